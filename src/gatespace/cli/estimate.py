"""`--dry-run`: estimate the cost of a run before training: tokens, FLOPs, memory, time.

Models are loaded without their weights. Counts that depend only on the data are exact; those that depend on responses
are a range from the length of the gold responses to the maximum length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from gatespace.cli.console import console, print_json
from gatespace.cli.progress import duration
from gatespace.config import TeachConfig, TrainConfig, dump_config, dump_yaml
from gatespace.config.address import is_address
from gatespace.gating.configured import build_objective
from gatespace.models import Model
from gatespace.models.load import TINY
from gatespace.models.sizes import Sizes, sizes_of
from gatespace.tasks.data import AnyTask
from gatespace.training.fit import check_fit, check_models
from gatespace.training.memory import Layout, Memory, Plan, Work, layouts
from gatespace.training.setup import (
    Material,
    ModelSpec,
    Placement,
    encoder_for,
    load_shapes,
    material,
    placement,
    teacher_encoder_for,
)

_PROBE_SECONDS = 1.0
_PROBE_TOKENS = 512
_SLOWEST_SHARE = 0.2
"""Fraction of the mean GEMM rate that remains after decoding, attention and the optimizer."""
_TOO_SMALL = 20_000_000
"""Networks with fewer weights than this are dominated by overhead between matrix products."""


class Range(NamedTuple):
    """Bounds for the shortest and the longest responses."""

    low: float
    high: float

    def __add__(self, other: Any) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> Range:
        """Multiply both bounds by `factor`."""
        return Range(self.low * factor, self.high * factor)


def _exactly(value: float) -> Range:
    return Range(value, value)


@dataclass(frozen=True)
class Prompts:
    """Token counts of a task's prompts and responses."""

    prefix: int
    mean: float
    longest: int
    right: float
    """Mean tokens of a gold response."""
    evaluated: Range
    """Tokens of all evaluations, prompts and responses."""
    responses: Range
    """Response tokens among them."""
    notes: list[str]


@dataclass(frozen=True)
class Training:
    """The part of an estimate that `train` and `teach` compute differently."""

    data: Material
    prompts: Prompts
    plan: Plan
    flops: Range
    step: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def estimate(
    config: TrainConfig | TeachConfig,
    note: Callable[[str], None],
    *,
    processes: int = 1,
    device_memory: int | None = None,
    outlines: dict[Any, Model] | None = None,
) -> dict[str, Any]:
    """Estimate the cost of the run of `config`, as plain numbers by name.

    Args:
        config: The configuration, validated as the run would.
        note: Called with a message before slow operations.
        processes: Number of processes of the run.
        device_memory: Bytes of memory of a hypothetical GPU to run on, in bf16 unless the settings say fp32.
        outlines: Models loaded by earlier calls; those loaded here are added.
    """
    place = placement(config.engine)
    if device_memory is not None:
        place = Placement("cuda", torch.float32 if config.engine.precision == "fp32" else torch.bfloat16)
    known = {} if outlines is None else outlines

    def outline(name: str, setting: str, *, role: str, task: AnyTask, **options: Any) -> Model:
        # Tiny models are built for role and task.
        key = (name, *options.values(), *((role, task.digest) if name in TINY else ()))
        if key not in known:
            spec = ModelSpec(name, setting, role, **options)
            known[key] = load_shapes(spec, task, note, weights=device_memory is None)
        return known[key]

    found = _train(config, place, outline) if isinstance(config, TrainConfig) else _teach(config, place, outline)
    data, prompts, plan = found.data, found.prompts, found.plan
    beside = not isinstance(config, TrainConfig) or config.pair.teacher_device is None
    sharded = processes > 1 and config.engine.parallel == "fsdp"
    memory = plan.memory(processes, sharded=sharded, teacher_beside=beside)
    sizes = plan.student
    evaluating = prompts.evaluated.times(2 * sizes.body) + prompts.responses.times(2 * sizes.head)
    return {
        "task": data.task.describe(),
        "rows": len(data.rows),
        "epochs": config.steps * config.batch_size / len(data.rows),
        "prefix_tokens": prompts.prefix,
        "prompt_tokens_mean": prompts.mean,
        "prompt_tokens_longest": prompts.longest,
        "right_response_tokens_mean": prompts.right,
        **({} if plan.read is None else _teacher_prompts(plan.read)),
        "parameters": sizes.all,
        "trained_parameters": sizes.trained,
        **({"teacher_parameters": plan.teacher.all} if plan.teacher else {}),
        "device": place.device,
        "precision": place.precision,
        "step": {name: list(value) if isinstance(value, Range) else value for name, value in found.step.items()},
        "evaluation_tokens": list(prompts.evaluated),
        "flops": {"training": list(found.flops), "evaluation": list(evaluating)},
        "memory_bytes": _memory_json(memory),
        "memory_phases": memory.phases,
        **({} if device_memory is None else {"cards": _cards(plan, processes, device_memory)}),
        "time": _time(found.flops + evaluating, sizes, place, device_memory),
        "notes": found.notes,
    }


