"""`gatespace run`: run a whole study."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import engine as engines
from gatespace.cli import run_options as options
from gatespace.cli import study_file
from gatespace.cli.console import stopped
from gatespace.errors import missing_extra
from gatespace.plugins import provider

if TYPE_CHECKING:
    from gatespace.runs import StudyFolder
    from gatespace.study.engines import Results
    from gatespace.study.outlook import Outlook


def run(
    study: study_file.Study,
    output: study_file.Output = None,
    workers: engines.Workers = None,
    threads: engines.Threads = None,
    engine: engines.EngineName = "local",
    address: engines.Address = None,
    results: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="Pass results through s3://… or any other fsspec URL."),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try failed runs again.")] = False,
    quick: study_file.Quick = False,
    yes: study_file.Yes = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write the report at the end.")] = True,
    sets: study_file.Sets = None,
    plugins: options.Plugins = None,
    trust_plugins: options.TrustPlugins = False,
    trust_remote_code: options.TrustRemoteCode = False,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Run a study: train, evaluate, compare, and write the report.

    A study that was stopped or killed resumes with the same command, and
    ends with the same numbers. A failed run is recorded with its error, and
    the others continue. Test rows are read once per trained model, and
    every read is recorded; results shown during the run are on validation.

    \b
    gatespace run demo                    minutes, on two cores, no download
    gatespace run my.yaml --workers 2
    gatespace run studies/demo --retry    resume a study by its folder
    gatespace run my.yaml --engine ray --address auto --workers 16
    gatespace run my.yaml --engine ray --address auto --results s3://bucket/my

    Exit code 0: all runs are done; 1: some failed; 2: wrong usage or settings;
    130 or 143: stopped by Ctrl-C or SIGTERM.
    """
    from gatespace.cli.study_view import StudyView
    from gatespace.study.engines import EngineSpec, SharedFolder
    from gatespace.study.runner import run_study

    open_engine = engines.engine_opener(engine, address)
    config = study_file.load_study(
        study,
        sets or [],
        quick=quick,
        plugins=plugins,
        trust_plugins=trust_plugins,
        trust_remote_code=trust_remote_code,
    )
    if report:
        _check_report()
    plan = study_file.checked_plan(config, yes=yes)
    folder, count = study_file.study_folder(config, study, output), workers or config.workers
    place: Results = SharedFolder()
    if results is not None:
        place = provider("results", "url", kind="--results")(results, folder, config)
    usual = place.threads or engines.usual_threads(config, address)
    chosen = folder.threads_of_runs(config, workers=count, threads=threads, usual=usual)
    try:
        with StudyView(count, quiet=quiet) as view:
            if (support := study_file.support(plan)).is_empty:
                view.note(f"{study_file.out_of_reach(support)} (see `gatespace plan`)")
            shared = results is None
            spec = EngineSpec(config, folder, count, chosen, address, place.perform, view.note, shared=shared)
            with closing(open_engine(spec)) as opened:
                engines.check_study(opened, folder, config, view.note)
                folder.begin(config, workers=count, threads=chosen)
                place.publish()
                outlook = run_study(
                    folder.config(),
                    folder,
                    place.through(opened),
                    threads=chosen,
                    retry=retry,
                    watch=view.update,
                    note=view.note,
                )
    except KeyboardInterrupt as interrupt:
        also = f", and so does: gatespace run {folder}" if engine == "local" and results is None else ""
        raise typer.Exit(stopped(interrupt, f"; the same command resumes{also}")) from None
    _finish(folder, outlook, report=report, as_json=as_json, quiet=quiet)
    if outlook.count("done") < len(outlook.work):
        raise typer.Exit(1)


def _check_report() -> None:
    """Raise now if the report's packages are missing."""
    for module in ("jinja2", "matplotlib", "scipy", "statsmodels"):
        if importlib.util.find_spec(module) is None:
            raise missing_extra("the report of a study", module=module, extra="study")


def _finish(folder: StudyFolder, outlook: Outlook, *, report: bool, as_json: bool, quiet: bool) -> None:
    """Write the report, and print how the study ended."""
    from gatespace.cli.console import console, print_json, print_warnings
    from gatespace.cli.study_view import headline
    from gatespace.study.results import read_results

    failed, done = outlook.errors(), outlook.of("done")
    written: Any = None
    if report and any(work.run is not None for work in done):
        from gatespace.cli.report import write_report

        written = write_report(folder.path, quiet=quiet or as_json)
    warnings = read_results(folder.path).warning_lines() if done else []
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "done": [work.name for work in done],
                "failed": failed,
                "blocked": outlook.blocked,
                "warnings": warnings,
                "report": None if written is None else str(written.html),
            }
        )
        return
    out = console()
    out.print(headline(outlook, 1))
    for name, error in failed.items():
        out.print(f"{name}: {error}", soft_wrap=True)
    for reason in dict.fromkeys(outlook.blocked.values()):
        out.print(f"not done, because {reason}", soft_wrap=True)
    if written is None or quiet:  # a printed report includes them
        print_warnings(warnings)
    if failed:
        out.print("to try again: the same command with --retry", soft_wrap=True)
