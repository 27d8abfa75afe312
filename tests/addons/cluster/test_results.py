"""Results by URL: jobs that are done in scratch and resumed anywhere, and what comes of them in the study's folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("fsspec", reason="fsspec is not installed")

from gatespace import signals
from gatespace.addons.cluster import results
from gatespace.addons.cluster.results import UrlResults, relocated, scratch_of
from gatespace.addons.cluster.storage import Storage
from gatespace.config import StudyConfig, dump_yaml
from gatespace.errors import UsageError
from gatespace.files import claim
from gatespace.runs import RunFolder, StudyFolder
from gatespace.study.jobs import Job, execute, folder_of
from gatespace.study.outlook import outline, read_outlook
from gatespace.study.runner import run_study
from tests.study.conftest import InlineEngine, study

from .conftest import filled


def test_paths_are_relocated_and_nothing_else():
    value = {"a": "/s/x", "b": ["/s", "/sx", 3], "c": {"d": "see /s/x", "e": None}}
    assert relocated(value, Path("/s"), Path("/t")) == {
        "a": "/t/x",
        "b": ["/t", "/sx", 3],
        "c": {"d": "see /s/x", "e": None},
    }


# ---------------------------------------------------------------------------------------------------- a study


def tiny_study(**changes) -> StudyConfig:
    """One model, one run."""
    axes = {"restrictions": False, "static": [], "isolation": None}
    teach = {"teacher": {"model": "tiny", "steps": 2}}
    train = {**study().train, "pair": {"student": "tiny"}, "steps": 4}
    return study(
        **({"name": "far", "axes": axes, "points": ["G5"], "seeds": [1], "teach": teach, "train": train} | changes)
    )


def through(url: str, path: Path, config: StudyConfig | None = None):
    """The outcome of a study whose results go through a URL."""
    config, folder = config or tiny_study(), StudyFolder(path)
    there = UrlResults(url, folder, config)
    threads = folder.begin(config, workers=1, threads=1, usual=there.threads)
    there.publish()
    return run_study(folder.config(), folder, there.through(InlineEngine(there.perform)), threads=threads)


@pytest.fixture(scope="module")
def both(tmp_path_factory, shared_cache):
    """The same study in a folder, and through a URL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(shared_cache))
        base = tmp_path_factory.mktemp("both")
        plain = StudyFolder(base / "plain")
        run_study(tiny_study(), plain, InlineEngine(), threads=plain.begin(tiny_study(), workers=1, threads=1))
        outlook = through(f"file://{base}/url", base / "far")
    assert {*outlook.states.values()} == {"done"}, outlook.errors()
    return plain.path, base / "far", Storage(f"file://{base}/url")


def files_of(folder: Path) -> dict[str, bytes]:
    """What may not depend on how a study was run; paths are those of the study."""
    different = ("timings.jsonl", ".lock", "environment.json", "running.json")
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name not in different and not name.startswith("scores/"):
            found[name] = path.read_bytes().replace(str(folder).encode(), b"STUDY")
    return found


def test_a_study_through_a_url_has_the_files_of_one_in_a_folder(both):
    plain, far, _ = both
    ours, theirs = files_of(far), files_of(plain)
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert any(name.endswith("model/model.safetensors") for name in ours)


def test_the_url_has_it_too_and_the_scratch_has_no_runs(both):
    _, far, storage = both
    (name,) = storage.names("runs")
    assert storage.has(f"runs/{name}/done")
    assert results.UNFINISHED not in storage.names(f"runs/{name}")
    assert list((scratch_of(storage.url) / "attempts").iterdir()) == []
    assert len(list((scratch_of(storage.url) / "models").glob("*/done"))) == 1
    run = StudyFolder(far).run(name)
    assert run.seconds() == pytest.approx(run.done_file.stat().st_mtime - run.config_file.stat().st_mtime)
    assert run.summary()["steps"] == 4


def test_another_machine_gets_all_of_it_from_the_url_alone(both, tmp_path, monkeypatch):
    _, far, storage = both
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path / "cache"))  # nothing is computed, so no model is built there
    outlook = through(storage.url, tmp_path / "other")
    assert {*outlook.states.values()} == {"done"}
    there = {
        name: content.replace(str(far).encode(), b"STUDY") for name, content in files_of(tmp_path / "other").items()
    }
    assert there == files_of(far)
    assert not (tmp_path / "cache").exists()


def test_a_url_belongs_to_one_study_and_keeps_its_threads(both, tmp_path):
    storage = both[2]
    with pytest.raises(UsageError, match="--results holds another study"):
        UrlResults(storage.url, StudyFolder(tmp_path / "x"), tiny_study(name="other"))
    there = UrlResults(storage.url, StudyFolder(tmp_path / "y"), tiny_study())
    assert there.threads == 1
    assert StudyFolder(tmp_path / "y").begin(tiny_study(), workers=1, threads=None, usual=there.threads) == 1
    assert not (tmp_path / "x").exists()


SIGNAL = """
from gatespace import signals

@signals.register("teacher_top", range=(0.0, 1.0))
def teacher_top(tokens):
    return tokens.teacher_top(1).log_probs.exp().squeeze(-1)
"""


