"""Device memory of a run by purpose, estimated from shapes and settings before anything is computed.

Persistent memory (weights, masters, optimizer states, a teacher) and gradients, which live from the first backward pass
of a step to its end, are arithmetic. Temporary memory is estimated by phase, and the largest adds to that;
`benchmarks/memory.py` compares it with real runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from gatespace.config import TeachConfig, TeachEngineConfig, TrainConfig
from gatespace.config.sections import SELF_EMA
from gatespace.errors import UsageError
from gatespace.models.encode import Encoder
from gatespace.models.sizes import Sizes
from gatespace.tasks.data import Example
from gatespace.teacher.local import PASS
from gatespace.training.processes import Processes

TELEMETRY = 64 << 20
"""Bytes of one model's logits that token records process at a time."""
_TELEMETRY_COPIES = 21
"""Tensors of that size alive at once; measured, with gradient through the gate."""
_CHUNK_MB = {"cpu": 60, "other": 512}
"""Logit buffers of the fused loss. On a CPU they fit into the cache. A GPU does 150 to 300 multiplications in the time
to read two bytes of weights; at a vocabulary of 152k, 60 MB are 48 tokens per weight, and 512 MB are 416."""
_SLICES = {"cpu": 8 << 20, "other": 8 << 26}
"""Eight slices of the vocabulary that the fused loss works on at once."""
_DRAWN = 28
"""Bytes per logit in sampling: float32 once, float64 three times."""
_QUANTISED = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
"""Bytes per quantised weight, with its scales."""
_SPARE = 0.05
"""Share of a device reserved for its context and for allocator fragmentation."""
_CERTAIN = 0.8
"""Share of temporary memory that is certainly needed; the rest is an estimate."""
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_CARDS = (1, 2, 8)


@dataclass(frozen=True)
class Work:
    """Token counts of a step."""

    prefix: int
    mean: float
    """Prompt length after the prefix."""
    longest: int
    new: int
    """The longest response."""
    rows: int
    """Responses of a step."""
    shared: int = 1
    """Responses that share a prompt's forward pass."""

    @property
    def row(self) -> float:
        """Tokens of a response and its share of the prompt."""
        return self.mean / self.shared + self.new

    @classmethod
    def of(cls, config: TrainConfig | TeachConfig, encoder: Encoder, data: Sequence[Example], right: int) -> Work:
        """Work of a run on the rows `data`, whose longest gold response has `right` tokens."""
        lengths = encoder.lengths(data)
        rows, new, shared = config.batch_size, right, 1
        if isinstance(config, TrainConfig):
            rows, new = rows * config.rollout.per_prompt, config.rollout.max_new_tokens
            shared = config.rollout.per_prompt if config.engine.share_prompt else 1
        return cls(len(encoder.prefix), sum(lengths) / len(lengths), max(lengths), new, rows, shared)


@dataclass(frozen=True)
class Memory:
    """Bytes on the device of one process."""

    lasting: dict[str, int]
    gradients: int
    """From a step's first update on: not during rollout or evaluation."""
    phases: dict[str, dict[str, int]]
    """Phase → purpose → bytes. Phases do not overlap."""
    loading: int
    """While models are loaded, before there are gradients."""
    teacher: dict[str, int]
    """On the teacher's own device; empty if it has none."""

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: sum(self.during(name).values()))

    @property
    def passing(self) -> int:
        """Temporary memory of that phase."""
        return sum(self.phases[self.phase].values())

    @property
    def all(self) -> int:
        """Peak memory."""
        return max(sum(self.by_purpose().values()), self.loading)

    def during(self, phase: str) -> dict[str, int]:
        """Purpose → bytes in a phase."""
        gradients = {} if phase in ("rollout", "evaluation") else {"gradients": self.gradients}
        return {name: size for name, size in (self.lasting | gradients | self.phases[phase]).items() if size}

    def by_purpose(self) -> dict[str, int]:
        """`during` the phase that needs most."""
        return self.during(self.phase)


