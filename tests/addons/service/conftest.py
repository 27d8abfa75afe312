"""The tiny pair, its teacher, and the fixtures of training and of the command line that these tests share."""

from __future__ import annotations

import pytest

from gatespace.models import Model, TinyPair, load_model
from tests.cli.conftest import python, run
from tests.training.conftest import (
    one_thread,
    own_cache,
    shared_place,
    student,
    synthetic,
    taught,
    tiny,
    train_config,
)

__all__ = [
    "one_thread",
    "own_cache",
    "python",
    "run",
    "shared_place",
    "student",
    "synthetic",
    "taught",
    "tiny",
    "train_config",
]


@pytest.fixture(scope="session")
def model(tiny: TinyPair) -> Model:
    """The teacher that is served."""
    return load_model(str(tiny.teacher))
