"""Quantised teachers: what runs with bitsandbytes on this machine, and what is said where a package is missing."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatespace.config import TrainConfig, parse_config
from gatespace.errors import UsageError
from gatespace.models import Model, TinyPair, build_tiny, load_model
from gatespace.tasks import synthetic_task
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec
from gatespace.training.train import train

QUESTIONS = [([11, 12, 13], [30, 31, 32]), ([20, 21, 22, 23], [40])]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return build_tiny(synthetic_task(size=600), tmp_path_factory.mktemp("tiny"))


def scores(model: Model, questions: list[tuple[list[int], list[int]]]) -> Tensor:
    teacher = LocalTeacher(model, ScoreSpec((5, 6, 7), 8, model.vocab_size))
    payload = teacher.score(*map(list, zip(*questions, strict=True))).payload
    assert isinstance(payload, Tensor)
    return payload[0]


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_weights_that_need_another_package(method: str, tiny: TinyPair, tmp_path: Path) -> None:
    if method == "bitsandbytes" and importlib.util.find_spec(method) is not None:
        pytest.skip("it is installed")
    folder = tmp_path / "quantised"
    shutil.copytree(tiny.teacher, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    if method == "bitsandbytes":
        config["quantization_config"] = {"quant_method": method, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"quantised weights .* need a package"):
        load_model(str(folder))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="it is installed")
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_quantising_needs_bitsandbytes(quantization: str, tiny: TinyPair) -> None:
    with pytest.raises(UsageError, match="pip install bitsandbytes"):
        load_model(str(tiny.teacher), quantization=quantization)


def test_quantisation_by_a_name_that_is_none(tiny: TinyPair) -> None:
    with pytest.raises(UsageError, match="int7"):
        load_model(str(tiny.teacher), quantization="int7")


@needs_bitsandbytes
@pytest.mark.parametrize(("quantization", "allowed"), [("int8", 0.08), ("nf4", 0.5)])
def test_a_teacher_is_quantised_when_it_is_loaded(quantization: str, allowed: float, tiny: TinyPair) -> None:
    whole = load_model(str(tiny.teacher))
    model = load_model(str(tiny.teacher), quantization=quantization)
    assert model.dtype == torch.float32, "of the passes; the head is not quantised"
    assert model.fingerprint() not in (whole.fingerprint(), None)
    right, found = scores(whole, QUESTIONS), scores(model, QUESTIONS)
    assert 0 < float((found - right).norm() / right.norm()) < allowed
    assert scores(model, QUESTIONS[1:]).equal(found[3:]), "its scores do not depend on the batch"


@needs_bitsandbytes
def test_saved_quantised_weights_are_scored_with_and_not_trained(tiny: TinyPair, tmp_path: Path) -> None:
    model = load_model(str(tiny.teacher), quantization="nf4")
    model.save(tmp_path / "nf4")
    again = load_model(str(tmp_path / "nf4"))
    assert again.fingerprint() == model.fingerprint()
    assert scores(again, QUESTIONS).equal(scores(model, QUESTIONS))
    settings = {
        "task": {"name": "synthetic", "brief": True},
        "pair": {"student": str(tmp_path / "nf4"), "teacher": str(tiny.teacher)},
        "teacher": {"cache": None},
        "output": str(tmp_path / "run"),
    }
    with pytest.raises(UsageError, match="quantised weights are not trained"):
        train(parse_config(TrainConfig, settings))
