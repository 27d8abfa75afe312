"""Figures of differences: every seed, their mean and its interval, one row per comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gatespace.evidence.records import ALL_TASKS, BlockClaim, ComparisonEvidence, Summary
from gatespace.report.drawing import (
    BAND,
    BLUE,
    GREEN,
    INK,
    KEY_ROW,
    MUTED,
    ORANGE,
    PAPER,
    PINK,
    Chart,
    canvas,
    heading,
    heading_rows,
    rows_panel,
)
from gatespace.report.table import Column, Table, Value, shown
from gatespace.report.view import AXIS_NAMES, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["difference_charts"]

_ROW = 0.185
_FOREST = ("restriction", "static", "published", "control")
_OTHER: Mapping[str, str] = {
    "restriction": "restrictions", "isolation": "mean-matched twin", "control": "shuffled λ", "static": "constant λ",
    "published": "published methods", "gap": "same point, d = 0",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of differences in pp; without a summary it is the heading of those below it."""

    label: str
    summary: Summary | None = None
    dots: tuple[tuple[float, bool], ...] = ()
    """Single differences, and whether they are of the selection seed."""
    fresh: float | None = None
    colour: str = BLUE


def difference_charts(view: View) -> list[Chart]:
    """The overview, then isolation, gap signal and forests task by task."""
    charts = [_overview(view)]
    for task in view.results.tasks:
        charts.append(_isolation(view, task))
        charts.append(_gap(view, task))
        charts += [_forest(view, task, axis) for axis in _FOREST]
    return [chart for chart in charts if chart.data.rows]


# ---------------------------------------------------------------------------------------------------- the charts


def _overview(view: View) -> Chart:
    rows: list[Row] = []
    tasks = view.results.tasks if len(view.results.tasks) == 1 else (ALL_TASKS, *view.results.tasks)
    for task in tasks:
        mine = []
        for group in view.analysis.groups:
            split = any(g.restriction for g in view.analysis.groups if (g.axis, g.task) == (group.axis, task))
            if group.task != task or not isinstance(group.all, BlockClaim) or (split and group.restriction is None):
                continue
            dots = tuple((b.mean, b.seed == view.results.selection_seed) for b in group.all.blocks)
            fresh = group.fresh.mean if isinstance(group.fresh, BlockClaim) else None
            mine.append(Row(group.restriction or _OTHER[group.axis], group.all, dots, fresh))
        if mine:
            rows += [Row("all tasks together" if task == ALL_TASKS else task), *mine]
    return _chart(
        view, "overview", "The family against everything it is compared with", rows,
        "Mean difference of all cells of an axis, family minus the other side, in percentage points of test accuracy; "
        "one mark per (task, seed) block.",
    )  # fmt: skip


def _isolation(view: View, task: str) -> Chart:
    found = view.comparisons("isolation", task)
    on_rkl = [one for one in found if one.right.startswith("twin-rkl")]
    on_lam = [one for one in found if one not in on_rkl]
    rows = [Row("matched on E[λ]")] if on_rkl and on_lam else []
    rows += [_row(view, one, one.left, BLUE) for one in on_lam]
    rows += [Row("matched on RKL")] if on_rkl else []
    rows += [_row(view, one, one.left, ORANGE) for one in on_rkl]
    se = view.sampling_se(task)
    band = (
        f" The grey band is ±1 binomial SE of one model's accuracy ({se:.2f} pp): no error of a difference."
        if se
        else ""
    )
    return _chart(
        view, f"isolation-{task}", f"{task}: dynamic λ minus its mean-matched constant", rows,
        "Each point minus the training at the constant λ that it had on average, in pp of test accuracy." + band,
        task=task, band=se, sides=("dynamic", "constant"),
    )  # fmt: skip


def _gap(view: View, task: str) -> Chart:
    rows: list[Row] = []
    found = view.comparisons("gap", task)
    for number, base in enumerate(dict.fromkeys(one.right for one in found)):
        mine = [one for one in found if one.right == base]
        rows.append(Row(f"on {base}"))
        for one in mine:
            gate = view.gate(task, one.left)
            label = one.left if gate is None else f"d = {gate.d:+g}".replace("-", "−")
            rows.append(_row(view, one, label, (BLUE, GREEN, ORANGE, PINK)[number % 4]))
    return _chart(
        view, f"gap-{task}", f"{task}: what the gap signal adds", rows,
        "Each point with a gap coefficient d minus the same point with d = 0, in pp of test accuracy.", task=task,
        sides=("with d", "without d"),
    )  # fmt: skip


def _forest(view: View, task: str, axis: str) -> Chart:
    rows = []
    for found in view.comparisons(axis, task):
        label = f"{found.left} − {found.right}" if axis != "control" else f"{found.left} − shuffled"
        rows.append(_row(view, found, label, ORANGE if found.restriction == "entropy-only" else BLUE))
    return _chart(
        view, f"forest-{axis}-{task}", f"{task}: {AXIS_NAMES[axis][0].lower()}{AXIS_NAMES[axis][1:]}", rows,
        "Left minus right in pp of test accuracy, paired within seed.", task=task,
    )  # fmt: skip


def _row(view: View, found: ComparisonEvidence, label: str, colour: str) -> Row:
    assert found.all is not None
    dots = tuple(
        (value, seed == view.results.selection_seed)
        for seed, value in zip(found.all.seeds, found.all.differences, strict=True)
    )
    return Row(label, found.all, dots, found.fresh.mean if found.fresh is not None else None, colour)


