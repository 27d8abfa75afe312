"""The processes of a run: here a single one; `gatespace.addons.parallel` has several behind the same methods.

Every process has the rows of the whole batch and works on its share; random streams are named by a row's place in the
whole batch, so that they do not depend on the number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gatespace.errors import GatespaceError, UsageError
from gatespace.plugins import provider

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gatespace.config import TeachConfig, TrainConfig
    from gatespace.models.body import Body
    from gatespace.models.load import Model


def launched() -> tuple[int, int] | None:
    """(rank, world size) from the variables set by torchrun, `accelerate launch` and `--processes`, or None."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    return int(os.environ["RANK"]), size


def is_first() -> bool:
    """Whether this process writes to the console."""
    return (launched() or (0, 1))[0] == 0


class Processes:
    """The single process of a run."""

    rank: int = 0
    """Rank of this process; rank 0 writes the run's files."""
    size: int = 1
    """World size."""
    sharded: bool = False
    """Whether each process holds a shard of the student's weights (FSDP2) and not a whole copy."""
    device: str | None = None
    """Device of this process; None: as configured."""
    content: Mapping[str, str] = {}
    """What becomes part of the run's identity."""

    @property
    def first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    # ------------------------------------------------------------------ rows

    def shares(self, count: int) -> list[range]:
        """Divide `count` rows into contiguous ranges of nearly equal size, one per process."""
        return [range(*ends) for ends in pairwise(count * rank // self.size for rank in range(self.size + 1))]

    def share(self, count: int) -> range:
        """The rows of this process."""
        return self.shares(count)[self.rank]

    def divide(self, items: Sequence[Any], work: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """Run `work` on this process's share of the items; returns all results in order."""
        return work(items)

    # ------------------------------------------------------------------ messages

    def total(self, number: float) -> float:
        """The sum of a number over all processes; whole numbers up to 2^53 are exact."""
        return number

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in order of rank; plain data that JSON can represent."""
        return [value]

    def agree(self, value: Any, error: Callable[[list[Any]], GatespaceError]) -> None:
        """Raise `error`, made from the values of all processes, unless they are equal."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """A section without communication: an error in one process is raised in all, so that none waits for it."""
        yield

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run in the first process, then in all others, which find what the first downloaded or built."""
        yield

    # ------------------------------------------------------------------ the student's weights

    def loads_on(self, device: str) -> str:
        """Device to load the trained model's weights on; ``meta``: this process loads none."""
        return device

    def prepare(self, model: Model, *, dtype: torch.dtype, packed: bool | None) -> Model:
        """The model to train: whole, or this process's shard of it."""
        return model

    def update(self, body: Body, done: int, most: int) -> AbstractContextManager[None]:
        """Context of the passes over this process's `done` micro-batches; `most` is the maximum of all processes."""
        return nullcontext()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by its sum over all processes."""

    def gather_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from the shards of all processes, in the first process."""
        return tensors

    def full(self, tensor: Tensor) -> Tensor:
        """The whole tensor from the shards of all."""
        return tensor

    def shard_like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """A whole tensor, sharded like `parameter`."""
        return value


ONE = Processes()


def join(config: TrainConfig | TeachConfig) -> Processes:
    """The processes of this run: those started by a launcher, or this one alone."""
    processes: Processes = ONE if launched() is None else provider("processes", "distributed")(config)
    rows = config.batch_size * (config.rollout.per_prompt if hasattr(config, "rollout") else 1)
    with processes.together():
        if rows < processes.size:
            raise UsageError("batch_size: every process needs a row", got=f"{rows} rows for {processes.size} processes")
    return processes
