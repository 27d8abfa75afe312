"""A tiny pair that TRL accepts, and a maker of trainers. What needs TRL is imported where it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.models.tiny import STUDENT, TinyPair, build_tiny
from gatespace.tasks import Task, synthetic_task

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # TRL reports its use to the Hub
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="session")
def task() -> Task:
    return synthetic_task(size=600)


@pytest.fixture(scope="session")
def tiny(task: Task, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """TRL wants as many rows in both heads. The teacher is made to have preferences, which a fresh one has not."""
    from transformers import AutoModelForCausalLM

    pair = build_tiny(task, tmp_path_factory.mktemp("tiny"), student=replace(STUDENT, pad_to=64, spare=1))
    teacher = AutoModelForCausalLM.from_pretrained(pair.teacher)
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(5)
    teacher.save_pretrained(pair.teacher)
    return pair


@pytest.fixture(scope="session")
def prompts(task: Task) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": example.text}] for example in task.train[:64]]


@pytest.fixture
def make(tiny: TinyPair, prompts: list[Any], tmp_path: Path) -> Callable[..., Any]:
    """make(**settings) → a trainer of the tiny pair, with as few of TRL's own defaults changed as a CPU wants."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    from gatespace.addons.trl import GatedDistillationConfig, GatedDistillationTrainer

    def make(*, own: bool = True, greedy: bool = False, **settings: Any) -> Any:
        student = AutoModelForCausalLM.from_pretrained(tiny.student)
        options = {name: settings.pop(name) for name in ("peft_config", "eval_dataset") if name in settings}
        if greedy:
            settings["generation_kwargs"] = {"do_sample": False}
            # A fifth of the ids end a response, so that lengths differ.
            student.generation_config.eos_token_id = list(range(0, student.config.vocab_size, 5))
        common = {
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "max_completion_length": 8,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "shuffle_dataset": False,
        }
        kinds = (
            (GatedDistillationTrainer, GatedDistillationConfig) if own else (DistillationTrainer, DistillationConfig)
        )
        trainer, config = kinds
        return trainer(
            student,
            str(tiny.teacher),
            config(str(tmp_path / "out"), **(common | settings)),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(tiny.student),
            **options,
        )

    return make


@pytest.fixture
def batch(tiny: TinyPair) -> dict[str, torch.Tensor]:
    """Three responses of different lengths as TRL hands them over, one with a tool's answer inside."""
    generator = torch.Generator().manual_seed(3)

    def ids(width: int) -> torch.Tensor:
        return torch.randint(10, 400, (3, width), generator=generator)

    masks = {
        "prompt_mask": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]],
        "completion_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
        "tool_mask": [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    }
    return {"prompt_ids": ids(5), "completion_ids": ids(6), **{name: torch.tensor(m) for name, m in masks.items()}}
