"""Results by URL: folders that arrive whole or not at all, and jobs that are done in scratch and taken up anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fsspec", reason="fsspec is not installed")

from gatespace.config import dump_yaml
from gatespace.errors import MissingExtraError, RunError, UsageError
from gatespace.files import claim, read
from gatespace.study import scratch
from gatespace.study.depot import Depot
from gatespace.study.depot_engine import DepotEngine, join, publish
from gatespace.study.jobs import execute, folder_of, relocated, scratch_of
from gatespace.study.runner import look, outline, run_study
from gatespace.study.store import Store, progress_of, seconds_of

from .conftest import InlineEngine, study


@pytest.fixture
def depot(tmp_path: Path) -> Depot:
    return Depot(f"file://{tmp_path}/depot")


def filled(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# ---------------------------------------------------------------------------------------------------- folders


def test_a_folder_comes_back_as_it_was(depot, tmp_path):
    here = filled(tmp_path / "here", a="one", deep__er__b="two", empty="", skipped="no")
    os.utime(here / "a", (1e9, 1e9))
    depot.put_folder(here, "runs/x", last="done", leave=lambda name: name == "skipped")
    assert depot.get_folder("runs/x", tmp_path / "there", last="done")
    found = {
        path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*") if path.is_file()
    }
    assert found == {"a", "deep/er/b", "empty", "done"}
    assert (tmp_path / "there/deep/er/b").read_text() == "two"
    assert (tmp_path / "there/a").stat().st_mtime == 1e9


def test_what_was_not_put_to_its_end_is_not_there(depot, tmp_path):
    here = filled(tmp_path / "here", a="one", b="two")
    depot.put_folder(here, "runs/x", last="done")
    (tmp_path / "depot/runs/x/done").unlink()  # as a kill before the last file leaves it
    assert not depot.has("runs/x/done")
    assert not depot.get_folder("runs/x", tmp_path / "there", last="done")
    assert not (tmp_path / "there").exists()


def test_a_put_that_fails_on_the_way_leaves_nothing_that_counts(depot, tmp_path):
    (tmp_path / "depot/x/b").mkdir(parents=True)  # no file can go there
    (tmp_path / "depot/x/b/in_the_way").touch()
    with pytest.raises(RunError, match="x/b could not be put"):
        depot.put_folder(filled(tmp_path / "here", a="one", b="two", c="three"), "x", last="done")
    assert depot.names("x") == ["a", "b"]


def test_a_file_that_is_gone_makes_a_folder_not_whole(depot, tmp_path):
    depot.put_folder(filled(tmp_path / "here", a="one", b="two"), "x", last="done")
    (tmp_path / "depot/x/b").unlink()
    assert not depot.get_folder("x", tmp_path / "there", last="done")
    assert not (tmp_path / "there/done").exists()


def test_a_damaged_file_is_an_error_and_not_a_result(depot, tmp_path):
    depot.put_folder(filled(tmp_path / "here", a="one"), "x", last="done")
    (tmp_path / "depot/x/a").write_text("0ne")
    with pytest.raises(RunError, match="x/a is damaged"):
        depot.get_folder("x", tmp_path / "there", last="done")
    assert not (tmp_path / "there/done").exists()
    assert not (tmp_path / "there/a").exists()


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/../../b", "..\\a", "./a", ""])
def test_a_list_cannot_name_files_outside(depot, tmp_path, name):
    statement = {"format": 1, "when": None, "files": {name: {"size": 1, "sha256": "0", "mtime": 0}}}
    depot.write("x/done", json.dumps(statement).encode())
    with pytest.raises(RunError, match="x/done is not what this gatespace writes"):
        depot.get_folder("x", tmp_path / "there", last="done")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 2, "when": null, "files": {}}', b'{"files": {"a": 3}}'])
def test_a_last_file_of_another_kind_is_refused(depot, tmp_path, content):
    depot.write("x/done", content)
    with pytest.raises(RunError, match="x/done is not what this gatespace writes"):
        depot.get_folder("x", tmp_path / "there", last="done")


@pytest.mark.parametrize(
    ("url", "text"),
    [("/a/folder", "no URL"), ("s3://", "no URL"), ("memory://x", "no other process"), ("nosuch://x/y", "nosuch")],
)
def test_urls_that_cannot_be(url, text):
    with pytest.raises(UsageError, match=text):
        Depot(url)


def test_a_storage_that_refuses_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError, match=r"could not be written to file://"):
        Depot(f"file://{tmp_path}/file/below").write("a", b"")


def test_without_its_package_a_scheme_says_which_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match="s3fs") as caught:
        Depot("s3://bucket/path")
    assert "gatespace[remote]" in str(caught.value)


def test_paths_are_relocated_and_nothing_else():
    value = {"a": "/s/x", "b": ["/s", "/sx", 3], "c": {"d": "see /s/x", "e": None}}
    assert relocated(value, Path("/s"), Path("/t")) == {
        "a": "/t/x",
        "b": ["/t", "/sx", 3],
        "c": {"d": "see /s/x", "e": None},
    }


# ---------------------------------------------------------------------------------------------------- a study


def tiny_study(**changes):
    """One model, one run."""
    axes = {"restrictions": False, "static": [], "isolation": None}
    teach = {"teacher": {"model": "tiny", "steps": 2}}
    train = {**study().train, "pair": {"student": "tiny"}, "steps": 4}
    return study(
        **({"name": "far", "axes": axes, "points": ["G5"], "seeds": [1], "teach": teach, "train": train} | changes)
    )


def through(depot: Depot, folder: Path, config=None):
    config = config or tiny_study()
    store = Store(folder)
    join(depot, store, config)
    threads = store.begin(config, workers=1, threads=1)
    publish(depot, store)
    return store, run_study(config, store, DepotEngine(InlineEngine(), depot, store), threads=threads)


@pytest.fixture(scope="module")
def both(tmp_path_factory, shared_cache):
    """The same study in a folder, and through a depot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(shared_cache))
        base = tmp_path_factory.mktemp("both")
        plain = Store(base / "plain")
        run_study(tiny_study(), plain, InlineEngine(), threads=plain.begin(tiny_study(), workers=1, threads=1))
        depot = Depot(f"file://{base}/depot")
        store, outlook = through(depot, base / "far")
    assert {*outlook.states.values()} == {"done"}, [store.error(work.folder) for work in outlook.work]
    return plain.folder, store.folder, depot


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
    _, far, depot = both
    (name,) = depot.names("runs")
    assert depot.has(f"runs/{name}/done")
    assert scratch.UNFINISHED not in depot.names(f"runs/{name}")
    assert list((scratch_of(depot.url) / "attempts").iterdir()) == []
    assert len(list((scratch_of(depot.url) / "models").glob("*/done"))) == 1
    run = far / "runs" / name
    assert seconds_of(run) == pytest.approx((run / "done").stat().st_mtime - (run / "config.yaml").stat().st_mtime)
    assert json.loads((run / "summary.json").read_text())["steps"] == 4


