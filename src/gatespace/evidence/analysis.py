"""Analysis of a study: every comparison, every group claim, and the baselines.

Accuracies are from counts on the test split, differences in pp. Unfinished runs are left out and reported as missing;
a comparison that is impossible by construction stays in, with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, median_low
from typing import Any, Literal, NamedTuple

import numpy as np

from gatespace.evidence.counts import Cell, win_count
from gatespace.evidence.examples import Resampler, mcnemar
from gatespace.evidence.groups import Difference, anova, block_claim, decisive, mixed
from gatespace.evidence.paired import bh, holm, minimum_detectable, paired, summarise
from gatespace.evidence.power import detectable
from gatespace.evidence.reach import ALPHA, is_split, level_of, part_of
from gatespace.evidence.records import (
    ALL_TASKS,
    BaselineEvidence,
    BelowStart,
    BlockClaim,
    Choice,
    ComparisonEvidence,
    Detectable,
    GroupEvidence,
    Interval,
    McNemar,
    Paired,
    Selection,
    Side,
    StudyAnalysis,
)
from gatespace.gating.coefficients import NotApplicable
from gatespace.seeding import stream
from gatespace.study.records import Comparison, RunResult, StudyResults

SPLIT = "test"
_STREAM = 0  # equal results give equal statistics, whatever the study's seeds


def analyse(results: StudyResults) -> StudyAnalysis:
    """Compute the statistics of a study from its finished runs."""
    done = {
        (result.spec.task, result.spec.point, result.spec.seed): result
        for result in results.done
        if SPLIT in result.scores
    }
    examples = _Examples()
    comparisons = [_comparison(records, results, done, examples) for records in _grouped(results.comparisons)]
    comparisons = _adjusted(comparisons)
    accuracies: dict[str, dict[str, dict[int, float]]] = {task: {} for task in results.tasks}
    for (task, point, seed), run in done.items():
        accuracies[task].setdefault(point, {})[seed] = _percent(run)
    level = level_of(len(results.looks))
    return StudyAnalysis(
        comparisons=tuple(comparisons),
        anova={task: anova(found) for task, found in accuracies.items()},
        groups=tuple(_groups(comparisons, results.selection_seed, level)),
        selection={task: _selection(task, results, done) for task in results.tasks},
        baselines={task: _baseline(task, results, done) for task in results.tasks},
        below_start=tuple(_below_start(results, accuracies)),
        detectable={
            task: _detectable([c for c in comparisons if task in (ALL_TASKS, c.task)])
            for task in (ALL_TASKS, *results.tasks)
        },
        level=level,
    )


# ----------------------------------------------------------------------------------------------------- comparisons

_Done = Mapping[tuple[str, str, int], RunResult]


def _grouped(comparisons: Iterable[Comparison]) -> list[list[Comparison]]:
    """Group comparisons of the same two points over seeds, in plan order."""
    found: dict[tuple[str | None, ...], list[Comparison]] = {}
    for record in comparisons:
        found.setdefault((record.task, record.axis, record.restriction, record.left, record.right), []).append(record)
    return list(found.values())


def _comparison(
    records: Sequence[Comparison], results: StudyResults, done: _Done, examples: _Examples
) -> ComparisonEvidence:
    first = records[0]
    role: Literal["sweep", "replication"] = (
        "replication" if any(record.role == "replication" for record in records) else "sweep"
    )
    seeds = list(dict.fromkeys(record.seed for record in records if record.status == "comparable"))
    sides: dict[int, tuple[RunResult, RunResult]] = {}
    for seed in seeds:
        one, other = done.get((first.task, first.left, seed)), done.get((first.task, first.right, seed))
        if one is not None and other is not None:
            sides[seed] = (one, other)
    status: Literal["comparable", "n/a", "missing"] = "comparable" if sides else ("missing" if seeds else "n/a")
    missing = [seed for seed in seeds if seed not in sides]
    reason = first.reason
    if missing:
        reason = f"not both runs are done at seed{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    left = {seed: _percent(pair[0]) for seed, pair in sides.items()}
    right = {seed: _percent(pair[1]) for seed, pair in sides.items()}
    fresh_left = {seed: value for seed, value in left.items() if seed != results.selection_seed}
    tests, bootstrap = examples.compare(sides)
    return ComparisonEvidence(
        task=first.task,
        axis=first.axis,
        restriction=part_of(first),
        left=first.left,
        right=first.right,
        role=role,
        status=status,
        reason=reason,
        all=_paired(left, right),
        fresh=_paired(fresh_left, {seed: right[seed] for seed in fresh_left}),
        holm=None,
        bh=None,
        mcnemar=tests,
        bootstrap=bootstrap,
        run_ids=tuple(dict.fromkeys(run.spec.id for pair in sides.values() for run in pair)),
    )


def _paired(left: Mapping[int, float], right: Mapping[int, float]) -> Paired | None:
    found = paired(left, right)
    return found if isinstance(found, Paired) else None


def _percent(run: RunResult) -> float:
    score = run.scores[SPLIT]
    return 100.0 * score.correct / score.count


class _Examples:
    """Per-example correctness of every run, loaded once; one resampler per task and number of examples."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._resamplers: dict[tuple[str, int], Resampler] = {}

    def compare(
        self, sides: Mapping[int, tuple[RunResult, RunResult]]
    ) -> tuple[tuple[tuple[int, McNemar], ...], Interval | None]:
        """McNemar per seed, and the bootstrap over the seeds whose two runs predicted equally many examples."""
        tests: list[tuple[int, McNemar]] = []
        differences: list[Any] = []
        task = ""
        for seed, (left, right) in sides.items():
            one, other = self._correct(left), self._correct(right)
            if one is None or other is None or one.size != other.size:
                continue
            task = left.spec.task
            if one.dtype == bool:
                tests.append((seed, mcnemar(one, other)))
                differences.append(one.astype(np.int8) - other.astype(np.int8))
            else:  # free-text scores are not binary
                differences.append(one - other)
        if not differences or len({row.size for row in differences}) > 1:
            return tuple(tests), None
        return tuple(tests), self._resampler(task, differences[0].size).interval(np.stack(differences))

    def _correct(self, run: RunResult) -> Any:
        """Correctness per row; None if the predictions are missing or do not match the score."""
        if run.spec.id not in self._loaded:
            score = run.scores[SPLIT]
            scores = [row.score for row in run.predictions(SPLIT)]
            rows = np.array(scores, dtype=bool if score.metrics.metric == "accuracy" else float)
            own = score.metric == score.metrics.metric  # the outcome is that of single responses
            fits = own and rows.size == score.count and abs(float(rows.sum()) - score.correct) < 1e-6
            self._loaded[run.spec.id] = rows if fits else None
        return self._loaded[run.spec.id]

    def _resampler(self, task: str, examples: int) -> Resampler:
        key = (task, examples)
        if key not in self._resamplers:
            generator = np.random.default_rng(stream(_STREAM, "bootstrap", task, examples))
            self._resamplers[key] = Resampler(examples, generator=generator)
        return self._resamplers[key]


