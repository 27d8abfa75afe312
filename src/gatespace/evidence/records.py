"""Dataclasses of evidence. No NaN: unknown values are None, and a `note` gives the reason.

Differences are left minus right, in the caller's unit; in a study, percentage points of accuracy (pp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gatespace.gating.coefficients import NotApplicable

ALL_TASKS = "all"
"""Task name of a group over all tasks of a study."""


@dataclass(frozen=True)
class Summary:
    """Mean of differences, with tests and interval."""

    n: int
    mean: float
    sd: float | None
    """Their standard deviation (n - 1); None for a single one."""
    t: float | None
    """Student's t of the mean against 0; None for a single one, and if all are equal."""
    p: float | None
    """Two-sided, from t with n - 1 degrees of freedom."""
    low: float | None
    """Lower end of the interval of the mean."""
    high: float | None
    sign_flip_p: float | None
    """Two-sided: share of sign assignments with a mean as far from 0; exact up to n = 14, else sampled."""
    sign_flip_floor: float
    """2 / 2ⁿ, lower bound of the sign-flip p whatever the data."""
    mde: float | None
    """Minimum detectable difference: the smallest true one that a t-test at .05 with this SD and n detects with power
    80 %. For the groups of a study: about the smallest that is supported with power 80 %, see
    `gatespace.evidence.power`; None if none can be."""
    wins: int
    """Differences above 0."""
    ties: int
    """Differences equal to 0."""
    losses: int
    """Differences below 0."""
    confidence: float
    """Of the interval."""
    note: str
    """What is missing above and why; how to read it."""


@dataclass(frozen=True)
class Paired(Summary):
    """Two points over the seeds at which both were run."""

    seeds: tuple[int, ...]
    differences: tuple[float, ...]


class Block(NamedTuple):
    """All cells of a task at one seed."""

    task: str
    seed: int
    mean: float
    cells: int


class CellMean(NamedTuple):
    """Two points of a task, and the mean of their difference over seeds."""

    task: str
    left: str
    right: str
    mean: float


@dataclass(frozen=True)
class BlockClaim(Summary):
    """A claim about a group of comparisons: t and sign-flip over means of (task, seed) blocks, never over cells."""

    blocks: tuple[Block, ...]
    cells: tuple[CellMean, ...]
    """What the blocks are means of."""
    excluded_seed: int | None
    """The selection seed, if left out."""


@dataclass(frozen=True)
class Mixed:
    """Intercept of a mixed model over cells, with crossed variances. Anticonservative: secondary, never the claim.

    It treats estimated variances as known and counts cells, unlike the blocks; with few blocks its p is too small.
    """

    mean: float
    se: float
    z: float
    p: float
    low: float
    high: float
    cells: int
    variances: Mapping[str, float]
    """Component → variance."""
    label: str = "anticonservative"


@dataclass(frozen=True)
class Anova:
    """Two-way analysis of variance of a task, point + seed without interaction (type II)."""

    points: int
    seeds: int
    runs: int
    f: float
    """F of the points: is there any difference among them?"""
    p: float
    """p of `f`: its rank among the F of permutations of the points within each seed."""
    df: tuple[int, int]
    """Degrees of freedom of the points and of the residual."""
    seed_f: float
    seed_p: float
    sd: float
    """Pooled SD of a run about its point and seed, the square root of the residual mean square."""
    note: str = ""


@dataclass(frozen=True)
class WinCount:
    """Number of cells won, with p values that do and do not account for shared runs."""

    wins: int
    """Cells whose mean difference is above 0."""
    ties: int
    """Cells whose mean difference is 0; left out of both p."""
    losses: int
    """Cells whose mean difference is below 0."""
    naive_p: float | None
    """Two-sided binomial p as if the cells were independent. They are not."""
    naive_variance: float
    """Variance of the count in that case: a quarter of the non-tied cells."""
    null_variance: float
    """Variance of the count if no points differ and every run is drawn once for all its cells."""
    effective_n: float | None
    """Number of independent cells with the same variance of the win share."""
    correlated_p: float | None
    """Two-sided p under that null, from simulated runs."""
    simulations: int
    note: str = ""

    @property
    def cells(self) -> int:
        """The number of cells."""
        return self.wins + self.ties + self.losses


