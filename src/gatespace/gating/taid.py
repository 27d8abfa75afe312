"""TAID: forward KL from a target between student and teacher that moves to the teacher over the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.divergences import Divergence, ForwardKL, Tile, not_negative
from gatespace.gating.objectives import Objective, register
from gatespace.gating.tokens import Tokens

_FORWARD = ForwardKL()


@dataclass(frozen=True, eq=False)  # a tensor has no single truth value, so no generated ==
class BetweenKL(Divergence):
    """KL(p‖s) with p ∝ s^(1-τ)·t^τ, detached: the softmax of interpolated logits.

    Args:
        tau: τ.
        log_total: (N,) log Σ s^(1-τ)·t^τ, the normaliser of p.
    """

    tau: float
    log_total: Tensor

    def _target(self, tile: Tile) -> Tile:
        log_p = tile.log_student - self.tau * tile.ratio - self.log_total[:, None]
        return Tile(tile.log_student, log_p.detach())

    def term(self, tile: Tile) -> Tensor:
        return _FORWARD.term(self._target(tile))

    def psi(self, tile: Tile) -> Tensor:
        return _FORWARD.psi(self._target(tile))

    def psi_total(self, value: Tensor) -> Tensor:
        return _FORWARD.psi_total(value)

    def join(self, parts: Sequence[Divergence]) -> Divergence:
        return BetweenKL(self.tau, torch.cat([part.log_total for part in parts if isinstance(part, BetweenKL)]))


@register("taid")
@dataclass(frozen=True)
class TAID(Objective):
    """KL(p‖s), p = softmax((1-τ)·sg z_s + τ·z_t): the target moves from the student's side to the teacher.

    τ starts at `t_start`. After each step it becomes min(t_end, max(τ_lin, τ + α·σ(m)·(1-τ))), where τ_lin goes
    linearly from `t_start` to `t_end` over the run, and m is the running mean, with decay β, of the relative decrease
    of the loss from step to step. τ, m and the last loss are saved in checkpoints. Outside a run, τ is `t_start` until
    `advance` is called.

    Args:
        t_start: τ of the first step.
        t_end: Final τ.
        alpha: α, bound on how far a step moves τ ahead.
        beta: β of the running mean.
        adaptive: Whether τ may run ahead of the linear schedule.
    """

    summary: ClassVar[str] = "forward KL to a target that moves to the teacher"
    formula: ClassVar[str] = (
        "KL(p‖s), p = softmax((1−τ)·sg z_s + τ·z_t); τ ← min(1, max(τ_lin, τ + α·σ(m)·(1−τ))), m: relative "
        "decrease of the loss, averaged with β"
    )
    citation: ClassVar[str] = (
        "Shing, Misaki, Bao, Yokoi, Akiba (2025). TAID: Temporally Adaptive Interpolated Distillation for Efficient "
        "Knowledge Transfer in Language Models. ICLR 2025. arXiv:2501.16937. Code: SakanaAI/TAID."
    )

    t_start: float = 0.4
    t_end: float = 1.0
    alpha: float = 5e-4
    beta: float = 0.99
    adaptive: bool = True
    moving: dict[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.t_start < 1 or not self.t_start <= self.t_end <= 1:
            raise UsageError(
                "t_start and t_end of TAID have 0 ≤ t_start < 1 and t_start ≤ t_end ≤ 1",
                got=f"{self.t_start:g}, {self.t_end:g}",
            )
        if not (0 <= self.alpha <= 1 and 0 <= self.beta < 1):
            raise UsageError("α of TAID lies in [0, 1], β in [0, 1)", got=f"{self.alpha:g}, {self.beta:g}")
        self.moving.update(tau=self.t_start, momentum=0.0)

    @property
    def tau(self) -> float:
        """τ of the next step."""
        return self.moving["tau"]

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(BetweenKL(self.tau, tokens.log_between(self.tau)))[0])

    def state(self) -> dict[str, float]:
        return dict(self.moving)

    def restore(self, state: Mapping[str, float]) -> None:
        self.moving.clear()
        self.moving.update(state)

    def advance(self, loss: float, progress: float) -> None:
        now, line = self.moving, self.t_start + (self.t_end - self.t_start) * progress
        if "loss" in now:  # the first step has no previous loss
            change = (now["loss"] - loss) / (now["loss"] + 1e-15)
            now["momentum"] = self.beta * now["momentum"] + (1 - self.beta) * change
            step = self.alpha * _sigmoid(now["momentum"]) * (1 - self.tau)
            now["tau"] = min(self.t_end, max(line, self.tau + step)) if self.adaptive else line
        now["loss"] = loss


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
