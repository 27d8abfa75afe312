"""Every figure that the paper prints and that follows from its per-seed accuracies, copied from its tables by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gatespace.addons.paper import counts as paper_counts
from gatespace.addons.paper import paper
from gatespace.addons.paper import tables as paper_tables
from gatespace.evidence.counts import null_variance
from tests.evidence import oracle

ACCURACIES = {
    "emotion": {
        "G4": (7734, 7685, 7671), "G5": (7748, 7635, 7847), "H2": (7847, 7734, 7706), "HG5,d+4": (7868, 7713, 7706),
        "entropy-only(-4)": (7671, 7769, 7657), "static0.388": (7727, 7727, 7692),
    },
    "hate": {
        "G4": (5586, 5239, 5444), "G5": (5286, 5296, 5529), "H1": (5549, 5360, 5283), "H2": (5411, 5488, 5525),
        "HG4,d+2": (5209, 5357, 5266), "entropy-only(-4)": (5128, 5350, 5195), "gap-only(+2)": (5387, 5377, 5283),
        "static0.556": (5202, 5444, 5195),
    },
    "offensive": {
        "G2": (7721, 7651, 7698), "H1": (7814, 7791, 7488), "entropy-only(-4)": (7581, 7698, 7558),
        "gap-only(+2)": (7674, 7616, 7523), "static0.574": (7581, 7547, 7581),
    },
}  # fmt: skip
"""Table 3seed-percfg × 10⁴, seeds 42, 2, 3."""

NINE = [
    ("restriction", "hate", "H1", "entropy-only(-4)", 4.21, 1.73, 2.18, -3.69, 7.15, 0.30),
    ("restriction", "hate", "HG4,d+2", "gap-only(+2)", -1.78, -0.72, 0.92, -3.00, 1.57, 0.31),
    ("restriction", "emotion", "HG5,d+4", "entropy-only(-4)", 1.97, 0.63, 1.27, -2.52, 3.79, 0.48),
    ("restriction", "offensive", "H1", "entropy-only(-4)", 2.33, 0.85, 1.52, -2.91, 4.62, 0.43),
    ("restriction", "offensive", "H1", "gap-only(+2)", 1.40, 0.93, 1.13, -1.86, 3.73, 0.29),
    ("restriction", "offensive", "G2", "entropy-only(-4)", 1.40, 0.78, 1.08, -1.91, 3.46, 0.34),
    ("isolation", "hate", "G4", "static0.556", 3.84, 1.43, 3.09, -6.24, 9.09, 0.51),
    ("isolation", "emotion", "HG5,d+4", "static0.388", 1.41, 0.47, 0.83, -1.58, 2.52, 0.43),
    ("isolation", "offensive", "H1", "static0.574", 2.33, 1.28, 1.91, -3.48, 6.04, 0.37),
]
SDS = {
    "emotion": (0.33, 1.06, 0.75, 0.92, 0.61, 0.20),
    "hate": (1.74, 1.38, 1.37, 0.58, 0.75, 1.14, 0.57, 1.42),
    "offensive": (0.36, 1.82, 0.75, 0.76, 0.20),
}


@pytest.fixture(scope="module")
def found():
    return paper.recompute()


@pytest.mark.parametrize("number", range(9))
def test_the_nine(found, number):
    axis, task, a, b, single, mean, sd, low, high, p = NINE[number]
    row = found["nine"][number]
    assert (row["axis"], row["task"], row["a"], row["b"]) == (axis, task, a, b)
    hundredths = [x - y for x, y in zip(ACCURACIES[task][a], ACCURACIES[task][b], strict=True)]
    values = [h / 100 for h in hundredths]
    own_mean, own_sd = oracle.mean_sd(values)
    t = own_mean / (own_sd / math.sqrt(3))
    own_p = 1 - abs(t) / math.sqrt(2 + t * t)  # two degrees of freedom have a closed form
    reach = 2 * 0.475 * math.sqrt(2 / (4 * 0.975 * 0.025)) * own_sd / math.sqrt(3)
    assert (row["mean"], row["sd"], row["t"], row["p"]) == pytest.approx((own_mean, own_sd, t, own_p), rel=1e-9)
    assert row["ci"] == pytest.approx([own_mean - reach, own_mean + reach], rel=1e-9)
    # and that is what is printed
    assert row["printed"] == {"delta_1seed": single, "mean": mean, "sd": sd, "ci": [low, high], "p": p}
    assert (round(row["mean"], 2), round(row["sd"], 2), round(row["p"], 2)) == (mean, sd, p)
    assert [round(end, 2) for end in row["ci"]] == [low, high]
    assert row["delta_1seed"] == single
    assert row["match"] is True
    # beyond it
    assert row["fresh_mean"] == pytest.approx((values[1] + values[2]) / 2, abs=1e-12)
    assert row["sign_flip"] == {"p": oracle.sign_flip(hundredths), "floor": 0.25}
    assert row["mde"] == pytest.approx(3.264043552819638 * own_sd, rel=1e-6)


def test_first_row_in_full(found):
    row = found["nine"][0]
    six = [f"{x:.6f}" for x in (row["mean"], row["sd"], row["t"], row["p"], *row["ci"])]
    assert six == ["1.730000", "2.182865", "1.372713", "0.303500", "-3.692537", "7.152537"]


def test_counts_give_other_last_digits_in_seven_rows(found):
    assert sum(not row["from_counts"]["match"] for row in found["nine"]) == 7
    row = found["nine"][3]
    values = [100 * d / 860 for d in (672 - 652, 670 - 662, 644 - 650)]
    assert (row["from_counts"]["mean"], row["from_counts"]["sd"]) == pytest.approx(oracle.mean_sd(values))


def test_a_wrong_digit_would_be_seen(monkeypatch):
    """One accuracy of the nine moved by one hundredth of a point: the row no longer matches."""
    real = paper_tables.seed_accuracies

    def moved(task, point):
        values = real(task, point)
        return {**values, 2: values[2] + 3} if (task, point) == ("hate", "H1") else values

    monkeypatch.setattr(paper_tables, "seed_accuracies", moved)
    printed = paper.facts()["nine"]
    assert paper_tables._nine(printed[0])["match"] is False
    assert paper_tables._nine(printed[1])["match"] is True
    assert next(r for r in paper_tables.seed_sds() if r["point"] == "H1" and r["task"] == "hate")["match"] is False


def test_the_facts_are_the_papers(found):
    for task, points in ACCURACIES.items():
        stored = paper.facts()["per_seed_accuracy"][task]
        assert list(stored) == list(points)
        for point, values in points.items():
            assert [round(10_000 * stored[point]["acc"][s]) for s in ("42", "2", "3")] == list(values)
            for value, count in zip(values, stored[point]["correct"].values(), strict=True):
                assert round(10_000 * count / stored[point]["n"]) == value
    assert found["whole_counts"] == {"accuracies": 57, "not_a_count": 0}


def test_nineteen_sds(found):
    rows = found["seed_sds"]
    assert len(rows) == 19
    expected = [(t, p, sd) for t in SDS for p, sd in zip(ACCURACIES[t], SDS[t], strict=True)]
    assert [(r["task"], r["point"], r["printed"]) for r in rows] == expected
    for row in rows:
        assert row["recomputed"] == pytest.approx(
            oracle.mean_sd([v / 100 for v in ACCURACIES[row["task"]][row["point"]]])[1]
        )
        assert round(row["recomputed"], 2) == row["printed"]
        assert row["match"]


def test_not_applicable_counts(found):
    table = found["not_applicable"]
    assert table["total"] == {"points": 26, "gap_only": 10, "entropy_only": 6, "comparable": 36}
    assert {task: row["comparable"] for task, row in table["tasks"].items()} == {"emotion": 20, "hate": 16}
    assert {task: row["entropy_only"] for task, row in table["tasks"].items()} == {"emotion": 1, "hate": 5}
    assert table["restrictions_named_alike"]
    assert all(row["match"] for row in table["checks"])


def test_d_on_g2(found):
    rows = {(r["task"], r["d"]): r for r in found["d_on_g2"]}
    assert [rows["hate", d]["printed"] for d in ("+2", "+4", "-2", "-4")] == [3.27, 1.89, 1.35, 1.45]
    assert [rows["emotion", d]["printed"] for d in ("+2", "+4", "-2", "-4")] == [0.63, 1.55, 0.42, 1.41]
    assert {key for key, r in rows.items() if r["match"]} == {("hate", "+2"), ("hate", "+4"), ("emotion", "+4")}
    assert not [key for key, r in rows.items() if r["match"] is False]
    assert rows["hate", "+2"]["recomputed"] == pytest.approx((5549 - (5586 - 364)) / 100)
    assert all(r["g2"] == r["g2_derived"] for r in rows.values())
    for (task, _), row in rows.items():  # a printed difference is a whole number of examples
        n = {"emotion": 1421, "hate": 2970}[task]
        assert abs(100 * row["examples"] / n - row["printed"]) < 0.0101


def test_best_observed_and_named_cells(found):
    best = {(r["task"], r["side"]): r for r in found["best_observed"]}
    assert [r["printed"] for r in found["best_observed"]] == [
        0.7671,
        0.7734,
        0.7790,
        0.7868,
        0.5391,
        0.5387,
        0.5347,
        0.5586,
    ]
    assert {key for key, r in best.items() if r["match"]} == {
        ("emotion", "family"),
        ("hate", "family"),
        ("hate", "gap-only"),
    }
    assert not [r for r in best.values() if r["match"] is False or r["consistent"] is False]
    cells = {(r["task"], r["cell"].split(" vs")[0]): r for r in found["named_cells"]}
    assert {key: r["recomputed"] for key, r in cells.items() if r["match"]} == {
        ("hate", "G4"): 3.84,
        ("hate", "HG4,d+2"): -1.78,
        ("hate", "H1"): 4.21,
    }
    assert all(r["match"] in (True, None) for r in cells.values())


def test_sampling_errors(found):
    assert [round(r["recomputed"], 3) for r in found["sampling_errors"]] == [1.111, 0.915, 1.449]
    for row in found["sampling_errors"]:
        values = [v / 10_000 for run in ACCURACIES[row["task"]].values() for v in run]
        p = sum(values) / len(values)
        assert row["recomputed"] == pytest.approx(100 * math.sqrt(p * (1 - p) / row["n"]))
        assert row["match"]


def test_statements(found):
    rows = {r["what"]: r for r in found["statements"]}
    assert len(rows) == 11
    assert all(r["match"] for r in rows.values())
    assert rows["single-seed / three-seed, range"]["recomputed"] == pytest.approx(
        [1.40 / (2.80 / 3), 1.97 / (1.90 / 3)]
    )
    assert rows["positive among the nine"]["recomputed"] == [8, 9]


# ---------------------------------------------------------------------------------------------------- win counts


def counts(found):
    return {r["group"]: r for r in found["win_counts"]}


def test_what_is_known_of_the_win_counts(found):
    known = {
        g: (r["cells"], r["won"], r["won_unnamed"], r["lost"], r["undecided"], r["published"])
        for g, r in counts(found).items()
    }
    assert known == {
        "emotion_gap": (8, 4, 2, 0, 2, 8),
        "emotion_entropy": (12, 7, 2, 1, 2, 11),
        "hate_gap": (8, 2, 0, 1, 5, 6),
        "hate_entropy": (8, 6, 0, 0, 2, 8),
        "emotion_total": (20, 11, 4, 1, 4, 19),
        "hate_total": (16, 8, 0, 1, 7, 14),
        "wins": (36, 19, 4, 2, 11, 33),
        "mean_match": (26, 4, 0, 0, 22, 19),
    }
    assert {r["verdict"] for r in found["win_counts"]} == {"possible"}
    for row in found["win_counts"]:
        assert row["won"] + row["won_unnamed"] + row["lost"] + row["undecided"] == row["cells"]
        assert row["at_least"] <= row["published"] <= row["at_most"]


def test_cells_by_hand(found):
    rows = {(r["task"], r["left"], r["right"]): r for r in found["cells"]}
    assert len(rows) == 36
    expected = {
        ("emotion", "G2", "entropy-only(-4)"): (1093 - 1090, "win"),
        ("emotion", "G3", "entropy-only(-8)"): (1099 - 1107, "loss"),
        ("emotion", "HG5,d+4", "entropy-only(-4)"): (1118 - 1090, "win"),
        ("hate", "H1", "gap-only(+2)"): (1648 - 1600, "win"),
        ("hate", "HG4,d+2", "gap-only(+2)"): (1547 - 1600, "loss"),
    }
    for key, (difference, outcome) in expected.items():
        assert (rows[key]["at_least"], rows[key]["at_most"], rows[key]["outcome"]) == (difference, difference, outcome)
    # bounded: H1 of emotion has 1102, and no gap-only run more than 1099
    assert (rows["emotion", "H1", "gap-only(+2)"]["at_least"], rows["emotion", "H1", "gap-only(+2)"]["outcome"]) == (
        3,
        "win",
    )
    assert rows["emotion", "H3", "gap-only(-2)"]["outcome"] == "win or tie"
    assert rows["hate", "H3", "gap-only(-2)"]["outcome"] == "unknown"
    assert rows["emotion", "HG5,d+2", "entropy-only(-4)"]["at_least"] is None


def test_the_verdict_would_see_a_count_that_cannot_be():
    assert paper_counts._verdict("x", 8, 4, 2, 1, 5, "")["verdict"] == "contradicted"
    assert paper_counts._verdict("x", 8, 4, 2, 1, 8, "")["verdict"] == "contradicted"
    assert paper_counts._verdict("x", 8, 4, 2, 1, 7, "")["verdict"] == "possible"
    assert paper_counts._verdict("x", 8, 6, 0, 2, 6, "")["verdict"] == "derived"


def test_the_infeasible_aggregate_by_brute_force(found):
    """All ways to fill the four open cells of emotion against entropy-only, around the published mean."""
    row = next(r for r in found["mean_deltas"] if r["group"] == "emotion_entropy")
    known = [3, -8, 11, 12, 25, 9, 23, 28]  # G2, G3, G5, H1, H2, H3, H4, HG5,d+4
    assert (row["known_cells"], row["known_sum"], row["open_cells"]) == (8, sum(known), 4)

    def means(least):
        """Printed means that open cells of at least these differences can give."""
        ranges = [range(value, value + 6) for value in least]
        return {round(100 * (sum(known) + sum(open_)) / 1421 / 12, 2) for open_ in itertools.product(*ranges)}

    # G1 - entropy-only(-2), two HG5 points above G5 (1101) and so 12 above 1090, and the fourth HG5 point
    assert 0.74 not in means([1, 12, 12, 1])
    assert min(means([1, 12, 12, 1])) == 0.76
    assert 0.74 in means([0, 11, 11, 0])
    assert (row["minimum"], row["minimum_with_ties"]) == (26, 22)
    assert (row["needed"], row["needed_widest"]) == ([23, 24], [21, 25])
    assert (row["feasible"], row["feasible_with_ties"]) == (False, True)
    assert row["smallest_mean"] == pytest.approx(100 * 129 / 1421 / 12)


def test_the_other_means_can_be(found):
    rows = {r["group"]: r for r in found["mean_deltas"]}
    assert [rows[g]["feasible"] for g in ("emotion_gap", "hate_gap", "hate_entropy")] == [True] * 3
    assert (rows["hate_entropy"]["known_sum"], rows["hate_entropy"]["needed"]) == (
        28 + 47 + 125 + 84 + 68 + 71,
        [94, 96],
    )
    assert rows["hate_gap"]["known_sum"] == 48 - 53


# --------------------------------------------------------------------------------------------------------- audit


def test_variance_of_33_of_36_from_the_structure():
    """Pairs of cells that share an arm on the same side have covariance 1/12; nothing else is shared here."""
    cells = paper_counts.null_cells()
    assert sum(c.difference > 0 for c in cells) == 33
    pairs = [(c.left[0], c.right[0]) for c in cells]
    shared = sum((a == c) + (b == d) for (a, b), (c, d) in itertools.permutations(pairs, 2))
    assert not {a for a, _ in pairs} & {b for _, b in pairs}
    assert shared == 160
    assert null_variance(cells) == pytest.approx(36 / 4 + 160 / 12) == pytest.approx(67 / 3)


def test_shared_comparators(found):
    audit = found["audit"]["shared_comparators"]
    assert audit["most_shared"] == {"task": "emotion", "restriction": "entropy-only(-4)", "cells": 10, "of": 20}
    assert (round(audit["null_variance"], 1), audit["naive_variance"]) == (22.3, 9.0)
    assert round(audit["effective_n"], 1) == 14.5
    assert audit["naive_p"] == pytest.approx(oracle.binomial_two_sided(33, 36))
    # the same null with other numbers: uniform draws, since only the order of the runs counts
    rng = np.random.default_rng(99)
    cells = paper_counts.cells()
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
    assert paper.recompute() == found
