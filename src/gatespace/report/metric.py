"""Rename accuracy in tables and figures to the metric of text tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from gatespace.report.drawing import Chart
from gatespace.report.table import Table, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACCURACY = re.compile(r"\b[Aa]ccurac(?:y|ies)\b")


def in_words(text: str, metric: str) -> str:
    """Replace accuracy by `metric` in a text.

    Examples:
        >>> in_words("Accuracy per seed", "rouge_l"), in_words("test accuracy, %", "accuracy")
        ('rouge_l per seed', 'test accuracy, %')
    """
    return text if metric == "accuracy" else _ACCURACY.sub(metric, text)


def table_about(table: Table, metric: str, metrics: Mapping[str, str] = MappingProxyType({})) -> Table:
    """Replace accuracy by `metric` in a table's texts; column keys stay.

    `metrics` (task → metric, if tasks differ) become a column next to the task.
    """
    if metric == "accuracy":
        return table
    keys = [column.key for column in table.columns]
    if metrics and "task" in keys and "judged_by" not in keys:
        at = keys.index("task")
        rows = tuple((*row[: at + 1], metrics.get(str(row[at])), *row[at + 1 :]) for row in table.rows)
        columns = (*table.columns[: at + 1], text("metric"), *table.columns[at + 1 :])
        table = replace(table, columns=columns, rows=rows, stub=table.stub + 1)
    columns = tuple(replace(column, title=in_words(column.title, metric)) for column in table.columns)
    title, note, empty = (in_words(words, metric) for words in (table.title, table.note, table.empty))
    return replace(table, columns=columns, title=title, note=note, empty=empty)


def chart_about(chart: Chart, metric: str) -> Chart:
    """Replace accuracy by `metric` in a figure's texts."""
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
            for label in axes.texts:
                label.set_text(in_words(label.get_text(), metric))
        return figure

    return drawn
