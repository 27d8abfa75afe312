"""`gatespace tune`: find the best gate of a study, and judge whether it is worth having."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gatespace.cli import engine as engines
from gatespace.cli import run_options as options
from gatespace.cli import study_file
from gatespace.cli.console import console, print_json, stopped
from gatespace.errors import RunError

if TYPE_CHECKING:
    from gatespace.addons.tune.plan import Spec
    from gatespace.addons.tune.search import Search
    from gatespace.addons.tune.verdict import Verdict
    from gatespace.config import StudyConfig

Source = Annotated[
    str,
    typer.Argument(
        metavar="STUDY", show_default=False, help="A shipped study, a study file, or a file for `gatespace train`."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", show_default=False, help="The search's folder; else tunes/NAME."),
]
LimitedBy = Annotated[
    str | None,
    typer.Option(
        "--budget", metavar="TIME|STEPS", show_default=False, help="For search and verdict: 2h, 30min, 5000steps."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print candidates, rungs and the largest cost; train nothing.")]


def tune(
    study: Source,
    output: Output = None,
    budget: LimitedBy = None,
    dry_run: DryRun = False,
    workers: engines.Workers = None,
    threads: engines.Threads = None,
    engine: engines.EngineName = "local",
    address: engines.Address = None,
    sets: study_file.Sets = None,
    plugins: options.Plugins = None,
    trust_plugins: options.TrustPlugins = False,
    trust_remote_code: options.TrustRemoteCode = False,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Search for the best gate on validation, then judge it on fresh seeds.

    Constant λ, named gates, published methods and gates that Optuna
    proposes compete by successive halving. The best gate is then trained
    at seeds that had no part in the choice, along with its two static
    twins, λ = 0.5, the best constant and the best published method, and
    compared on test, which nothing else reads. The verdict says what to
    use: the simplest candidate that nothing was shown to beat. A search
    that was stopped or killed resumes with the same command.

    \b
    gatespace tune demo --dry-run
    gatespace tune demo --budget 10min
    gatespace tune my.yaml --set tune.proposals=40 --workers 2

    Exit code 0: there is a verdict; 1: runs failed; 2: invalid arguments.
    """
    from gatespace.addons.tune.folder import TuneFolder
    from gatespace.addons.tune.plan import Spec
    from gatespace.addons.tune.proposals import require_optuna
    from gatespace.addons.tune.settings import TuneConfig, parse_budget
    from gatespace.config import parse_config

    engines.engine_opener(engine, address)  # raises if there is none
    limit = None if budget is None else parse_budget(budget)
    require_optuna()
    config = _load(study, sets or [], plugins, trust_plugins, trust_remote_code)
    folder = TuneFolder(output or config.output or Path("tunes") / config.name)
    tuned = parse_config(TuneConfig, config.tune, where=f"{config.name}: tune")
    spec = Spec.of(config, tuned, folder, workers=workers or config.workers, budget=limit, threads=threads)
    if dry_run:
        _dry_run(spec, as_json=as_json)
        return
    try:
        search, verdict = _run(spec, engine, address, quiet=quiet)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(stopped(interrupt, "; the same command resumes")) from None
    from gatespace.addons.tune import page
    from gatespace.config.text import write_yaml
    from gatespace.files import atomic_write

    page.write_page(search, verdict)
    found = page.summary(search, verdict)
    atomic_write(folder.path / "verdict.json", json.dumps(found, indent=2) + "\n")
    if as_json:
        print_json({**found, "page": str(folder.page)})
        return
    out = console()
    out.print(verdict.sentence, style="bold", soft_wrap=True)
    lines = (verdict.why, *page.notes(search, verdict), *write_yaml(verdict.settings).splitlines())
    for line in (*lines, f"page: {folder.page}"):
        out.print(line, soft_wrap=True)


