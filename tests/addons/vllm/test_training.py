"""Training with a vLLM server as teacher, as sampler, or as both: from a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gatespace.addons.vllm.process import VllmProcess
from gatespace.addons.vllm.sampler import VllmSampler, VllmWriter
from gatespace.addons.vllm.untied import save_untied
from gatespace.config import TeachConfig, TrainConfig, load_config, parse_config
from gatespace.config.identity import identity
from gatespace.errors import RunError, UsageError
from gatespace.models import Model, build_tiny, load_model
from gatespace.tasks.configured import load_configured_task
from gatespace.training.loop import Silent
from gatespace.training.run import train


def settings(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "pair": {"student": "smollm2", "teacher": "vllm://127.0.0.1:8000"},
        "teacher": {"payload": "top_k", "k": 8},
        "objective": {"support": "hybrid", "support_k": 8},
    }
    return base | changes


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"teacher": {"payload": "hidden"}}, "first choices only"),
        ({"pair": {"teacher": "vllm://127.0.0.1"}}, "is not an address"),
        ({"pair": {"teacher": "zmq://127.0.0.1:5555/model"}}, "is not an address"),
        ({"pair": {"teacher": "http://127.0.0.1:8000"}}, "no kind of teacher"),
        ({"rollout": {"engine": "vllm"}}, "rollout.vllm"),
        ({"rollout": {"vllm": ".venv-vllm/bin/python"}}, "rollout.vllm"),
        ({"rollout": {"engine": "vllm", "vllm": "zmq://127.0.0.1:5555"}}, "not the address of a vLLM server"),
        ({"rollout": {"from": {"teacher": 1.0}}}, "writes none"),
        ({"evaluation": {"engine": "vllm"}}, "answers only where it writes"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(change, text):
    with pytest.raises(UsageError, match=text):
        parse_config(TrainConfig, settings(**change))


def test_who_writes_counts_in_the_identity_and_where_it_is_does_not():
    native = parse_config(TrainConfig, settings())
    one, two = (parse_config(TrainConfig, settings(rollout={"engine": "vllm", "vllm": v})) for v in ("a", "b"))
    assert identity(native) != identity(one) == identity(two)
    rollout = {"engine": "vllm", "vllm": "a"}
    asked = parse_config(TrainConfig, settings(rollout=rollout, evaluation={"engine": "vllm"}))
    assert identity(asked) != identity(one)


@pytest.mark.slow
def test_a_step_with_teacher_and_rollouts_by_vllm(served, vllm_python, smollm2, tweeteval, tmp_path):
    config = parse_config(
        TrainConfig,
        settings(
            task={"name": "tweeteval/emotion", "root": str(tweeteval)},
            pair={"student": str(smollm2), "teacher": served.address},
            rollout={"engine": "vllm", "vllm": vllm_python, "max_new_tokens": 6},
            engine={"precision": "fp32"},
            evaluation={"final": []},
            optimizer={"lr": 1e-5},
            steps=2,
            batch_size=4,
            output=str(tmp_path / "run"),
        ),
    )
    summary = train(config)
    first, second = [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    # Teacher and student are one model before the first update, and no longer after it.
    assert first["forward_kl"] == pytest.approx(0, abs=1e-4)
    assert first["reverse_kl"] == pytest.approx(0, abs=1e-4)
    assert second["forward_kl"] > 0
    assert summary["run"]["rows"] == 8
    assert json.loads((config.output / "environment.json").read_text())["teacher"]["address"] == served.address
    assert not (config.output / "vllm").exists()


# ---------------------------------------------------------------------------------------------------- a tiny pair


@pytest.fixture(scope="module")
def learner(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untaught twin of the teacher: the tiny student's heads are too narrow for vLLM's CPU build."""
    task = load_configured_task(load_config(TeachConfig, taught / "config.yaml").task)
    return build_tiny(task, tmp_path_factory.mktemp("pair")).teacher


