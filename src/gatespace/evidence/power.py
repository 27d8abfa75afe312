"""How small a difference can be seen with so many seeds, and how many seeds a difference needs."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from statsmodels.stats.power import TTestPower  # type: ignore[import-untyped]

from gatespace.errors import RunError, UsageError

POWER = 0.8
ALPHA = 0.05


def minimum_detectable(sd: float, n: int, power: float = POWER, alpha: float = ALPHA) -> float:
    """The smallest true mean difference that a two-sided paired t-test finds with this power.

    Args:
        sd: Standard deviation of the paired differences, in any unit; the answer is in the same.
        n: Pairs, e.g. seeds; at least 2.
        power: The share of repetitions that should find it.
        alpha: Level of the test.

    Example:
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
    """The number of paired seeds at which a two-sided paired t-test finds `difference` with this power.

    Example:
        >>> [seeds_needed(sd, 1.0) for sd in (1.0, 1.5, 2.0)]
        [10, 20, 34]
    """
    _check(power=power, alpha=alpha)
    if not (math.isfinite(difference) and difference != 0):
        raise UsageError("the difference to be found is a number other than 0", got=difference)
    if not (math.isfinite(sd) and sd > 0):
        raise UsageError("a standard deviation is a number above 0 here", got=sd)
    effect = abs(difference) / sd
    for n in (2, 3, 4):  # the solver finds no root where fewer than a handful are enough
        if effect >= _effect(n, power, alpha):
            return n
    return math.ceil(_solved(effect_size=effect, nobs=None, alpha=alpha, power=power))


@lru_cache(maxsize=256)
def _effect(n: int, power: float, alpha: float) -> float:
    return _solved(effect_size=None, nobs=n, alpha=alpha, power=power)


def _solved(**known: float | None) -> float:
    # The solver answers with a number or an array of one, and where both signs are roots sometimes with the other one.
    root = abs(float(np.asarray(TTestPower().solve_power(**known)).item()))
    if not math.isfinite(root):
        raise RunError("the power of the t-test could not be solved", got=known)
    return root


def _check(*, power: float, alpha: float) -> None:
    if not 0 < alpha < power < 1:
        raise UsageError("a level and a power lie between 0 and 1, the level below the power", got=f"{alpha}, {power}")
