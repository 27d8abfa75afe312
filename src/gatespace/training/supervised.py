"""Supervised fine-tuning of a teacher on gold responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gatespace.config import TeachConfig
from gatespace.errors import RunError
from gatespace.models.body import Body, response_states
from gatespace.models.encode import Encoder
from gatespace.rollout import Rollout
from gatespace.training.batches import Batches
from gatespace.training.clock import Clock
from gatespace.training.job import Job
from gatespace.training.memory import micro_tokens
from gatespace.training.metrics import SupervisedMetrics
from gatespace.training.processes import ONE, Processes
from gatespace.training.rollouts import Batch, MicroBatch, divide
from gatespace.training.setup import ModelSpec, material, open_model


@dataclass
class GoldResponses:
    """The rows of each step with their gold responses: the source of micro-batches where nothing is sampled."""

    encoder: Encoder
    batches: Batches
    end: int | None
    """Id that ends a response."""
    longest: int
    """Tokens of the longest response."""
    micro_tokens: int
    """Token limit of a micro-batch."""
    processes: Processes = ONE
    parts: list[MicroBatch] = field(default_factory=list)
    """Those of the step in progress, for the record of a failed step."""

    def __call__(self, step: int, clock: Clock) -> Batch:
        """This process's micro-batches of a step."""
        divided = divide(self.batches.at(step), self.processes, self.micro_tokens, self.longest)
        self.parts = divided[self.processes.rank]
        for part in self.parts:
            part.rollout = Rollout([self.encoder.gold(row.example.gold, self.end) for row in part.rows])
            part.prefix = self.encoder.prefix
        return Batch(self.parts, max(map(len, divided)))


@dataclass(frozen=True)
class SupervisedOutput:
    """The loss of a micro-batch."""

    loss: Tensor
    """Summed cross-entropy of its response tokens, in nats."""
    tokens: int
    right: int
    """Tokens that are the model's argmax."""


def supervised_loss(body: Body, part: MicroBatch) -> SupervisedOutput:
    """Cross-entropy of the gold responses; prompts are context."""
    hidden = response_states(body, part.prompts, part.families, prefix=part.prefix)
    logits = body.model.head.logits(hidden)[:, : body.model.vocab_size]
    target = torch.tensor([token for ids in part.rollout.responses for token in ids], device=logits.device)
    loss = cross_entropy(logits, target, reduction="sum")
    if not bool(torch.isfinite(loss)):
        raise RunError("the loss is not finite", got=float(loss.detach()), instead="a smaller learning rate, or fp32")
    return SupervisedOutput(loss, target.numel(), int((logits.argmax(-1) == target).sum()))


class Supervised(Job):
    """The job of `gatespace teach`."""

    config: TeachConfig
    rollouts: GoldResponses

    def open(self) -> None:
        """Load the model and its task."""
        config = self.config
        self.data = material(config.task, "teacher")
        with self.processes.in_turn():
            spec = ModelSpec(
                config.model,
                "model",
                "teacher",
                config.revision,
                config.trust_remote_code,
                device=self.processes.loads_on(self.place.device),
                lora=config.lora,
                seed=config.seed,
            )
            self.model = open_model(spec, self.data.task, self.progress.note)
        self.encoder = self.encoder_of(self.model)
        self.check(model=self.model)
        self.content = {
            "task": self.data.task.digest,
            "model": self.fingerprint(),
            "precision": self.place.precision,
        }

    def prepare(self) -> None:
        """Create what training needs besides the model."""
        super().prepare()
        config, end = self.config, self.model.turn_end
        self.rollouts = GoldResponses(
            self.encoder,
            Batches(self.data.rows, self.encoder, batch_size=config.batch_size, seed=config.seed),
            end,
            self.encoder.longest_gold(self.data.rows, end),
            micro_tokens(self.sizes, config.engine, len(self.encoder.prefix)),
            self.processes,
        )
        self.loss = lambda step, part: supervised_loss(self.body, part)
        self.trace = SupervisedMetrics(self.processes)

    def evidence(self) -> dict[str, Any]:
        """The rows of the step."""
        rows = [row for part in self.rollouts.parts for row in part.rows]
        return {"rows": [{"index": row.index, "text": row.example.text, "gold": row.example.gold} for row in rows]}
