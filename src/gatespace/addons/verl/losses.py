"""Per-token loss from rows of logits and the teacher's top-K, with its gradient.

verl aggregates tokens itself, so it needs L_t for each. A token's loss depends only on its own row of logits, so the
gradient of the sum, computed chunk by chunk with the values, holds each token's gradient in its row. The backward pass
only scales the rows; until then just that one tensor is kept, in the precision of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gatespace.gating.inputs import LossInputs
from gatespace.gating.loss import LossOutput, distillation_loss
from gatespace.gating.objectives import Gated
from gatespace.gating.signals import normalised_entropy
from gatespace.gating.tokens import TeacherTopK, TopKTeacher
from gatespace.gating.vocabulary import computable

TELEMETRY = ("lam", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass")


@dataclass(frozen=True)
class LossSettings:
    """Settings of `distillation_loss`, the same for every micro-batch."""

    objective: Gated
    inputs: LossInputs
    vocab_size: int
    chunk_tokens: int
    """Rows of logits per chunk."""


def prompt_entropy(teacher: TeacherTopK, settings: LossSettings) -> Tensor:
    """(M,) h of M single tokens from ids and log_probs (M, K): u(x) of a sample at its first token."""
    known = TopKTeacher(teacher.ids.long(), computable(teacher.log_probs), None, settings.vocab_size)
    return normalised_entropy(known, settings.inputs)


def token_losses(
    logits: Tensor,
    index: Tensor,
    teacher: TeacherTopK,
    *,
    sample: Tensor,
    u: Tensor,
    temperature: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute L_t of N tokens, with gradient, and its components.

    Args:
        logits: (P, V) of the student, divided by the sampler's temperature.
        index: (N,) the row of each token; each row at most once.
        teacher: ids and log_probs (N, K).
        sample: (N,) the sample of each token; a sample's tokens are contiguous.
        u: (N,) u(x) of the token's sample.
        temperature: (N,) of the sampler. It is undone, as the teacher is known only at temperature 1.
        settings: The same for all tokens.

    Returns:
        (N,) losses, and (N,) each of `TELEMETRY` and the gate's extra signals, detached.
    """
    wanted = torch.is_grad_enabled() and logits.requires_grad
    rows = logits.detach()
    gradient = rows.new_empty(index.numel(), rows.shape[-1]) if wanted else None
    parts: list[dict[str, Tensor]] = []
    with torch.autocast(device_type=logits.device.type, enabled=False):
        for span in _chunks(sample, settings):
            with torch.enable_grad():
                leaf = rows[index[span]].requires_grad_(wanted)
                heat = temperature[span, None]
                scaled = leaf if bool((heat == 1).all()) else computable(leaf) * heat
                part = TeacherTopK(teacher.ids[None, span], teacher.log_probs[None, span])
                inputs = replace(settings.inputs, segment_ids=sample[None, span], u=u[None, span])
                out = distillation_loss(scaled[None], part, objective=settings.objective, inputs=inputs)
                if gradient is not None:
                    gradient[span] = torch.autograd.grad(out.loss, leaf)[0]
            parts.append(_columns(out))
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else _empty(u, settings)
    losses = columns.pop("loss")
    if gradient is not None:
        losses = _WithGradient.apply(logits, losses, gradient, index, settings.chunk_tokens)
    return losses, columns


class _WithGradient(torch.autograd.Function):
    """Attaches precomputed gradients with respect to rows of logits to losses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, losses: Tensor, gradient: Tensor, index: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(gradient, index)
        ctx.shape, ctx.chunk = logits.shape, chunk
        return losses.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        gradient, index = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.shape)
        for start in range(0, index.numel(), ctx.chunk):
            span = slice(start, start + ctx.chunk)
            whole[index[span]] = (gradient[span] * weights[span, None]).to(whole.dtype)
        return whole, None, None, None, None


def _columns(out: LossOutput) -> dict[str, Tensor]:
    columns = {"loss": out.per_token, **{name: getattr(out, name) for name in TELEMETRY}, **out.signals}
    return {name: values.reshape(-1) for name, values in columns.items()}


def _empty(u: Tensor, settings: LossSettings) -> dict[str, Tensor]:
    return {name: u.new_zeros(0) for name in ("loss", *TELEMETRY, *settings.objective.further_signals())}


def _chunks(sample: Tensor, settings: LossSettings) -> Iterator[slice]:
    """Yield spans of at most `chunk_tokens` tokens; of whole samples if a signal may depend on a token's position."""
    count = sample.numel()
    if not settings.objective.further_signals():
        for start in range(0, count, settings.chunk_tokens):
            yield slice(start, min(start + settings.chunk_tokens, count))
        return
    sizes: list[int] = torch.unique_consecutive(sample, return_counts=True)[1].tolist()
    start = size = 0
    for one in sizes:
        if size and size + one > settings.chunk_tokens:
            yield slice(start, start + size)
            start, size = start + size, 0
        size += one
    if size:
        yield slice(start, start + size)