@dataclass(frozen=True)
class McNemar:
    """Exact McNemar test of two trained models, on the examples that only one of them gets right.

    It is about these two models on other examples, not about other seeds.
    """

    both: int
    left_only: int
    right_only: int
    neither: int
    p: float

    @property
    def n(self) -> int:
        """Examples."""
        return self.both + self.left_only + self.right_only + self.neither

    @property
    def difference(self) -> float:
        """Difference in accuracy, left minus right, in pp."""
        return 100.0 * (self.left_only - self.right_only) / self.n


@dataclass(frozen=True)
class Interval:
    """Percentile bootstrap interval of a mean difference in pp, and what was resampled."""

    mean: float
    low: float
    high: float
    confidence: float
    resampled: str
    """What it covers, in words."""
    over_seeds: bool
    """Whether seeds were resampled too; if not, it is about these trained models only."""
    seeds: int
    examples: int
    resamples: int


# --------------------------------------------------------------------------------------------------------- a study


@dataclass(frozen=True)
class ComparisonEvidence:
    """Two points of a task over all seeds; accuracy on test in pp, left minus right."""

    task: str
    axis: str
    """What the two differ in."""
    restriction: str | None
    """The part of that axis: ``entropy-only`` or ``gap-only``, ``mean-matched`` or ``RKL-matched``."""
    left: str
    right: str
    role: Literal["sweep", "replication"]
    """``replication`` if rerun on fresh seeds, else ``sweep``."""
    status: Literal["comparable", "n/a", "missing"]
    """``comparable``; ``n/a`` by construction; ``missing`` if no seed has both runs yet."""
    reason: str
    """Why it is not comparable, or which seeds are missing."""
    all: Paired | None
    """Over all seeds."""
    fresh: Paired | None
    """Without the selection seed."""
    holm: float | None
    """p of `judged`, adjusted over the headline comparisons (those with role ``replication``); None for others."""
    bh: float | None
    """p of `judged`, adjusted over all comparisons of the study."""
    mcnemar: tuple[tuple[int, McNemar], ...]
    """(seed, test) for every seed with predictions."""
    bootstrap: Interval | None
    """Over examples, and over seeds if there are at least four."""
    run_ids: tuple[str, ...]
    """The runs behind it."""

    @property
    def judged(self) -> Paired | None:
        """`fresh` if it has at least two seeds, else `all`."""
        return self.fresh if self.fresh is not None and self.fresh.n > 1 else self.all


class Decisive(NamedTuple):
    """A point that alone decides a group claim, see `gatespace.evidence.groups.decisive`."""

    point: str
    without: BlockClaim
    """The claim without its cells."""


@dataclass(frozen=True)
class GroupEvidence:
    """All comparisons of an axis on a task, or on all tasks."""

    axis: str
    restriction: str | None
    """The part of the axis, or None for all of it. Isolation has parts only."""
    task: str
    """Task name, or `ALL_TASKS`."""
    comparable: int
    """Cells with at least one seed that has both runs."""
    not_applicable: int
    """Cells that are impossible by construction."""
    missing: int
    """Cells whose runs are not done."""
    mean: float | None
    """Mean over the comparable cells of their mean differences, in pp; None without any."""
    all: BlockClaim | NotApplicable
    """The claim over all (task, seed) blocks."""
    fresh: BlockClaim | NotApplicable
    """The same without the selection seed: the confirmatory claim."""
    wins: WinCount | NotApplicable
    """Cells won, tied and lost by their mean over seeds."""
    claimed: bool
    """Whether the report makes a claim about it."""
    holm: float | None
    """p of `judged`, adjusted over all claims that the study plans, finished or not; None for other groups."""
    mixed: Mixed | NotApplicable
    """The mixed model, as a secondary analysis."""
    decisive: Decisive | None = None
    """The point that alone decides the claim, and the claim without it; None if there is none."""

    @property
    def judged(self) -> BlockClaim | None:
        """The first of `fresh` and `all` that is a claim over at least two blocks; None if neither is."""
        for claim in (self.fresh, self.all):
            if isinstance(claim, BlockClaim) and claim.n > 1:
                return claim
        return None


