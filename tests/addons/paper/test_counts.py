"""What follows from printed accuracies about the paper's win counts and mean differences."""

from __future__ import annotations

import itertools

import pytest

from gatespace.addons.paper.counts import null_cells, verdict
from gatespace.evidence.counts import null_variance


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


@pytest.mark.parametrize(
    "published, at_least, at_most, expected",
    [(5, 6, 7, "contradicted"), (8, 6, 7, "contradicted"), (7, 6, 7, "possible"), (6, 6, 6, "derived")],
)
def test_the_verdict_would_see_a_count_that_cannot_be(published, at_least, at_most, expected):
    assert verdict(published, at_least, at_most) == expected


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


def test_variance_of_33_of_36_from_the_structure():
    """Pairs of cells that share an arm on the same side have covariance 1/12; nothing else is shared here."""
    cells = null_cells()
    assert sum(c.difference > 0 for c in cells) == 33
    pairs = [(c.left[0], c.right[0]) for c in cells]
    shared = sum((a == c) + (b == d) for (a, b), (c, d) in itertools.permutations(pairs, 2))
    assert not {a for a, _ in pairs} & {b for _, b in pairs}
    assert shared == 160
    assert null_variance(cells) == pytest.approx(36 / 4 + 160 / 12) == pytest.approx(67 / 3)
