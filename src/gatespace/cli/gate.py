"""`gatespace gate`: describe points of the family before any training. Imports torch only for further signals."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
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

PAPER_SIGNALS = ("h", "u", "gap")
GRID = 25
"""Cells per axis of the signal cube [0, 1]³; its statistics are taken at the cells' midpoints."""
TYPICAL = 0.3
"""Value of signals that --at leaves out. A teacher torn between two labels has h = log 2 / log 8 = .33, and the paper's
E[λ] of G4 on hate implies a mean u of .31."""

_CORNERS_AND_CENTRE = (*itertools.product((0.0, 1.0), repeat=3), (0.5, 0.5, 0.5))
_DASH_POINT = re.compile(r"-(?:inf\b|\.?\d)")


class PointCommand(TyperCommand):
    """A command whose arguments may start with a minus sign, like the point -4,0,0,0."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A leading space keeps the parser from taking the point for an option; `read_points` strips it.
        guarded: list[str] = []
        for i, arg in enumerate(args):
            if arg == "--":
                guarded += args[i:]
                break
            is_value = i > 0 and args[i - 1] == "--at"
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
    at: Annotated[
        str | None,
        typer.Option(
            metavar="SIGNALS",
            show_default="h, u, gap at 0.3, further signals at 0",
            help="Signals as h=.3,u=.2,gap=.5: one more column of the table.",
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
    gatespace gate G2 H2 --at h=.3,u=.1,gap=.5
    gatespace gate 4,0,-1,0,mine=2 --plugin my_signal.py

    JSON, unrounded, alone on standard output:

    \b
    {"points": \\[{"input", "name", "gate": \\[a, b, c, d], "extra": {},
      "lam_range": \\[low, high], "entropy_only": {"gate"} or {"na": reason},
      "gap_only": the same, "table": \\[{"h", "u", "gap", "lam"}],
      "saturation", "mean_lam", "notes": \\[]}], "at": {}, "grid"}
    An infinite c (static:0, static:1) is the text "inf" or "-inf".
    """
    load_plugins(plugins or [])
    chosen = read_points(points or [])
    held = read_signals(at, chosen)
    rows = [dict(zip(PAPER_SIGNALS, corner, strict=True)) for corner in _CORNERS_AND_CENTRE]
    if at is not None:
        rows.append(held)
    if as_json:
        print_json({"points": [_as_json(point, rows) for point in chosen], "at": held, "grid": GRID})
    else:
        _print_report(console(), chosen, rows)


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
    further = sorted({name for point in points for name in point.gate.extra})
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
    numbers = (*"abcd", "λ reaches", "mean λ", "saturated")
    shown = table("Points: λ = σ(a·h + b·u + c + d·gap + further signals)", "point", *numbers, numbers=numbers)
    restrictions = table("Restrictions to one channel, magnitude kept", "point", "entropy-only", "gap-only", "notes")
    corners = ["".join("½" if value == 0.5 else f"{value:g}" for value in corner) for corner in _CORNERS_AND_CENTRE]
    columns = [*corners, "--at"][: len(rows)]
    lams = table("λ at the corners of h, u, gap (010: u = 1, the others 0)", "point", *columns, numbers=columns)
    for text, gate in points:
        low, high = lam_range(gate)
        reach = f"{low:.3f}" if low == high else f"{low:.3f} .. {high:.3f}"
        mean_lam, saturation = cube_statistics(gate)
        figures = [*(f"{value:.4g}" for value in gate.abcd), reach, f"{mean_lam:.3f}", f"{saturation:.1%}"]
        shown.add_row(gate.name or text, *figures)
        restrictions.add_row(gate.label, str(gate.entropy_only()), str(gate.gap_only()), "; ".join(notes(gate)))
        lams.add_row(gate.label, *(f"{lam_at(gate, row):.3f}".removeprefix("0") for row in rows))
    out.print(shown)
    out.print(
        f"Mean and saturation over a uniform grid of the signals, {GRID} cells per axis; real tokens do not fill it "
        f"evenly. Saturated: λ within {SATURATION:g} of 0 or 1.",
        style="dim",
    )
    out.print(lams)
    out.print(restrictions)
    out.print(
        "entropy-only has the direction of EOPD, gap-only with d < 0 that of ToDi; neither is the published method.",
        style="dim",
    )
