"""Claims about groups: is there any difference on a task, and is one side ahead overall?"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from gatespace.evidence.paired import summarise
from gatespace.evidence.reach import ALPHA, whole_cells
from gatespace.evidence.records import Anova, Block, BlockClaim, CellMean, Decisive, Mixed
from gatespace.gating.coefficients import NotApplicable
from gatespace.seeding import stream

_LEAST_RESIDUAL = 1e-6
"""Lower bound on the mixed model's residual variance, in units of the sample variance."""
_PERMUTATIONS = 4_999


class Difference(NamedTuple):
    """Difference of one cell at one seed; `left` and `right` are labels of points of the task."""

    task: str
    seed: int
    left: str
    right: str
    value: float


def anova(accuracies: Mapping[str, Mapping[int, float]]) -> Anova | NotApplicable:
    """Is there any difference between the points of a task? Two-way, point + seed, type II.

    The p of the points is that of F among permutations of the points within each seed: no normal errors are assumed.

    Args:
        accuracies: Point → seed → accuracy. Missing runs are left out of the model, not imputed.
    """
    from statsmodels.regression.linear_model import OLS  # type: ignore[import-untyped]

    rows = [(point, seed, value) for point, values in accuracies.items() for seed, value in values.items()]
    points = len({point for point, _, _ in rows})
    seeds = len({seed for _, seed, _ in rows})
    if points < 2:
        return NotApplicable("fewer than two points were run")
    if seeds < 2:
        return NotApplicable("one seed: no estimate of the error of a difference")
    values = np.array([value for _, _, value in rows])
    by_point, by_seed = _indicators([point for point, _, _ in rows]), _indicators([seed for _, seed, _ in rows])
    constant = np.ones((len(rows), 1))
    design = np.hstack([constant, by_point, by_seed])
    if np.linalg.matrix_rank(design) < points + seeds - 1:
        return NotApplicable("the finished runs do not separate points from seeds")
    model = OLS(values, design).fit()
    if model.df_resid < 1:
        return NotApplicable("too few runs: no degree of freedom is left for the error")
    if model.ssr <= 1e-20 * float((values**2).sum()):
        return NotApplicable("points and seeds explain the runs without an error: no F")
    # Type II: each factor against the model with only the other one; without missing runs all types agree.
    f, _, _ = model.compare_f_test(OLS(values, np.hstack([constant, by_seed])).fit())
    seed_f, seed_p, _ = model.compare_f_test(OLS(values, np.hstack([constant, by_point])).fit())
    gaps = points * seeds - len(rows)
    return Anova(
        points=points,
        seeds=seeds,
        runs=len(rows),
        f=float(f),
        p=_permuted_p(values, design, [seed for _, seed, _ in rows], model.ssr),
        df=(points - 1, round(model.df_resid)),
        seed_f=float(seed_f),
        seed_p=float(seed_p),
        sd=math.sqrt(float(model.mse_resid)),
        note=f"{gaps} of {points * seeds} runs are missing" if gaps else "",
    )


def _permuted_p(values: Any, design: Any, seeds: Sequence[int], ssr: float) -> float:
    """Share of permutations within seeds that leave the model no more error: seeds explain the same, F is as large."""
    random = np.random.default_rng(stream(0, "anova", len(values)))
    permuted = np.tile(values, (_PERMUTATIONS, 1))
    for seed in dict.fromkeys(seeds):
        columns = np.flatnonzero(np.equal(seeds, seed))
        permuted[:, columns] = random.permuted(permuted[:, columns], axis=1)
    basis, _ = np.linalg.qr(design)
    errors = (permuted**2).sum(1) - ((permuted @ basis) ** 2).sum(1)
    as_large = int((errors <= ssr + 1e-9 * float((values**2).sum())).sum())
    return (1 + as_large) / (1 + _PERMUTATIONS)


def _indicators(levels: Sequence[Hashable]) -> Any:
    """Rows × levels except the first: 1 where a row has the level."""
    names = list(dict.fromkeys(levels))
    return np.array([[float(level == name) for name in names[1:]] for level in levels])


def block_claim(
    differences: Sequence[Difference], *, exclude_seed: int | None = None, confidence: float = 0.95
) -> BlockClaim | NotApplicable:
    """Is the left side ahead overall? The mean of every (task, seed) block, then t and sign-flip over blocks.

    Cells of a block share runs, so a block counts once however many cells it has. Blocks of a task are means over the
    same cells: those with a difference at every seed of the task.

    Args:
        differences: One per cell and seed.
        exclude_seed: The selection seed, to leave out.
        confidence: Of the interval.
    """
    kept = [found for found in differences if found.seed != exclude_seed]
    if not kept:
        return NotApplicable("no comparable runs" if not differences else "no seed other than the selection seed")
    blocks, cells = _blocks(kept)
    if not blocks:
        return NotApplicable("no cell was run at every seed of its task")
    total = len({(found.task, found.left, found.right) for found in kept})
    note = f"over the {len(cells)} of {total} cells that have every seed of their task" if len(cells) < total else ""
    summary = summarise([block.mean for block in blocks], confidence=confidence, unit="block", note=note)
    return BlockClaim(**vars(summary), blocks=tuple(blocks), cells=tuple(cells), excluded_seed=exclude_seed)


