"""Run by test_engine.py in two processes: slices of one packed batch, and verl's own gathering of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import ulysses

from gatespace.errors import UsageError
from tests.addons.verl.batches import Batch, actor, settings


def outputs(batch: Batch, logits: torch.Tensor, gate: str) -> dict[str, torch.Tensor]:
    config = settings(gate=gate)
    found: dict[str, torch.Tensor] = distillation_ppo_loss(
        config=actor(), distillation_config=config, data=batch.data(), student_logits=logits
    )
    return found


def main() -> None:
    dist.init_process_group("gloo")
    for holes in ((), ((0, 0), (1, 1))):
        # an odd number of positions, so that the last slice ends in padding; poisoned where nothing is to be read
        batch = Batch(lengths=((3, 2), (5, 4), (2, 1), (4, 2)), holes=holes)
        assert batch.positions % 2 == 1
        whole = batch.logits()
        expected = outputs(batch, whole, "4,4,-1.5,2,log_ratio=1")
        weights = torch.randn(batch.positions, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (expected["distillation_losses"][0] * weights).sum().backward()

        ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
        mine = ulysses.slice_input_tensor(whole.detach(), dim=1).requires_grad_()
        found = outputs(batch, mine, "4,4,-1.5,2,log_ratio=1")
        for name, values in found.items():
            joined = ulysses.gather_outputs_and_unpad(values[0], gather_dim=0, unpad_dim=0, padding_size=1)
            torch.testing.assert_close(joined, expected[name][0], rtol=1e-12, atol=1e-14, msg=name)
            if name == "distillation_losses":
                (joined * weights).sum().backward()
        gradient = ulysses.slice_input_tensor(whole.grad, dim=1)
        # verl's gathering multiplies by the ranks what its data-parallel mean divides by again
        torch.testing.assert_close(mine.grad, gradient * dist.get_world_size(), rtol=1e-12, atol=1e-14)
        with pytest.raises(UsageError, match="'position' cannot be computed under sequence parallelism"):
            outputs(batch, mine, "4,4,-1.5,2,position=1")
        ulysses.set_ulysses_sequence_parallel_group(None)
    sys.stdout.write("rank equals\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
