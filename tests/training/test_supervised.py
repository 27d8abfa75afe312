"""Fine-tuning on gold responses against the network's own loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.config import OptimizerConfig, parse_config
from gatespace.errors import RunError
from gatespace.models import Model
from gatespace.models.body import body_of
from gatespace.models.encode import Encoder
from gatespace.tasks import Prompt, Task
from gatespace.training.batches import Batches, Row
from gatespace.training.clock import Clock
from gatespace.training.optimizer import Optimizer, Update
from gatespace.training.supervised import GoldResponses, supervised_loss

Step = Callable[..., tuple["Learned", dict[str, Tensor], list[Row]]]


@dataclass(frozen=True)
class Learned:
    """What a step saw."""

    update: Update
    loss: float
    tokens: int
    right: int


LONGEST = 8
"""Tokens: no right answer of the synthetic task is longer."""


def learn(
    model: Model, encoder: Encoder, batches: Batches, optimizer: Optimizer, *, micro_tokens: int = 10**9, **options: Any
) -> Learned:
    """One step."""
    body, total, tokens, right = body_of(model, **options), 0.0, 0, 0
    for part in GoldResponses(encoder, batches, model.turn_end, LONGEST, micro_tokens)(0, Clock()).parts:
        out = supervised_loss(body, part)
        out.loss.backward()
        total, tokens, right = total + float(out.loss.detach()), tokens + out.tokens, right + out.right
    return Learned(optimizer.step(0, tokens), total / tokens, tokens, right)


@pytest.fixture
def step(student: Model, synthetic: Task) -> Step:
    """One step whose update is far below rounding, and the gradient that it had."""

    def run(
        *, rows: int = 6, micro_tokens: int = 10**9, share: bool = True, packed: bool | None = None
    ) -> tuple[Learned, dict[str, Tensor], list[Row]]:
        examples = synthetic.train[:20]
        texts = [row.text for row in examples]
        encoder = Encoder(Prompt.of(synthetic, brief=True), student.tokenizer, texts, share=share)
        config = parse_config(OptimizerConfig, {"lr": 1e-30, "betas": [0.0, 0.999], "clip": None})
        optimizer = Optimizer(student.network, config, steps=1, dtype=torch.float32)
        batches = Batches(examples, encoder, batch_size=rows, seed=0)
        batch = batches.at(0)
        learned = learn(student, encoder, batches, optimizer, micro_tokens=micro_tokens, packed=packed)
        state = optimizer.tensors()
        return learned, {n[len("exp_avg/") :]: t for n, t in state.items() if n.startswith("exp_avg/")}, batch

    return run


def plain(model: Model, task: Task, rows: list[Row]) -> tuple[float, float, int, dict[str, Tensor]]:
    """Mean loss by transformers' own shift of the labels, the share of tokens it would have written, their number."""
    prompt = Prompt.of(task, brief=True)
    tokenizer: Any = model.tokenizer
    asked = [prompt.render(tokenizer, row.example.text) for row in rows]
    said = [tokenizer.encode(f'{row.example.label}"}}<|im_end|>', add_special_tokens=False) for row in rows]
    width = max(len(a) + len(b) for a, b in zip(asked, said, strict=True))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, (a, b) in enumerate(zip(asked, said, strict=True)):
        ids[i, : len(a) + len(b)] = torch.tensor(a + b)
        labels[i, len(a) : len(a) + len(b)] = torch.tensor(b)
    # Rows of the head beyond the tokenizer's ids are no tokens; there they take part in no softmax.
    network: Any = model.network
    network.zero_grad()
    logits = network(input_ids=ids).logits[..., : model.vocab_size]
    loss = network.loss_function(logits=logits, labels=labels, vocab_size=model.vocab_size)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    hits = (logits[:, :-1].argmax(-1) == labels[:, 1:]).sum()
    return float(loss.detach()), int(hits), sum(map(len, said)), gradients


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 2e-5 * float(gradient.norm()) + 1e-8, name


def test_loss_and_gradient_are_those_of_the_network_itself(step: Step, student: Model, synthetic: Task) -> None:
    learned, gradients, rows = step()
    loss, right, tokens, expected = plain(student, synthetic, rows)
    assert learned.loss == pytest.approx(loss, rel=1e-5)
    assert (learned.right, learned.tokens) == (right, tokens)
    assert_same(gradients, expected)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert learned.update.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("way", [{"micro_tokens": 1}, {"micro_tokens": 110}, {"share": False}, {"packed": False}])
def test_the_way_of_computing_does_not_matter(step: Step, way: dict[str, Any]) -> None:
    learned, gradients, _ = step(rows=5)
    other, others, _ = step(rows=5, **way)
    assert other.loss == pytest.approx(learned.loss, rel=1e-5)
    assert (other.right, other.tokens) == (learned.right, learned.tokens)
    assert_same(others, gradients)


def test_right_tokens_are_counted(teacher: Model, synthetic: Task) -> None:
    """A model that has learned the task writes most of the tokens itself."""
    encoder = Encoder(Prompt.of(synthetic, brief=True), teacher.tokenizer, [row.text for row in synthetic.val[:30]])
    config = parse_config(OptimizerConfig, {"lr": 1e-30})
    optimizer = Optimizer(teacher.network, config, steps=1, dtype=torch.float32)
    batches = Batches(synthetic.val[:30], encoder, batch_size=30, seed=0)
    rows = batches.at(0)
    learned = learn(teacher, encoder, batches, optimizer)
    assert 0.75 < learned.right / learned.tokens < 1
    assert plain(teacher, synthetic, rows)[1] == learned.right


def test_a_loss_that_is_not_finite_stops(step: Step, student: Model) -> None:
    with torch.no_grad():
        student.network.model.norm.weight[2] = math.nan
    with pytest.raises(RunError, match="the loss is not finite"):
        step()
