"""Confidence interval of an accuracy: over seeds, or over texts for a single seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from gatespace.evaluation.metrics import CONFIDENCE, wilson
from gatespace.study.records import Score

__all__ = ["CONFIDENCE", "accuracy_interval", "wilson"]


def accuracy_interval(scores: Sequence[Score]) -> tuple[float, float] | None:
    """Return Student's interval over the seeds of a point; over the texts of a single score Wilson's for a share of
    right labels, Student's for free-text scores.

    None without scores, for the AUC of a single seed, or for Student's if scipy (extra `evidence`) is not installed.
    """
    if len(scores) > 1:
        shares = [score.accuracy for score in scores]
        return _student(fmean(shares), stdev(shares), len(shares))
    for score in scores:
        if score.best_constant is not None:  # a share of right labels
            return wilson(score.correct, score.count)
        if score.metric == score.metrics.metric and score.metrics.sd is not None:
            return _student(score.accuracy, score.metrics.sd, score.count)
    return None


def _student(mean: float, sd: float, count: int) -> tuple[float, float] | None:
    try:
        from scipy.stats import t  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return None
    reach = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * sd / math.sqrt(count)
    return max(0.0, mean - reach), min(1.0, mean + reach)
