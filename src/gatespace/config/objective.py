"""The `objective` section: the loss of a token.

A gate is stored as written, as a JSON value. `gatespace.gating.configured.build_objective` interprets it, since
`gatespace.gating` is above this package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BeforeValidator, Field, Strict, model_validator

from gatespace.config.base import Count, Fault, Name, Section, Switch

Parameter = bool | int | float | str
GateValue = str | tuple[float, float, float, float] | dict[str, float]


def gate_value(value: Any) -> GateValue | None:
    """Validate a gate as written in a file and return it as a JSON value."""
    if value is None:
        return None
    if isinstance(value, str):
        if value.strip():
            return value.strip()
    elif isinstance(value, list | tuple):
        if len(value) != 4:
            raise ValueError(f"must have four coefficients a, b, c, d, not {len(value)}")
        a, b, c, d = (_coefficient(f"coefficient {index}", part) for index, part in enumerate(value))
        return (a, b, c, d)
    elif isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return {key: _coefficient(key, part) for key, part in value.items()}
    raise ValueError(
        "must be a name such as G5 or static:0.5, four numbers a,b,c,d, or a mapping such as {a: 4, c: -1}"
    )


def _coefficient(name: str, value: Any) -> float:
    if isinstance(value, bool) or not _is_finite(value):
        raise ValueError(f"{name} of the gate must be a finite number")
    return float(value) + 0.0  # turns -0.0, which JSON distinguishes, into 0.0


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def method_parameters(value: Any) -> Any:
    """Validate a method's parameters: finite numbers, text and booleans."""
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping of parameter to value, such as {beta: 1.0}")
    for name, part in value.items():
        if not isinstance(name, str) or not (isinstance(part, str) or _is_finite(part)):
            raise ValueError(f"the value of {name} must be a finite number, a text, true or false")
    return dict(value)


class ObjectiveConfig(Section):
    """The loss: a gate of the family, or a published method."""

    method: Name = "gated"
    """gated: λ = σ(a·h + b·u + c + d·gap) mixes reverse and forward KL. static: a constant λ. The others are published
    methods as their authors define them; `gatespace methods` lists them."""

    gate: Annotated[GateValue | None, BeforeValidator(gate_value)] = "G5"
    """The point of the family, for the method gated: a name (G1 … G5, H1 … H4, HG4,d+2, entropy-only(4), gap-only(-2),
    static:0.388), four numbers a,b,c,d as text or list, or a mapping such as {a: 4, c: -1, student_entropy: 2}."""

    params: Annotated[dict[str, Parameter], BeforeValidator(method_parameters)] = Field(default={})
    """Parameters of the method by name, e.g. {lam: 0.388} for static, {beta: 1.0} for todi, {tau: 0.8, alpha: 1.0} for
    eopd. Others have the published default."""

    top_k: Count = 8
    """K of the entropy signals h and u. The paper does not say its K; a two-label tie has h = log 2 / log K, so
    coefficients are never compared across K."""

    temperature: Annotated[float, Strict(), AllowInfNan(False), Field(gt=0)] = 1.0
    """Divides the logits of both sides in the divergences. Signals are computed at temperature 1."""

    stop_gradient: Switch = False
    """Treat λ as a constant in the gradient. By default gradient flows through the gate, as in the paper."""

    shuffle: Switch = False
    """A control: the gate's values of λ in a step are permuted over its tokens at random, within each micro-batch, as
    constants. What the gate gains over this is due to where it puts λ, not to which values it has."""

    support: Literal["full", "bucket", "hybrid", "renorm", "student", "labels"] = "full"
    """What both KLs sum over at a token: full is all of the vocabulary; bucket, hybrid and renorm need only the
    teacher's top-K; student is the student's top-K, and the rest as one outcome. labels: at each text the task's
    labels instead, as whole responses, normalised over them; nothing is sampled, and student and teacher may have
    different tokenizers."""

    support_k: Count | None = None
    """K of a support other than full; null: the teacher's K if it sends a top-K, else top_k."""

    entropy: Literal["top_k", "full", "bucket"] = "top_k"
    """How h and u are computed: over the teacher's top-K renormalised (the family's definition), the whole vocabulary,
    or the top-K with the tail as one further outcome."""

    @model_validator(mode="before")
    @classmethod
    def _only_gated_has_a_gate(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("method", "gated") != "gated" and "gate" not in data:
            return {**data, "gate": None}
        return data

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> ObjectiveConfig:
        if self.method == "gated" and self.gate is None:
            raise Fault("gate", "the method gated needs a gate", instead="e.g. G5, or 4,0,-1,0")
        if self.method == "gated" and self.params:
            raise Fault("params", "the method gated has no parameters but its gate", instead="gate: {a: 4, c: -1}")
        if self.method != "gated" and self.gate is not None:
            hint = "params: {lam: 0.5}, or method: gated" if self.method == "static" else "gate: null, or method: gated"
            raise Fault("gate", f"the method {self.method} has no gate", instead=hint)
        for name in ("stop_gradient", "shuffle"):
            if self.method != "gated" and getattr(self, name):
                raise Fault(name, f"no meaning without a gate, and {self.method} has none", instead="false")
        if self.method not in ("gated", "static") and self.support != "full":
            raise Fault("support", f"the method {self.method} defines its own support", instead="full")
        if (self.support == "full" or self.over_labels) and self.support_k is not None:
            what = f"the support {self.support} has no K"
            raise Fault("support_k", what, instead="support_k: null, or support: bucket")
        return self

    @property
    def over_labels(self) -> bool:
        """Whether the divergences are over a text's labels rather than the tokens of a response."""
        return self.support == "labels"
