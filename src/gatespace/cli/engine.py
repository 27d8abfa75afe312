"""Options of commands that run a study's jobs, and how they open its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from gatespace.errors import UsageError
from gatespace.plugins import provider

if TYPE_CHECKING:
    from gatespace.config import StudyConfig
    from gatespace.runs import StudyFolder
    from gatespace.study.engines import Engine, EngineSpec

Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, show_default=False, help="Runs in parallel; default: the study's."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        show_default=False,
        help="CPU threads per run; default: cores / workers, at most $OMP_NUM_THREADS; 1 for tiny models.",
    ),
]
EngineName = Annotated[
    str, typer.Option("--engine", metavar="NAME", help="local (processes), ray, or an engine of another package.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="ADDRESS", show_default=False, help="The cluster's address, e.g. auto."),
]


def engine_opener(engine: str, address: str | None) -> Callable[[EngineSpec], Engine]:
    """The opener of the engine of this name."""
    if engine != "local":
        found: Callable[[EngineSpec], Engine] = provider("engines", engine, kind="engine", known=["local"])
        return found
    if address is not None:
        raise UsageError("--address is for a cluster", got=address, instead="with --engine ray")
    return _local_engine


def _local_engine(spec: EngineSpec) -> Engine:
    from gatespace.study.engines import LocalEngine
    from gatespace.study.jobs import perform

    retries = spec.config.resources.retries
    return LocalEngine(spec.workers, spec.threads, spec.perform or perform, retries=retries, note=spec.note)


def usual_threads(config: StudyConfig, address: str | None) -> int | None:
    """Default threads per run, where it does not depend on this machine's cores; else None.

    A cluster's nodes may have other cores; and the threads of a tiny model wait for each other on a busy machine.
    """
    from gatespace.models.load import TINY

    if address is not None:
        return max(1, int(config.resources.cpus or 1))
    models = set()
    for task in config.tasks.values():
        pair = {**config.train.get("pair", {}), **task.train.get("pair", {})}
        for role in ("student", "teacher"):
            taught = getattr(config.teach, role)
            models.add(str(pair.get(role) if taught is None else taught.get("model")))
    return 1 if models <= {*TINY} else None


def check_study(engine: Engine, folder: StudyFolder, config: StudyConfig, note: Callable[[str], None]) -> None:
    """Check the unfinished part of a study in a local worker, before anything is trained."""
    from gatespace.study.engines import LocalEngine
    from gatespace.study.outlook import check_job

    if isinstance(engine, LocalEngine) and (job := check_job(folder, config)) is not None:
        for text in engine.check(job):
            note(text)
