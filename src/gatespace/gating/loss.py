"""The plain path: losses from logits that are in memory, differentiated by autograd; the reference for the fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate
from gatespace.gating.layout import Layout
from gatespace.gating.objectives import Gated, Objective, TokenLoss
from gatespace.gating.supports import KLPair, check_support, kl_pair
from gatespace.gating.tokens import (
    LogitsStudent,
    LogitsTeacher,
    SignalSettings,
    Teacher,
    TeacherTopK,
    Tokens,
    TopKTeacher,
)
from gatespace.gating.vocabulary import LOWEST, computable

_FIELDS = ("lam", "weight", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass")


@dataclass(frozen=True)
class LossOutput:
    """A loss and what it was made of. All but `loss` is detached, (B, T), and 0 outside the mask."""

    loss: Tensor
    """Σ over masked tokens / total_tokens; a scalar with gradient."""
    tokens: int
    """Number of masked tokens N."""
    per_token: Tensor
    """L_t."""
    lam: Tensor | None
    """λ_t, the weight of reverse KL; None for an objective that mixes nothing."""
    weight: Tensor
    """w_t."""
    forward_kl: Tensor
    """KL(teacher‖student), nats."""
    reverse_kl: Tensor
    """KL(student‖teacher), nats."""
    h: Tensor
    u: Tensor
    gap: Tensor
    tail_mass: Tensor
    """Student mass that the support does not resolve; above .01 a top-K reverse KL is not to be trusted."""
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    """Further signals of the gate by name."""


@dataclass(frozen=True)
class Context:
    """What a loss is told beside the two models' numbers: which tokens count, and how they are read."""

    layout: Layout
    temperature: float
    settings: SignalSettings
    vocab_size: int
    total_tokens: float | Tensor
    sampled: Tensor | None
    sampled_log_probs: Tensor | None
    prompt_entropy: Tensor | None
    lam_order: Tensor | None = None

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        device: torch.device,
        *,
        vocab_size: int,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int = 8,
        entropy: str = "top_k",
        sampled: Tensor | None = None,
        sampled_log_probs: Tensor | None = None,
        u: Tensor | None = None,
        total_tokens: float | Tensor | None = None,
        lam_order: Tensor | None = None,
    ) -> Context:
        """Check everything that can be checked before a number is computed."""
        if not 0.0 < float(temperature) < float("inf"):
            raise UsageError("temperature must be positive", got=temperature)
        layout = Layout.of(shape, device, mask, segment_ids)
        if total_tokens is None:
            total_tokens = float(max(layout.count, 1))
        elif not bool(torch.as_tensor(total_tokens > 0)):
            raise UsageError("total_tokens must be positive", got=total_tokens)
        if sampled is not None:
            sampled = layout.select(_shaped("sampled", sampled, shape, device)).long()
            if sampled.numel() and not bool(((sampled >= 0) & (sampled < vocab_size)).all()):
                raise UsageError("sampled holds an id outside the vocabulary", got=f"V={vocab_size}")
        if sampled_log_probs is not None:
            sampled_log_probs = layout.select(_shaped("sampled_log_probs", sampled_log_probs, shape, device)).detach()
        if u is not None:
            if u.shape == shape[:1]:
                u = u[:, None].expand(shape)
            u = layout.select(_shaped("u", u, shape, device)).detach()
        if lam_order is not None:
            lam_order = _order(lam_order, layout)
        settings = SignalSettings(top_k, entropy)
        own = (sampled, sampled_log_probs, u, lam_order)
        return cls(layout, float(temperature), settings, vocab_size, total_tokens, *own)

    def dealt(self, lam: Tensor) -> Tensor:
        """λ (N,) of the tokens, as `lam_order` deals it out."""
        assert self.lam_order is not None
        return lam[self.lam_order]

    def output(self, loss: Tensor, per_token: Tensor, telemetry: Mapping[str, Tensor]) -> LossOutput:
        """Numbers per token back into the batch."""
        spread = {name: self.layout.spread(value) for name, value in telemetry.items()}
        fields = {name: spread.pop(name, None) for name in _FIELDS}
        return LossOutput(
            loss=loss,
            tokens=self.layout.count,
            per_token=self.layout.spread(per_token.detach()),
            signals=spread,
            **fields,  # type: ignore[arg-type]  # all but lam are always there
        )