def _train(config: TrainConfig, place: Placement, load: Callable[..., Model]) -> Training:
    build_objective(config.objective, sources=config.rollout.source.shares())
    data, pair = material(config.task, "distill"), config.pair

    def outline(setting: str, name: str, revision: str | None, role: str) -> Model:
        code = pair.trust_remote_code
        return load(name, f"pair.{setting}", role=role, task=data.task, revision=revision, trust_remote_code=code)

    student = outline("student", *pair.model("student"))
    ours = sizes_of(student, pair.lora)
    notes: list[str] = []
    teachers: dict[str, Model] = {}
    for scorer, where in pair.scorers().items():
        if is_address(where):
            # The service itself checks that its model has the student's vocabulary.
            notes.append(f"the teacher at {where} was not contacted: its arithmetic, memory and time are not counted")
        else:
            teachers[scorer] = teacher = outline(scorer, *pair.alone(scorer).model("teacher"))
            notes += check_models(config, student, teacher).notes
    theirs = {scorer: sizes_of(teacher) for scorer, teacher in teachers.items()}
    if config.engine.packed is False:
        notes.append("engine.packed is false: one forward pass over the prompt per response token, not counted")

    # Tokens of a step.
    prompts = _prompts(config, data, {"student": student, **teachers}, end=config.rollout.stop == "eos")
    notes += prompts.notes
    rows = config.batch_size * config.rollout.per_prompt
    shares = config.rollout.source.shares()
    longest = config.rollout.max_new_tokens
    shortest = min(prompts.right, longest)
    responses = Range(shortest, shortest if set(shares) == {"gold"} else longest).times(rows)
    shared = config.rollout.per_prompt if config.engine.share_prompt else 1
    prompting = _exactly(prompts.prefix + rows / shared * prompts.mean)
    decoded = responses.times(shares.get("student", 0.0))
    work = Work(prompts.prefix, prompts.mean, prompts.longest, longest, rows, shared)
    largest = max(theirs.values(), key=lambda sizes: sizes.all, default=None)
    asked = teacher_encoder_for(config, data, student, teachers)
    read = None if asked is None else Work.of(config, asked, data.rows, longest)
    plan = Plan(config, place.dtype, place.device, ours, largest, student.vocab_size, work, read=read)
    asks = read or work
    if len(theirs) > 1:  # a model under two names is loaded once
        loaded = {pair.alone(scorer).model("teacher"): sizes for scorer, sizes in theirs.items()}
        plan = replace(plan, teacher_bytes=sum(map(plan.weights_of, loaded.values())) + plan.average_bytes())
    forward = prompting.times(1 if plan.reuses() else 2) + decoded + responses
    backward = prompting + responses
    scored = responses + _exactly(rows * asks.mean)
    sampled = scored.times(shares.get("teacher", 0.0))

    flops = (
        forward.times(2 * ours.body)
        + backward.times((6 if config.engine.activation_checkpointing else 4) * ours.body)
        + (decoded + responses).times(2 * ours.head)
        + responses.times(4 * ours.head)
    ).times(config.steps)
    for scorer, sizes in theirs.items():
        passed = (scored + sampled).times(2 * sizes.body) + (responses + sampled).times(2 * sizes.head)
        own = [row.teacher == scorer.removeprefix("teachers.") for row in data.rows] if pair.teachers else [True]
        flops += passed.times(config.steps * sum(own) / len(own)) + _exactly(2 * sizes.body * asks.prefix)
    step = {
        "prompts": config.batch_size,
        "responses": rows,
        "response_tokens": responses,
        "student_forward_tokens": forward,
        "student_backward_tokens": backward,
        "teacher_tokens_at_most": scored + sampled,
        "micro_batches": plan.micro_batches(),
    }
    return Training(data, prompts, plan, flops, step, notes)


