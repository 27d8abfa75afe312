"""A small study, really trained: what it leaves behind, what happens when runs fail, and that nothing hangs on how it
was run."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from statistics import fmean

import pytest

from gatespace.cli.engine import usual_threads
from gatespace.cli.study_file import load_study
from gatespace.errors import RunError, UsageError
from gatespace.evaluation.calibration import LabelProbabilities, calibrate
from gatespace.evidence.analysis import analyse
from gatespace.runs import RunFolder, StudyFolder
from gatespace.study.engines import LocalEngine
from gatespace.study.jobs import execute
from gatespace.study.outlook import read_outlook
from gatespace.study.results import read_results
from gatespace.study.runner import run_study

from .conftest import ROWS, InlineEngine, settings, study

pytestmark = pytest.mark.slow


def run(config, folder: Path, *, engine=None, retry: bool = False, notes: list[str] | None = None):
    """In this process, unless another engine is given: processes cost more time than what most tests ask them to do."""
    study_folder = StudyFolder(folder)
    threads = study_folder.begin(config, workers=2, threads=1)
    heard = [] if notes is None else notes
    return run_study(config, study_folder, engine or InlineEngine(), threads=threads, retry=retry, note=heard.append)


def models_of(done: Path, folder: Path) -> Path:
    """A study's folder with the models and baselines of another, and no runs."""
    for part in ("models", "baselines"):
        shutil.copytree(done / part, folder / part)
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory, shared_cache):
    """A study that is done, by two processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(shared_cache))
        folder = tmp_path_factory.mktemp("done") / "study"
        outlook = run(study(), folder, engine=LocalEngine(2, 1))
    assert {*outlook.states.values()} == {"done"}, outlook.errors()
    return folder


def numbers(folder: Path) -> dict[str, object]:
    """All that may not depend on how a study was run."""
    results = read_results(folder)
    return {
        name: (result.gate, result.fingerprint, result.lam_stats, result.scores, result.curve())
        for name, result in results.runs.items()
    }


def test_results_are_those_of_the_run_folders(done):
    results = read_results(done)
    assert results.problems == ()
    assert {result.state for result in results.runs.values()} == {"done"}
    assert set(results.baselines["messages"].start) == set(results.baselines["messages"].teacher) == {"val", "test"}
    assert results.baselines["messages"].start["test"].calibration.count == ROWS
    for result in results.runs.values():
        score = result.scores["test"]
        predicted = result.predictions("test")
        assert score.count == len(predicted) == ROWS
        assert score.correct == sum(row.gold == row.response for row in predicted)
        assert score.calibration.count == ROWS
        assert len(result.curve()) == result.cost.steps == 3
        assert result.environment["threads"] == 1
        assert not (result.folder / "model").exists()
        assert len(result.fingerprint) >= 16


def test_a_twin_has_the_mean_of_its_dynamic_run(done):
    results = read_results(done)
    for point in ("G4", "G5"):
        means = set()
        for seed in (42, 2):
            dynamic, twin = results.run("messages", point, seed), results.run("messages", f"twin({point})", seed)
            # E[λ] is the mean over all tokens of the training, counted here from its steps.
            steps = dynamic.curve()
            mean = sum(s["lam_mean"] * s["tokens"] for s in steps) / sum(s["tokens"] for s in steps)
            assert twin.lam == pytest.approx(mean, abs=1e-12)
            assert twin.lam_stats.mean == pytest.approx(mean, abs=1e-6)
            assert twin.lam_stats.sd == pytest.approx(0, abs=1e-6)
            means.add(twin.lam)
        assert len(means) == 2  # per seed


def test_a_control_has_the_lam_of_its_gate_in_the_first_step(done):
    results = read_results(done)
    gate, control = (results.run("messages", point, 42).curve()[0] for point in ("G5", "shuffled(G5)"))
    assert control["lam_hist"] == gate["lam_hist"]
    assert control["loss"] != gate["loss"]


def test_every_read_of_the_test_split_is_recorded(done):
    results = read_results(done)
    reads = {read.run: read for read in results.test_reads}
    assert set(results.runs) < set(reads)
    assert len(reads) == len(results.runs) + 2
    assert all(read.reads == 1 and read.rows == ROWS for read in reads.values())


def test_runs_share_the_teachers_answers(done):
    costs = [result.cost for result in read_results(done).runs.values()]
    assert sum(cost.scores_cached for cost in costs) > 0.4 * sum(cost.scores_asked for cost in costs)
    assert sum(cost.teacher_tokens for cost in costs) > 0


def test_outcomes_of_label_probabilities_are_fitted_on_validation(done):
    results = read_results(done)
    models = [(run.folder, run.scores) for run in results.runs.values()]
    known = results.baselines["messages"]
    models += [(known.folders["start"], known.start), (known.folders["teacher"], known.teacher)]
    for folder, scores in models:
        rows = {
            split: (
                [row["references"][0] for row in records],
                [
                    LabelProbabilities(
                        {label: row["probabilities"][label] for label in score.labels.confusion}, row["mass"]
                    )
                    for row in records
                ],
            )
            for split, score in scores.items()
            for records in [RunFolder(folder).predictions(split)]
        }
        for split, score in scores.items():
            assert score.calibration == calibrate(*rows[split], rows["val"])
            assert None not in (score.calibration.prior_corrected, score.calibration.auc)


def test_a_study_names_its_outcome(tmp_path, done):
    folder = tmp_path / "study"
    shutil.copytree(done, folder)
    before = read_results(folder)
    for path in folder.glob("runs/*/summary.json"):  # as an earlier release wrote it
        summary = json.loads(path.read_text())
        for record in summary["evaluation"].values():
            del record["calibration"]["auc"], record["calibration"]["prior_corrected"]
        path.write_text(json.dumps(summary))
    for outcome, metric in (("auc", "macro AUC"), ("prior_corrected", "prior-corrected accuracy")):
        outlook = run(study(outcome=outcome), folder)
        assert {*outlook.states.values()} == {"done"}
        results = read_results(folder)
        assert results.runs.keys() == before.runs.keys()  # no run depends on it
        assert results.looks[-1].digest != before.looks[-1].digest
        for name, result in results.runs.items():
            old, score = before.runs[name].scores["test"], result.scores["test"]
            assert score.metric == metric
            assert score.accuracy == getattr(old.calibration, outcome)
            assert score.metrics == old.metrics
        for c in analyse(results).comparisons:
            if c.all is not None:
                sides = [
                    [results.run(c.task, point, seed).scores["test"].accuracy for seed in c.all.seeds]
                    for point in (c.left, c.right)
                ]
                assert c.all.mean == pytest.approx(100 * (fmean(sides[0]) - fmean(sides[1])))
                assert c.mcnemar == ()
    train = {**settings()["train"], "evaluation": {}}
    with pytest.raises(UsageError, match="label probabilities of val and test"):
        study(outcome="auc", train=train)


def test_a_study_that_is_done_is_left_as_it_is(done):
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*.jsonl")}
    outlook = run(study(), done)
    assert {*outlook.states.values()} == {"done"}
    assert before == {path: path.stat().st_mtime_ns for path in done.rglob("*.jsonl")}


def test_first_seed_and_decimals(tmp_path, done):
    axes = {"restrictions": False, "static": [], "isolation": {"reuse": "first-seed", "decimals": 3, "points": ["G5"]}}
    shutil.copytree(done, tmp_path / "study")  # the dynamic runs are those of the other study, and are not run again
    run(study(axes=axes), tmp_path / "study")
    results = read_results(tmp_path / "study")
    dynamic = results.run("messages", "G5", 42)
    wanted = round(dynamic.lam_stats.mean, 3)
    for seed in (42, 2):
        assert results.run("messages", "twin(G5)", seed).lam == pytest.approx(wanted, abs=1e-12)
    assert results.run("messages", "twin(G4)", 42) is None


def test_rkl_weighted_match(tmp_path, done):
    shutil.copytree(done, tmp_path / "study")
    axes = {"restrictions": False, "static": [], "isolation": {"match": ["rkl"], "points": ["G5"]}}
    run(study(axes=axes, seeds=[42]), tmp_path / "study")
    results = read_results(tmp_path / "study")
    wanted = results.run("messages", "G5", 42).lam_stats.rkl_mean
    twin = results.run("messages", "twin-rkl(G5)", 42)
    assert twin.lam == pytest.approx(wanted, abs=1e-12)
    assert abs(wanted - results.run("messages", "G5", 42).lam_stats.mean) > 1e-4


def test_the_base_is_the_best_on_validation_and_one_process_gives_what_two_give(tmp_path, done):
    axes = {"restrictions": False, "static": [], "isolation": {"points": ["G5"]}, "published": ["todi"]}
    notes: list[str] = []
    folder = models_of(done, tmp_path / "study")
    run(study(points="paper", seeds=[42], axes=axes), folder, notes=notes)
    results = read_results(folder)
    base = results.bases["messages"]
    val = {p: results.run("messages", p, 42).scores["val"].accuracy for p in ("G1", "G3", "G4", "G5")}
    assert base.val == val
    assert val[base.point] == max(val.values())
    assert len([r for r in results.runs.values() if r.spec.point.startswith(f"H{base.point},")]) == 4
    assert any("best on validation" in note for note in notes)
    assert {r.state for r in results.runs.values()} == {"done"}
    assert len(results.points("messages", "point")) == 13
    # Runs that both studies have were here one after the other, in another order, with another cache of scores.
    ours, theirs = numbers(folder), numbers(done)
    common = set(ours) & set(theirs)
    assert {results.runs[name].spec.point for name in common} == {"G4", "G5", "twin(G5)", "todi"}
    assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}


# ---------------------------------------------------------------------------------------------------- failures


def test_a_failed_run_is_recorded_and_the_others_go_on(tmp_path, done):
    shutil.copytree(done, tmp_path / "study")
    folder = tmp_path / "study"
    results = read_results(folder)
    broken = results.run("messages", "G4", 2)
    # Another run's folder: `train` refuses to go on in it.
    shutil.rmtree(broken.folder)
    shutil.copytree(results.run("messages", "G5", 2).folder, broken.folder)
    (broken.folder / "done").unlink()
    for name in ("twin(G4)", "todi"):
        shutil.rmtree(results.run("messages", name, 2).folder)
    notes: list[str] = []
    outlook = run(study(), folder, notes=notes)
    after = read_results(folder)
    assert after.run("messages", "G4", 2).state == "failed"
    assert "another run" in after.run("messages", "G4", 2).error
    assert after.run("messages", "todi", 2).state == "done"
    assert after.run("messages", "twin(G4)", 2).state == "waiting"
    assert list(outlook.blocked.values()) == [f"{broken.spec.id} failed"]
    assert after.problems == ("1 of 16 runs failed", "1 of 16 runs are not done")
    assert any(broken.spec.id in note for note in notes)
    # It stays failed until it is asked for again.
    again = run(study(), folder)
    assert again.count("failed") == 1
    shutil.rmtree(broken.folder, ignore_errors=True)
    RunFolder(broken.folder).fail("as before")
    final = run(study(), folder, retry=True)
    assert {*final.states.values()} == {"done"}
    assert numbers(folder) == numbers(done)


def test_a_worker_that_is_killed_costs_its_run_only(tmp_path):
    engine = LocalEngine(1, 1)
    try:
        engine.start("sleep", {"do": "nothing known"})
        ended = _until(engine)
        assert ended[0][1]["state"] == "failed"
        assert "KeyError" in ended[0][1]["error"]
        engine.start("victim", {"do": "teach", "config": _endless(tmp_path)})
        time.sleep(0.5)
        os.kill(engine._workers[0].process.pid, signal.SIGKILL)
        name, outcome = _until(engine)[0]
        assert (name, outcome["state"]) == ("victim", "failed")
        assert "SIGKILL" in outcome["error"]
        engine.start("next", {"do": "nothing known"})
        assert _until(engine)[0][0] == "next"
    finally:
        engine.close()


def test_a_killed_worker_is_replaced_and_the_command_ends_well(tmp_path, done):
    from gatespace.config import dump_yaml

    file = tmp_path / "study.yaml"
    file.write_text(dump_yaml(study()))
    folder = models_of(done, tmp_path / "killed")
    for path in sorted(done.glob("runs/*"))[2:]:
        shutil.copytree(path, folder / "runs" / path.name)
    words = [*_command(file, folder, workers=1)[:-1]]
    before = _work_seen(folder)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while _work_seen(folder) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    (worker,) = [pid for pid in _children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(worker, signal.SIGKILL)
    _, heard = process.communicate(timeout=600)
    assert process.returncode == 0, heard
    assert heard.count("SIGKILL") == heard.count("resumed (1 of 3 times)") == 1
    assert numbers(folder) == numbers(done)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_job_that_costs_every_worker_fails(tmp_path):
    notes: list[str] = []
    engine = LocalEngine(1, 1, _die, retries=2, note=notes.append)
    try:
        engine.start("fatal", {"do": "die"})
        name, outcome = _until(engine)[0]
    finally:
        engine.close()
    assert (name, outcome["state"]) == ("fatal", "failed")
    assert "(3 times)" in outcome["error"]
    assert [note.rpartition("resumed ")[2] for note in notes] == ["(1 of 2 times)", "(2 of 2 times)"]


def _die(job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _until(engine) -> list:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if ended := engine.wait(1.0):
            return ended
    raise AssertionError("the engine said nothing for ten minutes")


def _endless(tmp_path) -> dict:
    from gatespace.config import TeachConfig, dump_config, parse_config

    task = {"name": "synthetic", "brief": True}
    config = {"task": task, "model": "tiny", "steps": 100000, "output": str(tmp_path / "endless")}
    return dump_config(parse_config(TeachConfig, config))


def test_a_task_whose_models_fail_is_left_and_others_go_on(tmp_path, done):
    shutil.copytree(done, tmp_path / "study")
    tasks = dict(study().tasks)
    broken = {"task": {"name": "tweeteval/emotion", "root": str(tmp_path / "nowhere")}}
    config = study(tasks={"messages": tasks["messages"].model_dump(), "broken": broken})
    outlook = run(config, tmp_path / "study")
    results = read_results(tmp_path / "study")
    assert {r.state for r in results.runs.values() if r.spec.task == "messages"} == {"done"}
    assert {r.state for r in results.runs.values() if r.spec.task == "broken"} == {"waiting"}
    assert outlook.count("failed") == 2  # its teacher and its student
    assert all("nowhere" in error for error in outlook.errors().values())
    assert {name for name in outlook.blocked if name in results.runs} == {
        r.spec.id for r in results.runs.values() if r.spec.task == "broken"
    }


def test_runs_of_a_study_share_a_teacher_that_is_a_service(tmp_path, done):
    """The numbers are those of a teacher in each run's own process."""
    from gatespace.models import load_model

    TeacherServer = pytest.importorskip("gatespace.addons.service.server").TeacherServer

    (made,) = done.glob("models/messages-teacher-*/model")
    (student,) = done.glob("models/messages-student-*/model")
    train = study().train
    axes = {"restrictions": False, "static": [], "isolation": None}
    with TeacherServer(load_model(str(made)), "tcp://127.0.0.1:0") as server:
        pair = {"student": str(student), "teacher": server.address}
        config = study(teach={}, train={**train, "pair": pair}, axes=axes)
        run(config, tmp_path / "served")
    served, local = read_results(tmp_path / "served"), read_results(done)
    assert served.problems == ()
    assert served.baselines["messages"].teacher == {}
    assert served.baselines["messages"].start == local.baselines["messages"].start
    for point in ("G4", "G5"):
        for seed in (42, 2):
            ours, theirs = (results.run("messages", point, seed) for results in (served, local))
            assert ours.fingerprint == theirs.fingerprint
            assert ours.curve() == theirs.curve()


