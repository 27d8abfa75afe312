"""`--dry-run`: the settings of a run, its tokens per step, and its memory by purpose.

Models are loaded without their weights. Counts that depend only on the data are exact; those that depend on responses
are a range from the length of the gold responses to the maximum length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gatespace.cli.console import console, print_json
from gatespace.config import TeachConfig, TrainConfig, dump_config, dump_yaml
from gatespace.config.address import is_address
from gatespace.config.checking import checking
from gatespace.gating.configured import build_objective
from gatespace.models import Model
from gatespace.models.sizes import sizes_of
from gatespace.training.fit import check_fit, check_models
from gatespace.training.memory import micro_tokens, update_memory
from gatespace.training.setup import (
    Material,
    ModelSpec,
    encoder_for,
    load_shapes,
    material,
    placement,
    teacher_encoder_for,
)


def estimate(config: TrainConfig | TeachConfig, note: Callable[[str], None], *, processes: int = 1) -> dict[str, Any]:
    """The cost of a run, as numbers by name, after the checks that the run makes before its first step.

    Args:
        config: The run.
        note: Called with a message before slow operations.
        processes: Number of processes of the run.
    """
    place = placement(config.engine)
    data = material(config.task, "distill" if isinstance(config, TrainConfig) else "teacher")
    models, notes = _outlines(config, data, note)
    model, *teachers = models.values()
    splits = (*config.evaluation.final, config.evaluation.split)
    encoder = encoder_for(data, model, splits, share=checking().share_prefix)
    notes += check_fit(config, data, encoder, **models)
    lengths = encoder.lengths(data.rows)
    prefix, mean = len(encoder.prefix), sum(lengths) / len(lengths)
    ends = not isinstance(config, TrainConfig) or config.rollout.stop == "eos" or not data.prompt.closes
    gold = {text: len(encoder.gold(text, model.turn_end if ends else None)) for text in data.prompt.golds(data.rows)}
    right = sum(gold[row.gold] for row in data.rows) / len(data.rows)

    rows, prompts, shortest, longest = config.batch_size, config.batch_size, right, right
    more: dict[str, Any] = {}
    lora = None
    if isinstance(config, TrainConfig):
        rollout, lora = config.rollout, config.pair.lora
        rows *= rollout.per_prompt
        prompts = prompts if checking().share_prompt else rows
        shortest, longest = min(right, rollout.max_new_tokens), rollout.max_new_tokens
        others = {name: teacher for name, teacher in models.items() if name != "student"}
        teacher_encoder = teacher_encoder_for(config, data, model, others)
        read = lengths if teacher_encoder is None else teacher_encoder.lengths(data.rows)
        teacher_mean = sum(read) / len(read)
        if teacher_encoder is not None:
            more = {"teacher_prompt_tokens_mean": teacher_mean, "teacher_prompt_tokens_longest": max(read)}
    else:
        lora = config.lora
    sizes = sizes_of(model, lora)
    scorers = list({teacher.source: sizes_of(teacher) for teacher in teachers}.values())  # each is loaded once
    row = prompts / rows * mean + longest
    step = {
        "prompts": config.batch_size,
        "responses": rows,
        "prompt_tokens": prefix + prompts * mean,
        "response_tokens": [rows * shortest, rows * longest],
        "micro_batches": -(-rows // (processes * max(1, int(micro_tokens(sizes, config.engine, prefix) // row)))),
    }
    if isinstance(config, TrainConfig):
        if set(config.rollout.source.shares()) == {"gold"}:
            step["response_tokens"] = [rows * shortest, rows * shortest]
        step["teacher_tokens_at_most"] = rows * (teacher_mean + longest)
    memory = update_memory(
        config,
        sizes,
        scorers,
        itemsize=place.dtype.itemsize,
        device=place.device,
        vocab_size=model.vocab_size,
        prefix=prefix,
        longest=max(lengths) + round(longest),
        tokens=rows * row / processes,
        response_tokens=rows * longest / processes,
        shards=processes if config.engine.parallel == "fsdp" else 1,
    )
    return {
        "task": data.task.describe(),
        "rows": len(data.rows),
        "epochs": config.steps * config.batch_size / len(data.rows),
        "prefix_tokens": prefix,
        "prompt_tokens_mean": mean,
        "prompt_tokens_longest": max(lengths),
        **more,
        "right_response_tokens_mean": right,
        "parameters": sizes.all,
        "trained_parameters": sizes.trained,
        **({"teacher_parameters": sum(teacher.all for teacher in scorers)} if scorers else {}),
        "device": place.device,
        "precision": place.precision,
        "step": step,
        "memory_bytes": memory,
        "notes": notes,
    }


def _outlines(
    config: TrainConfig | TeachConfig, data: Material, note: Callable[[str], None]
) -> tuple[dict[str, Model], list[str]]:
    """The models in this process by setting, the trained one first, without weights; and notes about them."""

    def outline(setting: str, role: str, name: str, revision: str | None, trusted: bool) -> Model:
        return load_shapes(
            ModelSpec(name, setting, role, revision=revision, trust_remote_code=trusted), data.task, note
        )

    if not isinstance(config, TrainConfig):
        trusted = config.trust_remote_code
        return {"model": outline("model", "teacher", config.model, config.revision, trusted)}, []
    build_objective(config.objective, run=config)
    pair, trusted = config.pair, config.pair.trust_remote_code
    name, revision, whose = pair.model("student")
    models = {"student": outline("pair.student", whose, name, revision, trusted)}
    notes: list[str] = []
    for setting, teacher in pair.scorers().items():
        if is_address(teacher):
            # The service itself checks that its model has the student's vocabulary.
            notes.append(f"the teacher at {teacher} was not contacted: its tokens and memory are not counted")
            continue
        name, revision, whose = pair.alone(setting).model("teacher")
        models[setting] = outline(f"pair.{setting}", whose, name, revision, trusted)
        notes += check_models(config, models["student"], models[setting]).notes
    return models, notes


def print_estimate(config: TrainConfig | TeachConfig, cost: dict[str, Any], *, as_json: bool) -> None:
    """Print the settings as YAML that `gatespace` reads back, then the estimate as YAML comments."""
    if as_json:
        print_json({"config": dump_config(config), "estimate": cost})
        return
    out = console()
    out.out(dump_yaml(config), end="")
    out.out("")
    lines = list(_lines(config, cost))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        out.out(f"# {name:<{width}}  {text}".rstrip())


def _lines(config: TrainConfig | TeachConfig, cost: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Estimate", "nothing was trained"
    yield "task", cost["task"]
    passes = f"{config.steps} steps of {config.batch_size} are {cost['epochs']:.2g} passes over them"
    yield "rows", f"{cost['rows']}; {passes}"
    own = f"{cost['prompt_tokens_mean']:.1f} of its own (longest {cost['prompt_tokens_longest']})"
    yield "prompt", f"{cost['prefix_tokens']} tokens shared, {own}"
    if "teacher_prompt_tokens_mean" in cost:
        longest = cost["teacher_prompt_tokens_longest"]
        yield "teacher's prompt", f"{cost['teacher_prompt_tokens_mean']:.1f} tokens of its own (longest {longest})"
    yield "right response", f"{cost['right_response_tokens_mean']:.1f} tokens"
    trained = cost["trained_parameters"]
    part = "" if trained == cost["parameters"] else f", {trained:,} trained"
    teacher = f"; teacher {cost['teacher_parameters']:,}" if "teacher_parameters" in cost else ""
    yield "parameters", f"{cost['parameters']:,}{part}{teacher}; {cost['precision']} on {cost['device']}"
    for key, value in cost["step"].items():
        low, high = value if isinstance(value, list) else (value, value)
        text = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
        yield f"step: {key.replace('_', ' ')}", text + " (before the cache)" * (key == "teacher_tokens_at_most")
    for key, size in cost["memory_bytes"].items():
        yield f"memory: {key.replace('_', ' ')}", f"{size / 1e9:>7.2f} GB"
    for note in cost["notes"]:
        yield "note", note
