"""`gatespace gate`: describe points of the family before any training. Imports torch only for further signals."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from gatespace.cli.console import console, json_number, print_json, table
from gatespace.cli.run_options import Plugins
from gatespace.errors import UsageError, unknown_name
from gatespace.gating.coefficients import SATURATION, Gate, LamRange, NotApplicable, named_points
from gatespace.plugins import load_plugins

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PAPER_SIGNALS = ("h", "u", "gap")
GRID = 25
"""Cells per axis of the signal cube [0, 1]³; its statistics are taken at the cells' midpoints."""
TYPICAL = 0.3
"""Value of the signals that a plot does not vary. A teacher torn between two labels has h = log 2 / log 8 = .33, and
the paper's E[λ] of G4 on hate implies a mean u of .31."""

_CORNERS_AND_CENTRE = (*itertools.product((0.0, 1.0), repeat=3), (0.5, 0.5, 0.5))
_DASH_POINT = re.compile(r"-(?:inf\b|\.?\d)")
_BALANCED = (0.4, 0.6)
_CELL_WIDTH = len("RR 0.999")
_LABEL_WIDTH = 24
_COLUMN_GAP = 3
_SIGNAL_COLUMNS_WIDTH = 20


class PointCommand(TyperCommand):
    """A command whose arguments may start with a minus sign, like the point -4,0,0,0."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A leading space keeps the parser from taking the point for an option; `read_points` strips it.
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
    gap  1 - the student's probability of the teacher's most likely token

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
    chosen = read_points(points or [])
    held = read_signals(at, chosen)
    rows = [dict(zip(PAPER_SIGNALS, corner, strict=True)) for corner in _CORNERS_AND_CENTRE]
    if at is not None:
        rows.append(held)
    if plot is not None:
        from gatespace.cli.gate_plot import save_plot

        save_plot(plot, chosen, held)
    if as_json:
        found = [_as_json(point, rows) for point in chosen]
        print_json({"points": found, "at": held, "grid": GRID, "plot": None if plot is None else str(plot)})
    else:
        _print_report(console(), chosen, rows)
    if plot is not None:
        typer.echo(f"wrote {plot}", err=as_json)


# ---------------------------------------------------------------------------------------------------- numbers


class Point(NamedTuple):
    """A gate and the text that it was parsed from."""

    text: str
    gate: Gate


def read_points(texts: Sequence[str]) -> list[Point]:
    """Parse points; without any, return all named points of the paper."""
    if not texts:
        return [Point(name, gate) for name, gate in named_points().items()]
    return [Point(text, Gate.parse(text)) for text in map(str.strip, texts)]


def read_signals(text: str | None, points: Sequence[Point]) -> dict[str, float]:
    """Parse signals from text such as ``h=.3,u=.2,gap=.5``; missing signals have their defaults."""
    further = extra_signals(point.gate for point in points)
    signals = dict.fromkeys(PAPER_SIGNALS, TYPICAL) | dict.fromkeys(further, 0.0)
    for part in text.split(",") if text is not None else ():
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            raise UsageError(
                "--at takes signal=value, separated by commas", got=text, instead="e.g. h=.3,u=.2"
            ) from None
        if name not in signals:
            raise unknown_name("signal", name, signals)
        if name in PAPER_SIGNALS and not 0.0 <= number <= 1.0:
            raise UsageError(f"{name} lies in [0, 1]", got=part.strip())
        if not math.isfinite(number):
            raise UsageError(f"{name} must be a finite number", got=part.strip())
        signals[name] = number
    return signals


def extra_signals(gates: Iterable[Gate]) -> list[str]:
    """The signals beyond the paper's three that any of the gates uses, sorted."""
    return sorted({name for gate in gates for name in gate.extra})


def weights(gate: Gate) -> dict[str, float]:
    """Signal → coefficient."""
    return {"h": gate.a, "u": gate.b, "gap": gate.d, **gate.extra}


