"""Objectives: the loss per token, defined by three hooks.

    L_t = w_t · (λ_t · R_t + (1-λ_t) · F_t)

`divergence` returns R_t and F_t (or a single divergence for methods without a mixture), `lam` returns λ_t,
`token_weight` returns w_t. Every method in `gatespace.gating.methods` uses these three, and so can your own:

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
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
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

NEEDS = {
    "full": "the teacher's full distribution",
    "sampled": "the sampled token",
    "selection": "random choice or ranking of tokens",
    "source": "responses of student and teacher",
    "special": "the tokenizer's special tokens",
    "state": "a state over steps",
}
"""What an objective may need from a run (`Objective.needs`), in words."""


class Terms(NamedTuple):
    """Two terms mixed like reverse and forward KL, but other than those two KLs."""

    reverse: Tensor
    forward: Tensor


class TokenLoss(NamedTuple):
    """The losses of N tokens. Only `loss` carries gradient; the rest is telemetry."""

    loss: Tensor
    telemetry: dict[str, Tensor]
    """(N,) each: lam (if there is one), weight, forward_kl, reverse_kl, tail_mass, h, u, gap, extra signals."""


@dataclass(frozen=True)
class Objective(ABC):
    """A loss per token, the same for the plain and the fused path."""

    name: ClassVar[str]
    """Its name in configurations; set by `register`."""

    @abstractmethod
    def divergence(self, tokens: Tokens) -> KLPair | Terms | Tensor:
        """Return R_t and F_t, to be mixed by λ_t, or a single divergence (N,)."""

    def lam(self, tokens: Tokens) -> Tensor | None:
        """Return λ_t, or None without a mixture."""
        return None

    def token_weight(self, tokens: Tokens) -> Tensor | None:
        """Return w_t, or None for 1."""
        return None

    @property
    def needs(self) -> frozenset[str]:
        """What it needs beside both sides' log-probabilities of selected ids: keys of `NEEDS`."""
        return frozenset()

    def learned(self) -> Tensor | None:
        """Return the objective's own tensor that receives gradient, or None."""
        return None

    def prepass(self) -> tuple[str, ...]:
        """Signals needed for all tokens before the first loss, see `signals.everywhere`."""
        return tuple(dict.fromkeys(name for own in self.further_signals() for name in signals.get(own).prepass))

    @property
    def state(self) -> dict[str, float]:
        """What changes from step to step, saved in checkpoints and updated from them; empty for most."""
        return {}

    def advance(self, loss: float, progress: float) -> None:
        """Update the state after a step from its mean loss per token; `progress` (0 to 1) is as of before the step."""
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
        """Return λ_t, detached; an error without a mixture."""
        lam = self.lam(tokens)
        if lam is None:
            raise UsageError(f"the objective {self.name!r} mixes nothing and has no λ to permute", got="lam_order")
        return lam.detach()

    def further_signals(self) -> tuple[str, ...]:
        """Names of the signals beyond h, u and gap that the objective depends on or logs."""
        return ()

    @staticmethod
    def _telemetry_pair(tokens: Tokens) -> KLPair:
        return kl_pair(tokens, "bucket" if isinstance(tokens.teacher, TopKTeacher) else "full")


OBJECTIVES: dict[str, type[Objective]] = {}
"""Name → class of all registered objectives. `get` also finds those of installed packages."""
_Kind = TypeVar("_Kind", bound=type[Objective])


def register(name: str) -> Callable[[_Kind], _Kind]:
    """Make an `Objective` usable as ``objective.method`` under `name`; its dataclass fields are its parameters.

    A duplicate name is an error: a run's identity includes its objective's name.
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
    """Remove a registered objective."""
    get(name)
    del OBJECTIVES[name]


def get(name: str) -> type[Objective]:
    """Return the class of that name: registered, or an entry point of the group `gatespace.objectives`."""
    if name not in OBJECTIVES:
        kind = plugins.provider("objectives", name, kind="objective", known=OBJECTIVES)
        if name not in OBJECTIVES:  # its module may have registered it on import
            register(name)(kind)
    return OBJECTIVES[name]


def objective(name: str, **parameters: object) -> Objective:
    """Return an objective by name, e.g. ``objective("todi", beta=1.0)``.

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


def described(kind: type[Objective]) -> dict[str, str]:
    """The parts of a method's docstring, each in one line: summary, formula, citation, departures; "" if missing.

    Examples:
        >>> described(get("skl"))["formula"]
        'KL(t‖α·t + (1-α)·s)'
    """
    text = inspect.getdoc(kind) or ""
    parts = dict(re.findall(r"^(Loss|Source|Departures): (.+?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL))
    line = {name: " ".join(part.split()) for name, part in parts.items()}
    return {
        "summary": text.partition("\n")[0].rstrip("."),
        "formula": line.get("Loss", "").rstrip("."),
        "citation": line.get("Source", ""),
        "departures": line.get("Departures", ""),
    }


def mix(lam: Tensor, reverse: Tensor, forward: Tensor) -> Tensor:
    """Return λ·R + (1-λ)·F; a side of weight exactly 0 adds nothing, even if infinite."""
    reverse = torch.where(lam == 0, 0.0, reverse)
    forward = torch.where(lam == 1, 0.0, forward)
    return lam * reverse + (1 - lam) * forward


@register("gated")
@dataclass(frozen=True, eq=False)  # a tensor has no single truth value, so no generated ==
class Gated(Objective):
    """λ per token mixes reverse and forward KL: the family.

    Loss: λ·KL(s‖t) + (1-λ)·KL(t‖s), λ = σ(a·h + b·u + c + d·gap + …).

    Args:
        gate: The point. A static λ is the point with a = b = d = 0.
        support: full, bucket, hybrid, renorm or student (see `gatespace.gating.supports`).
        support_k: K of the top-K supports; None: that of a top-K teacher, else that of the signals.
        stop_gradient: Treat λ as a constant. By default gradient flows through the gate, as in the paper.
        coefficients: (4+E,) tensor (a, b, c, d, extra signals in the gate's order) that replaces the gate's numbers
            and receives gradient.

    Source: Wu, Lin, Yuan, Jiang (2026). A Unified Per-Token Gating Family for On-Policy Distillation: FKL/RKL Mixing
    with Multi-Channel and Bias Coefficients. Findings of EMNLP 2026.
    """

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

    @property
    def needs(self) -> frozenset[str]:
        sampled = self.support == "hybrid" or any(signals.get(name).sampled for name in self.gate.extra)
        full = self.support in ("full", "student")
        return frozenset(name for name, needed in (("full", full), ("sampled", sampled)) if needed)

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
                continue  # skip signals without influence, and their gradient
            value = signals.read(name, tokens)
            logit = logit + weight * (value.detach() if self.stop_gradient else value)
        return torch.sigmoid(logit + c)


@register("static")
class Static(Gated):
    """A constant λ mixes reverse and forward KL.

    Loss: λ·KL(s‖t) + (1-λ)·KL(t‖s), the point (0, 0, logit λ, 0) of the family.

    Source: Wu, Lin, Yuan, Jiang (2026), as for the method gated.
    """

    def __init__(self, lam: float = 0.5, support: str = "full", support_k: int | None = None) -> None:
        super().__init__(Gate.static(lam), support, support_k)


import gatespace.gating.methods  # noqa: E402, F401 - registers the published methods, after the family
