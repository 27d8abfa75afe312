"""Expected rollouts in training: a step against all responses there are, and whole runs."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.config import TrainConfig
from gatespace.errors import UsageError
from gatespace.files import read
from gatespace.models import Model
from gatespace.tasks import Task
from gatespace.training.train import train

from .conftest import Lab, Stepped
from .test_distill import WITH_GAP, assert_same_gradient, gated, logits_of
from .test_resume import assert_same_numbers
from .test_rollouts import Stop
from .test_share_prompt import perturbed, rows_of
from .test_train import Listener

Make = Callable[..., TrainConfig]
WHOLE = {"mass": 1.0, "max_nodes": 1000}
TOP: dict[str, Any] = {"gate": list(WITH_GAP), "top_k": 4}


def double(lab: Lab) -> Model:
    student = Model(copy.deepcopy(lab.student.network).double(), lab.student.tokenizer, "double", "")
    student.network.zero_grad()
    return student


@pytest.fixture
def skilled(taught: Path, teacher: Model, synthetic: Task) -> Lab:
    """A student that answers in the right form, and knows several answers."""
    return Lab(perturbed(str(taught / "model"), 0.5), teacher, synthetic, synthetic.train[:40], brief=True)


# ---------------------------------------------------------------------------------------------------- a step


def test_the_gradient_is_the_mean_over_all_responses(lab: Lab) -> None:
    """With a vocabulary of five and three tokens every response is written out, and weighed by its probability."""
    lab.vocab_size, longest = 5, 3
    ends = set(lab.student.end_ids)
    assert ends & set(range(lab.vocab_size))  # so that some responses are shorter
    stepped = lab.step(rows=3, objective=TOP, rollout={"max_new_tokens": longest, "expected": WHOLE})

    student, loss = double(lab), gated(WITH_GAP, top_k=4)
    every = list(
        dict.fromkeys(
            ids[: next((n + 1 for n, token in enumerate(ids) if token in ends), longest)]
            for ids in itertools.product(range(lab.vocab_size), repeat=longest)
        )
    )
    responses = [list(ids) for ids in every]
    total, tokens = torch.zeros(()), 0.0
    for row in {row.index: row for row in stepped.rows}.values():
        prompts = [lab.prompt.render(student.tokenizer, row.example.text)] * len(responses)
        with torch.no_grad():
            teacher = logits_of(lab.teacher, prompts, responses, lab.vocab_size)
        own = logits_of(student, prompts, responses, lab.vocab_size)
        for z, w, ids in zip(own, teacher, responses, strict=True):
            probability = math.exp(z.detach().log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum())
            total = total + probability * loss([z], [w], [ids])
            tokens += probability * len(ids)
    (total / tokens).backward()
    gradients = {name: p.grad for name, p in student.network.named_parameters() if p.grad is not None}
    assert stepped.loss == pytest.approx(float(total.detach()) / tokens, rel=1e-5)
    assert sum(one.output.tokens for one in stepped.scored) == pytest.approx(tokens, rel=1e-5)
    assert_same_gradient(stepped.gradients, gradients)


def assert_same_step(found: Stepped, wanted: Stepped) -> None:
    def paths(stepped: Stepped) -> list[Any]:
        return [(row.index, ids) for row, ids in zip(stepped.rows, stepped.responses, strict=True)]

    def weights(stepped: Stepped) -> list[float]:
        return [weight for one in stepped.scored for row in one.part.weights or () for weight in row]

    assert paths(found) == paths(wanted)
    assert weights(found) == pytest.approx(weights(wanted), rel=1e-3)  # probabilities of float32 logits
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    assert_same_gradient(found.gradients, wanted.gradients, 1e-4)


@pytest.mark.parametrize("rest", ["drop", "sample"])
def test_the_switches_change_nothing_but_time(rest: str, skilled: Lab) -> None:
    settings: dict[str, Any] = {
        "objective": TOP,
        "rollout": {"expected": {"mass": 0.8, "max_nodes": 12, "rest": rest}},
        "rows": 4,
    }
    plain = skilled.step(**settings)
    assert rows_of(plain) > 4
    assert len(plain.scored) == 1
    trees = plain.scored[0].part.trees
    assert all(tree.nodes == 12 or tree.uncovered <= 0.2 for tree in trees)
    # every node counts once: by the sum of its weights a prompt's tree has its expected length
    part = plain.scored[0].part
    assert part.weights is not None
    for prompt, tree in enumerate(trees):
        own = [row for row, parent in enumerate(part.parents) if parent == prompt]
        assert [part.weights[row] for row in own] == tree.weights
        assert sum(weight > 0 for row in tree.weights for weight in row) >= tree.nodes
    for other in (
        {"reuse": False},
        {"micro_tokens": 60},
        {"micro_tokens": 60, "rollout_tokens": 1},
        {"share_prompt": False},
        {"share_prompt": False, "micro_tokens": 60},
        {"fused": False},
    ):
        found = skilled.step(**settings, **other)
        assert (len(found.scored) > 1) == ("micro_tokens" in other)
        assert_same_step(found, plain)


def test_plain_passes_give_the_same(skilled: Lab) -> None:
    settings: dict[str, Any] = {"rollout": {"expected": {"mass": 0.6, "max_nodes": 6, "rest": "sample"}}, "rows": 2}
    assert_same_step(skilled.step(packed=False, **settings), skilled.step(**settings))


def test_a_top_k_teacher_will_do(skilled: Lab) -> None:
    settings: dict[str, Any] = {"payload": "top_k", "objective": {**TOP, "support": "bucket"}}
    assert skilled.step(rollout={"expected": {}}, **settings).loss > 0


# ---------------------------------------------------------------------------------------------------- a run


@pytest.fixture
def make(train_config: Make, taught: Path, tmp_path: Path) -> Make:
    student = perturbed(str(taught / "model"), 0.5)
    student.network.save_pretrained(tmp_path / "student")
    student.tokenizer.save_pretrained(tmp_path / "student")

    def build(name: str, **settings: Any) -> TrainConfig:
        expected = {"mass": 0.9, "max_nodes": 10, "rest": "sample"}
        whole = {"pair": {"student": str(tmp_path / "student")}, "rollout": {"expected": expected}, **settings}
        return train_config(output=str(tmp_path / name), **whole)

    return build


def test_a_run_logs_what_its_trees_cover(make: Make) -> None:
    expected, sampled = make("expected", trace={"rollouts": 30}), make("sampled", rollout={"expected": None})
    for config in (expected, sampled):
        train(config)
    records = read(expected.output / "metrics.jsonl")
    for record, other in zip(records, read(sampled.output / "metrics.jsonl"), strict=True):
        assert set(record) == {*other, "nodes", "uncovered"}
        assert record["rows"] == other["rows"] == 6
        assert 1 <= record["nodes"] <= 10
        assert 0 <= record["uncovered"] < 1
        assert 0 <= record["ended"] <= 1 + 1e-9
        assert record["tokens"] == pytest.approx(6 * record["response_length"])
        assert record["sampled_log_prob"] is None
        assert sum(record["lam_hist"]) == pytest.approx(record["tokens"])
    identities = [json.loads((config.output / "identity.json").read_text()) for config in (expected, sampled)]
    assert identities[0]["identity"] != identities[1]["identity"]
    # A token that counts in an earlier path has the numbers that it has there.
    first: dict[Any, Any] = {}
    shared = 0
    lines = [line for line in read(expected.output / "tokens.jsonl") if line["step"] == 1]
    assert len(lines) > 6
    for line in lines:
        assert line["values"]["prefix_probability"][0] == 1.0
        for place in range(len(line["ids"])):
            node = (line["index"], *line["ids"][:place])
            values = {name: column[place] for name, column in line["values"].items()}
            values["top"] = line["student_top"][place]
            shared += node in first
            assert first.setdefault(node, values) == values
            assert values["loss"] > 0
    assert shared > 6


def test_a_run_resumes_to_the_byte(make: Make) -> None:
    settings: dict[str, Any] = {"steps": 5, "engine": {"micro_tokens": 60}, "optimizer": {"lr": 0.02}}
    straight, killed = make("straight", **settings), make("killed", **settings)
    train(straight)
    for at in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            train(killed, Stop(at))
    listener = Listener()
    train(killed, listener)
    assert listener.steps == [3, 4, 5]
    assert_same_numbers(killed.output, straight.output)


def test_an_objective_of_the_sampled_token_is_refused(make: Make) -> None:
    config = make("run", objective={"gate": "G5", "support": "hybrid"})
    with pytest.raises(UsageError, match="this objective reads the response that was sampled"):
        train(config)
    assert not (config.output / "metrics.jsonl").exists()