def lam_at(gate: Gate, signals: Mapping[str, float]) -> float:
    """λ of `gate` at these signals; missing signals count as 0."""
    known = weights(gate)
    return gate.lam(**{name: value for name, value in signals.items() if name in known})


def lam_range(gate: Gate) -> LamRange:
    """Smallest and largest λ, with further signals in the ranges that they are registered with."""
    return gate.lam_range(_ranges(gate))


def _ranges(gate: Gate) -> dict[str, tuple[float, float]]:
    if not gate.extra:
        return {}
    from gatespace.gating import signals  # imports torch

    return {name: signals.get(name).range for name in gate.extra}


def cube_statistics(gate: Gate) -> tuple[float, float]:
    """Mean of λ and fraction of saturated λ over a uniform grid of the signal cube, further signals at 0."""
    # An axis that the gate does not use can be reduced to one value without changing the result.
    midpoints = [(i + 0.5) / GRID for i in range(GRID)]
    axes = [midpoints if weight else [0.5] for weight in (gate.a, gate.b, gate.d)]
    lams = [gate.lam(h=h, u=u, gap=gap) for h, u, gap in itertools.product(*axes)]
    saturated = sum(min(lam, 1.0 - lam) <= SATURATION for lam in lams)
    return math.fsum(lams) / len(lams), saturated / len(lams)


