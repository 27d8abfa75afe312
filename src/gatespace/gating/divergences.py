"""Divergences between teacher and student at one token, as sums over the vocabulary of an elementwise term.

Notation: t teacher (constant), s student, l = log s - log t; all in nats.
A divergence D = Σ_v f(s_v, t_v) is defined by two elementwise functions: the term f, and ψ = s·∂f/∂s, which gives
the gradient with respect to the student's logits z at temperature T:  ∂D/∂z_j = (ψ_j - s_j·Σψ) / T.
The plain path differentiates f by autograd; the fused path uses ψ. Neither calls the other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gatespace.errors import UsageError


class derived:  # a decorator
    """A property that is computed once: `cached_property` without the lock, which torch.compile cannot trace."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    def __get__(self, owner: Any, _: type) -> Tensor:
        value = self.function(owner)
        setattr(owner, self.name, value)  # shadows this descriptor from now on
        return value


class Tile:
    """Log-probabilities of both sides over a slice of the vocabulary, with derived quantities computed once."""

    def __init__(self, log_student: Tensor, log_teacher: Tensor) -> None:
        self.log_student = log_student
        self.log_teacher = log_teacher

    @derived
    def ratio(self) -> Tensor:
        """l = log s - log t."""
        return self.log_student - self.log_teacher

    @derived
    def student(self) -> Tensor:
        """s."""
        return self.log_student.exp()

    @derived
    def teacher(self) -> Tensor:
        """t."""
        return self.log_teacher.exp()

    @derived
    def near(self) -> Tensor:
        """l clamped to [-1, 1], so that its exponentials stay finite."""
        return self.ratio.clamp(-1.0, 1.0)

    @derived
    def is_near(self) -> Tensor:
        """1 where |l| ≤ 1, else 0."""
        return (self.ratio == self.near).to(self.ratio.dtype)

    def choose(self, near: Tensor, far: Tensor) -> Tensor:
        """`near` where |l| ≤ 1, else `far`; both must be finite everywhere. (A `where` on random masks is slower.)"""
        return torch.addcmul(far, self.is_near, near - far)

    @derived
    def excess(self) -> Tensor:
        """s - t."""
        return self.student - self.teacher


class Divergence(ABC):
    """D = Σ_v f(s_v, t_v), elementwise in the vocabulary."""

    @abstractmethod
    def term(self, tile: Tile) -> Tensor:
        """f(s, t), the summand."""

    @abstractmethod
    def psi(self, tile: Tile) -> Tensor:
        """ψ = s·∂f/∂s, up to a part that cancels in ψ_j - s_j·Σψ."""

    def psi_total(self, value: Tensor) -> Tensor | None:
        """Σψ if it follows from the value of the divergence; None: sum it."""
        return None

    def join(self, parts: Sequence[Divergence]) -> Divergence:
        """Concatenate the divergences of successive chunks, this one first; only per-token numbers differ."""
        return self


@dataclass(frozen=True)
class ReverseKL(Divergence):
    """R = KL(student‖teacher) = Σ s·l."""

    def term(self, tile: Tile) -> Tensor:
        """s·l + t - s: never negative, and the last two terms sum to 0 over a distribution.

        For |l| ≤ 1 it is evaluated as s·(expm1(-l) + l), second order in l, so that rounding of l cannot swamp the
        sum where both sides are close.
        """
        near = tile.student * (torch.expm1(-tile.near) + tile.near)
        return tile.choose(near, tile.student * tile.ratio - tile.excess)

    def psi(self, tile: Tile) -> Tensor:
        return tile.student * tile.ratio

    def psi_total(self, value: Tensor) -> Tensor:
        return value


@dataclass(frozen=True)
class ForwardKL(Divergence):
    """F = KL(teacher‖student) = Σ t·(log t - log s)."""

    def term(self, tile: Tile) -> Tensor:
        # ReverseKL's term with the sides swapped
        near = tile.teacher * (torch.expm1(tile.near) - tile.near)
        return tile.choose(near, tile.excess - tile.teacher * tile.ratio)

    def psi(self, tile: Tile) -> Tensor:
        return -tile.teacher

    def psi_total(self, value: Tensor) -> Tensor:
        return torch.full_like(value, -1.0)


