"""Warnings: signs of collapse while a run trains (alarms), and results that are probably bad (concerns).

Each says what was seen and what usually helps. They depend on what a run has stored alone, so a killed and resumed run
has the same ones. Alarms about the student compare the last steps with a threshold and with as many steps before
them: a student that has yet to learn the answer format is beyond most thresholds, and none is raised while it improves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean, variance
from types import MappingProxyType
from typing import Any, NamedTuple

from gatespace.config import TrainConfig
from gatespace.config.sections import ALARMS
from gatespace.errors import RunError
from gatespace.evaluation.metrics import Metrics, metric_of, wilson
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
CERTAIN = 0.05
"""Nats. Below this entropy the teacher is certain, and so may the student be."""
_SMALLER = "Usually a smaller learning rate helps, or warm-up steps"
_TOO_SMALL = "Usually the learning rate is too small: try ten times as much with --lr, or more steps."
_TOO_LARGE = "Usually the learning rate is too large: try a tenth of it with --lr, or warm-up steps."


class Concern(NamedTuple):
    """A warning: its kind in a few words, what was observed, and what usually helps."""

    kind: str
    seen: str
    helps: str

    def __str__(self) -> str:
        return f"{self.seen} {self.helps}"


_UNCHANGED = Concern(
    "nothing gained",
    "No evaluation during training was better than the one before it, whose weights are kept.",
    "Usually a smaller learning rate helps, more steps, or a teacher that is better than the student.",
)


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
        for concern in _evaluation(split, metrics, aucs.get(split)):
            found.setdefault(concern.kind, concern)
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


def _evaluation(split: str, metrics: Metrics, auc: float | None) -> Iterator[Concern]:
    if (labels := metrics.labels) is None:
        if metrics.truncated is not None and metrics.truncated >= CUT_OFF:
            yield Concern(
                "cut off",
                f"{_percent(metrics.truncated)} of the responses on {split} are ended by evaluation.max_new_tokens.",
                "Usually a larger cap helps, task.text.stop, or a teacher that ends its own responses.",
            )
        return
    count, most, best = metrics.count, max(labels.per_label, key=lambda row: row.predicted), labels.best_constant
    if labels.parse_failures >= NO_LABEL * count:
        yield Concern(
            "no label",
            f"{labels.parse_failures} of {count} answers on {split} have no legal label.",
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
    if labels.accuracy < best.accuracy:
        yield Concern(
            "below the best constant",
            f"Accuracy on {split} is {_percent(labels.accuracy)}; always predicting {best.label!r} scores "
            f"{_percent(best.accuracy)}.",
            "Usually more steps or another learning rate help; also check that the teacher beats this baseline.",
        )
    if auc is not None and auc < PRIOR_ONLY:
        yield Concern(
            "label prior only",
            f"Macro AUC on {split} is {_percent(auc)}, and 50 % is chance.",
            "The model has learned the label prior only: how frequent labels are, not which text has which. "
            "Differences in accuracy are changes of that prior. Train longer, or use more prompts or another learning "
            "rate.",
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


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ---------------------------------------------------------------------------------------------------- alarms


class AlarmError(RunError):
    """An alarm of `alarms.stop_on` ended the run, after a checkpoint."""

    exit_code = 3


class Alarm(NamedTuple):
    """A raised alarm, as in alarms.jsonl."""

    step: int
    alarm: str
    value: float
    """Over the last steps."""
    threshold: float
    seen: str
    helps: str

    def __str__(self) -> str:
        return f"alarm {self.alarm}: {self.seen} {self.helps}"


class Alarms:
    """Checks the records of metrics.jsonl, one step at a time.

    Args:
        config: Has the thresholds, and how often metrics are measured that are not in every record.
        records: Of steps already done, whose alarms were raised then.
    """

    def __init__(self, config: TrainConfig, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._settings = config.alarms
        self._spans = dict.fromkeys(ALARMS, self._settings.window)
        for name, rule in _RULES.items():
            if rule.sampled:  # a window without a measurement says nothing
                self._spans[name] = max(self._spans[name], config.trace.tokens_every)
        self._first: list[Mapping[str, Any]] = []
        self._last: deque[Mapping[str, Any]] = deque(maxlen=2 * max(self._spans.values()))
        self.on: dict[str, Alarm] = {}
        """Raised and still beyond the threshold."""
        for record in records:
            self.see(record)

    def see(self, record: Mapping[str, Any]) -> list[Alarm]:
        """Alarms raised by a step. One is raised again only after it was back within its threshold."""
        self._last.append(record)
        if len(self._first) < self._settings.window:
            self._first.append(record)
        raised: list[Alarm] = []
        for name, rule in _RULES.items():
            limit: float | None = getattr(self._settings, name)
            span, step = self._spans[name], record["step"]
            if limit is None or (step < 2 * span and not rule.at_once):
                continue
            now, before = (self._window(step - ago, span) for ago in (span, 2 * span))
            first = _Window(self._first)
            value = rule.value(now, first)
            earlier = value if rule.at_once else rule.value(before, first)
            if value is None or earlier is None:
                continue
            sign = 1 if rule.high else -1
            if sign * value < sign * limit:
                self.on.pop(name, None)
            elif name not in self.on and sign * value >= sign * earlier:
                measured = now.steps(rule.column)
                when = f"Steps {measured[0]} to {measured[-1]}" if len(measured) > 1 else f"Step {measured[0]}"
                seen = f"{when}: {rule.seen.format(percent=f'{100 * value:.0f} %', now=now, first=first)}."
                self.on[name] = Alarm(step, name, value, limit, seen, rule.helps)
                raised.append(self.on[name])
        return raised

    def withdraw(self, evaluations: Iterable[Metrics]) -> str:
        """Withdraw `legal` if all final evaluations have more legal answers than its threshold; returns why, or ""."""
        labels = [(metrics.count, metrics.labels) for metrics in evaluations if metrics.labels is not None]
        if "legal" not in self.on or not labels or min(one.parsed for _, one in labels) <= self.on["legal"].threshold:
            return ""
        del self.on["legal"]
        rows, failures = sum(count for count, _ in labels), sum(one.parse_failures for _, one in labels)
        return f"alarm legal withdrawn: {rows - failures} of {rows} final answers are legal"

    def _window(self, after: int, span: int) -> _Window:
        return _Window([record for record in self._last if after < record["step"] <= after + span])


# ---------------------------------------------------------------------------------------------------- the rules


@dataclass(frozen=True)
class _Window:
    """A span of steps."""

    records: Sequence[Mapping[str, Any]]

    def __getitem__(self, name: Any) -> Any:
        """Mean of a metric, for the texts of rules."""
        return self.mean(name)

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the records with it."""
        values = [record[name] for record in self.records if record.get(name) is not None]
        return fsum(values) / len(values) if values else None

    def steps(self, name: str) -> list[int]:
        """Steps whose record has the metric."""
        return [record["step"] for record in self.records if record.get(name) is not None]

    @property
    def legal(self) -> str:
        """Legal answers as counts."""
        records = [record for record in self.records if record.get("legal_answers") is not None]
        legal = sum(round(record["legal_answers"] * record["rows"]) for record in records)
        return f"{legal} of {sum(record['rows'] for record in records)}"


