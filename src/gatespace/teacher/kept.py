"""The rows of a question: scores that a cache has, those still to be had, and all of them as a teacher gives them.

A row's scores are one vector per response token: the hidden state, or the ids and log-probabilities of the first
choices and the log-probability of the token itself. Caches hold them so, the same wherever the teacher lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gatespace.gating.projection import Head
from gatespace.gating.tokens import TeacherTopK
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.scores import Scores, score_keys


@dataclass(frozen=True)
class Form:
    """What the scores of a teacher look like, and what they are filed under."""

    fingerprint: str
    numerics: str
    payload: str
    k: int
    """First choices; without meaning for hidden states."""
    dtype: torch.dtype
    """Of a vector."""
    device: torch.device
    """Where scores go."""
    head: Head | None = None


class RowScores:
    """The scores of some rows, filled in as they come.

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
        self._found: list[Tensor | None] = [None] * len(responses)
        self._keys: list[list[bytes]] = []
        if cache is not None:
            self._look_up(cache, prefix, prompts, responses)
        self.missing = [row for row, entry in enumerate(self._found) if entry is None]
        """The rows that were not in the cache, whole."""

    def _look_up(
        self,
        cache: ScoreCache,
        prefix: Sequence[int],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
    ) -> None:
        form = self._form
        self._keys = [
            score_keys(
                fingerprint=form.fingerprint,
                numerics=form.numerics,
                payload=form.payload,
                prompt=[*prefix, *prompt],
                response=response,
            )
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        entries = iter(cache.get_many([key for row in self._keys for key in row]))
        for row, row_keys in enumerate(self._keys):
            values = [next(entries) for _ in row_keys]
            if None not in values:
                whole = bytearray(b"".join(value for value in values if value is not None))
                self._found[row] = torch.frombuffer(whole, dtype=form.dtype).view(len(values), -1)

    def fill(self, rows: Sequence[int], entries: Sequence[Tensor]) -> None:
        """The scores of `rows`, (length, width) each."""
        for row, entry in zip(rows, entries, strict=True):
            self._found[row] = entry

    def scores(self) -> Scores:
        """All rows, one after another; those that are new are kept."""
        if self._cache is not None and self.missing:
            self._cache.put_many(
                (key, position.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                for row in self.missing
                for key, position in zip(self._keys[row], self._found[row], strict=True)  # type: ignore[arg-type]
            )
        form = self._form
        joined = torch.cat([entry.to(form.device) for entry in self._found if entry is not None])[None]
        if form.payload == "hidden":
            return Scores(joined, form.head)
        ids, log_probs, sampled = joined.split([form.k, form.k, 1], -1)
        return Scores(TeacherTopK(ids.long(), log_probs, sampled[..., 0]), None)
