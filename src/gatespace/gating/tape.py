"""The tape of the fused path: records what an objective reads from the student, and gives the gradient at the logits.

Every number read from the student of `ChunkTokens` is a leaf on its `Tape`. Once the objective is computed, the
gradient of the loss at those leaves gives the gradient at any slice of the vocabulary in closed form:

    ∂L/∂z_j = (1/T) { Σ_i c_i·(ψ_ij - s_j·Ψ_i)                    divergences over the vocabulary (Sum)
                      + Σ_m g_m·(1[j = id_m] - s_j)               log-probabilities of selected ids (Selected)
                      + g_τ·(1[j ∉ ids]·s_j/τ - s_j) }            log of the mass outside selected ids (Outside)
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from gatespace.gating.divergences import (
    Divergence,
    ForwardKL,
    ReverseKL,
    Tile,
    both_kls,
    both_kls_gradient,
)
from gatespace.gating.inputs import Batch
from gatespace.gating.tokens import LogitsTeacher, Teacher, Tokens
from gatespace.gating.vocabulary import inside, lowered, scaled, tiled_logsumexp, tiles, top_entries

_BOTH_KLS = (ReverseKL(), ForwardKL())


@dataclass
class Leaf:
    """Numbers (n, …) read from the student at a temperature, and the gradient of the loss at them."""

    temperature: float
    value: Tensor
    grad: Tensor = field(init=False)


@dataclass
class Selected(Leaf):
    """Log-probabilities (n, M) of ids."""

    ids: Tensor


@dataclass
class Outside(Leaf):
    """(n,) log of the mass outside ids (n, K)."""

    ids: Tensor


@dataclass
class Sum(Leaf):
    """(n,) divergence over the vocabulary, with Ψ = Σψ."""

    divergence: Divergence
    psi_total: Tensor


@dataclass
class Tape:
    """All leaves in recording order, and the normalisers (n,) by temperature, to recompute them."""

    student: dict[float, Tensor] = field(default_factory=dict)
    teacher: dict[float, Tensor] = field(default_factory=dict)
    leaves: list[Leaf] = field(default_factory=list)

    @classmethod
    def join(cls, parts: list[Tape]) -> Tape:
        """Concatenate the tapes of successive chunks; the same objective wrote them, so they match leaf by leaf."""
        return cls(
            {T: torch.cat([part.student[T] for part in parts]) for T in parts[0].student},
            {T: torch.cat([part.teacher[T] for part in parts]) for T in parts[0].teacher},
            [_joined(leaves) for leaves in zip(*(part.leaves for part in parts), strict=True)],
        )

    def differentiate(self, loss: Tensor, learned: Tensor | None) -> Tensor | None:
        """Store the gradient of `loss` (a scalar) at every leaf; return that at the objective's own tensor.

        Leaves that the loss does not use are dropped.
        """
        wanted = [leaf.value for leaf in self.leaves] + ([] if learned is None else [learned])
        grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if loss.requires_grad and wanted:
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        used = []
        for leaf, grad in zip(self.leaves, grads, strict=False):
            if grad is not None:
                leaf.value, leaf.grad = leaf.value.detach(), grad
                used.append(leaf)
        self.leaves = used
        return None if learned is None else grads[-1]

    @property
    def needs_teacher(self) -> bool:
        """Whether the gradient depends on the teacher's logits."""
        return any(isinstance(leaf, Sum) for leaf in self.leaves)

    def gradient(self, student: Tensor, teacher: Tensor | None, start: int, stop: int) -> Tensor:
        """∂L/∂z on a slice [start, stop) of the vocabulary, from both sides' logits (n, stop-start) there."""
        total: Tensor | None = None
        for temperature in self.student:
            part = self._at(temperature, student, teacher, start, stop)
            if part is not None:
                total = part if total is None else total.add_(part)
        return torch.zeros_like(student) if total is None else total

    def _at(self, temperature: float, student: Tensor, teacher: Tensor | None, start: int, stop: int) -> Tensor | None:
        """Part of the gradient from the leaves of one temperature."""
        leaves = [leaf for leaf in self.leaves if leaf.temperature == temperature]
        if not leaves:
            return None
        sums = [leaf for leaf in leaves if isinstance(leaf, Sum)]
        selected = [leaf for leaf in leaves if isinstance(leaf, Selected)]
        outside = [leaf for leaf in leaves if isinstance(leaf, Outside)]
        log_s = scaled(student, temperature) - self.student[temperature][:, None]
        log_t = log_s
        if sums:
            assert teacher is not None
            log_t = scaled(teacher, temperature) - self.teacher[temperature][:, None]
        # coefficient of s_j, common to all entries
        share = torch.zeros_like(self.student[temperature])
        for term in sums:
            share -= term.grad * term.psi_total
        for some in selected:
            share -= some.grad.sum(-1)
        masses = []
        for tail in outside:
            share -= tail.grad
            mass = lowered((log_s - tail.value[:, None]).exp_(), tail.ids, 0.0, start)
            masses.append(mass.mul_(tail.grad[:, None]))
        if tuple(term.divergence for term in sums) == _BOTH_KLS:
            weights = [weight[:, None] for weight in (sums[0].grad, sums[1].grad, share)]
            part = both_kls_gradient(log_s, log_t, *weights)
        else:
            tile = Tile(log_s, log_t)
            part = tile.student * share[:, None]
            for term in sums:
                part.addcmul_(term.divergence.psi(tile), term.grad[:, None])
        for mass in masses:
            part += mass
        for some in selected:
            columns, here = inside(some.ids, start, stop)
            part.scatter_add_(-1, columns, some.grad * here)
        return part if temperature == 1.0 else part.div_(temperature)