class Choice(NamedTuple):
    """A selected point; accuracies are means over the seeds of the sweep, as shares."""

    label: str
    val: float | None
    test: float


@dataclass(frozen=True)
class Side:
    """The best point of one kind: selected on validation, and selected on test (optimistic)."""

    chosen: Choice | NotApplicable
    observed: Choice | NotApplicable


@dataclass(frozen=True)
class Selection:
    """The best point of a task."""

    chosen: Choice | NotApplicable
    """Best mean accuracy on validation; its test accuracy is unbiased by selection."""
    observed: Choice | NotApplicable
    """Best mean accuracy on test: selected on the test split, hence optimistic."""
    optimism: float | None
    """Test accuracy of `observed` minus that of `chosen`, in pp."""
    sides: Mapping[str, Side]
    """Kind → its best point: family, entropy-only, gap-only, static, published."""
    seeds: tuple[int, ...]
    note: str


@dataclass(frozen=True)
class BaselineEvidence:
    """The baselines of a task on the test split, as shares, except `gain`."""

    start: float | None
    """Accuracy of the student before training."""
    start_macro_f1: float | None
    teacher: float | None
    teacher_macro_f1: float | None
    best_constant: float | None
    """Accuracy of always predicting the split's most frequent label."""
    best_constant_label: str | None
    """That label."""
    trained: float | None
    """Mean accuracy of the family's points, over runs."""
    trained_macro_f1: float | None
    runs: int
    """Number of these runs."""
    gain: float | None
    """`trained` minus `start`, in pp."""
    below_best_constant: int
    """Runs of any kind whose accuracy is below the best constant's."""
    done: int
    """Finished runs of any kind."""
    rows: int | None
    """Evaluated rows of the test split."""
    duplicates: int | None
    """Rows whose text is also in train."""


class BelowStart(NamedTuple):
    """A point whose mean accuracy over seeds is below the untrained student's: training did harm."""

    task: str
    point: str
    start: float
    """Accuracy of the student before training, as a share."""
    shares: tuple[float, ...]
    """Accuracies of the runs, one per seed."""
    gain: Summary
    """Accuracy minus start over seeds, in pp; its mean is below 0."""


class Detectable(NamedTuple):
    """Minimum detectable difference of a typical comparison in a study.

    The smallest true difference that a two-sided paired t-test at .05 detects with power 80 %, at the median SD and
    the median number of seeds of the comparisons.
    """

    pp: float
    sd: float
    seeds: int
    comparisons: int


@dataclass(frozen=True)
class StudyAnalysis:
    """The statistics of a study."""

    comparisons: tuple[ComparisonEvidence, ...]
    anova: Mapping[str, Anova | NotApplicable]
    """Per task."""
    groups: tuple[GroupEvidence, ...]
    """Claims about groups of comparisons."""
    selection: Mapping[str, Selection]
    baselines: Mapping[str, BaselineEvidence]
    below_start: tuple[BelowStart, ...] = ()
    """Points below the untrained student, the lowest first."""
    detectable: Mapping[str, Detectable | NotApplicable] = field(default_factory=dict)
    """Minimum detectable difference of a single comparison, per task and for `ALL_TASKS`."""
    level: float = 0.05
    """Significance level of claims about groups at this look; their intervals have confidence 1 - `level`."""

    def group(self, axis: str, *, task: str = ALL_TASKS, restriction: str | None = None) -> GroupEvidence | None:
        """Return the group of an axis, or None."""
        for found in self.groups:
            if (found.axis, found.task, found.restriction) == (axis, task, restriction):
                return found
        return None

    def comparison(self, task: str, left: str, right: str) -> ComparisonEvidence | None:
        """Return the comparison of two points of a task, or None."""
        for found in self.comparisons:
            if (found.task, found.left, found.right) == (task, left, right):
                return found
        return None
