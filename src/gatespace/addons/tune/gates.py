"""Map places of the search space to gates and back: mean gate λ̄, spread of its logit, direction over channels.

A gate's coefficients depend on the scale of its signals, and so on the pair, the task and K. Proposals do not: with
the signals of a warm-up batch standardized,

    logit_t = τ·z_t + c₀,      z = Σ v_i·(x_i - mean x_i)/SD x_i   scaled to SD 1,      c₀ such that mean σ(logit) = λ̄

τ is the spread, v the direction, and a, b, c, d follow. Mean and spread hold for the warm-up only: training changes the
signals, so the verdict compares with the mean λ that the gate actually had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]

from gatespace.errors import UsageError
from gatespace.gating.coefficients import COEFFICIENTS, Gate

_COEFFICIENT = {"h": "a", "u": "b", "gap": "d"}
"""Channel → its coefficient; any other signal's coefficient has the signal's name."""
LARGEST = 50.0
"""Bound of a proposal's coefficients: the signals lie within [0, 1], where a logit of 50 is a step already."""
LEAST_SD = 0.01
"""A signal with a smaller standard deviation is no channel: it would need a coefficient above `LARGEST`."""
_CONSTANT = 1e-6
_SAME = 0.999
"""Two signals with a higher correlation count as one channel."""


class Place(NamedTuple):
    """A place in the search space. The direction has length 1 over standardized channels."""

    lam: float
    spread: float
    direction: Mapping[str, float]


@dataclass(frozen=True)
class Signals:
    """Signals at the tokens of the warm-up.

    Args:
        values: Channel → (N,).
        weights: (N,) token weights: how many samples have this token.
    """

    values: Mapping[str, np.ndarray]
    weights: np.ndarray

    @classmethod
    def of(cls, values: Mapping[str, Sequence[float]], weights: Sequence[float]) -> Signals:
        """Build from plain lists."""
        return cls({name: np.asarray(column, float) for name, column in values.items()}, np.asarray(weights, float))

    def mean(self, column: Any) -> float:
        """Weighted mean of a per-token value."""
        return float(np.average(column, weights=self.weights))

    def sd(self, column: Any) -> float:
        """Weighted standard deviation."""
        return float(np.sqrt(np.average((column - self.mean(column)) ** 2, weights=self.weights)))

    @cached_property
    def channels(self) -> tuple[str, ...]:
        """The channels that vary over tokens, without duplicates."""
        found: list[str] = []
        for name, column in self.values.items():
            if self.sd(column) >= LEAST_SD and not any(self._alike(name, other) for other in found):
                found.append(name)
        return tuple(found)

    def _alike(self, one: str, other: str) -> bool:
        return abs(self.mean(self._standard(one) * self._standard(other))) > _SAME

    def _standard(self, name: str) -> Any:
        column = self.values[name]
        return (column - self.mean(column)) / self.sd(column)

    def solve(self, place: Place) -> Gate:
        """The gate at a place: its λ has that mean over these tokens, its logit that spread, or the largest allowed."""
        weights = {name: place.direction.get(name, 0.0) for name in self.channels}
        z = sum((weight * self._standard(name) for name, weight in weights.items()), np.zeros(len(self.weights)))
        if not self.channels or self.sd(z) <= _CONSTANT:
            raise UsageError(
                "no gate depends on these channels",
                got=", ".join(self.values),
                why=f"over the warm-up's tokens every signal has a standard deviation below {LEAST_SD}",
                instead="other tune.channels, or more tune.warm_up batches; tune.proposals: 0 compares the others",
            )
        slopes = {name: weight / self.sd(self.values[name]) for name, weight in weights.items()}
        scale = min(place.spread / self.sd(z), LARGEST / max(map(abs, slopes.values())))
        found = {name: _rounded(scale * slope) for name, slope in slopes.items()}
        free = sum(value * self.values[name] for name, value in found.items())
        far = float(np.abs(free).max()) + 60
        c = brentq(lambda c: self.mean(_sigmoid(free + c)) - place.lam, -far, far, xtol=1e-12)
        return Gate.parse({_COEFFICIENT.get(name, name): value for name, value in found.items()} | {"c": _rounded(c)})

    def place(self, gate: Gate) -> Place | None:
        """The place of a gate; its direction is over `channels`, or empty for a static gate.

        None if the gate depends on a signal that was not measured.
        """
        weights = dict(zip(COEFFICIENTS, gate.abcd, strict=True)) | dict(gate.extra)
        keys = {name: _COEFFICIENT.get(name, name) for name in self.values}
        if any(weights[key] for key in weights.keys() - {"c", *keys.values()}):
            return None
        parts = [weights[key] * self.values[name] for name, key in keys.items() if key in weights]
        logit = sum(parts, np.full(len(self.weights), gate.c))
        lam, spread = self.mean(_sigmoid(logit)), self.sd(logit)
        if spread <= _CONSTANT or not self.channels:
            return Place(lam, 0.0, {})
        columns = np.stack([self._standard(name) for name in self.channels], 1) * np.sqrt(self.weights)[:, None]
        wanted = (logit - self.mean(logit)) * np.sqrt(self.weights)
        found, *_ = np.linalg.lstsq(columns, wanted, rcond=None)
        length = float(np.linalg.norm(found))
        return Place(lam, spread, {name: float(w) / length for name, w in zip(self.channels, found, strict=True)})


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