def notes(gate: Gate) -> list[str]:
    """Notable properties of a gate, one sentence each."""
    if gate.is_static:
        return ["constant λ: no signal moves it"]
    up = [name for name, weight in weights(gate).items() if weight > 0]
    down = [name for name, weight in weights(gate).items() if weight < 0]
    directions = [f"{verb} with {_and(names)}" for verb, names in (("rises", up), ("falls", down)) if names]
    found = [f"λ {', '.join(directions)}"]
    if gate.b != 0 and gate.a == gate.d == 0 and not gate.extra:
        found.append("every token of a response shares one λ")
    if gate.b != 0:
        found.append("needs u, from the first response token")
    if gate.d != 0:
        found.append("reads the student (gap), so the gate has a gradient")
    if gate.extra:
        found.append(f"{_and(list(gate.extra))} counted as 0, except in what λ reaches")
    if unbounded := [name for name, ends in _ranges(gate).items() if any(map(math.isinf, ends))]:
        found.append(f"{_and(unbounded)} unbounded")
    low, high = lam_range(gate)
    if high <= 0.5:
        found.append("λ ≤ 0.5 always: never more reverse than forward KL")
    if low >= 0.5:
        found.append("λ ≥ 0.5 always: never more forward than reverse KL")
    return found


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _as_json(point: Point, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Everything that the command prints about a point, unrounded."""
    gate = point.gate
    mean_lam, saturation = cube_statistics(gate)
    return {
        "input": point.text,
        "name": gate.name,
        "gate": [json_number(value) for value in gate.abcd],
        "extra": dict(gate.extra),
        "lam_range": list(lam_range(gate)),
        "entropy_only": _restriction_json(gate.entropy_only()),
        "gap_only": _restriction_json(gate.gap_only()),
        "table": [{**row, "lam": lam_at(gate, row)} for row in rows],
        "saturation": saturation,
        "mean_lam": mean_lam,
        "notes": notes(gate),
    }


def _restriction_json(restriction: Gate | NotApplicable) -> dict[str, Any]:
    if isinstance(restriction, NotApplicable):
        return {"na": restriction.reason}
    return {"gate": [json_number(value) for value in restriction.abcd]}


# ---------------------------------------------------------------------------------------------------- tables


def _print_report(out: Console, points: Sequence[Point], rows: Sequence[Mapping[str, float]]) -> None:
    out.print(_points_table(points))
    out.print(_restrictions_table(points))
    out.print(
        "entropy-only has the direction of EOPD, gap-only with d < 0 that of ToDi; neither is the published method.",
        style="dim",
    )
    out.print()
    for block in _blocks([point.gate for point in points], out.width):
        out.print(_lam_table(block, rows))
    out.print(
        f"F forward-heavy (λ < {_BALANCED[0]:g}), FF nearly forward KL alone (λ ≤ {SATURATION:g}); "
        f"R reverse-heavy (λ > {_BALANCED[1]:g}), RR nearly reverse KL alone (λ ≥ {1 - SATURATION:g}); = balanced",
        style="dim",
    )
    out.print()
    out.print(_cube_table(points))
    out.print(
        f"Over a uniform grid of the signal cube 0..1 ({GRID} cells per axis). Saturated: λ within "
        f"{SATURATION:g} of 0 or 1. Real tokens do not fill the cube evenly.",
        style="dim",
    )


def _points_table(points: Sequence[Point]) -> Table:
    found = table("Points: λ = σ(a·h + b·u + c + d·gap)", "point", *"abcd", numbers="abcd")
    further = any(gate.extra for _, gate in points)
    if further:
        found.add_column("further signals", overflow="fold")
    found.add_column("λ reaches", justify="right", no_wrap=True)
    for text, gate in points:
        low, high = lam_range(gate)
        reach = f"{low:.3f}" if low == high else f"{low:.3f} .. {high:.3f}"
        numbers = [f"{value:.4g}" for value in gate.abcd]
        found.add_row(gate.name or text, *numbers, *([_listed(gate.extra)] if further else []), reach)
    return found


def _restrictions_table(points: Sequence[Point]) -> Table:
    from rich.text import Text

    found = table("Restrictions to one channel, magnitude kept", "point", "entropy-only", "gap-only")
    for _, gate in points:
        both = (gate.entropy_only(), gate.gap_only())
        cells = [Text(str(one), style="dim" if isinstance(one, NotApplicable) else "") for one in both]
        found.add_row(gate.label, *cells)
    return found


def _lam_table(gates: Sequence[Gate], rows: Sequence[Mapping[str, float]]) -> Table:
    found = table("λ over the signals", *PAPER_SIGNALS, numbers=PAPER_SIGNALS)
    further = any(len(row) > len(PAPER_SIGNALS) for row in rows)
    if further:
        found.add_column("further", overflow="fold")
    for gate in gates:
        found.add_column(gate.label, justify="right", overflow="fold", min_width=_CELL_WIDTH, max_width=_LABEL_WIDTH)
    for row in rows:
        cells = [f"{row[name]:g}" for name in PAPER_SIGNALS]
        if further:
            cells.append(_listed({name: row[name] for name in row if name not in PAPER_SIGNALS}) or "0")
        found.add_row(*cells, *(_lam_cell(lam_at(gate, row)) for gate in gates))
    return found


def _cube_table(points: Sequence[Point]) -> Table:
    numbers = ("mean λ", "saturated")
    found = table("Over the signal cube", "point", *numbers, "what to know", numbers=numbers)
    for _, gate in points:
        mean_lam, saturation = cube_statistics(gate)
        found.add_row(gate.label, f"{mean_lam:.3f}", f"{saturation:.1%}", "; ".join(notes(gate)))
    return found


def _blocks(gates: Sequence[Gate], width: int) -> Iterator[Sequence[Gate]]:
    """Group the gates so that their λ columns fit `width`."""
    block: list[Gate] = []
    used = _SIGNAL_COLUMNS_WIDTH
    for gate in gates:
        needed = min(max(len(gate.label), _CELL_WIDTH), _LABEL_WIDTH) + _COLUMN_GAP
        if block and used + needed > width:
            yield block
            block, used = [], _SIGNAL_COLUMNS_WIDTH
        block.append(gate)
        used += needed
    yield block


def _lam_cell(lam: float) -> Text:
    from rich.text import Text

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
    return Text(f"{mark} {lam:.3f}", style=style)


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in values.items())
