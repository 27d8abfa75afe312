"""A teacher with a prompt of its own where the task has labels; of free text it is in test_text.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gatespace.cli.estimate import estimate
from gatespace.config import TrainConfig
from gatespace.errors import UsageError
from gatespace.files import read
from gatespace.tasks import Example, Prompt, Task
from gatespace.tasks.prompt import TeacherPrompt
from gatespace.training.train import train

Make = Callable[..., TrainConfig]
SHOWN = {
    "system": "Be sure.",
    "prompt": "{prompt}\nIt is {label}: {text}",
    "examples": [{"user": "a", "assistant": "b"}],
}


def losses(config: TrainConfig) -> list[float]:
    train(config)
    return [record["loss"] for record in read(config.output / "metrics.jsonl")]


def test_its_turns(synthetic: Task) -> None:
    student = Prompt.of(synthetic, brief=True)
    row = Example(" Where is it? ", synthetic.labels[1])
    other = replace(student, teacher=TeacherPrompt(str(SHOWN["prompt"]), "Be sure.", (("a", "b"),)))
    turns = other.messages(other.text(row))
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    (own,) = student.messages(row.text)
    assert turns[-1]["content"] == f"{own['content']}\nIt is {row.label}: {row.text}"
    # responses are those after the student's prompt
    right = student.gold_response(row.label)
    assert (other.prefill, other.gold_response(row.label), other.parse(right)) == (student.prefill, right, row.label)
    assert (other.closed(right), other.closed(right[:-1]), other.closes) == (True, False, True)
    # a model without a chat template gets the student's form where the turns are as many
    alone = replace(student, teacher=TeacherPrompt("{text}"))
    assert alone.plain(alone.messages(alone.text(row))) == f"{row.text}\n\nAnswer: {student.prefill}"


@pytest.mark.parametrize("objective", [{}, {"support": "labels"}])
def test_the_students_own_prompt_changes_nothing(objective: dict[str, Any], train_config: Make, tmp_path: Path) -> None:
    plain = train_config(objective=objective, output=str(tmp_path / "plain"))
    cache = {"cache": str(tmp_path / "other"), "prompt": {"prompt": "{prompt}"}}
    same = train_config(objective=objective, output=str(tmp_path / "same"), teacher=cache)
    assert losses(plain) == losses(same)
    assert (same.output / "tokens.jsonl").read_bytes() == (plain.output / "tokens.jsonl").read_bytes()


@pytest.mark.parametrize("objective", [{}, {"support": "labels"}])
def test_a_hint_teaches_the_models_own_weights(
    objective: dict[str, Any], train_config: Make, taught: Path, tmp_path: Path
) -> None:
    """And what is cached under one prompt is not what the teacher says after another."""
    pair = {"student": str(taught / "model"), "teacher": "self"}
    make = {"pair": pair, "objective": objective, "steps": 1}
    assert losses(train_config(**make, output=str(tmp_path / "same"))) == [pytest.approx(0, abs=1e-4)]
    shown = losses(train_config(**make, output=str(tmp_path / "shown"), teacher={"prompt": SHOWN}))
    assert shown[0] > 1e-3
    cold = {"prompt": SHOWN, "cache": None}
    assert losses(train_config(**make, output=str(tmp_path / "cold"), teacher=cold)) == shown


def test_an_estimate_counts_what_the_teacher_reads(train_config: Make, tmp_path: Path) -> None:
    """And a run's teacher then reads no more."""
    plain = estimate(train_config(), lambda text: None)
    assert "teacher_prompt_tokens_mean" not in plain
    config = train_config(teacher={"prompt": SHOWN, "cache": None}, steps=1)
    found = estimate(config, lambda text: None)
    rows = found["step"]["responses"]
    longer = found["teacher_prompt_tokens_mean"] - found["prompt_tokens_mean"]
    assert longer > 5
    more = found["step"]["teacher_tokens_at_most"] - plain["step"]["teacher_tokens_at_most"]
    assert more == pytest.approx(rows * longer)
    assert found["memory_bytes"] == plain["memory_bytes"]  # the student's prompt is as it was
    train(config)
    (timing,) = read(config.output / "timings.jsonl")
    most = rows * (found["teacher_prompt_tokens_longest"] + config.rollout.max_new_tokens)
    assert rows * found["teacher_prompt_tokens_mean"] / 2 < timing["teacher_tokens"] <= most


def test_a_row_that_has_nothing_to_show() -> None:
    other = Prompt(teacher=TeacherPrompt("Hint: {hint}"))
    assert "Hint: x" in other.text(Example("a", "b", columns={"hint": "x"}, where="rows.csv:2"))
    with pytest.raises(UsageError, match=r"teacher\.prompt\.prompt: rows\.csv:3: the prompt is empty"):
        other.text(Example("a", "b", columns={"hint": " "}, where="rows.csv:3"))
    chat = Prompt(conversations=True, teacher=TeacherPrompt(None, "Be sure.", (("c", "d"),)))
    turns = '[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]'
    found = chat.messages(chat.text(Example(turns, "b")))
    assert [turn["content"] for turn in found] == ["Be sure.", "c", "d", "u"]  # the system's turn first, and once


def test_a_column_that_rows_with_labels_lack(train_config: Make) -> None:
    with pytest.raises(UsageError, match=r"teacher\.prompt\.prompt: '.+' has no column 'hint'") as error:
        train(train_config(teacher={"prompt": {"prompt": "{hint}"}}))
    assert "'text', 'label'; and 'prompt', the student's turn" in str(error.value)
    with pytest.raises(UsageError, match=r"teacher\.prompt: .* do not fit into the context window"):
        train(train_config(teacher={"prompt": {"system": "word " * 2000}}))
