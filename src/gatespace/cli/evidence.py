"""`gatespace evidence`: every comparison of a study with its interval, on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatespace.cli.console import console, print_json, table
from gatespace.cli.run_options import AsJson

if TYPE_CHECKING:
    from gatespace.evidence.records import ComparisonEvidence


def evidence(
    folder: Annotated[
        Path, typer.Argument(metavar="PATH", show_default=False, help="The folder of a study, or an archive of it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print every comparison of a study with its interval and p-values.

    Nothing is trained and no report is written; the look at test is logged.

    \b
    gatespace evidence studies/demo
    gatespace evidence studies/demo.tar.xz --json
    """
    from gatespace.study.results import reading

    with reading(folder):
        _print(folder, as_json=as_json)


def _print(folder: Path, *, as_json: bool) -> None:
    from gatespace.evidence.analysis import analyse
    from gatespace.report.findings import looks_text
    from gatespace.report.table import shown
    from gatespace.report.view import View
    from gatespace.study.results import look_at

    results = look_at(folder)
    analysis = analyse(results)
    found = analysis.comparisons
    if as_json:
        parts = {"study": results.name, "problems": results.problems, "looks": len(results.looks)}
        print_json({**parts, "comparisons": [*map(plain, found)]})
        return
    out = console()
    numbers = ("seeds", "mean, pp", "95 % interval", "p, adjusted")
    view = View(results, analysis, {})
    for task in dict.fromkeys(one.task for one in found):
        rows = table(f"{task}: {view.metric_name} on test, left minus right", "comparison", *numbers, numbers=numbers)
        for one in found:
            if one.task == task and (pair := one.judged) is not None:
                mean, low, high = (shown(value, "signed_pp") for value in (pair.mean, pair.low, pair.high))
                interval = "–" if pair.low is None else f"{low} to {high}"
                p = shown(one.bh if one.holm is None else one.holm, "p")
                rows.add_row(f"{one.left} − {one.right}", str(pair.n), mean, interval, p)
        if rows.row_count:
            out.print(rows)
    seed = results.selection_seed
    without = "" if seed is None else f", excluding the selection seed ({seed}) if at least two others exist"
    out.print(f"Intervals are over seeds{without}.")
    out.print("p is adjusted by Holm among replicated comparisons, by Benjamini-Hochberg among others.")
    if text := looks_text(results):
        out.print(text)
    if results.problems:
        out.print(f"not complete: {'; '.join(results.problems)}")


def plain(found: ComparisonEvidence) -> dict[str, Any]:
    """A comparison as JSON has it."""
    from dataclasses import asdict

    return {name: value for name, value in asdict(found).items() if name not in ("mcnemar", "run_ids")}
