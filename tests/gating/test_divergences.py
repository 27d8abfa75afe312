"""forward_kl and reverse_kl per token: every support against its definition, limits, bounds, small differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gatespace import Gate, gated_kl
from gatespace.gating import TeacherTopK, forward_kl, reverse_kl

from . import oracle
from .compare import assert_close, fixed, leaf, numbers, top_k_of
from .strategies import distinct_logits, rows

SUPPORTS = ["full", "bucket", "hybrid", "renorm"]
VALID = ["full", "bucket", "renorm"]  # always a KL of two distributions, token by token
INF = math.inf


def both(student: Any, teacher: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return forward_kl(student, teacher, **options), reverse_kl(student, teacher, **options)


def by_definition(student: np.ndarray, teacher: np.ndarray, temperature: float = 1.0, **options: Any) -> oracle.Pair:
    return oracle.pair(
        oracle.probabilities(student, temperature), oracle.probabilities(teacher, temperature), **options
    )


def sampled_options(support: str, sampled: np.ndarray, log_mu: np.ndarray | None = None) -> dict[str, torch.Tensor]:
    if support != "hybrid":
        return {}
    options = {"sampled": torch.as_tensor(sampled)}
    if log_mu is not None:
        options["sampled_log_probs"] = fixed(log_mu)
    return options


# ---------------------------------------------------------------------------------------------- value and gradient


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [1, 3, 8, 9])
@pytest.mark.parametrize(("support", "off_policy"), [*((s, False) for s in SUPPORTS), ("hybrid", True)])
def test_value_and_gradient_of_every_support(support: str, k: int, temperature: float, off_policy: bool) -> None:
    rng = np.random.default_rng(k)
    student, teacher = rng.normal(size=(2, 4, 9)) * 1.5, rng.normal(size=(2, 4, 9)) * 1.5
    sampled = rng.integers(0, 9, size=(2, 4))
    log_mu = np.log(rng.uniform(0.05, 0.9, size=(2, 4))) if off_policy else None
    options: dict[str, Any] = {"support": support, "support_k": k, "temperature": temperature}
    for which, kl in enumerate((forward_kl, reverse_kl)):
        z = leaf(student)
        value = kl(z, fixed(teacher), **options, **sampled_options(support, sampled, log_mu))
        assert value.shape == (2, 4)
        value.sum().backward()
        for bt in np.ndindex(2, 4):
            term = by_definition(
                student[bt],
                teacher[bt],
                temperature,
                support=support,
                k=k,
                y=int(sampled[bt]),
                log_mu=oracle.sampler(student[bt], int(sampled[bt]), log_mu, bt),
            )[which]
            assert_close(value[bt], term.value, what=f"{kl.__name__} {bt}")
            assert_close(z.grad[bt], term.grad / temperature, what=f"gradient of {kl.__name__} {bt}")


@pytest.mark.parametrize("support", ["full", "bucket", "renorm"])
def test_gradcheck_of_the_divergences(support: str) -> None:
    rng = np.random.default_rng(1)
    teacher = fixed(rng.normal(size=(2, 5)))
    for kl in (forward_kl, reverse_kl):
        assert torch.autograd.gradcheck(
            lambda z, kl=kl: kl(z, teacher, support=support, support_k=3), leaf(rng.normal(size=(2, 5)))
        )


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 7)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    student, teacher = rng.normal(size=shape), rng.normal(size=shape)
    s, t = oracle.probabilities(student), oracle.probabilities(teacher)
    forward, reverse = both(fixed(student), fixed(teacher))
    assert_close(forward, (t * np.log(t / s)).sum(-1))
    assert_close(reverse, (s * np.log(s / t)).sum(-1))


# ---------------------------------------------------------------------------------------------- limits


LIMITS = {
    # name: (student, teacher, forward, reverse)
    "teacher = student": ([1.0, 2.0, -1.0, 0.5], [1.0, 2.0, -1.0, 0.5], 0.0, 0.0),
    "teacher = student up to a shift": ([1.0, 2.0, -1.0, 0.5], [11.0, 12.0, 9.0, 10.5], 0.0, 0.0),
    "both uniform": ([0.0] * 4, [3.0] * 4, 0.0, 0.0),
    "one-hot teacher, uniform student": ([0.0] * 4, [0.0, -INF, -INF, -INF], math.log(4), INF),
    "both one-hot, same id": ([0.0, -INF, -INF, -INF], [0.0, -INF, -INF, -INF], 0.0, 0.0),
    "a forbidden id on both sides": (
        [0.0, 0.0, -INF, -INF],
        [math.log(3.0), 0.0, -INF, -INF],
        0.75 * math.log(1.5) + 0.25 * math.log(0.5),
        0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25),
    ),
    "near one-hot teacher": (
        [0.0] * 4,
        [50.0, 0.0, 0.0, 0.0],
        math.log(4),
        0.25 * 150.0 - math.log(4),
    ),
    "near one-hot, opposite ids": ([50.0, 0.0, 0.0, 0.0], [0.0, 50.0, 0.0, 0.0], 50.0, 50.0),
    "uniform teacher, near one-hot student": ([50.0, 0.0, 0.0, 0.0], [0.0] * 4, 0.75 * 50.0 - math.log(4), math.log(4)),
    "extreme logits": ([1e4, -1e4, 0.0, 0.0], [-1e4, 1e4, 0.0, 0.0], 2e4, 2e4),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    student, teacher, forward, reverse = LIMITS[name]
    z = leaf(student)
    value = forward_kl(z, fixed(teacher))
    assert_close(value, forward, rtol=1e-12, atol=1e-12)
    value.backward()
    assert torch.isfinite(z.grad).all()
    if math.isinf(reverse):
        return
    z = leaf(student)
    value = reverse_kl(z, fixed(teacher))
    assert_close(value, reverse, rtol=1e-12, atol=1e-12)
    value.backward()
    assert torch.isfinite(z.grad).all()
    assert_close(z.grad.sum(), 0.0, atol=1e-9)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_stay_finite_in_every_support(support: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    student, teacher = (
        rng.choice([-1e4, -50.0, 0.0, 1.0, 1e4], size=(20, 6)) + rng.normal(size=(20, 6)) for _ in range(2)
    )
    sampled = student.argmax(-1)  # t_y/s_y overflows only for a token that the student would never draw
    for kl in (forward_kl, reverse_kl):
        z = leaf(student, dtype)
        value = kl(z, fixed(teacher, dtype), support=support, support_k=3, **sampled_options(support, sampled))
        assert torch.isfinite(value).all()
        value.sum().backward()
        assert torch.isfinite(z.grad).all()


def test_one_id_in_the_support() -> None:
    """K = 1: renorm sees nothing, bucket sees a coin."""
    student, teacher = np.log([0.2, 0.5, 0.3]), np.log([0.6, 0.3, 0.1])
    for value in both(fixed(student), fixed(teacher), support="renorm", support_k=1):
        assert_close(value, 0.0, atol=1e-12)
    forward, reverse = both(fixed(student), fixed(teacher), support="bucket", support_k=1)
    assert_close(forward, 0.6 * math.log(0.6 / 0.2) + 0.4 * math.log(0.4 / 0.8))
    assert_close(reverse, 0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4))


def test_renorm_is_blind_to_mass_that_leaves_the_support() -> None:
    """The reason why it is not the default, kept as a fact."""
    teacher = np.log([0.5, 0.3, 0.1, 0.1])
    leaving = np.log([0.05, 0.03, 0.46, 0.46])
    for value in both(fixed(leaving), fixed(teacher), support="renorm", support_k=2):
        assert_close(value, 0.0, atol=1e-12)
    assert float(reverse_kl(fixed(leaving), fixed(teacher), support="bucket", support_k=2)) > 1.0


# ---------------------------------------------------------------------------------------------- bounds


@given(rows(), st.sampled_from(VALID), st.data())
def test_never_negative(pair: tuple[np.ndarray, np.ndarray], support: str, data: st.DataObject) -> None:
    student, teacher = pair
    k = data.draw(st.integers(1, len(student)))
    for dtype in (torch.float64, torch.float32):
        for value in both(fixed(student, dtype), fixed(teacher, dtype), support=support, support_k=k):
            assert float(value) >= 0.0


@given(rows(ties=False), st.data())
def test_a_bucket_never_sees_more_than_the_whole(pair: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    student, teacher = pair
    k = data.draw(st.integers(1, len(student)))
    full = both(fixed(student), fixed(teacher))
    bucket = both(fixed(student), fixed(teacher), support="bucket", support_k=k)
    for part, whole in zip(bucket, full, strict=True):
        assert float(part) <= float(whole) + 1e-9


@given(rows(), st.data())
def test_with_k_the_vocabulary_every_support_agrees(pair: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    student, teacher = pair
    v = len(student)
    y = torch.tensor(data.draw(st.integers(0, v - 1)))
    expected = by_definition(student, teacher)
    for support in SUPPORTS:
        options = {"support": support, "support_k": v} | ({"sampled": y} if support == "hybrid" else {})
        for which, kl in enumerate((forward_kl, reverse_kl)):
            z = leaf(student)
            value = kl(z, fixed(teacher), **options)
            value.backward()
            assert_close(value, expected[which].value, what=support)
            assert_close(z.grad, expected[which].grad, what=support)


@given(distinct_logits(6), distinct_logits(6), st.integers(1, 6), st.booleans())
def test_hybrid_is_unbiased_in_value_and_gradient(student: np.ndarray, teacher: np.ndarray, k: int, off: bool) -> None:
    """Σ_y P(y)·estimate(y) is the full KL: y drawn from the student, or from any μ with the weight s/μ."""
    s = oracle.probabilities(student)
    mu = oracle.probabilities(student * 0.5 + teacher * 0.3) if off else s
    expected = by_definition(student, teacher)
    for which, kl in enumerate((forward_kl, reverse_kl)):
        mean, mean_grad = 0.0, np.zeros(6)
        for y in range(6):
            z = leaf(student)
            value = kl(
                z,
                fixed(teacher),
                support="hybrid",
                support_k=k,
                sampled=torch.tensor(y),
                sampled_log_probs=fixed(math.log(mu[y])) if off else None,
            )
            value.backward()
            mean += mu[y] * float(value.detach())
            mean_grad += mu[y] * z.grad.numpy()
        assert mean == pytest.approx(expected[which].value, abs=1e-9)
        np.testing.assert_allclose(mean_grad, expected[which].grad, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_hybrid_at_a_temperature_is_unbiased_for_tokens_drawn_at_1(temperature: float) -> None:
    rng = np.random.default_rng(4)
    student, teacher = rng.normal(size=6), rng.normal(size=6)
    s = oracle.probabilities(student)
    expected = by_definition(student, teacher, temperature)
    for which, kl in enumerate((forward_kl, reverse_kl)):
        mean, mean_grad = 0.0, np.zeros(6)
        for y in range(6):
            z = leaf(student)
            value = kl(
                z, fixed(teacher), support="hybrid", support_k=2, sampled=torch.tensor(y), temperature=temperature
            )
            value.backward()
            mean += s[y] * float(value.detach())
            mean_grad += s[y] * z.grad.numpy()
        assert mean == pytest.approx(expected[which].value, abs=1e-9)
        np.testing.assert_allclose(mean_grad, expected[which].grad / temperature, atol=1e-9)


# ---------------------------------------------------------------------------------------------- small differences


@pytest.mark.parametrize("support", ["full", "bucket"])
@pytest.mark.parametrize("scale", [1e-3, 1e-4])
def test_float32_is_accurate_where_the_two_sides_almost_agree(support: str, scale: float) -> None:
    """R ≈ 4e-7 over 50k ids: the naive sum is wrong by several times its value, and often negative."""
    rng = np.random.default_rng(5)
    teacher = (rng.normal(size=(8, 50_000)) * 2).astype(np.float32)
    student = (teacher + rng.normal(size=teacher.shape).astype(np.float32) * np.float32(scale)).astype(np.float32)
    k = 50_000 if support == "bucket" else 8
    s, t = (oracle.probabilities(x.astype(np.float64)) for x in (student, teacher))
    l = np.log(s) - np.log(t)
    expected_r = (s * l + t - s).sum(-1)
    expected_f = (t * -l + s - t).sum(-1)
    if scale == 1e-3:
        assert 3e-7 < expected_r.mean() < 6e-7
    z = torch.from_numpy(student)
    for value, expected in zip(
        both(z, torch.from_numpy(teacher), support=support, support_k=k), (expected_f, expected_r), strict=True
    ):
        assert (value >= 0).all()
        # What float32 logits allow: log s and log t are each known to about 1e-6, in common for all ids of a row.
        np.testing.assert_allclose(numbers(value), expected, rtol=2e-2, atol=2e-12)


def test_exact_agreement_is_zero_in_float32() -> None:
    teacher = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 3
    for support in VALID:
        for kl in (forward_kl, reverse_kl):
            z = teacher.clone().requires_grad_()
            value = kl(z, teacher.clone(), support=support, support_k=8)
            value.sum().backward()
            assert ((value >= 0) & (value < 1e-12)).all(), support
            assert float(z.grad.abs().max()) < 1e-7


# ---------------------------------------------------------------------------------------------- kinds of input


@pytest.mark.parametrize("support", ["bucket", "renorm", "hybrid"])
def test_a_teacher_known_by_its_top_k_equals_full_logits(support: str) -> None:
    rng = np.random.default_rng(6)
    student, teacher = rng.normal(size=(2, 3, 9)) * 1.5, rng.normal(size=(2, 3, 9)) * 1.5
    sampled = rng.integers(0, 9, size=(2, 3))
    for which, kl in enumerate((forward_kl, reverse_kl)):
        z = leaf(student)
        known = top_k_of(teacher, 4, sampled if support == "hybrid" else None)
        value = kl(z, known, support=support, support_k=4, **sampled_options(support, sampled))
        value.sum().backward()
        for bt in np.ndindex(2, 3):
            term = by_definition(student[bt], teacher[bt], support=support, k=4, y=int(sampled[bt]))[which]
            assert_close(value[bt], term.value, rtol=1e-7)
            assert_close(z.grad[bt], term.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("support", ["bucket", "renorm"])
def test_gated_kl_of_a_teacher_known_by_its_top_k(support: str) -> None:
    rng = np.random.default_rng(7)
    student, teacher = rng.normal(size=(2, 3, 9)) * 1.5, rng.normal(size=(2, 3, 9)) * 1.5
    z = leaf(student)
    out = gated_kl(z, top_k_of(teacher, 4), gate=Gate(1, 2, -1, 3), top_k=4, support=support)
    out.loss.backward()
    expected = oracle.gated(student, teacher, abcd=(1, 2, -1, 3), top_k=4, support=support)
    assert_close(out.loss, expected.loss)
    for name in ("lam", "h", "u", "gap", "forward_kl", "reverse_kl", "tail_mass"):
        assert_close(getattr(out, name), getattr(expected, name), what=name)
    assert_close(z.grad, expected.grad)


@pytest.mark.parametrize("support", ["bucket", "renorm"])
def test_the_order_in_which_the_top_k_is_sent_does_not_matter(support: str) -> None:
    rng = np.random.default_rng(11)
    student, teacher = rng.normal(size=(2, 3, 9)), rng.normal(size=(2, 3, 9))
    known = top_k_of(teacher, 4)
    shuffled = TeacherTopK(ids=known.ids[..., [2, 0, 3, 1]], log_probs=known.log_probs[..., [2, 0, 3, 1]])
    options: dict[str, Any] = {"gate": Gate(1, 2, -1, 3), "top_k": 2, "support": support}
    one, two = (gated_kl(fixed(student), sent, **options) for sent in (known, shuffled))
    for name in ("per_token", "lam", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass"):
        assert_close(getattr(two, name), getattr(one, name), what=name)


def test_renorm_of_a_top_k_teacher_at_a_temperature() -> None:
    """Renormalised log-probabilities divided by T are the softmax of logits/T on the top-K: no tail is needed."""
    rng = np.random.default_rng(12)
    student, teacher = rng.normal(size=(2, 3, 9)), rng.normal(size=(2, 3, 9))
    for which, kl in enumerate((forward_kl, reverse_kl)):
        value = kl(fixed(student), top_k_of(teacher, 4), support="renorm", support_k=4, temperature=2.0)
        expected = [
            [by_definition(student[b, t], teacher[b, t], 2.0, support="renorm", k=4)[which].value for t in range(3)]
            for b in range(2)
        ]
        assert_close(value, expected)


@pytest.mark.parametrize("excess", [1e-7, 0.0, -1e-7])
def test_a_server_whose_rounding_leaves_no_tail(excess: float) -> None:
    """Top-K probabilities that sum to 1 or a little more: still finite, never negative, and the student moves."""
    log_probs = np.log(np.array([0.7, 0.2, 0.1]) * (1 + excess))
    known = TeacherTopK(ids=torch.tensor([[[4, 1, 0]]]), log_probs=fixed(log_probs[None, None]))
    for kl in (forward_kl, reverse_kl):
        z = leaf(np.zeros((1, 1, 6)))
        value = kl(z, known, support="bucket", support_k=3)
        assert torch.isfinite(value).all()
        assert (value >= 0).all()
        value.sum().backward()
        assert torch.isfinite(z.grad).all()
        assert float(z.grad[0, 0, [2, 3, 5]].min()) > 0  # mass outside the top-K is pushed down


def test_vocab_size_is_cut_before_the_softmax() -> None:
    rng = np.random.default_rng(8)
    student, teacher = rng.normal(size=(3, 12)), rng.normal(size=(3, 10))  # padded to different lengths
    student[:, 9:], teacher[:, 9:] = 40.0, 30.0
    for support in ("full", "bucket"):
        expected = [by_definition(student[i, :9], teacher[i, :9], support=support, k=4) for i in range(3)]
        for which, kl in enumerate((forward_kl, reverse_kl)):
            z = leaf(student)
            value = kl(z, fixed(teacher), support=support, support_k=4, vocab_size=9)
            value.sum().backward()
            assert_close(value, [e[which].value for e in expected])
            assert_close(z.grad[:, :9], [e[which].grad for e in expected])
            assert (z.grad[:, 9:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_upcast(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(9)
    student, teacher = (torch.from_numpy(rng.normal(size=(4, 500)) * 4).to(dtype) for _ in range(2))
    expected = [by_definition(numbers(student[i]), numbers(teacher[i])) for i in range(4)]
    for which, kl in enumerate((forward_kl, reverse_kl)):
        z = student.clone().requires_grad_()
        value = kl(z, teacher)
        assert value.dtype == torch.float32
        assert_close(value, [e[which].value for e in expected], rtol=1e-5)
        value.sum().backward()
        assert z.grad.dtype == dtype
        assert_close(z.grad, [e[which].grad for e in expected], rtol=1e-2, atol=1e-5)


def test_the_teacher_is_a_constant() -> None:
    teacher = leaf(np.random.default_rng(10).normal(size=(2, 5)))
    for kl in (forward_kl, reverse_kl):
        kl(leaf(np.zeros((2, 5))), teacher).sum().backward()
        assert teacher.grad is None
