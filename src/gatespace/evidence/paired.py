"""One comparison over seeds: paired t-test, sign-flip test and power; p values adjusted for multiple comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]
from statsmodels.stats.power import TTestPower  # type: ignore[import-untyped]

from gatespace.errors import RunError, UsageError
from gatespace.evidence.reach import ALPHA, least_differences, sign_flip_floor
from gatespace.evidence.records import Paired, Summary
from gatespace.gating.coefficients import NotApplicable
from gatespace.seeding import stream

EXACT_UP_TO = 14
"""Up to this many differences, all 2ⁿ sign assignments are tried; above, a sample of them."""
SAMPLED_FLIPS = 19_999
POWER = 0.8

_ROUNDING = 16 * np.finfo(float).eps


def paired(
    left: Mapping[int, float], right: Mapping[int, float], *, confidence: float = 0.95
) -> Paired | NotApplicable:
    """Compare two points at the seeds that both have.

    Args:
        left: Seed → value of the first point, e.g. accuracy in pp.
        right: Seed → value of the second.
        confidence: Of the interval.

    Examples:
        >>> found = paired({42: 55.49, 2: 53.60, 3: 52.83}, {42: 51.28, 2: 53.50, 3: 51.95})
        >>> print(f"{found.mean:.2f} ± {found.sd:.2f}, p = {found.p:.2f}, [{found.low:.2f}, {found.high:.2f}]")
        1.73 ± 2.18, p = 0.30, [-3.69, 7.15]
        >>> found.sign_flip_p, found.sign_flip_floor
        (0.25, 0.25)
    """
    seeds = tuple(seed for seed in left if seed in right)
    if not seeds:
        return NotApplicable("no seed at which both points were run")
    # Accuracies of 70, differences of 0.1: the former determine the rounding error.
    tolerance = _ROUNDING * max(abs(side[seed]) for side in (left, right) for seed in seeds)
    raw = [left[seed] - right[seed] for seed in seeds]
    differences = [0.0 if abs(value) <= tolerance else value for value in raw]
    alone = len(set(left) ^ set(right))
    note = f"{alone} seed{'s' * (alone > 1)} with one of the two runs only" if alone else ""
    found = summarise(differences, confidence=confidence, unit="seed", note=note, tolerance=tolerance)
    return Paired(**vars(found), seeds=seeds, differences=tuple(differences))


def summarise(
    differences: Sequence[float],
    *,
    confidence: float = 0.95,
    unit: str = "seed",
    note: str = "",
    tolerance: float = 0.0,
) -> Summary:
    """Summarise differences: mean, t with its interval, sign-flip p, minimum detectable difference.

    Args:
        differences: At least one.
        confidence: Of the interval.
        unit: What one difference is, for the note.
        note: Start of the summary's note.
        tolerance: A mean or SD up to this counts as 0: rounding error of the subtraction.
    """
    values = np.asarray(differences, dtype=float)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise UsageError("differences are a list of finite numbers, at least one", got=list(differences))
    if not 0 < confidence < 1:
        raise UsageError("a confidence lies between 0 and 1", got=confidence)
    n = int(values.size)
    tolerance = max(tolerance, _ROUNDING * float(np.abs(values).max()))
    mean = float(values.mean())
    notes = [note] if note else []
    sd = t = p = low = high = flip = mde = None
    if n == 1:
        notes.append(f"one {unit}: a difference without a measure of its error")
    else:
        sd = float(values.std(ddof=1))
        flip = sign_flip(values)
        if sd <= tolerance:
            sd = 0.0
            notes.append(f"all {n} {unit}s give the same difference: without variance there is no t")
        else:
            test = stats.ttest_1samp(values, 0.0)  # same as ttest_rel on the two sides
            interval = test.confidence_interval(confidence)
            t, p, low, high = map(float, (test.statistic, test.pvalue, interval.low, interval.high))
            mde = minimum_detectable(sd, n)
        if n < least_differences():
            notes.append(f"with {n} {unit}s no sign-flip p is below {sign_flip_floor(n):.4g}")
        if n > EXACT_UP_TO:
            notes.append(f"sign-flip p from {SAMPLED_FLIPS} random assignments of signs")
    return Summary(
        n=n,
        mean=0.0 if abs(mean) <= tolerance else mean,
        sd=sd,
        t=t,
        p=p,
        low=low,
        high=high,
        sign_flip_p=flip,
        sign_flip_floor=sign_flip_floor(n),
        mde=mde,
        wins=int((values > 0).sum()),
        ties=int((values == 0).sum()),
        losses=int((values < 0).sum()),
        confidence=confidence,
        note="; ".join(notes),
    )


def sign_flip(differences: Any) -> float:
    """Two-sided p of the mean under sign assignments, equally likely under the null; see `EXACT_UP_TO`."""
    values = np.asarray(differences, dtype=float)
    scale = float(np.abs(values).max())
    if scale == 0:
        return 1.0

    def mean(sample: Any, axis: int) -> Any:
        # rounded, so that equal sums compare equal whatever the order of addition
        return np.round(np.mean(sample, axis=axis), 11)

    exact = values.size <= EXACT_UP_TO
    test = stats.permutation_test(
        (values / scale,),
        mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf if exact else SAMPLED_FLIPS,
        rng=None if exact else np.random.default_rng(stream(0, "sign-flip", int(values.size))),
        alternative="two-sided",
    )
    return float(test.pvalue)


# ---------------------------------------------------------------------------------------------------- power


def minimum_detectable(sd: float, n: int, power: float = POWER, alpha: float = ALPHA) -> float:
    """Return the smallest true mean difference that a two-sided paired t-test detects with this power.

    Args:
        sd: Standard deviation of the paired differences, in the unit of the result.
        n: Pairs, e.g. seeds; at least 2.
        power: Probability of detecting it.
        alpha: Level of the test.

    Examples:
        >>> round(minimum_detectable(1.0, 3), 2), round(minimum_detectable(1.0, 10), 2)
        (3.26, 1.0)
    """
    _check(power=power, alpha=alpha)
    if n < 2:
        raise UsageError("a minimum detectable difference needs at least 2 pairs", got=n, why="one pair has no SD")
    if not (math.isfinite(sd) and sd >= 0):
        raise UsageError("a standard deviation is a number of at least 0", got=sd)
    return sd * _effect(n, power, alpha)


def seeds_needed(sd: float, difference: float, power: float = POWER, alpha: float = ALPHA) -> int:
    """Return the number of seeds at which a two-sided paired t-test detects `difference` with this power.

    Examples:
        >>> seeds_needed(1.0, 1.0), seeds_needed(1.5, 1.0), seeds_needed(2.0, 1.0)
        (10, 20, 34)
    """
    _check(power=power, alpha=alpha)
    if not (math.isfinite(difference) and difference != 0):
        raise UsageError("the difference to be found is a number other than 0", got=difference)
    if not (math.isfinite(sd) and sd > 0):
        raise UsageError("a standard deviation is a number above 0 here", got=sd)
    effect = abs(difference) / sd
    for n in (2, 3, 4):  # the solver finds no root for so few
        if effect >= _effect(n, power, alpha):
            return n
    return math.ceil(_solved(effect_size=effect, nobs=None, alpha=alpha, power=power))


@lru_cache(maxsize=256)
def _effect(n: int, power: float, alpha: float) -> float:
    return _solved(effect_size=None, nobs=n, alpha=alpha, power=power)


def _solved(**known: float | None) -> float:
    # The solver returns a number or an array of one, and sometimes the negative of two roots.
    root = abs(float(np.asarray(TTestPower().solve_power(**known)).item()))
    if not math.isfinite(root):
        raise RunError("the power of the t-test could not be solved", got=known)
    return root


def _check(*, power: float, alpha: float) -> None:
    if not 0 < alpha < power < 1:
        raise UsageError("a level and a power lie between 0 and 1, the level below the power", got=f"{alpha}, {power}")


# ---------------------------------------------------------------------------------------------------- adjusted p


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Return Holm-adjusted p values: below .05, the chance of any false claim among all of them is below .05.

    Examples:
        >>> holm([0.01, None, 0.04])
        [0.02, None, 0.04]
    """
    return _adjusted(ps, lambda ranked, n: np.maximum.accumulate(ranked * np.arange(n, 0, -1)))


def bh(ps: Sequence[float | None]) -> list[float | None]:
    """Return Benjamini-Hochberg-adjusted p values: of those below .05, at most 5 % are expected to be false."""
    return _adjusted(ps, lambda ranked, n: np.minimum.accumulate((ranked / (np.arange(1, n + 1) / n))[::-1])[::-1])


def _adjusted(ps: Sequence[float | None], adjust: Callable[[Any, int], Any]) -> list[float | None]:
    """Apply `adjust` to the known p values, smallest first, and their number."""
    known = np.array([p for p in ps if p is not None])
    order = np.argsort(known)
    adjusted = np.empty_like(known)
    adjusted[order] = np.minimum(adjust(known[order], len(known)), 1.0)
    found = iter(adjusted.tolist())
    return [None if p is None else next(found) for p in ps]
