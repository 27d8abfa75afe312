"""Figure of label probabilities: reliability diagram, and accuracy against coverage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from gatespace.evaluation.calibration import Bin, Calibration
from gatespace.report.drawing import (
    BAND,
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PAPER,
    SMALL,
    WIDTH,
    Chart,
    canvas,
    draw_key,
    key_height,
    panel,
    short,
)
from gatespace.report.table import Record, Table, count, percent, text
from gatespace.report.tables import confusion_models
from gatespace.report.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = (("●", "o", BLUE, "-"), ("◆", "D", ORANGE, "--"), ("■", "s", GREEN, "-."))
_TALL = 2.9
"""Height of a panel with its axis, in inches."""

Models = Sequence[tuple[str, Sequence[Calibration]]]


def reliability(view: View, task: str) -> Chart:
    """Return accuracy by confidence and by coverage, for start, the point best on validation, and teacher."""
    known = [
        (model, [score.calibration for score in scores if score.calibration is not None])
        for model, scores in confusion_models(view, task)
    ]
    models = [(model, found) for model, found in known if found]
    columns = (
        text("model"), text("rows_of", "texts"), count("rows"), percent("confidence", "confidence, %"),
        percent("accuracy", "accuracy, %"),
    )  # fmt: skip
    parts = [
        f"{model}: confidence {100 * fmean(one.confidence for one in found):.1f} % and accuracy "
        f"{100 * fmean(one.accuracy for one in found):.1f} % on average (ECE "
        f"{100 * fmean(one.ece for one in found):.1f} %), {100 * fmean(one.curve[49] for one in found):.1f} % among "
        "the most confident half"
        for model, found in models
    ]
    title = f"{task}: calibration of label probabilities, and accuracy by coverage"
    name = f"reliability-{task}"
    data = Table.of(name, title, columns, _records(models))
    return Chart(name, title, "; ".join(parts) + ".", data, lambda: _draw(models), task)


def pooled(found: Sequence[Calibration]) -> list[Bin]:
    """Pool the bins of several seeds."""
    bins = []
    for some in zip(*(one.bins for one in found), strict=True):
        rows = sum(one.count for one in some)
        confidence, accuracy = (
            sum(one.count * (value or 0.0) for one, value in values) / rows if rows else None
            for values in ([(one, one.confidence) for one in some], [(one, one.accuracy) for one in some])
        )
        bins.append(Bin(some[0].low, some[0].high, rows, confidence, accuracy))
    return bins


def _curve(found: Sequence[Calibration]) -> list[float]:
    """Accuracy among the most confident 1 %, 2 %, …, mean over seeds."""
    return [fmean(values) for values in zip(*(one.curve for one in found), strict=True)]


def _records(models: Models) -> Iterator[Record]:
    for model, found in models:
        for one in pooled(found):
            if one.count:
                about = f"confidence {one.low:.2f} to {one.high:.2f}"
                shares = {"confidence": one.confidence, "accuracy": one.accuracy}
                yield {"model": model, "rows_of": about, "rows": one.count, **shares}
        curve, rows = _curve(found), sum(one.count for one in found)
        for point in range(10, 101, 10):
            about = f"the most confident {point} %"
            yield {"model": model, "rows_of": about, "rows": -(-rows * point // 100), "accuracy": curve[point - 1]}


def _draw(models: Models) -> Figure:
    key = [(f"{look[0]} {short(model, 24)}", look[2]) for (model, _), look in zip(models, _LOOKS, strict=False)]
    key.append(("— accuracy = confidence", MUTED))
    top = key_height(key)
    figure = canvas(top + _TALL)
    draw_key(figure, key)
    half = WIDTH / 2
    panels = [
        panel(figure, left=left, right=WIDTH - left - half + 0.75, top=top + 0.12, bottom=0.48)
        for left in (0.55, 0.55 + half)
    ]
    _draw_bins(panels[0], models)
    _draw_curves(panels[1], models)
    for axes in panels:
        axes.grid(color=BAND, linewidth=0.6)
        axes.tick_params(labelsize=SMALL)
    return figure


def _draw_bins(axes: Axes, models: Models) -> None:
    axes.plot([0, 100], [0, 100], color=MUTED, linewidth=0.8, zorder=1)
    for (_, found), (_, marker, colour, dash) in zip(models, _LOOKS, strict=False):
        bins = [one for one in pooled(found) if one.count]
        total = sum(one.count for one in bins)
        x, y = [100 * (one.confidence or 0) for one in bins], [100 * (one.accuracy or 0) for one in bins]
        axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.2, zorder=2)
        for one, across, up in zip(bins, x, y, strict=True):
            size = 3 + 9 * math.sqrt(one.count / total)
            axes.plot([across], [up], marker, markersize=size, color=colour, markeredgecolor=PAPER, zorder=3)
    axes.set_xlim(0, 103)
    axes.set_ylim(-3, 103)
    axes.set_xlabel("confidence, % (a larger mark has more texts)")
    axes.set_ylabel("accuracy, %")


def _draw_curves(axes: Axes, models: Models) -> None:
    lowest = 100.0
    for (_, found), (_, _, colour, dash) in zip(models, _LOOKS, strict=False):
        curve = [100 * share for share in _curve(found)]
        axes.plot(range(1, len(curve) + 1), curve, color=colour, linestyle=dash, linewidth=1.7)
        lowest = min(lowest, *curve)
    axes.set_xlim(0, 103)
    axes.set_ylim(max(0.0, lowest - 5), 102)
    axes.set_xlabel("coverage: the most confident, % of texts")
    axes.set_ylabel("accuracy among them, %")
