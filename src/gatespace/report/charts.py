"""All figures of a report, each with its finding in words and the plotted numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gatespace.evidence.records import ALL_TASKS, BlockClaim, Choice, ComparisonEvidence, Summary
from gatespace.report.beside import beside_charts
from gatespace.report.drawing import (
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
    draw_interval,
    draw_key,
    key_height,
    panel,
    rows_figure,
    short,
)
from gatespace.report.reliability import reliability
from gatespace.report.table import Column, Record, Table, count, lam, percent, shown, signed, signed_pp, text
from gatespace.report.tables import (
    NO_LABEL,
    POINT,
    confusion,
    confusion_models,
    confusion_records,
    lam_records,
    point_records,
)
from gatespace.report.view import AXES, KINDS, View, confidence_text, leaves_out_zero
from gatespace.study.records import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORESTS = ("restriction", "static", "published", "control")
_CURVE_POINTS = 60
"""Maximum points of a training curve; more would not be visible."""
_CURVES = {"loss": "loss", "lam_mean": "mean λ", "forward_kl": "forward KL", "reverse_kl": "reverse KL"}
_MOST_LABELS = 12
"""Maximum number of labels for a legible confusion matrix."""
_BESIDE = "beside"
"""Kind of start, teacher and best constant in a ranking."""
_LOOKS: Mapping[str, tuple[str, str, str, str]] = {
    "point": ("family", "●", "o", BLUE),
    "published": ("published methods", "◆", "D", ORANGE),
    "restriction": ("restrictions", "▲", "^", GREEN),
    **dict.fromkeys(("static", "twin", "control"), ("controls (constant, shuffled)", "■", "s", PINK)),
    _BESIDE: ("start, teacher, best constant", "✕", "X", INK),
}
"""Kind of a point → description, mark in the key, matplotlib marker, colour."""


def all_charts(view: View) -> list[Chart]:
    """Return every figure that the study has data for, in page order."""
    charts = [*beside_charts(view), *(_ranking(view, task) for task in view.results.tasks), _overview(view)]
    for task in view.results.tasks:
        charts += [_isolation(view, task), _gap(view, task), *(_forest(view, task, axis) for axis in _FORESTS)]
    for task in view.results.tasks:
        charts += [_against_lam(view, task), _lam(view, task), _curves(view, task), _confusion(view, task)]
        charts.append(reliability(view, task))
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
    """A row of differences in pp; without a summary, a heading of the rows below."""

    label: str
    summary: Summary | None = None
    dots: tuple[tuple[float, bool], ...] = ()
    """Single differences, and whether they are from the selection seed."""
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
            fresh = group.fresh.mean if isinstance(group.fresh, BlockClaim) and group.fresh != group.all else None
            mine.append(Row(group.restriction or AXES[group.axis].other, group.all, dots, fresh))
        if mine:
            rows += [Row("all tasks together" if task == ALL_TASKS else task), *mine]
    return _differences(
        view, "overview", "The family against everything it is compared with", rows,
        "Mean difference of all cells of an axis, family minus the other side, in percentage points of test "
        f"{view.metric_name}; "
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
    metric = view.metric(task)
    about = f"Each point minus the training at the constant λ that it had on average, in pp of test {metric}."
    if se := view.sampling_se(task):
        about += f" The grey band is ±1 binomial SE of one model's {metric} ({se:.2f} pp): no error of a difference."
    return _differences(
        view, f"isolation-{task}", f"{task}: dynamic λ minus its matched constant", rows, about, task=task,
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
        f"Each point with a gap coefficient d minus the same point with d = 0, in pp of test {view.metric(task)}.",
        task=task, sides=("with d", "without d"),
    )  # fmt: skip


def _forest(view: View, task: str, axis: str) -> Chart:
    rows = []
    for found in view.comparisons(axis, task):
        label = f"{found.left} − {found.right}" if axis != "control" else f"{found.left} − shuffled"
        rows.append(_row(view, found, label, ORANGE if found.restriction == "entropy-only" else BLUE))
    title = AXES[axis].title
    return _differences(
        view, f"forest-{axis}-{task}", f"{task}: {title[0].lower()}{title[1:]}", rows,
        f"Left minus right in pp of test {view.metric(task)}, paired within seed.", task=task,
    )  # fmt: skip


def _row(view: View, found: ComparisonEvidence, label: str, colour: str) -> Row:
    assert found.all is not None
    pairs = zip(found.all.seeds, found.all.differences, strict=True)
    dots = tuple((value, seed == view.results.selection_seed) for seed, value in pairs)
    fresh = None if found.fresh in (None, found.all) else found.fresh
    return Row(label, found.all, dots, None if fresh is None else fresh.mean, colour)


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
    """Figure of differences: every seed, their mean and its interval."""
    columns = (
        text("row", "comparison"), count("n"), signed_pp("mean", "mean, pp"),
        signed_pp("low", f"{_confidence(rows)} from"), signed_pp("high", "to"),
        signed_pp("fresh", "without selection seed, pp"), text("each", "each, pp"),
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


def _confidence(rows: Sequence[Row]) -> str:
    return confidence_text(next((row.summary.confidence for row in rows if row.summary is not None), 0.95))


def _finding(rows: Sequence[Row]) -> str:
    """What the rows show, in words."""
    found = [row.summary for row in rows if row.summary is not None]
    if not found:
        return ""
    if len(found) == 1:
        only = found[0]
        finding = f"The mean is {signed(only.mean)} pp"
        if only.low is None or only.high is None:
            return finding + ", without an interval."
        return finding + f", its interval from {signed(only.low)} to {signed(only.high)} pp."
    means = [summary.mean for summary in found]
    intervals = sum(summary.low is not None for summary in found)
    apart = sum(map(leaves_out_zero, found))
    finding = f"Means run from {signed(min(means))} to {signed(max(means))} pp; "
    finding += f"{sum(m > 0 for m in means)} of {len(means)} are above 0. "
    if not intervals:
        return finding + "One seed has no interval."
    if not apart:
        return finding + f"All {intervals} intervals contain 0."
    return finding + f"{apart} of {intervals} intervals exclude 0; about one in twenty does by chance alone."


def _draw_differences(
    rows: Sequence[Row], selection_seed: int | None, band: float | None, sides: tuple[str, str]
) -> Figure:
    several = any(len(row.dots) > 1 for row in rows)
    key = [("● mean", BLUE)] if several else []
    key.append(("○ one seed", MUTED))
    if selection_seed is not None:
        key.append((f"◇ selection seed {selection_seed}", MUTED))
    if selection_seed is not None and any(row.fresh is not None for row in rows) and several:
        key.append(("| mean without it", INK))
    if any(row.summary is not None and row.summary.low is not None for row in rows):
        key.append((f"— {_confidence(rows)} interval (arrow: runs on)", BLUE))
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
    draw_interval(axes, place, (found.low, found.high), limit, row.colour)
    for selected, marker, size in ((False, "o", 4), (True, "D", 3.6)):
        dots = [value for value, own in row.dots if own == selected]
        if dots:
            _rings(axes, dots, place, marker, markersize=size, zorder=4)
    if len(row.dots) > 1:
        axes.plot([found.mean], [place], marker="o", markersize=5.5, color=row.colour, markeredgecolor=PAPER, zorder=5)
        if row.fresh is not None:
            axes.plot([row.fresh], [place], marker="|", markersize=9, markeredgewidth=1.4, color=INK, zorder=6)


def _rings(axes: Axes, values: Sequence[float], place: int, marker: str = "o", **more: Any) -> None:
    """Draw single seeds as hollow markers in a row."""
    axes.plot(
        values, [place] * len(values), linestyle="none", marker=marker, markerfacecolor=PAPER, markeredgecolor=MUTED,
        markeredgewidth=0.8, **more,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- accuracies


def _ranking(view: View, task: str) -> Chart:
    """All points and baselines, best first."""
    metric = view.metric(task)
    rows = [{**record, "look": _LOOKS[view.kind(task, record["point"])]} for record in point_records(view, task)]
    rows = [*(row for row in rows if row["accuracy"] is not None), *_standing_beside(view, task)]
    rows.sort(key=lambda row: -row["accuracy"])
    columns = (
        POINT, text("kind"), count("seeds"), percent("accuracy", f"{metric}, mean %"), percent("low", "95 % from"),
        percent("high", "to"), lam("lam", "E[λ]"), lam("lam_rkl", "RKL-weighted λ"), text("every", "each seed, %"),
    )  # fmt: skip
    for row in rows:
        row["every"] = ", ".join(shown(share, "percent") for share in row["each"]) or None
    trained = [row for row in rows if row["each"]]
    finding = ""
    if trained:
        best, last = trained[0], trained[-1]
        finding = (
            f"{len(trained)} points, from {best['point']} with {100 * best['accuracy']:.1f} % on average down to "
            f"{last['point']} with {100 * last['accuracy']:.1f} %. {_overlapping(trained)}"
        )

    def draw() -> Figure:
        there = {row["look"] for row in rows}
        looks = dict.fromkeys(look for look in _LOOKS.values() if look in there)
        key = [(f"{mark} {words}", colour) for words, mark, _, colour in looks]
        several = any(len(row["each"]) > 1 for row in rows)
        key += [("○ one seed", MUTED), (f"— 95 % interval over {'seeds' if several else 'texts'}", BLUE)]
        labels, tall = [row["point"] for row in rows], 0.2 if len(rows) > 25 else 0.24
        figure, axes = rows_figure(labels, key, row=tall, right=2.95)
        for row in rows:
            if row["point"] in ("start", "teacher"):
                axes.axvline(100 * row["accuracy"], color=INK, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        for place, (row, label) in enumerate(zip(rows, axes.get_yticklabels(), strict=True)):
            _, _, marker, colour = row["look"]
            if not row["each"]:
                label.set_fontweight("bold")
            if row["low"] is not None:
                axes.plot([100 * row["low"], 100 * row["high"]], [place, place], color=colour, linewidth=1.4, zorder=2)
            if len(row["each"]) > 1:
                _rings(axes, [100 * share for share in row["each"]], place, markersize=3.6)
            axes.plot(
                [100 * row["accuracy"]], [place], marker, markersize=6.5, color=colour, markeredgecolor=PAPER, zorder=5
            )
            interval = f"{100 * row['low']:.1f} – {100 * row['high']:.1f}" if row["low"] is not None else ""
            words = (f"{100 * row['accuracy']:.1f} %", interval, row["kind"])
            for inches, part in zip((0.08, 0.64, 1.54), words, strict=True):
                _beside(axes, place, part, inches, color=MUTED if inches > 0.5 else INK)
        _score_axis(axes, metric)
        return figure

    return _chart(f"ranking-{task}", f"{task}: all points by test {metric}", finding, columns, rows, draw, task)


def _standing_beside(view: View, task: str) -> Iterator[dict[str, Any]]:
    """Rows of start, teacher and best constant in a ranking, without intervals: theirs would be over texts, those of
    the points are over seeds."""
    known = view.results.baselines.get(task)
    scores = {} if known is None else {"start": known.start.get("test"), "teacher": known.teacher.get("test")}
    words = {"start": "untouched student", "teacher": "teacher"}
    shared: dict[str, Any] = {"each": [], "seeds": None, "low": None, "high": None, "look": _LOOKS[_BESIDE]}
    for point, score in scores.items():
        if score is not None:
            yield {"point": point, "kind": words[point], "accuracy": score.accuracy, **shared}
    beside = view.analysis.baselines[task]
    if beside.best_constant is not None:
        yield {
            "point": "best constant", "kind": f"always {short(str(beside.best_constant_label), 16)}",
            "accuracy": beside.best_constant, **shared,
        }  # fmt: skip


def _overlapping(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many intervals contain the best mean."""
    best = rows[0]["accuracy"]
    known = [row for row in rows[1:] if row["low"] is not None]
    held = sum(row["low"] <= best <= row["high"] for row in known)
    return f"The best mean lies in the intervals of {held} of the {len(known)} others." if known else ""


