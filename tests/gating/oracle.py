"""The definitions, written in probability space: float64, plain numpy, one token at a time.

Nothing here is fast or clever. A distribution is `exp` of shifted logits divided by its sum, a divergence is
a sum over probabilities, a gradient is the analytic one with respect to the logits. Its self-checks: test_oracle.py.

Every per-token divergence is a `Term`: its value and its gradient with respect to the student's *tempered* logits z/T;
the chain rule's 1/T is applied by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Term(NamedTuple):
    value: float
    grad: Array  # (V,)


# ---------------------------------------------------------------------------------------------- probabilities


def probabilities(logits: Array, temperature: float = 1.0) -> Array:
    """exp(z/T) / Σ exp(z/T), shifted by the largest; the same along the last axis for any leading shape."""
    z = np.asarray(logits, dtype=np.float64) / temperature
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def xlog(x: Array, y: Array) -> Array:
    """x·log y, and 0 where x is 0."""
    x, y = np.broadcast_arrays(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
    out = np.zeros(x.shape)
    positive = x > 0
    out[positive] = x[positive] * np.log(y[positive])
    return out


def top_ids(p: Array, k: int) -> Array:
    """The k ids of largest probability, descending; the lowest id first among equals."""
    return np.argsort(-p, kind="stable")[:k]


def through_softmax(psi: Array, s: Array) -> Array:
    """∂D/∂z for D = Σ f(s_v), where psi_v = s_v ∂f/∂s_v."""
    return psi - s * psi.sum()


def indicator(size: int, index: int) -> Array:
    out = np.zeros(size)
    out[index] = 1.0
    return out


def sigmoid(x: float) -> float:
    if x < 0:
        return 1.0 - sigmoid(-x)
    return 1.0 / (1.0 + math.exp(-x))


# ---------------------------------------------------------------------------------------------- signals


def shannon(p: Array) -> float:
    """Entropy in nats."""
    return float(-xlog(p, p).sum())


def teacher_entropy(logits: Array, top_k: int = 8, entropy: str = "top_k") -> float:
    """h of one token, in [0, 1]."""
    logits = np.asarray(logits, dtype=np.float64)
    if np.all(np.isneginf(logits)):
        return 0.0
    t = probabilities(logits)
    head = t[top_ids(t, top_k)]
    if entropy == "full":
        outcomes = t
    elif entropy == "bucket":
        outcomes = np.append(head, max(0.0, 1.0 - head.sum()))
    else:
        outcomes = head / head.sum()
    if len(outcomes) == 1:
        return 0.0
    return min(1.0, max(0.0, shannon(outcomes) / math.log(len(outcomes))))


def teacher_choice(teacher_logits: Array) -> int:
    """y*: the teacher's first choice, the lowest id among equals."""
    return int(np.argmax(np.asarray(teacher_logits)))


def gap(student_logits: Array, teacher_logits: Array) -> Term:
    y = teacher_choice(teacher_logits)
    s = probabilities(student_logits)
    return Term(1.0 - s[y], -s[y] * (indicator(len(s), y) - s))


def samples(mask: Array, segment_ids: Array | None = None) -> list[list[tuple[int, int]]]:
    """The masked positions (b, t) of every sample, in order: a sample is a row, or a segment of a row."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                key = (b, 0 if segment_ids is None else int(segment_ids[b, t]))
                found.setdefault(key, []).append((b, t))
    return list(found.values())


def prompt_entropy(
    teacher: Array, mask: Array, top_k: int = 8, entropy: str = "top_k", segment_ids: Array | None = None
) -> Array:
    """u: h at the first masked token of each sample, repeated over the sample's tokens; 0 outside the mask."""
    u = np.zeros(mask.shape)
    for tokens in samples(mask, segment_ids):
        for position in tokens:
            u[position] = teacher_entropy(teacher[tokens[0]], top_k, entropy)
    return u


def student_entropy(student_logits: Array, teacher_logits: Array, top_k: int) -> Term:
    """The h formula on the student's own top-K; the gradient of an entropy is -p(log p + H)."""
    s = probabilities(student_logits)
    ids = top_ids(s, top_k)
    grad = np.zeros(len(s))
    if top_k == 1:
        return Term(0.0, grad)
    head = s[ids] / s[ids].sum()
    nats = shannon(head)
    grad[ids] = -head * (np.log(head) + nats) / math.log(top_k)
    return Term(nats / math.log(top_k), grad)


