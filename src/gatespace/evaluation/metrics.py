"""How well labels were predicted, as plain numbers beside the counts they come from.

Accuracy alone can be had without any skill: the best constant, balanced accuracy and macro-F1 always stand beside it.
An answer without a legal label is wrong, and is never left out of a denominator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

from gatespace.errors import UsageError, unknown_name
from gatespace.tasks.data import Baseline


@dataclass(frozen=True, slots=True)
class LabelRow:
    """One label.

    Args:
        label: The label.
        precision: correct / predicted; 0 if it was never predicted.
        recall: correct / support; 0 if no row has it.
        f1: 2·correct / (support + predicted); 0 if it has neither.
        support: Rows whose gold label it is.
        predicted: Rows it was predicted for.
        correct: Rows with both.
        unparsed: Rows whose gold label it is and whose answer had no legal label.
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
    """The measures of a list of predictions.

    Args:
        accuracy: correct / count.
        balanced_accuracy: The mean recall of the labels that these rows have: 1 / labels for one answer to all.
        macro_f1: The mean F1 of all labels of the task. A label that no row has and that was never predicted counts
            with 0, as with scikit-learn's `labels=` and `zero_division=0`.
        parsed: The share of answers with a legal label.
        parse_failures: The answers without one.
        count: Rows.
        correct: Rows with the right label.
        best_constant: The most frequent gold label of these rows, and the accuracy of giving it to all: the most
            that is to be had without reading a text.
        per_label: One row for every label, in the order of the task.
        confusion: Gold label → predicted label → rows. What a row of it lacks to its label's support is `unparsed`.
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
        """What the task's metric has come to, as in `TextMetrics`."""
        return self.accuracy

    def as_json(self) -> dict[str, Any]:
        """Plain lists, dictionaries and numbers."""
        # asdict would give the baseline, a named tuple, as a list
        return asdict(self) | {"best_constant": self.best_constant._asdict()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Metrics:
        """From what `as_json` gave, of an earlier release too: all of it follows from the labels' rows."""
        return _of([LabelRow(**row) for row in record["per_label"]], record["confusion"])


def metric_of(record: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of the metric that an evaluation is about, from the JSON of its metrics or evaluations.jsonl.

    Examples:
        >>> metric_of({"accuracy": 0.5, "count": 2}), metric_of({"metric": "bleu", "score": 0.25})
        (('accuracy', 0.5), ('bleu', 0.25))
    """
    if "score" in record:
        return record["metric"], record["score"]
    return "accuracy", record["accuracy"]


def measure(gold: Sequence[str], predicted: Sequence[str | None], labels: Sequence[str]) -> Metrics:
    """Compare predictions with gold labels.

    Args:
        gold: The right label of every row.
        predicted: The label the model gave, None where its answer has no legal one.
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
