"""View of a study's results and evidence: lookups, ordering and wording shared by tables and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev
from typing import NamedTuple, Protocol

from gatespace.evaluation.metrics import metric_of
from gatespace.evidence.records import ComparisonEvidence, StudyAnalysis, Summary
from gatespace.gating.coefficients import Gate
from gatespace.plugins import provided, provider
from gatespace.study.records import OUTCOMES, RunResult, Score, StudyResults


class Axis(NamedTuple):
    """An axis of comparison, in the words of a report."""

    title: str
    about: str
    """Subject of its verdict."""
    right: str
    """The second side, within a sentence about several points."""
    other: str
    """The second side, as a row label in figures."""
    text: str
    """What is compared, and what a difference means."""


AXES: Mapping[str, Axis] = {
    "restriction": Axis(
        title="Family against its one-channel restrictions",
        about="One-channel restrictions",
        right="their one-channel restrictions",
        other="restrictions",
        text="Each point of the family against the points that keep one of its channels at the same magnitude: "
        "entropy-only (-|a|, 0, 0, 0) and gap-only (0, 0, 0, d). They share a direction with EOPD and ToDi and are not "
        "those methods.",
    ),
    "isolation": Axis(
        title="Dynamic λ against a matched constant",
        about="Matched constant",
        right="a constant λ of the same mean",
        other="matched twin",
        text="Each point against a training at a constant λ: its mean over tokens (mean-matched), or its mean weighted "
        "by reverse KL (RKL-matched), which is what the loss feels. What remains is due to λ varying over tokens.",
    ),
    "control": Axis(
        title="Gate against its shuffled-λ control",
        about="Shuffled λ",
        right="the same values of λ at shuffled tokens",
        other="shuffled λ",
        text="Each gate against a training with the same values of λ in every step, assigned to tokens at random: "
        "what remains is due to where the gate puts λ.",
    ),
    "static": Axis(
        title="Family against a constant λ",
        about="Constant λ",
        right="a constant λ",
        other="constant λ",
        text="Each point against one constant λ for all.",
    ),
    "published": Axis(
        title="Family against published methods",
        about="Published methods",
        right="the published methods",
        other="published methods",
        text="Each point against published methods as their authors define them.",
    ),
    "gap": Axis(
        title="With the gap signal against without",
        about="Gap signal",
        right="the same points without the gap signal",
        other="same point, d = 0",
        text="Each point with a gap coefficient d against the same point without: on G2, and on the base of the task.",
    ),
}


def axis_of(axis: str, restriction: str | None) -> Axis:
    """Return the wording of an axis, or of one of its parts."""
    found = AXES[axis]
    if restriction is None:
        return found
    about = f"{restriction[0].upper()}{restriction[1:]}"
    if axis == "isolation":
        mean = "RKL-weighted mean" if restriction == "RKL-matched" else "mean"
        return found._replace(about=f"{about} constant", right=f"constants λ of the same {mean}")
    return found._replace(about=f"{about} restrictions", right=f"their {restriction} restrictions")


KINDS: Mapping[str, str] = {
    "point": "family",
    "restriction": "restriction",
    "static": "constant λ",
    "twin": "matched twin",
    "control": "shuffled-λ control",
    "published": "published method",
}
"""Kind of a run → its display name, in the order of tables."""


class Published(NamedTuple):
    """A published difference in pp: at the first seed, and over all seeds if it was replicated."""

    one_seed: float
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None


class Reference(Protocol):
    """Published results, shown next to a study's own; the port ``references``.

    An entry point names a function that returns one. Its name prefixes the column keys, e.g. ``paper_mean_pp``.
    Tasks are identified by the name of their data, e.g. ``tweeteval/hate``; a reference has nothing on other tasks.
    """

    seeds: tuple[int, ...]
    """The first is that of single-seed results."""
    note: str
    """Source of the numbers, as a sentence."""

    def accuracies(self, data: str) -> Mapping[str, Mapping[int, float]]:
        """Point → seed → test accuracy; empty for a task that the reference does not have."""

    def differences(self, data: str) -> Mapping[tuple[str, str], Published]:
        """(left, right) → difference."""

    def best(self, data: str) -> Mapping[str, float]:
        """Side, e.g. ``family`` or ``gap-only`` → its best test accuracy at the first seed."""


def installed_references() -> dict[str, Reference]:
    """Return name → reference of all installed packages."""
    return {name: provider("references", name)() for name in provided("references")}


@dataclass(frozen=True)
class View:
    """Results with their analysis. Accuracies are on the test split unless a split is named."""

    results: StudyResults
    analysis: StudyAnalysis
    all_references: Mapping[str, Reference] = field(default_factory=installed_references, repr=False)
    """Name → published results; shown only if they cover one of the study's tasks."""

    # ------------------------------------------------------------------ runs

    @cached_property
    def _runs(self) -> dict[tuple[str, str, int], RunResult]:
        return {(run.spec.task, run.spec.point, run.spec.seed): run for run in self.results.runs.values()}

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """All seeds: the sweep's, then the replication's."""
        return (*self.results.seeds, *(s for s in self.results.replication_seeds if s not in self.results.seeds))

    def run(self, task: str, point: str, seed: int) -> RunResult | None:
        """The run at a point and seed, or None."""
        return self._runs.get((task, point, seed))

    @cached_property
    def ordered(self) -> list[RunResult]:
        """All runs: tasks and seeds in study order, points of the family first."""
        return [
            run
            for task in self.results.tasks
            for point in self.points(task)
            for seed in self.seeds
            if (run := self.run(task, point, seed)) is not None
        ]

    def done(self, task: str, point: str) -> dict[int, RunResult]:
        """Seed → finished run."""
        found = {seed: self.run(task, point, seed) for seed in self.seeds}
        return {seed: run for seed, run in found.items() if run is not None and run.state == "done"}

    def scores(self, task: str, point: str, split: str = "test") -> dict[int, Score]:
        """Seed → score."""
        return {seed: run.scores[split] for seed, run in self.done(task, point).items() if split in run.scores}

    def validation(self, run: RunResult) -> dict[int, float]:
        """Step → validation accuracy, from the untrained student through evaluations during training to the end."""
        known = self.results.baselines.get(run.spec.task)
        found = {0: known.start["val"].metrics.score} if known is not None and "val" in known.start else {}
        found |= {check["step"]: metric_of(check)[1] for check in run.evaluations() if check.get("split") == "val"}
        if "val" in run.scores:
            found[run.chosen_step] = run.scores["val"].metrics.score
        return dict(sorted(found.items()))

    def sweep(self, task: str, point: str, split: str = "test") -> dict[int, Score]:
        """Seed → score, for the seeds of the sweep, which all points share."""
        return {seed: score for seed, score in self.scores(task, point, split).items() if seed in self.results.seeds}

    @cached_property
    def _kinds(self) -> dict[tuple[str, str], str]:
        return {(run.spec.task, run.spec.point): run.spec.kind for run in self.results.runs.values()}

    def kind(self, task: str, point: str) -> str:
        """Kind of a point, a key of `KINDS`."""
        return self._kinds[task, point]

    def points(self, task: str, *kinds: str) -> list[str]:
        """Labels of a task's points (of these kinds, if given), family first, otherwise in plan order."""
        wanted = [kind for kind in KINDS if not kinds or kind in kinds]
        return [point for kind in wanted for (of, point), own in self._kinds.items() if (of, own) == (task, kind)]

    def gate(self, task: str, point: str) -> Gate | None:
        """The gate of a point; None for twins, whose gate differs by seed, and points without one."""
        for seed in self.seeds:
            run = self.run(task, point, seed)
            if run is not None and run.spec.kind != "twin":
                found = run.gate or run.spec.gate
                return None if found is None else Gate(*found)
        return None

    @cached_property
    def counts(self) -> dict[str, int]:
        """State → number of runs."""
        states = [run.state for run in self.results.runs.values()]
        return {state: states.count(state) for state in ("done", "failed", "running", "waiting")}

    @property
    def is_partial(self) -> bool:
        """Whether part of the plan is missing."""
        return self.counts["done"] < len(self.results.runs) or bool(self.results.problems)

    def metric(self, task: str) -> str:
        """Name of a task's metric."""
        known = self.results.baselines.get(task)
        scores = [*known.start.values(), *known.teacher.values()] if known is not None else []
        scores += [score for run in self.results.done if run.spec.task == task for score in run.scores.values()]
        if scores:
            return scores[0].metric
        planned = self.results.config.tasks[task].task.get("text")
        return str(planned.get("metric", "exact")) if planned else OUTCOMES[self.results.config.outcome]

    @cached_property
    def metrics(self) -> dict[str, str]:
        """Task → metric if tasks have different ones, else empty."""
        found = {task: self.metric(task) for task in self.results.tasks}
        return found if len({*found.values()}) > 1 else {}

    @cached_property
    def metric_name(self) -> str:
        """Name of the common metric of all tasks; score if they differ."""
        return "score" if self.metrics else self.metric(self.results.tasks[0])

    def said(self, task: str) -> str:
        """A task's name, with its metric if tasks have different ones."""
        return f"{task} ({self.metrics[task]})" if self.metrics else task

    def labelled(self) -> list[str]:
        """Names of the tasks with labels."""
        planned = self.results.config.tasks
        return [task for task in self.results.tasks if not planned[task].task.get("text")]

    def plain(self, metric: str) -> str:
        """Name of the metric of single responses: a study's outcome on labels may be another."""
        return "accuracy" if metric in OUTCOMES.values() else metric

    # ------------------------------------------------------------------ comparisons

    def comparisons(self, axis: str, task: str | None = None, *, comparable: bool = True) -> list[ComparisonEvidence]:
        """Comparisons of an axis, in plan order."""
        return [
            found
            for found in self.analysis.comparisons
            if found.axis == axis and task in (None, found.task) and (not comparable or found.all is not None)
        ]

    @cached_property
    def axes(self) -> list[str]:
        """The study's axes, in the order of `AXES`."""
        present = {comparison.axis for comparison in self.results.comparisons}
        return [axis for axis in AXES if axis in present]

    def sampling_se(self, task: str) -> float | None:
        """Binomial SE of one model's accuracy on the test split, in pp, at the mean accuracy of the family's runs."""
        scores = [s for p in self.points(task, "point") for s in self.scores(task, p).values()]
        if not scores or scores[0].best_constant is None:
            return None  # not a share of right answers
        share = fmean(score.accuracy for score in scores)
        return 100 * math.sqrt(share * (1 - share) / scores[0].count)

    # ------------------------------------------------------------------ published results

    def data(self, task: str) -> str:
        """Name of a task's data."""
        baseline = self.results.baselines.get(task)
        return baseline.name if baseline is not None else str(self.results.config.tasks[task].task.get("name", ""))

    @cached_property
    def references(self) -> dict[str, Reference]:
        """Name → published results on at least one of the study's tasks."""
        data = [self.data(task) for task in self.results.tasks]
        return {name: found for name, found in self.all_references.items() if any(map(found.accuracies, data))}


def confidence_text(confidence: float) -> str:
    """Return e.g. 95 %."""
    return f"{100 * confidence:.4g} %"


def leaves_out_zero(found: Summary) -> bool:
    """Whether the interval of a mean excludes 0."""
    return found.low is not None and found.high is not None and (found.low > 0 or found.high < 0)


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean, or None if empty."""
    return fmean(values) if values else None


def sd_of(values: Sequence[float]) -> float | None:
    """Return the sample SD, or None for fewer than two values."""
    return stdev(values) if len(values) > 1 else None
