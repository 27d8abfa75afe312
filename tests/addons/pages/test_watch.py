"""How a study stands, as the page is told: from folders in every state, again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gatespace.addons.pages.watch_snapshot import Watcher, check_watchable
from gatespace.errors import UsageError
from gatespace.files import claim
from gatespace.study.records import Base
from tests.explore.watched import begin, finish, lines, record, under_way

TEACHER, STUDENT_BEFORE = "teach the teacher of messages", "evaluate the student of messages"


def watcher(folder: Path, **options) -> Watcher:
    return Watcher(folder, fresh_seconds=0, **options)


def rows(snapshot) -> dict[str, dict]:
    return {row["title"]: row for row in snapshot["rows"]}


def states(snapshot) -> dict[str, str]:
    return {title: row["state"] for title, row in rows(snapshot).items()}


def test_every_state(tmp_path):
    store, work = begin(tmp_path / "study")
    for title, accuracy in ((TEACHER, 0.9), (STUDENT_BEFORE, 0.3), ("evaluate the teacher of messages", 0.9)):
        work[title].folder.mkdir(parents=True)
        finish(work[title].folder, accuracy)
    done, running, stopped, failed = (work[f"messages {name} seed 1"] for name in ("G4", "G5", "static:0.5", "todi"))
    under_way(done.folder, 10, accuracy=0.5)
    began = time.time() - 60
    os.utime(done.folder / "config.yaml", (began, began))
    finish(done.folder, 0.8125)
    under_way(running.folder, 4, accuracy=0.625)
    under_way(stopped.folder, 7)
    under_way(failed.folder, 2)
    store.fail(failed.folder, "the gradient is not finite\n  got: inf", "Traceback …")
    with claim(store.folder), claim(running.folder):
        found = watcher(store.folder).snapshot()
    seen = rows(found)
    assert (found["kind"], found["title"], found["alive"], found["state"]) == ("study", "watched", True, "running")
    assert seen[TEACHER]["state"] == "done"
    assert (seen[STUDENT_BEFORE]["accuracy"], seen[STUDENT_BEFORE]["kind"]) == (0.3, "preparation")
    one = seen[done.title]
    assert (one["point"], one["task"], one["seed"], one["state"]) == ("G4", "messages", 1, "done")
    assert (one["step"], one["steps"], one["accuracy"]) == (10, 10, 0.8125)  # validation, never test
    assert one["lam"] == pytest.approx(record(10)["lam_mean"], rel=1e-5)
    assert one["loss"] == pytest.approx(record(10)["loss"], rel=1e-5)
    assert one["seconds"] == pytest.approx(60, abs=20)
    one = seen[running.title]
    assert (one["state"], one["step"], one["accuracy"], one["error"]) == ("running", 4, 0.625, "")
    assert (seen[stopped.title]["state"], seen[stopped.title]["step"]) == ("stopped", 7)
    assert seen[stopped.title]["seconds"] is None
    one = seen[failed.title]
    assert (one["state"], one["step"], one["details"]) == ("failed", 2, "Traceback …")
    assert one["error"].startswith("the gradient is not finite")
    assert one["when"].endswith("Z")
    assert seen["messages G5 seed 2"]["state"] == "waiting"
    # As `gatespace status` has it: what is left of one run, a whole one for each other, by two workers.
    waiting = sum(state in ("waiting", "stopped") for state in states(found).values())
    assert found["seconds_left"] == pytest.approx((waiting + 0.6) * one_minute(done.folder) / 2, rel=0.01)
    curves = found["curves"]
    assert curves[done.name]["accuracy"] == [0.8125]
    assert curves[running.name]["step"] == [1, 2, 3, 4]
    assert set(curves) == {done.name, running.name, stopped.name, failed.name, work[TEACHER].name}
    json.dumps(found, allow_nan=False)


def one_minute(folder: Path) -> float:
    return (folder / "done").stat().st_mtime - (folder / "config.yaml").stat().st_mtime


def test_what_waits_for_a_failure_cannot_be_done(tmp_path):
    store, work = begin(tmp_path / "study")
    store.fail(work[TEACHER].folder, "no room")
    found = watcher(store.folder).snapshot()
    seen = rows(found)
    assert seen["messages G5 seed 1"]["state"] == "blocked"
    assert seen["messages G5 seed 1"]["error"] == f"{work[TEACHER].name} failed"
    assert seen[STUDENT_BEFORE]["state"] == "waiting"
    assert (found["alive"], found["state"]) == (False, "stopped")
    work[STUDENT_BEFORE].folder.mkdir(parents=True)
    finish(work[STUDENT_BEFORE].folder, 0.1)
    assert watcher(store.folder).snapshot()["state"] == "failed"


def test_only_curves_that_have_changed(tmp_path):
    store, work = begin(tmp_path / "study")
    one, other = (work[f"messages {name} seed 1"] for name in ("G4", "G5"))
    under_way(one.folder, 3)
    under_way(other.folder, 3)
    watch = watcher(store.folder)
    first = watch.snapshot()
    assert (first["whole"], set(first["curves"])) == (True, {one.name, other.name})
    second = watch.snapshot(first["version"])
    assert (second["whole"], second["curves"]) == (False, {})
    under_way(other.folder, 1, first=4)
    third = watch.snapshot(second["version"])
    assert {name: curves["step"] for name, curves in third["curves"].items()} == {other.name: [1, 2, 3, 4]}
    finish(one.folder, 0.75)
    fourth = watch.snapshot(third["version"])
    assert {name: curves["accuracy"] for name, curves in fourth["curves"].items()} == {one.name: [0.75]}
    # One who has missed some gets all of them; so does one who comes from another watcher.
    assert set(watch.snapshot(first["version"])["curves"]) == {one.name, other.name}
    for since in ("", "nonsense", "x.y", f"{first['version']}9x", watcher(store.folder).snapshot()["version"]):
        assert watch.snapshot(since)["whole"] is True
        assert set(watch.snapshot(since)["curves"]) == {one.name, other.name}
    # A run that begins again has the curve that its file has.
    (other.folder / "metrics.jsonl").unlink()
    assert watch.snapshot(fourth["version"])["curves"][other.name]["step"] == []


def test_long_logs_come_in_parts_and_what_runs_comes_first(tmp_path):
    store, work = begin(tmp_path / "study", train={"steps": 50, "pair": {"student": "tiny-student"}})
    one, other = (work[f"messages {name} seed 1"] for name in ("G4", "G5"))
    under_way(one.folder, 30)
    under_way(other.folder, 30)
    with claim(other.folder):
        watch = watcher(store.folder, most_bytes=600)
        first = watch.snapshot()
        assert (first["behind"], set(first["curves"])) == (True, {other.name})
        assert rows(first)[one.title]["step"] == 30  # read from the end
        for _ in range(200):
            last = watch.snapshot()
            if not last["behind"]:
                break
    assert {name: len(curves["step"]) for name, curves in last["curves"].items()} == {one.name: 30, other.name: 30}


def test_from_before_the_beginning(tmp_path):
    folder = tmp_path / "study"
    watch = watcher(folder)
    found = watch.snapshot()
    assert (found["kind"], found["state"], found["rows"]) == ("nothing", "nothing", [])
    assert not folder.exists()
    begin(folder)
    found = watch.snapshot(found["version"])
    assert (found["kind"], found["state"], len(found["rows"])) == ("study", "stopped", 15)


def test_a_base_that_is_chosen_on_the_way_shows(tmp_path):
    store, _ = begin(tmp_path / "study", points="paper", seeds=[1])
    watch = watcher(store.folder)
    before = states(watch.snapshot())
    store.choose("messages", Base("G3", "validation", {"G3": 0.5}))
    after = states(watch.snapshot())
    assert before.keys() != after.keys()
    assert "messages HG3,d+2 seed 1" in after


def test_a_study_file_that_cannot_be_read_does_not_blind(tmp_path):
    store, work = begin(tmp_path / "study")
    under_way(work["messages G5 seed 1"].folder, 3)
    watch = watcher(store.folder)
    good = watch.snapshot()
    text = (store.folder / "study.yaml").read_text()
    (store.folder / "study.yaml").write_text("points: [")
    found = watch.snapshot(good["version"])
    assert found["rows"] == good["rows"]
    assert "study.yaml" in found["problem"]
    (store.folder / "study.yaml").write_text(text)
    assert watch.snapshot(found["version"])["problem"] == ""


def test_a_run_and_a_folder_of_runs(gated, runs, tmp_path):
    found = watcher(gated).snapshot()
    (row,) = found["rows"]
    summary = json.loads((gated / "summary.json").read_text())
    assert (found["kind"], found["title"], found["state"]) == ("run", "gated", "done")
    assert (row["task"], row["seed"], row["step"], row["steps"], row["state"]) == ("synthetic", 3, 4, 4, "done")
    assert row["accuracy"] == summary["evaluation"]["val"]["metrics"]["accuracy"]
    last = json.loads((gated / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["lam"] == pytest.approx(last["lam_mean"], rel=1e-5)
    assert found["curves"]["gated"]["step"] == [1, 2, 3, 4]
    found = watcher(runs).snapshot()
    assert (found["kind"], {row["id"]: row["point"] for row in found["rows"]}["todi"]) == ("runs", "todi")
    (row,) = watcher(runs.parent / "taught").snapshot()["rows"]
    assert (row["point"], row["lam"], row["steps"]) == ("teach", None, 10)
    assert row["loss"] > 0


def test_a_run_alone_has_its_time_left_by_its_pace(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 10\nseed: 7\ntask: {name: synthetic}\n")
    under_way(tmp_path, 4)
    assert watcher(tmp_path).snapshot()["state"] == "stopped"
    with claim(tmp_path):
        found = watcher(tmp_path).snapshot()
        assert (found["state"], found["seconds_left"], found["rows"][0]["seed"]) == ("running", 9.0, 7)
        (tmp_path / "timings.jsonl").unlink()
        assert watcher(tmp_path).snapshot()["seconds_left"] is None


def test_a_config_of_another_time_is_shown_as_far_as_it_goes(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 3\nobjective: {method: gated, gate: no gate}\n")
    (row,) = watcher(tmp_path).snapshot()["rows"]
    assert (row["steps"], row["point"]) == (3, tmp_path.name)


def test_nothing_is_written(tmp_path):
    store, work = begin(tmp_path / "study")
    under_way(work["messages G5 seed 1"].folder, 3)
    lines(work["messages G4 seed 1"].folder / "metrics.jsonl", record(1), tail=b"torn")
    with claim(work["messages G5 seed 1"].folder):
        before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
        watcher(store.folder).snapshot()
        after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    assert after == before


def test_one_look_serves_all_who_ask_at_once(tmp_path):
    store, work = begin(tmp_path / "study")
    watch = Watcher(store.folder, fresh_seconds=3600)
    first = watch.snapshot()
    under_way(work["messages G5 seed 1"].folder, 3)
    assert watch.snapshot()["version"] == first["version"]
    assert watch.snapshot()["curves"] == {}


def test_what_can_be_watched(tmp_path):
    assert check_watchable(tmp_path / "not yet") is False
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".lock").touch()
    assert check_watchable(tmp_path / "empty") is False
    store, _ = begin(tmp_path / "study")
    assert check_watchable(store.folder) is True
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="only a folder"):
        check_watchable(tmp_path / "notes.txt")
    with pytest.raises(UsageError, match="not the folder of a study or a run"):
        check_watchable(tmp_path)


def test_torch_stays_away(tmp_path):
    store, _ = begin(tmp_path / "study")
    code = (
        "import sys; from gatespace.addons.pages.watch import watch_server; "
        "from gatespace.addons.pages.watch_snapshot import Watcher; "
        f"assert len(Watcher({str(store.folder)!r}).snapshot()['rows']) == 15; print(sorted({{'torch', 'numpy'}} & "
        "set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
