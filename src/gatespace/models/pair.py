"""Check that student and teacher have the same tokens: a divergence compares them id by id."""

from __future__ import annotations

from dataclasses import dataclass

from gatespace.errors import UsageError
from gatespace.models.load import Model

_TEXT = 'The price rose by 12.5 %, "really"?!\n\t@user #tag naïve 文字 😀 {"label": "x"}'


@dataclass(frozen=True)
class PairReport:
    """Result of `check_pair`.

    Args:
        vocab_size: Number of ids that both models share; rows of a head beyond it are padding.
        notes: Differences that are not errors.
    """

    vocab_size: int
    notes: tuple[str, ...] = ()


def check_pair(student: Model, teacher: Model) -> PairReport:
    """Raise unless every id is the same token in both models, and both heads have a row for it.

    Heads are often padded, to different sizes even within one family; what counts is the tokenizer.
    """
    ours, theirs = _tokens(student), _tokens(teacher)
    differing = [id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id)]
    if differing:
        first = min(differing)
        raise UsageError(
            "student and teacher do not have the same vocabulary",
            got=f"id {first} is {_shown(ours.get(first))} to {student.name}, "
            f"{_shown(theirs.get(first))} to {teacher.name} ({len(differing)} ids differ)",
            why="a divergence compares the two models id by id",
            instead="two models of one family, with the same tokenizer; for label tasks also objective.support: labels",
        )
    for role, model in (("student", student), ("teacher", teacher)):
        rows = len(model.head.weight)
        if rows < model.vocab_size:
            raise UsageError(
                f"the {role}'s head has fewer rows than its tokenizer has ids",
                got=f"{model.name}: {rows} rows, {model.vocab_size} ids",
            )
    return PairReport(student.vocab_size, tuple(_notes(student, teacher)))


def _notes(student: Model, teacher: Model) -> list[str]:
    notes = []
    if student.end_ids != teacher.end_ids:
        ends = [
            ", ".join(_shown(_tokens(model).get(id)) for id in model.end_ids) or "nothing"
            for model in (student, teacher)
        ]
        notes.append(f"a response of the student ends at {ends[0]}; the teacher's own would end at {ends[1]}")
    if student.tokenizer.chat_template != teacher.tokenizer.chat_template:
        notes.append("the chat templates differ; prompts are written with the student's")
    if student.tokenizer.encode(_TEXT) != teacher.tokenizer.encode(_TEXT):
        notes.append("the tokenizers have the same tokens and divide a text differently; the student's is used")
    return notes


def _tokens(model: Model) -> dict[int, str]:
    return {id: token for token, id in model.tokenizer.get_vocab().items()}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
