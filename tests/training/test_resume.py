"""A run that is killed at any moment and started again ends with the bytes of one that was not.

Run as a module it is a nursery: it imports torch and transformers once, and forks for each life of a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TeachConfig, TrainConfig, dump_yaml, load_config, parse_config
from gatespace.files import read
from gatespace.models import TinyPair
from gatespace.training.progress import Silent

from .conftest import TASK

ROOT = Path(__file__).resolve().parents[2]
Point = list[Any]
Outcome = dict[str, Any]

# Where a life ends: at a report of the run, at an operation on a file, or after some seconds.
TRAIN: list[Point] = [
    ["at", "open", ".identity.json.tmp"],
    ["evaluating", 32, 0],
    ["step", 1],
    ["at", "os.rename", "checkpoints/.step-000002.new"],
    ["step", 3],
    ["evaluating", 32, 3],
    ["at", "os.rename", "checkpoints/.step-000002.old"],
    ["at", "shutil.rmtree", "checkpoints/.step-000004.old"],
    ["step", 7],
    ["evaluating", 32, 8],
    ["at", "os.rename", ".model.new"],
    ["at", "open", ".summary.json.tmp"],
    ["at", "os.rename", ".model.new"],  # now between taking the old one away and putting the new one in its place
    ["at", "open", ".done.tmp"],
    ["at", "shutil.rmtree", "train/checkpoints"],
]
TEACH: list[Point] = [
    ["step", 3],
    ["at", "os.rename", "checkpoints/.step-000004.new"],
    ["at", "os.rename", ".model.new"],
]


# ---------------------------------------------------------------------------------------------------- the nursery


class Doomed(Silent):
    """Progress that kills its process at a point."""

    def __init__(self, point: Point | None) -> None:
        self._point = point or ["never"]
        self._done = 0
        if self._point[0] == "at":
            sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == self._point[1] and any(self._point[2] in str(argument) for argument in arguments):
            die()

    def note(self, text: str) -> None:
        if "resuming from step" in text:
            self._done = int(text.split()[3])

    def step(self, step: int, steps: int, record: Any, timing: Any) -> None:
        self._done = step
        if self._point == ["step", step]:
            die()

    def evaluating(self, split: str, done: int, total: int) -> None:
        if self._point == ["evaluating", done, self._done]:
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def life(kind: str, path: Path, point: Point | None) -> Outcome:
    """Fork a process that runs, and tell how it ended."""
    from gatespace.training.train import teach, train

    child = os.fork()
    if child == 0:
        code = 1
        try:
            if kind == "train":
                train(load_config(TrainConfig, path), Doomed(point))
            else:
                teach(load_config(TeachConfig, path), Doomed(point))
            code = 0
        except BaseException as error:
            print(f"{point}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    started = time.monotonic()
    if point is not None and point[0] == "after":
        time.sleep(point[1])
        os.kill(child, signal.SIGKILL)  # not yet waited for, so the number is still this child's
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {
        "point": point,
        "killed": killed,
        "code": None if killed else os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - started,
        "records": len(read(load_config(_kind(kind), path).output / "metrics.jsonl")),
    }


def _kind(kind: str) -> type[TrainConfig] | type[TeachConfig]:
    return TrainConfig if kind == "train" else TeachConfig


def render(config: TrainConfig | TeachConfig, name: str, role: str) -> None:
    """Leave the prompts to the children in tokens: each of them would begin by rendering thousands."""
    from gatespace.training.setup import ModelSpec, encoder_for, load_shapes, material

    data = material(config.task, "teacher" if role == "teacher" else "distill")
    splits = (*config.evaluation.final, config.evaluation.split)
    encoder_for(data, load_shapes(ModelSpec(name, role, role), data.task), splits, share=True)


def nursery() -> None:
    # Imported here, once, and not by every child. Nothing is computed in this process: threads do not survive a fork.
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM  # noqa: F401

    rendered: set[str] = set()
    for line in sys.stdin:
        order = json.loads(line)
        config = load_config(_kind(order["kind"]), Path(order["config"]))
        name, role = (config.model, "teacher") if isinstance(config, TeachConfig) else (config.pair.student, "student")
        if name not in rendered:
            render(config, name, role)
            rendered.add(name)
        outcome = life(order["kind"], Path(order["config"]), order["point"])
        print(json.dumps(outcome), flush=True)


# ---------------------------------------------------------------------------------------------------- the tests


class Nursery:
    def __init__(self, place: Path, cache: Path) -> None:
        self._config = place / "config.yaml"
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.test_resume"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "GATESPACE_CACHE": str(cache),
            },
        )

    def live(self, config: TrainConfig | TeachConfig, point: Point | None = None) -> Outcome:
        kind = "train" if isinstance(config, TrainConfig) else "teach"
        self._config.write_text(dump_yaml(config))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"kind": kind, "config": str(self._config), "point": point}) + "\n")
        self._process.stdin.flush()
        outcome: Outcome = json.loads(self._process.stdout.readline())
        return outcome

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def born(shared_place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"), shared_place / "cache")
    yield nursery
    nursery.close()


@pytest.fixture
def train_in(train_config: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., TrainConfig]:
    """A run of eight steps in several micro-batches, with looks and checkpoints at different steps."""

    def make(name: str, *, cache: str | None = None, shuffle: bool = False, model: bool = True) -> TrainConfig:
        return train_config(
            steps=8,
            engine={"micro_tokens": 150},
            optimizer={"schedule": "cosine"},
            rollout={"from": {"student": 0.7, "teacher": 0.2, "gold": 0.1}},
            objective={"gate": [1.5, -1.0, 0.3, 2.5], "shuffle": shuffle},
            evaluation={"every": 3, "limit": 70, "batch_size": 32, "max_new_tokens": 6, "final": ["val"]},
            checkpoint={"every": 2, "model": model},
            trace={"tokens_every": 3, "rollouts": 2},
            teacher={"cache": cache and str(tmp_path / cache)},
            output=str(tmp_path / name / "train"),
        )

    return make


def numbers(folder: Path) -> dict[str, bytes]:
    """Everything in a run folder that no clock has a part in."""
    others = ("timings.jsonl", "config.yaml", "environment.json", ".lock")
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in others}


def assert_same_numbers(found: Path, wanted: Path, *, but: tuple[str, ...] = ()) -> None:
    one, other = numbers(found), numbers(wanted)
    assert set(one) == set(other)  # nothing is missing, and no scrap of a killed life is left
    assert {"metrics.jsonl", "summary.json", "predictions-val.jsonl"} <= set(other)
    assert ("model/model.safetensors" in other) == (json.loads(other["summary.json"])["model"] is not None)
    for name, content in other.items():
        assert name in but or one[name] == content, name


def test_a_killed_run_loses_its_patience_at_the_same_step(
    born: Nursery, train_config: Callable[..., TrainConfig], taught: Path, tmp_path: Path
) -> None:
    """With alarms on the way, and at the end the weights of an evaluation before checkpoints that are gone."""

    def make(name: str) -> TrainConfig:
        return train_config(
            pair={"student": str(taught / "model")},
            steps=12,
            optimizer={"lr": 0.01},
            evaluation={"every": 1, "limit": 40, "batch_size": 20, "patience": 3},
            checkpoint={"every": 3, "select": "best"},
            alarms={"window": 1, "length": 1.01, "legal": 1.0},
            trace={"tokens_every": 1},
            teacher={"cache": None},
            output=str(tmp_path / name / "train"),
        )

    straight, killed = make("straight"), make("killed")
    assert born.live(straight)["code"] == 0
    summary = json.loads((straight.output / "summary.json").read_text())
    assert summary["steps"] < 12
    last, best = summary["steps"], summary["chosen_step"]
    assert last == best + 3
    assert (straight.output / "alarms.jsonl").stat().st_size > 0
    # before anything is known, at the evaluation of the best, between it and its checkpoint, after it, at the very end
    points: list[Point] = [
        ["evaluating", 20, 0],
        ["evaluating", 20, best],
        ["at", "os.rename", f"checkpoints/.step-{best:06d}.new"],
        ["step", best + 2],
        ["evaluating", 20, last],
        ["at", "open", ".summary.json.tmp"],
    ]
    for point in points:
        assert born.live(killed, point)["killed"], point
    assert born.live(killed)["code"] == 0
    assert_same_numbers(killed.output, straight.output)


def test_a_killed_control_without_its_model(born: Nursery, train_in: Callable[..., TrainConfig]) -> None:
    settings: dict[str, Any] = {"shuffle": True, "model": False}
    straight, killed = train_in("straight", **settings), train_in("killed", **settings)
    assert born.live(straight)["code"] == 0
    assert born.live(killed, ["step", 5])["killed"]
    # killed once more with the model already written, by a life that was asked for it
    assert born.live(train_in("killed", shuffle=True), ["at", "open", ".summary.json.tmp"])["killed"]
    assert (killed.output / "model").exists()
    assert born.live(killed)["code"] == 0
    assert not (killed.output / "model").exists()
    assert_same_numbers(killed.output, straight.output)
    run = json.loads((killed.output / "summary.json").read_text())["run"]
    assert run["lam_sd"] > 0
    assert 0 < run["lam_rkl_mean"] < 1


@pytest.mark.slow
def test_train_killed_at_every_stage(born: Nursery, train_in: Callable[..., TrainConfig]) -> None:
    straight, killed = train_in("straight", cache="one"), train_in("killed", cache="other")
    assert born.live(straight)["code"] == 0
    for point in TRAIN:
        outcome = born.live(killed, point)
        assert outcome["killed"], outcome
    # what a killed run leaves open it does not leave for long
    assert (killed.output / "done").exists()
    assert born.live(killed)["code"] == 0
    assert_same_numbers(killed.output, straight.output)
    assert [record["step"] for record in read(killed.output / "timings.jsonl")] == list(range(1, 9))

    warm, none = train_in("warm", cache="one"), train_in("none")
    for config in (warm, none):
        assert born.live(config)["code"] == 0
        assert_same_numbers(config.output, straight.output)
    cold, hot, off = (
        [timing.get("cache_misses") for timing in read(config.output / "timings.jsonl")]
        for config in (straight, warm, none)
    )
    assert all(misses > 0 for misses in cold[:4])
    assert hot == [0] * 8
    assert off == [None] * 8


@pytest.mark.slow
@pytest.mark.long
def test_train_killed_at_random_moments(born: Nursery, train_in: Callable[..., TrainConfig]) -> None:
    straight, killed = train_in("straight"), train_in("killed", cache="scores")
    whole = born.live(straight)
    draw = random.Random(8)
    deaths = []
    while len(deaths) < 6:
        outcome = born.live(killed, ["after", draw.uniform(0.2, 1.0) * whole["seconds"]])
        if not outcome["killed"]:  # it was faster
            assert outcome["code"] == 0
            break
        deaths.append(outcome)
    assert len(deaths) >= 1
    assert born.live(killed)["code"] == 0
    assert_same_numbers(killed.output, straight.output)


@pytest.mark.slow
def test_teach_killed(born: Nursery, tiny: TinyPair, tmp_path: Path) -> None:
    def make(name: str) -> TeachConfig:
        settings = {
            "task": TASK,
            "model": str(tiny.teacher),
            "steps": 5,
            "batch_size": 6,
            "engine": {"precision": "bf16", "threads": 1},
            "optimizer": {"lr": 2e-3, "warmup_steps": 2},
            "evaluation": {"every": 2, "limit": 40, "max_new_tokens": 6, "final": ["val"]},
            "checkpoint": {"every": 2},
            "output": str(tmp_path / name),
        }
        return parse_config(TeachConfig, settings)

    straight, killed = make("straight"), make("killed")
    assert born.live(straight)["code"] == 0
    for point in TEACH:
        assert born.live(killed, point)["killed"], point
    assert born.live(killed)["code"] == 0
    assert_same_numbers(killed.output, straight.output)


if __name__ == "__main__":
    nursery()
