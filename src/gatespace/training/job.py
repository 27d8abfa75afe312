"""What the training loop trains: `Distillation` (`gatespace train`) and `Supervised` (`gatespace teach`)."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import Any

from gatespace.config import TeachConfig, TrainConfig
from gatespace.config.checking import checking
from gatespace.errors import RunError, UsageError
from gatespace.evaluation import Evaluation, evaluate
from gatespace.models import Model
from gatespace.models.body import Body, body_of
from gatespace.models.cache_root import remove_leftovers
from gatespace.models.encode import Encoder
from gatespace.models.sizes import sizes_of
from gatespace.plugins import copy_plugins, plugins_digest
from gatespace.rollout import Answer, greedy
from gatespace.runs import RunFolder
from gatespace.training.clock import Clock
from gatespace.training.environment import environment
from gatespace.training.fit import check_fit
from gatespace.training.optimizer import Optimizer, eight_bit
from gatespace.training.processes import Processes
from gatespace.training.progress import Progress
from gatespace.training.rollouts import Batch, MicroBatch
from gatespace.training.setup import Material, deterministic, encoder_for, placement


class Job(ABC):
    """A run: opened with its models, then begun in its folder, then prepared for its steps.

    Args:
        config: All settings.
        run: Its folder.
        processes: Its processes.
        progress: Follows the run.
        stack: Closes what the job opens.
    """

    data: Material
    model: Model
    """The trained model."""
    encoder: Encoder
    """The task in its tokens."""
    content: dict[str, str]
    """What the settings resolved to; part of the run's identity."""
    about: dict[str, Any]
    """Entries of environment.json besides versions and machine."""

    # Since `prepare`:
    body: Body
    optimizer: Optimizer
    rollouts: Callable[[int, Clock], Batch]
    """Step → its micro-batches with their responses, and the teacher's scores requested."""
    loss: Callable[[int, MicroBatch], Any]
    """Step, micro-batch → output with a `loss` to call backward on, summed over tokens."""
    trace: Any
    """Metrics of steps: begin, add, record; `tokens` of this process so far."""

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
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Load data and models; raise if the run cannot work."""

    def encoder_of(self, model: Model) -> Encoder:
        """The task in the model's tokens."""
        splits = (*self.config.evaluation.final, self.config.evaluation.split)
        return encoder_for(self.data, model, splits, share=checking().share_prefix)

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
        self.sizes = sizes_of(self.model)
        for note in notes:
            self.progress.note(note)

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
                lambda values, name=name: RunError(  # type: ignore[misc]
                    f"the processes of this run do not have the same {name}",
                    got=", ".join(text[:12] for text in values),
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
            def answered(mine: Sequence[str]) -> list[Answer]:
                return greedy(model, encoder, mine, writer=self.evaluation_writer(), **how)

            if processes.size == 1:
                return answered(texts)
            answers = processes.divide(texts, lambda mine: [[*astuple(answer)] for answer in answered(mine)])
            return [
                Answer(tuple(ids), text, ended, labels and tuple(labels), tuple(samples))
                for ids, text, ended, labels, samples in answers
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
        model = self.model.gathered(here=processes.first)
        fingerprint, *others = processes.gather(None if model is None else model.fingerprint())
        with processes.together():
            if any(other not in (None, fingerprint) for other in others):
                raise RunError("the processes of this run have different final weights")
            if processes.first and model is not None:
                run.check_claim()
                remove_leftovers(run.model)
                if wanted:
                    model.save(run.model)
                else:  # this run may have been killed after writing it
                    shutil.rmtree(run.model, ignore_errors=True)
        return {"model": run.model.name if wanted else None, "fingerprint": fingerprint}
