"""The suite of the simulated device, in processes of its own: a backend cannot be taken back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUNS = "numbers_of_the_cpu or bfloat16"


@pytest.mark.parametrize(
    "some", [RUNS, pytest.param(f"not ({RUNS})", marks=pytest.mark.long)], ids=["runs", "the rest"]
)
def test_what_holds_on_a_device_that_is_not_the_cpu(some: str) -> None:
    suite = Path(__file__).with_name("on_device.py")
    command = [sys.executable, "-m", "pytest", str(suite), "-k", some, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