def _adjusted(comparisons: Sequence[ComparisonEvidence]) -> list[ComparisonEvidence]:
    """Adjust p values: Holm over the replicated comparisons that are planned, BH over all."""
    ps = [None if found.judged is None else found.judged.p for found in comparisons]
    headline = _planned_holm([found.role == "replication" and found.status != "n/a" for found in comparisons], ps)
    return [replace(found, holm=h, bh=b) for found, h, b in zip(comparisons, headline, bh(ps), strict=True)]


def _planned_holm(planned: Sequence[bool], ps: Sequence[float | None]) -> list[float | None]:
    """Holm over all planned tests: one that is not finished counts as p = 1."""
    adjusted = holm([(1.0 if p is None else p) if counts else None for counts, p in zip(planned, ps, strict=True)])
    return [None if p is None else found for p, found in zip(ps, adjusted, strict=True)]


# ---------------------------------------------------------------------------------------------------------- groups


class _Members(NamedTuple):
    """Comparisons of a group."""

    axis: str
    restriction: str | None
    task: str
    claimed: bool
    comparisons: list[ComparisonEvidence]


def _groups(comparisons: Sequence[ComparisonEvidence], selection_seed: int | None, level: float) -> list[GroupEvidence]:
    """Groups for every axis, whole and by part, pooled and per task; Holm over those that are claimed."""
    groups: list[_Members] = []
    for axis in dict.fromkeys(c.axis for c in comparisons):
        of_axis = [c for c in comparisons if c.axis == axis]
        parts = list(dict.fromkeys(c.restriction for c in of_axis if c.restriction is not None))
        split = bool(parts) and is_split(axis, selects=selection_seed is not None)
        for part in parts if axis == "isolation" else [None, *parts]:
            members = [c for c in of_axis if part in (None, c.restriction)]
            for task in (ALL_TASKS, *dict.fromkeys(c.task for c in members)):
                mine = [c for c in members if task in (ALL_TASKS, c.task)]
                planned = task == ALL_TASKS and split == (part is not None) and any(c.status != "n/a" for c in mine)
                groups.append(_Members(axis, part, task, planned, mine))
    family = max(1, sum(members.claimed for members in groups))
    found = [_group(members, selection_seed, level, family) for members in groups]
    ps = [None if group.judged is None or not group.claimed else group.judged.p for group in found]
    adjusted = _planned_holm([group.claimed for group in found], ps)
    return [replace(group, holm=p) for group, p in zip(found, adjusted, strict=True)]


