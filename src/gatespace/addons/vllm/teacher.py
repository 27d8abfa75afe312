"""A teacher on a stock vLLM server, which returns top-k log-probabilities.

Prompt and response are sent as token ids, as one prompt with `prompt_logprobs`; only the response positions are
decoded. Nothing is retokenized: the server echoes the ids it received, and they are compared with those sent.

Unlike other teachers, this one is not batch-invariant: vLLM batches as it likes. It also sends no hash of its weights;
it is identified by name, version and the log-probabilities of a probe text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gatespace.addons.vllm.server import Card, Choice, RefusedError, ServerAwayError, VllmServer, read_position
from gatespace.errors import RunError, UsageError
from gatespace.files import Closing
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.scores import (
    Form,
    RowScores,
    Scores,
    ScoreSpec,
    TeacherAwayError,
    TeacherStats,
    check_questions,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT = 'The price rose by 12.5 %, "really"?!\n\t@user #tag naïve 文字 😀 {"label": "x"}'
_SPREAD = 61
"""Tokens spread over the vocabulary on which the two tokenizers are compared."""
_REPLY_BYTES, _ENTRY_BYTES = 64 << 20, 80
"""Approximate limit of a reply, and approximate bytes per token and position in it."""
_PROBE = 24
"""Tokens of the probe text that identifies a server."""
_LIKE = 0.5
"""Nats by which the probe's log-probabilities may change; half precision stays within .13."""
_NO_LIMIT = 1 << 62


class _Identity(NamedTuple):
    """What identifies a server."""

    id: str
    root: str | None
    version: str
    max_model_len: int | None
    probe: list[float]
    """Log-probabilities of the probe text."""


def name_fingerprint(card: Card, version: str) -> str:
    """Hash name and version; a stock server sends no hash of its weights."""
    identity = "\n".join(("gatespace vllm 1", card.id, card.root or "", version))
    return hashlib.sha256(identity.encode()).hexdigest()


