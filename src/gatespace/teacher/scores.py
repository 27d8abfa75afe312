"""Scores of a teacher: what is asked, what comes back, and the cache between the two, wherever the teacher is.

A row's scores are one vector per response token: the hidden state, or ids and log-probabilities of the top k and the
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
    """(1, N, H) hidden states at the positions that predict the tokens, or the teacher's top k there."""
    head: Head | None
    """Turns hidden states into logits; None for top k."""

    def part(self, tokens: slice) -> Scores:
        """Those of some of the tokens."""
        payload = self.payload
        return Scores(payload[:, tokens] if isinstance(payload, Tensor) else payload.part(tokens), self.head)


@dataclass(frozen=True)
class ScoreSpec:
    """What is asked of a teacher, the same for all rows of a run.

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
    """Response tokens that were asked for."""
    computed_tokens: int = 0
    """Prompt and response tokens that went through the network."""
    passes: int = 0
    """Forward passes."""


class Teacher(Protocol):
    """Scores responses to prompts; the same row has the same scores, to the bit."""

    fingerprint: str
    """Of its weights."""
    numerics: str
    """All that the bits of a score depend on beside weights and tokens."""
    vocab_size: int
    """Ids from here on are padding, for teacher and student alike."""

    @property
    def stats(self) -> TeacherStats: ...

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each the continuation of its prompt (after the shared prefix)."""
        ...

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """Ask without waiting: what is returned gives the scores. A remote teacher works on them meanwhile."""
        ...

    def about(self) -> dict[str, str]:
        """What a run records of a teacher that is not in this process: address, model, numerics. {} for a local one."""
        ...

    def close(self) -> None: ...


class TeacherAwayError(RunError):
    """A teacher does not reply. Nothing is wrong with the run itself, which can go on once the teacher is back."""


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
    """What the scores of a teacher look like, and what their keys in a cache are made of."""

    fingerprint: str
    numerics: str
    payload: str
    k: int
    """Tokens of the payload ``top_k``; without meaning for hidden states."""
    dtype: torch.dtype
    """Of a vector."""
    device: torch.device
    """Where scores go."""
    head: Head | None = None

    def keys(self, prompt: Sequence[int], response: Sequence[int]) -> list[bytes]:
        """A row's keys in a cache, one for each response token, the same wherever the teacher is."""
        # The top k come with the log-probability of the token itself, on which the key then depends too.
        known = response if self.payload == "hidden" else [*response, 0]
        keys = prefix_keys(fingerprint=self.fingerprint, numerics=self.numerics, prompt=prompt, response=known)
        return keys if self.payload == "hidden" else keys[1:]


class RowScores:
    """The scores of some rows: looked up in a cache, the missing ones filled in by the teacher.

    Args:
        form: What they look like.
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
        """The rows that were not in the cache, whole: a token needs keys and values of those whose scores are there."""

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
        """All rows, one after another; those that were missing go into the cache."""
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
