"""Several processes do a run together and come to the numbers of one, but for rounding: two of them, over gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from gatespace.addons.parallel.processes import Distributed
from gatespace.addons.service.server import TeacherServer
from gatespace.config import TeachConfig, TrainConfig, parse_config
from gatespace.files import read
from gatespace.models import TinyPair, load_model
from gatespace.training import train as run
from gatespace.training.processes import ONE

pytestmark = pytest.mark.long

WORKER = Path(__file__).with_name("process_worker.py")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Nine rows as 4 + 5, two or three in a micro-batch: the processes have different numbers of micro-batches.
    "mixed parts": {
        "batch_size": 9,
        "engine": {"micro_tokens": 70, "activation_checkpointing": True},
        "rollout": {"from": {"student": 0.4, "teacher": 0.3, "gold": 0.3}, "max_new_tokens": 8},
    },
    "several": {
        "batch_size": 4,
        "rollout": {"per_prompt": 2, "max_new_tokens": 8},
        "objective": {"method": "sampled_reverse_kl"},
    },
    "stale": {
        "rollout": {"staleness": 1, "max_new_tokens": 8},
        "objective": {"gate": {"a": 4, "c": -1, "lead_in_processes": -2}},  # a signal that the plugin registers
        "plugins": [str(WORKER.with_name("own_signal.py"))],
    },
}
ONLY_DDP: dict[str, dict[str, Any]] = {"lora": {"pair": {"lora": {"r": 4}}}}


def settings(kind: str, teacher: Path, tiny: TinyPair, output: Path, parallel: str = "ddp") -> dict[str, Any]:
    found: dict[str, Any] = {
        "task": {"name": "synthetic", "brief": True},
        "pair": {"student": str(tiny.student), "teacher": str(teacher / "model")},
        "objective": {"gate": "H2"},
        "rollout": {"max_new_tokens": 8},
        "engine": {"precision": "fp32", "threads": 1, "parallel": parallel},
        "teacher": {"cache": None},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
        "evaluation": {"every": 0, "final": ["val"], "limit": 51, "max_new_tokens": 8},
        "trace": {"tokens_every": 2},
        "steps": 4,
        "batch_size": 6,
        "output": str(output),
    }
    for section, changed in {**KINDS, **ONLY_DDP}[kind].items():
        found[section] = {**found[section], **changed} if isinstance(changed, dict) else changed
    if "method" in found["objective"]:
        del found["objective"]["gate"]
    return found


def teaching(tiny: TinyPair, output: Path, parallel: str = "ddp") -> dict[str, Any]:
    return {
        "task": {"name": "synthetic", "brief": True},
        "model": str(tiny.teacher),
        "engine": {"precision": "fp32", "threads": 1, "parallel": parallel, "micro_tokens": 120},
        "evaluation": {"every": 0, "final": ["val"], "limit": 51, "probabilities": True},
        "optimizer": {"lr": 3e-3},
        "steps": 4,
        "batch_size": 9,
        "output": str(output),
    }


def launch(plan: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(WORKER),
        str(plan),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-12000:]


@pytest.fixture(scope="module")
def pairs(shared_place: Path, taught: Path, tiny: TinyPair) -> Path:
    """All runs by two processes, made by the first test worker that needs them."""
    place = shared_place / "processes"
    with FileLock(shared_place / "processes.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(shared_place / "cache"))
        if not (place / "done").exists():
            place.mkdir(exist_ok=True)
            runs = [
                settings(kind, taught, tiny, place / f"{kind}-{parallel}", parallel)
                for parallel in ("ddp", "fsdp")
                for kind in (KINDS if parallel == "fsdp" else {**KINDS, **ONLY_DDP})
            ]
            runs += [teaching(tiny, place / f"teach-{parallel}", parallel) for parallel in ("ddp", "fsdp")]
            plan = place / "plan.json"
            plan.write_text(json.dumps({"student": str(tiny.student), "runs": runs}))
            launch(plan)
            (place / "done").write_text("")
    return place


def compare(one: Path, two: Path) -> None:
    """Same rows, same tokens, losses and weights to float32's rounding."""
    ours, theirs = read(one / "metrics.jsonl"), read(two / "metrics.jsonl")
    assert len(ours) == len(theirs) == 4
    for left, right in zip(ours, theirs, strict=True):
        assert set(left) == set(right)
        of_some = {
            "kappa_share",
            "student_entropy_nats",
            "teacher_entropy_nats",
            "teacher_entropy_share",
            "top_k_overlap",
        }
        for name in set(left) - of_some - {"lam_hist"}:  # κ and others are of the first rows of a process
            expected = None if left[name] is None else pytest.approx(left[name], rel=2e-4, abs=2e-6)
            assert right[name] == expected, (left["step"], name)
    weights, others = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            others[name], weight, rtol=1e-3, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    left, right = (json.loads((folder / "summary.json").read_text()) for folder in (one, two))
    assert left["evaluation"]["val"]["metrics"]["count"] == right["evaluation"]["val"]["metrics"]["count"] == 51
    lines = [list(map(json.loads, (folder / "predictions-val.jsonl").open())) for folder in (one, two)]
    assert [[line["index"] for line in found] for found in lines] == [list(range(51))] * 2
    for ours, theirs in zip(*lines, strict=True):
        assert theirs.get("probabilities") == pytest.approx(ours.get("probabilities"), abs=1e-3)
    same = sum(ours["raw"] == theirs["raw"] for ours, theirs in zip(*lines, strict=True))
    assert same >= 49, "an answer is another one only where two tokens are equally probable"


