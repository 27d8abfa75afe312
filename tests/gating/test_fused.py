"""The fused form: equal to the plain one in value and every gradient, whatever the chunks; never a whole (N, V)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gatespace import Gate, fused_gated_kl, gated_kl
from gatespace.gating import Head
from gatespace.gating.fused import _keep_pages

from . import oracle
from .compare import TELEMETRY, assert_close, assert_matches, fixed, leaf, numbers, top_k_of

SUPPORTS = ["full", "bucket", "hybrid", "renorm"]
TINY = 0.0005  # megabytes: a few dozen float64, so both tokens and vocabulary are cut, and not evenly
B, T, V, H, HT = 2, 5, 37, 6, 4


@dataclass
class Inputs:
    hidden: np.ndarray
    weight: np.ndarray
    teacher_hidden: np.ndarray
    teacher_weight: np.ndarray
    bias: np.ndarray
    teacher_bias: np.ndarray
    mask: np.ndarray
    sampled: np.ndarray
    log_mu: np.ndarray


def inputs(seed: int = 0, b: int = B, t: int = T, v: int = V, h: int = H, ht: int = HT) -> Inputs:
    rng = np.random.default_rng(seed)
    mask = np.ones((b, t), dtype=np.int64)
    mask[0, 0] = mask[-1, -1] = 0
    return Inputs(
        hidden=rng.normal(size=(b, t, h)),
        weight=rng.normal(size=(v, h)) * 0.8,
        teacher_hidden=rng.normal(size=(b, t, ht)),
        teacher_weight=rng.normal(size=(v, ht)),
        bias=rng.normal(size=v),
        teacher_bias=rng.normal(size=v),
        mask=mask,
        sampled=rng.integers(0, v, size=(b, t)),
        log_mu=np.log(rng.uniform(0.01, 0.5, size=(b, t))),
    )


@dataclass
class Result:
    out: Any
    grads: dict[str, np.ndarray] = field(default_factory=dict)


def result(out: Any, leaves: dict[str, torch.Tensor]) -> Result:
    out.loss.backward()
    return Result(out, {name: tensor.grad.numpy() for name, tensor in leaves.items()})


def logits_of(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def plain_and_fused(
    x: Inputs,
    gate: Gate,
    *,
    bias: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    coefficients: list[float] | None = None,
    fused: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Result, Result]:
    """The same loss both ways, with the gradients of everything that may have one."""
    options.setdefault("mask", torch.as_tensor(x.mask))
    results = []
    for form in ("plain", "fused"):
        leaves = {"hidden": leaf(x.hidden), "weight": leaf(x.weight)}
        if bias:
            leaves["bias"] = leaf(x.bias)
        if coefficients is not None:
            leaves["coefficients"] = leaf(coefficients)
        call = {**options, "gate": gate, "coefficients": leaves.get("coefficients")}
        student_bias = leaves.get("bias")
        teacher_bias = fixed(x.teacher_bias) if bias else None
        teacher_hidden, teacher_weight = fixed(x.teacher_hidden), fixed(x.teacher_weight)
        if form == "plain":
            student = logits_of(leaves["hidden"], leaves["weight"], student_bias, scale, softcap)
            teacher = logits_of(teacher_hidden, teacher_weight, teacher_bias, scale, softcap)
            out = gated_kl(student, teacher, **call)
        else:
            out = fused_gated_kl(
                leaves["hidden"],
                Head(leaves["weight"], bias=student_bias, scale=scale, softcap=softcap),
                teacher_hidden,
                Head(teacher_weight, bias=teacher_bias, scale=scale, softcap=softcap),
                **{"chunk_mb": TINY, **call, **(fused or {})},
            )
        results.append(result(out, leaves))
    return results[0], results[1]


def assert_same(plain: Result, fused: Result, *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert_close(fused.out.loss, plain.out.loss, rtol=rtol, atol=atol, what="loss")
    for name in (*TELEMETRY, "weight"):
        assert_close(getattr(fused.out, name), getattr(plain.out, name), rtol=rtol, atol=atol, what=name)
    assert fused.out.signals.keys() == plain.out.signals.keys()
    for name, values in plain.out.signals.items():
        assert_close(fused.out.signals[name], values, rtol=rtol, atol=atol, what=name)
    assert fused.out.tokens == plain.out.tokens
    assert plain.grads.keys() == fused.grads.keys()
    for name, grad in plain.grads.items():
        assert np.abs(grad).max() > 0, f"the gradient of {name} is all zero: nothing is compared"
        assert_close(fused.grads[name], grad, rtol=rtol, atol=atol, what=f"gradient of {name}")


def needs(support: str, x: Inputs, off_policy: bool = False) -> dict[str, torch.Tensor]:
    if support != "hybrid":
        return {}
    given = {"sampled": torch.as_tensor(x.sampled)}
    return given | {"sampled_log_probs": fixed(x.log_mu)} if off_policy else given


# ---------------------------------------------------------------------------------------------- fused equals plain


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("stop_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("support", SUPPORTS)
def test_every_support(support: str, temperature: float, stop_gradient: bool, recompute: bool) -> None:
    x = inputs()
    plain, fused = plain_and_fused(
        x,
        Gate(0, 0, 0, 0),
        coefficients=[2.0, -1.0, 0.3, 3.0],
        bias=True,
        support=support,
        support_k=5,
        top_k=4,
        temperature=temperature,
        stop_gradient=stop_gradient,
        fused={"recompute": recompute},
        **needs(support, x),
    )
    assert_same(plain, fused)


@pytest.mark.parametrize("recompute", [True, False])
def test_hybrid_off_policy(recompute: bool) -> None:
    x = inputs(1)
    plain, fused = plain_and_fused(
        x, Gate.named("H1"), support="hybrid", support_k=3, fused={"recompute": recompute}, **needs("hybrid", x, True)
    )
    assert_same(plain, fused)


GATES = ["G1", "G4", "G5", "H1", "H4", "entropy-only(8)", "gap-only(-4)", "static:0", "static:0.388", "static:1"]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_every_kind_of_gate(gate: str, recompute: bool) -> None:
    assert_same(*plain_and_fused(inputs(2), Gate.parse(gate), fused={"recompute": recompute}))


@pytest.mark.parametrize("stop_gradient", [False, True])
@pytest.mark.parametrize("support", ["full", "bucket", "hybrid"])
def test_further_signals(support: str, stop_gradient: bool) -> None:
    x = inputs(3)
    extra = {"jsd": 1.0, "log_ratio": -0.3, "position": 2.0, "student_entropy": -1.5}
    plain, fused = plain_and_fused(
        x,
        Gate(1, 1, 0, 1, extra=extra),
        coefficients=[2.0, -1.0, 0.3, 3.0, *extra.values()],
        temperature=2.0,
        support=support,
        support_k=5,
        stop_gradient=stop_gradient,
        **needs(support, x),
    )
    assert_same(plain, fused)


@pytest.mark.parametrize("entropy", ["top_k", "full", "bucket"])
def test_entropy_variants_and_segments(entropy: str) -> None:
    x = inputs(4)
    segments = torch.tensor([[0, 0, 0, 1, 1], [3, 3, 2, 2, 2]])
    assert_same(*plain_and_fused(x, Gate.named("H1"), entropy=entropy, segment_ids=segments))


def test_u_and_total_tokens_can_be_given() -> None:
    plain, fused = plain_and_fused(inputs(5), Gate.named("G4"), u=fixed([0.2, 0.8]), total_tokens=100)
    assert_same(plain, fused)
    assert_close(plain.out.u[0, 1], 0.2)


@pytest.mark.parametrize(("scale", "softcap"), [(0.25, None), (1.0, 3.0), (2.5, 4.0)])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", ["full", "bucket"])
def test_heads_with_bias_scale_and_softcap(support: str, recompute: bool, scale: float, softcap: float | None) -> None:
    plain, fused = plain_and_fused(
        inputs(6),
        Gate.named("H2"),
        bias=True,
        scale=scale,
        softcap=softcap,
        support=support,
        temperature=1.5,
        fused={"recompute": recompute},
    )
    assert_same(plain, fused)


@pytest.mark.parametrize("chunk_mb", [0.0001, 0.0003, 0.001, 0.004, 1.0, 256.0])
@pytest.mark.parametrize(("b", "t", "v"), [(1, 1, 2), (1, 7, 5), (3, 4, 101), (1, 13, 64)])
def test_any_chunk_size_gives_the_same(b: int, t: int, v: int, chunk_mb: float) -> None:
    x = inputs(7, b, t, v)
    x.mask[:] = 1
    plain, fused = plain_and_fused(
        x, Gate.named("H1"), top_k=2, support="full", bias=True, fused={"chunk_mb": chunk_mb}
    )
    assert_same(plain, fused)


class ProductSizes(TorchDispatchMode):
    """Remembers every dimension of every result of a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ and isinstance(given, torch.Tensor):
            self.sizes.update(given.shape)
        return given


