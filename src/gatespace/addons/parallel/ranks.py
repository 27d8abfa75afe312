"""The processes that do one run together: who does which rows, and how they come to one result.

Every process has the whole batch's rows and does its own share of them; random numbers are named by a row's place in
the whole batch, so the same rows get the same numbers in however many processes. What a process tells the others
travels as tensors or JSON, never as a pickle.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gatespace.addons.parallel.launched import launched
from gatespace.errors import GatespaceError, RunError, UsageError, missing_extra
from gatespace.teacher.scores import TeacherAwayError

_BUCKET = 32 << 20
"""Bytes that are summed over processes at once."""
_SPARE = 1800.0
"""Seconds that a process waits for the others beyond the patience with a teacher."""
_KINDS: dict[str, type[GatespaceError]] = {kind.__name__: kind for kind in (TeacherAwayError, UsageError, RunError)}


@dataclass(frozen=True)
class Ranks:
    """One process among those of a run.

    Args:
        rank: Its number from 0. The first one writes the run's files.
        size: How many there are.
        device: Where this process computes.
        sharded: Whether each keeps a part of the student only (FSDP2) and not a whole copy.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    sharded: bool = False

    @property
    def first(self) -> bool:
        """Whether this one writes files and speaks to the user."""
        return self.rank == 0

    def shares(self, count: int) -> list[range]:
        """Who does which of `count` things that stand in a row: neighbours together, and nearly as many for each."""
        return [range(*ends) for ends in pairwise(count * rank // self.size for rank in range(self.size + 1))]

    def share(self, count: int) -> range:
        """Which of `count` things are this process's."""
        return self.shares(count)[self.rank]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, which then have the same bits."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            torch.distributed.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def total(self, number: float) -> float:
        """The sum of a number over all processes; whole numbers up to 2^53 are exact."""
        if self.size == 1:
            return number
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(found)
        return float(found)

    def gather(self, value: Any) -> list[Any]:
        """What every process gives, in their order. It has to be something that JSON has a form for."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        torch.distributed.all_gather(sizes, torch.tensor([len(text)], device=self.device))
        longest = max(map(int, sizes))
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = [torch.empty(longest, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        torch.distributed.all_gather(texts, own.to(self.device))
        pairs = zip(texts, sizes, strict=True)
        return [json.loads(bytes(found[: int(size)].cpu().numpy())) for found, size in pairs]

    def agree(self, value: Any, error: Callable[[list[Any]], GatespaceError]) -> None:
        """Raise `error`, made from what every process gives, unless all give the same."""
        found = self.gather(value)
        with self.together():
            if any(other != found[0] for other in found):
                raise error(found)

    def divide(self, items: Sequence[Any], work: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """Let every process do some of `items`; what all have made of them, in order, through JSON."""
        own: list[Any] = []
        with self.together():
            own = work(items[self.rank :: self.size])
        found = self.gather(own)
        return [found[place % self.size][place // self.size] for place in range(len(items))]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work without any message between processes. What one of them raises in here is raised by all, so that none
        waits for another that is gone."""
        if self.size == 1:
            yield
            return
        mine: GatespaceError | None = None
        try:
            yield
        except GatespaceError as error:
            mine = error
        told = self.gather(mine and [_kind(mine), mine.what, mine.got, mine.why, mine.instead])
        for name, what, got, why, instead in filter(None, told):
            told_by_all: Any = mine or _KINDS[name](what, got=got, why=why, instead=instead)
            told_by_all.joint, told_by_all.elsewhere = True, mine is None
            raise told_by_all

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first process alone, then all others: what the first one fetches or builds is there for them."""
        if self.first:
            with self.together():
                yield
        else:
            with self.together():
                pass
            yield


ALONE = Ranks()


def joined(*, device: str, sharded: bool, patience: float = 0.0) -> Ranks:
    """This process among those that a launcher has started: `gatespace train --processes`, `accelerate launch` or
    torchrun. `ALONE` where there is none.

    They stay joined until the process ends: further runs find each other as this one did.

    Args:
        device: As in the configuration.
        sharded: As the configuration wants it; `accelerate launch --use_fsdp` wants it too.
        patience: Seconds for which a process may wait for its teacher.
    """
    if launched() is None:
        return ALONE
    try:
        from accelerate import PartialState  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing_extra("a run in several processes", module="accelerate", extra="accelerate") from error
    if ":" in device:
        raise UsageError(
            "engine.device: each of several processes has a device of its own", got=device, instead="auto, cpu or cuda"
        )
    cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    # Set by `accelerate launch --use_fsdp`, it has transformers give the weights of a file to the first process only.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if not torch.distributed.is_initialized():
        atexit.register(_part)
    state = PartialState(cpu=cpu, timeout=timedelta(seconds=patience + _SPARE))
    sharded = sharded or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return Ranks(state.process_index, state.num_processes, str(state.device), sharded)


def _part() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _kind(error: GatespaceError) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(error, kind) or kind is RunError)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > _BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
