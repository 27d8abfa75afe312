"""The live page: how a study stands, from folders in every state; logs while they grow; who may read the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from gatespace.addons.pages.watch import Budget, Records, Tail, Watcher, check_watchable, thinned, watch_server
from gatespace.errors import UsageError
from gatespace.files import claim, encode
from gatespace.runs import Base, RunFolder
from tests.addons.pages.test_page import ask
from tests.addons.pages.watched import begin, finish, lines, record, under_way

TEACHER, STUDENT_BEFORE = "teach the teacher of messages", "evaluate the student of messages"


def watcher(folder: Path, **options) -> Watcher:
    return Watcher(folder, fresh_seconds=0, **options)


def rows(snapshot) -> dict[str, dict]:
    return {row["title"]: row for row in snapshot["rows"]}


def states(snapshot) -> dict[str, str]:
    return {title: row["state"] for title, row in rows(snapshot).items()}


def test_alarms_are_shown_while_they_are_in_the_log(tmp_path):
    run = RunFolder(tmp_path / "run")
    lines(run.log_file("metrics"), record(1))
    run.config_file.write_text("steps: 9\n")
    looking = watcher(run.path)
    assert looking.snapshot()["rows"][0]["alarms"] == []
    first, second = (
        {"step": step, "alarm": "legal", "value": 0.1, "threshold": 0.3, "seen": f"Step {step}.", "helps": "Less."}
        for step in (4, 8)
    )
    lines(run.log_file("alarms"), first, second)
    shown = [{"step": step, "alarm": "legal", "text": f"Step {step}. Less."} for step in (4, 8)]
    assert looking.snapshot()["rows"][0]["alarms"] == shown
    os.truncate(run.log_file("alarms"), len(encode(first)))  # resumed from an earlier checkpoint
    assert looking.snapshot()["rows"][0]["alarms"] == shown[:1]


def test_every_state(tmp_path):
    study, work = begin(tmp_path / "study")
    for title, accuracy in ((TEACHER, 0.9), (STUDENT_BEFORE, 0.3), ("evaluate the teacher of messages", 0.9)):
        finish(work[title].folder, accuracy)
    done, running, stopped, failed = (work[f"messages {name} seed 1"] for name in ("G4", "G5", "static:0.5", "todi"))
    under_way(done.folder, 10, accuracy=0.5)
    began = time.time() - 60
    os.utime(done.folder.config_file, (began, began))
    finish(done.folder, 0.8125)
    under_way(running.folder, 4, accuracy=0.625)
    under_way(stopped.folder, 7)
    under_way(failed.folder, 2)
    failed.folder.fail("the gradient is not finite\n  got: inf", "Traceback …")
    with study.claim(), running.folder.claim():
        found = watcher(study.path).snapshot()
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


def one_minute(run: RunFolder) -> float:
    return run.done_file.stat().st_mtime - run.config_file.stat().st_mtime


def test_what_waits_for_a_failure_cannot_be_done(tmp_path):
    study, work = begin(tmp_path / "study")
    work[TEACHER].folder.fail("no room")
    found = watcher(study.path).snapshot()
    seen = rows(found)
    assert seen["messages G5 seed 1"]["state"] == "blocked"
    assert seen["messages G5 seed 1"]["error"] == f"{work[TEACHER].name} failed"
    assert seen[STUDENT_BEFORE]["state"] == "waiting"
    assert (found["alive"], found["state"]) == (False, "stopped")
    finish(work[STUDENT_BEFORE].folder, 0.1)
    assert watcher(study.path).snapshot()["state"] == "failed"


def test_only_curves_that_have_changed(tmp_path):
    study, work = begin(tmp_path / "study")
    one, other = (work[f"messages {name} seed 1"] for name in ("G4", "G5"))
    under_way(one.folder, 3)
    under_way(other.folder, 3)
    watch = watcher(study.path)
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
    for since in ("", "nonsense", "x.y", f"{first['version']}9x", watcher(study.path).snapshot()["version"]):
        assert watch.snapshot(since)["whole"] is True
        assert set(watch.snapshot(since)["curves"]) == {one.name, other.name}
    # A run that begins again has the curve that its file has.
    other.folder.log_file("metrics").unlink()
    assert watch.snapshot(fourth["version"])["curves"][other.name]["step"] == []


def test_long_logs_come_in_parts_and_what_runs_comes_first(tmp_path):
    study, work = begin(tmp_path / "study", train={"steps": 50, "pair": {"student": "tiny-student"}})
    one, other = (work[f"messages {name} seed 1"] for name in ("G4", "G5"))
    under_way(one.folder, 30)
    under_way(other.folder, 30)
    with other.folder.claim():
        watch = watcher(study.path, most_bytes=600)
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
    study, _ = begin(tmp_path / "study", points="paper", seeds=[1])
    watch = watcher(study.path)
    before = states(watch.snapshot())
    study.choose("messages", Base("G3", "validation", {"G3": 0.5}))
    after = states(watch.snapshot())
    assert before.keys() != after.keys()
    assert "messages HG3,d+2 seed 1" in after


def test_a_study_file_that_cannot_be_read_does_not_blind(tmp_path):
    study, work = begin(tmp_path / "study")
    under_way(work["messages G5 seed 1"].folder, 3)
    watch = watcher(study.path)
    good = watch.snapshot()
    text = study.study_file.read_text()
    study.study_file.write_text("points: [")
    found = watch.snapshot(good["version"])
    assert found["rows"] == good["rows"]
    assert "study.yaml" in found["problem"]
    study.study_file.write_text(text)
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
    under_way(RunFolder(tmp_path), 4)
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
    study, work = begin(tmp_path / "study")
    under_way(work["messages G5 seed 1"].folder, 3)
    lines(work["messages G4 seed 1"].folder.log_file("metrics"), record(1), tail=b"torn")
    with work["messages G5 seed 1"].folder.claim():
        before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
        watcher(study.path).snapshot()
        after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    assert after == before


def test_one_look_serves_all_who_ask_at_once(tmp_path):
    study, work = begin(tmp_path / "study")
    watch = Watcher(study.path, fresh_seconds=3600)
    first = watch.snapshot()
    under_way(work["messages G5 seed 1"].folder, 3)
    assert watch.snapshot()["version"] == first["version"]
    assert watch.snapshot()["curves"] == {}


def test_what_can_be_watched(tmp_path):
    assert check_watchable(tmp_path / "not yet") is False
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".lock").touch()
    assert check_watchable(tmp_path / "empty") is False
    study, _ = begin(tmp_path / "study")
    assert check_watchable(study.path) is True
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="only a folder"):
        check_watchable(tmp_path / "notes.txt")
    with pytest.raises(UsageError, match="not the folder of a study or a run"):
        check_watchable(tmp_path)


def test_torch_stays_away(tmp_path):
    study, _ = begin(tmp_path / "study")
    code = (
        "import sys; from gatespace.addons.pages.watch import Watcher, watch_server; "
        f"assert len(Watcher({str(study.path)!r}).snapshot()['rows']) == 15; print(sorted({{'torch', 'numpy'}} & "
        "set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# ---------------------------------------------------------------------------------------------------- logs


def steps(tail: Tail, budget: int = 10**6) -> tuple[bool, list[int]]:
    anew, records = tail.read(Budget(budget))
    return anew, [one["step"] for one in records]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(path, record(1), record(2))
    return path


def test_only_what_is_new_and_whole(log):
    tail = Tail(log)
    assert steps(tail) == (False, [1, 2])
    assert steps(tail) == (False, [])
    lines(log, record(3), tail=b'{"step": 4, "lo')
    assert steps(tail) == (False, [3])
    lines(log, tail=b'ss": 1.5}\n')
    assert steps(tail) == (False, [4])
    budget = Budget(10**6)
    lines(log, record(5))
    assert tail.read(budget)[1][0]["step"] == 5
    assert budget.left == 10**6 - len(log.read_bytes().splitlines(keepends=True)[-1])


def test_a_log_that_was_cut_is_read_anew(log):
    tail = Tail(log)
    steps(tail)
    os.truncate(log, len(log.read_bytes().splitlines(keepends=True)[0]))
    assert steps(tail) == (True, [1])
    lines(log, record(2, loss=9.0), record(3))
    assert steps(tail) == (False, [2, 3])


def test_a_log_that_was_cut_and_has_grown_beyond_where_it_was(log):
    tail = Tail(log)
    steps(tail)
    os.truncate(log, len(log.read_bytes().splitlines(keepends=True)[0]))
    lines(log, record(2, loss=123456.789), record(3), record(4))
    assert steps(tail) == (True, [1, 2, 3, 4])


def test_a_log_that_was_replaced(log):
    tail = Tail(log)
    steps(tail)
    log.rename(log.with_name("old"))
    assert steps(tail) == (True, [])
    assert steps(tail) == (False, [])
    lines(log, record(1), record(2), record(3))
    assert steps(tail) == (False, [1, 2, 3])
    other = log.with_name("other")
    other.write_bytes(log.read_bytes())
    other.replace(log)
    assert steps(tail) == (True, [1, 2, 3])


def test_a_long_log_is_read_in_parts(log):
    lines(log, *(record(step) for step in range(3, 40)))
    tail, seen = Tail(log), []
    for _ in range(100):
        _, found = steps(tail, 500)
        assert found
        seen += found
        if not tail.behind:
            break
    assert seen == list(range(1, 40))
    assert len(seen) > len(found) > 0
    lines(log, record(40))
    assert (steps(tail, 0), tail.behind) == ((False, []), True)


def test_a_line_that_is_no_record_is_passed_over(log):
    lines(log, tail=b"nonsense\n[1]\n\xff\xfe\n")
    lines(log, record(3))
    assert steps(Tail(log)) == (False, [1, 2, 3])


def test_columns_follow_their_files(tmp_path):
    records = Records(RunFolder(tmp_path))
    records.read(Budget(10**6), 1)
    assert (records.step, records.version, records.seconds_per_step) == (0, 0, None)
    lines(tmp_path / "metrics.jsonl", record(1, lam_mean=None), record(2), record(3, loss=None), {"loss": 1.0})
    lines(tmp_path / "timings.jsonl", {"step": 1, "wall": {"a": 1.0, "b": 0.5}}, {"step": 2, "wall": {"a": 0.5}})
    for split, step, accuracy in (("val", 0, 0.25), ("test", 1, 0.9), ("val", 2, 0.5)):
        lines(tmp_path / "evaluations.jsonl", {"split": split, "step": step, "accuracy": accuracy})
    records.read(Budget(10**6), 2)
    assert (records.step, records.version, records.seconds_per_step) == (3, 2, 1.0)
    records.final = 0.75
    curves = records.curves(10)
    assert (curves["step"], curves["loss"][2], curves["lam"][0]) == ([1, 2, 3], None, None)
    assert curves["loss"][0] == pytest.approx(record(1)["loss"], rel=1e-5)
    assert (curves["evaluated"], curves["accuracy"]) == ([0, 2, 3], [0.25, 0.5, 0.75])
    records.read(Budget(10**6), 3)
    assert records.version == 2
    os.truncate(tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").read_bytes().index(b"\n") + 1)
    (tmp_path / "evaluations.jsonl").unlink()
    records.read(Budget(10**6), 4)
    assert (records.step, records.version, records.accuracies) == (1, 4, {})
    lines(tmp_path / "metrics.jsonl", record(5), record(4))
    records.read(Budget(10**6), 5)
    assert list(records.steps) == [1, 4]


def test_thinning_keeps_ends_and_means():
    assert thinned([1.0, 2.0], 2) == [1.0, 2.0]
    assert thinned([1.0, 2.0, 6.0], 2) == [1.5, 6.0]
    assert thinned([1, 2, 3], 2, last=True) == [2, 3]
    assert thinned([float("nan"), float("nan"), 1.0, float("inf")], 2) == [None, None]
    assert thinned([], 2) == []
    many = thinned([float(i) for i in range(1001)], 100)
    assert len(many) <= 100
    assert many[0] == 5.0


# ---------------------------------------------------------------------------------------------------- the server


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path / "cache"))


@contextmanager
def served(folder, **options):
    watch = watch_server(folder, **options)
    with watch.server as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield watch
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def study(tmp_path):
    return begin(tmp_path / "study")[0].path


def test_without_the_token_nothing(study):
    with served(study) as watch:
        address, token = watch.server.server_address, watch.token
        assert address[0] == "127.0.0.1"
        assert len(token) >= 32
        other = token[:-1] + ("a" if token[-1] != "a" else "b")
        wrong = ["", "?token=", f"?token={other}", f"?token={token}x", f"?token={token[:-1]}", "?token=%ff%ed%a0%80"]
        wrong += [f"?token={token}&token=x", f"?Token={token}"]
        for path in ("/", "/snapshot", "/other"):
            for query in wrong:
                status, body, headers = ask(address, path + query)
                assert (status, "token" in body, token in body) == (403, True, False)
                assert headers["Content-Type"].startswith("text/plain")
            assert ask(address, f"{path}?token={token}")[0] == (404 if path == "/other" else 200)


@pytest.mark.parametrize("target", ["//[", "//[v1.x]?token=1", "/%", "?", "*", "//evil.example:x/"])
def test_an_odd_address_gets_a_reply(target, study):
    with served(study) as watch:
        assert ask(watch.server.server_address, target)[0] in (400, 403)


def test_other_names_of_this_machine_are_refused_even_with_the_token(study):
    with served(study) as watch:
        address, path = watch.server.server_address, f"/snapshot?token={watch.token}"
        for host in (
            "evil.example",
            f"evil.example:{watch.port}",
            f"127.0.0.1.evil.example:{watch.port}",
            "",
            "0.0.0.0:1",
        ):
            status, body, _ = ask(address, path, host=host)
            assert (status, "watched" in body) == (403, False)
        assert ask(address, path, host=f"localhost:{watch.port}")[0] == 200


def test_it_can_only_be_read(study):
    with served(study) as watch:
        address = watch.server.server_address
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(address, f"/?token={watch.token}", method=method)[0] == 501
        status, body, headers = ask(address, f"/snapshot?token={watch.token}", method="HEAD")
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) > 100


def test_headers_and_page(study):
    with served(study) as watch:
        address = watch.server.server_address
        status, body, headers = ask(address, f"/?token={watch.token}")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', body)[1]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src 'self';" in policy
        assert "unsafe" not in policy
        assert watch.token not in body
        _, text, told = ask(address, f"/snapshot?token={watch.token}")
        assert json.loads(text)["title"] == "watched"
        for found in (headers, told):
            assert "frame-ancestors 'none'" in found["Content-Security-Policy"]
            assert (found["Cache-Control"], found["Referrer-Policy"]) == ("no-store", "no-referrer")
            assert (found["X-Content-Type-Options"], found["Cross-Origin-Resource-Policy"]) == (
                "nosniff",
                "same-origin",
            )
            assert not any(name.lower().startswith("access-control") for name in found)
        assert told["Content-Security-Policy"].startswith("default-src 'none'")


def test_the_address_stays_and_only_its_owner_can_read_it(study, tmp_path):
    with served(study) as first:
        port, token = first.port, first.token
        (kept,) = (tmp_path / "cache" / "watch").iterdir()
        assert kept.stat().st_mode & 0o777 == 0o600
        with served(study) as beside:  # the port is taken, so another one
            assert (beside.token, beside.port == port) == (token, False)
    with served(study) as again:
        assert (again.port, again.token) == (port, token)
    with served(study / "elsewhere") as other:
        assert other.token != token
    with served(study, new_address=True) as new:
        assert new.token != token
        assert ask(new.server.server_address, f"/?token={token}")[0] == 403
    with served(study) as again:
        assert again.token == new.token
        kept.chmod(0o644)  # somebody may have read it
    with served(study) as last:
        assert last.token != new.token
    kept.chmod(0o600)
    kept.write_text('{"port": 70000, "token": "short"}')
    with served(study) as last:
        assert len(last.token) >= 32


def test_a_port_that_is_taken_is_told(study):
    with served(study) as watch, pytest.raises(UsageError, match="another --port"):
        watch_server(study, port=watch.port)


def test_a_cache_that_cannot_be_written_costs_only_the_address(study, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path / "file" / "cache"))
    with served(study) as watch:
        assert ask(watch.server.server_address, f"/?token={watch.token}")[0] == 200
