"""Claims about groups: is there any difference on a task, and is one side ahead overall?"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from gatespace.evidence.paired import summarise
from gatespace.evidence.reach import whole_cells
from gatespace.evidence.records import Anova, Block, BlockClaim, Decisive, Mixed
from gatespace.gating.coefficients import NotApplicable

_LEAST_RESIDUAL = 1e-6
"""Lower bound on the mixed model's residual variance, in units of the sample variance."""


class Difference(NamedTuple):
    """Difference of one cell at one seed; `left` and `right` are labels of points of the task."""

    task: str
    seed: int
    left: str
    right: str
    value: float


def anova(accuracies: Mapping[str, Mapping[int, float]]) -> Anova | NotApplicable:
    """Is there any difference between the points of a task? Two-way, point + seed, type II.

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
    f, p, _ = model.compare_f_test(OLS(values, np.hstack([constant, by_seed])).fit())
    seed_f, seed_p, _ = model.compare_f_test(OLS(values, np.hstack([constant, by_point])).fit())
    gaps = points * seeds - len(rows)
    return Anova(
        points=points,
        seeds=seeds,
        runs=len(rows),
        f=float(f),
        p=float(p),
        df=(points - 1, round(model.df_resid)),
        seed_f=float(seed_f),
        seed_p=float(seed_p),
        sd=math.sqrt(float(model.mse_resid)),
        note=f"{gaps} of {points * seeds} runs are missing" if gaps else "",
    )


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
    blocks, used, total = _blocks(kept)
    if not blocks:
        return NotApplicable("no cell was run at every seed of its task")
    note = f"over the {used} of {total} cells that have every seed of their task" if used < total else ""
    summary = summarise([block.mean for block in blocks], confidence=confidence, unit="block", note=note)
    return BlockClaim(**vars(summary), blocks=tuple(blocks), excluded_seed=exclude_seed)


def _blocks(differences: Sequence[Difference]) -> tuple[list[Block], int, int]:
    """The blocks, the number of cells they average, and the number of all cells."""
    blocks: list[Block] = []
    used = total = 0
    for task in dict.fromkeys(found.task for found in differences):
        mine = [found for found in differences if found.task == task]
        by_cell: dict[Hashable, dict[int, float]] = {}
        for found in mine:
            by_cell.setdefault((found.left, found.right), {})[found.seed] = found.value
        cells, seeds = whole_cells(by_cell)
        whole = [by_cell[cell] for cell in cells]
        used, total = used + len(whole), total + len(by_cell)
        if whole:
            blocks += [Block(task, s, math.fsum(v[s] for v in whole) / len(whole), len(whole)) for s in seeds]
    return blocks, used, total


def decisive(differences: Sequence[Difference], claim: BlockClaim | NotApplicable) -> Decisive | None:
    """Return the point that alone decides a claim, or None.

    Without its cells, the sign of the mean or whether the interval excludes 0 changes, and the mean with them lies
    outside the interval without. The last condition rules out means close to 0, whose sign any point can change.

    Args:
        differences: What the claim was made from.
        claim: The claim over all of them.
    """
    if isinstance(claim, NotApplicable) or claim.low is None or claim.high is None:
        return None
    farthest, chosen = 0.0, None
    for point in dict.fromkeys(label for d in differences for label in (d.right, d.left)):
        rest = [d for d in differences if point not in (d.left, d.right)]
        means = [block.mean for block in _blocks(rest)[0]]
        if len(means) < 2 or np.ptp(means) == 0:
            continue
        mean, reach = float(np.mean(means)), float(stats.t.ppf((1 + claim.confidence) / 2, len(means) - 1))
        reach *= float(np.std(means, ddof=1)) / math.sqrt(len(means))
        turns = claim.mean * mean < 0 or (claim.low * claim.high > 0) != (abs(mean) > reach)
        shift = abs(claim.mean - mean)
        if turns and shift > max(reach, farthest):
            farthest, chosen = shift, (point, rest)
    if chosen is None:
        return None
    without = block_claim(chosen[1], confidence=claim.confidence)
    assert isinstance(without, BlockClaim)
    return Decisive(chosen[0], without)


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
