"""Probabilities of labels against each label alone through the network, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.log_probs import token_log_probs
from gatespace.gating.projection import Head
from gatespace.models import Model, load_model
from gatespace.models.encode import Encoder
from gatespace.models.packed import PackedBody
from gatespace.models.plain import PlainBody
from gatespace.rollout.labels import label_log_probs, label_responses
from gatespace.tasks import Prompt, Task
from gatespace.tasks.tweeteval import load_tweeteval
from tests.models.architectures import distance, made, some_ids, some_rows

PREFIX = some_ids(11, seed=1)
PROMPTS = some_rows((7, 30, 1), seed=2)
LABELS = [[5, 6, 7], [5, 6, 8, 9], [9], [4, 6, 7], [5, 3]]


def one_by_one(model: Model, prompts: list[list[int]], labels: list[list[int]]) -> Tensor:
    """The network's own logits over prompt and label, once for every pair."""
    found = []
    for prompt in prompts:
        for label in labels:
            logits = model.network(input_ids=torch.tensor([[*prompt, *label]])).logits[0, :, : model.vocab_size]
            log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            found.append(log_probs.gather(1, torch.tensor(label)[:, None]).sum())
    return torch.stack(found).view(len(prompts), len(labels))


def gradients(model: Model, log_probs: Tensor) -> dict[str, Tensor]:
    """Of a sum with different weights, the last label left out: it gets no gradient."""
    weights = torch.linspace(-1, 2, log_probs.numel(), dtype=log_probs.dtype).view_as(log_probs).clone()
    weights[:, -1] = 0
    model.network.zero_grad()
    (weights * log_probs).sum().backward()
    return {name: p.grad.clone() for name, p in model.network.named_parameters() if p.grad is not None}


def with_forward(body: Any, vocab_size: int) -> Tensor:
    forward = body.forward(PROMPTS, prefix=PREFIX)
    return label_log_probs(body, PROMPTS, LABELS, vocab_size=vocab_size, forward=forward)


def at_once(body: Any, vocab_size: int) -> Tensor:
    return label_log_probs(body, PROMPTS, LABELS, prefix=PREFIX, vocab_size=vocab_size)


@pytest.mark.parametrize("way", [at_once, with_forward], ids=lambda way: way.__name__)
@pytest.mark.parametrize("body", [PackedBody, PlainBody])
def test_each_label_is_as_alone(
    body: Any, way: Callable[..., Tensor], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatespace.gating.log_probs.TILE", 64 * 40)  # several slices of the vocabulary
    other = made(model.tokenizer, "Starcoder2", dtype=torch.float64)
    expected = one_by_one(other, [[*PREFIX, *prompt] for prompt in PROMPTS], LABELS)
    right = gradients(other, expected)
    found = way(body(other), other.vocab_size)
    assert found.shape == (3, 5)
    assert distance(found, expected) < 1e-13
    own = gradients(other, found)
    assert own.keys() == right.keys()
    for name, gradient in right.items():
        assert distance(own[name], gradient) < 1e-12, name
    assert other.vocab_size < len(other.head.weight)


def test_tokens_of_a_head_with_all_it_may_have() -> None:
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, generator=draw).requires_grad_() for n in (5, 200))
    bias = torch.randn(200, dtype=torch.float64, generator=draw).requires_grad_()
    head = Head(weight, bias, scale=0.7, softcap=3.0)
    rows, ids = torch.tensor([0, 0, 4, 2, 0, 3]), torch.tensor([7, 7, 189, 0, 64, 65])

    def plain() -> Tensor:
        logits = torch.tanh(0.7 * (hidden @ weight.T + bias) / 3) * 3
        return logits[:, :190].log_softmax(-1)[rows, ids]

    def found() -> Tensor:
        return token_log_probs(hidden, head, rows, ids, 190)

    factors = torch.linspace(-1, 2, 6, dtype=torch.float64)
    assert distance(found(), plain()) < 1e-14
    leaves = (hidden, weight, bias)
    for own, right in zip(
        *(torch.autograd.grad((factors * way()).sum(), leaves) for way in (found, plain)), strict=True
    ):
        assert distance(own, right) < 1e-14
    # A frozen head: only the hidden states learn.
    frozen = replace(head, weight=weight.detach(), bias=bias.detach())
    (own,) = torch.autograd.grad((factors * token_log_probs(hidden, frozen, rows, ids, 190)).sum(), hidden)
    assert distance(own, torch.autograd.grad((factors * plain()).sum(), hidden)[0]) < 1e-14


