"""The nine properties of the family, each for whatever Hypothesis can think of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gatespace import Gate, gated_kl, signals
from gatespace.gating import EOPD, LossInputs, Static, ToDi, distillation_loss, forward_kl, reverse_kl

from . import oracle
from .compare import assert_close, fixed, leaf, numbers
from .strategies import ABCD, COEFFICIENT, Case, cases, distinct_logits, rows


def run(student: np.ndarray, teacher: np.ndarray, gate: Gate, **options: Any) -> tuple[Any, np.ndarray]:
    z = leaf(student)
    out = gated_kl(z, fixed(teacher), gate=gate, **options)
    out.loss.backward()
    assert z.grad is not None
    return out, z.grad.numpy()


def of(case: Case) -> dict[str, Any]:
    return {"mask": torch.as_tensor(case.mask), "top_k": case.top_k, "temperature": case.temperature}


# 1 -------------------------------------------------------------------------------------------


@given(cases(), st.floats(-8, 8))
def test_without_signals_the_gate_is_static(case: Case, c: float) -> None:
    lam = 1 / (1 + math.exp(-c))
    left, left_grad = run(case.student, case.teacher, Gate(0, 0, c, 0), **of(case))
    right, right_grad = run(case.student, case.teacher, Gate.static(lam), **of(case))
    assert_close(left.loss, right.loss)
    assert_close(left_grad, right_grad)
    assert_close(numbers(left.lam)[case.mask == 1], lam, rtol=1e-12)


@given(cases())
def test_all_zero_is_half_and_half(case: Case) -> None:
    out, _ = run(case.student, case.teacher, Gate(), **of(case))
    assert_close(out.per_token, (numbers(out.reverse_kl) + numbers(out.forward_kl)) / 2)
    assert_close(numbers(out.lam)[case.mask == 1], 0.5, rtol=1e-15)


# 2 -------------------------------------------------------------------------------------------


@given(cases(), st.floats(-50, 50), st.floats(-50, 50))
def test_shift_invariance(case: Case, by: float, teacher_by: float) -> None:
    gate = Gate(*case.abcd)
    out, grad = run(case.student, case.teacher, gate, **of(case))
    # The tie-breaking of y* survives a shift only if the shift is exact.
    moved, moved_grad = run(case.student + round(by), case.teacher + round(teacher_by), gate, **of(case))
    assert_close(moved.loss, out.loss, rtol=1e-9, atol=1e-10)
    assert_close(moved_grad, grad, rtol=1e-8, atol=1e-10)


@given(cases(ties=False), st.randoms(use_true_random=False))
def test_permutation_equivariance(case: Case, random: Any) -> None:
    gate = Gate(*case.abcd)
    order = list(range(case.student.shape[-1]))
    random.shuffle(order)
    out, grad = run(case.student, case.teacher, gate, **of(case))
    moved, moved_grad = run(case.student[..., order], case.teacher[..., order], gate, **of(case))
    assert_close(moved.loss, out.loss)
    assert_close(moved_grad, grad[..., order])


@given(cases(), st.booleans())
def test_gradient_rows_sum_to_zero(case: Case, stop_gradient: bool) -> None:
    _, grad = run(case.student, case.teacher, Gate(*case.abcd), stop_gradient=stop_gradient, **of(case))
    assert_close(grad.sum(-1), np.zeros(case.mask.shape), atol=1e-11)


@given(cases())
def test_agreement_is_zero_in_value_and_gradient(case: Case) -> None:
    out, grad = run(case.teacher, case.teacher, Gate(*case.abcd), **of(case))
    assert_close(out.loss, 0.0, atol=1e-13)
    assert_close(grad, np.zeros_like(grad), atol=1e-13)


# 3 -------------------------------------------------------------------------------------------


@given(cases())
def test_the_loss_lies_between_the_two_kls(case: Case) -> None:
    out, _ = run(case.student, case.teacher, Gate(*case.abcd), **of(case))
    forward, reverse, mixed = (numbers(x) for x in (out.forward_kl, out.reverse_kl, out.per_token))
    slack = 1e-12 * (1 + np.maximum(forward, reverse))
    assert (mixed >= np.minimum(forward, reverse) - slack).all()
    assert (mixed <= np.maximum(forward, reverse) + slack).all()
    assert ((out.lam >= 0) & (out.lam <= 1)).all()


# 4 -------------------------------------------------------------------------------------------


@given(cases(), COEFFICIENT, st.integers(0, 3))
def test_lambda_is_monotone_in_each_channel(case: Case, step: float, which: int) -> None:
    """Raising a coefficient raises λ where its signal is positive: λ' - λ has the sign of step·signal."""
    moved = list(case.abcd)
    moved[which] += step
    before, _ = run(case.student, case.teacher, Gate(*case.abcd), **of(case))
    after, _ = run(case.student, case.teacher, Gate(*moved), **of(case))
    signal = [before.h, before.u, torch.ones_like(before.h), before.gap][which]
    change = numbers(after.lam) - numbers(before.lam)
    sign = step * numbers(signal) * (case.mask == 1)
    assert (change * np.sign(sign) >= -1e-15).all()
    assert (np.abs(change[sign == 0]) < 1e-15).all()


