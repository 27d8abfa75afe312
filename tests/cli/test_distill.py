from __future__ import annotations

import json
import re

import pytest
from statsmodels.stats.proportion import proportion_confint

from gatespace.cli import distill
from gatespace.files import read

STUDENT = ("--student", "tiny-student", "--set", "engine.precision=fp32")
PAIR = ("--teacher", "tiny-teacher", *STUDENT)
TEXT = "mr,ref\n" + "".join(f"thing {i},The thing number {i} is good.\n" for i in range(30))
LABELS = "text,label\n" + "".join(
    f"I feel {('fine', 'ill')[i % 2]} on day {i},{('yes', 'no')[i % 2]}\n" for i in range(40)
)


def names_and_scores(printed):
    """Name → the score beside it and its interval, of the printed table."""
    rows = [line.strip().partition("  ") for line in printed.splitlines()]
    models = ("teacher", "student before", "student after")
    numbers = {name: rest.replace("[", "").replace(",", "").replace("]", "").split() for name, _, rest in rows}
    return {name: [*map(float, numbers[name][:3])] for name in models}


@pytest.fixture
def teach(cli, tmp_path):
    """Teaches the tiny teacher a table, in another file than the one that is distilled on."""

    def run(task):
        (tmp_path / "teach.json").write_text(json.dumps({"task": {**task, "split": None}}))
        words = ("--model", "tiny-teacher", "--steps", "40", "--lr", "3e-3", "--set", "engine.precision=fp32")
        assert cli("teach", tmp_path / "teach.json", *words, "-o", tmp_path / "teacher").exit_code == 0
        return "--teacher", tmp_path / "teacher", *STUDENT

    return run


@pytest.mark.parametrize(
    "rows, task, options, said, metric",
    [
        (
            TEXT,
            {"text": {"prompt": "{mr}", "answer": "ref", "metric": "token_f1"}},
            ("--metric", "token_f1", "--steps", "2"),
            "a text task: prompt '{mr}', right response 'ref'",
            "token_f1",
        ),
        (
            LABELS.replace(",", ";"),
            {"table": {"labels": ["no", "yes"]}},
            ("--steps", "12"),
            "a label task: 'label' holds 2 labels (no, yes), 'text' the text",
            "accuracy",
        ),
    ],
)
def test_one_command_from_a_table_to_a_model(cli, teach, tmp_path, monkeypatch, rows, task, options, said, metric):
    data, run = tmp_path / "rows.csv", tmp_path / "run"
    for file in (data, tmp_path / "taught.csv"):
        file.write_text(rows, encoding="utf-8-sig")  # as a spreadsheet writes it
    ((kind, settings),) = task.items()
    pair = teach({kind: {"source": str(tmp_path / "taught.csv"), **settings}})
    words = ["distill", data, *pair, *options, "--batch-size", "4", "-o", run]
    result = cli(*words)
    assert result.exit_code == 0, result.stderr
    assert said in result.stderr
    assert f"test {metric}, 95 % CI" in result.stdout
    assert re.search(r"warning: [34] validation rows chose the weights", result.stdout)
    assert (run / "model" / "config.json").is_file()
    again = json.loads(cli(*words, "--json", "--quiet").stdout)
    assert again["metric"] == metric
    models, found = again["models"], json.loads((run / "evaluation-test.json").read_text())["metrics"]
    assert models["student after"]["score"] == found["score" if metric == "token_f1" else "accuracy"]
    shown = {name: [*(round(number, 2) for number in (one["score"], *one["interval"]))] for name, one in models.items()}
    assert names_and_scores(result.stdout) == shown
    for one in models.values():
        count = one["rows"]
        if metric == "accuracy":
            interval = proportion_confint(round(one["score"] * count), count, method="wilson")
            assert one["interval"] == pytest.approx(interval)
        assert 0 <= one["interval"][0] <= one["score"] <= one["interval"][1] <= 1
    assert models["teacher"]["parameters"] > models["student after"]["parameters"] > 0
    assert models["student before"]["parameters"] == models["student after"]["parameters"]
    for one in models.values():
        assert one["megabytes"] == pytest.approx(4e-6 * one["parameters"])
        assert one["tokens_per_second"] > 0
        assert one["rows"] == one["of"] == found["count"]
    assert again["minutes"] > 0 < again["train_minutes"]
    # training ended by the rule of patience, and with the best weights
    curve = [record.get("score", record.get("accuracy")) for record in read(run / "evaluations.jsonl")]
    steps, best = [record["step"] for record in read(run / "evaluations.jsonl")], curve.index(max(curve))
    done = again["steps"]
    assert done["chosen_step"] == steps[best]
    assert done["steps"] == steps[-1] == (done["planned_steps"] if len(curve) - 1 - best < 3 else steps[best + 3])
    assert f"{done['steps']} of {options[-1]} steps" in result.stdout
    if done["chosen_step"] == 0:
        assert models["student after"]["score"] == models["student before"]["score"]
    monkeypatch.setattr(distill, "_measure", lambda *_: pytest.fail("evaluated before the folder was checked"))
    other = cli(*words, "--lr", "0.01")
    assert (other.exit_code, "this folder holds another run" in other.stderr) == (2, True)
    assert "its optimizer.lr is 0.003, not 0.01" in " ".join(other.stderr.split())


