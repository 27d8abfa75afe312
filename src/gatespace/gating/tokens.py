"""What may be asked about N tokens: the one interface between numbers and everything that is built from them.

A signal, a support or an objective is a function of `Tokens`. It is written once and serves the plain path (logits in
memory, autograd) and the fused path (hidden states and head rows, chunk by chunk, analytic gradient) alike.

Shapes: N tokens, V vocabulary, K or M selected ids. Log-probabilities are over the full vocabulary unless said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gatespace.errors import UsageError, unknown_name
from gatespace.gating.divergences import Divergence, Tile
from gatespace.gating.layout import Layout
from gatespace.gating.vocabulary import LOWEST, check_k, scaled, tiled_logsumexp, tiles, top_entries, top_entry

ENTROPIES = ("top_k", "full", "bucket")
TAIL_FLOOR = 1e-6
"""Least tail mass of a teacher whose tail is known only as what the top-K leaves over."""


class Top(NamedTuple):
    """The K most probable ids of a side, most probable first, with their log-probabilities."""

    ids: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher known by its K most probable tokens per position, as a server returns them.

    Args:
        ids: (B, T, K) token ids.
        log_probs: (B, T, K) log-probabilities over the full vocabulary at temperature 1. They are never normalised
            again, except by the support `renorm`.
        sampled_log_probs: (B, T) the teacher's log-probability of the response token itself.
    """

    ids: Tensor
    log_probs: Tensor
    sampled_log_probs: Tensor | None = None


@dataclass(frozen=True)
class SignalSettings:
    """How the teacher's entropy is read; part of what identifies a run."""

    top_k: int = 8
    entropy: str = "top_k"

    def __post_init__(self) -> None:
        if self.entropy not in ENTROPIES:
            raise unknown_name("entropy", self.entropy, ENTROPIES)
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1:
            raise UsageError("top_k is a whole number of at least 1", got=self.top_k)


class Teacher(ABC):
    """The teacher's side: constants."""

    vocab_size: int

    @abstractmethod
    def top(self, k: int) -> Top:
        """Its k first choices, at temperature 1."""

    @abstractmethod
    def choice(self) -> Tensor:
        """(N,) its first choice y*; the lowest id among equals."""

    @abstractmethod
    def at(self, ids: Tensor, temperature: float) -> Tensor:
        """(N, M) log-probabilities of `ids` (N, M)."""

    @abstractmethod
    def log_tail(self, ids: Tensor, temperature: float) -> Tensor:
        """(N,) log of the mass outside `ids` (N, K)."""

    @abstractmethod
    def sampled(self, ids: Tensor, temperature: float) -> Tensor:
        """(N,) log-probability of the response tokens `ids` (N,)."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """(N,) entropy over the full vocabulary in nats, at temperature 1."""


class Student(ABC):
    """The student's side; every result carries gradient."""

    vocab_size: int
    dtype: torch.dtype

    @abstractmethod
    def top_ids(self, k: int) -> Tensor:
        """(N, k) ids of its k first choices."""

    @abstractmethod
    def at(self, ids: Tensor, temperature: float) -> Tensor:
        """(N, M) log-probabilities of `ids` (N, M)."""

    @abstractmethod
    def log_tail(self, ids: Tensor, temperature: float) -> Tensor:
        """(N,) log of the mass outside `ids` (N, K)."""

    @abstractmethod
    def sums(self, teacher: Teacher, divergences: tuple[Divergence, ...], temperature: float) -> list[Tensor]:
        """(N,) each: the divergences over the full vocabulary."""


