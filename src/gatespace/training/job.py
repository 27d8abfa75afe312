"""Interface of the training loop's jobs: `Distillation` (`gatespace train`) and `Supervised` (`gatespace teach`)."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import astuple
from typing import Any, Protocol

from torch import Tensor

from gatespace.config import TeachConfig, TrainConfig
from gatespace.config.checking import checking
from gatespace.errors import RunError, UsageError
from gatespace.evaluation import Evaluation, evaluate
from gatespace.models import Model
from gatespace.models.body import Body, body_of
from gatespace.models.cache_root import remove_leftovers
from gatespace.models.encode import Encoder
from gatespace.models.sizes import Sizes, sizes_of
from gatespace.plugins import copy_plugins, plugins_digest
from gatespace.rollout import Answer, greedy
from gatespace.runs import RunFolder
from gatespace.training.clock import Clock
from gatespace.training.environment import environment
from gatespace.training.fit import check_fit
from gatespace.training.optimizer import Optimizer, Update, eight_bit
from gatespace.training.processes import Processes
from gatespace.training.progress import Progress
from gatespace.training.setup import Material, deterministic, placement


class Loss(Protocol):
    """Something with a loss to call backward on."""

    @property
    def loss(self) -> Tensor: ...


class StepTrace(Protocol):
    """Metrics of a step."""

    tokens: float
    """Response tokens of this process in the step so far, or the sum of their weights."""

    def begin(self, step: int) -> None: ...
    def add(self, batch: Any, out: Any) -> None: ...
    def record(self, update: Update, clock: Clock) -> dict[str, list[dict[str, Any]]]:
        """New lines by log: metrics, timings, tokens."""
        ...


class Job(ABC):
    """A run: opened with its models, then begun, then prepared for its steps.

    Args:
        config: All settings.
        run: Its folder.
        processes: Its processes.
        progress: Follows the run.
        stack: Closes what the job opens.
    """

    model: Model
    """The trained model."""
    data: Material
    encoder: Encoder
    body: Body
    optimizer: Optimizer
    trace: StepTrace
    content: dict[str, str]
    """What the settings resolved to; part of the run's identity."""
    sizes: Sizes
    """Of the trained model."""
    about: dict[str, Any]
    """Entries of environment.json besides versions and machine."""

    def __init__(
        self,
        config: TrainConfig | TeachConfig,
        run: RunFolder,
        processes: Processes,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self.config, self.run, self.processes, self.progress, self.stack = config, run, processes, progress, stack
        self.place = placement(config.engine, processes)
        stack.enter_context(deterministic(config.engine, self.place))
        self.about = {}
        self.splits = (*config.evaluation.final, config.evaluation.split)

    def check(self, **models: Model) -> None:
        """Raise if the run does not fit its models."""
        if getattr(self.model.network, "is_quantized", False) and not hasattr(self.model.network, "peft_config"):
            raise UsageError(
                "quantised weights are not trained",
                got=self.model.name,
                instead="low-rank additions to them (lora), or the model in its own precision",
            )
        notes = check_fit(self.config, self.data, self.encoder, **models)
        if self.config.optimizer.states == "8bit":
            eight_bit(self.processes)
        self.sizes = sizes_of(models.get("model") or models["student"])
        for note in notes:
            self.progress.note(note)

    @property
    def teacher_encoder(self) -> Encoder:
        """Encoder of a teacher's prompts."""
        return self.encoder

    def fingerprint(self) -> str:
        """Fingerprint of the trained model; from the first process if this one has no weights."""
        own = None if self.model.device.type == "meta" else self.model.fingerprint()
        first: str = self.processes.gather(own)[0]
        return own or first

    def begin(self) -> dict[str, Any] | None:
        """Begin the run in its folder, or check that it is this run's; returns the summary if the run is done."""
        config, processes = self.config, self.processes
        content = {**self.content, **processes.content}
        if config.plugins:
            content["plugins"] = plugins_digest(config.plugins)
        for name, value in content.items():
            processes.agree(
                value,
                lambda found, name=name: RunError(  # type: ignore[misc]
                    f"the processes of this run do not have the same {name}",
                    got=", ".join(text[:12] for text in found),
                    instead="the same files on every machine",
                ),
            )
        summary = None
        with processes.together():
            if processes.first:
                summary = self.run.begin(config, content, {**environment(self.place), **self.about})
                copy_plugins(config.plugins, self.run.plugins)
        first: dict[str, Any] | None = processes.gather(summary)[0]
        if first is not None:
            self.progress.note("this run is done; its summary was read from the folder")
            if config.checkpoint.model and first["model"] is None:
                self.progress.note("its model was not kept (checkpoint.model: false); another output trains it again")
        return first

    def prepare(self) -> None:
        """Create what training needs besides the models."""
        config, place = self.config, self.place
        self.model = self.processes.prepare(self.model, dtype=place.dtype, packed=checking().packed)
        self.optimizer = Optimizer(
            self.model.network, config.optimizer, steps=config.steps, dtype=place.dtype, processes=self.processes
        )
        again = config.engine.activation_checkpointing
        if again is None and self.processes.sharded:
            again = False  # all processes gather layers together, and only some may have long texts
        self.body = body_of(  # after the optimizer, which rounds the network to its precision
            self.model, packed=checking().packed, checkpointing=again
        )

    @abstractmethod
    def micro_batches(self, step: int, clock: Clock) -> AbstractContextManager[Iterator[Any]]:
        """The micro-batches of a step, ready for their loss."""

    @abstractmethod
    def loss(self, step: int, batch: Any) -> Loss:
        """Loss of a micro-batch, summed over tokens."""

    def release(self, batch: Any) -> None:
        """Free the tensors of a micro-batch whose loss was computed and recorded."""
        return

    def advance(self, loss: float, progress: float) -> None:
        """Move the state of the objective, if it has one, after a step with this mean loss."""
        return

    def state(self, done: int) -> dict[str, Any]:
        """Checkpoint state besides tensors, after `done` steps."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        return

    @abstractmethod
    def evidence(self) -> dict[str, Any]:
        """What a failed step saw, for its record."""

    def summary(self) -> dict[str, Any]:
        """Entries of the summary about the steps."""
        return {}

    # ------------------------------------------------------------------ evaluation and end

    def evaluation_writer(self) -> Any:
        """Generates instead of the model; None: the model does."""
        return None

    def evaluate(self, split: str, *, probabilities: bool = False) -> Evaluation:
        """Evaluate on a split with greedy decoding, and label probabilities if wanted, in all processes."""
        processes = self.processes

        def generate(model: Model, encoder: Encoder, texts: Sequence[str], **how: Any) -> list[Answer]:
            def answered(some: Sequence[str]) -> list[Answer]:
                return greedy(model, encoder, some, writer=self.evaluation_writer(), **how)

            if processes.size == 1:
                return answered(texts)
            found = processes.divide(texts, lambda some: [[*astuple(one)] for one in answered(some)])
            return [
                Answer(tuple(ids), text, ended, labels and tuple(labels), tuple(samples))
                for ids, text, ended, labels, samples in found
            ]

        with self.model.whole():
            return evaluate(
                self.model,
                self.data.task,
                self.data.prompt,
                self.config.evaluation,
                split=split,
                probabilities=probabilities,
                encoder=self.encoder,
                generate=generate,
                progress=lambda done, total: self.progress.evaluating(split, done, total),
            )

    def save_model(self) -> dict[str, Any]:
        """Save the model with float32 weights if wanted; returns its entries of the summary."""
        processes, run, wanted = self.processes, self.run, self.config.checkpoint.model
        self.optimizer.widen()
        whole = self.model.gathered(here=processes.first)
        fingerprint, *others = processes.gather(None if whole is None else whole.fingerprint())
        with processes.together():
            if any(other not in (None, fingerprint) for other in others):
                raise RunError("the processes of this run have different final weights")
            if processes.first and whole is not None:
                run.check_claim()
                remove_leftovers(run.model)
                if wanted:
                    whole.save(run.model)
                else:  # this run may have been killed after writing it
                    shutil.rmtree(run.model, ignore_errors=True)
        return {"model": run.model.name if wanted else None, "fingerprint": fingerprint}
