from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from gatespace.errors import UsageError
from gatespace.evidence.paired import (
    EXACT_UP_TO,
    bh,
    holm,
    minimum_detectable,
    paired,
    seeds_needed,
    sign_flip,
    summarise,
)
from gatespace.gating.coefficients import NotApplicable
from tests.evidence import oracle

COUNTS = st.lists(st.integers(-40, 40), min_size=2, max_size=7)


def sides(differences):
    """Accuracies of 860 examples with these differences in right answers, and what they differ by in pp."""
    left = {i: 100 * (600 + d) / 860 for i, d in enumerate(differences)}
    right = dict.fromkeys(left, 100 * 600 / 860)
    return left, right


@given(COUNTS)
def test_equals_the_definitions(counts):
    assume(len(set(counts)) > 1)
    found = paired(*sides(counts))
    mean, sd = oracle.mean_sd([100 * c / 860 for c in counts])
    n = len(counts)
    t = mean / (sd / math.sqrt(n))
    assert found.n == n
    assert found.mean == pytest.approx(mean, abs=1e-12)
    assert found.sd == pytest.approx(sd, rel=1e-10)
    assert found.t == pytest.approx(t, rel=1e-9, abs=1e-10)
    assert found.p == pytest.approx(oracle.t_two_sided(t, n - 1), abs=1e-8)
    assert found.sign_flip_p == oracle.sign_flip(counts)
    assert found.sign_flip_floor == 2 / 2**n <= found.sign_flip_p
    assert (found.wins, found.ties, found.losses) == (
        sum(c > 0 for c in counts),
        sum(c == 0 for c in counts),
        sum(c < 0 for c in counts),
    )


@pytest.mark.parametrize("n", [2, 3, 5, 9])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_interval_is_mean_plus_and_minus_the_quantile(n, confidence):
    values = np.random.default_rng(n).normal(0.4, 1, n).tolist()
    found = summarise(values, confidence=confidence)
    mean, sd = oracle.mean_sd(values)
    reach = oracle.t_quantile(1 - confidence, n - 1) * sd / math.sqrt(n)
    assert (found.low, found.high) == pytest.approx((mean - reach, mean + reach), rel=1e-6)


def test_is_what_ttest_rel_gives():
    left, right = {1: 70.1, 2: 71.3, 3: 69.0, 4: 72.2}, {1: 69.0, 2: 71.9, 3: 68.5, 4: 70.1}
    found, expected = paired(left, right), stats.ttest_rel([*left.values()], [*right.values()])
    interval = expected.confidence_interval()
    assert (found.t, found.p, found.low, found.high) == pytest.approx(
        (expected.statistic, expected.pvalue, interval.low, interval.high), rel=1e-9
    )


@given(COUNTS, st.floats(0.01, 100))
def test_swapping_sides_turns_the_sign_and_nothing_else(counts, scale):
    assume(len(set(counts)) > 1)
    left, right = sides(counts)
    one, other = paired(left, right), paired(right, left)
    assert one.mean == -other.mean
    assert (one.wins, one.losses, one.ties) == (other.losses, other.wins, other.ties)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), rel=1e-9, abs=1e-12)
    assert one.p == pytest.approx(other.p, rel=1e-9)
    assert one.sign_flip_p == other.sign_flip_p
    assert one.mde == pytest.approx(other.mde)
    # and a change of unit changes what has a unit
    scaled = paired({s: v * scale for s, v in left.items()}, {s: v * scale for s, v in right.items()})
    assert scaled.p == pytest.approx(one.p, rel=1e-6)
    assert scaled.mde == pytest.approx(one.mde * scale, rel=1e-6)
    assert scaled.sign_flip_p == one.sign_flip_p
    # what both sides have in common does not matter
    shifted = paired({s: v + 7 * (s + 1) for s, v in left.items()}, {s: v + 7 * (s + 1) for s, v in right.items()})
    assert shifted.mean == pytest.approx(one.mean, abs=1e-11)
    assert shifted.sign_flip_p == one.sign_flip_p
    assert (shifted.wins, shifted.ties) == (one.wins, one.ties)


def test_one_seed_has_a_mean_and_nothing_else():
    found = paired({42: 70.0}, {42: 69.0})
    assert (found.n, found.mean, found.wins, found.sign_flip_floor) == (1, 1.0, 1, 1.0)
    assert [found.sd, found.t, found.p, found.low, found.high, found.sign_flip_p, found.mde] == [None] * 7
    assert "one seed" in found.note


@pytest.mark.parametrize("count", [0, 1, -30])
def test_equal_differences_have_no_t(count):
    # 1 of 860 subtracted from different accuracies: equal but for rounding
    left = {s: 100 * (base + count) / 860 for s, base in enumerate((511, 600, 733))}
    right = {s: 100 * base / 860 for s, base in enumerate((511, 600, 733))}
    found = paired(left, right)
    assert found.sd == 0
    assert [found.t, found.p, found.low, found.high, found.mde] == [None] * 5
    assert found.sign_flip_p == (1.0 if count == 0 else 0.25)
    assert "same difference" in found.note
    assert found.ties == (3 if count == 0 else 0)


def test_differences_that_cancel_have_a_mean_of_zero():
    found = paired({0: 100 * 601 / 860, 1: 100 * 733 / 860}, {0: 100 * 600 / 860, 1: 100 * 734 / 860})
    assert found.mean == 0.0
    assert found.sign_flip_p == 1.0


