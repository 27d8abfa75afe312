"""Tables of what the measurements may claim: comparisons, groups, counts, power, controls, and what does not apply."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from gatespace.addons.paper.published import SOURCE, best_observed, d_on_g2, nine, paper_task
from gatespace.evidence.power import minimum_detectable, seeds_needed
from gatespace.evidence.records import (
    ALL_TASKS,
    BlockClaim,
    ComparisonEvidence,
    GroupEvidence,
    Paired,
    Summary,
    WinCount,
)
from gatespace.gating.coefficients import NotApplicable
from gatespace.report.table import CSV_ONLY, FILES_ONLY, NOT_IN_PRINT, Column, Runs, Table, Value
from gatespace.report.view import AXES, AXIS_NAMES, View

__all__ = ["evidence_tables", "group_name"]

_NOTE = Column("note", "note", "text", NOT_IN_PRINT)
_RUNS = Column("runs", "runs", "runs", NOT_IN_PRINT)
_SIDES = ("family", "entropy-only", "gap-only", "static", "published")
_PAIR = (Column("task", "task"), Column("left", "left"), Column("right", "right"))


def evidence_tables(view: View) -> list[Table]:
    """All of them, also those that are empty and say why."""
    return [
        _groups(view),
        _wins(view),
        *(_comparisons(view, axis) for axis in AXES if axis in view.axes),
        _d_on_g2(view),
        _replication(view),
        _best(view),
        _anova(view),
        _power(view),
        _controls(view),
        _examples(view),
        _not_applicable(view),
    ]


def group_name(axis: str, restriction: str | None) -> str:
    """An axis, or the part of it that has one restriction."""
    return f"{axis}: {restriction}" if restriction else axis


# ---------------------------------------------------------------------------------------------------- comparisons


def _summary(found: Summary | NotApplicable | None) -> tuple[Value, ...]:
    if found is None:
        return (None,) * 8
    if isinstance(found, NotApplicable):
        return (found,) * 8
    return found.n, found.mean, found.sd, found.low, found.high, found.p, found.sign_flip_p, found.mde


def _summary_columns(what: str = "") -> tuple[Column, ...]:
    prefix, title = (f"{what}_", f"{what} ") if what else ("", "")
    return (
        Column(f"{prefix}n", f"{title}n", "count"), Column(f"{prefix}mean_pp", f"{title}mean, pp", "signed_pp"),
        Column(f"{prefix}sd_pp", f"{title}SD", "pp"), Column(f"{prefix}low_pp", f"{title}95 % from", "signed_pp"),
        Column(f"{prefix}high_pp", f"{title}to", "signed_pp"), Column(f"{prefix}p", f"{title}p (t)", "p"),
        Column(f"{prefix}sign_flip_p", f"{title}p (sign-flip)", "p"),
        Column(f"{prefix}mde_pp", f"{title}detectable, pp", "pp"),
    )  # fmt: skip


def _comparisons(view: View, axis: str) -> Table:
    columns = (
        *_PAIR, Column("role", "role", "text", FILES_ONLY), *_summary_columns(),
        Column("sign_flip_floor", "sign-flip floor", "p"),
        Column("fresh_n", "fresh n", "count"), Column("fresh_mean_pp", "fresh mean, pp", "signed_pp"),
        Column("fresh_low_pp", "fresh from", "signed_pp", NOT_IN_PRINT),
        Column("fresh_high_pp", "fresh to", "signed_pp", NOT_IN_PRINT),
        Column("bh", "p, BH", "p"), Column("holm", "p, Holm", "p"),
        Column("differences_pp", "per seed, pp", "text", CSV_ONLY),
        _NOTE, _RUNS,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for found in view.comparisons(axis, comparable=False):
        if found.status == "n/a":
            continue
        fresh = found.fresh
        rows.append(
            (
                found.task, found.left, found.right, found.role, *_summary(found.all),
                None if found.all is None else found.all.sign_flip_floor,
                None if fresh is None else fresh.n, None if fresh is None else fresh.mean,
                None if fresh is None else fresh.low, None if fresh is None else fresh.high, found.bh, found.holm,
                _per_seed(found.all), found.reason or None, Runs(found.run_ids),
            )
        )  # fmt: skip
    return Table(
        f"comparisons-{axis}", f"{AXIS_NAMES[axis]}: every comparison", columns, tuple(rows), stub=3,
        empty="The study has no comparison on this axis.",
        note="Accuracy on test, left minus right, paired within seed. Detectable: the smallest true difference that "
        "would be found in 80 % of repetitions with this SD and so many seeds. Fresh leaves the selection seed "
        f"({view.results.selection_seed}) out. The sign-flip p cannot fall below its floor.",
    )  # fmt: skip


def _per_seed(found: Paired | None) -> str | None:
    if found is None:
        return None
    return " ".join(f"{seed}:{value!r}" for seed, value in zip(found.seeds, found.differences, strict=True))


def _d_on_g2(view: View) -> Table:
    papers = {task: paper_task(view.results, task) for task in view.results.tasks}
    beside = any(papers.values())
    columns = [
        Column("task", "task"), Column("base", "on"), Column("point", "point"), Column("d", "d", "coefficient"),
        *_summary_columns(),
    ]  # fmt: skip
    if beside:
        columns.append(Column("paper_pp", "paper, s42, pp", "signed_pp"))
    rows: list[tuple[Value, ...]] = []
    for found in view.comparisons("gap"):
        gate = view.gate(found.task, found.left)
        d = None if gate is None else gate.d
        row: list[Value] = [found.task, found.right, found.left, d, *_summary(found.all)]
        if beside:
            paper = papers[found.task]
            printed: Mapping[float, float] = d_on_g2(paper) if paper and found.right == "G2" else {}
            row.append(printed.get(d) if d is not None else None)
        rows.append(tuple(row))
    return Table(
        "d-on-g2", "Adding the gap coefficient d", tuple(columns), tuple(rows), stub=3,
        empty="The study has no point with d beside the same point without.",
        note="Difference to the same point with d = 0." + (f" {SOURCE}" if beside else ""),
    )  # fmt: skip


def _replication(view: View) -> Table:
    """What was run again on fresh seeds, and whatever the paper replicated and this study has."""
    columns = (
        Column("axis", "axis"), *_PAIR, Column("selected_pp", "selection seed, pp", "signed_pp"), *_summary_columns(),
        Column("fresh_n", "fresh n", "count"), Column("fresh_mean_pp", "fresh mean, pp", "signed_pp"),
        Column("fresh_low_pp", "fresh from", "signed_pp"), Column("fresh_high_pp", "fresh to", "signed_pp"),
        Column("fresh_p", "fresh p", "p"), Column("holm", "p, Holm", "p"),
        Column("paper_one_seed_pp", "paper s42", "signed_pp"), Column("paper_mean_pp", "paper mean", "signed_pp"),
        Column("paper_sd_pp", "paper SD", "pp"), Column("paper_low_pp", "paper from", "signed_pp"),
        Column("paper_high_pp", "paper to", "signed_pp"), Column("paper_p", "paper p", "p"), _RUNS,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    any_printed = False
    for found in view.analysis.comparisons:
        paper = paper_task(view.results, found.task)
        printed = nine(paper).get((found.left, found.right)) if paper else None
        if found.status == "n/a" or (found.role != "replication" and printed is None):
            continue
        any_printed = any_printed or printed is not None
        fresh = found.fresh
        theirs: tuple[Value, ...] = (None,) * 6
        if printed is not None:
            theirs = (printed.one_seed, printed.mean, printed.sd, printed.low, printed.high, printed.p)
        rows.append(
            (
                found.axis, found.task, found.left, found.right, _at(found.all, view.results.selection_seed),
                *_summary(found.all),
                *((fresh.n, fresh.mean, fresh.low, fresh.high, fresh.p) if fresh else (None,) * 5),
                found.holm, *theirs, Runs(found.run_ids),
            )
        )  # fmt: skip
    kept = [i for i, column in enumerate(columns) if any_printed or not column.key.startswith("paper_")]
    return Table(
        "replication", "Replication: headline comparisons over seeds", tuple(columns[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in rows), stub=4,
        empty="The study replicates no comparison, and has none of the paper's nine.",
        note=f"The selection seed ({view.results.selection_seed}) is left out of what is called fresh; Holm is over "
        "these comparisons." + (f" {SOURCE}" if any_printed else ""),
    )  # fmt: skip


def _at(found: Paired | None, seed: int) -> float | None:
    if found is None or seed not in found.seeds:
        return None
    return found.differences[found.seeds.index(seed)]


# ---------------------------------------------------------------------------------------------------- groups


def _groups(view: View) -> Table:
    columns = (
        Column("axis", "axis"), Column("task", "task"), Column("cells", "cells", "count"), Column("na", "N/A", "count"),
        Column("missing", "missing", "count"), *_summary_columns(), Column("sign_flip_floor", "sign-flip floor", "p"),
        *_summary_columns("fresh"), Column("fresh_sign_flip_floor", "fresh floor", "p"), Column("holm", "p, Holm", "p"),
        Column("mixed_pp", "mixed model, pp", "signed_pp", CSV_ONLY),
        Column("mixed_p", "mixed p (too small)", "p", CSV_ONLY), _NOTE,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for group in _shown_groups(view):
        mixed = group.mixed
        note = group.fresh.reason if isinstance(group.fresh, NotApplicable) else group.fresh.note
        rows.append(
            (
                group_name(group.axis, group.restriction), group.task, group.comparable, group.not_applicable,
                group.missing,
                *_summary(group.all), _floor(group.all), *_summary(group.fresh), _floor(group.fresh), group.holm,
                mixed if isinstance(mixed, NotApplicable) else mixed.mean,
                mixed if isinstance(mixed, NotApplicable) else mixed.p,
                note or None,
            )
        )  # fmt: skip
    return Table(
        "groups", "Group claims", columns, tuple(rows), stub=2, empty="There is no comparison yet.",
        note="Mean difference of all cells of an axis, per (task, seed) block; t and sign-flip are over blocks, never "
        "over cells. Fresh leaves the selection seed out and is the one that confirms. Holm is over the pooled axes.",
    )  # fmt: skip


def _shown_groups(view: View) -> list[GroupEvidence]:
    """All; of a study with one task those of all tasks, which are the same numbers."""
    alone = len(view.results.tasks) == 1
    return [group for group in view.analysis.groups if group.task == ALL_TASKS or not alone]


def _floor(claim: BlockClaim | NotApplicable) -> Value:
    return claim if isinstance(claim, NotApplicable) else claim.sign_flip_floor


def _wins(view: View) -> Table:
    columns = (
        Column("axis", "axis"), Column("task", "task"), Column("cells", "cells", "count"),
        Column("wins", "wins", "count"),
        Column("ties", "ties", "count"), Column("losses", "losses", "count"),
        Column("naive_p", "p, cells independent", "p"),
        Column("correlated_p", "p, shared runs kept", "p"), Column("naive_variance", "variance, independent", "number"),
        Column("null_variance", "variance, shared runs", "number"), Column("effective_n", "effective cells", "number"),
        _NOTE,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for group in _shown_groups(view):
        count = group.wins
        name = group_name(group.axis, group.restriction)
        if isinstance(count, WinCount):
            rows.append(
                (
                    name, group.task, count.cells, count.wins, count.ties, count.losses, count.naive_p,
                    count.correlated_p,
                    count.naive_variance, count.null_variance, count.effective_n, count.note or None,
                )
            )  # fmt: skip
        else:
            rows.append((name, group.task, group.comparable, *(count,) * 8, count.reason))
    return Table(
        "wins", "Cells won, tied and lost", columns, tuple(rows), stub=2, empty="There is no comparison yet.",
        note="By the mean over seeds. Cells share runs, so that a count varies more than independent ones would: the "
        "second p keeps what is shared, and effective cells are the independent ones that it is worth.",
    )  # fmt: skip


def _best(view: View) -> Table:
    papers = {task: paper_task(view.results, task) for task in view.results.tasks}
    beside = any(papers.values())
    columns = [
        Column("task", "task"), Column("side", "side"), Column("chosen", "best on validation"),
        Column("chosen_val", "its val, %", "percent"), Column("chosen_test", "its test, %", "percent"),
        Column("observed", "best on test (optimistic)"), Column("observed_test", "its test, %", "percent"),
    ]  # fmt: skip
    if beside:
        columns.append(Column("paper_observed", "paper's best on test, s42, %", "percent"))
    rows: list[tuple[Value, ...]] = []
    for task, selection in view.analysis.selection.items():
        paper = papers.get(task)
        printed = best_observed(paper) if paper else {}
        for side in [*(s for s in _SIDES if s in selection.sides), *(s for s in selection.sides if s not in _SIDES)]:
            found = selection.sides[side]
            chosen, observed = found.chosen, found.observed
            row: list[Value] = [task, side]
            row += [chosen] * 3 if isinstance(chosen, NotApplicable) else [chosen.label, chosen.val, chosen.test]
            row += [observed] * 2 if isinstance(observed, NotApplicable) else [observed.label, observed.test]
            rows.append((*row, printed.get(side)) if beside else tuple(row))
    return Table(
        "best-observed", "The best of each side", tuple(columns), tuple(rows), stub=2, empty="No run is done.",
        note="Means over the seeds of the sweep. What is best on test was picked by what it is judged by, and is "
        "optimistic; what is best on validation is not." + (f" {SOURCE}" if beside else ""),
    )  # fmt: skip


def _anova(view: View) -> Table:
    columns = (
        Column("task", "task"), Column("points", "points", "count"), Column("seeds", "seeds", "count"),
        Column("runs", "runs", "count"), Column("f", "F of points", "number"), Column("df", "df"),
        Column("p", "p", "p"),
        Column("seed_f", "F of seeds", "number"), Column("seed_p", "p", "p"), Column("sd_pp", "pooled SD, pp", "pp"),
        _NOTE,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task, found in view.analysis.anova.items():
        if isinstance(found, NotApplicable):
            rows.append((task, *(found,) * 9, found.reason))
        else:
            rows.append(
                (
                    task, found.points, found.seeds, found.runs, found.f, f"{found.df[0]}, {found.df[1]}", found.p,
                    found.seed_f, found.seed_p, found.sd, found.note or None,
                )
            )  # fmt: skip
    return Table(
        "anova", "Is there any difference among the points of a task?", columns, tuple(rows), empty="No run is done.",
        note="Two-way analysis of variance, point + seed, without interaction.",
    )  # fmt: skip


def _power(view: View) -> Table:
    columns = (
        Column("axis", "axis"), Column("task", "task"), Column("pairs", "comparisons", "count"),
        Column("seeds", "seeds", "count"), Column("sd_pp", "SD of differences, pp", "pp"),
        Column("mde_pp", "detectable now, pp", "pp"), Column("seeds_for_1", "seeds for 1 pp", "count"),
        Column("seeds_for_2", "for 2 pp", "count"), Column("seeds_for_3", "for 3 pp", "count"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for axis in view.axes:
        for task in view.results.tasks:
            pairs = [found.all for found in view.comparisons(axis, task) if found.all is not None]
            sd = view.spread(axis, task)
            if not pairs:
                continue
            n = min(pair.n for pair in pairs)
            if not sd:
                rows.append((axis, task, len(pairs), n, sd, *(NotApplicable("no SD over seeds"),) * 4))
                continue
            least = minimum_detectable(sd, n) if n > 1 else None
            rows.append((axis, task, len(pairs), n, sd, least, *(seeds_needed(sd, gap) for gap in (1.0, 2.0, 3.0))))
    return Table(
        "power", "What could have been seen, and how many seeds it takes", columns, tuple(rows), stub=2,
        empty="There is no comparison yet.",
        note="For one comparison: two-sided paired t-test at .05 with 80 % power, with the pooled SD over seeds of the "
        "axis' differences.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the rest


def _controls(view: View) -> Table:
    columns = (
        *_PAIR, *_summary_columns(), Column("left_lam", "E[λ] left", "lam"), Column("right_lam", "E[λ] right", "lam"),
        Column("left_lam_sd", "SD left", "lam"), Column("right_lam_sd", "SD right", "lam"), _RUNS,
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for found in [*view.comparisons("control"), *view.comparisons("isolation")]:
        stats = [_lam(view, found, side) for side in (found.left, found.right)]
        rows.append(
            (
                found.task, found.left, found.right, *_summary(found.all), *(mean for mean, _ in stats),
                *(sd for _, sd in stats),
                Runs(found.run_ids),
            )
        )  # fmt: skip
    return Table(
        "controls", "Controls: shuffled λ, and constants with the same mean", columns, tuple(rows), stub=3,
        empty="The study has no control.",
        note="A shuffled control has the gate's values of λ at other tokens; a twin has their mean at all tokens. What "
        "the gate gains over the first is due to where λ goes, over the second to λ varying at all.",
    )  # fmt: skip


def _lam(view: View, found: ComparisonEvidence, point: str) -> tuple[Value, Value]:
    stats = [run.lam_stats for run in view.done(found.task, point).values() if run.lam_stats is not None]
    return (fmean(s.mean for s in stats), fmean(s.sd for s in stats)) if stats else (None, None)


def _examples(view: View) -> Table:
    columns = (
        Column("axis", "axis"), *_PAIR, Column("mean_pp", "mean, pp", "signed_pp"),
        Column("low_pp", "95 % from", "signed_pp"),
        Column("high_pp", "to", "signed_pp"), Column("resampled", "resampled"), Column("examples", "examples", "count"),
        Column("mcnemar", "only left right / only right right, exact p, per seed"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for found in view.analysis.comparisons:
        boot = found.bootstrap
        if boot is None and not found.mcnemar:
            continue
        tests = "; ".join(f"s{seed}: {t.left_only}/{t.right_only}, p {t.p:.3f}" for seed, t in found.mcnemar)
        interval = (boot.mean, boot.low, boot.high, boot.resampled, boot.examples) if boot is not None else (None,) * 5
        rows.append((found.axis, found.task, found.left, found.right, *interval, tests or None))
    return Table(
        "examples", "Example by example", columns, tuple(rows), stub=4, empty="No pair of runs has predictions.",
        note="McNemar's test asks whether these two trained models differ on other examples; what another seed would "
        "give is outside of it. The bootstrap says what it resampled.",
    )  # fmt: skip


def _not_applicable(view: View) -> Table:
    columns = (Column("task", "task"), Column("axis", "axis"), Column("left", "point"), Column("right", "against"),
               Column("reason", "why there is none"))  # fmt: skip
    seen: dict[tuple[Value, ...], None] = {}
    for found in view.results.comparisons:
        if found.status == "n/a":
            seen[found.task, found.axis, found.left, found.restriction or found.right, found.reason] = None
    return Table(
        "not-applicable", "Cells that cannot be by construction", columns, tuple(seen), stub=4, empty="There are none.",
        note="N/A is no missing number: the restriction keeps nothing of such a point.",
    )  # fmt: skip
