"""Quantised teachers and students: what bitsandbytes does on this machine, and what is said where it is missing."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatespace.config import TrainConfig, dump_config, parse_config
from gatespace.errors import UsageError
from gatespace.models import Model, TinyPair, load_model, merged, with_lora
from gatespace.study.jobs import execute
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec
from gatespace.training.train import train

QUESTIONS = [([11, 12, 13], [30, 31, 32]), ([20, 21, 22, 23], [40])]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def run(tiny: TinyPair, output: Path, **pair: object) -> TrainConfig:
    settings = {
        "task": {"name": "synthetic", "brief": True},
        "pair": {"student": str(tiny.student), "teacher": str(tiny.teacher), **pair},
        "teacher": {"cache": None},
        "steps": 2,
        "batch_size": 4,
        "rollout": {"max_new_tokens": 4},
        "optimizer": {"lr": 1e-2},
        "evaluation": {"every": 0, "limit": 4, "max_new_tokens": 8, "final": ["val"]},
        "output": str(output),
    }
    return parse_config(TrainConfig, settings)


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
    with pytest.raises(UsageError, match="quantised weights are not trained"):
        train(run(tiny, tmp_path / "run", student=str(tmp_path / "nf4")))


# ---------------------------------------------------------------------------------------------------- students


def test_a_quantised_student_learns_in_additions(tiny: TinyPair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"student_quantization: quantised weights are not trained"):
        run(tiny, tmp_path, student_quantization="nf4")
    pair = run(tiny, tmp_path, student_quantization="nf4", teacher="self", lora={}).pair
    assert (pair.quantization("student"), pair.quantization("teacher")) == ("nf4", "nf4")
    assert run(tiny, tmp_path, student_quantization="nf4", lora={}).pair.quantization("teacher") is None


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="it is installed")
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_run_and_a_baseline_say_what_is_missing(role: str, tiny: TinyPair, tmp_path: Path) -> None:
    config = run(tiny, tmp_path / "run", **{f"{role}_quantization": "nf4"}, lora={})
    with pytest.raises(UsageError, match=rf"(?s)pair\.{role}: .*pip install bitsandbytes"):
        train(config)
    job = {"do": "baseline", "role": role, "config": dump_config(config), "folder": str(tmp_path / "base")}
    outcome = execute(job)
    assert outcome["state"] == "failed"
    assert "pip install bitsandbytes" in outcome["error"]


def test_a_quantised_student_saves_its_adapters(tiny: TinyPair, tmp_path: Path) -> None:
    from peft import PeftModel

    model = with_lora(load_model(str(tiny.student)), r=4)
    for name, weight in model.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.network.is_quantized = True  # as bitsandbytes would make it: only saving looks at it
    with pytest.raises(UsageError, match="are not merged"):
        merged(model)
    model.save(tmp_path / "model")
    assert not list((tmp_path / "model").glob("model*.safetensors")), "the base is not copied"
    again = PeftModel.from_pretrained(load_model(str(tiny.student)).network, tmp_path / "model").eval()
    ids = torch.tensor([[5, 17, 300, 2, 41]])
    with torch.no_grad():
        assert again(ids).logits.equal(model.network(ids).logits)
    with pytest.raises(UsageError, match="adapters alone"):
        load_model(str(tmp_path / "model"))


@needs_bitsandbytes
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_student_on_a_quantised_base_is_trained(precision: str, tiny: TinyPair, tmp_path: Path) -> None:
    config = run(tiny, tmp_path / "run", student_quantization="nf4", teacher_quantization="int8", lora={"r": 4})
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"precision": precision})})
    assert train(config)["steps"] == 2
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
