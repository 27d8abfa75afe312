"""Metrics of responses: the mean score by the task's metric, and statistics of labels with the counts they come from.

Accuracy can be high without skill, so the best constant, balanced accuracy and macro-F1 are always reported with it.
An answer without a legal label is wrong and is never left out of a denominator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import fsum, sqrt
from statistics import NormalDist, stdev
from typing import Any

from gatespace.errors import UsageError, unknown_name
from gatespace.tasks.data import Baseline, Task
from gatespace.tasks.scores import mean

CONFIDENCE = 0.95
_ON_REQUEST = ("probabilities", "mass", "samples", "sample_scores")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The response to one row.

    Args:
        index: Row index in the split.
        text: The row's text.
        references: Right responses: the gold label, or the references of free text.
        response: What was judged: the label in the response, None if there is no legal one; or its text.
        score: By the task's metric, from 0 to 1.
        raw: The response, without the prefill.
        ended: Whether the model ended the response itself, before the cap.
        tokens: Length of the response.
        also: Further metric → score.
        probabilities: Label → probability among the labels, if requested.
        mass: Total probability of the labels.
        samples: What was judged of sampled responses, if requested.
        sample_scores: Their scores.
    """

    index: int
    text: str
    references: tuple[str, ...]
    response: str | None
    score: float
    raw: str = ""
    ended: bool = True
    tokens: int | None = None
    also: Mapping[str, float] = field(default_factory=dict)
    probabilities: Mapping[str, float] | None = None
    mass: float | None = None
    samples: tuple[str | None, ...] | None = None
    sample_scores: tuple[float, ...] | None = None

    @property
    def gold(self) -> str:
        """The gold label, or the first reference."""
        return self.references[0]

    def as_json(self) -> dict[str, Any]:
        """Return plain values, without what was not requested."""
        return {key: value for key, value in asdict(self).items() if value is not None or key not in _ON_REQUEST}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Prediction:
        """Build from the output of `as_json`, or from a label of results published before 0.2: `gold` and `label`."""
        if "gold" in record:
            gold, label = record["gold"], record.get("label")
            judged = {"references": (gold,), "response": label, "score": float(gold == label)}
            record = {"index": 0, "text": "", **record, **judged}
        names = {one.name for one in fields(cls)}
        known = {name: value for name, value in record.items() if name in names}
        return cls(**known | {"references": tuple(record["references"])})


@dataclass(frozen=True, slots=True)
class LabelRow:
    """Statistics of one label.

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
class LabelStatistics:
    """What labels have beside a score.

    Args:
        accuracy: correct / rows.
        balanced_accuracy: Mean recall of the labels that occur in these rows: 1 / labels for a constant answer.
        macro_f1: Mean F1 of all labels of the task. A label with no rows and no predictions counts as 0, as with
            scikit-learn's `labels=` and `zero_division=0`.
        parsed: Share of answers with a legal label.
        parse_failures: Answers without one.
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
    correct: int
    best_constant: Baseline
    per_label: list[LabelRow]
    confusion: dict[str, dict[str, int]]

    @classmethod
    def of(cls, rows: list[LabelRow], confusion: dict[str, dict[str, int]]) -> LabelStatistics:
        """Everything follows from the per-label rows."""
        count, correct = sum(row.support for row in rows), sum(row.correct for row in rows)
        failures = sum(row.unparsed for row in rows)
        present = [row for row in rows if row.support]
        most = max(rows, key=lambda row: row.support)
        return cls(
            accuracy=correct / count,
            balanced_accuracy=fsum(row.recall for row in present) / len(present),
            macro_f1=fsum(row.f1 for row in rows) / len(rows),
            parsed=(count - failures) / count,
            parse_failures=failures,
            correct=correct,
            best_constant=Baseline(most.label, most.support / count),
            per_label=rows,
            confusion=confusion,
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain lists, dictionaries and numbers."""
        # asdict would leave the baseline, a named tuple, to become a list
        return asdict(self) | {"best_constant": self.best_constant._asdict()}


@dataclass(frozen=True)
class Metrics:
    """Metrics of a list of responses.

    Args:
        metric: Name of the task's metric.
        score: Mean score by it.
        count: Rows.
        truncated: Share of responses truncated at the cap on new tokens; None if unknown.
        length: Mean response length in tokens; None if unknown.
        also: Further metric → mean score.
        figures: Corpus-level figures of the split, e.g. corpus_bleu.
        sd: SD of the score over rows; None for a single one.
        labels: Statistics of labels; None for free text.
    """

    metric: str
    score: float
    count: int
    truncated: float | None = None
    length: float | None = None
    also: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    sd: float | None = None
    labels: LabelStatistics | None = None

    @classmethod
    def of(cls, task: Task, predictions: Sequence[Prediction]) -> Metrics:
        """Aggregate judged responses to rows of a task."""
        if not predictions:
            raise UsageError("there is nothing to measure", got="no rows", why="a mean of no rows is not a number")
        figures: dict[str, float] = {}
        for metric in task.metrics:
            if metric.figures is not None:
                responses = [row.response or "" for row in predictions]
                figures |= metric.figures(responses, [row.references for row in predictions])
        labels = None
        if task.labels:
            gold, given = [row.gold for row in predictions], [row.response for row in predictions]
            labels = measure(gold, given, task.labels).labels
        return cls(
            metric=task.metric,
            score=mean([row.score for row in predictions]),
            count=len(predictions),
            truncated=mean([not row.ended for row in predictions]),
            length=mean([row.tokens or 0 for row in predictions]),
            also={name: mean([row.also[name] for row in predictions]) for name in task.also},
            figures=figures,
            sd=stdev([row.score for row in predictions]) if len(predictions) > 1 else None,
            labels=labels,
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain lists, dictionaries and numbers; the statistics of labels are beside the others."""
        values = asdict(self)
        del values["labels"]
        return values if self.labels is None else values | self.labels.as_json()

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Metrics:
        """Build from the output of `as_json`, also of labels published before 0.2, which have fewer fields."""
        labels = None
        if "per_label" in record:
            labels = LabelStatistics.of([LabelRow(**row) for row in record["per_label"]], record["confusion"])
        metric, score = metric_of(record)
        known = {name: record[name] for name in ("truncated", "length", "also", "figures", "sd") if name in record}
        return cls(metric, score, record["count"], labels=labels, **known)


def metric_of(record: Mapping[str, Any]) -> tuple[str, float]:
    """Return name and value of the task's metric, from the JSON of metrics or a line of evaluations.jsonl.

    Labels of results published before 0.2 have an accuracy only.

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
    """Accuracy of labels, and their statistics.

    Args:
        gold: Gold label of every row.
        predicted: Predicted label, None if the answer has no legal one.
        labels: All labels of the task.

    Examples:
        >>> found = measure(["joy", "joy", "anger"], ["joy", None, "joy"], ["anger", "joy", "sadness"])
        >>> found.labels.correct, found.count, found.labels.parse_failures, found.labels.best_constant.label
        (1, 3, 1, 'joy')
        >>> found.labels.per_label[1].f1, round(found.labels.macro_f1, 4)
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
    confusion = {right: {label: pairs[right, label] for label in labels} for right in labels}
    statistics = LabelStatistics.of(rows, confusion)
    return Metrics("accuracy", statistics.accuracy, len(gold), labels=statistics)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
