"""All figures of a report, each with its finding in words and the numbers that are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gatespace.evidence.paired import minimum_detectable
from gatespace.evidence.records import ALL_TASKS, BlockClaim, ComparisonEvidence, Summary
from gatespace.report.drawing import (
    AMBER,
    BAND,
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    PINK,
    SKY,
    SMALL,
    WIDTH,
    Chart,
    canvas,
    draw_key,
    key_height,
    panel,
    rows_figure,
    short,
)
from gatespace.report.table import Column, Record, Table, count, lam, percent, pp, shown, signed_pp, text
from gatespace.report.tables import (
    NO_LABEL,
    POINT,
    confusion,
    confusion_models,
    confusion_records,
    costs,
    lam_records,
)
from gatespace.report.view import AXES, KINDS, View, leaves_out_zero, mean_of
from gatespace.study.records import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORESTS = ("restriction", "static", "published", "control")
_CURVE_POINTS = 60
"""Steps of a training curve; a line shows no more."""
_CURVES = (("loss", "loss"), ("lam_mean", "mean λ"), ("forward_kl", "forward KL"), ("reverse_kl", "reverse KL"))
_CURVE_GROUPS = {"family, d = 0": BLUE, "family, d > 0": ORANGE, "family, d < 0": GREEN, "restrictions": PINK}
_SEED_COUNTS = (2, 3, 4, 5, 6, 8, 10, 14, 20, 28, 40)
_MOST_LABELS = 12
"""Labels up to which a confusion matrix can be drawn legibly."""


def all_charts(view: View) -> list[Chart]:
    """Every figure that the study has data for, in the order of the page."""
    charts = [_overview(view)]
    for task in view.results.tasks:
        charts += [_isolation(view, task), _gap(view, task), *(_forest(view, task, axis) for axis in _FORESTS)]
    for task in view.results.tasks:
        charts += [_grid(view, task), _restrictions(view, task), _lam(view, task)]
        charts += [_curves(view, task), _confusion(view, task)]
    charts += [_cost(view), _power(view)]
    return [chart for chart in charts if chart.data.rows]


def _chart(
    name: str,
    title: str,
    finding: str,
    columns: Sequence[Column],
    records: Iterable[Record],
    draw: Callable[[], Figure],
    task: str = "",
) -> Chart:
    return Chart(name, title, finding, Table.of(name, title, columns, records), draw, task)


# ---------------------------------------------------------------------------------------------------- differences


@dataclass(frozen=True)
class Row:
    """A row of differences in pp; without a summary it is the heading of those below it."""

    label: str
    summary: Summary | None = None
    dots: tuple[tuple[float, bool], ...] = ()
    """Single differences, and whether they are of the selection seed."""
    fresh: float | None = None
    colour: str = BLUE


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
            mine.append(Row(group.restriction or AXES[group.axis].other, group.all, dots, fresh))
        if mine:
            rows += [Row("all tasks together" if task == ALL_TASKS else task), *mine]
    return _differences(
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
    about = "Each point minus the training at the constant λ that it had on average, in pp of test accuracy."
    if se := view.sampling_se(task):
        about += f" The grey band is ±1 binomial SE of one model's accuracy ({se:.2f} pp): no error of a difference."
    return _differences(
        view, f"isolation-{task}", f"{task}: dynamic λ minus its mean-matched constant", rows, about, task=task,
        band=se, sides=("dynamic", "constant"),
    )  # fmt: skip


def _gap(view: View, task: str) -> Chart:
    rows: list[Row] = []
    found = view.comparisons("gap", task)
    for i, base in enumerate(dict.fromkeys(one.right for one in found)):
        rows.append(Row(f"on {base}"))
        for one in [one for one in found if one.right == base]:
            gate = view.gate(task, one.left)
            label = one.left if gate is None else f"d = {gate.d:+g}".replace("-", "−")
            rows.append(_row(view, one, label, (BLUE, GREEN, ORANGE, PINK)[i % 4]))
    return _differences(
        view, f"gap-{task}", f"{task}: what the gap signal adds", rows,
        "Each point with a gap coefficient d minus the same point with d = 0, in pp of test accuracy.", task=task,
        sides=("with d", "without d"),
    )  # fmt: skip


def _forest(view: View, task: str, axis: str) -> Chart:
    rows = []
    for found in view.comparisons(axis, task):
        label = f"{found.left} − {found.right}" if axis != "control" else f"{found.left} − shuffled"
        rows.append(_row(view, found, label, ORANGE if found.restriction == "entropy-only" else BLUE))
    title = AXES[axis].title
    return _differences(
        view, f"forest-{axis}-{task}", f"{task}: {title[0].lower()}{title[1:]}", rows,
        "Left minus right in pp of test accuracy, paired within seed.", task=task,
    )  # fmt: skip


def _row(view: View, found: ComparisonEvidence, label: str, colour: str) -> Row:
    assert found.all is not None
    pairs = zip(found.all.seeds, found.all.differences, strict=True)
    dots = tuple((value, seed == view.results.selection_seed) for seed, value in pairs)
    return Row(label, found.all, dots, found.fresh.mean if found.fresh is not None else None, colour)


def _differences(
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
    """The figure of some rows: every seed, their mean and its interval."""
    columns = (
        text("row", "comparison"), count("n"), signed_pp("mean", "mean, pp"), signed_pp("low", "95 % from"),
        signed_pp("high", "to"), signed_pp("fresh", "without selection seed, pp"), text("each", "each, pp"),
    )  # fmt: skip
    records = []
    group = ""
    for row in rows:
        if row.summary is None:
            group = f"{row.label}: "
            continue
        each = ", ".join(shown(value, "signed_pp") for value, _ in row.dots)
        records.append({**vars(row.summary), "row": group + row.label, "fresh": row.fresh, "each": each})
    seed = view.results.selection_seed

    def draw() -> Figure:
        return _draw_differences(rows, seed, band, sides)

    return _chart(name, title, f"{about} {_finding(rows)}", columns, records, draw, task)


def _finding(rows: Sequence[Row]) -> str:
    """What the rows show, in words."""
    found = [row.summary for row in rows if row.summary is not None]
    if not found:
        return ""
    if len(found) == 1:
        only = found[0]
        finding = f"The mean is {_signed(only.mean)} pp"
        if only.low is None or only.high is None:
            return finding + ", without an interval."
        return finding + f", its interval from {_signed(only.low)} to {_signed(only.high)} pp."
    means = [summary.mean for summary in found]
    intervals = sum(summary.low is not None for summary in found)
    apart = sum(map(leaves_out_zero, found))
    finding = f"Means run from {_signed(min(means))} to {_signed(max(means))} pp; "
    finding += f"{sum(m > 0 for m in means)} of {len(means)} are above 0. "
    if not intervals:
        return finding + "One seed has no interval."
    if not apart:
        return finding + f"All {intervals} intervals hold 0."
    return finding + f"{apart} of {intervals} intervals leave out 0; about one in twenty does by chance alone."


def _signed(value: float) -> str:
    return shown(value, "signed_pp").replace("-", "−")


def _draw_differences(rows: Sequence[Row], selection_seed: int, band: float | None, sides: tuple[str, str]) -> Figure:
    several = any(len(row.dots) > 1 for row in rows)
    key = [("● mean", BLUE)] if several else []
    key += [("○ one seed", MUTED), (f"◇ selection seed {selection_seed}", MUTED)]
    if any(row.fresh is not None for row in rows) and several:
        key.append(("| mean without it", INK))
    if any(row.summary is not None and row.summary.low is not None for row in rows):
        key.append(("— 95 % interval (arrow: runs on)", BLUE))
    figure, axes = rows_figure([row.label for row in rows], key, row=0.185)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        if row.summary is None:
            label.set_fontweight("bold")
    values = [abs(value) for row in rows for value, _ in row.dots]
    limit = max(1.0, 1.3 * max(values, default=1.0), 1.2 * (band or 0.0))
    if band is not None:
        axes.axvspan(-band, band, color=BAND, zorder=0, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8, zorder=1)
    axes.set_xlim(-limit, limit)
    for place, row in enumerate(rows):
        if row.summary is not None:
            _draw_row(axes, place, row, row.summary, limit)
    axes.set_xlabel(f"← {sides[1]} better  ·  pp  ·  {sides[0]} better →")
    return figure


def _draw_row(axes: Axes, place: int, row: Row, found: Summary, limit: float) -> None:
    if found.low is not None and found.high is not None:
        low, high = max(found.low, -limit), min(found.high, limit)
        axes.plot([low, high], [place, place], color=row.colour, linewidth=1.4, solid_capstyle="butt", zorder=2)
        for end, cut, marker in ((low, found.low < -limit, "<"), (high, found.high > limit, ">")):
            if cut:
                axes.plot([end], [place], marker=marker, color=row.colour, markersize=4.5, clip_on=False, zorder=3)
    for selected, marker, size in ((False, "o", 4), (True, "D", 3.6)):
        dots = [value for value, own in row.dots if own == selected]
        if dots:
            _rings(axes, dots, place, marker, markersize=size, zorder=4)
    if len(row.dots) > 1:
        axes.plot([found.mean], [place], marker="o", markersize=5.5, color=row.colour, markeredgecolor=PAPER, zorder=5)
        if row.fresh is not None:
            axes.plot([row.fresh], [place], marker="|", markersize=9, markeredgewidth=1.4, color=INK, zorder=6)


def _rings(axes: Axes, values: Sequence[float], place: int, marker: str = "o", **more: Any) -> None:
    """Single seeds, as empty marks in a row."""
    axes.plot(
        values, [place] * len(values), linestyle="none", marker=marker, markerfacecolor=PAPER, markeredgecolor=MUTED,
        markeredgewidth=0.8, **more,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- accuracies


def _grid(view: View, task: str) -> Chart:
    """The points without a gap coefficient."""
    columns = (POINT, text("gate", "a,b,c,d"), percent("mean", "mean, %"), text("each", "each seed, %"))
    gates = {point: view.gate(task, point) for point in view.points(task, "point")}
    found = {
        point: {seed: score.accuracy for seed, score in view.sweep(task, point).items()}
        for point, gate in gates.items()
        if gate is not None and gate.d == 0
    }
    means = {point: fmean(shares.values()) for point, shares in found.items() if shares}
    records = []
    for point, mean in means.items():
        each = ", ".join(f"s{seed} {shown(share, 'percent')}" for seed, share in found[point].items())
        records.append({"point": point, "gate": str(gates[point]), "mean": mean, "each": each})
    se = view.sampling_se(task)
    finding = ""
    if means:
        low, high = min(means.values()), max(means.values())
        best = max(means, key=lambda p: means[p])
        finding = (
            f"Mean test accuracy of the points with d = 0 spans {100 * (high - low):.2f} pp, from {100 * low:.2f} % to "
            f"{100 * high:.2f} % ({best})."
        )
        if se:
            finding += f" The sampling SE of one model is {se:.2f} pp (grey band about the grid's mean)."

    def draw() -> Figure:
        labels = [f"{point}  ({str(gates[point]).removesuffix(',0')})" for point in means]
        key = [("● mean", BLUE), ("○ one seed", MUTED)]
        figure, axes = rows_figure(labels, key, row=0.205, top=0.32, rest=0.46, bottom=0.45)
        middle = 100 * fmean(means.values())
        if se:
            axes.axvspan(middle - se, middle + se, color=BAND, linewidth=0, zorder=0)
        for place, (point, mean) in enumerate(means.items()):
            if len(found[point]) > 1:
                _rings(axes, [100 * share for share in found[point].values()], place, markersize=4)
            axes.plot([100 * mean], [place], "o", markersize=6.5, color=BLUE, markeredgecolor=PAPER)
        _accuracy_axis(axes)
        return figure

    data = Table.of(f"abc-{task}", "abc grid", columns, records)
    return Chart(f"abc-{task}", f"{task}: the abc grid", finding, data, draw, task)


def _restrictions(view: View, task: str) -> Chart:
    """Family and matched restrictions, point by point."""
    columns = (
        POINT, percent("family", "family, mean %"), percent("entropy-only", "entropy-only, mean %"),
        percent("gap-only", "gap-only, mean %"),
    )  # fmt: skip
    records: dict[str, dict[str, Any]] = {}
    for found in view.comparisons("restriction", task, comparable=False):
        record = records.setdefault(found.left, {"point": found.left, "family": _mean(view, task, found.left)})
        if found.restriction not in record:
            record[str(found.restriction)] = "N/A" if found.status == "n/a" else _mean(view, task, found.right)
    order = [point for point in view.points(task, "point") if point in records]
    rows = [records[point] for point in order if any(isinstance(cell, float) for cell in records[point].values())]
    cuts = ("entropy-only", "gap-only")
    others = [(row["family"], row.get(cut)) for row in rows for cut in cuts]
    leads = [own - other for own, other in others if isinstance(own, float) and isinstance(other, float)]
    finding = (
        f"By the mean over seeds the family is ahead in {sum(x > 0 for x in leads)} of {len(leads)} cells, behind in "
        f"{sum(x < 0 for x in leads)}; cells share runs, so this is a count and no test."
        if leads
        else "No pair is done yet."
    )

    def draw() -> Figure:
        key = [("● family", BLUE), ("◆ entropy-only", ORANGE), ("▲ gap-only", GREEN)]
        if se := view.sampling_se(task):
            key.append((f"± one model's sampling SE: {se:.1f} pp", MUTED))
        labels = [row["point"] for row in rows]
        figure, axes = rows_figure(labels, key, row=0.205, top=key_height(key, 0.14), rest=0.48, right=0.9)
        styles = {"family": ("o", BLUE, 6.5), "entropy-only": ("D", ORANGE, 5), "gap-only": ("^", GREEN, 6)}
        for place, row in enumerate(rows):
            marks = {side: 100 * row[side] for side in styles if isinstance(row.get(side), float)}
            if len(marks) > 1:
                ends = [min(marks.values()), max(marks.values())]
                axes.plot(ends, [place, place], color=MUTED, linewidth=0.8, zorder=2)
            for side, x in reversed(marks.items()):
                marker, colour, size = styles[side]
                axes.plot([x], [place], marker, markersize=size, color=colour, markeredgecolor=PAPER, zorder=4)
            none = [cut.removesuffix("-only") for cut in cuts if row.get(cut) == "N/A"]
            if none:
                _beside(axes, place, "both N/A" if len(none) == 2 else f"{none[0]} N/A", x=1.02, color=MUTED)
        _accuracy_axis(axes)
        return figure

    title = f"{task}: family and its matched restrictions"
    return _chart(f"restrictions-{task}", title, finding, columns, rows, draw, task)


def _mean(view: View, task: str, point: str) -> float | None:
    return mean_of([score.accuracy for score in view.sweep(task, point).values()])


def _beside(axes: Axes, place: float, words: str, *, x: float, **look: Any) -> None:
    """Words on the right of a row."""
    axes.text(x, place, words, transform=axes.get_yaxis_transform(), fontsize=SMALL, va="center", **look)


def _accuracy_axis(axes: Axes, least: float = 2.0) -> None:
    """Name the axis, and widen it to `least` pp: differences that are noise must not look as if they were large."""
    axes.set_xlabel("test accuracy, %")
    low, high = axes.get_xlim()
    if high - low < least:
        middle = (low + high) / 2
        axes.set_xlim(middle - least / 2, middle + least / 2)


# ---------------------------------------------------------------------------------------------------- training


def _lam(view: View, task: str) -> Chart:
    """One row per point: the histogram of λ over all tokens of all seeds."""
    columns = (POINT, lam("mean", "E[λ]"), lam("sd", "SD"), percent("saturated", "saturated, %"), count("tokens"))
    records = list(lam_records(view, task, "point", "restriction", "control"))
    finding = ""
    if records:
        means = [record["mean"] for record in records]
        flat = [record["point"] for record in records if record["sd"] < 0.05]
        finding = f"E[λ] runs from {min(means):.3f} to {max(means):.3f} over {len(means)} points. " + (
            f"λ hardly varies (SD over tokens below 0.05) at {', '.join(flat)}."
            if flat
            else "Its SD over tokens is above 0.05 at every point."
        )

    def draw() -> Figure:
        labels = [record["point"] for record in records]
        figure, axes = rows_figure(labels, row=0.27, top=0.28, rest=0.47, right=1.2)
        axes.set_ylim(len(records) - 0.85, -0.95)
        width, height = figure.get_size_inches()
        for x, words in ((width - 1.12, "mean\u2003SD\u2003 sat."), (0.08, "▏ mean; height: share of tokens")):
            figure.text(x / width, 1 - 0.1 / height, words, fontsize=SMALL, color=MUTED, va="top")
        for place, record in enumerate(records):
            counts, mean = record["hist"], record["mean"]
            edges = [i / len(counts) for i in range(len(counts) + 1)]
            tops = [place + 0.1 - 0.85 * tokens / (max(counts) or 1.0) for tokens in counts]
            axes.stairs(tops, edges, baseline=place + 0.1, fill=True, color=SKY, linewidth=0, zorder=2)
            axes.stairs(tops, edges, baseline=place + 0.1, color=BLUE, linewidth=0.7, zorder=3)
            axes.plot([mean, mean], [place + 0.1, place - 0.7], color=INK, linewidth=1.1, zorder=4)
            words = f"{mean:.2f}\u2002{record['sd']:.2f}\u2002{100 * record['saturated']:.0f} %"
            _beside(axes, place - 0.1, words, x=1.03)
        axes.set_xlim(0, 1)
        axes.set_xlabel("← forward KL  ·  λ  ·  reverse KL →")
        return figure

    title = f"{task}: λ over the tokens of training"
    return _chart(f"lambda-{task}", title, finding, columns, records, draw, task)


@dataclass(frozen=True)
class Line:
    """A training curve: mean over the seeds of a point."""

    point: str
    group: str
    steps: list[float]
    values: list[float]


def _curves(view: View, task: str) -> Chart:
    """Training curves, thinned out to what a line can show."""
    columns = (POINT, text("what"), lam("first"), lam("last"))
    panels = dict((*_CURVES, ("accuracy", "val accuracy, %")))
    lines: dict[str, list[Line]] = {what: [] for what in panels}
    for point in view.points(task, "point", "restriction"):
        runs = list(view.done(task, point).values())
        group = _curve_group(view, task, point)
        curves = [run.curve() for run in runs]
        for what, _ in _CURVES:
            steps, values = _averaged(curves, what)
            if steps:
                lines[what].append(Line(point, group, steps, values))
        checks = [[e for e in run.evaluations() if e.get("split") == "val"] for run in runs]
        steps, values = _averaged(checks, "accuracy")
        if len(steps) > 1:
            lines["accuracy"].append(Line(point, group, steps, [100 * value for value in values]))
    lines = {what: found for what, found in lines.items() if found}
    records = [
        {"point": line.point, "what": panels[what], "first": line.values[0], "last": line.values[-1]}
        for what, found in lines.items()
        for line in found
    ]
    finding = ""
    if losses := lines.get("loss"):
        first, last = fmean(line.values[0] for line in losses), fmean(line.values[-1] for line in losses)
        finding = (
            f"The loss goes from {first:.3f} to {last:.3f} on average over {len(losses)} points (losses of different "
            "gates are different functions: compare a line with itself)."
        )

    def draw() -> Figure:
        drawn = {line.group for found in lines.values() for line in found}
        key = [(f"— {group}", colour) for group, colour in _CURVE_GROUPS.items() if group in drawn]
        high, tall, last_row = key_height(key), 1.45, (len(lines) - 1) // 2
        figure = canvas(high + tall * (last_row + 1))
        draw_key(figure, key)
        for i, (what, found) in enumerate(lines.items()):
            row, column = divmod(i, 2)
            left = 0.48 + column * WIDTH / 2
            axes = panel(
                figure, left=left, right=WIDTH - left - (WIDTH / 2 - 0.62), top=high + 0.22 + tall * row,
                bottom=0.33 + tall * (last_row - row),
            )  # fmt: skip
            for line in found:
                style = "--" if line.group == "restrictions" else "-"
                colour = _CURVE_GROUPS[line.group]
                axes.plot(line.steps, line.values, color=colour, linewidth=0.9, linestyle=style, alpha=0.85)
            axes.set_title(panels[what], loc="left", pad=3)
            axes.tick_params(labelsize=SMALL)
            axes.locator_params(nbins=5)
            axes.grid(color=BAND, linewidth=0.6)
            if i + 2 >= len(lines):
                axes.set_xlabel("step", labelpad=1, fontsize=SMALL)
        return figure

    return _chart(f"curves-{task}", f"{task}: training curves", finding, columns, records, draw, task)


def _curve_group(view: View, task: str, point: str) -> str:
    gate = view.gate(task, point)
    if view.kind(task, point) != "point":
        return "restrictions"
    return "family, d = 0" if gate is None or gate.d == 0 else "family, d > 0" if gate.d > 0 else "family, d < 0"


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


def _cost(view: View) -> Chart:
    """The teacher's scores by kind of run."""
    columns = (
        text("kind"), count("runs"), count("asked", "scores needed"), count("cached", "of them from the cache"),
        count("teacher", "tokens of the teacher's forward passes"),
    )  # fmt: skip
    found = {name: costs(view, kind) for kind, name in KINDS.items()}
    records: list[dict[str, Any]] = [
        {
            "kind": kind,
            "runs": len(mine),
            "asked": sum(cost.scores_asked for cost in mine),
            "cached": sum(cost.scores_cached for cost in mine),
            "teacher": sum(cost.teacher_tokens for cost in mine),
        }
        for kind, mine in found.items()
        if mine
    ]
    asked, cached = (sum(record[key] for record in records) for key in ("asked", "cached"))
    finding = (
        f"The runs needed the teacher's score of {asked:,} tokens; {100 * cached / asked:.1f} % of them came from "
        "the cache."
        if asked
        else "No score was needed."
    )

    def draw() -> Figure:
        labels = [f"{record['kind']} ({record['runs']})" for record in records]
        key = [("■ from the cache", SKY), ("■ computed for this run", ORANGE)]
        figure, axes = rows_figure(labels, key, row=0.27, top=0.32, rest=0.48, bottom=0.45, right=0.65)
        most = max(record["asked"] for record in records)
        scale, unit = 1.0, "tokens"
        if most >= 2e3:
            scale, unit = (1e6, "million tokens") if most >= 2e6 else (1e3, "thousand tokens")
        for place, record in enumerate(records):
            wanted, known = record["asked"] / scale, record["cached"] / scale
            axes.barh([place], [known], color=SKY, height=0.62)
            axes.barh([place], [wanted - known], left=[known], color=ORANGE, height=0.62)
            share = f"{100 * known / wanted:.0f} %" if wanted else ""
            axes.text(wanted, place, f" {share}", fontsize=SMALL, color=MUTED, va="center")
        axes.set_xlabel(f"scores of response tokens, {unit}")
        return figure

    return _chart("cost", "The teacher's scores: computed, and from the cache", finding, columns, records, draw)


