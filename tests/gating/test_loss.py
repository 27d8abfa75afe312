"""gated_kl against its definition: loss, telemetry, gradient through the gate and without, masks and counts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatespace import Gate, gated_kl
from gatespace.gating.inputs import ENTROPIES

from . import oracle
from .compare import TELEMETRY, assert_close, assert_matches, fixed, leaf, numbers
from .strategies import Case, cases

INF = math.inf
GATES = [
    "G1",
    "G2",
    "G3",
    "G4",
    "G5",
    "H1",
    "H4",
    "HG4,d-2",
    "HG5,d+4",
    "entropy-only(4)",
    "gap-only(-2)",
    "static:0.388",
]


def batch(
    seed: int, b: int = 2, t: int = 4, v: int = 11, scale: float = 2.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = np.ones((b, t), dtype=np.int64)
    mask[0, 0] = mask[-1, -1] = 0
    return rng.normal(size=(b, t, v)) * scale, rng.normal(size=(b, t, v)) * scale, mask


def run(student: Any, teacher: Any, gate: Gate, **options: Any) -> tuple[Any, np.ndarray]:
    z = leaf(student)
    out = gated_kl(z, fixed(teacher), gate=gate, **options)
    out.loss.backward()
    assert z.grad is not None
    return out, z.grad.numpy()


# ---------------------------------------------------------------------------------------------- against the definition


MASK = batch(1)[2]
LOG_MU = np.log(np.random.default_rng(4).uniform(0.05, 0.9, size=MASK.shape))
SAMPLED = np.random.default_rng(3).integers(0, 11, size=MASK.shape)
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{gate}, T {temperature}, {'stopped' if stop else 'through'}": {
            "gate": gate,
            "temperature": temperature,
            "stop_gradient": stop,
        }
        for gate in GATES
        for temperature in (1.0, 0.5, 3.0)
        for stop in (False, True)
    },
    **{
        f"{support}, T {temperature}": {"support": support, "support_k": 3, "top_k": 4, "temperature": temperature}
        | ({"sampled": SAMPLED} if support == "hybrid" else {})
        for support in ("bucket", "hybrid", "renorm")
        for temperature in (1.0, 2.0)
    },
    "hybrid off policy": {"support": "hybrid", "support_k": 5, "sampled": SAMPLED, "sampled_log_probs": LOG_MU},
    "support_k is top_k": {"support": "bucket", "top_k": 3},
    **{f"{entropy}, K {k}": {"entropy": entropy, "top_k": k} for entropy in ENTROPIES for k in (1, 4, 11)},
    "no mask": {"mask": None},
    "total_tokens": {"total_tokens": 100},
    "segments": {
        "top_k": 4,
        "mask": np.array([[0, 1, 1, 1], [1, 1, 1, 0]]),
        "segment_ids": np.array([[0, 0, 1, 1]] * 2),
    },
    "u per sample": {"gate": "G4", "u": np.array([0.2, 0.9])},
    "u per token": {"gate": "G4", "u": np.random.default_rng(0).uniform(size=MASK.shape)},
}


@pytest.mark.parametrize("name", CASES)
def test_value_telemetry_and_gradient(name: str) -> None:
    student, teacher, _ = batch(1)
    options = {"mask": MASK, **CASES[name]}
    gate = Gate.parse(options.pop("gate", "H2"))
    tensors = {
        key: torch.as_tensor(value) if isinstance(value, np.ndarray) else value for key, value in options.items()
    }
    out, grad = run(student, teacher, gate, **tensors)
    expected = oracle.gated(student, teacher, abcd=gate.abcd, **options)
    assert_matches(out, expected)
    assert_close(grad, expected.grad)
    mask = np.ones(MASK.shape) if options["mask"] is None else options["mask"]
    assert out.tokens == int(mask.sum())
    assert_close(out.weight, mask)


@given(cases(), st.booleans())
@settings(max_examples=60)
def test_random_cases_with_ties_and_masks(case: Case, stop_gradient: bool) -> None:
    options = {"top_k": case.top_k, "temperature": case.temperature, "stop_gradient": stop_gradient}
    out, grad = run(case.student, case.teacher, Gate(*case.abcd), mask=torch.as_tensor(case.mask), **options)
    expected = oracle.gated(case.student, case.teacher, abcd=case.abcd, mask=case.mask, **options)
    assert_matches(out, expected)
    assert_close(grad, expected.grad)


@pytest.mark.parametrize("stop_gradient", [False, True])
def test_gradcheck(stop_gradient: bool) -> None:
    student, teacher, mask = batch(7, 1, 3, 5, 1.0)
    h = oracle.gated(student, teacher, abcd=(2, -1, 0.3, 3), mask=mask, top_k=3)

    def loss(z: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        gate = Gate(2, -1, 0.3, 3)
        return gated_kl(
            z, fixed(teacher), gate=gate, mask=torch.as_tensor(mask), top_k=3, coefficients=coefficients
        ).loss

    assert torch.autograd.gradcheck(loss, (leaf(student), leaf([2.0, -1.0, 0.3, 3.0])))
    # With the gate stopped there is no function whose derivative it is, unless λ does not depend on the student.
    out, grad = run(
        student, teacher, Gate(2, -1, 0.3, 3), mask=torch.as_tensor(mask), top_k=3, stop_gradient=stop_gradient
    )
    lam = fixed(h.lam)

    def frozen(z: torch.Tensor) -> torch.Tensor:
        s, t = torch.softmax(z, -1), torch.softmax(fixed(teacher), -1)
        reverse, forward = (s * (s.log() - t.log())).sum(-1), (t * (t.log() - s.log())).sum(-1)
        return ((lam * reverse + (1 - lam) * forward) * torch.as_tensor(mask)).sum() / mask.sum()

    z = leaf(student)
    frozen(z).backward()
    assert np.allclose(grad, z.grad.numpy(), atol=1e-10) is stop_gradient
    assert_close(out.loss, h.loss)


# ---------------------------------------------------------------------------------------------- coefficients


@pytest.mark.parametrize("stop_gradient", [False, True])
def test_gradient_of_the_coefficients(stop_gradient: bool) -> None:
    """∂L/∂(a, b, c, d) = λ(1-λ)(R-F)·(h, u, 1, gap); stopping the gate's gradient to the student leaves it alone."""
    student, teacher, mask = batch(8)
    coefficients = leaf([4.0, 4.0, -1.5, 2.0])
    gate = Gate(0, 0, 0, 0)
    z = leaf(student)
    out = gated_kl(
        z, fixed(teacher), gate=gate, mask=torch.as_tensor(mask), coefficients=coefficients, stop_gradient=stop_gradient
    )
    out.loss.backward()
    expected = oracle.gated(student, teacher, abcd=(4, 4, -1.5, 2), mask=mask, stop_gradient=stop_gradient)
    assert_matches(out, expected)
    assert_close(z.grad, expected.grad)
    assert_close(coefficients.grad, expected.coefficient_grad)
    assert np.abs(expected.coefficient_grad).min() > 1e-6


