"""`gatespace distill`: from a table, a teacher and a student to a distilled model and a table of its gain."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import run_options as options

if TYPE_CHECKING:
    from gatespace.config import TrainConfig
    from gatespace.evaluation import Evaluation, Metrics
    from gatespace.models import Model
    from gatespace.tasks.guess import Guess
    from gatespace.training.setup import Material

STEPS, BATCH_SIZE, LR = 60, 24, 5e-5
"""As measured with SmolLM2-135M on emotion (docs/smollm2.md)."""
CHECKS, PATIENCE, CHECKED_ROWS = 6, 3, 200
"""Number of validation evaluations, patience among them, and rows of each."""
_MOST_TOKENS = 512
_SPARE_TOKENS = 8


def distill(
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", show_default=False, help="A .jsonl, .csv, .tsv or .parquet file, or a folder."),
    ],
    teacher: Annotated[
        str, typer.Option(metavar="MODEL", show_default=False, help="A model or run folder, smollm2, or a Hub name.")
    ],
    student: Annotated[
        str, typer.Option(metavar="MODEL", show_default=False, help="A model or run folder, smollm2, or a Hub name.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="The run; its model is DIR/model.")
    ],
    prompt: options.Prompt = None,
    answer: options.Answer = None,
    metric: options.Metric = None,
    gate: Annotated[str | None, typer.Option(metavar="POINT", show_default="G5", help="The gate.")] = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    lr: options.LearningRate = None,
    seed: options.Seed = None,
    device: options.Device = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default="longest reference answer", help="The longest response, in tokens."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default=False, help="Evaluate on the first N rows only.")
    ] = None,
    sets: options.Sets = None,
    plugins: options.Plugins = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Distil a teacher into a student on your own data, and report the gain.

    Reads the table, guesses what kind of task it is and says so, evaluates
    the teacher and the student, trains, evaluates again, and prints one
    table. It ends before training if the teacher is no better than the
    student on the validation rows. Training stops when validation has not
    improved three times in a row, and keeps the best weights. A killed
    command resumes. If the teacher is a run on the same file, the task is
    that of its run.

    \b
    gatespace distill rows.csv --teacher runs/teach --student smollm2 -o runs/small
    gatespace distill e2e.csv --prompt "Describe: {mr}" --answer ref \\
        --metric rouge_l --teacher big --student small -o runs/e2e

    To correct a wrong guess, use --prompt, --answer and --metric, or any
    setting: --set task.text.stop='["END"]'. The model, with its card, is
    in DIR/model.
    """
    from gatespace.cli.console import console, print_json, print_warnings
    from gatespace.cli.estimate import estimate
    from gatespace.cli.progress import RunProgress
    from gatespace.cli.training import question_rate, with_model_folders
    from gatespace.config import TrainConfig
    from gatespace.models.load import TINY
    from gatespace.plugins import load_plugins
    from gatespace.runs import RunFolder
    from gatespace.tasks.configured import teacher_prompt
    from gatespace.training.setup import material
    from gatespace.training.train import train

    load_plugins(plugins or ())
    guess = _task(data, teacher, prompt=prompt, answer=answer, metric=metric)
    own = {"lr": 3e-3 if student in TINY else LR, "steps": steps or STEPS}
    usual: dict[str, Any] = {
        "task": guess.task,
        "evaluation.every": max(1, own["steps"] // CHECKS),
        "evaluation.patience": PATIENCE,
        "checkpoint.every": 20,
        "checkpoint.select": "best",
    }
    flags: list[options.Option] = [
        *((f"--set {path}", path, value) for path, value in usual.items()),
        ("--teacher", "pair.teacher", teacher),
        ("--student", "pair.student", student),
        ("--gate", "objective.gate", gate or "G5"),
        ("--steps", "steps", own["steps"]),
        ("--batch-size", "batch_size", batch_size or BATCH_SIZE),
        ("--lr", "optimizer.lr", lr or own["lr"]),
        ("--seed", "seed", seed),
        ("--device", "engine.device", device),
        ("--limit", "evaluation.limit", limit or {"val": CHECKED_ROWS}),
        ("--output", "output", output),
    ]
    config = with_model_folders(options.load(TrainConfig, None, flags, sets or [], plugins))
    _check_student(config.pair.student_quantization)
    with RunProgress(quiet=quiet, job="distill") as progress:
        progress.note(guess.said)
        question_rate(config, progress)
        found = material(config.task, "distill")
        progress.note(found.task.describe())
        measured: dict[str, dict[str, Any]] = {}
        begun = time.monotonic()
        model = _open(config, "student", found, progress.note)
        _check_student(config.pair.student if getattr(model.network, "is_quantized", False) else None)
        config = _with_cap(config, found, model, max_new_tokens)
        RunFolder(output).expect(config)  # this and the estimate raise what training would, before the evaluations
        estimate(config, progress.note)
        start = _evaluate(model, found, config, "val", progress.generating)
        measured["student before"] = _measure(model, found, config, progress.generating)
        del model
        model = _open(config, "teacher", found, progress.note)
        shown = replace(found, prompt=teacher_prompt(config.teacher.prompt, found.prompt))
        _check_teacher(_evaluate(model, shown, config, "val", progress.generating).metrics, start.metrics)
        measured["teacher"] = _measure(model, shown, config, progress.generating)
        del model
        summary = train(config, progress)
        trained = config.model_copy(
            update={"pair": config.pair.model_copy(update={"student": str(output / "model"), "student_revision": None})}
        )
        after = _measure(_open(trained, "student", found, progress.note), found, config, progress.generating)
        after |= _result(summary["evaluation"]["test"])  # as in the run's own files
        measured["student after"] = after
    result = {
        "task": guess.said,
        "metric": found.task.metric,
        "models": {name: measured[name] for name in ("teacher", "student before", "student after")},
        "steps": {key: summary[key] for key in ("steps", "planned_steps", "chosen_step") if key in summary},
        "train_minutes": (RunFolder(output).seconds() or 0.0) / 60,  # even if an earlier command trained it
        "minutes": (time.monotonic() - begun) / 60,
        "model": str(output / "model"),
        "warnings": summary.get("warnings", []),
    }
    if as_json:
        print_json(result)
        return
    _print(console(), result)
    print_warnings(result["warnings"])


def _task(data: str, teacher: str, **given: str | None) -> Guess:
    """The task of the teacher's run if it is on the same file, so that no row it learned from is a prompt or tested on.

    Else a guess, with all training rows as prompts.
    """
    from gatespace.cli.found_model import model_folder, run_settings
    from gatespace.tasks.guess import Guess, guess_task
    from gatespace.tasks.read import path_of

    chosen = {name: value for name, value in given.items() if value is not None}
    theirs: Any = run_settings(model_folder(teacher)).get("task") or {}
    kind = "text" if theirs.get("text") else "table"
    own = theirs.get(kind) or {}
    if isinstance(own.get("source"), str) and path_of(own["source"]).resolve() == path_of(data).resolve():
        if kind == "text" or not chosen:
            return Guess(
                {**theirs, kind: {**own, **chosen}}, "the task of the teacher's run, which is on the same rows"
            )
        guess = guess_task(data, **chosen)
        parts = {"text": {**guess.task["text"], "carve": own["carve"], "carve_seed": own["carve_seed"]}}
        return Guess({**parts, "split": theirs["split"], "split_seed": theirs["split_seed"]}, guess.said)
    guess = guess_task(data, **chosen)
    return Guess({**guess.task, "split": None}, guess.said)


def _open(config: TrainConfig, role: str, data: Material, report: Callable[[str], None]) -> Model:
    from gatespace.training.setup import ModelSpec, open_model, placement

    place = placement(config.engine)
    spec = ModelSpec.of(config.pair, role, device=place.device, dtype=place.dtype)
    return open_model(spec, data.task, report)


def _with_cap(config: TrainConfig, data: Material, model: Model, cap: int | None) -> TrainConfig:
    """The configuration with responses capped at the longest gold response, unless a cap is set."""
    from gatespace.config import RolloutConfig
    from gatespace.models.encode import Encoder

    if cap is None and config.rollout.max_new_tokens != RolloutConfig().max_new_tokens:
        return config
    if cap is None:
        longest = Encoder(data.prompt, model.tokenizer, []).longest_gold(data.rows, model.turn_end)
        cap = min(longest + _SPARE_TOKENS, _MOST_TOKENS)
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"max_new_tokens": cap}),
            "evaluation": config.evaluation.model_copy(update={"max_new_tokens": cap}),
        }
    )


