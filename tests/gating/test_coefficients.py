"""Gate as a value: the paper's points, text that reads back, restrictions and their reasons, errors."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatespace.errors import UsageError
from gatespace.gating.coefficients import SATURATION, Gate, NotApplicable, named_points, sigmoid

from .strategies import ABCD, ANY_FLOAT, COEFFICIENT, SIGNAL_NAME

# Copied from the paper (sec. "Grid Design", "Third task" and Table d-on-G2), not from the module under test.
PAPER = {
    "G1": (2, 2, 0, 0),
    "G2": (4, 4, -1.5, 0),
    "G3": (8, 8, -3, 0),
    "G4": (0, 4, -1, 0),
    "G5": (4, 0, -1, 0),
    "H1": (4, 4, -1.5, 2),
    "H2": (4, 4, -1.5, 4),
    "H3": (4, 4, -1.5, -2),
    "H4": (4, 4, -1.5, -4),
    "HG4,d+2": (0, 4, -1, 2),
    "HG4,d+4": (0, 4, -1, 4),
    "HG4,d-2": (0, 4, -1, -2),
    "HG4,d-4": (0, 4, -1, -4),
    "HG5,d+2": (4, 0, -1, 2),
    "HG5,d+4": (4, 0, -1, 4),
    "HG5,d-2": (4, 0, -1, -2),
    "HG5,d-4": (4, 0, -1, -4),
}
SHARED = ["G1", "G2", "G3", "G4", "G5", "H1", "H2", "H3", "H4"]
TASKS = {
    "emotion": [*SHARED, "HG5,d+2", "HG5,d+4", "HG5,d-2", "HG5,d-4"],
    "hate": [*SHARED, "HG4,d+2", "HG4,d+4", "HG4,d-2", "HG4,d-4"],
}


@pytest.mark.parametrize(("name", "abcd"), PAPER.items())
def test_named_points_of_the_paper(name: str, abcd: tuple[float, ...]) -> None:
    gate = Gate.named(name)
    assert gate.abcd == abcd
    assert gate.name == name
    assert gate == Gate(*abcd) == Gate.parse(name) == Gate.parse(name.lower())


def test_all_named_points_and_no_others() -> None:
    assert {name: gate.abcd for name, gate in named_points().items()} == PAPER


@pytest.mark.parametrize(
    ("text", "abcd"),
    [
        ("entropy-only(4)", (-4, 0, 0, 0)),
        ("entropy-only(-4)", (-4, 0, 0, 0)),
        ("entropy-only(8)", (-8, 0, 0, 0)),
        ("gap-only(+2)", (0, 0, 0, 2)),
        ("gap-only(-4)", (0, 0, 0, -4)),
        ("HG4d+2", (0, 4, -1, 2)),
        ("hg5 d-4", (4, 0, -1, -4)),
        ("static:0.5", (0, 0, 0, 0)),
        ("(4, 0, -1, 0)", (4, 0, -1, 0)),
        ("  4,0,-1,0  ", (4, 0, -1, 0)),
        ("1e-3,-2.5E2,.5,+3", (1e-3, -250, 0.5, 3)),
    ],
)
def test_spellings(text: str, abcd: tuple[float, ...]) -> None:
    assert Gate.parse(text).abcd == abcd


@pytest.mark.parametrize("family", ["entropy-only(-4)", "entropy-only(-8)", "gap-only(+2)", "gap-only(-4)"])
def test_restrictions_name_themselves_as_the_paper_does(family: str) -> None:
    assert Gate.named(family).name == family


# ---------------------------------------------------------------------------------------------- round trips


@given(ANY_FLOAT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT, st.dictionaries(SIGNAL_NAME, ANY_FLOAT, max_size=3))
def test_print_and_parse_is_the_identity(a: float, b: float, c: float, d: float, extra: dict[str, float]) -> None:
    gate = Gate(a, b, c, d, extra=extra)
    again = Gate.parse(str(gate))
    assert again == gate
    assert hash(again) == hash(gate)
    assert again.abcd == (a, b, c, d)
    assert again.extra == {k: v for k, v in extra.items() if v != 0}
    assert str(again) == str(gate)


@pytest.mark.parametrize("value", [5e-324, -5e-324, 1.7976931348623157e308, 0.1 + 0.2, -0.0, 1e15, 1e16, 123456789.0])
def test_extreme_numbers_read_back(value: float) -> None:
    gate = Gate(value, -value, value, value, extra={"jsd": value})
    assert Gate.parse(str(gate)) == gate


@given(st.floats(0, 1))
def test_static_is_a_constant_gate(lam: float) -> None:
    gate = Gate.static(lam)
    assert gate.is_static
    assert (gate.a, gate.b, gate.d) == (0, 0, 0)
    assert gate.lam(h=1, u=0.3, gap=0.9) == pytest.approx(lam, rel=1e-12, abs=1e-300)
    assert Gate.parse(str(gate)) == gate


@pytest.mark.parametrize("lam", [0, 1, 0.0, 1.0])
def test_static_ends_are_exact(lam: float) -> None:
    gate = Gate.static(lam)
    assert gate.lam(h=0.5, u=0.5, gap=0.5) == lam
    assert gate.lam_range() == (lam, lam)
    assert Gate.parse(str(gate)) == gate
    assert Gate.parse(f"static:{lam}") == gate


def test_static_of_the_paper() -> None:
    assert Gate.static(0.388).c == pytest.approx(math.log(0.388 / 0.612))
    assert Gate.parse("static:0.388") == Gate.static(0.388)
    assert Gate.static(0.388).name == "static:0.388"


def test_order_and_zero_extras_do_not_matter() -> None:
    left = Gate(1, 2, 3, 4, extra={"jsd": 1.0, "position": 2.0, "log_ratio": 0.0})
    right = Gate(1, 2, 3, 4, extra={"position": 2.0, "jsd": 1.0})
    assert left == right
    assert hash(left) == hash(right)
    assert len({left, right, Gate(1, 2, 3, 4)}) == 2
    assert list(left.extra) == ["jsd", "position"]


def test_equal_gates_from_integers_and_floats() -> None:
    assert Gate(4, 0, -1, 0) == Gate(4.0, -0.0, -1.0, 0.0)
    assert hash(Gate(4, 0, -1, 0)) == hash(Gate(4.0, -0.0, -1.0, 0.0))
    assert str(Gate(4, 0, -1, 0)) == "4,0,-1,0"
    assert Gate(1, 2, 3, 4) != Gate(1, 2, 3, 5)


# ---------------------------------------------------------------------------------------------- restrictions


def test_restrictions_keep_one_channel() -> None:
    gate = Gate.named("H4")
    assert gate.entropy_only() == Gate(-4, 0, 0, 0)
    assert gate.gap_only() == Gate(0, 0, 0, -4)
    assert Gate(a=-3, d=2).entropy_only() == Gate(a=-3)
    assert Gate(a=-3, d=2).gap_only() == Gate(d=2)


@pytest.mark.parametrize(
    ("restriction", "letter"), [(Gate.named("G5").gap_only(), "d"), (Gate.named("G4").entropy_only(), "a")]
)
def test_not_applicable_has_a_reason(restriction: Gate | NotApplicable, letter: str) -> None:
    assert isinstance(restriction, NotApplicable)
    assert not restriction
    assert f"{letter} = 0" in restriction.reason
    assert str(restriction) == f"N/A ({restriction.reason})"


def test_comparisons_of_the_paper() -> None:
    """26 cells, 52 comparisons: 10 without gap-only, 6 without entropy-only, 36 left; 7 distinct ones a task."""
    no_gap = no_entropy = comparable = 0
    for points in TASKS.values():
        assert len(points) == 13
        restrictions = set()
        for name in points:
            gap, entropy = Gate.named(name).gap_only(), Gate.named(name).entropy_only()
            no_gap += isinstance(gap, NotApplicable)
            no_entropy += isinstance(entropy, NotApplicable)
            found = [r for r in (gap, entropy) if isinstance(r, Gate)]
            comparable += len(found)
            restrictions.update(found)
        assert len(restrictions) == 7
    assert (no_gap, no_entropy, comparable) == (10, 6, 36)


def test_comparable_cells_per_task() -> None:
    counts = {
        task: sum(isinstance(r, Gate) for n in names for r in (Gate.named(n).gap_only(), Gate.named(n).entropy_only()))
        for task, names in TASKS.items()
    }
    assert counts == {"emotion": 20, "hate": 16}


# ---------------------------------------------------------------------------------------------- λ


@given(ABCD, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_lam_is_the_sigmoid_of_the_sum(abcd: tuple[float, float, float, float], h: float, u: float, gap: float) -> None:
    a, b, c, d = abcd
    gate = Gate(*abcd, extra={"jsd": 1.5})
    x = a * h + b * u + c + d * gap + 1.5 * 0.25
    assert gate.logit(h=h, u=u, gap=gap, jsd=0.25) == pytest.approx(x, abs=1e-12)
    assert gate.lam(h=h, u=u, gap=gap, jsd=0.25) == pytest.approx(1 / (1 + math.exp(-x)), rel=1e-12)


@given(ABCD, st.floats(0, 1), st.floats(0, 1), st.sampled_from(["h", "u", "gap"]))
def test_lam_is_monotone_by_the_sign_of_its_coefficient(
    abcd: tuple[float, float, float, float], x: float, y: float, signal: str
) -> None:
    gate = Gate(*abcd)
    weight = {"h": gate.a, "u": gate.b, "gap": gate.d}[signal]
    low, high = (gate.lam(**{signal: v}) for v in sorted((x, y)))
    assert (high - low) * weight >= 0
    if weight and abs(x - y) > 1e-3 and abs(weight) > 1e-2:
        assert high != low


@given(ABCD, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_lam_range_holds_and_is_reached(abcd: tuple[float, float, float, float], h: float, u: float, g: float) -> None:
    gate = Gate(*abcd)
    low, high = gate.lam_range()
    assert low - 1e-15 <= gate.lam(h=h, u=u, gap=g) <= high + 1e-15
    corners = [gate.lam(h=i, u=j, gap=k) for i in (0, 1) for j in (0, 1) for k in (0, 1)]
    assert low == pytest.approx(min(corners))
    assert high == pytest.approx(max(corners))


def test_lam_range_without_the_range_of_a_signal_is_everything() -> None:
    gate = Gate(a=4, extra={"near": -2, "far": 1})
    assert gate.lam_range() == (0.0, 1.0)
    low, high = gate.lam_range({"near": (0.0, 1.0), "far": (0.5, math.inf)})
    assert low == pytest.approx(gate.lam(near=1, far=0.5))
    assert high == 1.0


@pytest.mark.parametrize(("x", "lam"), [(0, 0.5), (1000, 1.0), (-1000, 0.0), (-745, 5e-324), (math.log(3), 0.75)])
def test_sigmoid_without_overflow(x: float, lam: float) -> None:
    assert sigmoid(x) == pytest.approx(lam, rel=1e-12, abs=5e-324)


def test_saturation_is_a_small_distance() -> None:
    assert 0 < SATURATION < 0.5
    assert SATURATION * (1 - SATURATION) < 0.02


# ---------------------------------------------------------------------------------------------- errors


ERRORS: list[tuple[Callable[[], object], str]] = [
    *[(lambda lam=lam: Gate.static(lam), r"\[0, 1\]") for lam in (-0.001, 1.001, 2, math.inf, -math.inf)],
    *[(make, "NaN") for make in (lambda: Gate(a=math.nan), lambda: Gate.static(math.nan))],
    (lambda: Gate.parse("1,2,nan,0"), "NaN"),
    (lambda: Gate(a="much"), "must be a number"),
    (lambda: Gate.static(None), "must be a number"),
    (lambda: Gate(d=[1]), "must be a number"),
    *[(lambda name=name: Gate(**{name: math.inf}), "finite") for name in "abd"],
    *[(lambda name=name: Gate(c=math.inf, **{name: 1}), "infinite") for name in "abd"],
    (lambda: Gate(c=math.inf, extra={"jsd": 1}), "infinite"),
    (lambda: Gate(extra={"jsd": math.inf}), "finite"),
    *[
        (lambda text=text: Gate.parse(text), "four coefficients")
        for text in ("1,2,3", "1,2", "1,2,3,4,5", "1,2,3,4,", "1,2,3,4,jsd", "1,2,3,4,jsd=x")
    ],
    *[(lambda value=value: Gate.parse(value), "not a gate") for value in (None, 4, [1, 2, 3])],
    (lambda: Gate.parse("G6"), "did you mean 'G"),
    (lambda: Gate.parse("HG4,d+3"), r"did you mean 'HG4,d\+"),
    (lambda: Gate.parse("entropy-onl(4)"), "did you mean 'entropy-only"),
    (lambda: Gate.parse("statc:0.3"), "did you mean 'static"),
    (lambda: Gate.named("zzzzzzzzzz"), "G1.*HG5,d-4"),
    *[
        (lambda name=name: Gate(extra={name: 1.0}), "further signal")
        for name in ("h", "gap", "a", "two words", "", "3d")
    ],
    (lambda: Gate(extra={"jsd": 1.0}).lam(jds=0.5), "jsd"),
    *[(lambda name=name: Gate.named(name), "other than 0") for name in ("entropy-only(0)", "gap-only(0)")],
]


@pytest.mark.parametrize(("make", "words"), ERRORS)
def test_what_is_no_gate(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


@given(COEFFICIENT)
def test_a_gate_cannot_be_changed(value: float) -> None:
    gate = Gate(a=1)
    with pytest.raises(AttributeError):
        gate.a = value  # type: ignore[misc]


def test_a_gate_needs_no_torch() -> None:
    code = "import sys; from gatespace import Gate; Gate.named('G5'); raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
