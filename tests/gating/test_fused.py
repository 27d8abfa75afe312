"""The fused form: equal to the plain one in value and every gradient, whatever the chunks; never a whole (N, V)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gatespace import Gate, fused_gated_kl, gated_kl
from gatespace.gating import Head
from gatespace.gating.fused import _keep_pages

from . import oracle
from .compare import TELEMETRY, assert_close, assert_matches, fixed, leaf, numbers, top_k_of
from .strategies import ABCD

SUPPORTS = ["full", "bucket", "hybrid", "renorm"]
TINY = 0.0005  # megabytes: a few dozen float64, so both tokens and vocabulary are cut, and not evenly
B, T, V, H, HT = 2, 5, 37, 6, 4
H1 = (4, 4, -1.5, 2)
EXTRA = ("jsd", "log_ratio", "position", "student_entropy")


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

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return self.hidden @ self.weight.T, self.teacher_hidden @ self.teacher_weight.T


def inputs(seed: int = 0, b: int = B, t: int = T, v: int = V, h: int = H, ht: int = HT) -> Inputs:
    rng = np.random.default_rng(seed)
    mask = np.ones((b, t), dtype=np.int64)
    if b * t > 2:
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


def logits_of(hidden: Any, weight: Any, bias: Any = None, scale: float = 1.0, softcap: float | None = None) -> Any:
    z = (hidden @ weight.T + (0.0 if bias is None else bias)) * scale
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
    teacher = (fixed(x.teacher_hidden), fixed(x.teacher_weight), fixed(x.teacher_bias) if bias else None)
    results = []
    for form in ("plain", "fused"):
        leaves = {"hidden": leaf(x.hidden), "weight": leaf(x.weight)}
        leaves |= {"bias": leaf(x.bias)} if bias else {}
        leaves |= {} if coefficients is None else {"coefficients": leaf(coefficients)}
        student = (leaves["hidden"], leaves["weight"], leaves.get("bias"))
        call = {**options, "gate": gate, "coefficients": leaves.get("coefficients")}
        if form == "plain":
            out = gated_kl(logits_of(*student, scale, softcap), logits_of(*teacher, scale, softcap), **call)
        else:
            heads = [Head(*side[1:], scale, softcap) for side in (student, teacher)]
            call = {"chunk_mb": TINY, **call, **(fused or {})}
            out = fused_gated_kl(student[0], heads[0], teacher[0], heads[1], **call)
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
    assert np.abs(plain.grads["hidden"]).max() > 0, "the gradient is all zero: nothing is compared"
    for name, grad in plain.grads.items():
        assert_close(fused.grads[name], grad, rtol=rtol, atol=atol, what=f"gradient of {name}")


def needs(support: str, x: Inputs, off_policy: bool = False) -> dict[str, torch.Tensor]:
    if support != "hybrid":
        return {}
    given = {"sampled": torch.as_tensor(x.sampled)}
    return given | {"sampled_log_probs": fixed(x.log_mu)} if off_policy else given


def fused_loss(x: Inputs, dtype: torch.dtype = torch.float64, **options: Any) -> Result:
    """The fused loss of G = H1, with the gradients of hidden states and head."""
    leaves = {"hidden": leaf(x.hidden, dtype), "weight": leaf(x.weight, dtype)}
    teacher = fixed(x.teacher_hidden, dtype), fixed(x.teacher_weight, dtype)
    options = {"gate": Gate(*H1), "chunk_mb": TINY, **options}
    out = fused_gated_kl(leaves["hidden"], leaves["weight"], *teacher, **options)
    out.loss.backward()
    return Result(out, {name: tensor.grad for name, tensor in leaves.items()})


def assert_is(found: Result, expected: oracle.Batch, x: Inputs) -> None:
    """Loss, telemetry and gradients by the oracle."""
    assert_matches(found.out, expected)
    assert_close(found.grads["hidden"], expected.grad @ x.weight)
    assert_close(found.grads["weight"], np.einsum("btv,bth->vh", expected.grad, x.hidden))


# ---------------------------------------------------------------------------------------------- fused equals plain


@st.composite
def settings_of_a_call(draw: st.DrawFn) -> tuple[Inputs, dict[str, Any]]:
    """Any shape, gate, head form, temperature, entropy, segments and chunk size at once."""
    b, t, v = draw(st.integers(1, 2)), draw(st.integers(1, 6)), draw(st.sampled_from([5, 37, 64, 150]))
    x = inputs(draw(st.integers(0, 99)), b, t, v)
    extra = draw(st.lists(st.sampled_from(EXTRA), unique=True, max_size=3))
    abcd = draw(st.one_of(ABCD, st.sampled_from([(0, 0, 0, 0), (4, 0, -1, 0), (0, 0, 0, -4)])))
    gate = Gate(*abcd, dict.fromkeys(extra, 1.5))
    drawn = {
        "gate": draw(st.sampled_from([gate, gate, Gate.static(0), Gate.static(1), Gate.static(0.388)])),
        "bias": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 0.25])),
        "softcap": draw(st.sampled_from([None, 4.0])),
        "temperature": draw(st.sampled_from([1.0, 2.0])),
        "stop_gradient": draw(st.booleans()),
        "entropy": draw(st.sampled_from(["top_k", "full", "bucket"])),
        "top_k": draw(st.integers(1, 4)),
        "support_k": draw(st.integers(2, 4)),
        "total_tokens": draw(st.sampled_from([None, 100])),
        "vocab_size": draw(st.sampled_from([None, v - 1])),
        "chunk_mb": draw(st.sampled_from([0.0001, TINY, 0.004, 256.0])),
        "segment_ids": draw(st.sampled_from([None, torch.arange(t).div(2, rounding_mode="floor").expand(b, t)])),
        "u": draw(st.sampled_from([None, torch.linspace(0.2, 0.8, b, dtype=torch.float64)])),
    }
    if draw(st.booleans()) and not drawn["gate"].is_static:
        drawn["coefficients"] = [*drawn["gate"].abcd, *drawn["gate"].extra.values()]
    return x, drawn


@pytest.mark.usefixtures("narrow_slices")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", [*SUPPORTS, "student", "hybrid off policy"])
@settings(max_examples=15)
@given(case=settings_of_a_call())
def test_fused_equals_plain(support: str, recompute: bool, case: tuple[Inputs, dict[str, Any]]) -> None:
    x, options = case
    options = dict(options)
    support, _, off_policy = support.partition(" ")
    x.sampled %= options["vocab_size"] or len(x.weight)
    fused = {"recompute": recompute, "chunk_mb": options.pop("chunk_mb")}
    given = needs(support, x, bool(off_policy))
    assert_same(*plain_and_fused(x, options.pop("gate"), support=support, fused=fused, **options, **given))


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
    options: dict[str, Any] = {"support": support, "support_k": 5, "entropy": "full", "temperature": 1.5}
    fused = {"chunk_mb": 0.1, "recompute": recompute}
    gate = Gate(extra={"jsd": 1.0, "student_entropy": 1.0})
    call: dict[str, Any] = {"bias": True, "softcap": 9.0, "coefficients": [2.0, -1.0, 0.3, 3.0, 1.0, -1.5]}
    assert_same(*plain_and_fused(x, gate, fused=fused, **call, **options, **needs(support, x)))
    with ProductSizes() as seen:
        fused_loss(x, **fused)
    assert 150 % 64 in seen.sizes, "the vocabulary was not cut: the case shows nothing"
    assert 150 not in seen.sizes


@pytest.mark.parametrize("support", SUPPORTS)
def test_against_the_definition_itself(support: str) -> None:
    """Not only equal to the plain form: both equal what is written in probability space."""
    x = inputs(8)
    options: dict[str, Any] = {"support": support, "support_k": 5, "temperature": 0.5}
    expected = oracle.gated(*x.logits(), abcd=H1, mask=x.mask, sampled=x.sampled, **options)
    assert_is(fused_loss(x, mask=torch.as_tensor(x.mask), **options, **needs(support, x)), expected, x)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", ["full", "bucket", "renorm"])
def test_gradcheck(support: str, recompute: bool) -> None:
    x = inputs(9, 1, 3, 7, 3, 2)
    options = {"top_k": 3, "support": support, "temperature": 1.5, "recompute": recompute, "chunk_mb": 0.0001}

    def loss(hidden: Any, weight: Any, bias: Any, coefficients: Any) -> torch.Tensor:
        call = {"gate": Gate(1, 1, 1, 1), "mask": torch.as_tensor(x.mask), "coefficients": coefficients, **options}
        teacher = fixed(x.teacher_hidden), fixed(x.teacher_weight)
        return fused_gated_kl(hidden, Head(weight, bias=bias), *teacher, **call).loss

    leaves = (leaf(x.hidden), leaf(x.weight), leaf(x.bias), leaf([2.0, -1.0, 0.3, 3.0]))
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_loss_is_a_node_like_any_other(recompute: bool) -> None:
    """A factor behind it and a function before it are respected; a tied head adds both gradients; twice is twice."""
    x = inputs(10)
    grads = []
    teacher = fixed(x.teacher_hidden), fixed(x.teacher_weight)
    for fused in (False, True):
        h, w, coefficients = leaf(x.hidden), leaf(x.weight), leaf(H1)
        hidden = torch.tanh(h + torch.nn.functional.embedding(torch.as_tensor(x.sampled), w))
        call: dict[str, Any] = {"gate": Gate(), "coefficients": coefficients}
        if fused:
            loss = fused_gated_kl(hidden, w, *teacher, recompute=recompute, chunk_mb=TINY, **call).loss
        else:
            loss = gated_kl(hidden @ w.T, teacher[0] @ teacher[1].T, **call).loss
        (3.0 * loss**2 + w.square().sum()).backward(retain_graph=True)
        (2 * loss).backward()
        grads.append((h.grad, w.grad, coefficients.grad))
    for fused_grad, plain_grad in zip(grads[1], grads[0], strict=True):
        assert_close(fused_grad, plain_grad)


def test_strided_inputs() -> None:
    x = inputs(26, 2, 10)
    wide, w = leaf(np.repeat(x.hidden, 2, axis=-1)), leaf(x.weight.T.copy())
    call: dict[str, Any] = {"gate": Gate(*H1), "mask": torch.as_tensor(x.mask)[:, ::2], "chunk_mb": TINY}
    teacher = fixed(x.teacher_hidden)[:, ::2], fixed(x.teacher_weight)
    out = fused_gated_kl(wide[:, ::2, ::2], w.T, *teacher, **call)
    out.loss.backward()
    part = replace(x, hidden=x.hidden[:, ::2], teacher_hidden=x.teacher_hidden[:, ::2])
    expected = oracle.gated(*part.logits(), abcd=H1, mask=x.mask[:, ::2])
    assert_is(Result(out, {"hidden": wide.grad[:, ::2, ::2], "weight": w.grad.T}), expected, part)


# ---------------------------------------------------------------------------------------------- heads


def test_linear_layers_are_heads() -> None:
    x = inputs(11)
    linear, teacher = torch.nn.Linear(H, V).double(), torch.nn.Linear(HT, V, bias=False).double()
    grads = []
    for fused in (True, False):
        h = leaf(x.hidden)
        linear.zero_grad()
        if fused:
            out = fused_gated_kl(h, linear, fixed(x.teacher_hidden), teacher, gate=Gate(*H1), chunk_mb=TINY)
        else:
            out = gated_kl(linear(h), teacher(fixed(x.teacher_hidden)), gate=Gate(*H1))
        out.loss.backward()
        grads.append([h.grad, linear.weight.grad, linear.bias.grad])
    for fused_grad, plain_grad in zip(*grads, strict=True):
        assert_close(fused_grad, plain_grad)
    assert teacher.weight.grad is None


def test_the_teacher_is_a_constant_even_with_the_student_s_head() -> None:
    x = inputs(13, h=4, ht=4)
    w, v, teacher_hidden = leaf(x.weight), leaf(x.weight), leaf(x.teacher_hidden)
    fused_gated_kl(fixed(x.hidden), w, teacher_hidden, w, gate=Gate(*H1), chunk_mb=TINY).loss.backward()
    gated_kl(fixed(x.hidden) @ v.T, fixed(x.teacher_hidden) @ v.detach().T, gate=Gate(*H1)).loss.backward()
    assert_close(w.grad, v.grad)
    assert teacher_hidden.grad is None


@pytest.mark.parametrize("recompute", [True, False])
def test_padded_rows_of_the_heads(recompute: bool) -> None:
    """Rows behind the tokenizer's last id have no part in the softmax, and exactly no gradient."""
    x, v = inputs(14), 29
    padded = np.concatenate([x.teacher_weight, np.full((6, HT), 50.0)])
    bias = np.where(np.arange(V) < v, x.bias, 1e3)
    h, w, b = leaf(x.hidden), leaf(x.weight), leaf(bias)
    call: dict[str, Any] = {"gate": Gate(*H1), "vocab_size": v, "recompute": recompute, "chunk_mb": TINY}
    out = fused_gated_kl(h, Head(w, bias=b), fixed(x.teacher_hidden), fixed(padded), **call)
    out.loss.backward()
    student, teacher = x.logits()
    expected = oracle.gated(student[..., :v] + bias[:v], teacher[..., :v], abcd=H1)
    found = Result(out, {"hidden": h.grad, "weight": w.grad[:v]})
    assert_is(found, expected, replace(x, weight=x.weight[:v]))
    assert (w.grad[v:] == 0).all()
    assert (b.grad[v:] == 0).all()


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("sides", "gate"),
    [(("bias", "teacher_bias"), Gate(*H1)), (("teacher_bias",), Gate.static(0)), (("bias",), Gate.static(1))],
)
def test_ids_that_a_bias_forbids(sides: tuple[str, ...], gate: Gate, recompute: bool) -> None:
    x, forbidden = inputs(27), [3, 17, 36]
    for side in sides:
        getattr(x, side)[forbidden] = -np.inf
    plain, fused = plain_and_fused(x, gate, bias=True, fused={"recompute": recompute})
    assert_same(plain, fused)
    if len(sides) == 2:
        assert (fused.grads["weight"][forbidden] == 0).all()


