"""Positions and samples of the response tokens in verl's packed batch.

verl concatenates the sequences of a micro-batch, prompt and response, without padding: P positions in all. The logits
and the teacher's numbers at position p predict the token at p + 1. Under Ulysses sequence parallelism every rank has
one slice of the student's P positions, and all of the teacher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gatespace.errors import RunError


@dataclass(frozen=True)
class Packed:
    """The unmasked response tokens of a micro-batch, in order."""

    positions: int
    """P, of the whole micro-batch."""
    index: Tensor
    """(N,) the position whose logits predict each token."""
    sample: Tensor
    """(N,) its sample, from 0."""
    first: Tensor
    """(N,) index of the first token of its sample."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Packed:
        """Build from verl's loss inputs: prompts, responses and response_mask, nested or padded.

        Masked response tokens (e.g. tool output) are left out; the first token of a sample is its first unmasked one.
        """
        prompts, responses, mask = data["prompts"], data["responses"], data["response_mask"]
        if prompts.is_nested:
            prompt_lengths = prompts.offsets().diff()
            lengths = responses.offsets().diff()
        else:
            attention = data["attention_mask"]
            prompt_lengths = attention[:, : prompts.shape[1]].sum(1)
            lengths = attention[:, prompts.shape[1] :].sum(1)
        if bool((prompt_lengths < 1).any()):
            raise RunError(
                "a sample has no prompt",
                why="the first token of a response is predicted at the last position of its prompt",
            )
        counts = _kept(mask, lengths)
        device = lengths.device
        ends = (prompt_lengths + lengths).cumsum(0)
        sample = torch.repeat_interleave(torch.arange(lengths.numel(), device=device), lengths)
        place = torch.arange(sample.numel(), device=device) - (lengths.cumsum(0) - lengths)[sample]
        index = (ends - lengths - 1)[sample] + place
        index, sample = index[counts], sample[counts]
        begins = torch.ones_like(sample, dtype=torch.bool)
        begins[1:] = sample[1:] != sample[:-1]
        first = begins.nonzero().squeeze(-1)[begins.cumsum(0) - 1]
        return cls(int(ends[-1]) if ends.numel() else 0, index, sample, first)


def _kept(mask: Tensor, lengths: Tensor) -> Tensor:
    """(Σ lengths,) whether a response token is unmasked."""
    if mask.is_nested:
        flat = mask.values()
    else:
        places = torch.arange(mask.shape[1], device=mask.device)
        flat = mask[places < lengths.to(mask.device)[:, None]]
    if flat.shape[0] != int(lengths.sum()):
        raise RunError(
            "verl's response_mask does not cover its responses",
            got=f"{flat.shape[0]} entries for {int(lengths.sum())} response tokens",
        )
    return flat.bool().to(lengths.device)
