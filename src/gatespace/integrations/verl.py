"""`gatespace.addons.verl` under its public name. Importing it registers the loss `gated_kl_topk` with verl."""

from gatespace.addons.verl import LOSS_MODE, TESTED, GatedLossConfig, install

__all__ = ["LOSS_MODE", "TESTED", "GatedLossConfig", "install"]
