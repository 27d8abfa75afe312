"""What a run would cost, counted before anything is trained: tokens, arithmetic, memory, and a range of time.

Models are read without their weights. Counts are exact where the data decides them; where the responses decide, they
are a range from the right answers to the longest response allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from gatespace.config import LoraConfig, TeachConfig, TrainConfig, in_setting
from gatespace.config.address import is_address
from gatespace.errors import UsageError, missing_extra
from gatespace.gating.configured import build_objective
from gatespace.models import Model, build_tiny, check_pair
from gatespace.models.load import TINY, located
from gatespace.training.setup import (
    Material,
    Placement,
    activation_bytes,
    encoder_for,
    material,
    micro_tokens,
    placement,
)

if TYPE_CHECKING:
    from gatespace.models.encode import Encoder
    from gatespace.tasks import Task

_PROBE_SECONDS = 1.0
_PROBE_TOKENS = 512
_SLOWEST_SHARE = 0.2
"""Of the mean rate of large products: what decoding token by token, attention and the optimizer leave of it."""
_TOO_SMALL = 20_000_000
"""Networks with fewer weights than this spend their time between the products."""


class Range(NamedTuple):
    """From the shortest responses to the longest."""

    low: float
    high: float

    def __add__(self, other: Any) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> Range:
        """Both ends times `factor`."""
        return Range(self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Sizes:
    """A network's weights."""

    all: int
    body: int
    """In products with every token: without the embedding and the head."""
    head: int
    """In products with the tokens that a response is predicted at."""
    trained: int
    bytes_per_token: int
    """What autograd keeps of a token in half precision."""


