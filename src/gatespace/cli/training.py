"""Shared part of `teach` and `train`: estimate or run a configuration, and print the result."""

from __future__ import annotations

import shlex
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import typer

from gatespace.cli.console import console, print_json, print_warnings, stopped
from gatespace.cli.evaluate import curve, results_table
from gatespace.cli.found_model import model_folder, run_settings
from gatespace.cli.progress import RunProgress
from gatespace.cli.run_options import task_command
from gatespace.config import TeachConfig, TrainConfig, describe, dump_config, dump_yaml
from gatespace.config.base import Section
from gatespace.evaluation.metrics import metric_of
from gatespace.plugins import provider
from gatespace.runs import RunFolder
from gatespace.training.processes import is_first
from gatespace.training.warnings import of_rate, of_teacher, start_of


def execute(
    config: TrainConfig | TeachConfig,
    *,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    processes: int = 1,
) -> None:
    """Run `config`, or with `dry_run` print its estimated cost."""
    config = with_model_folders(config)
    if dry_run:
        from gatespace.cli.estimate import estimate, print_estimate

        with RunProgress(quiet=quiet, job="estimate") as progress:
            question_rate(config, progress)
            cost = estimate(config, progress.note, processes=processes)
        print_estimate(config, cost, as_json=as_json)
        return
    if processes > 1:
        _launch(config, processes, quiet=quiet, as_json=as_json)
        return

    from gatespace.training.train import teach, train

    folder = RunFolder(config.output)
    try:
        with RunProgress(quiet=quiet, job=_command(config)) as progress:
            question_rate(config, progress)
            if isinstance(config, TrainConfig):
                for note in _teacher_notes(config):
                    progress.note(note)
                summary = train(config, progress)
            else:
                summary = teach(config, progress)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(stopped(interrupt, f": {_how_to_resume(folder)}" if is_first() else "")) from None
    if is_first():
        _report(config, folder, summary, as_json=as_json)


def question_rate(config: TrainConfig | TeachConfig, progress: RunProgress) -> None:
    """Warn before training if the learning rate cannot be meant."""
    if huge := of_rate(config.optimizer.lr):
        progress.warn(str(huge))


def _command(config: TrainConfig | TeachConfig) -> str:
    return "train" if isinstance(config, TrainConfig) else "teach"


def _launch(config: TrainConfig | TeachConfig, processes: int, *, quiet: bool, as_json: bool) -> None:
    """Run the job in several processes on this machine."""
    launch = provider("processes", "launch")
    with tempfile.TemporaryDirectory(prefix="gatespace-") as place:
        file = Path(place) / "run.yaml"
        file.write_text(dump_yaml(config), "utf-8")
        flags = ["--trust-plugins", "--trust-remote-code"]  # as the user allowed
        flags += [flag for flag, wanted in (("--quiet", quiet), ("--json", as_json)) if wanted]
        if code := launch(processes, [_command(config), str(file), *flags]):
            raise typer.Exit(code)


def _report(config: TrainConfig | TeachConfig, folder: RunFolder, summary: dict[str, Any], *, as_json: bool) -> None:
    """Print the result of a run, and the next command."""
    model = None if summary["model"] is None else str(folder.model)
    after = None if model is None else _next_command(config, folder)
    on_the_way = folder.log("evaluations")
    warnings = [*_about_teacher(config, summary, on_the_way), *summary.get("warnings", ())]
    if as_json:
        more = {"evaluations": on_the_way, "warnings": warnings, "output": str(folder), "model": model, "next": after}
        print_json({**summary, **more})
        return
    out = console()
    if summary["evaluation"]:
        out.print(results_table(summary["evaluation"], on_the_way))
    chosen = summary.get("chosen_step", summary["steps"])
    looked = any(record["step"] == chosen for record in on_the_way)
    if line := curve({} if looked else summary["evaluation"], on_the_way, chosen):
        out.print(line, soft_wrap=True)
    if "planned_steps" in summary:
        out.print(
            f"weights after step {chosen}; ended after step {summary['steps']} of {summary['planned_steps']}",
            soft_wrap=True,
        )
    run = summary.get("run")
    if run and run["lam_mean"] is not None:
        saturated = f"{run['lam_saturated']:.1%} of them saturated"
        weighed = run["lam_rkl_mean"]
        lam = f"E[λ] {run['lam_mean']:.4f}" + ("" if weighed is None else f" (weighted by reverse KL {weighed:.4f})")
        of = f"over {run['tokens']:.0f} tokens of {run['rows']} responses"
        out.print(f"{lam} {of}, {saturated}", soft_wrap=True)
    for name, one in (run or {}).get("teachers", {}).items():
        lam = f"E[λ] {one['lam_mean']:.4f}, " if "lam_mean" in one else ""
        divergences = f"forward KL {one['forward_kl']:.4f}, reverse KL {one['reverse_kl']:.4f}"
        of = f"over {one['tokens']:.0f} tokens of {one['rows']} responses"
        out.print(f"teacher {name}: {lam}{divergences} {of}", soft_wrap=True)
    print_warnings(warnings)
    if model is not None:
        out.print(f"model  {model}", soft_wrap=True)
        out.print(f"next   {after}", soft_wrap=True)


