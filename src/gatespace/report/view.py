"""A study's results and evidence, arranged for readers: look-ups, orders and names that tables and figures share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev

from gatespace.evidence.records import ComparisonEvidence, Paired, StudyAnalysis
from gatespace.gating.coefficients import Gate
from gatespace.study.records import RunResult, Score, StudyResults

__all__ = ["AXES", "AXIS_NAMES", "View", "mean_of", "sd_of"]

AXES = ("restriction", "isolation", "control", "static", "published", "gap")
AXIS_NAMES: Mapping[str, str] = {
    "restriction": "Family against its one-channel restrictions",
    "isolation": "Dynamic λ against a mean-matched constant",
    "control": "Gate against its shuffled-λ control",
    "static": "Family against a constant λ",
    "published": "Family against published methods",
    "gap": "With the gap signal against without",
}
KINDS = ("point", "restriction", "static", "twin", "control", "published")
KIND_NAMES: Mapping[str, str] = {
    "point": "family", "restriction": "restriction", "static": "constant λ", "twin": "mean-matched twin",
    "control": "shuffled-λ control", "published": "published method",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """Results with their analysis. Accuracies are those of the test split unless something else is said."""

    results: StudyResults
    analysis: StudyAnalysis
    _runs: dict[tuple[str, str, int], RunResult] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for run in self.results.runs.values():
            self._runs[run.spec.task, run.spec.point, run.spec.seed] = run

    # ------------------------------------------------------------------ runs

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """All seeds: the sweep's, then the replication's."""
        return (*self.results.seeds, *(s for s in self.results.replication_seeds if s not in self.results.seeds))

    def run(self, task: str, point: str, seed: int) -> RunResult | None:
        """The run at a point and seed."""
        return self._runs.get((task, point, seed))

    def done(self, task: str, point: str) -> dict[int, RunResult]:
        """Seed → run, of those that are done."""
        found = {seed: self.run(task, point, seed) for seed in self.seeds}
        return {seed: run for seed, run in found.items() if run is not None and run.state == "done"}

    def scores(self, task: str, point: str, split: str = "test") -> dict[int, Score]:
        """Seed → score."""
        return {seed: run.scores[split] for seed, run in self.done(task, point).items() if split in run.scores}

    def sweep(self, task: str, point: str, split: str = "test") -> dict[int, Score]:
        """Seed → score on the seeds of the sweep, which all points have in common."""
        return {seed: score for seed, score in self.scores(task, point, split).items() if seed in self.results.seeds}

    def points(self, task: str, *kinds: str) -> list[str]:
        """Labels of a task's points, those of the family first, else in the order of the plan."""
        labels: dict[str, str] = {}
        for run in self.results.runs.values():
            if run.spec.task == task:
                labels.setdefault(run.spec.point, run.spec.kind)
        wanted = kinds or KINDS
        return [label for kind in KINDS if kind in wanted for label, own in labels.items() if own == kind]

    def kind(self, task: str, point: str) -> str:
        """What a point is for."""
        return next(r.spec.kind for r in self.results.runs.values() if (r.spec.task, r.spec.point) == (task, point))

    def gate(self, task: str, point: str) -> Gate | None:
        """The gate of a point that is the same for all seeds."""
        for seed in self.seeds:
            run = self.run(task, point, seed)
            if run is not None and run.spec.kind != "twin":
                found = run.gate or run.spec.gate
                return None if found is None else Gate(*found)
        return None

    @cached_property
    def counts(self) -> dict[str, int]:
        """State → runs."""
        states = [run.state for run in self.results.runs.values()]
        return {state: states.count(state) for state in ("done", "failed", "running", "waiting")}

    @property
    def is_partial(self) -> bool:
        """Whether something of the plan is not there."""
        return self.counts["done"] < len(self.results.runs) or bool(self.results.problems)

    # ------------------------------------------------------------------ comparisons

    def comparisons(self, axis: str, task: str | None = None, *, comparable: bool = True) -> list[ComparisonEvidence]:
        """Comparisons of an axis in the order of the plan."""
        return [
            found
            for found in self.analysis.comparisons
            if found.axis == axis and task in (None, found.task) and (not comparable or found.all is not None)
        ]

    @cached_property
    def axes(self) -> list[str]:
        """The axes that the study has, in our order."""
        present = {comparison.axis for comparison in self.results.comparisons}
        return [axis for axis in AXES if axis in present]

    def spread(self, axis: str, task: str | None = None) -> float | None:
        """Pooled SD over seeds of an axis' paired differences, in pp; None where no pair has two seeds."""
        return pooled_sd([c.all for c in self.comparisons(axis, task) if c.all is not None])

    def sampling_se(self, task: str) -> float | None:
        """Binomial SE of one model's accuracy on the test split, in pp, at the mean accuracy of the family's runs."""
        scores = [s for p in self.points(task, "point") for s in self.scores(task, p).values()]
        if not scores:
            return None
        share = fmean(score.accuracy for score in scores)
        return 100 * math.sqrt(share * (1 - share) / scores[0].count)


def pooled_sd(pairs: Sequence[Paired]) -> float | None:
    """√ of the mean variance, each weighing as much as it has degrees of freedom."""
    known = [(pair.sd, pair.n - 1) for pair in pairs if pair.sd is not None and pair.n > 1]
    weight = sum(freedom for _, freedom in known)
    return math.sqrt(sum(sd * sd * freedom for sd, freedom in known) / weight) if weight else None


def mean_of(values: Sequence[float]) -> float | None:
    """Mean, or None of nothing."""
    return fmean(values) if values else None


def sd_of(values: Sequence[float]) -> float | None:
    """Sample SD, or None of fewer than two."""
    return stdev(values) if len(values) > 1 else None
