"""The oracle checks itself: hand-computed numbers, and analytic gradients against central differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from . import oracle

V = 6
RNG = np.random.default_rng(7)
STUDENT = RNG.normal(size=V) * 1.5
TEACHER = RNG.normal(size=V) * 1.5


def smooth(name: str, s: np.ndarray, t: np.ndarray) -> oracle.Term:
    """Divergences whose gradient is the derivative of their value."""
    return {
        "forward": lambda: oracle.forward_kl(s, t),
        "reverse": lambda: oracle.reverse_kl(s, t),
        "bucket forward": lambda: oracle.pair(s, t, "bucket", 3).forward,
        "bucket reverse": lambda: oracle.pair(s, t, "bucket", 3).reverse,
        "renorm forward": lambda: oracle.pair(s, t, "renorm", 3).forward,
        "renorm reverse": lambda: oracle.pair(s, t, "renorm", 3).reverse,
        "jsd": lambda: oracle.jsd(s, t, 0.3),
        "skl": lambda: oracle.skl(s, t, 0.1),
        "srkl": lambda: oracle.srkl(s, t, 0.1),
        "abkd": lambda: oracle.abkd(s, t, 0.2, 0.7),
    }[name]()


SMOOTH = (
    "forward",
    "reverse",
    "bucket forward",
    "bucket reverse",
    "renorm forward",
    "renorm reverse",
    "jsd",
    "skl",
    "srkl",
    "abkd",
)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", SMOOTH)
def test_analytic_gradient_is_the_derivative(name: str, temperature: float) -> None:
    t = oracle.probabilities(TEACHER, temperature)

    def value(z: np.ndarray) -> float:
        return smooth(name, oracle.probabilities(z, temperature), t).value

    analytic = smooth(name, oracle.probabilities(STUDENT, temperature), t).grad / temperature
    np.testing.assert_allclose(analytic, oracle.finite_difference(value, STUDENT), atol=1e-9)


def frozen_todi(z: np.ndarray) -> float:
    s, t, s0 = oracle.probabilities(z), oracle.probabilities(TEACHER), oracle.probabilities(STUDENT)
    alpha = t / (t + s0)
    return float((alpha * t * np.log(t / s) + (1 - alpha) * s * np.log(s / t)).sum())


def frozen_akl(z: np.ndarray) -> float:
    s, t, s0 = oracle.probabilities(z), oracle.probabilities(TEACHER), oracle.probabilities(STUDENT)
    lam = oracle.akl_weight(s0, t)
    return lam * oracle.reverse_kl(s, t).value + (1 - lam) * oracle.forward_kl(s, t).value


def frozen_srkl(z: np.ndarray) -> float:
    s, t, s0 = oracle.probabilities(z), oracle.probabilities(TEACHER), oracle.probabilities(STUDENT)
    m = 0.9 * t + 0.1 * s0
    return float((s * np.log(s / m)).sum())


@pytest.mark.parametrize(
    ("frozen", "method"),
    [
        (frozen_todi, oracle.todi),
        (frozen_akl, oracle.akl),
        (frozen_srkl, lambda s, t: oracle.srkl(s, t, 0.1, detach_mixture=True)),
    ],
    ids=["todi", "akl", "srkl detached"],
)
def test_gradient_with_a_detached_weight(
    frozen: Callable[[np.ndarray], float], method: Callable[[np.ndarray, np.ndarray], oracle.Term]
) -> None:
    term = method(oracle.probabilities(STUDENT), oracle.probabilities(TEACHER))
    assert term.value == pytest.approx(frozen(STUDENT), abs=1e-12)
    np.testing.assert_allclose(term.grad, oracle.finite_difference(frozen, STUDENT), atol=1e-9)


@pytest.mark.parametrize("name", ["student_entropy", "log_ratio", "jsd"])
def test_signal_gradient_is_the_derivative(name: str) -> None:
    signal = oracle.SIGNALS[name]
    numeric = oracle.finite_difference(lambda z: signal(z, TEACHER, 3).value, STUDENT)
    np.testing.assert_allclose(signal(STUDENT, TEACHER, 3).grad, numeric, atol=1e-9)


def test_gap_gradient_is_the_derivative() -> None:
    numeric = oracle.finite_difference(lambda z: oracle.gap(z, TEACHER).value, STUDENT)
    np.testing.assert_allclose(oracle.gap(STUDENT, TEACHER).grad, numeric, atol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gated_gradients_are_the_derivatives(temperature: float) -> None:
    student, teacher = RNG.normal(size=(2, 2, V)), RNG.normal(size=(2, 2, V))
    mask = np.array([[1, 1], [0, 1]])
    abcd = np.array([1.5, -2.0, 0.4, 3.0])
    extra = {"jsd": 2.0, "student_entropy": -1.0}

    def run(z: np.ndarray, weights: np.ndarray) -> oracle.Batch:
        return oracle.gated(
            z,
            teacher,
            abcd=weights[:4],
            extra=dict(zip(extra, weights[4:], strict=True)),
            mask=mask,
            top_k=3,
            temperature=temperature,
        )

    weights = np.append(abcd, list(extra.values()))
    out = run(student, weights)
    np.testing.assert_allclose(out.grad, oracle.finite_difference(lambda z: run(z, weights).loss, student), atol=1e-9)
    np.testing.assert_allclose(
        out.coefficient_grad, oracle.finite_difference(lambda w: run(student, w).loss, weights), atol=1e-9
    )


def test_numbers_by_hand() -> None:
    s, t = np.array([0.5, 0.5]), np.array([0.75, 0.25])
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert oracle.forward_kl(s, t).value == pytest.approx(forward)
    assert oracle.reverse_kl(s, t).value == pytest.approx(reverse)
    # A third id of probability 1/4 outside the top 2: what the tail outcome and the renormalised head are.
    s, t = np.array([0.25, 0.25, 0.5]), np.array([0.5, 0.3, 0.2])
    bucket = oracle.pair(s, t, "bucket", 2)
    assert bucket.reverse.value == pytest.approx(oracle.reverse_kl(s, t).value)  # one id in the tail: nothing is lost
    assert bucket.tail_mass == 0.5
    renorm = oracle.pair(s, t, "renorm", 2)
    assert renorm.reverse.value == pytest.approx(0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375))
    hybrid = oracle.pair(s, t, "hybrid", 2, y=2, log_mu=math.log(0.25))
    assert hybrid.reverse.value == pytest.approx(0.25 * math.log(0.5) + 0.25 * math.log(0.25 / 0.3) + 2 * math.log(2.5))
    assert oracle.akl_weight(s, t) == pytest.approx((0.05 + 0.3) / 0.6)  # 0.5 with the first id, 0.8 with the second
    assert oracle.teacher_entropy(np.log([0.4, 0.4, 0.2]), top_k=2) == pytest.approx(1.0)
    assert oracle.teacher_entropy(np.log([0.4, 0.4, 0.2]), top_k=3) == pytest.approx(
        -(0.8 * math.log(0.4) + 0.2 * math.log(0.2)) / math.log(3)
    )


def test_samples_are_rows_or_segments() -> None:
    mask = np.array([[0, 1, 1, 1], [1, 0, 0, 1]])
    segments = np.array([[0, 0, 1, 1], [5, 5, 5, 5]])
    assert oracle.samples(mask) == [[(0, 1), (0, 2), (0, 3)], [(1, 0), (1, 3)]]
    assert oracle.samples(mask, segments) == [[(0, 1)], [(0, 2), (0, 3)], [(1, 0), (1, 3)]]
