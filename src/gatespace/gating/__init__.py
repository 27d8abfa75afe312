"""Gates, signals, divergences and objectives, as pure functions on tensors.

Names are imported lazily, so that `Gate` and its users do not need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.gating import objectives, signals
    from gatespace.gating.coefficients import Gate, NotApplicable, named_points
    from gatespace.gating.fused import fused_distillation_loss, fused_gated_kl
    from gatespace.gating.inputs import LossInputs
    from gatespace.gating.loss import LossOutput, distillation_loss, forward_kl, gated_kl, reverse_kl
    from gatespace.gating.objectives import Gated, Objective, Static, objective
    from gatespace.gating.projection import Head
    from gatespace.gating.published import ABKD, AKL, EOPD, JSD, OBJECTIVES, SKL, SRKL, SampledReverseKL, ToDi
    from gatespace.gating.published_opd import IWOPD, TIP, VOPD, DistiLLM2, RevisitingOPD, StudentTopK
    from gatespace.gating.taid import TAID
    from gatespace.gating.tokens import TeacherTopK, Tokens

_HOME = {
    "coefficients": ("Gate", "NotApplicable", "named_points"),
    "fused": ("fused_distillation_loss", "fused_gated_kl"),
    "inputs": ("LossInputs",),
    "loss": ("LossOutput", "distillation_loss", "forward_kl", "gated_kl", "reverse_kl"),
    "objectives": ("Gated", "Objective", "Static", "objective"),
    "projection": ("Head",),
    "published": ("ABKD", "AKL", "EOPD", "JSD", "OBJECTIVES", "SKL", "SRKL", "SampledReverseKL", "ToDi"),
    "published_opd": ("IWOPD", "TIP", "VOPD", "DistiLLM2", "RevisitingOPD", "StudentTopK"),
    "taid": ("TAID",),
    "tokens": ("TeacherTopK", "Tokens"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "ABKD",
    "AKL",
    "EOPD",
    "IWOPD",
    "JSD",
    "OBJECTIVES",
    "SKL",
    "SRKL",
    "TAID",
    "TIP",
    "VOPD",
    "DistiLLM2",
    "Gate",
    "Gated",
    "Head",
    "LossInputs",
    "LossOutput",
    "NotApplicable",
    "Objective",
    "RevisitingOPD",
    "SampledReverseKL",
    "Static",
    "StudentTopK",
    "TeacherTopK",
    "ToDi",
    "Tokens",
    "distillation_loss",
    "forward_kl",
    "fused_distillation_loss",
    "fused_gated_kl",
    "gated_kl",
    "named_points",
    "objective",
    "objectives",
    "reverse_kl",
    "signals",
]


def __getattr__(name: str) -> object:
    if name in ("objectives", "signals"):
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