@pytest.mark.usefixtures("narrow_slices")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", SUPPORTS)
def test_slices_of_the_vocabulary(support: str, recompute: bool) -> None:
    """Slices that do not divide the vocabulary, beside chunks that do not divide the tokens."""
    x = inputs(29, 2, 50, 150)
    options: dict[str, Any] = {
        "bias": True,
        "coefficients": [2.0, -1.0, 0.3, 3.0, 1.0, -1.5],
        "support": support,
        "support_k": 5,
        "entropy": "full",
        "temperature": 1.5,
        "softcap": 9.0,
        **needs(support, x),
    }
    gate = Gate(extra={"jsd": 1.0, "student_entropy": 1.0})
    assert_same(*plain_and_fused(x, gate, fused={"chunk_mb": 0.1, "recompute": recompute}, **options))
    with ProductSizes() as seen:
        fused_gated_kl(
            leaf(x.hidden),
            leaf(x.weight),
            fixed(x.teacher_hidden),
            fixed(x.teacher_weight),
            gate=Gate.named("H1"),
            recompute=recompute,
            chunk_mb=0.1,
        ).loss.backward()
    assert 150 % 64 in seen.sizes, "the vocabulary was not cut: the case shows nothing"
    assert 150 not in seen.sizes


@pytest.mark.parametrize("support", SUPPORTS)
def test_against_the_definition_itself(support: str) -> None:
    """Not only equal to the plain form: both equal what is written in probability space."""
    x = inputs(8)
    student, teacher = x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T
    expected = oracle.gated(
        student,
        teacher,
        abcd=(4, 4, -1.5, 2),
        mask=x.mask,
        support=support,
        support_k=5,
        sampled=x.sampled,
        temperature=0.5,
    )
    h, w = leaf(x.hidden), leaf(x.weight)
    out = fused_gated_kl(
        h,
        w,
        fixed(x.teacher_hidden),
        fixed(x.teacher_weight),
        gate=Gate.named("H1"),
        mask=torch.as_tensor(x.mask),
        support=support,
        support_k=5,
        temperature=0.5,
        chunk_mb=TINY,
        **needs(support, x),
    )
    out.loss.backward()
    assert_matches(out, expected)
    assert_close(h.grad, expected.grad @ x.weight)
    assert_close(w.grad, np.einsum("btv,bth->vh", expected.grad, x.hidden))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", ["full", "bucket", "renorm"])
