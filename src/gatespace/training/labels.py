"""Distillation over labels: student and teacher score each label of a text as a whole response.

Nothing is sampled. Both models score every label of the task, each in its own tokens, so their tokenizers may differ;
normalised over the labels, the log-probabilities are the logits of one position with as many outcomes. Gate, signals
and divergences are those of tokens, and h = u: a text has one position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gatespace.config.checking import checking
from gatespace.errors import RunError
from gatespace.gating.log_probs import token_log_probs
from gatespace.gating.loss import LossInputs, LossOutput, distillation_loss
from gatespace.models import Model
from gatespace.models.body import KVCache
from gatespace.models.encode import Encoder
from gatespace.models.tree import tree_of
from gatespace.rollout import Rollout
from gatespace.rollout.labels import label_log_probs, label_responses
from gatespace.seeding import permutation
from gatespace.teacher.scores import ScoreSpec
from gatespace.training.batches import Row
from gatespace.training.clock import Clock
from gatespace.training.distill import Distillation
from gatespace.training.metrics import Texts
from gatespace.training.rollouts import MicroBatch, OnPolicy
from gatespace.training.setup import encoder_for


@dataclass
class LabelBatch(MicroBatch):
    """Texts whose labels are scored. A row's response is its likeliest label, as an index into the labels."""

    teacher: Tensor | None = None
    """(B, L) the teacher's logits of the labels."""
    student: Tensor | None = None
    """(B, L) the student's, detached."""


class LabelDistillation(Distillation):
    """The job of `gatespace train` where `objective.support` is labels."""

    @cached_property
    def teacher_encoder(self) -> Encoder:
        """The task in the teacher's tokens; a remote teacher has the student's tokens."""
        if self._local is None or self.config.teacher.prompt is not None:
            return super().teacher_encoder
        return encoder_for(self.data, self._local, self.splits, share=checking().share_prefix)

    @cached_property
    def labels(self) -> list[list[int]]:
        """The response of every label in the student's tokens."""
        return label_responses(self.encoder, self._end(self.model))

    @cached_property
    def teacher_labels(self) -> list[list[int]]:
        """The response of every label in the teacher's tokens."""
        return label_responses(self.teacher_encoder, self._end(self._local or self.model))

    def _end(self, model: Model) -> int | None:
        return None if self.config.rollout.stop == "json" else model.turn_end

    def score_spec(self) -> ScoreSpec:
        """The teacher's own prefix and labels."""
        size = self.vocab_size if self._local is None else self._local.vocab_size
        return ScoreSpec(tuple(self.teacher_encoder.prefix), max(map(len, self.teacher_labels)), size)

    def logits(self, batch: MicroBatch, tokens: slice) -> tuple[Tensor, Tensor]:
        """(B, L) logits of the labels by both models; each text is one token."""
        assert isinstance(batch, LabelBatch)
        assert batch.student is not None
        assert batch.teacher is not None
        return batch.student[tokens], batch.teacher[tokens]

    def texts(self) -> Texts:
        """A token is an index into the labels."""
        labels = self.data.prompt.labels
        return Texts(lambda ids: "".join(labels[i] for i in ids), labels.__getitem__, str, judged=True)

    def open_rollouts(self, **options: object) -> OnPolicy:
        """All labels of every text, instead of samples."""
        room = len(tree_of(self.labels).tokens)
        settings = self.config.rollout.model_copy(update={"max_new_tokens": room})  # tokens per text in the update
        rows = _LabelRows(**{**options, "settings": settings})  # type: ignore[arg-type]
        rows.job = self
        return rows

    @torch.no_grad()
    def teacher_logits(self, rows: Sequence[Row]) -> Tensor:
        """(B, L) the teacher's logits of the labels, through its score cache."""
        labels, encoder = self.teacher_labels, self.teacher_encoder
        prompts = [row.asked or encoder.suffix(encoder.prompt.text(row.example)) for row in rows for _ in labels]
        scores = self.teacher.score(prompts, labels * len(rows))
        payload, head = scores.payload, scores.head
        assert isinstance(payload, Tensor)
        assert head is not None
        states = payload[0]
        ids = torch.tensor([token for label in labels for token in label] * len(rows), device=states.device)
        places = torch.arange(len(ids), device=states.device)
        found = token_log_probs(states, head, places, ids, self.teacher.vocab_size).view(len(rows), -1)
        return torch.stack([part.sum(-1) for part in found.split([len(ids) for ids in labels], 1)], 1)

    def loss(self, step: int, batch: MicroBatch) -> LossOutput:
        """Summed loss of all texts; the optimizer divides it by the texts of the whole step."""
        assert isinstance(batch, LabelBatch)
        assert batch.teacher is not None
        logits = label_log_probs(self.body, batch.prompts, self.labels, prefix=batch.prefix, vocab_size=self.vocab_size)
        if not bool(torch.isfinite(logits).all()):
            raise RunError("the student's log-probabilities are not finite", instead="a smaller learning rate, or fp32")
        batch.student = logits.detach()
        count = len(batch.rows)
        batch.rollout = Rollout([[best] for best in logits.argmax(-1).tolist()], [[0.0]] * count, [True] * count)
        batch.sources = ["labels"] * count
        inputs = self.loss_inputs()
        if self.config.objective.shuffle:
            order = permutation(count, self.config.seed, "shuffle", step, batch.places[0])
            inputs = self.loss_inputs(torch.tensor(order))
        return distillation_loss(logits[:, None], batch.teacher[:, None], objective=self.objective, inputs=inputs)

    def loss_inputs(self, order: Tensor | None = None) -> LossInputs:
        """K is at most the number of labels."""
        settings = self.config.objective
        return LossInputs(
            top_k=min(settings.top_k, len(self.labels)),
            temperature=settings.temperature,
            entropy=settings.entropy,
            total_tokens=1.0,
            lam_order=order,
        )


@dataclass
class _LabelRows(OnPolicy):
    """The texts of a step with the teacher's logits of their labels."""

    def __post_init__(self) -> None:
        self.job: LabelDistillation

    def scored(
        self, step: int, batches: list[MicroBatch], prefix: KVCache | Sequence[int], clock: Clock
    ) -> Iterator[MicroBatch]:
        """Each micro-batch with the teacher's logits."""
        for batch in batches:
            with clock("score"):
                teacher = self.job.teacher_logits(batch.rows)
            self.current = LabelBatch(batch.rows, batch.places, prefix=prefix, teacher=teacher)
            yield self.current
