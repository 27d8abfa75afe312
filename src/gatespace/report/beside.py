"""Comparisons that a reference has replicated and this study has run on fresh seeds, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from gatespace.evidence.records import Paired
from gatespace.report.drawing import BLUE, INK, MUTED, ORANGE, PAPER, Chart, rows_figure
from gatespace.report.table import Table, count, shown, signed_pp, text
from gatespace.report.view import Published, Reference, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Both:
    """One comparison in a reference and in the study; differences in pp.

    Args:
        task: Task name in the study.
        left: Label of the first point.
        right: Label of the second point.
        theirs: The published difference.
        fresh: The reference's mean over its seeds without the first, the selection seed; None if not published.
        ours: Over the study's fresh seeds; None if no pair of runs is done.
    """

    task: str
    left: str
    right: str
    theirs: Published
    fresh: float | None
    ours: Paired | None

    def contains(self, value: float | None) -> bool:
        """Whether our interval contains a value."""
        ours = self.ours
        if ours is None or ours.low is None or ours.high is None or value is None:
            return False
        return ours.low <= value <= ours.high

    @property
    def verdict(self) -> str:
        """Whether our interval contains the reference's means, in words."""
        ours = self.ours
        if ours is None:
            return "not run yet"
        if ours.low is None or ours.high is None:
            return "no interval"
        means = {"mean": self.theirs.mean, "fresh-seed mean": self.fresh}
        known = {name: value for name, value in means.items() if value is not None}
        inside = [name for name, value in known.items() if self.contains(value)]
        if not inside:
            side = {value > ours.mean for value in known.values()}
            return "contains neither" + (
                "" if len(side) > 1 else ": ours is lower" if True in side else ": ours is higher"
            )
        return "contains both" if len(inside) > 1 else f"contains the {inside[0]}{' only' * (len(known) > 1)}"

    def sentence(self, name: str, reference: Reference) -> str:
        """Return the comparison as a sentence."""
        theirs = f"the {name} has {_pp(self.theirs.mean)} pp over {len(reference.seeds)} seeds"
        if self.fresh is not None:
            theirs += f" and {_pp(self.fresh)} pp on its {len(reference.seeds) - 1} fresh ones"
        here = "not run here yet"
        if (ours := self.ours) is not None:
            here = f"here {_pp(ours.mean)} pp over {ours.n} seed{'s' * (ours.n != 1)}, without an interval"
            if ours.low is not None:
                interval = f"95 % CI [{_pp(ours.low)}, {_pp(ours.high)}]"
                here = f"here {_pp(ours.mean)} pp, {interval} over {ours.n} seeds, which {self.verdict}"
        return f"{self.task}, {self.left} minus {self.right}: {theirs}; {here}."


def both(view: View, reference: Reference) -> list[Both]:
    """Return the comparisons that a reference has replicated and this study replicates on fresh seeds."""
    found = []
    for one in view.analysis.comparisons:
        printed = reference.differences(view.data(one.task)).get((one.left, one.right))
        if one.role == "replication" and one.status != "n/a" and printed is not None and printed.mean is not None:
            accuracies = reference.accuracies(view.data(one.task))
            left, right = (accuracies.get(point, {}) for point in (one.left, one.right))
            seeds = [seed for seed in reference.seeds[1:] if seed in left and seed in right]
            fresh = 100 * fmean(left[seed] - right[seed] for seed in seeds) if seeds else None
            found.append(Both(one.task, one.left, one.right, printed, fresh, one.fresh))
    return found


def sentences(view: View) -> list[str]:
    """Return, per reference, a sentence about all its comparisons, then one about each."""
    found = []
    for name, reference in view.references.items():
        if rows := both(view, reference):
            found += [_finding(name, rows, reference), *(row.sentence(name, reference) for row in rows)]
    return found


def beside_tables(view: View) -> list[Table]:
    """Return a table for each reference that shares replicated comparisons with this study."""
    found = {name: (reference, both(view, reference)) for name, reference in view.references.items()}
    return [_table(name, reference, rows) for name, (reference, rows) in found.items() if rows]


def beside_charts(view: View) -> list[Chart]:
    """Return a figure for each of these tables."""
    charts = []
    for name, reference in view.references.items():
        if rows := both(view, reference):
            table, finding = _table(name, reference, rows), _finding(name, rows, reference)
            charts.append(Chart(table.name, table.title, finding, table, partial(_draw, name, rows, reference)))
    return charts


