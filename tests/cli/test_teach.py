from __future__ import annotations

import json
import re
import shlex

import pytest
from statsmodels.stats.proportion import proportion_confint

from gatespace.cli.training import _next_command
from gatespace.config import TeachConfig, describe, load_config
from gatespace.runs import RunFolder


def test_a_teacher_is_made_and_reported(taught):
    summary = json.loads((taught.folder / "summary.json").read_text())
    test = summary["evaluation"]["test"]["metrics"]
    assert test["accuracy"] > test["best_constant"]["accuracy"] + 0.2
    out = taught.result.stdout
    low, high = proportion_confint(test["correct"], 40, method="wilson")
    others = (test["best_constant"]["accuracy"], test["balanced_accuracy"], test["macro_f1"])
    numbers = [f"{test['accuracy']:.2f}", f"[{low:.2f},", f"{high:.2f}]", *(f"{number:.2f}" for number in others)]
    assert ["test,", "first", "rows", "40", *numbers] in [line.split()[:10] for line in out.splitlines()]
    assert "warning" not in out
    assert f"model  {taught.folder / 'model'}\n" in out
    assert (taught.folder / "model" / "config.json").is_file()


def test_progress_is_printed_on_standard_error(taught):
    lines = taught.result.stderr.splitlines()
    assert re.search(r"^step 1/30 · loss \d\S* · tokens right 0\.\d+ · \S+ s \(update \S+, optimizer \S+\)", lines[1])
    assert any(line.startswith("step 30/30 · loss ") for line in lines)
    assert any(re.fullmatch(r"after step 20: val accuracy 0\.\d+ \(best constant .*", line) for line in lines)


def test_where_it_began_and_how_it_went_is_shown(taught, cli):
    out = taught.result.stdout
    assert re.search(r"^ *val, first rows, +40 +0\.00 \[0\.00, 0\.09\] ", out, re.M)
    began, later, end = re.search(r"^val accuracy by step  \S{3}  0: (\S+), 20: (\S+), 30: (\S+)$", out, re.M).groups()
    assert float(began) < float(later) < float(end)
    found = json.loads(cli(*taught.command, "--json", "--quiet").stdout)
    assert [record["step"] for record in found["evaluations"]] == [0, 20]
    assert found["warnings"] == []


