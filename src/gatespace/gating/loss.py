"""The plain path: losses from logits in memory, differentiated by autograd. Reference for the fused path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate
from gatespace.gating.inputs import Batch
from gatespace.gating.inputs import LossInputs as LossInputs
from gatespace.gating.objectives import Gated, Objective, TokenLoss
from gatespace.gating.supports import KLPair, check_support, kl_pair
from gatespace.gating.tokens import LogitsTeacher, PlainTokens, Teacher, TeacherTopK, TopKTeacher
from gatespace.gating.vocabulary import LOWEST, check_rows, computable

if TYPE_CHECKING:
    from gatespace.gating.tape import ChunkTokens

DEFAULTS = LossInputs()
_INFINITE = -LOWEST * 1e-9
_FIELDS = ("lam", "weight", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass")


@dataclass(frozen=True)
class LossOutput:
    """A loss and its parts. Tensors other than `loss` are detached, (B, T), and 0 outside the mask."""

    loss: Tensor
    """Σ over masked tokens / total_tokens; a scalar with gradient."""
    tokens: int | float
    """Number of masked tokens N, or the sum of their weights."""
    per_token: Tensor
    """L_t, without its weight in `LossInputs.weights`."""
    lam: Tensor | None
    """λ_t, the weight of reverse KL; None for an objective without a mixture."""
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
    """Student mass that the support does not resolve; above .01, do not trust a top-K reverse KL."""
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    """Extra signals of the objective by name."""

    @classmethod
    def of(cls, loss: Tensor, per_token: Tensor, telemetry: Mapping[str, Tensor], batch: Batch) -> LossOutput:
        """Build from (N,) per-token values."""
        spread = {name: batch.spread(value) for name, value in telemetry.items()}
        fields = {name: spread.pop(name, None) for name in _FIELDS}
        return cls(
            loss=loss,
            tokens=batch.tokens,
            per_token=batch.spread(per_token.detach()),
            signals=spread,
            **fields,  # type: ignore[arg-type]  # all but lam are always there
        )

    @classmethod
    def empty(cls, batch: Batch, objective: Objective, *student: Tensor | None) -> LossOutput:
        """Output for an empty mask: 0, connected to the student's tensors so that backward works and gives 0."""
        joined = [tensor.reshape(-1)[:0].sum() for tensor in (*student, objective.learned()) if tensor is not None]
        loss = torch.stack([part.to(computable(part).dtype) for part in joined]).sum()
        none = loss.detach().new_zeros(0)
        return cls.of(loss, none, dict.fromkeys((*_FIELDS, *objective.further_signals()), none), batch)


def gated_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    *,
    gate: Gate,
    stop_gradient: bool = False,
    support: str = "full",
    support_k: int | None = None,
    coefficients: Tensor | None = None,
    **inputs: Any,
) -> LossOutput:
    """Per-token gated mixture of reverse and forward KL, from logits.

        λ_t = σ(a·h_t + b·u + c + d·gap_t)        L_t = λ_t·KL(student‖teacher) + (1-λ_t)·KL(teacher‖student)

    Args:
        student_logits: (B, T, V), logits at position t predict response token t (already shifted).
        teacher_logits: (B, T, V), or a `TeacherTopK`. Always a constant.
        gate: The point (a, b, c, d), and extra signals.
        stop_gradient: Treat λ as a constant. By default gradient flows through the gate.
        support: full, bucket, hybrid, renorm or student.
        support_k: K of the top-K supports; None: top_k, or the K of a `TeacherTopK`.
        coefficients: (4+E,) tensor that replaces the gate's numbers and receives their gradient.
        **inputs: The fields of `LossInputs`: mask, weights, top_k, temperature, entropy, sampled,
            sampled_log_probs, segment_ids, u, total_tokens, vocab_size, lam_order.

    Returns:
        `LossOutput`; an empty mask gives loss 0 and gradient 0.

    Examples:
        >>> from gatespace import Gate, gated_kl
        >>> student = torch.zeros(1, 2, 4, requires_grad=True)
        >>> teacher = torch.tensor([[[2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
        >>> out = gated_kl(student, teacher, gate=Gate.named("G5"), top_k=4)
        >>> out.lam
        tensor([[0.8388, 0.9526]])
        >>> out.loss.backward()
    """
    objective = Gated(gate, support, support_k, stop_gradient, coefficients)
    return distillation_loss(student_logits, teacher_logits, objective=objective, inputs=LossInputs(**inputs))


