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
    numbers = ("seeds", "mean, pp", "from", "to", "p", "p, Holm", "p, BH")
    title = f"{results.name}: {View(results, analysis, {}).metric_name} on test, left minus right"
    rows = table(title, "task", "left", "right", *numbers, numbers=numbers)
    for one in found:
        if (pair := one.judged) is not None:
            values = [shown(value, "signed_pp") for value in (pair.mean, pair.low, pair.high)]
            values += [shown(value, "p") for value in (pair.p, one.holm, one.bh)]
            rows.add_row(one.task, one.left, one.right, str(pair.n), *values)
    out.print(rows)
    seed = results.selection_seed
    without = "" if seed is None else f"; where two others are there, without the selection seed ({seed})"
    out.print(f"95 % intervals over seeds{without}.")
    if text := looks_text(results):
        out.print(text)
    if results.problems:
        out.print(f"not complete: {'; '.join(results.problems)}")


def plain(found: ComparisonEvidence) -> dict[str, Any]:
    """A comparison as JSON has it."""
    from dataclasses import asdict

    return {name: value for name, value in asdict(found).items() if name not in ("mcnemar", "run_ids")}
