"""Classification metrics, with the counts they come from.

Accuracy can be high without skill, so the best constant, balanced accuracy and macro-F1 are always reported with it.
An answer without a legal label is wrong and is never left out of a denominator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum, sqrt
from statistics import NormalDist
from typing import Any

from gatespace.errors import UsageError, unknown_name
from gatespace.tasks.data import Baseline

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class LabelRow:
    """Metrics of one label.

    Args:
        label: The label.
        precision: correct / predicted; 0 if it was never predicted.
        recall: correct / support; 0 if no row has it.
        f1: 2·correct / (support + predicted); 0 if both are 0.
        support: Rows with this gold label.
        predicted: Rows with this prediction.
        correct: Rows with both.
        unparsed: Rows with this gold label whose answer had no legal label.
    """

    label: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int
    correct: int
    unparsed: int


@dataclass(frozen=True)
class Metrics:
    """Metrics of a list of predictions.

    Args:
        accuracy: correct / count.
        balanced_accuracy: Mean recall of the labels that occur in these rows: 1 / labels for a constant answer.
        macro_f1: Mean F1 of all labels of the task. A label with no rows and no predictions counts as 0, as with
            scikit-learn's `labels=` and `zero_division=0`.
        parsed: Share of answers with a legal label.
        parse_failures: Answers without one.
        count: Rows.
        correct: Rows with the right label.
        best_constant: Most frequent gold label of these rows, and the accuracy of always predicting it.
        per_label: One row per label, in task order.
        confusion: Gold label → predicted label → rows. Each row sums to its label's support minus `unparsed`.
    """

    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    parsed: float
    parse_failures: int
    count: int
    correct: int
    best_constant: Baseline
    per_label: list[LabelRow]
    confusion: dict[str, dict[str, int]]

    metric = "accuracy"

    @property
    def score(self) -> float:
        """Value of the task's metric, as in `TextMetrics`."""
        return self.accuracy

    def as_json(self) -> dict[str, Any]:
        """Return plain lists, dictionaries and numbers."""
        # asdict would leave the baseline, a named tuple, to become a list
        return asdict(self) | {"best_constant": self.best_constant._asdict()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Metrics:
        """Build from the output of `as_json`, also of earlier releases: everything follows from the per-label rows."""
        return _of([LabelRow(**row) for row in record["per_label"]], record["confusion"])


def metric_of(record: Mapping[str, Any]) -> tuple[str, float]:
    """Return name and value of the task's metric, from the JSON of metrics or a line of evaluations.jsonl.

    Examples:
        >>> metric_of({"accuracy": 0.5, "count": 2}), metric_of({"metric": "bleu", "score": 0.25})
        (('accuracy', 0.5), ('bleu', 0.25))
    """
    if "score" in record:
        return record["metric"], record["score"]
    return "accuracy", record["accuracy"]


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
    reach = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def rounded(share: float, rows: int) -> str:
    """A share with as many digits as that many rows can support: 2 below 100 rows, 4 from 10,000.

    Examples:
        >>> rounded(0.9125, 80), rounded(0.9125, 1421)
        ('0.91', '0.912')
    """
    return f"{share:.{2 if rows < 100 else 3 if rows < 10_000 else 4}f}"


def with_interval(share: float, rows: int, interval: tuple[float, float] | None = None) -> str:
    """A share with its 95 % interval, by default Wilson's.

    Examples:
        >>> with_interval(0.9, 80)
        '0.90 [0.81, 0.95]'
    """
    low, high = (rounded(end, rows) for end in interval or wilson(share * rows, rows))
    return f"{rounded(share, rows)} [{low}, {high}]"


def measure(gold: Sequence[str], predicted: Sequence[str | None], labels: Sequence[str]) -> Metrics:
    """Compare predictions with gold labels.

    Args:
        gold: Gold label of every row.
        predicted: Predicted label, None if the answer has no legal one.
        labels: All labels of the task.

    Examples:
        >>> found = measure(["joy", "joy", "anger"], ["joy", None, "joy"], ["anger", "joy", "sadness"])
        >>> found.correct, found.count, found.parse_failures, found.best_constant.label
        (1, 3, 1, 'joy')
        >>> found.per_label[1].f1, round(found.macro_f1, 4)
        (0.5, 0.1667)
    """
    if len(gold) != len(predicted):
        raise UsageError("every row has one prediction", got=f"{len(gold)} rows, {len(predicted)} predictions")
    if not gold:
        raise UsageError("there is nothing to measure", got="no rows", why="a share of no rows is not a number")
    if len(set(labels)) != len(labels):
        raise UsageError("a label is named once", got=list(labels))
    named: dict[str, set[str | None]] = {"gold label": {*gold}, "predicted label": {*predicted} - {None}}
    for kind, found in named.items():
        if unknown := found.difference(labels):
            raise unknown_name(kind, min(map(str, unknown)), labels)

    pairs = Counter(zip(gold, predicted, strict=True))
    support, given = Counter(gold), Counter(predicted)
    rows = [
        LabelRow(
            label=label,
            precision=_share(pairs[label, label], given[label]),
            recall=_share(pairs[label, label], support[label]),
            f1=_share(2 * pairs[label, label], support[label] + given[label]),
            support=support[label],
            predicted=given[label],
            correct=pairs[label, label],
            unparsed=pairs[label, None],
        )
        for label in labels
    ]
    return _of(rows, {right: {label: pairs[right, label] for label in labels} for right in labels})


def _of(rows: list[LabelRow], confusion: dict[str, dict[str, int]]) -> Metrics:
    count, correct = sum(row.support for row in rows), sum(row.correct for row in rows)
    failures = sum(row.unparsed for row in rows)
    present = [row for row in rows if row.support]
    most = max(rows, key=lambda row: row.support)
    return Metrics(
        accuracy=correct / count,
        balanced_accuracy=fsum(row.recall for row in present) / len(present),
        macro_f1=fsum(row.f1 for row in rows) / len(rows),
        parsed=(count - failures) / count,
        parse_failures=failures,
        count=count,
        correct=correct,
        best_constant=Baseline(most.label, most.support / count),
        per_label=rows,
        confusion=confusion,
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
