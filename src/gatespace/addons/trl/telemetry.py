"""Gate telemetry: token statistics over micro-batches and processes, for TRL's logs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gatespace.gating.coefficients import SATURATION
from gatespace.gating.divergences import NegativeEntropy
from gatespace.gating.loss import LossOutput
from gatespace.gating.objectives import Objective, Terms, TokenLoss
from gatespace.gating.supports import KLPair
from gatespace.gating.tokens import Tokens

STUDENT_ENTROPY = "student_entropy_nats"


@dataclass(frozen=True, eq=False)
class Watched(Objective):
    """Adds the student's entropy, which TRL logs, to an objective's telemetry."""

    inner: Objective

    name: ClassVar[str] = "watched"

    def divergence(self, tokens: Tokens) -> KLPair | Terms | Tensor:
        return self.inner.divergence(tokens)

    def lam(self, tokens: Tokens) -> Tensor | None:
        return self.inner.lam(tokens)

    def further_signals(self) -> tuple[str, ...]:
        return (*self.inner.further_signals(), STUDENT_ENTROPY)

    def prepass(self) -> tuple[str, ...]:
        return self.inner.prepass()

    def __call__(self, tokens: Tokens) -> TokenLoss:
        result = self.inner(tokens)
        with torch.no_grad():
            (negative,) = tokens.divergences(NegativeEntropy())
        return TokenLoss(result.loss, {**result.telemetry, STUDENT_ENTROPY: -negative})


_COLUMNS = ("h", "u", "gap", "forward_kl", "reverse_kl")
_OF_LAM = ("lam", "saturated", "lam_rkl")
_SPREAD = ("lam", "h", "u", "gap")


@dataclass(frozen=True)
class Tally:
    """Token statistics: means, sums of squared deviations, maxima. Adding two merges their tokens."""

    count: float
    mean: tuple[float, ...]
    squares: tuple[float, ...]
    most: tuple[float, ...]

    @classmethod
    def of(cls, row: Sequence[float]) -> Tally:
        size = len(row) // 3
        return cls(row[0], tuple(row[1 : 1 + size]), tuple(row[1 + size : 1 + 2 * size]), tuple(row[1 + 2 * size :]))

    @staticmethod
    def row(columns: Tensor) -> Tensor:
        """Reduce (N, C) to (1+3C,), the input of `of`, which is gathered over processes."""
        if not columns.shape[0]:
            return columns.new_zeros(1 + 3 * columns.shape[1])
        mean = columns.mean(0)
        squares = (columns - mean).square().sum(0)
        return torch.cat([columns.new_tensor([columns.shape[0]]), mean, squares, columns.amax(0)])

    def __add__(self, other: Tally) -> Tally:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        share = other.count / count
        pairs = list(zip(self.mean, other.mean, strict=True))
        # Squares around the means: Σx² - (Σx)²/N loses the digits of a small spread.
        moved = [(after - before) ** 2 * self.count * share for before, after in pairs]
        return Tally(
            count,
            tuple(before + (after - before) * share for before, after in pairs),
            tuple(map(sum, zip(self.squares, other.squares, moved, strict=True))),
            tuple(map(max, self.most, other.most)),
        )


class Telemetry:
    """Gate statistics over the tokens of all processes, between two logs and over the run."""

    def __init__(self, objective: Objective) -> None:
        self.mixes = type(objective).lam is not Objective.lam
        self.signals = objective.further_signals()
        columns = list(_COLUMNS)
        if type(objective).token_weight is not Objective.token_weight:
            columns.append("weight")
        if getattr(objective, "support", "full") != "full":
            columns.append("tail_mass")
        self.columns = columns
        self.names = [*(_OF_LAM if self.mixes else ()), *columns, *self.signals]
        self.open: dict[str, Tally] = {}
        self.run: Tally | None = None

    def row(self, out: LossOutput, mask: Tensor) -> Tensor:
        """Statistics of this process's micro-batch; same length on every process, even without tokens."""
        chosen = mask.bool()
        columns: dict[str, Tensor] = {name: getattr(out, name) for name in self.columns}
        columns |= {name: out.signals[name] for name in self.signals}
        if self.mixes:
            assert out.lam is not None
            columns["lam"] = out.lam
            columns["saturated"] = torch.minimum(out.lam, 1 - out.lam) <= SATURATION
            columns["lam_rkl"] = out.lam * out.reverse_kl
        return Tally.row(torch.stack([columns[name][chosen].float() for name in self.names], -1))

    def add(self, rows: Tensor, metrics: dict[str, list[float]], mode: str) -> None:
        """Add a micro-batch of all processes to TRL's metrics for the next log."""
        tally = sum((Tally.of(row) for row in rows.tolist()), self.empty())
        if mode == "train":
            self.run = tally if self.run is None else self.run + tally
        # TRL averages its entries over micro-batches and clears them with every log. A single entry per name, the
        # mean over all tokens so far, weights every token equally.
        known = "gate/h" in metrics
        self.open[mode] = self.open[mode] + tally if known else tally
        if self.open[mode].count:
            metrics.update({f"gate/{name}": [value] for name, value in self.means(self.open[mode]).items()})

    def empty(self) -> Tally:
        none = (0.0,) * len(self.names)
        return Tally(0.0, none, none, none)

    def means(self, tally: Tally) -> dict[str, float]:
        """Return means under the metric names of a gatespace run."""
        mean = dict(zip(self.names, tally.mean, strict=True))
        squares = dict(zip(self.names, tally.squares, strict=True))
        found: dict[str, float] = {}
        if self.mixes:
            found = {"lam_mean": mean.pop("lam"), "lam_saturated": mean.pop("saturated")}
            if 0 < mean["reverse_kl"] < math.inf:
                found["lam_rkl_mean"] = mean["lam_rkl"] / mean["reverse_kl"]
            del mean["lam_rkl"]
        found |= mean
        found |= {f"{name}_sd": math.sqrt(squares[name] / tally.count) for name in _SPREAD if name in squares}
        if "tail_mass" in mean:
            found["tail_mass_max"] = tally.most[self.names.index("tail_mass")]
        return found

    def summary(self) -> dict[str, float | None]:
        run = self.empty() if self.run is None else self.run
        found: dict[str, float | None] = {"tokens": run.count}
        if self.mixes:
            names = ("lam_mean", "lam_sd", "lam_saturated", "lam_rkl_mean")
            means = self.means(run) if run.count else {}
            found |= {name: means.get(name) for name in names}
        return found
