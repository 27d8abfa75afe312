"""Objectives: what is minimised at a token, by three hooks.

    L_t = w_t · (λ_t · R_t + (1-λ_t) · F_t)

`divergence` gives R_t and F_t (or one divergence for methods that have no mixture), `lam` gives λ_t, `token_weight`
gives w_t. Every published method of `gatespace.gating.published` is written with these three, and so is your own:

    >>> from gatespace.gating import Tokens, objectives
    >>> from gatespace.gating.divergences import ReverseKL
    >>> @objectives.register("scaled_reverse_kl")
    ... @dataclass(frozen=True)
    ... class ScaledReverseKL(objectives.Objective):
    ...     factor: float = 2.0
    ...     def divergence(self, tokens: Tokens) -> Tensor:
    ...         return self.factor * tokens.divergences(ReverseKL())[0]
    >>> objectives.objective("scaled_reverse_kl", factor=3.0).factor
    3.0
    >>> objectives.unregister("scaled_reverse_kl")
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from gatespace import plugins
from gatespace.errors import UsageError, unknown_name
from gatespace.gating import signals
from gatespace.gating.coefficients import Gate
from gatespace.gating.supports import KLPair, check_support, kl_pair
from gatespace.gating.tokens import Tokens, TopKTeacher


class Terms(NamedTuple):
    """Two terms to be mixed like reverse and forward KL, which are not those two KLs themselves."""

    reverse: Tensor
    forward: Tensor


class TokenLoss(NamedTuple):
    """The losses of N tokens. Only `loss` carries gradient; the rest is telemetry."""

    loss: Tensor
    telemetry: dict[str, Tensor]
    """(N,) each: lam (where there is one), weight, forward_kl, reverse_kl, tail_mass, h, u, gap, further signals."""


@dataclass(frozen=True)
class Objective(ABC):
    """A loss per token, independent of how the numbers are obtained."""

    name: ClassVar[str]
    """What configurations call it; `register` sets it."""
    summary: ClassVar[str] = ""
    """What it minimises, in a few words."""
    formula: ClassVar[str] = ""
    """The loss at a token in one line: s student, t teacher, sg without gradient."""
    citation: ClassVar[str] = ""
    departures: ClassVar[str] = ""
    """How the paper's restriction of the same signal differs from this method, where there is one."""

    @abstractmethod
    def divergence(self, tokens: Tokens) -> KLPair | Terms | Tensor:
        """R_t and F_t to be mixed by λ_t, or one divergence (N,) where nothing is mixed."""

    def lam(self, tokens: Tokens) -> Tensor | None:
        """λ_t, or None where nothing is mixed."""
        return None

    def token_weight(self, tokens: Tokens) -> Tensor | None:
        """w_t, or None for 1."""
        return None

    def learned(self) -> Tensor | None:
        """A tensor of the objective's own that wants gradient, or None."""
        return None

    def uses_sampled(self) -> bool:
        """Whether it uses the response token itself, and so at the probability under which it was sampled."""
        return False

    def ahead(self) -> tuple[str, ...]:
        """Signals that are needed of all tokens before the loss of the first, see `signals.everywhere`."""
        return tuple(dict.fromkeys(one for name in self.further_signals() for one in signals.get(name).ahead))

    def selects(self) -> bool:
        """Whether it learns from some of a micro-batch's tokens only, which it chooses (with `LossInputs.noise`)."""
        return False

    def by_source(self) -> bool:
        """Whether it depends on who wrote the response (`LossInputs.from_teacher`)."""
        return False

    def skips_special(self) -> bool:
        """Whether special tokens of the response, such as the end of a turn, do not count."""
        return False

    def state(self) -> dict[str, float]:
        """What changes from step to step; part of a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Resume from what `state` gave."""
        return

    def advance(self, loss: float, progress: float) -> None:
        """Take in the mean loss per token of a step, before which `progress` of all steps (0 to 1) was done."""
        return

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """L_t for N tokens, with telemetry."""
        divergence = self.divergence(tokens)
        lam = self.lam(tokens) if tokens.lam is None else tokens.lam
        weight = self.token_weight(tokens)
        telemetry: dict[str, Tensor] = {}
        if not isinstance(divergence, Tensor):
            if lam is None:
                raise UsageError(f"the objective {self.name!r} gives two divergences and no λ to mix them")
            loss = mix(lam, divergence.reverse, divergence.forward)
            telemetry["lam"] = lam
        else:
            loss = divergence
        if weight is not None:
            loss = weight * loss
        with torch.no_grad():
            pair = divergence if isinstance(divergence, KLPair) else self._telemetry_pair(tokens)
            telemetry |= {
                "weight": torch.ones_like(loss) if weight is None else weight,
                "reverse_kl": pair.reverse,
                "forward_kl": pair.forward,
                "tail_mass": pair.tail_mass,
                **{name: signals.read(name, tokens) for name in ("h", "u", "gap")},
                **{name: signals.read(name, tokens) for name in self.further_signals()},
            }
        return TokenLoss(loss, {name: value.detach() for name, value in telemetry.items()})

    def own_lam(self, tokens: Tokens) -> Tensor:
        """λ_t as a constant; an error where nothing is mixed."""
        lam = self.lam(tokens)
        if lam is None:
            raise UsageError(f"the objective {self.name!r} mixes nothing and has no λ to permute", got="lam_order")
        return lam.detach()

    def further_signals(self) -> tuple[str, ...]:
        """Names of signals beyond h, u and gap that the objective depends on."""
        return ()

    @staticmethod
    def _telemetry_pair(tokens: Tokens) -> KLPair:
        return kl_pair(tokens, "bucket" if isinstance(tokens.teacher, TopKTeacher) else "full")