def reference_gated_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    gate: Gate,
    mask: Tensor,
    top_k: int = 8,
    temperature: float = 1.0,
) -> Tensor:
    """The loss of `gated_kl` in plain torch, to read and to check against: the whole mathematics of the family.

    Examples:
        >>> student, teacher = torch.randn(2, 3, 4, 20, generator=torch.Generator().manual_seed(0)).unbind()
        >>> call = {"gate": Gate.named("H1"), "mask": torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]])}
        >>> ours = gated_kl(student, teacher, **call).loss
        >>> torch.testing.assert_close(reference_gated_kl(student, teacher, **call), ours)
    """
    top = teacher_logits.topk(top_k).values.log_softmax(-1)  # (B, T, K)
    h = -(top.exp() * top).sum(-1) / math.log(top_k)  # (B, T) entropy of the teacher's top-K, from 0 to 1
    u = h.gather(1, mask.argmax(1, keepdim=True))  # (B, 1) h at the first response token
    choice = teacher_logits.argmax(-1, keepdim=True)
    gap = 1 - student_logits.softmax(-1).gather(-1, choice).squeeze(-1)  # (B, T)
    lam = torch.sigmoid(gate.a * h + gate.b * u + gate.c + gate.d * gap)
    log_s, log_t = ((logits / temperature).log_softmax(-1) for logits in (student_logits, teacher_logits))
    reverse_kl = (log_s.exp() * (log_s - log_t)).sum(-1)
    forward_kl = (log_t.exp() * (log_t - log_s)).sum(-1)
    return ((lam * reverse_kl + (1 - lam) * forward_kl) * mask).sum() / mask.sum()


def distillation_loss(
    student_logits: Tensor,
    teacher: Tensor | TeacherTopK,
    *,
    objective: Objective,
    inputs: LossInputs = DEFAULTS,
) -> LossOutput:
    """Compute any objective from logits.

    Args:
        student_logits: (B, T, V), logits at position t predict response token t (already shifted).
        teacher: (B, T, V) logits, or a `TeacherTopK`. Always a constant.
        objective: E.g. ``ToDi()`` or ``Gated(gate)``.
        inputs: Mask, temperature, sampled ids and whatever else the objective needs.

    Examples:
        >>> from gatespace.gating import ToDi, distillation_loss
        >>> student, teacher = torch.zeros(1, 1, 8), torch.arange(8.0).reshape(1, 1, 8)
        >>> out = distillation_loss(student, teacher, objective=ToDi())
        >>> bool(torch.isclose(out.loss, out.forward_kl.sum() + out.reverse_kl.sum()))
        True
    """
    check_objective(objective, inputs)
    size = _vocabulary(student_logits, teacher, inputs.vocab_size)
    batch = Batch.of(student_logits.shape[:-1], student_logits.device, size, inputs)
    if batch.count == 0:
        return LossOutput.empty(batch, objective, student_logits)
    tokens = _tokens(student_logits, teacher, batch)
    if batch.given.lam_order is not None:
        # not under no_grad, although this graph is unused: log-probabilities memoised there would lack the KLs' graph
        tokens.lam = objective.own_lam(tokens)[batch.given.lam_order]
    result = objective(tokens)
    check_finite(result, tokens, objective)
    return LossOutput.of(batch.weighted(result.loss).sum() / batch.total_tokens, result.loss, result.telemetry, batch)


