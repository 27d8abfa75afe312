"""All figures; here those of accuracies and of λ."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from gatespace.report.difference_charts import difference_charts
from gatespace.report.drawing import (
    BAND,
    BLUE,
    GREEN,
    INK,
    KEY_ROW,
    MUTED,
    ORANGE,
    PAPER,
    SKY,
    SMALL,
    Chart,
    canvas,
    heading,
    heading_rows,
    rows_panel,
)
from gatespace.report.table import Column, Table, Value, shown
from gatespace.report.training_charts import confusion_chart, cost_chart, curves_chart, power_chart
from gatespace.report.view import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["all_charts"]

_ROW = 0.205


def all_charts(view: View) -> list[Chart]:
    """Every figure that the study has something for, in the order of the page."""
    charts = difference_charts(view)
    for task in view.results.tasks:
        charts += [
            _abc(view, task),
            _restrictions(view, task),
            _lam(view, task),
            curves_chart(view, task),
            confusion_chart(view, task),
        ]
    charts += [cost_chart(view), power_chart(view)]
    return [chart for chart in charts if chart.data.rows]


# ---------------------------------------------------------------------------------------------------- accuracies


def _abc(view: View, task: str) -> Chart:
    """The points without a gap coefficient."""
    points = [p for p in view.points(task, "point") if (g := view.gate(task, p)) is not None and g.d == 0]
    found = {p: view.sweep(task, p) for p in points}
    found = {p: scores for p, scores in found.items() if scores}
    columns = (
        Column("point", "point"), Column("gate", "a,b,c,d"), Column("mean", "mean, %", "percent"),
        Column("each", "each seed, %"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    means: dict[str, float] = {}
    for point, scores in found.items():
        shares = [score.accuracy for score in scores.values()]
        means[point] = fmean(shares)
        each = ", ".join(f"s{seed} {shown(score.accuracy, 'percent')}" for seed, score in scores.items())
        rows.append((point, str(view.gate(task, point)), means[point], each))
    se = view.sampling_se(task)
    finding = ""
    if means:
        spread = 100 * (max(means.values()) - min(means.values()))
        best = max(means, key=lambda p: means[p])
        finding = (
            f"Mean test accuracy of the points with d = 0 spans {spread:.2f} pp, from "
            f"{100 * min(means.values()):.2f} % to {100 * max(means.values()):.2f} % ({best})."
        )
        if se:
            finding += f" The sampling SE of one model is {se:.2f} pp (grey band about the grid's mean)."

    def draw() -> Figure:
        key = [("● mean", BLUE), ("○ one seed", MUTED)]
        figure = canvas(0.78 + _ROW * len(means))
        labels = [f"{p}  ({str(view.gate(task, p)).removesuffix(',0')})" for p in means]
        axes = rows_panel(figure, labels, top=0.32, bottom=0.45)
        heading(figure, key)
        middle = 100 * fmean(means.values())
        if se:
            axes.axvspan(middle - se, middle + se, color=BAND, linewidth=0, zorder=0)
        for place, (point, mean) in enumerate(means.items()):
            shares = [100 * score.accuracy for score in found[point].values()]
            if len(shares) > 1:
                axes.plot(
                    shares, [place] * len(shares), "o", markersize=4, markerfacecolor=PAPER, markeredgecolor=MUTED,
                    markeredgewidth=0.8,
                )  # fmt: skip
            axes.plot([100 * mean], [place], "o", markersize=6.5, color=BLUE, markeredgecolor=PAPER)
        axes.set_xlabel("test accuracy, %")
        _wide_enough(axes, 2.0)
        return figure

    return Chart(
        f"abc-{task}",
        f"{task}: the abc grid",
        finding,
        Table(f"abc-{task}", "abc grid", columns, tuple(rows)),
        draw,
        task,
    )


def _restrictions(view: View, task: str) -> Chart:
    """Family and matched restrictions, point by point."""
    columns = (
        Column("point", "point"), Column("family", "family, mean %", "percent"),
        Column("entropy", "entropy-only, mean %", "percent"), Column("gap", "gap-only, mean %", "percent"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    names = {c.left for c in view.results.comparisons if (c.task, c.axis) == (task, "restriction")}
    for point in [p for p in view.points(task, "point") if p in names]:
        cells: list[Value] = [_mean(view, task, point)]
        for kind in ("entropy-only", "gap-only"):
            pairs = [
                c
                for c in view.comparisons("restriction", task, comparable=False)
                if c.left == point and c.restriction == kind
            ]
            one = pairs[0] if pairs else None
            cells.append(
                "N/A" if one is not None and one.status == "n/a" else _mean(view, task, one.right) if one else None
            )
        if any(isinstance(cell, float) for cell in cells):
            rows.append((point, *cells))
    leads = [
        row[1] - other for row in rows for other in row[2:] if isinstance(row[1], float) and isinstance(other, float)
    ]
    finding = (
        f"By the mean over seeds the family is ahead in {sum(x > 0 for x in leads)} of {len(leads)} cells, behind in "
        f"{sum(x < 0 for x in leads)}; cells share runs, so this is a count and no test."
        if leads
        else "No pair is done yet."
    )

    def draw() -> Figure:
        key = [("● family", BLUE), ("◆ entropy-only", ORANGE), ("▲ gap-only", GREEN)]
        se = view.sampling_se(task)
        key += [(f"± one model's sampling SE: {se:.1f} pp", MUTED)] if se else []
        top = 0.14 + KEY_ROW * heading_rows(key)
        figure = canvas(top + 0.48 + _ROW * len(rows))
        axes = rows_panel(figure, [str(row[0]) for row in rows], top=top, bottom=0.42, right=0.9)
        heading(figure, key)
        for place, row in enumerate(rows):
            marks = [
                (100 * value, marker, colour, size)
                for value, (marker, colour, size) in zip(
                    row[1:], (("o", BLUE, 6.5), ("D", ORANGE, 5), ("^", GREEN, 6)), strict=True
                )
                if isinstance(value, float)
            ]
            xs = [mark[0] for mark in marks]
            if len(xs) > 1:
                axes.plot([min(xs), max(xs)], [place, place], color=MUTED, linewidth=0.8, zorder=2)
            for x, marker, colour, size in reversed(marks):
                axes.plot([x], [place], marker, markersize=size, color=colour, markeredgecolor=PAPER, zorder=4)
            none = [name for name, value in zip(("entropy", "gap"), row[2:], strict=True) if value == "N/A"]
            if none:
                text = "both N/A" if len(none) == 2 else f"{none[0]} N/A"
                axes.text(
                    1.02, place, text, transform=axes.get_yaxis_transform(), fontsize=SMALL, color=MUTED, va="center"
                )
        axes.set_xlabel("test accuracy, %")
        _wide_enough(axes, 2.0)
        return figure

    title = f"{task}: family and its matched restrictions"
    return Chart(
        f"restrictions-{task}", title, finding, Table(f"restrictions-{task}", title, columns, tuple(rows)), draw, task
    )


def _mean(view: View, task: str, point: str) -> float | None:
    scores = view.sweep(task, point)
    return fmean(score.accuracy for score in scores.values()) if scores else None


def _wide_enough(axes: Any, least: float) -> None:
    """An axis of differences that are noise must not look as if they were large."""
    low, high = axes.get_xlim()
    if high - low < least:
        middle = (low + high) / 2
        axes.set_xlim(middle - least / 2, middle + least / 2)


# ---------------------------------------------------------------------------------------------------- λ


def _lam(view: View, task: str) -> Chart:
    """One row per point: the histogram of λ over all tokens of all seeds."""
    columns = (
        Column("point", "point"), Column("mean", "E[λ]", "lam"), Column("sd", "SD", "lam"),
        Column("saturated", "saturated, %", "percent"), Column("tokens", "tokens", "count"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    shapes: list[tuple[str, list[float]]] = []
    for point in view.points(task, "point", "restriction", "control"):
        stats = [run.lam_stats for run in view.done(task, point).values() if run.lam_stats is not None]
        if not stats:
            continue
        counts = [float(sum(bins)) for bins in zip(*(s.hist for s in stats), strict=True)]
        means = [fmean(getattr(s, name) for s in stats) for name in ("mean", "sd", "saturated")]
        rows.append((point, *means, sum(s.tokens for s in stats)))
        shapes.append((point, counts))
    flat = [str(row[0]) for row in rows if isinstance(row[2], float) and row[2] < 0.05]
    means = [row[1] for row in rows if isinstance(row[1], float)]
    finding = ""
    if means:
        finding = f"E[λ] runs from {min(means):.3f} to {max(means):.3f} over {len(means)} points. " + (
            f"λ hardly varies (SD over tokens below 0.05) at {', '.join(flat)}."
            if flat
            else "Its SD over tokens is above 0.05 at every point."
        )

    def draw() -> Figure:
        step = 0.27
        figure = canvas(0.75 + step * len(shapes))
        axes = rows_panel(figure, [point for point, _ in shapes], top=0.28, bottom=0.42, right=1.2)
        axes.set_ylim(len(shapes) - 0.85, -0.95)
        width, height = figure.get_size_inches()
        figure.text(
            (width - 1.12) / width, 1 - 0.1 / height, "mean\u2003SD\u2003 sat.", fontsize=SMALL, color=MUTED, va="top"
        )
        figure.text(
            0.08 / width, 1 - 0.1 / height, "▏ mean; height: share of tokens", fontsize=SMALL, color=MUTED, va="top"
        )
        for place, ((_, counts), row) in enumerate(zip(shapes, rows, strict=True)):
            edges = [i / len(counts) for i in range(len(counts) + 1)]
            top = max(counts) or 1.0
            tops = [place + 0.1 - 0.85 * count / top for count in counts]
            axes.stairs(tops, edges, baseline=place + 0.1, fill=True, color=SKY, linewidth=0, zorder=2)
            axes.stairs(tops, edges, baseline=place + 0.1, color=BLUE, linewidth=0.7, zorder=3)
            mean, sd, saturated = (float(x) for x in row[1:4] if isinstance(x, float))
            axes.plot([mean, mean], [place + 0.1, place - 0.7], color=INK, linewidth=1.1, zorder=4)
            text = f"{mean:.2f}\u2002{sd:.2f}\u2002{100 * saturated:.0f} %"
            axes.text(1.03, place - 0.1, text, transform=axes.get_yaxis_transform(), fontsize=SMALL, va="center")
        axes.set_xlim(0, 1)
        axes.set_xlabel("← forward KL  ·  λ  ·  reverse KL →")
        return figure

    title = f"{task}: λ over the tokens of training"
    return Chart(f"lambda-{task}", title, finding, Table(f"lambda-{task}", title, columns, tuple(rows)), draw, task)
