"""Two models on the same examples: exact McNemar, and a bootstrap over examples and, given enough, seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar  # type: ignore[import-untyped]

from gatespace.errors import UsageError
from gatespace.evidence.records import Interval, McNemar

SEEDS_TO_RESAMPLE = 4
"""With fewer, seeds are fixed: three values drawn from three have only ten distinct outcomes, with far too little
spread."""
RESAMPLES = 2000


def mcnemar(left_correct: Sequence[bool] | Any, right_correct: Sequence[bool] | Any) -> McNemar:
    """Exact McNemar test of two models on the same examples, in the same order.

    Examples:
        >>> mcnemar([True, True, True, False], [False, False, True, False])
        McNemar(both=1, left_only=2, right_only=0, neither=1, p=0.5)
    """
    left, right = np.asarray(left_correct, dtype=bool), np.asarray(right_correct, dtype=bool)
    if left.shape != right.shape or left.ndim != 1 or left.size == 0:
        raise UsageError("both models are judged on the same examples, at least one", got=f"{left.size}, {right.size}")
    both = int((left & right).sum())
    left_only, right_only = int(left.sum()) - both, int(right.sum()) - both
    neither = left.size - both - left_only - right_only
    if left_only == right_only:
        p = 1.0  # also if nothing differs, where libraries give no p
    else:
        table = [[both, left_only], [right_only, neither]]
        p = float(statsmodels_mcnemar(table, exact=True).pvalue)
    return McNemar(both, left_only, right_only, neither, p)


class Resampler:
    """Owen's pigeonhole bootstrap; the resamples are drawn once and shared by many comparisons.

    Seeds and examples are resampled independently with replacement, and a resample's value is the mean over all pairs
    of a drawn seed and a drawn example.

    Args:
        examples: Rows of the split.
        generator: Random generator.
        resamples: Number of resamples.
    """

    def __init__(self, examples: int, *, generator: np.random.Generator, resamples: int = RESAMPLES) -> None:
        if examples < 1:
            raise UsageError("a bootstrap needs examples", got=examples)
        self.examples = examples
        self.resamples = resamples
        self._generator = generator
        self._example_counts = np.empty((resamples, examples), dtype=np.float32)
        for row in range(resamples):
            drawn = generator.integers(examples, size=examples)
            self._example_counts[row] = np.bincount(drawn, minlength=examples)
        self._seed_counts: dict[int, Any] = {}

    def interval(self, differences: Any, *, confidence: float = 0.95) -> Interval:
        """Interval of the mean of `differences` (seeds × examples, left's correctness minus right's), in pp."""
        matrix = np.asarray(differences, dtype=np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != self.examples or matrix.shape[0] < 1:
            raise UsageError(f"differences are seeds × {self.examples} examples", got=matrix.shape)
        seeds = matrix.shape[0]
        per_seed = self._example_counts @ matrix.T / self.examples  # resamples × seeds
        over_seeds = seeds >= SEEDS_TO_RESAMPLE
        means = (per_seed * self._seeds(seeds)).sum(axis=1) / seeds if over_seeds else per_seed.mean(axis=1)
        low, high = np.quantile(100.0 * means.astype(float), [(1 - confidence) / 2, (1 + confidence) / 2])
        if over_seeds:
            resampled = f"{seeds} seeds and {self.examples} examples: other seeds and other examples"
        else:
            these = "this trained pair" if seeds == 1 else f"these {seeds} trained pairs"
            resampled = f"{self.examples} examples, seeds fixed: {these} on other examples, not other seeds"
        return Interval(
            mean=100.0 * float(matrix.mean(dtype=float)),
            low=float(low),
            high=float(high),
            confidence=confidence,
            resampled=resampled,
            over_seeds=over_seeds,
            seeds=seeds,
            examples=self.examples,
            resamples=self.resamples,
        )

    def _seeds(self, seeds: int) -> Any:
        if seeds not in self._seed_counts:
            weights = self._generator.multinomial(seeds, [1 / seeds] * seeds, size=self.resamples)
            self._seed_counts[seeds] = weights.astype(np.float32)
        return self._seed_counts[seeds]
