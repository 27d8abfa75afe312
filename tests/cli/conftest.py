from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
            [sys.executable, *args], capture_output=True, text=True, encoding="utf-8", env=environment, timeout=600
        )

    return call


@pytest.fixture
def gatespace(python: Callable[..., Process]) -> Callable[..., Process]:
    """Call `python -m gatespace`."""
    return lambda *args, **env: python("-m", "gatespace", *args, **env)


TEACH = (
    "teach", "--task", "synthetic", "--model", "tiny", "--brief", "--lr", "0.003", "--steps", "30",
    "--set", "evaluation.limit=40", "--set", "engine.precision=fp32",
)  # fmt: skip
"""A real teacher in a few seconds: tiny, and well above the best constant."""


@dataclass(frozen=True)
class Taught:
    """A run of `gatespace teach` that is done."""

    folder: Path
    result: Result

    @property
    def command(self) -> list[str]:
        return [*TEACH, "--output", str(self.folder)]


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory) -> Iterator[Path]:
    """A cache for these tests, so that they leave the user's alone; and no network."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(place))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("GATESPACE_TWEETEVAL", raising=False)
        yield place


@pytest.fixture(scope="session")
def cli(own_cache) -> Callable[..., Result]:
    """Call the app in this process, with a cache of its own and with standard input."""

    def call(*args: object, stdin: str | bytes = "") -> Result:
        result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, [*map(str, args)], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def child(own_cache) -> dict[str, str]:
    """The environment of a process of its own that sees the source tree and the cache of these tests."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def taught(cli, tmp_path_factory) -> Taught:
    """A teacher, made once for all tests of a process."""
    folder = tmp_path_factory.mktemp("teach") / "run"
    result = cli(*TEACH, "--output", folder)
    assert result.exit_code == 0, result.stderr
    return Taught(folder, result)


@pytest.fixture
def distil(taught) -> list[str]:
    """The command that distils the teacher into a tiny student, but for its length and its folder."""
    return [
        "train", "--teacher", str(taught.folder), "--student", "tiny", "--task", "synthetic", "--brief",
        "--lr", "0.001", "--batch-size", "6", "--set", "engine.precision=fp32", "--set", "evaluation.final=[test]",
        "--set", "evaluation.limit=10", "--set", "rollout.max_new_tokens=8",
    ]  # fmt: skip
