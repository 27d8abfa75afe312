"""Whole runs in TRL's trainer, on a real tiny pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="no TRL here; `make test-engines` makes an environment with it")

from datasets import Dataset
from transformers import AutoModelForCausalLM

from gatespace import Gate


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def steps(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "loss" in log]


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor], share: float) -> None:
    """Weights that went the same way: they differ by less than `share` of how far they went."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= share * (value - start[name]).norm(), name


def test_student_learns(make: Callable[..., Any]) -> None:
    trainer = make(gate="G5", max_steps=25, per_device_train_batch_size=8, learning_rate=5e-3)
    trainer.train()
    for name in ("loss", "gate/forward_kl", "gate/reverse_kl"):
        course = [log[name] for log in steps(trainer)]
        assert sum(course[-5:]) < 0.93 * sum(course[:5]), name


@pytest.mark.parametrize(
    "beta, settings",
    [
        (1.0, {"gate": Gate.static(1)}),
        (0.0, {"gate": "static:0"}),
        (0.4, {"method": "jsd", "params": {"beta": 0.4}}),
    ],
    ids=["reverse", "forward", "jsd"],
)
def test_run_is_that_of_trl_where_the_objectives_are_the_same(
    make: Callable[..., Any], beta: float, settings: dict[str, Any]
) -> None:
    # SGD, because Adam makes a whole step of a gradient that is only rounding.
    common = {"gradient_accumulation_steps": 2, "temperature": 1.3, "optim": "sgd", "learning_rate": 0.5}
    theirs = make(own=False, beta=beta, **common)
    theirs.train()
    ours = make(**settings, **common)  # not before: a new trainer begins the random numbers again
    start = weights(ours)
    ours.train()
    assert_close(weights(ours), weights(theirs), start, share=2e-3)
    for one, other in zip(steps(ours), steps(theirs), strict=True):
        timed = {"step_time"}
        shared = {name: value for name, value in one.items() if name in other and name not in timed}
        assert len(shared) == len(other) - len(timed)
        assert shared == pytest.approx({name: other[name] for name in shared}, rel=1e-3)


def test_micro_batches_do_not_show(make: Callable[..., Any]) -> None:
    """Responses of different lengths: a mean of means would be another number."""
    found = []
    for size, parts in ((8, 1), (2, 4)):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        trainer = make(gate="4,2,-1,-3", greedy=True, optim="sgd", learning_rate=0.5, max_steps=2, **sizes)
        start = weights(trainer)
        trainer.train()
        log = steps(trainer)[-1]
        assert log["completions/min_length"] < log["completions/max_length"]
        found.append((weights(trainer), steps(trainer), trainer.gate_summary()))
    (whole, whole_logs, whole_run), (split, split_logs, split_run) = found
    assert_close(split, whole, start, share=2e-3)
    for one, other in zip(split_logs, whole_logs, strict=True):
        names = [name for name in other if name.startswith("gate/") or name in ("loss", "grad_norm")]
        assert len(names) > 10
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-3)
    assert split_run == pytest.approx(whole_run, rel=1e-4)


def test_logs_are_of_the_tokens_since_the_last_log(make: Callable[..., Any]) -> None:
    """Every step its own log, and one log for all: the means fit together, each token counting alike."""
    settings = {"gate": "H2", "greedy": True, "max_steps": 3, "signal_top_k": 4}
    often, once = make(logging_steps=1, **settings), make(logging_steps=3, **settings)
    tokens: list[int] = []
    inner = often._compute_loss

    def count(student: Any, inputs: Any, items: Any) -> Any:
        tokens.append(int(inputs["completion_mask"].sum()))
        return inner(student, inputs, items)

    often._compute_loss = count
    often.train()
    once.train()
    (last,) = steps(once)
    assert len(tokens) == 3
    for name in ("gate/lam_mean", "gate/h", "gate/gap", "gate/forward_kl", "gate/lam_saturated"):
        mean = sum(n * log[name] for n, log in zip(tokens, steps(often), strict=True)) / sum(tokens)
        assert last[name] == pytest.approx(mean, rel=1e-5, abs=1e-7)
    run = often.gate_summary()
    assert run["tokens"] == sum(tokens)
    assert run["lam_mean"] == pytest.approx(last["gate/lam_mean"])
    assert run["lam_sd"] == pytest.approx(last["gate/lam_sd"], rel=1e-4)
    assert 0 < run["lam_rkl_mean"] < 1


