"""What is worth knowing about a gate, in plain numbers. No torch, no printing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gatespace.cli.console import json_number
from gatespace.errors import UsageError, unknown_name
from gatespace.gating.coefficients import SATURATION, Gate, NotApplicable, named_points

GRID = 25
"""Cells per axis of the signal cube [0, 1]³; its statistics are taken at the cells' midpoints."""

TYPICAL = 0.3
"""Where a plot holds the signals that it does not vary. A teacher torn between two labels has h = log 2 / log 8 = .33,
and the paper's E[λ] of G4 on hate implies a mean u of .31."""

PAPER_SIGNALS = ("h", "u", "gap")
_CORNERS_AND_CENTRE = (*itertools.product((0.0, 1.0), repeat=3), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Signals:
    """One token's signals; `extra` holds those beyond the paper's three."""

    h: float
    u: float
    gap: float
    extra: Mapping[str, float]

    def lam(self, gate: Gate) -> float:
        """λ of `gate` here. A signal of the gate that is not given counts as 0."""
        known = {name: value for name, value in self.extra.items() if name in gate.extra}
        return gate.lam(h=self.h, u=self.u, gap=self.gap, **known)

    def replace(self, name: str, value: float) -> Signals:
        """The same signals with one of them at `value`."""
        values = {"h": self.h, "u": self.u, "gap": self.gap}
        if name in values:
            values[name] = value
            return Signals(**values, extra=self.extra)
        return Signals(**values, extra={**self.extra, name: value})

    def get(self, name: str) -> float:
        """The value of the signal `name`."""
        return float(getattr(self, name)) if name in PAPER_SIGNALS else self.extra.get(name, 0.0)


@dataclass(frozen=True)
class Point:
    """A gate and the text that it was asked for with."""

    text: str
    gate: Gate

    @property
    def label(self) -> str:
        """The paper's name, or the coefficients."""
        return self.gate.label


@dataclass(frozen=True)
class CubeStatistics:
    """λ over the signal cube: the share of it that is saturated, and the mean."""

    saturation: float
    mean_lam: float


def read_points(texts: Sequence[str]) -> list[Point]:
    """The points of these texts; without any, all named points of the paper."""
    if not texts:
        return [Point(name, gate) for name, gate in named_points().items()]
    return [Point(text, Gate.parse(text)) for text in map(str.strip, texts)]


def read_signals(text: str | None, points: Sequence[Point]) -> Signals:
    """Signals from text such as ``h=.3,u=.2,gap=.5``; what is not named keeps its default."""
    further = extra_signals(points)
    signals = Signals(TYPICAL, TYPICAL, TYPICAL, extra=dict.fromkeys(further, 0.0))
    for part in text.split(",") if text is not None else ():
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            raise UsageError(
                "--at takes signal=value, separated by commas", got=text, instead="e.g. h=.3,u=.2"
            ) from None
        if name not in (*PAPER_SIGNALS, *further):
            raise unknown_name("signal", name, [*PAPER_SIGNALS, *further])
        if name in PAPER_SIGNALS and not 0.0 <= number <= 1.0:
            raise UsageError(f"{name} lies in [0, 1]", got=part.strip())
        if not abs(number) < float("inf"):
            raise UsageError(f"{name} must be a finite number", got=part.strip())
        signals = signals.replace(name, number)
    return signals


def extra_signals(points: Sequence[Point]) -> list[str]:
    """The signals beyond the paper's three that any of the points reads, sorted."""
    return sorted({name for point in points for name in point.gate.extra})


def reads(gate: Gate, signal: str) -> bool:
    """True where the signal moves this gate's λ."""
    return {"h": gate.a, "u": gate.b, "gap": gate.d, **gate.extra}.get(signal, 0.0) != 0.0


def table_rows(at: Signals | None) -> list[Signals]:
    """The corners of the signal cube and its centre, then `at`. Further signals are 0, save in `at`."""
    rows = [Signals(h, u, gap, extra={}) for h, u, gap in _CORNERS_AND_CENTRE]
    return rows if at is None else [*rows, at]


def cube_statistics(gate: Gate) -> CubeStatistics:
    """Statistics of λ over a uniform grid of the signal cube, further signals at 0."""
    # An axis that the gate does not read changes nothing: one value of it gives the same share and mean as all.
    midpoints = [(i + 0.5) / GRID for i in range(GRID)]
    axes = [midpoints if weight else [0.5] for weight in (gate.a, gate.b, gate.d)]
    lams = [gate.lam(h=h, u=u, gap=gap) for h, u, gap in itertools.product(*axes)]
    saturated = sum(min(lam, 1.0 - lam) <= SATURATION for lam in lams)
    return CubeStatistics(saturation=saturated / len(lams), mean_lam=math.fsum(lams) / len(lams))


def notes(gate: Gate) -> list[str]:
    """Notable properties of a gate, each a plain sentence."""
    if gate.is_static:
        return ["constant λ: no signal moves it"]
    weights = {"h": gate.a, "u": gate.b, "gap": gate.d, **gate.extra}
    found = [_direction(weights)]
    if gate.b != 0 and gate.a == gate.d == 0 and not gate.extra:
        found.append("every token of a response shares one λ")
    if gate.b != 0:
        found.append("needs u, from the first response token")
    if gate.d != 0:
        found.append("reads the student (gap), so the gate has a gradient")
    if gate.extra:
        found.append(f"{_and(list(gate.extra))} counted as 0 here")
    else:
        low, high = gate.lam_range()
        if high <= 0.5:
            found.append("λ ≤ 0.5 always: never more reverse than forward KL")
        if low >= 0.5:
            found.append("λ ≥ 0.5 always: never more forward than reverse KL")
    return found


def as_json(point: Point, rows: Sequence[Signals]) -> dict[str, Any]:
    """Everything the command prints of a point, unrounded."""
    gate, cube = point.gate, cube_statistics(point.gate)
    return {
        "input": point.text,
        "name": gate.name,
        "gate": [json_number(value) for value in gate.abcd],
        "extra": dict(gate.extra),
        "lam_range": list(gate.lam_range()),
        "entropy_only": _restriction_json(gate.entropy_only()),
        "gap_only": _restriction_json(gate.gap_only()),
        "table": [{"h": row.h, "u": row.u, "gap": row.gap, **row.extra, "lam": row.lam(gate)} for row in rows],
        "saturation": cube.saturation,
        "mean_lam": cube.mean_lam,
        "notes": notes(gate),
    }


def _restriction_json(restriction: Gate | NotApplicable) -> dict[str, Any]:
    if isinstance(restriction, NotApplicable):
        return {"na": restriction.reason}
    return {"gate": [json_number(value) for value in restriction.abcd]}


def _direction(weights: Mapping[str, float]) -> str:
    up = [name for name, weight in weights.items() if weight > 0]
    down = [name for name, weight in weights.items() if weight < 0]
    parts = [f"{verb} with {_and(names)}" for verb, names in (("rises", up), ("falls", down)) if names]
    return f"λ {', '.join(parts)}"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
