"""Supports: the ids that the KLs sum over, for teachers known only in part.

full    the whole vocabulary.
bucket  the teacher's top-K, and everything else as one more outcome: a valid KL, never above the full one.
hybrid  the top-K exactly and the tail by the sampled token: unbiased in value and gradient on-policy.
renorm  both sides renormalised on the top-K: a valid KL that is blind to mass leaving the top-K.
student the student's top-K, and everything else as one more outcome: a valid KL, never above the full one; needs the
        teacher's probabilities of ids that the student chooses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gatespace.errors import unknown_name
from gatespace.gating.divergences import ForwardKL, ReverseKL, Tile, not_negative
from gatespace.gating.tokens import TAIL_FLOOR, Tokens, TopKTeacher
from gatespace.gating.vocabulary import LOWEST, among, check_k

SUPPORTS = ("full", "bucket", "hybrid", "renorm", "student")
_REVERSE, _FORWARD = ReverseKL(), ForwardKL()


class KLPair(NamedTuple):
    """Both KLs per token, and the student mass that the support does not resolve."""

    reverse: Tensor
    forward: Tensor
    tail_mass: Tensor


def check_support(support: str) -> str:
    """Return the name, or raise if it is unknown."""
    if support not in SUPPORTS:
        raise unknown_name("support", support, SUPPORTS)
    return support


def kl_pair(tokens: Tokens, support: str = "full", k: int | None = None) -> KLPair:
    """Reverse and forward KL per token on a support, at the tokens' temperature.

    Args:
        k: K of the top-K supports; None: that of a top-K teacher, else that of the signals.
    """
    check_support(support)
    if support == "full":
        reverse, forward = tokens.divergences(_REVERSE, _FORWARD)
        if tokens.infinite is not None:
            reverse = reverse.masked_fill(tokens.infinite[0], torch.inf)
            forward = forward.masked_fill(tokens.infinite[1], torch.inf)
        return KLPair(not_negative(reverse), not_negative(forward), torch.zeros_like(forward.detach()))
    if k is None:
        k = tokens.teacher.k if isinstance(tokens.teacher, TopKTeacher) else tokens.top_k
    check_k(k, tokens.vocab_size, "support_k")
    if support == "student":
        return with_tail(tokens, *chosen_ids(tokens, k, "student"))
    if support == "hybrid":
        return _hybrid(tokens, k)
    top, at = tokens.teacher_top(k), tokens.temperature
    if support == "renorm":
        # the teacher's log-probabilities at T=1, divided by T and renormalised, equal softmax(logits / T) on the top-K,
        # so a top-K teacher works at any temperature here
        return renormalised_pair(tokens.student_at(top.ids, temperature=at), top.log_probs / at)
    if k == tokens.vocab_size:  # no tail
        log_t = tokens.teacher_at(top.ids, temperature=at)
        return _pair(tokens.student_at(top.ids, temperature=at), log_t, torch.zeros_like(log_t[:, 0]))
    return with_tail(tokens, *chosen_ids(tokens, k, "teacher"))


IDS = ("student", "teacher", "union", "intersection")


def chosen_ids(tokens: Tokens, k: int, whose: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (N, M) from both sides' top-k, which of them count, and which are duplicates of an earlier one.

    Args:
        whose: student, teacher, union or intersection of both top-k.
    """
    ids = tokens.teacher_top(k).ids if whose == "teacher" else tokens.student_top_ids(k)
    again = torch.zeros_like(ids, dtype=torch.bool)
    counts = ~again
    if whose == "union":
        more = tokens.teacher_top(k).ids
        again = torch.cat([again, among(more, ids)], -1)
        ids, counts = torch.cat([ids, more], -1), ~again
    elif whose == "intersection":
        counts = among(ids, tokens.teacher_top(k).ids)
    return ids, counts, again


def with_tail(tokens: Tokens, ids: Tensor, counts: Tensor, again: Tensor) -> KLPair:
    """Both KLs over the ids that count, and everything else as one more outcome (see `chosen_ids`)."""
    at = tokens.temperature
    log_s, log_t = tokens.student_at(ids, temperature=at), tokens.teacher_at(ids, temperature=at)
    single = counts & (log_t > LOWEST / 2)  # an id that the teacher forbids is not an outcome: it goes to the tail
    rest = ~single & ~again
    tail_s = _and_rest(tokens.student_log_tail(ids, temperature=at), log_s, rest)
    tail_t = _and_rest(tokens.teacher.log_tail(ids, at), log_t, rest)
    log_s, log_t = log_s.masked_fill(~single, LOWEST), log_t.masked_fill(~single, LOWEST)
    # a tail of exactly 0 on the teacher's side alone would make reverse KL infinite
    floor = torch.full_like(tail_t, TAIL_FLOOR).log()
    tail_t = torch.where((tail_t <= LOWEST / 2) & (tail_s > LOWEST / 2), floor, tail_t)
    log_s, log_t = torch.cat([log_s, tail_s[:, None]], -1), torch.cat([log_t, tail_t[:, None]], -1)
    return _pair(log_s, log_t, tail_s.detach().exp())


def _and_rest(log_tail: Tensor, log_probs: Tensor, rest: Tensor) -> Tensor:
    """log of the tail's mass plus that of the ids in `rest`."""
    return torch.cat([log_tail[:, None], log_probs.masked_fill(~rest, LOWEST)], -1).logsumexp(-1)


def _pair(log_s: Tensor, log_t: Tensor, tail_mass: Tensor) -> KLPair:
    tile = Tile(log_s, log_t)
    reverse, forward = _REVERSE.term(tile).sum(-1), _FORWARD.term(tile).sum(-1)
    return KLPair(not_negative(reverse), not_negative(forward), tail_mass)


def renormalised_pair(log_s: Tensor, log_t: Tensor) -> KLPair:
    """Both KLs of log-probabilities (N, K), each side renormalised over its K entries."""
    # what the teacher alone forbids stays forbidden, even where that is every entry
    forbidden = (log_t <= LOWEST / 2) & (log_s > LOWEST / 2)
    return _pair(log_s.log_softmax(-1), log_t.log_softmax(-1).masked_fill(forbidden, LOWEST), _mass_outside(log_s))


def _mass_outside(log_s: Tensor) -> Tensor:
    return (1 - log_s.detach().exp().sum(-1)).clamp(min=0.0)


def _hybrid(tokens: Tokens, k: int) -> KLPair:
    temperature = tokens.temperature
    ids = tokens.teacher_top(k).ids
    sampled = tokens.sampled
    log_t = tokens.teacher_at(ids, temperature=temperature)
    log_s = tokens.student_at(ids, temperature=temperature)
    ratio = log_s - log_t
    outside = (ids != sampled[:, None]).all(-1)

    log_sy = tokens.student_sampled(temperature=temperature)
    log_ty = torch.where(outside, tokens.teacher_sampled(temperature=temperature), log_sy.detach())
    at_one = log_sy if temperature == 1.0 else tokens.student_sampled()
    # importance weight: the expectation is over the student at the loss temperature, the token from the sampler
    weight = (log_sy.detach() - tokens.sampler_log_probs(at_one)).exp() * outside
    ratio_y = (log_sy - log_ty).detach()
    score = log_sy - log_sy.detach()  # value 0, gradient ∇log s_y
    odds = (-ratio_y).exp()  # t_y / s_y
    reverse = (log_s.exp() * ratio).sum(-1) + weight * (ratio_y + (ratio_y + 1) * score)
    forward = (-log_t.exp() * ratio).sum(-1) - weight * odds * (ratio_y + score)
    return KLPair(reverse, forward, _mass_outside(log_s))
