"""Tokens that count several times, or by a fraction: both paths against the oracle, and against repeated tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gatespace import Gate, fused_gated_kl
from gatespace.errors import UsageError
from gatespace.gating import Gated, ToDi

from . import oracle
from .compare import assert_close, fixed, numbers
from .test_fused import SUPPORTS, TINY, Inputs, inputs, needs
from .test_lam_order import both

GATE = Gate(3, -2, -1.5, 2)


def weights_of(x: Inputs, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 3, size=x.mask.shape)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("total", [None, 7.5])
def test_value_and_gradient_are_the_token_s_own_times_its_weight(support: str, total: float | None) -> None:
    x = inputs(3)
    weights = weights_of(x)
    student, teacher = x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T
    sampled = {"sampled": x.sampled} if support == "hybrid" else {}
    own = oracle.gated(
        student, teacher, abcd=GATE.abcd, mask=x.mask, support=support, support_k=8, total_tokens=1.0, **sampled
    )
    counted = (weights * x.mask).sum()
    by = counted if total is None else total
    grad = own.grad * weights[..., None] / by
    options: dict[str, Any] = {"weights": torch.as_tensor(weights), "total_tokens": total, **needs(support, x)}
    for out, hidden, weight in both(x, Gated(GATE, support, 8), None, **options):
        assert_close(out.loss, (weights * own.per_token).sum() / by)
        assert_close(out.tokens, counted)
        for name in ("per_token", "lam", "u", "reverse_kl"):
            assert_close(getattr(out, name), getattr(own, name), what=name)
        assert_close(hidden, grad @ x.weight, what="hidden")
        assert_close(weight, np.einsum("btv,bth->vh", grad, x.hidden), what="weight")


@pytest.mark.parametrize("objective", [Gated(GATE), ToDi()])
def test_a_weight_of_two_is_the_token_twice(objective: Any) -> None:
    x = inputs(4, b=3)
    twice = Inputs(*(np.concatenate([a, a[1:2]]) if a.shape[:1] == (3,) else a for a in vars(x).values()))
    weights = torch.ones(x.mask.shape, dtype=torch.float64)
    weights[1] = 2
    for (one, *grads), (repeated, *expected) in zip(
        both(x, objective, None, weights=weights), both(twice, objective, None), strict=True
    ):
        assert_close(one.loss, repeated.loss)
        assert one.tokens == repeated.tokens
        grads[0][1] /= 2  # which the repeated token's two rows have a half of each
        assert_close(grads[0], expected[0][:3])
        assert_close(grads[1], expected[1])


def test_no_weights_have_the_bits_of_weights_of_one() -> None:
    x = inputs(5, b=3, t=9)
    tensors = [fixed(value, torch.float32) for value in (x.hidden, x.weight, x.teacher_hidden, x.teacher_weight)]
    mask = torch.as_tensor(x.mask)
    found = []
    for weights in (None, torch.ones(mask.shape)):
        hidden = tensors[0].clone().requires_grad_()
        out = fused_gated_kl(hidden, *tensors[1:], gate=GATE, mask=mask, weights=weights, chunk_mb=TINY)
        out.loss.backward()
        found.append((out.loss.detach(), hidden.grad, out.tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2] == int(x.mask.sum())
    assert isinstance(found[0][2], int)


def test_a_token_of_weight_zero_is_left_out_of_the_loss_but_not_of_its_response() -> None:
    x = inputs(6, b=3, t=9)
    weights = weights_of(x)
    weights[0, 1:4] = weights[1, :5] = weights[2, 3] = 0  # first tokens of their responses, too
    gate = Gate(3, -2, -1.5, 2, extra={"position": 1.5})
    student, teacher = x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T
    own = oracle.gated(student, teacher, abcd=gate.abcd, extra=gate.extra, mask=x.mask, total_tokens=1.0)
    kept = weights * x.mask > 0
    close = {"rtol": 1e-5, "atol": 1e-7}  # the position is a quotient in float32
    grad = own.grad * (weights / (weights * x.mask).sum())[..., None]
    for out, hidden, weight in both(x, Gated(gate), None, weights=torch.as_tensor(weights)):
        assert_close(out.loss, (weights * own.per_token).sum() / (weights * x.mask).sum(), **close)
        for name in ("lam", "u", "per_token"):
            assert_close(numbers(getattr(out, name))[kept], getattr(own, name)[kept], what=name, **close)
        assert_close(hidden, grad @ x.weight, what="hidden", **close)
        assert_close(weight, np.einsum("btv,bth->vh", grad, x.hidden), what="weight", **close)
        # what is left out is not computed, but for the first of a response
        assert int((out.per_token != 0).sum()) == int(kept.sum()) + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": torch.ones(2, 3)}, r"weights must have the shape \(B, T\)"),
        ({"weights": torch.full((2, 5), -1.0)}, "weights must be finite and not negative"),
        ({"weights": torch.full((2, 5), torch.nan)}, "weights must be finite and not negative"),
        ({"weights": torch.ones(2, 5), "lam_order": torch.arange(8)}, "lam_order and weights exclude each other"),
    ],
)
def test_weights_that_are_none(options: dict[str, Any], message: str) -> None:
    x = inputs(7)
    tensors = [fixed(value) for value in (x.hidden, x.weight, x.teacher_hidden, x.teacher_weight)]
    with pytest.raises(UsageError, match=message):
        fused_gated_kl(*tensors, gate=GATE, mask=torch.as_tensor(x.mask), **options)