def test_half_precision_is_rounded_once() -> None:
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 16, generator=draw).bfloat16() for n in (40, 300))
    rows, ids = torch.arange(40), torch.arange(40) * 7
    leaf, head = weight.clone().requires_grad_(), weight.double().requires_grad_()
    found = token_log_probs(hidden, Head(leaf), rows, ids, 300)
    expected = (hidden.double() @ head.T).log_softmax(-1)[rows, ids]
    assert found.dtype == torch.float32
    assert float((found.double() - expected).detach().abs().max()) < 1e-4  # not the tenth of a nat of bfloat16 logits
    own, right = torch.autograd.grad(found.sum(), leaf)[0], torch.autograd.grad(expected.sum(), head)[0]
    assert own.dtype == torch.bfloat16
    assert distance(own, right) < 2**-7


def test_labels_of_the_real_architecture(short_smollm2: Path, tweeteval: Path) -> None:
    task = load_tweeteval("emotion", tweeteval)
    model = load_model(str(short_smollm2))
    texts = [row.text for row in task.test[:2]]
    encoder = Encoder(Prompt.of(task), model.tokenizer, texts)
    labels, prompts = label_responses(encoder), [encoder.suffix(text) for text in texts]
    found = {}
    with torch.no_grad():
        for kind in (PackedBody, PlainBody):
            body: Any = kind(model)
            prefix = body.prefix_cache(encoder.prefix)
            found[kind] = label_log_probs(body, prompts, labels, prefix=prefix, vocab_size=model.vocab_size)
        model.network.double()
        expected = one_by_one(model, [[*encoder.prefix, *prompt] for prompt in prompts], labels)
    for log_probs in found.values():
        assert log_probs.dtype == torch.float32
        assert distance(log_probs, expected) < 1e-6
        assert bool((log_probs.exp().sum(1) <= 1).all())


def test_labels_are_whole_responses(model: Model, task: Task) -> None:
    texts = [row.text for row in task.test[:40]]
    encoder = Encoder(Prompt.of(task, brief=True), model.tokenizer, texts)
    labels = label_responses(encoder)
    for label, ids in zip(task.labels, labels, strict=True):
        # sampling would end here, and not before
        assert encoder.closed(ids)
        assert not encoder.closed(ids[:-1])
        assert encoder.prompt.parse(encoder.decode(ids)) == label
    assert label_responses(encoder, 3) == [[*ids, 3] for ids in labels]
    with torch.no_grad():
        log_probs = label_log_probs(
            PackedBody(model),
            [encoder.suffix(text) for text in texts],
            labels,
            prefix=encoder.prefix,
            vocab_size=model.vocab_size,
        )
    total = log_probs.exp().sum(1)
    assert bool((total <= 1).all())
    assert bool((total > 0).all())


def test_all_short_responses_have_all_of_the_mass(model: Model) -> None:
    """Every token but one ends a response, and after that one every token does: there is no other response."""
    size = 200
    labels = [[3, token] for token in range(size)] + [[token] for token in range(size) if token != 3]
    with torch.no_grad():
        log_probs = label_log_probs(PackedBody(model), [[5, 6, 7], [8]], labels, vocab_size=size)
    assert torch.allclose(log_probs.double().exp().sum(1), torch.ones(2, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "at least one token"),
        ([[3], []], "at least one token"),
        ([[3], [3, 4]], "beginning of another"),
        ([[3, 4], [3, 4]], "beginning of another"),
    ],
)
def test_labels_that_do_not_exclude_each_other(labels: list[list[int]], message: str, model: Model) -> None:
    with pytest.raises(UsageError, match=message):
        label_log_probs(PackedBody(model), [[5]], labels, vocab_size=100)
