"""A head's logits, all at once: the reference that the fused path never makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gatespace.errors import UsageError
from gatespace.gating import Head
from gatespace.gating.projection import Projection, logits_buffer

from .compare import assert_close, fixed, leaf, numbers

RNG = np.random.default_rng(0)
HIDDEN, WEIGHT, BIAS = RNG.normal(size=(2, 3, 5)), RNG.normal(size=(7, 5)), RNG.normal(size=7)
KINDS: dict[str, dict[str, Any]] = {
    "weight": {},
    "bias": {"bias": BIAS},
    "scale": {"bias": BIAS, "scale": 0.25},
    "softcap": {"bias": BIAS, "scale": 2.0, "softcap": 1.5},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_definition_in_float32(kind: str, dtype: torch.dtype) -> None:
    settings = KINDS[kind]
    hidden, weight = leaf(HIDDEN, dtype), leaf(WEIGHT, dtype)
    bias = None if "bias" not in settings else leaf(settings["bias"], dtype)
    scale, softcap = settings.get("scale", 1.0), settings.get("softcap")
    z = (numbers(hidden) @ numbers(weight).T + (0.0 if bias is None else numbers(bias))) * scale
    expected = z if softcap is None else softcap * np.tanh(z / softcap)

    logits = Head(weight, bias, scale, softcap).logits(hidden)
    assert logits.dtype == torch.float32
    assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    slope = scale * (1.0 if softcap is None else 1 - np.tanh(z / softcap) ** 2)
    logits.sum().backward()
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    wanted = np.broadcast_to(slope, z.shape)
    assert_close(hidden.grad, wanted @ numbers(weight), rtol=rounding, atol=rounding)
    assert_close(weight.grad, np.einsum("btv,bth->vh", wanted, numbers(hidden)), rtol=rounding, atol=rounding)

    # slices of the vocabulary give the same, half precision included
    flat = hidden.detach().flatten(0, 1)
    projection = Projection(flat, Head(weight, bias, scale, softcap), 7)
    out = logits_buffer(flat, 6, 7, torch.float32)
    for start, stop in ((0, 4), (4, 7)):
        projection.into(out[:, start:stop], slice(None), start, stop)
    assert_close(out.reshape(2, 3, 7), expected, rtol=1e-4, atol=1e-4)


def test_what_can_be_a_head() -> None:
    layer = torch.nn.Linear(5, 7)
    head = Head.of(layer)
    assert head.weight is layer.weight
    assert head.bias is layer.bias
    assert Head.of(head) is head
    assert Head.of(fixed(WEIGHT)).bias is None
    with pytest.raises(UsageError, match="a head is a"):
        Head.of("lm_head")  # type: ignore[arg-type]
