"""Intervals of accuracies against scipy's."""

from __future__ import annotations

import pytest
from numpy.random import default_rng
from scipy import stats

from gatespace.evaluation import Metrics, Prediction, measure
from gatespace.evidence.accuracy import accuracy_interval, wilson
from gatespace.study.records import Score
from gatespace.tasks import Example, Prompt, Task


def score(correct, count=100):
    metrics = measure(["a"] * count, ["a"] * correct + ["b"] * (count - correct), ("a", "b"))
    return Score.from_json({"split": "test", "metrics": metrics.as_json(), "duplicates": 0, "without_duplicates": {}})


@pytest.mark.parametrize("correct, count", [(0, 7), (7, 7), (9, 20), (431, 1000)])
def test_one_seed_has_wilsons_interval_over_texts(correct, count):
    want = stats.binomtest(correct, count).proportion_ci(method="wilson")
    assert wilson(correct, count) == pytest.approx((want.low, want.high), abs=1e-12)
    assert accuracy_interval([score(correct, count)]) == wilson(correct, count)
    assert wilson(0, 0) == (0.0, 1.0)


def test_seeds_have_students_interval():
    values = [0.7, 0.72, 0.69]
    want = stats.t.interval(0.95, 2, sum(values) / 3, stats.sem(values))
    assert accuracy_interval([score(round(100 * value)) for value in values]) == pytest.approx(want)
    assert accuracy_interval([]) is None


def text_score(values):
    rows = [Prediction(i, "", ("x",), "", value, tokens=3) for i, value in enumerate(values)]
    task = Task("t", [Example("", "x")], [], [], prompt=Prompt(), metric="token_f1")
    record = {"split": "test", "metrics": Metrics.of(task, rows).as_json(), "duplicates": 0}
    return Score.from_json({**record, "without_duplicates": {}})


def test_free_text_at_one_seed_has_students_interval_over_rows():
    values = default_rng(1).uniform(0.4, 0.6, 80).tolist()
    low, high = accuracy_interval([text_score(values)])
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 79, sum(values) / 80, stats.sem(values)), abs=1e-12)
    wide = wilson(sum(values), 80)
    assert wide[1] - wide[0] > 5 * (high - low)
    assert accuracy_interval([text_score([0.5])]) is None
