"""Launcher: run one command as several processes on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from gatespace.errors import UsageError

_GRACE = 10.0
"""Seconds for the others to exit by themselves after one has failed: they may report the same error."""


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run `gatespace ARGUMENTS` as `count` processes, and return the overall exit code.

    They find each other through the same environment variables as with torchrun. If one fails, the others are stopped.
    """
    from gatespace.training.processes import launched

    if (others := launched()) is not None:
        raise UsageError(
            "--processes: this command was started as one of several processes already",
            got=f"{count}, within {others[1]}",
            instead="either a launcher, or --processes",
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # oversubscribed cores are many times slower
        common[name] = os.environ.get(name, str(max(1, cores // count)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "gatespace", *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(count)
    ]
    try:
        return _watched(processes)
    except KeyboardInterrupt:
        _end(processes, signal.SIGINT)
        return processes[0].returncode
    finally:
        _end(processes, signal.SIGTERM)


def _watched(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have finished or one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            _wait(processes, _GRACE)
            # The user sees the output of rank 0, so its exit code comes first.
            return processes[0].returncode or failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _end(processes: list[subprocess.Popen[bytes]], how: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(how)
    _wait(processes, _GRACE)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