def log_ratio(student_logits: Array, teacher_logits: Array, top_k: int) -> Term:
    s, t, y = probabilities(student_logits), probabilities(teacher_logits), teacher_choice(teacher_logits)
    return Term(math.log(t[y]) - math.log(s[y]), s - indicator(len(s), y))


def jsd_signal(student_logits: Array, teacher_logits: Array, top_k: int) -> Term:
    value, grad = jsd(probabilities(student_logits), probabilities(teacher_logits), 0.5)
    return Term(value / math.log(2), grad / math.log(2))


SIGNALS: dict[str, Callable[[Array, Array, int], Term]] = {
    "student_entropy": student_entropy,
    "log_ratio": log_ratio,
    "jsd": jsd_signal,
}


# ---------------------------------------------------------------------------------------------- divergences


def forward_kl(s: Array, t: Array) -> Term:
    """KL(teacher‖student); `t` need not sum to 1."""
    return Term(float((xlog(t, t) - xlog(t, s)).sum()), through_softmax(-t, s))


def reverse_kl(s: Array, t: Array) -> Term:
    """KL(student‖teacher)."""
    terms = xlog(s, s) - xlog(s, t)
    return Term(float(terms.sum()), through_softmax(terms, s))


class Pair(NamedTuple):
    forward: Term
    reverse: Term
    tail_mass: float  # the student's mass outside the support


def pair(
    s: Array, t: Array, support: str = "full", k: int = 8, y: int | None = None, log_mu: float | None = None
) -> Pair:
    """Forward and reverse KL of one token in a support; `log_mu` is None where y was drawn from `s` itself."""
    size = len(s)
    if support == "full":
        return Pair(forward_kl(s, t), reverse_kl(s, t), 0.0)
    ids = top_ids(t, k)
    inside = np.zeros(size, dtype=bool)
    inside[ids] = True
    tail_mass = float(s[~inside].sum())
    if support == "bucket":
        return Pair(*_bucket(s, t, inside), tail_mass)
    if support == "renorm":
        return Pair(_renorm(s, t, inside, forward_kl), _renorm(s, t, inside, reverse_kl), tail_mass)
    assert support == "hybrid", support
    return Pair(*_hybrid(s, t, inside, y, log_mu), tail_mass)


def sampler(logits: Array, y: int, log_probs: Array | None, position: tuple[int, int]) -> float:
    """log μ of the sampled token: as given, else the current student's at T = 1, which is what on-policy means."""
    return math.log(probabilities(logits)[y]) if log_probs is None else float(log_probs[position])


def _bucket(s: Array, t: Array, inside: Array) -> tuple[Term, Term]:
    """The top-K ids and one outcome that is all the others."""
    if inside.all():
        return forward_kl(s, t), reverse_kl(s, t)
    ids = np.flatnonzero(inside)
    outcomes_s = np.append(s[ids], s[~inside].sum())
    outcomes_t = np.append(t[ids], t[~inside].sum())
    terms = []
    for kl in (forward_kl, reverse_kl):
        value, of_outcome = kl(outcomes_s, outcomes_t)
        grad = np.zeros(len(s))
        grad[ids] = of_outcome[:-1]
        # The tail outcome's logit is the logsumexp of its members: each member gets its share.
        grad[~inside] = of_outcome[-1] * s[~inside] / s[~inside].sum()
        terms.append(Term(value, grad))
    return terms[0], terms[1]


def _renorm(s: Array, t: Array, inside: Array, kl: Callable[[Array, Array], Term]) -> Term:
    value, of_head = kl(s[inside] / s[inside].sum(), t[inside] / t[inside].sum())
    grad = np.zeros(len(s))
    grad[inside] = of_head
    return Term(value, grad)


def _hybrid(s: Array, t: Array, inside: Array, y: int | None, log_mu: float | None) -> tuple[Term, Term]:
    """Exact head; the tail from the one sampled token, whose weights are constants in the gradient."""
    assert y is not None
    head_l = np.where(inside, np.log(s) - np.log(t), 0.0)
    reverse = float((s * head_l).sum())
    reverse_grad = through_softmax(np.where(inside, s * (head_l + 1.0), 0.0), s)
    forward, forward_grad = forward_kl(s, np.where(inside, t, 0.0))
    if not inside[y]:
        weight = 1.0 if log_mu is None else s[y] / math.exp(log_mu)
        ratio, l_y = t[y] / s[y], math.log(s[y]) - math.log(t[y])
        score = indicator(len(s), y) - s
        reverse += weight * l_y
        reverse_grad = reverse_grad + weight * (l_y + 1.0) * score
        forward += weight * ratio * -l_y
        forward_grad = forward_grad - weight * ratio * score
    return Term(forward, forward_grad), Term(reverse, reverse_grad)


