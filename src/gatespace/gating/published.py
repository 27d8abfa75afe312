"""Published methods as their authors define them, kept apart from the family's restrictions.

Each is an `Objective` with its published defaults. Where the paper compares against a restriction with the same
signal, `departures` says how that restriction differs from the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gatespace.errors import UsageError, unknown_name
from gatespace.gating.divergences import (
    AbsoluteDifference,
    JSDDivergence,
    ReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    ToDiDivergence,
    alpha_beta,
    not_negative,
)
from gatespace.gating.objectives import OBJECTIVES as OBJECTIVES
from gatespace.gating.objectives import Objective, Terms, register
from gatespace.gating.supports import KLPair, kl_pair
from gatespace.gating.tokens import Tokens
from gatespace.gating.vocabulary import check_k, prefix_sums


@register("todi")
@dataclass(frozen=True)
class ToDi(Objective):
    """Σ_v [α_v·t(log t - log s) + (1-α_v)·s(log s - log t)], α_v = sg σ(β·log(t_v/s_v)).

    A mixture per vocabulary entry. With β = 1 its value is exactly F + R, but its gradient is not; near s = t the
    gradient is (1+β/2) times that of the even mixture (F+R)/2, so its loss scale differs from a gate's.

    Args:
        beta: Sharpness of the weight; 1 in the authors' code.
    """

    summary: ClassVar[str] = "a mixture of both KLs per vocabulary entry"
    formula: ClassVar[str] = "Σ_v [α_v·t(log t − log s) + (1−α_v)·s(log s − log t)], α_v = sg σ(β·log(t_v/s_v))"
    citation: ClassVar[str] = (
        "Jung, Yoon, Kim, Lee (2025). ToDi: Token-wise Distillation via Fine-Grained Divergence Control. EMNLP 2025. "
        "arXiv:2505.16297."
    )
    departures: ClassVar[str] = (
        "The restriction gap-only (0,0,0,d) is not ToDi: it has one weight per position instead of one per vocabulary "
        "entry; its signal is the probability gap at the teacher's most probable token instead of the log-ratio; "
        "gradient flows through its gate, where ToDi detaches it; only d < 0 has ToDi's direction; and its magnitude "
        "is matched to another configuration instead of β = 1. ToDi was proposed offline, beside a cross-entropy loss."
    )

    beta: float = 1.0

    def divergence(self, tokens: Tokens) -> Tensor:
        return tokens.divergences(ToDiDivergence(self.beta))[0]


@register("eopd")
@dataclass(frozen=True)
class EOPD(Objective):
    """PG_t + α·1[H_t > τ]·FKL_t: policy gradient, plus forward KL where the teacher is uncertain.

    H_t is the teacher's entropy in nats over the full vocabulary. FKL_t has the teacher renormalised on its top-K and
    the student over the full vocabulary. The release gates position t+1 by H_t; here each position is gated by its
    own entropy. In the family's terms: w_t = 1 + α·1[H_t > τ] and λ_t = 1/w_t.

    Args:
        tau: Threshold τ in nats.
        alpha: Weight α of the forward KL.
        pg: ``sampled``: max(-A·ρ, -A·clip(ρ, 1±clip)) with A = log t(y) - log s_old(y), at temperature 1;
            ``exact``: its expectation, the full reverse KL.
        clip: Clipping range of the importance ratio ρ = s(y)/s_old(y); default of the trainer the authors use.
        top_k: K of the forward KL.
    """

    summary: ClassVar[str] = "policy gradient, forward KL where the teacher is unsure"
    formula: ClassVar[str] = "PG + α·1[H > τ]·FKL, H the teacher's entropy in nats"
    citation: ClassVar[str] = (
        "Jin, Min, Yang, Wei, Zhou, Kadhe, Baracaldo, Lee (2026). Entropy-Aware On-Policy Distillation of Language "
        "Models. ICML 2026. arXiv:2603.07079."
    )
    departures: ClassVar[str] = (
        "The restriction entropy-only (-β,0,0,0) is not EOPD: it is a convex mixture, where EOPD adds forward KL to an "
        "undiminished policy-gradient term; its gate is soft, monotone and never above λ = 1/2, where EOPD switches at "
        "a threshold; its entropy is normalised over the top-K, where EOPD's is in nats over the full vocabulary; it "
        "has no α; and its magnitude is matched to another configuration instead of τ = 0.8."
    )

    tau: float = 0.8
    alpha: float = 1.0
    pg: str = "sampled"
    clip: float = 0.2
    top_k: int = 16

    def __post_init__(self) -> None:
        if self.pg not in ("sampled", "exact"):
            raise unknown_name("policy-gradient term of EOPD", self.pg, ("sampled", "exact"))
        if not 0 <= self.clip < 1:
            raise UsageError("clip of EOPD lies in [0, 1)", got=self.clip)

    def uses_sampled(self) -> bool:
        return self.pg == "sampled"

    def divergence(self, tokens: Tokens) -> Terms:
        return Terms(self._policy_gradient(tokens), self._forward(tokens))

    def token_weight(self, tokens: Tokens) -> Tensor:
        return 1 + self.alpha * (tokens.teacher_entropy() > self.tau).to(tokens.dtype)

    def lam(self, tokens: Tokens) -> Tensor:
        return self.token_weight(tokens).reciprocal()

    def _policy_gradient(self, tokens: Tokens) -> Tensor:
        if self.pg == "exact":
            return not_negative(tokens.divergences(ReverseKL(), temperature=1.0)[0])
        log_s = tokens.student_sampled()
        old = tokens.sampler_log_probs(log_s)
        advantage = tokens.teacher_sampled() - old
        ratio = (log_s - old).exp()
        return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - self.clip, 1 + self.clip))

    def _forward(self, tokens: Tokens) -> Tensor:
        check_k(self.top_k, tokens.vocab_size, "top_k of EOPD")
        top = tokens.teacher_top(self.top_k)
        log_t = (top.log_probs / tokens.temperature).log_softmax(-1)
        log_s = tokens.student_at(top.ids, temperature=tokens.temperature)
        return (log_t.exp() * (log_t - log_s)).sum(-1)


@register("akl")
@dataclass(frozen=True)
class AKL(Objective):
    """λ_t = sg[g_tail / (g_head + g_tail)], g = Σ|t - s| over head and tail of the teacher's distribution.

    The head is the teacher's tokens in descending order while their cumulative mass is at most `mass`, and always the
    first; the token that crosses it belongs to the tail, as in the authors' code. If both gaps are 0, λ = 1/2.

    Args:
        mass: Cumulative teacher mass of the head.
    """

    summary: ClassVar[str] = "both KLs, by where teacher and student differ"
    formula: ClassVar[str] = "λ·RKL + (1−λ)·FKL, λ = sg[g_tail / (g_head + g_tail)], g = Σ|t − s|"
    citation: ClassVar[str] = (
        "Wu, Tao, Wang, Yang, Zhao, Wong (2025). Rethinking Kullback-Leibler Divergence in Knowledge Distillation for "
        "Large Language Models. COLING 2025. arXiv:2404.02657."
    )

    mass: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.mass < 1:
            raise UsageError("mass of AKL lies between 0 and 1", got=self.mass)

    def divergence(self, tokens: Tokens) -> KLPair:
        return kl_pair(tokens)

    @torch.no_grad()
    def lam(self, tokens: Tokens) -> Tensor:
        temperature = tokens.temperature
        total = tokens.divergences(AbsoluteDifference())[0]
        k = min(64, tokens.vocab_size)
        while True:  # the head is a handful of tokens, unless the teacher is nearly flat
            ids = tokens.teacher_top(k).ids
            teacher = tokens.teacher_at(ids, temperature=temperature).exp()
            cumulative = prefix_sums(teacher)
            if k == tokens.vocab_size or bool((cumulative[:, -1] > self.mass).all()):
                break
            k = min(8 * k, tokens.vocab_size)
        in_head = cumulative <= self.mass
        in_head[:, 0] = True
        student = tokens.student_at(ids, temperature=temperature).exp()
        head = ((teacher - student).abs() * in_head).sum(-1)
        tail = (total - head).clamp(min=0.0)
        return torch.where(total > 0, tail / (head + tail).clamp(min=torch.finfo(total.dtype).tiny), 0.5)


@register("jsd")
@dataclass(frozen=True)
class JSD(Objective):
    """Generalised Jensen-Shannon divergence β·KL(t‖m) + (1-β)·KL(s‖m), m = β·t + (1-β)·s.

    β is not λ: it sets the mixture that both sides are compared to, and the divergence itself goes to 0 at both ends,
    where JSD_β/β → forward KL (β → 0) and JSD_β/(1-β) → reverse KL (β → 1).
    """

    summary: ClassVar[str] = "generalised Jensen-Shannon divergence (GKD)"
    formula: ClassVar[str] = "β·KL(t‖m) + (1−β)·KL(s‖m), m = β·t + (1−β)·s"
    citation: ClassVar[str] = (
        "Agarwal, Vieillard, Zhou, Stanczyk, Ramos, Geist, Bachem (2024). On-Policy Distillation of Language Models: "
        "Learning from Self-Generated Mistakes. ICLR 2024. arXiv:2306.13649."
    )

    beta: float = 0.5

    def __post_init__(self) -> None:
        JSDDivergence(self.beta)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(JSDDivergence(self.beta))[0])


_DISTILLM = (
    "Ko, Kim, Chen, Yun (2024). DistiLLM: Towards Streamlined Distillation for Large Language Models. ICML 2024. "
    "arXiv:2402.03898."
)


@register("skl")
@dataclass(frozen=True)
class SKL(Objective):
    """Skew forward KL: KL(t‖α·t + (1-α)·s)."""

    summary: ClassVar[str] = "skew forward KL (DistiLLM)"
    formula: ClassVar[str] = "KL(t‖α·t + (1−α)·s)"
    citation: ClassVar[str] = _DISTILLM

    alpha: float = 0.1

    def __post_init__(self) -> None:
        SkewForwardKL(self.alpha)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(SkewForwardKL(self.alpha))[0])


@register("srkl")
@dataclass(frozen=True)
class SRKL(Objective):
    """Skew reverse KL: KL(s‖(1-α)·t + α·s). The mixture carries gradient, as in the authors' code."""

    summary: ClassVar[str] = "skew reverse KL (DistiLLM)"
    formula: ClassVar[str] = "KL(s‖(1−α)·t + α·s)"
    citation: ClassVar[str] = _DISTILLM

    alpha: float = 0.1
    detach_mixture: bool = False

    def __post_init__(self) -> None:
        SkewReverseKL(self.alpha)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(SkewReverseKL(self.alpha, self.detach_mixture))[0])


