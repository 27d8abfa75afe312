"""`gatespace gate`: what a point of the family does, before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from gatespace.cli import gate_summary as summary
from gatespace.cli.console import console, print_json
from gatespace.cli.run_options import Plugins
from gatespace.gating.coefficients import SATURATION, NotApplicable, named_points
from gatespace.plugins import load_plugins

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gatespace.cli.gate_summary import Point, Signals

_DASH_POINT = re.compile(r"-(?:inf\b|\.?\d)")
_BALANCED = (0.4, 0.6)
_CELL_WIDTH = len("RR 0.999")
_LABEL_WIDTH = 24
_COLUMN_GAP = 3
_SIGNAL_COLUMNS_WIDTH = 20


class PointCommand(TyperCommand):
    """A command whose arguments may start with a minus sign, as the point -4,0,0,0 does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A leading blank keeps the parser from reading the point as an option; whoever reads the point strips it.
        guarded: list[str] = []
        for i, arg in enumerate(args):
            if arg == "--":
                guarded += args[i:]
                break
            is_value = i > 0 and args[i - 1] in ("--plot", "--at")
            guarded.append(f" {arg}" if _DASH_POINT.match(arg) and not is_value else arg)
        return super().parse_args(ctx, guarded)


def _complete_point(incomplete: str) -> list[str]:
    return [name for name in named_points() if name.casefold().startswith(incomplete.casefold())]


