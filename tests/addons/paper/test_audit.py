"""The audit, against the same statistics from their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gatespace.addons.paper import counts
from gatespace.addons.paper.audit import recompute
from tests.addons.paper.printed import ACCURACIES, NINE
from tests.evidence import oracle


def test_shared_comparators(found):
    audit = found["audit"]["shared_comparators"]
    assert audit["most_shared"] == {"task": "emotion", "restriction": "entropy-only(-4)", "cells": 10, "of": 20}
    assert (round(audit["null_variance"], 1), audit["naive_variance"]) == (22.3, 9.0)
    assert round(audit["effective_n"], 1) == 14.5
    assert audit["naive_p"] == pytest.approx(oracle.binomial_two_sided(33, 36))
    # the same null with other numbers: uniform draws, since only the order of the runs counts
    rng = np.random.default_rng(99)
    cells = counts.cells()
    runs = {
        run: i for i, run in enumerate(dict.fromkeys((r["task"], r[side]) for r in cells for side in ("left", "right")))
    }
    left = [runs[r["task"], r["left"]] for r in cells]
    right = [runs[r["task"], r["right"]] for r in cells]
    drawn = rng.random((200_000, len(runs)))
    wins = (drawn[:, left] > drawn[:, right]).sum(axis=1)
    assert wins.var() == pytest.approx(67 / 3, rel=0.02)
    assert audit["correlated_p"] == pytest.approx(np.mean(abs(wins - 18) >= 15), abs=2e-4)


def test_fresh_seeds(found):
    audit = found["audit"]["fresh_seeds"]
    assert (round(audit["mean_on_selection_seed"], 2), round(audit["mean_on_fresh_seeds"], 2)) == (1.90, 0.28)
    assert audit["fresh_means"] == {"positive": 6, "zero": 1, "negative": 2}
    assert audit["single_differences"] == {"positive": 9, "zero": 0, "negative": 9}
    assert "+1.90" in audit["says"]
    assert "+0.28" in audit["says"]


def test_omnibus(found):
    for task, row in found["audit"]["omnibus"]["tasks"].items():
        values = {p: dict(zip((42, 2, 3), (v / 100 for v in acc), strict=True)) for p, acc in ACCURACIES[task].items()}
        f, _, mse = oracle.two_way(values)
        assert (row["f"], row["residual_sd"]) == pytest.approx((f, math.sqrt(mse)), rel=1e-9)
        assert row["p"] > 0.3


def test_group_claim(found):
    audit = found["audit"]["group_claim"]
    means = {}
    for _, task, a, b, *_ in NINE:
        for i, seed in enumerate((42, 2, 3)):
            means.setdefault((task, seed), []).append((ACCURACIES[task][a][i] - ACCURACIES[task][b][i]) / 100)
    for key, kept in (("all_seeds", (42, 2, 3)), ("fresh_seeds", (2, 3))):
        values = [sum(v) / len(v) for (_, seed), v in means.items() if seed in kept]
        mean, sd = oracle.mean_sd(values)
        n = len(values)
        assert (audit[key]["blocks"], audit[key]["mean"]) == (n, pytest.approx(mean))
        assert audit[key]["p"] == pytest.approx(oracle.t_two_sided(mean / (sd / math.sqrt(n)), n - 1), abs=1e-8)


def test_what_no_effect_on_fresh_seeds_would_give(found):
    audit = found["audit"]["expected_without_effect"]
    rng, n = np.random.default_rng(7), 200_000
    selected, means, drawn = [], [], {}
    for _, task, a, b, *_ in NINE:
        values = {p: dict(zip((42, 2, 3), (v / 100 for v in acc), strict=True)) for p, acc in ACCURACIES[task].items()}
        sd = math.sqrt(oracle.two_way(values)[2])
        left, right = (drawn.setdefault((task, point), rng.normal(0, sd, (2, n))) for point in (a, b))
        selected.append(values[a][42] - values[b][42])
        means.append((selected[-1] + (left - right).sum(axis=0)) / 3)
    means, selected = np.array(means), np.array(selected)
    assert audit["p_as_many_positive"] == pytest.approx(((means > 0).sum(axis=0) >= 8).mean(), abs=0.01)
    assert audit["p_all_shrink"] == pytest.approx((abs(means) < abs(selected)[:, None]).all(axis=0).mean(), abs=0.01)
    assert audit["expected_mean"] == pytest.approx(means.mean(), abs=0.01)
    rounded = [round(audit[key], 2) for key in ("p_as_many_positive", "p_all_shrink", "expected_mean", "mean")]
    assert rounded == [0.50, 0.80, 0.63, 0.82]


def test_counts_with_d_if_every_order_of_runs_is_equally_likely(found):
    audit, rng = found["audit"]["adding_d"], np.random.default_rng(8)
    runs = rng.random((100_000, 2, 9))  # five grid points with G2 first, then four with d
    above = (runs[..., 5:] > runs[..., :1]).sum(axis=(1, 2))
    assert audit["on_g2"]["p"] == pytest.approx(np.isin(above, (0, 8)).mean(), abs=0.005)
    above_lowest = (runs[..., 5:].min(axis=2) > runs[..., :5].min(axis=2)).all(axis=1)
    assert audit["on_g2"]["p_if_g2_is_the_lowest_of_its_grid"] == pytest.approx(above_lowest.mean(), abs=0.01)
    below_best = runs[:, 0, 5:].max(axis=1) < runs[:, 0, :5].max(axis=1)
    assert audit["on_hate_g4"]["p"] == pytest.approx(below_best.mean(), abs=0.01)
    assert (round(audit["on_g2"]["p"], 2), round(audit["on_hate_g4"]["p"], 2)) == (0.08, 0.56)


def test_the_range_on_hate_and_the_sds_are_those_of_noise(found):
    audit, rng = found["audit"], np.random.default_rng(9)
    values = {p: dict(zip((42, 2, 3), (v / 100 for v in acc), strict=True)) for p, acc in ACCURACIES["hate"].items()}
    ranges = np.ptp(rng.normal(0, math.sqrt(oracle.two_way(values)[2]), (200_000, 5)), axis=1)
    hate = audit["hate_grid_range"]
    assert (hate["range"], round(hate["noise_95"], 1)) == (3.64, 4.9)
    assert hate["noise_95"] == pytest.approx(np.quantile(ranges, 0.95), rel=0.01)
    assert hate["p"] == pytest.approx((ranges >= 3.64).mean(), abs=0.01)
    drawn, printed = [], []
    for points in ACCURACIES.values():
        sds = [oracle.mean_sd([v / 100 for v in acc])[1] for acc in points.values()]
        pooled = math.sqrt(sum(sd**2 for sd in sds) / len(sds))
        drawn.append(rng.normal(0, pooled, (100_000, len(sds), 3)).std(axis=2, ddof=1))
        printed += sds
    drawn = np.concatenate(drawn, axis=1)
    assert audit["seed_sds"]["ratio"] == pytest.approx(max(printed) / min(printed))
    expected = np.median(drawn.max(axis=1) / drawn.min(axis=1))
    assert audit["seed_sds"]["median_ratio_of_equal_variances"] == pytest.approx(expected, rel=0.02)
    assert round(expected) == 11


def test_the_rest_of_the_audit(found):
    audit = found["audit"]
    hate = audit["majority_class"]["tasks"]["hate"]
    assert (round(hate["majority"], 4), hate["below"], hate["of"]) == (0.5785, 28, 28)
    assert audit["majority_class"]["tasks"]["emotion"]["below"] == 0
    assert audit["duplicates"]["tasks"]["hate"] == {"rows": 231, "of": 2970}
    assert list(audit["power"]["seeds_needed_for_1pp_by_sd"].values()) == [10, 20, 34]
    assert audit["power"]["means_at_least_their_mde"] == 0
    lam = audit["mean_lambda"]["entropy_only"]
    assert len(lam) == 20
    assert all(row["restriction_lam"][1] == 0.5 for row in lam)
    assert next(row for row in lam if row["point"] == "G1")["lam"][0] == 0.5
    assert audit["static_baseline"]["family_above"] == 3
    assert round(audit["reference_band"]["two_models"], 2) == 0.36
    assert all(isinstance(entry["says"], str) and entry["says"].endswith(".") for entry in audit.values())


def test_equal_every_time(found):
    assert recompute() == found