def _joined(leaves: tuple[Leaf, ...]) -> Leaf:
    """Concatenate the same leaf of successive chunks."""
    first = leaves[0]
    names = [f.name for f in fields(first) if f.init and isinstance(getattr(first, f.name), Tensor)]
    whole: dict[str, Any] = {name: torch.cat([getattr(leaf, name) for leaf in leaves]) for name in names}
    if isinstance(first, Sum):
        whole["divergence"] = first.divergence.join([leaf.divergence for leaf in leaves if isinstance(leaf, Sum)])
    joined = replace(first, **whole)
    joined.grad = torch.cat([leaf.grad for leaf in leaves])
    return joined


class ChunkTokens(Tokens):
    """Tokens of one chunk, with student logits (n, V) in a buffer that the next chunk overwrites.

    Args:
        logits: (n, V) student logits.
        teacher: Teacher of the same tokens.
        whole: All tokens of the call.
        span: Which of them this chunk covers.
        tile: Width of the vocabulary slices.
        firsts: Values (N,) by name, shared by all chunks: a response may begin in an earlier one.
        infinite: As in `Tokens`.
    """

    def __init__(
        self,
        logits: Tensor,
        teacher: Teacher,
        whole: Batch,
        span: slice,
        *,
        tile: int,
        firsts: dict[str, Tensor],
        infinite: tuple[Tensor, Tensor] | None,
    ) -> None:
        super().__init__(teacher, whole.part(span), infinite)
        self.logits = logits
        self.dtype = logits.dtype
        self.span, self.whole = span, whole
        self.tape = Tape()
        self._tile = tile
        self._firsts = firsts

    def at_first(self, name: str, values: Tensor) -> Tensor:
        kept = self._firsts.setdefault(name, values.new_zeros(self.whole.count))
        kept[self.span] = values.detach()
        return kept[self.batch.first]

    def normaliser(self, temperature: float) -> Tensor:
        """(n,) logsumexp of the student's logits at a temperature."""
        if temperature not in self.tape.student:
            self.tape.student[temperature] = tiled_logsumexp(self.logits, temperature, self._tile)
        return self.tape.student[temperature]

    def student_at(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        value = scaled(self.logits.gather(-1, ids), temperature) - self.normaliser(temperature)[:, None]
        if torch.is_grad_enabled():
            self.tape.leaves.append(Selected(temperature, value.requires_grad_(), ids))
        return value

    def student_log_tail(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        with torch.no_grad():
            value = tiled_logsumexp(self.logits, temperature, self._tile, without=ids) - self.normaliser(temperature)
        if torch.is_grad_enabled():
            self.tape.leaves.append(Outside(temperature, value.requires_grad_(), ids))
        return value

    def student_top_ids(self, k: int) -> Tensor:
        return top_entries(self.logits, k)[1]

    @torch.no_grad()
    def log_between(self, tau: float) -> Tensor:
        at, parts = self.temperature, []
        for start, stop in tiles(self.vocab_size, self._tile):
            log_t = self.teacher.log_probs(start, stop, at)
            log_s = scaled(self.logits[:, start:stop], at) - self.normaliser(at)[:, None]
            parts.append(torch.lerp(log_s, log_t, tau).logsumexp(-1))
        return torch.stack(parts, -1).logsumexp(-1)

    def divergences(self, *kinds: Divergence, temperature: float | None = None) -> list[Tensor]:
        at = self.temperature if temperature is None else temperature
        totals = [self.logits.new_zeros(self.count) for _ in kinds]
        psi = [torch.zeros_like(total) for total in totals]
        graph = torch.is_grad_enabled()
        with torch.no_grad():
            wanted = [graph and kind.psi_total(total) is None for kind, total in zip(kinds, totals, strict=True)]
            for start, stop in tiles(self.vocab_size, self._tile):
                log_t = self.teacher.log_probs(start, stop, at)
                log_s = scaled(self.logits[:, start:stop], at) - self.normaliser(at)[:, None]
                if kinds == _BOTH_KLS and self.infinite is None:
                    for total, part in zip(totals, both_kls(log_s, log_t), strict=True):
                        total += part
                else:
                    tile = Tile(log_s, log_t)
                    for i, kind in enumerate(kinds):
                        totals[i] += kind.term(tile).sum(-1)
                        if wanted[i]:
                            psi[i] += kind.psi(tile).sum(-1)
                    del tile
                del log_s, log_t  # before the next slice, so that two are never alive
        if graph:
            assert isinstance(self.teacher, LogitsTeacher)
            self.tape.teacher[at] = self.teacher.normaliser(at)
            for kind, total, own in zip(kinds, totals, psi, strict=True):
                known = kind.psi_total(total)
                total_psi = own if known is None else known.clone()
                self.tape.leaves.append(Sum(at, total.requires_grad_(), kind, total_psi))
        return totals

    def gradient(self, start: int, stop: int) -> Tensor:
        """∂L/∂z on a slice of the vocabulary, once the tape has been differentiated."""
        teacher = self.teacher.logits[:, start:stop] if isinstance(self.teacher, LogitsTeacher) else None
        return self.tape.gradient(self.logits[:, start:stop], teacher, start, stop)
