"""Evaluation by vLLM: the answers of a server in place of the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.addons.vllm.process import VllmProcess
from gatespace.addons.vllm.sampler import VllmWriter
from gatespace.errors import RunError
from gatespace.evaluation import evaluate
from gatespace.models import Model, load_model
from gatespace.tasks import Prompt, Task
from gatespace.tasks.configured import configured_prompt, load_configured_task
from tests.vllm.scripted import Reply, Scripted

LIMIT = 20


@pytest.fixture(scope="module")
def model(taught: Path) -> Model:
    return load_model(str(taught / "model"))


@pytest.fixture(scope="module")
def task(taught: Path) -> tuple[Task, Prompt]:
    from gatespace.config import TeachConfig, load_config

    section = load_config(TeachConfig, taught / "config.yaml").task
    task = load_configured_task(section)
    return task, configured_prompt(section, task)


@pytest.fixture
def server(model: Model) -> Iterator[Scripted]:
    with Scripted(model) as server:
        # Its softmax goes over the head's padding too, as vLLM's does and the check expects.
        server.script["/v1/completions"] = lambda body: over_all_rows(server, body)
        yield server


def over_all_rows(server: Scripted, body: dict[str, Any]) -> Any:
    found = server.complete(body)
    if body.get("prompt_logprobs") is None:
        return found
    for choice in found["choices"]:
        ids = choice["prompt_token_ids"]
        with torch.no_grad():
            network: Any = server.model.network
            log_probs = torch.log_softmax(network(input_ids=torch.tensor([ids])).logits[0].float(), -1)
        for place, told in enumerate(choice["prompt_logprobs"][1:]):
            for id in told:
                told[id]["logprob"] = float(log_probs[place, int(id)])
    return found


def labels(evaluation: Any) -> list[tuple[str | None, str, bool]]:
    return [(row.label, row.raw, row.ended) for row in evaluation.predictions]


def test_a_writer_answers_as_the_model_does(server: Scripted, model: Model, task: Any) -> None:
    settings: dict[str, Any] = {"split": "test", "limit": LIMIT, "max_new_tokens": 8, "batch_size": 7}
    native = evaluate(model, *task, **settings)
    told: list[tuple[int, int]] = []
    with VllmWriter(server.address, model) as writer:
        server.asked.clear()
        served = evaluate(model, *task, writer=writer, progress=lambda *done: told.append(done), **settings)
    assert labels(served) == labels(native)
    assert served.metrics == native.metrics
    assert len({label for label, _, _ in labels(native)} - {None}) > 1  # a model that says one thing proves little
    assert any(not ended for _, _, ended in labels(native)) or all(ended for _, _, ended in labels(native))
    assert told == [(7, LIMIT), (14, LIMIT), (20, LIMIT)]
    assert [len(body["prompt"]) for _, body in server.asked] == [7, 7, 6]
    assert all(body["temperature"] == 0 for _, body in server.asked)


def test_another_model_is_refused(server: Scripted, model: Model, taught: Path) -> None:
    other = load_model(str(taught / "model"))
    with torch.no_grad():
        other.head.weight.mul_(1.2)
    with pytest.raises(RunError, match="does not have the weights of"):
        VllmWriter(server.address, other)


def test_one_that_comes_back_as_another_is_refused(server: Scripted, model: Model, task: Any) -> None:
    with VllmWriter(server.address, model, patience=10.0) as writer:
        left = [Reply(head=b"")]
        other = load_model(model.name)
        with torch.no_grad():
            other.head.weight.mul_(1.2)

        def changed(body: dict[str, Any]) -> Any:
            if left:
                server.model = other
                return left.pop()
            return over_all_rows(server, body)

        server.script["/v1/completions"] = changed
        with pytest.raises(RunError, match="does not have the weights of"):
            evaluate(model, *task, split="test", limit=3, max_new_tokens=4, writer=writer)


def test_mistakes_are_found_before_the_model_is_loaded(cli: Callable[..., Any], taught: Path) -> None:
    for where, message in (("no/python", "no Python with vLLM"), ("http://a:1", "not the address of a vLLM server")):
        result = cli("evaluate", "no-such-model", "--vllm", where)
        assert result.exit_code == 2
        assert message in result.stderr


def test_the_command_with_a_server(cli: Callable[..., Any], server: Scripted, taught: Path, tmp_path: Path) -> None:
    words = ["evaluate", taught, "--limit", LIMIT, "--quiet", "--precision", "fp32"]
    result = cli(*words, "--vllm", server.address, "--output", tmp_path)
    assert result.exit_code == 0, result.stderr
    for name in ("predictions-test.jsonl", "evaluation-test.json"):
        assert (tmp_path / name).read_bytes() == (taught / name).read_bytes()


@pytest.mark.slow
def test_the_command_with_a_real_vllm(
    cli: Callable[..., Any], vllm_python: str, taught: Path, model: Model, tmp_path: Path
) -> None:
    result = cli(
        "evaluate", taught, "--limit", LIMIT, "--vllm", vllm_python, "--output", tmp_path, "--precision", "fp32"
    )
    assert result.exit_code == 0, result.stderr

    def read(folder: Path) -> list[tuple[Any, ...]]:
        lines = (folder / "predictions-test.jsonl").read_text().splitlines()
        return [(row["index"], row["label"]) for row in map(json.loads, lines)]

    assert read(tmp_path) == read(taught)
    with VllmProcess(vllm_python, taught / "model", log=tmp_path / "vllm.log", dtype="float32") as process:
        other = load_model(str(taught / "model"))
        with VllmWriter(process.address, other) as writer:
            assert writer.verify() < 1e-3
            with torch.no_grad():
                other.head.weight.mul_(1.2)
            with pytest.raises(RunError, match="does not have the weights of"):
                writer.verify()
