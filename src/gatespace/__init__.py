"""gatespace: on-policy distillation with per-token gated KL.

λ_t = σ(a·h_t + b·u(x) + c + d·gap_t)        L_t = λ_t·KL(student‖teacher) + (1-λ_t)·KL(teacher‖student)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Before torch is imported, which reads them once: products in bf16 are compiled for every shape and kept, 1,024 of them
# in each of two caches. Prompts have many shapes, so a process grew by 300 MB over a few tiny runs. Same numbers.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "64")

if TYPE_CHECKING:
    from gatespace.gating import (
        Gate,
        Head,
        LossInputs,
        LossOutput,
        NotApplicable,
        TeacherTopK,
        distillation_loss,
        forward_kl,
        fused_distillation_loss,
        fused_gated_kl,
        gated_kl,
        objective,
        objectives,
        reverse_kl,
        signals,
    )

__version__ = "0.2.0"

__all__ = [
    "Gate",
    "Head",
    "LossInputs",
    "LossOutput",
    "NotApplicable",
    "TeacherTopK",
    "__version__",
    "distillation_loss",
    "forward_kl",
    "fused_distillation_loss",
    "fused_gated_kl",
    "gated_kl",
    "objective",
    "objectives",
    "reverse_kl",
    "signals",
]


def __getattr__(name: str) -> object:
    # lazy, so that `import gatespace` and code that only needs a Gate do not load torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gatespace import gating

    value = getattr(gating, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
