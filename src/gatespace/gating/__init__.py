"""Gates, signals, divergences and objectives, as pure functions on tensors.

Names are imported lazily, so that `Gate` and its users do not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gatespace.lazy import lazy

if TYPE_CHECKING:
    from gatespace.gating import objectives as objectives
    from gatespace.gating import signals as signals
    from gatespace.gating.coefficients import *
    from gatespace.gating.fused import *
    from gatespace.gating.inputs import *
    from gatespace.gating.loss import *
    from gatespace.gating.methods import *
    from gatespace.gating.objectives import *
    from gatespace.gating.projection import *
    from gatespace.gating.tokens import *

_HOMES = {
    "coefficients": "Gate NotApplicable named_points",
    "fused": "fused_distillation_loss fused_gated_kl",
    "inputs": "LossInputs",
    "loss": "LossOutput distillation_loss forward_kl gated_kl reference_gated_kl reverse_kl",
    "methods": (
        "ABKD AKL EOPD IWOPD JSD SKL SRKL TAID TIP VOPD DistiLLM2 RevisitingOPD SampledReverseKL StudentTopK ToDi"
    ),
    "objectives": "OBJECTIVES Gated Objective Static objective objectives",
    "projection": "Head",
    "signals": "signals",
    "tokens": "TeacherTopK Tokens",
}
__getattr__, __dir__, __all__ = lazy(__name__, _HOMES)