def test_gradcheck(support: str, recompute: bool) -> None:
    x = inputs(9, 1, 3, 7, 3, 2)

    def loss(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        return fused_gated_kl(
            hidden,
            Head(weight, bias=bias),
            fixed(x.teacher_hidden),
            fixed(x.teacher_weight),
            gate=Gate(1, 1, 1, 1),
            mask=torch.as_tensor(x.mask),
            coefficients=coefficients,
            top_k=3,
            support=support,
            temperature=1.5,
            recompute=recompute,
            chunk_mb=0.0001,
        ).loss

    leaves = (leaf(x.hidden), leaf(x.weight), leaf(x.bias), leaf([2.0, -1.0, 0.3, 3.0]))
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_incoming_gradient_scales(recompute: bool) -> None:
    """The loss is a node like any other: a factor behind it and a function before it are respected."""
    x = inputs(10)
    grads = []
    for fused in (False, True):
        h, w = leaf(x.hidden), leaf(x.weight)
        if fused:
            loss = fused_gated_kl(
                torch.tanh(h),
                w,
                fixed(x.teacher_hidden),
                fixed(x.teacher_weight),
                gate=Gate.named("H1"),
                recompute=recompute,
                chunk_mb=TINY,
            ).loss
        else:
            teacher = fixed(x.teacher_hidden) @ fixed(x.teacher_weight).T
            loss = gated_kl(torch.tanh(h) @ w.T, teacher, gate=Gate.named("H1")).loss
        (3.0 * loss**2 + w.square().sum()).backward()
        grads.append((h.grad, w.grad))
    for fused_grad, plain_grad in zip(grads[1], grads[0], strict=True):
        assert_close(fused_grad, plain_grad)


@pytest.mark.parametrize("recompute", [True, False])
def test_backward_twice_adds_twice(recompute: bool) -> None:
    x = inputs(25)
    h, w, coefficients = leaf(x.hidden), leaf(x.weight), leaf([4.0, 4.0, -1.5, 2.0])
    loss = fused_gated_kl(
        h,
        w,
        fixed(x.teacher_hidden),
        fixed(x.teacher_weight),
        gate=Gate(),
        coefficients=coefficients,
        recompute=recompute,
        chunk_mb=TINY,
    ).loss
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in (h, w, coefficients)]
    (2 * loss).backward()
    for tensor, first in zip((h, w, coefficients), once, strict=True):
        assert_close(tensor.grad, 3 * first)


def test_strided_inputs() -> None:
    x = inputs(26, 2, 10)
    wide = leaf(np.repeat(x.hidden, 2, axis=-1))
    w = leaf(x.weight.T.copy())
    mask = torch.as_tensor(x.mask)[:, ::2]
    teacher_hidden = fixed(x.teacher_hidden)[:, ::2]
    out = fused_gated_kl(
        wide[:, ::2, ::2], w.T, teacher_hidden, fixed(x.teacher_weight), gate=Gate.named("H1"), mask=mask, chunk_mb=TINY
    )
    out.loss.backward()
    expected = oracle.gated(
        x.hidden[:, ::2] @ x.weight.T,
        x.teacher_hidden[:, ::2] @ x.teacher_weight.T,
        abcd=(4, 4, -1.5, 2),
        mask=x.mask[:, ::2],
    )
    assert_matches(out, expected)
    assert_close(wide.grad[:, ::2, ::2], expected.grad @ x.weight)
    assert_close(w.grad.T, np.einsum("btv,bth->vh", expected.grad, x.hidden[:, ::2]))