def _group(group: _Members, selection_seed: int | None, level: float, family: int) -> GroupEvidence:
    axis, restriction, task, claimed, members = group
    differences: list[Difference] = []
    cells: list[Cell] = []
    for c in members:
        if c.all is None:
            continue
        pairs = zip(c.all.seeds, c.all.differences, strict=True)
        differences += [Difference(c.task, seed, c.left, c.right, value) for seed, value in pairs]
        left = tuple((c.task, c.left, seed) for seed in c.all.seeds)
        right = tuple((c.task, c.right, seed) for seed in c.all.seeds)
        cells.append(Cell(c.all.mean, left, right))
    if selection_seed is None:  # comparisons were fixed in advance: count only blocks with all comparisons of the task
        whole = Counter(c.task for c in members if c.status != "n/a")
        found = Counter((d.task, d.seed) for d in differences)
        differences = [d for d in differences if found[d.task, d.seed] == whole[d.task]]
    generator = np.random.default_rng(stream(_STREAM, "win count", axis, restriction or "", task))
    pooled = task == ALL_TASKS and (restriction is None or axis == "isolation")
    claim = block_claim(differences, confidence=1 - level)
    fresh = block_claim(differences, exclude_seed=selection_seed, confidence=1 - level)
    blocks = fresh.n if isinstance(fresh, BlockClaim) else 0

    def with_mde(one: BlockClaim | NotApplicable) -> BlockClaim | NotApplicable:
        if isinstance(one, NotApplicable) or not one.sd:
            return one
        return replace(one, mde=detectable(one.sd, blocks, round(family * ALPHA / level)))

    return GroupEvidence(
        axis=axis,
        restriction=restriction,
        task=task,
        comparable=len(cells),
        not_applicable=sum(c.status == "n/a" for c in members),
        missing=sum(c.status == "missing" for c in members),
        mean=fmean(cell.difference for cell in cells) if cells else None,
        all=with_mde(claim),
        fresh=with_mde(fresh),
        wins=win_count(cells, generator=generator),
        claimed=claimed,
        holm=None,
        mixed=mixed(differences) if pooled else NotApplicable("only for all tasks of an axis together"),
        decisive=decisive(differences, claim, level=ALPHA / family),
    )


# --------------------------------------------------------------------------------------- selection and baselines


def _side(run: RunResult) -> str | None:
    if run.spec.kind == "restriction":
        return "entropy-only" if run.spec.point.startswith("entropy-only") else "gap-only"
    return {"point": "family", "static": "static", "published": "published"}.get(run.spec.kind)


