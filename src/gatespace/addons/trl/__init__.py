"""The gated objective inside TRL's `DistillationTrainer` (extra `trl`).

    from gatespace.integrations.trl import GatedDistillationConfig, GatedDistillationTrainer

    trainer = GatedDistillationTrainer(
        model="Qwen/Qwen3-0.6B",
        teacher_model="Qwen/Qwen3-4B",
        args=GatedDistillationConfig(output_dir="runs/gated", gate="G5"),
        train_dataset=dataset,
    )
    trainer.train()

Only the loss of a micro-batch is replaced: TRL generates, accumulates, distributes, saves and logs. The replaced method
is private to TRL, so the trainer checks it before it starts, and raises if it is not the one it was written for.
"""

from __future__ import annotations

from gatespace.errors import missing_extra

try:
    import trl as _trl  # type: ignore[import-not-found]  # noqa: F401
except ImportError as error:
    raise missing_extra("gatespace.integrations.trl", module="trl", extra="trl") from error

from gatespace.addons.trl.seam import check_seam
from gatespace.addons.trl.settings import GatedDistillationConfig
from gatespace.addons.trl.trainer import GatedDistillationTrainer

__all__ = ["GatedDistillationConfig", "GatedDistillationTrainer", "check_seam"]
