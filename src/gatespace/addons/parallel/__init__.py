"""One run in several processes: DDP and FSDP2 over torch.distributed, and the launcher behind `--processes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.config import TeachConfig, TrainConfig
    from gatespace.training.processes import Processes


def join(config: TrainConfig | TeachConfig) -> Processes:
    """Join the process group that a launcher has started."""
    from gatespace.addons.parallel.processes import join

    return join(config)