def _power(view: View) -> Chart:
    """Detectable difference against seeds, one line per axis."""
    columns = (text("axis"), pp("sd", "SD, pp"), *(pp(f"n{n}", f"{n} seeds") for n in _SEED_COUNTS))
    known = {axis: sd for axis in view.axes if (sd := view.spread(axis))}
    lines = {axis: [minimum_detectable(sd, n) for n in _SEED_COUNTS] for axis, sd in known.items()}
    records = [
        {"axis": axis, "sd": known[axis], **{f"n{n}": value for n, value in zip(_SEED_COUNTS, values, strict=True)}}
        for axis, values in lines.items()
    ]
    most = max((c.all.n for c in view.analysis.comparisons if c.all is not None), default=0)
    finding = ""
    if records and most > 1:
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
        ends: list[tuple[float, str, dict[str, Any]]] = []
        for (axis, values), colour, dash in zip(lines.items(), colours, dashes, strict=False):
            look: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 1.5}
            axes.plot(_SEED_COUNTS, values, **look)
            ends.append((values[-1], f"{axis} ({known[axis]:.1f})", look))
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

    return _chart("power", "How small a difference one comparison can show", finding, columns, records, draw)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, dict[str, Any]]]) -> None:
    """Names at the ends of lines, pushed apart where lines meet."""
    axes.text(1.03, 1.0, "axis (SD, pp)", transform=axes.transAxes, fontsize=SMALL, color=MUTED, va="top")
    low, high = axes.get_ylim()
    place = -1.0
    for value, words, look in sorted(ends, key=lambda end: end[:2]):
        place = max(log(value / low) / log(high / low), place + 0.055)
        axes.plot([1.02, 1.07], [place, place], transform=axes.transAxes, clip_on=False, **look)
        axes.text(1.09, place, words, transform=axes.transAxes, fontsize=SMALL, va="center")


