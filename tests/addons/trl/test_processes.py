"""Two processes that train together end where one ends that has the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.models.tiny import TinyPair

pytest.importorskip("trl", reason="no TRL here; `make test-engines` makes an environment with it")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

WORKER = Path(__file__).with_name("process_worker.py")


def run(job: str, pair: TinyPair, out: Path, settings: dict[str, Any], processes: int) -> dict[str, Any]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    out.mkdir()
    command = [sys.executable, *launch, WORKER, job, pair.student, pair.teacher, out, json.dumps(settings)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads((out / "told.json").read_text(encoding="utf-8"))
    return told


@pytest.mark.slow
def test_two_processes_are_one(tiny: TinyPair, tmp_path: Path) -> None:
    common = {"gate": "4,2,-1,-3", "max_steps": 2}
    weights, told = {}, {}
    for processes, size in ((1, 4), (2, 2)):
        out = tmp_path / f"{processes}"
        told[processes] = run("train", tiny, out, {**common, "per_device_train_batch_size": size}, processes)
        weights[processes] = load_file(out / "weights.safetensors")
    assert told[2]["processes"] == 2
    start = AutoModelForCausalLM.from_pretrained(tiny.student).state_dict()
    for name, value in weights[1].items():
        moved = (value - start[name]).norm()
        assert (weights[2][name] - value).norm() <= 2e-3 * moved, name
    assert any(not torch.equal(value, start[name]) for name, value in weights[1].items())
    for one, two in zip(told[1]["logs"], told[2]["logs"], strict=True):
        assert one["completions/min_length"] < one["completions/max_length"]
        names = [name for name in one if name.startswith("gate/") or name in ("grad_norm", "entropy")]
        assert len(names) > 10
        assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-3)
    assert told[2]["run"] == pytest.approx(told[1]["run"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["head with the rest", "head of its own"])
def test_sharded_networks_have_the_gradient_of_whole_ones(tiny: TinyPair, tmp_path: Path, own: bool) -> None:
    told = run("shard", tiny, tmp_path / "out", {"gate": "4,2,-1,-3", "head_of_its_own": own}, processes=2)
    assert told["sharded"]
    assert "lm_head.weight" in told["far"]
    assert max(told["far"].values()) < 1e-4
