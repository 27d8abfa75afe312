"""A student that was distilled at G5, made once for cards and exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import child, cli, own_cache, taught

__all__ = ["ROWS", "TRAIN", "child", "cli", "own_cache", "taught", "trained"]

ROWS = 10
TRAIN = (
    "train", "--student", "tiny", "--task", "synthetic", "--brief", "--lr", "0.002", "--batch-size", "12",
    "--set", "engine.precision=fp32", "--set", "evaluation.final=[test, val]", "--set", f"evaluation.limit={ROWS}",
    "--set", "rollout.max_new_tokens=8",
)  # fmt: skip


@pytest.fixture(scope="package")
def trained(cli, taught, tmp_path_factory) -> Path:
    """The folder of the run."""
    folder = tmp_path_factory.mktemp("publish") / "run"
    result = cli(*TRAIN, "--teacher", taught.folder, "--steps", "25", "--gate", "G5", "--output", folder)
    assert result.exit_code == 0, result.stderr
    return folder
