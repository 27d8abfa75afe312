"""What is written down about a step: its record, single tokens on some steps, and where time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gatespace.config import TraceConfig
from gatespace.errors import GatespaceError
from gatespace.gating.coefficients import Gate
from gatespace.gating.tokens import TeacherTopK
from gatespace.teacher.cache import ScoreCache
from gatespace.training.clock import Clock
from gatespace.training.loop import Outcome
from gatespace.training.optimizer import Update
from gatespace.training.step import Distillation, Scored, whole_logits
from gatespace.training.token_records import due, token_record
from gatespace.training.trace import Trace, kappa_share


class Telemetry:
    """Watches the steps of a distillation."""

    def __init__(
        self, distillation: Distillation, gate: Gate | None, config: TraceConfig, cache: ScoreCache | None
    ) -> None:
        self._distillation, self._gate, self._config, self._cache = distillation, gate, config, cache
        self._trace = Trace()
        self._step = 0
        self._seen: list[Scored] = []
        self._sample: list[dict[str, Any]] = []
        self._kappa: float | None = None
        self._before: dict[str, int] = {}

    def begin(self, number: int) -> None:
        """A step begins; `number` counts from 0."""
        self._step = number + 1
        self._seen, self._sample, self._kappa = [], [], None
        self._trace.begin(self._step)
        self._before = self._counts()

    def watch(self, scored: Scored) -> None:
        """Take in a micro-batch."""
        first = scored.part.places[0]
        self._trace.add(scored.output, rows=scored.part.segments + first)
        if first == 0 and due(self._step, every=self._config.tokens_every):
            self._look_closely(scored)
        self._seen.append(_without_tensors(scored))

    @contextmanager
    def evidence(self) -> Iterator[None]:
        """If the step fails, let the error carry what was seen of it."""
        try:
            yield
        except GatespaceError as error:
            parts = [scored.part for scored in self._seen]
            parts += [part for part in [getattr(error, "part", None)] if part is not None]
            # The last one may not have got as far as responses.
            responses = [part.rollout.responses or [[]] * len(part.rows) for part in parts]
            pairs = zip(parts, responses, strict=True)
            rows = [(row, ids) for part, written in pairs for row, ids in zip(part.rows, written, strict=True)]
            encoder = self._distillation.encoder
            error.evidence = {  # type: ignore[attr-defined]
                "rows": [
                    {
                        "index": row.index,
                        "text": row.example.text,
                        "gold": row.example.label,
                        "response": encoder.decode(ids),
                    }
                    for row, ids in rows
                ],
                "losses": [float(scored.output.loss.detach()) for scored in self._seen],
            }
            raise

    def outcome(self, update: Update, clock: Clock) -> Outcome:
        """The step is done, in all processes."""
        rollouts = [scored.part.rollout for scored in self._seen]
        sources = [source for scored in self._seen for source in scored.part.sources]
        log_probs = [row for rollout in rollouts for row in rollout.log_probs]
        own = {
            "lengths": [len(ids) for rollout in rollouts for ids in rollout.responses],
            "ended": [ended for rollout in rollouts for ended in rollout.ended],
            "log_probs": [row if source == "student" else None for row, source in zip(log_probs, sources, strict=True)],
        }
        counts = {name: count - self._before[name] for name, count in self._counts().items()}
        ranks = self._distillation.ranks
        found = ranks.gather((own, counts, self._trace.tokens() if ranks.size > 1 else None))
        for rank, (_, _, tokens) in enumerate(found):
            if rank != ranks.rank:
                self._trace.take(tokens)
        rows = {name: [value for one, _, _ in found for value in one[name]] for name in own}
        self._trace.rollout(**rows)
        record = self._trace.record(grad_norm=update.grad_norm, lr=update.lr, kappa_share=self._kappa)
        seconds = sum(clock.wall.values())
        timing = {
            "step": self._step,
            "wall": clock.wall,
            "cpu": clock.cpu,
            "tokens_per_second": record["tokens"] / seconds if seconds else None,
            **{name: sum(one[name] for _, one, _ in found) for name in counts},
        }
        return Outcome(record, timing, self._sample)

    def state(self) -> dict[str, Any]:
        """The sums of the run, for a checkpoint."""
        return self._trace.state()

    def summary(self) -> dict[str, Any]:
        """The run so far: tokens, E[λ] over them, saturation."""
        return self._trace.summary()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._trace.restore(state)

    # ------------------------------------------------------------------ single tokens

    def _look_closely(self, scored: Scored) -> None:
        distillation, part = self._distillation, scored.part
        rows = min(self._config.rollouts, len(part.rows))
        lengths = [len(ids) for ids in part.rollout.responses[:rows]]
        count = sum(lengths)
        size = distillation.vocab_size
        with torch.no_grad():
            student = whole_logits(scored.hidden[:count], distillation.student.model.head)[:, :size]
            teacher: Tensor | TeacherTopK
            payload, head = scored.scores.payload, scored.scores.head
            if isinstance(payload, TeacherTopK):
                sampled = payload.sampled_log_probs
                teacher = TeacherTopK(
                    payload.ids[:, :count],
                    payload.log_probs[:, :count],
                    None if sampled is None else sampled[:, :count],
                )
            else:
                assert head is not None
                teacher = whole_logits(payload[0, :count], head)[:, :size]
        settings = distillation.settings
        if settings.shuffle:
            self._kappa = 0.0  # λ that was dealt out is a constant
        elif self._gate is not None:
            responses = [token for ids in part.rollout.responses[:rows] for token in ids]
            self._kappa = kappa_share(
                student,
                teacher,
                self._gate,
                segments=part.segments[:count],
                top_k=settings.top_k,
                temperature=settings.temperature,
                support=settings.support,
                support_k=settings.support_k,
                entropy=settings.entropy,
                sampled=torch.tensor(responses, device=student.device),
            )
        start = 0
        for row, length in enumerate(lengths):
            span = slice(start, start + length)
            start += length
            self._sample.append(self._record(part, row, student[span], _part(teacher, span)))

    def _record(self, part: Any, row: int, student: Tensor, teacher: Tensor | TeacherTopK) -> dict[str, Any]:
        encoder = self._distillation.encoder
        example, ids = part.rows[row].example, part.rollout.responses[row]
        return token_record(
            step=self._step,
            row=row,
            text=example.text,
            gold=example.label,
            label=encoder.prompt.parse(encoder.decode(ids)),
            response=ids,
            ended=part.rollout.ended[row],
            values=self._trace.row(row),
            student_logits=student,
            teacher_logits=teacher,
            token_text=lambda token: encoder.tokenizer.decode([token]),
            more={"source": part.sources[row], "index": part.rows[row].index},
        )

    def _counts(self) -> dict[str, int]:
        stats = self._distillation.teacher.stats
        counts = {"teacher_tokens": stats.computed_tokens, "teacher_passes": stats.passes}
        if self._cache is not None:
            counts |= {"cache_hits": self._cache.stats.hits, "cache_misses": self._cache.stats.misses}
        return counts


def _part(teacher: Tensor | TeacherTopK, span: slice) -> Tensor | TeacherTopK:
    if isinstance(teacher, Tensor):
        return teacher[span]
    return TeacherTopK(teacher.ids[0, span], teacher.log_probs[0, span])


def _without_tensors(scored: Scored) -> Scored:
    """Hidden states of a whole step need not be kept."""
    empty = scored.hidden[:0]
    return Scored(scored.part, scored.output, empty, type(scored.scores)(empty, None))
