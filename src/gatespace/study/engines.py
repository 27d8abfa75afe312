"""Where jobs are done: processes of this machine, or a Ray cluster. Both give the same numbers."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Protocol

from gatespace.errors import RunError, missing_extra
from gatespace.study.jobs import Job, Outcome, execute

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Engine(Protocol):
    """Does jobs, several at a time."""

    slots: int
    """How many jobs it does at once."""

    def start(self, name: str, job: Job) -> None:
        """Begin a job; only while fewer than `slots` are under way."""

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        """The jobs that have ended, after at most so many seconds."""

    def close(self) -> None:
        """Stop whatever is still going on."""


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    job: str | None = None


class LocalEngine:
    """Processes of this machine, each with its share of the cores. A process that dies costs its job only.

    Args:
        workers: How many.
        threads: Of each. Two processes that both use all cores slow each other many times over.
    """

    def __init__(self, workers: int, threads: int) -> None:
        self.slots = workers
        self._threads = threads
        self._workers: list[_Worker] = []

    def start(self, name: str, job: Job) -> None:
        idle = next((worker for worker in self._workers if worker.job is None), None)
        if idle is None:
            if len(self._workers) >= self.slots:
                raise RunError("all workers are busy")
            idle = self._spawn()
            self._workers.append(idle)
        idle.job = name
        idle.pipe.send(job)

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        busy = [worker for worker in self._workers if worker.job is not None]
        ready = connection.wait([part for worker in busy for part in (worker.pipe, worker.process.sentinel)], seconds)
        ended: list[tuple[str, Outcome]] = []
        for worker in busy:
            if worker.pipe not in ready and worker.process.sentinel not in ready:
                continue
            assert worker.job is not None
            try:
                outcome = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join()
                outcome = {"state": "failed", "error": _death(worker.process.exitcode), "details": ""}
                worker.pipe.close()
                self._workers.remove(worker)
            ended.append((worker.job, outcome))
            worker.job = None
        return ended

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
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _environment(dict.fromkeys(_THREAD_VARIABLES, str(self._threads))):
            process.start()  # libraries read these when they are loaded
        theirs.close()
        return _Worker(process, ours)


def _serve(pipe: connection.Connection) -> None:
    """The life of a worker: one job after the other, until the study's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the study, which then stops its workers
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        outcome = execute(job)
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


class RayEngine:
    """Tasks of a Ray cluster. The study's folder must be one that all its nodes see.

    Args:
        workers: How many jobs at once.
        threads: CPUs of each.
        address: Of a cluster that runs; None: a local one for the time of the study.
    """

    def __init__(self, workers: int, threads: int, address: str | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise missing_extra("--engine ray", module="ray", extra="ray") from error
        self._ray: Any = ray
        self.slots = workers
        # What Ray says on its own would tear the live table apart; an error comes back as an outcome.
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address is None:
                ray.init(num_cpus=workers * threads, include_dashboard=False, **options)
            else:
                ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(
                "Ray could not be reached", got=address or "a local cluster", why=str(error).splitlines()[0]
            ) from error
        variables = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        self._execute = ray.remote(num_cpus=threads, max_retries=0, runtime_env={"env_vars": variables})(execute)
        self._jobs: dict[Any, str] = {}

    def start(self, name: str, job: Job) -> None:
        self._jobs[self._execute.remote(job)] = name

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        if not self._jobs:
            return []
        ready, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=seconds)
        ended = []
        for reference in ready:
            try:
                outcome = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                text = str(error).strip().splitlines()[0]
                outcome = {"state": "failed", "error": f"its Ray task was lost: {text}", "details": str(error)}
            ended.append((self._jobs.pop(reference), outcome))
        return ended

    def close(self) -> None:
        self._ray.shutdown()
