"""Intervals of accuracies against scipy's."""

from __future__ import annotations

import pytest
from scipy import stats

from gatespace.evaluation.metrics import measure
from gatespace.evidence.accuracy import accuracy_interval, wilson
from gatespace.study.records import Score


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
