"""λ permuted over tokens: all of the gate's values, as constants, on both paths and every support."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gatespace import Gate
from gatespace.errors import UsageError
from gatespace.gating import (
    Gated,
    LossInputs,
    Objective,
    TeacherTopK,
    ToDi,
    distillation_loss,
    fused_distillation_loss,
    fused_gated_kl,
    gated_kl,
)

from . import oracle
from .compare import assert_close, fixed, leaf, numbers, top_k_of
from .test_fused import SUPPORTS, TINY, Inputs, inputs, needs

GATE = Gate(3, -2, -1.5, 2)


def order_of(count: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(count)
    assert (order != np.arange(count)).any()
    return order


def by_hand(x: Inputs, order: np.ndarray, support: str = "full", temperature: float = 1.0, **options: Any) -> Any:
    """(per_token, λ, gradient at the student's logits), each (B, T, …), from the oracle's single divergences."""
    student, teacher = x.hidden @ x.weight.T, x.teacher_hidden @ x.teacher_weight.T
    given = {"mask": x.mask, "support": support, "temperature": temperature, **options}
    if support == "hybrid":
        given["sampled"] = x.sampled
    own = oracle.gated(student, teacher, abcd=GATE.abcd, **given)
    places = list(zip(*np.nonzero(x.mask), strict=True))
    lam = np.zeros(x.mask.shape)
    per_token, grad = np.zeros(x.mask.shape), np.zeros(student.shape)
    for place, source in zip(places, order, strict=True):
        y = int(x.sampled[place]) if support == "hybrid" else None
        forward, reverse, _ = oracle.pair(
            oracle.probabilities(student[place], temperature),
            oracle.probabilities(teacher[place], temperature),
            support,
            8,
            y,
            None if y is None else oracle.sampler(student[place], y, None, place),
        )
        lam[place] = one = own.lam[places[source]]
        per_token[place] = one * reverse.value + (1 - one) * forward.value
        grad[place] = (one * reverse.grad + (1 - one) * forward.grad) / temperature / len(places)
    return per_token, lam, grad


def both(x: Inputs, objective: Objective, order: np.ndarray | None, *, top_k: bool = False, **options: Any) -> Any:
    """(output, gradient at hidden states, gradient at the head) of the plain path, and of the fused in small chunks."""
    teacher_logits = x.teacher_hidden @ x.teacher_weight.T
    payload: TeacherTopK | None = top_k_of(teacher_logits, 12, x.sampled) if top_k else None
    options |= {"mask": torch.as_tensor(x.mask), "lam_order": None if order is None else torch.as_tensor(order)}
    found = []
    for chunk_mb, recompute in ((None, None), (TINY, False), (TINY, True), (60, False)):
        hidden, weight = leaf(x.hidden), leaf(x.weight)
        if chunk_mb is None:
            teacher = fixed(teacher_logits) if payload is None else payload
            out = distillation_loss(hidden @ weight.T, teacher, objective=objective, inputs=LossInputs(**options))
        else:
            out = fused_distillation_loss(
                hidden,
                weight,
                fixed(x.teacher_hidden) if payload is None else payload,
                fixed(x.teacher_weight) if payload is None else None,
                objective=objective,
                inputs=LossInputs(**options),
                chunk_mb=chunk_mb,
                recompute=recompute,
            )
        out.loss.backward()
        found.append((out, hidden.grad, weight.grad))
    return found


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradient_are_those_of_the_constants(support: str, temperature: float) -> None:
    x = inputs(3)
    order = order_of(int(x.mask.sum()))
    per_token, lam, grad = by_hand(x, order, support, temperature)
    objective = Gated(GATE, support, 8)
    for out, hidden, weight in both(x, objective, order, temperature=temperature, **needs(support, x)):
        assert_close(out.lam, lam, what="lam")
        assert_close(out.per_token, per_token, what="per_token")
        assert_close(out.loss, per_token.sum() / x.mask.sum(), what="loss")
        assert_close(hidden, grad @ x.weight, what="hidden")
        assert_close(weight, np.einsum("btv,bth->vh", grad, x.hidden), what="weight")


@pytest.mark.parametrize("support", ["bucket", "hybrid", "renorm"])
def test_a_teacher_known_by_its_top_k(support: str) -> None:
    x = inputs(4)
    order = order_of(int(x.mask.sum()))
    plain, *fused = both(x, Gated(GATE, support, 8), order, top_k=True, **needs(support, x))
    own, *_ = both(x, Gated(GATE, support, 8), None, top_k=True, **needs(support, x))
    keep = x.mask != 0
    np.testing.assert_array_equal(numbers(plain[0].lam)[keep], numbers(own[0].lam)[keep][order])
    expected = plain[0].lam * plain[0].reverse_kl + (1 - plain[0].lam) * plain[0].forward_kl
    assert_close(plain[0].per_token, expected)
    for out, hidden, weight in fused:
        assert_close(out.loss, plain[0].loss)
        assert_close(out.lam, plain[0].lam)
        assert_close(hidden, plain[1])
        assert_close(weight, plain[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_the_gate_s_to_the_bit_and_all_else_is_the_token_s_own(dtype: torch.dtype) -> None:
    x = inputs(5, b=3, t=9)
    order = order_of(int(x.mask.sum()))
    tensors = [fixed(value, dtype) for value in (x.hidden, x.weight, x.teacher_hidden, x.teacher_weight)]
    mask = torch.as_tensor(x.mask)
    permuted = fused_gated_kl(*tensors, gate=GATE, mask=mask, lam_order=torch.as_tensor(order), chunk_mb=TINY)
    own = fused_gated_kl(*tensors, gate=GATE, mask=mask, chunk_mb=TINY)
    keep = mask.bool()
    assert own.lam is not None
    assert permuted.lam is not None
    assert torch.equal(permuted.lam[keep], own.lam[keep][order])
    assert sorted(permuted.lam[keep].tolist()) == sorted(own.lam[keep].tolist())
    assert permuted.lam[keep].std() > 0.05
    assert not torch.equal(permuted.lam, own.lam)
    assert not permuted.lam[~keep].any()
    for name in ("h", "u", "gap", "forward_kl", "reverse_kl", "weight", "tail_mass"):
        assert torch.equal(getattr(permuted, name), getattr(own, name)), name


def test_in_its_own_order_it_is_the_gate_without_gradient_through_it() -> None:
    x = inputs(6)
    same = np.arange(int(x.mask.sum()))
    stopped = both(x, Gated(GATE, stop_gradient=True), None)
    through = both(x, Gated(GATE), None)
    for i, (out, hidden, weight) in enumerate(both(x, Gated(GATE), same)):
        assert_close(out.loss, stopped[i][0].loss)
        assert_close(hidden, stopped[i][1])
        assert_close(weight, stopped[i][2])
        assert np.abs(numbers(hidden - through[i][1])).max() > 1e-4  # the comparison can fail


def test_an_empty_mask() -> None:
    x = inputs(7)
    x.mask[:] = 0
    for out, hidden, _ in both(x, Gated(GATE), np.arange(0)):
        assert (out.tokens, float(out.loss.detach())) == (0, 0.0)
        assert not hidden.any()


@pytest.mark.parametrize(
    "order",
    [
        torch.arange(5),
        torch.zeros(6, dtype=torch.long),
        torch.arange(6) + 1,
        torch.arange(6).reshape(2, 3),
        torch.arange(6.0),
        torch.ones(6, dtype=torch.bool),
    ],
)
def test_what_is_no_permutation_is_refused(order: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="lam_order must be a permutation of the masked tokens"):
        gated_kl(torch.zeros(2, 3, 9), torch.zeros(2, 3, 9), gate=GATE, lam_order=order)


def test_there_must_be_a_lam_and_nothing_that_learns_from_it() -> None:
    x, order = inputs(8), order_of(8)
    student, teacher = fixed(x.hidden @ x.weight.T), fixed(x.teacher_hidden @ x.teacher_weight.T)
    given = LossInputs(mask=torch.as_tensor(x.mask), lam_order=torch.as_tensor(order))
    heads = [fixed(value) for value in (x.hidden, x.weight, x.teacher_hidden, x.teacher_weight)]
    learning = Gated(GATE, coefficients=leaf(GATE.abcd))
    for objective, message in ((ToDi(), "'todi' mixes nothing"), (learning, "nothing to learn")):
        with pytest.raises(UsageError, match=message):
            distillation_loss(student, teacher, objective=objective, inputs=given)
        with pytest.raises(UsageError, match=message):
            fused_distillation_loss(*heads, objective=objective, inputs=given)
    assert gated_kl(student, teacher, gate=GATE, coefficients=leaf(GATE.abcd)).loss.requires_grad
