"""The points of one task by label: those of the family, and those they are compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gatespace.config.study import BEST, PublishedConfig, StudyConfig
from gatespace.errors import UsageError, unknown_name
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.study.records import Kind

GRID = ("G1", "G2", "G3", "G4", "G5")
CANDIDATES = ("G1", "G3", "G4", "G5")
"""Candidates for a base. G2 is not one: its HG points would be H1 … H4."""
D_STEPS = (2.0, 4.0, -2.0, -4.0)
TWIN = {"lam": "twin", "rkl": "twin-rkl"}
"""What a twin is matched on → prefix of its label."""
_DERIVED = re.compile(r"(twin|twin-rkl|shuffled)\((.+)\)")
_ON_BASE = re.compile(r"HG\*?,d([-+]\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Point:
    """A point of a study on one task.

    Args:
        label: Its name in comparisons.
        kind: Its purpose in the study.
        gate: Its gate, if known without any run.
        method: A published method in place of a gate.
        of: The dynamic point that a twin or a control is derived from.
        match: What a twin matches of it.
        d: The gap coefficient of a point whose base is not chosen yet.
    """

    label: str
    kind: Kind
    gate: Gate | None = None
    method: PublishedConfig | None = None
    of: str | None = None
    match: str | None = None
    d: float | None = None

    @property
    def rollout(self) -> Mapping[str, Any]:
        """A published method's own `rollout` settings."""
        return {} if self.method is None else self.method.rollout

    @property
    def is_dynamic(self) -> bool:
        """Whether λ depends on the token."""
        return self.d is not None or (self.gate is not None and not self.gate.is_static and self.kind != "control")


class Catalogue:
    """The points of a task. A gate has exactly one label, however it is derived."""

    def __init__(self, config: StudyConfig, task: str, base: str | None) -> None:
        self._study, self._task = config, task
        self.base = base
        """The point that HG points are built on; None if not chosen yet."""
        self._known: dict[str, Point] = {}
        self._labels: dict[Gate, str] = {}
        for label, gate in self._family().items():
            if gate is None:
                self._add(Point(label, "point", d=float(label.partition("d")[2])))
            else:
                self._add(Point(label, "point", gate=gate))
        self.family = tuple(self._known)
        """Labels of the task's own points."""

    def __getitem__(self, label: str) -> Point:
        return self._known[label]

    # ------------------------------------------------------------------ the family

    def _family(self) -> dict[str, Gate | None]:
        own = self._study.tasks[self._task].points
        wanted = own if own is not None else self._study.points
        if wanted == "paper":
            grid: dict[str, Gate | None] = {name: Gate.named(name) for name in (*GRID, "H1", "H2", "H3", "H4")}
            return grid | self._on_base()
        if isinstance(wanted, dict):
            return {name: Gate.parse(value) for name, value in wanted.items()}
        points: dict[str, Gate | None] = {}
        for text in wanted:
            gate = Gate.parse(text)
            label = gate.label
            if label in points:
                raise UsageError(f"points of {self._task}: a point is named twice", got=f"{text}, which is {label}")
            points[label] = gate
        return points

    def _on_base(self) -> dict[str, Gate | None]:
        if self.base is None:
            return {f"HG*,d{d:+g}": None for d in D_STEPS}
        base = Gate.parse(self.base)
        name = f"H{base.name}" if base.name in GRID else f"H({base})"
        return {f"{name},d{d:+g}": Gate(base.a, base.b, base.c, base.d + d, base.extra) for d in D_STEPS}

    # ------------------------------------------------------------------ points to compare with

    def gate(self, gate: Gate, kind: Kind) -> Point:
        """The point of a gate, under its existing label if it has one."""
        label = self._labels.get(gate, gate.label)
        return self._known.get(label) or self._add(Point(label, kind, gate=gate))

    def restriction(self, label: str, name: str) -> Point | NotApplicable | None:
        """The ``entropy-only`` or ``gap-only`` restriction of a point; None if it depends on a base not chosen yet."""
        point = self._known[label]
        if point.gate is None:
            if name == "entropy-only":
                return None
            assert point.d is not None
            return self.gate(Gate(d=point.d), "restriction")
        found = point.gate.entropy_only() if name == "entropy-only" else point.gate.gap_only()
        return found if isinstance(found, NotApplicable) else self.gate(found, "restriction")

    def without_gap(self, label: str) -> Point | None:
        """The same point with d = 0, if the family has it."""
        point = self._known[label]
        if point.gate is None:
            return Point("base", "point")  # display only; the plan is recomputed once the base is known
        gate = point.gate
        if gate.d == 0:
            return None
        other = self._labels.get(Gate(gate.a, gate.b, gate.c, 0.0, gate.extra))
        return self._known[other] if other in self.family else None

    def twin(self, label: str, match: str) -> Point:
        """The static twin of a dynamic point."""
        name = f"{TWIN[match]}({label})"
        return self._known.get(name) or self._add(Point(name, "twin", of=label, match=match))

    def shuffled(self, label: str) -> Point:
        """The shuffled-λ control of a dynamic point."""
        name = f"shuffled({label})"
        return self._known.get(name) or self._add(Point(name, "control", gate=self._known[label].gate, of=label))

    def published(self, method: PublishedConfig) -> Point:
        """A published method."""
        return self._known.get(method.point) or self._add(Point(method.point, "published", method=method))

    def find(self, text: str) -> Point:
        """Look up a point as named in a file."""
        if text in self._known:
            return self._known[text]
        if match := _DERIVED.fullmatch(text):
            of = self.find(match[2])
            if not of.is_dynamic:
                raise UsageError(f"{text}: {of.label} has no λ that depends on the token")
            if match[1] == "shuffled":
                return self.shuffled(of.label)
            return self.twin(of.label, "lam" if match[1] == TWIN["lam"] else "rkl")
        if match := _ON_BASE.fullmatch(text):
            d = float(match[1])
            for label in self.family:
                if label.startswith("HG") and label.endswith(f"d{d:+g}"):
                    return self._known[label]
        for method in self._study.axes.published:
            if method.point == text:
                return self.published(method)
        try:
            gate = Gate.parse(text)
        except UsageError:
            methods = [method.point for method in self._study.axes.published]
            raise unknown_name("point", text, [*self._known, *methods]) from None
        kind: Kind = "static" if gate.is_static else "restriction" if _is_restriction(gate) else "point"
        return self.gate(gate, kind)

    def _add(self, point: Point) -> Point:
        self._known[point.label] = point
        if point.gate is not None and point.kind != "control":
            if point.gate in self._labels:
                other = self._labels[point.gate]
                raise UsageError(f"points of {self._task}: {point.label} and {other} are one point", got=point.gate)
            self._labels[point.gate] = point.label
        return point


def base_of(config: StudyConfig, task: str) -> str | None:
    """The base that the file names for a task, or None if it is to be chosen."""
    named = config.tasks[task].base or config.base
    return None if named == BEST else named


def _is_restriction(gate: Gate) -> bool:
    return not gate.extra and (gate.abcd == (gate.a, 0, 0, 0) or gate.abcd == (0, 0, 0, gate.d))
