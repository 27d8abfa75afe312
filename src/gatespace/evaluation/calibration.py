"""Label probabilities and their quality: log-loss, Brier score, calibration, risk and coverage.

Everything is over the task's labels alone: the prediction is the most probable label, which may differ from the greedy
response, and the confidence is that label's probability.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import fsum
from typing import Any

from gatespace.errors import UsageError, unknown_name

BINS = 15
"""Bins of equal width over confidences from 0 to 1; a bin includes its lower edge, the last one both edges."""
TARGETS = (0.8, 0.9, 0.95, 0.99)
"""Accuracies to report coverage at."""
_POINTS = 100
"""Points of a curve over coverage: 1 %, 2 %, ..."""


@dataclass(frozen=True, slots=True)
class LabelProbabilities:
    """Probability of each label for one text.

    Args:
        probabilities: Label → probability, normalised over the labels.
        mass: Total probability of the labels' responses before normalisation; the rest goes to responses without a
            legal label and to other spellings of the labels.
    """

    probabilities: Mapping[str, float]
    mass: float

    @classmethod
    def of(cls, labels: Sequence[str], log_probs: Sequence[float]) -> LabelProbabilities:
        """Build from the log-probability of each label's whole response.

        Examples:
            >>> found = LabelProbabilities.of(["joy", "anger"], [math.log(0.6), math.log(0.2)])
            >>> found.label, round(found.confidence, 6), round(found.margin, 6), round(found.mass, 6)
            ('joy', 0.75, 0.5, 0.8)
        """
        most = max(log_probs)
        parts = [math.exp(one - most) for one in log_probs]
        total = fsum(parts)
        return cls(dict(zip(labels, (part / total for part in parts), strict=True)), math.exp(most) * total)

    @property
    def label(self) -> str:
        """The most probable label; ties: the first."""
        return max(self.probabilities, key=lambda label: self.probabilities[label])

    @property
    def confidence(self) -> float:
        """The probability of the most probable label."""
        return max(self.probabilities.values())

    @property
    def margin(self) -> float:
        """The confidence minus the second-highest probability."""
        first, *others = sorted(self.probabilities.values(), reverse=True)
        return first - (others[0] if others else 0.0)


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows with confidence between `low` and `high`; confidence and accuracy are None if there are none."""

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Coverage:
    """Largest share of rows, by confidence, that is answered with at least a given accuracy.

    Args:
        accuracy: Target accuracy.
        coverage: Share of rows; 0 if the target is not reached.
        threshold: Lowest confidence of those rows, for `gatespace predict --threshold`; None if there are none.
    """

    accuracy: float
    coverage: float
    threshold: float | None


