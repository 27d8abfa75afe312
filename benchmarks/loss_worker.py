"""One contender, one dtype, one fresh process: build the inputs, warm up, run, measure, compare with float64.

`loss.py` starts this file; started by hand it waits for a request on stdin. Shapes: N tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
from loss import BUCKET_K, CONTENDERS, STATIC_LAM, Contender
from torch import Tensor
from torch.nn import functional as F

GATE = (4.0, 4.0, -1.5, -4.0)
"""(a, b, c, d) = the paper's H4: uses every signal, d != 0, and λ is far from saturation on these inputs."""
TOP_K = 8
ROW = 64
"""Tokens per sample; the signal u is taken at the first."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP_TOKENS, WARM_UP_VOCAB = 64, 4096
_EVERY = 32


@dataclass(frozen=True)
class Inputs:
    """Hidden states and head matrices of both sides, and λ for contenders that need it given."""

    student_hidden: Tensor  # (N, H), with gradient
    student_head: Tensor  # (V, H), with gradient
    teacher_hidden: Tensor  # (N, H_teacher)
    teacher_head: Tensor  # (V, H_teacher)
    lam: Tensor | None = None  # (N,)

    @property
    def rows(self) -> int:
        tokens = self.student_hidden.shape[0]
        return tokens // ROW if tokens % ROW == 0 else 1

    def small(self) -> Inputs:
        def leaf(x: Tensor) -> Tensor:
            return x.detach().requires_grad_()

        n, v = WARM_UP_TOKENS, WARM_UP_VOCAB
        return Inputs(
            leaf(self.student_hidden[:n]),
            leaf(self.student_head[:v]),
            self.teacher_hidden[:n],
            self.teacher_head[:v],
            None if self.lam is None else self.lam[:n],
        )


def make_inputs(*, tokens: int, vocab: int, hidden: int, teacher_hidden: int, dtype: str, seed: int) -> Inputs:
    """Make the same inputs for every contender. Teacher and student partly agree; some tokens are sharp, some flat."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shared = min(hidden, teacher_hidden)
    student_head = normal(vocab, hidden).mul_(hidden**-0.5)
    teacher_head = normal(vocab, teacher_hidden).mul_(0.3 * hidden**-0.5)
    teacher_head[:, :shared] += student_head[:, :shared]
    sharpness = 2 + 6 * torch.rand(tokens, 1, generator=generator)
    student = normal(tokens, hidden)
    teacher = normal(tokens, teacher_hidden).mul_(0.3)
    teacher[:, :shared] += student[:, :shared]
    as_dtype = DTYPES[dtype]
    return Inputs(
        (student * sharpness).to(as_dtype).requires_grad_(),
        student_head.to(as_dtype).requires_grad_(),
        (teacher * sharpness).to(as_dtype),
        teacher_head.to(as_dtype),
    )


# Contenders: each is a forward pass from inputs to a loss. Autograd computes the gradient for all.


def naive(x: Inputs, *, exact: bool = False) -> Tensor:
    """The obvious version: full logits, log_softmax in float32, and autograd. `exact`: logits of float32 factors."""

    def log_probs(hidden: Tensor, head: Tensor) -> Tensor:
        logits = hidden.float() @ head.float().T if exact else (hidden @ head.T).float()
        return F.log_softmax(logits, dim=-1)

    student = log_probs(x.student_hidden, x.student_head)
    with torch.no_grad():
        teacher = log_probs(x.teacher_hidden, x.teacher_head)
        top, ids = teacher.topk(TOP_K, dim=-1)
        h = torch.special.entr(top.softmax(-1)).sum(-1) / math.log(TOP_K)
        u = h.view(x.rows, -1)[:, :1].expand(x.rows, h.numel() // x.rows).reshape(-1)
    forward_kl = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    reverse_kl = F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
    gap = 1 - student.gather(-1, ids[:, :1]).squeeze(-1).exp()
    a, b, c, d = GATE
    lam = torch.sigmoid(a * h + b * u + c + d * gap)
    return (lam * reverse_kl + (1 - lam) * forward_kl).mean()


def trl(x: Inputs) -> Tensor:
    """TRL's autograd Function, called for each KL. λ is computed beforehand, at no cost to TRL."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    assert x.lam is not None

    def divergence(beta: float) -> Tensor:
        arguments = (x.student_hidden, x.student_head, None, x.teacher_hidden, x.teacher_head, None, beta)
        return ChunkedDivergenceFunction.apply(*arguments)[0]

    return (x.lam * divergence(1.0) + (1 - x.lam) * divergence(0.0)).mean()


def liger_two_calls(x: Inputs, *, chunk_size: int, compiled: bool) -> Tensor:
    """Liger's JSD loss at its two ends. λ goes in as weight_soft_loss, which saves scaling the gradients."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    def divergence(beta: float, weight: float) -> Tensor:
        loss = LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=weight, beta=beta, compiled=compiled, chunk_size=chunk_size
        )
        labels = torch.zeros(x.student_hidden.shape[0], dtype=torch.long)
        return loss(x.student_hidden, x.student_head, x.teacher_hidden, x.teacher_head, labels)

    return divergence(1.0, STATIC_LAM) + divergence(0.0, 1 - STATIC_LAM)


