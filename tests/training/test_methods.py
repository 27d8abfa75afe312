"""Published methods in whole runs: what a run gives them beside distributions, and that they resume to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TrainConfig
from gatespace.errors import UsageError
from gatespace.files import read
from gatespace.training.train import train

from .conftest import assert_resumes

Make = Callable[..., TrainConfig]
BOTH = {"from": {"student": 0.5, "teacher": 0.5}}
METHODS: dict[str, dict[str, Any]] = {
    "student_top_k": {},
    "revisiting_opd": {"params": {"share": 0.5}, "rollout": {"top_p": 0.9}},
    "tip": {"params": {"gamma": 1.0}},
    "iw_opd": {},
    "vopd": {},
    "distillm2": {"rollout": BOTH},
    "taid": {"params": {"alpha": 0.2}},
}


def settings(name: str, **more: Any) -> dict[str, Any]:
    own = METHODS[name]
    goal = {"method": name, "params": own.get("params", {})}
    rollout = {"max_new_tokens": 8, **own.get("rollout", {}), **more.pop("rollout", {})}
    return {"objective": goal, "rollout": rollout, "evaluation": {"final": []}, **more}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_was_stopped_ends_with_the_same_bytes(train_config: Make, tmp_path: Path, name: str) -> None:
    """Stopped a step after a checkpoint, so that a step is computed again."""
    straight, killed = (train_config(**settings(name, steps=4, output=str(tmp_path / n))) for n in ("one", "two"))
    assert_resumes(straight, killed, 3)
    records = read(straight.output / "metrics.jsonl")
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)


def test_tau_of_taid_is_recorded_and_moves_with_the_loss(train_config: Make) -> None:
    config = train_config(**settings("taid", steps=4))
    train(config)
    records = read(config.output / "metrics.jsonl")
    taus = [record["taid_tau"] for record in records]
    assert taus[:2] == [0.4, 0.4]  # the first step has no loss before it
    mean = 0.01 * (records[0]["loss"] - records[1]["loss"]) / (records[0]["loss"] + 1e-15)
    ahead = 0.4 + 0.2 / (1 + math.exp(-mean)) * 0.6
    assert taus[2] == pytest.approx(max(0.4 + 0.6 / 4, ahead), abs=1e-12)
    assert taus[3] > taus[2]


def test_tokens_that_tip_draws_depend_on_seed_and_step(train_config: Make, tmp_path: Path) -> None:
    def weights(seed: int) -> list[list[float]]:
        config = train_config(
            **settings(
                "tip", steps=2, seed=seed, trace={"tokens_every": 1, "rollouts": 6}, output=str(tmp_path / str(seed))
            )
        )
        train(config)
        rows = read(config.output / "tokens.jsonl")
        return [
            [weight for row in rows if row["step"] == step for weight in row["values"]["weight"]] for step in (1, 2)
        ]

    first, again = weights(1), weights(2)
    assert all(set(step) == {0.0, 1.0} for step in first)
    assert all(sum(step) == len(step) // 2 for step in first)
    assert first != again


def test_special_tokens_do_not_count(train_config: Make, tmp_path: Path) -> None:
    """A response that ends with the end token is one token shorter."""
    rows, found = {"from": {"student": 0.0, "gold": 1.0}, "stop": "eos", "top_p": 1.0}, {}
    for masked in (True, False):
        goal = {"method": "revisiting_opd", "params": {"mask_special": masked}}
        config = train_config(
            objective=goal, rollout=rows, steps=1, evaluation={"final": []}, output=str(tmp_path / str(masked))
        )
        train(config)
        (found[masked],) = read(config.output / "metrics.jsonl")
    assert found[False]["tokens"] - found[True]["tokens"] == found[True]["rows"] == 6
    assert found[False]["response_length"] == found[True]["response_length"]


def test_distillm2_looks_at_who_wrote_each_response(train_config: Make, tmp_path: Path) -> None:
    """Its loss does not depend on how the step is divided into micro-batches."""
    losses = []
    for size in (None, 60):
        config = train_config(
            **settings(
                "distillm2", steps=1, batch_size=12, engine={"micro_tokens": size}, output=str(tmp_path / str(size))
            )
        )
        train(config)
        rows = read(config.output / "tokens.jsonl") if (config.output / "tokens.jsonl").exists() else []
        assert all(row["source"] in ("student", "teacher") for row in rows)
        losses.append(read(config.output / "metrics.jsonl")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": {"method": "distillm2"}}, "needs responses of the student and of the teacher"),
        ({"objective": {"gate": {"trust": 2.0}, "support": "labels"}}, "over labels none is sampled"),
    ],
)
def test_what_a_method_does_not_get_is_an_error(train_config: Make, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(train_config(**change))


def test_a_gate_of_trust_and_drift_trains(train_config: Make) -> None:
    config = train_config(objective={"gate": {"a": 1.0, "trust": 2.0, "drift": -1.0}}, evaluation={"final": []})
    train(config)
    records = read(config.output / "metrics.jsonl")
    assert all(0 < record["trust"] <= 1 and 0 <= record["drift"] < 1 for record in records)
    assert any(record["lam_sd"] > 0 for record in records)
