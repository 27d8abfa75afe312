"""The benchmarks run, and what they computed agrees with float64; how fast they were is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "loss.py"


@pytest.mark.slow
def test_loss_benchmark_measures_and_is_right() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json", "--check"],  # --check: exit 1 where a number is inaccurate
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert {(row["contender"], row["dtype"]) for row in rows} == {
        (contender, dtype) for contender in ("naive", "gatespace") for dtype in ("fp32", "bf16")
    }
