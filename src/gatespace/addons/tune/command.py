"""`gatespace tune`: the best gate of a study, and whether it is worth having."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import run_options as options
from gatespace.cli import study_file
from gatespace.cli.console import console, print_json, stopped
from gatespace.errors import RunError, UsageError
from gatespace.plugins import provider

if TYPE_CHECKING:
    from gatespace.addons.tune.search import Spec
    from gatespace.config import StudyConfig
    from gatespace.study.engines import Engine, EngineSpec

Source = Annotated[
    str,
    typer.Argument(
        metavar="STUDY", show_default=False, help="A shipped study, a study file, or a file for `gatespace train`."
    ),
]


def tune(
    study: Source,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", show_default=False, help="The search's folder; else tunes/NAME."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME|STEPS", show_default=False, help="Of search and verdict: 2h, 30min, 5000steps."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print candidates, rungs and the largest cost.")] = False,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default=False, help="Runs at once; else as the study says.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="CPU threads of each run; else cores / workers."),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="local processes, or ray, or one of another package.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", show_default=False, help="Of the engine's cluster, e.g. auto.")
    ] = None,
    sets: study_file.Sets = None,
    plugins: options.Plugins = None,
    trust_plugins: study_file.TrustPlugins = False,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Search for the gate of a study on validation, and judge it on fresh seeds.

    Constants, points of the family, published methods and proposals of Optuna
    compete by successive halving; the best gate is then trained at seeds that
    had no part in the choice, beside its static twin, λ = 0.5, the best
    constant and the best published method. Test is read for that alone.
    A search that was killed resumes with the same command, and ends with the
    same trials and verdict.

    \b
    gatespace tune demo --budget 10min
    gatespace tune my.yaml --dry-run
    gatespace tune my.yaml --set tune.proposals=40 --workers 2

    Exit code 0: there is a verdict; 1: runs failed; 2: a mistake in the call.
    """
    from gatespace.addons.tune.folder import TuneFolder
    from gatespace.addons.tune.proposals import require_optuna
    from gatespace.addons.tune.search import Spec
    from gatespace.addons.tune.settings import NO_BUDGET, Budget, TuneConfig
    from gatespace.config import parse_config

    if engine == "local" and address is not None:
        raise UsageError("--address is for a cluster", got=address, instead="with --engine ray")
    allowed = NO_BUDGET if budget is None else Budget.parse(budget)
    require_optuna()
    config = _load(study, sets or [], plugins, trust_plugins)
    folder = TuneFolder(output or config.output or Path("tunes") / config.name)
    tuned = parse_config(TuneConfig, config.tune, where=f"{config.name}: tune")
    count = workers or config.workers
    spec = Spec.of(config, tuned, folder, workers=count, budget=allowed, threads=threads)
    if dry_run:
        _dry_run(spec, as_json=as_json)
        return
    try:
        found, verdict = _run(spec, engine, address, quiet=quiet)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(stopped(interrupt, "; the same command resumes")) from None
    from gatespace.addons.tune import page
    from gatespace.files import atomic_write

    page.write_page(found, verdict)
    told = page.summary(found, verdict)
    atomic_write(folder.path / "verdict.json", json.dumps(told, indent=2) + "\n")
    if as_json:
        print_json({**told, "page": str(folder.page)})
        return
    out = console()
    out.print(verdict.sentence, style="bold", soft_wrap=True)
    for line in (*page.notes(found, verdict), *page.paste(verdict).splitlines(), f"page: {folder.page}"):
        out.print(line, soft_wrap=True)


def _load(study: str, sets: list[str], plugins: list[str] | None, trust_plugins: bool) -> StudyConfig:
    """The study: shipped, a file, or made of a file for `gatespace train`."""
    from gatespace.addons.tune.settings import study_of_train_file
    from gatespace.config.text import read_yaml

    path = Path(study).expanduser()
    if path.is_file():
        try:
            found = read_yaml(path.read_text(encoding="utf-8-sig"), where=study)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{study} cannot be read", why=str(error)) from None
        if isinstance(found, dict) and "tasks" not in found and {"pair", "task", "objective"} & found.keys():
            return study_file.finished(
                study_of_train_file(path, sets), path.parent, plugins=plugins, trust_plugins=trust_plugins
            )
    return study_file.load_study(study, sets, plugins=plugins, trust_plugins=trust_plugins)