# ---------------------------------------------------------------------------------------------- heads


def test_linear_layers_are_heads() -> None:
    x = inputs(11)
    linear = torch.nn.Linear(H, V).double()
    teacher_linear = torch.nn.Linear(HT, V, bias=False).double()
    h = leaf(x.hidden)
    out = fused_gated_kl(h, linear, fixed(x.teacher_hidden), teacher_linear, gate=Gate.named("H1"), chunk_mb=TINY)
    out.loss.backward()
    got = {"hidden": h.grad.clone(), "weight": linear.weight.grad.clone(), "bias": linear.bias.grad.clone()}
    linear.zero_grad()
    h = leaf(x.hidden)
    plain = gated_kl(linear(h), teacher_linear(fixed(x.teacher_hidden)), gate=Gate.named("H1"))
    plain.loss.backward()
    assert_close(out.loss, plain.loss)
    assert_close(got["hidden"], h.grad)
    assert_close(got["weight"], linear.weight.grad)
    assert_close(got["bias"], linear.bias.grad)
    assert teacher_linear.weight.grad is None


def test_tied_heads_add_both_gradients() -> None:
    """One tensor as embedding before and head behind: its gradient is the sum of both uses."""
    x = inputs(12)
    ids = torch.as_tensor(x.sampled)
    grads = []
    for fused in (False, True):
        table = leaf(x.weight)
        hidden = torch.tanh(torch.nn.functional.embedding(ids, table))
        if fused:
            out = fused_gated_kl(
                hidden, table, fixed(x.teacher_hidden), fixed(x.teacher_weight), gate=Gate.named("H1"), chunk_mb=TINY
            )
        else:
            out = gated_kl(hidden @ table.T, fixed(x.teacher_hidden) @ fixed(x.teacher_weight).T, gate=Gate.named("H1"))
        out.loss.backward()
        grads.append(table.grad)
    assert_close(grads[1], grads[0])


def test_teacher_and_student_may_share_the_head() -> None:
    """Self-distillation: the same tensor on both sides, constant on the teacher's."""
    x = inputs(13, h=4, ht=4)
    w = leaf(x.weight)
    out = fused_gated_kl(fixed(x.hidden), w, fixed(x.teacher_hidden), w, gate=Gate.named("H1"), chunk_mb=TINY)
    out.loss.backward()
    v = leaf(x.weight)
    plain = gated_kl(fixed(x.hidden) @ v.T, fixed(x.teacher_hidden) @ v.detach().T, gate=Gate.named("H1"))
    plain.loss.backward()
    assert_close(w.grad, v.grad)


@pytest.mark.parametrize("recompute", [True, False])
def test_padded_rows_of_the_heads(recompute: bool) -> None:
    """Rows behind the tokenizer's last id have no part in the softmax, and exactly no gradient."""
    x = inputs(14)
    v = 29
    teacher_weight = np.concatenate([x.teacher_weight, np.full((6, HT), 50.0)])
    h, w, bias = leaf(x.hidden), leaf(x.weight), leaf(np.where(np.arange(V) < v, x.bias, 1e3))
    out = fused_gated_kl(
        h,
        Head(w, bias=bias),
        fixed(x.teacher_hidden),
        fixed(teacher_weight),
        gate=Gate.named("H1"),
        vocab_size=v,
        recompute=recompute,
        chunk_mb=TINY,
    )
    out.loss.backward()
    expected = oracle.gated(
        x.hidden @ x.weight[:v].T + x.bias[:v], x.teacher_hidden @ x.teacher_weight[:v].T, abcd=(4, 4, -1.5, 2)
    )
    assert_matches(out, expected)
    assert_close(h.grad, expected.grad @ x.weight[:v])
    assert_close(w.grad[:v], np.einsum("btv,bth->vh", expected.grad, x.hidden))
    assert (w.grad[v:] == 0).all()
    assert (bias.grad[v:] == 0).all()


@pytest.mark.parametrize("recompute", [True, False])
def test_ids_that_a_bias_forbids_on_both_sides(recompute: bool) -> None:
    x = inputs(27)
    forbidden = [3, 17, 36]
    x.bias[forbidden] = x.teacher_bias[forbidden] = -np.inf
    plain, fused = plain_and_fused(x, Gate.named("H1"), bias=True, fused={"recompute": recompute})
    assert_same(plain, fused)
    assert (fused.grads["weight"][forbidden] == 0).all()


