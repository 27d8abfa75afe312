"""Signals: the per-token numbers that a gate depends on.

h, u and gap are the paper's. Extra signals enter a gate by name, with their own coefficient:
``Gate(a=4, c=-1, extra={"student_entropy": 2})``. A custom signal takes a few lines:

    >>> from gatespace import signals
    >>> @signals.register("margin", range=(0.0, 1.0))
    ... def margin(tokens):
    ...     "How far the teacher's most probable token stands above its second."
    ...     first, second = tokens.teacher_top(2).log_probs.exp().unbind(-1)
    ...     return first - second
    >>> signals.get("margin").range
    (0.0, 1.0)
    >>> signals.unregister("margin")

In a file listed under `plugins` in a configuration, it works wherever a gate is named. Signals are computed at
temperature 1, whatever the temperature of the divergences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gatespace import plugins
from gatespace.errors import UsageError, unknown_name
from gatespace.gating.coefficients import COEFFICIENTS
from gatespace.gating.divergences import JSDDivergence, NegativeEntropy
from gatespace.gating.inputs import Batch, LossInputs
from gatespace.gating.tokens import LogitsTeacher, Teacher, Tokens
from gatespace.gating.vocabulary import (
    LOWEST,
    among,
    check_k,
    computable,
    entropy_of,
    prefix_sums,
    top_k_overlap,
)

SignalFunction = Callable[[Tokens], Tensor]


@dataclass(frozen=True)
class Signal:
    """A named function of tokens and the range of its values."""

    name: str
    function: SignalFunction
    range: tuple[float, float]
    sampled: bool = False
    """Whether it uses the sampled response token."""
    prepass: tuple[str, ...] = ()
    """Signals that it needs for all tokens of the call, see `everywhere`."""

    def __call__(self, tokens: Tokens) -> Tensor:
        values = self.function(tokens)
        if not isinstance(values, Tensor) or values.shape != (tokens.count,):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UsageError(f"the signal {self.name!r} must return one value per token", got=got)
        return values


_REGISTRY: dict[str, Signal] = {}


def register(
    name: str, *, range: tuple[float, float], sampled: bool = False, prepass: tuple[str, ...] = ()
) -> Callable[[SignalFunction], SignalFunction]:
    """Register a function of `Tokens` as a signal.

    The function returns (N,) values; gradient flows through the student's part, unless the gate stops it. A duplicate
    name is an error: a run's identity includes its signals' names.

    Args:
        name: Its name in gates.
        range: Its smallest and largest value.
        sampled: Whether it uses the sampled response token.
        prepass: Signals that it needs for all tokens of the call, through `everywhere`.
    """

    def wrap(function: SignalFunction) -> SignalFunction:
        if name in _REGISTRY or name in COEFFICIENTS:
            raise UsageError(f"the signal name {name!r} is taken", instead="unregister it first, or choose another")
        if not name.isidentifier():
            raise UsageError("a signal's name must be a Python identifier", got=name)
        low, high = float(range[0]), float(range[1])
        if not low < high:
            raise UsageError("a signal's range is (low, high) with low < high", got=range)
        _REGISTRY[name] = Signal(name, function, (low, high), sampled, prepass)
        return function

    return wrap


def unregister(name: str) -> None:
    """Remove a registered signal."""
    get(name)
    del _REGISTRY[name]


def get(name: str) -> Signal:
    """Return the signal of that name: registered, or from a module of the entry-point group `gatespace.signals`."""
    if name not in _REGISTRY:
        for module in plugins.provided("signals"):
            plugins.provider("signals", module)  # importing it registers its signals, once
    if name not in _REGISTRY:
        raise unknown_name("signal", name, _REGISTRY)
    return _REGISTRY[name]


def names() -> list[str]:
    """Return the names of all registered signals, the paper's first."""
    return list(_REGISTRY)


def read(name: str, tokens: Tokens) -> Tensor:
    """Return a signal's values for these tokens, memoised."""
    graph = (name, True)
    key = (name, torch.is_grad_enabled())
    if key in tokens.memo:
        return tokens.memo[key]
    if graph in tokens.memo:
        return tokens.memo[graph].detach()
    tokens.memo[key] = get(name)(tokens)
    return tokens.memo[key]


