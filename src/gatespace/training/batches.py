"""Which rows a step learns from: a function of the seed and of the step's number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gatespace.errors import UsageError
from gatespace.models.encode import Encoder
from gatespace.seeding import permutation
from gatespace.tasks import Example


@dataclass(frozen=True)
class Row:
    """A training example as token ids."""

    index: int
    """Its place among the rows that are trained on."""
    example: Example
    prompt: list[int]
    """The prompt after the shared prefix."""


class Batches:
    """Endless passes over the rows, each in a random order of its own."""

    def __init__(self, examples: Sequence[Example], encoder: Encoder, *, batch_size: int, seed: int) -> None:
        if not examples:
            raise UsageError("there are no rows to train on")
        self._rows = [Row(i, example, encoder.suffix(example.text)) for i, example in enumerate(examples)]
        self._size, self._seed = batch_size, seed
        self._orders: dict[int, list[int]] = {}

    def at(self, step: int) -> list[Row]:
        """The rows of step number `step`, counted from 0."""
        places = (divmod(step * self._size + i, len(self._rows)) for i in range(self._size))
        return [self._rows[self._order(epoch)[place]] for epoch, place in places]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k == epoch - 1}
            self._orders[epoch] = permutation(len(self._rows), self._seed, "order", epoch)
        return self._orders[epoch]


def micro_batches(rows: Sequence[Row], tokens: int, room: int) -> list[list[Row]]:
    """Consecutive rows with at most `tokens` tokens together, `room` tokens of response counted for each."""
    parts: list[list[Row]] = []
    used = 0
    for row in rows:
        size = len(row.prompt) + room
        if not parts or used + size > tokens:
            parts.append([])
            used = 0
        parts[-1].append(row)
        used += size
    return parts