@pytest.mark.parametrize("recompute", [True, False])
def test_frozen_parts(recompute: bool) -> None:
    x = inputs(15)
    common: dict[str, Any] = {"gate": Gate(*H1), "recompute": recompute, "chunk_mb": TINY}
    teacher = (fixed(x.teacher_hidden), fixed(x.teacher_weight))
    both = fused_loss(x, recompute=recompute).grads
    h, w, coefficients = leaf(x.hidden), leaf(x.weight), leaf(H1)
    fused_gated_kl(h, fixed(x.weight), *teacher, **common).loss.backward()
    fused_gated_kl(fixed(x.hidden), w, *teacher, **common).loss.backward()
    fused_gated_kl(fixed(x.hidden), fixed(x.weight), *teacher, **common, coefficients=coefficients).loss.backward()
    assert_close(h.grad, both["hidden"])
    assert_close(w.grad, both["weight"])
    expected = oracle.gated(*x.logits(), abcd=H1)
    assert_close(coefficients.grad, expected.coefficient_grad)
    with torch.no_grad():
        out = fused_gated_kl(h, w, *teacher, **common)
    assert not out.loss.requires_grad
    assert_matches(out, expected)


# ---------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", SUPPORTS)
def test_empty_mask(support: str, recompute: bool) -> None:
    x = inputs(17)
    found = fused_loss(x, mask=torch.zeros(B, T), support=support, recompute=recompute, **needs(support, x))
    assert float(found.out.loss.detach()) == 0.0
    assert all((grad == 0).all() for grad in found.grads.values())
    for name in TELEMETRY:
        assert (getattr(found.out, name) == 0).all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_hidden_states_outside_the_mask_are_never_read(garbage: float) -> None:
    x = inputs(18)
    clean = fused_loss(x, mask=torch.as_tensor(x.mask))
    x.hidden[x.mask == 0], x.teacher_hidden[x.mask == 0] = garbage, garbage
    found = fused_loss(x, mask=torch.as_tensor(x.mask))
    assert torch.equal(found.out.loss, clean.out.loss)
    assert all(torch.equal(found.grads[name], clean.grads[name]) for name in clean.grads)