class _Rule(NamedTuple):
    value: Callable[[_Window, _Window], float | None]
    """(Window, window of the run's first steps) → the value; None if unknown."""
    column: str
    """The metric whose records are counted."""
    seen: str
    """Describes a window in words, by its `percent`, the window `now` and that of the `first` steps."""
    helps: str
    high: bool = True
    """Whether large values are bad."""
    sampled: bool = False
    """Whether it is measured only every `trace.tokens_every` steps."""
    at_once: bool = False
    """Whether it is raised from the first step on, without a comparison with earlier steps."""


def _truncated(window: _Window, first: _Window) -> float | None:
    ended = window.mean("ended")
    return None if ended is None else 1 - ended


def _length(window: _Window, first: _Window) -> float | None:
    """Factor by which responses are longer than at first, or shorter if most ended then."""
    now, before, ended = window.mean("response_length"), first.mean("response_length"), first.mean("ended")
    if not now or not before:
        return None
    return max(now / before, before / now) if ended is not None and ended >= 0.5 else now / before


def _entropy(window: _Window, first: _Window) -> float | None:
    student, teacher = window.mean("student_entropy_nats"), window.mean("teacher_entropy_nats")
    return None if student is None or teacher is None or teacher < CERTAIN else student / teacher


def _uniform(window: _Window, first: _Window) -> float | None:
    """Mean h, or the share of ln V that the entropy has, whichever is less; the latter may be unmeasured.

    h alone is near 1 for a teacher that is honestly uncertain between a dozen tokens, e.g. digits.
    """
    h, share = window.mean("h"), window.mean("teacher_entropy_share")
    return h if h is None or share is None else min(h, share)