@dataclass(frozen=True)
class ToDiDivergence(Divergence):
    """Σ [α·t·(log t - log s) + (1-α)·s·(log s - log t)], α = sg σ(β·(log t - log s)) per vocabulary entry."""

    beta: float = 1.0

    def _alpha(self, tile: Tile) -> Tensor:
        return torch.sigmoid(-self.beta * tile.ratio).detach()

    def term(self, tile: Tile) -> Tensor:
        alpha = self._alpha(tile)
        return tile.ratio * ((1 - alpha) * tile.student - alpha * tile.teacher)

    def psi(self, tile: Tile) -> Tensor:
        alpha = self._alpha(tile)
        return (1 - alpha) * tile.student * (tile.ratio + 1) - alpha * tile.teacher


_REVERSE = ReverseKL()


def _log_mixture(tile: Tile, weight: float) -> Tensor:
    """log of weight·t + (1-weight)·s."""
    if weight == 0.0:
        return tile.log_student
    if weight == 1.0:
        return tile.log_teacher
    return torch.logaddexp(tile.log_teacher + math.log(weight), tile.log_student + math.log1p(-weight))


@dataclass(frozen=True)
class JSDDivergence(Divergence):
    """β·KL(t‖m) + (1-β)·KL(s‖m), m = β·t + (1-β)·s, 0 < β < 1."""

    beta: float = 0.5

    def __post_init__(self) -> None:
        _in_open_unit("β of JSD", self.beta, "β = 0 and β = 1 give 0: use forward_kl or reverse_kl for those ends")

    def term(self, tile: Tile) -> Tensor:
        log_m = _log_mixture(tile, self.beta)
        from_teacher, from_student = Tile(tile.log_teacher, log_m), Tile(tile.log_student, log_m)
        return self.beta * _REVERSE.term(from_teacher) + (1 - self.beta) * _REVERSE.term(from_student)

    def psi(self, tile: Tile) -> Tensor:
        return (1 - self.beta) * tile.student * (tile.log_student - _log_mixture(tile, self.beta))


