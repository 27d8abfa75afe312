"""Scores of validation rows, as an evaluation left them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gatespace.addons.tune.jobs import reached, read_rows, row_scores
from gatespace.runs import RunFolder

TEXT = {"index": 0, "text": "", "references": ["b"], "response": "b"}


def paused(folder: Path, step: int, rows: list[dict[str, object]]) -> RunFolder:
    """A run that has paused after `step` steps."""
    place = RunFolder(folder).at_step(step)
    place.path.mkdir(parents=True)
    place.predictions_file("val").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.evaluation_file("val").write_text("{}")
    return RunFolder(folder)


def test_labels_have_the_log_probability_of_the_right_one(tmp_path: Path) -> None:
    rows = [{"gold": "a", "probabilities": {"a": p, "b": 1 - p}} for p in (0.8, 0.0)]
    place = reached(paused(tmp_path, 3, [*rows]), 3)
    assert place is not None
    good, hopeless = row_scores(place)
    assert good == pytest.approx(math.log(0.8))
    assert hopeless < -700
    assert math.isfinite(hopeless)


def test_texts_have_their_score(tmp_path: Path) -> None:
    runs = {
        seed: paused(tmp_path / str(seed), 5, [{**TEXT, "score": 0.25 * seed}, {**TEXT, "score": 1}]) for seed in (1, 2)
    }
    assert read_rows(runs, 5) == {1: [0.25, 1.0], 2: [0.5, 1.0]}
    assert read_rows(runs, 9) is None  # no run has come so far


def test_a_number_that_a_diverged_model_did_not_have_stays_none(tmp_path: Path) -> None:
    rows = [{"gold": "a", "probabilities": {"a": None, "b": None}}, {**TEXT, "score": 0.5}]
    place = reached(paused(tmp_path, 3, [*rows]), 3)
    assert place is not None
    *lost, known = row_scores(place)
    assert all(map(math.isnan, lost))
    assert known == 0.5
