"""Measures of probabilities against formulas written anew in numpy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from gatespace.errors import UsageError
from gatespace.evaluation.calibration import (
    BINS,
    TARGETS,
    Calibration,
    LabelProbabilities,
    Rows,
    calibrate,
    label_bias,
)

LABELS = ("anger", "joy", "optimism", "sadness")


def drawn(rows: int, seed: int, *, levels: int | None = None) -> tuple[list[str], np.ndarray]:
    """Gold labels, and log-probabilities (rows, labels) that know something of them; few `levels` make ties."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(len(LABELS), size=rows)
    scores = rng.normal(size=(rows, len(LABELS))) + 1.5 * np.eye(len(LABELS))[gold]
    if levels is not None:
        return [LABELS[i] for i in gold], np.round(scores * levels) / levels - 10
    log_probs = scores - np.log(np.exp(scores).sum(1, keepdims=True)) + np.log(rng.uniform(0.5, 1, (rows, 1)))
    return [LABELS[i] for i in gold], log_probs


def measured(gold: list[str], log_probs: np.ndarray) -> Calibration:
    return calibrate(gold, [LabelProbabilities.of(LABELS, row) for row in log_probs.tolist()])


@pytest.mark.parametrize("rows, levels", [(1, None), (7, None), (500, None), (500, 1), (60, 2)])
def test_every_measure_is_its_formula(rows: int, levels: int | None) -> None:
    gold, log_probs = drawn(rows, seed=rows, levels=levels)
    found = measured(gold, log_probs)
    raw = np.exp(log_probs)
    p = raw / raw.sum(1, keepdims=True)
    truth = np.array([LABELS.index(label) for label in gold])
    top, right = p.max(1), p.argmax(1) == truth
    assert found.count == rows
    assert found.accuracy == pytest.approx(right.mean())
    assert found.confidence == pytest.approx(top.mean())
    assert found.mass == pytest.approx(raw.sum(1).mean())
    assert found.log_loss == pytest.approx(-np.log(p[np.arange(rows), truth]).mean())
    assert found.brier == pytest.approx(((p - np.eye(len(LABELS))[truth]) ** 2).sum(1).mean())
    # Bins by their edges, one after the other.
    edges = np.linspace(0, 1, BINS + 1)
    ece = 0.0
    for place, one in enumerate(found.bins):
        here = (top >= edges[place]) & ((top < edges[place + 1]) | (place == BINS - 1))
        assert (one.low, one.high) == pytest.approx((edges[place], edges[place + 1]))
        assert one.count == here.sum()
        if here.any():
            assert (one.confidence, one.accuracy) == pytest.approx((top[here].mean(), right[here].mean()))
            ece += here.mean() * abs(right[here].mean() - top[here].mean())
        else:
            assert one.confidence is one.accuracy is None
    assert found.ece == pytest.approx(ece)
    # The expectation over orders of rows of equal confidence, as a mean over many of them.
    rng, areas, curves = np.random.default_rng(1), [], []
    top = np.round(top, 12)
    assert len({*top}) == rows or levels
    for _ in range(2000 if levels else 1):
        order = np.lexsort((rng.random(rows), -top))
        share = np.cumsum(right[order]) / np.arange(1, rows + 1)
        areas.append((1 - share).mean())
        curves.append([share[math.ceil(rows * point / 100 - 1e-9) - 1] for point in range(1, 101)])
    assert found.aurc == pytest.approx(np.mean(areas), abs=1e-3 if levels else 1e-12)
    assert found.curve == pytest.approx(np.mean(curves, 0), abs=0.03 if levels else 1e-12)
    assert found.curve[-1] == pytest.approx(found.accuracy)


@pytest.mark.parametrize("levels", [None, 1])
def test_coverage_is_the_most_that_a_threshold_allows(levels: int | None) -> None:
    gold, log_probs = drawn(120, seed=4, levels=levels)
    found = measured(gold, log_probs)
    rows = [LabelProbabilities.of(LABELS, row) for row in log_probs.tolist()]
    for one, target in zip(found.coverage_at, TARGETS, strict=True):
        possible = {}
        for threshold in {row.confidence for row in rows}:
            kept = [row.label == right for right, row in zip(gold, rows, strict=True) if row.confidence >= threshold]
            if sum(kept) / len(kept) >= target:
                possible[threshold] = len(kept) / 120
        assert one.accuracy == target
        assert one.coverage == max(possible.values(), default=0.0)
        assert one.threshold == min(possible, default=None)


def test_thresholds_of_validation_are_reported_on_other_rows() -> None:
    val, test = (rows_of(*drawn(150, seed=seed, levels=2)) for seed in (6, 7))
    chosen, found = calibrate(*val), calibrate(*test, val)
    for one, there in zip(found.coverage_at, chosen.coverage_at, strict=True):
        assert one.threshold == there.threshold
        kept = [row.label == right for right, row in zip(*test, strict=True) if row.confidence >= (one.threshold or 2)]
        assert one.coverage == len(kept) / 150
        assert one.reached == (sum(kept) / len(kept) if kept else None)
    assert any(one.reached != there.reached for one, there in zip(found.coverage_at, chosen.coverage_at, strict=True))


def rows_of(gold: list[str], log_probs: np.ndarray, labels: tuple[str, ...] = LABELS) -> Rows:
    return gold, [LabelProbabilities.of(labels, row) for row in log_probs.tolist()]