@pytest.mark.parametrize("kind", [*KINDS, *ONLY_DDP])
def test_two_processes_come_to_the_numbers_of_one(
    kind: str, pairs: Path, taught: Path, tiny: TinyPair, tmp_path: Path
) -> None:
    run.train(parse_config(TrainConfig, settings(kind, taught, tiny, tmp_path / "one")))
    compare(tmp_path / "one", pairs / f"{kind}-ddp")
    if kind not in ONLY_DDP:
        compare(tmp_path / "one", pairs / f"{kind}-fsdp")


def test_two_processes_teach_as_one(pairs: Path, tiny: TinyPair, tmp_path: Path) -> None:
    run.teach(parse_config(TeachConfig, teaching(tiny, tmp_path / "one")))
    for parallel in ("ddp", "fsdp"):
        compare(tmp_path / "one", pairs / f"teach-{parallel}")


def test_they_write_the_same_responses(pairs: Path, taught: Path, tiny: TinyPair, tmp_path: Path) -> None:
    run.train(parse_config(TrainConfig, settings("plain", taught, tiny, tmp_path / "one")))
    ours = read(tmp_path / "one" / "tokens.jsonl")
    for parallel in ("ddp", "fsdp"):
        theirs = read(pairs / f"plain-{parallel}" / "tokens.jsonl")
        assert theirs, "the first process records its first rows"
        known = {(record["step"], record["index"]): record["ids"] for record in ours}
        for record in theirs:
            assert known[record["step"], record["index"]] == record["ids"]


def test_a_sharded_model_is_the_same_model(pairs: Path) -> None:
    found = [json.loads((pairs / f"shards.{rank}").read_text()) for rank in range(2)]
    assert [one["loaded"] for one in found] == ["cpu", "meta"], "one process reads the weights"
    for one in found:
        assert one["whole"] == 0, "no device has held the whole model"
        assert one["own"] < 0.52 * one["size"]
    assert sum(one["own"] for one in found) == found[0]["size"]
    assert [one["after"] for one in found] == [found[0]["before"], None]


def test_memory_that_runs_out_in_one_process_ends_all(pairs: Path) -> None:
    first, second = ((pairs / f"shards.error.{rank}").read_text() for rank in range(2))
    assert first.startswith("RunError: process 1 of 2 failed")
    assert "OutOfMemoryError: out of memory" in first
    assert second.startswith("OutOfMemoryError")  # with its own traceback


def test_processes_are_part_of_the_identity(pairs: Path, taught: Path, tiny: TinyPair, tmp_path: Path) -> None:
    from gatespace.errors import UsageError

    with pytest.raises(UsageError, match="2 fsdp processes"):
        run.train(parse_config(TrainConfig, settings("plain", taught, tiny, pairs / "plain-fsdp")))


def test_shares_are_neighbours_and_nearly_equal() -> None:
    assert list(ONE.share(5)) == [0, 1, 2, 3, 4]
    for size in (2, 3, 7):
        for count in (size, 10, 72):
            shares = Distributed(0, size).shares(count)
            assert [place for share in shares for place in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


# ---------------------------------------------------------------------------------------------------- by command


def command(config: dict[str, Any], place: Path, *flags: str) -> list[str]:
    file = place / "run.json"
    file.write_text(json.dumps(config))
    return [sys.executable, "-m", "gatespace", "train", str(file), "--trust-plugins", "--processes", "2", *flags]


def start(words: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_killed_run_goes_on_to_the_same_bytes(pairs: Path, taught: Path, tiny: TinyPair, tmp_path: Path) -> None:
    """Sharded and one step off policy: everything that a checkpoint has to gather."""
    config = settings("stale", taught, tiny, tmp_path / "run", "fsdp") | {"checkpoint": {"every": 1}}
    process = start(command(config, tmp_path, "--quiet"))
    deadline = time.monotonic() + 600
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")) and process.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "run" / "done").exists(), "it was killed too late"
    process = start(command(config, tmp_path, "--json"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "resuming from step" in err
    assert "each of the 2 processes holds the whole teacher" in err
    assert json.loads(out)["steps"] == 4
    whole = pairs / "stale-fsdp"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    name = "model/model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def test_accelerate_launches_it_with_one_teacher_for_all(
    pairs: Path, taught: Path, tiny: TinyPair, tmp_path: Path
) -> None:
    """A service gives the bytes of a teacher in every process."""
    config = settings("plain", taught, tiny, tmp_path / "run")
    with TeacherServer(load_model(str(taught / "model")), "tcp://127.0.0.1:0") as server:
        config["pair"]["teacher"] = server.address
        out, err = accelerated(command(config, tmp_path)[4])
    assert "model  " in out
    assert "holds the whole teacher" not in err
    whole = pairs / "plain-fsdp"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def accelerated(config: str) -> tuple[str, str]:
    """What a run that accelerate has launched writes."""
    options = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1"]
    options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    process = start([sys.executable, "-m", "accelerate.commands.launch", *options, "-m", "gatespace", "train", config])
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out, err


def test_an_error_is_told_once_and_ends_all(taught: Path, tiny: TinyPair, tmp_path: Path) -> None:
    config = settings("plain", taught, tiny, tmp_path / "run") | {"batch_size": 1}
    process = start(command(config, tmp_path))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 2
    assert err.count("every process needs a row") == 1
    assert "Traceback" not in err
    assert not out


def test_one_that_dies_ends_the_others(taught: Path, tiny: TinyPair, tmp_path: Path) -> None:
    config = settings("plain", taught, tiny, tmp_path / "run") | {"steps": 10000}
    process = start(command(config, tmp_path, "--quiet"))
    deadline = time.monotonic() + 600
    while not (tmp_path / "run" / "metrics.jsonl").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    children = [int(child) for child in found.stdout.split()]
    assert len(children) == 2
    os.kill(children[-1], signal.SIGKILL)
    process.communicate(timeout=600)
    assert process.returncode not in (0, None)
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
