"""Supervised fine-tuning of a teacher on gold responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gatespace.config import TeachConfig
from gatespace.config.checking import checking
from gatespace.errors import RunError
from gatespace.models.body import response_states
from gatespace.runs import RunFolder
from gatespace.training.batches import Batches, Row, micro_batches
from gatespace.training.clock import Clock
from gatespace.training.job import Job
from gatespace.training.memory import micro_tokens
from gatespace.training.metrics import SupervisedMetrics
from gatespace.training.processes import Processes
from gatespace.training.progress import Progress
from gatespace.training.setup import encoder_for, material, open_model


@dataclass(frozen=True)
class SupervisedOutput:
    """The loss of a micro-batch."""

    loss: Tensor
    """Summed cross-entropy of its response tokens, in nats."""
    tokens: int
    right: int
    """Tokens that are the model's argmax."""


class Supervised(Job):
    """The job of `gatespace teach`: the loss is on responses, prompts are context."""

    config: TeachConfig
    trace: SupervisedMetrics

    def __init__(
        self, config: TeachConfig, run: RunFolder, processes: Processes, progress: Progress, stack: ExitStack
    ) -> None:
        super().__init__(config, run, processes, progress, stack)
        self.data = material(config.task, "teacher")
        with processes.in_turn():
            self.model = open_model(
                config.model,
                "model",
                role="teacher",
                task=self.data.task,
                device=processes.loads_on(self.place.device),
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                lora=config.lora,
                seed=config.seed,
                report=progress.note,
            )
        self.encoder = encoder_for(self.data, self.model, self.splits, share=checking().share_prefix)
        self.check(model=self.model)
        self.content = {
            "task": self.data.task.digest,
            "model": self.fingerprint(),
            "precision": self.place.precision,
        }

    def prepare(self) -> None:
        """Create what training needs besides the model."""
        super().prepare()
        config = self.config
        self._batches = Batches(self.data.rows, self.encoder, batch_size=config.batch_size, seed=config.seed)
        self._micro_tokens = micro_tokens(self.sizes, config.engine, len(self.encoder.prefix))
        self._longest = self.encoder.longest_gold(self.data.rows, self.model.turn_end)
        self._rows: list[Row] = []
        self.trace = SupervisedMetrics(self.processes)

    @contextmanager
    def micro_batches(self, step: int, clock: Clock) -> Iterator[Iterator[list[Row]]]:
        """This process's rows, divided."""
        self._rows = rows = self._batches.at(step)
        shares = [[rows[i] for i in share] for share in self.processes.shares(len(rows))]
        parts = [micro_batches(share, self._micro_tokens, self._longest) for share in shares]
        own = parts[self.processes.rank]
        with self.processes.update(self.body, len(own), max(map(len, parts))):
            yield iter(own)

    def loss(self, step: int, batch: list[Row]) -> SupervisedOutput:
        """Cross-entropy of the gold responses."""
        responses = [self._gold(row.example.gold) for row in batch]
        hidden = response_states(
            self.body, [row.prompt for row in batch], [[ids] for ids in responses], prefix=self.encoder.prefix
        )
        logits = self.model.head.logits(hidden)[:, : self.model.vocab_size]
        target = torch.tensor([token for ids in responses for token in ids], device=logits.device)
        loss = cross_entropy(logits, target, reduction="sum")
        if not bool(torch.isfinite(loss)):
            raise RunError(
                "the loss is not finite", got=float(loss.detach()), instead="a smaller learning rate, or fp32"
            )
        return SupervisedOutput(loss, target.numel(), int((logits.argmax(-1) == target).sum()))

    def evidence(self) -> dict[str, Any]:
        """The rows of the step."""
        rows = [{"index": row.index, "text": row.example.text, "gold": row.example.gold} for row in self._rows]
        return {"rows": rows}

    def _gold(self, gold: str) -> list[int]:
        return self.encoder.gold(gold, self.model.turn_end)
