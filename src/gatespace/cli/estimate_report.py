"""The estimate of `--dry-run` in print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gatespace.cli.console import console, print_json
from gatespace.cli.progress import duration

if TYPE_CHECKING:
    from gatespace.config import TeachConfig, TrainConfig

_STEP = {
    "prompts": "prompts",
    "responses": "responses",
    "response_tokens": "tokens written",
    "student_forward_tokens": "student, tokens forward",
    "student_backward_tokens": "student, tokens backward",
    "forward_tokens": "tokens forward",
    "backward_tokens": "tokens backward",
    "teacher_tokens_at_most": "teacher, tokens at most",
    "micro_batches": "micro-batches",
}


def print_estimate(config: TrainConfig | TeachConfig, found: dict[str, Any], *, as_json: bool) -> None:
    """Print the settings as YAML that `gatespace` reads back, then the estimate as comments of it."""
    from gatespace.config import dump_config, dump_yaml

    if as_json:
        print_json({"config": dump_config(config), "estimate": found})
        return
    out = console()
    out.out(dump_yaml(config), end="")
    out.out("")
    width = max(len(name) for name, _ in _lines(config, found))
    for name, text in _lines(config, found):
        out.out(f"# {name:<{width}}  {text}".rstrip())


def _lines(config: TrainConfig | TeachConfig, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Estimate", "nothing was trained"
    yield "task", found["task"]
    yield (
        "rows",
        f"{found['rows']}; {config.steps} steps of {config.batch_size} are {found['epochs']:.2g} passes over them",
    )
    longest, mean = found["prompt_tokens_longest"], found["prompt_tokens_mean"]
    yield "prompt", f"{found['prefix_tokens']} tokens shared, {mean:.1f} of its own (longest {longest})"
    yield "right answer", f"{found['right_response_tokens_mean']:.1f} tokens"
    trained = found["trained_parameters"]
    part = "" if trained == found["parameters"] else f", {_number(trained)} trained"
    teacher = f"; teacher {_number(found['teacher_parameters'])}" if "teacher_parameters" in found else ""
    yield "parameters", f"{_number(found['parameters'])}{part}{teacher}; {found['precision']} on {found['device']}"
    for key, value in found["step"].items():
        cached = " (before the cache)" if key == "teacher_tokens_at_most" else ""
        yield f"step: {_STEP[key]}", f"{_span(value) if isinstance(value, list) else value}{cached}"
    yield "evaluation: tokens", _span(found["evaluation_tokens"])
    for key, value in found["flops"].items():
        yield f"{key}: FLOPs", f"{_span(value)} (2 forward and 4 backward per weight and token; no attention)"
    memory = found["memory_bytes"]
    parts = ", ".join(
        f"{key.replace('_', ' ')} {_gib(value)}" for key, value in memory.items() if key != "all" and value
    )
    yield "memory", f"about {_gib(memory['all'])} GiB: {parts}"
    yield "time", _time(found["time"])
    for note in found["notes"]:
        yield "note", note


def _time(found: dict[str, Any]) -> str:
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
    """Short, and exact where it is small.

    Example:
        >>> _number(937.0), _number(134515008), _number(2.5e15)
        ('937', '134.5 M', '2.5e+15')
    """
    if value < 100_000:
        return f"{value:.0f}"
    for power, unit in ((6, "M"), (9, "G"), (12, "T")):
        if value < 1000 * 10**power:
            return f"{value / 10**power:.4g} {unit}"
    return f"{value:.3g}"


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f}"
