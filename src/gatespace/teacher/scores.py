"""What a teacher says of responses, wherever it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gatespace.errors import RunError
from gatespace.gating.projection import Head
from gatespace.gating.tokens import TeacherTopK


@dataclass(frozen=True)
class Scores:
    """A teacher's view of every response token, rows one after another (N tokens in all)."""

    payload: Tensor | TeacherTopK
    """(1, N, H) hidden states at the positions that predict the tokens, or the teacher's first choices there."""
    head: Head | None
    """Turns hidden states into logits; None beside first choices."""


class Teacher(Protocol):
    """Scores responses to prompts; the same question has the same answer, to the bit."""

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each the continuation of its prompt (after the shared prefix)."""
        ...

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """Ask without waiting: what is returned gives the scores. A teacher elsewhere works on them meanwhile."""
        ...


class TeacherAwayError(RunError):
    """A teacher does not answer. Nothing is wrong with the run itself, which can go on once the teacher is back."""