@pytest.mark.parametrize(("side", "lam"), [("teacher_bias", 0), ("bias", 1)])
def test_ids_that_one_side_alone_forbids(side: str, lam: float) -> None:
    x = inputs(28)
    getattr(x, side)[[3, 17, 36]] = -np.inf
    assert_same(*plain_and_fused(x, Gate.static(lam), bias=True))


@pytest.mark.parametrize("recompute", [True, False])
def test_frozen_parts(recompute: bool) -> None:
    x = inputs(15)
    common: dict[str, Any] = {"gate": Gate.named("H1"), "recompute": recompute, "chunk_mb": TINY}
    teacher = (fixed(x.teacher_hidden), fixed(x.teacher_weight))
    h, w = leaf(x.hidden), leaf(x.weight)
    fused_gated_kl(h, w, *teacher, **common).loss.backward()
    only_h = leaf(x.hidden)
    fused_gated_kl(only_h, fixed(x.weight), *teacher, **common).loss.backward()
    only_w = leaf(x.weight)
    fused_gated_kl(fixed(x.hidden), only_w, *teacher, **common).loss.backward()
    assert_close(only_h.grad, h.grad)
    assert_close(only_w.grad, w.grad)
    coefficients = leaf([4.0, 4.0, -1.5, 2.0])
    fused_gated_kl(fixed(x.hidden), fixed(x.weight), *teacher, **common, coefficients=coefficients).loss.backward()
    expected = oracle.gated(x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T, abcd=(4, 4, -1.5, 2))
    assert_close(coefficients.grad, expected.coefficient_grad)


def test_no_grad_mode_and_the_teacher_is_a_constant() -> None:
    x = inputs(16)
    with torch.no_grad():
        out = fused_gated_kl(
            leaf(x.hidden), leaf(x.weight), fixed(x.teacher_hidden), fixed(x.teacher_weight), gate=Gate.named("H1")
        )
    assert not out.loss.requires_grad
    assert_matches(
        out, oracle.gated(x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T, abcd=(4, 4, -1.5, 2))
    )
    teacher_hidden, teacher_weight = leaf(x.teacher_hidden), leaf(x.teacher_weight)
    fused_gated_kl(
        leaf(x.hidden), leaf(x.weight), teacher_hidden, teacher_weight, gate=Gate.named("H1")
    ).loss.backward()
    assert teacher_hidden.grad is None
    assert teacher_weight.grad is None


# ---------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", SUPPORTS)
def test_empty_mask(support: str, recompute: bool) -> None:
    x = inputs(17)
    h, w = leaf(x.hidden), leaf(x.weight)
    out = fused_gated_kl(
        h,
        w,
        fixed(x.teacher_hidden),
        fixed(x.teacher_weight),
        gate=Gate.named("H1"),
        mask=torch.zeros(B, T),
        support=support,
        recompute=recompute,
        **needs(support, x),
    )
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert (h.grad == 0).all()
    assert w.grad is None or (w.grad == 0).all()
    for name in TELEMETRY:
        assert (getattr(out, name) == 0).all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_hidden_states_outside_the_mask_are_never_read(garbage: float) -> None:
    x = inputs(18)
    plain, clean = plain_and_fused(x, Gate.named("H1"))
    assert_same(plain, clean)
    x.hidden[x.mask == 0], x.teacher_hidden[x.mask == 0] = garbage, garbage
    h, w = leaf(x.hidden), leaf(x.weight)
    out = fused_gated_kl(
        h,
        w,
        fixed(x.teacher_hidden),
        fixed(x.teacher_weight),
        gate=Gate.named("H1"),
        mask=torch.as_tensor(x.mask),
        chunk_mb=TINY,
    )
    out.loss.backward()
    assert float(out.loss.detach()) == float(clean.out.loss.detach())
    np.testing.assert_array_equal(h.grad.numpy(), clean.grads["hidden"])
    np.testing.assert_array_equal(w.grad.numpy(), clean.grads["weight"])


def test_ties_of_the_teacher_across_vocabulary_tiles() -> None:
    """Equal logits in different tiles: the lowest id is still the teacher's choice."""
    x = inputs(19)
    x.teacher_weight[[30, 20, 4]] = 3.0
    x.teacher_hidden[:] = np.abs(x.teacher_hidden) + 1.0
    h, w = leaf(x.hidden), leaf(x.weight)
    out = fused_gated_kl(h, w, fixed(x.teacher_hidden), fixed(x.teacher_weight), gate=Gate.named("H1"), chunk_mb=TINY)
    out.loss.backward()
    expected = oracle.gated(x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T, abcd=(4, 4, -1.5, 2))
    assert np.all((x.teacher_hidden @ x.teacher_weight.T).argmax(-1) == 4)
    assert_matches(out, expected)
    assert_close(h.grad, expected.grad @ x.weight)