@given(cases(), st.sampled_from([0, 1, 3]))
def test_lambda_is_monotone_in_each_signal(case: Case, which: int) -> None:
    """Over the tokens of a batch with one channel only, λ orders as coefficient·signal does."""
    weight = case.abcd[which]
    alone = [0.0, 0.0, case.abcd[2], 0.0]
    alone[which] = weight
    out, _ = run(case.student, case.teacher, Gate(*alone), **of(case))
    keep = case.mask == 1
    signal, lam = numbers([out.h, out.u, None, out.gap][which])[keep], numbers(out.lam)[keep]
    order = np.argsort(weight * signal, kind="stable")
    assert (np.diff(lam[order]) >= -1e-15).all()


@given(rows(), ABCD)
def test_slope_in_gap_is_at_most_a_quarter_of_d(pair: tuple[np.ndarray, np.ndarray], abcd: tuple[float, ...]) -> None:
    """|λ(gap₁) - λ(gap₂)| ≤ |d|/4·|gap₁ - gap₂| for two students under one teacher, so h and u are the same."""
    student, teacher = pair
    gate = Gate(*abcd)
    other = np.roll(student, 1)
    k = min(3, len(student))
    one, _ = run(student[None, None], teacher[None, None], gate, top_k=k)
    two, _ = run(other[None, None], teacher[None, None], gate, top_k=k)
    difference = abs(float(one.lam) - float(two.lam))
    assert difference <= abs(abcd[3]) / 4 * abs(float(one.gap) - float(two.gap)) + 1e-13


# 5 -------------------------------------------------------------------------------------------


@given(cases())
def test_what_the_gradient_through_the_gate_adds(case: Case) -> None:
    """κ s_{y*}(s_j - 1[j = y*]) with the student at T = 1, where the gap is read; no 1/T."""
    gate = Gate(*case.abcd)
    out, through = run(case.student, case.teacher, gate, **of(case))
    _, stopped = run(case.student, case.teacher, gate, stop_gradient=True, **of(case))
    lam, forward, reverse = (numbers(x) for x in (out.lam, out.forward_kl, out.reverse_kl))
    kappa = case.abcd[3] * lam * (1 - lam) * (reverse - forward)
    s = oracle.probabilities(case.student)
    choice = case.teacher.argmax(-1)[..., None]
    of_choice = np.take_along_axis(s, choice, -1)
    one = np.zeros_like(s)
    np.put_along_axis(one, choice, 1.0, -1)
    expected = kappa[..., None] * of_choice * (s - one) * case.mask[..., None] / case.mask.sum()
    assert_close(through - stopped, expected, atol=1e-11)


# 6 -------------------------------------------------------------------------------------------


@given(cases(), st.tuples(COEFFICIENT, COEFFICIENT, COEFFICIENT))
def test_without_gap_exchanging_the_sides_negates_the_gate(case: Case, abc: tuple[float, float, float]) -> None:
    """L(s, t; x) = L(t, s; -x), x the gate's logit: c alone for any sides, h and u where both sides share them."""
    left, _ = run(case.student, case.teacher, Gate(c=abc[2]), **of(case))
    right, _ = run(case.teacher, case.student, Gate(c=-abc[2]), **of(case))
    assert_close(left.loss, right.loss)
    # A student whose probabilities are a permutation of the teacher's has the same h and u.
    student = np.roll(case.teacher, 1, axis=-1)
    a, b, c = abc
    left, _ = run(student, case.teacher, Gate(a, b, c, 0), **of(case))
    right, _ = run(case.teacher, student, Gate(-a, -b, -c, 0), **of(case))
    assert_close(left.loss, right.loss, rtol=1e-8)
    assert_close(left.lam, np.where(case.mask == 1, 1 - numbers(right.lam), 0.0), rtol=1e-8)


# 7 -------------------------------------------------------------------------------------------


@given(cases())
def test_todi_at_beta_1_is_forward_plus_reverse_and_symmetric(case: Case) -> None:
    inputs = LossInputs(mask=torch.as_tensor(case.mask), temperature=case.temperature, top_k=2)
    todi = distillation_loss(fixed(case.student), fixed(case.teacher), objective=ToDi(beta=1.0), inputs=inputs)
    swapped = distillation_loss(fixed(case.teacher), fixed(case.student), objective=ToDi(beta=1.0), inputs=inputs)
    both, _ = run(case.student, case.teacher, Gate(), **of(case))
    assert_close(todi.per_token, numbers(both.forward_kl) + numbers(both.reverse_kl))
    assert_close(todi.loss, swapped.loss)