def _evaluate(
    model: Model, data: Material, config: TrainConfig, split: str, progress: Callable[[int, int], None]
) -> Evaluation:
    from gatespace.evaluation import evaluate

    return evaluate(model, data.task, data.prompt, config.evaluation, split=split, progress=progress)


def _check_student(quantized: str | None) -> None:
    """Raise if the student is quantised: by a setting, or in its folder."""
    from gatespace.errors import UsageError

    if quantized is not None:
        raise UsageError(
            "distill takes no quantised student",
            got=quantized,
            why="its run saves adapters alone, which gatespace does not load again for the last evaluation",
            instead="pair.lora: {} with a student that is not quantised, or `gatespace train`",
        )


def _check_teacher(teacher: Metrics, student: Metrics) -> None:
    """Raise unless the teacher knows the answer format and is better than the untrained student, on validation rows."""
    from gatespace.errors import RunError
    from gatespace.evaluation.metrics import with_interval
    from gatespace.training.warnings import NO_LABEL

    failures = 0 if teacher.labels is None else teacher.labels.parse_failures
    scores = [with_interval(one.score, one.count) for one in (teacher, student)]
    if teacher.labels is not None and failures >= NO_LABEL * teacher.count:
        what, seen = "the teacher does not give legal labels", f"{failures} of {teacher.count} answers without one; "
    elif teacher.score <= student.score:
        what, seen = "the teacher is no better than the student before training", ""
    else:
        return
    raise RunError(
        what,
        got=f"{seen}{teacher.metric} {scores[0]}, student {scores[1]}, on {teacher.count} validation rows (95 % CI)",
        why="there is nothing to distil: at best, a student becomes like its teacher",
        instead="teach it first (`gatespace teach`), or use a teacher that knows this task; `gatespace train` makes no "
        "such check",
    )