@pytest.mark.parametrize("form", ["plain", "fused"])
@pytest.mark.parametrize("support", ["full", "bucket", "renorm"])
@pytest.mark.parametrize("shape", ["spread", "crowded", "tied", "forbidden"])
def test_the_top_k_of_a_large_vocabulary(shape: str, support: str, form: str) -> None:
    """First choices spread over 1500 ids, side by side, equal, or few; V is no multiple of anything."""
    rng = np.random.default_rng(31)
    v = 1501
    student, teacher = rng.normal(size=(1, 6, v)), rng.normal(size=(1, 6, v))
    if shape == "crowded":
        teacher[..., 1491:] += 9.0  # the best ten are the last ids
        student[..., 640:650] += 9.0
    if shape == "tied":
        teacher[..., [1500, 700, 130, 129]] = 9.0
    if shape == "forbidden":
        keep = [5, 64, 700, 1500]
        for side in (student, teacher):
            side[..., np.setdiff1d(np.arange(v), keep)] = -np.inf
    k = 3 if shape == "forbidden" else 4
    extra = {"student_entropy": 1.5}
    expected = oracle.gated(student, teacher, abcd=(4, 4, -1.5, 2), extra=extra, top_k=k, support=support)
    options: dict[str, Any] = {"gate": Gate(4, 4, -1.5, 2, extra=extra), "top_k": k, "support": support}
    z = leaf(student)
    if form == "plain":
        out = gated_kl(z, fixed(teacher), **options)
    else:  # one-hot hidden states: each token picks its own column of the head, which holds its logits
        one_hot = fixed(np.eye(6)[None])
        bias = np.where(np.isinf(student[0, 0]), -np.inf, 0.0)
        finite = [torch.nan_to_num(side[0].T, neginf=0.0) for side in (z, fixed(teacher))]
        out = fused_gated_kl(
            one_hot,
            Head(finite[0], bias=fixed(bias)),
            one_hot,
            Head(finite[1], bias=fixed(bias)),
            chunk_mb=0.05,
            **options,
        )
    out.loss.backward()
    assert_matches(out, expected)
    assert_close(z.grad, expected.grad)


# ---------------------------------------------------------------------------------------------- teacher by top-K


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", ["bucket", "renorm", "hybrid"])
def test_a_teacher_known_by_its_top_k(support: str, recompute: bool) -> None:
    x = inputs(20)
    student, teacher = x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T
    known = top_k_of(teacher, 6, x.sampled if support == "hybrid" else None)
    h, w, coefficients = leaf(x.hidden), leaf(x.weight), leaf([4.0, 4.0, -1.5, 2.0])
    out = fused_gated_kl(
        h,
        w,
        known,
        None,
        gate=Gate(1, 1, 1, 1),
        coefficients=coefficients,
        mask=torch.as_tensor(x.mask),
        top_k=4,
        support=support,
        recompute=recompute,
        chunk_mb=TINY,
        **needs(support, x),
    )
    out.loss.backward()
    expected = oracle.gated(
        student,
        teacher,
        abcd=(4, 4, -1.5, 2),
        mask=x.mask,
        top_k=4,
        support=support,
        support_k=6,
        sampled=x.sampled,
    )
    assert_matches(out, expected)
    assert_close(h.grad, expected.grad @ x.weight)
    assert_close(w.grad, np.einsum("btv,bth->vh", expected.grad, x.hidden))
    assert_close(coefficients.grad, expected.coefficient_grad)


# ---------------------------------------------------------------------------------------------- low precision


def relative(actual: Any, expected: Any) -> float:
    return float(np.linalg.norm(numbers(actual) - numbers(expected)) / np.linalg.norm(numbers(expected)))


@pytest.mark.parametrize("recompute", [True, False, None])
@pytest.mark.parametrize("support", ["full", "bucket"])
def test_bf16_inputs_lose_nothing_but_their_own_rounding(support: str, recompute: bool) -> None:
    """Against float64 on the same bf16 numbers. Logits that were ever bf16 would be off by far more."""
    rng = np.random.default_rng(21)
    b, t, v, h = 2, 16, 400, 64

    def bf16(*shape: int, scale: float) -> torch.Tensor:
        return torch.as_tensor(rng.normal(size=shape) * scale).to(torch.bfloat16)

    hidden, weight = bf16(b, t, h, scale=1.0), bf16(v, h, scale=0.7)
    teacher_hidden, teacher_weight = hidden + bf16(b, t, h, scale=0.1), weight + bf16(v, h, scale=0.05)
    student, teacher = numbers(hidden) @ numbers(weight).T, numbers(teacher_hidden) @ numbers(teacher_weight).T
    expected = oracle.gated(student, teacher, abcd=(4, 4, -1.5, 2), support=support)

    rounded = oracle.gated(
        numbers(torch.as_tensor(student).to(torch.bfloat16)),
        numbers(torch.as_tensor(teacher).to(torch.bfloat16)),
        abcd=(4, 4, -1.5, 2),
        support=support,
    )
    assert relative(rounded.per_token, expected.per_token) > 5e-3, "the case would not notice bf16 logits"

    z, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = fused_gated_kl(
        z,
        w,
        teacher_hidden,
        teacher_weight,
        gate=Gate.named("H1"),
        support=support,
        recompute=recompute,
        chunk_mb=0.003,
    )
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert_close(out.loss, expected.loss, rtol=1e-4)
    for name in TELEMETRY:
        if np.abs(getattr(expected, name)).max() > 0:
            assert relative(getattr(out, name), getattr(expected, name)) < 1e-3, name
    assert z.grad.dtype == w.grad.dtype == torch.bfloat16
    # One rounding to bf16 at the end is at most 2^-9 per element; chunks must not be summed in bf16.
    assert relative(z.grad, expected.grad @ numbers(weight)) < 4e-3
    assert relative(w.grad, np.einsum("btv,bth->vh", expected.grad, numbers(hidden))) < 4e-3