def test_no_model_of_a_run_outlives_it(tmp_path, done, monkeypatch):
    """A worker does many runs."""
    from gatespace.training import setup

    load, networks = setup.load_model, []

    def loaded(*words, **options):
        model = load(*words, **options)
        networks.extend(map(weakref.ref, (model.network, *model.network.parameters())))
        return model

    monkeypatch.setattr(setup, "load_model", loaded)
    config = RunFolder(read_results(done).run("messages", "G5", 42).folder).settings()
    job = {"do": "train", "config": {**config, "steps": 1, "output": str(tmp_path / "run")}}
    assert execute(job) == {"state": "done"}
    assert len(networks) > 2
    assert not [network for network in networks if network() is not None]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_only_the_first_job_of_a_worker_walks_the_objects_of_all_libraries():
    class Node:
        """Part of a cycle."""

    left = []

    def circle(job) -> None:
        node = Node()
        node.own = node
        left.append(weakref.ref(node))

    gc.unfreeze()
    try:
        execute({}, circle)
        assert len(gc.get_objects()) < gc.get_freeze_count()
        execute({}, circle)
        assert [node() for node in left] == [None, None]
    finally:
        gc.unfreeze()


def test_two_processes_do_not_run_one_study(tmp_path):
    folder = StudyFolder(tmp_path)
    folder.begin(study(), workers=1, threads=1)
    with folder.claim(), pytest.raises(UsageError, match="another process"):
        run_study(study(), folder, LocalEngine(1, 1), threads=1)