def liger_subclass(x: Inputs, *, chunk_size: int) -> Tensor:
    """Liger's base class with a custom loss: one call, float32 inside, still one constant λ."""
    from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase

    class Mixture(LigerFusedLinearDistillationBase):
        @staticmethod
        def distillation_loss_fn(student_logits, teacher_logits, beta=0.5, target=None, ignore_index=-100):
            student = F.log_softmax(student_logits.float(), dim=-1)
            teacher = F.log_softmax(teacher_logits.float(), dim=-1)
            reverse = F.kl_div(teacher, student, reduction="sum", log_target=True)
            return beta * reverse + (1 - beta) * F.kl_div(student, teacher, reduction="sum", log_target=True)

        @classmethod
        def forward(cls, ctx, *tensors):
            weights = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "beta": STATIC_LAM}
            return super().forward(cls, ctx, *tensors, chunk_size=chunk_size, compiled=False, **weights)

        @staticmethod
        def backward(ctx, grad_output):
            return LigerFusedLinearDistillationBase.backward(ctx, grad_output)[:5]

    labels = torch.zeros(x.student_hidden.shape[0], dtype=torch.long)
    return Mixture.apply(x.student_hidden, x.student_head, x.teacher_hidden, x.teacher_head, labels)


def gatespace(x: Inputs, *, static: bool = False, **options: Any) -> Tensor:
    from gatespace import Gate, fused_gated_kl

    def rows(hidden: Tensor) -> Tensor:
        return hidden.view(x.rows, -1, hidden.shape[-1])

    gate = Gate.static(STATIC_LAM) if static else Gate(*GATE)
    return fused_gated_kl(
        rows(x.student_hidden),
        x.student_head,
        rows(x.teacher_hidden),
        x.teacher_head,
        gate=gate,
        top_k=TOP_K,
        **options,
    ).loss


FORWARD: dict[str, Callable[..., Tensor]] = {
    "naive": naive,
    "trl": trl,
    "liger_two_calls": liger_two_calls,
    "liger_subclass": liger_subclass,
    "gatespace": gatespace,
}


# Reference: float64, token by token from the definition, gradient by autograd at the logits.


def reference(x: Inputs, tasks: Iterable[str]) -> dict[str, Any]:
    """Loss and gradients of each task in float64 on the same inputs (already rounded to their dtype).

    Of the head's gradient it keeps every 32nd row and the rows of the teacher's choices, and one random ±1 combination
    of all rows to cover the rest.
    """
    vocab = x.student_head.shape[0]
    student_head, teacher_head = x.student_head.detach().double(), x.teacher_head.double()
    samples = list(zip(x.student_hidden.detach().chunk(x.rows), x.teacher_hidden.chunk(x.rows), strict=True))
    choices = torch.cat([(t @ x.teacher_head.T).argmax(-1) for _, t in samples])
    rows = torch.cat([torch.arange(0, vocab, _EVERY), choices]).unique()
    signs = _signs(vocab).double()
    total = x.student_hidden.shape[0]
    lam: list[Tensor] = []
    out: dict[str, dict[str, Any]] = {
        task: {"loss": 0.0, "hidden": [], "head_rows": torch.zeros(len(rows), x.student_head.shape[1]), "head_sum": 0.0}
        for task in tasks
    }
    for student_hidden, teacher_hidden in samples:
        hidden = student_hidden.double()
        logits = (hidden @ student_head.T).requires_grad_()
        losses, sample_lam = _definition(logits, teacher_hidden.double() @ teacher_head.T)
        lam.append(sample_lam)
        for task, kept in out.items():
            loss = losses[task] / total
            (slope,) = torch.autograd.grad(loss, logits, retain_graph=True)
            kept["loss"] += loss.item()
            kept["hidden"].append(slope @ student_head)
            kept["head_rows"] = kept["head_rows"] + slope[:, rows].T @ hidden
            kept["head_sum"] = kept["head_sum"] + (slope @ signs) @ hidden
    for kept in out.values():
        kept["hidden"] = torch.cat(kept["hidden"])
    return {"rows": rows, "lam": torch.cat(lam).float(), "tasks": out}


