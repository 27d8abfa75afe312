"""Where jobs run: processes of this machine here, a Ray cluster in an add-on. All give the same numbers."""

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
        """How many jobs it does at once."""

    def start(self, name: str, job: Job) -> None:
        """Begin a job; only while fewer than `slots` are under way."""

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        """The jobs that have ended, after at most this many seconds."""

    def close(self) -> None:
        """Stop all jobs that are running."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is opened with: an entry point of the group `engines` is called with this and gives an `Engine`.

    Args:
        config: The study file.
        folder: The study's folder.
        workers: How many jobs at once.
        threads: Of each job. Two processes that both use all cores slow each other many times over.
        address: Of a cluster; None: this machine.
        perform: What a worker does with a job; None: `gatespace.study.jobs.perform`.
        note: Called with a message that a user should see.
        shared: Whether workers work in the study's folder, which all of them must see. False: `perform` works
            elsewhere, and brings the results there.
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
    """How results come from workers into the study's folder.

    An entry point of the group `results` is called with a URL, the study's folder and the study file, and gives this.
    """

    @property
    def threads(self) -> int | None:
        """Threads of each run as the study was begun there; None where it was not."""

    @property
    def perform(self) -> Perform | None:
        """What a worker does with a job; None: it works in the study's folder."""

    def publish(self) -> None:
        """The study has begun: put there what another machine needs to resume it."""

    def through(self, engine: Engine) -> Engine:
        """An engine whose outcomes come when the results are in the study's folder."""


class SharedFolder:
    """Every worker sees the study's folder and works in it."""

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
    """Of the job that it does; None: it is idle."""
    job: Job = field(default_factory=dict)
    losses: int = 0
    """How many workers this job has cost."""


class LocalEngine:
    """Processes of this machine, each with its share of the cores. A process that dies costs its job only, which
    another one resumes from its last checkpoint.

    Args:
        workers: How many.
        threads: Of each.
        perform: What they do with a job.
        retries: How often a job is resumed after its process was lost.
        note: Called with a message that a user should see.
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
        """Have a worker check the study of `job`; returns its notes. Raises what is wrong with it."""
        worker = self._spawn()
        self._workers.append(worker)  # the first job finds it with its libraries loaded
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
        with suppress(OSError):  # it has died since: `wait` finds it so
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
        """What the death of a worker means for its job; None where another worker resumes it."""
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
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._perform), daemon=True)
        with _environment(dict.fromkeys(THREAD_VARIABLES, str(self._threads))):
            process.start()  # libraries read these when they are loaded
        theirs.close()
        return _Worker(process, ours)


def _serve(pipe: connection.Connection, perform: Perform) -> None:
    """A worker: one job after the other, until the study's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the study, which then stops its workers
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
        os._exit(1)  # a worker that outlives a killed study would go on writing into its folder


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; the system kills a process that takes too much memory" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with exit code {code}"


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process for a while."""
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
