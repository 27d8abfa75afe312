"""`gatespace init`, `plan`, `run` and `status`, as a user calls them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from gatespace.cli.app import app
from gatespace.cli.study_file import checked_plan, load_study, shipped
from gatespace.cli.study_view import StudyView
from gatespace.errors import UsageError
from gatespace.runs import StudyFolder
from gatespace.study.outlook import read_outlook
from gatespace.study.plan import make_plan


def test_shipped_studies_are_copied_with_their_comments(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "methods", "smollm2", "replication", "paper"):
        result = cli("init", name)
        assert result.exit_code == 0
        assert (tmp_path / f"{name}.yaml").read_text() == shipped()[name]
        assert f"gatespace plan {name}.yaml" in result.stdout
    again = cli("init", "demo")
    assert again.exit_code == 2
    assert "--force" in again.stderr
    assert cli("init", "demo", "--force").exit_code == 0
    assert cli("init", "dmo").exit_code == 2


def test_a_copy_plans_what_the_shipped_one_plans(cli, tmp_path):
    cli("init", "demo", tmp_path / "my.yaml")
    mine = cli("plan", tmp_path / "my.yaml", "--json")
    theirs = cli("plan", "demo", "--json")
    assert mine.exit_code == 0
    assert mine.stdout == theirs.stdout


def test_plan_as_json(cli):
    plan = json.loads(cli("plan", "paper", "--json").stdout)
    assert {*plan["runs"][0]} >= {"id", "task", "point", "gate", "seed", "kind"}
    assert {*plan["comparisons"][0]} >= {"task", "axis", "left", "right", "seed", "status", "reason"}
    cells = [c for c in plan["comparisons"] if c["axis"] == "restriction" and c["task"] != "offensive"]
    sweep = [c for c in cells if c["seed"] == 42]
    assert len([c for c in sweep if c["status"] == "comparable"]) == 36
    assert len([c for c in sweep if c["status"] == "n/a"]) == 16
    ids = [run["id"] for run in plan["runs"]]
    assert len(ids) == len(set(ids))


def test_plan_in_print(cli):
    shown = cli("plan", "paper").stdout
    assert "127 runs on emotion, hate, offensive" in shown
    assert "gap-only keeps d, and d = 0 here" in shown
    whole = cli("plan", "paper", "--all").stdout
    assert whole.count(" sweep ") + whole.count(" replication ") == len(make_plan(load_study("paper")).comparisons)
    quick = cli("plan", "demo", "--quick").stdout
    assert "demo-quick: 16 runs" in quick


@pytest.mark.parametrize("words", [["demo"], ["smollm2"], ["replication"], ["paper", "--all"]])
def test_plans_fit_a_terminal_of_80_columns(own_cache, words):
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["plan", *words])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 81  # one sentence that is no table may wrap by itself
    plan = checked_plan(load_study(words[0]))
    shown = set(result.stdout.split())
    assert {run.point for run in plan.runs.values()} <= shown
    assert {cell.left for cell in plan.comparisons} | {cell.right for cell in plan.comparisons} <= {
        word.removesuffix(":") for word in shown
    }


def test_plan_says_what_could_be_supported_and_how_many_seeds_that_takes(cli):
    words = ["plan", "demo", "--set", "seeds=[1,2,3]"]
    shown = cli(*words).stdout
    assert "no: takes 7 seeds" in shown
    assert "whatever the result, this study can support no claim: that takes at least 7 seeds" in shown
    claims = json.loads(cli(*words, "--json").stdout)["support"]["claims"]
    assert {claim["possible"] for claim in claims} == {False}
    enough = cli("plan", "demo").stdout
    assert "yes: 7 fresh blocks" in enough
    assert "can support no claim" not in enough


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["plan", "dmo"], "did you mean 'demo'"),
        (["plan", "nowhere.yaml"], "no such file"),
        (["plan", "demo", "--set", "seeds=[]"], "seeds"),
        (["plan", "demo", "--set", "train.optimizer.lrr=1"], "lrr"),
        (["plan", "demo", "--set", "axes.published=[nothing]"], "axes.published.method: unknown objective 'nothing'"),
        (["plan", "demo", "--set", "axes.published=[{method: todi, params: {bta: 1}}]"], "'beta'"),
        (["run", "demo", "--set", "points=['4,0,-1,0,nosuch=1']"], "unknown signal 'nosuch'"),
        (["run", "demo", "--engine", "spark"], "spark"),
        (["run", "demo", "--address", "auto"], "--engine ray"),
        (["run", "demo", "--results", "folder"], "--results is not a URL"),
        (["run", "demo", "--results", "memory://x"], "no other process"),
        (["plan", "demo", "--set", "resources.gpus=-1"], "resources.gpus"),
        (["plan", "demo", "--set", "resources.gpu=1"], "did you mean"),
        (["status", "nowhere"], "there is nothing at this place"),
    ],
)
def test_mistakes_exit_2_and_write_nothing(cli, words, text, tmp_path, monkeypatch):
    if "--results" in words:
        pytest.importorskip("gatespace.addons.cluster")
    monkeypatch.chdir(tmp_path)
    result = cli(*words)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_ray_is_asked_for_before_anything_is_written(cli, tmp_path, monkeypatch):
    pytest.importorskip("gatespace.addons.cluster")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    result = cli("run", "demo", "--engine", "ray")
    assert result.exit_code == 2
    assert "'.[ray]' in a clone" in result.stderr
    monkeypatch.setitem(sys.modules, "ray", sys)  # it is not come to
    result = cli("run", "demo", "--engine", "ray", "--set", "train.engine.device=cuda")
    assert result.exit_code == 2
    assert "--set resources.gpus=1" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_the_report_needs_is_asked_for_at_the_start(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)  # as where it is not installed
    result = cli("run", "demo")
    assert result.exit_code == 2
    assert "'.[study]' in a clone" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_line_about_running_work_has_no_empty_brackets(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gatespace.cli.study_view._SECONDS_BETWEEN_LINES", 0)
    folder = StudyFolder(tmp_path)
    folder.begin(load_study("demo"), workers=1, threads=1)
    outlook = read_outlook(folder)
    outlook.states.update(dict.fromkeys([work.name for work in outlook.work[:5]], "running"))
    with StudyView(1) as view:
        view.update(outlook)
        view.update(outlook)
    heard = capsys.readouterr().err
    assert "evaluate the teacher of messages, " in heard
    assert "messages G2 seed 42 (0/30)" in heard
    assert "()" not in heard


def test_help_teaches(cli):
    assert "--retry" in cli("run", "--help").stdout
    assert "gatespace status studies/demo" in cli("status", "--help").stdout
    assert "N/A" in cli("plan", "--help").stdout


SMALL = """
name: own
tasks:
  tickets:
    task:
      table: {source: tickets.csv, labels: [billing, technical]}
      brief: true
      split: {teacher: 0.5, distill: 0.5}
