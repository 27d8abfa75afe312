"""`Tokens`: the interface between model outputs and signals, supports and objectives.

A signal, support or objective is a function of `Tokens`, written once for the plain path (logits in memory, autograd)
and the fused path (hidden states and head rows, chunk by chunk, analytic gradient).

Shapes: N tokens, V vocabulary, K or M selected ids. Log-probabilities are over the full vocabulary unless noted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.divergences import Divergence, Tile, derived
from gatespace.gating.inputs import Batch
from gatespace.gating.vocabulary import (
    LOWEST,
    check_k,
    check_rows,
    computable,
    scaled,
    tiled_logsumexp,
    tiles,
    top_entries,
    top_entry,
)

TAIL_FLOOR = 1e-6
"""Minimum tail mass of a teacher whose tail is only known as one minus its top-K."""


class Top(NamedTuple):
    """Top-K ids of one side, most probable first, with their log-probabilities."""

    ids: Tensor
    log_probs: Tensor


class Tokens(ABC):
    """N tokens: both sides, positions in the batch, and per-token inputs."""

    dtype: torch.dtype
    """Dtype of every per-token number."""

    def __init__(self, teacher: Teacher, batch: Batch, infinite: tuple[Tensor, Tensor] | None = None) -> None:
        self.teacher = teacher
        self.batch = batch
        self.infinite = infinite
        """(N,) each: where reverse and where forward KL is infinite, because only one side forbids an id."""
        self.count, self.vocab_size, self.device = batch.count, batch.vocab_size, batch.index.device
        self.position, self.length = batch.position, batch.length
        """(N,) index of the token within its response, from 0, and length of the response."""
        self.temperature, self.top_k = batch.given.temperature, batch.given.top_k
        """Temperature of the divergences (signals are computed at 1), and K of the entropy signals."""
        self.lam: Tensor | None = None
        """(N,) constant λ that replaces the objective's own (`LossInputs.lam_order`), or None."""
        self.memo: dict[tuple[str, bool], Tensor] = {}
        """Signals computed so far, by name and whether they carry gradient."""
        self.whole = batch
        """All tokens of the call, of which these may be a chunk."""
        self.span = slice(None)
        """Where these tokens lie in `whole`."""
        self.everywhere: dict[str, Tensor] = {}
        """Signals (N,) of all tokens of the call by name, from an earlier pass (`Objective.prepass`)."""

    def at_first(self, name: str, values: Tensor) -> Tensor:
        """(N,) value at the first token of each token's response, detached. `name` is unique per quantity."""
        return values.detach()[self.batch.first]

    # ------------------------------------------------------------------ teacher

    @property
    def teacher_choice(self) -> Tensor:
        """(N,) y*, the teacher's most probable id; ties: the lowest."""
        return self.teacher.choice

    def teacher_top(self, k: int) -> Top:
        """The teacher's top-k at temperature 1."""
        check_k(k, self.vocab_size)
        return self.teacher.top(k)

    def teacher_at(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """(N, M) teacher log-probabilities of `ids` (N, M)."""
        return self.teacher.at(ids, temperature)

    # ------------------------------------------------------------------ student (differentiable)

    @abstractmethod
    def student_at(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """(N, M) student log-probabilities of `ids` (N, M)."""

    @abstractmethod
    def student_log_tail(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """(N,) log of the student's mass outside `ids` (N, K)."""

    @abstractmethod
    def student_top_ids(self, k: int) -> Tensor:
        """(N, k) the student's top-k ids."""

    @abstractmethod
    def divergences(self, *kinds: Divergence, temperature: float | None = None) -> list[Tensor]:
        """(N,) each: divergences over the full vocabulary, by default at the temperature of the loss."""

    @abstractmethod
    def log_between(self, tau: float) -> Tensor:
        """(N,) log Σ s^(1-τ)·t^τ at the temperature of the loss, detached."""

    def student_top(self, k: int) -> Top:
        """The student's top-k at temperature 1."""
        check_k(k, self.vocab_size)
        ids = self.student_top_ids(k)
        return Top(ids, self.student_at(ids))

    # ------------------------------------------------------------------ the response token

    @property
    def sampled(self) -> Tensor:
        """(N,) ids of the response tokens."""
        if self.batch.given.sampled is None:
            raise UsageError(
                "the response token ids are needed and were not given",
                why="a sampled term uses the token that the student sampled",
                instead="pass sampled= of shape (B, T)",
            )
        return self.batch.given.sampled

    def student_sampled(self, *, temperature: float = 1.0) -> Tensor:
        """(N,) student log-probability of the response token (differentiable)."""
        return self.student_at(self.sampled[:, None], temperature=temperature).squeeze(-1)

    def teacher_sampled(self, *, temperature: float = 1.0) -> Tensor:
        """(N,) teacher log-probability of the response token."""
        return self.teacher.sampled(self.sampled, temperature)

    def sampler_log_probs(self, log_student: Tensor) -> Tensor:
        """(N,) log-probability of the token under the sampler; if not given, `log_student` (at T=1): on-policy."""
        given = self.batch.given.sampled_log_probs
        return log_student.detach() if given is None else given


class PlainTokens(Tokens):
    """Tokens with student logits (N, V) in memory; gradients by autograd."""

    def __init__(
        self, logits: Tensor, teacher: Teacher, batch: Batch, infinite: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__(teacher, batch, infinite)
        self.logits = logits
        self.dtype = logits.dtype
        self._log_probs: dict[float, Tensor] = {}

    def log_probs(self, temperature: float) -> Tensor:
        """(N, V) the student's log-probabilities."""
        if temperature not in self._log_probs:
            self._log_probs[temperature] = scaled(self.logits, temperature).log_softmax(-1)
        return self._log_probs[temperature]

    def student_at(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        return self.log_probs(temperature).gather(-1, ids)

    def student_log_tail(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        return self.log_probs(temperature).scatter(-1, ids, LOWEST).logsumexp(-1)

    def student_top_ids(self, k: int) -> Tensor:
        return self.logits.detach().topk(k, dim=-1).indices

    def log_between(self, tau: float) -> Tensor:
        at = self.temperature
        log_s, log_t = self.log_probs(at).detach(), self.teacher.log_probs(0, self.vocab_size, at)
        return torch.lerp(log_s, log_t, tau).logsumexp(-1)

    def divergences(self, *kinds: Divergence, temperature: float | None = None) -> list[Tensor]:
        at = self.temperature if temperature is None else temperature
        tile = Tile(self.log_probs(at), self.teacher.log_probs(0, self.vocab_size, at))
        return [kind.term(tile).sum(-1) for kind in kinds]


# ---------------------------------------------------------------------- teachers (no gradient)


class LogitsTeacher:
    """A teacher given by its logits (N, V), read in slices so that no second (N, V) tensor is made."""

    def __init__(self, logits: Tensor, tile: int | None = None) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[-1]
        self.tile = tile or self.vocab_size
        self._normaliser: dict[float, Tensor] = {}
        self._top: dict[int, Top] = {}

    def normaliser(self, temperature: float) -> Tensor:
        """(N,) logsumexp of the logits at a temperature."""
        if temperature not in self._normaliser:
            self._normaliser[temperature] = tiled_logsumexp(self.logits, temperature, self.tile)
        return self._normaliser[temperature]

    def log_probs(self, start: int, stop: int, temperature: float) -> Tensor:
        """(N, stop-start) log-probabilities of a slice of the vocabulary."""
        return scaled(self.logits[:, start:stop], temperature) - self.normaliser(temperature)[:, None]

    @derived
    def choice(self) -> Tensor:
        """(N,) its most probable id y*; ties: the lowest."""
        return top_entry(self.logits)

    @derived
    def entropy(self) -> Tensor:
        """(N,) entropy over the full vocabulary in nats, at temperature 1."""
        total = self.logits.new_zeros(self.logits.shape[0])
        for start, stop in tiles(self.vocab_size, self.tile):
            log_probs = self.log_probs(start, stop, 1.0)
            total -= (log_probs.exp() * log_probs).sum(-1)
        return total

    def top(self, k: int) -> Top:
        """Its top-k, at temperature 1."""
        if k not in self._top:
            values, ids = top_entries(self.logits, k)
            self._top[k] = Top(ids, values - self.normaliser(1.0)[:, None])
        return self._top[k]

    def at(self, ids: Tensor, temperature: float) -> Tensor:
        """(N, M) log-probabilities of `ids` (N, M)."""
        return scaled(self.logits.gather(-1, ids), temperature) - self.normaliser(temperature)[:, None]

    def log_tail(self, ids: Tensor, temperature: float) -> Tensor:
        """(N,) log of the mass outside `ids` (N, K)."""
        total = tiled_logsumexp(self.logits, temperature, self.tile, without=ids)
        return total - self.normaliser(temperature)

    def sampled(self, ids: Tensor, temperature: float) -> Tensor:
        """(N,) log-probability of the response tokens `ids` (N,)."""
        return self.at(ids[:, None], temperature).squeeze(-1)


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher given by its top-K per position, as a server returns it.

    Args:
        ids: (B, T, K) token ids.
        log_probs: (B, T, K) log-probabilities over the full vocabulary at temperature 1. Never renormalised, except
            by the support `renorm`.
        sampled_log_probs: (B, T) teacher log-probability of the response token.
    """

    ids: Tensor
    log_probs: Tensor
    sampled_log_probs: Tensor | None = None

    def part(self, tokens: slice) -> TeacherTopK:
        """A slice of the positions."""
        sampled = None if self.sampled_log_probs is None else self.sampled_log_probs[:, tokens]
        return TeacherTopK(self.ids[:, tokens], self.log_probs[:, tokens], sampled)


class TopKTeacher:
    """N tokens of a `TeacherTopK`, with the methods of `LogitsTeacher`; raises for what a top-K does not contain."""

    strict = True
    """Whether a token outside the top-K raises at once; otherwise it gives NaN."""

    def __init__(self, ids: Tensor, log_probs: Tensor, sampled_log_probs: Tensor | None, vocab_size: int) -> None:
        order = log_probs.argsort(dim=-1, descending=True, stable=True)
        self.ids = ids.gather(-1, order)
        self.known = log_probs.gather(-1, order).clamp(min=LOWEST)
        self.sampled_log_probs = sampled_log_probs
        self.vocab_size = vocab_size

    @classmethod
    def of(cls, teacher: TeacherTopK, batch: Batch, dtype: torch.dtype) -> TopKTeacher:
        """Select and check the masked tokens of what a teacher sent."""
        ids, log_probs, shape = teacher.ids, teacher.log_probs.detach(), batch.shape
        if ids.shape != log_probs.shape or ids.shape[:-1].numel() != shape.numel():
            raise UsageError(
                "TeacherTopK must hold ids and log_probs of shape (B, T, K) for this batch",
                got=f"ids {tuple(ids.shape)}, log_probs {tuple(log_probs.shape)}, batch {tuple(shape)}",
            )
        k = ids.shape[-1]
        ids = batch.select(ids.reshape(*shape, k)).long()
        log_probs = computable(batch.select(log_probs.reshape(*shape, k))).to(dtype)
        check_rows("teacher top-K", log_probs, batch)
        if ids.numel() and not bool(((ids >= 0) & (ids < batch.vocab_size)).all()):
            raise UsageError("TeacherTopK holds an id outside the vocabulary", got=f"V={batch.vocab_size}")
        ordered = ids.sort(-1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise UsageError("TeacherTopK holds an id twice at one position", why="its probability would count twice")
        if bool((log_probs > 1e-3).any()):
            raise UsageError(
                "TeacherTopK.log_probs must be log-probabilities, at most 0",
                got=f"a maximum of {log_probs.max().item():.4g}",
                why="logits are not normalised over the vocabulary, and the rest of it is not here to do so",
            )
        sampled = teacher.sampled_log_probs
        if sampled is not None:
            if sampled.numel() != shape.numel():
                raise UsageError(
                    "TeacherTopK.sampled_log_probs must have the shape (B, T) of the batch",
                    got=f"{tuple(sampled.shape)} for a batch of {tuple(shape)}",
                )
            sampled = computable(batch.select(sampled.reshape(shape).to(ids.device)).detach()).to(dtype)
        return cls(ids, log_probs, sampled, batch.vocab_size)

    @property
    def k(self) -> int:
        """Tokens per position that the teacher sent."""
        return self.ids.shape[-1]

    def part(self, span: slice, *, strict: bool = True) -> TopKTeacher:
        """The same teacher for a slice of the tokens."""
        sampled = None if self.sampled_log_probs is None else self.sampled_log_probs[span]
        part = TopKTeacher(self.ids[span], self.known[span], sampled, self.vocab_size)
        part.strict = strict
        return part

    @property
    def choice(self) -> Tensor:
        best = self.known == self.known[:, :1]
        return torch.where(best, self.ids, self.vocab_size).amin(-1)

    @property
    def entropy(self) -> Tensor:
        raise _unknown("its entropy over the full vocabulary", "entropy='top_k' or 'bucket'")

    def top(self, k: int) -> Top:
        if k > self.k:
            raise UsageError(
                f"the teacher sent its top {self.k}, and top {k} is asked for",
                instead=f"ask the teacher for K ≥ {k}, or use top_k/support_k ≤ {self.k}",
            )
        return Top(self.ids[:, :k], self.known[:, :k])

    def at(self, ids: Tensor, temperature: float) -> Tensor:
        _only_at_one(temperature)
        hit = ids[:, :, None] == self.ids[:, None, :]
        if self.strict and not bool(hit.any(-1).all()):
            raise _unknown("its probability of a token outside its top-K", "support bucket, hybrid or renorm")
        return torch.where(hit.any(-1), (self.known[:, None, :] * hit).sum(-1), torch.nan)

    def log_tail(self, ids: Tensor, temperature: float) -> Tensor:
        _only_at_one(temperature)
        k = ids.shape[-1]
        probs = self.known[:, :k].exp()
        # 1 - Σ top-K is all that is known of the tail, and rounding may make it 0 or negative. No id of the tail is
        # more probable than the last of the top-K, which bounds it from above.
        ceiling = ((self.vocab_size - k) * probs[:, -1]).clamp(min=TAIL_FLOOR)
        return torch.minimum((1 - probs.sum(-1)).clamp(min=TAIL_FLOOR), ceiling).log()

    def sampled(self, ids: Tensor, temperature: float) -> Tensor:
        _only_at_one(temperature)
        hit = ids[:, None] == self.ids
        given = self.sampled_log_probs
        if given is None and self.strict and not bool(hit.any(-1).all()):
            raise _unknown(
                "its log-probability of a response token outside its top-K", "TeacherTopK(sampled_log_probs=...) (B, T)"
            )
        return torch.where(hit.any(-1), (self.known * hit).sum(-1), torch.nan if given is None else given)

    def log_probs(self, start: int, stop: int, temperature: float) -> Tensor:
        raise _unknown("its full distribution, for a sum over the vocabulary", "support='bucket' or 'hybrid'")


Teacher = LogitsTeacher | TopKTeacher


def _unknown(what: str, instead: str) -> UsageError:
    return UsageError(
        f"the teacher sent its top-K, and {what} is needed",
        instead=f"{instead}, or a teacher that gives hidden states or logits",
    )


def _only_at_one(temperature: float) -> None:
    if temperature != 1.0:
        raise _unknown(f"its tail at temperature {temperature:g}", "temperature=1, or support='renorm'")