def _teach(config: TeachConfig, place: Placement, load: Callable[..., Model]) -> Training:
    data = material(config.task, "teacher")
    model = load(
        config.model,
        "model",
        role="teacher",
        task=data.task,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    prompts = _prompts(config, data, {"model": model}, end=True)
    again = config.engine.activation_checkpointing
    sizes = sizes_of(model, config.lora)
    rows = config.batch_size
    work = Work(prompts.prefix, prompts.mean, prompts.longest, round(prompts.right), rows)
    plan = Plan(config, place.dtype, place.device, sizes, None, model.vocab_size, work)
    parts = plan.micro_batches()
    responses = _exactly(rows * prompts.right)
    backward = responses + _exactly(parts * prompts.prefix + rows * prompts.mean)
    flops = (backward.times((8 if again else 6) * sizes.body) + responses.times(6 * sizes.head)).times(config.steps)
    step = {
        "prompts": rows,
        "response_tokens": responses,
        "forward_tokens": backward,
        "backward_tokens": backward,
        "micro_batches": parts,
    }
    return Training(data, prompts, plan, flops, step, prompts.notes)


# ---------------------------------------------------------------------------------------------------- the parts


def _prompts(config: TrainConfig | TeachConfig, data: Material, models: dict[str, Model], *, end: bool) -> Prompts:
    evaluation, model = config.evaluation, next(iter(models.values()))
    encoder = encoder_for(data, model, (*evaluation.final, evaluation.split), share=config.engine.share_prefix)
    lengths = encoder.lengths(data.rows)
    close = model.turn_end if end or not data.prompt.closes else None
    gold = {one: len(encoder.gold(one, close)) for one in data.prompt.golds(data.rows)}
    right = sum(gold[row.gold] for row in data.rows) / len(data.rows)
    on_the_way = -(-config.steps // evaluation.every) if evaluation.every else 0
    evaluated, responses = Range(0, 0), Range(0, 0)
    for split, often in [*((split, 1) for split in evaluation.final), (evaluation.split, on_the_way)]:
        rows = data.task.rows(split)[: evaluation.limit_of(split)]
        prompting = len(encoder.prefix) + sum(encoder.lengths(rows))
        longest = evaluation.max_new_tokens
        response = Range(min(right, longest), longest).times(len(rows) * often)
        responses += response
        evaluated += response + _exactly(often * prompting)
    if evaluation.probabilities:
        rows_of = [len(data.task.rows(split)[: evaluation.limit_of(split)]) for split in evaluation.final]
        labels = _exactly(sum(rows_of) * sum(gold.values()))
        responses, evaluated = responses + labels, evaluated + labels
    notes = check_fit(config, data, encoder, **models)
    return Prompts(len(encoder.prefix), sum(lengths) / len(lengths), max(lengths), right, evaluated, responses, notes)


def _teacher_prompts(read: Work) -> dict[str, float]:
    return {
        "teacher_prefix_tokens": read.prefix,
        "teacher_prompt_tokens_mean": read.mean,
        "teacher_prompt_tokens_longest": read.longest,
    }


def _memory_json(memory: Memory) -> dict[str, int]:
    return {**memory.by_purpose(), "all": memory.all}


def _cards(plan: Plan, processes: int, size: int) -> dict[str, Any]:
    def described(layout: Layout) -> dict[str, Any]:
        memory = layout.memory
        return {
            "cards": layout.cards,
            "parallel": layout.parallel or None,
            "teacher": layout.teacher or None,
            "verdict": layout.verdict(size),
            "memory_bytes": _memory_json(memory),
            "teacher_bytes": {**memory.teacher, "all": sum(memory.teacher.values())} if memory.teacher else None,
        }

    return {"bytes": size, "layouts": [described(layout) for layout in layouts(plan, processes)]}


def _time(flops: Range, sizes: Sizes, place: Placement, device_memory: int | None) -> dict[str, Any]:
    if device_memory is not None:
        return {"status": "n/a", "reason": "nothing is known here about the speed of that card"}
    if sizes.all < _TOO_SMALL:
        reason = "so small a network spends its time between the matrix products; try a few steps"
        return {"status": "n/a", "reason": reason}
    best, mean = _gemm_rates(place)
    seconds = [flops.low / best, flops.high / mean / _SLOWEST_SHARE]
    return {"gemm_flops_per_second": best, "gemm_flops_per_second_mean": mean, "seconds": seconds}


@cache
def _gemm_rates(place: Placement) -> tuple[float, float]:
    """FLOP/s of large matrix products, measured once for about a second: the fastest and the mean."""
    size = 1024
    left = torch.ones(_PROBE_TOKENS, size, dtype=place.dtype, device=place.device)
    right = torch.ones(size, 4 * size, dtype=place.dtype, device=place.device)

    def product() -> float:
        began = time.perf_counter()
        (left @ right)[0, 0].item()  # reading the value synchronizes the device
        return time.perf_counter() - began

    product()
    times = [product()]
    while sum(times) < _PROBE_SECONDS:
        times.append(product())
    work = 2 * left.numel() * right.shape[1]
    return work / min(times), work * len(times) / sum(times)


# ---------------------------------------------------------------------------------------------------- printing


def print_estimate(config: TrainConfig | TeachConfig, found: dict[str, Any], *, as_json: bool) -> None:
    """Print the settings as YAML that `gatespace` reads back, then the estimate as YAML comments."""
    if as_json:
        print_json({"config": dump_config(config), "estimate": found})
        return
    out = console()
    out.out(dump_yaml(config), end="")
    out.out("")
    lines = list(_lines(config, found))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        out.out(f"# {name:<{width}}  {text}".rstrip())


def _lines(config: TrainConfig | TeachConfig, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Estimate", "nothing was trained"
    yield "task", found["task"]
    passes = f"{config.steps} steps of {config.batch_size} are {found['epochs']:.2g} passes over them"
    yield "rows", f"{found['rows']}; {passes}"
    for whose in ("", "teacher_"):
        if (mean := found.get(f"{whose}prompt_tokens_mean")) is not None:
            shared, longest = found[f"{whose}prefix_tokens"], found[f"{whose}prompt_tokens_longest"]
            yield (
                f"{whose}prompt".replace("_", "'s "),
                f"{shared} tokens shared, {mean:.1f} of its own (longest {longest})",
            )
    yield "right response", f"{found['right_response_tokens_mean']:.1f} tokens"
    trained = found["trained_parameters"]
    part = "" if trained == found["parameters"] else f", {_number(trained)} trained"
    teacher = f"; teacher {_number(found['teacher_parameters'])}" if "teacher_parameters" in found else ""
    yield "parameters", f"{_number(found['parameters'])}{part}{teacher}; {found['precision']} on {found['device']}"
    for key, value in found["step"].items():
        cached = " (before the cache)" if key == "teacher_tokens_at_most" else ""
        yield f"step: {key.replace('_', ' ')}", f"{_span(value) if isinstance(value, list) else value}{cached}"
    yield "evaluation: tokens", _span(found["evaluation_tokens"])
    for key, value in found["flops"].items():
        yield f"{key}: FLOPs", f"{_span(value)} (2 forward and 4 backward per weight and token; no attention)"
    memory = {key.replace("_", " "): f"{value / 1e9:.2f}" for key, value in found["memory_bytes"].items()}
    whole = memory.pop("all")
    if "cards" in found:
        yield from ((f"memory: {key}", f"{size:>7} GB") for key, size in memory.items())
        yield "memory: at most", f"{whole:>7} GB of one process"
        yield from _card_lines(found["cards"])
    else:
        yield "memory", f"about {whole} GB at most: {', '.join(f'{key} {size}' for key, size in memory.items())}"
    yield "time", _time_text(found["time"])
    for note in found["notes"]:
        yield "note", note


def _card_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    size = f"{found['bytes'] / 1e9:.3g} GB"
    for layout in found["layouts"]:
        count, parallel, alone = layout["cards"], layout["parallel"], layout["teacher_bytes"]
        name = f"{count} × {size}{f', {parallel}' if parallel else ''}"
        where = {"beside": ", teacher beside the student", "own card": ", teacher on one of them", None: ""}
        whole = f"{layout['memory_bytes']['all'] / 1e9:.1f} GB"
        if alone:
            whole += f" for the student, {alone['all'] / 1e9:.1f} GB for the teacher"
        yield name + where[layout["teacher"]], f"{layout['verdict']}: {whole}"


def _time_text(found: dict[str, Any]) -> str:
    if "seconds" not in found:
        return f"{found['status']}: {found['reason']}"
    low, high = found["seconds"]
    rate = found["gemm_flops_per_second"] / 1e9
    return (
        f"{duration(low)} to {duration(high)}, an estimate: from short responses and all products at the {rate:.0f} "
        "GFLOP/s measured here just now, to the longest responses at a fifth of the mean rate"
    )


def _span(value: Sequence[float]) -> str:
    low, high = map(_number, value)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Format a number compactly, and exactly if it is small.

    Examples:
        >>> _number(937.0), _number(134515008), _number(2.5e15)
        ('937', '134.5 M', '2.5e+15')
    """
    if value < 100_000:
        return f"{value:.0f}"
    for power, unit in ((6, "M"), (9, "G"), (12, "T")):
        if value < 1000 * 10**power:
            return f"{value / 10**power:.4g} {unit}"
    return f"{value:.3g}"