train:
  pair: {student: student, teacher: teacher}
  steps: 2
  batch_size: 4
  rollout: {max_new_tokens: 6}
  evaluation: {max_new_tokens: 6}
  engine: {precision: fp32}
points: [G5]
axes: {restrictions: false, static: [], isolation: {match: [lam]}}
seeds: [1]
"""


@pytest.fixture
def own(tmp_path, monkeypatch, own_cache):
    """A table and two model folders of one's own."""
    from gatespace.config import TaskConfig, parse_config
    from gatespace.models import build_tiny
    from gatespace.tasks.configured import load_configured_task

    monkeypatch.chdir(tmp_path)
    rows = [f"invoice {i} is wrong,billing\nthe app crashes {i} times,technical" for i in range(40)]
    (tmp_path / "tickets.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    table = {"source": "tickets.csv", "labels": ["billing", "technical"]}
    pair = build_tiny(load_configured_task(parse_config(TaskConfig, {"table": table})))
    for role in ("student", "teacher"):
        (tmp_path / role).symlink_to(getattr(pair, role))
    (tmp_path / "own.yaml").write_text(SMALL)
    return tmp_path


@pytest.mark.slow
def test_a_study_of_ones_own_data_and_models(cli, own):
    shown = cli("run", "own.yaml", "--workers", "1")  # each takes seconds to begin
    assert shown.exit_code == 0, shown.stderr
    assert "this study can support no claim: that takes at least 7 seeds" in shown.stderr
    folder = own / "studies" / "own"
    assert (folder / "report.html").is_file()
    assert list((folder / "tables").glob("*.csv"))
    status = json.loads(cli("status", folder, "--json").stdout)
    assert {work["state"] for work in status["work"]} == {"done"}
    assert status["running"] is False
    assert status["seconds_left"] == 0
    again = cli("run", folder, "--json", "--quiet")
    found = json.loads(again.stdout)
    assert (again.exit_code, found["failed"], len(found["done"])) == (0, {}, 4)
    # Neither model was taught anything, and two steps change nothing.
    assert found["warnings"][0].startswith("tickets: The teacher: 8 of 8 answers on val have no legal label. ")
    assert any("On test the teacher is right in 0.0 %, the student before" in text for text in found["warnings"])
    assert found["warnings"][-1].startswith("tickets, alarm teacher: G5 (seed 1); twin(G5) (seed 1). ")
    assert shown.stdout.count("warning: ") == len(found["warnings"]) == 4
    assert "4 of 4 done" in cli("status", folder).stdout


@pytest.mark.slow
def test_failed_runs_exit_1_with_their_error(cli, own):
    weights = _copied(own, "teacher") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])  # a check before the run reads no weights
    result = cli("run", "own.yaml", "--quiet", "--workers", "1")
    assert result.exit_code == 1
    assert "teacher" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert "--retry" in result.stdout
    status = cli("status", own / "studies" / "own")
    assert "no process is working on it" in status.stdout