def _table(name: str, reference: Reference, rows: Sequence[Both]) -> Table:
    seeds = len(reference.seeds)
    columns = (
        text("task"), text("left"), text("right"), signed_pp("theirs", f"{name}, {seeds} seeds, pp"),
        signed_pp("fresh", f"{name}, {seeds - 1} fresh seeds, pp"), signed_pp("ours", "here, pp"),
        signed_pp("low", "95 % from"), signed_pp("high", "to"), count("n", "seeds"),
        text("verdict", f"our interval and the {name}'s means"),
    )  # fmt: skip
    records = [
        {
            **({} if row.ours is None else {**vars(row.ours), "ours": row.ours.mean}),
            "task": row.task, "left": row.left, "right": row.right, "theirs": row.theirs.mean, "fresh": row.fresh,
            "verdict": row.verdict,
        }
        for row in rows
    ]  # fmt: skip
    return Table.of(
        f"beside-{name}", f"The comparisons that the {name} has replicated, and the same here", columns, records,
        stub=3, note="Left minus right in pp of test accuracy, paired within seed; intervals are not adjusted for "
        f"their number. {reference.note}",
    )  # fmt: skip


def _finding(name: str, rows: Sequence[Both], reference: Reference) -> str:
    own = [row.ours for row in rows if row.ours is not None and row.ours.low is not None]
    if not own:
        return f"None of the {len(rows)} comparisons has an interval here yet: that takes two seeds."
    mean = sum(row.contains(row.theirs.mean) for row in rows)
    fresh = sum(row.contains(row.fresh) for row in rows)
    zero = sum(row.contains(0.0) for row in rows)
    found = f"{len(own)} of the {len(rows)} comparisons have an interval here. " if len(own) < len(rows) else ""
    found += (
        f"Of our {len(own)} intervals {mean} contain the mean that the {name} has over its {len(reference.seeds)} "
        f"seeds, {fresh} the mean of its fresh seeds, and {zero} contain 0. "
        f"Means run from {_range([one.mean for one in own])} pp here, from "
        f"{_range([row.theirs.mean for row in rows])} pp in the {name}, and from {_range([row.fresh for row in rows])} "
        "pp on its fresh seeds. "
    )
    if zero:
        found += "An interval with 0 in it does not tell a difference from none, whatever else it contains."
    return found.rstrip()


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{_pp(min(known))} to {_pp(max(known))}" if known else "– to –"


def _pp(value: float | None) -> str:
    return shown(value, "signed_pp").replace("-", "−")


def _draw(name: str, rows: Sequence[Both], reference: Reference) -> Figure:
    seeds = len(reference.seeds)
    key = [
        (f"■ {name}, {seeds} seeds", ORANGE), (f"□ {name}, {seeds - 1} fresh seeds", ORANGE), ("● here", BLUE),
        ("○ one seed here", MUTED), ("— 95 % interval (arrow: runs on)", INK),
    ]  # fmt: skip
    figure, axes = rows_figure([f"{row.task}: {row.left} − {row.right}" for row in rows], key, row=0.42)
    means = [value for row in rows for value in (row.theirs.mean, row.fresh) if value is not None]
    own = [row.ours for row in rows if row.ours is not None]
    means += [value for one in own for value in (one.mean, one.low, one.high, *one.differences) if value is not None]
    limit = 1.15 * max(1.0, *map(abs, means))
    axes.axvline(0, color=INK, linewidth=0.8, zorder=1)
    axes.set_xlim(-limit, limit)
    for place, row in enumerate(rows):
        _interval(axes, place - 0.16, (row.theirs.low, row.theirs.high), limit, ORANGE)
        for mean, inside in ((row.theirs.mean, ORANGE), (row.fresh, PAPER)):
            if mean is not None:
                axes.plot(
                    [mean], [place - 0.16], marker="s", markersize=5, color=ORANGE, markerfacecolor=inside, zorder=4
                )
        if row.ours is not None:
            _interval(axes, place + 0.16, (row.ours.low, row.ours.high), limit, BLUE)
            axes.plot(
                row.ours.differences, [place + 0.16] * row.ours.n, linestyle="none", color=MUTED, marker="o",
                markersize=3.6, markerfacecolor=PAPER, markeredgecolor=MUTED, markeredgewidth=0.8, zorder=3,
            )  # fmt: skip
            axes.plot(
                [row.ours.mean], [place + 0.16], marker="o", markersize=5.5, color=BLUE, markeredgecolor=PAPER, zorder=5
            )
    axes.set_xlabel("← right better  ·  pp of test accuracy, left − right  ·  left better →")
    return figure


def _interval(axes: Axes, place: float, ends: tuple[float | None, float | None], limit: float, colour: str) -> None:
    """Draw the interval as a line, with an arrow where it leaves the figure."""
    low, high = ends
    if low is None or high is None:
        return
    axes.plot([max(low, -limit), min(high, limit)], [place] * 2, color=colour, linewidth=1.4, zorder=2)
    for beyond, end, marker in ((low < -limit, -limit, "<"), (high > limit, limit, ">")):
        if beyond:
            axes.plot([end], [place], marker=marker, color=colour, markersize=4.5, clip_on=False, zorder=3)
