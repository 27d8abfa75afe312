"""Warnings about results that are probably bad, and what usually helps.

Computed from what a run has stored, so that a killed and resumed run ends with the same warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance
from types import MappingProxyType
from typing import Any, NamedTuple

from gatespace.evaluation.metrics import LabelStatistics, Metrics, metric_of, wilson
from gatespace.tasks.data import SPLITS

ONE_ANSWER = 0.9
"""Share of texts from which a single predicted label is no classification, unless the gold labels are as uniform."""
NO_LABEL = 0.5
CUT_OFF = 0.5
"""Share of truncated responses from which to warn."""
SAME = 0.01
"""Answers count as unchanged if neither accuracy nor any label's share moved by more."""
PRIOR_ONLY = 0.6
"""Macro AUC below which label probabilities hardly depend on the text; chance is 0.5."""
HUGE_RATE = 0.1
"""AdamW moves every weight by about the learning rate per step, and a network's weights are smaller than this."""
TEACHER_ALARM = "alarm teacher"
FEW_ROWS = 50
"""Validation rows below which a choice of weights is mostly noise."""
_ROSE = 2.0
_STEPS = 10
"""Minimum steps to call the loss flat."""


class Concern(NamedTuple):
    """A warning: its kind in a few words, what was observed, and what usually helps."""

    kind: str
    seen: str
    helps: str

    def __str__(self) -> str:
        return f"{self.seen} {self.helps}"


class Answers(NamedTuple):
    """Summary of a model's answers on a split, for comparison: accuracy, and label → share of texts.

    For free text: mean score, and mean response length instead of shares.
    """

    accuracy: float
    given: Mapping[str, float]

    @classmethod
    def of(cls, metrics: Metrics) -> Answers:
        """Build from an evaluation's metrics."""
        if metrics.labels is None:
            return cls(metrics.score, {} if metrics.length is None else {"length": metrics.length})
        return cls(metrics.score, {row.label: row.predicted / metrics.count for row in metrics.labels.per_label})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Answers:
        """Build from a line of evaluations.jsonl."""
        score = metric_of(record)[1]
        if "predicted" not in record:
            return cls(score, {"length": record["length"]} if "length" in record else {})
        return cls(score, {label: rows / record["count"] for label, rows in record["predicted"].items()})

    def same(self, other: Answers) -> bool:
        """Whether both are equal within `SAME`."""
        if not (self.given and other.given):  # not recorded by earlier releases
            return False
        moved = [abs(share - other.given.get(label, 0.0)) for label, share in self.given.items()]
        return max(abs(self.accuracy - other.accuracy), *moved) <= SAME


def concerns(
    evaluations: Mapping[str, Metrics],
    *,
    start: Mapping[str, Answers] | None = None,
    steps: Sequence[Mapping[str, Any]] = (),
    unchanged: bool = False,
    aucs: Mapping[str, float | None] = MappingProxyType({}),
) -> list[Concern]:
    """Return the warnings about a trained model, at most one per kind, for the first split that shows it.

    Args:
        evaluations: Split → metrics.
        start: Split → answers before training, if known.
        steps: Records of the run's metrics.jsonl.
        unchanged: Whether the weights are those of before training, the best on validation.
        aucs: Split → macro AUC of the label probabilities, if known.
    """
    found: dict[str, Concern] = {}
    gained = moved = False
    for split in sorted(evaluations, key=SPLITS.index):
        metrics = evaluations[split]
        labels = metrics.labels
        for concern in _responses(split, metrics) if labels is None else _evaluation(split, metrics.count, labels):
            found.setdefault(concern.kind, concern)
        if (auc := aucs.get(split)) is not None and auc < PRIOR_ONLY:
            seen = f"Macro AUC on {split} is {_percent(auc)}, and 50 % is chance."
            found.setdefault("label prior only", Concern("label prior only", seen, _PRIOR))
        if (before := (start or {}).get(split)) is not None:
            gained |= metrics.score > before.accuracy + SAME
            moved |= not Answers.of(metrics).same(before)
            for concern in [_UNCHANGED] if unchanged else _against_start(split, metrics, before):
                found.setdefault(concern.kind, concern)
    for concern in _training(steps, gained=gained, moved=moved, in_doubt=bool(found)):
        found.setdefault(concern.kind, concern)
    if "diverged" in found:  # its advice is the opposite, and it explains the others
        found.pop("nothing learned", None)
    if "label prior only" in found:  # the cause of both
        found.pop("one label", None)
        found.pop("below the best constant", None)
    return sorted(found.values(), key=lambda one: (one.kind != "diverged", one.kind != "label prior only"))


def start_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Answers]:
    """Return split → answers before the first step, from evaluations.jsonl."""
    return {record["split"]: Answers.from_record(record) for record in records if record["step"] == 0}


def of_teacher(split: str, teacher: float, start: float, metric: str = "accuracy") -> list[Concern]:
    """Warn if the teacher's metric is not above that of the untrained student."""
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


