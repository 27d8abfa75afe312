"""Published on-policy distillation methods of 2026, and DistiLLM-2.

They weight or select tokens by the sampled response, sum over ids that the student chooses, or depend on the source of
the response. Formulas, sources and known differences from the authors' releases: docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gatespace.errors import UsageError, unknown_name
from gatespace.gating import signals
from gatespace.gating.divergences import ReverseKL, SkewForwardKL, SkewReverseKL, not_negative
from gatespace.gating.objectives import Objective, register
from gatespace.gating.supports import IDS, chosen_ids, kl_pair, renormalised_pair, with_tail
from gatespace.gating.tokens import Tokens
from gatespace.gating.vocabulary import LOWEST, check_k

_FORMS = ("release", "equation", "bucket")


@register("student_top_k")
@dataclass(frozen=True)
class StudentTopK(Objective):
    """Reverse KL on the student's k most probable ids S, in one of three forms.

    ``release`` is the authors' code: a policy-gradient term for every id of S instead of the sampled one alone, with
    the advantage s̃·(log t - log s), s̃ the student renormalised on S. Its value can be negative; its gradient is 0 at
    s = t. The ratio ρ = s/s_old has the value 1 here, since no log-probabilities of S are kept from the rollout, so the
    release's clip never acts; nor does it in the authors' script, which has one update per rollout.

    Args:
        top_k: k.
        ids: student, teacher, union or intersection of both sides' top-k.
        form: ``release``; ``equation``: the paper's KL(s̃‖t̃), both renormalised on S; ``bucket``: everything outside S
            as one more outcome on both sides, never above KL(s‖t).
    """

    summary: ClassVar[str] = "reverse KL on the student's own top-k"
    formula: ClassVar[str] = (
        "release: Σ_v ρ_v·sg[s̃_v(log s_v − log t_v)] over v in the student's top-k, s̃ renormalised on it; equation: "
        "KL(s̃‖t̃); bucket: KL(s‖t) of the top-k and the rest as one outcome"
    )
    citation: ClassVar[str] = (
        "Rethinking On-Policy Distillation of Large Language Models: Phenomenology, Mechanism, and Recipe (2026). "
        "arXiv:2604.13016. Code: thunlp/OPD. The form bucket is ours."
    )

    top_k: int = 16
    ids: str = "student"
    form: str = "release"

    def __post_init__(self) -> None:
        if self.ids not in IDS:
            raise unknown_name("ids of student_top_k", self.ids, IDS)
        if self.form not in _FORMS:
            raise unknown_name("form of student_top_k", self.form, _FORMS)

    def further_signals(self) -> tuple[str, ...]:
        return ("overlap", "overlap_mass")

    def divergence(self, tokens: Tokens) -> Tensor:
        check_k(self.top_k, tokens.vocab_size, "top_k of student_top_k")
        ids, counts, again = chosen_ids(tokens, self.top_k, self.ids)
        if self.form == "bucket":
            return with_tail(tokens, ids, counts, again).reverse
        at = tokens.temperature
        log_s = tokens.student_at(ids, temperature=at).masked_fill(~counts, LOWEST)
        log_t = tokens.teacher_at(ids, temperature=at).masked_fill(~counts, LOWEST)
        if self.form == "equation":
            return renormalised_pair(log_s, log_t).reverse
        advantage = log_s.log_softmax(-1).exp() * (log_t - log_s)
        return -(advantage.detach() * (log_s - log_s.detach()).exp()).sum(-1)


@register("revisiting_opd")
@dataclass(frozen=True)
class RevisitingOPD(Objective):
    """Reverse KL with both sides renormalised on the teacher's top-k; special tokens are masked.

    Published with rollouts at top-p 0.9, a setting of the run (`rollout.top_p`).

    Args:
        top_k: k.
        share: Share of a micro-batch's tokens to train on, those with the highest student entropy; 1: all.
        mask_special: Whether to mask special tokens of the response, such as end of turn.
    """

    summary: ClassVar[str] = "reverse KL renormalised on the teacher's top-k"
    formula: ClassVar[str] = "KL(s̃‖t̃), s̃ and t̃ renormalised on the teacher's top-k; special tokens do not count"
    citation: ClassVar[str] = (
        "Fu, Huang, Jiang, Zhu, Zhao (2026). Revisiting On-Policy Distillation: Empirical Failure Modes and Simple "
        "Fixes. arXiv:2603.25562. Code: hhh675597/revisiting_opd."
    )

    top_k: int = 32
    share: float = 1.0
    mask_special: bool = True

    def __post_init__(self) -> None:
        _check_share("revisiting_opd", self.share)

    def ahead(self) -> tuple[str, ...]:
        return ("student_entropy_full",) if self.selects() else ()

    def selects(self) -> bool:
        return self.share < 1

    def skips_special(self) -> bool:
        return self.mask_special

    def divergence(self, tokens: Tokens) -> Tensor:
        return kl_pair(tokens, "renorm", self.top_k).reverse

    def token_weight(self, tokens: Tokens) -> Tensor | None:
        if not self.selects():
            return None
        return _highest(signals.everywhere("student_entropy_full", tokens), self.share, tokens)


@register("tip")
@dataclass(frozen=True)
class TIP(Objective):
    """Reverse KL on a share of the tokens, drawn without replacement with weight H^α·J^γ.

    H is the student's entropy over the full vocabulary divided by log V, J the Jensen-Shannon divergence in bits.
    Tokens are drawn within a micro-batch by the largest log(noise)/weight (`LossInputs.noise`), which is equivalent to
    sequential draws without replacement.

    Args:
        share: Share of the tokens to keep.
        alpha: Exponent α of the entropy.
        gamma: Exponent γ of the divergence; 0: entropy alone.
    """

    summary: ClassVar[str] = "reverse KL of tokens drawn by entropy and divergence"
    formula: ClassVar[str] = (
        "w·KL(s‖t), w in {0, 1}: a share of the tokens, drawn with weight (H_s/log V)^α·(JSD/log 2)^γ"
    )
    citation: ClassVar[str] = (
        "Xu, Sang, Zhou, He, Wang, Geramifard (2026). TIP: Token Importance in On-Policy Distillation. "
        "arXiv:2604.14084. Code: HJSang/OPSD_OnPolicyDistillation."
    )

    share: float = 0.5
    alpha: float = 1.0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        _check_share("tip", self.share)

    def ahead(self) -> tuple[str, ...]:
        return ("student_entropy_full", "jsd") if self.gamma else ("student_entropy_full",)

    def selects(self) -> bool:
        return True

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(ReverseKL())[0])

    @torch.no_grad()
    def token_weight(self, tokens: Tokens) -> Tensor:
        noise = tokens.whole.given.noise
        if noise is None:
            raise UsageError(
                "random numbers are needed and were not given",
                why="TIP draws the tokens that it learns from",
                instead="pass noise= of shape (B, T), uniform in [0, 1)",
            )
        weight = signals.everywhere("student_entropy_full", tokens).clamp(min=1e-8) ** self.alpha
        if self.gamma:
            weight = weight * signals.everywhere("jsd", tokens).clamp(min=1e-8) ** self.gamma
        return _highest(noise.to(weight).clamp(min=torch.finfo(weight.dtype).tiny).log() / weight, self.share, tokens)


def _check_share(method: str, share: float) -> None:
    if not 0 < share <= 1:
        raise UsageError(f"share of {method} lies in (0, 1]", got=share)


def _highest(values: Tensor, share: float, tokens: Tokens) -> Tensor:
    """(n,) of 0 and 1: whether a token is in the `share` of all tokens with the largest values (N,)."""
    count = max(1, int(values.numel() * share))
    kept = torch.zeros_like(values)
    kept[values.argsort(descending=True, stable=True)[:count]] = 1
    return kept.to(tokens.dtype)[tokens.span]


@register("iw_opd")
@dataclass(frozen=True)
class IWOPD(Objective):
    """Sampled reverse KL that weights early tokens more: w_t = 1 + γ·(1 - drift_t).

    drift_t is the share of Σ|A| over the response that lies before token t (the signal `drift`).

    Args:
        gamma: γ, extra weight of the first token.
    """

    summary: ClassVar[str] = "sampled reverse KL in which early tokens count more"
    formula: ClassVar[str] = (
        "w·ρ·sg[log s(y) − log t(y)], w = 1 + γ·(1 − Σ_{i<t}|A_i| / Σ_i|A_i|), A = log t(y) − log s(y)"
    )
    citation: ClassVar[str] = (
        "Xie, Zhu, Wen, Chen, Wang (2026). On the Position Bias of On-Policy Distillation. arXiv:2606.22600. Code: "
        "TRL, experimental/iw_opd."
    )

    gamma: float = 0.5

    def uses_sampled(self) -> bool:
        return True

    def further_signals(self) -> tuple[str, ...]:
        return ("drift",)

    def divergence(self, tokens: Tokens) -> Tensor:
        ratio, k = _sampled_terms(tokens)
        return ratio * k

    def token_weight(self, tokens: Tokens) -> Tensor:
        return 1 + self.gamma * (1 - signals.read("drift", tokens))


@register("vopd")
@dataclass(frozen=True)
class VOPD(Objective):
    """Sampled reverse KL with its exact mean as baseline: the advantage A + R, since -R is the value of the policy.

    Its expected gradient is that of reverse KL, with less variance than `sampled_reverse_kl`; its expected value is 0.
    """

    summary: ClassVar[str] = "sampled reverse KL with its exact mean as baseline"
    formula: ClassVar[str] = "ρ·sg[log s(y) − log t(y) − KL(s‖t)] on the sampled token y"
    citation: ClassVar[str] = (
        "Oh, Song, Choi, Choi, Jo (2026). KL for a KL: On-Policy Distillation with Control Variate Baseline. "
        "arXiv:2605.07865. After its abstract."
    )

    def uses_sampled(self) -> bool:
        return True

    def divergence(self, tokens: Tokens) -> Tensor:
        ratio, k = _sampled_terms(tokens)
        with torch.no_grad():  # after the sampled token, so that memoised log-probabilities have their graph
            value = not_negative(tokens.divergences(ReverseKL(), temperature=1.0)[0])
        return ratio * (k - value)


def _sampled_terms(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """ρ = s(y)/s_old(y), with gradient, and k1 = log s_old(y) - log t(y), at temperature 1."""
    log_s = tokens.student_sampled()
    old = tokens.sampler_log_probs(log_s)
    return (log_s - old).exp(), old - tokens.teacher_sampled()


@register("distillm2")
@dataclass(frozen=True)
class DistiLLM2(Objective):
    """Skew forward KL on the teacher's responses, skew reverse KL on the student's.

    The mixture of the latter is detached, as in the authors' code. Gold responses count as the teacher's.

    Args:
        alpha: α of both.
    """

    summary: ClassVar[str] = "skew KLs, by who wrote the response"
    formula: ClassVar[str] = "teacher's response: KL(t‖α·t + (1−α)·s); student's: KL(s‖(1−α)·t + α·sg s)"
    citation: ClassVar[str] = (
        "Ko, Chen, Kim, Ding, Liang, Zharkov, Yun (2025). DistiLLM-2: A Contrastive Approach Boosts the Distillation "
        "of LLMs. ICML 2025. arXiv:2503.07067. Code: jongwooko/distillm-2."
    )

    alpha: float = 0.1

    def __post_init__(self) -> None:
        SkewForwardKL(self.alpha)

    def by_source(self) -> bool:
        return True

    def divergence(self, tokens: Tokens) -> Tensor:
        from_teacher = tokens.batch.given.from_teacher
        if from_teacher is None:
            raise UsageError(
                "it is needed and was not given who wrote the responses",
                why="DistiLLM-2 has one divergence for responses of the teacher and another for those of the student",
                instead="pass from_teacher= of shape (B,) or (B, T)",
            )
        forward, reverse = tokens.divergences(SkewForwardKL(self.alpha), SkewReverseKL(self.alpha, True))
        return not_negative(torch.where(from_teacher, forward, reverse))