def _against_lam(view: View, task: str) -> Chart:
    """Accuracy against mean λ: is it the mean that matters?"""
    metric = view.metric(task)
    rows = [row for row in point_records(view, task) if row["accuracy"] is not None and row["lam"] is not None]
    rows.sort(key=lambda row: row["lam"])
    columns = (
        POINT, text("kind"), lam("lam", "E[λ]"), percent("accuracy", f"{metric}, mean %"), percent("low", "95 % from"),
        percent("high", "to"),
    )  # fmt: skip
    finding = ""
    if rows:
        part = max(1, len(rows) // 3)
        few, many = (100 * fmean(row["accuracy"] for row in side) for side in (rows[:part], rows[-part:]))
        finding = (
            f"E[λ] runs from {rows[0]['lam']:.2f} to {rows[-1]['lam']:.2f} over {len(rows)} points. The {part} with "
            f"the least are at {few:.1f} % on average, the {part} with the greatest at {many:.1f} %."
        )

    def draw() -> Figure:
        shown_kinds = [kind for kind in _LOOKS if any(row["kind"] == KINDS.get(kind) for row in rows)]
        key = list(dict.fromkeys((f"{_LOOKS[kind][1]} {_LOOKS[kind][0]}", _LOOKS[kind][3]) for kind in shown_kinds))
        high = key_height([*key, ("— 95 % interval", MUTED)])
        figure = canvas(high + 3.4)
        draw_key(figure, [*key, ("— 95 % interval", MUTED)])
        axes = panel(figure, left=0.55, right=0.75, top=high, bottom=0.45)
        axes.grid(color=BAND, linewidth=0.6)
        for row in rows:
            _, _, marker, colour = _LOOKS[view.kind(task, row["point"])]
            x, y = row["lam"], 100 * row["accuracy"]
            if row["low"] is not None:
                axes.plot([x, x], [100 * row["low"], 100 * row["high"]], color=colour, linewidth=0.8, alpha=0.6)
            axes.plot([x], [y], marker, markersize=6.5, color=colour, markeredgecolor=PAPER, zorder=3)
        beside = view.analysis.baselines[task]
        lines = {"start": beside.start, "teacher": beside.teacher}
        for name, share in lines.items():
            if share is not None:
                axes.axhline(100 * share, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
                _beside(axes, 100 * share, name, 0.06)
        # Scale to the means: wide intervals of few seeds may leave the panel.
        means = [100 * share for share in (*lines.values(), *(row["accuracy"] for row in rows)) if share is not None]
        margin = max(1.0, 0.12 * (max(means) - min(means)))
        axes.set_ylim(min(means) - margin, max(means) + margin)
        _name_points(axes, [(row["lam"], 100 * row["accuracy"], row["point"]) for row in rows])
        axes.set_xlim(-0.03, 1.03)
        axes.set_xlabel("← forward KL  ·  E[λ] in training  ·  reverse KL →")
        axes.set_ylabel(f"test {metric}, %")
        return figure

    title = f"{task}: {metric} against the mean of λ"
    return _chart(f"against-lambda-{task}", title, finding, columns, rows, draw, task)


def _name_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Label points where the label would not overlap another label or point."""
    low, high = axes.get_ylim()
    letters = 0.013
    taken: list[tuple[float, float, float, float]] = []
    for x, y, name in sorted(points, key=lambda point: abs(point[1] - fmean(p[1] for p in points)), reverse=True):
        at = (y - low) / (high - low)
        for right in (True, False):
            start = x + 0.012 if right else x - 0.012 - letters * len(name)
            box = (start, start + letters * len(name), at - 0.03, at + 0.03)
            free = all(box[1] < b[0] or box[0] > b[1] or box[3] < b[2] or box[2] > b[3] for b in taken)
            clear = all(
                not (box[0] < px < box[1] and abs((py - low) / (high - low) - at) < 0.03) for px, py, _ in points
            )
            if free and clear and box[1] < 1.03 and box[0] > -0.03:
                paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.4}  # so that no line strikes it through
                axes.text(start, y, name, fontsize=SMALL, va="center", zorder=2.5, bbox=paper)
                taken.append(box)
                break


def _beside(axes: Axes, place: float, words: str, inches: float, **look: Any) -> None:
    """Write text to the right of a row, `inches` from its end."""
    x = 1 + inches / (axes.get_position().width * WIDTH)
    axes.text(x, place, words, transform=axes.get_yaxis_transform(), fontsize=SMALL, va="center", **look)


def _score_axis(axes: Axes, metric: str, least: float = 2.0) -> None:
    """Label the axis and widen it to at least `least` pp, so that noise does not look large."""
    axes.set_xlabel(f"test {metric}, %")
    low, high = axes.get_xlim()
    if high - low < least:
        middle = (low + high) / 2
        axes.set_xlim(middle - least / 2, middle + least / 2)


# ---------------------------------------------------------------------------------------------------- training


def _lam(view: View, task: str) -> Chart:
    """One row per point: histogram of λ over all tokens of all seeds."""
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
        height = figure.get_size_inches()[1]
        for x, words in ((WIDTH - 1.12, "mean\u2003SD\u2003 sat."), (0.08, "▏ mean; height: share of tokens")):
            figure.text(x / WIDTH, 1 - 0.1 / height, words, fontsize=SMALL, color=MUTED, va="top")
        for place, record in enumerate(records):
            counts, mean = record["hist"], record["mean"]
            edges = [i / len(counts) for i in range(len(counts) + 1)]
            tops = [place + 0.1 - 0.85 * tokens / (max(counts) or 1.0) for tokens in counts]
            axes.stairs(tops, edges, baseline=place + 0.1, fill=True, color=SKY, linewidth=0, zorder=2)
            axes.stairs(tops, edges, baseline=place + 0.1, color=BLUE, linewidth=0.7, zorder=3)
            axes.plot([mean, mean], [place + 0.1, place - 0.7], color=INK, linewidth=1.1, zorder=4)
            words = f"{mean:.2f}\u2002{record['sd']:.2f}\u2002{100 * record['saturated']:.0f} %"
            _beside(axes, place - 0.1, words, 0.1)
        axes.set_xlim(0, 1)
        axes.set_xlabel("← forward KL  ·  λ  ·  reverse KL →")
        return figure

    title = f"{task}: λ over the tokens of training"
    return _chart(f"lambda-{task}", title, finding, columns, records, draw, task)


@dataclass(frozen=True)
class Line:
    """A training curve: mean over the seeds of a point."""

    point: str
    steps: list[float]
    values: list[float]


def _curves(view: View, task: str) -> Chart:
    """Validation accuracy and training curves; a few points are highlighted and named, the others are grey."""
    columns = (POINT, text("what"), lam("first"), lam("last"))
    panels = {"accuracy": f"{view.plain(view.metric(task))} on validation, %", **_CURVES}
    lines: dict[str, list[Line]] = {what: [] for what in panels}
    for point in view.points(task):
        runs = list(view.done(task, point).values())
        curves = {what: [run.curve() for run in runs] for what in _CURVES} if runs else {}
        curves["accuracy"] = [
            [{"step": step, "accuracy": 100 * share} for step, share in view.validation(run).items()] for run in runs
        ]
        for what, found in curves.items():
            steps, values = _averaged(found, what)
            if len(steps) > 1:
                lines[what].append(Line(point, steps, values))
    lines = {what: found for what, found in lines.items() if found}
    records = [
        {"point": line.point, "what": panels[what], "first": line.values[0], "last": line.values[-1]}
        for what, found in lines.items()
        for line in found
    ]
    finding = ""
    if checks := lines.get("accuracy"):
        ends = sorted(checks, key=lambda line: line.values[-1])
        finding = (
            f"On validation {len(checks)} points go from {checks[0].values[0]:.1f} % to between "
            f"{ends[0].values[-1]:.1f} % ({ends[0].point}) and {ends[-1].values[-1]:.1f} % ({ends[-1].point}). "
        )
    if losses := lines.get("loss"):
        first, last = fmean(line.values[0] for line in losses), fmean(line.values[-1] for line in losses)
        finding += (
            f"The loss goes from {first:.3f} to {last:.3f} on average (losses of different gates are different "
            "functions: compare a line with itself)."
        )

    def draw() -> Figure:
        looks = _highlighted(view, task, lines.get("accuracy") or next(iter(lines.values())))
        key = [(f"— {words}", colour) for words, colour, _ in looks.values()] + [("— other points", MUTED)]
        small = [what for what in lines if what != "accuracy"]
        across = 4
        high, large, tall = key_height(key), 2.4 if "accuracy" in lines else 0.0, 1.75
        figure = canvas(high + large - tall * (-len(small) // across))
        draw_key(figure, key)
        whole = figure.get_size_inches()[1]
        if large:
            axes = panel(figure, left=0.48, right=1.5, top=high + 0.22, bottom=whole - high - large + 0.5)
            _draw_lines(axes, lines["accuracy"], looks, panels["accuracy"])
            axes.set_xlabel("step", labelpad=1, fontsize=SMALL)
            _name_ends(axes, [(line, looks[line.point][1]) for line in lines["accuracy"] if line.point in looks])
        for i, what in enumerate(small):
            row, column = divmod(i, across)
            left, top = 0.48 + column * WIDTH / across, high + large + 0.22 + tall * row
            right = WIDTH - left - (WIDTH / across - 0.62)
            axes = panel(figure, left=left, right=right, top=top, bottom=whole - top - tall + 0.6)
            _draw_lines(axes, lines[what], looks, panels[what])
        return figure

    return _chart(f"curves-{task}", f"{task}: training curves", finding, columns, records, draw, task)


def _highlighted(view: View, task: str, lines: Sequence[Line]) -> dict[str, tuple[str, str, str]]:
    """Point → description, colour, dash: on validation, best of family, published and constant λ; and the lowest."""
    sides = view.analysis.selection[task].sides
    found: dict[str, tuple[str, str, str]] = {}
    for side, words, colour, dash in (
        ("family", "best of the family", BLUE, "-"),
        ("published", "best published method", ORANGE, "--"),
        ("static", "constant λ", GREEN, "-."),
    ):
        chosen = sides[side].chosen if side in sides else None
        if isinstance(chosen, Choice):
            found[chosen.label] = (f"{chosen.label}: {words}", colour, dash)
    lowest = min(lines, key=lambda line: line.values[-1]).point
    if lowest not in found:
        found[lowest] = (f"{lowest}: lowest", PINK, ":")
    return found


def _draw_lines(axes: Axes, lines: Sequence[Line], looks: Mapping[str, tuple[str, str, str]], title: str) -> None:
    for line in lines:
        _, colour, dash = looks.get(line.point, ("", MUTED, "-"))
        own = line.point in looks
        axes.plot(
            line.steps, line.values, color=colour, linestyle=dash, linewidth=1.7 if own else 0.7,
            alpha=1.0 if own else 0.4, zorder=3 if own else 2,
        )  # fmt: skip
    axes.set_title(title, loc="left", pad=3)
    axes.tick_params(labelsize=SMALL)
    axes.locator_params(nbins=5)
    axes.grid(color=BAND, linewidth=0.6)


def _name_ends(axes: Axes, ends: Sequence[tuple[Line, str]]) -> None:
    """Label the ends of lines, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    place = 2.0
    for line, colour in sorted(ends, key=lambda end: -end[0].values[-1]):
        place = min((line.values[-1] - low) / (high - low), place - 0.1)
        words = f"{short(line.point, 16)} {line.values[-1]:.1f}"
        axes.text(1.01, place, words, transform=axes.transAxes, fontsize=SMALL, va="center", color=colour)


def _averaged(curves: Sequence[Sequence[dict[str, Any]]], key: str) -> tuple[list[float], list[float]]:
    """Mean over runs, at the steps that all of them have."""
    known = [{r["step"]: r[key] for r in curve if isinstance(r.get(key), int | float)} for curve in curves]
    known = [curve for curve in known if curve]
    if not known:
        return [], []
    steps = sorted(set.intersection(*(set(curve) for curve in known)))
    if len(steps) > _CURVE_POINTS:
        every = (len(steps) - 1) / (_CURVE_POINTS - 1)
        steps = [steps[round(i * every)] for i in range(_CURVE_POINTS)]
    return [float(s) for s in steps], [fmean(curve[s] for curve in known) for s in steps]


# ---------------------------------------------------------------------------------------------------- confusions


def _confusion(view: View, task: str) -> Chart:
    """Confusion matrices side by side; none for many labels, where only the table is legible."""
    columns = (
        text("model"), text("gold", "gold label"), text("predicted"), count("rows"), percent("share", "share, %")
    )  # fmt: skip
    models = confusion_models(view, task) if task in view.labelled() else []
    parts = []
    for model, scores in models:
        right = {gold: counts[gold] / max(sum(counts.values()), 1) for gold, counts in confusion(scores).items()}
        worst = min(right, key=lambda gold: right[gold])
        weakest = f"weakest on {worst} ({100 * right[worst]:.0f} % right)" if right[worst] < 1 else "all right"
        parts.append(f"{model}: {weakest}")
    finding = "; ".join(parts) + "." if parts else ""
    legible = models and len(confusion(models[0][1])) <= _MOST_LABELS
    records = confusion_records(view, task) if legible else []
    title = f"{task}: confusions of start, the point best on validation, and teacher"
    return _chart(f"confusion-{task}", title, finding, columns, records, lambda: _draw_confusion(models), task)


def _draw_confusion(models: Sequence[tuple[str, tuple[Score, ...]]]) -> Figure:
    from matplotlib.patches import Rectangle

    labels = [short(label, 14) for label in confusion(models[0][1])]
    wide, longest = len(labels) + 1, max(map(len, labels))
    across = len(models) if len(labels) <= 5 else 1
    left = 0.2 + 0.07 * longest
    side = (WIDTH - left - 0.1 - 0.15 * (across - 1)) / across
    cell = min(side / wide, 0.58)
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
                # At most half opaque: the number in it must stay legible in light and dark mode.
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