@pytest.mark.parametrize("recompute", [True, False, None])
def test_many_small_chunks_are_not_summed_in_bf16(recompute: bool | None) -> None:
    """400 equal parts, one chunk each: a bf16 sum stops growing at 256 of them."""
    x = inputs(30, 1, 1, 16)
    hidden = torch.as_tensor(np.repeat(x.hidden, 400, axis=1)).to(torch.bfloat16)
    teacher_hidden = torch.as_tensor(np.repeat(x.teacher_hidden, 400, axis=1)).to(torch.bfloat16)
    weight = leaf(x.weight, torch.bfloat16)
    bias = leaf(x.bias, torch.bfloat16)
    out = fused_gated_kl(
        hidden,
        Head(weight, bias=bias),
        teacher_hidden,
        fixed(x.teacher_weight, torch.bfloat16),
        gate=Gate.named("H1"),
        recompute=recompute,
        chunk_mb=0.0001,
    )
    out.loss.backward()
    h, w = rounded_to_bf16(x.hidden), rounded_to_bf16(x.weight)
    teacher = rounded_to_bf16(x.teacher_hidden) @ rounded_to_bf16(x.teacher_weight).T
    one = oracle.gated(h @ w.T + rounded_to_bf16(x.bias), teacher, abcd=(4, 4, -1.5, 2))
    assert_close(out.loss, one.loss, rtol=1e-4)
    assert relative(weight.grad, np.einsum("btv,bth->vh", one.grad, h)) < 1e-2
    assert relative(bias.grad, one.grad.sum((0, 1))) < 1e-2


def rounded_to_bf16(array: np.ndarray) -> np.ndarray:
    return numbers(torch.as_tensor(array).to(torch.bfloat16))


