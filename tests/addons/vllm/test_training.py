"""The ports: training with a vLLM server as teacher, as sampler, or as both, from a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.addons.vllm import open_sampler, open_teacher
from gatespace.addons.vllm.process import VllmProcess
from gatespace.addons.vllm.sampler import VllmSampler, save_untied
from gatespace.config import TeachConfig, TrainConfig, load_config, parse_config
from gatespace.config.identity import identity
from gatespace.errors import RunError, UsageError
from gatespace.models import build_tiny, load_model
from gatespace.runs import RunFolder
from gatespace.tasks.configured import load_configured_task
from gatespace.teacher.scores import ScoreSpec
from gatespace.training.progress import Silent
from gatespace.training.setup import Placement
from gatespace.training.train import train
from tests.addons.vllm.scripted import Scripted


def settings(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "pair": {"student": "smollm2", "teacher": "vllm://127.0.0.1:8000"},
        "teacher": {"payload": "top_k", "k": 8},
        "objective": {"support": "hybrid", "support_k": 8},
    }
    return base | changes


def opened(config: TrainConfig, tmp_path: Path) -> AbstractContextManager[VllmSampler]:
    """The sampler of a run, opened as far as the settings allow: models are not needed for the checks."""
    nothing: Any = None
    place = Placement("cpu", torch.float32)
    return open_sampler(config, nothing, nothing, [], run=RunFolder(tmp_path), place=place, report=print)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "rollout.options.server: is needed with rollout.engine: vllm"),
        ({"server": None}, "rollout.options.server: is needed"),
        ({"server": "no/python"}, "rollout.options.server: no Python with vLLM"),
        ({"server": "zmq://127.0.0.1:5555"}, "rollout.options.server: not the address of a vLLM server"),
        ({"server": "vllm://127.0.0.1:8000", "patiense": 3}, "rollout.options: patiense: unknown key"),
        ({"server": "vllm://127.0.0.1:8000", "timeout": 0}, "rollout.options: timeout"),
    ],
)
def test_a_mistake_in_the_sampler_s_options_is_named(options, text, tmp_path):
    config = parse_config(TrainConfig, settings(rollout={"engine": "vllm", "options": options}))
    with pytest.raises(UsageError, match=re.escape(text)), opened(config, tmp_path):
        pass


def test_vllm_samples_for_one_process_only(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    options = {"server": "vllm://127.0.0.1:8000"}
    config = parse_config(TrainConfig, settings(rollout={"engine": "vllm", "options": options}))
    with pytest.raises(UsageError, match="one process only"), opened(config, tmp_path):
        pass


@pytest.mark.parametrize(
    ("teacher", "text"),
    [
        ({"payload": "hidden"}, "teacher.payload: a vLLM server gives top-k log-probabilities only"),
        ({"payload": "top_k", "options": {"client_key": "a.key"}}, "teacher.options: client_key: unknown key"),
    ],
)
def test_a_mistake_in_the_teacher_s_settings_is_named(teacher, text):
    config = parse_config(TrainConfig, settings(teacher=teacher))
    spec = ScoreSpec((5,), 4, 100, config.teacher.payload, config.teacher.k)
    nothing: Any = None
    with pytest.raises(UsageError, match=re.escape(text)):
        open_teacher(config, nothing, spec, place=Placement("cpu", torch.float32), cache=None, report=print)


def test_that_vllm_samples_counts_in_the_identity_and_where_it_is_does_not():
    native = parse_config(TrainConfig, settings())
    one, two = (
        parse_config(TrainConfig, settings(rollout={"engine": "vllm", "options": {"server": server}}))
        for server in ("a", "b")
    )
    assert identity(native) != identity(one) == identity(two)
    rollout = {"engine": "vllm", "options": {"server": "a"}}
    evaluated = parse_config(TrainConfig, settings(rollout=rollout, evaluation={"engine": "vllm"}))
    assert identity(evaluated) != identity(one)


@pytest.mark.slow
def test_a_step_with_teacher_and_rollouts_by_vllm(served, vllm_python, smollm2, tweeteval, tmp_path):
    config = parse_config(
        TrainConfig,
        settings(
            task={"name": "tweeteval/emotion", "root": str(tweeteval)},
            pair={"student": str(smollm2), "teacher": served.address},
            rollout={"engine": "vllm", "options": {"server": vllm_python}, "max_new_tokens": 6},
            engine={"precision": "fp32"},
            evaluation={"every": 0, "final": []},
            optimizer={"lr": 1e-5},
            steps=2,
            batch_size=4,
            output=str(tmp_path / "run"),
        ),
    )
    summary = train(config)
    first, second = metrics(config)
    # Teacher and student are one model before the first update, and no longer after it.
    assert first["forward_kl"] == pytest.approx(0, abs=1e-4)
    assert first["reverse_kl"] == pytest.approx(0, abs=1e-4)
    assert second["forward_kl"] > 0
    assert summary["run"]["rows"] == 8
    assert RunFolder(config.output).environment()["teacher"]["address"] == served.address
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


def tiny_run(taught: Path, learner: Path, server: str, output: Path, **changes: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "task": {"name": "synthetic", "brief": True},
        "pair": {"student": str(learner), "teacher": str(taught / "model")},
        "rollout": {"engine": "vllm", "options": {"server": server}, "max_new_tokens": 6},
        "teacher": {"cache": None},
        "engine": {"precision": "fp32"},
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every": 0, "final": []},
        "checkpoint": {"every": 1},
        "steps": 4,
        "batch_size": 4,
        "output": str(output),
    }
    return parse_config(TrainConfig, base | changes)


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    return RunFolder(config.output).log("metrics")


def test_a_run_samples_and_evaluates_by_a_server_that_gets_its_weights(
    taught: Path, learner: Path, tmp_path: Path
) -> None:
    """A scripted server responds as the student itself would: greedily, so that no random numbers are needed."""
    evaluation = {"every": 0, "final": ["test"], "limit": 10, "max_new_tokens": 8}
    with Scripted(load_model(str(learner)), all_rows=True, weights=True) as server:
        runs = {}
        for engine, options in {"native": {}, "vllm": {"server": server.address}}.items():
            config = tiny_run(
                *(taught, learner, server.address, tmp_path / engine),
                rollout={"engine": engine, "options": options, "temperature": 0.0, "max_new_tokens": 6},
                evaluation={**evaluation, "engine": engine},
                steps=2,
            )
            train(config)
            runs[engine] = RunFolder(config.output)
        loads = [body for path, body in server.asked if path == "/collective_rpc"]
        trained = load_model(str(runs["vllm"].model))
        assert torch.allclose(server.model.head.weight, trained.head.weight)
    assert len(loads) == 5  # the rehearsal, the start, before each step, and for the evaluation
    assert runs["vllm"].predictions("test") == runs["native"].predictions("test")
    for record, right in zip(runs["vllm"].log("metrics"), runs["native"].log("metrics"), strict=True):
        for name in ("loss", "forward_kl", "reverse_kl", "tokens"):
            assert record[name] == pytest.approx(right[name], rel=1e-3), (record["step"], name)
    assert not (runs["vllm"].path / "vllm").exists()


class Interrupted(Silent):
    """Ends a run after its second step."""

    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        if step == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_with_a_vllm_sampler_resumes(writing: VllmProcess, taught: Path, learner: Path, tmp_path: Path) -> None:
    whole = tiny_run(taught, learner, writing.address, tmp_path / "whole")
    train(whole)
    broken = tiny_run(taught, learner, writing.address, tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        train(broken, Interrupted())
    assert not (broken.output / "summary.json").exists()
    train(broken)  # the server has other weights by now, and gets those of the checkpoint
    found, expected = metrics(broken), metrics(whole)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for record, right in zip(found, expected, strict=True):
        for name in ("loss", "forward_kl", "reverse_kl", "tokens"):
            assert record[name] == pytest.approx(right[name], rel=1e-3), (record["step"], name)
    assert expected[3]["forward_kl"] != pytest.approx(expected[2]["forward_kl"], rel=1e-3)


@pytest.mark.slow
def test_a_lora_student_is_sampled_by_its_merged_weights(
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
    with pytest.raises(RunError, match="does not have the weights of"):
        VllmSampler(writing.address, load_model(str(learner)))


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
        rows = RunFolder(config.output).predictions("test")
        runs[engine] = [(row["index"], row["response"], row["raw"]) for row in rows]
    assert runs["vllm"] == runs["native"]
    assert len(runs["vllm"]) == 20


@pytest.mark.slow
def test_a_server_that_dies_in_a_run_is_an_error_with_the_end_of_its_log(
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
