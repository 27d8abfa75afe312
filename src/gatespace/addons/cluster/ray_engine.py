"""Jobs as tasks of a Ray cluster, begun again where a worker or a node is lost."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatespace import __version__
from gatespace.config.study import ResourcesConfig
from gatespace.errors import RunError, UsageError, missing_extra
from gatespace.study.engines import THREAD_VARIABLES
from gatespace.study.jobs import Job, Outcome, execute

_GIB = 2**30
_PATIENCE_SECONDS = 60.0
"""How long a run waits for its folder: a worker notices within seconds that its node is gone, and ends."""


@dataclass
class _Started:
    name: str
    job: Job
    losses: int = 0


class RayEngine:
    """Tasks of a Ray cluster.

    Args:
        workers: How many jobs at once. What the cluster has no room for waits in it.
        threads: Of each job.
        address: Of a cluster that runs; None: a local one for the time of the study.
        resources: What each job asks of the cluster, and how often one is begun again whose worker or node was lost.
        scores: The folder of the study's scores, in whose place each machine of a cluster has one of its own: several
            machines cannot share such a cache, whatever file system it is on.
        note: Is told what a user should know.
    """

    def __init__(
        self,
        workers: int,
        threads: int,
        address: str | None = None,
        *,
        resources: ResourcesConfig | None = None,
        scores: Path | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._ray = require_ray()
        self._workers, self._note = workers, note
        self._resources = resources or ResourcesConfig()
        self._asked = asked(self._resources, threads)
        # What Ray says on its own would tear the live table apart; an error comes back as an outcome.
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            # Beside the cores of each job: whatever else is asked for must be on this machine.
            options |= {"num_cpus": max(1, round(workers * self._asked["CPU"] + 0.5)), "include_dashboard": False}
        else:
            options |= {"address": address}
        try:
            self._ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(
                "Ray could not be reached",
                got=address or "a local cluster",
                why=" ".join(str(error).split())[:300],
                instead="`ray status` on this machine says whether a cluster runs here; or --address HOST:PORT",
            ) from error
        try:
            self._check_room(local=address is None)
        except UsageError:
            self._ray.shutdown()
            raise
        variables = dict.fromkeys(THREAD_VARIABLES, str(threads))
        self._execute = self._ray.remote(
            num_cpus=self._asked["CPU"],
            num_gpus=self._asked.get("GPU", 0),
            memory=self._asked.get("memory"),
            resources=dict(self._resources.custom) or None,
            max_retries=0,  # what is lost is begun again here, where it is counted and told
            runtime_env={"env_vars": variables},
        )(execute)
        self._added: Job = {"version": __version__, "cwd": os.getcwd(), "patience": _PATIENCE_SECONDS}
        if scores is not None and address is not None:
            self._added["scores"] = str(scores)
        self._jobs: dict[Any, _Started] = {}

    @property
    def slots(self) -> int:
        return self._workers

    def start(self, name: str, job: Job) -> None:
        self._submit(_Started(name, {**job, **self._added}))

    def _submit(self, started: _Started) -> None:
        self._jobs[self._execute.remote(started.job)] = started

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        if not self._jobs:
            return []
        try:
            ready, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=seconds)
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise RunError(
                "the Ray cluster is gone", got=_line(error), instead="start Ray again; the same command then goes on"
            ) from error
        ended = []
        for reference in ready:
            started = self._jobs.pop(reference)
            try:
                outcome: Outcome | None = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                outcome = self._after(error, started)
            if outcome is not None:
                ended.append((started.name, outcome))
        return ended

    def _after(self, error: Exception, started: _Started) -> Outcome | None:
        """What an error of Ray's means for a job; None where it was begun again."""
        text, retries = _line(error), self._resources.retries
        if not isinstance(error, self._losses()):
            return {"state": "failed", "error": f"its Ray task failed: {text}", "details": str(error)}
        started.losses += 1
        if started.losses <= retries:
            self._note(f"{started.name}: {text}; begun again ({started.losses} of {retries} times)")
            self._submit(started)
            return None
        times = "once" if started.losses == 1 else f"{started.losses} times"
        return {"state": "failed", "error": f"its worker was lost {times}: {text}", "details": str(error)}

    def _losses(self) -> tuple[type[Exception], ...]:
        """Errors that are not the job's own: another worker may do it."""
        names = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "ObjectLostError", "OutOfMemoryError")
        return tuple(getattr(self._ray.exceptions, name) for name in names)

    def _check_room(self, *, local: bool) -> None:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0) >= amount for name, amount in self._asked.items()) for node in nodes):
            return
        wanted = ", ".join(f"{name} {amount:g}" for name, amount in self._asked.items())
        if local:
            raise UsageError(
                "resources: a run asks for more than this machine has",
                got=wanted,
                why=_most(nodes, self._asked),
                instead="less of it, or --address of a cluster that has it",
            )
        self._note(f"no node of the cluster has what a run asks for ({wanted}): {_most(nodes, self._asked)}; waiting")

    def close(self) -> None:
        self._ray.shutdown()


def asked(resources: ResourcesConfig, threads: int) -> dict[str, float]:
    """What a job asks for, by the names that Ray's nodes use."""
    amounts: dict[str, float] = {"CPU": float(threads) if resources.cpus is None else resources.cpus}
    if resources.gpus:
        amounts["GPU"] = resources.gpus
    if resources.memory_gb is not None:
        amounts["memory"] = int(resources.memory_gb * _GIB)
    return amounts | resources.custom


def _most(nodes: list[Mapping[str, float]], wanted: Mapping[str, float]) -> str:
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in wanted}
    return "the most that one has is " + ", ".join(f"{name} {amount:g}" for name, amount in most.items())


def require_ray() -> Any:
    """The package, or the error that says how to get it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise missing_extra("--engine ray", module="ray", extra="ray") from error


def _line(error: Exception) -> str:
    """The gist of one of Ray's errors, which go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # The last line of what a task has raised is its error; of other errors the first line says most.
    return (lines[-1] if type(error).__name__.startswith("RayTaskError") else lines[0])[:300]
