"""What a run stands on: precision, device, micro-batches, models by name, and rows that teacher and student share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.config import EngineConfig, LoraConfig, TaskConfig, parse_config
from gatespace.errors import UsageError
from gatespace.models import Model, TinyPair
from gatespace.tasks import Task
from gatespace.training.clock import Clock
from gatespace.training.environment import environment
from gatespace.training.setup import ModelSpec, Placement, _fast_bf16, encoder_for, material, open_model, placement

from .conftest import TASK


def placed(**settings: Any) -> Placement:
    return placement(parse_config(EngineConfig, settings))


def test_precision_and_threads() -> None:
    assert placed(precision="fp32", device="cpu") == Placement("cpu", torch.float32)
    assert placed(precision="bf16", device="cpu") == Placement("cpu", torch.bfloat16)
    assert [placed(precision=name, device="cpu").precision for name in ("fp32", "bf16")] == ["fp32", "bf16"]
    assert placed(device="cpu").precision in ("fp32", "bf16")
    placed(threads=2)
    assert torch.get_num_threads() == 2
    placed(threads=1)
    placed()
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"engine\.device: this device cannot be used\n  got: cuda:1"):
        placed(device="cuda:1")
    assert placed().device == "cpu"


def test_a_device_that_sampling_cannot_run_on() -> None:
    with pytest.raises(UsageError, match=r"device: cannot be mps: it has no float64"):
        placed(device="mps")


def test_bf16_that_is_emulated_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA card before Ampere, which answers so."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not _fast_bf16("cuda:0")


def test_rows_of_teacher_and_student_are_disjoint() -> None:
    config = parse_config(TaskConfig, TASK)
    teacher, distill = (material(config, part) for part in ("teacher", "distill"))
    seen, unseen = ({row.text for row in one.rows} for one in (teacher, distill))
    assert not seen & unseen
    assert seen | unseen == {row.text for row in teacher.task.train}
    assert len(seen) == pytest.approx(0.6 * len(teacher.task.train), abs=1)
    both = material(parse_config(TaskConfig, {**TASK, "split": None}), "distill")
    assert len(both.rows) == len(teacher.task.train)


@pytest.mark.parametrize(
    "name, role, size",
    [("tiny", "student", 64), ("tiny", "teacher", 128), ("tiny-teacher", "student", 128), ("tiny-student", "x", 64)],
)
def test_tiny_is_built_in_the_size_of_its_role(synthetic: Task, name: str, role: str, size: int) -> None:
    model = open_model(ModelSpec(name, "pair.student", role), synthetic)
    assert model.name == name
    assert model.network.config.hidden_size == size


def test_a_model_that_is_not_there_is_said_with_its_setting(synthetic: Task, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pair\.teacher: no such model"):
        open_model(ModelSpec(str(tmp_path / "none"), "pair.teacher"), synthetic)


def test_adapters_start_by_seed_and_change_nothing(synthetic: Task, tiny: TinyPair) -> None:
    def opened(seed: int) -> Model:
        lora = LoraConfig(r=2, alpha=4.0)
        return open_model(ModelSpec("tiny", "pair.student", lora=lora, seed=seed), synthetic)

    one, same, other = (opened(seed) for seed in (1, 1, 2))
    first, second, third = (
        torch.cat([p.flatten() for n, p in model.network.named_parameters() if "lora_A" in n])
        for model in (one, same, other)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    trained = [name for name, p in one.network.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_the_prefix_is_shared_by_training_rows_and_splits(synthetic: Task, student: Model) -> None:
    data = material(parse_config(TaskConfig, TASK), "distill")
    encoder = encoder_for(data, student, ("val", "test"), share=True)
    apart = encoder_for(data, student, ("val",), share=False)
    assert len(encoder.prefix) > 10
    assert apart.prefix == []
    for row in (*data.rows[:20], *synthetic.val[:20], *synthetic.test[:20]):
        whole = data.prompt.render(student.tokenizer, row.text)
        assert encoder.prefix + encoder.suffix(row.text) == whole == apart.suffix(row.text)


def test_environment_says_what_a_run_was_computed_with() -> None:
    found = environment(Placement("cpu", torch.bfloat16))
    assert (found["device"], found["precision"], found["threads"]) == ("cpu", "bf16", torch.get_num_threads())
    assert found["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["packages"]["transformers"]


def test_clock_adds_up_and_counts_failures_too() -> None:
    clock = Clock()
    for _ in range(2):
        with clock("rollout"):
            sum(range(200_000))
    once = dict(clock.wall)
    with pytest.raises(ValueError), clock("score"):
        raise ValueError
    with clock("rollout"):
        sum(range(200_000))
    assert set(clock.wall) == set(clock.cpu) == {"rollout", "score"}
    assert clock.wall["rollout"] > once["rollout"] > 0
    assert clock.cpu["rollout"] > 0