class VllmTeacher(Closing):
    """Scores with a vLLM server; replaces a `LocalTeacher` with payload ``top_k``.

    Args:
        address: ``vllm://HOST:PORT``, or ``vllm://HOST:PORT/MODEL`` if the server has several models.
        spec: Score specification; the server's ``--max-logprobs`` is the largest `k`.
        tokenizer: The student's. A server with another tokenizer is refused.
        cache: Cached scores. Without `fingerprint`, keys hold the server's model name, not a hash of its weights: use
            it only if a name always means the same weights.
        fingerprint: Of the weights, if known; None: `name_fingerprint`.
        device: Device of the scores.
        timeout: Seconds after which a request is retried.
        patience: Seconds without a reply after which `TeacherAwayError` is raised.
        wait: As in `VllmServer`.
        report: Called with a message when a reply is late, or prompts leave this machine unencrypted.
    """

    def __init__(
        self,
        address: str,
        spec: ScoreSpec,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache: ScoreCache | None = None,
        fingerprint: str | None = None,
        device: str | torch.device = "cpu",
        timeout: float = 60.0,
        patience: float = 600.0,
        wait: bool = True,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.stats = TeacherStats()
        self.vocab_size = spec.vocab_size
        self._prefix, self._longest, self._k = list(spec.prefix), spec.max_new_tokens, min(spec.k, spec.vocab_size)
        self._extra = 0
        """Extra tokens requested beyond k, to make up for padding ids."""
        self._cache = cache
        self._server = VllmServer(address, timeout=timeout, patience=patience, wait=wait, report=report)
        self._probe = tokenizer.encode(_TEXT, add_special_tokens=False)[:_PROBE]
        try:
            with _teacher_away():
                card = self._server.card()
                self._body = {"model": card.id, "max_tokens": 1, "temperature": 0.0}
                self._check_length(card)
                self._check_tokenizer(card.id, tokenizer)
                self._known = self._identity()
            self._seen = self._server.interruptions
        except BaseException:
            self.close()
            raise
        self.model_name, version = card.root or card.id, self._known.version
        self.fingerprint = fingerprint or name_fingerprint(card, version)
        self.numerics = f"vllm-{version}/top{self._k}-of-{self.vocab_size}/prefix{len(self._prefix)}"
        self._form = Form(self.fingerprint, self.numerics, "top_k", self._k, torch.float32, torch.device(device))
        host = self._server.address.host
        if report is not None and host not in ("localhost", "[::1]") and not host.startswith("127."):
            report(f"prompts travel to {self._server.address} unencrypted, as vLLM's HTTP does")

    def about(self) -> dict[str, str]:
        """What a run records about the teacher."""
        return {"address": str(self._server.address), "model": self.model_name, "numerics": self.numerics}

    def close(self) -> None:
        """Abort running requests."""
        self._server.close()

    # ------------------------------------------------------------------ scores

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """Score all tokens of `responses`, each continuing its prompt (without the shared prefix)."""
        return self.ask(prompts, responses)()

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """Send without waiting; calling the result waits and returns the scores."""
        wholes = self._wholes(prompts, responses)
        lengths = [len(response) for response in responses]
        self.stats.rows += len(lengths)
        self.stats.tokens += sum(lengths)
        rows = RowScores(self._form, self._cache, self._prefix, prompts, responses)
        requests = [(part, self._request(part, wholes, lengths)) for part in self._parts(rows.missing, wholes)]
        known: list[Scores] = []

        def scores() -> Scores:
            if not known:
                with _teacher_away():
                    for part, request in requests:
                        rows.fill(part, request.result())
                    self._recognise()
                known.append(rows.scores())
            return known[0]

        return scores

    def _wholes(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[list[int]]:
        """Prefix, prompt and response of each row."""
        check_questions(prompts, responses, self._longest)
        most = (self._known.max_model_len or _NO_LIMIT) - 1  # vLLM always generates one token
        wholes = []
        for prompt, response in zip(prompts, responses, strict=True):
            whole = [*self._prefix, *prompt, *response]
            if len(whole) > most:
                raise RunError(
                    f"a prompt and its response are too long for {self._server}",
                    got=f"{len(whole)} tokens, and one to be generated",
                    instead=f"at most {most + 1}, or a larger --max-model-len",
                )
            wholes.append(whole)
        return wholes

    def _parts(self, rows: Sequence[int], wholes: list[list[int]]) -> list[list[int]]:
        """Split rows in order into requests with replies of bounded size."""
        most = _REPLY_BYTES // (_ENTRY_BYTES * (self._k + self._extra + 1))
        parts: list[list[int]] = []
        tokens = 0
        for row in rows:
            if not parts or tokens + len(wholes[row]) > most:
                parts.append([])
                tokens = 0
            parts[-1].append(row)
            tokens += len(wholes[row])
        return parts

    def _request(self, rows: list[int], wholes: list[list[int]], lengths: list[int]) -> Future[list[Tensor]]:
        asked, counts = [wholes[row] for row in rows], [lengths[row] for row in rows]
        self.stats.passes += 1
        self.stats.computed_tokens += sum(map(len, asked))
        return self._server.submit(lambda: self._score(asked, counts))

    def _score(self, wholes: list[list[int]], lengths: list[int]) -> list[Tensor]:
        """Return (length, 2k+1) each: ids and log-probabilities of the top-k, log-probability of the token itself."""
        while True:
            extra = self._extra
            choices = self._complete(wholes, self._k + extra)
            rows = [self._top_k(*row, self._k + extra) for row in zip(wholes, choices, lengths, strict=True)]
            if all(row is not None for row in rows):
                return [row for row in rows if row is not None]
            # Padding rows of the teacher's head took places in its top-k: request more.
            self._extra = max(self._extra, 2 * extra, 8)

    def _complete(self, wholes: list[list[int]], k: int) -> list[Choice]:
        try:
            return self._server.complete(wholes, {**self._body, "prompt_logprobs": k})
        except RefusedError as error:
            if "logprobs" in error.detail:
                padding = f" (and {k - self._k} for ids that are padding)" if k > self._k else ""
                raise UsageError(
                    f"{self._server} gives fewer log-probabilities than teacher.k asks for",
                    got=f"k = {self._k}{padding}; {error.detail}",
                    instead=f"start vLLM with --max-logprobs {k}, or a smaller teacher.k",
                ) from None
            raise

    def _top_k(self, whole: list[int], choice: Choice, length: int, asked: int) -> Tensor | None:
        """Return the scores of a row; None if padding leaves fewer than k ids."""
        rows: list[list[float]] = []
        for token, raw in zip(whole[-length:], (choice.prompt_logprobs or [])[-length:], strict=True):
            entries = read_position(raw, token)
            if len(entries) < asked:
                raise RunError(f"{self._server} has sent too few log-probabilities", got=f"{len(entries)} of {asked}")
            real = ((value, id) for id, value in entries.items() if id < self.vocab_size)
            top = sorted(real, key=lambda entry: (-entry[0], entry[1]))[: self._k]
            if len(top) < self._k:
                return None
            rows.append([*(float(id) for _, id in top), *(value for value, _ in top), entries[token]])
        return torch.tensor(rows, dtype=torch.float32)  # float32 represents every token id exactly

    # ------------------------------------------------------------------ server identity

    def _check_length(self, card: Card) -> None:
        needed = len(self._prefix) + self._longest
        if needed + 2 > (card.max_model_len or _NO_LIMIT):
            raise UsageError(
                f"{self._server} takes too few tokens",
                got=f"{card.max_model_len}, and the shared prefix and a response have {needed}",
                instead="a larger --max-model-len",
            )

    def _check_tokenizer(self, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise unless the server's tokenizer gives the student's ids for a few texts."""
        step = max(1, self.vocab_size // _SPREAD)
        spread = list(range(step // 2, self.vocab_size, step))
        texts = [_TEXT, str(tokenizer.decode(spread)), " ".join(map(str, tokenizer.all_special_tokens))]
        for text in filter(None, texts):
            ours = list(tokenizer.encode(text, add_special_tokens=False))
            try:
                theirs = self._server.tokenize(model, text)
            except RefusedError as error:
                raise UsageError(
                    f"{self._server} does not say how it tokenises",
                    got=error.got,
                    why="whether its tokens are the student's cannot be known",
                ) from None
            if ours != theirs:
                place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
                got = f"{len(theirs)} tokens instead of {len(ours)}"
                if place >= 0:
                    got = f"{theirs[place]} instead of {ours[place]} as token {place} of {text[:40]!r}"
                raise UsageError(
                    f"{self._server} has another tokenizer than the student",
                    got=got,
                    why="a divergence compares the two models id by id",
                    instead="two models of one family, with tokenizers of the same version",
                )

    def _identity(self) -> _Identity:
        card, version = self._server.card(), self._server.version()
        (choice,) = self._complete([self._probe], self._k)
        positions = (choice.prompt_logprobs or [])[1:]
        probe = [read_position(raw, id)[id] for id, raw in zip(self._probe[1:], positions, strict=True)]
        return _Identity(card.id, card.root, version, card.max_model_len, probe)

    def _recognise(self) -> None:
        """After an interruption, raise if a different server replies."""
        if self._server.interruptions == self._seen:
            return
        now = self._identity()
        self._seen = self._server.interruptions
        apart = max((abs(a - b) for a, b in zip(now.probe, self._known.probe, strict=True)), default=0.0)
        if now[:4] != self._known[:4] or not apart <= _LIKE:
            raise RunError(
                f"{self._server} is not the one that this run began with",
                got=f"{now.root or now.id} (vLLM {now.version}), whose log-probabilities differ by {apart:.2g}",
                instead=f"start {self.model_name} there again, or a new run",
            )


@contextmanager
def _teacher_away() -> Iterator[None]:
    """Convert `ServerAwayError` to `TeacherAwayError`, on which a run writes a checkpoint."""
    try:
        yield
    except ServerAwayError as error:
        raise TeacherAwayError(error.what, got=error.got, why=error.why, instead=error.instead) from error
