from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from gatespace.cli.console import stop_on_sigterm
from gatespace.config import TrainConfig, load_config


def records(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(cli, taught, tmp_path_factory):
    """A run of three steps with the estimate that was made before it."""
    folder = tmp_path_factory.mktemp("train") / "run"
    words = [
        "train", "--teacher", taught.folder, "--student", "tiny", "--task", "synthetic", "--brief", "--steps", "3",
        "--batch-size", "6", "--lr", "0.001", "--gate", "-4,0,1,0", "--set", "engine.precision=fp32",
        "--set", "evaluation.final=[test]", "--set", "evaluation.limit=10", "--output", folder,
    ]  # fmt: skip
    dry = cli(*words, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.stderr
    assert not folder.exists()
    result = cli(*words)
    assert result.exit_code == 0, result.stderr
    return folder, json.loads(dry.stdout), result


def test_a_student_is_trained_and_reported(trained):
    folder, _, result = trained
    summary = json.loads((folder / "summary.json").read_text())
    run = summary["run"]
    weighed = f"(weighted by reverse KL {run['lam_rkl_mean']:.4f})"
    assert f"E[λ] {run['lam_mean']:.4f} {weighed} over {run['tokens']} tokens of 18 responses" in result.stdout
    assert f"model  {folder / 'model'}\n" in result.stdout
    assert f"next   gatespace predict {folder / 'model'} < texts.txt\n" in result.stdout
    assert "test, first rows" in result.stdout
    assert result.stdout.count("warning: ") == len(summary["warnings"]) > 0  # three steps are too few
    first = records(folder, "metrics")[0]
    lam = f"λ {first['lam_mean']:.3f} ± {first['lam_sd']:.3f}"
    line = next(line for line in result.stderr.splitlines() if line.startswith("step 1/3"))
    assert f"loss {first['loss']:.4g} · {lam} · " in line
    assert re.search(r"\(rollout \S+, score \S+, update \S+, optimizer \S+\) · cache 0% · ", line)


def test_a_teacher_that_knows_no_more_than_the_student_is_warned_of(cli, distil, taught, tmp_path):
    words = [*distil, "--steps", "1", "--set", "evaluation.final=[val]", "--set", "evaluation.limit=40"]
    words[words.index("--student") + 1] = str(taught.folder)
    words[words.index("--teacher") + 1] = str(taught.folder)
    result = cli(*words, "--json", "--quiet", "--output", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["warnings"]
    assert found[0].startswith("On val the teacher is right in ")
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]
    assert found[1:] == stored  # which hold nothing that lies outside of the run


def test_without_a_model_there_is_no_next_step(cli, distil, tmp_path):
    words = [*distil, "--steps", "2", "--set", "checkpoint.model=false", "--output", tmp_path / "run"]
    result = cli(*words)
    assert result.exit_code == 0, result.stderr
    assert "E[λ]" in result.stdout
    assert not re.search(r"^(model|next) ", result.stdout, re.MULTILINE)
    assert not (tmp_path / "run" / "model").exists()
    again = json.loads(cli(*words, "--json").stdout)
    assert (again["model"], again["next"]) == (None, None)
    assert again["fingerprint"] == json.loads((tmp_path / "run" / "summary.json").read_text())["fingerprint"]


def test_the_estimate_holds_what_the_run_then_did(trained):
    folder, dry, _ = trained
    found = dry["estimate"]
    assert (found["rows"], found["step"]["prompts"], found["step"]["responses"]) == (960, 6, 6)
    low, high = found["step"]["response_tokens"]
    assert low == 6 * found["right_response_tokens_mean"]
    assert high == 6 * 32
    assert all(record["tokens"] <= high for record in records(folder, "metrics"))
    most = found["step"]["teacher_tokens_at_most"]
    assert all(0 < record["teacher_tokens"] <= 1.3 * most for record in records(folder, "timings"))
    prompts = most / 6 - 32
    assert prompts == pytest.approx(found["prompt_tokens_mean"])
    memory = found["memory_bytes"]
    assert memory["weights"] == 4 * found["parameters"]
    assert memory["optimizer"] == 8 * found["parameters"]
    assert memory["gradients"] == 4 * found["parameters"]
    assert memory["all"] == sum(value for key, value in memory.items() if key != "all")


def test_an_estimate_knows_adapters_and_micro_batches(cli, distil):
    def cost(*sets):
        words = [word for setting in sets for word in ("--set", setting)]
        result = cli(*distil, *words, "--dry-run", "--json", "--quiet")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["estimate"]

    usual = cost()
    lora = cost("pair.lora={r: 2, targets: [q_proj]}")
    assert lora["trained_parameters"] == 2 * 2 * (64 + 64)
    assert lora["memory_bytes"]["optimizer"] == 8 * lora["trained_parameters"]
    parts = cost("engine.micro_tokens=64")
    assert parts["step"]["micro_batches"] > usual["step"]["micro_batches"] == 1
    assert parts["memory_bytes"]["activations"] < usual["memory_bytes"]["activations"]
    gold = cost("rollout.from={gold: 1.0}")["step"]["response_tokens"]
    assert gold[0] == gold[1]


@pytest.mark.parametrize(
    "written, words, expected",
    [
        ("{method: todi, params: {beta: 2.0}}", ["--gate", "H2"], ("gated", "H2", {})),
        ("{gate: G2}", ["--method", "todi"], ("todi", None, {})),
        ("{gate: G2}", ["--gate", "-4,0,0,0"], ("gated", "-4,0,0,0", {})),
        ("{gate: G2}", ["--method", "static", "--set", "objective.params={lam: 0.4}"], ("static", None, {"lam": 0.4})),
    ],
)
def test_gate_and_method_replace_what_the_file_says(cli, distil, tmp_path, written, words, expected):
    file = tmp_path / "train.yaml"
    file.write_text(f"objective: {written}\n")
    result = cli(distil[0], file, *distil[1:], *words, "--dry-run", "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    objective = json.loads(result.stdout)["config"]["objective"]
    assert (objective["method"], objective["gate"], objective["params"]) == expected


def test_dry_run_prints_settings_that_can_be_read_back(cli, distil, tmp_path, taught):
    result = cli(*distil, "--dry-run", "--quiet")
    (tmp_path / "printed.yaml").write_text(result.stdout)
    printed = load_config(TrainConfig, tmp_path / "printed.yaml")
    assert printed.pair.teacher == str(taught.folder / "model")
    assert printed.rollout.max_new_tokens == 8


def test_an_interrupted_run_resumes_with_the_same_command(cli, distil, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
    words = [*distil, "--steps", "15", "--set", "checkpoint.every=2"]
    folder = tmp_path / "stopped"

    def stop(number, before):
        while set(folder.glob("checkpoints/step-0*")) <= before:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    stop_on_sigterm()
    try:
        for number, code, how in ((signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, "stopped by SIGTERM")):
            there = set(folder.glob("checkpoints/step-0*"))
            threading.Thread(target=stop, args=(number, there), daemon=True).start()
            result = cli(*words, "--output", folder)
            assert result.exit_code == code
            assert re.search(rf"^{how}: the same command resumes from step \d+$", result.stderr, re.M)
            assert "Traceback" not in result.stderr
            assert not (folder / "done").exists()
    finally:
        signal.signal(signal.SIGTERM, before)
    again, straight = cli(*words, "--output", folder, "--json"), cli(*words, "--output", tmp_path / "other", "--json")
    assert re.search(r"^note: resuming from step \d+ of 15$", again.stderr, re.M)
    assert json.loads(again.stdout)["fingerprint"] == json.loads(straight.stdout)["fingerprint"]


def test_a_run_that_fails_exits_1(cli, distil, tmp_path):
    result = cli(*distil, "--steps", "3", "--lr", "1e30", "--output", tmp_path / "run")
    assert result.exit_code == 1
    assert re.search(r"^error: step \d failed: ", result.stderr, re.M)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("more", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("objective.top_k=100000", "objective.top_k: larger than the vocabulary"),
        ("rollout.max_new_tokens=100000", "100000 of a response, of 1024"),
        ("evaluation.max_new_tokens=1024", "evaluation.max_new_tokens: prompt and response do not fit"),
    ],
)
def test_what_does_not_fit_the_models_is_refused_before_the_first_step(cli, distil, tmp_path, setting, text, more):
    result = cli(*distil, "--steps", "1", "--set", setting, "--output", tmp_path / "run", *more)
    assert result.exit_code == 2
    assert text in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_response_that_may_be_very_long_is_noted(cli, distil):
    result = cli(*distil, "--dry-run", "--set", "rollout.max_new_tokens=900")
    assert result.exit_code == 0
    assert "rollout.max_new_tokens is 900, and the longest right response has" in result.stdout


def test_a_teacher_for_another_task_is_noted(cli, distil, tmp_path):
    words = [word for word in distil if word != "--brief"]
    result = cli(*words, "--set", "task.split_seed=5", "--gate", "nonsense", "--output", tmp_path / "run")
    assert "note: the teacher was made with task.brief True, and this run has False\n" in result.stderr
    assert "note: task.split is not the teacher's" in result.stderr
    assert "error: objective.gate: " in result.stderr
    assert result.exit_code == 2


def test_there_is_no_training_without_a_teacher(cli, tmp_path, taught):
    for words in ([], ["--student", "tiny"]):
        result = cli("train", *words)
        assert result.exit_code == 2
        assert "pair.teacher: is needed and not given\n  instead: --teacher" in result.stderr
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for name in ("config.yaml", "identity.json"):
        (unfinished / name).write_bytes((taught.folder / name).read_bytes())
    result = cli("train", "--teacher", unfinished)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: this run has no model yet")


def test_a_terminal_gets_a_bar(child, distil, tmp_path):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "gatespace", *distil, "--steps", "2", "--json", "--output", str(tmp_path / "run")]
    environment = {**child, "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    output = process.communicate(timeout=600)[0]
    os.close(master)
    assert process.returncode == 0, shown.decode(errors="replace")
    assert json.loads(output)["steps"] == 2
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "━" in text
    assert re.search(r"train .*2/2.* loss \d", text)
    assert "after step 2: test accuracy" in text