def _measure(model: Model, data: Material, config: TrainConfig, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Test metric with its interval, size and generation speed of a model."""
    begun = time.monotonic()
    found = _evaluate(model, data, config, "test", progress)
    seconds = time.monotonic() - begun
    parameters = [*model.network.parameters()]
    return {
        **_result(found.as_json()),
        "interval": _interval(found),
        "parameters": model.network.num_parameters(),  # counts packed 4-bit weights correctly
        "megabytes": sum(one.nbytes for one in parameters) / 1e6,
        "tokens_per_second": _tokens(model, data, found) / seconds,
    }


def _interval(found: Evaluation) -> tuple[float, float]:
    """95 % interval of the metric: Wilson's of an accuracy, normal over rows of a text score."""
    from statistics import NormalDist

    from gatespace.evaluation.metrics import CONFIDENCE, wilson

    metrics = found.metrics
    if metrics.metric == "accuracy":
        return wilson(metrics.score * metrics.count, metrics.count)
    if metrics.sd is None:
        return 0.0, 1.0
    reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * metrics.sd / metrics.count**0.5
    return max(0.0, metrics.score - reach), min(1.0, metrics.score + reach)


def _tokens(model: Model, data: Material, found: Evaluation) -> int:
    """Number of tokens in all responses."""
    raw = [row.raw for row in found.predictions]
    return sum(len(model.tokenizer.encode(text, add_special_tokens=False)) for text in raw)


def _result(evaluation: dict[str, Any]) -> dict[str, Any]:
    from gatespace.evaluation.metrics import metric_of

    metrics = evaluation["metrics"]
    return {"score": metric_of(metrics)[1], "rows": metrics["count"], "of": evaluation["available"]}


def _print(out: Any, result: dict[str, Any]) -> None:
    from gatespace.cli.console import table
    from gatespace.evaluation.metrics import with_interval

    columns: Sequence[str] = (f"test {result['metric']}, 95 % CI", "rows", "parameters, M", "MB", "tokens/s")
    shown = table("Distilled", "model", *columns, numbers=columns)
    for name, one in result["models"].items():
        numbers = (f"{one['parameters'] / 1e6:.1f}", f"{one['megabytes']:.0f}", f"{one['tokens_per_second']:.0f}")
        shown.add_row(name, with_interval(one["score"], one["rows"], one["interval"]), str(one["rows"]), *numbers)
    out.print(shown)
    done = result["steps"]
    if "chosen_step" in done:
        steps = f"{done['steps']} of {done['planned_steps']} steps"
        out.print(f"{steps}; the weights are those after step {done['chosen_step']}, the best on validation")
    out.print(f"{result['minutes']:.1f} minutes; training took {result['train_minutes']:.1f}")
    out.print(f"model  {result['model']}", soft_wrap=True)
