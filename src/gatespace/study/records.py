"""Plain dataclasses of a study: runs, comparisons and results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gatespace.config.study import StudyConfig
from gatespace.errors import UsageError
from gatespace.evaluation.calibration import Calibration
from gatespace.evaluation.metrics import LabelStatistics, Metrics, Prediction
from gatespace.runs import Base, RunFolder, State
from gatespace.tasks.data import Baseline
from gatespace.training.warnings import TEACHER_ALARM, Concern

Kind = Literal["point", "restriction", "static", "twin", "control", "published"]
Axis = Literal["restriction", "isolation", "control", "static", "published", "gap"]
Coefficients = tuple[float, float, float, float]
OUTCOMES = {"accuracy": "accuracy", "prior_corrected": "prior-corrected accuracy", "auc": "macro AUC"}
"""Primary outcome of a study on label tasks → its name as a metric."""


@dataclass(frozen=True)
class RunSpec:
    """A planned training run at one point and seed.

    Args:
        id: Name of the run and its folder: task, point, seed, and a hash of every setting that can change its numbers.
        task: The task's name in the study.
        point: Its label in comparisons, e.g. ``G5``, ``twin(G5)``, ``todi``.
        kind: Its purpose in the study.
        seed: Its seed.
        gate: (a, b, c, d); None for a published method, or while it depends on unfinished runs.
        of: The dynamic point that a twin or a control belongs to.
        needs: Runs that must finish before this one can start.
    """

    id: str
    task: str
    point: str
    kind: Kind
    seed: int
    gate: Coefficients | None = None
    of: str | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two points of a task at one seed; the difference is left minus right.

    Args:
        task: The task's name in the study.
        axis: What the two differ in.
        left: Label of the first point.
        right: Label of the second, or a placeholder if there is no such point.
        seed: Seed of both runs.
        status: ``comparable``, or ``n/a`` by construction.
        reason: Why it is not applicable.
        restriction: ``entropy-only`` or ``gap-only`` on that axis.
        role: Part of the sweep, or of its replication on fresh seeds.
    """

    task: str
    axis: Axis
    left: str
    right: str
    seed: int
    status: Literal["comparable", "n/a"] = "comparable"
    reason: str = ""
    restriction: Literal["entropy-only", "gap-only"] | None = None
    role: Literal["sweep", "replication"] = "sweep"


# ---------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Score:
    """A model's score on a split: `accuracy` is by `metric`, the task's or on labels the study's outcome."""

    split: str
    accuracy: float
    metric: str
    metrics: Metrics
    """As the evaluation computed them, whatever the outcome."""
    duplicates: int = 0
    """Rows of a test split whose text also occurs in train."""
    without_duplicates: Metrics | None = None
    calibration: Calibration | None = None
    """Calibration of label probabilities, if the study asks for them."""

    @property
    def count(self) -> int:
        """Rows."""
        return self.metrics.count

    @property
    def correct(self) -> float:
        """`accuracy` times `count`: of labels, the number of right ones."""
        return (
            self.labels.correct if self.labels is not None and self.metric == "accuracy" else self.accuracy * self.count
        )

    @property
    def labels(self) -> LabelStatistics | None:
        """Statistics of labels; None for free text."""
        return self.metrics.labels

    @property
    def macro_f1(self) -> float | None:
        """Macro-F1 of labels."""
        return None if self.labels is None else self.labels.macro_f1

    @property
    def best_constant(self) -> Baseline | None:
        """The most frequent label and its accuracy if predicted everywhere, where `accuracy` is comparable with it."""
        comparable = self.metric in (OUTCOMES["accuracy"], OUTCOMES["prior_corrected"])
        return self.labels.best_constant if self.labels is not None and comparable else None

    def by(self, outcome: str) -> Score:
        """The same score with `accuracy` by an outcome of label probabilities; free text keeps its metric."""
        if outcome == "accuracy" or self.labels is None:
            return self
        value = None if self.calibration is None else getattr(self.calibration, outcome)
        if value is None:
            raise UsageError(
                f"outcome: {outcome} is not known on {self.split}",
                why="it needs label probabilities of validation and test rows, and rows of at least two labels",
                instead="outcome: accuracy",
            )
        return replace(self, accuracy=value, metric=OUTCOMES[outcome])

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Score:
        """Parse the record that an evaluation wrote."""
        metrics, clean = Metrics.from_json(record["metrics"]), record["without_duplicates"]
        return cls(
            split=record["split"],
            accuracy=metrics.score,
            metric=metrics.metric,
            metrics=metrics,
            duplicates=record["duplicates"],
            without_duplicates=Metrics.from_json(clean) if "count" in clean else None,
            calibration=Calibration.from_json(record["calibration"]) if "calibration" in record else None,
        )