def test_ties_of_the_teacher_across_vocabulary_tiles() -> None:
    """Equal logits in different tiles: the lowest id is still the teacher's choice."""
    x = inputs(19)
    x.teacher_weight[[30, 20, 4]] = 3.0
    x.teacher_hidden[:] = np.abs(x.teacher_hidden) + 1.0
    assert np.all(x.logits()[1].argmax(-1) == 4)
    assert_is(fused_loss(x), oracle.gated(*x.logits(), abcd=H1), x)


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
        for side in (student, teacher):
            side[..., np.setdiff1d(np.arange(v), [5, 64, 700, 1500])] = -np.inf
    k = 3 if shape == "forbidden" else 4
    extra = {"student_entropy": 1.5}
    expected = oracle.gated(student, teacher, abcd=H1, extra=extra, top_k=k, support=support)
    options: dict[str, Any] = {"gate": Gate(*H1, extra=extra), "top_k": k, "support": support}
    z = leaf(student)
    if form == "plain":
        out = gated_kl(z, fixed(teacher), **options)
    else:  # one-hot hidden states: each token picks its own column of the head, which holds its logits
        one_hot, bias = fixed(np.eye(6)[None]), fixed(np.where(np.isinf(student[0, 0]), -np.inf, 0.0))
        heads = [Head(torch.nan_to_num(side[0].T, neginf=0.0), bias=bias) for side in (z, fixed(teacher))]
        out = fused_gated_kl(one_hot, heads[0], one_hot, heads[1], chunk_mb=0.05, **options)
    out.loss.backward()
    assert_matches(out, expected)
    assert_close(z.grad, expected.grad)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("support", ["bucket", "renorm", "hybrid"])
