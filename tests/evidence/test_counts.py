from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from gatespace.errors import UsageError
from gatespace.evidence.counts import Cell, null_variance, win_count
from gatespace.gating.coefficients import NotApplicable
from tests.evidence import oracle


def cells_of(pairs, wins=None):
    wins = len(pairs) if wins is None else wins
    return [Cell(1.0 if i < wins else -1.0, (left,), (right,)) for i, (left, right) in enumerate(pairs)]


def by_orders(pairs):
    """Variance and distribution of wins - losses where every order of the runs is as likely: exact."""
    runs = sorted({run for pair in pairs for run in pair})
    leads = []
    for order in itertools.permutations(range(len(runs))):
        rank = dict(zip(runs, order, strict=True))
        leads.append(sum(1 if rank[left] > rank[right] else -1 for left, right in pairs))
    mean_square = Fraction(sum(lead * lead for lead in leads), len(leads))
    return mean_square / 4, leads  # wins = (n + lead) / 2, and leads have mean 0


STRUCTURES = [
    [("a", "x")],
    [("a", "x"), ("b", "y"), ("c", "z")],
    [("a", "x"), ("b", "x"), ("c", "x")],
    [("a", "x"), ("a", "y"), ("b", "y")],
    [("a", "b"), ("b", "c"), ("c", "d")],
    [("a", "x"), ("b", "x"), ("c", "x"), ("a", "y"), ("b", "z"), ("c", "y")],
]


@pytest.mark.parametrize("pairs", STRUCTURES)
def test_variance_equals_that_over_all_orders_of_the_runs(pairs):
    variance, _ = by_orders(pairs)
    assert null_variance(cells_of(pairs)) == pytest.approx(float(variance), rel=1e-12)


@pytest.mark.parametrize("pairs", STRUCTURES[1:])
@pytest.mark.parametrize("wins", [0, 2, 3])
def test_p_equals_that_over_all_orders_of_the_runs(pairs, wins):
    _, leads = by_orders(pairs)
    away = abs(2 * wins - len(pairs))
    exact = sum(abs(lead) >= away for lead in leads) / len(leads)
    found = win_count(cells_of(pairs, wins), generator=np.random.default_rng(5))
    assert found.correlated_p == pytest.approx(exact, abs=0.012)
    assert found.naive_p == pytest.approx(oracle.binomial_two_sided(wins, len(pairs)), rel=1e-9)
    assert (found.wins, found.losses) == (wins, len(pairs) - wins)


def test_independent_cells_are_worth_what_they_are():
    found = win_count(cells_of([(f"l{i}", f"r{i}") for i in range(12)], 11), generator=np.random.default_rng(0))
    assert found.null_variance == pytest.approx(3.0) == found.naive_variance
    assert found.effective_n == pytest.approx(12)
    assert found.correlated_p == pytest.approx(found.naive_p, abs=0.003)


def test_one_comparator_for_all_is_worth_three_cells_at_most():
    pairs = [(f"l{i}", "x") for i in range(60)]
    found = win_count(cells_of(pairs), generator=np.random.default_rng(0))
    assert found.naive_p < 1e-15
    # all wins: the comparator is the lowest of 61 runs, or the highest
    assert found.correlated_p == pytest.approx(2 / 61, abs=0.005)
    assert found.effective_n < 3


def test_more_seeds_per_arm_keep_the_structure():
    pairs = [("a", "x"), ("b", "x"), ("a", "y")]
    many = [Cell(1.0, tuple((p, s) for s in range(3)), tuple((q, s) for s in range(3))) for p, q in pairs]
    assert null_variance(many) == pytest.approx(null_variance(cells_of(pairs)), rel=1e-12)
    # a cell with fewer seeds shares less
    part = [*many[:2], Cell(1.0, (("a", 0),), (("y", 0),))]
    assert 3 / 4 < null_variance(part) < null_variance(many)


def test_an_arm_is_the_mean_of_its_runs_however_many():
    """One run against the mean of three: two such cells with the same three correlate by (1/3) / (1 + 1/3)."""
    right = ("x1", "x2", "x3")
    cells = [Cell(1.0, ("a",), right), Cell(1.0, ("b",), right)]
    assert null_variance(cells) == pytest.approx(2 / 4 + 2 * math.asin(1 / 4) / (2 * math.pi), rel=1e-9)


def test_ties_are_neither_won_nor_lost():
    cells = [Cell(0.0, ("a",), ("x",)), *cells_of([("b", "y"), ("c", "z")], 1)]
    found = win_count(cells, generator=np.random.default_rng(0))
    assert (found.wins, found.ties, found.losses, found.cells) == (1, 1, 1, 3)
    assert found.naive_variance == 0.5
    assert "1 tie left out" in found.note


def test_nothing_but_ties_has_no_p():
    found = win_count([Cell(0.0, ("a",), ("x",))], generator=np.random.default_rng(0))
    assert (found.ties, found.naive_p, found.correlated_p, found.effective_n) == (1, None, None, None)


def test_no_cells_are_not_applicable():
    assert isinstance(win_count([], generator=np.random.default_rng(0)), NotApplicable)


@pytest.mark.parametrize("cell", [Cell(1.0, (), ("x",)), Cell(1.0, ("x",), ("x",))])
def test_refuses_cells_that_compare_nothing(cell):
    with pytest.raises(UsageError):
        win_count([cell], generator=np.random.default_rng(0))


def test_the_generator_decides():
    cells = cells_of(STRUCTURES[-1], 5)
    one, again, other = (win_count(cells, generator=np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == again
    assert one.correlated_p != other.correlated_p
