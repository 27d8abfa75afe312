"""What an objective took from a chunk's student, and how the gradient at the logits follows from it.

Every number that leaves `ChunkStudent` is a leaf; once the objective is computed, the cotangents of those leaves
make a `Tape`, and with it the gradient at any slice of the vocabulary:

    ∂L/∂z_j = (1/T) { Σ_i c_i·(ψ_ij - s_j·Ψ_i)                    divergences over the vocabulary (Sum)
                      + Σ_m g_m·(1[j = id_m] - s_j)               log-probabilities of selected ids (Selected)
                      + g_τ·(1[j ∉ ids]·s_j/τ - s_j) }            log of the mass outside selected ids (Outside)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gatespace.gating.divergences import Divergence, Tile
from gatespace.gating.tokens import Student, Teacher, full_teacher, inside, scaled, tiled_logsumexp, tiles


@dataclass
class Selected:
    """Student log-probabilities of ids (n, M) at a temperature."""

    temperature: float
    ids: Tensor
    grad: Tensor


@dataclass
class Outside:
    """Log of the student's mass outside ids (n, K) at a temperature."""

    temperature: float
    ids: Tensor
    value: Tensor
    grad: Tensor


@dataclass
class Sum:
    """A divergence over the vocabulary at a temperature, with Ψ = Σψ."""

    temperature: float
    divergence: Divergence
    psi_total: Tensor
    grad: Tensor


@dataclass
class Tape:
    """Cotangents of everything that an objective took from the student, and the normalisers to redo it."""

    student: dict[float, Tensor]
    teacher: dict[float, Tensor]
    selected: list[Selected] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)

    @classmethod
    def join(cls, parts: list[Tape]) -> Tape:
        """Tapes of successive chunks as one; they were written by the same objective, so they match entry by entry."""

        def cat(pick: Callable[[Tape], Tensor]) -> Tensor:
            return torch.cat([pick(part) for part in parts])

        first = parts[0]
        return cls(
            {T: cat(lambda p, T=T: p.student[T]) for T in first.student},
            {T: cat(lambda p, T=T: p.teacher[T]) for T in first.teacher},
            [
                Selected(e.temperature, cat(lambda p, i=i: p.selected[i].ids), cat(lambda p, i=i: p.selected[i].grad))
                for i, e in enumerate(first.selected)
            ],
            [
                Outside(
                    e.temperature,
                    cat(lambda p, i=i: p.outside[i].ids),
                    cat(lambda p, i=i: p.outside[i].value),
                    cat(lambda p, i=i: p.outside[i].grad),
                )
                for i, e in enumerate(first.outside)
            ],
            [
                Sum(
                    e.temperature,
                    e.divergence,
                    cat(lambda p, i=i: p.sums[i].psi_total),
                    cat(lambda p, i=i: p.sums[i].grad),
                )
                for i, e in enumerate(first.sums)
            ],
        )

    def gradient(self, student: Tensor, teacher: Tensor | None, start: int, stop: int) -> Tensor:
        """∂L/∂z on a slice [start, stop) of the vocabulary, from both sides' logits (n, stop-start) there."""
        total = torch.zeros_like(student)
        for temperature, normaliser in self.student.items():
            sums = [e for e in self.sums if e.temperature == temperature]
            selected = [e for e in self.selected if e.temperature == temperature]
            outside = [e for e in self.outside if e.temperature == temperature]
            if not (sums or selected or outside):
                continue
            log_s = scaled(student, temperature) - normaliser[:, None]
            log_t = log_s
            if sums:
                assert teacher is not None
                log_t = scaled(teacher, temperature) - self.teacher[temperature][:, None]
            tile = Tile(log_s, log_t)
            share = torch.zeros_like(normaliser)  # what every entry gives back in proportion to s
            for entry in sums:
                share -= entry.grad * entry.psi_total
            for e in selected:
                share -= e.grad.sum(-1)
            for o in outside:
                share -= o.grad
            part = tile.student * share[:, None]
            for entry in sums:
                part.addcmul_(entry.divergence.psi(tile), entry.grad[:, None])
            for o in outside:
                tail = (log_s - o.value[:, None]).exp_().mul_(o.grad[:, None])
                rows, columns, _ = inside(o.ids, start, stop)
                tail[rows, columns] = 0.0
                part += tail
            for e in selected:
                rows, columns, places = inside(e.ids, start, stop)
                part.index_put_((rows, columns), e.grad[rows, places], accumulate=True)
            total += scaled(part, temperature)
        return total

    @property
    def needs_teacher(self) -> bool:
        return bool(self.sums)


