"""What a report calls the number that it is about: accuracy, or the metric of text tasks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gatespace.report.drawing import Chart
from gatespace.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACCURACY = re.compile(r"\b[Aa]ccurac(?:y|ies)\b")


def in_words(text: str, metric: str) -> str:
    """A text about accuracy as one about `metric`.

    Examples:
        >>> in_words("Accuracy per seed", "rouge_l"), in_words("test accuracy, %", "accuracy")
        ('rouge_l per seed', 'test accuracy, %')
    """
    return text if metric == "accuracy" else _ACCURACY.sub(metric, text)


def table_about(table: Table, metric: str) -> Table:
    """A table in the words of `metric`; the keys of its columns stay."""
    if metric == "accuracy":
        return table
    columns = tuple(replace(column, title=in_words(column.title, metric)) for column in table.columns)
    title, note, empty = (in_words(text, metric) for text in (table.title, table.note, table.empty))
    return replace(table, columns=columns, title=title, note=note, empty=empty)


def chart_about(chart: Chart, metric: str) -> Chart:
    """A figure in the words of `metric`."""
    if metric == "accuracy":
        return chart
    return replace(
        chart,
        title=in_words(chart.title, metric),
        finding=in_words(chart.finding, metric),
        data=table_about(chart.data, metric),
        draw=_drawn(chart.draw, metric),
    )


def _drawn(draw: Callable[[], Figure], metric: str) -> Callable[[], Figure]:
    def drawn() -> Figure:
        figure = draw()
        for axes in figure.axes:
            axes.set_xlabel(in_words(axes.get_xlabel(), metric))
            axes.set_ylabel(in_words(axes.get_ylabel(), metric))
            for text in axes.texts:
                text.set_text(in_words(text.get_text(), metric))
        return figure

    return drawn