@dataclass(frozen=True)
class LamStats:
    """λ over all response tokens of a run, every token weighted equally."""

    mean: float
    sd: float
    saturated: float
    """Fraction of tokens whose λ is within `SATURATION` of 0 or 1."""
    hist: tuple[float, ...]
    """Token counts in equal-width bins over [0, 1]."""
    rkl_mean: float | None
    """Σ λ·RKL / Σ RKL: the constant λ that gives reverse KL the same total weight."""
    tokens: int


@dataclass(frozen=True)
class Cost:
    """What a run cost. Seconds vary between executions; teacher tokens depend on what the cache held."""

    seconds: float
    cpu_seconds: float
    steps: int
    response_tokens: int
    teacher_tokens: int
    """Tokens in the teacher's forward passes for this run."""
    scores_asked: int
    """Response tokens that were scored."""
    scores_cached: int
    """Those of them whose scores were in the cache from an earlier step or run."""


def predictions(folder: Path, split: str) -> list[Prediction]:
    """Predictions of a run or baseline for every row of a split, in row order."""
    return [Prediction.from_json(row) for row in RunFolder(folder).predictions(split)]


@dataclass(frozen=True)
class RunResult:
    """A planned run with its state and results."""

    spec: RunSpec
    state: State
    folder: Path
    error: str = ""
    gate: Coefficients | None = None
    """As trained; None for a published method, or while unknown."""
    lam: float | None = None
    """The constant λ of a static point."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    lam_stats: LamStats | None = None
    cost: Cost | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    content: Mapping[str, str] = field(default_factory=dict)
    """What the settings resolved to: fingerprints of teacher and student, digest of the rows, precision of `auto`."""
    fingerprint: str = ""
    """Fingerprint of the trained weights."""
    chosen_step: int = 0
    """The step that the weights are from: the last one, or that of the best evaluation during training."""
    chosen_on: int | None = None
    """Number of validation rows that chose that step."""
    alarms: tuple[Concern, ...] = ()
    """Alarms active at the end of training."""
    teachers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """With several teachers, by name: rows, tokens, and the means of λ and of both divergences over them."""

    def predictions(self, split: str) -> list[Prediction]:
        """Predictions for every row, in row order."""
        return predictions(self.folder, split)

    def curve(self) -> list[dict[str, Any]]:
        """One record per step: loss, lam_mean, lam_sd, h, u, gap, forward_kl, reverse_kl and more."""
        return RunFolder(self.folder).log("metrics")

    def evaluations(self) -> list[dict[str, Any]]:
        """Evaluations during training: step, split, accuracy, macro_f1."""
        return RunFolder(self.folder).log("evaluations")


@dataclass(frozen=True)
class TaskBaseline:
    """Scores of a task's initial student and teacher."""

    name: str
    """Name of the data, e.g. ``tweeteval/emotion``."""
    digest: str
    start: Mapping[str, Score]
    """The student before training, by split."""
    teacher: Mapping[str, Score]
    folders: Mapping[str, Path] = field(default_factory=dict)
    """``start`` and ``teacher`` → folder with its predictions."""

    def predictions(self, model: Literal["start", "teacher"], split: str = "test") -> list[Prediction]:
        """Predictions of the model, row by row; empty if there are none."""
        return predictions(self.folders[model], split) if model in self.folders else []


