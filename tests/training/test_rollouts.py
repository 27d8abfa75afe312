"""Rollouts one step off policy: whose responses they are, and what a resumed run needs of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TrainConfig
from gatespace.files import read
from gatespace.training.train import train

from .conftest import Listener, assert_resumes

Make = Callable[..., TrainConfig]


@pytest.fixture
def make(train_config: Make, tmp_path: Path) -> Make:
    """A run of six steps in several micro-batches."""

    def build(name: str, **settings: Any) -> TrainConfig:
        whole = {"steps": 6, "engine": {"micro_tokens": 150}, "checkpoint": {"every": 4}, **settings}
        return train_config(output=str(tmp_path / name), **whole)

    return build


def ids(folder: Path, step: int) -> list[list[int]]:
    return [record["ids"] for record in read(folder / "tokens.jsonl") if record["step"] == step]


def test_stale_responses_are_those_of_the_student_before(make: Make) -> None:
    """Random numbers are named by step and place, so that a student that does not move shows which one sampled."""
    every = {"trace": {"tokens_every": 1, "rollouts": 6}, "engine": {"micro_tokens": None}}
    moving = {"optimizer": {"lr": 0.05}, **every}
    fresh, stale = make("fresh", **moving), make("stale", rollout={"staleness": 1}, **moving)
    still = make("still", optimizer={"lr": 1e-30}, **every)
    for config in (fresh, stale, still):
        train(config)
    assert ids(stale.output, 1) == ids(fresh.output, 1) == ids(still.output, 1)
    assert ids(stale.output, 2) == ids(still.output, 2) != ids(fresh.output, 2)
    # The first update is the same, so its student samples what it would have sampled a step earlier.
    assert read(stale.output / "metrics.jsonl")[0]["loss"] == pytest.approx(
        read(fresh.output / "metrics.jsonl")[0]["loss"], rel=1e-5
    )
    assert ids(stale.output, 3) != ids(still.output, 3)
    identities = [json.loads((config.output / "identity.json").read_text())["identity"] for config in (fresh, stale)]
    assert identities[0] != identities[1]


def test_a_stale_run_resumes_with_the_responses_sampled_ahead(make: Make) -> None:
    """Equal ones, here gold ones, are merged into one row."""
    settings = {
        "rollout": {"staleness": 1, "from": {"student": 0.6, "gold": 0.4}, "per_prompt": 3},
        "steps": 8,
        "checkpoint": {"every": 2},
        "optimizer": {"lr": 0.02},
    }
    assert_resumes(make("straight", **settings), make("killed", **settings), 1, 3, 6, 7)


def test_a_stale_run_needs_the_responses_sampled_ahead(make: Make) -> None:
    config = make("run", rollout={"staleness": 1}, checkpoint={"every": 2})
    with pytest.raises(KeyboardInterrupt):
        train(config, Listener(3))
    (state,) = (config.output / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["state"]["ahead"]["number"] == 2
    damaged = state.read_text().replace('"ahead"', '"other"')
    state.write_text(damaged)
    listener = Listener()
    train(config, listener)  # a checkpoint that was changed is no checkpoint
    assert listener.steps == [1, 2, 3, 4, 5, 6]