# ---------------------------------------------------------------------------------------------------- confusions


def _confusion(view: View, task: str) -> Chart:
    """Confusion matrices side by side; with many labels none, as the table is the only legible form."""
    columns = (
        text("model"), text("gold", "gold label"), text("predicted"), count("rows"), percent("share", "share, %")
    )  # fmt: skip
    models = confusion_models(view, task)
    parts = []
    for model, scores in models:
        right = {gold: counts[gold] / max(sum(counts.values()), 1) for gold, counts in confusion(scores).items()}
        worst = min(right, key=lambda gold: right[gold])
        parts.append(f"{model}: weakest on {worst} ({100 * right[worst]:.0f} % right)")
    finding = "; ".join(parts) + "." if parts else ""
    legible = models and len(models[0][1][0].labels) <= _MOST_LABELS
    records = confusion_records(view, task) if legible else []
    title = f"{task}: confusions of start, the point best on validation, and teacher"
    return _chart(f"confusion-{task}", title, finding, columns, records, lambda: _draw_confusion(models), task)


def _draw_confusion(models: Sequence[tuple[str, tuple[Score, ...]]]) -> Figure:
    from matplotlib.patches import Rectangle

    labels = [short(label, 14) for label in models[0][1][0].labels]
    wide, longest = len(labels) + 1, max(map(len, labels))
    across = len(models) if len(labels) <= 5 else 1
    left = 0.2 + 0.07 * longest
    side = (WIDTH - left - 0.1 - 0.15 * (across - 1)) / across
    cell = min(side / wide, 0.4)
    slanted = max(0.35, 0.052 * max(longest, 6) + 0.1)
    tall = 0.3 + cell * len(labels) + slanted + 0.1
    height = 0.05 - (-len(models) // across) * tall
    figure = canvas(height)
    for i, (model, scores) in enumerate(models):
        row, column = divmod(i, across)
        x, top = left + column * (cell * wide + 0.15), 0.25 + row * tall
        axes = panel(figure, left=x, right=WIDTH - x - cell * wide, top=top, bottom=height - top - cell * len(labels))
        axes.spines[:].set_visible(False)
        axes.set_xlim(0, wide)
        axes.set_ylim(len(labels), 0)
        for y, counts in enumerate(confusion(scores).values()):
            total = sum(counts.values()) or 1
            for x, rows in enumerate(counts.values()):
                share, colour = rows / total, BLUE if x == y else ORANGE
                # At most half covered: the figure in it must stay legible on light and on dark paper.
                alpha = 0.06 + 0.44 * share
                axes.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, alpha=alpha, linewidth=0))
                axes.text(x + 0.5, y + 0.52, f"{100 * share:.0f}", fontsize=SMALL, ha="center", va="center")
        axes.set_title(short(model, 18), loc="left", pad=3, fontweight="bold")
        axes.set_xticks(
            [x + 0.5 for x in range(wide)], [*labels, NO_LABEL], rotation=45, ha="right", rotation_mode="anchor",
            fontsize=SMALL,
        )  # fmt: skip
        axes.set_yticks([y + 0.5 for y in range(len(labels))], labels if column == 0 else [""] * len(labels))
        axes.tick_params(length=0, pad=2)
    return figure