def test_another_machine_gets_all_of_it_from_the_url_alone(both, tmp_path, monkeypatch):
    _, far, depot = both
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path / "cache"))  # nothing is computed, so no model is built there
    store, outlook = through(depot, tmp_path / "other")
    assert {*outlook.states.values()} == {"done"}
    there = {name: content.replace(str(far).encode(), b"STUDY") for name, content in files_of(store.folder).items()}
    assert there == files_of(far)
    assert not (tmp_path / "cache").exists()


def test_a_url_belongs_to_one_study_and_keeps_its_threads(both, tmp_path):
    depot = both[2]
    with pytest.raises(UsageError, match="--results holds another study"):
        join(depot, Store(tmp_path / "x"), tiny_study(name="other"))
    assert not (tmp_path / "x").exists()
    store = Store(tmp_path / "y")
    join(depot, store, tiny_study())
    assert store.begin(tiny_study(), workers=64, threads=None, usual=7) == 1


# ---------------------------------------------------------------------------------------------------- interruptions

KILLED = """
import json, os, sys, time
from gatespace.study import jobs, scratch
from gatespace.study.depot import Depot
from gatespace.training import loop

job, place = json.loads(sys.argv[1]), sys.argv[2]
put, step = scratch.put_snapshot, loop._step
scratch._POLL_SECONDS = 0.01

def put_and_die(depot, place, folder, step, checkpoint):
    put(depot, place, folder, step, checkpoint)
    if step >= 2:
        os._exit(9)  # as SIGKILL would, at this very place

def when_the_last_one_is_there(course, number, clock):
    while number > 0 and scratch.progress_at(Depot(job["depot"]["url"]), place) < number:
        time.sleep(0.01)
    return step(course, number, clock)

scratch.put_snapshot, loop._step = put_and_die, when_the_last_one_is_there
print(jobs.execute(job))
"""


