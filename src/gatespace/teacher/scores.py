"""Teacher scores: request, result, and the cache in between, for local and remote teachers.

A row's scores are one vector per response token: the hidden state, or ids and log-probabilities of the top-k and the
log-probability of the token itself. Caches hold these vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gatespace.errors import RunError, UsageError
from gatespace.gating.projection import Head
from gatespace.gating.tokens import TeacherTopK
from gatespace.teacher.cache import ScoreCache, prefix_keys


@dataclass(frozen=True)
class Scores:
    """A teacher's scores of every response token, rows one after another (N tokens in all)."""

    payload: Tensor | TeacherTopK
    """(1, N, H) hidden states at the positions that predict the tokens, or the teacher's top-k there."""
    head: Head | None
    """Turns hidden states into logits; None for top-k."""

    def part(self, tokens: slice) -> Scores:
        """The scores of some tokens."""
        payload = self.payload
        return Scores(payload[:, tokens] if isinstance(payload, Tensor) else payload.part(tokens), self.head)


@dataclass(frozen=True)
class ScoreSpec:
    """The requested scores, the same for all rows of a run.

    Args:
        prefix: Ids that all prompts begin with.
        max_new_tokens: The longest response that will be scored.
        vocab_size: Ids from here on are padding.
        payload: ``hidden``: last hidden states, exact for the whole vocabulary. ``top_k``: `k` log-probabilities.
        k: Tokens of the payload ``top_k``.
    """

    prefix: tuple[int, ...]
    max_new_tokens: int
    vocab_size: int
    payload: str = "hidden"
    k: int = 64


@dataclass
class TeacherStats:
    """What a teacher has done so far."""

    rows: int = 0
    tokens: int = 0
    """Requested response tokens."""
    computed_tokens: int = 0
    """Prompt and response tokens that went through the network."""
    passes: int = 0
    """Forward passes."""


class Teacher(Protocol):
    """Scores responses to prompts; the same row has the same scores, bit for bit."""

    fingerprint: str
    """Of its weights."""
    numerics: str
    """What the bits of a score depend on besides weights and tokens."""
    vocab_size: int
    """Ids from here on are padding, for teacher and student alike."""

    @property
    def stats(self) -> TeacherStats: ...

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each the continuation of its prompt (after the shared prefix)."""
        ...

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """Request scores without waiting; returns a getter. A remote teacher computes them meanwhile."""
        ...

    def about(self) -> dict[str, str]:
        """What a run records of a remote teacher: address, model, numerics. {} for a local one."""
        ...

    def close(self) -> None: ...


class TeacherAwayError(RunError):
    """A teacher does not reply. Nothing is wrong with the run itself, which can resume once the teacher is back."""


def check_questions(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], longest: int) -> None:
    """Raise unless there is something to score, and every row has a prompt and a response of at most `longest`."""
    if not responses:
        raise UsageError("there is nothing to score")
    for prompt, response in zip(prompts, responses, strict=True):
        if not prompt:
            raise RunError("a prompt has no token of its own after the shared prefix", got=repr(list(response)))
        if not 0 < len(response) <= longest:
            raise RunError(
                "a response has the wrong length for this teacher",
                got=f"{len(response)} tokens",
                instead=f"1 to {longest}",
            )


# ---------------------------------------------------------------------------------------------------- cached rows


@dataclass(frozen=True)
class Form:
    """Format of a teacher's scores, and what their cache keys are made from."""

    fingerprint: str
    numerics: str
    payload: str
    k: int
    """Tokens of the payload ``top_k``; unused for hidden states."""
    dtype: torch.dtype
    """Of a vector."""
    device: torch.device
    """Where scores go."""
    head: Head | None = None

    def keys(self, prompt: Sequence[int], response: Sequence[int]) -> list[bytes]:
        """A row's cache keys, one per response token, the same for local and remote teachers."""
        # top_k includes the log-probability of the token itself, so the key depends on it too.
        known = response if self.payload == "hidden" else [*response, 0]
        keys = prefix_keys(fingerprint=self.fingerprint, numerics=self.numerics, prompt=prompt, response=known)
        return keys if self.payload == "hidden" else keys[1:]


class RowScores:
    """The scores of some rows: looked up in a cache, the missing ones filled in by the teacher.

    Args:
        form: Their format.
        cache: Scores computed before.
        prefix: What all prompts begin with.
        prompts: After the prefix.
        responses: Their continuations.
    """

    def __init__(
        self,
        form: Form,
        cache: ScoreCache | None,
        prefix: Sequence[int],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
    ) -> None:
        self._form, self._cache = form, cache
        self._rows: list[Tensor | None] = [None] * len(responses)
        self._keys: list[list[bytes]] = []
        if cache is not None:
            for prompt, response in zip(prompts, responses, strict=True):
                self._keys.append(form.keys([*prefix, *prompt], response))
            self._look_up(cache)
        self.missing = [row for row, scores in enumerate(self._rows) if scores is None]
        """Rows not entirely in the cache, to be scored whole: a token needs the keys and values of those before it."""

    def _look_up(self, cache: ScoreCache) -> None:
        entries = iter(cache.get_many([key for keys in self._keys for key in keys]))
        for row, keys in enumerate(self._keys):
            vectors = [next(entries) for _ in keys]
            if None not in vectors:
                joined = bytearray(b"".join(vector for vector in vectors if vector is not None))
                self._rows[row] = torch.frombuffer(joined, dtype=self._form.dtype).view(len(vectors), -1)

    def fill(self, rows: Sequence[int], scores: Sequence[Tensor]) -> None:
        """Fill in the scores of `rows`, (length, width) each."""
        for row, entry in zip(rows, scores, strict=True):
            self._rows[row] = entry

    def scores(self) -> Scores:
        """All rows, one after another; missing ones are added to the cache."""
        if self._cache is not None and self.missing:
            fresh = [scores for row in self.missing if (scores := self._rows[row]) is not None]
            vectors = torch.cat(fresh).cpu().contiguous()  # one copy from the device, not one per token
            keys = (key for row in self.missing for key in self._keys[row])
            self._cache.put_many(
                (key, vector.tobytes()) for key, vector in zip(keys, vectors.view(torch.uint8).numpy(), strict=True)
            )
        form = self._form
        rows = [scores for scores in self._rows if scores is not None]
        if len({scores.device for scores in rows}) > 1:  # some from the cache
            rows = [scores.to(form.device) for scores in rows]
        joined = torch.cat(rows).to(form.device)[None]
        if form.payload == "hidden":
            return Scores(joined, form.head)
        ids, log_probs, sampled = joined.split([form.k, form.k, 1], -1)
        return Scores(TeacherTopK(ids.long(), log_probs, sampled[..., 0]), None)
