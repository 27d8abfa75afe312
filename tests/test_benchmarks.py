"""The benchmarks run, and what they computed is right; how fast they were is not asked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def _run(script: str, *arguments: str, cache: Path | None = None) -> dict[str, Any]:
    """The JSON of a quick run."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick", "--json", *arguments],
        env=os.environ | ({} if cache is None else {"GATESPACE_CACHE": str(cache)}),
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_loss_benchmark_measures_and_is_right() -> None:
    rows = _run("loss.py", "--check")["results"]  # --check: exit 1 where a number is inaccurate
    assert {(row["contender"], row["dtype"]) for row in rows} == {
        (contender, dtype) for contender in ("naive", "gatespace") for dtype in ("fp32", "bf16")
    }


@pytest.mark.slow
def test_step_benchmark_measures_every_contender_on_the_same_work(tmp_path: Path) -> None:
    rows = {row["contender"]: row for row in _run("step.py", "--batch", "3", cache=tmp_path)["results"]}
    assert list(rows) == ["trl", "trl-autocast", "plain", "gatespace-cold", "gatespace-warm"]
    for name, row in rows.items():
        if name.startswith("trl") and "unavailable" in row:
            assert "cannot be imported" in row["unavailable"]  # a peer need not be there; it must not fail otherwise
            continue
        phases = sum(row[f"wall_{phase}"] for phase in ("rollout", "score", "update", "optimizer"))
        assert 0 < phases <= row["wall"] * 1.001
        assert phases > 0.8 * row["wall"]
        assert 1 <= row["mean_length"] <= 8
        assert row["peak_mib"] > 0
    cold, warm = rows["gatespace-cold"], rows["gatespace-warm"]
    assert cold["hits"] == 0
    assert cold["misses"] == 3 * cold["mean_length"]
    assert (warm["hits"], warm["misses"]) == (cold["misses"], 0)


@pytest.mark.slow
def test_ladder_computes_the_same_on_every_rung(tmp_path: Path) -> None:
    rungs = ("whole", "prefix-rollout", "fused", "warm", "engine-warm")
    # --check: exit 1 where fp32 rungs differ, a rung does not run, or a warm cache is not warm
    found = _run("ladder.py", "--check", "--batch", "3", "--rungs", ",".join(rungs), cache=tmp_path)
    rows = {row["rung"]: row for row in found["results"]}
    assert tuple(rows) == rungs
    assert rows["whole"]["gradient_norm"] > 0
    assert rows["prefix-rollout"]["same_responses"] == 6  # two steps of three rows: the sampler is fed by named streams
    assert 0 < found["largest_difference"]["fp32"]["gradient_error"] < 1e-4
    assert found["largest_difference"]["bf16"]["gradient_error"] < 0.2
    for row in rows.values():
        assert sum(row["limit_wall_parts"].values()) == pytest.approx(row["limit_wall"])
        assert 0 < row["share_wall"] < 1
    assert "teacher" in rows["fused"]["limit_wall_parts"]
    assert "teacher" not in rows["warm"]["limit_wall_parts"]