def _about_teacher(
    config: TrainConfig | TeachConfig, summary: dict[str, Any], on_the_way: list[dict[str, Any]]
) -> list[str]:
    """Warn if the teacher is not better than the initial student, if its own run was evaluated on the same rows."""
    if not isinstance(config, TrainConfig) or config.pair.teacher is None:
        return []
    teacher = RunFolder(Path(config.pair.teacher).parent)
    theirs = ((teacher.summary() if teacher.exists else None) or {}).get("evaluation", {})
    for split, before in start_of(on_the_way).items():
        ours, known = summary["evaluation"].get(split), theirs.get(split)
        same = ours and known and all(ours[key] == known[key] for key in ("task_digest", "available"))
        if same and ours["metrics"]["count"] == known["metrics"]["count"]:
            name, score = metric_of(known["metrics"])
            return [str(one) for one in of_teacher(split, score, before.accuracy, name)]
    return []


def _next_command(config: TrainConfig | TeachConfig, folder: RunFolder) -> str:
    """The command to suggest after a run."""
    model = str(_short(folder.model))
    plugins = [word for plugin in config.plugins for word in ("--plugin", plugin)]
    if isinstance(config, TrainConfig):
        predict = shlex.join(["gatespace", "predict", model, *plugins])
        return f"{predict} < texts.txt" if config.task.text is None else f"{predict} rows.jsonl"
    words = ["gatespace", "train", "--teacher", model]
    if config.model != "smollm2":
        words += ["--student", config.model]
    from gatespace.models.load import TINY

    # The default learning rate is the paper's, for larger models.
    learning = ["--lr", f"{config.optimizer.lr / 2:g}"]
    if config.model in TINY:
        learning = ["--lr", "0.003", "--batch-size", "24"]
    if config.task.text is not None:
        cap = config.evaluation.max_new_tokens
        learning += ["--set", f"rollout.max_new_tokens={cap}", "--set", f"evaluation.max_new_tokens={cap}"]
    elif config.model in TINY:
        learning += ["--set", "rollout.max_new_tokens=8"]
    return shlex.join([*words, *task_command(config.task), *learning, *plugins])


def list_settings(cls: type[Section], *, as_json: bool) -> None:
    """Print every setting of a configuration with its type, default and description."""
    settings = describe(cls)
    if as_json:
        print_json([setting._asdict() for setting in settings])
        return
    from rich.text import Text

    out = console()
    for setting in settings:
        heading = Text.assemble((setting.path, "bold"), f" = {setting.default}", (f"   {setting.type}", "dim"))
        out.print(heading, soft_wrap=True)
        out.print(textwrap.fill(setting.doc, out.width, initial_indent="    ", subsequent_indent="    "))


def with_model_folders(config: Any) -> Any:
    """The configuration with run folders replaced by their model folders."""
    if isinstance(config, TrainConfig):
        pair = config.pair
        changed: dict[str, Any] = {"student": model_folder(pair.student)}
        changed["teacher"] = None if pair.teacher is None else model_folder(pair.teacher)
        changed["teachers"] = pair.teachers and {name: model_folder(model) for name, model in pair.teachers.items()}
        return config.model_copy(update={"pair": pair.model_copy(update=changed)})
    return config.model_copy(update={"model": model_folder(config.model)})


def _teacher_notes(config: TrainConfig) -> list[str]:
    """Notes on how a teacher's task differs from this run's, or that it may have been trained on this run's rows."""
    named = config.pair.teachers is not None
    return [
        f"{scorer}: {note}" if named else note
        for scorer, model in config.pair.scorers().items()
        for note in _notes_of(config, model)
    ]


def _notes_of(config: TrainConfig, teacher: str) -> list[str]:
    theirs, ours = run_settings(teacher).get("task"), dump_config(config.task)
    if not isinstance(theirs, dict):
        return []
    for task in (theirs, ours):  # a teacher's own task does not depend on how rows are assigned to teachers
        for kind in ("table", "text"):
            (task.get(kind) or {}).pop("teacher_column", None)
    notes = []
    if any(theirs.get(key) != ours[key] for key in ("name", "table", "text")):
        notes.append(f"the teacher was made for {theirs.get('name') or 'other data'}, which is not this run's task")
    elif [theirs.get(key) for key in ("split", "split_seed")] != [ours["split"], ours["split_seed"]]:
        notes.append("task.split is not the teacher's: it may have learned from rows that this run distils on")
    for key in ("brief", "prefill"):
        if key in theirs and theirs[key] != ours[key]:
            notes.append(f"the teacher was made with task.{key} {theirs[key]!r}, and this run has {ours[key]!r}")
    return notes


def _how_to_resume(folder: RunFolder) -> str:
    steps = folder.checkpoint_steps()
    if not steps:
        return "there is no checkpoint yet; the same command starts again"
    return f"the same command resumes from step {max(steps)}"


def _short(folder: Path) -> Path:
    """The path relative to the working directory, if possible."""
    try:
        return folder.relative_to(Path.cwd())
    except ValueError:
        return folder