def test_plugins_go_with_the_job(tmp_path, monkeypatch, shared_cache):
    """A worker that does not see the study's folder imports the same code, and records where the study has it."""
    another_machine(tmp_path, monkeypatch, shared_cache)
    monkeypatch.setattr("gatespace.plugins._loaded", {})  # as in a process of its own
    plugin = filled(tmp_path / "code", **{"mine.py": SIGNAL}) / "mine.py"
    config = tiny_study(plugins=[str(plugin)], points=["4,0,-1,0,teacher_top=1"])
    url = f"file://{tmp_path}/url"
    outlook = through(url, tmp_path / "far", config)
    assert {*outlook.states.values()} == {"done"}, outlook.errors()
    assert list(scratch_of(url).rglob("mine.py")) == []  # it was there for the time of the job
    (path,) = (tmp_path / "far" / "runs").iterdir()
    run = RunFolder(path)
    (copy,) = run.plugins.iterdir()
    assert copy.read_text() == SIGNAL
    (named,) = run.settings()["plugins"]
    assert Path(named).is_relative_to(tmp_path / "far" / "plugins")
    signals.unregister("teacher_top")


# ---------------------------------------------------------------------------------------------------- interruptions

KILLED = """
import json, os, sys, time
from functools import partial
from gatespace.addons.cluster import results
from gatespace.addons.cluster.storage import Storage
from gatespace.study.jobs import execute
from gatespace.training.rollouts import Rollouts

job, place, url, study = json.loads(sys.argv[1]), *sys.argv[2:]
put, respond = results.put_snapshot, Rollouts.__call__
results._POLL_SECONDS = 0.01

def put_and_die(storage, place, run, step, checkpoint):
    put(storage, place, run, step, checkpoint)
    if step >= 2:
        os._exit(9)  # as SIGKILL would, at this very place

def when_the_last_one_is_there(self, step, clock):
    while step > 0 and results.progress_at(Storage(url), place) < step:
        time.sleep(0.01)
    return respond(self, step, clock)

results.put_snapshot, Rollouts.__call__ = put_and_die, when_the_last_one_is_there
print(execute(job, partial(results.perform_through, url=url, study=study)))
"""


class Lost(BaseException):
    """Stands for the end of a process where nothing that it leaves on its machine matters."""


class Prepared(NamedTuple):
    """A URL that has all but the run."""

    plain: Path
    """The same study in a folder, done."""
    storage: Storage
    folder: StudyFolder
    results: UrlResults
    job: Job
    place: str

    def execute(self) -> dict:
        return execute(self.job, self.results.perform)


@pytest.fixture
def prepared(both, tmp_path) -> Prepared:
    plain, _, done = both
    shutil.copytree(done.url.removeprefix("file://"), tmp_path / "url")
    shutil.rmtree(tmp_path / "url/runs")
    storage, folder = Storage(f"file://{tmp_path}/url"), StudyFolder(tmp_path / "study")
    there = UrlResults(storage.url, folder, tiny_study())
    folder.begin(tiny_study(), workers=1, threads=1)
    (work,) = [work for work in outline(folder, tiny_study(), 1)[1] if work.run is not None]
    job = {**work.job(), "sources": {}}
    return Prepared(plain, storage, folder, there, job, f"runs/{work.name}")


def another_machine(tmp_path, monkeypatch, shared_cache) -> list[str]:
    """Has nothing of the first one's scratch; only the cache of tiny models. Returns what is noted there."""
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(shared_cache / "tiny", tmp_path / "cache" / "tiny")
    heard: list[str] = []
    monkeypatch.setattr("gatespace.study.jobs.Reads.note", lambda self, text: heard.append(text))
    return heard


def run_files(study_folder: Path, place: str) -> dict[str, bytes]:
    found = files_of(study_folder / place)
    return found | {"config.yaml": found["config.yaml"].replace(str(study_folder).encode(), b"STUDY")}


def test_a_killed_run_is_resumed_on_another_machine(prepared, tmp_path, monkeypatch, shared_cache):
    plain, storage, folder, _, job, place = prepared
    command = [sys.executable, "-c", KILLED, json.dumps(job), place, storage.url, str(folder)]
    first = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300, capture_output=True)
    assert first.returncode == 9, first.stderr
    assert results.progress_at(storage, place) == 2
    heard = another_machine(tmp_path, monkeypatch, shared_cache)
    assert prepared.execute() == {"state": "done"}
    assert any("from step 2 of 4" in text for text in heard), heard
    assert storage.get_folder(place, folder.path / place, last="done")
    assert run_files(folder.path, place) == run_files(plain, place)
    assert storage.names(f"{place}/{results.UNFINISHED}") == []
    # Asked again, nothing is done.
    done = Path(storage.url.removeprefix("file://")) / place / "done"
    before = done.stat().st_mtime_ns
    assert prepared.execute() == {"state": "done"}
    assert done.stat().st_mtime_ns == before


