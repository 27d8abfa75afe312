"""A tiny model for scripted servers, and a real vLLM server where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gatespace.addons.vllm.process import VllmProcess
from gatespace.cli.app import app
from gatespace.config import TeachConfig, parse_config
from gatespace.models import Model, build_tiny, load_model
from gatespace.tasks import synthetic_task
from tests.addons.vllm.scripted import Scripted


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(build_tiny(synthetic_task(size=600), tmp_path_factory.mktemp("tiny")).teacher))


@pytest.fixture
def scripted(tiny: Model) -> Iterator[Scripted]:
    with Scripted(tiny) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM."""
    python = os.environ.get("GATESPACE_VLLM", "")
    if not python or not os.access(python, os.X_OK):
        pytest.skip(f"no vLLM: $GATESPACE_VLLM is {python!r} and no interpreter; `make test-vllm` installs one")
    return python


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a tiny teacher that has learned a little of the synthetic task."""
    from gatespace.training.train import teach

    folder = tmp_path_factory.mktemp("taught") / "run"
    settings = {
        "task": {"name": "synthetic", "brief": True},
        "model": "tiny",
        "steps": 15,
        "optimizer": {"lr": 5e-3},
        "engine": {"precision": "fp32"},
        "evaluation": {"every": 0, "final": ["test"], "limit": 20, "max_new_tokens": 8},
        "output": str(folder),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        teach(parse_config(TeachConfig, settings))
    return folder


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Call the app in this process."""

    def call(*args: object) -> Result:
        result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, [*map(str, args)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture(scope="session")
def student(smollm2: Path) -> Model:
    """SmolLM2 in float32."""
    return load_model(str(smollm2))


@pytest.fixture(scope="session")
def served(vllm_python: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """SmolLM2 as it is, with the head tied to the embedding."""
    log = tmp_path_factory.mktemp("vllm") / "tied.log"
    with VllmProcess(vllm_python, smollm2, log=log, dtype="float32", max_logprobs=16, weights=True) as process:
        yield process