def todi(s: Array, t: Array, beta: float = 1.0) -> Term:
    alpha = 1.0 / (1.0 + (s / t) ** beta)
    l = np.log(s) - np.log(t)
    value = (alpha * t * -l + (1.0 - alpha) * s * l).sum()
    return Term(float(value), through_softmax(-alpha * t + (1.0 - alpha) * s * (l + 1.0), s))


def jsd(s: Array, t: Array, beta: float = 0.5) -> Term:
    m = beta * t + (1.0 - beta) * s
    value = beta * (xlog(t, t) - xlog(t, m)).sum() + (1.0 - beta) * (xlog(s, s) - xlog(s, m)).sum()
    return Term(float(value), through_softmax((1.0 - beta) * (xlog(s, s) - xlog(s, m)), s))


def skl(s: Array, t: Array, alpha: float = 0.1) -> Term:
    """KL(t ‖ αt + (1-α)s)."""
    m = alpha * t + (1.0 - alpha) * s
    return Term(float((xlog(t, t) - xlog(t, m)).sum()), through_softmax(-(1.0 - alpha) * s * t / m, s))


def srkl(s: Array, t: Array, alpha: float = 0.1, detach_mixture: bool = False) -> Term:
    """KL(s ‖ (1-α)t + αs)."""
    m = (1.0 - alpha) * t + alpha * s
    terms = xlog(s, s) - xlog(s, m)
    psi = terms if detach_mixture else terms - alpha * s * s / m
    return Term(float(terms.sum()), through_softmax(psi, s))


def abkd(s: Array, t: Array, alpha: float = 0.2, beta: float = 0.7) -> Term:
    both = alpha + beta
    inner = t**alpha * s**beta - alpha / both * t**both - beta / both * s**both
    return Term(float(-inner.sum() / (alpha * beta)), through_softmax((s**both - t**alpha * s**beta) / alpha, s))


def akl_weight(s: Array, t: Array, mass: float = 0.5) -> float:
    """λ of AKL: how much of the difference lies outside the teacher's head.

    The head: ids in descending order while their cumulative mass is at most `mass`, and the first in any case.
    """
    head_gap = tail_gap = cumulative = 0.0
    for rank, v in enumerate(top_ids(t, len(t))):
        cumulative += t[v]
        if rank == 0 or cumulative <= mass:
            head_gap += abs(t[v] - s[v])
        else:
            tail_gap += abs(t[v] - s[v])
    total = head_gap + tail_gap
    return 0.5 if total == 0 else tail_gap / total


def akl(s: Array, t: Array, mass: float = 0.5) -> Term:
    lam = akl_weight(s, t, mass)
    forward, reverse = forward_kl(s, t), reverse_kl(s, t)
    return Term(lam * reverse.value + (1 - lam) * forward.value, lam * reverse.grad + (1 - lam) * forward.grad)


def policy_gradient(s: Array, t: Array, y: int, log_old: float | None = None, clip: float = 0.2) -> Term:
    """max(-Aρ, -A·clip(ρ)), A = log t(y) - log s_old(y), ρ = s(y)/s_old(y); all at T = 1, where y was drawn."""
    old = math.log(s[y]) if log_old is None else log_old
    advantage, ratio = math.log(t[y]) - old, s[y] / math.exp(old)
    free, held = -advantage * ratio, -advantage * min(max(ratio, 1.0 - clip), 1.0 + clip)
    if held > free:  # there the ratio is a constant
        return Term(held, np.zeros(len(s)))
    return Term(free, free * (indicator(len(s), y) - s))


