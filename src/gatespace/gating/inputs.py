"""Loss inputs other than model outputs and objective, and the selection of masked tokens.

The rest of the package works on the N masked tokens in row-major order; only this module knows about (B, T).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gatespace.errors import UsageError, unknown_name

ENTROPIES = ("top_k", "full", "bucket")
_PER_TOKEN = ("weights", "sampled", "sampled_log_probs", "u", "from_teacher", "noise")
_PER_SAMPLE = ("u", "from_teacher")
"""Those of them that may be (B,) instead of (B, T)."""


@dataclass(frozen=True, eq=False)  # a tensor has no single truth value, so no generated ==
class LossInputs:
    """Inputs of a loss other than model outputs and objective. B samples, T response positions.

    Examples:
        >>> from gatespace.gating import LossInputs, ToDi, distillation_loss
        >>> student, teacher = torch.zeros(1, 2, 8), torch.arange(8.0).expand(1, 2, 8)
        >>> inputs = LossInputs(mask=torch.tensor([[1, 0]]), temperature=2.0)
        >>> distillation_loss(student, teacher, objective=ToDi(), inputs=inputs).tokens
        1
    """

    mask: Tensor | None = None
    """(B, T) of 0 and 1, response tokens; positions outside it are never read. None: all."""
    weights: Tensor | None = None
    """(B, T) how often each token counts: a constant, non-negative factor of its loss and gradient. A token of weight 0
    is dropped, but still counts in its response's length. None: once each."""
    top_k: int = 8
    """K of the entropy signals h and u. Coefficients are not comparable across it."""
    temperature: float = 1.0
    """Divides the logits of both sides in the divergences, with no T² factor. The signals are computed at 1."""
    entropy: str = "top_k"
    """How h and u are normalised: top_k (over log K), full (over log V) or bucket (over log(K+1))."""
    sampled: Tensor | None = None
    """(B, T) response token ids, for terms of the sampled token such as the support hybrid."""
    sampled_log_probs: Tensor | None = None
    """(B, T) log-probabilities under the sampler, if it was not the current student at temperature 1."""
    segment_ids: Tensor | None = None
    """(B, T), for rows that pack several samples: a new sample, with its own u, begins where the id changes."""
    u: Tensor | None = None
    """(B,) or (B, T) override of u(x), for batches without the first response token."""
    total_tokens: float | Tensor | None = None
    """Denominator of the loss; for a micro-batch, the masked tokens of the whole step. None: N, or the sum of the
    weights."""
    vocab_size: int | None = None
    """Tokenizer length without padding; both sides are cut to it before any softmax. None: sizes must match."""
    lam_order: Tensor | None = None
    """(N,) permutation of the masked tokens: token i gets the objective's λ for token lam_order[i], as a constant. A
    control that keeps the values of λ but not their positions; h, u and gap stay the token's own."""
    from_teacher: Tensor | None = None
    """(B,) or (B, T) of 0 and 1: whether the response is the teacher's or gold rather than sampled by the student. For
    objectives that depend on it (DistiLLM-2)."""
    noise: Tensor | None = None
    """(B, T) independent uniform numbers in [0, 1), for objectives that draw tokens at random (TIP)."""

    def __post_init__(self) -> None:
        if not 0.0 < float(self.temperature) < float("inf"):
            raise UsageError("temperature must be positive", got=self.temperature)
        if self.entropy not in ENTROPIES:
            raise unknown_name("entropy", self.entropy, ENTROPIES)
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1:
            raise UsageError("top_k is a whole number of at least 1", got=self.top_k)


