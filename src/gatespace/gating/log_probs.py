"""Differentiable log-probabilities of single tokens from hidden states and a head, without (N, V) logits in memory.

Forward and backward loop over vocabulary slices with all tokens inside: each head row is read once per direction and
its gradient written once, so a half-precision head needs no float32 copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gatespace.gating.projection import Head, Projection, logits_buffer
from gatespace.gating.vocabulary import inside, tiles

TILE = 1 << 20
"""Elements of a slice of logits; about four slices are in memory at once."""


def token_log_probs(hidden: Tensor, head: Head, rows: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """(M,) log-probability of the token `ids[m]` after `hidden[rows[m]]`, float32 (float64 for a float64 network).

    Args:
        hidden: (N, H).
        head: Rows from `vocab_size` on are padding.
        rows: (M,) index of the hidden state that predicts each token; may repeat.
        ids: (M,) below `vocab_size`.
        vocab_size: Size of the softmax.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    found: Tensor = _TokenLogProbs.apply(hidden, head.weight, head.bias, head, rows, ids, vocab_size)
    return found


class _TokenLogProbs(torch.autograd.Function):
    """Takes the head's weight and bias as separate arguments, so that autograd returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, rows: Tensor, ids: Tensor, size: int
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            projection = Projection(hidden, head, size)
            found, parts = torch.zeros_like(ids, dtype=projection.dtype), []
            for start, logits in _slices(projection, size):
                parts.append(logits.logsumexp(-1))
                columns, here = inside(ids, start, start + logits.shape[1])
                found = torch.where(here, logits[rows, columns], found)
            normaliser = torch.stack(parts).logsumexp(0)
        ctx.head, ctx.size = head, size
        ctx.save_for_backward(hidden, weight, bias, rows, ids, normaliser)
        return found - normaliser[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, rows, ids, normaliser = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            projection = Projection(hidden, ctx.head, ctx.size)
            by_hidden = torch.zeros_like(hidden, dtype=projection.dtype) if need_hidden else None
            by_weight = torch.zeros_like(weight) if need_weight else None
            by_bias = torch.zeros_like(bias) if need_bias else None
            total = torch.zeros_like(normaliser).index_put((rows,), upstream, accumulate=True)
            for start, logits in _slices(projection, ctx.size):
                stop = start + logits.shape[1]
                # ∂ log p(id) / ∂ logits = 1[id] - p
                grad = (logits - normaliser[:, None]).exp_().mul_(-total[:, None])
                columns, here = inside(ids, start, stop)
                grad.index_put_((rows, columns), torch.where(here, upstream, 0.0), accumulate=True)
                grad = projection.pull_back(grad, logits)
                if by_bias is not None:
                    by_bias[start:stop] = grad.sum(0)
                grad = grad.to(hidden.dtype)
                if by_hidden is not None:
                    by_hidden += grad @ projection.rows(start, stop)
                if by_weight is not None:
                    by_weight[start:stop] = grad.t() @ projection.hidden
        return None if by_hidden is None else by_hidden.to(hidden.dtype), by_weight, by_bias, None, None, None, None


def _slices(projection: Projection, size: int) -> Iterator[tuple[int, Tensor]]:
    """Start and logits (N, width) of each slice of the vocabulary."""
    count = projection.hidden.shape[0]
    for start, stop in tiles(size, max(64, TILE // max(count, 1) // 64 * 64)):
        out = logits_buffer(projection.hidden, count, stop - start, projection.dtype)
        yield start, projection.into(out, slice(0, count), start, stop)
