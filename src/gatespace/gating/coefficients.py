"""Gates as values: four coefficients, plus optional extra signals with one coefficient each.

    λ = σ(a·h + b·u + c + d·gap + Σ e_i·signal_i)          λ always multiplies reverse KL

No tensors here: planning, statistics and the CLI use gates without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gatespace.errors import UsageError, unknown_name

COEFFICIENTS = ("a", "b", "c", "d")
SATURATION = 0.02
"""A gate is saturated where λ is within this distance of 0 or 1 (there λ(1-λ) < .02: the gate hardly moves)."""

_D_STEPS = (2.0, 4.0, -2.0, -4.0)
_GRID: dict[str, tuple[float, float, float, float]] = {
    "G1": (2, 2, 0, 0),
    "G2": (4, 4, -1.5, 0),
    "G3": (8, 8, -3, 0),
    "G4": (0, 4, -1, 0),
    "G5": (4, 0, -1, 0),
    # The paper gives H1, and H2 follows from its tables; the order of H3 and H4 is that of Table d-on-G2's columns.
    **{f"H{i}": (4, 4, -1.5, d) for i, d in enumerate(_D_STEPS, start=1)},
    **{f"HG4,d{d:+g}": (0, 4, -1, d) for d in _D_STEPS},
    **{f"HG5,d{d:+g}": (4, 0, -1, d) for d in _D_STEPS},
}
_FAMILIES = ("entropy-only(β)", "gap-only(d)", "static:λ")
_FAMILY = re.compile(r"(static|entropy[-_ ]?only|gap[-_ ]?only)\s*[(:]\s*(.+?)\s*\)?", re.IGNORECASE)


@dataclass(frozen=True)
class NotApplicable:
    """A comparison that is impossible by construction: a value with a reason, not missing data."""

    reason: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"N/A ({self.reason})"


class LamRange(NamedTuple):
    """Smallest and largest λ of a gate while its signals stay in their ranges."""

    low: float
    high: float


@dataclass(frozen=True)
class Gate:
    """A point of the family: λ = σ(a·h + b·u + c + d·gap), plus optional extra signals.

    Args:
        a: Weight of h, the teacher's entropy at the token.
        b: Weight of u, the teacher's entropy at the first response token.
        c: Bias. Infinite only for a static λ of exactly 0 or 1.
        d: Weight of gap, one minus the student's probability of the teacher's most probable token.
        extra: Coefficients of other registered signals by name, e.g. ``{"student_entropy": 2}``.

    Examples:
        >>> gate = Gate(a=4, b=0, c=-1, d=0)
        >>> gate == Gate.named("G5") == Gate.parse("4,0,-1,0")
        True
        >>> print(gate, gate.name)
        4,0,-1,0 G5
        >>> round(gate.lam(h=0.5), 3)
        0.731
        >>> print(gate.entropy_only())
        -4,0,0,0
        >>> print(gate.gap_only())
        N/A (gap-only keeps d, and d = 0 here)
    """

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        pairs = {str(k): _number(str(k), v) for k, v in sorted(dict(self.extra).items())}
        for name, value in pairs.items():
            if not name.isidentifier() or name in (*COEFFICIENTS, "h", "u", "gap"):
                raise UsageError(
                    f"{name!r} cannot name a further signal of a gate",
                    why="h, u and gap have the coefficients a, b and d; other names must be Python identifiers",
                )
            if math.isinf(value):
                raise UsageError(f"the coefficient of {name} must be finite", got=value)
        object.__setattr__(self, "extra", {k: v for k, v in pairs.items() if v != 0.0})
        if math.isinf(self.a) or math.isinf(self.b) or math.isinf(self.d):
            raise UsageError("a, b and d must be finite", got=self, why="an infinite weight times 0 is not a number")
        if math.isinf(self.c) and not self.is_static:
            why = "an infinite bias is the static λ of 0 or 1 and leaves no place for a signal"
            raise UsageError("c may be infinite only where a = b = d = 0", got=self, why=why)

    def __hash__(self) -> int:
        return hash((*self.abcd, tuple(self.extra.items())))

    # ------------------------------------------------------------------ constructors

    @classmethod
    def static(cls, lam: float) -> Gate:
        """The constant gate λ = `lam`: a = b = d = 0 and c = logit(λ)."""
        value = _number("λ", lam)
        if not 0.0 <= value <= 1.0:
            raise UsageError("a static λ lies in [0, 1]", got=lam, why="it is the weight of reverse KL in a mixture")
        if value in (0.0, 1.0):
            return cls(c=math.inf if value else -math.inf)
        return cls(c=math.log(value) - math.log1p(-value))

    @classmethod
    def named(cls, name: str) -> Gate:
        """Return the paper's point of that name.

        G1–G5, H1–H4, ``HG4,d+2`` (also ``HG4d+2``) with d = ±2, ±4 on G4 or G5, ``entropy-only(4)``,
        ``gap-only(-2)``, ``static:0.388``. The sign of entropy-only is fixed by its meaning (high entropy → forward
        KL), so ``entropy-only(4)`` and the paper's spelling ``entropy-only(-4)`` are the same point.
        """
        if (match := _FAMILY.fullmatch(name.strip())) and _is_number(match[2]):
            family, value = match[1].lower(), float(match[2])
            if family == "static":
                return cls.static(value)
            if value == 0:
                instead = "Gate.static(0.5) is the gate with all coefficients 0"
                raise UsageError(f"{family} needs a magnitude other than 0", got=name, instead=instead)
            return cls(a=-abs(value)) if family.startswith("entropy") else cls(d=value)
        for known, abcd in _GRID.items():
            if _fold(known) == _fold(name):
                return cls(*abcd)
        raise unknown_name("gate", name, [*_GRID, *_FAMILIES])

    @classmethod
    def parse(cls, value: object) -> Gate:
        """Return the gate as written in a call or a configuration.

        A name, four numbers as text or list, a mapping of coefficients, or a gate. Text may go on with
        ``signal=coefficient`` for each extra signal; so may a mapping.

        Examples:
            >>> Gate.parse("4, 0, -1, 0, student_entropy=2").extra
            {'student_entropy': 2.0}
            >>> Gate.parse({"a": 4, "c": -1}) == Gate.parse("G5") == Gate.parse([4, 0, -1, 0])
            True
        """
        if isinstance(value, Gate):
            return value
        if isinstance(value, Mapping):
            extra = {str(name): weight for name, weight in value.items() if name not in COEFFICIENTS}
            return cls(**{name: value.get(name, 0.0) for name in COEFFICIENTS}, extra=extra)
        if isinstance(value, str):
            parts = (value.strip()[1:-1] if value.strip().startswith("(") else value).split(",")
            if not _is_number(parts[0]):
                return cls.named(value)
            pairs = [part.partition("=") for part in parts[4:]]
            if len(parts) < 4 or not all(map(_is_number, [*parts[:4], *(weight for _, _, weight in pairs)])):
                what = "a gate has four coefficients a,b,c,d, then signal=coefficient for each extra signal"
                raise UsageError(what, got=repr(value), instead="e.g. 4,0,-1,0 or 4,0,-1,0,jsd=2")
            a, b, c, d = map(float, parts[:4])
            return cls(a, b, c, d, {name.strip(): float(weight) for name, _, weight in pairs})
        if isinstance(value, Sequence) and len(value) == len(COEFFICIENTS):
            return cls(*value)
        raise UsageError("this is not a gate", got=repr(value), instead="G5, [4, 0, -1, 0] or {a: 4, c: -1}")

    # ------------------------------------------------------------------ properties

    @property
    def abcd(self) -> tuple[float, float, float, float]:
        """(a, b, c, d)."""
        return (self.a, self.b, self.c, self.d)

    @property
    def is_static(self) -> bool:
        """True if λ depends on no signal."""
        return self.a == self.b == self.d == 0.0 and not self.extra

    @property
    def name(self) -> str | None:
        """The paper's name for this point, or None."""
        if self.extra:
            return None
        for known, abcd in _GRID.items():
            if self.abcd == abcd:
                return known
        if self.is_static:
            return f"static:{self.lam():.12g}"
        if self.a < 0 and self.abcd == (self.a, 0, 0, 0):
            return f"entropy-only({self.a:.12g})"
        if self.abcd == (0, 0, 0, self.d):
            return f"gap-only({self.d:+g})"
        return None

    @property
    def label(self) -> str:
        """The name if there is one, else the coefficients."""
        return self.name or str(self)

    def __str__(self) -> str:
        """Text that `Gate.parse` turns back into an equal gate."""
        return ",".join([*map(_text, self.abcd), *(f"{k}={_text(v)}" for k, v in self.extra.items())])

    # ------------------------------------------------------------------ λ

    def logit(self, *, h: float = 0.0, u: float = 0.0, gap: float = 0.0, **extra: float) -> float:
        """The argument of the sigmoid for one token's signals."""
        for name in extra:
            if name not in self.extra:
                raise unknown_name("signal of this gate", name, ["h", "u", "gap", *self.extra])
        further = sum(weight * extra.get(name, 0.0) for name, weight in self.extra.items())
        return self.a * h + self.b * u + self.c + self.d * gap + further

    def lam(self, *, h: float = 0.0, u: float = 0.0, gap: float = 0.0, **extra: float) -> float:
        """λ for one token's signals."""
        return sigmoid(self.logit(h=h, u=u, gap=gap, **extra))

    def lam_range(self, ranges: Mapping[str, tuple[float, float]] | None = None) -> LamRange:
        """Smallest and largest λ over h, u and gap in [0, 1], and extra signals in their `ranges`.

        A signal without a range may have any value, and take λ to 0 and 1.
        """
        terms = [(weight, (0.0, 1.0)) for weight in (self.a, self.b, self.d)]
        terms += [(weight, (ranges or {}).get(name, (-math.inf, math.inf))) for name, weight in self.extra.items()]
        ends = [(weight * low, weight * high) for weight, (low, high) in terms]
        return LamRange(sigmoid(self.c + sum(map(min, ends))), sigmoid(self.c + sum(map(max, ends))))

    # ------------------------------------------------------------------ restrictions

    def entropy_only(self) -> Gate | NotApplicable:
        """The matched-magnitude restriction to the entropy channel: (-|a|, 0, 0, 0).

        It shares EOPD's direction (high entropy → forward KL) but is not EOPD: EOPD adds a forward-KL term behind a
        hard threshold; this is a convex mixture behind a sigmoid, with no threshold (paper, §"What the aligned
        restrictions do not capture"). `gatespace.gating.EOPD` is the published method.
        """
        if self.a == 0:
            return NotApplicable("entropy-only keeps a, and a = 0 here")
        return Gate(a=-abs(self.a))

    def gap_only(self) -> Gate | NotApplicable:
        """The matched-magnitude restriction to the gap channel: (0, 0, 0, d), sign kept.

        Only d < 0 has ToDi's direction (student under-estimates → forward KL), and even that is not ToDi, whose weight
        is per vocabulary entry, from a log-ratio, and detached. `gatespace.gating.ToDi` is the published
        method.
        """
        if self.d == 0:
            return NotApplicable("gap-only keeps d, and d = 0 here")
        return Gate(d=self.d)


def named_points() -> dict[str, Gate]:
    """Return the named points of the paper's sweeps, in the paper's order."""
    return {name: Gate(*abcd) for name, abcd in _GRID.items()}


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x) without overflow."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a number", got=repr(value)) from None
    if math.isnan(number):
        raise UsageError(f"{name} must be a number", got="NaN")
    return number + 0.0  # -0.0 becomes 0.0, so that equal gates print the same


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fold(name: str) -> str:
    return re.sub(r"[\s,_]", "", name).casefold()


def _text(value: float) -> str:
    """The shortest text that parses back to the same float."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
