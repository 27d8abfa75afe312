"""Comparisons that a reference has replicated and this study has run on fresh seeds, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, variance
from typing import TYPE_CHECKING, NamedTuple

from scipy import stats  # type: ignore[import-untyped]

from gatespace.evidence.records import Paired
from gatespace.report.drawing import BLUE, INK, MUTED, ORANGE, PAPER, Chart, draw_interval, rows_figure
from gatespace.report.table import Table, count, signed, signed_pp, text
from gatespace.report.view import Published, Reference, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Gap(NamedTuple):
    """The reference's mean minus ours in pp, with a 95 % interval from the errors of both (Welch)."""

    mean: float
    low: float
    high: float


def gap(theirs: Sequence[float], ours: Sequence[float]) -> Gap | None:
    """Compare two independent sets of paired differences; None if either has one seed or both have no variance."""
    if min(len(theirs), len(ours)) < 2:
        return None
    # not ttest_ind: it warns if one side is constant, which is no problem here
    errors = [variance(side) / len(side) for side in (theirs, ours)]
    if sum(errors) == 0:
        return None
    df = sum(errors) ** 2 / sum(error**2 / (len(side) - 1) for error, side in zip(errors, (theirs, ours), strict=True))
    mean, half = fmean(theirs) - fmean(ours), float(stats.t.ppf(0.975, df)) * math.sqrt(sum(errors))
    return Gap(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Both:
    """One comparison in a reference and in the study; differences in pp."""

    task: str
    left: str
    right: str
    theirs: Published
    """The published difference."""
    differences: tuple[float, ...]
    """The reference's differences, one per seed, its selection seed first; empty if not published."""
    ours: Paired | None
    """Over the study's fresh seeds; None if no pair of runs is done."""
    learned: bool
    """Whether most runs of the task learned; see `learned`."""

    @property
    def fresh(self) -> float | None:
        """The reference's mean over its seeds without the selection seed."""
        return fmean(self.differences[1:]) if len(self.differences) > 1 else None

    @property
    def gap(self) -> Gap | None:
        """Theirs minus ours."""
        return None if self.ours is None else gap(self.differences, self.ours.differences)

    @property
    def verdict(self) -> str:
        """Whether the two differ, in words."""
        if self.ours is None:
            return "not run yet"
        if not self.learned:
            return "no verdict: runs did not learn"
        if self.gap is None:
            return "no interval"
        return (
            "theirs is higher"
            if self.gap.low > 0
            else "theirs is lower"
            if self.gap.high < 0
            else "no difference detected"
        )

    def sentence(self, name: str, reference: Reference) -> str:
        """Return the comparison as a sentence."""
        theirs = f"the {name} has {signed(self.theirs.mean)} pp over {len(reference.seeds)} seeds"
        here = "not run here yet"
        if (ours := self.ours) is not None:
            interval = f", 95 % CI [{signed(ours.low)}, {signed(ours.high)}]," if ours.low is not None else ""
            here = f"here {signed(ours.mean)} pp{interval} over {ours.n} seed{'s' * (ours.n != 1)}"
            if self.gap is not None:
                here += (
                    f"; theirs minus ours: {signed(self.gap.mean)} [{signed(self.gap.low)}, {signed(self.gap.high)}] pp"
                )
            here += f"; {self.verdict}"
        return f"{self.task}, {self.left} minus {self.right}: {theirs}; {here}."


def learned(view: View, task: str) -> bool:
    """Whether most runs of a task have learned to tell its labels apart.

    A run has if its balanced accuracy on test is above that of a constant answer and of the untrained student by two
    standard errors. Accuracy would not do: on hate, students that learned are below the most frequent label.
    """
    scores = [run.scores["test"] for run in view.results.done if run.spec.task == task and "test" in run.scores]
    baseline = view.results.baselines.get(task)
    before = baseline.start["test"].labels if baseline is not None and "test" in baseline.start else None
    start = 0.0 if before is None else before.balanced_accuracy
    above = [
        score.labels.balanced_accuracy - max(1 / len(score.labels.per_label), start) > 1 / math.sqrt(score.count)
        for score in scores
        if score.labels is not None
    ]
    return 2 * sum(above) >= len(above)


def both(view: View, reference: Reference) -> list[Both]:
    """Return the comparisons that a reference has replicated and this study replicates on fresh seeds."""
    rows = []
    for comparison in view.analysis.comparisons:
        task, points = comparison.task, (comparison.left, comparison.right)
        printed = reference.differences(view.data(task)).get(points)
        if comparison.role != "replication" or comparison.status == "n/a" or printed is None or printed.mean is None:
            continue
        accuracies = reference.accuracies(view.data(task))
        left, right = (accuracies.get(point, {}) for point in points)
        seeds = [seed for seed in reference.seeds if seed in left and seed in right]
        differences = tuple(100 * (left[seed] - right[seed]) for seed in seeds)
        rows.append(Both(task, *points, printed, differences, comparison.fresh, learned(view, task)))
    return rows


def sentences(view: View) -> list[str]:
    """Return, per reference, a sentence about all its comparisons, then one about each."""
    found = []
    for name, reference in view.references.items():
        if rows := both(view, reference):
            found += [_finding(rows), *(row.sentence(name, reference) for row in rows)]
    return found


def beside_tables(view: View) -> list[Table]:
    """Return a table for each reference that shares replicated comparisons with this study."""
    found = {name: (reference, both(view, reference)) for name, reference in view.references.items()}
    return [_table(view, name, reference, rows) for name, (reference, rows) in found.items() if rows]


def beside_charts(view: View) -> list[Chart]:
    """Return a figure for each of these tables."""
    charts = []
    for name, reference in view.references.items():
        if rows := both(view, reference):
            table, finding = _table(view, name, reference, rows), _finding(rows)
            charts.append(Chart(table.name, table.title, finding, table, partial(_draw, view, name, rows, reference)))
    return charts


def _table(view: View, name: str, reference: Reference, rows: Sequence[Both]) -> Table:
    seeds = len(reference.seeds)
    columns = (
        text("task"), text("left"), text("right"), signed_pp("theirs", f"{name}, {seeds} seeds, pp"),
        signed_pp("fresh", f"{name}, {seeds - 1} fresh seeds, pp"), signed_pp("ours", "here, pp"),
        signed_pp("low", "95 % from"), signed_pp("high", "to"), count("n", "seeds"),
        signed_pp("gap", "theirs minus ours, pp"), signed_pp("gap_low", "95 % from"), signed_pp("gap_high", "to"),
        text("verdict"),
    )  # fmt: skip
    records = [
        {
            **({} if row.ours is None else {**vars(row.ours), "ours": row.ours.mean}),
            **({} if row.gap is None else {"gap": row.gap.mean, "gap_low": row.gap.low, "gap_high": row.gap.high}),
            "task": row.task, "left": row.left, "right": row.right, "theirs": row.theirs.mean, "fresh": row.fresh,
            "verdict": row.verdict,
        }
        for row in rows
    ]  # fmt: skip
    return Table.of(
        f"beside-{name}", f"The comparisons that the {name} has replicated, and the same here", columns, records,
        stub=3, note=f"Left minus right in pp of test {view.metric_name}, paired within seed. Theirs minus ours: the "
        "difference of both means, with an interval from the errors of both (Welch's t). Intervals are not adjusted "
        f"for their number. The {name}'s mean includes its selection seed and is biased upward. {reference.note}",
    )  # fmt: skip


def _finding(rows: Sequence[Both]) -> str:
    done = [row for row in rows if row.ours is not None]
    gaps = [row.gap for row in done if row.learned and row.gap is not None]
    parts = []
    if len(done) < len(rows):
        parts.append(f"{len(done) or 'None'} of the {len(rows)} comparisons {'was' if len(done) == 1 else 'were'} run.")
    if unlearned := [row for row in done if not row.learned]:
        tasks = " and ".join(dict.fromkeys(row.task for row in unlearned))
        parts.append(f"{len(unlearned)} get no verdict: most runs on {tasks} did not learn.")
    if gaps:
        apart = sum(gap.low > 0 or gap.high < 0 for gap in gaps)
        widths = [(gap.high - gap.low) / 2 for gap in gaps]
        parts.append(
            f"Theirs minus ours excludes 0 in {apart or 'none'} of the {'other ' * bool(unlearned)}{len(gaps)}; these "
            f"95 % intervals are {min(widths):.1f} to {max(widths):.1f} pp wide to each side, so smaller discrepancies "
            "would not show."
        )
    elif not unlearned:
        parts.append("No comparison has an interval yet: that takes two seeds.")
    return " ".join(parts)


def _draw(view: View, name: str, rows: Sequence[Both], reference: Reference) -> Figure:
    seeds = len(reference.seeds)
    key = [
        (f"■ {name}, {seeds} seeds", ORANGE), (f"□ {name}, {seeds - 1} fresh seeds", ORANGE), ("● here", BLUE),
        ("○ one seed here", MUTED), ("— 95 % interval (arrow: runs on)", INK),
    ]  # fmt: skip
    if not all(row.learned for row in rows):
        key.append(("✖ here, runs did not learn: no verdict", MUTED))
    figure, axes = rows_figure([f"{row.task}: {row.left} − {row.right}" for row in rows], key, row=0.42)
    means = [value for row in rows for value in (row.theirs.mean, row.fresh) if value is not None]
    own = [row.ours for row in rows if row.ours is not None]
    means += [value for one in own for value in (one.mean, one.low, one.high, *one.differences) if value is not None]
    limit = 1.15 * max(1.0, *map(abs, means))
    axes.axvline(0, color=INK, linewidth=0.8, zorder=1)
    axes.set_xlim(-limit, limit)
    for place, row in enumerate(rows):
        draw_interval(axes, place - 0.16, (row.theirs.low, row.theirs.high), limit, ORANGE)
        for mean, inside in ((row.theirs.mean, ORANGE), (row.fresh, PAPER)):
            if mean is not None:
                axes.plot(
                    [mean], [place - 0.16], marker="s", markersize=5, color=ORANGE, markerfacecolor=inside, zorder=4
                )
        if row.ours is not None:
            colour, marker = (BLUE, "o") if row.learned else (MUTED, "X")
            draw_interval(axes, place + 0.16, (row.ours.low, row.ours.high), limit, colour)
            axes.plot(
                row.ours.differences, [place + 0.16] * row.ours.n, linestyle="none", color=MUTED, marker="o",
                markersize=3.6, markerfacecolor=PAPER, markeredgecolor=MUTED, markeredgewidth=0.8, zorder=3,
            )  # fmt: skip
            axes.plot(
                [row.ours.mean], [place + 0.16], marker=marker, markersize=6, color=colour, markeredgecolor=PAPER,
                zorder=5,
            )  # fmt: skip
    axes.set_xlabel(f"← right better  ·  pp of test {view.metric_name}, left − right  ·  left better →")
    return figure
