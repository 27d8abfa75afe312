"""Tables of results, made from what `evaluation-<split>.json` holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def results_table(evaluations: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per split, and one more for a test without the rows that also stand in train."""
    table = _table("Results", "rows", "accuracy", "macro-F1", "no label", "majority", first="split")
    for split, found in evaluations.items():
        metrics = found["metrics"]
        partly = metrics["count"] < found["available"]
        table.add_row(f"{split}, first rows" if partly else split, *_cells(metrics))
        without = found["without_duplicates"]
        if found["duplicates"] and "accuracy" in without:
            table.add_row(f"{split} without {found['duplicates']} rows that are in train", *_cells(without))
    return table


def labels_table(metrics: Mapping[str, Any]) -> Table:
    """One row per label."""
    table = _table("Labels", "precision", "recall", "F1", "rows", "predicted", "no label", first="label")
    for row in metrics["per_label"]:
        shares = [f"{row[key]:.3f}" for key in ("precision", "recall", "f1")]
        table.add_row(row["label"], *shares, *(str(row[key]) for key in ("support", "predicted", "unparsed")))
    return table


def _cells(metrics: Mapping[str, Any]) -> list[str]:
    majority = metrics["majority"]
    return [
        str(metrics["count"]),
        f"{metrics['accuracy']:.4f}",
        f"{metrics['macro_f1']:.4f}",
        str(metrics["parse_failures"]),
        f"{majority['accuracy']:.4f} ({majority['label']})",
    ]


def _table(title: str, *columns: str, first: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table