OBJECTIVES: dict[str, type[Objective]] = {}
"""Name → class, of all that are registered. `get` also finds those of installed packages."""
_Kind = TypeVar("_Kind", bound=type[Objective])


def register(name: str) -> Callable[[_Kind], _Kind]:
    """Make an `Objective` usable as ``objective.method`` under `name`; its dataclass fields are its parameters.

    A name that is taken is an error: a run's identity names its objective.
    """

    def wrap(kind: _Kind) -> _Kind:
        if name in OBJECTIVES:
            raise UsageError(f"the objective name {name!r} is taken", instead="unregister it first, or choose another")
        if not name.isidentifier():
            raise UsageError("an objective's name must be a Python identifier", got=name)
        if not (isinstance(kind, type) and issubclass(kind, Objective)):
            raise UsageError(f"the objective {name!r} must be a subclass of Objective", got=repr(kind))
        kind.name = name
        OBJECTIVES[name] = kind
        return kind

    return wrap


def unregister(name: str) -> None:
    """Forget an objective that was registered."""
    get(name)
    del OBJECTIVES[name]


def get(name: str) -> type[Objective]:
    """The class of that name: registered here or by a plugin, or an entry point of the group `gatespace.objectives`."""
    import gatespace.gating.published  # noqa: F401 - registers the published methods

    if name not in OBJECTIVES:
        kind = plugins.provider("objectives", name, kind="objective", known=OBJECTIVES)
        if name not in OBJECTIVES:  # unless its module has registered it
            register(name)(kind)
    return OBJECTIVES[name]


def objective(name: str, **parameters: object) -> Objective:
    """An objective by its name, e.g. ``objective("todi", beta=1.0)``.

    Examples:
        >>> objective("eopd").tau
        0.8
    """
    kind = get(name.casefold())
    known = list(inspect.signature(kind).parameters)
    for parameter in parameters:
        if parameter not in known:
            raise unknown_name(f"parameter of {kind.name}", parameter, known)
    return kind(**parameters)


def mix(lam: Tensor, reverse: Tensor, forward: Tensor) -> Tensor:
    """λ·R + (1-λ)·F; a side of weight exactly 0 adds nothing, even where it is infinite."""
    reverse = torch.where(lam == 0, 0.0, reverse)
    forward = torch.where(lam == 1, 0.0, forward)
    return lam * reverse + (1 - lam) * forward


