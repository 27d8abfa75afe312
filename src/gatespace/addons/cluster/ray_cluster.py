"""Study jobs as Ray tasks, resumed elsewhere when a worker or node is lost."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gatespace import __version__
from gatespace.addons.cluster.results import relocated, scratch_of
from gatespace.config import StudyConfig
from gatespace.config.study import ResourcesConfig
from gatespace.errors import RunError, UsageError, missing_extra
from gatespace.files import is_claimed
from gatespace.study.engines import THREAD_VARIABLES, EngineSpec
from gatespace.study.jobs import Job, Outcome, Perform, execute, failed, folder_of, perform

_GIB = 2**30
_PATIENCE_SECONDS = 60.0
"""How long a run waits for its folder; a worker exits within seconds of losing its node."""


# ---------------------------------------------------------------------------------------------------- worker side


@dataclass(frozen=True)
class Node:
    """What a worker on another machine needs besides its job.

    Args:
        perform: Runs the job.
        version: The gatespace version that planned the job.
        cwd: Base of relative paths, if the folder exists there.
        scores: The study's score cache, which each machine replaces with its own: several machines cannot share one on
            any file system.
    """

    perform: Perform = perform
    version: str = __version__
    cwd: str = ""
    scores: str | None = None

    @classmethod
    def of(cls, spec: EngineSpec) -> Node:
        """Build from an engine spec."""
        own = spec.shared and spec.address is not None
        return cls(spec.perform or perform, cwd=os.getcwd(), scores=str(spec.folder.scores) if own else None)


def execute_on_node(job: Job, node: Node) -> Outcome:
    """Run a job on the machine chosen by Ray, and return its outcome."""
    return execute(job, partial(_perform_on_node, node=node))


def _perform_on_node(job: Job, node: Node) -> None:
    if node.version != __version__:
        raise RunError(
            "this worker has another gatespace than the study",
            got=f"{__version__} at {os.uname().nodename}",
            why=f"the study was planned by {node.version}, and two versions need not give the same numbers",
            instead="the same version on all nodes",
        )
    if os.path.isdir(node.cwd):
        os.chdir(node.cwd)
    if node.scores is not None:
        own = scratch_of(node.scores) / "scores"
        job = {**job, "config": relocated(job["config"], Path(node.scores), own)}
    # A worker of a lost node may hold the folder for a while after the cluster has given it up.
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while is_claimed(folder_of(job).path) and time.monotonic() < deadline:
        time.sleep(0.5)
    node.perform(job)


# ---------------------------------------------------------------------------------------------------- driver side


@dataclass
class _Started:
    name: str
    job: Job
    losses: int = 0


class RayEngine:
    """Runs jobs as tasks on the cluster at `spec.address`, or on a local one for the duration of the study.

    Tasks without resources queue in the cluster. A job whose worker or node is lost is resubmitted up to
    `resources.retries` times.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._ray = _require_ray()
        _check_gpus(spec.config)
        self.slots, self._note, self._resources = spec.workers, spec.note, spec.config.resources
        self._asked = asked(self._resources, spec.threads)
        self._connect(spec.address)
        self._execute = self._ray.remote(
            num_cpus=self._asked["CPU"],
            num_gpus=self._asked.get("GPU", 0),
            memory=self._asked.get("memory"),
            resources=dict(self._resources.custom) or None,
            max_retries=0,  # lost jobs are resubmitted here, where retries are counted and reported
            runtime_env={"env_vars": dict.fromkeys(THREAD_VARIABLES, str(spec.threads))},
        )(execute_on_node)
        self._node = Node.of(spec)
        self._jobs: dict[Any, _Started] = {}

    def _connect(self, address: str | None) -> None:
        # Ray's own output would break the live table; errors come back as outcomes.
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            # CPU slots are set here; other requested resources must exist on this machine.
            options |= {"num_cpus": max(1, round(self.slots * self._asked["CPU"] + 0.5)), "include_dashboard": False}
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

    def _check_room(self, *, local: bool) -> None:
        """If no node has the resources of a job: raise on a local cluster, note on one that may grow."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0) >= amount for name, amount in self._asked.items()) for node in nodes):
            return
        wanted = _amounts(self._asked)
        most = _amounts({name: max((node.get(name, 0) for node in nodes), default=0) for name in self._asked})
        if local:
            raise UsageError(
                "resources: a run asks for more than this machine has",
                got=wanted,
                why=f"the most that one has is {most}",
                instead="less of it, or --address of a cluster that has it",
            )
        self._note(
            f"no node of the cluster has what a run asks for ({wanted}): the most that one has is {most}; waiting"
        )

    def start(self, name: str, job: Job) -> None:
        self._submit(_Started(name, job))

    def _submit(self, started: _Started) -> None:
        self._jobs[self._execute.remote(started.job, self._node)] = started

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        if not self._jobs:
            return []
        try:
            ready, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=seconds)
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise RunError(
                "the Ray cluster is gone", got=_line(error), instead="start Ray again; the same command then resumes"
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
        """Return the outcome of a job after a Ray error; None if it was resubmitted."""
        # Errors that are not the job's own: another worker may succeed.
        names = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "ObjectLostError", "OutOfMemoryError")
        text, retries = _line(error), self._resources.retries
        if not isinstance(error, tuple(getattr(self._ray.exceptions, name) for name in names)):
            return failed(f"its Ray task failed: {text}", str(error))
        started.losses += 1
        if started.losses <= retries:
            self._note(f"{started.name}: {text}; resumed ({started.losses} of {retries} times)")
            self._submit(started)
            return None
        times = "once" if started.losses == 1 else f"{started.losses} times"
        return failed(f"its worker was lost {times}: {text}", str(error))

    def close(self) -> None:
        self._ray.shutdown()


def asked(resources: ResourcesConfig, threads: int) -> dict[str, float]:
    """Resources of a job, by Ray's names."""
    amounts: dict[str, float] = {"CPU": float(threads) if resources.cpus is None else resources.cpus}
    if resources.gpus:
        amounts["GPU"] = resources.gpus
    if resources.memory_gb is not None:
        amounts["memory"] = int(resources.memory_gb * _GIB)
    return amounts | resources.custom


def _require_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise missing_extra("--engine ray", module="ray", extra="ray") from error


def _check_gpus(config: StudyConfig) -> None:
    """Raise if runs compute on a GPU but request none: they would fail only hours later."""
    device = config.train.get("engine", {}).get("device", "auto")
    if str(device).startswith("cuda") and not config.resources.gpus:
        raise UsageError(
            "resources.gpus: 0, and the runs compute on a GPU",
            got=f"train.engine.device: {device}",
            why="Ray hides all GPUs from a run that asks for none",
            instead="--set resources.gpus=1",
        )


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items())


def _line(error: Exception) -> str:
    """Reduce a Ray error, which can be pages long, to one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # A task error ends with the exception; other errors are most informative in their first line.
    return (lines[-1] if type(error).__name__.startswith("RayTaskError") else lines[0])[:300]