# ---------------------------------------------------------------------------------------------- masks and counts


@pytest.mark.parametrize("support", ["full", "bucket", "hybrid", "renorm"])
def test_empty_mask_gives_zero_and_not_nan(support: str) -> None:
    student, teacher, mask = batch(9)
    sampled = {"sampled": torch.zeros(mask.shape, dtype=torch.long)} if support == "hybrid" else {}
    coefficients = leaf([1.0, 1.0, 1.0, 1.0])
    out, grad = run(
        student,
        teacher,
        Gate(1, 1, 1, 1),
        mask=torch.zeros(mask.shape),
        support=support,
        coefficients=coefficients,
        **sampled,
    )
    assert float(out.loss.detach()) == 0.0
    assert out.tokens == 0
    assert (grad == 0).all()
    assert coefficients.grad is None or (coefficients.grad == 0).all()
    for name in TELEMETRY:
        assert (getattr(out, name) == 0).all(), name


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF, 1e30])
@pytest.mark.parametrize("support", ["full", "bucket", "hybrid"])
def test_positions_outside_the_mask_are_never_read(support: str, garbage: float) -> None:
    student, teacher, mask = batch(10)
    sampled = np.random.default_rng(0).integers(0, 11, size=mask.shape)
    options: dict[str, Any] = {"support": support, "support_k": 3}
    if support == "hybrid":
        options["sampled"] = torch.as_tensor(sampled)
    clean, clean_grad = run(student, teacher, Gate.named("H1"), mask=torch.as_tensor(mask), **options)
    student, teacher = student.copy(), teacher.copy()
    student[mask == 0], teacher[mask == 0] = garbage, garbage
    if support == "hybrid":
        options["sampled"] = torch.as_tensor(np.where(mask == 0, -100, sampled))
    out, grad = run(student, teacher, Gate.named("H1"), mask=torch.as_tensor(mask), **options)
    assert float(out.loss.detach()) == float(clean.loss.detach())
    np.testing.assert_array_equal(grad, clean_grad)
    assert (grad[mask == 0] == 0).all()
    for name in TELEMETRY:
        values = numbers(getattr(out, name))
        np.testing.assert_array_equal(values, numbers(getattr(clean, name)))
        assert (values[mask == 0] == 0).all(), name


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.float64])
def test_kinds_of_mask(dtype: torch.dtype) -> None:
    student, teacher, mask = batch(11)
    out, grad = run(student, teacher, Gate.named("G5"), mask=torch.as_tensor(mask).to(dtype))
    expected = oracle.gated(student, teacher, abcd=(4, 0, -1, 0), mask=mask)
    assert_matches(out, expected)
    assert_close(grad, expected.grad)


