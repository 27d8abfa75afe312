from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatespace.errors import UsageError
from gatespace.evidence.examples import RESAMPLES, Resampler, mcnemar
from tests.evidence import oracle


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_mcnemar_equals_the_binomial_sum(pairs):
    left, right = zip(*pairs, strict=True)
    found = mcnemar(left, right)
    only_left, only_right = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    assert (found.left_only, found.right_only) == (only_left, only_right)
    assert found.both == sum(a and b for a, b in pairs)
    assert found.n == len(pairs)
    discordant = only_left + only_right
    expected = oracle.binomial_two_sided(only_left, discordant) if discordant else 1.0
    assert found.p == pytest.approx(expected, rel=1e-9)
    assert found.difference == pytest.approx(100 * (sum(left) - sum(right)) / len(pairs))
    assert mcnemar(right, left).p == found.p


def test_mcnemar_refuses_models_on_different_examples():
    with pytest.raises(UsageError):
        mcnemar([True], [True, False])
    with pytest.raises(UsageError):
        mcnemar([], [])


def draw(rng, seeds, examples, *, seed_sd=0.0, effect=0.0):
    """Correctness of two points on the same examples; each run's accuracy moves with its seed."""
    hard = rng.normal(size=examples)
    sides = []
    for side in (effect, 0.0):
        own = rng.normal(size=(seeds, examples))
        sides.append(0.8 * hard + 0.6 * own < 0.6 + side + rng.normal(0, seed_sd, (seeds, 1)))
    return sides


def pigeonhole(left, right, *, generator, resamples=RESAMPLES):
    """The interval of two points' difference, from their correctness (seeds × examples)."""
    resampler = Resampler(left.shape[1], generator=generator, resamples=resamples)
    return resampler.interval(left.astype(np.int8) - right.astype(np.int8))


def test_says_what_is_resampled():
    rng = np.random.default_rng(0)
    few = pigeonhole(*draw(rng, 3, 200), generator=np.random.default_rng(1), resamples=200)
    assert not few.over_seeds
    assert few.resampled == "200 examples, seeds fixed: these 3 trained pairs on other examples, not other seeds"
    enough = pigeonhole(*draw(rng, 4, 200), generator=np.random.default_rng(1), resamples=200)
    assert enough.over_seeds
    assert enough.resampled == "4 seeds and 200 examples: other seeds and other examples"
    one = pigeonhole(*draw(rng, 1, 200), generator=np.random.default_rng(1), resamples=200)
    assert "this trained pair" in one.resampled


def test_mean_is_the_difference_in_accuracy():
    left, right = draw(np.random.default_rng(3), 4, 500, effect=0.4)
    found = pigeonhole(left, right, generator=np.random.default_rng(1), resamples=300)
    assert found.mean == pytest.approx(100 * (left.mean() - right.mean()))
    assert found.low < found.mean < found.high
    turned = pigeonhole(right, left, generator=np.random.default_rng(1), resamples=300)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low), abs=1e-4)


def test_the_generator_decides():
    sides = draw(np.random.default_rng(3), 5, 300)
    one, again, other = (pigeonhole(*sides, generator=np.random.default_rng(s), resamples=300) for s in (1, 1, 2))
    assert one == again
    assert one != other


def test_no_difference_has_no_width():
    same = np.ones((4, 50), dtype=bool)
    found = pigeonhole(same, same, generator=np.random.default_rng(0), resamples=50)
    assert (found.mean, found.low, found.high) == (0.0, 0.0, 0.0)


def test_spread_over_examples_is_the_standard_error():
    """With seeds fixed, the SD of resampled means is that of the mean of per-example differences."""
    left, right = draw(np.random.default_rng(5), 2, 800)
    per_example = 100 * (left.astype(float) - right).mean(axis=0)
    se = per_example.std() / np.sqrt(800)
    found = pigeonhole(left, right, generator=np.random.default_rng(1), resamples=4000)
    assert found.high - found.low == pytest.approx(2 * 1.96 * se, rel=0.06)


def test_spread_over_seeds_is_more_where_seeds_differ():
    calm = pigeonhole(*draw(np.random.default_rng(5), 8, 400), generator=np.random.default_rng(1))
    wild = pigeonhole(*draw(np.random.default_rng(5), 8, 400, seed_sd=0.5), generator=np.random.default_rng(1))
    assert wild.high - wild.low > 2 * (calm.high - calm.low)


def test_pigeonhole_matches_drawing_rows_and_columns():
    """The weights are nothing but counts of drawn seeds and drawn examples."""
    left, right = draw(np.random.default_rng(8), 5, 120, seed_sd=0.4)
    differences = left.astype(float) - right
    rng = np.random.default_rng(11)
    means = [
        100 * differences[np.ix_(rng.integers(5, size=5), rng.integers(120, size=120))].mean() for _ in range(6000)
    ]
    low, high = np.quantile(means, [0.025, 0.975])
    found = pigeonhole(left, right, generator=np.random.default_rng(1), resamples=6000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.08 * (high - low))


@pytest.mark.parametrize("seeds, seed_sd, floor", [(2, 0.0, 0.92), (12, 0.15, 0.90)])
def test_coverage(seeds, seed_sd, floor):
    """Fixed seeds: 95 % about their own mean over all examples. Many seeds: near 95 % about no difference."""
    rng = np.random.default_rng(21)
    inside = 0
    for trial in range(200):
        left, right = draw(rng, seeds, 200, seed_sd=seed_sd)
        found = pigeonhole(left, right, generator=np.random.default_rng(trial), resamples=300)
        inside += found.low <= 0.0 <= found.high
    assert floor <= inside / 200 <= 0.995


def test_one_resampler_serves_many():
    resampler = Resampler(50, generator=np.random.default_rng(0), resamples=100)
    first = resampler.interval(np.eye(3, 50))
    assert resampler.interval(np.eye(3, 50)) == first
    with pytest.raises(UsageError):
        resampler.interval(np.zeros((3, 49)))
    with pytest.raises(UsageError):
        resampler.interval(np.zeros(50))


def test_refuses_a_bootstrap_of_nothing():
    with pytest.raises(UsageError):
        Resampler(0, generator=np.random.default_rng(0))
