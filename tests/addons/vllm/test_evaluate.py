"""`gatespace evaluate --sampler vllm=…`: the responses of a server in place of the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.addons.vllm.process import VllmProcess
from gatespace.addons.vllm.sampler import VllmSampler
from gatespace.config import EvaluationConfig
from gatespace.errors import RunError
from gatespace.evaluation import evaluate
from gatespace.models import Model, load_model
from gatespace.rollout import greedy
from gatespace.tasks import Prompt, Task
from gatespace.tasks.configured import configured_prompt, load_configured_task
from tests.addons.vllm.scripted import Reply, Scripted

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
    with Scripted(model, all_rows=True) as server:
        yield server


def labels(evaluation: Any) -> list[tuple[str | None, str, bool]]:
    return [(row.response, row.raw, row.ended) for row in evaluation.predictions]


def test_a_server_responds_as_the_model_does(server: Scripted, model: Model, task: Any) -> None:
    settings = EvaluationConfig(limit=LIMIT, max_new_tokens=8, batch_size=7)
    native = evaluate(model, *task, settings)
    reported: list[tuple[int, int]] = []
    with VllmSampler(server.address, model) as sampler:
        server.asked.clear()
        generate = partial(greedy, writer=sampler)
        served = evaluate(model, *task, settings, generate=generate, progress=lambda *done: reported.append(done))
    assert labels(served) == labels(native)
    assert served.metrics == native.metrics
    assert len({label for label, _, _ in labels(native)} - {None}) > 1  # a model that says one thing proves little
    assert any(not ended for _, _, ended in labels(native)) or all(ended for _, _, ended in labels(native))
    assert reported == [(7, LIMIT), (14, LIMIT), (20, LIMIT)]
    assert [len(body["prompt"]) for _, body in server.asked] == [7, 7, 6]
    assert all(body["temperature"] == 0 for _, body in server.asked)


def test_another_model_is_refused(server: Scripted, model: Model, taught: Path) -> None:
    other = load_model(str(taught / "model"))
    with torch.no_grad():
        other.head.weight.mul_(1.2)
    with pytest.raises(RunError, match="does not have the weights of"):
        VllmSampler(server.address, other)


def test_one_that_comes_back_as_another_is_refused(server: Scripted, model: Model, task: Any) -> None:
    with VllmSampler(server.address, model, patience=10.0) as sampler:
        left = [Reply(head=b"")]
        other = load_model(model.name)
        with torch.no_grad():
            other.head.weight.mul_(1.2)

        def changed(body: dict[str, Any]) -> Any:
            if left:
                server.model = other
                return left.pop()
            return server.complete(body)

        server.script["/v1/completions"] = changed
        settings = EvaluationConfig(limit=3, max_new_tokens=4)
        with pytest.raises(RunError, match="does not have the weights of"):
            evaluate(model, *task, settings, generate=partial(greedy, writer=sampler))


def test_mistakes_are_found_before_the_model_is_loaded(cli: Callable[..., Any], taught: Path) -> None:
    for sampler, message in (
        ("vllm=no/python", "no Python with vLLM"),
        ("vllm", "no Python with vLLM"),
        ("vllm=http://a:1", "not the address of a vLLM server"),
        ("vlm=no/python", "did you mean 'vllm'"),
    ):
        result = cli("evaluate", "no-such-model", "--sampler", sampler)
        assert result.exit_code == 2
        assert message in result.stderr


def test_the_command_with_a_server(cli: Callable[..., Any], server: Scripted, taught: Path, tmp_path: Path) -> None:
    words = ["evaluate", taught, "--limit", LIMIT, "--quiet", "--precision", "fp32"]
    result = cli(*words, "--sampler", f"vllm={server.address}", "--output", tmp_path)
    assert result.exit_code == 0, result.stderr
    for name in ("predictions-test.jsonl", "evaluation-test.json"):
        assert (tmp_path / name).read_bytes() == (taught / name).read_bytes()


@pytest.mark.slow
def test_the_command_with_a_real_vllm(
    cli: Callable[..., Any], vllm_python: str, taught: Path, model: Model, tmp_path: Path
) -> None:
    result = cli(
        *("evaluate", taught, "--limit", LIMIT, "--precision", "fp32"),
        *("--sampler", f"vllm={vllm_python}", "--output", tmp_path),
    )
    assert result.exit_code == 0, result.stderr

    def read(folder: Path) -> list[tuple[Any, ...]]:
        lines = (folder / "predictions-test.jsonl").read_text().splitlines()
        return [(row["index"], row["response"]) for row in map(json.loads, lines)]

    assert read(tmp_path) == read(taught)
    with VllmProcess(vllm_python, taught / "model", log=tmp_path / "vllm.log", dtype="float32") as process:
        other = load_model(str(taught / "model"))
        with VllmSampler(process.address, other) as sampler:
            assert sampler.sync() < 1e-3
            with torch.no_grad():
                other.head.weight.mul_(1.2)
            with pytest.raises(RunError, match="does not have the weights of"):
                sampler.sync()