def _copied(own, role):
    """The folder of a model as a copy that may be changed."""
    model = own / role
    original = model.resolve()
    model.unlink()
    shutil.copytree(original, model)
    return model


def test_a_study_that_cannot_run_exits_2_before_anything_is_written(cli, own):
    (own / "teacher").unlink()
    result = cli("run", "own.yaml", "--quiet")
    assert result.exit_code == 2
    assert "own: tickets: pair.teacher: no such model" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (own / "studies").exists()


def _wrong_labels(own):
    (own / "own.yaml").write_text(SMALL.replace("[billing, technical]", "[billing, sales]"))


def _no_table(own):
    (own / "tickets.csv").unlink()


def _other_tokens(own):
    from gatespace.models import build_tiny
    from gatespace.tasks import load_task

    (own / "teacher").unlink()
    (own / "teacher").symlink_to(build_tiny(load_task("synthetic")).teacher)


def _small_window(own):
    file = _copied(own, "teacher") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 12}))


def _some_runs(own):
    (own / "runs" / "teacher").mkdir(parents=True)


@pytest.mark.parametrize(
    ("change", "sets", "text"),
    [
        (_wrong_labels, [], "technical"),
        (_no_table, [], "tickets.csv"),
        (_other_tokens, [], "do not have the same vocabulary"),
        (_small_window, [], "rollout.max_new_tokens: prompt and response do not fit .* of pair.teacher"),
        (None, ["train.objective.top_k=100000"], "objective.top_k: larger than the vocabulary"),
        (None, ["axes.published=[{method: eopd, params: {top_k: 99999}}]"], "eopd.*params.top_k"),
        (None, ["train.rollout.max_new_tokens=100000"], "rollout.max_new_tokens: prompt and response do not fit"),
        (None, ["train.evaluation.max_new_tokens=2000"], "evaluation.max_new_tokens: prompt and response do not fit"),
        (None, ["train.pair.student=no/such/model"], "pair.student: no such model"),
        (_some_runs, ["train.pair.teacher=runs/teachr"], "pair.teacher: no such model(.|\n)*mean runs/teacher[?]"),
        (None, ["teach.teacher={model: nowhere}"], "teach.teacher: model: no such model"),
    ],
)
def test_what_every_run_would_fail_with_is_found_once(own, change, sets, text):
    from gatespace.study.check import check_study

    if change is not None:
        change(own)
    with pytest.raises(UsageError, match=text) as error:
        check_study(load_study("own.yaml", sets), {"tickets": {}})
    assert error.value.what.startswith("own: tickets: ")


