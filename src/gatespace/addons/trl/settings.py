"""Configuration: TRL's own settings, and those of an objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gatespace.addons.trl.seam import DistillationConfig
from gatespace.config import ObjectiveConfig, parse_config
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate
from gatespace.gating.configured import build_gate, build_objective
from gatespace.gating.fused import CHUNK_MB
from gatespace.gating.objectives import NEEDS, OBJECTIVES, Objective


@dataclass
class GatedDistillationConfig(DistillationConfig):  # type: ignore[misc]  # TRL has no types, or is not installed
    """`trl.DistillationConfig` with the settings of a gatespace objective.

    The names are those of the section `objective` of a gatespace configuration, except for two that TRL already uses:
    `top_k` and `temperature` belong to TRL's sampler, `signal_top_k` and `loss_temperature` to the loss. A gate may
    also be a `Gate`, four numbers, or a mapping; it is stored as text.

    Examples:
        >>> from gatespace import Gate
        >>> config = GatedDistillationConfig("runs/gated", gate=Gate(a=4, c=-1), use_cpu=True)
        >>> config.gate, config.objective().gate == Gate.named("G5")
        ('4,0,-1,0', True)
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*DistillationConfig._VALID_DICT_FIELDS, "gate", "params"]

    method: str = field(
        default="gated",
        metadata={"help": f"The objective, one of {', '.join(OBJECTIVES)}."},
    )
    # HfArgumentParser uses the second member of a union that ends in None: text.
    gate: Gate | str | Sequence[float] | Mapping[str, float] | None = field(
        default=None,
        metadata={
            "help": "The point of the family, for the method gated: a name such as G5, H2, static:0.388 or "
            "gap-only(-2), four numbers a,b,c,d (--gate=-4,0,0,0 where the first is negative), or a mapping as JSON. "
            "Not given: G5."
        },
    )
    params: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": """Parameters of any other method as JSON, e.g. '{"tau": 0.8}' for eopd."""},
    )
    support: str = field(
        default="full",
        metadata={
            "help": "What both KLs sum over: full; bucket, hybrid, renorm on the teacher's top-K; or "
            "student, on its own."
        },
    )
    support_k: int | None = field(
        default=None,
        metadata={"help": "K of a support other than full. Not given: signal_top_k."},
    )
    signal_top_k: int = field(
        default=8,
        metadata={"help": "K of the entropy signals h and u. Coefficients are not comparable across K."},
    )
    entropy: str = field(
        default="top_k",
        metadata={"help": "How h and u are normalised: top_k, full or bucket."},
    )
    loss_temperature: float | None = field(
        default=None,
        metadata={
            "help": "Divides the logits of both sides in the divergences; signals are computed at 1. Not given: "
            "`temperature`, as in TRL."
        },
    )
    stop_gradient: bool = field(
        default=False,
        metadata={"help": "Treat the gate's λ as a constant in the gradient."},
    )
    shuffle: bool = field(
        default=False,
        metadata={"help": "A control: permute the gate's values of λ over the tokens of a micro-batch at random."},
    )
    chunk_mb: float = field(
        default=CHUNK_MB,
        metadata={"help": "Size of the logit buffers in MB. Time and memory change with it, the result does not."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta != 1.0:
            raise UsageError(
                "beta is TRL's own divergence, which is not computed here",
                got=self.beta,
                instead="method='jsd' with params={'beta': ...} for that divergence; λ of a gate is another quantity",
            )
        if self.loss_temperature is not None and not 0 < self.loss_temperature < math.inf:
            raise UsageError("loss_temperature must be positive", got=self.loss_temperature)
        if isinstance(self.signal_top_k, bool) or not isinstance(self.signal_top_k, int) or self.signal_top_k < 1:
            raise UsageError("signal_top_k must be a whole number of at least 1", got=self.signal_top_k)
        if not self.chunk_mb > 0:
            raise UsageError("chunk_mb must be positive", got=self.chunk_mb)
        if self.gate is None and self.method == "gated":
            self.gate = "G5"
        if isinstance(self.gate, Gate):
            self.gate = str(self.gate)
        gate = build_gate(self._section(), path="")
        if gate is not None and not isinstance(self.gate, str):
            self.gate = str(gate)  # text survives JSON, argparse and a model card
        objective = self.objective()
        self._check_needs(objective)
        self._check_sampler(objective)

    def objective(self) -> Objective:
        """Build the configured objective."""
        return build_objective(self._section(), path="")

    def _section(self) -> ObjectiveConfig:
        names = ("method", "gate", "params", "support", "support_k", "entropy", "stop_gradient", "shuffle")
        given = {name: getattr(self, name) for name in names}
        return parse_config(ObjectiveConfig, {**given, "params": {} if self.params is None else self.params})

    def _check_needs(self, objective: Objective) -> None:
        """Raise if the method needs something that TRL lacks."""
        srkl = "method='srkl' with params={'detach_mixture': True} for its part on them, or gatespace train"
        missing = {
            "state": ("TRL's checkpoints have no place for it", "gatespace train"),
            "source": ("TRL samples all responses from the student", srkl),
            "special": ("TRL counts the tokens of a step itself", "params={'mask_special': False}"),
        }
        for need in objective.needs & missing.keys():
            what, (why, instead) = f"the method {objective.name} needs {NEEDS[need]}", missing[need]
            raise UsageError(what, got=f"method={self.method!r}", why=why, instead=instead)

    def _check_sampler(self, objective: Objective) -> None:
        """Raise if the objective uses sampled tokens and the sampler changes their probabilities."""
        own: dict[str, tuple[Any, ...]] = {
            "temperature": (1,),
            "top_p": (1, None),
            "top_k": (0, -1, None),
            "min_p": (0, None),
            "repetition_penalty": (1, None),
            "do_sample": (True,),
            "num_beams": (1, None),
        }
        drawn = {name: getattr(self, name) for name in own if hasattr(self, name)} | dict(self.generation_kwargs or {})
        changed = {name: value for name, value in drawn.items() if name in own and value not in own[name]}
        if "sampled" in objective.needs and changed:
            raise UsageError(
                "this objective uses the sampled tokens, and they must be the student's own at temperature 1",
                got=", ".join(f"{name}={value}" for name, value in changed.items()),
                why="TRL keeps no log-probabilities of its sampler, so that there are no importance weights",
                instead="temperature=1, top_p=1, top_k=0 and no penalties; or support='full', or pg='exact' for eopd",
            )
