"""A teacher that has learned the synthetic task, and steps put together by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from gatespace.config import OptimizerConfig, TeachConfig, TrainConfig, parse_config
from gatespace.config.checking import VARIABLE
from gatespace.gating import LossOutput
from gatespace.gating.configured import build_objective
from gatespace.models import Model, TinyPair, build_tiny, load_model
from gatespace.models.body import body_of
from gatespace.models.encode import Encoder
from gatespace.tasks import Example, Prompt, Task, synthetic_task
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import Scores, ScoreSpec
from gatespace.teacher.several import Teachers
from gatespace.training.batches import Batches, Row
from gatespace.training.clock import Clock
from gatespace.training.distill import DistillationLoss
from gatespace.training.optimizer import Optimizer, Update
from gatespace.training.progress import Silent
from gatespace.training.rollouts import MicroBatch, Rollouts
from gatespace.training.train import teach, train

TASK = {"name": "synthetic", "brief": True}


class Listener(Silent):
    """Records its calls; ends the run after the step `stop`, before its checkpoint, as a kill would."""

    def __init__(self, stop: int | None = None) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []
        self._stop = stop

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, steps: int, record: Any, timing: Any) -> None:
        self.steps.append(step)
        if step == self._stop:
            raise KeyboardInterrupt


def written(folder: Path) -> dict[str, bytes]:
    """All that is the same in two runs of one configuration."""
    left_out = ("timings.jsonl", "environment.json")
    kinds = (".json", ".jsonl", ".safetensors")
    paths = [path for path in folder.rglob("*") if path.suffix in kinds and path.name not in left_out]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_resumes(straight: TrainConfig, killed: TrainConfig, *stops: int) -> dict[str, Any]:
    """A run that ends after each of `stops` and is resumed leaves the same bytes; returns the summary."""
    summary = train(straight)
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            train(killed, Listener(stop))
    assert train(killed) == summary
    assert written(killed.output) == written(straight.output)
    return summary


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_place(shared_folder: Path) -> Path:
    place = shared_folder / "training"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(autouse=True)
def own_cache(shared_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing in these tests comes from the user's cache or goes there, but for the real model."""
    cache = shared_place / "cache"
    monkeypatch.setenv("GATESPACE_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def tiny(shared_place: Path, synthetic: Task) -> TinyPair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(shared_place / "cache"))
        return build_tiny(synthetic)


@pytest.fixture(scope="session")
def taught(shared_place: Path, tiny: TinyPair) -> Path:
    """The run folder of a teacher; the first worker makes it, the others wait for it."""
    output = shared_place / "taught"
    settings = {
        "task": TASK,
        "model": str(tiny.teacher),
        "steps": 60,
        "optimizer": {"lr": 3e-3},
        "engine": {"precision": "fp32", "threads": 1},
        "evaluation": {"every": 30, "limit": 100, "final": ["val"]},
        "output": str(output),
    }
    with FileLock(shared_place / "taught.lock"):
        teach(parse_config(TeachConfig, settings))
    return output


@pytest.fixture(scope="session")
def synthetic() -> Task:
    return synthetic_task()


@pytest.fixture
def student(tiny: TinyPair) -> Model:
    """Untrained."""
    return load_model(str(tiny.student))


@pytest.fixture
def teacher(taught: Path) -> Model:
    return load_model(str(taught / "model"))


@pytest.fixture
def train_config(taught: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A short run on the tiny pair; sections that are given are laid over these."""

    def make(**settings: Any) -> TrainConfig:
        whole: dict[str, Any] = {
            "task": TASK,
            "pair": {"student": "tiny", "teacher": str(taught / "model")},
            "steps": 3,
            "batch_size": 6,
            "rollout": {"max_new_tokens": 8},
            "teacher": {"cache": str(tmp_path / "scores")},
            "optimizer": {"lr": 2e-3},
            "engine": {"precision": "fp32", "threads": 1},
            "evaluation": {"every": 0, "limit": 12, "max_new_tokens": 12, "final": ["val"]},
            "checkpoint": {"every": 2},
            "trace": {"tokens_every": 2, "rollouts": 2},
            "output": str(tmp_path / "train"),
        }
        for name, value in settings.items():
            whole[name] = {**whole.get(name, {}), **value} if isinstance(value, dict) else value
        return parse_config(TrainConfig, whole)

    return make


@dataclass(frozen=True)
class Scored:
    """A micro-batch after its loss."""

    part: MicroBatch
    output: LossOutput
    hidden: Tensor
    scores: Scores


@dataclass
class Stepped:
    """What one step of a distillation did."""

    update: Update
    gradients: dict[str, Tensor]
    """Of the mean loss."""
    loss: float
    """The mean over all tokens."""
    scored: list[Scored] = field(default_factory=list)

    @property
    def responses(self) -> list[list[int]]:
        return [one.part.rollout.responses[row] for one in self.scored for row in one.part.samples]

    @property
    def rows(self) -> list[Row]:
        return [one.part.rows[row] for one in self.scored for row in one.part.samples]

    @property
    def sources(self) -> list[str]:
        return [one.part.sources[row] for one in self.scored for row in one.part.samples]


class Lab:
    """Makes single steps. They leave the student as it is: their learning rate is far below rounding."""

    def __init__(self, student: Model, teacher: Model, task: Task, examples: list[Example], *, brief: bool) -> None:
        self.student, self.teacher = student, teacher
        self.prompt = Prompt.of(task, brief=brief)
        self.examples = examples
        self.vocab_size = student.vocab_size

    def step(
        self,
        *,
        number: int = 0,
        rows: int = 6,
        objective: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        micro_tokens: int = 10**9,
        rollout_tokens: int = 10**9,
        reuse: bool = True,
        fused: bool = True,
        share: bool = True,
        share_prompt: bool = True,
        packed: bool | None = None,
        payload: str = "hidden",
        seed: int = 5,
    ) -> Stepped:
        config = parse_config(
            TrainConfig,
            {
                "pair": {"teacher": "unused"},
                "objective": objective or {},
                "rollout": {"max_new_tokens": 7, **(rollout or {})},
                "seed": seed,
            },
        )
        texts = [example.text for example in self.examples]
        encoder = Encoder(self.prompt, self.student.tokenizer, texts, share=share)
        # Without memory of earlier gradients, AdamW's first moment after one update is that update's gradient.
        settings = parse_config(OptimizerConfig, {"lr": 1e-30, "betas": [0.0, 0.999], "clip": None})
        optimizer = Optimizer(self.student.network, settings, steps=1, dtype=torch.float32)
        body = body_of(self.student, packed=packed)
        spec = ScoreSpec(tuple(encoder.prefix), config.rollout.max_new_tokens, self.vocab_size, payload)
        rollouts = Rollouts(
            student=body,
            teachers=Teachers({"": LocalTeacher(self.teacher, spec, packed=packed)}),
            encoder=encoder,
            batches=Batches(self.examples, encoder, batch_size=rows, seed=seed),
            settings=config.rollout,
            steps=number + 1,
            vocab_size=self.vocab_size,
            seed=seed,
            micro_tokens=micro_tokens,
            rollout_tokens=rollout_tokens,
            reuse=reuse,
            share=share_prompt,
            merge=not config.objective.shuffle,
        )
        loss_of = DistillationLoss(body, build_objective(config.objective), config, self.vocab_size)
        scored: list[Scored] = []
        batch = rollouts(number, Clock())
        for part in batch.parts:
            part.scores = part.ask()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(VARIABLE, "" if fused else "unfused")
                output = loss_of(number, part)
            output.loss.backward()
            assert part.hidden is not None
            scored.append(Scored(part, output, part.hidden, part.scores))
        batch.backward()
        update = optimizer.step(number, sum(one.output.tokens for one in scored))
        state = optimizer.tensors()
        gradients = {n[len("exp_avg/") :]: t.clone() for n, t in state.items() if n.startswith("exp_avg/")}
        tokens = sum(one.output.tokens for one in scored)
        loss = sum(float(one.output.loss.detach()) for one in scored) / tokens
        return Stepped(update, gradients, loss, scored)


@pytest.fixture
def lab(student: Model, teacher: Model, synthetic: Task) -> Lab:
    return Lab(student, teacher, synthetic, synthetic.train[:40], brief=True)
