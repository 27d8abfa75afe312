"""Engines that run jobs: local processes here, a Ray cluster in an add-on. All give the same numbers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Protocol

from gatespace.config import StudyConfig
from gatespace.errors import RunError
from gatespace.runs import StudyFolder
from gatespace.study.jobs import Job, Outcome, Perform, check, execute, failed, perform

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Engine(Protocol):
    """Runs jobs, several at a time."""

    @property
    def slots(self) -> int:
        """Number of jobs it runs at once."""

    def start(self, name: str, job: Job) -> None:
        """Start a job; call only while fewer than `slots` are running."""

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        """Return the jobs that have ended, after at most this many seconds."""

    def close(self) -> None:
        """Stop all running jobs."""


@dataclass(frozen=True)
class EngineSpec:
    """Arguments of an engine: an entry point of the group `engines` is called with this and returns an `Engine`.

    Args:
        config: The study file.
        folder: The study's folder.
        workers: Number of jobs at once.
        threads: Threads per job. Two processes that both use all cores slow each other down many times over.
        address: Address of a cluster; None: this machine.
        perform: Function with which a worker runs a job; None: `gatespace.study.jobs.perform`.
        note: Called with messages for the user.
        shared: Whether workers write to the study's folder, which all of them must see. False: `perform` works
            elsewhere and transfers the results there.
    """

    config: StudyConfig
    folder: StudyFolder
    workers: int
    threads: int
    address: str | None = None
    perform: Perform | None = None
    note: Callable[[str], None] = lambda text: None
    shared: bool = True


class Results(Protocol):
    """Transfers results from workers into the study's folder.

    An entry point of the group `results` is called with a URL, the study's folder and the study file, and returns this.
    """

    @property
    def threads(self) -> int | None:
        """Threads per run that the study was started with at the URL; None if it was not."""

    @property
    def perform(self) -> Perform | None:
        """Function with which a worker runs a job; None: it works in the study's folder."""

    def publish(self) -> None:
        """Upload at the start what another machine needs to resume the study."""

    def through(self, engine: Engine) -> Engine:
        """Wrap an engine to report outcomes once results are in the study's folder."""


class SharedFolder:
    """Workers all see the study's folder and write to it."""

    threads: int | None = None
    perform: Perform | None = None

    def publish(self) -> None: ...

    def through(self, engine: Engine) -> Engine:
        return engine


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    name: str | None = None
    """Name of its current job; None if idle."""
    job: Job = field(default_factory=dict)
    losses: int = 0
    """Number of workers that have died on this job."""


class LocalEngine:
    """Worker processes on this machine, each with its share of the cores. If one dies, another resumes
    its job from the last checkpoint, up to `retries` times.

    Args:
        workers: Number of processes.
        threads: Threads per process.
        perform: Function that runs a job.
        retries: How often a job is resumed after its process died.
        note: Called with messages for the user.
    """

    def __init__(
        self,
        workers: int,
        threads: int,
        perform: Perform = perform,
        *,
        retries: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.slots = workers
        self._threads, self._perform, self._retries, self._note = threads, perform, retries, note
        self._workers: list[_Worker] = []

    def check(self, job: Job) -> list[str]:
        """Check the study of `job` in a worker and return its notes; raise any error found."""
        worker = self._spawn()
        self._workers.append(worker)  # reused for the first job, with its libraries already loaded
        worker.pipe.send({"do": "check", **job})
        try:
            outcome = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            self._workers.remove(worker)
            return [f"the study could not be checked: {_death(worker.process.exitcode)}"]
        if outcome["state"] == "failed":
            raise outcome["raised"]
        return list(outcome["notes"])

    def start(self, name: str, job: Job) -> None:
        self._start(name, job, losses=0)

    def _start(self, name: str, job: Job, *, losses: int) -> None:
        idle = next((worker for worker in self._workers if worker.name is None), None)
        if idle is None:
            if len(self._workers) >= self.slots:
                raise RunError("all workers are busy")
            idle = self._spawn()
            self._workers.append(idle)
        idle.name, idle.job, idle.losses = name, job, losses
        with suppress(OSError):  # the worker has died: `wait` will notice
            idle.pipe.send(job)

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        busy = [worker for worker in self._workers if worker.name is not None]
        ready = connection.wait([part for worker in busy for part in (worker.pipe, worker.process.sentinel)], seconds)
        ended: list[tuple[str, Outcome]] = []
        for worker in busy:
            if worker.pipe not in ready and worker.process.sentinel not in ready:
                continue
            assert worker.name is not None
            try:
                outcome = worker.pipe.recv()
            except (EOFError, OSError):
                outcome = self._lost(worker)
            if outcome is not None:
                ended.append((worker.name, outcome))
            worker.name = None
        return ended

    def _lost(self, worker: _Worker) -> Outcome | None:
        """Handle a dead worker: the outcome of its job, or None if another worker resumes it."""
        assert worker.name is not None
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        how, losses = _death(worker.process.exitcode), worker.losses + 1
        if losses <= self._retries:
            self._note(f"{worker.name}: {how}; resumed ({losses} of {self._retries} times)")
            self._start(worker.name, worker.job, losses=losses)
            return None
        return failed(how if losses == 1 else f"{how} ({losses} times)")

    def close(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    def _spawn(self) -> _Worker:
        context = multiprocessing.get_context("spawn")  # forking a process with threads may deadlock
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._perform), daemon=True)
        with _environment(dict.fromkeys(THREAD_VARIABLES, str(self._threads))):
            process.start()  # libraries read these at import
        theirs.close()
        return _Worker(process, ours)


def _serve(pipe: connection.Connection, perform: Perform) -> None:
    """Main loop of a worker: run jobs until the study's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study handles Ctrl-C and stops its workers
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        outcome = check(job) if job["do"] == "check" else execute(job, perform)
        with suppress(OSError):
            pipe.send(outcome)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # a worker that outlived a killed study would keep writing to its folder


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; the system kills a process that takes too much memory" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with exit code {code}"


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Temporarily set environment variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
