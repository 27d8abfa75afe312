"""Ray clusters of two nodes on this machine, an S3 server, and a study that both have to get right.

Nodes are processes that share nothing but the files that a test gives them: each has a cache of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gatespace.config import StudyConfig, dump_yaml
from gatespace.runs import StudyFolder
from gatespace.study.engines import LocalEngine
from gatespace.study.results import read_results
from gatespace.study.runner import run_study
from tests.study.conftest import settings as small
from tests.study.conftest import study as parsed

CALM = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
DEADLINE = 300.0


def study(**changes: Any) -> StudyConfig:
    """Two dynamic runs and their twins, long enough to be interrupted, and the models that they begin with."""
    common = small()
    axes = {"restrictions": False, "static": [], "isolation": {"match": ["lam"]}}
    wanted = {"points": ["G5"], "axes": axes, "train": {**common["train"], "steps": 24}, "name": "cluster"}
    return parsed(**(wanted | changes))


def numbers(folder: Path) -> dict[str, object]:
    """All that may not depend on how a study was run."""
    results = read_results(folder)
    assert results.problems == ()
    return {
        name: (result.gate, result.lam, result.fingerprint, result.lam_stats, result.scores, result.curve())
        for name, result in results.runs.items()
    }


def until(found: Callable[[], Any], what: str, *, every: float = 0.05) -> Any:
    """Wait for something to be there."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(every)
    raise AssertionError(f"there was no {what} within {DEADLINE:.0f} s")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """The study as local processes do it."""
    folder = StudyFolder(tmp_path_factory.mktemp("reference") / "study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(shared_cache))
        threads = folder.begin(study(), workers=2, threads=1)
        outlook = run_study(study(), folder, LocalEngine(2, threads), threads=threads)
    assert {*outlook.states.values()} == {"done"}, outlook.errors()
    return folder.path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The study file."""
    path = tmp_path / "study.yaml"
    path.write_text(dump_yaml(study()))
    return path


class Nodes:
    """A cluster of a head and a second node, each with one core and a cache of its own."""

    def __init__(self, tmp_path: Path, **environment: str) -> None:
        from ray.cluster_utils import Cluster

        self.caches = [tmp_path / "cache-0", tmp_path / "cache-1"]
        self._environment = environment
        # The head has the driver's core only: what it does must not hang on which node Ray likes better.
        self.cluster = Cluster(initialize_head=True, head_node_args={**self._arguments(0), "resources": {"first": 1}})
        self.second = self.cluster.add_node(**self._arguments(1), resources={"second": 1})
        self.address = self.cluster.address

    def _arguments(self, number: int) -> dict[str, Any]:
        variables = {**CALM, "GATESPACE_CACHE": str(self.caches[number]), **self._environment}
        return {"num_cpus": 1, "include_dashboard": False, "env_vars": variables}

    def kill_second(self) -> None:
        """SIGKILL to the second node's own processes; its workers are left to find out."""
        self.cluster.remove_node(self.second, allow_graceful=False)

    def workers_of_second(self) -> list[int]:
        """Processes that the second node has started."""
        (raylet,) = self.second.all_processes["raylet"]
        return descendants(raylet.process.pid)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """Make a cluster; it ends with the test."""
    made: list[Nodes] = []

    def make(**environment: str) -> Nodes:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**CALM, **environment}.items():
                patch.setenv(name, value)
            made.append(Nodes(tmp_path, **environment))
        return made[-1]

    yield make
    for one in made:
        one.cluster.shutdown()


def descendants(pid: int) -> list[int]:
    """Processes below a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def run_folder_of(pids: list[int], below: Path) -> Path | None:
    """The folder of a run below `below` that one of the processes holds."""
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = Path(os.readlink(link))
            except OSError:
                continue
            if target.name == ".lock" and target.is_relative_to(below) and (target.parent / "identity.json").exists():
                return target.parent
    return None


@contextmanager
def gatespace(*words: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`gatespace WORDS` in a process of its own, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gatespace", *map(str, words)],
        env={**os.environ, **CALM, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