def _blocks(differences: Sequence[Difference]) -> tuple[list[Block], list[CellMean]]:
    """The blocks, and the cells that they are means of."""
    blocks: list[Block] = []
    used: list[CellMean] = []
    for task in dict.fromkeys(found.task for found in differences):
        mine = [found for found in differences if found.task == task]
        by_cell: dict[tuple[str, str], dict[int, float]] = {}
        for found in mine:
            by_cell.setdefault((found.left, found.right), {})[found.seed] = found.value
        cells, seeds = whole_cells(by_cell)
        used += [CellMean(task, *cell, fmean(by_cell[cell].values())) for cell in cells]
        if cells:
            blocks += [Block(task, s, math.fsum(by_cell[c][s] for c in cells) / len(cells), len(cells)) for s in seeds]
    return blocks, used


def decisive(
    differences: Sequence[Difference], claim: BlockClaim | NotApplicable, *, level: float = ALPHA
) -> Decisive | None:
    """Return the point that alone decides a claim, or None.

    Without its cells, the sign of the mean or whether the interval excludes 0 changes, and the mean with minus without
    them differs from 0 by a paired t-test over blocks, at `level` over the number of points. A point whose cells are
    all that a task has is no candidate: without it another task would be missing too.

    Args:
        differences: What the claim was made from.
        claim: The claim over all of them.
        level: Chance that any point is returned if none differs.
    """
    if isinstance(claim, NotApplicable) or claim.low is None or claim.high is None:
        return None
    points = dict.fromkeys(label for d in differences for label in (d.right, d.left))
    farthest, chosen = 0.0, None
    for point in points:
        rest = [d for d in differences if point not in (d.left, d.right)]
        means = {(block.task, block.seed): block.mean for block in _blocks(rest)[0]}
        if means.keys() != {(block.task, block.seed) for block in claim.blocks}:
            continue
        shifts = np.array([block.mean - means[block.task, block.seed] for block in claim.blocks])
        shift = abs(float(shifts.mean()))
        if shift <= farthest or np.ptp(shifts) <= 1e-9 * shift:
            continue
        if float(stats.ttest_1samp(shifts, 0.0).pvalue) >= level / len(points):
            continue
        without = block_claim(rest, confidence=claim.confidence)
        assert isinstance(without, BlockClaim)
        if without.low is None or without.high is None:
            continue
        if claim.mean * without.mean < 0 or (claim.low * claim.high > 0) != (without.low * without.high > 0):
            farthest, chosen = shift, Decisive(point, without)
    return chosen


def mixed(differences: Sequence[Difference], *, confidence: float = 0.95) -> Mixed | NotApplicable:
    """Mean difference over cells by a mixed model with crossed variances of blocks and of shared runs (REML).

    Secondary: it is anticonservative with the few blocks that a study has.
    """
    from scipy import optimize

    n = len(differences)
    columns = {
        "block": [f"{d.task} {d.seed}" for d in differences],
        "left": [f"{d.task} {d.left} {d.seed}" for d in differences],
        "right": [f"{d.task} {d.right} {d.seed}" for d in differences],
    }
    # Not identifiable: a factor with a level per cell (residual), one with a single level (mean), and two that
    # partition the cells alike (each other).
    divisions = {tuple(map(levels.index, levels)): name for name, levels in reversed(columns.items())}
    factors = {name: division for division, name in divisions.items() if 1 < len(set(division)) < n}
    values = np.array([d.value for d in differences])
    if n < 6 or "block" not in factors:
        return NotApplicable("too few cells and blocks for a mixed model")
    if np.ptp(values) <= 1e-12 * np.abs(values).max():
        return NotApplicable("all cells give the same difference")
    # Both runs of a difference are in the model, so the residual may vanish. A lower bound keeps the covariance
    # invertible throughout the search. In units of the sample variance.
    centre, scale = float(values.mean()), float(values.std())
    values = (values - centre) / scale
    shared = np.array([np.equal.outer(division, division) for division in [*factors.values(), range(n)]], dtype=float)
    bounds = [(0.0, None)] * len(factors) + [(_LEAST_RESIDUAL, None)]

    def precision(variances: Any) -> tuple[Any, Any]:
        """Inverse of the covariance, and the same with the mean projected out."""
        inverse = np.linalg.inv(np.tensordot(variances, shared, 1))
        return inverse, inverse - np.outer(inverse.sum(0), inverse.sum(0)) / inverse.sum()

    def deviance(variances: Any) -> tuple[float, Any]:
        """-2 log restricted likelihood, and its gradient."""
        inverse, rest = precision(variances)
        residuals = rest @ values
        value = math.log(inverse.sum()) - np.linalg.slogdet(inverse)[1] + values @ residuals
        return value, (shared * (rest - np.outer(residuals, residuals))).sum((1, 2))

    search = partial(optimize.minimize, deviance, jac=True, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-12})
    with np.errstate(invalid="ignore"):  # checked below
        fits = sorted((search(np.full(len(bounds), start)) for start in (0.1, 1.0, 10.0)), key=lambda fit: fit.fun)
    variances = fits[0].x
    if not fits[1].fun - fits[0].fun < 1e-3:  # two searches must agree, and be finite
        return NotApplicable("the mixed model is not fitted: the search for its variances did not converge")
    inverse, _ = precision(variances)
    mean = centre + scale * float(inverse.sum(0) @ values / inverse.sum())
    se = scale / math.sqrt(inverse.sum())
    reach = float(stats.norm.ppf((1 + confidence) / 2)) * se
    return Mixed(
        mean=mean,
        se=se,
        z=mean / se,
        p=float(2 * stats.norm.sf(abs(mean / se))),
        low=mean - reach,
        high=mean + reach,
        cells=n,
        variances={name: float(v) * scale**2 for name, v in zip([*factors, "residual"], variances, strict=True)},
    )
