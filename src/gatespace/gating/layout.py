"""Which positions of a (B, T) batch are response tokens, and how they group into samples.

Everything below works on the N masked tokens in reading order; only this module knows about (B, T).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gatespace.errors import UsageError


@dataclass(frozen=True)
class Layout:
    """The N tokens of a batch that count."""

    shape: torch.Size
    """(B, T), or the leading shape of a per-token call."""
    index: Tensor
    """(N,) flat position of each token."""
    position: Tensor
    """(N,) index of the token within its response, from 0."""
    length: Tensor
    """(N,) length of its response."""
    first: Tensor
    """(N,) which of the N tokens is the first of its response."""

    @classmethod
    def of(
        cls, shape: torch.Size, device: torch.device, mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Layout:
        """The layout of a batch of `shape` (B, T); without a mask every position counts.

        Args:
            mask: (B, T) of 0 and 1.
            segment_ids: (B, T); where it changes along a row, a new sample begins (packed sequences).
        """
        if len(shape) != 2:
            raise UsageError("a batch has two leading dimensions (B, T)", got=tuple(shape))
        width = shape[1]
        if mask is None:
            index = torch.arange(shape.numel(), device=device)
        else:
            index = _as_bool(mask, shape).to(device).reshape(-1).nonzero().squeeze(-1)
        n = index.numel()
        row = torch.div(index, max(width, 1), rounding_mode="floor")
        begins = torch.ones(n, dtype=torch.bool, device=device)
        if n:
            begins[1:] = row[1:] != row[:-1]
        if segment_ids is not None:
            if segment_ids.shape != shape:
                raise UsageError(
                    "segment_ids must have the shape (B, T) of the batch",
                    got=f"{tuple(segment_ids.shape)} for a batch of {tuple(shape)}",
                )
            segment = segment_ids.to(device).reshape(-1)[index]
            if n:
                begins[1:] |= segment[1:] != segment[:-1]
        sample = begins.cumsum(0) - 1
        starts = begins.nonzero().squeeze(-1)
        first = starts[sample]
        counts = torch.bincount(sample, minlength=starts.numel())
        return cls(shape, index, torch.arange(n, device=device) - first, counts[sample], first)

    @property
    def count(self) -> int:
        """N."""
        return int(self.index.numel())

    def part(self, span: slice) -> Layout:
        """Some of the tokens; `first` still counts over all of them."""
        return Layout(self.shape, self.index[span], self.position[span], self.length[span], self.first[span])

    def select(self, values: Tensor) -> Tensor:
        """(B, T, …) → (N, …); differentiable. Copies nothing where every position counts."""
        flat = values.reshape(-1, *values.shape[len(self.shape) :])
        return flat if self.count == flat.shape[0] else flat.index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """(N,) → (B, T), 0 outside the mask."""
        out = values.new_zeros(self.shape.numel())
        return out.index_copy(0, self.index, values).reshape(self.shape)

    def place(self, token: int) -> str:
        """Where in the batch a token stands, for error messages."""
        flat, where = int(self.index[token]), []
        for size in reversed(self.shape):
            where.append(flat % size)
            flat //= size
        return "[" + ", ".join(map(str, reversed(where))) + "]"


def _as_bool(mask: Tensor, shape: torch.Size) -> Tensor:
    if mask.shape != shape:
        raise UsageError(
            "mask must have the shape (B, T) of the batch", got=f"{tuple(mask.shape)} for a batch of {tuple(shape)}"
        )
    if mask.dtype == torch.bool:
        return mask
    on = mask != 0
    if not bool((mask == on).all()):
        raise UsageError(
            "mask must hold only 0 and 1",
            why="it says which tokens count; it is not a weight",
            instead="put per-token weights into an objective's weight",
        )
    return on
