"""One step of supervised fine-tuning on gold responses: how a teacher is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from gatespace.addons.parallel.ranks import ALONE, Ranks
from gatespace.errors import RunError
from gatespace.models.body import Body
from gatespace.models.encode import Encoder
from gatespace.training.batches import Row, divided, keep_up
from gatespace.training.clock import Clock
from gatespace.training.optimizer import Optimizer, Update
from gatespace.training.step import whole_logits


@dataclass(frozen=True)
class Learned:
    """What a step of fine-tuning saw."""

    update: Update
    loss: float
    """Mean cross-entropy of a response token, in nats."""
    tokens: int
    right: int
    """Tokens that the model would have written itself."""


@dataclass(frozen=True)
class Supervised:
    """A model and the right answers it learns; prompts are read but not learned."""

    body: Body
    encoder: Encoder
    optimizer: Optimizer
    vocab_size: int
    micro_tokens: int
    ranks: Ranks = ALONE

    def step(self, number: int, rows: Sequence[Row], clock: Clock) -> Learned:
        """Update the model with the right responses to `rows`, those of all processes; `number` counts from 0."""
        end = self.body.model.turn_end
        total, tokens, right = 0.0, 0, 0
        with clock("update"), self.body.model.learning():
            longest = max(len(self.encoder.gold(label, end)) for label in self.encoder.prompt.labels)
            parts = divided(rows, self.ranks, self.micro_tokens, longest)
            for part in parts[self.ranks.rank]:
                responses = [self.encoder.gold(row.example.label, end) for row in part]
                whole = [[*row.prompt, *ids[:-1]] for row, ids in zip(part, responses, strict=True)]
                forward = self.body.forward(whole, prefix=self.encoder.prefix)
                pieces = zip(forward.hidden.split([len(row) for row in whole]), part, strict=True)
                hidden = torch.cat([states[len(row.prompt) - 1 :] for states, row in pieces])
                logits = whole_logits(hidden, self.body.model.head)[:, : self.vocab_size]
                target = torch.tensor([token for ids in responses for token in ids], device=logits.device)
                loss = cross_entropy(logits, target, reduction="sum")
                if not bool(torch.isfinite(loss)):
                    raise RunError(
                        "the loss is not finite", got=float(loss.detach()), instead="a smaller learning rate, or fp32"
                    )
                loss.backward()
                self.optimizer.collect()
                total += float(loss.detach())
                tokens += target.numel()
                right += int((logits.argmax(-1) == target).sum())
            if self.ranks.sharded:
                keep_up(self.body, len(parts[self.ranks.rank]), parts)
        with clock("optimizer"):
            update = self.optimizer.step(number, tokens)
        all_tokens, all_right = int(self.ranks.total(tokens)), int(self.ranks.total(right))
        return Learned(update, self.ranks.total(total) / all_tokens, all_tokens, all_right)
