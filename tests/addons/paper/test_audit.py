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
