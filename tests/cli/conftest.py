from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gatespace.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
Process = subprocess.CompletedProcess[str]


@pytest.fixture
def run() -> Callable[..., Result]:
    """Call the app in this process, at a width of 100 columns."""
    return lambda *args: CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, list(args))


@pytest.fixture
def python() -> Callable[..., Process]:
    """Call a Python of its own that sees the source tree."""

    def call(*args: str, **env: str) -> Process:
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **env}
        return subprocess.run(
            [sys.executable, *args], capture_output=True, text=True, encoding="utf-8", env=environment, timeout=120
        )

    return call


@pytest.fixture
def gatespace(python: Callable[..., Process]) -> Callable[..., Process]:
    """Call `python -m gatespace`."""
    return lambda *args, **env: python("-m", "gatespace", *args, **env)
