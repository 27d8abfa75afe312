"""Alarms: signs of training collapse in a run's metrics, and what usually helps.

They depend on the logged records alone, so a resumed run raises the same ones. Those about the student compare the last
steps with a threshold and with as many steps before them: a student that has yet to learn the answer format is beyond
most thresholds, and no alarm is raised while it improves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from typing import Any, NamedTuple

from gatespace.config import TrainConfig
from gatespace.config.sections import ALARMS
from gatespace.errors import RunError
from gatespace.evaluation import Metrics

CERTAIN = 0.05
"""Nats. Below this entropy the teacher is certain, and so may the student be."""
_SMALLER = "Usually a smaller learning rate helps, or warm-up steps"


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
                seen = f"{when}: {rule.seen(value, now, first)}."
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


class _Window(NamedTuple):
    """A span of steps."""

    records: Sequence[Mapping[str, Any]]

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the records with it."""
        values = [record[name] for record in self.records if record.get(name) is not None]
        return fsum(values) / len(values) if values else None

    def steps(self, name: str) -> list[int]:
        """Steps whose record has the metric."""
        return [record["step"] for record in self.records if record.get(name) is not None]

    def counted(self, name: str) -> str:
        """A share of responses as counts."""
        records = [record for record in self.records if record.get(name) is not None]
        share = sum(round(record[name] * record["rows"]) for record in records)
        return f"{share} of {sum(record['rows'] for record in records)}"


class _Rule(NamedTuple):
    value: Callable[[_Window, _Window], float | None]
    """(Window, window of the run's first steps) → the value; None if unknown."""
    column: str
    """The metric whose records are counted."""
    seen: Callable[[float, _Window, _Window], str]
    """Describes the value of a window in words."""
    helps: str
    high: bool = True
    """Whether large values are bad."""
    sampled: bool = False
    """Whether it is measured only every `trace.tokens_every` steps."""
    at_once: bool = False
    """Whether it is raised from the first step on, without a comparison with earlier steps."""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


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
        lambda value, now, first: (
            f"the teacher's distribution is nearly uniform (mean h {now.mean('h'):.2f}, where 1 is uniform): there is "
            "nothing to learn from it"
        ),
        "Usually its weights were not loaded or were damaged, or it was trained until it diverged: evaluate it "
        "(`gatespace evaluate`), and use another teacher.",
        sampled=True,
        at_once=True,
    ),
    "truncated": _Rule(
        _truncated,
        "ended",
        lambda value, now, first: f"{_percent(value)} of the responses were cut off at rollout.max_new_tokens",
        "Usually a larger rollout.max_new_tokens helps where right answers are that long, or task.text.stop where free "
        "text goes on after them. A student that has not learned to end needs more steps, another learning rate, or "
        "right answers among its responses (rollout.from).",
    ),
    "length": _Rule(
        _length,
        "response_length",
        lambda value, now, first: (
            f"responses had {now.mean('response_length'):.1f} tokens, and {first.mean('response_length'):.1f} in the "
            "first steps"
        ),
        f"{_SMALLER}. Where the teacher answers like that nothing is wrong: alarms.length: null.",
    ),
    "entropy": _Rule(
        _entropy,
        "student_entropy_nats",
        lambda value, now, first: (
            f"the student's entropy was {now.mean('student_entropy_nats'):.3g} nats, and the teacher's "
            f"{now.mean('teacher_entropy_nats'):.3g} at the same tokens: it has settled on few responses"
        ),
        f"{_SMALLER}, or a gate of smaller λ: it is reverse KL that narrows a student.",
        high=False,
        sampled=True,
    ),
    "overlap": _Rule(
        _column("top_k_overlap"),
        "top_k_overlap",
        lambda value, now, first: f"student and teacher had {_percent(value)} of their top tokens in common",
        "A teacher teaches little about responses that it would never write. Usually it helps to begin with some right "
        "answers or some of the teacher's (rollout.from), with a student that was taught the form of an answer, or "
        "with a smaller learning rate. Both models need the same chat template.",
        high=False,
        sampled=True,
    ),
    "repeated": _Rule(
        _column("repeated_ngrams"),
        "repeated_ngrams",
        lambda value, now, first: f"{_percent(value)} of the 4-grams of a response occurred in it before",
        f"{_SMALLER}, or a smaller rollout.max_new_tokens: a teacher finds repetition probable once it has begun.",
    ),
    "legal": _Rule(
        _column("legal_answers"),
        "legal_answers",
        lambda value, now, first: f"{now.counted('legal_answers')} responses had a legal answer",
        "The answer format is not learned, or was lost. Usually more steps help, a smaller learning rate, or some "
        "right answers among the responses (rollout.from).",
        high=False,
    ),
}
assert tuple(_RULES) == ALARMS
