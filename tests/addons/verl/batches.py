"""Micro-batches as verl hands them to a loss, beside the same numbers in plain (B, T) order.

What a loss has no business to read is poisoned: the student's logits and the teacher's numbers at positions that
predict no response token are NaN, and the teacher's ids there are all 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig, FSDPActorConfig
from verl.workers.utils.padding import left_right_2_no_padding

from gatespace.addons.verl import GatedLossConfig

LENGTHS = ((3, 2), (5, 4), (2, 1), (4, 3))
"""(prompt, response) of each sample."""
V, K = 24, 12


def nested(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@dataclass
class Batch:
    """A micro-batch. `student` and `teacher` are (B, T, V), T the longest response; `mask` is (B, T)."""

    lengths: tuple[tuple[int, int], ...] = LENGTHS
    seed: int = 0
    dtype: torch.dtype = torch.float64
    holes: tuple[tuple[int, int], ...] = ()
    """(sample, place in its response) of tokens that do not count."""
    padded: bool = False
    """verl's older form: prompts, responses and masks as padded tensors."""
    temperature: float | list[float] = 1.0
    poison: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        rows, longest = len(self.lengths), max(response for _, response in self.lengths)
        self.teacher = torch.randn(rows, longest, V, generator=generator, dtype=torch.float64) * 2
        self.student = self.teacher + torch.randn(rows, longest, V, generator=generator, dtype=torch.float64)
        self.mask = torch.zeros(rows, longest, dtype=torch.bool)
        for row, (_, response) in enumerate(self.lengths):
            self.mask[row, :response] = True
        for row, place in self.holes:
            self.mask[row, place] = False
        self.ids = [torch.randint(2, V, (sum(both),), generator=generator) for both in self.lengths]

    @property
    def samples(self) -> int:
        return len(self.lengths)

    @property
    def positions(self) -> int:
        return sum(map(sum, self.lengths))

    def heat(self) -> torch.Tensor:
        return torch.as_tensor(self.temperature, dtype=torch.float64).reshape(-1).expand(self.samples)

    def logits(self) -> torch.Tensor:
        """(1, P, V), as verl's engine makes them: divided by the sampler's temperature. A leaf."""
        out = torch.full((self.positions, V), torch.nan if self.poison else 0.0, dtype=torch.float64)
        for row, place, position in self.places():
            if self.mask[row, place] or not self.poison:
                out[position] = self.student[row, place] / self.heat()[row]
        return out.to(self.dtype)[None].requires_grad_()

    def places(self) -> list[tuple[int, int, int]]:
        """(row, place in the response, position that predicts it), by counting."""
        found, start = [], 0
        for row, (prompt, response) in enumerate(self.lengths):
            found += [(row, place, start + prompt - 1 + place) for place in range(response)]
            start += prompt + response
        return found

    def unpacked(self, values: torch.Tensor) -> torch.Tensor:
        """(1, P, …) → (B, T, …), 0 where nothing counts."""
        out = values.new_zeros(*self.mask.shape, *values.shape[2:])
        for row, place, position in self.places():
            if self.mask[row, place]:
                out[row, place] = values[0, position]
        return out

    def data(self) -> TensorDict:
        """What verl's engine passes on."""
        top = self.teacher.log_softmax(-1).topk(K)
        ids = torch.zeros(self.positions, K, dtype=torch.int32)
        log_probs = torch.full((self.positions, K), torch.nan if self.poison else 0.0, dtype=torch.float64)
        for row, place, position in self.places():
            if self.mask[row, place]:
                ids[position] = top.indices[row, place].int()
                log_probs[position] = top.values[row, place]
        log_probs = log_probs.to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        sizes = [sum(both) for both in self.lengths]
        tokens = int(self.mask.sum())
        facts: dict[str, Any] = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": self.samples}
        heat = torch.tensor(self.temperature) if isinstance(self.temperature, list) else self.temperature
        if isinstance(heat, float):
            facts["temperature"] = heat
        tensors: dict[str, Any] = {} if isinstance(heat, float) else {"temperature": heat}
        parts = zip(self.ids, self.lengths, self.mask, strict=True)
        rows = [(ids[:prompt], ids[prompt:], mask[:response].long()) for ids, (prompt, response), mask in parts]
        if self.padded:
            data = self._padded(rows, ids.split(sizes), log_probs.split(sizes), tensors)
            tu.assign_non_tensor(data, **facts, **self.more)
            return left_right_2_no_padding(data)
        tensors |= {
            "prompts": nested([prompt for prompt, _, _ in rows]),
            "responses": nested([response for _, response, _ in rows]),
            "response_mask": nested([mask for _, _, mask in rows]),
            "loss_mask": nested([mask for _, _, mask in rows]),
            "input_ids": nested(self.ids),
            "position_ids": nested([torch.arange(size) for size in sizes]),
            "teacher_ids": nested(list(ids.split(sizes))),
            "teacher_logprobs": nested(list(log_probs.split(sizes))),
        }
        return tu.get_tensordict(tensors, facts | self.more)

    def _padded(self, rows: Any, ids: Any, log_probs: Any, tensors: dict[str, Any]) -> TensorDict:
        left, right = (max(both[side] for both in self.lengths) for side in (0, 1))

        def wide(part: torch.Tensor, prompt: int, response: int) -> torch.Tensor:
            rest = part.shape[1:]
            return torch.cat([part.new_zeros(left - prompt, *rest), part, part.new_zeros(right - response, *rest)])

        def stacked(parts: Any) -> torch.Tensor:
            return torch.stack([wide(part, *both) for part, both in zip(parts, self.lengths, strict=True)])

        sequences = stacked(self.ids)
        attention = stacked([torch.ones_like(one) for one in self.ids])
        mask = torch.zeros(self.samples, right, dtype=torch.long)
        for row, (_, _, part) in enumerate(rows):
            mask[row, : part.numel()] = part
        whole = {
            "prompts": sequences[:, :left],
            "responses": sequences[:, left:],
            "input_ids": sequences,
            "attention_mask": attention,
            "response_mask": mask,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "teacher_ids": stacked(ids),
            "teacher_logprobs": stacked(log_probs),
        }
        return TensorDict(whole | tensors, batch_size=self.samples)

    def arrays(self) -> dict[str, np.ndarray]:
        """Student, teacher and mask for the oracle."""
        return {"student": self.student.numpy(), "teacher": self.teacher.numpy(), "mask": self.mask.numpy()}


def settings(**fields: Any) -> DistillationConfig:
    """A distillation configuration with our loss."""
    return DistillationConfig(enabled=False, distillation_loss=GatedLossConfig(**{"topk": K, **fields}))


def actor(strategy: str = "fsdp2") -> FSDPActorConfig:
    return FSDPActorConfig(rollout_n=1, strategy=strategy, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False)
