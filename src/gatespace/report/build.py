"""From the results of a study to its report: tables, figures and one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gatespace.evidence.analysis import analyse
from gatespace.files import atomic_write
from gatespace.report.charts import all_charts
from gatespace.report.drawing import render
from gatespace.report.evidence_tables import evidence_tables
from gatespace.report.findings import Findings, find
from gatespace.report.page import page
from gatespace.report.score_tables import cost_table, failures_table, score_tables
from gatespace.report.table import csv_text, latex_text, markdown_text
from gatespace.report.view import View
from gatespace.study.records import StudyResults

__all__ = ["ReportFiles", "build_report"]

_FORMS = {"md": markdown_text, "tex": latex_text, "csv": csv_text}


@dataclass(frozen=True)
class ReportFiles:
    """What was written, and what it says first.

    Args:
        html: The page.
        tables: Files of tables.
        figures: Files of figures.
        findings: The first screen.
        partial: Whether something of the plan is not there.
    """

    html: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]
    findings: Findings
    partial: bool


def build_report(results: StudyResults | Path, out: Path | None = None, *, png: bool = True) -> ReportFiles:
    """Write report.html, tables/ and figures/.

    Files of an earlier report that this one does not have are removed from tables/ and figures/, so that what lies
    there belongs together. Equal results give equal bytes in tables/.

    Args:
        results: A study's results, or its folder.
        out: Where to; None: the folder of the study.
        png: Draw every figure as PNG too.
    """
    if isinstance(results, Path):
        from gatespace.study.results import read_results

        results = read_results(results)
    place = Path(out) if out is not None else results.folder
    view = View(results, analyse(results))
    findings = find(view)
    tables = [*score_tables(view), *evidence_tables(view)]
    drawn = render(all_charts(view), png=png)
    text = page(view, findings, tables, [cost_table(view), failures_table(view)], drawn)

    written: dict[Path, str | bytes] = {}
    for table in tables:
        written |= {place / "tables" / f"{table.name}.{form}": write(table) for form, write in _FORMS.items()}
    table_files = tuple(written)
    for one in drawn:
        written[place / "figures" / f"{one.chart.name}.svg"] = one.svg
        if one.png is not None:
            written[place / "figures" / f"{one.chart.name}.png"] = one.png
    figure_files = tuple(path for path in written if path not in table_files)
    for path, content in written.items():
        atomic_write(path, content)
    _remove_others(place, set(written))
    atomic_write(place / "report.html", text)  # the last: a page that is there has its files beside it
    return ReportFiles(place / "report.html", table_files, figure_files, findings, view.is_partial)


def _remove_others(place: Path, kept: set[Path]) -> None:
    for folder, suffixes in (("tables", (".md", ".tex", ".csv")), ("figures", (".svg", ".png"))):
        for path in (place / folder).glob("*") if (place / folder).is_dir() else ():
            if path.suffix in suffixes and path not in kept:
                path.unlink()
