"""Label probabilities and their quality: log-loss, Brier score, AUC, calibration, risk and coverage.

Everything is over the task's labels alone: the prediction is the most probable label, which may differ from the greedy
response, and the confidence is that label's probability. What is fitted (a bias per label, thresholds of coverage) is
fitted on validation rows and reported on others.
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
_NEWTON_STEPS = 100
_CONVERGED = 1e-10
"""Newton decrement, in nats of all rows, at which a fit ends."""


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
    """Rows answered above a threshold of confidence.

    Args:
        accuracy: Target accuracy.
        coverage: Share of rows with at least the threshold's confidence; 0 if there is no threshold.
        threshold: Confidence from which the most rows are answered with the target accuracy, for `gatespace predict
            --threshold`: of the validation rows, or of these rows if there are none. None: the target is not reached.
        reached: Accuracy among the covered rows; None if there are none.
    """

    accuracy: float
    coverage: float
    threshold: float | None
    reached: float | None = None


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
        auc: Macro AUC: mean over labels of the probability that a row with the label gives it a higher probability
            than a row without, ties counting half. 0.5 is chance. None if all rows have the same label.
        prior_corrected: Accuracy after `label_bias` of the validation rows; None without them.
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
    auc: float | None = None
    prior_corrected: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain lists, dictionaries and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Calibration:
        """Build from the output of `as_json`."""
        parts = {"bins": [Bin(**one) for one in record["bins"]]}
        return cls(**{**record, **parts, "coverage_at": [Coverage(**one) for one in record["coverage_at"]]})


Rows = tuple[Sequence[str], Sequence[LabelProbabilities]]
"""Gold labels and probabilities of the same rows."""


def calibrate(gold: Sequence[str], found: Sequence[LabelProbabilities], validation: Rows | None = None) -> Calibration:
    """Compare probabilities with gold labels.

    Args:
        gold: Gold label of every row.
        found: Probabilities of every row.
        validation: Rows that the bias of labels and the thresholds of coverage are fitted on. None: no bias, and
            thresholds of the rows themselves, which makes coverage optimistic.
    """
    _check(gold, found)
    if validation is not None:
        _check(*validation)
    count, pairs = len(gold), list(zip(gold, found, strict=True))
    rows = _judged(gold, found)
    bins = _bins(rows)
    errors = _errors(rows)
    chosen_on = rows if validation is None else _judged(*validation)
    return Calibration(
        count=count,
        accuracy=sum(right for _, right in rows) / count,
        log_loss=fsum(-math.log(max(row.probabilities[right], sys.float_info.min)) for right, row in pairs) / count,
        brier=fsum((p - (label == right)) ** 2 for right, row in pairs for label, p in row.probabilities.items())
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
        coverage_at=[_coverage(rows, target, chosen_on) for target in TARGETS],
        curve=[1 - errors[n - 1] / n for n in (-(-count * point // _POINTS) for point in range(1, _POINTS + 1))],
        auc=macro_auc(gold, found),
        prior_corrected=None if validation is None else _corrected(gold, found, label_bias(*validation)),
    )


def macro_auc(gold: Sequence[str], found: Sequence[LabelProbabilities]) -> float | None:
    """Mean over labels of the area under the ROC curve, each label against the rest; None for a single label.

    Examples:
        >>> rows = [LabelProbabilities({"joy": p, "anger": 1 - p}, 1.0) for p in (0.75, 0.5, 0.5, 0.25)]
        >>> macro_auc(["joy", "joy", "anger", "anger"], rows)
        0.875
    """
    import numpy as np

    areas = []
    for label in found[0].probabilities:
        having = [row.probabilities[label] for right, row in zip(gold, found, strict=True) if right == label]
        others = np.sort([row.probabilities[label] for right, row in zip(gold, found, strict=True) if right != label])
        if having and others.size:
            # rows below, counted twice, and ties once: exact in whole numbers
            halves = np.searchsorted(others, having, "left") + np.searchsorted(others, having, "right")
            areas.append(int(halves.sum()) / (2 * len(having) * others.size))
    return fsum(areas) / len(areas) if areas else None


def label_bias(gold: Sequence[str], found: Sequence[LabelProbabilities]) -> dict[str, float]:
    """Fit one bias per label: the likeliest b for gold ~ softmax(log p + b), with a standard normal prior on each b.

    The prior makes the minimum unique, and finite for a label that no row has. Newton's method from 0, with step
    halving: the problem is convex.
    """
    import numpy as np

    labels = list(found[0].probabilities)
    logits = _log([[row.probabilities[label] for label in labels] for row in found])
    counts = np.array([sum(right == label for right in gold) for label in labels], dtype=float)

    def loss(bias: Any) -> float:
        return float(np.logaddexp.reduce(logits + bias, axis=1).sum() - counts @ bias + bias @ bias / 2)

    bias = np.zeros(len(labels))
    for _ in range(_NEWTON_STEPS):
        shares = np.exp(logits + bias - np.logaddexp.reduce(logits + bias, axis=1, keepdims=True))
        gradient = shares.sum(0) - counts + bias
        step = np.linalg.solve(np.diag(shares.sum(0) + 1) - shares.T @ shares, gradient)
        gain, size = float(gradient @ step), 1.0
        if gain < _CONVERGED:
            break
        while size > sys.float_info.epsilon and loss(bias - size * step) > loss(bias) - size * gain / 4:
            size /= 2
        bias = bias - size * step
    return dict(zip(labels, bias.tolist(), strict=True))


def _log(probabilities: Any) -> Any:
    """Logarithms; a probability of 0 counts as the smallest normal float."""
    import numpy as np

    return np.log(np.maximum(probabilities, sys.float_info.min))


def _corrected(gold: Sequence[str], found: Sequence[LabelProbabilities], bias: Mapping[str, float]) -> float:
    """Accuracy of the most probable label after adding the bias; ties: the first."""
    labels = list(bias)
    logits = _log([[row.probabilities[label] for label in labels] for row in found])
    said: list[str] = [labels[place] for place in (logits + list(bias.values())).argmax(1)]
    return sum(right == label for right, label in zip(gold, said, strict=True)) / len(gold)


def _check(gold: Sequence[str], found: Sequence[LabelProbabilities]) -> None:
    if len(gold) != len(found):
        raise UsageError("every row has its probabilities", got=f"{len(gold)} rows, {len(found)} with probabilities")
    if not gold:
        raise UsageError("there is nothing to measure", got="no rows", why="a share of no rows is not a number")
    for right, row in zip(gold, found, strict=True):
        if right not in row.probabilities:
            raise unknown_name("gold label", right, row.probabilities)


def _judged(gold: Sequence[str], found: Sequence[LabelProbabilities]) -> list[tuple[float, bool]]:
    """Confidence of every row, and whether its most probable label is right."""
    return [(row.confidence, row.label == right) for right, row in zip(gold, found, strict=True)]


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


def _coverage(rows: Sequence[tuple[float, bool]], target: float, chosen_on: Sequence[tuple[float, bool]]) -> Coverage:
    """Coverage above the threshold that `chosen_on` gives a target; it cannot split rows of equal confidence."""
    threshold, covered, wrong = None, 0, 0
    for confidence, size, errors in _groups(chosen_on):
        covered, wrong = covered + size, wrong + errors
        if covered - wrong >= target * covered:
            threshold = confidence
    answered = [right for confidence, right in rows if threshold is not None and confidence >= threshold]
    reached = sum(answered) / len(answered) if answered else None
    return Coverage(target, len(answered) / len(rows), threshold, reached)