class Lost(BaseException):
    """Stands for the end of a process where nothing that it leaves on its machine matters."""


@pytest.fixture
def prepared(both, tmp_path):
    """A depot with all but the run, the job of the run, and its place."""
    plain, _, done = both
    shutil.copytree(done.url.removeprefix("file://"), tmp_path / "depot")
    shutil.rmtree(tmp_path / "depot/runs")
    depot = Depot(f"file://{tmp_path}/depot")
    store = Store(tmp_path / "study")
    join(depot, store, tiny_study())
    store.begin(tiny_study(), workers=1, threads=1)
    (work,) = [work for work in outline(store, tiny_study(), 1)[1] if work.run is not None]
    job = {**work.job(), "depot": {"url": depot.url, "folder": str(store.folder)}}
    return plain, depot, store, job, f"runs/{work.folder.name}"


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


def test_a_killed_run_is_taken_up_on_another_machine(prepared, tmp_path, monkeypatch, shared_cache):
    plain, depot, store, job, place = prepared
    command = [sys.executable, "-c", KILLED, json.dumps(job), place]
    first = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600, capture_output=True)
    assert first.returncode == 9, first.stderr
    assert scratch.progress_at(depot, place) == 2
    heard = another_machine(tmp_path, monkeypatch, shared_cache)
    assert execute(job) == {"state": "done"}
    assert "going on from step 2 of 4" in heard
    assert depot.get_folder(place, store.folder / place, last="done")
    assert run_files(store.folder, place) == run_files(plain, place)
    assert depot.names(f"{place}/{scratch.UNFINISHED}") == []
    # Asked again, nothing is done.
    done = Path(depot.url.removeprefix("file://")) / place / "done"
    before = done.stat().st_mtime_ns
    assert execute(job) == {"state": "done"}
    assert done.stat().st_mtime_ns == before


def test_reads_of_a_worker_that_was_lost_are_counted(prepared, tmp_path, monkeypatch, shared_cache):
    plain, depot, store, job, place = prepared
    write = Depot.write

    def write_or_die(self: Depot, where: str, content: bytes) -> None:
        if where.endswith("/done"):
            raise Lost
        write(self, where, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Depot, "write", write_or_die)
        with pytest.raises(Lost):  # all is computed, and the last file is not put
            execute(job)
    assert not depot.has(f"{place}/done")
    assert len(depot.names(f"{place}/reads")) == 2
    another_machine(tmp_path, monkeypatch, shared_cache)
    assert execute(job) == {"state": "done"}
    assert depot.get_folder(place, store.folder / place, last="done")
    ours, theirs = run_files(store.folder, place), run_files(plain, place)
    assert ours.pop("reads.jsonl") == 2 * theirs.pop("reads.jsonl")
    assert ours == theirs


def test_of_several_snapshots_the_latest_that_is_whole_counts(depot, tmp_path):
    for step, text in ((1, "one"), (3, "three"), (5, "five")):
        here = filled(
            tmp_path / f"step{step}", **{"metrics.jsonl": text, f"checkpoints__step-00000{step}__state.json": text}
        )
        depot.put_folder(here, f"runs/x/unfinished/step-{step:06d}-abc", last=scratch.WHOLE)
    (tmp_path / "depot/runs/x/unfinished/step-000005-abc/whole").unlink()
    assert scratch._fetch_latest(depot, "runs/x", tmp_path / "there")
    assert (tmp_path / "there/metrics.jsonl").read_text() == "three"
    assert [path.name for path in (tmp_path / "there/checkpoints").iterdir()] == ["step-000003"]


