"""The fused path: the same losses from hidden states and LM heads, without materialising (N, V) logits.

Tokens are processed in chunks. For each chunk, both sides' logits are computed in vocabulary slices into two buffers
of bounded size; the objective is computed from them through `Tokens`, as on the plain path, and everything it takes
from the student is recorded on a tape. One small autograd pass gives the gradient at those (n,) numbers; the gradient
at the logits follows in closed form (see `tape`), again slice by slice, and goes straight into the matmuls with head
rows and hidden states. So the gate, every support and every objective are written once, for both paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gatespace.errors import UsageError
from gatespace.gating import signals
from gatespace.gating.coefficients import Gate
from gatespace.gating.inputs import Batch, LossInputs
from gatespace.gating.loss import (
    DEFAULTS,
    LossOutput,
    check_finite,
    check_objective,
    finite,
    forbidden,
    shared_vocabulary,
)
from gatespace.gating.objectives import Gated, Objective
from gatespace.gating.projection import Head, Projection, logits_buffer
from gatespace.gating.tape import ChunkTokens, Tape
from gatespace.gating.tokens import LogitsTeacher, Teacher, TeacherTopK, TopKTeacher
from gatespace.gating.vocabulary import check_rows, possible, tiles

CHUNK_MB = 60
"""Default total size of the two logit buffers, in MB."""
_CPU_TILE = 1 << 18
"""Elements of a slice on a CPU: small enough that a few stay in cache, large enough to amortise call overhead."""
_LANES = 16
"""Tokens that fill a vector register; matmuls are fastest at multiples of it."""
_GPU_TILE = 1 << 24
"""Elements of a slice on other devices: large enough to hide kernel launch overhead."""


def fused_gated_kl(
    student_hidden: Tensor,
    student_head: Head | nn.Linear | Tensor,
    teacher_hidden: Tensor | TeacherTopK,
    teacher_head: Head | nn.Linear | Tensor | None,
    *,
    gate: Gate,
    stop_gradient: bool = False,
    support: str = "full",
    support_k: int | None = None,
    coefficients: Tensor | None = None,
    recompute: bool | None = None,
    chunk_mb: float = CHUNK_MB,
    **inputs: Any,
) -> LossOutput:
    """`gated_kl` of the two heads' logits, same value and gradient, without materialising them.

    Args:
        student_hidden: (B, T, H), last hidden states at the positions that predict the response tokens.
        student_head: (V, H) tensor, Linear layer or `Head`; it may be tied to the embedding.
        teacher_hidden: (B, T, H'), or a `TeacherTopK` (then `teacher_head` is None).
        teacher_head: (V, H') tensor, Linear layer or `Head`.
        gate: As in `gated_kl`, like stop_gradient, support, support_k and coefficients.
        recompute: When to compute the gradient. False: with the value, in one pass over the vocabulary. True: in
            backward, from recomputed logits, at 1.5 times the work. None: False, unless the head's gradient is in
            half precision, where only True accumulates it in float32 without a float32 copy.
        chunk_mb: Size of the logit buffers, in MB; affects time and memory, not the result.
        **inputs: The fields of `LossInputs`.

    Half-precision hidden states and heads are multiplied in half precision and accumulated in float32; logits are
    float32.

    Examples:
        >>> from gatespace import Gate, fused_gated_kl
        >>> hidden, head = torch.ones(1, 2, 4, requires_grad=True), torch.eye(8, 4)
        >>> out = fused_gated_kl(hidden, head, torch.zeros(1, 2, 6), torch.eye(8, 6), gate=Gate.static(0.5))
        >>> out.loss.backward()
        >>> hidden.grad.shape
        torch.Size([1, 2, 4])
    """
    return fused_distillation_loss(
        student_hidden,
        student_head,
        teacher_hidden,
        teacher_head,
        objective=Gated(gate, support, support_k, stop_gradient, coefficients),
        inputs=LossInputs(**inputs),
        recompute=recompute,
        chunk_mb=chunk_mb,
    )


def fused_distillation_loss(
    student_hidden: Tensor,
    student_head: Head | nn.Linear | Tensor,
    teacher_payload: Tensor | TeacherTopK,
    teacher_head: Head | nn.Linear | Tensor | None,
    *,
    objective: Objective,
    inputs: LossInputs = DEFAULTS,
    recompute: bool | None = None,
    chunk_mb: float = CHUNK_MB,
) -> LossOutput:
    """Compute any objective from hidden states and heads.

    Arguments as in `fused_gated_kl` and `distillation_loss`. `inputs.lam_order` costs one extra pass over the
    vocabulary, since λ of all chunks is needed before the first loss; so does an objective with `prepass`.
    """
    check_objective(objective, inputs)
    if not chunk_mb > 0:
        raise UsageError("chunk_mb must be positive", got=chunk_mb)
    head = Head.of(student_head)
    _check_side("student", student_hidden, head)
    teacher: TeacherTopK | tuple[Tensor, Head]
    if isinstance(teacher_payload, TeacherTopK):
        teacher, teacher_size = teacher_payload, None
    else:
        if teacher_head is None:
            raise UsageError(
                "teacher hidden states need the teacher's head", instead="pass teacher_head, or TeacherTopK"
            )
        source = Head.of(teacher_head)
        _check_side("teacher", teacher_payload, source)
        if teacher_payload.shape[:-1] != student_hidden.shape[:-1]:
            raise UsageError(
                "student and teacher hidden states must cover the same tokens (B, T)",
                got=f"student {tuple(student_hidden.shape)}, teacher {tuple(teacher_payload.shape)}",
            )
        teacher, teacher_size = (teacher_payload, source), source.weight.shape[0]
    size = shared_vocabulary(head.weight.shape[0], teacher_size, inputs.vocab_size)
    batch = Batch.of(student_hidden.shape[:-1], student_hidden.device, size, inputs)
    if batch.count == 0:
        return LossOutput.empty(batch, objective, student_hidden, head.weight, head.bias)
    hidden = batch.select(student_hidden)
    work = _Work(batch, objective, hidden, head, teacher, chunk_mb)
    loss: Tensor = _FusedLoss.apply(work, recompute, hidden, head.weight, head.bias, objective.learned())
    telemetry = {name: torch.cat(values) for name, values in work.telemetry.items()}
    return LossOutput.of(loss, torch.cat(work.per_token), telemetry, batch)


def _check_side(side: str, hidden: Tensor, head: Head) -> None:
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or not hidden.is_floating_point():
        got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise UsageError(f"{side}_hidden must be a floating-point tensor of shape (B, T, H)", got=got)
    if head.weight.dim() != 2 or head.weight.shape[1] != hidden.shape[-1]:
        raise UsageError(
            f"the {side}'s head must have shape (V, H) with the H of its hidden states",
            got=f"head {tuple(head.weight.shape)}, hidden {tuple(hidden.shape)}",
        )
    if head.bias is not None and head.bias.shape != head.weight.shape[:1]:
        raise UsageError(
            f"the {side}'s head bias must have shape (V,)",
            got=f"bias {tuple(head.bias.shape)}, weight {tuple(head.weight.shape)}",
        )


# ---------------------------------------------------------------------- computation


@dataclass
class _Gradients:
    """Accumulated gradients; None where none is needed."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to accumulate."""
        return not (self.hidden is None and self.weight is None and self.bias is None)

    def add(self, grad: Tensor, projection: Projection, tokens: slice, start: int, stop: int) -> None:
        """Accumulate ∂L/∂(hidden @ weightᵀ + bias) of a slice of tokens and vocabulary."""
        hidden = projection.hidden[tokens]
        if self.bias is not None:
            self.bias[start:stop] += grad.sum(0)
        grad = grad.to(hidden.dtype)
        if self.hidden is not None:
            _accumulate(self.hidden[tokens], grad, projection.rows(start, stop))
        if self.weight is not None:
            # the first tokens overwrite, which saves zero-filling so large a tensor
            _accumulate(self.weight[start:stop], grad.t(), hidden, begin=tokens.start == 0)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, begin: bool = False) -> None:
    """total += left @ right, or total = left @ right if `begin`."""
    if total.dtype != left.dtype:
        product = left @ right
        _ = total.copy_(product) if begin else total.add_(product)
    else:
        total.addmm_(left, right, beta=0 if begin else 1)


def _narrow(buffer: Tensor, tokens: int) -> Tensor:
    """A logits buffer for fewer tokens, in the same memory."""
    width = buffer.shape[1]
    return buffer.t().reshape(-1)[: width * tokens].view(width, tokens).t()


class _Work:
    """State of one call: chunks over tokens, slices over the vocabulary, value and gradient."""

    def __init__(
        self,
        batch: Batch,
        objective: Objective,
        hidden: Tensor,
        head: Head,
        teacher: TeacherTopK | tuple[Tensor, Head],
        chunk_mb: float,
    ) -> None:
        self.batch = batch
        self.objective = objective
        self.chunk_bytes = chunk_mb * 1e6
        size, kind = batch.vocab_size, hidden.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.student = Projection(hidden.detach().to(cast or hidden.dtype), head, size)
        self.teacher: Projection | TopKTeacher
        self.infinite: tuple[Tensor, Tensor] | None = None
        if isinstance(teacher, TeacherTopK):
            self.teacher = TopKTeacher.of(teacher, batch, self.student.dtype)
        else:
            states, teacher_head = teacher
            # the teacher's own precision, unless one side is in float64: both sides' logits share a dtype
            wide = self.student.dtype
            own = wide if torch.float64 in (wide, states.dtype) else states.dtype
            self.teacher = Projection(batch.select(states.detach()).to(cast or own), teacher_head, size)
            self.infinite = forbidden(head.forbids(size), teacher_head.forbids(size))
        self.lam: Tensor | None = None
        self.everywhere: dict[str, Tensor] = {}
        self.strict = False
        self.start()

    def start(self) -> None:
        """Reset the results of an earlier run."""
        self.per_token: list[Tensor] = []
        self.telemetry: dict[str, list[Tensor]] = {}
        self.tapes: list[Tape] = []
        self.fine: list[Tensor] = []
        """Whether all numbers of a chunk are finite; checked once at the end, to avoid a sync per chunk."""
        self.learned_grad: Tensor | None = None

    # -- sizes -----------------------------------------------------------

    def _chunk(self) -> int:
        """Tokens per chunk: evenly sized chunks, in whole vector registers where they fit."""
        n = self.batch.count
        buffers = 2 if isinstance(self.teacher, Projection) else 1
        most = max(1, int(self.chunk_bytes // (buffers * self.batch.vocab_size * self.student.dtype.itemsize)))
        if most > _LANES:
            most -= most % _LANES
        even = math.ceil(n / math.ceil(n / most))
        return min(n, math.ceil(even / _LANES) * _LANES) if most >= _LANES else even

    def _tile(self, tokens: int) -> int:
        """Width of a slice of the vocabulary."""
        elements = _CPU_TILE if self.student.hidden.device.type == "cpu" else _GPU_TILE
        return min(max(64, elements // tokens // 64 * 64), self.batch.vocab_size)

    # -- value, and gradient in the same pass ------------------------------

    def run(self, gradients: _Gradients | None, keep_tape: bool = False) -> Tensor:
        """Return the loss; add its gradient to `gradients`, or keep tapes for `replay`."""
        self.start()
        width = self._tile(self._chunk())
        learned = self.objective.learned()
        if learned is not None and not learned.requires_grad:
            learned = None
        self._prepass()
        order = self.batch.given.lam_order
        if order is not None and self.lam is None:
            with torch.no_grad():
                self.lam = torch.cat([self.objective.own_lam(tokens) for tokens in self._chunks()])[order]
        for tokens in self._chunks():
            with torch.set_grad_enabled(keep_tape or gradients is not None):
                result = self.objective(tokens)
                total = (tokens.batch.weighted(result.loss) / self.batch.total_tokens).sum()
            self.fine.append(finite(result.loss).all())
            self.per_token.append(result.loss.detach())
            for name, value in result.telemetry.items():
                self.telemetry.setdefault(name, []).append(value)
            if gradients is None and not keep_tape:
                continue
            grad = tokens.tape.differentiate(total, learned)
            if grad is not None:
                self.learned_grad = grad if self.learned_grad is None else self.learned_grad + grad
            if gradients is None:
                self.tapes.append(tokens.tape)
            elif gradients.wanted:  # otherwise only the objective's own tensor is trained
                for start, stop in tiles(self.batch.vocab_size, width):
                    logits = tokens.logits[:, start:stop]
                    grad = self.student.pull_back(tokens.gradient(start, stop), logits)
                    gradients.add(grad, self.student, tokens.span, start, stop)
        if not bool(torch.stack(self.fine).all()):
            self._complain()
        return self.batch.weighted(torch.cat(self.per_token)).sum() / self.batch.total_tokens

    @torch.no_grad()
    def _prepass(self) -> None:
        """Compute, once, the signals that the objective needs for all tokens before the first loss."""
        names = [name for name in self.objective.prepass() if name not in self.everywhere]
        if names:
            parts = [[signals.read(name, tokens) for name in names] for tokens in self._chunks()]
            self.everywhere = dict(zip(names, map(torch.cat, zip(*parts, strict=True)), strict=True))

    @torch.no_grad()
    def _complain(self) -> None:
        """Raise at the first non-finite number, with its position."""
        self.strict, self.everywhere = True, {}
        self._prepass()
        for tokens in self._chunks():
            check_finite(self.objective(tokens), tokens, self.objective)

    def _chunks(self) -> Iterator[ChunkTokens]:
        """Yield all tokens chunk by chunk, reusing two buffers."""
        n, step = self.batch.count, self._chunk()
        width = self._tile(step)
        z_s = logits_buffer(self.student.hidden, step, self.batch.vocab_size, self.student.dtype)
        z_t = torch.empty_like(z_s) if isinstance(self.teacher, Projection) else None
        firsts: dict[str, Tensor] = {}
        for start in range(0, n, step):
            span = slice(start, min(start + step, n))
            count = span.stop - span.start
            if count < step:  # the last chunk: a smaller buffer in the same memory
                z_s, z_t = _narrow(z_s, count), None if z_t is None else _narrow(z_t, count)
            logits = self._logits(self.student, "student", z_s, span, width)
            if isinstance(self.teacher, Projection):
                assert z_t is not None
                teacher: Teacher = LogitsTeacher(self._logits(self.teacher, "teacher", z_t, span, width), width)
            else:
                teacher = self.teacher.part(span, strict=self.strict)
            tokens = ChunkTokens(logits, teacher, self.batch, span, tile=width, firsts=firsts, infinite=self.infinite)
            tokens.lam = None if self.lam is None else self.lam[span]
            tokens.everywhere = self.everywhere
            yield tokens

    def _logits(self, side: Projection, name: str, out: Tensor, span: slice, width: int) -> Tensor:
        for start, stop in tiles(self.batch.vocab_size, width):
            side.into(out[:, start:stop], span, start, stop)
        if self.strict:
            check_rows(name, out, self.batch.part(span))
        else:
            self.fine.append(possible(out).all())
        return out

    # -- gradient in backward ----------------------------------------------

    def replay(self, gradients: _Gradients) -> None:
        """Compute the gradient from the tapes: vocabulary slices outside, all tokens inside, each head row once."""
        tape = Tape.join(self.tapes)
        n, size = self.batch.count, self.batch.vocab_size
        everything = slice(0, n)
        # about eight slices are alive at once
        width = min(size, max(64, int(self.chunk_bytes // (8 * n * self.student.dtype.itemsize)) // 64 * 64))
        for start, stop in tiles(size, min(width, max(self._tile(n), 1024))):
            out = logits_buffer(self.student.hidden, n, stop - start, self.student.dtype)
            logits = self.student.into(out, everything, start, stop)
            teacher = None
            if tape.needs_teacher:
                assert isinstance(self.teacher, Projection)
                teacher = self.teacher.into(torch.empty_like(logits), everything, start, stop)
            grad = self.student.pull_back(tape.gradient(logits, teacher, start, stop), logits)
            gradients.add(grad, self.student, everything, start, stop)


def _unwritten(weight: Tensor, dtype: torch.dtype, vocab_size: int) -> Tensor:
    """Uninitialised head gradient, zeroed only in the rows that no token writes."""
    room = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    room[vocab_size:] = 0
    return room


@cache
def _keep_pages() -> None:
    """Make glibc keep the pages of freed slices, once per process.

    glibc trims the top of its heap beyond a threshold, so every half-megabyte temporary is paged in again: a tenth of
    this module's time. The threshold rises with the largest block ever freed (up to 32 MiB), and a block that is never
    written to costs nothing.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


class _FusedLoss(torch.autograd.Function):
    """The scalar loss as a function of hidden states, head and the objective's own tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        work: _Work,
        recompute: bool | None,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        learned: Tensor | None,
    ) -> Tensor:
        _, _, *needed = ctx.needs_input_grad
        if recompute is None:
            recompute = needed[1] and weight.dtype.itemsize < 4
        if hidden.device.type == "cpu":
            _keep_pages()
        ctx.work, ctx.recompute, ctx.gradients = work, recompute, None
        ctx.save_for_backward(hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            if not any(needed):
                return work.run(None)
            if recompute:
                return work.run(None, keep_tape=True)
            ctx.gradients = _FusedLoss._blank(ctx, hidden, weight, bias)
            return work.run(ctx.gradients)

    @staticmethod
    def _blank(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Gradients:
        """Gradient buffers: float32 or wider, except for a head gradient whose rows are each written once."""
        _, _, need_hidden, need_weight, need_bias, _ = ctx.needs_input_grad
        wide = ctx.work.student.dtype
        rows = weight.dtype if ctx.recompute or weight.dtype.itemsize >= 4 else wide
        return _Gradients(
            torch.zeros_like(hidden, dtype=wide) if need_hidden else None,
            _unwritten(weight, rows, ctx.work.batch.vocab_size) if need_weight else None,
            torch.zeros_like(bias, dtype=wide) if need_bias and bias is not None else None,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        gradients, ctx.gradients = ctx.gradients, None  # given away below, scaled in place
        hidden, weight, bias = ctx.saved_tensors
        if gradients is None:
            gradients = _FusedLoss._blank(ctx, hidden, weight, bias)
            with torch.autocast(hidden.device.type, enabled=False):
                if ctx.recompute:
                    work.replay(gradients)
                else:  # a second backward through the same graph
                    work.run(gradients)
        learned = work.learned_grad
        if float(upstream) != 1.0:
            for part in (gradients.hidden, gradients.weight, gradients.bias):
                if part is not None:
                    part *= upstream
            learned = None if learned is None else learned * upstream
        parts = zip((gradients.hidden, gradients.weight, gradients.bias), (hidden, weight, bias), strict=True)
        return None, None, *(None if g is None else g.to(x.dtype) for g, x in parts), learned
