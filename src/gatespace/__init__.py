"""gatespace: on-policy distillation with per-token gated KL.

λ_t = σ(a·h_t + b·u(x) + c + d·gap_t)        L_t = λ_t·KL(student‖teacher) + (1-λ_t)·KL(teacher‖student)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gatespace.lazy import lazy

# Before torch is imported, which reads them once: products in bf16 are compiled for every shape and kept, 1,024 of them
# in each of two caches. Prompts have many shapes, so a process grew by 300 MB over a few tiny runs. Same numbers.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "64")

if TYPE_CHECKING:
    from gatespace.gating import objectives as objectives
    from gatespace.gating import signals as signals
    from gatespace.gating.coefficients import *
    from gatespace.gating.fused import *
    from gatespace.gating.inputs import *
    from gatespace.gating.loss import *
    from gatespace.gating.objectives import *
    from gatespace.gating.projection import *
    from gatespace.gating.tokens import *

__version__ = "0.2.0"

_NAMES = (
    "Gate Head LossInputs LossOutput NotApplicable TeacherTopK distillation_loss forward_kl fused_distillation_loss "
    "fused_gated_kl gated_kl objective objectives reverse_kl signals"
)
# lazy, so that `import gatespace` and code that only needs a Gate do not load torch
__getattr__, __dir__, __all__ = lazy(__name__, {"gating": _NAMES})
__all__ += ["__version__"]