def test_micro_batches_add_up_to_the_batch() -> None:
    """Divide once by the global count: the split into micro-batches changes nothing."""
    student, teacher, mask = batch(13, 5, 4, 9)
    mask[1] = 0
    mask[2, 1:] = 0
    whole, grad = run(student, teacher, Gate.named("H1"), mask=torch.as_tensor(mask))
    for split in ([0, 1, 3, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]):
        loss, grads = 0.0, []
        for lo, hi in itertools.pairwise(split):
            out, part = run(
                student[lo:hi],
                teacher[lo:hi],
                Gate.named("H1"),
                mask=torch.as_tensor(mask[lo:hi]),
                total_tokens=int(mask.sum()),
            )
            loss += float(out.loss.detach())
            grads.append(part)
        assert loss == pytest.approx(float(whole.loss.detach()), abs=1e-12)
        np.testing.assert_allclose(np.concatenate(grads), grad, atol=1e-14)


def test_padded_vocabularies_are_cut() -> None:
    student, teacher, mask = batch(17, v=11)
    teacher = np.concatenate([teacher, np.full((*mask.shape, 3), 99.0)], -1)  # the teacher's head has 3 more rows
    student = student.copy()
    student[..., 9:], teacher[..., 9:] = 77.0, 88.0
    out, grad = run(student, teacher, Gate.named("H1"), mask=torch.as_tensor(mask), top_k=4, vocab_size=9)
    expected = oracle.gated(student[..., :9], teacher[..., :9], abcd=(4, 4, -1.5, 2), mask=mask, top_k=4)
    assert_matches(out, expected)
    assert_close(grad[..., :9], expected.grad)
    assert (grad[..., 9:] == 0).all()