def test_a_constant_gate_has_no_spread(make: Callable[..., Any]) -> None:
    trainer = make(gate="static:0.388", gradient_accumulation_steps=2)
    trainer.train()
    run = trainer.gate_summary()
    assert run["lam_mean"] == pytest.approx(0.388, abs=1e-6)
    assert run["lam_sd"] < 1e-6
    assert run["lam_rkl_mean"] == pytest.approx(0.388, abs=1e-6)


def test_evaluation_is_logged_apart(make: Callable[..., Any], prompts: list[Any]) -> None:
    held_out = Dataset.from_dict({"prompt": prompts[:6]})
    trainer = make(gate="G5", eval_dataset=held_out, eval_strategy="steps", eval_steps=3, logging_steps=3)
    trainer.train()
    (evaluated,) = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert 0 < evaluated["eval_gate/lam_mean"] < 1
    assert evaluated["eval_gate/forward_kl"] > 0
    (trained,) = steps(trainer)
    assert evaluated["eval_gate/h"] != trained["gate/h"]
    assert trainer.gate_summary()["lam_mean"] == pytest.approx(trained["gate/lam_mean"])


def test_adapters_learn_and_nothing_else(make: Callable[..., Any], tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = make(gate="G5", peft_config=lora, max_steps=15, learning_rate=2e-2)
    before = weights(trainer)
    trainer.train()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    losses = [log["loss"] for log in steps(trainer)]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])

    trainer.save_model(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(trainer.model.peft_config["default"].base_model_name_or_path)
    ids = torch.arange(10, 30)[None]
    again = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    trainer.model.eval()
    assert torch.allclose(again(input_ids=ids).logits, trainer.model(input_ids=ids).logits, atol=1e-5)


def test_bfloat16_student_and_teacher(make: Callable[..., Any]) -> None:
    trainer = make(gate="G5", bf16=True, gradient_checkpointing=True, teacher_model_init_kwargs={"dtype": "bfloat16"})
    assert next(trainer.teacher_model.parameters()).dtype == torch.bfloat16
    trainer.train()
    exact = make(gate="G5")
    exact.train()
    for half, full in zip(steps(trainer), steps(exact), strict=True):
        assert half["gate/lam_mean"] == pytest.approx(full["gate/lam_mean"], abs=0.03)
        assert half["loss"] == pytest.approx(full["loss"], rel=0.1)


def test_resumed_run_goes_on_as_it_would_have(make: Callable[..., Any], tmp_path: Path) -> None:
    settings = {"gate": "4,2,-1,-3", "shuffle": True, "greedy": True, "max_steps": 4, "save_strategy": "steps"}
    whole = make(save_steps=2, **settings)
    start = weights(whole)
    whole.train()
    again = make(save_steps=2, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert_close(weights(again), weights(whole), start, share=1e-4)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "gatespace, gate 4,2,-1,-3" in card
    assert "agarwal" not in card  # the method of the trainer that is built upon
    assert "- gatespace" in card.split("---")[1]
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    assert "gate/lam_mean" in state["log_history"][0]


def test_shuffled_gate_keeps_its_values_and_loses_its_places(
    make: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    plain, shuffled = make(gate="4,4,-1,0"), make(gate="4,4,-1,0", shuffle=True)
    found = {}
    for name, trainer in (("plain", plain), ("shuffled", shuffled)):
        trainer.model.eval()
        found[name] = trainer.compute_loss(trainer.model, batch).item()
    assert found["plain"] != pytest.approx(found["shuffled"], rel=1e-3)
    for name in ("gate/lam_mean", "gate/lam_sd", "gate/h"):
        assert shuffled._metrics["eval"][name] == pytest.approx(plain._metrics["eval"][name], rel=1e-6)
    assert shuffled.compute_loss(shuffled.model, batch).item() == found["shuffled"]
    shuffled.state.global_step = 1
    assert shuffled.compute_loss(shuffled.model, batch).item() != pytest.approx(found["shuffled"], rel=1e-3)
