"""Shared by all benchmarks: peak memory and time of a call, fresh processes, facts about the machine.

Memory is resident memory (RSS), because that is what runs out; it includes what a tensor library does not count, such
as packing buffers of matrix products. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

MIB = 2**20
SAMPLE_SECONDS = 0.002
PACKAGES = ("gatespace", "torch", "trl", "liger-kernel", "transformers", "triton")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ALLOCATOR_VARIABLES = ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES")
_MARK = "@result "

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Cost of one call: peak RSS (bytes, absolute), wall seconds, CPU seconds over all threads.

    `others` is CPU seconds that other processes (or the machine's host) took meanwhile, during which wall time does not
    measure the work alone.
    """

    peak_rss: int
    wall: float
    cpu: float
    others: float


def rss() -> int:
    """Resident memory of this process now, in bytes."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * _PAGE


def give_back_free_memory() -> None:
    """Return unused memory of the C allocator, so that set-up work does not inflate a baseline."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: the same baseline for all
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def measured(work: Callable[[], T]) -> tuple[T, Cost]:
    """Run `work` and measure it: memory by the kernel's high-water mark, if it can be reset, and by sampling."""
    exact = _reset_high_water_mark()
    sampler = _Sampler()
    busy, wall, cpu = _busy_everywhere(), time.perf_counter(), time.process_time()
    result = work()
    wall, cpu, busy = time.perf_counter() - wall, time.process_time() - cpu, _busy_everywhere() - busy
    peak = max(sampler.finish(), _high_water_mark() if exact else 0)
    return result, Cost(peak, wall, cpu, max(0.0, busy - cpu))


class _Sampler:
    def __init__(self) -> None:
        self._peak, self._stop = rss(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, rss())

    def finish(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self._peak, rss())


def _busy_everywhere() -> float:
    """CPU seconds the whole machine has been busy, including stolen time; 0 if the kernel does not report it."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def in_fresh_process(script: Path, request: dict[str, Any], *, threads: int, timeout: float) -> dict[str, Any]:
    """Call `python script`, which must end in `answer(...)`, with the request on stdin; return its answer.

    Everybody gets the default allocator: variables that tune or replace it are not passed on.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_ALLOCATOR_VARIABLES)}
    env |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | {"HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            input=json.dumps(request),
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"unavailable": f"no result within {timeout:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    if done.returncode < 0:
        return {"unavailable": f"ended by signal {-done.returncode} (9 is usually: out of memory)"}
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return {"unavailable": f"failed: {last}"}


def request() -> dict[str, Any]:
    """In the fresh process: read the request."""
    return json.load(sys.stdin)


def answer(result: dict[str, Any]) -> None:
    """In the fresh process: return the result."""
    print(_MARK + json.dumps(result), flush=True)


def environment(threads: int) -> dict[str, Any]:
    """Facts about the machine that a reader needs to compare two runs."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": packages,
    }


def usable_cores() -> int:
    """Number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        info = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        }
    except OSError:
        return platform.processor()
    # bf16 products are fast only with native bf16 instructions, so show the flags.
    flags = set(info.get("flags", "").split()) & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    return " ".join([info.get("model name", "unknown CPU"), *sorted(flags)])
