"""Published methods as their authors define them, kept apart from the family's restrictions.

Each is an `Objective` with its published defaults. Its docstring is what `gatespace methods NAME` prints: in one line
what it minimises, then the paragraphs Loss (the loss at a token; s student, t teacher, y the sampled token, sg
stop-gradient), Source, and, where the paper compares with a restriction to the same signal, Departures: how that
restriction differs from the method. Known differences from the authors' releases: docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gatespace.errors import UsageError, unknown_name
from gatespace.gating import signals
from gatespace.gating.coefficients import sigmoid
from gatespace.gating.divergences import (
    AbsoluteDifference,
    Divergence,
    ForwardKL,
    JSDDivergence,
    ReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    Tile,
    ToDiDivergence,
    alpha_beta,
    not_negative,
)
from gatespace.gating.objectives import Objective, Terms, register
from gatespace.gating.supports import IDS, KLPair, chosen_ids, kl_pair, renormalised_pair, with_tail
from gatespace.gating.tokens import Tokens
from gatespace.gating.vocabulary import LOWEST, check_k, prefix_sums

FULL = frozenset({"full"})
_FORMS = ("release", "equation", "bucket")
_FORWARD = ForwardKL()


@register("todi")
@dataclass(frozen=True)
class ToDi(Objective):
    """A mixture of both KLs per vocabulary entry.

    Loss: Σ_v [α_v·t(log t - log s) + (1-α_v)·s(log s - log t)], α_v = sg σ(β·log(t_v/s_v)).

    With β = 1 its value is exactly F + R, but its gradient is not; near s = t the gradient is (1+β/2) times that of
    the even mixture (F+R)/2, so its loss scale differs from a gate's.

    Args:
        beta: Sharpness of the weight; 1 in the authors' code.

    Source: Jung, Yoon, Kim, Lee (2025). ToDi: Token-wise Distillation via Fine-Grained Divergence Control. EMNLP 2025.
    arXiv:2505.16297.

    Departures: The restriction gap-only (0,0,0,d) is not ToDi: it has one weight per position instead of one per
    vocabulary entry; its signal is the probability gap at the teacher's most probable token instead of the log-ratio;
    gradient flows through its gate, where ToDi detaches it; only d < 0 has ToDi's direction; and its magnitude is
    matched to another configuration instead of β = 1. ToDi was proposed offline, beside a cross-entropy loss.
    """

    needs = FULL
    beta: float = 1.0

    def divergence(self, tokens: Tokens) -> Tensor:
        return tokens.divergences(ToDiDivergence(self.beta))[0]


@register("eopd")
@dataclass(frozen=True)
class EOPD(Objective):
    """Policy gradient, forward KL where the teacher is unsure.

    Loss: PG + α·1[H > τ]·FKL, H the teacher's entropy in nats over the full vocabulary.

    FKL has the teacher renormalised on its top-K and the student over the full vocabulary. The release gates position
    t+1 by H_t; here each position is gated by its own entropy. In the family's terms: w_t = 1 + α·1[H_t > τ] and
    λ_t = 1/w_t.

    Args:
        tau: Threshold τ in nats.
        alpha: Weight α of the forward KL.
        pg: ``sampled``: max(-A·ρ, -A·clip(ρ, 1±clip)) with A = log t(y) - log s_old(y), at temperature 1;
            ``exact``: its expectation, the full reverse KL.
        clip: Clipping range of the importance ratio ρ = s(y)/s_old(y); default of the trainer the authors use.
        top_k: K of the forward KL.

    Source: Jin, Min, Yang, Wei, Zhou, Kadhe, Baracaldo, Lee (2026). Entropy-Aware On-Policy Distillation of Language
    Models. ICML 2026. arXiv:2603.07079.

    Departures: The restriction entropy-only (-β,0,0,0) is not EOPD: it is a convex mixture, where EOPD adds forward KL
    to an undiminished policy-gradient term; its gate is soft, monotone and never above λ = 1/2, where EOPD switches at
    a threshold; its entropy is normalised over the top-K, where EOPD's is in nats over the full vocabulary; it has no
    α; and its magnitude is matched to another configuration instead of τ = 0.8.
    """

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

    @property
    def needs(self) -> frozenset[str]:
        return FULL | {"sampled"} if self.pg == "sampled" else FULL

    def divergence(self, tokens: Tokens) -> Terms:
        return Terms(self._policy_gradient(tokens), self._forward(tokens))

    def token_weight(self, tokens: Tokens) -> Tensor:
        return 1 + self.alpha * (tokens.teacher.entropy > self.tau).to(tokens.dtype)

    def lam(self, tokens: Tokens) -> Tensor:
        return self.token_weight(tokens).reciprocal()

    def _policy_gradient(self, tokens: Tokens) -> Tensor:
        if self.pg == "exact":
            return not_negative(tokens.divergences(ReverseKL(), temperature=1.0)[0])
        ratio, k = _sampled_terms(tokens)
        return torch.maximum(k * ratio, k * ratio.clamp(1 - self.clip, 1 + self.clip))

    def _forward(self, tokens: Tokens) -> Tensor:
        check_k(self.top_k, tokens.vocab_size, "top_k of EOPD")
        top = tokens.teacher_top(self.top_k)
        log_t = (top.log_probs / tokens.temperature).log_softmax(-1)
        log_s = tokens.student_at(top.ids, temperature=tokens.temperature)
        return (log_t.exp() * (log_t - log_s)).sum(-1)


@register("akl")
@dataclass(frozen=True)
class AKL(Objective):
    """Both KLs, by where teacher and student differ.

    Loss: λ·RKL + (1-λ)·FKL, λ = sg[g_tail / (g_head + g_tail)], g = Σ|t - s| over head and tail of the teacher's
    distribution.

    The head is the teacher's tokens in descending order while their cumulative mass is at most `mass`, and always the
    first; the token that crosses it belongs to the tail, as in the authors' code. If both gaps are 0, λ = 1/2.

    Args:
        mass: Cumulative teacher mass of the head.

    Source: Wu, Tao, Wang, Yang, Zhao, Wong (2025). Rethinking Kullback-Leibler Divergence in Knowledge Distillation
    for Large Language Models. COLING 2025. arXiv:2404.02657.
    """

    needs = FULL
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
    """Generalised Jensen-Shannon divergence (GKD).

    Loss: β·KL(t‖m) + (1-β)·KL(s‖m), m = β·t + (1-β)·s.

    β is not λ: it sets the mixture that both sides are compared to, and the divergence itself goes to 0 at both ends,
    where JSD_β/β → forward KL (β → 0) and JSD_β/(1-β) → reverse KL (β → 1).

    Source: Agarwal, Vieillard, Zhou, Stanczyk, Ramos, Geist, Bachem (2024). On-Policy Distillation of Language Models:
    Learning from Self-Generated Mistakes. ICLR 2024. arXiv:2306.13649.
    """

    needs = FULL
    beta: float = 0.5

    def __post_init__(self) -> None:
        JSDDivergence(self.beta)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(JSDDivergence(self.beta))[0])


@register("skl")
@dataclass(frozen=True)
class SKL(Objective):
    """Skew forward KL (DistiLLM).

    Loss: KL(t‖α·t + (1-α)·s).

    Source: Ko, Kim, Chen, Yun (2024). DistiLLM: Towards Streamlined Distillation for Large Language Models. ICML 2024.
    arXiv:2402.03898.
    """

    needs = FULL
    alpha: float = 0.1

    def __post_init__(self) -> None:
        SkewForwardKL(self.alpha)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(SkewForwardKL(self.alpha))[0])


@register("srkl")
@dataclass(frozen=True)
class SRKL(Objective):
    """Skew reverse KL (DistiLLM).

    Loss: KL(s‖(1-α)·t + α·s). The mixture carries gradient, as in the authors' code.

    Source: Ko, Kim, Chen, Yun (2024). DistiLLM: Towards Streamlined Distillation for Large Language Models. ICML 2024.
    arXiv:2402.03898.
    """

    needs = FULL
    alpha: float = 0.1
    detach_mixture: bool = False

    def __post_init__(self) -> None:
        SkewReverseKL(self.alpha)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(SkewReverseKL(self.alpha, self.detach_mixture))[0])


@register("abkd")
@dataclass(frozen=True)
class ABKD(Objective):
    """The α-β divergence.

    Loss: -1/(αβ) Σ [t^α s^β - α/(α+β)·t^(α+β) - β/(α+β)·s^(α+β)].

    (1, 0) is forward KL and (0, 1) reverse KL. The authors tune α and β per task; the defaults lie between the two KLs
    and are a starting point, not theirs.

    Source: Wang, Yang, Wang, Wang, Xu, Huang (2025). ABKD: Pursuing a Proper Allocation of the Probability Mass in
    Knowledge Distillation via α-β-Divergence. ICML 2025. arXiv:2505.04560.
    """

    needs = FULL
    alpha: float = 0.2
    beta: float = 0.7

    def __post_init__(self) -> None:
        alpha_beta(self.alpha, self.beta)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(alpha_beta(self.alpha, self.beta))[0])


# ---------------------------------------------------------------------- policy gradients on the sampled token


def _sampled_terms(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """ρ = s(y)/s_old(y), with gradient, and k1 = log s_old(y) - log t(y), at temperature 1."""
    log_s = tokens.student_sampled()
    old = tokens.sampler_log_probs(log_s)
    return (log_s - old).exp(), old - tokens.teacher_sampled()


@register("sampled_reverse_kl")
@dataclass(frozen=True)
class SampledReverseKL(Objective):
    """Reverse KL by policy gradient on the sampled token.

    Loss: ρ·sg[k] on the sampled token y, ρ = s(y)/s_old(y), k1 = log s_old(y) - log t(y), at temperature 1.

    k1 has the expected gradient of reverse KL while s_old is the current student. k3 = t/s_old - 1 + k1 has less
    variance as an estimate of the value, but as an advantage its expected gradient is ∇R - ∇F: offered to reproduce
    results.

    Args:
        estimator: k1 or k3.
        coefficient: Factor of the term.

    Source: Lu, Thinking Machines Lab (2025). On-Policy Distillation. Estimators: Schulman (2020). Approximating KL
    Divergence.
    """

    needs = frozenset({"sampled"})
    estimator: str = "k1"
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        if self.estimator not in ("k1", "k3"):
            raise unknown_name("estimator", self.estimator, ("k1", "k3"))

    def divergence(self, tokens: Tokens) -> Tensor:
        ratio, k = _sampled_terms(tokens)
        if self.estimator == "k3":
            k = torch.expm1(-k) + k
        return self.coefficient * ratio * k


@register("student_top_k")
@dataclass(frozen=True)
class StudentTopK(Objective):
    """Reverse KL on the student's own top-k.

    Loss: on the student's k most probable ids S, s̃ and t̃ renormalised on S; release: Σ_S ρ·sg[s̃·(log s - log t)];
    equation: KL(s̃‖t̃); bucket: KL(s‖t) of S and everything else as one more outcome.

    ``release`` is the authors' code: a policy-gradient term for every id of S instead of the sampled one alone. Its
    value can be negative; its gradient is 0 at s = t. The ratio ρ = s/s_old has the value 1 here, since no
    log-probabilities of S are kept from the rollout, so the release's clip never acts; nor does it in the authors'
    script, which has one update per rollout.

    Args:
        top_k: k.
        ids: student, teacher, union or intersection of both sides' top-k.
        form: ``release``; ``equation``: the paper's; ``bucket``: ours, never above KL(s‖t).

    Source: Rethinking On-Policy Distillation of Large Language Models: Phenomenology, Mechanism, and Recipe (2026).
    arXiv:2604.13016. Code: thunlp/OPD. The form bucket is ours.
    """

    needs = FULL
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
    """Reverse KL renormalised on the teacher's top-k.

    Loss: KL(s̃‖t̃), s̃ and t̃ renormalised on the teacher's top-k; special tokens do not count.

    Published with rollouts at top-p 0.9, a setting of the run (`rollout.top_p`).

    Args:
        top_k: k.
        share: Share of a micro-batch's tokens to train on, those with the highest student entropy; 1: all.
        mask_special: Whether to mask special tokens of the response, such as end of turn.

    Source: Fu, Huang, Jiang, Zhu, Zhao (2026). Revisiting On-Policy Distillation: Empirical Failure Modes and Simple
    Fixes. arXiv:2603.25562. Code: hhh675597/revisiting_opd.
    """

    top_k: int = 32
    share: float = 1.0
    mask_special: bool = True

    def __post_init__(self) -> None:
        _check_share("revisiting_opd", self.share)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"special"} if self.mask_special else ()) | ({"selection"} if self.share < 1 else set())

    def prepass(self) -> tuple[str, ...]:
        return ("student_entropy_full",) if self.share < 1 else ()

    def divergence(self, tokens: Tokens) -> Tensor:
        return kl_pair(tokens, "renorm", self.top_k).reverse

    def token_weight(self, tokens: Tokens) -> Tensor | None:
        if self.share == 1:
            return None
        return _highest(signals.everywhere("student_entropy_full", tokens), self.share, tokens)


@register("tip")
@dataclass(frozen=True)
class TIP(Objective):
    """Reverse KL of tokens drawn by entropy and divergence.

    Loss: w·KL(s‖t), w in {0, 1}: a share of the tokens, drawn without replacement with weight (H/log V)^α·J^γ, H the
    student's entropy over the full vocabulary, J the Jensen-Shannon divergence in bits.

    Tokens are drawn within a micro-batch by the largest log(noise)/weight (`LossInputs.noise`), which is equivalent to
    sequential draws without replacement.

    Args:
        share: Share of the tokens to keep.
        alpha: Exponent α of the entropy.
        gamma: Exponent γ of the divergence; 0: entropy alone.

    Source: Xu, Sang, Zhou, He, Wang, Geramifard (2026). TIP: Token Importance in On-Policy Distillation.
    arXiv:2604.14084. Code: HJSang/OPSD_OnPolicyDistillation.
    """

    needs = FULL | {"selection"}
    share: float = 0.5
    alpha: float = 1.0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        _check_share("tip", self.share)

    def prepass(self) -> tuple[str, ...]:
        return ("student_entropy_full", "jsd") if self.gamma else ("student_entropy_full",)

    def divergence(self, tokens: Tokens) -> Tensor:
        return not_negative(tokens.divergences(ReverseKL())[0])

    @torch.no_grad()
    def token_weight(self, tokens: Tokens) -> Tensor:
        noise = tokens.whole.given.noise
        if noise is None:
            raise UsageError("TIP draws the tokens that it learns from", instead="noise= (B, T), uniform in [0, 1)")
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
    """Sampled reverse KL in which early tokens count more.

    Loss: w·ρ·sg[log s(y) - log t(y)], w = 1 + γ·(1 - drift), drift = Σ_{i<t}|A_i| / Σ_i|A_i| over the response,
    A = log t(y) - log s(y) (the signal `drift`).

    Args:
        gamma: γ, extra weight of the first token.

    Source: Xie, Zhu, Wen, Chen, Wang (2026). On the Position Bias of On-Policy Distillation. arXiv:2606.22600. Code:
    TRL, experimental/iw_opd.
    """

    needs = frozenset({"sampled"})
    gamma: float = 0.5

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
    """Sampled reverse KL with its exact mean as baseline.

    Loss: ρ·sg[log s(y) - log t(y) - KL(s‖t)] on the sampled token y.

    Its expected gradient is that of reverse KL, with less variance than `sampled_reverse_kl`; its expected value is 0.

    Source: Oh, Song, Choi, Choi, Jo (2026). KL for a KL: On-Policy Distillation with Control Variate Baseline.
    arXiv:2605.07865. After its abstract.
    """

    needs = FULL | {"sampled"}

    def divergence(self, tokens: Tokens) -> Tensor:
        ratio, k = _sampled_terms(tokens)
        with torch.no_grad():  # after the sampled token, so that memoised log-probabilities have their graph
            value = not_negative(tokens.divergences(ReverseKL(), temperature=1.0)[0])
        return ratio * (k - value)


@register("distillm2")
@dataclass(frozen=True)
class DistiLLM2(Objective):
    """Skew KLs, by who wrote the response.

    Loss: teacher's response: KL(t‖α·t + (1-α)·s); student's: KL(s‖(1-α)·t + α·sg s).

    The detached mixture is that of the authors' code. Gold responses count as the teacher's.

    Source: Ko, Chen, Kim, Ding, Liang, Zharkov, Yun (2025). DistiLLM-2: A Contrastive Approach Boosts the Distillation
    of LLMs. ICML 2025. arXiv:2503.07067. Code: jongwooko/distillm-2.
    """

    needs = FULL | {"source"}
    alpha: float = 0.1

    def __post_init__(self) -> None:
        SkewForwardKL(self.alpha)

    def divergence(self, tokens: Tokens) -> Tensor:
        from_teacher = tokens.batch.given.from_teacher
        if from_teacher is None:
            raise UsageError("DistiLLM-2 needs to know who wrote each response", instead="from_teacher= (B,) or (B, T)")
        forward, reverse = tokens.divergences(SkewForwardKL(self.alpha), SkewReverseKL(self.alpha, True))
        return not_negative(torch.where(from_teacher, forward, reverse))


# ---------------------------------------------------------------------- a target that moves from step to step


@dataclass(frozen=True, eq=False)  # a tensor has no single truth value, so no generated ==
class BetweenKL(Divergence):
    """KL(p‖s) with p ∝ s^(1-τ)·t^τ, detached: the softmax of interpolated logits.

    Args:
        tau: τ.
        log_total: (N,) log Σ s^(1-τ)·t^τ, the normaliser of p.
    """

    tau: float
    log_total: Tensor

    def _target(self, tile: Tile) -> Tile:
        log_p = tile.log_student - self.tau * tile.ratio - self.log_total[:, None]
        return Tile(tile.log_student, log_p.detach())

    def term(self, tile: Tile) -> Tensor:
        return _FORWARD.term(self._target(tile))

    def psi(self, tile: Tile) -> Tensor:
        return _FORWARD.psi(self._target(tile))

    def psi_total(self, value: Tensor) -> Tensor:
        return _FORWARD.psi_total(value)

    def join(self, parts: Sequence[Divergence]) -> Divergence:
        return BetweenKL(self.tau, torch.cat([part.log_total for part in parts if isinstance(part, BetweenKL)]))


@register("taid")
@dataclass(frozen=True)
class TAID(Objective):
    """Forward KL to a target that moves to the teacher.

    Loss: KL(p‖s), p = softmax((1-τ)·sg z_s + τ·z_t); after each step τ ← min(t_end, max(τ_lin, τ + α·σ(m)·(1-τ))),
    where τ_lin goes linearly from t_start to t_end over the run, and m is the running mean, with decay β, of the
    relative decrease of the loss from step to step.

    τ, m and the last loss are saved in checkpoints. Outside a run, τ is `t_start` until `advance` is called.

    Args:
        t_start: τ of the first step.
        t_end: Final τ.
        alpha: α, bound on how far a step moves τ ahead.
        beta: β of the running mean.
        adaptive: Whether τ may run ahead of the linear schedule.

    Source: Shing, Misaki, Bao, Yokoi, Akiba (2025). TAID: Temporally Adaptive Interpolated Distillation for Efficient
    Knowledge Transfer in Language Models. ICLR 2025. arXiv:2501.16937. Code: SakanaAI/TAID.
    """

    needs = FULL | {"state"}
    t_start: float = 0.4
    t_end: float = 1.0
    alpha: float = 5e-4
    beta: float = 0.99
    adaptive: bool = True
    moving: dict[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.t_start < 1 or not self.t_start <= self.t_end <= 1:
            raise UsageError(
                "t_start and t_end of TAID have 0 ≤ t_start < 1 and t_start ≤ t_end ≤ 1",
                got=f"{self.t_start:g}, {self.t_end:g}",
            )
        if not (0 <= self.alpha <= 1 and 0 <= self.beta < 1):
            raise UsageError("α of TAID lies in [0, 1], β in [0, 1)", got=f"{self.alpha:g}, {self.beta:g}")
        self.moving.update(tau=self.t_start, momentum=0.0)

    @property
    def state(self) -> dict[str, float]:
        return self.moving

    def divergence(self, tokens: Tokens) -> Tensor:
        tau = self.state["tau"]
        return not_negative(tokens.divergences(BetweenKL(tau, tokens.log_between(tau)))[0])

    def advance(self, loss: float, progress: float) -> None:
        now, line = self.state, self.t_start + (self.t_end - self.t_start) * progress
        if "loss" in now:  # the first step has no previous loss
            change = (now["loss"] - loss) / (now["loss"] + 1e-15)
            now["momentum"] = self.beta * now["momentum"] + (1 - self.beta) * change
            step = self.alpha * sigmoid(now["momentum"]) * (1 - now["tau"])
            now["tau"] = min(self.t_end, max(line, now["tau"] + step)) if self.adaptive else line
        now["loss"] = loss
