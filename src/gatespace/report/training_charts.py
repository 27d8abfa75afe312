"""Figures of the course and the cost of training, of power, and of confusions."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gatespace.evidence.power import minimum_detectable
from gatespace.gating.coefficients import Gate
from gatespace.report.drawing import (
    AMBER,
    BAND,
    BLUE,
    GREEN,
    INK,
    KEY_ROW,
    MUTED,
    ORANGE,
    PINK,
    SKY,
    SMALL,
    WIDTH,
    Chart,
    canvas,
    heading,
    heading_rows,
    panel,
    rows_panel,
    short,
)
from gatespace.report.score_tables import confusion, confusion_models
from gatespace.report.table import Column, Table, Value
from gatespace.report.view import KIND_NAMES, KINDS, View
from gatespace.study.records import Score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["confusion_chart", "cost_chart", "curves_chart", "power_chart"]

_CURVE_POINTS = 60
_SEED_COUNTS = (2, 3, 4, 5, 6, 8, 10, 14, 20, 28, 40)
_MOST_LABELS = 12
"""Labels up to which a confusion matrix can be drawn legibly."""


# ---------------------------------------------------------------------------------------------------- training


def _group_of(gate: Gate | None, point: str, kind: str) -> str:
    if kind != "point":
        return "restrictions"
    return "family, d = 0" if gate is None or gate.d == 0 else "family, d > 0" if gate.d > 0 else "family, d < 0"


_GROUPS = {"family, d = 0": BLUE, "family, d > 0": ORANGE, "family, d < 0": GREEN, "restrictions": PINK}
_PANELS = (("loss", "loss"), ("lam_mean", "mean λ"), ("forward_kl", "forward KL"), ("reverse_kl", "reverse KL"))


def curves_chart(view: View, task: str) -> Chart:
    """Mean over seeds of each point, thinned out to what a line can show."""
    lines: dict[str, list[tuple[str, str, list[float], list[float]]]] = {}
    for point in view.points(task, "point", "restriction"):
        runs = list(view.done(task, point).values())
        curves = [run.curve() for run in runs]
        group = _group_of(view.gate(task, point), point, view.kind(task, point))
        for key, _ in _PANELS:
            xs, ys = _averaged(curves, key)
            if xs:
                lines.setdefault(key, []).append((point, group, xs, ys))
        xs, ys = _averaged([[e for e in run.evaluations() if e.get("split") == "val"] for run in runs], "accuracy")
        if len(xs) > 1:
            lines.setdefault("accuracy", []).append((point, group, xs, [100 * y for y in ys]))
    panels = [(key, name) for key, name in (*_PANELS, ("accuracy", "val accuracy, %")) if key in lines]
    columns = (
        Column("point", "point"),
        Column("what", "what"),
        Column("first", "first", "lam"),
        Column("last", "last", "lam"),
    )
    rows = tuple((point, name, ys[0], ys[-1]) for key, name in panels for point, _, _, ys in lines[key])
    finding = ""
    if "loss" in lines:
        firsts, lasts = [ys[0] for *_, ys in lines["loss"]], [ys[-1] for *_, ys in lines["loss"]]
        finding = (
            f"The loss goes from {fmean(firsts):.3f} to {fmean(lasts):.3f} on average over {len(firsts)} points "
            "(losses of different gates are different functions: compare a line with itself)."
        )

    def draw() -> Figure:
        key = [
            (f"— {name}", colour)
            for name, colour in _GROUPS.items()
            if any(g == name for v in lines.values() for _, g, *_ in v)
        ]
        per_row = 2
        count = -(-len(panels) // per_row)
        head = 0.12 + KEY_ROW * heading_rows(key)
        tall = 1.45
        figure = canvas(head + tall * count)
        heading(figure, key)
        for i, (what, name) in enumerate(panels):
            column, line = i % per_row, i // per_row
            left = 0.48 + column * WIDTH / 2
            axes = panel(
                figure, left=left, right=WIDTH - left - (WIDTH / 2 - 0.62), top=head + 0.22 + tall * line,
                bottom=0.33 + tall * (count - 1 - line),
            )  # fmt: skip
            for _, group, xs, ys in lines[what]:
                axes.plot(
                    xs,
                    ys,
                    color=_GROUPS[group],
                    linewidth=0.9,
                    linestyle="--" if group == "restrictions" else "-",
                    alpha=0.85,
                )
            axes.set_title(name, loc="left", pad=3)
            axes.tick_params(labelsize=SMALL)
            axes.locator_params(nbins=5)
            axes.grid(color=BAND, linewidth=0.6)
            if line == count - 1 or i + per_row >= len(panels):
                axes.set_xlabel("step", labelpad=1, fontsize=SMALL)
        return figure

    title = f"{task}: training curves"
    return Chart(f"curves-{task}", title, finding, Table(f"curves-{task}", title, columns, rows), draw, task)


def _averaged(curves: Sequence[Sequence[dict[str, Any]]], key: str) -> tuple[list[float], list[float]]:
    """Mean over runs at the steps that all of them have."""
    known = [{r["step"]: r[key] for r in curve if isinstance(r.get(key), int | float)} for curve in curves]
    known = [curve for curve in known if curve]
    if not known:
        return [], []
    steps = sorted(set.intersection(*(set(curve) for curve in known)))
    if len(steps) > _CURVE_POINTS:
        every = (len(steps) - 1) / (_CURVE_POINTS - 1)
        steps = [steps[round(i * every)] for i in range(_CURVE_POINTS)]
    return [float(s) for s in steps], [fmean(curve[s] for curve in known) for s in steps]


# ---------------------------------------------------------------------------------------------------- cost and power


def cost_chart(view: View) -> Chart:
    """What was asked of the teacher, by kind of run."""
    columns = (
        Column("kind", "kind"), Column("runs", "runs", "count"), Column("asked", "scores asked for", "count"),
        Column("cached", "of them from the cache", "count"), Column("teacher", "tokens the teacher read", "count"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for kind in KINDS:
        costs = [run.cost for run in view.results.done if run.spec.kind == kind and run.cost is not None]
        if costs:
            sums = [
                sum(getattr(cost, name) for cost in costs)
                for name in ("scores_asked", "scores_cached", "teacher_tokens")
            ]
            rows.append((KIND_NAMES[kind], len(costs), *sums))
    asked, cached = (sum(row[i] for row in rows if isinstance(row[i], int)) for i in (2, 3))  # type: ignore[misc]
    finding = (
        f"The runs asked for the teacher's score of {asked:,} tokens; {100 * cached / asked:.1f} % of them came from "
        "the cache."
        if asked
        else "No score was asked for."
    )

    def draw() -> Figure:
        key = [("■ from the cache", SKY), ("■ computed for this run", ORANGE)]
        figure = canvas(0.8 + 0.27 * len(rows))
        axes = rows_panel(figure, [f"{row[0]} ({row[1]})" for row in rows], top=0.32, bottom=0.45, right=0.65)
        heading(figure, key)
        most = max((row[2] for row in rows if isinstance(row[2], int)), default=1) or 1
        scale, unit = (
            (1e6, "million tokens") if most >= 2e6 else (1e3, "thousand tokens") if most >= 2e3 else (1.0, "tokens")
        )
        for place, row in enumerate(rows):
            wanted, known = (float(x) / scale for x in row[2:4] if isinstance(x, int))
            axes.barh([place], [known], color=SKY, height=0.62)
            axes.barh([place], [wanted - known], left=[known], color=ORANGE, height=0.62)
            share = f"{100 * known / wanted:.0f} %" if wanted else ""
            axes.text(wanted, place, f" {share}", fontsize=SMALL, color=MUTED, va="center")
        axes.set_xlabel(f"scores of response tokens, {unit}")
        return figure

    title = "What the teacher was asked, and what the cache knew"
    return Chart("cost", title, finding, Table("cost-figure", title, columns, tuple(rows)), draw)


def power_chart(view: View) -> Chart:
    """Detectable difference against seeds, one line per axis."""
    spreads = {axis: view.spread(axis) for axis in view.axes}
    known = {axis: sd for axis, sd in spreads.items() if sd}
    counted = (Column(f"n{n}", f"{n} seeds", "pp") for n in _SEED_COUNTS)
    columns = (Column("axis", "axis"), Column("sd", "SD, pp", "pp"), *counted)
    lines = [(axis, sd, [minimum_detectable(sd, n) for n in _SEED_COUNTS]) for axis, sd in known.items()]
    rows: tuple[tuple[Value, ...], ...] = tuple((axis, sd, *values) for axis, sd, values in lines)
    most = max((c.all.n for c in view.analysis.comparisons if c.all is not None), default=0)
    finding = ""
    if rows and most > 1:
        now = [minimum_detectable(sd, most) for sd in known.values()]
        finding = (
            f"With {most} seeds a single comparison shows only differences of at least {min(now):.1f} to "
            f"{max(now):.1f} pp, depending on the axis (80 % power, two-sided .05)."
        )

    def draw() -> Figure:
        colours = (BLUE, ORANGE, GREEN, PINK, AMBER, SKY)
        dashes = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
        figure = canvas(3.0)
        axes = panel(figure, left=0.5, right=1.35, top=0.15, bottom=0.45)
        ends: list[tuple[float, str, str, Any]] = []
        for (axis, sd, values), colour, dash in zip(lines, colours, dashes, strict=False):
            axes.plot(_SEED_COUNTS, values, color=colour, linestyle=dash, linewidth=1.5)
            ends.append((values[-1], f"{axis} ({sd:.1f})", colour, dash))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(_SEED_COUNTS[::2], [str(n) for n in _SEED_COUNTS[::2]])
        axes.minorticks_off()
        ticks = [t for t in (0.25, 0.5, 1, 2, 5, 10, 20, 50) if axes.get_ylim()[0] <= t <= axes.get_ylim()[1]]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.grid(color=BAND, linewidth=0.6)
        axes.axvline(most, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.text(most, 1.0, f" {most} seeds here", transform=axes.get_xaxis_transform(), fontsize=SMALL, va="top")
        _label_ends(axes, ends)
        axes.set_xlabel("paired seeds")
        axes.set_ylabel("detectable difference, pp")
        return figure

    title = "How small a difference one comparison can show"
    return Chart("power", title, finding, Table("power-figure", title, columns, rows), draw)


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str, Any]]) -> None:
    """Names at the ends of lines, pushed apart where lines meet."""
    axes.text(1.03, 1.0, "axis (SD, pp)", transform=axes.transAxes, fontsize=SMALL, color=MUTED, va="top")
    low, high = axes.get_ylim()
    last = -1.0
    for value, text, colour, dash in sorted(ends, key=lambda end: end[:2]):
        place = max(log(value / low) / log(high / low), last + 0.055)
        last = place
        axes.plot(
            [1.02, 1.07],
            [place, place],
            color=colour,
            linestyle=dash,
            linewidth=1.5,
            transform=axes.transAxes,
            clip_on=False,
        )
        axes.text(1.09, place, text, transform=axes.transAxes, fontsize=SMALL, va="center")


# ---------------------------------------------------------------------------------------------------- confusions


def confusion_chart(view: View, task: str) -> Chart:
    """Confusion matrices side by side."""
    models = confusion_models(view, task)
    columns = (
        Column("model", "model"), Column("gold", "gold label"), Column("predicted", "predicted"),
        Column("rows", "rows", "count"),
        Column("share", "share, %", "percent"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    parts = []
    for model, scores in models:
        table = confusion(scores)
        rows += [
            (model, gold, said, n, n / sum(counts.values()) if sum(counts.values()) else None)
            for gold, counts in table.items()
            for said, n in counts.items()
        ]
        right = {gold: counts[gold] / max(sum(counts.values()), 1) for gold, counts in table.items()}
        worst = min(right, key=lambda gold: right[gold])
        parts.append(f"{model}: weakest on {worst} ({100 * right[worst]:.0f} % right)")
    finding = "; ".join(parts) + "." if parts else ""
    title = f"{task}: confusions of start, the point best on validation, and teacher"
    data = Table(f"confusion-{task}", title, columns, tuple(rows))
    if models and len(models[0][1][0].labels) > _MOST_LABELS:
        data = Table(f"confusion-{task}", title, columns, ())  # the table is the only legible form
    return Chart(f"confusion-{task}", title, finding, data, lambda: _draw_confusion(models), task)


def _draw_confusion(models: Sequence[tuple[str, tuple[Score, ...]]]) -> Figure:
    labels = list(models[0][1][0].labels)
    shown_labels = [short(label, 14) for label in labels]
    said = [*labels, "(none)"]
    longest = max(map(len, shown_labels))
    across = len(models) if len(labels) <= 5 else 1
    left = 0.2 + 0.07 * longest
    side = (WIDTH - left - 0.1 - 0.15 * (across - 1)) / across
    cell = min(side / len(said), 0.4)
    slanted = max(0.35, 0.052 * max(longest, 6) + 0.1)
    tall = 0.3 + cell * len(labels) + slanted + 0.1
    rows = -(-len(models) // across)
    figure = canvas(0.05 + rows * tall)
    for number, (model, scores) in enumerate(models):
        column, line = number % across, number // across
        x = left + column * (cell * len(said) + 0.15)
        top = 0.25 + line * tall
        height = figure.get_size_inches()[1]
        axes = panel(
            figure, left=x, right=WIDTH - x - cell * len(said), top=top, bottom=height - top - cell * len(labels)
        )
        axes.spines[:].set_visible(False)
        axes.set_xlim(0, len(said))
        axes.set_ylim(len(labels), 0)
        for i, counts in enumerate(confusion(scores).values()):
            total = sum(counts.values()) or 1
            for j, n in enumerate(counts.values()):
                share = n / total
                colour = BLUE if i == j else ORANGE
                axes.add_patch(_square(j, i, colour, share))
                axes.text(j + 0.5, i + 0.52, f"{100 * share:.0f}", fontsize=SMALL, ha="center", va="center")
        axes.set_title(short(model, 18), loc="left", pad=3, fontweight="bold")
        axes.set_xticks(
            [j + 0.5 for j in range(len(said))],
            [*shown_labels, "(none)"],
            rotation=45,
            ha="right",
            rotation_mode="anchor",
            fontsize=SMALL,
        )
        axes.set_yticks([i + 0.5 for i in range(len(labels))], shown_labels if column == 0 else [""] * len(labels))
        axes.tick_params(length=0, pad=2)
    return figure


def _square(x: int, y: int, colour: str, share: float) -> Any:
    from matplotlib.patches import Rectangle

    # At most half covered: the figure in it must stay legible on light and on dark paper.
    return Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, alpha=0.06 + 0.44 * share, linewidth=0)
