"""Runs that end by their evaluations on the way, and the weights that they end with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.config import TeachConfig, TrainConfig, identity, parse_config
from gatespace.errors import UsageError
from gatespace.files import read
from gatespace.models import TinyPair, load_model
from gatespace.runs import RunFolder
from gatespace.training import checkpoint
from gatespace.training.train import teach, train

from .test_train import assert_predicts_as_recorded

Make = Callable[..., TrainConfig]


def last_step(accuracies: list[float], patience: int) -> int:
    """The place of the evaluation after which a run has lost its patience, by the definition; -1: none."""
    best, since = -1.0, 0
    for place, accuracy in enumerate(accuracies):
        since = 0 if accuracy > best else since + 1
        best = max(best, accuracy)
        if since == patience:
            return place
    return -1


@pytest.fixture
def restless(train_config: Make, taught: Path) -> Make:
    """A student whose accuracy goes up and down."""

    def make(**settings: Any) -> TrainConfig:
        usual: dict[str, Any] = {
            "pair": {"student": str(taught / "model")},
            "steps": 9,
            "optimizer": {"lr": 0.01},
            "evaluation": {"every": 1, "limit": 40},
            "checkpoint": {"every": 4},
            "trace": {"tokens_every": 0},
        }
        merged = {
            name: {**usual.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in {**usual, **settings}.items()
        }
        return train_config(**merged)

    return make


def test_a_run_ends_when_its_patience_does_and_keeps_its_best_weights(
    restless: Make, tmp_path: Path, synthetic: Any
) -> None:
    whole = restless(checkpoint={"select": "best"}, output=str(tmp_path / "whole"))
    summary = train(whole)
    evaluations = read(whole.output / "evaluations.jsonl")
    assert [record["step"] for record in evaluations] == list(range(10))  # the last too
    curve = [record["accuracy"] for record in evaluations]
    best = curve.index(max(curve))
    assert (summary["steps"], summary["chosen_step"]) == (9, best)
    assert summary["evaluation"]["val"]["metrics"]["accuracy"] == max(curve) > curve[-1]
    assert_predicts_as_recorded(whole.output, synthetic)
    if best:
        assert train(restless(steps=best, output=str(tmp_path / "best")))["fingerprint"] == summary["fingerprint"]

    patience = next(n for n in (1, 2, 3) if 0 < last_step(curve, n) < 9)
    config = restless(evaluation={"patience": patience}, output=str(tmp_path / "patient"))
    summary, done = train(config), last_step(curve, patience)
    assert [record["accuracy"] for record in read(config.output / "evaluations.jsonl")] == curve[: done + 1]
    assert (summary["steps"], summary["planned_steps"], summary["chosen_step"]) == (done, 9, done)
    assert summary["run"]["steps"] == done
    # up to there it is the same run, and its weights are those of a run of as many steps
    metrics = [(one.output / "metrics.jsonl").read_bytes() for one in (config, whole)]
    assert metrics[1].startswith(metrics[0])
    assert train(restless(steps=done, output=str(tmp_path / "short")))["fingerprint"] == summary["fingerprint"]
    assert train(config) == summary  # it is done


def test_where_training_only_harms_the_model_stays_as_it_was(restless: Make, taught: Path) -> None:
    config = restless(steps=6, optimizer={"lr": 0.3}, evaluation={"patience": 2}, checkpoint={"select": "best"})
    summary = train(config)
    assert (summary["steps"], summary["chosen_step"]) == (2, 0)
    assert not any("too small" in warning for warning in summary["warnings"])
    before, after = (load_model(str(folder / "model")).network.state_dict() for folder in (taught, config.output))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_teach_ends_early_too(tiny: TinyPair, tmp_path: Path) -> None:
    settings = {
        "task": {"name": "synthetic", "brief": True},
        "model": str(tiny.teacher),
        "steps": 8,
        "batch_size": 6,
        "optimizer": {"lr": 1e-7},
        "engine": {"precision": "fp32", "threads": 1},
        "evaluation": {"every": 2, "limit": 20, "max_new_tokens": 4, "final": ["val"], "patience": 1},
        "output": str(tmp_path / "teach"),
    }
    summary = teach(parse_config(TeachConfig, settings))
    assert (summary["steps"], summary["planned_steps"]) == (2, 8)
    assert "alarms" not in summary


def test_choices_need_evaluations_that_may_choose(train_config: Make) -> None:
    for choice in ({"evaluation": {"patience": 1}}, {"checkpoint": {"select": "best"}}):
        with pytest.raises(UsageError, match=r"evaluation\.every"):
            train_config(**choice)
        more = {name: {**choice.get(name, {}), "every": 1} for name in ("evaluation", "checkpoint")}
        train_config(**more)
        more["evaluation"]["split"] = "test"  # type: ignore[assignment]
        with pytest.raises(UsageError, match=r"evaluation\.split"):
            train_config(**more)
    with pytest.raises(UsageError, match=r"checkpoint\.every"):
        train_config(evaluation={"every": 1}, checkpoint={"select": "best", "every": 0})


def test_the_evaluations_count_where_they_choose(train_config: Make) -> None:
    """When and on what a run is evaluated is no part of its identity, unless that decides how it ends."""
    for choice in ({}, {"patience": 2}):
        plain, often, other = (
            identity(train_config(evaluation={**choice, "every": every, "split": split}))
            for every, split in ((2, "val"), (1, "val"), (2, "train"))
        )
        assert (plain == often) == (plain == other) == (not choice)


def test_a_checkpoint_keeps_the_tensors_of_an_earlier_one(tmp_path: Path) -> None:
    def save(step: int, best: Path | None = None) -> checkpoint.Checkpoint:
        checkpoint.save(tmp_path, step, {"w": torch.full((4,), float(step))}, {}, best=best)
        found = checkpoint.latest(tmp_path)
        assert found is not None
        return found

    first = save(1)
    assert first.best == checkpoint.tensors_file(tmp_path, 1)
    for step in (2, 3):  # each has it, and alone
        first = save(step, first.best)
        assert first.best == checkpoint.tensors_file(tmp_path, step, best=True)
        assert checkpoint.tensors_of(first.best)["w"].tolist() == [1.0] * 4
        assert first.tensors["w"].tolist() == [float(step)] * 4
        assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:06d}"]
    first.best.write_bytes(b"damaged")
    notes: list[str] = []
    assert checkpoint.latest(tmp_path, report=notes.append) is None
    assert "best.safetensors has another checksum" in notes[0]
    json.dumps(first.state)


def test_a_run_that_pauses_ends_as_one_that_does_not(train_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    settings = {"steps": 4, "evaluation": {"probabilities": True}, "checkpoint": {"every": 3}}
    whole = train(train_config(**settings, output=str(tmp_path / "whole")))
    config = train_config(**settings, output=str(tmp_path / "paused"))
    run = RunFolder(config.output)
    for step in (1, 3):
        found = train(config, until=step)
        assert found["steps"] == step
        assert not run.is_done
        assert run.at_step(step).evaluation("val") == found["evaluation"]["val"]
        assert len(run.at_step(step).predictions("val")) == 12
    assert train(config, until=9) == whole  # no more than all its steps
    assert run.is_done
    for name in ("metrics.jsonl", "tokens.jsonl", "predictions-val.jsonl"):
        assert (run.path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