def _load(
    study: str, sets: list[str], plugins: list[str] | None, trust_plugins: bool, trust_remote_code: bool
) -> StudyConfig:
    """Load the study: shipped, a file, or built from a file for `gatespace train`."""
    from gatespace.addons.tune.settings import study_of_train_file
    from gatespace.config.text import read_yaml

    path, found = Path(study).expanduser(), None
    with suppress(OSError, UnicodeDecodeError):  # `load_study` reports the error
        found = read_yaml(path.read_text(encoding="utf-8-sig"), where=study)
    if isinstance(found, dict) and "tasks" not in found and {"pair", "task", "objective"} & found.keys():
        config = study_of_train_file(path, sets)
        return study_file.finished(config, path.parent, plugins, trust_plugins, trust_remote_code)
    return study_file.load_study(
        study, sets, plugins=plugins, trust_plugins=trust_plugins, trust_remote_code=trust_remote_code
    )


def _run(spec: Spec, engine: str, address: str | None, *, quiet: bool) -> tuple[Search, Verdict]:
    """Run search and verdict."""
    from dataclasses import replace

    from gatespace.addons.tune.jobs import perform
    from gatespace.addons.tune.search import Search
    from gatespace.addons.tune.verdict import check_looks, judge, power_text, verdict_study, without_gate
    from gatespace.cli.study_view import StudyView
    from gatespace.files import atomic_write
    from gatespace.report.page import build_report
    from gatespace.study.engines import EngineSpec
    from gatespace.study.results import look_at
    from gatespace.study.runner import run_study

    check_looks(spec)
    study, folder, count = spec.study, spec.folder, spec.workers
    usual = engines.usual_threads(study, address)
    threads = folder.threads_of_runs(study, workers=count, threads=spec.threads, usual=usual)
    with StudyView(count, quiet=quiet) as view:
        wanted = EngineSpec(study, folder, count, threads, address, perform, view.note)
        with closing(engines.engine_opener(engine, address)(wanted)) as opened:
            with folder.claim():
                atomic_write(folder.store_file, json.dumps({"threads": threads, "workers": count}) + "\n")
                if not folder.records_file.exists():
                    engines.check_study(opened, folder, study, view.note)
                search = Search(replace(spec, threads=threads), opened, watch=view.say, note=view.note).go()
            if search.winner is None:
                return search, without_gate(search)
            view.note(power_text(search))
            folder.begin(verdict_study(search), workers=count, threads=threads)
            outlook = run_study(
                folder.config(), folder, opened, threads=threads, retry=True, watch=view.update, note=view.note
            )
    for name, error in outlook.errors().items():
        failed = f"{len(outlook.errors())} runs of the verdict failed"
        raise RunError(failed, got=f"{name}: {error}", instead="the same command tries them again")
    verdict = judge(search, look_at(folder.path))
    build_report(folder.path, png=False)
    return search, verdict


def _dry_run(spec: Spec, *, as_json: bool) -> None:
    """Print a search's plan and maximum cost."""
    timed = isinstance(spec.budget, float)
    fixed, proposals = [one.label for one in spec.fixed()], spec.config.proposals if timed else spec.affordable()
    count, check = len(fixed) + proposals, spec.verdict_cost()
    rungs = [
        {**dict(rung), "candidates_at_most": cost.candidates, "steps_at_most": cost.steps}
        for rung, cost in zip(spec.rungs, spec.costs(count), strict=True)
    ]
    most, grid = sum(rung["steps_at_most"] for rung in rungs) + check.steps, spec.grid_steps(count) + check.steps
    if as_json:
        verdict = {"arms": check.candidates, "seeds": spec.config.fresh, "steps_at_most": check.steps}
        found = {"task": spec.task, "candidates": fixed, "proposals": proposals, "rungs": rungs, "verdict": verdict}
        print_json({**found, "steps_at_most": most, "grid_steps": grid})
        return
    out = console()
    out.print(f"{spec.study.name}: a gate for {spec.task}", style="bold", soft_wrap=True)
    lines = [f"candidates: {', '.join(fixed)}; up to {proposals} proposals"]
    lines += ["how many of them the budget allows is known after the warm-up"] * timed
    lines += [
        f"rung {place}: {rung['steps']} steps × {rung['seeds']} seeds, at most {rung['candidates_at_most']} candidates "
        f"and {rung['steps_at_most']} further training steps"
        for place, rung in enumerate(rungs, start=1)
    ]
    arms = f"verdict: {check.candidates} arms × {len(spec.config.fresh)} fresh seeds: {check.steps} training steps"
    for line in (*lines, arms, f"in all at most {most} training steps; a full grid with the same verdict takes {grid}"):
        out.print(line, soft_wrap=True)
