"""Softmax attention of rows: explicit weights for short rows, kernels that save no weights for long ones.

Besides scale and mask it supports what layers need: a soft cap of the logits (Gemma 2), and a sliding window, which for
short rows is part of the mask. Nothing here knows about networks or packed passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

LONG = 1 << 17
"""Queries times keys of a row above which its attention weights are not saved; 340 tokens after a prefix of 60."""
_LEAST = 64
"""Queries that are worth a matmul of their own."""


class Rule(NamedTuple):
    """Attention rule of a layer."""

    scale: float
    softcap: float | None = None
    """Logits are softcap·tanh(logits / softcap)."""
    window: int | None = None
    """How many positions back a query sees, including its own."""


def is_long(length: int, keys: int) -> bool:
    """Whether a row has too many attention weights to save."""
    return length * keys > LONG


def mask_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows or 1, 1, S, K): 0 where a key is seen, -inf elsewhere."""
    return torch.zeros(1, dtype=dtype, device=seen.device).where(seen, -torch.inf)[:, None]


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """(B, Hq, S, D) from queries (B, Hq, S, D), keys and values (B, Hkv, K, D).

    The weights of long rows grow with the square of the length, and are not saved. Long rows are computed one by one,
    so that the bits of a row do not depend on how many others there are.

    Args:
        query: Of all new tokens.
        key: Of all tokens, the new ones last.
        value: Of the same tokens.
        mask: (B or 1, 1, S, K), including the rule's window; None: causal within the window.
        rule: The layer's rule.
    """
    length, keys = query.shape[2], key.shape[2]
    if mask is not None and not is_long(length, keys):
        result: Tensor = _Attention.apply(query, key, value, mask, rule.scale, rule.softcap)
        return result
    cut = mask is None and rule.window is not None and rule.window < keys
    kernel = _fused if rule.softcap is None and not cut else _in_chunks
    rows = []
    for row in range(len(query)):
        here = slice(row, row + 1)
        own = None if mask is None else mask[here if len(mask) > 1 else slice(1)]
        rows.append(kernel(query[here], key[here], value[here], own, rule))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """torch's fused kernel, for one row."""
    length, keys = query.shape[2], key.shape[2]
    if mask is None and keys > length:
        # The kernel's causal mask is square: keys before the first query get dummy queries.
        query = torch.cat([query.new_zeros(*query.shape[:2], keys - length, query.shape[3]), query], 2)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[:, :, -length:]


def _in_chunks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """One row in chunks of queries with explicit weights, recomputed in the backward pass."""
    outputs = [
        checkpoint(
            _Attention.apply,
            query[:, :, new],
            key[:, :, seen],
            value[:, :, seen],
            part,
            rule.scale,
            rule.softcap,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for new, seen, part in _chunks(query, key.shape[2], mask, rule.window)
    ]
    return torch.cat(outputs, 2)


def _chunks(query: Tensor, keys: int, mask: Tensor | None, window: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Chunks of a row: its queries, the keys that they may see, and their mask."""
    length = query.shape[2]
    if mask is not None:
        size = max(1, LONG // keys)
        for start in range(0, length, size):
            yield slice(start, start + size), slice(0, keys), mask[:, :, start : start + size]
        return
    window = keys if window is None else min(window, keys)
    # With more queries than keys in the window, most products would be with keys that are masked out.
    size = min(length, max(window, _LEAST), max(1, LONG // window))
    reach = min(keys, window + size - 1)
    # The mask of the last queries over the last keys; shifted, it is that of all others.
    to = torch.arange(reach, device=query.device)
    at = to[-size:, None]
    band = mask_of(((to <= at) & (to > at - window))[None], query.dtype)
    for start in range(0, length, size):
        stop = min(start + size, length)
        last = keys - length + stop
        first = max(0, last - reach)
        yield slice(start, stop), slice(first, last), band[:, :, start - stop :, first - last :]


def written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax weights (B, S, K), output (B, S, D), tanh(logits / softcap); `mask` broadcasts to (B, S, K)."""
    if softcap is None:
        capped, logits = None, torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale)
    else:
        capped = torch.baddbmm(mask, query, key.transpose(1, 2), beta=0, alpha=scale / softcap).tanh_()
        logits = torch.add(mask, capped, alpha=softcap)
    weights = torch.softmax(logits, -1)
    return weights, torch.bmm(weights, value), capped


class _Attention(torch.autograd.Function):
    """Softmax attention with grouped queries and explicit weights.

    At these sizes on a CPU, most of an update would go into the backward pass of torch's fused kernel, and plain
    autograd saves float32 copies of all weights. Here each pass over the weights is one call: scale and mask are part
    of the matmul, and the softmax computes in float32 internally, whatever the precision of its input and output.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        rows, heads, length, width = query.shape
        shared = key.shape[1]
        ctx.shapes = query.shape, key.shape
        query = query.reshape(rows * shared, heads // shared * length, width)
        key, value = key.reshape(rows * shared, -1, width), value.reshape(rows * shared, -1, value.shape[-1])
        # (rows or 1, 1, S, K) → (rows·Hkv or 1, Hq/Hkv·S, K), as the products are laid out
        mask = mask.expand(-1, heads, -1, -1) if len(mask) > 1 else mask.expand(-1, heads // shared, -1, -1)
        mask = mask.reshape(-1, query.shape[1], key.shape[1])
        weights, output, capped = written_out(query, key, value, mask, scale, softcap)
        ctx.save_for_backward(query, key, value, weights, capped)
        ctx.scale = scale
        return output.view(rows, heads, length, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights, capped = ctx.saved_tensors
        query_shape, key_shape = ctx.shapes
        grad = grad.reshape(*query.shape[:2], -1)
        to_value = torch.bmm(weights.transpose(1, 2), grad)
        to_weights = torch.bmm(grad, value.transpose(1, 2))
        to_scores = torch.ops.aten._softmax_backward_data(to_weights, weights, -1, weights.dtype)
        if capped is not None:
            to_scores = torch.ops.aten.tanh_backward(to_scores, capped)
        to_query = torch.baddbmm(query, to_scores, key, beta=0, alpha=ctx.scale)
        to_key = torch.baddbmm(key, to_scores.transpose(1, 2), query, beta=0, alpha=ctx.scale)
        return to_query.view(query_shape), to_key.view(key_shape), to_value.view(*key_shape[:3], -1), None, None, None