@dataclass(frozen=True)
class Plan:
    """A run whose memory is estimated.

    Args:
        config: Its settings.
        dtype: Compute precision of the networks.
        device: Device type.
        student: The trained model.
        teacher: None if there is none, or it is a service.
        vocab_size: Size of the shared vocabulary.
        work: Token counts of a step.
        read: Those of a teacher with its own prompt; None: the same.
    """

    config: TrainConfig | TeachConfig
    dtype: torch.dtype
    device: str
    student: Sizes
    teacher: Sizes | None
    vocab_size: int
    work: Work
    teacher_bytes: int | None = None
    """Of its weights, if known; None: from its shapes and `pair.teacher_quantization`."""
    read: Work | None = None

    @property
    def limit(self) -> int:
        """Token limit of a micro-batch."""
        return micro_tokens(self.student, self.config.engine, self.work.prefix)

    def micro_batches(self, processes: int = 1) -> int:
        """Per step and process."""
        each = max(1, int(self.limit // self.work.row))
        teachers = len(self.config.pair.scorers()) if isinstance(self.config, TrainConfig) else 1  # each has its own
        return -(-self.work.rows // (processes * each)) + teachers - 1

    def reuses(self, processes: int = 1) -> bool:
        """Whether the update reuses the forward pass that the rollout started from."""
        config = self.config
        assert isinstance(config, TrainConfig)
        return config.engine.reuse_rollout and config.rollout.staleness == 0 and self.micro_batches(processes) == 1

    def memory(self, processes: int = 1, *, sharded: bool = False, teacher_beside: bool = True) -> Memory:
        """Memory of each process.

        Args:
            processes: World size; each process has its own device.
            sharded: By FSDP; otherwise each has a full copy.
            teacher_beside: Whether a teacher in this process is on the student's device.
        """
        ours, theirs, item = self.student, self.teacher, self.dtype.itemsize
        mixed, parts = item < 4, processes if sharded else 1
        states = 8 if self.config.optimizer.states == "fp32" else 2 + 8 / 256
        lasting = {
            # FSDP's shards are the masters.
            "weights": ours.all * 4 // parts if sharded else self.weights_of(ours, "student"),
            "master_weights": ours.trained * 4 if mixed and not sharded else 0,
            "optimizer": int(ours.trained * states) // parts,
        }
        own_card: dict[str, int] = {}
        rows = -(-self.work.rows // processes)
        phases = {"update": self._update(rows, processes, sharded)}
        if isinstance(self.config, TrainConfig):
            phases["rollout"] = self._rollout(rows)
            if self.reuses(processes) and not sharded:  # one forward pass for both
                phases["rollout"]["activations"] = phases["update"]["activations"]
            if self.config.trace.tokens_every:
                logits = min(rows, self.config.trace.rollouts) * self.work.new * self.vocab_size * 4
                phases["telemetry"] = {"telemetry": min(logits, TELEMETRY) * _TELEMETRY_COPIES}
        phases["evaluation"] = self._evaluation()
        if self.config.optimizer.states == "8bit" and self.device == "cpu":
            # Not compiled: float32 copies while updating.
            phases["step"] = {"optimizer_step": ours.largest * 4 * 8}
        if sharded:
            for name in ("rollout", "evaluation"):
                if name in phases:  # all weights are gathered, and the head in float32 too
                    phases[name]["gathered"] = ours.all * item + ours.head * 4
        if theirs is not None:
            scoring = self._scoring(theirs)
            weights = {"teacher_weights": self._teacher_weights(theirs)}
            if teacher_beside:
                lasting |= weights
                phases["scoring"] = scoring
            else:
                own_card = weights | scoring
                lasting["teacher_head"] = theirs.head * item
        loaded = lasting["weights"] if self._quantization("student") else ours.all * 4
        loading = 0 if sharded else loaded + lasting["master_weights"] + lasting.get("teacher_weights", 0)
        return Memory(lasting, ours.trained * 4 // parts, phases, loading, own_card)

    # ------------------------------------------------------------------ phases

    def _update(self, rows: int, processes: int, sharded: bool) -> dict[str, int]:
        config, ours, work, item = self.config, self.student, self.work, self.dtype.itemsize
        again = bool(config.engine.activation_checkpointing)
        longest = work.longest + work.new
        tokens = min(max(self.limit, longest), rows * work.row)
        keys = min(work.prefix + longest, ours.most_keys(work.prefix))
        responses = int(tokens * work.new / work.row)
        layer = ours.kept() // ours.layers
        kept = (tokens + work.prefix) * ours.kept(checkpointing=again)
        long = work.prefix + longest > ours.most_keys(work.prefix)
        if config.engine.activation_checkpointing is None and long and not sharded:
            # In passes with long rows every second layer is recomputed.
            half = (ours.kept() + ours.kept(checkpointing=True)) // 2
            kept = max((min(tokens, self.limit) + work.prefix) * ours.kept(), (tokens + work.prefix) * half)
        whole = 0 if ours.trained < ours.all else ours.head * item
        found = {
            "activations": int(kept * item),
            "attention": int(tokens * ours.attention(keys, checkpointing=again) * item),
            "backward": int((tokens + work.prefix) * layer * item),
            # Of the head, and of the embedding if tied: folded into the masters only when complete.
            "head_gradient": whole * (2 if ours.tied else 1),
        }
        if isinstance(config, TrainConfig) and config.engine.fused:
            kind = "cpu" if self.device == "cpu" else "other"
            found["loss"] = int(chunk_mb(config, self.device) * 1e6) + _SLICES[kind]
        else:
            copies = 6 if isinstance(config, TrainConfig) else 3
            found["logits"] = responses * self.vocab_size * 4 * copies
        if sharded:
            # The head and its gradient in float32; the embedding; two layers and a layer's gradients.
            one = ours.body // ours.layers
            found["gathered"] = ours.head * (4 + 4 + item) + ours.head * item + one * (2 * item + item + 4)
        elif processes > 1:
            found["bucket"] = 2 * (32 << 20)
        return found

    def _rollout(self, rows: int) -> dict[str, int]:
        work = self.work
        most = max(1, int(self.student.rollout_tokens(self.dtype.itemsize) // (work.mean + work.new)))
        return self._decoding(min(rows, most), work.new) | {"sampling": min(rows, most) * self.vocab_size * _DRAWN}

    def _evaluation(self) -> dict[str, int]:
        settings = self.config.evaluation
        tokens = self.work.prefix + self.work.longest + settings.max_new_tokens
        most = max(1, self.student.rollout_tokens(self.dtype.itemsize) // tokens)
        rows = min(settings.batch_size, most)
        return self._decoding(rows, settings.max_new_tokens) | {"sampling": rows * self.vocab_size * 8}

    def _decoding(self, rows: int, new: int) -> dict[str, int]:
        """KV cache of the forward pass over the prompts, plus the buffers that decoding writes to."""
        ours, work, item = self.student, self.work, self.dtype.itemsize
        passed = int(rows * work.mean) + work.prefix
        buffers = rows * (work.prefix + work.longest + new)
        return {
            "kv_cache": (passed + buffers) * ours.cached() * item,
            "forward": passed * ours.kept() // ours.layers * item,
        }

    def _teacher_weights(self, theirs: Sizes) -> int:
        return self.weights_of(theirs) + self.average_bytes() if self.teacher_bytes is None else self.teacher_bytes

    def weights_of(self, sizes: Sizes, role: str = "teacher") -> int:
        """Bytes of a model's weights, from its shapes and its role's quantisation."""
        item = self.dtype.itemsize
        each = _QUANTISED.get(self._quantization(role) or "", item)
        return int(sizes.body * each) + (sizes.all - sizes.body) * item

    def _quantization(self, role: str) -> str | None:
        return self.config.pair.quantization(role) if isinstance(self.config, TrainConfig) else None

    def average_bytes(self) -> int:
        """Bytes of a self-ema teacher besides its compute weights: float32 averages."""
        moving = isinstance(self.config, TrainConfig) and SELF_EMA in self.config.pair.scorers().values()
        return 4 * self.student.trained if moving and self.dtype.itemsize < 4 else 0

    def _scoring(self, theirs: Sizes) -> dict[str, int]:
        work, item = self.read or self.work, self.dtype.itemsize
        size = -(-(work.longest + work.new - 1) // PASS) * PASS
        keys = min(work.prefix + work.longest + work.new, theirs.most_keys(work.prefix))
        one = theirs.attention(keys, checkpointing=True)  # of one layer
        return {
            "teacher_pass": size * (theirs.kept() // theirs.layers + theirs.cached() + 2 * one) * item
            + work.prefix * theirs.cached() * item,
            "scores": work.rows * work.new * theirs.hidden * item,
        }


def chunk_mb(config: TrainConfig, device: str) -> float:
    """Megabytes of the logit buffers of the fused loss."""
    return config.engine.chunk_mb or _CHUNK_MB["cpu" if device == "cpu" else "other"]


def micro_tokens(sizes: Sizes, engine: TeachEngineConfig, prefix: int = 0) -> int:
    """Token limit of a micro-batch.

    Depends on model, settings and shared prefix alone, not on free memory: how a batch is divided changes the last
    bits of a run.
    """
    if engine.micro_tokens is not None:
        return engine.micro_tokens
    return sizes.micro_tokens(checkpointing=bool(engine.activation_checkpointing), prefix=prefix)


# ---------------------------------------------------------------------------------------------------- devices


def device_bytes(text: str, setting: str = "--device-memory") -> int:
    """A size such as 80GB or 24GiB in bytes.

    Examples:
        >>> device_bytes("80GB"), device_bytes("24 GiB"), device_bytes("1.5TB")
        (80000000000, 25769803776, 1500000000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text.strip(), re.IGNORECASE)
    size = 0
    if match:
        number, unit, binary = match.groups()
        size = int(Fraction(number) * (1024 if binary else 1000) ** _UNITS[unit.upper()])
    if size <= 0:
        raise UsageError(f"{setting}: this is not a memory size", got=text, instead="80GB, or 24GiB")
    return size


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a device available to this process, with its allocator's reserve; None if unknown."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free: int = module.mem_get_info(device)[0]
    return free + int(module.memory_reserved(device))


@dataclass(frozen=True)
class Layout:
    """One way to place a run on cards of equal size."""

    cards: int
    parallel: str
    """ddp, fsdp, or "" for one process."""
    teacher: str
    """beside, own card, or "" if there is none to place."""
    memory: Memory

    def worst(self) -> int:
        """Bytes on the fullest card."""
        return max(self.memory.all, sum(self.memory.teacher.values()))

    def verdict(self, size: int) -> str:
        """Whether it fits on cards of `size` bytes: fits, barely, or does not fit."""
        if self.worst() > size:
            return "does not fit"
        return "barely" if self.worst() > (1 - _SPARE) * size else "fits"


def layouts(plan: Plan, processes: int = 1) -> Iterator[Layout]:
    """The ways to place a run on one, two and eight cards, and on as many as it has processes."""
    places = ["beside", "own card"] if plan.teacher is not None else [""]
    for cards in sorted({*_CARDS, processes}):
        for place in places:
            students = cards - 1 if place == "own card" else cards
            # Neither adapters nor 8-bit states are sharded.
            shards = plan.student.trained == plan.student.all and plan.config.optimizer.states == "fp32"
            for parallel in [""] if students == 1 else ["ddp", "fsdp"] if shards else ["ddp"]:
                if students:
                    memory = plan.memory(students, sharded=parallel == "fsdp", teacher_beside=place != "own card")
                    yield Layout(cards, parallel, place, memory)


def check_devices(plan: Plan, processes: Processes, student: torch.device, teacher: torch.device | None) -> list[str]:
    """Raise if a run cannot fit into its devices' free memory; returns notes if it may not.

    Args:
        plan: The run.
        processes: Its processes.
        student: Device of the trained model.
        teacher: Device of a teacher in this process.
    """
    beside = teacher is None or teacher == student
    memory = plan.memory(processes.size, sharded=processes.sharded, teacher_beside=beside)
    notes = _check(memory.by_purpose(), memory.all, memory.passing, student)
    if teacher is not None and not beside:
        alone = memory.teacher
        notes += _check(alone, sum(alone.values()), alone["teacher_pass"], teacher)
    return notes


def _check(parts: dict[str, int], needed: int, passing: int, device: torch.device) -> list[str]:
    free = free_bytes(device)
    if free is None or needed <= (1 - _SPARE) * free:
        return []
    listed = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.3g}" for name, size in parts.items())
    got = f"about {needed / 1e9:.3g} GB ({listed}), of which {free / 1e9:.3g} are free on {device}"
    instead = (
        "engine.activation_checkpointing: true, fewer engine.micro_tokens, optimizer.states: 8bit, pair.lora, "
        "engine.parallel: fsdp over several devices, or the teacher elsewhere (pair.teacher_device, or a service)"
    )
    if needed - (1 - _CERTAIN) * passing > free:
        raise UsageError(
            "the run does not fit into the memory of its device",
            got=got,
            why="it would fail at its first steps",
            instead=instead,
        )
    return [f"memory may run out: the run needs {got}. If it does: {instead}"]