def test_a_snapshot_has_the_checkpoint_and_the_records_and_replaces_those_before(depot, tmp_path):
    folder = filled(tmp_path / "work/run", **{"metrics.jsonl": "1\n2\n", "model__weights": "w", ".lock": ""})
    filled(folder, **{"checkpoints__step-000001__state.json": "old", "checkpoints__step-000002__state.json": "new"})
    for step in (1, 2):
        scratch.put_snapshot(depot, "runs/x", folder, step, folder / f"checkpoints/step-{step:06d}")
    (name,) = depot.names("runs/x/unfinished")
    assert name.startswith("step-000002-")
    assert depot.get_folder(f"runs/x/unfinished/{name}", tmp_path / "there", last=scratch.WHOLE)
    assert sorted(files_of(tmp_path / "there")) == ["checkpoints/step-000002/state.json", "metrics.jsonl", "whole"]
    assert not (tmp_path / "work/stage").exists()


def test_a_failed_run_leaves_its_evidence_where_the_user_is(prepared):
    _, depot, store, job, place = prepared
    job["config"]["optimizer"]["lr"] = 1e30
    engine = DepotEngine(InlineEngine(), depot, store)
    engine.start("x", job)
    [(name, outcome)] = engine.wait(60)
    engine.close()
    assert (name, outcome["state"]) == ("x", "failed")
    assert "what the step saw is in failed-step-" in outcome["error"]
    folder = store.folder / place
    (seen,) = folder.glob("failed-step-*.json")
    assert json.loads(seen.read_text())["step"] >= 2
    assert len(read(folder / "metrics.jsonl")) == json.loads(seen.read_text())["step"] - 1
    assert scratch.progress_at(depot, place) == json.loads(seen.read_text())["step"] - 1  # to go on from
    assert not (folder / "failed").exists()
    assert store.state(folder) == "waiting"  # the runner says that it failed


def test_dead_attempts_are_removed_and_living_ones_are_left(tmp_path):
    for name in ("dead", "alive", "foreign"):
        filled(tmp_path / name / ("other" if name == "foreign" else "run"), a="x")
    with claim(tmp_path / "alive"):
        scratch._remove_dead(tmp_path, "run")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "foreign"]


def test_a_worker_with_another_version_does_nothing(prepared):
    job = {**prepared[3], "version": "0.0.0"}
    outcome = execute(job)
    assert outcome["state"] == "failed"
    assert "another gatespace" in outcome["error"]
    assert "0.0.0" in outcome["error"]


def test_scores_of_a_cluster_are_the_machines_own(both, tmp_path, monkeypatch):
    plain = both[0]
    store = Store(tmp_path / "study")
    shutil.copytree(plain, store.folder)
    shutil.rmtree(store.folder / "runs")
    shutil.rmtree(store.folder / "scores")
    (work,) = [work for work in outline(store, tiny_study(), 1)[1] if work.run is not None]
    assert execute({**work.job(), "scores": str(store.scores)}) == {"state": "done"}
    assert not store.scores.exists()
    assert (scratch_of(str(store.scores)) / "scores" / "data.mdb").exists()
    assert read(store.folder / "runs" / work.folder.name / "metrics.jsonl") == read(
        plain / "runs" / work.folder.name / "metrics.jsonl"
    )


# ---------------------------------------------------------------------------------------------------- seen from outside


def test_status_knows_what_runs_on_other_machines(prepared):
    _, depot, store, job, place = prepared
    name = Path(place).name
    folder = filled(store.folder.parent / "work/run", **{"checkpoints__step-000003__state.json": "x"})
    scratch.put_snapshot(depot, place, folder, 3, folder / "checkpoints/step-000003")
    store.now_running([name])
    assert look(store).states[name] == "waiting"  # nobody holds the study
    with claim(store.folder):
        assert look(store).states[name] == "running"
    engine = DepotEngine(InlineEngine(), depot, store)
    engine._look_at([folder_of(job)])
    engine.close()
    assert progress_of(folder_of(job)) == 3


def test_the_command_takes_a_url(tmp_path, both, cli_run):
    _, far, depot = both
    file = tmp_path / "study.yaml"
    file.write_text(dump_yaml(tiny_study()))
    result = cli_run(
        "run", file, "--output", tmp_path / "out", "--results", depot.url, "--no-report", "--json", "--quiet"
    )
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["done"]) == len(list(far.glob("*/*/done")))
    wrong = cli_run("run", file, "--output", tmp_path / "no", "--results", "nothing")
    assert wrong.exit_code == 2
    assert "no URL" in wrong.stderr
    assert not (tmp_path / "no").exists()