def _column(name: str) -> Callable[[_Window, _Window], float | None]:
    return lambda window, first: window.mean(name)


_RULES: Mapping[str, _Rule] = {
    "teacher": _Rule(
        _uniform,
        "h",
        "the teacher's distribution is nearly uniform (mean h {now[h]:.2f}, where 1 is uniform): there is nothing to "
        "learn from it",
        "Usually its weights were not loaded or were damaged, or it was trained until it diverged: evaluate it "
        "(`gatespace evaluate`), and use another teacher.",
        sampled=True,
        at_once=True,
    ),
    "truncated": _Rule(
        _truncated,
        "ended",
        "{percent} of the responses were cut off at rollout.max_new_tokens",
        "Usually a larger rollout.max_new_tokens helps where right answers are that long, or task.text.stop where free "
        "text goes on after them. A student that has not learned to end needs more steps, another learning rate, or "
        "right answers among its responses (rollout.from).",
    ),
    "length": _Rule(
        _length,
        "response_length",
        "responses had {now[response_length]:.1f} tokens, and {first[response_length]:.1f} in the first steps",
        f"{_SMALLER}. Where the teacher answers like that nothing is wrong: alarms.length: null.",
    ),
    "entropy": _Rule(
        _entropy,
        "student_entropy_nats",
        "the student's entropy was {now[student_entropy_nats]:.3g} nats, and the teacher's "
        "{now[teacher_entropy_nats]:.3g} at the same tokens: it has settled on few responses",
        f"{_SMALLER}, or a gate of smaller λ: it is reverse KL that narrows a student.",
        high=False,
        sampled=True,
    ),
    "overlap": _Rule(
        _column("top_k_overlap"),
        "top_k_overlap",
        "student and teacher had {percent} of their top tokens in common",
        "A teacher teaches little about responses that it would never write. Usually it helps to begin with some right "
        "answers or some of the teacher's (rollout.from), with a student that was taught the form of an answer, or "
        "with a smaller learning rate. Both models need the same chat template.",
        high=False,
        sampled=True,
    ),
    "repeated": _Rule(
        _column("repeated_ngrams"),
        "repeated_ngrams",
        "{percent} of the 4-grams of a response occurred in it before",
        f"{_SMALLER}, or a smaller rollout.max_new_tokens: a teacher finds repetition probable once it has begun.",
    ),
    "legal": _Rule(
        _column("legal_answers"),
        "legal_answers",
        "{now.legal} responses had a legal answer",
        "The answer format is not learned, or was lost. Usually more steps help, a smaller learning rate, or some "
        "right answers among the responses (rollout.from).",
        high=False,
    ),
}
assert tuple(_RULES) == ALARMS
