"""Distillation over labels against the definition: every label through the whole network alone, float64 sums."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatespace.config import TrainConfig
from gatespace.errors import UsageError
from gatespace.models import Model, load_model
from gatespace.models.encode import Encoder
from gatespace.tasks import Prompt, synthetic_task
from gatespace.training.batches import Batches
from gatespace.training.setup import material
from gatespace.training.train import train
from tests.conftest import rounding

from .conftest import Listener, assert_resumes

Make = Callable[..., TrainConfig]
GATE = (1.5, -1.0, 0.3, 2.5)


def by_hand(model: Model, texts: list[str], prompt: Prompt) -> Tensor:
    """(B, L) log-probabilities of the labels' whole responses, each by a pass of its own."""
    size, rows = len(model.tokenizer), []
    for text in texts:
        before = prompt.render(model.tokenizer, text)
        found = []
        for label in prompt.labels:
            ids = model.tokenizer.encode(prompt.gold_response(label), add_special_tokens=False)
            logits = model.network(input_ids=torch.tensor([before + ids])).logits[0, :, :size].double()
            log_probs = logits.log_softmax(-1)[len(before) - 1 : -1]
            found.append(log_probs.gather(1, torch.tensor(ids)[:, None]).sum())
        rows.append(torch.stack(found))
    return torch.stack(rows)


def definition(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean of λR + (1-λ)F over texts; a text has one position, so u = h."""
    a, b, c, d = GATE
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    h = -(t.exp() * t).sum(-1) / math.log(t.shape[-1])
    gap = 1 - s.exp().gather(1, t.argmax(-1, keepdim=True))[:, 0]
    lam = torch.sigmoid(a * h + b * h + c + d * gap)
    reverse, forward = (s.exp() * (s - t)).sum(-1), (t.exp() * (t - s)).sum(-1)
    return (lam * reverse + (1 - lam) * forward).mean()


@pytest.mark.parametrize("other_tokens", [False, True], ids=["same tokens", "other tokens"])
def test_loss_and_gradient_are_those_of_the_definition(
    other_tokens: bool, train_config: Make, student: Model, request: pytest.FixtureRequest
) -> None:
    settings = {"pair": {"teacher": str(request.getfixturevalue("short_smollm2"))}} if other_tokens else {}
    config = train_config(
        steps=1, objective={"gate": list(GATE), "support": "labels"}, engine={"micro_tokens": 60}, **settings
    )
    listener = Listener()
    train(config, listener)
    assert any("different tokens" in note for note in listener.notes) == other_tokens
    record = json.loads((config.output / "metrics.jsonl").read_text())
    teacher = load_model(config.pair.teacher)
    data = material(config.task, "distill")
    encoder = Encoder(data.prompt, student.tokenizer, [row.text for row in data.rows])
    rows = Batches(data.rows, encoder, batch_size=config.batch_size, seed=config.seed).at(0)
    texts = [row.example.text for row in rows]
    with torch.no_grad():
        theirs = by_hand(teacher, texts, data.prompt)
    loss = definition(by_hand(student, texts, data.prompt), theirs)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in student.network.parameters() if p.grad is not None]).norm()
    allowed = 100 * rounding(student)  # a log-probability is a difference of larger numbers
    assert record["loss"] == pytest.approx(float(loss.detach()), rel=allowed)
    assert record["grad_norm"] == pytest.approx(float(norm), rel=allowed)
    assert record["tokens"] == config.batch_size
    assert record["h"] == record["u"]


def test_single_texts_are_recorded_by_label(train_config: Make) -> None:
    config = train_config(steps=1, objective={"gate": "H1", "support": "labels"})
    train(config)
    labels = set(synthetic_task().labels)
    for line in (config.output / "tokens.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert len(record["tokens"]) == 1
        assert record["tokens"][0] == record["label"]
        assert {name for name, _ in record["teacher_top"][0]} == labels
        assert sum(share for _, share in record["teacher_top"][0]) == pytest.approx(1, abs=1e-4)


def test_a_pair_of_different_tokens_needs_labels(train_config: Make, short_smollm2: Path) -> None:
    with pytest.raises(UsageError, match="do not have the same vocabulary") as error:
        train(train_config(steps=1, pair={"teacher": str(short_smollm2)}))
    assert "objective.support: labels" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"rollout": {"per_prompt": 4}}, "rollout.per_prompt"),
        ({"rollout": {"from": {"gold": 1.0}}}, "rollout.from"),
        ({"teacher": {"payload": "top_k"}}, "teacher.payload"),
    ],
)
def test_what_has_no_meaning_is_refused(settings: dict[str, dict[str, object]], where: str, train_config: Make) -> None:
    with pytest.raises(UsageError, match=where.replace(".", r"\.")):
        train_config(objective={"gate": "G5", "support": "labels"}, **settings)


def test_a_run_resumes_to_the_same_bytes(train_config: Make, tmp_path: Path) -> None:
    settings = {"steps": 4, "objective": {"gate": "H1", "support": "labels"}}
    assert_resumes(*(train_config(**settings, output=str(tmp_path / name)) for name in ("straight", "killed")), 3)
