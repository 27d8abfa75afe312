"""The same statistics from their definitions, in plain Python: no scipy, no statsmodels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def t_density(x: float, df: int) -> float:
    log = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return math.exp(log - (df + 1) / 2 * math.log1p(x * x / df))


def t_two_sided(t: float, df: int, steps: int = 4000) -> float:
    """1 minus the integral of the density from -|t| to |t|, by Simpson's rule on x = tan(θ)."""
    end = math.atan(abs(t))

    def f(theta: float) -> float:
        x = math.tan(theta)
        return t_density(x, df) * (1 + x * x)

    width = end / steps
    total = f(0.0) + f(end) + sum((4 if i % 2 else 2) * f(i * width) for i in range(1, steps))
    return 1 - 2 * total * width / 3


def t_quantile(two_sided: float, df: int) -> float:
    """The t whose two-sided p is `two_sided`, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, df) > two_sided else (low, middle)
    return low


def sign_flip(values: Sequence[Fraction | int]) -> float:
    """Twice the smaller tail over all assignments of signs, at most 1; exact."""
    observed = sum(values)
    sums = [
        sum(s * abs(v) for s, v in zip(signs, values, strict=True))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    above, below = sum(s >= observed for s in sums), sum(s <= observed for s in sums)
    return min(1.0, 2 * min(above, below) / len(sums))


def binomial_two_sided(wins: int, n: int) -> float:
    """Sum of the probabilities of all counts that are not more likely than `wins`, for p = 1/2."""
    weights = [math.comb(n, k) for k in range(n + 1)]
    return float(Fraction(sum(w for w in weights if w <= weights[wins]), 2**n))


def two_way(values: dict[str, dict[int, float]]) -> tuple[float, float, float]:
    """F of points, F of seeds and residual mean square of a complete table, by sums of squares."""
    points, seeds = list(values), list(next(iter(values.values())))
    a, b = len(points), len(seeds)
    grand = math.fsum(values[p][s] for p in points for s in seeds) / (a * b)
    by_point = {p: math.fsum(values[p].values()) / b for p in points}
    by_seed = {s: math.fsum(values[p][s] for p in points) / a for s in seeds}
    ss_point = b * math.fsum((m - grand) ** 2 for m in by_point.values())
    ss_seed = a * math.fsum((m - grand) ** 2 for m in by_seed.values())
    residual = math.fsum((values[p][s] - by_point[p] - by_seed[s] + grand) ** 2 for p in points for s in seeds)
    mse = residual / ((a - 1) * (b - 1))
    return ss_point / (a - 1) / mse, ss_seed / (b - 1) / mse, mse
