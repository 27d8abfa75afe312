"""Reductions of (N, V) logits in vocabulary slices, so that no second tensor of that size is made."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.divergences import not_negative
from gatespace.gating.inputs import Batch

LOWEST = -1e30
"""Internal stand-in for a logit of -inf: its probability is exactly 0 and nothing becomes NaN."""


def entropy_of(log_probs: Tensor) -> Tensor:
    """Entropy of K renormalised entries, divided by log K.

    An entry of probability 0 adds 0; K = 1 gives 0.
    """
    k = log_probs.shape[-1]
    if k == 1:
        return log_probs.new_zeros(log_probs.shape[:-1])
    normalised = log_probs.clamp(min=LOWEST).log_softmax(-1)
    value = -(normalised.exp() * normalised).sum(-1) / math.log(k)
    # straight-through clamp: rounding may exceed the bounds by an ulp, where the gradient must not vanish
    return not_negative(value) - (value - 1).clamp(min=0).detach()


_BLOCK = 64


def _block_maxima(logits: Tensor) -> Tensor:
    """(N, ⌈V/64⌉) largest logit of each block of 64 ids."""
    whole = logits.shape[-1] // _BLOCK * _BLOCK
    maxima: Tensor
    if logits.stride(0) == 1:  # vocabulary-major: reduce along the memory layout (otherwise 40 times slower)
        maxima = logits[:, :whole].t().unflatten(0, (-1, _BLOCK)).amax(1).t()
    else:
        maxima = logits[:, :whole].unflatten(-1, (-1, _BLOCK)).amax(-1)
    if whole < logits.shape[-1]:
        maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], -1)
    return maxima.contiguous()


def _block_members(logits: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and logits of the entries of `blocks` (N, M), both (N, 64·M); beyond the vocabulary the logit is -inf."""
    ids = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=blocks.device)).flatten(1)
    beyond = ids >= logits.shape[-1]
    ids = ids.clamp(max=logits.shape[-1] - 1)
    return ids, logits.gather(-1, ids).masked_fill(beyond, -torch.inf)


def top_entries(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids (N, k) of the largest logits, largest first.

    The k largest entries lie in the k blocks with the largest maxima, so after one pass for the maxima only 64·k
    entries are compared. (A plain topk is slow where the vocabulary dimension is not contiguous.)
    """
    if logits.shape[-1] <= 2 * _BLOCK * k:
        values, ids = logits.topk(k, dim=-1)
        return values, ids
    blocks = _block_maxima(logits).topk(k, dim=-1).indices
    ids, members = _block_members(logits, blocks)
    values, places = members.topk(k, dim=-1)
    return values, ids.gather(-1, places)


def top_entry(logits: Tensor) -> Tensor:
    """(N,) id of the largest logit; ties: the lowest."""
    if logits.shape[-1] <= 2 * _BLOCK:
        return logits.argmax(-1)
    ids, members = _block_members(logits, _block_maxima(logits).argmax(-1, keepdim=True))
    return ids.gather(-1, members.argmax(-1, keepdim=True)).squeeze(-1)


def prefix_sums(values: Tensor) -> Tensor:
    """Cumulative sums over the last dimension.

    On GPUs with deterministic algorithms enabled they are built from additions: torch's cumsum is nondeterministic.
    """
    if values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-1)
    step = 1
    while step < values.shape[-1]:
        values = torch.cat([values[..., :step], values[..., step:] + values[..., :-step]], -1)
        step *= 2
    return values


def among(ids: Tensor, others: Tensor) -> Tensor:
    """(..., K) which of `ids` (..., K) are among `others` (..., M)."""
    return (ids[..., :, None] == others[..., None, :]).any(-1)


def top_k_overlap(student_ids: Tensor, teacher_ids: Tensor) -> Tensor:
    """(...) share of the student's top-K ids (..., K) that are in the teacher's top-K, in [0, 1].

    Examples:
        >>> top_k_overlap(torch.tensor([[5, 2, 7, 0]]), torch.tensor([[2, 9, 5, 1]]))
        tensor([0.5000])
    """
    return among(student_ids, teacher_ids).to(torch.get_default_dtype()).mean(-1)


def computable(logits: Tensor) -> Tensor:
    """Upcast half precision before any softmax: bfloat16 log_softmax is off by a tenth of a nat."""
    return logits if logits.dtype == torch.float64 else logits.float()


def check_k(k: int, vocab_size: int, name: str = "K") -> None:
    """Raise unless K is between 1 and V."""
    if not 1 <= k <= vocab_size:
        raise UsageError(f"{name} must lie between 1 and the vocabulary size", got=f"{name}={k}, V={vocab_size}")


def possible(logits: Tensor) -> Tensor:
    """(N,) which rows are valid. The maximum reveals NaN, +inf and rows of only -inf."""
    return logits.amax(-1).isfinite()


def check_rows(side: str, logits: Tensor, batch: Batch) -> None:
    """Raise, with the position, on NaN, +inf and rows of only -inf; otherwise -inf is a forbidden id."""
    fine = possible(logits)
    if bool(fine.all()):
        return
    token = int((~fine).nonzero()[0])
    row = logits[token]
    bad = (row.isnan() | (row == torch.inf)).nonzero()
    if bad.numel() == 0:
        raise UsageError(f"the {side} rules out every token at {batch.place(token)}", got="-inf for all ids")
    entry = int(bad[0])
    place = batch.place(token)[:-1] + f", {entry}]"
    raise UsageError(
        f"the {side} has a logit that is not finite at {place}",
        got=str(row[entry].item()),
        why="positions are [b, t, v]; only masked positions are checked",
    )


def tiles(size: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield slices of [0, size) of the given width."""
    for start in range(0, size, width):
        yield start, min(start + width, size)


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / T; no copy at T = 1."""
    return logits if temperature == 1.0 else logits / temperature


def tiled_logsumexp(logits: Tensor, temperature: float, width: int, without: Tensor | None = None) -> Tensor:
    """(N,) logsumexp of (N, V) logits at a temperature, slice by slice; ids in `without` (N, K) are left out."""
    parts = []
    for start, stop in tiles(logits.shape[-1], width):
        part = scaled(logits[:, start:stop], temperature)
        if without is not None:
            part = lowered(part.clone(), without, LOWEST, start)
        # not Tensor.logsumexp, which checks for infinite maxima in two more passes; there are none here
        most = part.amax(-1)
        parts.append((part - most[:, None]).exp_().sum(-1).log_().add_(most))
    return torch.stack(parts, -1).logsumexp(-1) if len(parts) > 1 else parts[0]


def lowered(values: Tensor, ids: Tensor, least: float, start: int) -> Tensor:
    """Lower `values` (N, width) of the slice from `start` to `least` at `ids` (N, K), in place."""
    columns, here = inside(ids, start, start + values.shape[-1])
    bound = torch.where(here, least, torch.inf).to(values.dtype)
    return values.scatter_reduce_(-1, columns, bound, "amin")


def inside(ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Columns (N, K) of `ids` within the slice [start, stop), clamped to it, and which of them lie in it.

    No shape depends on the ids, so nothing waits for the device.
    """
    return (ids - start).clamp(0, stop - start - 1), (ids >= start) & (ids < stop)