def gated_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    *,
    gate: Gate,
    mask: Tensor | None = None,
    top_k: int = 8,
    temperature: float = 1.0,
    stop_gradient: bool = False,
    support: str = "full",
    support_k: int | None = None,
    entropy: str = "top_k",
    sampled: Tensor | None = None,
    sampled_log_probs: Tensor | None = None,
    segment_ids: Tensor | None = None,
    u: Tensor | None = None,
    coefficients: Tensor | None = None,
    total_tokens: float | Tensor | None = None,
    vocab_size: int | None = None,
) -> LossOutput:
    """Per-token gated mixture of reverse and forward KL, from logits.

        λ_t = σ(a·h_t + b·u + c + d·gap_t)        L_t = λ_t·KL(student‖teacher) + (1-λ_t)·KL(teacher‖student)

    Args:
        student_logits: (B, T, V), the logits that predict response token t at position t (shift them before).
        teacher_logits: (B, T, V), or a `TeacherTopK`. Always a constant.
        gate: The point (a, b, c, d), and further signals.
        mask: (B, T) of 0 and 1, response tokens; positions outside it are never read. None: all.
        top_k: K of the entropy signals h and u.
        temperature: Divides both sides' logits in the KLs, with no T² factor. The signals are read at 1.
        stop_gradient: Treat λ as a constant. By default gradient flows through the gate.
        support: full, bucket, hybrid, renorm or recipe.
        support_k: K of the top-K supports; None: top_k, or the K of a `TeacherTopK`.
        entropy: top_k (over log K), full (over log V) or bucket (over log(K+1)).
        sampled: (B, T) response token ids, for the support hybrid.
        sampled_log_probs: (B, T) log-probabilities under the sampler, where it was not the current student at T=1.
        segment_ids: (B, T), where several samples are packed in a row: each has its own u.
        u: (B,) or (B, T) in place of u(x), where the first response token is not in this batch.
        coefficients: (4+E,) tensor in place of the gate's numbers, to receive their gradient.
        total_tokens: What the sum is divided by; the masked tokens of the whole step where this is a micro-batch.
        vocab_size: Real length of the tokenizer; both sides are cut to it before any softmax.

    Returns:
        `LossOutput`; an empty mask gives loss 0 and gradient 0.

    Example:
        >>> from gatespace import Gate, gated_kl
        >>> student = torch.zeros(1, 2, 4, requires_grad=True)
        >>> teacher = torch.tensor([[[2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
        >>> out = gated_kl(student, teacher, gate=Gate.named("G5"), top_k=4)
        >>> out.lam
        tensor([[0.8388, 0.9526]])
        >>> out.loss.backward()
    """
    objective = Gated(gate, support, support_k, stop_gradient, coefficients)
    return distillation_loss(
        student_logits,
        teacher_logits,
        objective=objective,
        mask=mask,
        top_k=top_k,
        temperature=temperature,
        entropy=entropy,
        sampled=sampled,
        sampled_log_probs=sampled_log_probs,
        segment_ids=segment_ids,
        u=u,
        total_tokens=total_tokens,
        vocab_size=vocab_size,
    )


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    *,
    objective: Objective,
    mask: Tensor | None = None,
    top_k: int = 8,
    temperature: float = 1.0,
    entropy: str = "top_k",
    sampled: Tensor | None = None,
    sampled_log_probs: Tensor | None = None,
    segment_ids: Tensor | None = None,
    u: Tensor | None = None,
    total_tokens: float | Tensor | None = None,
    vocab_size: int | None = None,
    lam_order: Tensor | None = None,
) -> LossOutput:
    """Any objective, from logits. Arguments as in `gated_kl`, and two more.

    Args:
        objective: E.g. ``ToDi()`` or ``Gated(gate)``.
        lam_order: (N,) a permutation of the N masked tokens in reading order: token i is given the λ that the objective
            has for token lam_order[i], as a constant. The control that keeps all values of λ and takes away where they
            are. h, u and gap of the result stay the token's own.

    Example:
        >>> from gatespace.gating import ToDi, distillation_loss
        >>> student, teacher = torch.zeros(1, 1, 8), torch.arange(8.0).reshape(1, 1, 8)
        >>> out = distillation_loss(student, teacher, objective=ToDi())
        >>> bool(torch.isclose(out.loss, out.forward_kl.sum() + out.reverse_kl.sum()))
        True
    """
    check_objective(objective)
    size = _vocabulary(student_logits, teacher_logits, vocab_size)
    context = Context.of(
        student_logits.shape[:-1],
        student_logits.device,
        vocab_size=size,
        mask=mask,
        segment_ids=segment_ids,
        temperature=temperature,
        top_k=top_k,
        entropy=entropy,
        sampled=sampled,
        sampled_log_probs=sampled_log_probs,
        u=u,
        total_tokens=total_tokens,
        lam_order=lam_order,
    )
    check_order(context, objective)
    if context.layout.count == 0:
        return nothing(context, objective, student_logits)
    tokens = _plain_tokens(student_logits, teacher_logits, context)
    if context.lam_order is not None:
        # with a graph that nobody goes back through: log-probabilities without one would be kept for the divergences
        tokens.lam = context.dealt(objective.own_lam(tokens))
    result = objective(tokens)
    check_finite(result, context.layout)
    return context.output(result.loss.sum() / context.total_tokens, result.loss, result.telemetry)


