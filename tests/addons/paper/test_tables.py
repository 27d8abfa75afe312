"""Every figure that the paper prints and that follows from its per-seed accuracies, copied from its tables by hand."""

from __future__ import annotations

import math

import pytest

from gatespace.addons.paper import tables
from gatespace.addons.paper.facts import facts
from tests.addons.paper.printed import ACCURACIES, NINE
from tests.evidence import oracle

SDS = {
    "emotion": (0.33, 1.06, 0.75, 0.92, 0.61, 0.20),
    "hate": (1.74, 1.38, 1.37, 0.58, 0.75, 1.14, 0.57, 1.42),
    "offensive": (0.36, 1.82, 0.75, 0.76, 0.20),
}


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
    real = tables.seed_accuracies

    def moved(task, point):
        values = real(task, point)
        return {**values, 2: values[2] + 3} if (task, point) == ("hate", "H1") else values

    monkeypatch.setattr(tables, "seed_accuracies", moved)
    printed = facts()["nine"]
    assert tables._nine(printed[0])["match"] is False
    assert tables._nine(printed[1])["match"] is True
    assert next(r for r in tables.seed_sds() if r["point"] == "H1" and r["task"] == "hate")["match"] is False


def test_the_facts_are_the_papers(found):
    for task, points in ACCURACIES.items():
        stored = facts()["per_seed_accuracy"][task]
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
