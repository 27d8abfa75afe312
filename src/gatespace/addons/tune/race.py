"""Which candidates advance from a rung, by paired differences to the incumbent.

All candidates have the same prompts in the same order, the same random streams and the same validation rows, so they
are compared row by row and seed by seed. The incumbent is the best of many and looks better than it is: a decision here
is only a good guess, for the verdict to confirm on fresh seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

Rows = Mapping[int, Sequence[float]]
"""Seed → score of every validation row; higher is better."""


class Difference(NamedTuple):
    """A candidate's mean score minus the incumbent's."""

    mean: float
    se: float
    """Standard error over rows and seeds."""
    p: float
    """One-sided p-value: probability of a difference this low if the candidate were as good."""


def score(rows: Rows) -> float:
    """Mean over seeds of the mean over rows."""
    return fmean(fmean(values) for values in rows.values())


def difference(candidate: Rows, incumbent: Rows) -> Difference:
    """The paired difference at the seeds that both have, with rows and seeds as crossed random effects.

    Its variance is SD²(seeds)/S + SD²(rows)/N minus the part counted in both, and at least either term; with one seed,
    that of the rows. Satterthwaite degrees of freedom.
    """
    seeds = [seed for seed in candidate if seed in incumbent]
    cells = np.array([candidate[seed] for seed in seeds], float) - np.array([incumbent[seed] for seed in seeds], float)
    count, rows = cells.shape
    mean = float(cells.mean())
    by_row = float(cells.mean(0).var(ddof=1)) / rows if rows > 1 else 0.0
    by_seed = float(cells.mean(1).var(ddof=1)) / count if count > 1 else 0.0
    rest = 0.0
    if count > 1 and rows > 1:
        rest = cells - cells.mean(0) - cells.mean(1, keepdims=True) + mean
        rest = float((rest**2).sum()) / ((count - 1) * (rows - 1)) / (count * rows)
    square = max(by_row + by_seed - rest, by_row, by_seed)
    if square <= (1e-12 * max(1.0, float(np.abs(cells).max()))) ** 2:
        return Difference(mean, 0.0, 1.0 if mean >= 0 else 0.0)
    freedom = square**2 / (by_row**2 / max(rows - 1, 1) + by_seed**2 / max(count - 1, 1))
    return Difference(mean, math.sqrt(square), float(stats.t.cdf(mean / math.sqrt(square), freedom)))


def decide(found: Mapping[str, Rows], *, gates: set[str], keep: float, level: float) -> dict[str, Any]:
    """Keep the best share, except candidates significantly worse than the incumbent, the best of all.

    With one seed there is no error over seeds, and rows alone would separate runs that another seed ranks the other
    way; so the test is skipped and the share alone decides. The best gate stays unless it is significantly worse: the
    verdict asks whether a gate is worth having, which bad luck at one seed must not settle.

    Args:
        found: Candidate → its scores at this rung.
        gates: Candidates whose λ depends on the token.
        keep: The share that advances.
        level: Significance level for one candidate at this rung, corrected for the number of rungs.

    Returns:
        The record of the decision: incumbent, kept (best first), differences to the incumbent, score.
    """
    order = sorted(found, key=lambda name: -score(found[name]))  # stable: ties keep their order
    best = order[0]
    differences = {name: difference(found[name], found[best]) for name in order[1:]}
    alive = [name for name in order if name == best or len(found[best]) == 1 or differences[name].p >= level]
    most = math.ceil(keep * len(order))
    kept = alive[:most]
    if not gates.intersection(kept):
        kept += [name for name in alive[most:] if name in gates][:1]
    return {
        "incumbent": best,
        "kept": kept,
        "differences": {name: one._asdict() for name, one in differences.items()},
        "score": {name: score(rows) for name, rows in found.items()},
    }
