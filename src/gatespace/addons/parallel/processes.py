"""One run in several processes (DDP, FSDP2).

Messages between processes are tensors or JSON, never pickles. With DDP, gradients are summed once per step in float32,
without the DDP wrapper: a step runs the student several times before one backward pass. FSDP2 sums them in that pass.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gatespace.config import TeachConfig, TrainConfig
from gatespace.config.sections import SELF_EMA
from gatespace.errors import GatespaceError, RunError, UsageError, missing_extra
from gatespace.models.body import Body, body_of
from gatespace.models.load import Model
from gatespace.teacher.scores import TeacherAwayError
from gatespace.training.processes import Processes

_BUCKET = 32 << 20
"""Bytes per all-reduce."""
_SPARE = 1800.0
"""Seconds that a process waits for the others beyond the teacher's patience."""
_KINDS: dict[str, type[GatespaceError]] = {kind.__name__: kind for kind in (TeacherAwayError, UsageError, RunError)}


@dataclass(frozen=True)
class Distributed(Processes):
    """One of several processes, each with a full copy of the student (DDP)."""

    rank: int
    size: int
    device: str = "cpu"

    @property
    def content(self) -> dict[str, str]:  # type: ignore[override]
        """World size and kind, part of the run's identity: sums over processes differ in their last bits."""
        return {"processes": f"{self.size} {'fsdp' if self.sharded else 'ddp'}"}

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by its sum over all processes."""
        found = list(parameters)
        for parameter in found:
            if parameter.grad is None:  # other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
        self.sum([parameter.grad for parameter in found if parameter.grad is not None])

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, bitwise equal on all."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            torch.distributed.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def total(self, number: float) -> float:
        """Sum a number over all processes; integers up to 2^53 are exact."""
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(found)
        return float(found)

    def gather(self, value: Any) -> list[Any]:
        """Gather JSON-serializable values of all processes, in rank order."""
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
        """Raise `error`, built from the values of all processes, unless they are equal."""
        found = self.gather(value)
        with self.together():
            if any(other != found[0] for other in found):
                raise error(found)

    def divide(self, items: Sequence[Any], work: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """Run `work` on all items, each process on its share; gather all results in order, through JSON."""
        own: list[Any] = []
        with self.together():
            own = work(items[self.rank :: self.size])
        found = self.gather(own)
        return [found[place % self.size][place // self.size] for place in range(len(items))]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block without collectives; an exception in one process is raised in all, so that none waits for one
        that is gone. Includes exceptions that are not ours, such as out of memory."""
        mine: GatespaceError | None = None
        other_error: Exception | None = None
        try:
            yield
        except GatespaceError as error:
            mine = error
        except Exception as error:
            other_error, text = error, str(error).partition("\n")[0]
            mine = RunError(f"process {self.rank} of {self.size} failed", got=f"{type(error).__name__}: {text}")
        found = self.gather(mine and [_kind(mine), mine.what, mine.got, mine.why, mine.instead])
        for rank, other in enumerate(found):
            if other is not None:
                if other_error is not None:
                    raise other_error
                kind, what, got, why, instead = other
                shared = mine or _KINDS[kind](what, got=got, why=why, instead=instead)
                shared.raised_by = self.rank if mine is not None else rank
                raise shared

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block on the first process, then on all others, which find what it fetched or built."""
        if self.first:
            with self.together():
                yield
        else:
            with self.together():
                pass
            yield

    def update(self, body: Body, done: int, most: int) -> AbstractContextManager[None]:
        """Run each process's own micro-batches; an error in one is raised in all."""
        return self.together()


class Sharded(Distributed):
    """One of several processes that each hold a shard of the student (FSDP2)."""

    sharded = True

    def loads_on(self, device: str) -> str:
        """Load weights on the first process's CPU only; shards go from there, so no device holds the full model."""
        return "cpu" if self.first else "meta"

    def prepare(self, model: Model, *, dtype: torch.dtype, packed: bool | None) -> Model:
        """Return this process's shard of the model."""
        from gatespace.addons.parallel.sharded import shard

        with self.together():
            if self.first:
                body_of(model, packed=packed)  # checks on the full model whether packed passes work
        model.unpackable = self.gather(model.unpackable)[0]
        return shard(model, dtype=dtype, device=self.device)

    @contextmanager
    def update(self, body: Body, done: int, most: int) -> Iterator[None]:
        """Pad with empty passes to the largest number of micro-batches, as every pass needs all shards."""
        with body.model.learning():
            yield
            for _ in range(most - done):
                (body.forward([[0]]).hidden.sum() * 0).backward()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: FSDP2 sums gradients in the backward pass."""

    def gather_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather full tensors on the first process's CPU; collective."""
        gathered: dict[str, Tensor] = {}
        for key, value in tensors.items():
            whole = self.full(value)  # one full tensor at a time on the device
            if self.first:
                gathered[key] = whole.cpu()
        return gathered

    def full(self, tensor: Any) -> Tensor:
        """Return the full tensor."""
        whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole

    def shard_like(self, parameter: Any, value: Tensor) -> Tensor:
        """Shard a full tensor like `parameter`."""
        if not hasattr(parameter, "full_tensor"):
            return value
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def join(config: TrainConfig | TeachConfig) -> Distributed:
    """Join the processes started by `gatespace train --processes`, `accelerate launch` or torchrun.

    The group lives until the process exits, so that later runs reuse it.
    """
    try:
        from accelerate import PartialState  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing_extra("a run in several processes", module="accelerate", extra="accelerate") from error
    device = config.engine.device
    if ":" in device:
        raise UsageError(
            "engine.device: each of several processes has a device of its own", got=device, instead="auto, cpu or cuda"
        )
    cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    # `accelerate launch --use_fsdp` sets it, and transformers then loads weights in the first process only.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if not torch.distributed.is_initialized():
        atexit.register(_part)
    state = PartialState(cpu=cpu, timeout=timedelta(seconds=_patience(config) + _SPARE))
    sharded = config.engine.parallel == "fsdp" or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    kind = Sharded if sharded else Distributed
    processes = kind(state.process_index, state.num_processes, str(state.device))
    with processes.together():
        if isinstance(config, TrainConfig) and config.rollout.engine != "native":
            raise UsageError(
                "rollout.engine: this sampler serves one process only",
                got=f"{config.rollout.engine} with {processes.size} processes",
                instead="native",
            )
        if sharded and (config.pair if isinstance(config, TrainConfig) else config).lora is not None:
            raise UsageError(
                "a student with adapters is not sharded",
                got="lora with engine.parallel: fsdp",
                why="adapters are small, and the rest has neither gradients nor optimizer state",
                instead="engine.parallel: ddp",
            )
        if isinstance(config, TrainConfig) and sharded and SELF_EMA in config.pair.scorers().values():
            raise UsageError(
                "pair.teacher: self-ema and engine.parallel: fsdp do not go together",
                why="no process has all weights of the student, which the teacher averages",
                instead="engine.parallel: ddp, or self",
            )
    return processes


def _patience(config: TrainConfig | TeachConfig) -> float:
    """Seconds that a process may wait for a teacher."""
    if not isinstance(config, TrainConfig):
        return 0.0
    given = [config.alone(scorer).teacher.options.get("patience") for scorer in config.pair.scorers()]
    return max(float(one) if isinstance(one, int | float) and one else 600.0 for one in given)


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