# ---------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("lam", [0.0, 0.25, 1.0])
def test_static_gates_are_the_mixture(lam: float) -> None:
    student, teacher, mask = batch(18)
    out, grad = run(student, teacher, Gate.static(lam), mask=torch.as_tensor(mask))
    s, t = oracle.probabilities(student), oracle.probabilities(teacher)
    forward, reverse = (t * np.log(t / s)).sum(-1), (s * np.log(s / t)).sum(-1)
    expected = (lam * reverse + (1 - lam) * forward)[mask == 1].mean()
    assert_close(out.loss, expected)
    assert_close(out.lam, mask * lam, rtol=1e-14)
    l = np.log(s / t)
    by_rule = s * (lam * (l - reverse[..., None]) + (1 - lam)) - (1 - lam) * t
    assert_close(grad, by_rule * mask[..., None] / mask.sum())


def test_saturated_gates_stay_finite() -> None:
    student, teacher, _ = batch(19)
    for c, lam in ((1e6, 1.0), (-1e6, 0.0), (1e300, 1.0)):
        out, grad = run(student, teacher, Gate(1, 1, c, 1))
        assert_close(out.lam, np.full(out.lam.shape, lam))
        assert np.isfinite(grad).all()
        assert torch.isfinite(out.loss)


def test_a_forbidden_id_on_both_sides_changes_nothing() -> None:
    student, teacher, mask = batch(20)
    ids = [0, 1, 3, 4, 5, 6, 7, 9, 10]
    forbidden_s, forbidden_t = np.full(student.shape, -INF), np.full(teacher.shape, -INF)
    forbidden_s[..., ids], forbidden_t[..., ids] = student[..., ids], teacher[..., ids]
    out, grad = run(forbidden_s, forbidden_t, Gate.named("H1"), mask=torch.as_tensor(mask), top_k=4)
    expected = oracle.gated(student[..., ids], teacher[..., ids], abcd=(4, 4, -1.5, 2), mask=mask, top_k=4)
    assert_matches(out, expected)
    assert_close(grad[..., ids], expected.grad)
    assert (np.delete(grad, ids, axis=-1) == 0).all()


def test_one_hot_teacher_with_forward_kl_only() -> None:
    """λ = 0 needs no reverse KL: a hard label is allowed, and the loss is the cross-entropy."""
    student, _, _ = batch(21, 1, 2, 5)
    teacher = np.full((1, 2, 5), -INF)
    teacher[0, 0, 3] = teacher[0, 1, 1] = 0.0
    out, grad = run(student, teacher, Gate.static(0), top_k=4)
    s = oracle.probabilities(student)
    assert_close(out.loss, -(math.log(s[0, 0, 3]) + math.log(s[0, 1, 1])) / 2)
    assert_close(grad, (s - np.exp(teacher)) / 2)


def test_the_teacher_gets_no_gradient_and_inputs_are_not_changed() -> None:
    student, teacher, mask = batch(23)
    z, zt = leaf(student), leaf(teacher)
    out = gated_kl(z, zt, gate=Gate.named("H1"), mask=torch.as_tensor(mask))
    assert not any(getattr(out, name).requires_grad for name in (*TELEMETRY, "weight"))
    out.loss.backward()
    assert zt.grad is None
    with torch.no_grad():
        assert not gated_kl(z, zt, gate=Gate.named("H1")).loss.requires_grad
    np.testing.assert_array_equal(numbers(z), student)
    np.testing.assert_array_equal(numbers(zt), teacher)


def test_bf16_logits_against_the_same_numbers_in_float64() -> None:
    student, teacher, mask = batch(25, 2, 4, 300, 4.0)
    z = torch.as_tensor(student).to(torch.bfloat16).requires_grad_()
    zt = torch.as_tensor(teacher).to(torch.bfloat16)
    out = gated_kl(z, zt, gate=Gate.named("H1"), mask=torch.as_tensor(mask))
    out.loss.backward()
    expected = oracle.gated(numbers(z), numbers(zt), abcd=(4, 4, -1.5, 2), mask=mask)
    assert_matches(out, expected, rtol=1e-4, atol=1e-5)
    assert z.grad.dtype == torch.bfloat16
    assert_close(z.grad, expected.grad, rtol=1e-2, atol=1e-6)