def test_reads_of_a_worker_that_was_lost_are_counted(prepared, tmp_path, monkeypatch, shared_cache):
    plain, storage, folder, _, _, place = prepared
    write = Storage.write

    def write_or_die(self: Storage, where: str, content: bytes) -> None:
        if where.endswith("/done"):
            raise Lost
        write(self, where, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "write", write_or_die)
        with pytest.raises(Lost):  # all is computed, and the last file is not put
            prepared.execute()
    assert not storage.has(f"{place}/done")
    assert len(storage.names(f"{place}/reads")) == 2
    another_machine(tmp_path, monkeypatch, shared_cache)
    assert prepared.execute() == {"state": "done"}
    assert storage.get_folder(place, folder.path / place, last="done")
    ours, theirs = run_files(folder.path, place), run_files(plain, place)
    assert ours.pop("reads.jsonl") == 2 * theirs.pop("reads.jsonl")
    assert ours == theirs


def test_of_several_snapshots_the_latest_that_is_whole_counts(tmp_path):
    storage, run = Storage(f"file://{tmp_path}/url"), RunFolder(tmp_path / "there")
    for step, text in ((1, "one"), (3, "three"), (5, "five")):
        here = filled(
            tmp_path / f"step{step}", **{"metrics.jsonl": text, f"checkpoints__step-00000{step}__state.json": text}
        )
        storage.put_folder(here, f"runs/x/unfinished/step-{step:06d}-abc", last=results.WHOLE)
    (tmp_path / "url/runs/x/unfinished/step-000005-abc/whole").unlink()
    assert results.fetch_latest(storage, "runs/x", run)
    assert run.log_file("metrics").read_text() == "three"
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000003"]


def test_a_snapshot_has_the_checkpoint_and_the_records_and_replaces_those_before(tmp_path):
    storage = Storage(f"file://{tmp_path}/url")
    folder = filled(tmp_path / "work/run", **{"metrics.jsonl": "1\n2\n", "model__weights": "w", ".lock": ""})
    filled(folder, **{"checkpoints__step-000001__state.json": "old", "checkpoints__step-000002__state.json": "new"})
    for step in (1, 2):
        results.put_snapshot(storage, "runs/x", RunFolder(folder), step, folder / f"checkpoints/step-{step:06d}")
    (name,) = storage.names("runs/x/unfinished")
    assert name.startswith("step-000002-")
    assert storage.get_folder(f"runs/x/unfinished/{name}", tmp_path / "there", last=results.WHOLE)
    assert sorted(files_of(tmp_path / "there")) == ["checkpoints/step-000002/state.json", "metrics.jsonl", "whole"]
    assert not (tmp_path / "work/stage").exists()


def test_a_failed_run_leaves_its_evidence_where_the_user_is(prepared):
    _, storage, folder, there, job, place = prepared
    job["config"]["optimizer"]["lr"] = 1e30
    engine = there.through(InlineEngine(there.perform))
    engine.start("x", job)
    [(name, outcome)] = engine.wait(60)
    engine.close()
    assert (name, outcome["state"]) == ("x", "failed")
    assert "failed-step-" in outcome["error"]
    run = RunFolder(folder.path / place)
    (seen,) = run.path.glob("failed-step-*.json")
    step = json.loads(seen.read_text())["step"]
    assert step >= 2
    assert len(run.log("metrics")) == step - 1
    assert results.progress_at(storage, place) == step - 1  # to resume from
    assert not (run.path / "failed").exists()
    assert run.state == "waiting"  # the runner says that it failed


def test_dead_attempts_are_removed_and_living_ones_are_left(tmp_path):
    for name in ("dead", "alive", "foreign"):
        filled(tmp_path / name / ("other" if name == "foreign" else "run"), a="x")
    with claim(tmp_path / "alive"):
        results._remove_dead(tmp_path, "run")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "foreign"]


# ---------------------------------------------------------------------------------------------------- seen from outside


def test_status_knows_what_runs_on_other_machines(prepared):
    _, storage, folder, there, job, place = prepared
    name = Path(place).name
    here = filled(folder.path.parent / "work/run", **{"checkpoints__step-000003__state.json": "x"})
    results.put_snapshot(storage, place, RunFolder(here), 3, here / "checkpoints/step-000003")
    folder.now_running([name])
    assert read_outlook(folder).states[name] == "waiting"  # no process holds the study
    with folder.claim():
        assert read_outlook(folder).states[name] == "running"
    engine = there.through(InlineEngine())
    engine.record_progress([folder_of(job)])
    engine.close()
    assert folder_of(job).last_step() == 3


def test_the_command_takes_a_url(tmp_path, both, cli_run):
    _, far, storage = both
    file = tmp_path / "study.yaml"
    file.write_text(dump_yaml(tiny_study()))
    result = cli_run(
        "run", file, "--output", tmp_path / "out", "--results", storage.url, "--no-report", "--json", "--quiet"
    )
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["done"]) == len(list(far.glob("*/*/done")))
    wrong = cli_run("run", file, "--output", tmp_path / "no", "--results", "nothing")
    assert wrong.exit_code == 2
    assert "not a URL" in wrong.stderr
    assert not (tmp_path / "no").exists()
