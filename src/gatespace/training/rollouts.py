"""The responses of a step and their teacher scores, micro-batch by micro-batch.

`OnPolicy` samples a step's responses from the current student. If the update is a single micro-batch, it backpropagates
through the same forward pass over the prompts that sampling started from. If there are several, the whole step is
sampled and scored first: a decoding step costs little more for many rows than for few. Responses to a prompt share its
forward pass, and equal ones are merged into one weighted row. `Ahead` samples before the update: the responses of the
same step if the student is sharded, or those of the next step if the run is one step off policy
(`rollout.staleness: 1`), so that a remote teacher scores them while the student updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gatespace.config import RolloutConfig
from gatespace.errors import RunError, UsageError
from gatespace.models.body import Body, Forward, KVCache
from gatespace.models.encode import Encoder
from gatespace.rollout import Rollout, Sampler, Sampling, sample
from gatespace.seeding import generator, stream
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import Scores, Teacher
from gatespace.training.batches import Batches, Row, micro_batches
from gatespace.training.clock import Clock
from gatespace.training.processes import ONE, Processes


@dataclass
class MicroBatch:
    """Rows of a step; fields are filled in from first to last.

    A row is a prompt with a response: one sample each, until equal responses to a prompt are merged.
    """

    rows: list[Row]
    """Rows of the same prompt are adjacent."""
    places: list[int]
    """Places of its samples in the step's batch; a sample's random stream is named by its place."""
    parents: list[int] = field(default_factory=list)
    """Index of each row's prompt in `prompts`, from 0 in order; by default each row has its own forward pass."""
    rollout: Rollout = field(default_factory=Rollout)
    sources: list[str] = field(default_factory=list)
    """Source of each response: student, teacher or gold."""
    samples: list[int] = field(default_factory=list)
    """The row of every sample; rows are in the order of their first samples."""
    weights: list[list[float]] | None = None
    """Weight of each token of each row. None: 1 each."""
    scores: Scores | None = None
    forward: Forward | None = None
    """The student's forward pass over the prompts, with gradient; None: the update runs its own."""
    prefix: KVCache | Sequence[int] | None = None
    """The shared prefix: its KV cache, or its ids to be part of the forward pass."""
    hidden: Tensor | None = None
    """(N, H) the student's hidden states at the positions that predict the response tokens, detached."""

    def __post_init__(self) -> None:
        self.parents = self.parents or list(range(len(self.rows)))
        self.samples = self.samples or list(range(len(self.rows)))

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts, each computed once by the student."""
        return list({parent: row.prompt for parent, row in zip(self.parents, self.rows, strict=True)}.values())

    @property
    def teacher_prompts(self) -> list[list[int]]:
        """The teacher's prompts, in the same order."""
        return list({parent: row.teacher_prompt for parent, row in zip(self.parents, self.rows, strict=True)}.values())

    @property
    def families(self) -> list[list[list[int]]]:
        """Responses grouped by prompt."""
        found: dict[int, list[list[int]]] = {}
        for parent, response in zip(self.parents, self.rollout.responses, strict=True):
            found.setdefault(parent, []).append(response)
        return list(found.values())

    @property
    def segments(self) -> Tensor:
        """(N,) the row of every response token."""
        lengths = torch.tensor([len(response) for response in self.rollout.responses])
        return torch.arange(len(self.rows)).repeat_interleave(lengths)

    def merge(self) -> None:
        """Merge equal responses to a prompt into one row, weighted by their number."""
        known: dict[Any, int] = {}
        keys = zip(self.parents, self.sources, map(tuple, self.rollout.responses), self.rollout.ended, strict=True)
        samples = [known.setdefault(key, len(known)) for key in keys]
        if len(known) == len(self.rows):
            return
        firsts, counts = [samples.index(row) for row in range(len(known))], Counter(samples)
        self.samples = samples
        self.rows, self.parents = [self.rows[i] for i in firsts], [self.parents[i] for i in firsts]
        self.rollout, self.sources = self.rollout.select(firsts), [self.sources[i] for i in firsts]
        self.weights = [[float(counts[row])] * len(ids) for row, ids in enumerate(self.rollout.responses)]

    def leave_out(self, ids: Set[int]) -> None:
        """Set the weight of response tokens with these ids to 0."""
        weights = self.weights or [[1.0] * len(response) for response in self.rollout.responses]
        self.weights = [
            [0.0 if token in ids else weight for token, weight in zip(response, row, strict=True)]
            for response, row in zip(self.rollout.responses, weights, strict=True)
        ]


