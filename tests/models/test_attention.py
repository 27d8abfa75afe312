"""Attention in all its ways against softmax(capped logits + mask)·values in float64, by plain autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gatespace.models.attention import Rule, attention, mask_of

LENGTH, KEYS = 37, 50  # 13 keys before the first query


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def inputs(rows: int) -> list[Tensor]:
    """Grouped queries, and values narrower than keys; logits that a soft cap of 2 bends."""
    return [drawn(rows, 6, LENGTH, 8, seed=1), drawn(rows, 2, KEYS, 8, seed=2), drawn(rows, 2, KEYS, 5, seed=3)]


def visible(window: int | None) -> Tensor:
    """(S, K) in the order of positions."""
    distance = torch.arange(KEYS - LENGTH, KEYS)[:, None] - torch.arange(KEYS)
    return (distance >= 0) & (distance < (window or KEYS))


def expected(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, rule: Rule) -> Tensor:
    key, value = (side.repeat_interleave(3, 1) for side in (key, value))
    logits = torch.einsum("bhsd,bhkd->bhsk", query, key) * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    return torch.einsum("bhsk,bhkd->bhsd", logits.masked_fill(~seen, -math.inf).softmax(-1), value)


def compare(rows: int, seen: Tensor, mask: Tensor | None, rule: Rule) -> None:
    weights = drawn(rows, 6, LENGTH, 5, seed=4).detach()
    right, found = inputs(rows), inputs(rows)
    outputs = expected(*right, seen, rule), attention(*found, mask, rule)
    for output in outputs:
        (output * weights).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-13)
    for mine, other in zip(found, right, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("long", [60, 700, LENGTH * KEYS], ids="weights below {}".format)
@pytest.mark.parametrize("window", [None, 1, 7, 40, KEYS])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_of_one_shape(
    softcap: float | None, window: int | None, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatespace.models.attention.LONG", long)
    monkeypatch.setattr("gatespace.models.attention._LEAST", 4)
    seen, rule = visible(window), Rule(0.7, softcap, window)
    compare(3, seen, None, rule)
    compare(3, seen, mask_of(seen[None], torch.float64), rule)


@pytest.mark.parametrize("long", [700, LENGTH * KEYS])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_row_has_a_mask_of_its_own(softcap: float | None, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatespace.models.attention.LONG", long)
    seen = torch.stack([visible(3), visible(None).flip(1), visible(20)])
    compare(3, seen[:, None], mask_of(seen, torch.float64), Rule(0.7, softcap))


@pytest.mark.parametrize("rule", [Rule(0.7, 2.0), Rule(0.7, None, 7)], ids=["cap", "window"])
def test_long_rows_keep_no_weights_and_do_not_depend_on_each_other(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatespace.models.attention.LONG", 400)
    monkeypatch.setattr("gatespace.models.attention._LEAST", 4)
    query, key, value = inputs(3)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = attention(query, key, value, None, rule)
    given = sum(tensor.nbytes for tensor in (query, key, value))
    # and a small mask for each row
    assert given <= sum(storage.nbytes() for storage in kept.values()) < given + 3 * 8 * 400 * 2
    alone = attention(query[1:2], key[1:2], value[1:2], None, rule)
    assert alone.equal(output[1:2])