def test_a_model_that_has_learned_nothing_is_warned_of(cli, tmp_path):
    words = ["teach", "--task", "synthetic", "--model", "tiny", "--brief", "--lr", "1e-9", "--steps", "2"]
    words += ["--set", "evaluation.final=[val]", "--set", "evaluation.limit=20", "--output", tmp_path / "run"]
    result = cli(*words, "--quiet")
    lines = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    assert (result.exit_code, len(lines)) == (0, 3)
    assert lines[0].startswith("warning: 20 of 20 answers on val have no legal label. ")
    assert "always predicting" in lines[1]
    assert lines[2].endswith("Usually the learning rate is too small: try ten times as much with --lr, or more steps.")
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]
    assert [f"warning: {text}" for text in stored] == lines
    assert json.loads(cli(*words, "--quiet", "--json").stdout)["warnings"] == stored
    evaluated = cli("evaluate", tmp_path / "run", "--split", "val", "--limit", "20", "--quiet")
    assert lines[:2] == [line for line in evaluated.stdout.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize("dry", [True, False])
def test_a_learning_rate_of_50_is_questioned_before_training(cli, tmp_path, dry):
    """By what stands before the first step, and so in an estimate; not where it may be meant."""
    words = [
        "teach",
        "--task",
        "synthetic",
        "--model",
        "tiny",
        "--brief",
        "--steps",
        "1",
        "--set",
        "evaluation.limit=4",
    ]
    for rate, questioned in (("50", True), ("0.05", False)):
        result = cli(*words, "--lr", rate, "-o", tmp_path / rate, *["--dry-run"] * dry)
        before = result.stderr.partition("step 1/1")[0]
        line = "warning: The learning rate is 50, and AdamW moves every weight by about as much in a step. "
        line += "Typical values: 1e-6 (large models) to 3e-3 (tiny ones).\n"
        assert (line in before) == questioned, result.stderr


def test_the_next_command_can_be_run_as_it_is_printed(taught, cli):
    command = re.search(r"^next {3}gatespace (.*)$", taught.result.stdout, re.M)[1]
    words = shlex.split(command)
    assert words[:3] == ["train", "--teacher", str(taught.folder / "model")]
    result = cli(*words, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    config = json.loads(result.stdout)["config"]
    assert config["task"]["name"] == "synthetic"
    assert config["task"]["brief"] is True
    assert config["pair"]["student"] == "tiny"
    assert config["optimizer"]["lr"] == 0.003  # at which so small a student learns


def test_the_next_command_names_the_plugins(tmp_path):
    config = load_config(TeachConfig, None, ["model=tiny", "plugins=[my task.py]"])
    command = _next_command(config, RunFolder(tmp_path))
    assert command.startswith(f"gatespace train --teacher {tmp_path}/model --student tiny --lr 0.003 ")
    assert command.endswith("--plugin 'my task.py'")
    usual = load_config(TeachConfig, None, [])
    assert _next_command(usual, RunFolder(tmp_path)) == f"gatespace train --teacher {tmp_path}/model --lr 5e-05"


def test_json_is_alone_and_a_run_that_is_done_is_not_repeated(taught, cli):
    before = (taught.folder / "metrics.jsonl").stat().st_mtime_ns
    result = cli(*taught.command, "--json", "--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["steps"] == 30
    assert found["model"] == str(taught.folder / "model")
    assert set(found["evaluation"]) == {"val", "test"}
    assert found["next"].startswith("gatespace train --teacher ")
    assert (taught.folder / "metrics.jsonl").stat().st_mtime_ns == before


def test_another_run_does_not_get_the_folder(taught, cli):
    result = cli(*taught.command, "--seed", "7")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: output: this folder holds another run")
    assert result.stdout == ""


def test_settings_lists_them_all(cli):
    text = cli("teach", "--settings").stdout
    listed = json.loads(cli("teach", "--settings", "--json").stdout)
    assert [setting["path"] for setting in listed] == [setting.path for setting in describe(TeachConfig)]
    assert all(setting["path"] in text for setting in listed)
    assert "optimizer.lr = 0.0001   number > 0\n    Learning rate.\n" in text


def test_dry_run_prints_settings_that_can_be_read_back(cli, tmp_path):
    words = ["--task", "synthetic", "--model", "tiny", "--brief", "--lr", "1e-3", "--output", str(tmp_path / "new")]
    result = cli("teach", *words, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert not (tmp_path / "new").exists()
    (tmp_path / "printed.yaml").write_text(result.stdout)
    printed = load_config(TeachConfig, tmp_path / "printed.yaml")
    overrides = ["task.name=synthetic", "model=tiny", "task.brief=true", "optimizer.lr=1e-3"]
    assert printed == load_config(TeachConfig, None, [*overrides, f"output={tmp_path / 'new'}"])
    assert re.search(r"^# rows +1440; 120 steps of 24 are 2 passes over them$", result.stdout, re.M)


def test_options_come_before_the_file_and_set_before_options(cli, tmp_path):
    file = tmp_path / "teach.yaml"
    file.write_text(
        "steps: 7\nbatch_size: 3\nmodel: tiny\n"
        "task:\n  table: {source: gone.jsonl, labels: [a, b], definitions: {}}\noptimizer: {clip: 2.0}\n"
    )
    words = ["teach", file, "--task", "synthetic", "--steps", "9", "--lr", "0.5", "--set", "optimizer.lr=0.25"]
    result = cli(*words, "--dry-run", "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    config = json.loads(result.stdout)["config"]
    assert (config["steps"], config["batch_size"], config["model"]) == (9, 3, "tiny")
    assert (config["task"]["name"], config["task"]["table"]) == ("synthetic", None)
    assert (config["optimizer"]["lr"], config["optimizer"]["clip"]) == (0.25, 2.0)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--steps", "0"], "error: --steps: must be greater than or equal to 1\n  got: 0\n"),
        (["--set", "stpes=3"], "error: --set stpes: unknown key\n  instead: did you mean 'steps'?"),
        (["--task", "sythetic"], "error: task.name: unknown task 'sythetic'\n  instead: did you mean 'synthetic'?"),
        (["missing.yaml"], "error: no such file\n  got: missing.yaml\n"),
        (["--task", "synthetic", "--model", "no-such"], "error: model: no such model\n  got: 'no-such'\n"),
        (["--task", "synthetic", "--root", "/"], "error: task: the task synthetic has no folder\n"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_mistakes_are_said_in_the_words_of_the_call(cli, tmp_path, words, message, dry):
    result = cli("teach", *words, "--output", tmp_path / "run", *(["--dry-run"] if dry else []))
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stdout == ""


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_spreadsheet_s_table_becomes_a_teacher_that_labels_it(cli, tmp_path, delimiter):
    """By one command each, with no option about the table; and so does its export."""
    rows = [["nr", "Mail", "Label"], *([f"{i}", f"für {'ab'[i % 2]}, {i}", ("yes", "no")[i % 2]] for i in range(40))]
    data, run, out = tmp_path / "rows.csv", tmp_path / "run", tmp_path / "out"
    data.write_text("".join(f"{delimiter.join(row)}\r\n" for row in rows), encoding="utf-8-sig")
    learning = ("--model", "tiny", "--brief", "--lr", "0.003", "--steps", "20", "--batch-size", "8")
    result = cli("teach", data, *learning, "-o", run)
    assert result.exit_code == 0, result.stderr
    assert "note: a label task: 'Label' holds 2 labels (no, yes), 'Mail' the text" in result.stderr
    labelled = cli("predict", run, data, "--json")
    assert labelled.exit_code == 0, labelled.stderr
    found = [json.loads(line) for line in labelled.stdout.splitlines()]
    assert [[one["nr"], one["text"], one["Label"]] for one in found] == rows[1:]
    assert [one["label"] for one in found] == [one["Label"] for one in found]
    refused = cli("teach", data, "--task", "synthetic")
    assert (refused.exit_code, "the data is a table or --task, not both" in refused.stderr) == (2, True)
    refused = cli("teach", "--task", "synthetic", "--prompt", "{x}")
    assert (refused.exit_code, "--prompt, --answer and --metric are for a table" in refused.stderr) == (2, True)
    pytest.importorskip("gatespace.addons.publish")
    assert cli("export", run, "-o", out).exit_code == 0
    data.rename(tmp_path / "new.csv")  # an export does not need the rows that it learned from
    assert cli("predict", out, tmp_path / "new.csv", "--json").stdout == labelled.stdout


def test_the_next_command_names_what_a_table_was_given(tmp_path):
    config = load_config(TeachConfig, None, ["model=tiny", "task.table={source: tickets.csv, labels: [a, b]}"])
    command = _next_command(config, RunFolder(tmp_path))
    assert """ --set 'task.table={"source": "tickets.csv", "labels": ["a", "b"]}' """ in command