@pytest.fixture(scope="module")
def writing(vllm_python: str, learner: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """A server that takes the weights of all these runs, one after the other."""
    place = tmp_path_factory.mktemp("writing")
    save_untied(load_model(str(learner)), place / "model")
    with VllmProcess(
        vllm_python, place / "model", log=place / "vllm.log", dtype="float32", max_model_len=256, weights=True
    ) as process:
        yield process


def tiny_run(taught: Path, learner: Path, where: str, output: Path, **changes: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "task": {"name": "synthetic", "brief": True},
        "pair": {"student": str(learner), "teacher": str(taught / "model")},
        "rollout": {"engine": "vllm", "vllm": where, "max_new_tokens": 6},
        "teacher": {"cache": None},
        "engine": {"precision": "fp32"},
        "optimizer": {"lr": 1e-3},
        "evaluation": {"final": []},
        "checkpoint": {"every": 1},
        "steps": 4,
        "batch_size": 4,
        "output": str(output),
    }
    return parse_config(TrainConfig, base | changes)


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]


class Interrupted(Silent):
    """Ends a run after its second step."""

    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        if step == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_with_a_vllm_sampler_is_taken_up_again(
    writing: VllmProcess, taught: Path, learner: Path, tmp_path: Path
) -> None:
    whole = tiny_run(taught, learner, writing.address, tmp_path / "whole")
    train(whole)
    broken = tiny_run(taught, learner, writing.address, tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        train(broken, Interrupted())
    assert not (broken.output / "summary.json").exists()
    train(broken)  # the server has the weights of somewhere else by now, and is given those of the checkpoint
    found, expected = metrics(broken), metrics(whole)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for record, right in zip(found, expected, strict=True):
        for name in ("loss", "forward_kl", "reverse_kl", "tokens"):
            assert record[name] == pytest.approx(right[name], rel=1e-3), (record["step"], name)
    assert expected[3]["forward_kl"] != pytest.approx(expected[2]["forward_kl"], rel=1e-3)


@pytest.mark.slow
def test_a_lora_student_is_written_with_by_its_merged_weights(
    writing: VllmProcess, taught: Path, learner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart: list[float] = []
    sync = VllmSampler.sync

    def watched(sampler: VllmSampler) -> float:
        apart.append(sync(sampler))
        return apart[-1]

    monkeypatch.setattr(VllmSampler, "sync", watched)
    pair = {"student": str(learner), "teacher": str(taught / "model"), "lora": {"r": 4}}
    config = tiny_run(
        taught, learner, writing.address, tmp_path / "run", pair=pair, optimizer={"lr": 0.05}, batch_size=2
    )
    train(config)
    assert len(apart) == 5  # at the start, and before every step
    assert max(apart) < 1e-3
    # The server has the student of before the last step, which the adapters have moved far from where it began.
    start: Model = load_model(str(learner))
    with pytest.raises(RunError, match="does not have the weights of"):
        VllmWriter(writing.address, start)


@pytest.mark.slow
def test_evaluation_by_the_sampler(writing: VllmProcess, taught: Path, learner: Path, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"final": ["test"], "limit": 20, "max_new_tokens": 8, "every": 2, "split": "val"}
    runs = {}
    for engine in ("native", "vllm"):
        evaluation = {**shared, "engine": engine}
        config = tiny_run(
            taught, learner, writing.address, tmp_path / engine, evaluation=evaluation, optimizer={"lr": 5e-3}
        )
        train(config)
        lines = (config.output / "predictions-test.jsonl").read_text().splitlines()
        runs[engine] = [(row["index"], row["label"], row["raw"]) for row in map(json.loads, lines)]
    assert runs["vllm"] == runs["native"]
    assert len(runs["vllm"]) == 20


@pytest.mark.slow
def test_a_server_that_dies_in_a_run_is_an_error_with_its_last_words(
    vllm_python: str, taught: Path, tmp_path: Path
) -> None:
    """Heads of 16 are too narrow for vLLM's CPU build, which finds out when it is asked for the first time."""
    task = load_configured_task(load_config(TeachConfig, taught / "config.yaml").task)
    student = build_tiny(task, tmp_path / "pair").student
    with pytest.raises(RunError, match="started here has ended") as caught:
        train(tiny_run(taught, student, vllm_python, tmp_path / "run"))
    assert caught.value.why  # what it wrote last
    assert not (tmp_path / "run" / "vllm").exists()
    assert "head_dim=16" in (tmp_path / "run" / "vllm.log").read_text()
