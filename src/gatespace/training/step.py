"""One step of on-policy distillation, from prompts to weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from gatespace.addons.parallel.ranks import ALONE, Ranks
from gatespace.config import ObjectiveConfig, RolloutConfig
from gatespace.errors import GatespaceError, RunError, UsageError
from gatespace.gating.fused import fused_distillation_loss
from gatespace.gating.loss import LossOutput, distillation_loss
from gatespace.gating.objectives import Objective
from gatespace.gating.projection import Head
from gatespace.models.body import Body, Forward, KVCache
from gatespace.models.encode import Encoder
from gatespace.rollout import Rollout, Sampling, sample
from gatespace.seeding import generator, permutation, stream
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import Scores, Teacher
from gatespace.training.batches import Row, divided, keep_up
from gatespace.training.clock import Clock
from gatespace.training.optimizer import Optimizer, Update


@dataclass
class Part:
    """A micro-batch on its way through a step."""

    rows: list[Row]
    places: list[int]
    """Where in the step's batch its rows stand; every row's random numbers are named by its place."""
    rollout: Rollout = field(default_factory=Rollout)
    sources: list[str] = field(default_factory=list)

    @property
    def prompts(self) -> list[list[int]]:
        return [row.prompt for row in self.rows]

    @property
    def segments(self) -> Tensor:
        """(N,) the row of every response token."""
        lengths = torch.tensor([len(response) for response in self.rollout.responses])
        return torch.arange(len(self.rows)).repeat_interleave(lengths)


@dataclass(frozen=True)
class Scored:
    """A micro-batch after its loss: what telemetry is made of."""

    part: Part
    output: LossOutput
    hidden: Tensor
    scores: Scores


@dataclass(frozen=True)
class Ahead:
    """A step's responses, written before the update that the step before makes, and the scores that were asked for."""

    number: int
    parts: list[Part]
    scores: list[Callable[[], Scores]]


class TeacherStats(Protocol):
    """What a teacher has done so far."""

    computed_tokens: int
    passes: int


class CountingTeacher(Teacher, Protocol):
    """A teacher that counts its work."""

    @property
    def stats(self) -> TeacherStats: ...


class StudentSampler(Protocol):
    """Writes responses with a copy of the student's weights."""

    def sync(self) -> float:
        """Take the weights as they are now; an error unless they have arrived."""
        ...

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        stop: Callable[[list[int]], bool],
        seeds: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> Rollout:
        """Continue whole prompts."""
        ...