class SplitRead(NamedTuple):
    """A model that was evaluated on a test split. Reading it again after a kill gives the same predictions."""

    run: str
    task: str
    rows: int
    purpose: str
    reads: int


class Look(NamedTuple):
    """One occasion on which test statistics were computed. Unchanged results do not count as another look."""

    digest: str
    """Hash of (task, point, seed) of the finished runs."""
    runs: int
    seeds: Mapping[str, Sequence[int]]
    """Task → seeds of those runs."""


class Cause(NamedTuple):
    """What is probably wrong with a point, what usually helps, and the seeds that show it."""

    kind: str
    helps: str
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class StudyResults:
    """A whole study in its current state."""

    name: str
    folder: Path
    config: StudyConfig
    seeds: tuple[int, ...]
    replication_seeds: tuple[int, ...]
    selection_seed: int | None
    """Seed that selections were made on, left out when a selection is confirmed. None if the comparisons were fixed
    before the study: all seeds are fresh."""
    tasks: tuple[str, ...]
    runs: Mapping[str, RunResult]
    comparisons: tuple[Comparison, ...]
    baselines: Mapping[str, TaskBaseline]
    test_reads: tuple[SplitRead, ...]
    bases: Mapping[str, Base]
    problems: tuple[str, ...] = ()
    """Why the results are incomplete."""
    looks: tuple[Look, ...] = ()
    """All recorded looks at the test results, and this one."""
    warnings: Mapping[str, tuple[Concern, ...]] = field(default_factory=dict)
    """Run id → concerns about its results; task name → concerns about its teacher or its validation rows."""

    def run(self, task: str, point: str, seed: int) -> RunResult | None:
        """The run at a point and seed."""
        for result in self.runs.values():
            spec = result.spec
            if (spec.task, spec.point, spec.seed) == (task, point, seed):
                return result
        return None

    @property
    def done(self) -> list[RunResult]:
        """Finished runs."""
        return [result for result in self.runs.values() if result.state == "done"]

    def points(self, task: str, kind: Kind | None = None) -> list[str]:
        """Labels of a task's points, in plan order."""
        specs = [result.spec for result in self.runs.values()]
        return list(dict.fromkeys(s.point for s in specs if s.task == task and kind in (None, s.kind)))

    def causes(self) -> dict[tuple[str, str], Cause]:
        """Task and point → the concern that most of its seeds share, so that no two pieces of advice contradict."""
        points: dict[tuple[str, str], dict[tuple[str, str], list[int]]] = {}
        for name, concerns in self.warnings.items():
            for concern in concerns if name in self.runs else ():
                spec = self.runs[name].spec
                seeds = points.setdefault((spec.task, spec.point), {})
                seeds.setdefault((concern.kind, concern.helps), []).append(spec.seed)
        causes = {}
        for where, seeds in points.items():
            first = [cause for cause in seeds if cause[0] == TEACHER_ALARM]  # explains whatever else there is
            cause = first[0] if first else max(seeds, key=lambda cause: len(seeds[cause]))
            causes[where] = Cause(*cause, tuple(seeds[cause]))
        return causes

    def warning_lines(self, *, without: Collection[tuple[str, str]] = ()) -> list[str]:
        """Concerns about the results: a line per concern about a task, and one per cause with its points.

        Args:
            without: (task, point) to leave out.
        """
        lines = [
            f"{name}: {concern}" for name, about in self.warnings.items() if name not in self.runs for concern in about
        ]
        points: dict[tuple[str, str, str], list[str]] = {}
        for (task, point), cause in self.causes().items():
            if (task, point) not in without:
                runs = points.setdefault((task, cause.kind, cause.helps), [])
                runs.append(f"{point} (seed {', '.join(map(str, cause.seeds))})")
        return lines + [f"{task}, {kind}: {'; '.join(runs)}. {helps}" for (task, kind, helps), runs in points.items()]
