"""What is wrong with a result that looks like any other, and what usually helps.

The numbers are those that a run has stored, so that a run that was killed and resumed ends with the same warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple

from gatespace.evaluation.metrics import Metrics
from gatespace.evaluation.text import TextMetrics
from gatespace.tasks.data import SPLITS

ONE_ANSWER = 0.9
"""From this share of the texts on, one label for them is no classification, unless the texts are of one label too."""
NO_LABEL = 0.5
CUT_OFF = 0.5
"""From this share of the responses on, the cap ends them and not the model."""
SAME = 0.01
"""Answers are the same if neither accuracy nor any share of a label has moved by more."""
HUGE_RATE = 0.1
"""AdamW moves every weight by about its learning rate in a step, and the weights of a network are smaller than this."""
_ROSE = 2.0
_STEPS = 10
"""In fewer the loss cannot be seen to stand still."""


class Concern(NamedTuple):
    """A warning: its kind in a few words, what was seen, and what usually helps."""

    kind: str
    seen: str
    helps: str

    def __str__(self) -> str:
        return f"{self.seen} {self.helps}"


class Answers(NamedTuple):
    """What a model answered to a split, as far as it is compared: the accuracy, and label → share of the texts.

    Of free text, the mean score, and the mean length of a response in place of shares.
    """

    accuracy: float
    given: Mapping[str, float]

    @classmethod
    def of(cls, metrics: Metrics | TextMetrics) -> Answers:
        """From an evaluation."""
        if isinstance(metrics, TextMetrics):
            return cls(metrics.score, {"length": metrics.length})
        return cls(metrics.accuracy, {row.label: row.predicted / metrics.count for row in metrics.per_label})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Answers:
        """From a line of evaluations.jsonl."""
        if "score" in record:
            return cls(record["score"], {"length": record["length"]})
        given = {label: rows / record["count"] for label, rows in record.get("predicted", {}).items()}
        return cls(record["accuracy"], given)

    def same(self, other: Answers) -> bool:
        """Whether they are the same, as far as can be seen here."""
        if not (self.given and other.given):  # an earlier release did not record it
            return False
        moved = [abs(share - other.given.get(label, 0.0)) for label, share in self.given.items()]
        return max(abs(self.accuracy - other.accuracy), *moved) <= SAME


def concerns(
    evaluations: Mapping[str, Metrics | TextMetrics],
    *,
    start: Mapping[str, Answers] | None = None,
    steps: Sequence[Mapping[str, Any]] = (),
) -> list[Concern]:
    """The warnings about a trained model, at most one of a kind: the first split that shows it is named.

    Args:
        evaluations: Split → what it has come to.
        start: Split → what the model answered before it was trained, where that is known.
        steps: The run's metrics.jsonl.
    """
    found: dict[str, Concern] = {}
    gained = False
    for split in sorted(evaluations, key=SPLITS.index):
        metrics = evaluations[split]
        for concern in _responses(split, metrics) if isinstance(metrics, TextMetrics) else _evaluation(split, metrics):
            found.setdefault(concern.kind, concern)
        if (before := (start or {}).get(split)) is not None:
            gained |= metrics.score > before.accuracy + SAME
            for concern in _against_start(split, Answers.of(metrics), before, metrics.metric):
                found.setdefault(concern.kind, concern)
    for concern in _training(steps, gained=gained, in_doubt=bool(found)):
        found.setdefault(concern.kind, concern)
    if "diverged" in found:  # which asks for the opposite, and explains the others
        found.pop("nothing learned", None)
    return sorted(found.values(), key=lambda concern: concern.kind != "diverged")


def start_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Answers]:
    """Split → the answers before the first step, from evaluations.jsonl."""
    return {record["split"]: Answers.from_record(record) for record in records if record["step"] == 0}


def of_teacher(split: str, teacher: float, start: float, metric: str = "accuracy") -> list[Concern]:
    """Whether a teacher knows more than the student has known without it, by what their metric has come to."""
    if teacher > start:
        return []
    seen = f"On {split} the teacher is right in {_percent(teacher)}, the student before training in {_percent(start)}."
    if metric != "accuracy":
        seen = f"On {split} the teacher has {metric} {teacher:.3f}, the student before training {start:.3f}."
    return [
        Concern(
            "teacher no better than the student",
            seen,
            "There is little to learn from it: teach it longer or on more rows, or use another teacher.",
        )
    ]


def _evaluation(split: str, metrics: Metrics) -> Iterator[Concern]:
    count, most, best = metrics.count, max(metrics.per_label, key=lambda row: row.predicted), metrics.best_constant
    if metrics.parse_failures >= NO_LABEL * count:
        yield Concern(
            "no label",
            f"{metrics.parse_failures} of {count} answers on {split} have no legal label.",
            "The answer format is not learned yet: usually another learning rate or more steps help, or a larger "
            "evaluation.max_new_tokens where labels are long.",
        )
    elif most.predicted >= ONE_ANSWER * count and best.accuracy < ONE_ANSWER:
        yield Concern(
            "one label",
            f"{most.predicted} of {count} texts of {split} get the label {most.label!r}, which is right for "
            f"{most.correct} of them.",
            "The model does not distinguish texts: usually another learning rate or more steps help, or training rows "
            "in which no label dominates.",
        )
    if metrics.accuracy < best.accuracy:
        yield Concern(
            "below the best constant",
            f"Accuracy on {split} is {_percent(metrics.accuracy)}, below the {_percent(best.accuracy)} of giving "
            f"{best.label!r} to every text.",
            "Usually more steps or another learning rate help, and a teacher that is itself above it.",
        )


def _responses(split: str, metrics: TextMetrics) -> Iterator[Concern]:
    if metrics.truncated >= CUT_OFF:
        yield Concern(
            "cut off",
            f"{_percent(metrics.truncated)} of the responses on {split} are ended by evaluation.max_new_tokens.",
            "Usually a larger cap helps, task.text.stop, or a teacher that ends its own responses.",
        )


def _against_start(split: str, now: Answers, before: Answers, metric: str) -> Iterator[Concern]:
    name = metric if metric != "accuracy" else "Accuracy"
    if now.same(before):
        yield Concern(
            "nothing learned",
            f"The answers on {split} are those of before training: {metric} {_percent(before.accuracy)} then, "
            f"{_percent(now.accuracy)} now.",
            _TOO_SMALL,
        )
    elif now.accuracy < before.accuracy:
        yield Concern(
            "below the start",
            f"{name} on {split} is {_percent(now.accuracy)}, below the {_percent(before.accuracy)} before training.",
            "Usually a smaller learning rate helps, or a teacher that is better than that.",
        )


def _training(steps: Sequence[Mapping[str, Any]], *, gained: bool, in_doubt: bool) -> Iterator[Concern]:
    """What the losses of the steps show, and whether the learning rate can be right at all."""
    losses = [float(record["loss"]) for record in steps if record.get("loss") is not None]
    if not losses:
        return
    third = max(1, len(losses) // 3)
    first, last = losses[:third], losses[-third:]
    rate = max(record.get("lr") or 0.0 for record in steps)
    if losses[0] > 0 and fmean(last) > _ROSE * losses[0]:
        seen = f"The loss was {losses[0]:.3g} in the first step and {fmean(last):.3g} in the last third of the steps."
        yield Concern("diverged", seen, _TOO_LARGE)
    elif rate >= HUGE_RATE and in_doubt:
        seen = f"The learning rate is {rate:g}, and AdamW moves every weight by about as much in a step."
        yield Concern("diverged", seen, "Usual are 1e-6 for large models to 3e-3 for tiny ones.")
    elif len(losses) >= _STEPS and not gained and _stands_still(first, last):
        seen = f"The loss has not moved: {fmean(first):.3g} in the first third of steps, {fmean(last):.3g} in the last."
        yield Concern("nothing learned", seen, _TOO_SMALL)


def _stands_still(first: Sequence[float], last: Sequence[float]) -> bool:
    moved = abs(fmean(last) - fmean(first))
    error = ((variance(first) + variance(last)) / len(first)) ** 0.5
    return moved <= 2 * error and moved <= 0.1 * abs(fmean(first))


_TOO_SMALL = "Usually the learning rate is too small: try ten times as much with --lr, or more steps."
_TOO_LARGE = "Usually the learning rate is too large: try a tenth of it with --lr, or warm-up steps."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