class ChunkStudent(Student):
    """The student of one chunk: logits (n, V) in a buffer, answers as leaves whose cotangents are wanted later."""

    def __init__(self, logits: Tensor, tile: int) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[-1]
        self.dtype = logits.dtype
        self.tile = tile
        self._normaliser: dict[float, Tensor] = {}
        self._teacher: dict[float, Tensor] = {}
        self._selected: list[tuple[float, Tensor, Tensor]] = []
        self._outside: list[tuple[float, Tensor, Tensor]] = []
        self._sums: list[tuple[float, Divergence, Tensor, Tensor]] = []

    def normaliser(self, temperature: float) -> Tensor:
        if temperature not in self._normaliser:
            self._normaliser[temperature] = tiled_logsumexp(self.logits, temperature, self.tile)
        return self._normaliser[temperature]

    def top_ids(self, k: int) -> Tensor:
        return self.logits.topk(k, dim=-1).indices

    def at(self, ids: Tensor, temperature: float) -> Tensor:
        value = scaled(self.logits.gather(-1, ids), temperature) - self.normaliser(temperature)[:, None]
        if torch.is_grad_enabled():
            self._selected.append((temperature, ids, value.requires_grad_()))
        return value

    def log_tail(self, ids: Tensor, temperature: float) -> Tensor:
        with torch.no_grad():
            value = tiled_logsumexp(self.logits, temperature, self.tile, without=ids) - self.normaliser(temperature)
        if torch.is_grad_enabled():
            self._outside.append((temperature, ids, value.requires_grad_()))
        return value

    def sums(self, teacher: Teacher, divergences: tuple[Divergence, ...], temperature: float) -> list[Tensor]:
        source = full_teacher(teacher)
        totals = [self.logits.new_zeros(self.logits.shape[0]) for _ in divergences]
        psi = [torch.zeros_like(total) for total in totals]
        graph = torch.is_grad_enabled()
        with torch.no_grad():
            wanted = [graph and d.psi_total(total) is None for d, total in zip(divergences, totals, strict=True)]
            for start, stop in tiles(self.vocab_size, self.tile):
                log_s = scaled(self.logits[:, start:stop], temperature) - self.normaliser(temperature)[:, None]
                tile = Tile(log_s, source.log_probs(start, stop, temperature))
                for i, divergence in enumerate(divergences):
                    totals[i] += divergence.term(tile).sum(-1)
                    if wanted[i]:
                        psi[i] += divergence.psi(tile).sum(-1)
            if graph:
                self._teacher[temperature] = source.normaliser(temperature)
                for i, divergence in enumerate(divergences):
                    known = divergence.psi_total(totals[i])
                    total_psi = psi[i] if known is None else known.clone()
                    self._sums.append((temperature, divergence, total_psi, totals[i].requires_grad_()))
        return totals

    def tape(self, loss: Tensor, learned: Tensor | None) -> tuple[Tape, Tensor | None]:
        """Cotangents of `loss` (a scalar) at everything that was asked, and at the objective's own tensor."""
        leaves = [v for _, _, v in self._selected] + [v for _, _, v in self._outside] + [v for *_, v in self._sums]
        wanted = leaves if learned is None else [*leaves, learned]
        grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if loss.requires_grad and wanted:
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        answers = iter(grads)
        tape = Tape(self._normaliser, self._teacher)
        # what the loss did not use has no cotangent and leaves no entry
        for temperature, ids, _ in self._selected:
            if (grad := next(answers)) is not None:
                tape.selected.append(Selected(temperature, ids, grad))
        for temperature, ids, value in self._outside:
            if (grad := next(answers)) is not None:
                tape.outside.append(Outside(temperature, ids, value.detach(), grad))
        for temperature, divergence, psi_total, _ in self._sums:
            if (grad := next(answers)) is not None:
                tape.sums.append(Sum(temperature, divergence, psi_total, grad))
        return tape, next(answers, None)
