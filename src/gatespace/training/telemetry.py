"""Logs of a distillation step: metrics, timings, and on some steps single tokens."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gatespace.gating.configured import build_gate
from gatespace.gating.loss import LossInputs, LossOutput
from gatespace.gating.tokens import TeacherTopK
from gatespace.training.clock import Clock
from gatespace.training.memory import TELEMETRY
from gatespace.training.optimizer import Update
from gatespace.training.rollouts import MicroBatch
from gatespace.training.token_records import due, token_record, top_tokens
from gatespace.training.trace import Trace, agreement, kappa_share, kappa_squares, repeated

if TYPE_CHECKING:
    from gatespace.training.distill import Distillation


_MEANS = ("repeated_ngrams", "legal_answers")
"""Numbers per response whose mean is logged."""
_MAYBE = (
    "repeated_ngrams",
    "legal_answers",
    "student_entropy_nats",
    "teacher_entropy_nats",
    "teacher_entropy_share",
    "top_k_overlap",
)
"""Logged every step; None where not measured."""


class DistillationTrace:
    """Metrics of the steps of a distillation, over all processes."""

    def __init__(self, job: Distillation) -> None:
        self._job = job
        self._gate = build_gate(job.config.objective)
        self._trace = Trace()
        self._teachers: dict[str, dict[str, float]] = {}
        """Sums of the run by teacher, if there are several."""
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start step `step`, counted from 0."""
        self._step = step + 1
        self.tokens: float = 0
        self._seen: list[MicroBatch] = []
        self._losses: list[float] = []
        self._scored: list[list[Any]] = []
        """[teacher, sums] per micro-batch, if there are several teachers."""
        self._sample: list[dict[str, Any]] = []
        self._kappa: float | None = None
        self._agreement: dict[str, float] = {}
        self._trace.begin(self._step)
        self._before = self._counts()

    def add(self, batch: MicroBatch, out: LossOutput) -> None:
        """Add a micro-batch."""
        self.tokens += out.tokens
        weights = None if batch.weights is None else [weight for row in batch.weights for weight in row]
        self._trace.add(out, rows=batch.numbers, weights=weights)
        if name := batch.rows[0].teacher:  # one per micro-batch
            self._scored.append([name, {"rows": len(batch.samples), **_sums(out, weights)}])
        if batch.places[0] == 0 and due(self._step, every=self._job.config.trace.tokens_every):
            self._look_closely(batch)
        self._seen.append(batch)
        self._losses.append(float(out.loss.detach()))
        batch.hidden = batch.scores = None  # do not hold a whole step's tensors

    def record(self, update: Update, clock: Clock) -> dict[str, list[dict[str, Any]]]:
        """New lines by log, once the step is done in all processes."""
        samples = [(batch, row) for batch in self._seen for row in batch.samples]
        own: dict[str, list[Any]] = {
            "lengths": [len(batch.rollout.responses[row]) for batch, row in samples],
            "ended": [batch.rollout.ended[row] for batch, row in samples],
            "log_probs": [
                batch.rollout.log_probs[row] if batch.sources[row] == "student" else None for batch, row in samples
            ],
            "repeated_ngrams": [repeated(batch.rollout.responses[row]) for batch, row in samples],
            "teachers": self._scored,
        }
        if self._job.encoder.prompt.labels:
            own["legal_answers"] = [self._label(batch.rollout.responses[row]) is not None for batch, row in samples]
        counts = {name: count - self._before[name] for name, count in self._counts().items()}
        processes = self._job.processes
        found = processes.gather((own, counts, self._trace.tokens() if processes.size > 1 else None))
        for rank, (_, _, tokens) in enumerate(found):
            if rank != processes.rank:
                self._trace.take(tokens)
        rows = {name: [value for one, _, _ in found for value in one[name]] for name in own}
        by_teacher: dict[str, dict[str, float]] = {}
        for name, sums in rows.pop("teachers"):
            _add(by_teacher.setdefault(name, {}), sums)
            _add(self._teachers.setdefault(name, {}), sums)
        means = {name: math.fsum(values) / len(values) for name, values in rows.items() if name in _MEANS}
        self._trace.rollout(**{name: values for name, values in rows.items() if name not in means})
        objective = self._job.objective
        moving = {f"{objective.name}_{name}": value for name, value in objective.state.items() if name != "loss"}
        more: dict[str, Any] = {**dict.fromkeys(_MAYBE), **means, **self._agreement, **moving}
        if by_teacher:
            more["teachers"] = _by_token(by_teacher)
        metrics = self._trace.record(grad_norm=update.grad_norm, lr=update.lr, kappa_share=self._kappa, **more)
        objective.advance(metrics["loss"], (self._step - 1) / self._job.config.steps)
        seconds = sum(clock.wall.values())
        timing = {
            "step": self._step,
            "wall": clock.wall,
            "cpu": clock.cpu,
            "tokens_per_second": metrics["tokens"] / seconds if seconds else None,
            **{name: sum(one[name] for _, one, _ in found) for name in counts},
        }
        return {"tokens": self._sample, "metrics": [metrics], "timings": [timing]}

    def evidence(self, current: MicroBatch | None) -> dict[str, Any]:
        """What a failed step saw; `current` is the micro-batch it failed at."""
        batches = self._seen if current is None or current in self._seen else [*self._seen, current]
        return {
            "rows": [
                {
                    "index": batch.rows[row].index,
                    "text": batch.rows[row].example.text,
                    "gold": batch.rows[row].example.gold,
                    # The last micro-batch may have no responses yet.
                    "response": self._text(batch.rollout.responses[row] if batch.rollout.responses else []),
                }
                for batch in batches
                for row in batch.samples
            ],
            "losses": self._losses,
        }

    def state(self) -> dict[str, Any]:
        """The sums of the run, for a checkpoint."""
        return {**self._trace.state(), **({"teachers": self._teachers} if self._teachers else {})}

    def summary(self) -> dict[str, Any]:
        """The run so far: tokens, E[λ] over them, saturation; also by teacher if several."""
        return {**self._trace.summary(), **({"teachers": _by_token(self._teachers)} if self._teachers else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        rest = dict(state)
        self._teachers = {name: dict(sums) for name, sums in rest.pop("teachers", {}).items()}
        self._trace.restore(rest)

    # ------------------------------------------------------------------ single tokens

    def _look_closely(self, batch: MicroBatch) -> None:
        """Record the tokens of the first samples, and how much of their gradient flows through the gate."""
        job, responses = self._job, batch.rollout.responses
        settings, gate = job.config.objective, self._gate
        samples = batch.samples[: job.config.trace.rollouts]
        rows = range(max(samples) + 1)  # rows are ordered by their first samples
        values = [self._trace.row(batch.places[batch.samples.index(row)]) for row in rows]
        sampled = [token for row in rows for token in responses[row]]
        u = [one for row in values for one in row.get("u", ())]
        student_top: list[list[tuple[int, float]]] = []
        teacher_top: list[list[tuple[int, float]]] = []
        squares: tuple[list[float], ...] = ([], [])
        near: dict[str, list[float]] = {}
        at_once = max(1, TELEMETRY // (4 * job.vocab_size))
        for start in range(0, len(sampled), at_once):  # all logits would take gigabytes
            span = slice(start, min(start + at_once, len(sampled)))
            student, teacher = self._logits(batch, span)
            student_top += top_tokens(student)
            teacher_top += top_tokens(teacher)
            for name, found in agreement(student, teacher, settings.top_k).items():
                near.setdefault(name, []).extend(found)
            if gate is not None and not settings.shuffle:
                inputs = LossInputs(
                    top_k=settings.top_k,
                    temperature=settings.temperature,
                    entropy=settings.entropy,
                    sampled=torch.tensor([sampled[span]], device=student.device),
                    u=torch.tensor([u[span]], device=student.device),
                    segment_ids=batch.segments[None, span].to(student.device) if job.objective.prepass() else None,
                    total_tokens=1.0,  # the same for any division of the tokens
                )
                parts = kappa_squares(
                    student, teacher, gate, inputs=inputs, support=settings.support, support_k=settings.support_k
                )
                for all_of, some in zip(squares, parts, strict=True):
                    all_of += some
        starts = [0, *accumulate(len(responses[row]) for row in rows)]
        spans = [slice(starts[row], starts[row + 1]) for row in samples]
        self._agreement = _means(near, spans)
        if gate is not None:  # 0 if λ is shuffled and thus constant
            self._kappa = kappa_share([(squares[0][span], squares[1][span]) for span in spans])
        for sample, (row, span) in enumerate(zip(samples, spans, strict=True)):
            top = (student_top[span], teacher_top[span])
            self._sample.append(self._token_record(batch, sample, values[row], *top))

    @torch.no_grad()
    def _logits(self, batch: MicroBatch, span: slice) -> tuple[Tensor, Tensor | TeacherTopK]:
        """(N, V) logits of both models for some tokens, or the teacher's top-k."""
        assert batch.hidden is not None
        assert batch.scores is not None
        scores, size = batch.scores.part(span), self._job.vocab_size
        student = self._job.model.head.logits(batch.hidden[span])[:, :size]
        if isinstance(scores.payload, TeacherTopK):
            return student, scores.payload
        assert scores.head is not None
        return student, scores.head.logits(scores.payload[0])[:, :size]

    def _token_record(
        self,
        batch: MicroBatch,
        sample: int,
        values: Mapping[str, Sequence[float]],
        student_top: Sequence[Sequence[tuple[int, float]]],
        teacher_top: Sequence[Sequence[tuple[int, float]]],
    ) -> dict[str, Any]:
        row = batch.samples[sample]
        teacher = batch.rows[row].teacher
        example, ids = batch.rows[row].example, batch.rollout.responses[row]
        return token_record(
            step=self._step,
            row=sample,
            text=example.text,
            gold=example.gold,
            label=self._label(ids),
            response=ids,
            ended=batch.rollout.ended[row],
            values=values,
            student_top=student_top,
            teacher_top=teacher_top,
            token_text=lambda token: self._token(token),
            more={
                "source": batch.sources[row],
                "index": batch.rows[row].index,
                **({"teacher": teacher} if teacher else {}),
            },
        )

    def _text(self, ids: Sequence[int]) -> str:
        return self._job.encoder.decode(ids)

    def _label(self, ids: Sequence[int]) -> str | None:
        return self._job.encoder.prompt.parse(self._text(ids))

    def _token(self, token: int) -> str:
        text: str = self._job.encoder.tokenizer.decode([token])
        return text

    def _counts(self) -> dict[str, int]:
        stats, cache = self._job.teacher.stats, self._job.cache
        counts = {"teacher_tokens": stats.computed_tokens, "teacher_passes": stats.passes}
        if cache is not None:
            counts |= {"cache_hits": cache.stats.hits, "cache_misses": cache.stats.misses}
        return counts


def _sums(out: LossOutput, weights: Sequence[float] | None) -> dict[str, float]:
    """Number of tokens, and weighted sums of λ and both divergences over them."""
    columns = {"lam_mean": out.lam, "forward_kl": out.forward_kl, "reverse_kl": out.reverse_kl}
    known = {name: column.reshape(-1).tolist() for name, column in columns.items() if column is not None}
    often = [1.0] * out.per_token.numel() if weights is None else weights
    summed = {name: math.fsum(map(operator.mul, column, often)) for name, column in known.items()}
    return {"tokens": out.tokens, **summed}


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0) + value


def _by_token(teachers: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Rows, tokens, and per-token means of all else, for every teacher by name."""
    return {
        name: {key: value if key in ("rows", "tokens") else value / sums["tokens"] for key, value in sums.items()}
        for name, sums in sorted(teachers.items())
        if sums["tokens"]
    }


def _means(values: Mapping[str, Sequence[float]], spans: Sequence[slice]) -> dict[str, float]:
    """Mean of each column over the tokens of the spans; empty if there are none."""
    chosen = {name: [value for span in spans for value in column[span]] for name, column in values.items()}
    return {name: math.fsum(column) / len(column) for name, column in chosen.items() if column}