# 8 -------------------------------------------------------------------------------------------


@given(cases(ties=False))
def test_buckets_see_less_and_whole_supports_agree(case: Case) -> None:
    v = case.student.shape[-1]
    student, teacher = fixed(case.student), fixed(case.teacher)
    for kl in (forward_kl, reverse_kl):
        whole = kl(student, teacher, temperature=case.temperature)
        part = kl(student, teacher, support="bucket", support_k=case.top_k, temperature=case.temperature)
        assert (part <= whole + 1e-10).all()
        assert (part >= 0).all()
        for support in ("bucket", "renorm", "hybrid"):
            sampled = {"sampled": torch.zeros(case.mask.shape, dtype=torch.long)} if support == "hybrid" else {}
            same = kl(student, teacher, support=support, support_k=v, temperature=case.temperature, **sampled)
            assert_close(same, whole, what=support)


@given(distinct_logits(5), distinct_logits(5), ABCD, st.integers(1, 4))
def test_hybrid_gated_loss_with_a_fixed_gate_is_unbiased(
    student: np.ndarray, teacher: np.ndarray, abcd: tuple[float, float, float, float], k: int
) -> None:
    """By enumeration of y ~ student: λ does not depend on y, and L and its gradient are linear in the estimates."""
    s = oracle.probabilities(student)
    gate = Gate(*abcd)
    exact, exact_grad = run(student[None, None], teacher[None, None], gate, top_k=2)
    mean, mean_grad = 0.0, np.zeros(5)
    for y in range(5):
        out, grad = run(
            student[None, None],
            teacher[None, None],
            gate,
            top_k=2,
            support="hybrid",
            support_k=k,
            sampled=torch.tensor([[y]]),
        )
        mean += s[y] * float(out.loss.detach())
        mean_grad += s[y] * grad[0, 0]
    assert_close(mean, exact.loss, atol=1e-9)
    assert_close(mean_grad, exact_grad[0, 0], atol=1e-9)


# 9 -------------------------------------------------------------------------------------------


@given(cases(), st.randoms(use_true_random=False))
def test_eopd_with_an_infinite_threshold_is_plain_opd(case: Case, random: Any) -> None:
    v = case.student.shape[-1]
    sampled = np.array([[random.randrange(v) for _ in range(case.mask.shape[1])] for _ in range(case.mask.shape[0])])
    inputs = LossInputs(mask=torch.as_tensor(case.mask), top_k=2, sampled=torch.as_tensor(sampled))
    z = leaf(case.student)
    out = distillation_loss(z, fixed(case.teacher), objective=EOPD(tau=math.inf, top_k=2), inputs=inputs)
    out.loss.backward()
    loss, _, grad = oracle.batch_of(
        case.student,
        case.teacher,
        lambda s, t, bt: oracle.sampled_reverse_kl(s, t, y=int(sampled[bt])),
        mask=case.mask,
    )
    assert_close(out.loss, loss)
    assert_close(z.grad, grad)


@given(cases())
def test_mean_policy_gradient_of_eopd(case: Case) -> None:
    """Σ_y s_y ∇PG(y) = ∇R at every token, by enumeration."""
    v = case.student.shape[-1]
    inputs = LossInputs(mask=torch.as_tensor(case.mask), top_k=2)
    s = oracle.probabilities(case.student)
    mean = np.zeros(case.student.shape)
    for y in range(v):
        z = leaf(case.student)
        one = replace(inputs, sampled=torch.full(case.mask.shape, y))
        out = distillation_loss(z, fixed(case.teacher), objective=EOPD(tau=math.inf, top_k=2), inputs=one)
        out.loss.backward()
        mean += s[..., y : y + 1] * z.grad.numpy()
    z = leaf(case.student)
    distillation_loss(z, fixed(case.teacher), objective=Static(1.0), inputs=inputs).loss.backward()
    assert_close(mean, z.grad, atol=1e-10)


# ---------------------------------------------------------------------------------------------- signals


@given(cases(), st.sampled_from(["top_k", "full", "bucket"]))
def test_signals_lie_in_the_unit_interval(case: Case, entropy: str) -> None:
    for dtype in (torch.float64, torch.float32):
        h = signals.teacher_entropy(fixed(case.teacher, dtype), top_k=case.top_k, entropy=entropy)
        gap = signals.gap(fixed(case.student, dtype), fixed(case.teacher, dtype))
        for signal in (h, gap):
            assert ((signal >= 0) & (signal <= 1)).all()
