"""A teacher in a stock vLLM server, known by its first choices.

A prompt and its response go there as token ids, as one prompt whose log-probabilities are asked for; the positions of
the response are read and the others never looked at. Nothing is tokenised anew: the server repeats the ids it has read,
and they are compared with those it was sent.

Unlike other teachers, it does not promise the same bits for the same question: vLLM batches as it sees fit. Neither
does it tell a hash of its weights; it is recognised by its name, its version and what it says about a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gatespace.addons.vllm.server import Card, Choice, RefusedError, ServerAwayError, VllmServer, read_position
from gatespace.errors import RunError, UsageError
from gatespace.files import Closing
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.kept import Form, RowScores
from gatespace.teacher.local import LocalStats
from gatespace.teacher.scores import Scores, TeacherAwayError, check_questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT = 'The price rose by 12.5 %, "really"?!\n\t@user #tag naïve 文字 😀 {"label": "x"}'
_SPREAD = 61
"""Tokens from all over the vocabulary that the two tokenizers are compared on."""
_REPLY_BYTES, _ENTRY_BYTES = 64 << 20, 80
"""About how large a reply may become, and what one token at one position takes in it."""
_PROBE = 24
"""Tokens of the text by which a server is recognised."""
_LIKE = 0.5
"""Nats by which it may differ there from what it said before; half precision is within .13."""


class _Known(NamedTuple):
    """What a server says of itself."""

    id: str
    root: str | None
    version: str
    longest: int | None
    probe: list[float]


def name_fingerprint(card: Card, version: str) -> str:
    """What stands in place of a hash of the weights, which a stock server does not tell."""
    identity = "\n".join(("gatespace vllm 1", card.id, card.root or "", version))
    return hashlib.sha256(identity.encode()).hexdigest()


class VllmTeacher(Closing):
    """Scores with a vLLM server; it takes the place of a `LocalTeacher` whose payload is ``top_k``.

    Args:
        address: ``vllm://host:port``, or ``vllm://host:port/model`` where the server has several.
        prefix: What all prompts begin with.
        max_new_tokens: The longest response that will be scored.
        k: How many first choices; the server's ``--max-logprobs`` is the most it gives.
        tokenizer: The student's. A server whose tokenizer is another one is refused.
        vocab_size: Ids from here on are padding. None: those of the tokenizer count.
        cache: Scores computed before. Their keys hold the server's name for its weights, not a hash of them: only for a
            server whose names never change their meaning.
        fingerprint: Of the weights, where they are known; None: the server is known by its name and version.
        timeout: Seconds after which a question is asked again.
        patience: Seconds without an answer after which `TeacherAwayError` is raised.
        wait: As in `VllmServer`.
        report: Is told what a user should know.
        device: Where the scores go.
    """

    def __init__(
        self,
        address: str,
        prefix: Sequence[int],
        *,
        max_new_tokens: int = 32,
        k: int = 64,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int | None = None,
        cache: ScoreCache | None = None,
        fingerprint: str | None = None,
        timeout: float = 60.0,
        patience: float = 600.0,
        wait: bool = True,
        report: Callable[[str], None] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.prefix = list(prefix)
        self.stats = LocalStats()
        self.vocab_size = vocab_size or max(tokenizer.get_vocab().values()) + 1
        self._longest, self._k = max_new_tokens, min(k, self.vocab_size)
        self._spare = 0
        """Choices asked for beyond k, in place of ids that are padding."""
        self._cache = cache
        self._server = VllmServer(address, timeout=timeout, patience=patience, wait=wait, report=report)
        self.address = self._server.place
        self._text = tokenizer.encode(_TEXT, add_special_tokens=False)[:_PROBE]
        try:
            card = self._reached(self._server.card)
            self.model_name = card.root or card.id
            self._body = {"model": card.id, "max_tokens": 1, "temperature": 0.0}
            if len(self.prefix) + max_new_tokens + 2 > (card.max_model_len or 1 << 62):
                raise UsageError(
                    f"{self._server} takes too few tokens",
                    got=f"{card.max_model_len}, and the prompts' beginning and a response have "
                    f"{len(self.prefix) + max_new_tokens}",
                    instead="a larger --max-model-len",
                )
            self._compare(card.id, tokenizer)
            self._known = self._reached(self._introduction)
            self._seen = self._server.interruptions
        except BaseException:
            self.close()
            raise
        known = self._known
        self.fingerprint = fingerprint or name_fingerprint(card, known.version)
        self.numerics = f"vllm-{known.version}/top{self._k}-of-{self.vocab_size}/prefix{len(self.prefix)}"
        self._form = Form(self.fingerprint, self.numerics, "top_k", self._k, torch.float32, torch.device(device))
        here = self.address.host in ("localhost", "[::1]") or self.address.host.startswith("127.")
        if report is not None and not here:
            report(f"prompts travel to {self.address} unencrypted, as vLLM's HTTP does")

    def close(self) -> None:
        """Give up what is under way."""
        self._server.close()

    # ------------------------------------------------------------------ scores

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each the continuation of its prompt (after the shared prefix)."""
        return self.ask(prompts, responses)()

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """Ask without waiting: what is returned waits and gives the scores."""
        wholes = self._wholes(prompts, responses)
        lengths = [len(response) for response in responses]
        self.stats.rows += len(lengths)
        self.stats.tokens += sum(lengths)
        rows = RowScores(self._form, self._cache, self.prefix, prompts, responses)
        parts = [(part, self._begun(part, wholes, lengths)) for part in self._divided(rows.missing, wholes)]
        known: list[Scores] = []

        def scores() -> Scores:
            if not known:
                for part, begun in parts:
                    rows.fill(part, self._reached(begun.result))
                self._recognise()
                known.append(rows.scores())
            return known[0]

        return scores

    def _begun(self, rows: list[int], wholes: list[list[int]], lengths: list[int]) -> Future[list[Tensor]]:
        asked, counts = [wholes[row] for row in rows], [lengths[row] for row in rows]
        self.stats.passes += 1
        self.stats.computed_tokens += sum(map(len, asked))
        return self._server.later(lambda: self._scored(asked, counts))

    def _scored(self, wholes: list[list[int]], lengths: list[int]) -> list[Tensor]:
        """(length, 2k+1) each: ids and log-probabilities of the first choices, log-probability of the token itself."""
        while True:
            spare = self._spare
            choices = self._completed(wholes, self._k + spare)
            rows = [self._positions(*row, self._k + spare) for row in zip(wholes, choices, lengths, strict=True)]
            if all(row is not None for row in rows):
                return [row for row in rows if row is not None]
            # Padding of the teacher's head is among its first choices: so many more have to be asked for.
            self._spare = max(self._spare, 2 * spare, 8)

    def _completed(self, wholes: list[list[int]], k: int) -> list[Choice]:
        try:
            return self._server.complete(wholes, {**self._body, "prompt_logprobs": k})
        except RefusedError as error:
            if "logprobs" in error.detail:
                padding = f" (and {k - self._k} for ids that are padding)" if k > self._k else ""
                raise UsageError(
                    f"{self._server} gives fewer first choices than teacher.k asks for",
                    got=f"k = {self._k}{padding}; {error.detail}",
                    instead=f"start vLLM with --max-logprobs {k}, or a smaller teacher.k",
                ) from None
            raise

    def _positions(self, whole: list[int], choice: Choice, length: int, asked: int) -> Tensor | None:
        """The positions of the response; None if padding took the place of first choices."""
        told = choice.prompt_logprobs
        if told is None or len(told) != len(whole):
            got = "none" if told is None else len(told)
            raise RunError(f"{self._server} has not told of every position", got=f"{got} of {len(whole)}")
        rows: list[list[float]] = []
        for token, raw in zip(whole[-length:], told[-length:], strict=True):
            entries = read_position(raw)
            if token not in entries:
                raise RunError(f"{self._server} does not tell of the token itself", got=f"token {token}")
            real = ((value, id) for id, value in entries.items() if id < self.vocab_size)
            first = sorted(real, key=lambda entry: (-entry[0], entry[1]))[: self._k]
            if len(entries) < asked:
                raise RunError(f"{self._server} gives too few choices", got=f"{len(entries)} of {asked}")
            if len(first) < self._k:
                return None
            rows.append([*(float(id) for _, id in first), *(value for value, _ in first), entries[token]])
        return torch.tensor(rows, dtype=torch.float32)  # float32 holds every id of a vocabulary exactly

    # ------------------------------------------------------------------ questions

    def _wholes(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[list[int]]:
        check_questions(prompts, responses, self._longest)
        wholes = []
        for prompt, response in zip(prompts, responses, strict=True):
            whole = [*self.prefix, *prompt, *response]
            if len(whole) + 1 > (self._known.longest or 1 << 62):
                raise RunError(
                    f"a prompt and its response are too long for {self._server}",
                    got=f"{len(whole)} tokens, and one to be written",
                    instead=f"at most {self._known.longest}, or a larger --max-model-len",
                )
            wholes.append(whole)
        return wholes

    def _divided(self, rows: Sequence[int], wholes: list[list[int]]) -> list[list[int]]:
        """Consecutive rows in requests whose replies are not too large."""
        most = _REPLY_BYTES // (_ENTRY_BYTES * (self._k + self._spare + 1))
        parts: list[list[int]] = []
        tokens = 0
        for row in rows:
            if not parts or tokens + len(wholes[row]) > most:
                parts.append([])
                tokens = 0
            parts[-1].append(row)
            tokens += len(wholes[row])
        return parts

    # ------------------------------------------------------------------ who answers

    def _compare(self, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise unless the server's tokenizer reads some texts as the student's does."""
        step = max(1, self.vocab_size // _SPREAD)
        spread = list(range(step // 2, self.vocab_size, step))
        texts = [_TEXT, str(tokenizer.decode(spread)), " ".join(map(str, tokenizer.all_special_tokens))]
        for text in filter(None, texts):
            ours = list(tokenizer.encode(text, add_special_tokens=False))
            try:
                theirs = self._reached(lambda text=text: self._server.tokenize(model, text))  # type: ignore[misc]
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

    def _introduction(self) -> _Known:
        card, version = self._server.card(), self._server.version()
        (choice,) = self._completed([self._text], self._k)
        told = choice.prompt_logprobs or []
        if len(told) != len(self._text):
            raise RunError(f"{self._server} has not told of every position", got=f"{len(told)} of {len(self._text)}")
        probe = [read_position(raw).get(id, -torch.inf) for id, raw in zip(self._text[1:], told[1:], strict=True)]
        return _Known(card.id, card.root, version, card.max_model_len, probe)

    def _recognise(self) -> None:
        """After an interruption: whoever answers now must be the one that answered before."""
        if self._server.interruptions == self._seen:
            return
        known = self._reached(self._introduction)
        self._seen = self._server.interruptions
        apart = max((abs(a - b) for a, b in zip(known.probe, self._known.probe, strict=True)), default=0.0)
        if known[:4] != self._known[:4] or not apart <= _LIKE:
            raise RunError(
                f"{self._server} is not the one that this run began with",
                got=f"{known.root or known.id} (vLLM {known.version}), whose log-probabilities differ by {apart:.2g}",
                instead=f"start {self.model_name} there again, or a new run",
            )

    def _reached(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except ServerAwayError as error:
            away = TeacherAwayError(error.what, got=error.got, why=error.why, instead=error.instead)
            raise away from error
