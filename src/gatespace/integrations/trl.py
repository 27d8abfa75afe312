"""`gatespace.addons.trl` under its public name."""

from gatespace.addons.trl import GatedDistillationConfig, GatedDistillationTrainer, check_seam

__all__ = ["GatedDistillationConfig", "GatedDistillationTrainer", "check_seam"]