def test_a_folder_belongs_to_one_study(done):
    with pytest.raises(UsageError, match="another study"):
        StudyFolder(done).begin(study(name="other"), workers=1, threads=1)
    assert StudyFolder(done).config().name == "small"


def test_threads_stay_when_workers_change(tmp_path):
    folder = StudyFolder(tmp_path / "study")
    first = folder.begin(study(), workers=1, threads=None)
    assert folder.begin(study(), workers=64, threads=None) == first
    assert folder.begin(study(), workers=1, threads=3) == 3
    assert folder.workers == 1


@pytest.mark.parametrize(
    "variable, workers, expected",
    [(None, 1, 8), (None, 3, 2), ("3", 1, 3), ("3", 4, 2), ("2,1", 1, 2), ("0", 1, 8), ("x", 1, 8), ("1", 64, 1)],
)
def test_omp_num_threads_is_a_maximum(tmp_path, monkeypatch, variable, workers, expected):
    monkeypatch.setattr("os.process_cpu_count", lambda: 8, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    folder = StudyFolder(tmp_path / "study")
    assert folder.threads_of_runs(study(), workers=workers, threads=None) == expected
    assert folder.threads_of_runs(study(), workers=workers, threads=5) == 5  # as the user says
    assert folder.begin(study(), workers=workers, threads=None) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert folder.begin(study(), workers=1, threads=None) == expected  # its runs have had this number


def test_tiny_models_have_one_thread():
    tiny = study()
    assert usual_threads(tiny, None) == 1
    assert usual_threads(load_study("methods"), None) == 1
    pair = {"pair": {"student": "tiny", "teacher": "models/large"}}
    assert usual_threads(study(train={**tiny.train, **pair}, teach={}), None) is None
    assert usual_threads(load_study("smollm2"), None) is None


def test_status_from_outside(done):
    outlook = read_outlook(StudyFolder.open(done))
    assert outlook.count("done") == len(outlook.work) == 16 + 4
    assert outlook.seconds_left(2) == 0


# ---------------------------------------------------------------------------------------------------- kills


def _command(study_file: Path, folder: Path, workers: int) -> list[str]:
    words = ["run", str(study_file), "--output", str(folder), "--workers", str(workers), "--threads", "1"]
    words += ["--no-report", "--quiet"]
    return [sys.executable, "-m", "gatespace", *words]


@pytest.mark.parametrize("kills, workers", [(1, 1), pytest.param(5, 2, marks=pytest.mark.long)])
def test_killed_again_and_again_the_tables_are_the_same_to_the_byte(kills, workers, tmp_path, done, cli_run):
    from gatespace.config import dump_yaml

    file = tmp_path / "study.yaml"
    file.write_text(dump_yaml(study()))
    # The first kill finds a student being made; enough runs are left for every kill, on any machine:
    # one that has ended brings the kill forward, and each worker ends one more at most.
    killed = models_of(done, tmp_path / "killed")
    for path in (*killed.glob("models/messages-student-*"), *killed.glob("baselines/messages-start-*")):
        shutil.rmtree(path)
    for path in sorted(done.glob("runs/*"))[(1 + workers) * kills + 1 :]:
        shutil.copytree(path, killed / "runs" / path.name)
    draw = random.Random(7)
    for _ in range(kills):
        before, ended = _work_seen(killed), _runs_ended(killed)
        process = subprocess.Popen(_command(file, killed, workers), start_new_session=True)
        deadline = time.monotonic() + 600
        while _work_seen(killed) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        moment = time.monotonic() + draw.uniform(0, 2)
        while time.monotonic() < moment and _runs_ended(killed) == ended:
            time.sleep(0.02)
        process.kill()  # the study alone: its workers must end by themselves
        process.wait()
    assert _runs_ended(killed) < 16, "all was done before the last kill"
    # A worker that outlived its study would hold the folder of its run.
    subprocess.run(_command(file, killed, workers), check=True, timeout=600)

    def tables(folder: Path, out: Path) -> dict[str, bytes]:
        assert cli_run("report", folder, "--output", out, "--no-png").exit_code == 0
        return {path.name: path.read_bytes() for path in sorted((out / "tables").iterdir())}

    calm, again = tables(done, tmp_path / "calm"), tables(killed, tmp_path / "again")
    assert sorted(calm) == sorted(again)
    assert len(calm) > 20
    assert [name for name in calm if calm[name] != again[name]] == []
    assert numbers(done) == numbers(killed)


def _runs_ended(folder: Path) -> int:
    return len(list(folder.glob("runs/*/done")))


def _work_seen(folder: Path) -> int:
    """Records of steps that were ever written: it changes when a run has begun to work."""
    return sum(path.stat().st_size for path in folder.glob("*/*/metrics.jsonl"))


def test_a_folder_that_is_deleted_is_not_made_again(tmp_path):
    folder = StudyFolder(tmp_path / "study")

    class Deleting(InlineEngine):
        def start(self, name, job):
            shutil.rmtree(folder.path)

        def wait(self, seconds):
            return [("messages-teacher", {"state": "failed", "error": "x", "details": ""})]

    folder.begin(study(), workers=1, threads=1)
    with pytest.raises(RunError, match="deleted, moved or replaced while this was writing"):
        run_study(study(), folder, Deleting(), threads=1)
    assert not folder.path.exists()


def test_a_look_at_more_runs_is_another_look(done, tmp_path, cli_run):
    folder = StudyFolder(tmp_path / "study")
    shutil.copytree(done, folder.path, ignore=shutil.ignore_patterns("model", "scores", "looks.jsonl"))
    marks = sorted(folder.path.glob("runs/*-s2-*/done"))
    for mark in marks:
        mark.unlink()
    read_results(folder.path)  # to read is not to look

    def look() -> dict:
        return json.loads(cli_run("evidence", folder, "--json").stdout)

    assert [look()["looks"] for _ in range(2)] == [1, 1]
    assert "Look" not in cli_run("evidence", folder).stdout
    first = folder.looks()
    assert [(one["seeds"], one["runs"]) for one in first] == [({"messages": [42]}, len(marks))]
    for mark in marks:
        mark.touch()
    assert look()["looks"] == 2
    told = " ".join(cli_run("evidence", folder).stdout.split())
    assert f"Look 2 at the test results of this study; at earlier looks {len(marks)} runs were done." in told
    assert "not adjusted for looking" in told
    assert folder.looks() == [*first, {**folder.looks()[-1], "seeds": {"messages": [2, 42]}, "runs": 2 * len(marks)}]
    written = json.loads(cli_run("report", folder, "--no-png", "--json").stdout)
    assert any("Look 2 at the test results" in text for text in written["limits"])
    assert "look 2 at its results" in (folder.path / "report.html").read_text()
