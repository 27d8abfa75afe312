"""What a teacher says of responses, wherever it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gatespace.errors import RunError, UsageError
from gatespace.gating.projection import Head
from gatespace.gating.tokens import TeacherTopK
from gatespace.teacher.cache import prefix_keys


@dataclass(frozen=True)
class Scores:
    """A teacher's view of every response token, rows one after another (N tokens in all)."""

    payload: Tensor | TeacherTopK
    """(1, N, H) hidden states at the positions that predict the tokens, or the teacher's first choices there."""
    head: Head | None
    """Turns hidden states into logits; None beside first choices."""


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


class TeacherStats(Protocol):
    """What a teacher has done so far."""

    computed_tokens: int
    passes: int


class Teacher(Protocol):
    """Scores responses to prompts; the same question has the same answer, to the bit."""

    fingerprint: str
    """Of its weights."""
    numerics: str
    """Everything beside weights and question that the bits of a score depend on."""

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
    """A teacher does not answer. Nothing is wrong with the run itself, which can go on once the teacher is back."""


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


def score_keys(
    *, fingerprint: str, numerics: str, payload: str, prompt: Sequence[int], response: Sequence[int]
) -> list[bytes]:
    """The cache's keys of a row's scores, one for each response token, the same wherever the teacher lives."""
    # First choices come with the log-probability of the token itself, which is then part of the question.
    asked = response if payload == "hidden" else [*response, 0]
    keys = prefix_keys(fingerprint=fingerprint, numerics=numerics, prompt=prompt, response=asked)
    return keys if payload == "hidden" else keys[1:]