@pytest.mark.parametrize("recompute", [True, False, None])
@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_compute_with_float32_master_weights(autocast: bool, recompute: bool | None) -> None:
    """The products see both factors in bf16, as autocast would; the gradients keep the precision of their tensors."""
    x = inputs(28, 2, 8, 100, 16, 12)
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight = leaf(x.hidden, dtype), leaf(x.weight, torch.float32)
    teacher = fixed(x.teacher_hidden, dtype), fixed(x.teacher_weight, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = fused_gated_kl(hidden, weight, *teacher, gate=Gate.named("H1"), recompute=recompute, chunk_mb=0.01)
    out.loss.backward()
    h, w = rounded_to_bf16(x.hidden), rounded_to_bf16(x.weight)
    expected = oracle.gated(
        h @ w.T, rounded_to_bf16(x.teacher_hidden) @ rounded_to_bf16(x.teacher_weight).T, abcd=(4, 4, -1.5, 2)
    )
    assert_close(out.loss, expected.loss, rtol=1e-5)
    assert hidden.grad.dtype == dtype
    assert weight.grad.dtype == torch.float32
    assert relative(hidden.grad, expected.grad @ w) < 4e-3
    assert relative(weight.grad, np.einsum("btv,bth->vh", expected.grad, h)) < 4e-3


def test_float32_against_float64() -> None:
    x = inputs(22, 2, 8, 200, 16, 12)
    expected = oracle.gated(
        x.hidden.astype(np.float32).astype(np.float64) @ x.weight.astype(np.float32).astype(np.float64).T,
        x.teacher_hidden.astype(np.float32).astype(np.float64)
        @ x.teacher_weight.astype(np.float32).astype(np.float64).T,
        abcd=(4, 4, -1.5, 2),
    )
    h, w = leaf(x.hidden, torch.float32), leaf(x.weight, torch.float32)
    out = fused_gated_kl(
        h,
        w,
        fixed(x.teacher_hidden, torch.float32),
        fixed(x.teacher_weight, torch.float32),
        gate=Gate.named("H1"),
        chunk_mb=0.01,
    )
    out.loss.backward()
    assert_close(out.loss, expected.loss, rtol=1e-5)
    assert relative(h.grad, expected.grad @ x.weight) < 1e-4
    assert relative(w.grad, np.einsum("btv,bth->vh", expected.grad, x.hidden)) < 1e-4


# ---------------------------------------------------------------------------------------------- memory


class LargestStorage(TorchDispatchMode):
    """Remembers the largest storage, in elements, that any operation gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for value in given if isinstance(given, (tuple, list)) else [given]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return given


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", SUPPORTS)
def test_no_tensor_of_tokens_times_vocabulary(support: str, recompute: bool) -> None:
    x = inputs(23, 4, 64, 4096, 8, 8)
    n, v = 256, 4096
    w = leaf(x.weight, torch.float32)
    h, th, tw = (
        leaf(x.hidden, torch.float32),
        fixed(x.teacher_hidden, torch.float32),
        fixed(x.teacher_weight, torch.float32),
    )
    extra = {"jsd": 1.0, "student_entropy": 1.0} if support == "full" else {}
    _keep_pages()  # once per process it asks for a block that it does not touch
    with LargestStorage() as seen:
        out = fused_gated_kl(
            h,
            w,
            th,
            tw,
            gate=Gate(1, 1, 0, 1, extra=extra),
            support=support,
            entropy="full",
            recompute=recompute,
            chunk_mb=0.25,
            **needs(support, x),
        )
        out.loss.backward()
    assert w.grad is not None
    assert seen.elements >= v * 8, "the backward pass was not seen"
    assert seen.elements <= n * v // 8


def test_the_plain_form_would_be_seen() -> None:
    """The instrument works: the plain form does make the whole tensor."""
    x = inputs(24, 2, 8, 64)
    with LargestStorage() as seen:
        gated_kl(
            leaf(x.hidden) @ leaf(x.weight).T,
            fixed(x.teacher_hidden) @ fixed(x.teacher_weight).T,
            gate=Gate.named("H1"),
        ).loss.backward()
    assert seen.elements >= 2 * 8 * 64


@pytest.mark.parametrize("student", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("teacher", [torch.bfloat16, torch.float32, torch.float64])
def test_each_side_in_its_own_precision(student: torch.dtype, teacher: torch.dtype) -> None:
    """A float32 teacher is not rounded because the student is in half precision, nor the other way round."""
    x = inputs(31, 2, 6, 90, 12, 10)
    parts = [fixed(x.hidden, student), fixed(x.weight, student), fixed(x.teacher_hidden, teacher)]
    hidden, weight, teacher_hidden = parts
    teacher_weight = fixed(x.teacher_weight, teacher)
    out = fused_gated_kl(hidden, weight, teacher_hidden, teacher_weight, gate=Gate.named("H1"), chunk_mb=0.01)
    exact = [part.double().numpy() for part in (hidden, weight, teacher_hidden, teacher_weight)]
    expected = oracle.gated(exact[0] @ exact[1].T, exact[2] @ exact[3].T, abcd=(4, 4, -1.5, 2))
    assert_close(out.loss, expected.loss, rtol=1e-4 if torch.bfloat16 in (student, teacher) else 1e-5)


def test_near_the_teacher_in_float32() -> None:
    """Where student and teacher nearly agree both KLs keep their digits and never fall below 0."""
    rng = np.random.default_rng(5)
    hidden, weight = rng.normal(size=(1, 6, 16)), rng.normal(size=(20_000, 16))
    close = hidden + 2e-5 * rng.normal(size=hidden.shape)
    exact = [array.astype(np.float32).astype(np.float64) for array in (close, weight, hidden)]
    expected = oracle.gated(exact[0] @ exact[1].T, exact[2] @ exact[1].T, abcd=(0, 0, 0, 0))
    w = fixed(weight, torch.float32)
    out = fused_gated_kl(
        fixed(close, torch.float32), w, fixed(hidden, torch.float32), w, gate=Gate.static(0.5), chunk_mb=0.3
    )
    assert float(expected.reverse_kl.max()) < 1e-7
    for found, wanted in ((out.reverse_kl, expected.reverse_kl), (out.forward_kl, expected.forward_kl)):
        assert bool((found >= 0).all())
        np.testing.assert_allclose(found.double().numpy(), wanted, rtol=2e-2)


@pytest.mark.parametrize("recompute", [True, False])
def test_log_ratios_beyond_what_an_exponential_holds(recompute: bool) -> None:
    """A student that is e^-200 sure where the teacher is certain: finite, and equal to the plain path."""
    x = inputs(32, 1, 5, 40, 6, 6)
    weight = x.weight.copy()
    weight[3] *= 60.0
    x = replace(x, weight=weight, teacher_weight=-weight)
    plain, fused = plain_and_fused(x, Gate.named("H3"), fused={"chunk_mb": 0.001, "recompute": recompute})
    assert float(plain.out.reverse_kl.max()) > 100
    assert_same(plain, fused)
