"""A few true steps of the real 135M model, through the same functions as the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TeachConfig, TrainConfig, parse_config
from gatespace.files import read
from gatespace.training.train import teach, train

COMMON: dict[str, Any] = {
    # Three rows for each, so that every step has the same ones and their losses can be held against each other.
    "task": {"name": "synthetic", "brief": True, "split": {"teacher": 3 / 2400, "distill": 3 / 2400}},
    "batch_size": 3,
    "evaluation": {"final": ["val"], "limit": 2, "every": 0, "max_new_tokens": 8},
    "checkpoint": {"every": 0},
    # Which responses are sampled, and so how far three steps get, differs between precisions; auto is by the CPU.
    "engine": {"precision": "fp32"},
}


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_the_real_model_learns_and_is_learned_from(smollm2: Path, tmp_path: Path) -> None:
    taught = teach(
        parse_config(
            TeachConfig,
            {
                **COMMON,
                "model": str(smollm2),
                "steps": 3,
                "optimizer": {"lr": 1e-4, "warmup_steps": 0, "schedule": "constant"},
                "output": str(tmp_path / "teacher"),
            },
        )
    )
    found = losses(tmp_path / "teacher")
    assert found[-1] < 0.6 * found[0]
    assert taught["evaluation"]["val"]["metrics"]["parse_failures"] == 0
    common: dict[str, Any] = {
        **COMMON,
        "pair": {"student": str(smollm2), "teacher": str(tmp_path / "teacher" / "model")},
        "rollout": {"max_new_tokens": 8},
        "teacher": {"cache": str(tmp_path / "cache")},
        "checkpoint": {"every": 0, "model": False},
        "optimizer": {"lr": 5e-5},
        "evaluation": {"final": [], "every": 0},
    }
    student = tmp_path / "student"
    summary = train(parse_config(TrainConfig, {**common, "steps": 3, "output": str(student)}))
    found = losses(student)
    assert found[-1] < 0.6 * found[0]
    assert 0 < summary["run"]["lam_mean"] < 1
    # The same run again, now with every score of the first step in the cache: the same numbers, to the bit.
    again = tmp_path / "again"
    train(parse_config(TrainConfig, {**common, "steps": 1, "output": str(again)}))
    assert losses(again) == found[:1]
    assert sum(record["cache_misses"] for record in read(again / "timings.jsonl")) == 0
