"""The list of settings is complete, and its defaults are the ones that count."""

from __future__ import annotations

from typing import Any

import pytest

from gatespace.config import TeachConfig, TrainConfig, describe, load_config, parse_config
from gatespace.config.describe import REQUIRED
from gatespace.config.identity import settings_of
from gatespace.config.text import read_yaml


@pytest.mark.parametrize("cls", [TrainConfig, TeachConfig])
def test_every_setting_teaches(cls: type[Any]) -> None:
    lines = describe(cls)
    assert len({line.path for line in lines}) == len(lines)
    for line in lines:
        assert len(line.doc) > 10, line
        assert line.doc.endswith("."), line
        assert not any(word in line.type for word in ("typing", "class", "Annotated")), line


def test_defaults_are_those_of_the_configuration() -> None:
    needed = {"pair": {"teacher": "t"}}
    shown = {line.path: line.default for line in describe(TrainConfig)}
    assert shown.pop("pair.teacher") == "null"  # which is refused, unless pair.teachers is given
    for path, value in settings_of(parse_config(TrainConfig, needed)).items():
        if path != "pair.teacher":
            assert read_yaml(shown[path], where=path) == value, path
    shown = {line.path: line.default for line in describe(TeachConfig)}
    for path, value in settings_of(TeachConfig()).items():
        assert read_yaml(shown[path], where=path) == value, path


_NEEDED = ("task.name", "task.table", "task.text.prompt", "pair.teacher")
"""One of several has to be given."""


def test_every_default_can_be_set() -> None:
    beside = ["pair.teacher=t", "task.name=null", "task.table.source=x", "task.table.labels=[a, b]"]
    text = ["pair.teacher=t", "task.text.source=x", 'task.text.prompt="{x}"', "task.text.answer=y"]
    for line in describe(TrainConfig):
        if line.default != REQUIRED and line.path not in _NEEDED:
            if line.path == "task.text.answer":  # which a prompt needs
                continue
            around = text if line.path.startswith(("task.text.", "teacher.prompt")) else beside
            if line.path.startswith("teacher.prompt."):  # which has to name something
                other = "system" if line.path.endswith(".prompt") else "prompt"
                around = [*around, f"teacher.prompt.{other}=x"]
            load_config(TrainConfig, None, [*around, f"{line.path}={line.default}"])


def test_kinds() -> None:
    kinds = {line.path: line.type for line in describe(TrainConfig)}
    assert kinds["steps"] == "integer ≥ 1"
    assert kinds["seed"] == "integer ≥ 0"
    assert kinds["optimizer.clip"] == "number > 0 or null"
    assert kinds["optimizer.betas"] == "list of 2: number ≥ 0, < 1"
    assert kinds["rollout.from.gold"] == "number ≥ 0, ≤ 1"
    assert kinds["pair.lora"] == "section or null"
    assert kinds["engine.precision"] == "one of auto, fp32, bf16"
    assert kinds["evaluation.final"] == "list of one of train, val, test"
    assert kinds["task.root"] == "path or null"