@pytest.mark.parametrize("levels", [None, 1])
def test_auc_counts_all_pairs_of_rows(levels: int | None) -> None:
    gold, likely = rows_of(*drawn(80, seed=8, levels=levels))
    areas = []
    for label in LABELS:
        p = [row.probabilities[label] for row in likely]
        pairs = [
            (p[i] > p[j]) + (p[i] == p[j]) / 2 for i in range(80) for j in range(80) if gold[i] == label != gold[j]
        ]
        areas.append(sum(pairs) / len(pairs))
    assert calibrate(gold, likely).auc == pytest.approx(np.mean(areas), abs=1e-15)
    constant = [likely[0]] * 80
    assert calibrate(gold, constant).auc == 0.5
    assert calibrate(["joy"] * 80, likely).auc is None
    without_joy = [label if label != "joy" else "anger" for label in gold]
    assert calibrate(without_joy, likely).auc is not None  # a label that no row has is left out


def test_the_bias_of_two_labels_is_the_best_of_a_grid() -> None:
    rng = np.random.default_rng(9)
    gold = rng.random(70) < 0.3
    scores = rng.normal(size=70) + 1.2 * gold + 2.5  # far too many "yes"
    log_probs = np.stack([-np.logaddexp(0, scores), -np.logaddexp(0, -scores)], 1)
    grid = np.arange(-6, 6, 1e-3)[:, None]
    # softmax(log p + b) depends on d = b_yes - b_no alone, and the prior on both is least at b = ∓d/2
    nll = np.logaddexp(0, -(scores + grid) * np.where(gold, 1, -1)).sum(1) + grid[:, 0] ** 2 / 4
    best = grid[nll.argmin(), 0]
    names = ["yes" if one else "no" for one in gold]
    bias = label_bias(*rows_of(names, log_probs, ("no", "yes")))
    assert (bias["no"], bias["yes"]) == pytest.approx((-best / 2, best / 2), abs=1e-3)
    assert best < -1
    right = np.mean((scores + best > 0) == gold)
    found = calibrate(*(rows := rows_of(names, log_probs, ("no", "yes"))), rows)
    assert found.prior_corrected == right > found.accuracy


def test_the_bias_is_that_of_a_general_optimiser_and_undoes_a_shifted_prior() -> None:
    gold, log_probs = drawn(400, seed=10)
    shifted = log_probs + np.array([4.0, 0.0, -3.0, 0.0])
    truth = np.array([LABELS.index(label) for label in gold])
    logits = shifted - np.logaddexp.reduce(shifted, axis=1, keepdims=True)

    def loss(bias: np.ndarray) -> float:
        z = logits + bias
        return float((np.logaddexp.reduce(z, axis=1) - z[np.arange(400), truth]).sum() + bias @ bias / 2)

    best = minimize(loss, np.zeros(4), tol=1e-10)
    rows = rows_of(gold, shifted)
    assert [*label_bias(*rows).values()] == pytest.approx(best.x, abs=1e-4)
    val, test = ((rows[0][part], rows[1][part]) for part in (slice(200), slice(200, None)))
    found, plain = calibrate(*test, val), calibrate(*rows_of(gold[200:], log_probs[200:]))
    assert found.accuracy < plain.accuracy - 0.2
    assert found.prior_corrected == pytest.approx(plain.accuracy, abs=0.03)
    assert calibrate(*test).prior_corrected is None


def test_a_bias_is_finite_for_labels_and_probabilities_that_are_not_there() -> None:
    likely = [LabelProbabilities({"a": 1.0, "b": 0.0, "c": 0.0}, 1.0)] * 30
    bias = label_bias(["b"] * 30, likely)
    assert [*bias.values()] == pytest.approx([-30, 30, 0])  # where the prior holds what 30 rows ask for


def test_the_order_of_rows_does_not_matter() -> None:
    gold, log_probs = drawn(90, seed=5, levels=1)
    assert measured(gold[::-1], log_probs[::-1]) == measured(gold, log_probs)


def test_extremes() -> None:
    sure = LabelProbabilities.of(("a", "b"), [0.0, -5000.0])
    assert (sure.label, sure.confidence, sure.margin, sure.mass) == ("a", 1.0, 1.0, 1.0)
    right, wrong = calibrate(["a"] * 3, [sure] * 3), calibrate(["b"] * 3, [sure] * 3)
    assert (right.log_loss, right.brier, right.ece, right.aurc, right.accuracy) == (0, 0, 0, 0, 1)
    assert (wrong.brier, wrong.ece, wrong.aurc, wrong.accuracy) == (2, 1, 1, 0)
    assert 700 < wrong.log_loss < 710  # finite
    assert [one.coverage for one in wrong.coverage_at] == [0.0] * len(TARGETS)
    assert [one.threshold for one in wrong.coverage_at] == [None] * len(TARGETS)
    even = LabelProbabilities.of(("a", "b"), [math.log(0.1)] * 2)
    assert (even.label, even.margin) == ("a", 0.0)
    assert even.mass == pytest.approx(0.2)
    assert LabelProbabilities.of(("a",), [-3.0]).margin == 1.0


def test_it_is_read_as_it_was_written() -> None:
    found = measured(*drawn(40, seed=2))
    assert Calibration.from_json(json.loads(json.dumps(found.as_json()))) == found


@given(st.lists(st.floats(-1e4, 0), min_size=1, max_size=6))
def test_probabilities_add_up_to_one(log_probs: list[float]) -> None:
    found = LabelProbabilities.of([str(i) for i in range(len(log_probs))], log_probs)
    assert math.isclose(sum(found.probabilities.values()), 1)
    assert 0 <= found.margin <= found.confidence <= 1
    assert found.mass <= len(log_probs)


def test_mistakes() -> None:
    one = LabelProbabilities.of(("a", "b"), [-1.0, -2.0])
    with pytest.raises(UsageError, match="every row has its probabilities"):
        calibrate(["a", "b"], [one])
    with pytest.raises(UsageError, match="nothing to measure"):
        calibrate([], [])
    with pytest.raises(UsageError, match="unknown gold label"):
        calibrate(["c"], [one])
