"""`gatespace run`: a whole study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli import run_options as options
from gatespace.cli import study_file
from gatespace.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from gatespace.config import StudyConfig
    from gatespace.study.engines import Engine
    from gatespace.study.runner import Outlook
    from gatespace.study.store import Store

_ENGINES = ("local", "ray")
_INTERRUPTED = 130


def run(
    study: study_file.Study,
    output: study_file.Output = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default=False, help="Runs at once; else as the study says.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="CPU threads of each run; else cores / workers."),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="local processes, or ray.")] = "local",
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", show_default=False, help="Of a Ray cluster, e.g. auto.")
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="Pass results through s3://… or any other fsspec URL."),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try failed runs again.")] = False,
    quick: study_file.Quick = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write the report at the end.")] = True,
    sets: study_file.Sets = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Train, evaluate and compare all that a study plans, and write its report.

    A study that was stopped or killed goes on with the same command, and
    ends with the same numbers. A failed run is recorded with its error, and
    the others go on. Test rows are read once per trained model, and every
    read is recorded; what is shown on the way comes from validation.

    \b
    gatespace run demo                    minutes, on two cores, no download
    gatespace run my.yaml --workers 2
    gatespace run studies/demo --retry    take up a study by its folder
    gatespace run my.yaml --engine ray --address auto --workers 16
    gatespace run my.yaml --engine ray --address auto --results s3://bucket/my

    Exit code 0: all runs are done; 1: some failed; 2: a mistake in the call;
    130: stopped by Ctrl-C.
    """
    import sys

    from gatespace.addons.cluster.depot import Depot
    from gatespace.addons.cluster.depot_engine import DepotEngine, join, publish
    from gatespace.addons.cluster.ray_engine import require_ray
    from gatespace.cli.study_view import StudyView
    from gatespace.study.plan import check
    from gatespace.study.runner import run_study
    from gatespace.study.store import Store

    if engine not in _ENGINES:
        raise unknown_name("engine", engine, _ENGINES)
    if address is not None and engine != "ray":
        raise UsageError("--address is for --engine ray", got=address)
    config = study_file.load_study(study, sets or [], quick=quick)
    check(config)
    if engine == "ray":
        require_ray()
        _check_gpus(config)
    depot = None if results is None else Depot(results)
    folder = study_file.study_folder(config, study, output)
    store, count = Store(folder), workers or config.workers
    if depot is not None:
        join(depot, store, config)
    # On a cluster, the cores of this machine say nothing about those of its nodes.
    usual = max(1, int(config.resources.cpus or 1)) if engine == "ray" and address is not None else None
    chosen = store.begin(config, workers=count, threads=threads, usual=usual)
    if depot is not None:
        publish(depot, store)
    try:
        with StudyView(store, count, quiet=quiet) as view:
            doer = _engine(engine, store, config, count, chosen, address, view.note)
            if depot is not None:
                doer = DepotEngine(doer, depot, store)
            outlook = run_study(config, store, doer, threads=chosen, retry=retry, watch=view.update, note=view.note)
    except KeyboardInterrupt:
        here = engine == "local" and depot is None
        also = f", and so does: gatespace run {folder}" if here else ""
        sys.stderr.write(f"stopped; the same command goes on{also}\n")
        raise typer.Exit(_INTERRUPTED) from None
    _tell(store, outlook, report=report, as_json=as_json, quiet=quiet)
    if outlook.count("done") < len(outlook.work):
        raise typer.Exit(1)


def _check_gpus(config: StudyConfig) -> None:
    """A run that computes on a GPU and asks for none would find none, hours later."""
    device = config.train.get("engine", {}).get("device", "auto")
    if str(device).startswith("cuda") and not config.resources.gpus:
        raise UsageError(
            "resources.gpus: 0, and the runs compute on a GPU",
            got=f"train.engine.device: {device}",
            why="Ray hides all GPUs from a run that asks for none",
            instead="--set resources.gpus=1",
        )


def _engine(
    name: str,
    store: Store,
    config: StudyConfig,
    workers: int,
    threads: int,
    address: str | None,
    note: Callable[[str], None],
) -> Engine:
    from gatespace.addons.cluster.ray_engine import RayEngine
    from gatespace.study.engines import LocalEngine

    if name == "local":
        return LocalEngine(workers, threads)
    return RayEngine(workers, threads, address, resources=config.resources, scores=store.scores, note=note)


def _tell(store: Store, outlook: Outlook, *, report: bool, as_json: bool, quiet: bool) -> None:
    """Write the report, and say how the study has ended."""
    from gatespace.cli.console import console, print_json
    from gatespace.cli.study_view import headline

    failed = {work.name: store.error(work.folder) for work in outlook.work if outlook.states[work.name] == "failed"}
    runs_done = any(work.run is not None and outlook.states[work.name] == "done" for work in outlook.work)
    written: Any = None
    if report and runs_done:
        from gatespace.cli.report import write_report

        written = write_report(store.folder, quiet=quiet or as_json)
    if as_json:
        done = [work.name for work in outlook.work if outlook.states[work.name] == "done"]
        print_json(
            {
                "folder": str(store.folder),
                "done": done,
                "failed": failed,
                "blocked": outlook.blocked,
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
    if failed:
        out.print(f"try again with: gatespace run {store.folder} --retry", soft_wrap=True)