def of_choice(rows: int | None) -> list[Concern]:
    """Warn if fewer than `FEW_ROWS` validation rows chose the weights (None: nothing was chosen)."""
    if rows is None or rows >= FEW_ROWS:
        return []
    low, high = wilson(rows / 2, rows)
    return [
        Concern(
            "few validation rows",
            f"{rows} validation rows chose the weights: a score on so few is uncertain by up to "
            f"±{50 * (high - low):.0f} points.",
            f"Use at least {FEW_ROWS} validation rows, or keep the last weights (checkpoint.select: last, no "
            "evaluation.patience).",
        )
    ]


def _evaluation(split: str, count: int, metrics: LabelStatistics) -> Iterator[Concern]:
    most, best = max(metrics.per_label, key=lambda row: row.predicted), metrics.best_constant
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
            f"Accuracy on {split} is {_percent(metrics.accuracy)}; always predicting {best.label!r} scores "
            f"{_percent(best.accuracy)}.",
            "Usually more steps or another learning rate help; also check that the teacher beats this baseline.",
        )


def _responses(split: str, metrics: Metrics) -> Iterator[Concern]:
    if metrics.truncated is not None and metrics.truncated >= CUT_OFF:
        yield Concern(
            "cut off",
            f"{_percent(metrics.truncated)} of the responses on {split} are ended by evaluation.max_new_tokens.",
            "Usually a larger cap helps, task.text.stop, or a teacher that ends its own responses.",
        )


def _against_start(split: str, metrics: Metrics, before: Answers) -> Iterator[Concern]:
    now, metric = Answers.of(metrics), metrics.metric
    name = metric if metric != "accuracy" else "Accuracy"
    if now.same(before):
        yield Concern(
            "nothing learned",
            f"The answers on {split} are those of before training: {metric} {_percent(before.accuracy)} then, "
            f"{_percent(now.accuracy)} now.",
            _TOO_SMALL,
        )
    elif before.accuracy > wilson(now.accuracy * metrics.count, metrics.count)[1]:  # more than chance explains
        yield Concern(
            "below the start",
            f"{name} on {split} is {_percent(now.accuracy)}, below the {_percent(before.accuracy)} before training.",
            "Usually a smaller learning rate helps, a teacher that is better than that, or for a method that learns "
            "from sampled tokens more responses per prompt (rollout.per_prompt).",
        )


def _training(steps: Sequence[Mapping[str, Any]], *, gained: bool, moved: bool, in_doubt: bool) -> Iterator[Concern]:
    """Warnings from the training losses and the learning rate."""
    losses = [float(record["loss"]) for record in steps if record.get("loss") is not None]
    if not losses:
        return
    third = max(1, len(losses) // 3)
    first, last = losses[:third], losses[-third:]
    rate = max(record.get("lr") or 0.0 for record in steps)
    # If the student gained, a rising loss is no divergence: TAID's target moves away from the student.
    if not gained and losses[0] > 0 and fmean(last) > _ROSE * losses[0]:
        seen = f"The loss was {losses[0]:.3g} in the first step and {fmean(last):.3g} in the last third of the steps."
        yield Concern("diverged", seen, _TOO_LARGE)
    elif in_doubt and (huge := of_rate(rate)):
        yield huge
    elif len(losses) >= _STEPS and not moved and _stands_still(first, last):  # a sampled loss may be flat in any case
        seen = f"The loss has not moved: {fmean(first):.3g} in the first third of steps, {fmean(last):.3g} in the last."
        yield Concern("nothing learned", seen, _TOO_SMALL)


def of_rate(rate: float) -> Concern | None:
    """A warning of a learning rate that is larger than a network's weights."""
    seen = f"The learning rate is {rate:g}, and AdamW moves every weight by about as much in a step."
    helps = "Typical values: 1e-6 (large models) to 3e-3 (tiny ones)."
    return Concern("diverged", seen, helps) if rate >= HUGE_RATE else None


def _stands_still(first: Sequence[float], last: Sequence[float]) -> bool:
    moved = abs(fmean(last) - fmean(first))
    error = ((variance(first) + variance(last)) / len(first)) ** 0.5
    return moved <= 2 * error and moved <= 0.1 * abs(fmean(first))


_PRIOR = (
    "The model has learned the label prior only: how frequent labels are, not which text has which. Differences in "
    "accuracy are changes of that prior. Train longer, or use more prompts or another learning rate."
)
_TOO_SMALL = "Usually the learning rate is too small: try ten times as much with --lr, or more steps."
_TOO_LARGE = "Usually the learning rate is too large: try a tenth of it with --lr, or warm-up steps."


_UNCHANGED = Concern(
    "nothing gained",
    "No evaluation during training was better than the one before it, whose weights are kept.",
    "Usually a smaller learning rate helps, more steps, or a teacher that is better than the student.",
)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