def _definition(logits: Tensor, teacher_logits: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Sums over one sample's tokens of L = λR + (1-λ)F for each task, and the sample's λ. (T, V) each."""
    student, teacher = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    s, t = student.exp(), teacher.exp()
    forward_kl, reverse_kl = (t * (teacher - student)).sum(-1), (s * (student - teacher)).sum(-1)
    top = t.topk(TOP_K, dim=-1)
    p = top.values / top.values.sum(-1, keepdim=True)
    h = -(p * p.log()).sum(-1) / math.log(TOP_K)
    a, b, c, d = GATE
    lam = torch.sigmoid(a * h + b * h[0] + c + d * (1 - s.gather(-1, top.indices[:, :1]).squeeze(-1)))

    k = min(BUCKET_K, t.shape[-1] - 1)
    ids = t.topk(k, dim=-1).indices
    s_k, t_k = (torch.cat([z, 1 - z.sum(-1, keepdim=True)], dim=-1) for z in (s.gather(-1, ids), t.gather(-1, ids)))
    forward_b, reverse_b = (t_k * (t_k / s_k).log()).sum(-1), (s_k * (s_k / t_k).log()).sum(-1)

    def mixed(weight: Tensor | float, forward: Tensor, reverse: Tensor) -> Tensor:
        return (weight * reverse + (1 - weight) * forward).sum()

    losses = {
        "gated": mixed(lam, forward_kl, reverse_kl),
        "detached": mixed(lam.detach(), forward_kl, reverse_kl),
        "static": mixed(STATIC_LAM, forward_kl, reverse_kl),
        "bucket": mixed(lam, forward_b, reverse_b),
    }
    return losses, lam.detach()


def _signs(vocab: int) -> Tensor:
    return torch.randint(0, 2, (vocab,), generator=torch.Generator().manual_seed(1)).mul_(2).sub_(1).float()


def errors(loss: float, hidden: Tensor, head: Tensor, *, ref: dict[str, Any], rows: Tensor) -> dict[str, float]:
    """Relative errors of the loss, and of each gradient in the Euclidean norm."""

    def relative(value: Tensor, truth: Tensor) -> float:
        return ((value.double() - truth).norm() / truth.norm()).item()

    head_sum = torch.zeros(head.shape[1], dtype=torch.float64)
    for part, signs in zip(head.split(8192), _signs(head.shape[0]).split(8192), strict=True):
        head_sum += signs.double() @ part.double()
    return {
        "loss": abs(loss - ref["loss"]) / abs(ref["loss"]),
        "hidden": relative(hidden, ref["hidden"]),
        "head": max(relative(head[rows], ref["head_rows"]), relative(head_sum, ref["head_sum"])),
    }


# Process


def run(contender: Contender, x: Inputs, *, steps: int) -> tuple[dict[str, Any], float, tuple[Tensor, Tensor]]:
    """Warm up, then run forward and backward `steps` times. Peaks are relative to the memory before the first step.

    Gradients are results, not overhead: their bytes are subtracted from a backward pass's peak, and from a forward
    pass's peak if the contender can compute them there and that pass has left as much in memory. (If the peak comes
    before the gradients exist, as in naive autograd, this subtracts too much, in that contender's favour.)
    """

    forward_pass = FORWARD[contender.function]

    def step(inputs: Inputs) -> tuple[Tensor, tuple[Tensor, ...], measure.Cost, measure.Cost, int]:
        loss, forward = measure.measured(lambda: forward_pass(inputs, **contender.options))
        between = measure.rss()
        leaves = [inputs.student_hidden, inputs.student_head]
        gradients, backward = measure.measured(lambda: torch.autograd.grad(loss, leaves))
        return loss.detach(), gradients, forward, backward, between

    step(x if contender.whole_warm_up else x.small())
    measure.give_back_free_memory()
    rest = measure.rss()
    done = []
    gradients: tuple[Tensor, ...] = ()
    for _ in range(steps):
        gradients = ()  # free the previous step's before this one's are computed
        loss, gradients, forward, backward, between = step(x)
        size = sum(g.numel() * g.element_size() for g in gradients)
        early = contender.gradient_in_forward and between - rest > 0.9 * size
        peaks = (forward.peak_rss - rest - (size if early else 0), backward.peak_rss - rest - size)
        done.append(
            {
                "peak_extra_mib": max(0, *peaks) / measure.MIB,
                "peak_forward_mib": (forward.peak_rss - rest) / measure.MIB,
                "peak_backward_mib": (backward.peak_rss - rest) / measure.MIB,
                "wall": forward.wall + backward.wall,
                "cpu": forward.cpu + backward.cpu,
                "wall_forward": forward.wall,
                "others": forward.others + backward.others,
            }
        )
    return {"steps": done, "gradient_mib": size / measure.MIB}, loss.item(), (gradients[0], gradients[1])


def main() -> None:
    asked = measure.request()
    torch.set_num_threads(asked["threads"])
    x = make_inputs(**asked["inputs"])
    file = Path(asked["reference"])
    if asked["contender"] is None:
        torch.save(reference(x, asked["tasks"]), file)
        measure.answer({"ok": True})
        return
    contender = CONTENDERS[asked["contender"]]
    known = torch.load(file, mmap=True)
    x = Inputs(x.student_hidden, x.student_head, x.teacher_hidden, x.teacher_head, known["lam"].clone())
    try:
        result, loss, (hidden, head) = run(contender, x, steps=asked["steps"])
    except ImportError as error:
        measure.answer({"unavailable": f"cannot be imported: {error}"})
        return
    result["loss"] = loss
    result["mean_lam"] = known["lam"].mean().item()
    result["gradient_norm_hidden"] = hidden.double().norm().item()
    result["error"] = errors(loss, hidden, head, ref=known["tasks"][contender.task], rows=known["rows"])
    measure.answer(result)


if __name__ == "__main__":
    main()
