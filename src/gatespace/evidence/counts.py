"""The number of cells that are won, where cells share runs.

One restriction serves many points, and one point is in several cells. If nothing differs, a restriction that came
out low by chance loses all its cells together. So the null draws runs, each once for all its cells, and never cells.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from gatespace.errors import UsageError
from gatespace.evidence.records import WinCount
from gatespace.gating.coefficients import NotApplicable

SIMULATIONS = 19_999


@dataclass(frozen=True)
class Cell:
    """A comparison by its difference and the runs that it is made of: the mean of `left` minus the mean of `right`."""

    difference: float
    left: tuple[Hashable, ...]
    right: tuple[Hashable, ...]


def win_count(
    cells: Sequence[Cell], *, generator: np.random.Generator, simulations: int = SIMULATIONS
) -> WinCount | NotApplicable:
    """Wins, ties and losses, with the p of a sign test as if cells were independent and as they are.

    Under the null every run is one draw from one normal distribution. With one seed, or where all cells have the same
    seeds and noise is normal, only the order of the arms counts, so which distribution it is does not matter then.

    Args:
        cells: The comparisons.
        generator: Draws the simulated runs.
        simulations: The number of times that all runs are drawn.
    """
    if not cells:
        return NotApplicable("no comparable cells")
    wins = sum(cell.difference > 0 for cell in cells)
    losses = sum(cell.difference < 0 for cell in cells)
    decided = [cell for cell in cells if cell.difference != 0]
    ties = len(cells) - wins - losses
    if not decided:
        return WinCount(wins, ties, losses, None, 0.0, 0.0, None, None, 0, "every cell is a tie")
    contrasts = _contrasts(decided)
    variance = null_variance(decided)
    away = abs(wins - losses)
    # the sign of every simulated cell; twice the distance of the count from its half is |wins - losses|
    extreme = done = 0
    while done < simulations:
        size = min(2000, simulations - done)
        drawn = generator.standard_normal((size, contrasts.shape[1])) @ contrasts.T
        extreme += int((np.abs(np.sign(drawn).sum(axis=1)) >= away - 1e-9).sum())
        done += size
    n = len(decided)
    return WinCount(
        wins=wins,
        ties=ties,
        losses=losses,
        naive_p=float(stats.binomtest(wins, n, 0.5).pvalue),
        naive_variance=n / 4,
        null_variance=variance,
        effective_n=n * n / (4 * variance),
        correlated_p=(extreme + 1) / (simulations + 1),
        simulations=simulations,
        note=f"{ties} tie{'s' * (ties > 1)} left out of both p" if ties else "",
    )


def null_variance(cells: Sequence[Cell]) -> float:
    """The exact variance of the number of wins where no point differs from another.

    Two cells whose differences correlate by ρ are both won with probability 1/4 + arcsin(ρ)/2π. Two that share an arm
    on the same side have ρ = 1/2, hence a covariance of 1/12; on opposite sides -1/12; a cell with itself 1/4.

    Examples:
        >>> cells = [Cell(1.0, ("G2",), ("E4",)), Cell(1.0, ("G5",), ("E4",))]
        >>> round(null_variance(cells) - (2 / 4 + 2 / 12), 12)
        0.0
    """
    contrasts = _contrasts(cells)
    norms = np.sqrt((contrasts**2).sum(axis=1))
    correlations = contrasts @ contrasts.T / np.outer(norms, norms)
    return float(np.arcsin(np.round(correlations, 12)).sum() / (2 * math.pi))  # arcsin is steep where rounding hits 1


def _contrasts(cells: Sequence[Cell]) -> Any:
    """Cells × runs: what each run counts in each cell."""
    runs = {run: i for i, run in enumerate(dict.fromkeys(run for cell in cells for run in (*cell.left, *cell.right)))}
    matrix = np.zeros((len(cells), len(runs)))
    for row, cell in enumerate(cells):
        for arm, sign in ((cell.left, 1.0), (cell.right, -1.0)):
            if not arm:
                raise UsageError("a cell has runs on both sides", got=cell)
            for run in arm:
                matrix[row, runs[run]] += sign / len(arm)
        if not matrix[row].any():
            raise UsageError("a cell compares two different arms", got=cell)
    return matrix