def eopd(
    student: Array,
    teacher: Array,
    *,
    y: int | None = None,
    log_old: float | None = None,
    tau: float = 0.8,
    alpha: float = 1.0,
    pg: str = "sampled",
    clip: float = 0.2,
    top_k: int = 16,
    temperature: float = 1.0,
) -> Term:
    """From logits: the policy gradient and the entropy are those of T = 1, the forward KL is that of z/T."""
    s, t = probabilities(student), probabilities(teacher)
    if pg == "exact":
        policy = reverse_kl(s, t)
    else:
        assert y is not None
        policy = policy_gradient(s, t, y, log_old, clip)
    # The caller divides by T; the policy's part has no T to divide by.
    value, grad = policy.value, policy.grad * temperature
    if shannon(t) > tau:
        warm_s, warm_t = probabilities(student, temperature), probabilities(teacher, temperature)
        ids = top_ids(warm_t, top_k)
        head = np.zeros(len(t))
        head[ids] = warm_t[ids] / warm_t[ids].sum()
        extra = forward_kl(warm_s, head)
        value, grad = value + alpha * extra.value, grad + alpha * extra.grad
    return Term(float(value), grad)


def sampled_reverse_kl(s: Array, t: Array, *, y: int, log_old: float | None = None, estimator: str = "k1") -> Term:
    """The surrogate ρ·sg[k], k1 = log s_old(y) - log t(y), k3 = t/s_old - 1 + k1; its gradient is ρ·k·∇log s_y."""
    old = math.log(s[y]) if log_old is None else log_old
    constant = old - math.log(t[y])
    if estimator == "k3":
        constant += t[y] / math.exp(old) - 1.0
    ratio = s[y] / math.exp(old)
    return Term(ratio * constant, ratio * constant * (indicator(len(s), y) - s))


def vopd(s: Array, t: Array, *, y: int, log_old: float | None = None) -> Term:
    """ρ·sg[log s_old(y) - log t(y) - R]: the surrogate of the sampled reverse KL with its mean taken off."""
    old = math.log(s[y]) if log_old is None else log_old
    ratio = s[y] / math.exp(old)
    weight = ratio * (old - math.log(t[y]) - reverse_kl(s, t).value)
    return Term(weight, weight * (indicator(len(s), y) - s))


def student_top_k(s: Array, t: Array, k: int = 16, ids: str = "student", form: str = "release") -> Term:
    """Reverse KL on chosen ids: a policy gradient of each id, both sides renormalised, or all others as one outcome."""
    own, others = (np.isin(np.arange(len(s)), top_ids(side, k)) for side in (s, t))
    inside = {"student": own, "teacher": others, "union": own | others, "intersection": own & others}[ids]
    if form == "bucket":
        return _bucket(s, t, inside)[1]
    if not inside.any():
        return Term(0.0, np.zeros(len(s)))
    if form == "equation":
        return _renorm(s, t, inside, reverse_kl)
    minus_advantage = np.where(inside, s / s[inside].sum() * (np.log(s) - np.log(t)), 0.0)
    # a constant each, times s/s_old, whose gradient is that of log s
    return Term(float(minus_advantage.sum()), minus_advantage - s * minus_advantage.sum())


def renormalised_reverse_kl(s: Array, t: Array, k: int) -> Term:
    return _renorm(s, t, np.isin(np.arange(len(t)), top_ids(t, k)), reverse_kl)


def taid(s: Array, t: Array, tau: float = 0.4) -> Term:
    """KL(p ‖ s) to the constant p, whose logits lie between those of both sides."""
    p = s ** (1.0 - tau) * t**tau
    p = p / p.sum()
    return Term(float((xlog(p, p) - xlog(p, s)).sum()), s - p)


# ---------------------------------------------------------------------------------------------- a batch


@dataclass
class Batch:
    """What a loss gives: scalars, (B, T) telemetry and gradients."""

    loss: float
    grad: Array  # (B, T, V), with respect to the student's logits
    per_token: Array
    lam: Array
    forward_kl: Array
    reverse_kl: Array
    h: Array
    u: Array
    gap: Array
    tail_mass: Array
    coefficient_grad: Array  # (4 + extras,)
    signals: dict[str, Array] = field(default_factory=dict)


