"""The rows of each step, which depend on the seed and the step number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gatespace.errors import UsageError
from gatespace.models.encode import Encoder
from gatespace.seeding import permutation
from gatespace.tasks.data import Example


@dataclass(frozen=True)
class Row:
    """A training example as token ids."""

    index: int
    """Its place among the training rows."""
    example: Example
    prompt: list[int]
    """The prompt after the shared prefix."""
    teacher_prompt: list[int]
    """The teacher's prompt after its shared prefix."""
    teacher: str = ""
    """The name of its teacher; "" if the run has only one."""


class Batches:
    """Endless epochs over the rows, each in its own random order.

    Args:
        examples: The rows.
        encoder: Of the student's prompts.
        batch_size: Rows of a step.
        seed: Of the run.
        teacher_encoder: Of the teacher's prompts; None: they are the student's.
        by_teacher: Whether rows name one of several teachers.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        encoder: Encoder,
        *,
        batch_size: int,
        seed: int,
        teacher_encoder: Encoder | None = None,
        by_teacher: bool = False,
    ) -> None:
        if not examples:
            raise UsageError("there are no rows to train on")
        self._rows: list[Row] = []
        for i, example in enumerate(examples):
            prompt = teacher_prompt = encoder.suffix(example.text)
            if teacher_encoder is not None:
                teacher_prompt = teacher_encoder.suffix(teacher_encoder.prompt.text(example))
            self._rows.append(Row(i, example, prompt, teacher_prompt, example.teacher if by_teacher else ""))
        self._size, self._seed = batch_size, seed
        self._orders: dict[int, list[int]] = {}

    def at(self, step: int) -> list[Row]:
        """The rows of step `step` (from 0), grouped by teacher in order of first appearance."""
        places = (divmod(step * self._size + i, len(self._rows)) for i in range(self._size))
        rows = [self._rows[self._order(epoch)[place]] for epoch, place in places]
        names = {name: place for place, name in enumerate(dict.fromkeys(row.teacher for row in rows))}
        return sorted(rows, key=lambda row: names[row.teacher])

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k == epoch - 1}
            self._orders[epoch] = permutation(len(self._rows), self._seed, "order", epoch)
        return self._orders[epoch]


def micro_batches(
    rows: Sequence[Row], tokens: int, room: int, families: Sequence[int] | None = None
) -> list[list[Row]]:
    """Split rows into parts of one teacher with at most `tokens` tokens, `room` response tokens for each row.

    Args:
        rows: In order.
        tokens: Token limit of a part, unless a single row has more.
        room: The longest response.
        families: Neighbours with the same number share the forward pass over their prompt, which is counted once;
            they are split only if they do not fit together. None: every row has its own pass.
    """
    parts: list[list[Row]] = []
    used = 0
    for _, members in groupby(range(len(rows)), key=lambda i: i if families is None else families[i]):
        family = [rows[i] for i in members]
        prompt = len(family[0].prompt)
        other = bool(parts) and parts[-1][-1].teacher != family[0].teacher  # which has another head
        if not parts or other or used + prompt + room * len(family) > tokens:
            parts.append([])
            used = 0
        used += prompt
        for i, row in enumerate(family):
            if i and used + room > tokens and parts[-1]:
                parts.append([])
                used = prompt
            parts[-1].append(row)
            used += room
    return parts