def forward_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    *,
    support: str = "full",
    support_k: int | None = 8,
    temperature: float = 1.0,
    sampled: Tensor | None = None,
    sampled_log_probs: Tensor | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """KL(teacher‖student), nats, per token.

    Args:
        student_logits: (..., V).
        teacher_logits: (..., V), or a `TeacherTopK`.

    Returns:
        (...), with gradient. Infinite where the student rules out what the teacher allows.
    """
    return _per_token(
        lambda pair: pair.forward,
        *(student_logits, teacher_logits, support, support_k, temperature, sampled, sampled_log_probs, vocab_size),
    )


def reverse_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    *,
    support: str = "full",
    support_k: int | None = 8,
    temperature: float = 1.0,
    sampled: Tensor | None = None,
    sampled_log_probs: Tensor | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """KL(student‖teacher), nats, per token.

    Args:
        student_logits: (..., V).
        teacher_logits: (..., V), or a `TeacherTopK`.

    Returns:
        (...), with gradient. Infinite where the teacher rules out what the student allows, on the support full.
    """
    return _per_token(
        lambda pair: pair.reverse,
        *(student_logits, teacher_logits, support, support_k, temperature, sampled, sampled_log_probs, vocab_size),
    )


def _per_token(
    side: Callable[[KLPair], Tensor],
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    support: str,
    support_k: int | None,
    temperature: float,
    sampled: Tensor | None,
    sampled_log_probs: Tensor | None,
    vocab_size: int | None,
) -> Tensor:
    check_support(support)
    shape = student_logits.shape[:-1]
    size = _vocabulary(student_logits, teacher_logits, vocab_size)
    flat = torch.Size((1, shape.numel()))
    context = Context.of(
        flat,
        student_logits.device,
        vocab_size=size,
        temperature=temperature,
        sampled=None if sampled is None else sampled.reshape(flat),
        sampled_log_probs=None if sampled_log_probs is None else sampled_log_probs.reshape(flat),
    )
    if isinstance(teacher_logits, TeacherTopK):
        support_k = min(support_k or teacher_logits.ids.shape[-1], teacher_logits.ids.shape[-1])
    else:
        teacher_logits = teacher_logits.reshape(*flat, -1)
    tokens = _plain_tokens(student_logits.reshape(*flat, -1), teacher_logits, context)
    return side(kl_pair(tokens, support, support_k)).reshape(shape)


# ---------------------------------------------------------------------- from tensors to tokens