def forward_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    *,
    support: str = "full",
    support_k: int | None = 8,
    **inputs: Any,
) -> Tensor:
    """KL(teacher‖student), nats, per token.

    Args:
        student_logits: (..., V).
        teacher_logits: (..., V), or a `TeacherTopK`.
        support: As in `gated_kl`, like `support_k`.
        **inputs: Fields of `LossInputs`: temperature, sampled, sampled_log_probs, vocab_size.

    Returns:
        (...), with gradient. Infinite where the student rules out what the teacher allows.
    """
    return _both_kls(student_logits, teacher_logits, support, support_k, **inputs).forward


def reverse_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | TeacherTopK,
    *,
    support: str = "full",
    support_k: int | None = 8,
    **inputs: Any,
) -> Tensor:
    """KL(student‖teacher), nats, per token. Arguments as in `forward_kl`.

    Returns:
        (...), with gradient. Infinite on the full support where the teacher rules out what the student allows.
    """
    return _both_kls(student_logits, teacher_logits, support, support_k, **inputs).reverse


def _both_kls(
    student_logits: Tensor, teacher: Tensor | TeacherTopK, support: str, support_k: int | None, **inputs: Any
) -> KLPair:
    check_support(support)
    shape = student_logits.shape[:-1]
    flat = torch.Size((1, shape.numel()))
    inputs = {name: value.reshape(flat) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    given = LossInputs(**inputs)
    size = _vocabulary(student_logits, teacher, given.vocab_size)
    batch = Batch.of(flat, student_logits.device, size, given)
    if isinstance(teacher, TeacherTopK):
        support_k = min(support_k or teacher.ids.shape[-1], teacher.ids.shape[-1])
    else:
        teacher = teacher.reshape(*flat, -1)
    tokens = _tokens(student_logits.reshape(*flat, -1), teacher, batch)
    return KLPair(*(side.reshape(shape) for side in kl_pair(tokens, support, support_k)))


def _tokens(student_logits: Tensor, teacher_logits: Tensor | TeacherTopK, batch: Batch) -> PlainTokens:
    """The masked tokens of both sides, in float32 or float64, cut to the vocabulary and checked."""
    size = batch.vocab_size
    student = computable(batch.select(student_logits)[:, :size])
    check_rows("student", student.detach(), batch)
    infinite: tuple[Tensor, Tensor] | None = None
    if isinstance(teacher_logits, TeacherTopK):
        teacher: Teacher = TopKTeacher.of(teacher_logits, batch, student.dtype)
    else:
        rows = computable(batch.select(teacher_logits.detach())[:, :size]).to(student.dtype)
        check_rows("teacher", rows, batch)
        infinite = forbidden(student.detach(), rows)
        teacher = LogitsTeacher(rows if infinite is None else rows.clamp(min=LOWEST))
    if bool(student.detach().amin() == -torch.inf):
        student = student.clamp(min=LOWEST)
    return PlainTokens(student, teacher, batch, infinite)


# ---------------------------------------------------------------------- shared by both paths


def forbidden(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return which rows have infinite reverse KL and which infinite forward KL; None if no id is forbidden.

    A row is the last dimension; an id is forbidden by a logit (or bias) of -inf.
    """
    if not teacher.numel() or not bool(torch.minimum(teacher.amin(), student.amin()) == -torch.inf):
        return None
    by_student, by_teacher = student == -torch.inf, teacher == -torch.inf
    return (by_teacher & ~by_student).any(-1), (by_student & ~by_teacher).any(-1)


def check_objective(objective: Objective, inputs: LossInputs) -> None:
    """Raise if `objective` is not an instance, or has learnable coefficients while `lam_order` fixes λ."""
    if not isinstance(objective, Objective):
        got, instead = type(objective).__name__, "ToDi(), Gated(Gate(...)), ..."
        raise UsageError("objective must be an Objective", got=got, instead=instead)
    if inputs.lam_order is not None and objective.learned() is not None:
        raise UsageError(
            "with lam_order there is nothing to learn for the objective's own coefficients",
            why="λ is then a constant",
            instead="lam_order=None, or an objective without coefficients",
        )


def finite(loss: Tensor) -> Tensor:
    """(N,) which losses are finite and not the stand-in for infinity."""
    return loss.detach().isfinite() & (loss.detach().abs() < _INFINITE)


def check_finite(result: TokenLoss, tokens: PlainTokens | ChunkTokens, objective: Objective) -> None:
    """Raise on a loss that is not finite, with its position and the cause: λ, a forbidden id, or huge logits."""
    fine = finite(result.loss)
    if bool(fine.all()):
        return
    token = int((~fine).nonzero()[0])
    place, values = tokens.batch.place(token), {name: float(x[token]) for name, x in result.telemetry.items()}
    lam, learned = values.get("lam"), objective.learned()
    if lam is not None and math.isnan(lam):
        bad = [
            name
            for name, x in values.items()
            if math.isnan(x) and name in ("h", "u", "gap", *objective.further_signals())
        ]
        if bad:
            why = f"the signal {bad[0]} is NaN there"
        elif learned is not None and not bool(learned.isfinite().all()):
            why = f"the learned coefficients are {learned.tolist()}"
        else:
            why = f"coefficients times signals exceed {torch.finfo(tokens.dtype).max:.3g}, with both signs or times 0"
        raise UsageError(f"λ is not a number at {place}", why=why)
    infinite = {side: not abs(values[f"{side}_kl"]) < _INFINITE for side in ("reverse", "forward")}
    which = "reverse" if infinite["reverse"] and lam != 0 else "forward"
    if not infinite[which]:
        raise UsageError(f"the loss is not finite at {place}", got=float(result.loss[token]))
    zero, other = ("teacher", "student") if which == "reverse" else ("student", "teacher")
    teacher = tokens.teacher.known if isinstance(tokens.teacher, TopKTeacher) else tokens.teacher.logits
    rows = {"student": tokens.logits.detach()[token], "teacher": teacher[token]}
    if bool((rows[zero] <= LOWEST).any()):
        raise UsageError(
            f"{which} KL is infinite at {place}",
            why=f"the {zero} gives probability 0 (a logit of -inf or below {LOWEST:g}) to a token that the {other} "
            "allows",
            instead="support='bucket', or forbid the same ids on both sides, or a gate with λ = 0 (reverse) or 1 "
            "(forward)",
        )
    raise UsageError(
        f"{which} KL overflows at {place}",
        got=", ".join(f"logits of the {side} from {x.amin():.3g} to {x.amax():.3g}" for side, x in rows.items()),
        why="it grows with the distance of the logits, divided by the temperature",
        instead="models whose logits are below 1e20, or a temperature nearer to 1",
    )


def shared_vocabulary(student: int, teacher: int | None, vocab_size: int | None) -> int:
    """Return V of both sides, after cutting to `vocab_size` if given."""
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


def _vocabulary(student_logits: Tensor, teacher: Tensor | TeacherTopK, vocab_size: int | None) -> int:
    """V of both sides; checks that their logits cover the same tokens."""
    for side, tensor in (("student", student_logits), ("teacher", teacher)):
        if isinstance(tensor, TeacherTopK):
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UsageError(f"{side}_logits must be a floating-point tensor", got=got)
    if isinstance(teacher, TeacherTopK):
        return shared_vocabulary(student_logits.shape[-1], None, vocab_size)
    if student_logits.shape[:-1] != teacher.shape[:-1]:
        raise UsageError(
            "student and teacher logits must cover the same tokens (B, T)",
            got=f"student {tuple(student_logits.shape)}, teacher {tuple(teacher.shape)}",
        )
    return shared_vocabulary(student_logits.shape[-1], teacher.shape[-1], vocab_size)