@dataclass(frozen=True)
class Calibration:
    """Calibration metrics of label probabilities.

    Args:
        count: Rows.
        accuracy: Share of rows whose most probable label is right.
        log_loss: Mean of -log p(gold label), in nats; a p of 0 counts as the smallest normal float.
        brier: Mean over rows of Σ (p(label) - [label is right])² over all labels: 0 to 2.
        ece: Expected calibration error: Σ over `bins` of their share of rows times |accuracy - confidence|.
        confidence: Mean confidence; above `accuracy` if the model is overconfident.
        mass: Mean total probability of the labels.
        aurc: Area under the risk-coverage curve: mean, over n = 1 … count, of the error rate among the n most
            confident rows. Ties in confidence are averaged over their orders.
        bins: Reliability in `BINS` bins of equal width.
        coverage_at: Coverage at each of `TARGETS`.
        curve: Accuracy among the most confident 1 %, 2 %, … 100 % of rows, each rounded up to a whole row.
    """

    count: int
    accuracy: float
    log_loss: float
    brier: float
    ece: float
    confidence: float
    mass: float
    aurc: float
    bins: list[Bin]
    coverage_at: list[Coverage]
    curve: list[float]

    def as_json(self) -> dict[str, Any]:
        """Return plain lists, dictionaries and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Calibration:
        """Build from the output of `as_json`."""
        parts = {"bins": [Bin(**one) for one in record["bins"]]}
        return cls(**{**record, **parts, "coverage_at": [Coverage(**one) for one in record["coverage_at"]]})


def calibrate(gold: Sequence[str], found: Sequence[LabelProbabilities]) -> Calibration:
    """Compare probabilities with gold labels.

    Args:
        gold: Gold label of every row.
        found: Probabilities of every row.
    """
    if len(gold) != len(found):
        raise UsageError("every row has its probabilities", got=f"{len(gold)} rows, {len(found)} with probabilities")
    if not gold:
        raise UsageError("there is nothing to measure", got="no rows", why="a share of no rows is not a number")
    for right, row in zip(gold, found, strict=True):
        if right not in row.probabilities:
            raise unknown_name("gold label", right, row.probabilities)
    count = len(gold)
    rows = [(row.confidence, row.label == right) for right, row in zip(gold, found, strict=True)]
    bins = _bins(rows)
    errors = _errors(rows)
    return Calibration(
        count=count,
        accuracy=sum(right for _, right in rows) / count,
        log_loss=fsum(-math.log(max(p, sys.float_info.min)) for p in _of_gold(gold, found)) / count,
        brier=fsum(
            (p - (label == right)) ** 2
            for right, row in zip(gold, found, strict=True)
            for label, p in row.probabilities.items()
        )
        / count,
        ece=fsum(
            one.count * abs(one.accuracy - one.confidence)
            for one in bins
            if one.accuracy is not None and one.confidence is not None
        )
        / count,
        confidence=fsum(confidence for confidence, _ in rows) / count,
        mass=fsum(row.mass for row in found) / count,
        aurc=fsum(wrong / place for place, wrong in enumerate(errors, start=1)) / count,
        bins=bins,
        coverage_at=[_coverage(rows, target) for target in TARGETS],
        curve=[1 - errors[n - 1] / n for n in (-(-count * point // _POINTS) for point in range(1, _POINTS + 1))],
    )


def _of_gold(gold: Sequence[str], found: Sequence[LabelProbabilities]) -> list[float]:
    return [row.probabilities[right] for right, row in zip(gold, found, strict=True)]


def _bins(rows: Sequence[tuple[float, bool]]) -> list[Bin]:
    members: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for row in rows:
        members[min(int(row[0] * BINS), BINS - 1)].append(row)
    return [
        Bin(
            low=place / BINS,
            high=(place + 1) / BINS,
            count=len(some),
            confidence=fsum(confidence for confidence, _ in some) / len(some) if some else None,
            accuracy=sum(right for _, right in some) / len(some) if some else None,
        )
        for place, some in enumerate(members)
    ]


def _groups(rows: Sequence[tuple[float, bool]]) -> list[tuple[float, int, int]]:
    """Confidence, row count and error count for each distinct confidence, highest first."""
    ordered = sorted(rows, key=lambda row: -row[0])
    groups = [(confidence, [right for _, right in some]) for confidence, some in groupby(ordered, lambda row: row[0])]
    return [(confidence, len(some), some.count(False)) for confidence, some in groups]


def _errors(rows: Sequence[tuple[float, bool]]) -> list[float]:
    """Expected errors among the n most confident rows, for every n from 1."""
    found: list[float] = []
    before = 0
    for _, size, wrong in _groups(rows):
        found += [before + wrong * place / size for place in range(1, size + 1)]
        before += wrong
    return found


def _coverage(rows: Sequence[tuple[float, bool]], target: float) -> Coverage:
    """Coverage at a target accuracy; a threshold cannot split rows of equal confidence."""
    best, threshold, covered, wrong = 0, None, 0, 0
    for confidence, size, errors in _groups(rows):
        covered, wrong = covered + size, wrong + errors
        if covered - wrong >= target * covered:
            best, threshold = covered, confidence
    return Coverage(target, best / len(rows), threshold)
