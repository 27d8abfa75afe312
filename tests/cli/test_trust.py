"""Code that a received file asks for: without its flag no command runs any of it."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from gatespace.plugins import plugin_hash
from gatespace.runs import StudyFolder

STUDY = """
name: own
tasks: {tickets: {task: {name: synthetic, brief: true}}}
points: [G5]
"""


@pytest.fixture
def received(tmp_path, monkeypatch, taught):
    """Files from elsewhere: a model and a plugin that leave a mark when they are run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gatespace.plugins._loaded", {})  # as in a process of its own
    shutil.copytree(taught.folder / "model", "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "theirs.Theirs"}
    settings["model_type"] = "theirs"
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    mark = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    theirs = "from transformers import LlamaConfig\nclass Theirs(LlamaConfig):\n    model_type = 'theirs'\n"
    (tmp_path / "model" / "theirs.py").write_text(mark + theirs)
    (tmp_path / "theirs.py").write_text(mark)
    return tmp_path


def _files(teacher: str) -> dict[str, dict]:
    task = {"name": "synthetic", "brief": True}
    remote = {"student": "model", "teacher": teacher, "trust_remote_code": True}
    study = yaml.safe_load(STUDY)
    return {
        "train": {"task": task, "pair": remote},
        "teach": {"task": task, "model": "model", "trust_remote_code": True},
        "study": {**study, "train": {"pair": remote}},
        "task of a study": {**study, "tasks": {"tickets": {"task": task, "train": {"pair": remote}}}},
        "teacher of a study": {
            **study,
            "teach": {"teacher": {"model": "model", "trust_remote_code": True}},
            "train": {"pair": {"student": "model"}},
        },
    }


COMMANDS = [
    ("train", "train"),
    ("train", "train --dry-run"),
    ("teach", "teach"),
    ("teach", "teach --dry-run"),
    ("study", "plan"),
    ("task of a study", "plan"),
    ("teacher of a study", "plan"),
    ("study", "run"),
    ("study", "tune --dry-run"),
    ("train", "tune --dry-run"),
]


@pytest.mark.parametrize(("kind", "command"), COMMANDS)
def test_a_file_that_asks_for_code_is_refused_with_a_list_of_it(cli, received, taught, kind, command):
    name, *words = command.split()
    if name == "tune":
        pytest.importorskip("optuna")
        pytest.importorskip("gatespace.addons.tune")
    content = _files(str(taught.folder / "model"))[kind]
    flags = {
        "--trust-plugins": {**json.loads(json.dumps(content).replace("true", "false")), "plugins": ["theirs.py"]},
        "--trust-remote-code": content,
    }
    for flag, asked in flags.items():
        (received / "file.yaml").write_text(yaml.safe_dump(asked))
        refused = cli(name, "file.yaml", *words)
        text = refused.stderr.replace("\n", "")
        assert (refused.exit_code, flag in text) == (2, True), text
        assert ("trust_remote_code: true" in text) == (flag == "--trust-remote-code")
        assert (plugin_hash("theirs.py")[:12] in text) == (flag == "--trust-plugins")
        assert not (received / "ran").exists()
    both = {**content, "plugins": ["theirs.py"]}
    (received / "file.yaml").write_text(yaml.safe_dump(both))
    (received / "mine.py").write_text("")
    for more in ([], ["--trust-plugins"], ["--trust-remote-code"], ["--plugin", "mine.py", "--trust-remote-code"]):
        assert cli(name, "file.yaml", *words, *more).exit_code == 2
        assert not (received / "ran").exists()
    assert not [*received.glob("studies"), *received.glob("runs")]


@pytest.mark.parametrize("command", ["train", "train --dry-run", "plan", "run"])
def test_an_interpreter_that_a_file_names_is_not_started(cli, received, command):
    pytest.importorskip("gatespace.addons.vllm")
    name, *words = command.split()
    train = {"pair": {"student": "tiny", "teacher": "tiny"}}
    train["rollout"] = {"engine": "vllm", "options": {"server": "theirs.sh"}}
    content = {"task": {"name": "synthetic"}, **train} if name == "train" else yaml.safe_load(STUDY) | {"train": train}
    (received / "file.yaml").write_text(yaml.safe_dump(content))
    (received / "theirs.sh").write_text(f"#!/bin/sh\ntouch {received / 'ran'}\n")
    (received / "theirs.sh").chmod(0o755)
    refused = cli(name, "file.yaml", *words)
    assert (refused.exit_code, "--trust-plugins" in refused.stderr, (received / "ran").exists()) == (2, True, False)


@pytest.mark.parametrize("words", [["train", "file.yaml", "--dry-run"], ["plan", "file.yaml"]])
def test_with_its_flag_the_code_runs(cli, received, taught, words):
    content = _files(str(taught.folder / "model"))["train" if words[0] == "train" else "study"]
    plain = json.loads(json.dumps(content).replace('"student": "model"', '"student": "tiny"').replace("true", "false"))
    (received / "file.yaml").write_text(yaml.safe_dump({**plain, "plugins": ["theirs.py"]}))
    assert cli(*words, "--trust-plugins").exit_code == 0
    assert (received / "ran").exists()
    assert cli(*words, "--plugin", "theirs.py").exit_code == 0  # compared by content
    if words[0] == "plan":  # opens no model
        return
    (received / "file.yaml").write_text(yaml.safe_dump(content))
    (received / "ran").unlink()
    cli(*words, "--trust-remote-code")  # the model is not a real one
    assert (received / "ran").exists()


def test_what_only_reads_a_study_runs_no_code(cli, received, taught):
    from gatespace.cli.study_file import load_study

    content = {**_files(str(taught.folder / "model"))["study"], "plugins": ["theirs.py"]}
    (received / "file.yaml").write_text(yaml.safe_dump(content))
    config = load_study("file.yaml", trust_plugins=True, trust_remote_code=True)
    StudyFolder("studies/own").begin(config, workers=1, threads=1)
    (received / "ran").unlink()
    assert "0 of" in cli("status", "studies/own").stdout
    cli("report", "studies/own", "--no-png")
    cli("evidence", "studies/own")
    assert not (received / "ran").exists()
    assert "--trust-plugins" in cli("run", "studies/own").stderr


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_run_folder_from_elsewhere_runs_no_code(cli, received, command):
    (received / "run").mkdir()
    (received / "model").rename(received / "run" / "model")
    settings = {**_files("self")["train"], "plugins": ["theirs.py"]}
    (received / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    result = cli(command, "run", stdin="a text\n")
    assert result.exit_code == 2, result.stderr
    assert not (received / "ran").exists()
