"""Models of the tiny pair, loaded afresh for every test, and folders of other networks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.models import Model, TinyPair, load_model


@pytest.fixture
def student(tiny: TinyPair) -> Model:
    return load_model(str(tiny.student))


@pytest.fixture
def teacher(tiny: TinyPair) -> Model:
    return load_model(str(tiny.teacher))


@pytest.fixture
def saved(student: Model, tmp_path: Path) -> Callable[..., Path]:
    """A network of any configuration in a folder, with the tokenizer of the tiny pair."""

    def save(network: Any, name: str = "model", *, tokenizer: bool = True) -> Path:
        network.save_pretrained(tmp_path / name)
        if tokenizer:
            student.tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
