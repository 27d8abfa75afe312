"""What an objective took from a chunk's student, and how the gradient at the logits follows from it.

Every number that leaves `ChunkStudent` is a leaf; once the objective is computed, the cotangents of those leaves
make a `Tape`, and with it the gradient at any slice of the vocabulary:

    ∂L/∂z_j = (1/T) { Σ_i c_i·(ψ_ij - s_j·Ψ_i)                    divergences over the vocabulary (Sum)
                      + Σ_m g_m·(1[j = id_m] - s_j)               log-probabilities of selected ids (Selected)
                      + g_τ·(1[j ∉ ids]·s_j/τ - s_j) }            log of the mass outside selected ids (Outside)
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gatespace.gating.divergences import (
    LOWEST_RATIO,
    Divergence,
    ForwardKL,
    ReverseKL,
    Tile,
    both_kls,
    both_kls_gradient,
)
from gatespace.gating.tokens import Student, Teacher, full_teacher
from gatespace.gating.vocabulary import inside, scaled, tiled_logsumexp, tiles, top_entries

_BOTH_KLS = (ReverseKL(), ForwardKL())

Entry = TypeVar("Entry", "Selected", "Outside", "Sum")


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


def _join(entries: tuple[Entry, ...]) -> Entry:
    """The same entry of successive chunks, its tensors one after the other."""
    names = [f.name for f in fields(entries[0]) if isinstance(getattr(entries[0], f.name), Tensor)]
    joined: dict[str, Any] = {name: torch.cat([getattr(e, name) for e in entries]) for name in names}
    return replace(entries[0], **joined)


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
        return cls(
            {T: torch.cat([part.student[T] for part in parts]) for T in parts[0].student},
            {T: torch.cat([part.teacher[T] for part in parts]) for T in parts[0].teacher},
            [_join(entries) for entries in zip(*(part.selected for part in parts), strict=True)],
            [_join(entries) for entries in zip(*(part.outside for part in parts), strict=True)],
            [_join(entries) for entries in zip(*(part.sums for part in parts), strict=True)],
        )

    def gradient(self, student: Tensor, teacher: Tensor | None, start: int, stop: int) -> Tensor:
        """∂L/∂z on a slice [start, stop) of the vocabulary, from both sides' logits (n, stop-start) there."""
        total: Tensor | None = None
        for temperature in self.student:
            part = self._at(temperature, student, teacher, start, stop)
            if part is not None:
                total = part if total is None else total.add_(part)
        return torch.zeros_like(student) if total is None else total

    def _at(self, temperature: float, student: Tensor, teacher: Tensor | None, start: int, stop: int) -> Tensor | None:
        """The part of the gradient that was read at one temperature."""
        sums = [entry for entry in self.sums if entry.temperature == temperature]
        selected = [entry for entry in self.selected if entry.temperature == temperature]
        outside = [entry for entry in self.outside if entry.temperature == temperature]
        if not (sums or selected or outside):
            return None
        log_s = scaled(student, temperature) - self.student[temperature][:, None]
        log_t = log_s
        if sums:
            assert teacher is not None
            log_t = scaled(teacher, temperature) - self.teacher[temperature][:, None]
        # what every entry gives back in proportion to its probability
        share = torch.zeros_like(self.student[temperature])
        for entry in sums:
            share -= entry.grad * entry.psi_total
        for ids in selected:
            share -= ids.grad.sum(-1)
        masses = []
        for tail in outside:
            share -= tail.grad
            mass = (log_s - tail.value[:, None]).exp_().mul_(tail.grad[:, None])
            rows, columns, _ = inside(tail.ids, start, stop)
            mass[rows, columns] = 0.0
            masses.append(mass)
        if tuple(entry.divergence for entry in sums) == _BOTH_KLS:
            weights = [weight[:, None] for weight in (sums[0].grad, sums[1].grad, share)]
            part = both_kls_gradient(log_s, log_t, *weights)
        else:
            tile = Tile(log_s, log_t)
            part = tile.student * share[:, None]
            for entry in sums:
                part.addcmul_(entry.divergence.psi(tile), entry.grad[:, None])
        for mass in masses:
            part += mass
        for ids in selected:
            rows, columns, places = inside(ids.ids, start, stop)
            part.index_put_((rows, columns), ids.grad[rows, places], accumulate=True)
        return part if temperature == 1.0 else part.div_(temperature)


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
        return top_entries(self.logits, k)[1]

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
                log_t = source.log_probs(start, stop, temperature)
                if divergences == _BOTH_KLS:
                    ratio = log_s - log_t
                    if bool(ratio.amin() > LOWEST_RATIO):
                        del log_t
                        for total, part in zip(totals, both_kls(log_s, ratio), strict=True):
                            total += part
                        del log_s, ratio
                        continue
                tile = Tile(log_s, log_t)
                for i, divergence in enumerate(divergences):
                    totals[i] += divergence.term(tile).sum(-1)
                    if wanted[i]:
                        psi[i] += divergence.psi(tile).sum(-1)
                del log_s, log_t, tile  # before the next slice is made, so that two are never alive
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