def everywhere(name: str, tokens: Tokens) -> Tensor:
    """(N,) values of a signal for all tokens of the call, in the order of `tokens.whole`, detached.

    The fused path works chunk by chunk: a signal or objective that calls this lists the name in `prepass`, so that the
    values are computed in an earlier pass.
    """
    if name in tokens.everywhere:
        return tokens.everywhere[name]
    if tokens.count < tokens.whole.count:
        raise UsageError(f"the signal {name!r} is needed of all tokens at once", instead="name it in `prepass`")
    return read(name, tokens).detach()


# ---------------------------------------------------------------------- the paper's signals


@register("h", range=(0.0, 1.0))
def _h(tokens: Tokens) -> Tensor:
    """Teacher entropy at the token, normalised to [0, 1]; no gradient."""
    return normalised_entropy(tokens.teacher, tokens.batch.given)


def normalised_entropy(teacher: Teacher, inputs: LossInputs) -> Tensor:
    """(N,) teacher entropy, normalised to [0, 1] by `top_k` and `entropy` of the inputs."""
    k = inputs.top_k
    if inputs.entropy == "full":
        return (teacher.entropy / math.log(max(teacher.vocab_size, 2))).clamp(0.0, 1.0)
    check_k(k, teacher.vocab_size, "top_k")
    top = teacher.top(k)
    if inputs.entropy == "top_k":
        return entropy_of(top.log_probs)
    # with K = V the tail is empty, but still counts in the denominator
    empty = k == teacher.vocab_size
    tail = torch.full_like(top.log_probs[:, 0], LOWEST) if empty else teacher.log_tail(top.ids, 1.0)
    return entropy_of(torch.cat([top.log_probs, tail[:, None]], -1))


@register("u", range=(0.0, 1.0))
def _u(tokens: Tokens) -> Tensor:
    """Teacher entropy at the first token of the response, repeated over the response; no gradient."""
    given = tokens.batch.given.u
    return tokens.at_first("h", read("h", tokens)) if given is None else given


@register("gap", range=(0.0, 1.0))
def _gap(tokens: Tokens) -> Tensor:
    """One minus the student's probability of the teacher's most probable token; carries gradient."""
    return -torch.expm1(tokens.student_at(tokens.teacher_choice[:, None]).squeeze(-1))


# ---------------------------------------------------------------------- beyond the paper


@register("student_entropy", range=(0.0, 1.0))
def _student_entropy(tokens: Tokens) -> Tensor:
    """Student entropy, by the formula of h on the student's top-K; carries gradient."""
    return entropy_of(tokens.student_top(tokens.top_k).log_probs)


@register("log_ratio", range=(-math.inf, math.inf))
def _log_ratio(tokens: Tokens) -> Tensor:
    """log t(y*) - log s(y*) at the teacher's most probable token y*: ToDi's signal at one entry; carries gradient."""
    choice = tokens.teacher_choice[:, None]
    return (tokens.teacher_at(choice) - tokens.student_at(choice)).squeeze(-1)


@register("jsd", range=(0.0, 1.0))
def _jsd(tokens: Tokens) -> Tensor:
    """Jensen-Shannon divergence of teacher and student over the full vocabulary, in bits; carries gradient."""
    return tokens.divergences(JSDDivergence(0.5), temperature=1.0)[0] / math.log(2)


@register("position", range=(0.0, 1.0))
def _position(tokens: Tokens) -> Tensor:
    """Relative position of the token in its response, from 0 (first) to 1 (last)."""
    last = (tokens.length - 1).clamp(min=1)
    return (tokens.position / last).to(tokens.dtype)


@register("student_entropy_full", range=(0.0, 1.0))
def _student_entropy_full(tokens: Tokens) -> Tensor:
    """Student entropy over the full vocabulary, divided by log V; carries gradient."""
    return -tokens.divergences(NegativeEntropy(), temperature=1.0)[0] / math.log(max(tokens.vocab_size, 2))


