"""LM heads, applied to slices of tokens and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gatespace.errors import UsageError
from gatespace.gating.vocabulary import LOWEST


@dataclass(frozen=True)
class Head:
    """An LM head: logits = softcap·tanh(scale·(hidden·weightᵀ + bias) / softcap).

    Args:
        weight: (V, H).
        bias: (V,) or None.
        scale: Logit scale (Cohere and Granite models).
        softcap: Logit soft cap (Gemma 2), or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, head: Head | nn.Linear | Tensor) -> Head:
        """Build a head from a (V, H) tensor or a Linear layer."""
        if isinstance(head, Head):
            return head
        if isinstance(head, Tensor):
            return cls(head)
        if isinstance(getattr(head, "weight", None), Tensor):
            return cls(head.weight, getattr(head, "bias", None))
        raise UsageError("a head is a (V, H) tensor, a Linear layer or a Head", got=type(head).__name__)

    def to(self, device: torch.device) -> Head:
        """Return the head on that device; no copy if it is already there."""
        return replace(self, weight=self.weight.to(device), bias=None if self.bias is None else self.bias.to(device))

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, H) → (…, V), all at once in float32; differentiable."""
        bias = None if self.bias is None else self.bias.float()
        logits = linear(hidden.float(), self.weight.float(), bias) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def forbids(self, vocab_size: int) -> Tensor:
        """(V,) -inf at ids that the head can never produce, 0 elsewhere."""
        if self.bias is None or self.softcap is not None:
            return self.weight.new_zeros(vocab_size)
        return torch.where(self.bias.detach()[:vocab_size] == -torch.inf, -torch.inf, 0.0)


class Projection:
    """Logits of a head, in float32 (or float64) whatever the precision of hidden states and weights."""

    def __init__(self, hidden: Tensor, head: Head, vocab_size: int) -> None:
        self.hidden = hidden.detach()
        self.head = head
        self.weight = head.weight.detach()[:vocab_size]
        self.bias = None if head.bias is None else head.bias.detach()[:vocab_size].to(self.dtype).clamp(min=LOWEST)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def rows(self, start: int, stop: int) -> Tensor:
        """Head rows, cast to the dtype of the hidden states."""
        return self.weight[start:stop].to(self.hidden.dtype)

    def into(self, out: Tensor, tokens: slice, start: int, stop: int) -> Tensor:
        """Write the logits of a slice of tokens and vocabulary into `out`, a tensor from `logits_buffer`."""
        hidden, rows = self.hidden[tokens], self.rows(start, stop)
        if hidden.dtype == out.dtype:
            torch.mm(rows, hidden.t(), out=out.t())
        else:
            _exact_product(rows, hidden.t(), out.t())
        if self.bias is not None:
            out += self.bias[start:stop]
        if self.head.scale != 1.0:
            out *= self.head.scale
        if self.head.softcap is not None:
            out.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        return out

    def pull_back(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Backpropagate the gradient at the logits to hidden @ weightᵀ + bias, in place."""
        if self.head.softcap is not None:
            grad *= 1 - (logits / self.head.softcap) ** 2
        if self.head.scale != 1.0:
            grad *= self.head.scale
        return grad


def logits_buffer(like: Tensor, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Allocate (tokens, width) logits in vocabulary-major layout.

    A vocabulary slice is then contiguous, and the matmul with head rows has its long side where BLAS is fast: a sixth
    to a third faster at 50 to 100 tokens than token-major.
    """
    return torch.empty(width, tokens, dtype=dtype, device=like.device).t()


_FLOAT32_PRODUCT = "dtype" in torch.ops.aten.mm.overloads()
"""Whether this torch has a half-precision matmul with float32 output (on CUDA)."""


def _exact_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right of half-precision factors, in float32.

    A half-precision matmul accumulates in float32 but rounds its output to eight bits, an error of a tenth of a nat at
    common logits. Where float32 output is not available, the same product minus its rounded result is computed: that
    is accumulated in float32 too, so its rounded value is the missing low part.
    """
    if left.is_cuda and _FLOAT32_PRODUCT:
        out.copy_(torch.mm(left, right, out_dtype=torch.float32))
        return
    high = torch.mm(left, right)
    low = torch.addmm(high, left, right, beta=-1)
    out.copy_(high).add_(low)  # not high + low, which would be rounded to half precision again