def test_a_teacher_known_by_its_top_k(support: str, recompute: bool) -> None:
    x = inputs(20)
    known = top_k_of(x.logits()[1], 6, x.sampled if support == "hybrid" else None)
    h, w, coefficients = leaf(x.hidden), leaf(x.weight), leaf(H1)
    call: dict[str, Any] = {"top_k": 4, "support": support, "recompute": recompute, "chunk_mb": TINY}
    call |= {"mask": torch.as_tensor(x.mask), "coefficients": coefficients, **needs(support, x)}
    out = fused_gated_kl(h, w, known, None, gate=Gate(1, 1, 1, 1), **call)
    out.loss.backward()
    given = {"top_k": 4, "support": support, "support_k": 6, "sampled": x.sampled}
    expected = oracle.gated(*x.logits(), abcd=H1, mask=x.mask, **given)
    assert_is(Result(out, {"hidden": h.grad, "weight": w.grad}), expected, x)
    assert_close(coefficients.grad, expected.coefficient_grad)


# ---------------------------------------------------------------------------------------------- low precision


def relative(actual: Any, expected: Any) -> float:
    return float(np.linalg.norm(numbers(actual) - numbers(expected)) / np.linalg.norm(numbers(expected)))


def rounded(x: Inputs, dtype: torch.dtype) -> Inputs:
    """The same inputs, as that dtype holds them, in float64."""
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight", "bias")
    return replace(x, **{name: numbers(fixed(getattr(x, name), dtype)) for name in names})