def gated(
    student: Array,
    teacher: Array,
    *,
    abcd: Sequence[float],
    extra: Mapping[str, float] | None = None,
    mask: Array | None = None,
    top_k: int = 8,
    temperature: float = 1.0,
    stop_gradient: bool = False,
    support: str = "full",
    support_k: int | None = None,
    entropy: str = "top_k",
    sampled: Array | None = None,
    sampled_log_probs: Array | None = None,
    segment_ids: Array | None = None,
    u: Array | None = None,
    total_tokens: float | None = None,
    signals: Mapping[str, Callable[[Array, Array, int], Term]] | None = None,
) -> Batch:
    """L = Σ [λR + (1-λ)F] / tokens, λ = σ(a·h + b·u + c + d·gap + Σ e·signal), its gradient and its telemetry.

    The signals are those of T = 1, so their gradients carry no 1/T; the KLs are those of z/T and do.
    """
    known = {**SIGNALS, **(signals or {})}
    weights = dict(sorted((extra or {}).items()))
    a, b, c, d = abcd
    shape = student.shape[:2]
    keep = np.ones(shape, dtype=bool) if mask is None else np.asarray(mask) != 0
    k = top_k if support_k is None else support_k
    tokens = float(keep.sum()) if total_tokens is None else total_tokens
    if u is None:
        per_sample = prompt_entropy(teacher, keep, top_k, entropy, segment_ids)
    else:
        per_sample = np.where(keep, u if np.ndim(u) == 2 else np.asarray(u)[:, None], 0.0)
    where_in_sample = {
        position: (i, len(group)) for group in samples(keep, segment_ids) for i, position in enumerate(group)
    }

    zero = {name: np.zeros(shape) for name in ("per_token", "lam", "forward_kl", "reverse_kl", "h", "gap", "tail_mass")}
    out = Batch(
        loss=0.0,
        grad=np.zeros(student.shape),
        u=per_sample,
        coefficient_grad=np.zeros(4 + len(weights)),
        signals={name: np.zeros(shape) for name in weights},
        **zero,
    )
    for bt in zip(*np.nonzero(keep), strict=True):
        z, zt = np.asarray(student[bt], dtype=np.float64), np.asarray(teacher[bt], dtype=np.float64)
        forward, reverse, out.tail_mass[bt] = pair(
            probabilities(z, temperature),
            probabilities(zt, temperature),
            support,
            k,
            None if sampled is None else int(sampled[bt]),
            None if sampled is None else sampler(z, int(sampled[bt]), sampled_log_probs, bt),
        )
        h, gap_term = teacher_entropy(zt, top_k, entropy), gap(z, zt)
        logit = a * h + b * per_sample[bt] + c + d * gap_term.value
        gate_grad = d * gap_term.grad
        read = []
        for name, weight in weights.items():
            if name == "position":
                index, length = where_in_sample[bt]
                term = Term(index / (length - 1) if length > 1 else 0.0, np.zeros(len(z)))
            else:
                term = known[name](z, zt, top_k)
            out.signals[name][bt] = term.value
            logit += weight * term.value
            gate_grad = gate_grad + weight * term.grad
            read.append(term.value)
        lam = sigmoid(logit)
        slope = lam * (1.0 - lam) * (reverse.value - forward.value)
        grad = (lam * reverse.grad + (1.0 - lam) * forward.grad) / temperature
        if not stop_gradient:
            grad = grad + slope * gate_grad
        out.grad[bt] = grad / tokens
        out.h[bt], out.gap[bt], out.lam[bt] = h, gap_term.value, lam
        out.forward_kl[bt], out.reverse_kl[bt] = forward.value, reverse.value
        out.per_token[bt] = lam * reverse.value + (1.0 - lam) * forward.value
        out.coefficient_grad += slope * np.array([h, per_sample[bt], 1.0, gap_term.value, *read]) / tokens
    out.loss = out.per_token.sum() / tokens if tokens else 0.0
    return out


def batch_of(
    student: Array,
    teacher: Array,
    row: Callable[[Array, Array, tuple[int, int]], Term],
    *,
    mask: Array | None = None,
    temperature: float = 1.0,
    total_tokens: float | None = None,
) -> tuple[float, Array, Array]:
    """(loss, per_token, gradient) of any per-token divergence `row(s, t, (b, t))`."""
    shape = student.shape[:2]
    keep = np.ones(shape, dtype=bool) if mask is None else np.asarray(mask) != 0
    tokens = float(keep.sum()) if total_tokens is None else total_tokens
    per_token, grad = np.zeros(shape), np.zeros(student.shape)
    for bt in zip(*np.nonzero(keep), strict=True):
        term = row(probabilities(student[bt], temperature), probabilities(teacher[bt], temperature), bt)
        per_token[bt] = term.value
        grad[bt] = term.grad / temperature / tokens
    return (per_token.sum() / tokens if tokens else 0.0), per_token, grad


def finite_difference(f: Callable[[Array], float], x: Array, step: float = 1e-5) -> Array:
    """Central differences of a scalar function."""
    grad = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        grad[index] = (f(up) - f(down)) / (2 * step)
    return grad