@dataclass(frozen=True)
class Distillation:
    """A student, its teacher, and how the one learns from the other."""

    student: Body
    teacher: CountingTeacher
    encoder: Encoder
    objective: Objective
    settings: ObjectiveConfig
    rollout: RolloutConfig
    optimizer: Optimizer
    vocab_size: int
    seed: int
    micro_tokens: int
    reuse: bool = True
    fused: bool = True
    sampler: StudentSampler | None = None
    """Writes the student's responses in place of the student itself."""
    ranks: Ranks = ALONE
    """The processes that do a step together; each has a share of its rows."""

    def step(
        self,
        number: int,
        rows: Sequence[Row],
        clock: Clock,
        watch: Callable[[Scored], None],
        *,
        ahead: Ahead | None = None,
    ) -> Update:
        """Let the student write, the teacher score, and update the student.

        Args:
            number: The step's number from 0; random numbers are named by it.
            rows: The prompts, of all processes.
            clock: Is told where time goes.
            watch: Is shown every micro-batch of this process.
            ahead: What has been written and asked for already; None: it is done now, with the student as it is.
        """
        if not self.ranks.sharded:
            with self.ranks.together():
                tokens = self._learn(number, self.parts(rows) if ahead is None else ahead.parts, clock, watch, ahead)
        else:
            if ahead is None:
                ahead = self.write(number, rows, clock)
            with self.ranks.together(), clock("score"):  # none may fail between the passes, where others wait for it
                known = [scores() for scores in ahead.scores]
            ahead = Ahead(number, ahead.parts, [lambda scores=scores: scores for scores in known])  # type: ignore[misc]
            with self.student.model.learning():
                tokens = self._learn(number, ahead.parts, clock, watch, ahead)
                with clock("update"):
                    keep_up(self.student, len(ahead.parts), self._divided(rows))
        with clock("optimizer"):
            return self.optimizer.step(number, tokens)

    def _learn(
        self, number: int, parts: list[Part], clock: Clock, watch: Callable[[Scored], None], ahead: Ahead | None
    ) -> int:
        """Gather the gradient of this process's rows; how many tokens they have."""
        if ahead is None:
            self._sync(clock)
        prefix = self.encoder.prefix
        with clock("update"):
            # One part reads the shared prefix along with its prompts. Several share one reading of it, whose gradient
            # is gathered and goes back once; not in a model in pieces, whose layers are gathered at their outputs only.
            root = self.student.prefix_cache(prefix) if len(parts) > 1 and not self.ranks.sharded else None
        leaves = None if root is None else root.leaves()
        prefix = leaves if leaves is not None else prefix
        tokens = 0
        for place, part in enumerate(parts):
            with _named(part):
                forward = None
                if ahead is None:
                    with clock("rollout"), torch.set_grad_enabled(self.reuse):
                        forward = self.student.forward(part.prompts, prefix=prefix)
                        self._respond(number, part, forward)
                with clock("score"):
                    if ahead is None:
                        scores = self.teacher.score(part.prompts, part.rollout.responses)
                    else:
                        scores = ahead.scores[place]()
                with clock("update"):
                    hidden = self._hidden(part, forward if self.reuse else None, prefix)
                    output = self._loss(number, part, hidden, scores)
                    output.loss.backward()
                    self.optimizer.collect()
            tokens += output.tokens
            watch(Scored(part, output, hidden.detach(), scores))
        with clock("update"):
            if root is not None and leaves is not None:
                root.backward(leaves)
                self.optimizer.collect()
        return tokens

    def parts(self, rows: Sequence[Row]) -> list[Part]:
        """The micro-batches of this process in a step; a function of the rows of all alone."""
        found: list[Part] = []
        place = self.ranks.share(len(rows) * self.rollout.per_prompt).start
        for some in self._divided(rows)[self.ranks.rank]:
            found.append(Part(some, list(range(place, place + len(some)))))
            place += len(some)
        return found

    def _divided(self, rows: Sequence[Row]) -> list[list[list[Row]]]:
        repeated = [row for row in rows for _ in range(self.rollout.per_prompt)]
        return divided(repeated, self.ranks, self.micro_tokens, self.rollout.max_new_tokens)

    @torch.no_grad()
    def write(self, number: int, rows: Sequence[Row], clock: Clock) -> Ahead:
        """Let the student as it is write the responses of step `number`, and ask for their scores."""
        ahead = Ahead(number, self.parts(rows), [])
        with self.student.model.whole(), self.ranks.together():
            self._sync(clock)
            with clock("rollout"):
                prefix = self.encoder.prefix
                prefix = self.student.prefix_cache(prefix) if len(ahead.parts) > 1 else prefix
            for part in ahead.parts:
                with _named(part):
                    with clock("rollout"):
                        self._respond(number, part, self.student.forward(part.prompts, prefix=prefix))
                    with clock("score"):
                        ahead.scores.append(self.teacher.ask(part.prompts, part.rollout.responses))
        return ahead

    # ------------------------------------------------------------------ responses

    def _sync(self, clock: Clock) -> None:
        if self.sampler is not None and "student" in self.rollout.source.shares():
            with clock("rollout"):
                self.sampler.sync()

    def _respond(self, number: int, part: Part, forward: Forward) -> None:
        """Fill in the responses: the student's own, the teacher's, or the right ones."""
        shares = self.rollout.source.shares()
        part.sources = [_pick(shares, generator(self.seed, "source", number, place).random()) for place in part.places]
        part.rollout = Rollout([[]] * len(part.rows), [[]] * len(part.rows), [True] * len(part.rows))
        sampling = Sampling(self.rollout.temperature, self.rollout.top_p, self.rollout.max_new_tokens)
        for source in shares:
            chosen = [i for i, other in enumerate(part.sources) if other == source]
            if not chosen:
                continue
            if source == "gold":
                end = None if self.rollout.stop == "json" else self.student.model.turn_end
                gold = [self.encoder.gold(part.rows[i].example.label, end) for i in chosen]
                fits = [len(ids) <= self.rollout.max_new_tokens for ids in gold]
                found = Rollout(gold, [[0.0] * len(ids) for ids in gold], fits)
            else:
                found = self._sample(source, number, part, chosen, forward, sampling)
            for i, ids, log_probs, ended in zip(chosen, found.responses, found.log_probs, found.ended, strict=True):
                part.rollout.responses[i] = ids[: self.rollout.max_new_tokens]
                part.rollout.log_probs[i] = log_probs[: self.rollout.max_new_tokens]
                part.rollout.ended[i] = ended

    def _sample(
        self,
        source: str,
        number: int,
        part: Part,
        chosen: list[int],
        forward: Forward,
        sampling: Sampling,
    ) -> Rollout:
        body = self.student
        closed = self.encoder.closed if self.rollout.stop == "json" else lambda ids: False
        if source == "student" and self.sampler is not None:
            own = set(body.model.end_ids)
            return self.sampler.sample(
                [[*self.encoder.prefix, *part.rows[i].prompt] for i in chosen],
                sampling=sampling,
                stop=lambda ids: ids[-1] in own or closed(ids),
                seeds=[stream(self.seed, "rollout", number, part.places[i]) for i in chosen],
                vocab_size=self.vocab_size,
            )
        draws = [generator(self.seed, "rollout", number, part.places[i]).random for i in chosen]
        if source == "teacher":
            if not isinstance(self.teacher, LocalTeacher):
                raise UsageError("only a teacher in this process can write responses", got=type(self.teacher).__name__)
            body = self.teacher.body
            with torch.no_grad():
                forward = body.forward([part.rows[i].prompt for i in chosen], prefix=self.teacher.prefix_cache)
        elif len(chosen) < len(part.rows):
            with torch.no_grad():
                prefix = None if forward.prefix is None else forward.prefix.detached()
                forward = body.forward([part.rows[i].prompt for i in chosen], prefix=prefix)
        ends = set(body.model.end_ids)
        return sample(
            body,
            forward,
            vocab_size=self.vocab_size,
            sampling=sampling,
            stop=lambda ids: ids[-1] in ends or closed(ids),
            draws=draws,
        )

    # ------------------------------------------------------------------ loss

    def _hidden(self, part: Part, forward: Forward | None, prefix: KVCache | Sequence[int] | None) -> Tensor:
        """(N, H) the student's hidden states at the positions that predict the response tokens."""
        responses = part.rollout.responses
        if forward is None:
            fed = [[*prompt, *ids[:-1]] for prompt, ids in zip(part.prompts, responses, strict=True)]
            states = self.student.forward(fed, prefix=prefix).hidden.split([len(row) for row in fed])
            return torch.cat([s[len(p) - 1 :] for s, p in zip(states, part.prompts, strict=True)])
        # The last token of a response predicts nothing; a row needs a token all the same.
        fed = [ids[:-1] or ids for ids in responses]
        if all(len(ids) == 1 for ids in responses):
            return forward.last()
        after = self.student.forward(fed, prefix=forward.prefix, past=forward.cache).hidden.split(
            [len(ids) for ids in fed]
        )
        pieces = zip(forward.last().split(1), after, responses, strict=True)
        return torch.cat([torch.cat([first, rest[: len(ids) - 1]]) for first, rest, ids in pieces])

    def _loss(self, number: int, part: Part, hidden: Tensor, scores: Scores) -> LossOutput:
        """The sum of the losses of all tokens; the optimizer divides it by the tokens of the whole step."""
        if not bool(torch.isfinite(hidden).all()):
            raise RunError("the student's hidden states are not finite", instead="a smaller learning rate, or fp32")
        device = hidden.device
        responses, log_probs = part.rollout.responses, part.rollout.log_probs
        drawn = [value for row in log_probs for value in row]
        # Responses of the student as it is, drawn from its own distribution, need no correction.
        own = self.rollout.temperature == 1 and self.rollout.top_p == 1 and set(part.sources) == {"student"}
        own = own and self.rollout.staleness == 0 and self.sampler is None
        head = self.student.model.head
        common: dict[str, Any] = {
            "objective": self.objective,
            "top_k": self.settings.top_k,
            "temperature": self.settings.temperature,
            "entropy": self.settings.entropy,
            "sampled": torch.tensor([[token for row in responses for token in row]], device=device),
            "sampled_log_probs": None if own else torch.tensor([drawn], device=device),
            "segment_ids": part.segments.to(device)[None],
            "total_tokens": 1.0,
            "vocab_size": self.vocab_size,
            "lam_order": self._order(number, part) if self.settings.shuffle else None,
        }
        if self.fused:
            return fused_distillation_loss(hidden[None], head, scores.payload, scores.head, **common)
        payload = scores.payload
        if scores.head is not None and isinstance(payload, Tensor):
            payload = whole_logits(payload, scores.head)
        return distillation_loss(whole_logits(hidden[None], head), payload, **common)

    def _order(self, number: int, part: Part) -> Tensor:
        """(N,) whose λ each token gets. Within the micro-batch: λ of the others is not known before their turn."""
        tokens = sum(map(len, part.rollout.responses))
        return torch.tensor(permutation(tokens, self.seed, "shuffle", number, part.places[0]))


@contextmanager
def _named(part: Part) -> Iterator[None]:
    """Let an error carry the micro-batch that it arose in."""
    try:
        yield
    except GatespaceError as error:
        error.part = part  # type: ignore[attr-defined]
        raise


def whole_logits(hidden: Tensor, head: Head) -> Tensor:
    """All logits at once, in float32."""
    bias = None if head.bias is None else head.bias.float()
    logits = linear(hidden.float(), head.weight.float(), bias) * head.scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


def _pick(shares: dict[str, float], number: float) -> str:
    for name, share in shares.items():
        number -= share
        if number < 0:
            return name
    return list(shares)[-1]