@pytest.mark.parametrize(
    "rows, message",
    [(LABELS, "the teacher does not give legal labels"), (TEXT, "the teacher is no better than the student before")],
)
def test_a_teacher_that_knows_nothing_ends_the_command_before_training(cli, tmp_path, rows, message):
    (tmp_path / "rows.csv").write_text(rows)
    pair = ("--teacher", "tiny-student", *STUDENT)  # both untaught, and the same
    result = cli("distill", tmp_path / "rows.csv", *pair, "-o", tmp_path / "run")
    assert result.exit_code == 1
    shown = " ".join(result.stderr.split())
    assert message in shown
    assert "on 4 validation rows" in shown or "on 3 validation rows" in shown
    assert "`gatespace teach`" in shown
    assert not (tmp_path / "run").exists()


def test_a_teacher_on_the_same_file_tells_the_task(tmp_path, monkeypatch):
    """Its prompt is the one it knows, and rows that it learned from are neither prompts nor tested on."""
    from gatespace.cli import found_model
    from gatespace.config import TaskConfig, dump_config, parse_config

    def task_of(settings):
        return dump_config(parse_config(TaskConfig, settings))

    (tmp_path / "rows.csv").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    carved = {"carve": {"val": 0.3, "test": 0.3}, "carve_seed": 5}
    text = {"source": "rows.csv", "prompt": "Say: {mr}", "answer": "ref", "metric": "contains", **carved}
    theirs = task_of({"text": text, "split_seed": 7})
    monkeypatch.setattr(found_model, "run_settings", lambda name: {"task": theirs})
    for data in ("rows.csv", "./rows.csv", str(tmp_path / "rows.csv")):
        assert task_of(distill._task(data, "runs/teacher", prompt=None).task) == theirs
    found = task_of(distill._task("rows.csv", "runs/teacher", prompt="{mr}", metric=None).task)
    assert found == {**theirs, "text": {**theirs["text"], "prompt": "{mr}"}}
    (tmp_path / "other.csv").write_text(TEXT)
    found = distill._task("other.csv", "runs/teacher", prompt=None).task
    assert (found["split"], found["text"]["prompt"]) == (None, "{mr}")

    table = {"source": "rows.csv", "labels": ["a", "b"], "text_column": "mr", "label_column": "ref", **carved}
    theirs = task_of({"table": table, "split_seed": 7})
    assert task_of(distill._task("rows.csv", "runs/teacher", metric=None).task) == theirs
    found = task_of(distill._task("rows.csv", "runs/teacher", metric="exact").task)
    assert {name: found["text"][name] for name in carved} == carved
    assert (found["split"], found["split_seed"]) == (theirs["split"], 7)


@pytest.mark.parametrize(
    "rows, options, message",
    [
        ("", (), "there are no rows"),
        ("text,label\n", (), "there are no rows"),
        ("text,label\na,x\nb,x\nc,x\n", (), "all rows have the same label"),
        ("text,label\na,x\nb,y\n", (), "no row is left for test"),
        ("mr,ref\na,b\nc,d\ne,f\n", (), "no row is left for val"),
        (LABELS + "what,\n", (), "rows.csv:42: 'label' is not a label"),
        (TEXT, ("--prompt", "{nope}"), "rows.csv:2 has no column 'nope'"),
        (TEXT, ("--answer", "nope"), "rows.csv:2 has no column 'nope'"),
        (TEXT, ("--metric", "rogue"), "if a plugin registers it, --plugin FILE"),
        ("a,b,c\n1,2,3\n", (), "which columns are the prompt and the right response?"),
        (
            LABELS,
            ("--set", "pair.lora={}", "--set", "pair.student_quantization=nf4"),
            "distill takes no quantised student",
        ),
    ],
)
def test_calls_that_cannot_be_distilled(cli, tmp_path, rows, options, message):
    (tmp_path / "rows.csv").write_text(rows)
    result = cli("distill", tmp_path / "rows.csv", *PAIR, *options, "-o", tmp_path / "run")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "run").exists()
