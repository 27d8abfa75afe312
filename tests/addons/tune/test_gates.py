"""The gate at a place of the search space has the mean and the spread that it was asked for, by their definitions."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatespace.addons.tune.gates import LARGEST, Place, Signals
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate
from gatespace.seeding import generator

N = 400


def drawn(**powers: float) -> dict[str, list[float]]:
    return {name: [generator(1, name, i).random() ** power for i in range(N)] for name, power in powers.items()}


def signals() -> Signals:
    """Skewed like real ones: most tokens have next to no entropy."""
    return Signals.of(drawn(h=6.0, u=3.0, gap=0.5, drift=1.0), [1.0] * N)


def logits(gate: Gate, values: dict[str, list[float]]) -> list[float]:
    return [
        gate.logit(h=h, u=u, gap=gap, **dict.fromkeys(gate.extra, drift))
        for h, u, gap, drift in zip(values["h"], values["u"], values["gap"], values["drift"], strict=True)
    ]


@given(
    st.floats(0.03, 0.97),
    st.floats(0.1, 6.0),
    st.tuples(*[st.floats(-1, 1)] * 4).filter(lambda w: math.hypot(*w) > 0.05),
)
def test_mean_and_spread_are_reached(lam: float, spread: float, weights: tuple[float, ...]) -> None:
    found, values = signals(), drawn(h=6.0, u=3.0, gap=0.5, drift=1.0)
    length = math.hypot(*weights)
    direction = {name: w / length for name, w in zip(("h", "u", "gap", "drift"), weights, strict=True)}
    gate = found.solve(Place(lam, spread, direction))
    own = logits(gate, values)
    assert fmean(1 / (1 + math.exp(-x)) for x in own) == pytest.approx(lam, abs=1e-4)
    assert pstdev(own) == pytest.approx(spread, rel=1e-4)
    standard = {"h": gate.a, "u": gate.b, "gap": gate.d, "drift": gate.extra.get("drift", 0.0)}
    standard = {name: value * pstdev(values[name]) for name, value in standard.items()}
    total = math.hypot(*standard.values())
    assert {name: value / total for name, value in standard.items()} == pytest.approx(direction, abs=1e-4)
    again = found.place(gate)
    assert again is not None
    assert (again.lam, again.spread) == pytest.approx((lam, spread), rel=1e-3)
    assert again.direction == pytest.approx(direction, abs=1e-3)


def test_tokens_count_by_their_weight() -> None:
    values = drawn(h=2.0, u=1.0, gap=1.0)
    twice = Signals.of({name: [*column, *column[:100]] for name, column in values.items()}, [1.0] * (N + 100))
    weighed = Signals.of(values, [2.0] * 100 + [1.0] * (N - 100))
    place = Place(0.3, 2.0, {"h": 0.6, "gap": -0.8})
    assert weighed.solve(place).abcd == pytest.approx(twice.solve(place).abcd, rel=1e-5)


def test_a_static_gate_has_no_direction() -> None:
    place = signals().place(Gate.static(0.3))
    assert place is not None
    assert place == (pytest.approx(0.3), 0.0, {})


def test_a_gate_on_a_signal_that_was_not_measured_has_no_place() -> None:
    measured = Signals.of(drawn(h=6.0, gap=0.5), [1.0] * N)
    assert measured.place(Gate(a=2.0, d=1.0)) is not None
    assert measured.place(Gate(a=2.0, b=1.0)) is None
    assert measured.place(Gate(a=2.0, extra={"drift": 1.0})) is None


def test_coefficients_are_bounded() -> None:
    values = drawn(h=2.0, u=1.0)
    nearly = [0.3 + 0.002 * value for value in values["u"]]  # its SD is 0.0006: a spread of 1 would take 1,700
    found = Signals.of({"h": values["h"], "gap": nearly}, [1.0] * N)
    assert found.channels == ("h",)
    gate = found.solve(Place(0.5, 4.0, {"h": 0.6, "gap": 0.8}))
    assert gate.d == 0
    # Two channels that are nearly one: the direction between them hardly varies.
    twins = {"h": values["h"], "u": [h + 0.08 * u for h, u in zip(values["h"], values["u"], strict=True)]}
    found = Signals.of(twins, [1.0] * N)
    steep = found.solve(Place(0.3, 4.0, {"h": 0.5**0.5, "u": -(0.5**0.5)}))
    assert max(abs(steep.a), abs(steep.b)) == LARGEST
    place = found.place(steep)
    assert place is not None
    assert place.lam == pytest.approx(0.3)
    assert place.spread < 4.0


def test_constant_and_equal_signals_are_no_channels() -> None:
    values = drawn(h=2.0, gap=1.0)
    found = Signals.of({"h": values["h"], "u": values["h"], "gap": values["gap"], "position": [0.0] * N}, [1.0] * N)
    assert found.channels == ("h", "gap")
    assert found.solve(Place(0.5, 1.0, {"h": 1.0})).b == 0
    with pytest.raises(UsageError, match="no gate depends on these channels"):
        Signals.of({"u": [0.2] * N}, [1.0] * N).solve(Place(0.5, 1.0, {"u": 1.0}))
