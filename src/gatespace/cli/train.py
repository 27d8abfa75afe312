"""`gatespace train`: distil a teacher into a student."""

from __future__ import annotations

from typing import Annotated

import typer

from gatespace.cli import run_options as options


def train(
    config: options.File = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default=False,
            help="The model that scores: a folder (of `teach`), a Hub name, or the address of a service.",
        ),
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", show_default=False, help="The model that learns: a folder, smollm2, tiny, or a Hub name."
        ),
    ] = None,
    task: options.Task = None,
    root: options.Root = None,
    brief: options.Brief = None,
    gate: Annotated[
        str | None,
        typer.Option(
            metavar="POINT", show_default=False, help="G5, 4,0,-1,0 or static:0.388; see `gatespace gate --help`."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="A published objective in place of a gate, e.g. todi."),
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
    """Distil a teacher into a student, on the student's own responses.

    The student responds to prompts, the teacher scores every token of the
    responses, the gate mixes forward and reverse KL, and the student learns.
    Both models need the same tokenizer, unless objective.support is over
    labels. A run that was stopped resumes with the same command.

    \b
    gatespace train --teacher runs/teach --gate G5
    gatespace train --teacher runs/teach --gate static:0.388 --dry-run
    gatespace train run.yaml --seed 2 --output runs/seed-2
    gatespace train --settings         every setting of a file or of --set

    Exit code 0: trained; 1: the run failed; 2: wrong usage or settings;
    3: ended by an alarm (alarms.stop_on); 130 or 143: stopped by Ctrl-C or
    SIGTERM. With --json, standard output is the summary alone.
    """
    from gatespace.cli.training import execute, list_settings
    from gatespace.config import TrainConfig

    if settings:
        list_settings(TrainConfig, as_json=as_json)
        return
    flags = [
        ("--task", "task.name", task),
        ("--root", "task.root", root),
        ("--brief", "task.brief", brief),
        ("--teacher", "pair.teacher", teacher),
        ("--student", "pair.student", student),
        ("--gate", "objective.gate", gate),
        ("--method", "objective.method", method),
        ("--steps", "steps", steps),
        ("--batch-size", "batch_size", batch_size),
        ("--lr", "optimizer.lr", lr),
        ("--seed", "seed", seed),
        ("--device", "engine.device", device),
        ("--output", "output", output),
    ]
    chosen = options.load(
        TrainConfig,
        config,
        flags,
        sets or [],
        plugins,
        trust_plugins=trust_plugins,
        trust_remote_code=trust_remote_code,
    )
    execute(chosen, dry_run=dry_run, quiet=quiet, as_json=as_json, processes=processes)