def _plain_tokens(student_logits: Tensor, teacher_logits: Tensor | TeacherTopK, context: Context) -> Tokens:
    layout, size = context.layout, context.vocab_size
    student = computable(layout.select(student_logits)[:, :size])
    check_rows("student", student.detach(), layout)
    infinite: tuple[Tensor, Tensor] | None = None
    if isinstance(teacher_logits, TeacherTopK):
        teacher: Teacher = top_k_teacher(teacher_logits, context, student.dtype)
    else:
        rows = computable(layout.select(teacher_logits.detach())[:, :size]).to(student.dtype)
        check_rows("teacher", rows, layout)
        infinite = forbidden(student.detach(), rows)
        teacher = LogitsTeacher(rows if infinite is None else rows.clamp(min=LOWEST))
    if bool(student.detach().amin() == -torch.inf):
        student = student.clamp(min=LOWEST)
    return Tokens(
        LogitsStudent(student),
        teacher,
        layout,
        infinite=infinite,
        temperature=context.temperature,
        settings=context.settings,
        sampled=context.sampled,
        sampled_log_probs=context.sampled_log_probs,
        prompt_entropy=context.prompt_entropy,
    )


def forbidden(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor] | None:
    """Which rows have an infinite reverse KL and which an infinite forward KL; None where no id is forbidden at all.

    Rows are over the last dimension; an id is forbidden by a logit (or a bias) of -inf.
    """
    if not teacher.numel() or not bool(torch.minimum(teacher.amin(), student.amin()) == -torch.inf):
        return None
    by_student, by_teacher = student == -torch.inf, teacher == -torch.inf
    return (by_teacher & ~by_student).any(-1), (by_student & ~by_teacher).any(-1)


def top_k_teacher(teacher: TeacherTopK, context: Context, dtype: torch.dtype) -> TopKTeacher:
    """The masked tokens of a teacher known by its top-K."""
    layout, shape = context.layout, context.layout.shape
    ids, log_probs = teacher.ids, teacher.log_probs.detach()
    if ids.shape != log_probs.shape or ids.shape[:-1].numel() != shape.numel():
        raise UsageError(
            "TeacherTopK must hold ids and log_probs of shape (B, T, K) for this batch",
            got=f"ids {tuple(ids.shape)}, log_probs {tuple(log_probs.shape)}, batch {tuple(shape)}",
        )
    k = ids.shape[-1]
    ids = layout.select(ids.reshape(*shape, k)).long()
    log_probs = computable(layout.select(log_probs.reshape(*shape, k))).to(dtype)
    check_rows("teacher top-K", log_probs, layout)
    if ids.numel() and not bool(((ids >= 0) & (ids < context.vocab_size)).all()):
        raise UsageError("TeacherTopK holds an id outside the vocabulary", got=f"V={context.vocab_size}")
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
        sampled = layout.select(_shaped("TeacherTopK.sampled_log_probs", sampled.reshape(shape), shape, ids.device))
        sampled = computable(sampled.detach()).to(dtype)
    return TopKTeacher(ids, log_probs, sampled, context.vocab_size)


def nothing(context: Context, objective: Objective, *student: Tensor | None) -> LossOutput:
    """The answer for an empty mask: 0, joined to the student so that backward works and gives 0."""
    joined = [tensor.reshape(-1)[:0].sum() for tensor in (*student, objective.learned()) if tensor is not None]
    loss = torch.stack([part.to(computable(part).dtype) for part in joined]).sum()
    empty = loss.detach().new_zeros(0)
    telemetry = dict.fromkeys(_FIELDS, empty) | dict.fromkeys(objective.further_signals(), empty)
    return context.output(loss, empty, telemetry)


# ---------------------------------------------------------------------- checks


def check_rows(side: str, logits: Tensor, layout: Layout) -> None:
    """NaN, +inf and rows without any possible token are errors that say where; -inf elsewhere is a forbidden id."""
    best = logits.amax(-1)  # NaN and +inf both surface in the maximum
    if bool(best.isfinite().all()):
        return
    token = int((~best.isfinite()).nonzero()[0])
    row = logits[token]
    bad = (row.isnan() | (row == torch.inf)).nonzero()
    if bad.numel() == 0:
        raise UsageError(f"the {side} rules out every token at {layout.place(token)}", got="-inf for all ids")
    entry = int(bad[0])
    place = layout.place(token)[:-1] + f", {entry}]"
    raise UsageError(
        f"the {side} has a logit that is not finite at {place}",
        got=str(row[entry].item()),
        why="positions are [b, t, v]; only masked positions are looked at",
    )