class Tokens:
    """N tokens with both sides, their place in the batch, and the settings under which they are read."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        layout: Layout,
        *,
        temperature: float = 1.0,
        settings: SignalSettings | None = None,
        sampled: Tensor | None = None,
        sampled_log_probs: Tensor | None = None,
        prompt_entropy: Tensor | None = None,
        infinite: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.student = student
        self.teacher = teacher
        self.layout = layout
        self.temperature = temperature
        self.settings = settings or SignalSettings()
        self._sampled = sampled
        self._sampled_log_probs = sampled_log_probs
        self.prompt_entropy = prompt_entropy
        """(N,) u(x) as the caller gave it, or None."""
        self.infinite = infinite
        """(N,) each: where reverse and where forward KL are infinite, because one side alone forbids an id."""
        self.lam: Tensor | None = None
        """(N,) λ as it was dealt out, a constant in place of the objective's own; or None."""
        self.memo: dict[tuple[str, bool], Tensor] = {}
        """Signals that were read already, by name and whether they carry gradient."""

    # ------------------------------------------------------------------ place

    @property
    def count(self) -> int:
        """N."""
        return self.layout.count

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.student.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of every per-token number."""
        return self.student.dtype

    @property
    def device(self) -> torch.device:
        return self.layout.index.device

    @property
    def position(self) -> Tensor:
        """(N,) index within the response, from 0."""
        return self.layout.position

    @property
    def length(self) -> Tensor:
        """(N,) length of the response."""
        return self.layout.length

    def at_first(self, name: str, values: Tensor) -> Tensor:
        """(N,) the value at the first token of each token's response, as a constant. `name` is unique per quantity."""
        return values.detach()[self.layout.first]

    # ------------------------------------------------------------------ teacher

    @property
    def teacher_choice(self) -> Tensor:
        """(N,) y*, the teacher's first choice; the lowest id among equals."""
        return self.teacher.choice()

    def teacher_top(self, k: int) -> Top:
        """The teacher's k first choices at temperature 1."""
        check_k(k, self.vocab_size)
        return self.teacher.top(k)

    def teacher_at(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """(N, M) teacher log-probabilities of `ids` (N, M)."""
        return self.teacher.at(ids, temperature)

    def teacher_log_tail(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """(N,) log of the teacher's mass outside `ids` (N, K)."""
        return self.teacher.log_tail(ids, temperature)

    def teacher_entropy(self) -> Tensor:
        """(N,) the teacher's entropy over the full vocabulary, in nats."""
        return self.teacher.entropy()

    # ------------------------------------------------------------------ student (differentiable)

    def student_at(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """(N, M) student log-probabilities of `ids` (N, M)."""
        return self.student.at(ids, temperature)

    def student_top(self, k: int) -> Top:
        """The student's k first choices at temperature 1."""
        check_k(k, self.vocab_size)
        ids = self.student.top_ids(k)
        return Top(ids, self.student.at(ids, 1.0))

    def student_log_tail(self, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """(N,) log of the student's mass outside `ids` (N, K)."""
        return self.student.log_tail(ids, temperature)

    def divergences(self, *kinds: Divergence, temperature: float | None = None) -> list[Tensor]:
        """(N,) each: divergences over the full vocabulary, at the temperature of the loss unless one is given."""
        chosen = self.temperature if temperature is None else temperature
        return self.student.sums(self.teacher, kinds, chosen)

    # ------------------------------------------------------------------ the response token

    @property
    def sampled(self) -> Tensor:
        """(N,) ids of the response tokens."""
        if self._sampled is None:
            raise UsageError(
                "the response token ids are needed and were not given",
                why="a sampled term looks at the token that the student wrote",
                instead="pass sampled= of shape (B, T)",
            )
        return self._sampled

    def student_sampled(self, *, temperature: float = 1.0) -> Tensor:
        """(N,) student log-probability of the response token (differentiable)."""
        return self.student_at(self.sampled[:, None], temperature=temperature).squeeze(-1)

    def teacher_sampled(self, *, temperature: float = 1.0) -> Tensor:
        """(N,) teacher log-probability of the response token."""
        return self.teacher.sampled(self.sampled, temperature)

    def sampler_log_probs(self, log_student: Tensor) -> Tensor:
        """(N,) log-probability under which the token was sampled; `log_student` (at T=1) where it was on-policy."""
        return log_student.detach() if self._sampled_log_probs is None else self._sampled_log_probs


# ---------------------------------------------------------------------- plain implementations


class LogitsTeacher(Teacher):
    """A teacher known by its logits (N, V), read slice by slice so that no second (N, V) tensor is made."""

    def __init__(self, logits: Tensor, tile: int | None = None) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[-1]
        self.tile = tile or self.vocab_size
        self._normaliser: dict[float, Tensor] = {}
        self._top: dict[int, Top] = {}
        self._choice: Tensor | None = None
        self._entropy: Tensor | None = None

    def normaliser(self, temperature: float) -> Tensor:
        """(N,) logsumexp of the logits at a temperature."""
        if temperature not in self._normaliser:
            self._normaliser[temperature] = tiled_logsumexp(self.logits, temperature, self.tile)
        return self._normaliser[temperature]

    def log_probs(self, start: int, stop: int, temperature: float) -> Tensor:
        """(N, stop-start) log-probabilities of a slice of the vocabulary."""
        return scaled(self.logits[:, start:stop], temperature) - self.normaliser(temperature)[:, None]

    def top(self, k: int) -> Top:
        if k not in self._top:
            values, ids = top_entries(self.logits, k)
            self._top[k] = Top(ids, values - self.normaliser(1.0)[:, None])
        return self._top[k]

    def choice(self) -> Tensor:
        if self._choice is None:
            self._choice = top_entry(self.logits)
        return self._choice

    def at(self, ids: Tensor, temperature: float) -> Tensor:
        return scaled(self.logits.gather(-1, ids), temperature) - self.normaliser(temperature)[:, None]

    def log_tail(self, ids: Tensor, temperature: float) -> Tensor:
        total = tiled_logsumexp(self.logits, temperature, self.tile, without=ids)
        return total - self.normaliser(temperature)

    def sampled(self, ids: Tensor, temperature: float) -> Tensor:
        return self.at(ids[:, None], temperature).squeeze(-1)

    def entropy(self) -> Tensor:
        if self._entropy is None:
            self._entropy = self.logits.new_zeros(self.logits.shape[0])
            for start, stop in tiles(self.vocab_size, self.tile):
                log_probs = self.log_probs(start, stop, 1.0)
                self._entropy -= (log_probs.exp() * log_probs).sum(-1)
        return self._entropy


class TopKTeacher(Teacher):
    """A teacher known by its top-K; what the top-K cannot tell is an error, not a guess."""

    def __init__(self, ids: Tensor, log_probs: Tensor, sampled_log_probs: Tensor | None, vocab_size: int) -> None:
        order = log_probs.argsort(dim=-1, descending=True, stable=True)
        self.ids = ids.gather(-1, order)
        self.log_probs = log_probs.gather(-1, order).clamp(min=LOWEST)
        self.sampled_log_probs = sampled_log_probs
        self.vocab_size = vocab_size

    @property
    def k(self) -> int:
        """How many tokens the teacher sent per position."""
        return self.ids.shape[-1]

    def part(self, span: slice) -> TopKTeacher:
        """The same teacher for some of the tokens."""
        sampled = None if self.sampled_log_probs is None else self.sampled_log_probs[span]
        return TopKTeacher(self.ids[span], self.log_probs[span], sampled, self.vocab_size)

    def top(self, k: int) -> Top:
        if k > self.k:
            raise UsageError(
                f"the teacher sent its top {self.k}, and top {k} is asked for",
                instead=f"ask the teacher for K ≥ {k}, or use top_k/support_k ≤ {self.k}",
            )
        return Top(self.ids[:, :k], self.log_probs[:, :k])

    def choice(self) -> Tensor:
        best = self.log_probs == self.log_probs[:, :1]
        return torch.where(best, self.ids, self.vocab_size).amin(-1)

    def at(self, ids: Tensor, temperature: float) -> Tensor:
        _only_at_one(temperature)
        hit = ids[:, :, None] == self.ids[:, None, :]
        if not bool(hit.any(-1).all()):
            raise UsageError(
                "a top-K teacher was asked for a token outside its top-K",
                instead="use support bucket, hybrid or renorm, or a teacher that gives hidden states or logits",
            )
        return (self.log_probs[:, None, :] * hit).sum(-1)

    def log_tail(self, ids: Tensor, temperature: float) -> Tensor:
        _only_at_one(temperature)
        k = ids.shape[-1]
        probs = self.log_probs[:, :k].exp()
        # 1 - Σ top-K is all that is known of the tail, and rounding may leave it 0 or negative. No id of the tail can
        # be more probable than the last of the top-K, which bounds it from above.
        ceiling = ((self.vocab_size - k) * probs[:, -1]).clamp(min=TAIL_FLOOR)
        return torch.minimum((1 - probs.sum(-1)).clamp(min=TAIL_FLOOR), ceiling).log()

    def sampled(self, ids: Tensor, temperature: float) -> Tensor:
        _only_at_one(temperature)
        hit = ids[:, None] == self.ids
        known = (self.log_probs * hit).sum(-1)
        if self.sampled_log_probs is not None:
            return torch.where(hit.any(-1), known, self.sampled_log_probs)
        if bool(hit.any(-1).all()):
            return known
        raise UsageError(
            "the teacher's log-probability of a response token outside its top-K is needed and was not given",
            instead="pass TeacherTopK(..., sampled_log_probs=...) of shape (B, T)",
        )

    def entropy(self) -> Tensor:
        raise UsageError(
            "the teacher's entropy over the full vocabulary is not known from its top-K",
            instead="use entropy='top_k' or 'bucket', or a teacher that gives hidden states or logits",
        )


class LogitsStudent(Student):
    """A student known by its logits (N, V) in memory; gradients by autograd."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[-1]
        self.dtype = logits.dtype
        self._log_probs: dict[float, Tensor] = {}

    def log_probs(self, temperature: float) -> Tensor:
        if temperature not in self._log_probs:
            self._log_probs[temperature] = scaled(self.logits, temperature).log_softmax(-1)
        return self._log_probs[temperature]

    def top_ids(self, k: int) -> Tensor:
        return self.logits.detach().topk(k, dim=-1).indices

    def at(self, ids: Tensor, temperature: float) -> Tensor:
        return self.log_probs(temperature).gather(-1, ids)

    def log_tail(self, ids: Tensor, temperature: float) -> Tensor:
        return self.log_probs(temperature).scatter(-1, ids, LOWEST).logsumexp(-1)

    def sums(self, teacher: Teacher, divergences: tuple[Divergence, ...], temperature: float) -> list[Tensor]:
        source = full_teacher(teacher)
        tile = Tile(self.log_probs(temperature), source.log_probs(0, source.vocab_size, temperature))
        return [divergence.term(tile).sum(-1) for divergence in divergences]


def full_teacher(teacher: Teacher) -> LogitsTeacher:
    """The teacher as one that knows the whole vocabulary, or an error that says what to use instead."""
    if isinstance(teacher, LogitsTeacher):
        return teacher
    raise UsageError(
        "a sum over the full vocabulary needs the teacher's full distribution, and only its top-K is known",
        instead="support='bucket' or 'hybrid', or a teacher that gives hidden states or logits",
    )


def _only_at_one(temperature: float) -> None:
    if temperature != 1.0:
        raise UsageError(
            "a top-K teacher knows its log-probabilities at temperature 1 only",
            got=f"temperature={temperature:g}",
            why="the tail's share at another temperature cannot be told from the top-K",
            instead="temperature=1, or support='renorm', which needs no tail",
        )