def _run(spec: Spec, engine: str, address: str | None, *, quiet: bool) -> tuple[Any, Any]:
    """Search and verdict."""
    from dataclasses import replace

    from gatespace.addons.tune.jobs import perform
    from gatespace.addons.tune.search import Search
    from gatespace.addons.tune.verdict import judge, verdict_study, without_gate
    from gatespace.cli.study_view import StudyView
    from gatespace.files import atomic_write
    from gatespace.report.page import build_report
    from gatespace.study.engines import EngineSpec, LocalEngine
    from gatespace.study.outlook import check_job
    from gatespace.study.results import look_at
    from gatespace.study.runner import run_study

    open_engine = _local_engine if engine == "local" else provider("engines", engine, kind="engine", known=["local"])
    folder, count = spec.folder, spec.workers
    usual = None if address is None else max(1, int(spec.study.resources.cpus or 1))
    chosen = folder.threads_of_runs(spec.study, workers=count, threads=spec.threads, usual=usual)
    spec = replace(spec, threads=chosen)
    with StudyView(count, quiet=quiet) as view:
        lines = _Lines(view.say)
        with closing(open_engine(EngineSpec(spec.study, folder, count, chosen, address, perform, view.note))) as opened:
            with folder.claim():
                atomic_write(folder.store_file, json.dumps({"threads": chosen, "workers": count}) + "\n")
                if isinstance(opened, LocalEngine) and not folder.records_file.exists():
                    job = check_job(folder, spec.study)
                    for note in opened.check(job) if job is not None else ():
                        view.note(note)
                found = Search(spec, opened, watch=lines.show, note=view.note).go()
            if found.winner is None:
                return found, without_gate(found)
            config = verdict_study(found)
            folder.begin(config, workers=count, threads=chosen)
            outlook = run_study(
                folder.config(), folder, opened, threads=chosen, retry=True, watch=view.update, note=view.note
            )
    if errors := outlook.errors():
        name, error = next(iter(errors.items()))
        raise RunError(f"{len(errors)} runs of the verdict failed", got=f"{name}: {error}", instead="the same command")
    verdict = judge(found, look_at(folder.path))
    build_report(folder.path, png=False)
    return found, verdict


def _local_engine(spec: EngineSpec) -> Engine:
    from gatespace.study.engines import LocalEngine

    assert spec.perform is not None
    retries = spec.config.resources.retries
    return LocalEngine(spec.workers, spec.threads, spec.perform, retries=retries, note=spec.note)


class _Lines:
    """A line per run that has ended, with the time that is left at most."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._began, self._steps = say, time.monotonic(), 0

    def show(self, title: str, steps: int, left: int) -> None:
        """A run of so many steps has ended; so many are left at most, the verdict's included."""
        from gatespace.cli.progress import duration

        self._steps += steps
        if not self._steps:
            self._began = time.monotonic()  # models and warm-up say nothing about the steps
            self._say(title)
            return
        seconds = (time.monotonic() - self._began) / self._steps * max(left, 0)
        self._say(f"{title} · at most {duration(seconds)} left")


def _dry_run(spec: Spec, *, as_json: bool) -> None:
    """Print what a search would do."""
    proposals = spec.config.proposals
    fixed, costs, check = spec.fixed(), spec.costs(proposals), spec.verdict_cost()
    steps = sum(cost.steps for cost in costs)
    grid = spec.grid_steps(costs[0].candidates)
    told: dict[str, Any] = {
        "task": spec.task,
        "candidates": [one.label for one in fixed],
        "proposals": proposals,
        "rungs": [
            {
                "steps": rung.steps,
                "seeds": rung.seeds,
                "candidates_at_most": cost.candidates,
                "steps_at_most": cost.steps,
            }
            for rung, cost in zip(spec.rungs, costs, strict=True)
        ],
        "verdict": {"arms": check.candidates, "seeds": list(spec.config.fresh), "steps_at_most": check.steps},
        "steps_at_most": steps + check.steps,
        "grid_steps": grid + check.steps,
    }
    if as_json:
        print_json(told)
        return
    out = console()
    out.print(f"{spec.study.name}: a gate for {spec.task}", style="bold", soft_wrap=True)
    out.print(f"candidates: {', '.join(told['candidates'])}; up to {proposals} proposals", soft_wrap=True)
    for place, (rung, cost) in enumerate(zip(spec.rungs, costs, strict=True), start=1):
        out.print(
            f"rung {place}: {rung.steps} steps at {rung.seeds} of the seeds, at most {cost.candidates} candidates and "
            f"{cost.steps} further steps",
            soft_wrap=True,
        )
    out.print(f"verdict: {check.candidates} arms × {len(spec.config.fresh)} fresh seeds, {check.steps} steps")
    out.print(
        f"in all at most {steps + check.steps} training steps; a full grid and the same verdict take "
        f"{grid + check.steps}",
        soft_wrap=True,
    )