# ---------------------------------------------------------------------------------------------------- drawing


def _chart(
    view: View,
    name: str,
    title: str,
    rows: Sequence[Row],
    about: str,
    *,
    task: str = "",
    band: float | None = None,
    sides: tuple[str, str] = ("family", "other"),
) -> Chart:
    columns = (
        Column("row", "comparison"), Column("n", "n", "count"), Column("mean", "mean, pp", "signed_pp"),
        Column("low", "95 % from", "signed_pp"), Column("high", "to", "signed_pp"),
        Column("fresh", "without selection seed, pp", "signed_pp"), Column("each", "each, pp"),
    )  # fmt: skip
    cells: list[tuple[Value, ...]] = []
    group = ""
    for row in rows:
        if row.summary is None:
            group = row.label
            continue
        found = row.summary
        each = ", ".join(shown(value, "signed_pp") for value, _ in row.dots)
        label = f"{group}: {row.label}" if group else row.label
        cells.append((label, found.n, found.mean, found.low, found.high, row.fresh, each))
    data = Table(name, title, columns, tuple(cells))
    seed = view.results.selection_seed
    return Chart(name, title, f"{about} {_finding(rows)}", data, lambda: _draw(rows, seed, band, sides), task)


def _finding(rows: Sequence[Row]) -> str:
    """What is to be seen, in words."""
    found = [row for row in rows if row.summary is not None]
    means = [row.summary.mean for row in found if row.summary is not None]
    if not means:
        return ""
    only = found[0].summary
    if len(found) == 1 and only is not None:
        text = f"The mean is {_signed(only.mean)} pp"
        if only.low is None or only.high is None:
            return text + ", without an interval."
        return text + f", its interval from {_signed(only.low)} to {_signed(only.high)} pp."
    apart = [row.label for row in found if row.summary is not None and _leaves_out_zero(row.summary)]
    some = [row for row in found if row.summary is not None and row.summary.low is not None]
    text = f"Means run from {_signed(min(means))} to {_signed(max(means))} pp; "
    text += f"{sum(m > 0 for m in means)} of {len(means)} are above 0. "
    if not some:
        return text + "One seed has no interval."
    if not apart:
        return text + f"All {len(some)} intervals hold 0."
    return text + f"{len(apart)} of {len(some)} intervals leave out 0; about one in twenty does by chance alone."


def _signed(value: float) -> str:
    return shown(value, "signed_pp").replace("-", "−")


def _leaves_out_zero(found: Summary) -> bool:
    return found.low is not None and found.high is not None and (found.low > 0 or found.high < 0)


def _draw(rows: Sequence[Row], selection_seed: int, band: float | None, sides: tuple[str, str]) -> Figure:
    whole = any(row.summary is not None and row.summary.low is not None for row in rows)
    several = any(len(row.dots) > 1 for row in rows)
    key = [("● mean", BLUE)] if several else []
    key += [("○ one seed", MUTED), (f"◇ selection seed {selection_seed}", MUTED)]
    if any(row.fresh is not None for row in rows) and several:
        key.append(("| mean without it", INK))
    if whole:
        key.append(("— 95 % interval (arrow: runs on)", BLUE))
    top = 0.12 + KEY_ROW * heading_rows(key)
    figure = canvas(top + 0.5 + _ROW * len(rows))
    axes = rows_panel(figure, [row.label for row in rows], top=top, bottom=0.42)
    heading(figure, key)
    for row, text in zip(rows, axes.get_yticklabels(), strict=True):
        if row.summary is None:
            text.set_fontweight("bold")
    values = [abs(value) for row in rows for value, _ in row.dots]
    limit = max(1.0, 1.3 * max(values, default=1.0), 1.2 * (band or 0.0))
    if band is not None:
        axes.axvspan(-band, band, color=BAND, zorder=0, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8, zorder=1)
    axes.set_xlim(-limit, limit)
    for place, row in enumerate(rows):
        _draw_row(axes, place, row, limit)
    axes.set_xlabel(f"← {sides[1]} better  ·  pp  ·  {sides[0]} better →")
    return figure


def _draw_row(axes: Axes, place: int, row: Row, limit: float) -> None:
    found = row.summary
    if found is None:
        return
    if found.low is not None and found.high is not None:
        low, high = max(found.low, -limit), min(found.high, limit)
        axes.plot([low, high], [place, place], color=row.colour, linewidth=1.4, solid_capstyle="butt", zorder=2)
        for end, cut, marker in ((low, found.low < -limit, "<"), (high, found.high > limit, ">")):
            if cut:
                axes.plot([end], [place], marker=marker, color=row.colour, markersize=4.5, clip_on=False, zorder=3)
    for selected, marker in ((False, "o"), (True, "D")):
        dots = [value for value, own in row.dots if own == selected]
        if dots:
            axes.plot(
                dots, [place] * len(dots), linestyle="none", marker=marker, markersize=3.6 if selected else 4,
                markerfacecolor=PAPER, markeredgecolor=MUTED, markeredgewidth=0.8, zorder=4,
            )  # fmt: skip
    if len(row.dots) > 1:
        axes.plot([found.mean], [place], marker="o", markersize=5.5, color=row.colour, markeredgecolor=PAPER, zorder=5)
        if row.fresh is not None:
            axes.plot([row.fresh], [place], marker="|", markersize=9, markeredgewidth=1.4, color=INK, zorder=6)