@dataclass(frozen=True, eq=False)
class Batch:
    """The N selected tokens of a call: their positions in (B, T) and their per-token inputs."""

    shape: torch.Size
    """(B, T)."""
    index: Tensor
    """(N,) flat position of each token."""
    position: Tensor
    """(N,) index of the token within its response, from 0."""
    length: Tensor
    """(N,) length of its response."""
    first: Tensor
    """(N,) index among the N tokens of the first token of its response."""
    vocab_size: int
    """V of both sides, after cutting."""
    total_tokens: float | Tensor
    given: LossInputs
    """The inputs; weights, sampled, sampled_log_probs, u, from_teacher and noise are (N,) here."""

    @classmethod
    def of(cls, shape: torch.Size, device: torch.device, vocab_size: int, inputs: LossInputs) -> Batch:
        """Select the masked tokens of a batch of `shape` (B, T), and check all shapes and ids."""
        if len(shape) != 2:
            raise UsageError("a batch has two leading dimensions (B, T)", got=tuple(shape))
        if inputs.mask is None:
            index = torch.arange(shape.numel(), device=device)
        else:
            index = _as_bool(_shaped("mask", inputs.mask, shape)).to(device).reshape(-1).nonzero().squeeze(-1)
        n = index.numel()
        row = torch.div(index, max(shape[1], 1), rounding_mode="floor")
        begins = torch.ones(n, dtype=torch.bool, device=device)
        if n:
            begins[1:] = row[1:] != row[:-1]
        if inputs.segment_ids is not None:
            segment = _shaped("segment_ids", inputs.segment_ids, shape).to(device).reshape(-1)[index]
            if n:
                begins[1:] |= segment[1:] != segment[:-1]
        sample = begins.cumsum(0) - 1
        starts = begins.nonzero().squeeze(-1)
        first = starts[sample]
        length = torch.bincount(sample, minlength=starts.numel())[sample]
        total = inputs.total_tokens
        if total is not None and not bool(torch.as_tensor(total > 0)):
            raise UsageError("total_tokens must be positive", got=total)
        known = 1.0 if total is None else total
        batch = cls(shape, index, torch.arange(n, device=device) - first, length, first, vocab_size, known, inputs)
        if inputs.weights is not None:
            batch = batch._counting(_factors(inputs, shape).to(device), begins)
        batch = replace(batch, given=batch._selected(inputs))
        return batch if total is not None else replace(batch, total_tokens=float(batch.tokens) or 1.0)

    def _counting(self, weights: Tensor, begins: Tensor) -> Batch:
        """Drop tokens of weight 0, except the first of a response, which u needs."""
        keep = (self.select(weights) > 0) | begins
        first = (keep.cumsum(0) - 1)[self.first]
        index, position, length = self.index[keep], self.position[keep], self.length[keep]
        return replace(self, index=index, position=position, length=length, first=first[keep])

    def _selected(self, inputs: LossInputs) -> LossInputs:
        """The inputs, with per-token fields gathered at the N tokens."""
        given: dict[str, Any] = {}
        for name in _PER_TOKEN:
            values = getattr(inputs, name)
            if values is None:
                continue
            if name in _PER_SAMPLE and values.shape == self.shape[:1]:
                values = values[:, None].expand(self.shape)
            given[name] = self.select(_shaped(name, values, self.shape).to(self.index.device)).detach()
        if "sampled" in given:
            ids = given["sampled"] = given["sampled"].long()
            if ids.numel() and not bool(((ids >= 0) & (ids < self.vocab_size)).all()):
                raise UsageError("sampled holds an id outside the vocabulary", got=f"V={self.vocab_size}")
        if "from_teacher" in given:
            given["from_teacher"] = given["from_teacher"].bool()
        if inputs.lam_order is not None:
            given["lam_order"] = _permutation(inputs.lam_order.to(self.index.device), self.count)
        return replace(inputs, **given)

    @property
    def count(self) -> int:
        """N."""
        return int(self.index.numel())

    @property
    def tokens(self) -> int | float:
        """N, or the sum of the weights."""
        weights = self.given.weights
        return self.count if weights is None else float(weights.double().sum())

    def weighted(self, loss: Tensor) -> Tensor:
        """(N,) losses, multiplied by the weights."""
        weights = self.given.weights
        return loss if weights is None else loss * weights.to(loss.dtype)

    def part(self, span: slice) -> Batch:
        """A slice of the tokens; `first` still indexes the whole batch."""
        given = {name: values[span] for name in _PER_TOKEN if (values := getattr(self.given, name)) is not None}
        own: dict[str, Any] = {name: getattr(self, name)[span] for name in ("index", "position", "length", "first")}
        return replace(self, given=replace(self.given, **given), **own)

    def select(self, values: Tensor) -> Tensor:
        """(B, T, …) → (N, …); differentiable. No copy if every position is selected."""
        flat = values.reshape(-1, *values.shape[len(self.shape) :])
        return flat if self.count == flat.shape[0] else flat.index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """(N,) → (B, T), 0 outside the mask."""
        out = values.new_zeros(self.shape.numel())
        return out.index_copy(0, self.index, values).reshape(self.shape)

    def place(self, token: int) -> str:
        """Position of a token in the batch, for error messages."""
        row, column = divmod(int(self.index[token]), self.shape[1])
        return f"[{row}, {column}]"


def _shaped(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    if tensor.shape != shape:
        raise UsageError(
            f"{name} must have the shape (B, T) of the batch",
            got=f"{tuple(tensor.shape)} for a batch of {tuple(shape)}",
        )
    return tensor


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    on = mask != 0
    if not bool((mask == on).all()):
        raise UsageError(
            "mask must hold only 0 and 1",
            why="it says which tokens count; it is not a weight",
            instead="weights, or an objective's weight",
        )
    return on


def _factors(inputs: LossInputs, shape: torch.Size) -> Tensor:
    assert inputs.weights is not None
    weights = _shaped("weights", inputs.weights, shape)
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UsageError("weights must be finite and not negative", why="they say how often each token counts")
    if inputs.lam_order is not None:
        raise UsageError(
            "lam_order and weights exclude each other",
            why="a permutation is over single tokens, and one that counts twice has two λ",
            instead="repeat the tokens",
        )
    return weights


def _permutation(order: Tensor, count: int) -> Tensor:
    right = order.shape == (count,) and not order.is_floating_point() and order.dtype != torch.bool
    if not right or not torch.equal(order.long().sort().values, torch.arange(count, device=order.device)):
        raise UsageError(
            "lam_order must be a permutation of the masked tokens, each number from 0 to N-1 once",
            got=f"{order.dtype} of shape {tuple(order.shape)}, N={count}",
        )
    return order.long()
