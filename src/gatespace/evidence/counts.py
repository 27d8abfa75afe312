"""Win counts over cells that share runs.

One restriction is compared with many points, and one point is in several cells. Under the null, a restriction that is
low by chance loses all its cells together. So the null simulates runs, each once for all its cells, never cells.
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
    """A comparison: its difference, mean of `left` minus mean of `right`, and the runs on both sides."""

    difference: float
    left: tuple[Hashable, ...]
    right: tuple[Hashable, ...]


def win_count(
    cells: Sequence[Cell], *, generator: np.random.Generator, simulations: int = SIMULATIONS
) -> WinCount | NotApplicable:
    """Count wins, ties and losses, with sign-test p values for independent cells and for cells that share runs.

    Under the null every run is a draw from the same normal distribution. Its choice does not matter with one seed, or
    if all cells have the same seeds and noise is normal: then only the order of the arms counts.

    Args:
        cells: The comparisons.
        generator: Draws the simulated runs.
        simulations: Number of simulations of all runs.
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
    # the sum of the signs of the simulated cells is wins - losses
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
    """Return the exact variance of the number of wins if no points differ.

    Two cells whose differences have correlation ρ are both won with probability 1/4 + arcsin(ρ)/2π. Two that share an
    arm on the same side have ρ = 1/2, hence a covariance of 1/12; on opposite sides -1/12; a cell with itself 1/4.

    Examples:
        >>> cells = [Cell(1.0, ("G2",), ("E4",)), Cell(1.0, ("G5",), ("E4",))]
        >>> round(null_variance(cells) - (2 / 4 + 2 / 12), 12)
        0.0
    """
    contrasts = _contrasts(cells)
    norms = np.sqrt((contrasts**2).sum(axis=1))
    correlations = contrasts @ contrasts.T / np.outer(norms, norms)
    return float(np.arcsin(np.round(correlations, 12)).sum() / (2 * math.pi))  # rounded: arcsin is steep near 1


def _contrasts(cells: Sequence[Cell]) -> Any:
    """Cells × runs: the weight of each run in each cell."""
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
