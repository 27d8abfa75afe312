"""A small study that was really trained, for all tests of archives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gatespace.cli.app import app
from gatespace.config import StudyConfig
from gatespace.runs import StudyFolder
from tests.study.conftest import InlineEngine, study


def small(**changes: Any) -> StudyConfig:
    few = {
        "teach": {"teacher": {"model": "tiny", "steps": 6, "optimizer": {"lr": 2e-3}}},
        "points": ["G5"],
        "seeds": [1, 2],
        "axes": {"restrictions": False, "isolation": None},
    }
    settings = few | changes
    return study(
        **settings,
        train={
            "pair": {"student": "tiny-student"},
            "steps": 2,
            "batch_size": 4,
            "rollout": {"max_new_tokens": 4},
            "evaluation": {"max_new_tokens": 4, "batch_size": 20, "limit": 20},
            "trace": {"tokens_every": 1, "rollouts": 2},
            "engine": {"precision": "fp32"},
        },
    )


def run(config: StudyConfig, folder: Path) -> Path:
    from gatespace.study.runner import run_study

    place = StudyFolder(folder)
    threads = place.begin(config, workers=1, threads=1)
    outlook = run_study(config, place, InlineEngine(), threads=threads)
    assert {*outlook.states.values()} == {"done"}, outlook.errors()
    return folder


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("archive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(place / "cache"))
        folder = run(small(), place / "small")
    return folder


@pytest.fixture
def trained(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of its own for each test."""
    monkeypatch.setenv("GATESPACE_CACHE", str(original.parent / "cache"))
    shutil.copytree(original, tmp_path / "small")
    return tmp_path / "small"


def cli(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"}).invoke(app, [str(word) for word in words])
