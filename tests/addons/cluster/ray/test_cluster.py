"""A study on a Ray cluster whose nodes see its folder: the numbers of local processes, also when a node is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-engines` has an environment with it")

from gatespace.addons.cluster.ray_cluster import RayEngine
from gatespace.config import TeachConfig, dump_config, parse_config
from gatespace.errors import RunError, UsageError
from gatespace.runs import RunFolder, StudyFolder
from gatespace.study.engines import EngineSpec

from .conftest import Nodes, descendants, gatespace, numbers, run_folder_of, study, until

pytestmark = pytest.mark.slow


def test_a_local_ray_gives_what_local_processes_give(tmp_path, file, reference):
    words = ("run", file, "--output", tmp_path / "study", "--threads", 1, "--engine", "ray", "--json", "--no-report")
    with gatespace(*words) as process:
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert json.loads(out)["failed"] == {}
    assert numbers(tmp_path / "study") == numbers(reference)
    assert json.loads((tmp_path / "study" / "store.json").read_text())["threads"] == 1


def test_a_killed_node_costs_nothing_that_a_checkpoint_has(tmp_path, file, reference, nodes):
    cluster: Nodes = nodes()
    folder = tmp_path / "study"
    words = ("run", file, "--output", folder, "--engine", "ray", "--address", cluster.address, "--no-report")
    with gatespace(*words) as process:
        held = until(lambda: run_folder_of(cluster.workers_of_second(), folder / "runs"), "run on the second node")
        until(lambda: RunFolder(held).last_step() >= 3 and list(held.glob("checkpoints/step-*")), "checkpoint")
        workers = cluster.workers_of_second()
        cluster.kill_second()
        timings = (held / "timings.jsonl").read_text().splitlines()
        assert not (held / "done").exists(), "the run was over before its node was killed"
        _, heard = process.communicate(timeout=600)
    assert process.returncode == 0, heard
    assert "resumed (1 of 3 times)" in heard
    assert held.name in heard
    assert numbers(folder) == numbers(reference)
    # What a step took is never the same twice, so these steps were not done again.
    assert len(timings) >= 3
    assert (held / "timings.jsonl").read_text().splitlines()[: len(timings) - 2] == timings[:-2]
    assert not [pid for pid in workers if Path(f"/proc/{pid}/fd").is_dir() and os.listdir(f"/proc/{pid}/fd")]
    # Each machine has scores of its own; the folder that all see has none.
    assert not (folder / "scores").exists()
    assert [len(list(cache.glob("studies/*/scores"))) for cache in cluster.caches] == [1, 1]


# ---------------------------------------------------------------------------------------------------- the engine


def ray_engine(tmp_path: Path, address: str | None = None, note=lambda text: None, **resources: object) -> RayEngine:
    spec = EngineSpec(study(resources=resources), StudyFolder(tmp_path / "study"), 1, 1, address, note=note)
    return RayEngine(spec)


def long_job(folder: Path, steps: int = 100_000) -> dict:
    task = {"name": "synthetic", "brief": True}
    config = {"task": task, "model": "tiny", "steps": steps, "output": str(folder), "engine": {"precision": "fp32"}}
    config |= {"evaluation": {"every": 0, "final": []}, "checkpoint": {"every": 0}}
    return {"do": "teach", "config": dump_config(parse_config(TeachConfig, config))}


def ended(engine: RayEngine) -> list:
    return until(lambda: engine.wait(1.0), "end of the job")


def test_a_worker_that_is_lost_again_and_again_is_given_up(tmp_path):
    notes: list[str] = []
    engine = ray_engine(tmp_path, note=notes.append, retries=1)
    try:
        killed: set[int] = set()
        engine.start("victim", long_job(tmp_path / "run"))
        for _ in range(2):

            def victim() -> int | None:
                assert engine.wait(0) == []
                for pid in set(descendants(os.getpid())) - killed:
                    if run_folder_of([pid], tmp_path):
                        return pid
                return None

            pid = until(victim, "worker")
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            if len(killed) == 1:
                until(lambda: engine.wait(0.2) or notes, "word of the loss")
        [(name, outcome)] = ended(engine)
        assert (name, outcome["state"]) == ("victim", "failed")
        assert "lost 2 times" in outcome["error"]
        assert len(notes) == 1
        assert "1 of 1 times" in notes[0]
        # The engine goes on, and a job's own error is not tried again.
        engine.start("next", {"do": "nothing known"})
        [(name, outcome)] = ended(engine)
        assert (name, outcome["state"]) == ("next", "failed")
        assert "KeyError" in outcome["error"]
        assert len(notes) == 1
    finally:
        engine.close()


def test_a_run_goes_where_its_resources_are(tmp_path, nodes):
    cluster: Nodes = nodes()
    engine = ray_engine(tmp_path, cluster.address, custom={"second": 1})
    try:
        engine.start("model", long_job(tmp_path / "run", steps=1))
        assert ended(engine) == [("model", {"state": "done"})]
        # The tiny model is built in the cache of the machine that needs it.
        assert [(cache / "tiny").is_dir() for cache in cluster.caches] == [False, True]
    finally:
        engine.close()


def test_what_no_node_has_is_said(tmp_path, nodes):
    with pytest.raises(UsageError, match="more than this machine has") as caught:
        ray_engine(tmp_path, custom={"a100": 1})
    assert "a100 0" in str(caught.value)
    cluster: Nodes = nodes()
    notes: list[str] = []
    engine = ray_engine(tmp_path, cluster.address, notes.append, gpus=2)
    engine.close()
    assert "GPU 2" in notes[0]


def test_no_cluster_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where `auto` looks
    with pytest.raises(RunError, match="Ray could not be reached"):
        ray_engine(tmp_path, "auto")