@dataclass
class OnPolicy:
    """Samples and scores responses of the current student, by micro-batch.

    Args:
        student: Samples, unless there is a `sampler`.
        teacher: Scores.
        encoder: The task in the student's tokens.
        batches: The rows of each step.
        settings: The section `rollout`.
        vocab_size: Ids from here on are padding.
        seed: Of the run.
        micro_tokens: Token limit of a micro-batch of the update.
        rollout_tokens: Token limit of a batch in sampling.
        reuse: Whether the update backpropagates through the forward pass that sampling started from.
        sampler: Samples instead of the student, with a copy of its weights.
        processes: Those of the run; each has a share of the step's rows.
        share: Whether responses to a prompt share the student's forward pass over it.
        merge: Whether equal responses that share a prompt's pass are one row.
    """

    student: Body
    teacher: Teacher
    encoder: Encoder
    batches: Batches
    settings: RolloutConfig
    vocab_size: int
    seed: int
    micro_tokens: int
    rollout_tokens: int
    reuse: bool = True
    sampler: Sampler | None = None
    processes: Processes = ONE
    share: bool = True
    merge: bool = True
    current: MicroBatch | None = None
    """The micro-batch in progress, for the record of a failed step."""

    # ------------------------------------------------------------------ a step

    def split(self, step: int) -> list[list[MicroBatch]]:
        """The micro-batches of every process; depends on the step's rows alone."""
        each, room = self.settings.per_prompt, self.settings.max_new_tokens
        rows = [row for row in self.batches.at(step) for _ in range(each)]
        families = [place // each if self.share else place for place in range(len(rows))]
        found: list[list[MicroBatch]] = []
        for share in self.processes.shares(len(rows)):
            place, own = share.start, []
            for some in micro_batches([rows[i] for i in share], self.micro_tokens, room, [families[i] for i in share]):
                places = list(range(place, place + len(some)))
                own.append(MicroBatch(some, places, [families[i] - families[place] for i in places]))
                place += len(some)
            found.append(own)
        return found

    def begin(self, step: int, clock: Clock) -> list[MicroBatch]:
        """This process's micro-batches of a step."""
        return self.split(step)[self.processes.rank]

    def scored(
        self, step: int, batches: list[MicroBatch], prefix: KVCache | Sequence[int], clock: Clock
    ) -> Iterator[MicroBatch]:
        """Yield each micro-batch with responses and scores."""
        if len(batches) > 1 or not self.reuse:
            yield from self._one_by_one(batches, self._sample_all(step, batches, prefix, clock), prefix, clock)
            return
        self._sync(clock)
        for batch in batches:
            self.current = batch
            batch.prefix = prefix
            with clock("rollout"):
                batch.forward = self.student.forward(batch.prompts, prefix=prefix)
                self._respond(step, batch, batch.forward)
                self._merge(batch)
            with clock("score"):
                batch.scores = self.teacher.score([row.teacher_prompt for row in batch.rows], batch.rollout.responses)
            yield batch
            batch.forward = None  # its graph is freed by the backward pass

    def state(self) -> dict[str, Any]:
        """Checkpoint state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Restore from a checkpoint's `state`; returns the rest of it."""
        return dict(state)

    # ------------------------------------------------------------------ responses

    @torch.no_grad()
    def _sample_all(
        self, step: int, batches: list[MicroBatch], prefix: KVCache | Sequence[int] | None, clock: Clock
    ) -> list[Callable[[], Scores]]:
        """Fill in the responses of all micro-batches and request their scores; returns a getter for each."""
        self._sync(clock)
        found: list[Callable[[], Scores]] = []
        sizes = [sum(self._size(row) for row in batch.rows) for batch in batches]
        for span in _together(sizes, self.rollout_tokens):
            members = batches[span]
            self.current = every = _joined(members)
            with clock("rollout"):
                self._respond(step, every, self.student.forward(every.prompts, prefix=prefix))
                first = 0
                for batch in members:
                    rows = range(first, first := first + len(batch.rows))
                    batch.rollout, batch.sources = every.rollout.select(rows), [every.sources[i] for i in rows]
                    self._merge(batch)
            with clock("score"):
                asked = [row.teacher_prompt for batch in members for row in batch.rows]
                responses = [ids for batch in members for ids in batch.rollout.responses]
                scores = cache(self.teacher.ask(asked, responses))
            token = 0
            for batch in members:
                tokens = slice(token, token := token + sum(map(len, batch.rollout.responses)))
                found.append(lambda scores=scores, tokens=tokens: scores().part(tokens))  # type: ignore[misc]
        return found

    def _merge(self, batch: MicroBatch) -> None:
        if self.merge and self.share:
            batch.merge()

    def _size(self, row: Row) -> int:
        """Most tokens of a sample during decoding, with its own copy of the prompt's KV cache."""
        return len(row.prompt) + self.settings.max_new_tokens

    def _one_by_one(
        self,
        batches: list[MicroBatch],
        scores: list[Callable[[], Scores]],
        prefix: KVCache | Sequence[int],
        clock: Clock,
    ) -> Iterator[MicroBatch]:
        for batch, known in zip(batches, scores, strict=True):
            self.current = batch
            batch.prefix = prefix
            with clock("score"):
                batch.scores = known()
            yield batch

    def _sync(self, clock: Clock) -> None:
        if self.sampler is not None and "student" in self.settings.source.shares():
            with clock("rollout"):
                self.sampler.sync()

    def _respond(self, step: int, batch: MicroBatch, forward: Forward) -> None:
        """Fill in the responses: the student's own, the teacher's, or the gold ones."""
        shares = self.settings.source.shares()
        batch.sources = [_pick(shares, generator(self.seed, "source", step, place).random()) for place in batch.places]
        batch.rollout = Rollout([[]] * len(batch.rows), [[]] * len(batch.rows), [True] * len(batch.rows))
        cap = self.settings.max_new_tokens
        for source in shares:
            chosen = [i for i, other in enumerate(batch.sources) if other == source]
            if not chosen:
                continue
            if source == "gold":
                found = self._gold([batch.rows[i].example.gold for i in chosen])
            else:
                found = self._sample(source, step, batch, chosen, forward)
            for i, ids, log_probs, ended in zip(chosen, found.responses, found.log_probs, found.ended, strict=True):
                batch.rollout.responses[i] = ids[:cap]
                batch.rollout.log_probs[i] = log_probs[:cap]
                batch.rollout.ended[i] = ended

    def _stop(self, body: Body) -> Callable[[list[int]], bool]:
        """Stop condition for the responses of `body`."""
        ends = set(body.model.end_ids)
        closed = self.encoder.closed if self._until_closed else lambda ids: False
        return lambda ids: ids[-1] in ends or closed(ids)

    @property
    def _until_closed(self) -> bool:
        """Whether a response ends once the prompt says it is closed; stop strings of free text always end it."""
        return self.settings.stop == "json" or not self.encoder.prompt.closes

    def _gold(self, golds: list[str]) -> Rollout:
        end = None if self.settings.stop == "json" and self.encoder.prompt.closes else self.student.model.turn_end
        gold = [self.encoder.gold(one, end) for one in golds]
        fits = [len(ids) <= self.settings.max_new_tokens for ids in gold]
        return Rollout(gold, [[0.0] * len(ids) for ids in gold], fits)

    def _sample(self, source: str, step: int, batch: MicroBatch, chosen: list[int], forward: Forward) -> Rollout:
        body = self.student
        settings = self.settings
        sampling = Sampling(settings.temperature, settings.top_p, settings.max_new_tokens)
        if source == "student" and self.sampler is not None:
            return self.sampler.sample(
                [[*self.encoder.prefix, *batch.rows[i].prompt] for i in chosen],
                sampling=sampling,
                stop=self._stop(body),
                seeds=[stream(self.seed, "rollout", step, batch.places[i]) for i in chosen],
                vocab_size=self.vocab_size,
            )
        draws = [generator(self.seed, "rollout", step, batch.places[i]).random for i in chosen]
        parents = [batch.parents[i] for i in chosen]
        if source == "teacher" or len(chosen) < len(batch.rows):
            wanted = sorted(set(parents))
            parents = [wanted.index(parent) for parent in parents]
            prefix: Any = None if forward.prefix is None else forward.prefix.detached()
            if source == "teacher":
                if not isinstance(self.teacher, LocalTeacher):
                    got = type(self.teacher).__name__
                    raise UsageError("only a teacher in this process can sample responses", got=got)
                body, prefix = self.teacher.body, self.teacher.prefix_cache
            prompts = batch.teacher_prompts if source == "teacher" else batch.prompts
            with torch.no_grad():
                forward = body.forward([prompts[parent] for parent in wanted], prefix=prefix)
        whole = Rollout()
        for span in _together([self._size(batch.rows[i]) for i in chosen], self.rollout_tokens):
            found = sample(
                body,
                forward,
                vocab_size=self.vocab_size,
                sampling=sampling,
                stop=self._stop(body),
                draws=draws[span],
                parents=parents[span],
            )
            whole.responses += found.responses
            whole.log_probs += found.log_probs
            whole.ended += found.ended
        return whole


@dataclass(frozen=True)
class _Sampled:
    """The responses of a step, and getters of their requested scores."""

    step: int
    batches: list[MicroBatch]
    scores: list[Callable[[], Scores]]


@dataclass
class Ahead(OnPolicy):
    """Samples the responses of a whole step before the update.

    One step off policy, step n first samples the responses of step n+1, then updates on those of step n, which the
    student sampled before update n-1. Responses sampled ahead are part of a checkpoint: the weights that sampled them
    are gone by then. Their scores are requested again, and are the same.
    """

    steps: int = 0
    """Steps of the run; nothing is sampled beyond the last."""
    _now: _Sampled | None = None
    _next: _Sampled | None = None
    _following: _Sampled | None = None

    def begin(self, step: int, clock: Clock) -> list[MicroBatch]:
        """This process's micro-batches of a step. On failure, `state` is unchanged."""
        if self.settings.staleness == 0:
            now = self._sample_step(step, clock)
        else:
            if self._next is None or self._next.step != step:
                if step > 0:
                    raise RunError(f"the responses of step {step + 1} were not sampled by the step before")
                self._next = self._sample_step(step, clock)
            now = self._next
            self._following = self._sample_step(step + 1, clock) if step + 1 < self.steps else None
        self._now = now
        if self.processes.sharded:  # none may fail between passes, where the others would wait
            with self.processes.together(), clock("score"):
                known = [scores() for scores in now.scores]
            self._now = _Sampled(step, now.batches, [lambda scores=scores: scores for scores in known])  # type: ignore[misc]
        return now.batches

    def scored(
        self, step: int, batches: list[MicroBatch], prefix: KVCache | Sequence[int], clock: Clock
    ) -> Iterator[MicroBatch]:
        """Yield each micro-batch with its requested scores."""
        assert self._now is not None
        yield from self._one_by_one(batches, self._now.scores, prefix, clock)
        if self.settings.staleness:
            self._next = self._following

    def _sample_step(self, step: int, clock: Clock) -> _Sampled:
        batches = super().begin(step, clock)
        with self.student.model.whole(), self.processes.together():
            with clock("rollout"), torch.no_grad():
                prefix = self.student.prefix_cache(self.encoder.prefix)
            scores = self._sample_all(step, batches, prefix, clock)
        return _Sampled(step, batches, scores)

    def state(self) -> dict[str, Any]:
        """Responses of all processes sampled ahead."""
        if self._next is None:
            return {}
        batches = self._next.batches
        own = {
            "responses": [batch.rollout.responses[row] for batch in batches for row in batch.samples],
            "log_probs": [batch.rollout.log_probs[row] for batch in batches for row in batch.samples],
            "ended": [batch.rollout.ended[row] for batch in batches for row in batch.samples],
            "sources": [batch.sources[row] for batch in batches for row in batch.samples],
        }
        found = self.processes.gather(own)
        whole = {name: [value for one in found for value in one[name]] for name in own}
        return {"ahead": {"number": self._next.step, **whole}}

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Restore from a checkpoint's `state`; returns the rest of it."""
        rest = {name: value for name, value in state.items() if name != "ahead"}
        self._next = None
        if "ahead" in state:
            saved = state["ahead"]
            batches = super().begin(saved["number"], Clock())
            for batch in batches:
                span = slice(batch.places[0], batch.places[-1] + 1)
                batch.rollout = Rollout(saved["responses"][span], saved["log_probs"][span], saved["ended"][span])
                batch.sources = saved["sources"][span]
                self._merge(batch)
            asked = [self.teacher.ask([row.teacher_prompt for row in b.rows], b.rollout.responses) for b in batches]
            self._next = _Sampled(saved["number"], batches, asked)
        return rest


def _together(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Spans of items with a total size of at most `most`, or one item."""
    start = used = 0
    for i, size in enumerate(sizes):
        if i > start and used + size > most:
            yield slice(start, i)
            start, used = i, 0
        used += size
    yield slice(start, len(sizes))


def _joined(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Join micro-batches without responses into one."""
    parents: list[int] = []
    for batch in batches:
        before = parents[-1] + 1 if parents else 0
        parents += [before + parent for parent in batch.parents]
    rows = [row for batch in batches for row in batch.rows]
    return MicroBatch(rows, [place for batch in batches for place in batch.places], parents)


def _pick(shares: dict[str, float], number: float) -> str:
    for name, share in shares.items():
        number -= share
        if number < 0:
            return name
    return list(shares)[-1]