def test_what_is_not_on_this_machine_is_not_demanded(own):
    from gatespace.study.check import check_study

    for sets in (["train.pair.teacher=org/large"], ["train.pair.student=hub:org/small"], []):
        assert check_study(load_study("own.yaml", sets), {"tickets": {}}) == []
    (note,) = check_study(load_study("own.yaml", ["train.rollout.max_new_tokens=900"]), {"tickets": {}})
    assert "rollout.max_new_tokens is 900, and the longest right response has" in note


@pytest.mark.parametrize("name", ["..", "../..", "a/b", "/tmp/x", "."])
def test_the_name_of_a_study_is_that_of_a_folder(cli, own, name):
    result = cli("run", "own.yaml", "--set", f"name={name}")
    assert result.exit_code == 2
    assert "name: is also the name of a folder" in result.stderr


@pytest.mark.parametrize("command", ["plan", "run"])
def test_very_many_runs_are_asked_about(cli, own, command):
    (own / "own.yaml").write_text(SMALL.replace("seeds: [1]", f"seeds: {[*range(10_001)]}"))
    result = cli(command, "own.yaml")
    assert result.exit_code == 2
    assert "at least 10,001" in result.stderr
    assert "--yes" in result.stderr


def test_a_changed_file_counts_while_nothing_is_done(own):
    folder = StudyFolder(own / "studies" / "own")
    folder.begin(load_study("own.yaml"), workers=1, threads=1)
    other = load_study("own.yaml", ["name=other", "seeds=[5]"])
    folder.begin(other, workers=1, threads=1)
    assert folder.config().seeds == (5,)
    (folder.path / "runs" / "one").mkdir(parents=True)
    (folder.path / "runs" / "one" / "done").touch()
    with pytest.raises(UsageError, match="another study"):
        folder.begin(load_study("own.yaml"), workers=1, threads=1)