def _selection(task: str, results: StudyResults, done: _Done) -> Selection:
    sides = {}
    seeds = results.seeds
    incomplete: list[str] = []
    for name in ("family", "entropy-only", "gap-only", "static", "published"):
        labels = dict.fromkeys(r.spec.point for r in results.runs.values() if r.spec.task == task and _side(r) == name)
        choices: list[Choice] = []
        for label in labels:
            runs = [done.get((task, label, seed)) for seed in seeds]
            if any(run is None for run in runs):
                incomplete.append(label)
                continue
            whole = [run for run in runs if run is not None]
            vals = [run.scores["val"] for run in whole if "val" in run.scores]
            val = fmean(score.correct / score.count for score in vals) if len(vals) == len(whole) else None
            choices.append(Choice(label, val, fmean(_percent(run) / 100.0 for run in whole)))
        if labels:
            sides[name] = _best(choices)
    family = sides.get("family", _best([]))
    optimism = None
    if isinstance(family.chosen, Choice) and isinstance(family.observed, Choice):
        optimism = 100.0 * (family.observed.test - family.chosen.test)
    note = f"not considered, because a run is not done: {', '.join(incomplete)}" if incomplete else ""
    return Selection(family.chosen, family.observed, optimism, sides, tuple(seeds), note)


def _best(choices: Sequence[Choice]) -> Side:
    """The best choices on validation and on test; ties go to the first in plan order, never decided by test."""
    if not choices:
        none = NotApplicable("no point was run at every seed of the sweep")
        return Side(none, none)
    observed = max(choices, key=lambda choice: choice.test)
    if any(choice.val is None for choice in choices):
        return Side(NotApplicable("not all points were evaluated on validation"), observed)
    return Side(max(choices, key=lambda choice: choice.val or 0.0), observed)


def _baseline(task: str, results: StudyResults, done: _Done) -> BaselineEvidence:
    known = results.baselines.get(task)
    start = known.start.get(SPLIT) if known else None
    teacher = known.teacher.get(SPLIT) if known else None
    scores = [run.scores[SPLIT] for run in done.values() if run.spec.task == task]
    family = [run.scores[SPLIT] for run in done.values() if run.spec.task == task and run.spec.kind == "point"]
    any_score = start or teacher or (scores[0] if scores else None)
    constant = any_score.best_constant if any_score else None
    trained = fmean(score.correct / score.count for score in family) if family else None
    gain = None if trained is None or start is None else 100.0 * (trained - start.correct / start.count)
    return BaselineEvidence(
        start=start.accuracy if start else None,
        start_macro_f1=start.macro_f1 if start else None,
        teacher=teacher.accuracy if teacher else None,
        teacher_macro_f1=teacher.macro_f1 if teacher else None,
        best_constant=constant and constant.accuracy,
        best_constant_label=constant and constant.label,
        trained=trained,
        trained_macro_f1=_mean_of([score.macro_f1 for score in family]),
        runs=len(family),
        gain=gain,
        below_best_constant=sum(
            score.best_constant is not None and score.accuracy < score.best_constant.accuracy for score in scores
        ),
        done=len(scores),
        rows=any_score.count if any_score else None,
        duplicates=any_score.duplicates if any_score else None,
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _below_start(
    results: StudyResults, accuracies: Mapping[str, Mapping[str, Mapping[int, float]]]
) -> Iterable[BelowStart]:
    found = []
    for task, points in accuracies.items():
        known = results.baselines.get(task)
        start = known.start.get(SPLIT) if known else None
        if start is None:
            continue
        for point, by_seed in points.items():
            gain = summarise([value - 100.0 * start.correct / start.count for value in by_seed.values()])
            if gain.mean < 0:
                shares = tuple(value / 100.0 for value in by_seed.values())
                found.append(BelowStart(task, point, start.accuracy, shares, gain))
    return sorted(found, key=lambda one: one.gain.mean)


def _detectable(comparisons: Sequence[ComparisonEvidence]) -> Detectable | NotApplicable:
    known = [(c.all.sd, c.all.n) for c in comparisons if c.all is not None and c.all.sd is not None]
    if not known:
        return NotApplicable("no comparison has two seeds")
    # The median, so that one method that collapses on some seeds does not dominate.
    sd, seeds = median(sd for sd, _ in known), median_low(n for _, n in known)
    return Detectable(minimum_detectable(sd, seeds), sd, seeds, len(known))