@pytest.mark.parametrize("recompute", [True, False, None])
@pytest.mark.parametrize(
    ("dtype", "support"), [(torch.bfloat16, "full"), (torch.bfloat16, "bucket"), (torch.float32, "full")]
)
def test_inputs_lose_nothing_but_their_own_rounding(support: str, dtype: torch.dtype, recompute: bool | None) -> None:
    """Against float64 on the same rounded numbers. Logits that were ever bf16 would be off by far more."""
    x = inputs(21, 2, 16, 400, 64, 64)
    x.teacher_hidden[:] = x.hidden + 0.1 * x.teacher_hidden
    x.teacher_weight[:] = x.weight + 0.05 * x.teacher_weight
    x = rounded(x, dtype)
    expected = oracle.gated(*x.logits(), abcd=H1, support=support)
    half = [numbers(fixed(side, torch.bfloat16)) for side in x.logits()]
    coarse = oracle.gated(*half, abcd=H1, support=support)
    assert relative(coarse.per_token, expected.per_token) > 4e-3, "the case would not notice bf16 logits"

    found = fused_loss(x, dtype, support=support, recompute=recompute, chunk_mb=0.003)
    close = 1 if dtype == torch.bfloat16 else 0.05
    assert found.out.loss.dtype == torch.float32
    assert_close(found.out.loss, expected.loss, rtol=1e-4 * close)
    for name in TELEMETRY:
        if np.abs(getattr(expected, name)).max() > 0:
            assert relative(getattr(found.out, name), getattr(expected, name)) < 1e-3 * close, name
    assert found.grads["hidden"].dtype == found.grads["weight"].dtype == dtype
    # One rounding to bf16 at the end is at most 2^-9 per element; chunks must not be summed in bf16.
    assert relative(found.grads["hidden"], expected.grad @ x.weight) < 4e-3 * close
    assert relative(found.grads["weight"], np.einsum("btv,bth->vh", expected.grad, x.hidden)) < 4e-3 * close