def test_only_common_seeds_count_and_the_others_are_named():
    found = paired({42: 70.0, 2: 71.0, 3: 72.0}, {2: 70.0, 42: 70.5, 9: 1.0})
    assert found.seeds == (42, 2)
    assert found.differences == pytest.approx((-0.5, 1.0))
    assert "2 seeds with one of the two runs only" in found.note


def test_no_common_seed_is_not_applicable():
    assert isinstance(paired({1: 1.0}, {2: 1.0}), NotApplicable)
    assert isinstance(paired({}, {}), NotApplicable)


def test_says_what_a_sign_flip_test_cannot_reach():
    assert "no sign-flip p is below 0.0625" in summarise([1.0, 2.0, 3.0, 4.0, 6.0]).note
    assert "sign-flip" not in summarise([1.0, 2.0, 3.0, 4.0, 6.0, 5.0]).note


def test_sign_flip_of_many_is_sampled_and_repeatable():
    values = np.random.default_rng(1).normal(0.5, 1, EXACT_UP_TO + 6)
    sampled = sign_flip(values)
    assert sampled == sign_flip(values)
    rng = np.random.default_rng(2)
    signs = rng.choice([-1, 1], size=(200_000, values.size))
    exact = np.mean(np.abs(signs @ values) >= abs(values.sum()) - 1e-12)
    assert sampled == pytest.approx(exact, abs=0.006)
    assert "random assignments" in summarise(values.tolist()).note


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf], [[1.0, 2.0]]])
def test_refuses_what_is_no_list_of_numbers(values):
    with pytest.raises(UsageError):
        summarise(values)


def test_refuses_a_confidence_that_is_none():
    with pytest.raises(UsageError):
        summarise([1.0, 2.0], confidence=95)


def test_coverage_of_the_interval():
    """95 % intervals of 3 seeds hold the truth in 95 % of 2000 studies (SE 0.5 %)."""
    rng = np.random.default_rng(7)
    inside = 0
    for values in rng.normal(0.3, 1.0, (2000, 3)):
        found = summarise(values.tolist())
        inside += found.low <= 0.3 <= found.high
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_no_nan_anywhere():
    for values in ([0.0], [0.0, 0.0], [1.0, -1.0], [1.0, 1.0, 1.0]):
        for value in asdict(summarise(values)).values():
            assert value is None or isinstance(value, str) or not math.isnan(value)


# ------------------------------------------------------------------------------------------------------- power


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_the_detectable_difference_is_found_in_80_percent_of_repetitions(n):
    effect = minimum_detectable(2.0, n)
    draws = np.random.default_rng(n).normal(effect, 2.0, (40_000, n))
    t = draws.mean(axis=1) / (draws.std(axis=1, ddof=1) / math.sqrt(n))
    assert np.mean(np.abs(t) > oracle.t_quantile(0.05, n - 1)) == pytest.approx(0.8, abs=0.01)


def test_seeds_for_one_point():
    assert [seeds_needed(sd, 1.0) for sd in (1.0, 1.5, 2.0)] == [10, 20, 34]
    assert seeds_needed(1.0, -1.0) == 10


@pytest.mark.parametrize("sd", [0.01, 0.2, 0.4, 0.5, 1.0, 3.0])
def test_seeds_needed_is_the_first_number_that_is_enough(sd):
    n = seeds_needed(sd, 1.0)
    assert minimum_detectable(sd, n) <= 1.0
    assert n == 2 or minimum_detectable(sd, n - 1) > 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: minimum_detectable(1.0, 1),
        lambda: minimum_detectable(-1.0, 3),
        lambda: minimum_detectable(math.nan, 3),
        lambda: minimum_detectable(1.0, 3, power=0.01),
        lambda: minimum_detectable(1.0, 3, alpha=5),
        lambda: seeds_needed(0.0, 1.0),
        lambda: seeds_needed(1.0, 0.0),
    ],
)
def test_power_refuses_what_has_no_answer(call):
    with pytest.raises(UsageError):
        call()


def test_more_pairs_show_less_for_any_number_of_them():
    found = [minimum_detectable(1.0, n) for n in range(2, 120)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(2.8 / math.sqrt(119), rel=0.02)  # z of .975 plus z of .8, for many


def test_no_variance_shows_everything():
    assert minimum_detectable(0.0, 3) == 0.0


# ---------------------------------------------------------------------------------------------------- many at once

PS = st.lists(st.one_of(st.none(), st.floats(1e-9, 1.0)), max_size=12)


@given(PS)
def test_holm_and_bh_equal_their_definitions(ps):
    known = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    m = len(known)
    expected_holm, expected_bh = [None] * len(ps), [None] * len(ps)
    running = 0.0
    for rank, (p, i) in enumerate(known):
        running = max(running, min(1.0, (m - rank) * p))
        expected_holm[i] = running
    running = 1.0
    for rank, (p, i) in reversed([*enumerate(known)]):
        running = min(running, p * m / (rank + 1))
        expected_bh[i] = running
    for found, expected in ((holm(ps), expected_holm), (bh(ps), expected_bh)):
        assert [p is None for p in found] == [p is None for p in expected]
        assert [p for p in found if p is not None] == pytest.approx([p for p in expected if p is not None], rel=1e-12)


def test_nothing_to_adjust():
    assert holm([]) == bh([]) == []
    assert holm([None, None]) == [None, None]