@pytest.mark.slow
def test_the_folder_of_teach_is_a_teacher_in_a_study_too(cli, taught, tmp_path, monkeypatch):
    monkeypatch.chdir(taught.folder.parent)
    file = tmp_path / "taught.yaml"
    file.write_text(
        f"""
name: taught
tasks: {{messages: {{task: {{name: synthetic, brief: true}}}}}}
train:
  pair: {{student: tiny, teacher: {taught.folder.name}}}
  steps: 1
  batch_size: 4
  rollout: {{max_new_tokens: 8}}
  evaluation: {{max_new_tokens: 8, limit: 10}}
points: [G5]
axes: {{restrictions: false, static: [], isolation: null}}
"""
    )
    result = cli("run", file, "--output", tmp_path / "study", "--no-report", "--quiet", "--json", "--workers", "1")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["done"]) == 3


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(own, child):
    words = [sys.executable, "-m", "gatespace", "run", "own.yaml", "--set", "train.steps=5000", "--workers", "1"]
    process = subprocess.Popen(words, env=child, stderr=subprocess.PIPE, text=True, start_new_session=True)
    store = own / "studies" / "own"
    deadline = time.monotonic() + 600
    while not list(store.glob("runs/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    words = [sys.executable, "-m", "gatespace", "status", str(store), "--follow"]
    follower = subprocess.Popen(words, env=child, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert follower.stderr.readline().startswith("running: ")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the study and its worker
    _, heard = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "gatespace run" in heard.splitlines()[-1]
    assert "Traceback" not in heard
    assert "no process is working on it" in follower.communicate(timeout=600)[0]
    assert follower.returncode == 0


# ---------------------------------------------------------------------------------------------------- plugins

SIGNAL = """
from gatespace import signals

@signals.register("teacher_top", range=(0.0, 1.0))
def teacher_top(tokens):
    return tokens.teacher_top(1).log_probs.exp().squeeze(-1)
"""


@pytest.fixture
def plugged(own, monkeypatch):
    """The study with a signal of one's own, in a file beside the study file."""
    monkeypatch.setattr("gatespace.plugins._loaded", {})  # as in a process of its own
    (own / "mine.py").write_text(SIGNAL)
    text = SMALL.replace("points: [G5]", 'points: ["4,0,-1,0,teacher_top=2"]') + "plugins: [mine.py]\nworkers: 2\n"
    (own / "own.yaml").write_text(text)
    yield own
    from gatespace import signals

    for name in {"teacher_top", "other"} & set(signals.names()):
        signals.unregister(name)


def test_plugins_of_a_part_of_a_study_are_refused(cli, plugged):
    """They would be imported without having been named."""
    for setting in ("train.plugins", "tasks.tickets.train.plugins", "teach.teacher.plugins"):
        result = cli("plan", "own.yaml", "--plugin", "mine.py", "--set", f"{setting}=[mine.py]")
        assert result.exit_code == 2
        assert "plugins of the study itself" in result.stderr


def test_the_source_of_a_plugin_is_part_of_every_runs_id(cli, plugged):
    def ids(*words: str) -> list[str]:
        plan = cli("plan", "own.yaml", "--json", *words)
        assert plan.exit_code == 0, plan.stderr
        return [run["id"] for run in json.loads(plan.stdout)["runs"]]

    before = ids("--plugin", "mine.py")
    assert before == ids("--trust-plugins")
    (plugged / "elsewhere").mkdir()
    (plugged / "mine.py").rename(plugged / "elsewhere" / "same.py")
    assert before == ids("--set", "plugins=[elsewhere/same.py]", "--trust-plugins")
    (plugged / "changed.py").write_text(SIGNAL.replace("teacher_top", "other"))
    assert not set(before) & set(ids("--set", "plugins=[changed.py]", "--plugin", "changed.py"))


@pytest.mark.slow
@pytest.mark.long
def test_an_own_signal_in_a_study_with_two_workers(cli, plugged, monkeypatch):
    shown = cli("run", "own.yaml", "--plugin", "mine.py", "--quiet")
    assert shown.exit_code == 0, shown.stderr
    folder = plugged / "studies" / "own"
    (copy,) = (folder / "plugins").rglob("mine.py")
    assert copy.read_text() == SIGNAL
    assert (folder / "report.html").is_file()
    # The folder has the code: it can be read from anywhere without importing it, and resumed.
    (plugged / "mine.py").unlink()
    with monkeypatch.context() as patch:
        patch.chdir(plugged / "studies")
        assert "4 of 4 done" in cli("status", folder).stdout
        assert cli("report", folder, "--no-png", "--output", plugged / "again").exit_code == 0
    for path in folder.glob("runs/*/done"):
        path.unlink()
    assert "--trust-plugins" in cli("run", folder).stderr
    again = cli("run", folder, "--trust-plugins", "--json", "--quiet", "--workers", "1")
    assert (again.exit_code, json.loads(again.stdout)["failed"]) == (0, {})
    assert [path.name for path in (folder / "plugins").rglob("*.py")] == ["mine.py"]