@register("advantage", range=(-math.inf, math.inf), sampled=True)
def _advantage(tokens: Tokens) -> Tensor:
    """A = log t(y) - log s(y) at the response token y; no gradient."""
    return (tokens.teacher_sampled() - tokens.student_sampled()).detach()


@register("trust", range=(0.0, 1.0), sampled=True)
def _trust(tokens: Tokens) -> Tensor:
    """min(t(y) / s(y), 1) at the response token y: 1 where the teacher gives it at least s(y); no gradient."""
    return read("advantage", tokens).clamp(max=0.0).exp()


@register("drift", range=(0.0, 1.0), sampled=True, prepass=("advantage",))
def _drift(tokens: Tokens) -> Tensor:
    """Share of the response's disagreement Σ|A| before the token: 0 at the first; no gradient."""
    before, total = _sums(everywhere("advantage", tokens).abs().double(), tokens.whole)
    return (before / total.clamp(min=1e-8)).to(tokens.dtype)[tokens.span]  # the floor is that of IW-OPD


def _sums(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(N,) each: the sum of `values` over the earlier tokens of a token's response, and over the whole response.

    Each response is summed on its own, so that the result is batch-invariant.
    """
    begins = batch.first == torch.arange(batch.count, device=values.device)
    row = begins.cumsum(0) - 1
    rows, longest = int(begins.sum()), int(batch.length.max())
    table = values.new_zeros(rows, longest).index_put((row, batch.position), values)
    sums = prefix_sums(table)
    return sums[row, batch.position] - values, sums[row, -1]


@register("overlap", range=(0.0, 1.0))
def _overlap(tokens: Tokens) -> Tensor:
    """Share of the student's top-K ids that are in the teacher's top-K; no gradient."""
    shared = top_k_overlap(tokens.student_top_ids(tokens.top_k), tokens.teacher_top(tokens.top_k).ids)
    return shared.to(tokens.dtype)


@register("overlap_mass", range=(0.0, 1.0))
def _overlap_mass(tokens: Tokens) -> Tensor:
    """Student probability of the ids that are in both top-K; no gradient."""
    top = tokens.student_top(tokens.top_k)
    return (top.log_probs.detach().exp() * among(top.ids, tokens.teacher_top(tokens.top_k).ids)).sum(-1)


# ---------------------------------------------------------------------- directly from logits


def teacher_entropy(teacher_logits: Tensor, *, top_k: int = 8, entropy: str = "top_k") -> Tensor:
    """h: teacher entropy, normalised to [0, 1].

    The top-K entries are renormalised and their entropy is divided by log K, however many are non-zero.
    ``entropy='full'`` uses all V entries and log V, ``'bucket'`` adds the tail as one more outcome and divides by
    log(K+1).

    Args:
        teacher_logits: (..., V).
        top_k: K. Coefficients are not comparable across K: a two-way tie has h = log 2 / log K.

    Returns:
        (...) in [0, 1].

    Examples:
        >>> tie = torch.tensor([0.0, 0.0, -30.0, -30.0, -30.0, -30.0, -30.0, -30.0])
        >>> round(teacher_entropy(tie).item(), 3)
        0.333
    """
    logits = computable(teacher_logits.detach()).reshape(-1, teacher_logits.shape[-1]).clamp(min=LOWEST)
    values = normalised_entropy(LogitsTeacher(logits), LossInputs(top_k=top_k, entropy=entropy))
    values = torch.where(logits.amax(-1) <= LOWEST, 0.0, values)  # every entry is -inf
    return values.reshape(teacher_logits.shape[:-1])


def gap(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """gap: one minus the student's probability of the teacher's most probable token (ties: lowest id).

    Args:
        student_logits: (..., V); gradient flows back to it.
        teacher_logits: (..., V).

    Returns:
        (...) in [0, 1].
    """
    if student_logits.shape != teacher_logits.shape:
        raise UsageError(
            "student and teacher logits must have one shape",
            got=f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}",
        )
    choice = teacher_logits.detach().argmax(-1, keepdim=True)
    return -torch.expm1(computable(student_logits).log_softmax(-1).gather(-1, choice).squeeze(-1))
