"""The section `task` becomes the task, prompt and rows it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TaskConfig, parse_config
from gatespace.errors import UsageError
from gatespace.tasks import Prompt, load_table, load_task, split_rows
from gatespace.tasks.configured import configured_prompt, configured_rows, load_configured_task


def section(**settings: Any) -> TaskConfig:
    return parse_config(TaskConfig, settings)


def table(folder: Path, **settings: Any) -> dict[str, Any]:
    path = folder / "mails.csv"
    rows = [f"mail {index},{index % 2}" for index in range(100)]
    path.write_text("\n".join(["body,kind", *rows]), encoding="utf-8")
    return {"source": str(path), "labels": ["no", "yes"], "text_column": "body", "label_column": "kind", **settings}


def test_by_name(tweeteval: Path) -> None:
    assert load_configured_task(section(name="synthetic")) == load_task("synthetic")
    found = load_configured_task(section(root=str(tweeteval)))
    assert (found.name, len(found.train)) == ("tweeteval/emotion", 3257)


def test_table(tmp_path: Path) -> None:
    settings = table(tmp_path, definitions={"no": "Unwanted.", "yes": "Wanted."}, name="mails", question="Wanted?")
    task = load_configured_task(section(table={**settings, "carve": {"val": 0.2, "test": 0.3}, "carve_seed": 5}))
    assert (task.name, task.question, task.labels) == ("mails", "Wanted?", ("no", "yes"))
    assert task == load_table(
        tmp_path / "mails.csv",
        labels=("no", "yes"),
        definitions={"no": "Unwanted.", "yes": "Wanted."},
        text_column="body",
        label_column="kind",
        carve={"val": 0.2, "test": 0.3},
        carve_seed=5,
        name="mails",
        question="Wanted?",
    )
    assert (len(task.train), len(task.val), len(task.test)) == (50, 20, 30)
    assert load_configured_task(section(table=table(tmp_path))).name == str(tmp_path / "mails.csv")
    files = {"train": settings["source"], "test": settings["source"]}
    assert len(load_configured_task(section(table={**settings, "source": files})).test) == 100


def test_prompt() -> None:
    task = load_task("synthetic")
    assert configured_prompt(section(name="synthetic"), task) == Prompt.of(task)
    assert configured_prompt(section(prefill="", brief=True), task) == Prompt.of(task, "", brief=True)


def test_rows() -> None:
    task = load_task("synthetic")
    parts = split_rows(task.train, {"teacher": 0.6, "distill": 0.4}, 0)
    assert configured_rows(section(), task, "teacher") == parts["teacher"]
    assert configured_rows(section(split={"distill": 0.4, "teacher": 0.6}), task, "distill") == parts["distill"]
    assert configured_rows(section(split_seed=1), task, "teacher") != parts["teacher"]
    assert configured_rows(section(split=None), task, "teacher") == task.train
    with pytest.raises(UsageError, match=r"^task\.split\.teacher: no share"):
        configured_rows(section(split={"distill": 1.0}), task, "teacher")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": "tweetevl"}, r"^task\.name: unknown task 'tweetevl'"),
        ({"name": "synthetic", "root": "x"}, r"^task: the task synthetic has no folder"),
        ({"root": "no/such/folder"}, r"^task: root is not a folder"),
        (
            {"table": {"source": "none.csv", "labels": ["a", "b"]}},
            r"^task\.table: no such file(.|\n)*working directory",
        ),
        ({"table": {"source": "none.csv", "labels": ["a", "A"]}}, r"^task\.table: two labels differ in case"),
    ],
)
def test_errors_name_the_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_configured_task(section(**settings))


def test_prefill_is_checked() -> None:
    with pytest.raises(UsageError, match=r"^task\.prefill: a prefill is the beginning of every right answer"):
        configured_prompt(section(prefill="Label: "), load_task("synthetic"))
