"""`gatespace report`: a study's findings as tables, figures and one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gatespace.cli.console import console, print_json, print_warnings
from gatespace.cli.evidence import plain

if TYPE_CHECKING:
    from gatespace.report.page import ReportFiles

Folder = Annotated[
    Path, typer.Argument(metavar="PATH", show_default=False, help="The folder of a study, or an archive of it.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", show_default="with the study", help="Where the report is written."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the findings and the files as JSON.")]
NoPng = Annotated[bool, typer.Option("--no-png", help="Draw figures as SVG only, which is faster.")]


def report(folder: Folder, output: Output = None, as_json: AsJson = False, no_png: NoPng = False) -> None:
    """Write the report of a study: report.html, tables/ and figures/.

    Nothing is trained. An incomplete study gives a partial report, marked
    as such. An archive of `gatespace pack` gives the same tables as the
    folder; its report goes to NAME-report next to it.

    \b
    gatespace report studies/demo
    gatespace report studies/demo --output paper/supplement --no-png
    gatespace report studies/demo.tar.xz --json
    """
    written = write_report(folder, output, png=not no_png, quiet=as_json)
    if not as_json:
        return
    found = written.findings
    print_json(
        {
            "partial": written.partial,
            "headline": found.headline,
            "state": found.state,
            "notable": list(found.notable),
            "warnings": list(found.warnings),
            "training": list(found.training),
            "claims": [
                {"axis": c.axis, "restriction": c.restriction, "verdict": c.verdict, "look": c.look, "text": c.text}
                for c in found.claims
            ],
            "limits": list(found.limits),
            "beside": list(found.beside),
            "comparisons": [*map(plain, written.analysis.comparisons)],
            "html": str(written.html),
            "tables": [*map(str, written.tables)],
            "figures": [*map(str, written.figures)],
        }
    )


def write_report(folder: Path, output: Path | None = None, *, png: bool = True, quiet: bool = False) -> ReportFiles:
    """Write the report of the study in `folder`, and print its findings and paths."""
    from gatespace.report.page import build_report
    from gatespace.study.results import reading

    with reading(folder):
        written = build_report(folder, output, png=png)
    if not quiet:
        _print(written)
    return written


def _print(written: ReportFiles) -> None:
    out, found = console(), written.findings
    for text in found.notable:
        out.print(text, style="bold yellow")
    print_warnings(found.warnings)
    out.print(found.headline, style="bold")
    for text in (found.state, *found.training):
        out.print(text)
    for claim in found.claims:
        out.print(f"\n{claim.about}: {claim.verdict_text}", style="bold")
        out.print(claim.text)
    for text in found.beside:
        out.print(f"\n{text}" if text == found.beside[0] else f"- {text}")
    if found.limits:
        out.print("\nWhat limits it", style="bold")
    for text in found.limits:
        out.print(f"- {text}")
    folder = written.html.parent
    out.print(f"\nwrote {written.html}", soft_wrap=True)
    out.print(f"      {len(written.tables)} files in {folder / 'tables'}", soft_wrap=True)
    out.print(f"      {len(written.figures)} files in {folder / 'figures'}", soft_wrap=True)