@dataclass(frozen=True)
class SkewForwardKL(Divergence):
    """KL(t‖α·t + (1-α)·s)."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _in_half_open_unit("α of SKL", self.alpha)

    def term(self, tile: Tile) -> Tensor:
        return _REVERSE.term(Tile(tile.log_teacher, _log_mixture(tile, self.alpha)))

    def psi(self, tile: Tile) -> Tensor:
        log_m = _log_mixture(tile, self.alpha)
        # in logs: s·t/m is at most t/(1-α), but s/m or t/m alone may overflow
        return -(1 - self.alpha) * (tile.log_student + tile.log_teacher - log_m).exp()


@dataclass(frozen=True)
class SkewReverseKL(Divergence):
    """KL(s‖(1-α)·t + α·s); `detach_mixture` detaches the mixture."""

    alpha: float = 0.1
    detach_mixture: bool = False

    def __post_init__(self) -> None:
        _in_half_open_unit("α of SRKL", self.alpha)

    def term(self, tile: Tile) -> Tensor:
        log_m = _log_mixture(tile, 1 - self.alpha)
        if self.detach_mixture:
            # plain s·log(s/m): the two extra parts of ReverseKL's term would bring the mixture's derivative back
            log_m = log_m.detach()
            return tile.student * (tile.log_student - log_m)
        return _REVERSE.term(Tile(tile.log_student, log_m))

    def psi(self, tile: Tile) -> Tensor:
        log_m = _log_mixture(tile, 1 - self.alpha)
        psi = tile.student * (tile.log_student - log_m)
        if self.detach_mixture:
            return psi
        return psi - self.alpha * (2 * tile.log_student - log_m).exp()


@dataclass(frozen=True)
class AlphaBeta(Divergence):
    """-1/(αβ) Σ [t^α s^β - α/(α+β)·t^(α+β) - β/(α+β)·s^(α+β)], the α-β divergence of ABKD.

    α and β must not be 0 here; (1, 0) is forward KL and (0, 1) reverse KL as limits (see `alpha_beta`).
    """

    alpha: float = 0.2
    beta: float = 0.7

    def __post_init__(self) -> None:
        if self.alpha == 0 or self.beta == 0 or self.alpha + self.beta == 0:
            raise UsageError(
                "α, β and α+β of ABKD must not be 0",
                got=f"α={self.alpha:g}, β={self.beta:g}",
                instead="(1, 0) and (0, 1), forward and reverse KL, are the limits that are offered",
            )

    def term(self, tile: Tile) -> Tensor:
        a, b, n = self.alpha, self.beta, self.alpha + self.beta
        log_s, log_t, near = tile.log_student, tile.log_teacher, tile.near
        # near s = t the first orders of the three parts cancel; expm1 keeps the second
        close = (n * log_s).exp() * (torch.expm1(-a * near) - a / n * torch.expm1(-n * near))
        far = (a * log_t + b * log_s).exp() - a / n * (n * log_t).exp() - b / n * (n * log_s).exp()
        return tile.choose(close, far) / (-a * b)

    def psi(self, tile: Tile) -> Tensor:
        a, b = self.alpha, self.beta
        log_s, log_t = tile.log_student, tile.log_teacher
        return (((a + b) * log_s).exp() - (a * log_t + b * log_s).exp()) / a


def alpha_beta(alpha: float, beta: float) -> Divergence:
    """Return the α-β divergence, including the two limits that are KLs."""
    if (alpha, beta) == (1.0, 0.0):
        return ForwardKL()
    if (alpha, beta) == (0.0, 1.0):
        return ReverseKL()
    return AlphaBeta(alpha, beta)


@dataclass(frozen=True)
class AbsoluteDifference(Divergence):
    """Σ |t - s|, twice the total variation."""

    def term(self, tile: Tile) -> Tensor:
        return (tile.teacher - tile.student).abs()

    def psi(self, tile: Tile) -> Tensor:
        return tile.student * (tile.student - tile.teacher).sign()


@dataclass(frozen=True)
class NegativeEntropy(Divergence):
    """Σ s·log s of the student, summed over the vocabulary like a divergence."""

    def term(self, tile: Tile) -> Tensor:
        return tile.student * tile.log_student

    def psi(self, tile: Tile) -> Tensor:
        return tile.student * tile.log_student

    def psi_total(self, value: Tensor) -> Tensor:
        return value


_LEAST = -80.0
"""A log-probability x for which both e^x and e^-x are normal float32 numbers."""


def both_kls(log_student: Tensor, log_teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of reverse and forward KL, summed over the last dimension, in half the work; overwrites its arguments.

    With p = s·expm1(-l) = t - s the terms are p + s·l and -(p + s·l) - p·l. As accurate near s = t as
    `ReverseKL.term`. s is clamped to at least e^-80, except in the last l, so that the exponential does not overflow
    where s is 0. Not for ids that the teacher forbids: there the parts of forward KL are too large to cancel.
    """
    ratio = log_student - log_teacher
    minus = log_teacher.sub_(log_student.clamp_(min=_LEAST))
    student = log_student.exp_()
    difference = minus.expm1().mul_(student)
    reverse = difference - student.mul_(minus)
    return reverse.sum(-1), -difference.mul_(ratio).add_(reverse).sum(-1)


def both_kls_gradient(
    log_student: Tensor, log_teacher: Tensor, reverse: Tensor, forward: Tensor, share: Tensor
) -> Tensor:
    """reverse·ψ_R + forward·ψ_F + share·s = s·(reverse·l + share) - forward·t, (N, 1) weights; overwrites the rest."""
    total = (log_student - log_teacher).mul_(reverse).add_(share).mul_(log_student.exp_())
    return total.addcmul_(log_teacher.exp_(), forward, value=-1)


def not_negative(kl: Tensor) -> Tensor:
    """Clamp the value at 0 against rounding errors, without changing the gradient."""
    return kl + (-kl).clamp(min=0.0).detach()


def _in_open_unit(what: str, value: float, instead: str) -> None:
    if not 0.0 < value < 1.0:
        raise UsageError(f"{what} lies strictly between 0 and 1", got=value, instead=instead)


def _in_half_open_unit(what: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise UsageError(f"{what} lies in [0, 1)", got=value)