def check_finite(result: TokenLoss, layout: Layout) -> None:
    """An infinite divergence is an error that says which side rules out what."""
    loss = result.loss.detach()
    bound = -LOWEST * 1e-9
    if bool((loss.isfinite() & (loss.abs() < bound)).all()):
        return
    token = int((~(loss.isfinite() & (loss.abs() < bound))).nonzero()[0])
    reverse = float(result.telemetry["reverse_kl"][token])
    which, zero, other = ("reverse", "teacher", "student") if not reverse < bound else ("forward", "student", "teacher")
    raise UsageError(
        f"{which} KL is infinite at {layout.place(token)}",
        why=f"the {zero} gives probability 0 (a logit of -inf) to a token that the {other} allows",
        instead="support='bucket', or forbid the same ids on both sides, or a gate with λ = 0 (reverse) or 1 (forward)",
    )


def _vocabulary(student_logits: Tensor, teacher_logits: Tensor | TeacherTopK, vocab_size: int | None) -> int:
    """The size of the vocabulary that both sides share."""
    for side, tensor in (("student", student_logits), ("teacher", teacher_logits)):
        if isinstance(tensor, TeacherTopK):
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UsageError(f"{side}_logits must be a floating-point tensor", got=got)
    if isinstance(teacher_logits, TeacherTopK):
        return shared_vocabulary(student_logits.shape[-1], None, vocab_size)
    if student_logits.shape[:-1] != teacher_logits.shape[:-1]:
        raise UsageError(
            "student and teacher logits must cover the same tokens (B, T)",
            got=f"student {tuple(student_logits.shape)}, teacher {tuple(teacher_logits.shape)}",
        )
    return shared_vocabulary(student_logits.shape[-1], teacher_logits.shape[-1], vocab_size)


def shared_vocabulary(student: int, teacher: int | None, vocab_size: int | None) -> int:
    """V, where both sides have it or are cut to it."""
    if vocab_size is None:
        if teacher is not None and student != teacher:
            raise UsageError(
                "the vocabularies differ in size",
                got=f"student V={student}, teacher V={teacher}",
                why="padded rows would be given real probability",
                instead="if one tokenizer serves both, pass vocab_size=len(tokenizer) to cut both to it",
            )
        return student
    least = student if teacher is None else min(student, teacher)
    if not 1 <= vocab_size <= least:
        raise UsageError(
            "vocab_size must lie between 1 and the smaller vocabulary", got=f"{vocab_size}, with {least} available"
        )
    return vocab_size


def check_objective(objective: Objective) -> None:
    """An objective is an instance, not a class or a name."""
    if not isinstance(objective, Objective):
        raise UsageError(
            "objective must be an Objective", got=type(objective).__name__, instead="ToDi(), Gated(Gate(...)), ..."
        )


def check_order(context: Context, objective: Objective) -> None:
    """λ that is dealt out is a constant, and gives no gradient to an objective that learns."""
    if context.lam_order is not None and objective.learned() is not None:
        raise UsageError(
            "with lam_order there is nothing to learn for the objective's own coefficients",
            why="λ is then a constant",
            instead="lam_order=None, or an objective without coefficients",
        )


def _order(order: Tensor, layout: Layout) -> Tensor:
    order = order.to(layout.index.device)
    right = order.shape == (layout.count,) and not order.is_floating_point() and order.dtype != torch.bool
    if not right or not torch.equal(order.long().sort().values, torch.arange(layout.count, device=order.device)):
        raise UsageError(
            "lam_order must be a permutation of the masked tokens, each number from 0 to N-1 once",
            got=f"{order.dtype} of shape {tuple(order.shape)}, N={layout.count}",
        )
    return order.long()


def _shaped(name: str, tensor: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    if tensor.shape != shape:
        raise UsageError(
            f"{name} must have the shape (B, T) of the batch",
            got=f"{tuple(tensor.shape)} for a batch of {tuple(shape)}",
        )
    return tensor.to(device)