def gate(
    points: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="POINT",
            autocompletion=_complete_point,
            show_default=False,
            help="A name (G5, H2, HG5,d+4), a,b,c,d (4,0,-1,0), static:0.388, entropy-only:4 or gap-only:-2. "
            "Further signals follow the four numbers: 4,0,-1,0,jsd=2. None: all named points of the paper.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Draw λ against each signal; .png, .svg or .pdf by the suffix."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="SIGNALS",
            show_default="h, u, gap at 0.3, further signals at 0",
            help="Signals as h=.3,u=.2,gap=.5: one more row of the table, and where a plot holds the signals it does "
            "not vary.",
        ),
    ] = None,
    plugins: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what gates do: their coefficients, restrictions, λ over the signals, and saturation.

    λ = σ(a·h + b·u + c + d·gap) is the weight of reverse KL at a token;
    forward KL has 1-λ. The signals lie in 0..1:

    \b
    h    the teacher's entropy at the token
    u    the teacher's entropy at the first response token
    gap  1 - the student's probability of the teacher's first choice

    Examples:

    \b
    gatespace gate                             every named point of the paper
    gatespace gate G5 H2 static:0.388          three points side by side
    gatespace gate -4,0,0,0 entropy-only:4     one point, written in two ways
    gatespace gate G2 H2 --plot gates.svg --at u=.1
    gatespace gate 4,0,-1,0,mine=2 --plugin my_signal.py

    JSON, unrounded, alone on standard output:

    \b
    {"points": \\[{"input", "name", "gate": \\[a, b, c, d], "extra": {},
      "lam_range": \\[low, high], "entropy_only": {"gate"} or {"na": reason},
      "gap_only": the same, "table": \\[{"h", "u", "gap", "lam"}],
      "saturation", "mean_lam", "notes": \\[]}], "at": {}, "grid", "plot"}
    An infinite c (static:0, static:1) is the text "inf" or "-inf".
    """
    load_plugins(plugins or [])
    chosen = summary.read_points(points or [])
    held = summary.read_signals(at, chosen)
    rows = summary.table_rows(held if at is not None else None)
    if plot is not None:
        from gatespace.cli.gate_plot import save_plot

        save_plot(plot, chosen, held)
    if as_json:
        print_json(
            {
                "points": [summary.as_json(point, rows) for point in chosen],
                "at": {"h": held.h, "u": held.u, "gap": held.gap, **held.extra},
                "grid": summary.GRID,
                "plot": None if plot is None else str(plot),
            }
        )
    else:
        _print_report(console(), chosen, rows)
    if plot is not None:
        typer.echo(f"wrote {plot}", err=as_json)


def _print_report(out: Console, points: Sequence[Point], rows: Sequence[Signals]) -> None:
    out.print(_points_table(points))
    out.print(_restrictions_table(points))
    out.print(
        "entropy-only has the direction of EOPD, gap-only with d < 0 that of ToDi; neither is the published method.",
        style="dim",
    )
    out.print()
    for block in _blocks(points, out.width):
        out.print(_lam_table(block, rows))
    out.print(
        f"F forward-heavy (λ < {_BALANCED[0]:g}), FF nearly forward KL alone (λ ≤ {SATURATION:g}); "
        f"R reverse-heavy (λ > {_BALANCED[1]:g}), RR nearly reverse KL alone (λ ≥ {1 - SATURATION:g}); = balanced",
        style="dim",
    )
    out.print()
    out.print(_cube_table(points))
    out.print(
        f"Over a uniform grid of the signal cube 0..1 ({summary.GRID} cells per axis). Saturated: λ within "
        f"{SATURATION:g} of 0 or 1. Real tokens do not fill the cube evenly.",
        style="dim",
    )


def _points_table(points: Sequence[Point]) -> Table:
    table = _table("Points: λ = σ(a·h + b·u + c + d·gap)")
    table.add_column("point", style="bold", overflow="fold")
    for name in "abcd":
        table.add_column(name, justify="right")
    further = bool(summary.extra_signals(points))
    if further:
        table.add_column("further signals", overflow="fold")
    table.add_column("λ reaches", justify="right", no_wrap=True)
    for point in points:
        low, high = point.gate.lam_range()
        extra = ", ".join(f"{name}={value:g}" for name, value in point.gate.extra.items())
        reach = f"{low:.3f}" if low == high else f"{low:.3f} .. {high:.3f}"
        numbers = [f"{value:.4g}" for value in point.gate.abcd]
        table.add_row(point.gate.name or point.text, *numbers, *([extra] if further else []), reach)
    return table


def _restrictions_table(points: Sequence[Point]) -> Table:
    table = _table("Restrictions to one channel, magnitude kept")
    table.add_column("point", style="bold", overflow="fold")
    table.add_column("entropy-only")
    table.add_column("gap-only")
    for point in points:
        cells = []
        for restriction in (point.gate.entropy_only(), point.gate.gap_only()):
            style = "dim" if isinstance(restriction, NotApplicable) else ""
            cells.append(_styled(str(restriction), style))
        table.add_row(point.label, *cells)
    return table


def _lam_table(points: Sequence[Point], rows: Sequence[Signals]) -> Table:
    table = _table("λ over the signals")
    for name in summary.PAPER_SIGNALS:
        table.add_column(name, justify="right")
    further = sorted({name for row in rows for name in row.extra})
    if further:
        table.add_column("further", overflow="fold")
    for point in points:
        table.add_column(point.label, justify="right", overflow="fold", min_width=_CELL_WIDTH, max_width=_LABEL_WIDTH)
    for row in rows:
        cells = [f"{row.get(name):g}" for name in summary.PAPER_SIGNALS]
        if further:
            cells.append(", ".join(f"{name}={value:g}" for name, value in row.extra.items()) or "0")
        table.add_row(*cells, *(_lam_cell(row.lam(point.gate)) for point in points))
    return table


def _cube_table(points: Sequence[Point]) -> Table:
    table = _table("Over the signal cube")
    table.add_column("point", style="bold", overflow="fold")
    table.add_column("mean λ", justify="right")
    table.add_column("saturated", justify="right")
    table.add_column("what to know")
    for point in points:
        cube = summary.cube_statistics(point.gate)
        table.add_row(
            point.label, f"{cube.mean_lam:.3f}", f"{cube.saturation:.1%}", "; ".join(summary.notes(point.gate))
        )
    return table


def _blocks(points: Sequence[Point], width: int) -> Iterator[Sequence[Point]]:
    """The points in groups whose λ columns fit `width`."""
    block: list[Point] = []
    used = _SIGNAL_COLUMNS_WIDTH
    for point in points:
        needed = min(max(len(point.label), _CELL_WIDTH), _LABEL_WIDTH) + _COLUMN_GAP
        if block and used + needed > width:
            yield block
            block, used = [], _SIGNAL_COLUMNS_WIDTH
        block.append(point)
        used += needed
    yield block


def _lam_cell(lam: float) -> Any:
    if lam <= SATURATION:
        mark, style = "FF", "bold blue"
    elif lam < _BALANCED[0]:
        mark, style = "F", "blue"
    elif lam <= _BALANCED[1]:
        mark, style = "=", ""
    elif lam < 1.0 - SATURATION:
        mark, style = "R", "red"
    else:
        mark, style = "RR", "bold red"
    return _styled(f"{mark} {lam:.3f}", style)


def _styled(text: str, style: str) -> Any:
    from rich.text import Text

    return Text(text, style=style)


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