def estimate(config: TrainConfig | TeachConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """The costs of the run of `config`, as plain numbers by name.

    Args:
        config: Checked here as the run would check it.
        note: Is told what takes long.
    """
    place = placement(config.engine)
    if isinstance(config, TrainConfig):
        return _train(config, place, note)
    return _teach(config, place, note)


def _train(config: TrainConfig, place: Placement, note: Callable[[str], None]) -> dict[str, Any]:
    build_objective(config.objective)
    data, pair = material(config.task, "distill"), config.pair
    code = pair.trust_remote_code
    student = _outline(pair.student, "pair.student", "student", data.task, pair.student_revision, code, note)
    ours = _sizes(student, pair.lora)
    if is_address(pair.teacher):
        # What it computes, and the check that it speaks of the same tokens, are the service's own.
        notes = [f"the teacher at {pair.teacher} was not asked: its arithmetic, memory and time are not counted"]
        theirs = Sizes(0, 0, 0, 0, 0)
    else:
        teacher = _outline(pair.teacher, "pair.teacher", "teacher", data.task, pair.teacher_revision, code, note)
        notes = list(check_pair(student, teacher).notes)
        theirs = _sizes(teacher, None)
    prompts = _prompts(config, data, student, end=config.rollout.stop == "eos")

    rows = config.batch_size * config.rollout.per_prompt
    shares = config.rollout.source.shares()
    responses = Range(min(prompts.right, config.rollout.max_new_tokens), config.rollout.max_new_tokens)
    if set(shares) == {"gold"}:
        responses = Range(responses.low, responses.low)
    written = responses.times(rows)
    read = Range(prompts.prefix + rows * prompts.mean, prompts.prefix + rows * prompts.mean)
    decoded = written.times(shares.get("student", 0.0))
    learned = read + written
    reused = config.engine.reuse_rollout and config.rollout.staleness == 0
    passes = 1 if reused else 2  # over the prompts
    forward = read.times(passes) + decoded + written
    scored = written + Range(rows * prompts.mean, rows * prompts.mean)
    drawn = scored.times(shares.get("teacher", 0.0))

    work = (
        forward.times(2 * ours.body)
        + learned.times(4 * ours.body)
        + (decoded + written).times(2 * ours.head)
        + written.times(4 * ours.head)
        + (scored + drawn).times(2 * theirs.body)
        + (written + drawn).times(2 * theirs.head)
    ).times(config.steps)
    once = 2 * theirs.body * prompts.prefix
    limit = micro_tokens(student, config.engine.micro_tokens)
    if config.engine.packed is False:
        notes.append("engine.packed is false: every token of a response reads its prompt anew, which is not counted")
    kept = min(limit, learned.high)
    memory = _memory(ours, place, kept)
    memory["teacher_weights"] = theirs.all * place.dtype.itemsize
    if not config.engine.fused:
        memory["logits"] = int(kept / learned.high * written.high * student.vocab_size * 4 * 6)
    return _report(
        config, place, data, prompts, ours, work + Range(once, once), memory, notes,
        step={
            "prompts": config.batch_size,
            "responses": rows,
            "response_tokens": written,
            "student_forward_tokens": forward,
            "student_backward_tokens": learned,
            "teacher_tokens_at_most": scored + drawn,
            "micro_batches": _micro_batches(rows, prompts, config.rollout.max_new_tokens, limit),
        },
        extra={"teacher_parameters": theirs.all} if theirs.all else {},
    )  # fmt: skip


def _teach(config: TeachConfig, place: Placement, note: Callable[[str], None]) -> dict[str, Any]:
    data = material(config.task, "teacher")
    model = _outline(config.model, "model", "teacher", data.task, config.revision, config.trust_remote_code, note)
    prompts = _prompts(config, data, model, end=True)
    sizes = _sizes(model, config.lora)
    rows = config.batch_size
    limit = micro_tokens(model, config.engine.micro_tokens)
    parts = _micro_batches(rows, prompts, round(prompts.right), limit)
    written = Range(rows * prompts.right, rows * prompts.right)
    learned = written + Range(
        parts * prompts.prefix + rows * prompts.mean, parts * prompts.prefix + rows * prompts.mean
    )
    work = (learned.times(6 * sizes.body) + written.times(6 * sizes.head)).times(config.steps)
    kept = min(limit, learned.high)
    memory = _memory(sizes, place, kept)
    memory["logits"] = int(kept / learned.high * written.high * model.vocab_size * 4 * 3)
    return _report(
        config, place, data, prompts, sizes, work, memory, [],
        step={
            "prompts": rows,
            "response_tokens": written,
            "forward_tokens": learned,
            "backward_tokens": learned,
            "micro_batches": parts,
        },
        extra={},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the parts


class Prompts(NamedTuple):
    """A task in a model's tokens: lengths."""

    prefix: int
    mean: float
    longest: int
    right: float
    """Tokens of a right response."""
    evaluated: Range
    """Tokens of all evaluations, prompts and responses."""
    answers: Range
    """Of these, responses."""


def _prompts(config: TrainConfig | TeachConfig, data: Material, model: Model, *, end: bool) -> Prompts:
    looks = config.evaluation
    splits = (*looks.final, looks.split)
    encoder = encoder_for(data, model, splits, share=config.engine.share_prefix)
    lengths = [len(encoder.suffix(row.text)) for row in data.rows]
    right = {label: len(encoder.gold(label, model.turn_end if end else None)) for label in data.prompt.labels}
    gold = sum(right[row.label] for row in data.rows) / len(data.rows)
    on_the_way = config.steps // looks.every if looks.every else 0
    evaluated, answers = Range(0, 0), Range(0, 0)
    for split, often in [*((split, 1) for split in looks.final), (looks.split, on_the_way)]:
        read, count = _suffixes(encoder, data.task, split, looks.limit)
        response = Range(min(gold, looks.max_new_tokens), looks.max_new_tokens).times(count * often)
        answers += response
        evaluated += response + Range(often * (len(encoder.prefix) + read), often * (len(encoder.prefix) + read))
    return Prompts(len(encoder.prefix), sum(lengths) / len(lengths), max(lengths), gold, evaluated, answers)


def _suffixes(encoder: Encoder, task: Task, split: str, limit: int | None) -> tuple[int, int]:
    rows = task.rows(split)[:limit]
    return sum(len(encoder.suffix(row.text)) for row in rows), len(rows)


def _outline(
    name: str,
    setting: str,
    role: str,
    task: Task,
    revision: str | None,
    trust_remote_code: bool,
    note: Callable[[str], None],
) -> Model:
    """The model without its weights: shapes and tokenizer."""
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("an estimate", module="transformers", extra="train") from error
    with in_setting(setting):
        folder = name
        if name in TINY:
            tiny = build_tiny(task)
            folder = str(getattr(tiny, name.removeprefix("tiny-") if name != "tiny" else role))
        where, options, source = located(folder, revision, note)
        options |= {"trust_remote_code": trust_remote_code}
        try:
            config = transformers.AutoConfig.from_pretrained(where, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
            with torch.device("meta"):
                network = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise UsageError(f"{name} could not be read", got=str(error).strip().splitlines()[0]) from error
    return Model(network, tokenizer, name, source or where)


def _sizes(model: Model, lora: LoraConfig | None) -> Sizes:
    whole = sum(p.numel() for p in model.network.parameters())
    head = model.head.weight
    embedding = model.network.get_input_embeddings()
    rows = getattr(embedding, "weight", head)
    tied = rows is head
    return Sizes(
        all=whole,
        body=whole - head.numel() - (0 if tied else rows.numel()),
        head=head.numel(),
        trained=whole if lora is None else _adapters(model, lora),
        bytes_per_token=activation_bytes(model.network.config.get_text_config()),
    )


def _adapters(model: Model, lora: LoraConfig) -> int:
    head = model.network.get_output_embeddings()
    layers = [
        part
        for name, part in model.network.named_modules()
        if isinstance(part, nn.Linear) and part is not head
        and (lora.targets == "all-linear" or name.rpartition(".")[2] in lora.targets)
    ]  # fmt: skip
    return sum(lora.r * (layer.in_features + layer.out_features) for layer in layers)


def _micro_batches(rows: int, prompts: Prompts, room: int, limit: int) -> int:
    each = max(1, int(limit // (prompts.mean + room)))
    return -(-rows // each)


def _memory(sizes: Sizes, place: Placement, tokens: float) -> dict[str, int]:
    """Bytes by purpose."""
    mixed = place.dtype.itemsize < 4
    return {
        "weights": sizes.all * place.dtype.itemsize,
        "master_weights": sizes.trained * 4 if mixed else 0,
        "gradients": sizes.trained * (4 + place.dtype.itemsize if mixed else 4),
        "optimizer": sizes.trained * 8,
        "activations": int(tokens * sizes.bytes_per_token * place.dtype.itemsize / 2),
    }


def _report(
    config: TrainConfig | TeachConfig,
    place: Placement,
    data: Material,
    prompts: Prompts,
    sizes: Sizes,
    training: Range,
    memory: dict[str, int],
    notes: list[str],
    *,
    step: dict[str, Any],
    extra: dict[str, Any],
) -> dict[str, Any]:
    evaluating = prompts.evaluated.times(2 * sizes.body) + prompts.answers.times(2 * sizes.head)
    work = training + evaluating
    return {
        "task": data.task.describe(),
        "rows": len(data.rows),
        "epochs": config.steps * config.batch_size / len(data.rows),
        "prefix_tokens": prompts.prefix,
        "prompt_tokens_mean": prompts.mean,
        "prompt_tokens_longest": prompts.longest,
        "right_response_tokens_mean": prompts.right,
        "parameters": sizes.all,
        "trained_parameters": sizes.trained,
        **extra,
        "device": place.device,
        "precision": place.precision,
        "step": {name: list(value) if isinstance(value, Range) else value for name, value in step.items()},
        "evaluation_tokens": list(prompts.evaluated),
        "flops": {"training": list(training), "evaluation": list(evaluating)},
        "memory_bytes": {**memory, "all": sum(memory.values())},
        "time": _time(work, sizes, place),
        "notes": notes,
    }


def _time(work: Range, sizes: Sizes, place: Placement) -> dict[str, Any]:
    if sizes.all < _TOO_SMALL:
        return {"status": "n/a", "reason": "so small a network spends its time between the products; try a few steps"}
    best, mean = gemm_rates(place)
    seconds = [work.low / best, work.high / mean / _SLOWEST_SHARE]
    return {"gemm_flops_per_second": best, "gemm_flops_per_second_mean": mean, "seconds": seconds}


def gemm_rates(place: Placement) -> tuple[float, float]:
    """Floating-point operations per second in large matrix products of about a second: the fastest, and the mean."""
    size = 1024
    left = torch.ones(_PROBE_TOKENS, size, dtype=place.dtype, device=place.device)
    right = torch.ones(size, 4 * size, dtype=place.dtype, device=place.device)

    def product() -> float:
        began = time.perf_counter()
        (left @ right)[0, 0].item()  # the value, so that a device's queue is waited for
        return time.perf_counter() - began

    product()
    times = [product()]
    while sum(times) < _PROBE_SECONDS:
        times.append(product())
    work = 2 * left.numel() * right.shape[1]
    return work / min(times), work * len(times) / sum(times)