@pytest.mark.parametrize("recompute", [True, False, None])
def test_many_small_chunks_are_not_summed_in_bf16(recompute: bool | None) -> None:
    """400 equal parts, one chunk each: a bf16 sum stops growing at 256 of them."""
    x = rounded(inputs(30, 1, 1, 16), torch.bfloat16)
    hidden, teacher_hidden = (
        fixed(np.repeat(side, 400, axis=1), torch.bfloat16) for side in (x.hidden, x.teacher_hidden)
    )
    weight, bias = leaf(x.weight, torch.bfloat16), leaf(x.bias, torch.bfloat16)
    call: dict[str, Any] = {"gate": Gate(*H1), "recompute": recompute, "chunk_mb": 0.0001}
    teacher_weight = fixed(x.teacher_weight, torch.bfloat16)
    out = fused_gated_kl(hidden, Head(weight, bias=bias), teacher_hidden, teacher_weight, **call)
    out.loss.backward()
    student, teacher = x.logits()
    one = oracle.gated(student + x.bias, teacher, abcd=H1)
    assert_close(out.loss, one.loss, rtol=1e-4)
    assert relative(weight.grad, np.einsum("btv,bth->vh", one.grad, x.hidden)) < 1e-2
    assert relative(bias.grad, one.grad.sum((0, 1))) < 1e-2


@pytest.mark.parametrize("recompute", [True, False, None])
@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_compute_with_float32_master_weights(autocast: bool, recompute: bool | None) -> None:
    """The products see both factors in bf16, as autocast would; the gradients keep the precision of their tensors."""
    x = inputs(28, 2, 8, 100, 16, 12)
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight = leaf(x.hidden, dtype), leaf(x.weight, torch.float32)
    teacher = fixed(x.teacher_hidden, dtype), fixed(x.teacher_weight, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = fused_gated_kl(hidden, weight, *teacher, gate=Gate(*H1), recompute=recompute, chunk_mb=0.01)
    out.loss.backward()
    x = rounded(x, torch.bfloat16)
    expected = oracle.gated(*x.logits(), abcd=H1)
    assert_close(out.loss, expected.loss, rtol=1e-5)
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, torch.float32)
    assert relative(hidden.grad, expected.grad @ x.weight) < 4e-3
    assert relative(weight.grad, np.einsum("btv,bth->vh", expected.grad, x.hidden)) < 4e-3


