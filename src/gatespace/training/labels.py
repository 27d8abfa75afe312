"""Distillation over labels: student and teacher score each label of a text as a whole response.

Nothing is sampled. Both models score every label of the task, each in its own tokens, so their tokenizers may differ;
normalised over the labels, the log-probabilities are the logits of one position with as many outcomes. Gate, signals
and divergences are those of tokens, and h = u: a text has one position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gatespace.config import TrainConfig
from gatespace.errors import RunError
from gatespace.gating.log_probs import token_log_probs
from gatespace.gating.loss import LossInputs, LossOutput, distillation_loss
from gatespace.gating.objectives import Objective
from gatespace.models import Model
from gatespace.models.body import Body
from gatespace.models.encode import Encoder
from gatespace.models.tree import tree_of
from gatespace.rollout import Rollout
from gatespace.rollout.labels import label_log_probs, label_responses
from gatespace.seeding import permutation
from gatespace.teacher.scores import Scores, ScoreSpec
from gatespace.training.clock import Clock
from gatespace.training.distill import Distillation
from gatespace.training.metrics import Texts
from gatespace.training.rollouts import MicroBatch, Rollouts


@dataclass
class LabelRollouts(Rollouts):
    """The texts of each step, and the teacher's logits of their labels instead of samples."""

    labels: Sequence[Sequence[int]] = ()
    """The response of every label in the teacher's tokens."""

    def _respond(self, step: int, parts: list[MicroBatch], clock: Clock) -> None:
        for part in parts:
            teacher = self.teachers[part.rows[0].teacher]
            prompts = [row.teacher_prompt for row in part.rows for _ in self.labels]
            scores = teacher.ask(prompts, [*self.labels] * len(part.rows))
            part.ask = cache(partial(self._logits, scores, len(part.rows), teacher.vocab_size))

    @torch.no_grad()
    def _logits(self, scores: Callable[[], Scores], texts: int, vocab_size: int) -> Tensor:
        """(B, L) log-probabilities of the labels' whole responses."""
        payload, head = (known := scores()).payload, known.head
        assert isinstance(payload, Tensor)
        assert head is not None
        states = payload[0]
        ids = torch.tensor([token for label in self.labels for token in label] * texts, device=states.device)
        places = torch.arange(len(ids), device=states.device)
        log_probs = token_log_probs(states, head, places, ids, vocab_size).view(texts, -1)
        return torch.stack([part.sum(-1) for part in log_probs.split([len(ids) for ids in self.labels], 1)], 1)


@dataclass(frozen=True)
class LabelLoss:
    """The gated divergence over labels. A text's response is its likeliest label, as an index into the labels.

    Args:
        student: Its body.
        labels: The response of every label in its tokens.
        objective: Gate and divergences.
        config: Settings of the run.
        vocab_size: Ids from here on are padding.
    """

    student: Body
    labels: Sequence[Sequence[int]]
    objective: Objective
    config: TrainConfig
    vocab_size: int

    def __call__(self, step: int, batch: MicroBatch) -> LossOutput:
        """Summed loss of all texts; the optimizer divides it by the texts of the whole step."""
        prefix, size = batch.prefix, self.vocab_size
        logits = label_log_probs(self.student, batch.prompts, self.labels, prefix=prefix, vocab_size=size)
        if not bool(torch.isfinite(logits).all()):
            raise RunError("the student's log-probabilities are not finite", instead="a smaller learning rate, or fp32")
        batch.hidden = logits.detach()
        count = len(batch.rows)
        batch.rollout = Rollout([[best] for best in logits.argmax(-1).tolist()], [[0.0]] * count, [True] * count)
        batch.sources = ["labels"] * count
        settings, order = self.config.objective, None
        if settings.shuffle:
            order = torch.tensor(permutation(count, self.config.seed, "shuffle", step, batch.places[0]))
        inputs = LossInputs(
            top_k=min(settings.top_k, len(self.labels)),
            temperature=settings.temperature,
            entropy=settings.entropy,
            total_tokens=1.0,
            lam_order=order,
        )
        return distillation_loss(logits[:, None], batch.scores[:, None], objective=self.objective, inputs=inputs)

    def logits(self, batch: MicroBatch, texts: slice) -> tuple[Tensor, Tensor]:
        """(B, L) logits of the labels by both models; each text is one token."""
        assert batch.hidden is not None
        return batch.hidden[texts], batch.scores[texts]


class LabelDistillation(Distillation):
    """The job of `gatespace train` where `objective.support` is labels."""

    loss: LabelLoss

    def open_teacher_encoder(self) -> Encoder:
        """The task in the teacher's tokens; a remote teacher, and one of several, has the student's tokens."""
        if "teacher" not in self.models or self.config.teacher.prompt is not None:
            return super().open_teacher_encoder()
        return self.encoder_of(self.models["teacher"])

    def _responses(self, encoder: Encoder, model: Model) -> list[list[int]]:
        """The response of every label in the model's tokens."""
        return label_responses(encoder, None if self.config.rollout.stop == "json" else model.turn_end)

    def _teacher_responses(self) -> list[list[int]]:
        return self._responses(self.teacher_encoder, self.models.get("teacher", self.model))

    def score_spec(self) -> ScoreSpec:
        """The teacher's own prefix and labels."""
        size = self.models["teacher"].vocab_size if "teacher" in self.models else self.vocab_size
        return ScoreSpec(tuple(self.teacher_encoder.prefix), max(map(len, self._teacher_responses())), size)

    def assemble(self, **options: Any) -> None:
        """Put rollouts, loss and trace together."""
        labels = self._responses(self.encoder, self.model)
        # tokens per text in the update
        settings = options["settings"].model_copy(update={"max_new_tokens": len(tree_of(labels).tokens)})
        self.rollouts = LabelRollouts(**{**options, "settings": settings}, labels=self._teacher_responses())
        self.loss = LabelLoss(self.body, labels, self.objective, self.config, self.vocab_size)
        names = self.data.prompt.labels  # a token is an index into them
        texts = Texts(lambda ids: "".join(names[i] for i in ids), names.__getitem__, str, judged=True)
        self.trace = self.metrics(self.loss.logits, texts)
