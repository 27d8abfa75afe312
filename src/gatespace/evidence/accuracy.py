"""Confidence interval of an accuracy: over seeds, or over texts for a single seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from gatespace.study.records import Score

CONFIDENCE = 0.95


def accuracy_interval(scores: Sequence[Score]) -> tuple[float, float] | None:
    """Return Student's interval over the seeds of a point, or Wilson's over the texts of a single score.

    None without scores, or for several seeds if scipy (extra `evidence`) is not installed.
    """
    if len(scores) < 2:
        return wilson(scores[0].correct, scores[0].count) if scores else None
    try:
        from scipy.stats import t  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return None
    shares = [score.accuracy for score in scores]
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(shares) - 1)) * stdev(shares) / math.sqrt(len(shares))
    return max(0.0, fmean(shares) - reach), min(1.0, fmean(shares) + reach)


def wilson(correct: float, count: int, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's interval of a proportion. For a mean of scores in [0, 1], which vary less, it is too wide.

    Examples:
        >>> [round(end, 3) for end in wilson(9, 20)]
        [0.258, 0.658]
    """
    if count == 0:
        return 0.0, 1.0
    z, share = NormalDist().inv_cdf((1 + confidence) / 2), correct / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, centre - reach), min(1.0, centre + reach)