@pytest.mark.parametrize("student", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("teacher", [torch.bfloat16, torch.float32, torch.float64])
def test_each_side_in_its_own_precision(student: torch.dtype, teacher: torch.dtype) -> None:
    """A float32 teacher is not rounded because the student is in half precision, nor the other way round."""
    x = inputs(31, 2, 6, 90, 12, 10)
    parts = [fixed(x.hidden, student), fixed(x.weight, student), fixed(x.teacher_hidden, teacher)]
    parts.append(fixed(x.teacher_weight, teacher))
    out = fused_gated_kl(*parts, gate=Gate(*H1), chunk_mb=0.01)
    exact = [part.double().numpy() for part in parts]
    expected = oracle.gated(exact[0] @ exact[1].T, exact[2] @ exact[3].T, abcd=H1)
    assert_close(out.loss, expected.loss, rtol=1e-4 if torch.bfloat16 in (student, teacher) else 1e-5)


def test_near_the_teacher_in_float32() -> None:
    """Where student and teacher nearly agree both KLs keep their digits and never fall below 0."""
    rng = np.random.default_rng(5)
    hidden, weight = rng.normal(size=(1, 6, 16)), rng.normal(size=(20_000, 16))
    close = hidden + 2e-5 * rng.normal(size=hidden.shape)
    parts = [fixed(array, torch.float32) for array in (close, weight, hidden, weight)]
    out = fused_gated_kl(*parts, gate=Gate.static(0.5), chunk_mb=0.3)
    exact = [numbers(part) for part in parts]
    expected = oracle.gated(exact[0] @ exact[1].T, exact[2] @ exact[1].T, abcd=(0, 0, 0, 0))
    assert float(expected.reverse_kl.max()) < 1e-7
    for kl, wanted in ((out.reverse_kl, expected.reverse_kl), (out.forward_kl, expected.forward_kl)):
        assert bool((kl >= 0).all())
        np.testing.assert_allclose(kl.double().numpy(), wanted, rtol=2e-2)


@pytest.mark.parametrize("recompute", [True, False])
def test_log_ratios_beyond_what_an_exponential_holds(recompute: bool) -> None:
    """A student that is e^-200 sure where the teacher is certain: finite, and equal to the plain path."""
    x = inputs(32, 1, 5, 40, 6, 6)
    x.weight[3] *= 60.0
    x = replace(x, teacher_weight=-x.weight)
    plain, fused = plain_and_fused(x, Gate.named("H3"), fused={"chunk_mb": 0.001, "recompute": recompute})
    assert float(plain.out.reverse_kl.max()) > 100
    assert_same(plain, fused)


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
    extra = {"jsd": 1.0, "student_entropy": 1.0} if support == "full" else {}
    options: dict[str, Any] = {"gate": Gate(1, 1, 0, 1, extra=extra), "support": support, "entropy": "full"}
    _keep_pages()  # once per process it asks for a block that it does not touch
    with LargestStorage() as seen:
        fused_loss(x, torch.float32, recompute=recompute, chunk_mb=0.25, **options, **needs(support, x))
    assert seen.elements >= v * 8, "the backward pass was not seen"
    assert seen.elements <= n * v // 8
    with LargestStorage() as seen:  # the instrument works: the plain form does make the whole tensor
        gated_kl(*map(fixed, inputs(24, 2, 8, 64).logits()), gate=Gate(*H1))
    assert seen.elements >= 2 * 8 * 64
