"""The gated loss inside verl's trainer, as the distillation loss `gated_kl_topk`. Importing this registers it.

verl finds it through the configuration alone, in every process that loads it:

    distillation:
      distillation_loss:
        _target_: gatespace.integrations.verl.GatedLossConfig
        loss_mode: gated_kl_topk
        gate: G5

or earlier, by `VERL_USE_EXTERNAL_MODULES=gatespace.integrations.verl` in the environment. Needs the extra `verl`.
"""

from __future__ import annotations

from gatespace.addons.verl.plugin import install
from gatespace.addons.verl.seam import TESTED
from gatespace.addons.verl.settings import LOSS_MODE, GatedLossConfig

__all__ = ["LOSS_MODE", "TESTED", "GatedLossConfig", "install"]

install()
