"""`gatespace teach`: train a teacher by fine-tuning a model on a task's labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gatespace.cli import run_options as options


def teach(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", show_default=False, help="A table of your data, or a .yaml file of settings."),
    ] = None,
    task: options.Task = None,
    prompt: options.Prompt = None,
    answer: options.Answer = None,
    metric: options.Metric = None,
    root: options.Root = None,
    brief: options.Brief = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", show_default=False, help="What to start from: smollm2, tiny, a folder, or a Hub name."
        ),
    ] = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    lr: options.LearningRate = None,
    seed: options.Seed = None,
    device: options.Device = None,
    output: options.Output = None,
    sets: options.Sets = None,
    plugins: options.Plugins = None,
    trust_plugins: options.TrustPlugins = False,
    trust_remote_code: options.TrustRemoteCode = False,
    processes: options.Processes = 1,
    settings: options.ListSettings = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Make a teacher: fine-tune a model on the right labels or responses.

    The data is a table, whose task is guessed and said, or a named task.
    Only the teacher's share of the training rows is used, so that the texts
    of a later `gatespace train` are new to it. A run that was stopped resumes
    with the same command.

    \b
    gatespace teach rows.csv --output runs/teach
    gatespace teach e2e.csv --prompt "Describe: {mr}" --answer ref
    gatespace teach --task tweeteval/emotion --output runs/teach
    gatespace teach --task synthetic --model tiny --brief --lr 0.003
    gatespace teach teach.yaml --steps 200 --dry-run
    gatespace teach --settings         every setting of a file or of --set

    Exit code 0: trained; 1: the run failed; 2: wrong usage or settings;
    130 or 143: stopped by Ctrl-C or SIGTERM. With --json, standard output is
    the summary alone.
    """
    from gatespace.cli.progress import RunProgress
    from gatespace.cli.training import execute, list_settings
    from gatespace.config import TeachConfig
    from gatespace.errors import UsageError
    from gatespace.tasks.guess import guess_task
    from gatespace.tasks.read import FORMATS

    if settings:
        list_settings(TeachConfig, as_json=as_json)
        return
    flags: list[options.Option] = []
    guessed = {"prompt": prompt, "answer": answer, "metric": metric}
    if file is not None and (file.is_dir() or file.suffix.lower() in FORMATS):
        if task is not None:
            raise UsageError("the data is a table or --task, not both", got=f"{file} and --task {task}")
        guess = guess_task(str(file), **guessed)
        RunProgress(quiet=quiet).note(guess.said)
        flags, file = [("FILE", "task", guess.task)], None
    elif any(guessed.values()):
        raise UsageError("--prompt, --answer and --metric are for a table", instead="gatespace teach rows.csv …")
    flags += [
        ("--task", "task.name", task),
        ("--root", "task.root", root),
        ("--brief", "task.brief", brief),
        ("--model", "model", model),
        ("--steps", "steps", steps),
        ("--batch-size", "batch_size", batch_size),
        ("--lr", "optimizer.lr", lr),
        ("--seed", "seed", seed),
        ("--device", "engine.device", device),
        ("--output", "output", output),
    ]
    trusted = {"trust_plugins": trust_plugins, "trust_remote_code": trust_remote_code}
    chosen = options.load(TeachConfig, file, flags, sets or [], plugins, **trusted)
    execute(chosen, dry_run=dry_run, quiet=quiet, as_json=as_json, processes=processes)