@register("abkd")
@dataclass(frozen=True)
class ABKD(Objective):
    """α-β divergence -1/(αβ) Σ [t^α s^β - α/(α+β)·t^(α+β) - β/(α+β)·s^(α+β)].

    (1, 0) is forward KL and (0, 1) reverse KL. The authors tune α and β per task; the defaults lie between the two KLs
    and are a starting point, not theirs.
    """

    summary: ClassVar[str] = "the α-β divergence"
    formula: ClassVar[str] = "−1/(αβ) Σ [t^α s^β − α/(α+β)·t^(α+β) − β/(α+β)·s^(α+β)]"
    citation: ClassVar[str] = (
        "Wang, Yang, Wang, Wang, Xu, Huang (2025). ABKD: Pursuing a Proper Allocation of the Probability Mass in "
        "Knowledge Distillation via α-β-Divergence. ICML 2025. arXiv:2505.04560."
    )

    alpha: float = 0.2
    beta: float = 0.7

    def __post_init__(self) -> None:
        alpha_beta(self.alpha, self.beta)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(alpha_beta(self.alpha, self.beta))[0])


@register("sampled_reverse_kl")
@dataclass(frozen=True)
class SampledReverseKL(Objective):
    """Reverse KL by policy gradient on the sampled token: ρ·sg[k], ρ = s(y)/s_old(y), at temperature 1.

    k1 = log s_old(y) - log t(y) has the expected gradient of reverse KL while s_old is the current student.
    k3 = t/s_old - 1 + k1 has less variance as an estimate of the value, but as an advantage its expected gradient is
    ∇R - ∇F: offered to reproduce results.

    Args:
        estimator: k1 or k3.
        coefficient: Factor of the term.
    """

    summary: ClassVar[str] = "reverse KL by policy gradient on the sampled token"
    formula: ClassVar[str] = "ρ·sg[log s(y) − log t(y)] on the sampled token y"
    citation: ClassVar[str] = (
        "Lu, Thinking Machines Lab (2025). On-Policy Distillation. Estimators: Schulman (2020). Approximating KL "
        "Divergence."
    )

    estimator: str = "k1"
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        if self.estimator not in ("k1", "k3"):
            raise unknown_name("estimator", self.estimator, ("k1", "k3"))

    def uses_sampled(self) -> bool:
        return True

    def divergence(self, tokens: Tokens) -> Tensor:
        log_s = tokens.student_sampled()
        old = tokens.sampler_log_probs(log_s)
        k = old - tokens.teacher_sampled()
        if self.estimator == "k3":
            k = torch.expm1(-k) + k
        return self.coefficient * (log_s - old).exp() * k


import gatespace.gating.published_opd  # noqa: E402
import gatespace.gating.taid  # noqa: E402, F401 - these register more methods, listed after those above
