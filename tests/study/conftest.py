"""A study small enough to be trained in a test, and a folder in which all its tests share what is expensive."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gatespace.cli.app import app
from gatespace.config import StudyConfig, parse_config
from gatespace.study.jobs import Job, Outcome, Perform, execute, perform

ROWS = 40
"""Of a split, that a run is evaluated on."""


def settings(**changes: Any) -> dict[str, Any]:
    """The mapping of a small study on generated messages: real models, real training, seconds a run."""
    small = {
        "name": "small",
        "tasks": {
            "messages": {"task": {"name": "synthetic", "brief": True, "split": {"teacher": 0.5, "distill": 0.1}}}
        },
        "teach": {
            "teacher": {"model": "tiny", "steps": 40, "optimizer": {"lr": 2e-3}},
            "student": {"model": "tiny-student", "steps": 25, "optimizer": {"lr": 2e-3}},
        },
        "train": {
            "steps": 3,
            "batch_size": 8,
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_new_tokens": 8},
            "evaluation": {"max_new_tokens": 8, "batch_size": 100, "limit": ROWS, "probabilities": True},
            "engine": {"precision": "fp32"},
            "checkpoint": {"every": 1},
        },
        "points": ["G4", "G5"],
        "seeds": [42, 2],
        "axes": {"published": ["todi"], "controls": {"shuffled": ["G5"]}, "isolation": {"match": ["lam"]}},
        "workers": 2,
    }
    return small | changes


def study(**changes: Any) -> StudyConfig:
    return parse_config(StudyConfig, settings(**changes))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are built, once for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "study-cache"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(autouse=True)
def own_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATESPACE_CACHE", str(shared_cache))


class InlineEngine:
    """Does each job in this process, at once: processes cost more time than what most tests have them do."""

    slots = 1

    def __init__(self, perform: Perform = perform) -> None:
        self._perform = perform
        self._ended: list[tuple[str, Outcome]] = []

    def start(self, name: str, job: Job) -> None:
        self._ended.append((name, execute(job, self._perform)))

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None: ...


@pytest.fixture
def cli_run() -> Callable[..., Result]:
    """Call the command in this process."""
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})
    return lambda *words: runner.invoke(app, [str(word) for word in words])