@register("gated")
@dataclass(frozen=True, eq=False)  # a tensor has no single truth value, so no generated ==
class Gated(Objective):
    """λ_t = σ(a·h + b·u + c + d·gap + …) mixing reverse and forward KL: a point of the family.

    Args:
        gate: The point. A static λ is the point with a = b = d = 0.
        support: full, bucket, hybrid, renorm, recipe or student (see `gatespace.gating.supports`).
        support_k: K of the top-K supports; None: that of the signals, or of a teacher known by its top-K.
        stop_gradient: Treat λ as a constant in the gradient. By default gradient flows through the gate, as in the
            paper.
        coefficients: (4+E,) tensor (a, b, c, d, further signals in the gate's order) in place of the gate's numbers;
            it receives gradient.
    """

    summary: ClassVar[str] = "λ per token mixes reverse and forward KL: the family"
    formula: ClassVar[str] = "λ·KL(s‖t) + (1−λ)·KL(t‖s), λ = σ(a·h + b·u + c + d·gap)"
    citation: ClassVar[str] = (
        "Wu, Lin, Yuan, Jiang (2026). A Unified Per-Token Gating Family for On-Policy Distillation: FKL/RKL Mixing "
        "with Multi-Channel and Bias Coefficients. Findings of EMNLP 2026."
    )

    gate: Gate = field(default_factory=Gate)
    support: str = "full"
    support_k: int | None = None
    stop_gradient: bool = False
    coefficients: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.gate, Gate):
            raise UsageError(
                "gate must be a Gate",
                got=type(self.gate).__name__,
                instead='Gate(a=4, c=-1), Gate.named("G5"), Gate.static(0.5) or Gate.parse("4,0,-1,0")',
            )
        check_support(self.support)
        for name in self.gate.extra:
            signals.get(name)
        size = 4 + len(self.gate.extra)
        if self.coefficients is not None and self.coefficients.shape != (size,):
            raise UsageError(
                f"coefficients must have shape ({size},): a, b, c, d, then {list(self.gate.extra)}",
                got=tuple(self.coefficients.shape),
            )

    def learned(self) -> Tensor | None:
        return self.coefficients

    def uses_sampled(self) -> bool:
        return self.support == "hybrid" or any(signals.get(name).sampled for name in self.gate.extra)

    def divergence(self, tokens: Tokens) -> KLPair:
        return kl_pair(tokens, self.support, self.support_k)

    def further_signals(self) -> tuple[str, ...]:
        return tuple(self.gate.extra)

    def lam(self, tokens: Tokens) -> Tensor:
        gate = self.gate
        weights: tuple[float | Tensor, ...] = (*gate.abcd, *gate.extra.values())
        if self.coefficients is not None:
            weights = self.coefficients.to(tokens.dtype).unbind()
        a, b, c, d, *further = weights
        logit = torch.zeros(tokens.count, dtype=tokens.dtype, device=tokens.device)
        for name, weight in zip(("h", "u", "gap", *gate.extra), (a, b, d, *further), strict=True):
            if isinstance(weight, float) and weight == 0.0:
                continue  # not even computed, so that no gradient is taken of what cannot matter
            value = signals.read(name, tokens)
            logit = logit + weight * (value.detach() if self.stop_gradient else value)
        return torch.sigmoid(logit + c)


@register("static")
class Static(Gated):
    """A constant λ: the fixed mixture λ·R + (1-λ)·F, the point (0, 0, logit λ, 0) of the family."""

    summary: ClassVar[str] = "a constant λ mixes reverse and forward KL"
    formula: ClassVar[str] = "λ·KL(s‖t) + (1−λ)·KL(t‖s)"

    def __init__(self, lam: float = 0.5, support: str = "full", support_k: int | None = None) -> None:
        super().__init__(Gate.static(lam), support, support_k)
