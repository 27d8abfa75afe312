"""The responses of a step and their teacher scores, micro-batch by micro-batch.

`OnPolicy` samples a step's responses with the student as it is. Where the update is one micro-batch, it goes back
through the very forward pass over the prompts that sampling began with. Where it is several, the whole step is sampled
and scored first: a decoding step costs little more for many rows than for few. The responses of a prompt share its
pass, and equal ones are one row that counts as often. `Ahead` samples before the update
begins: the responses of the same step where the student is sharded, or those of the next step where the run is one step
off policy (`rollout.staleness: 1`), so that a remote teacher scores them while the student updates.
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
from gatespace.rollout import Expansion, Rollout, Sampler, Sampling, sample
from gatespace.seeding import generator, stream
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import Scores, Teacher
from gatespace.training.batches import Batches, Row, micro_batches
from gatespace.training.clock import Clock
from gatespace.training.processes import ONE, Processes


@dataclass
class MicroBatch:
    """Rows on their way through a step; filled in from left to right.

    A row is a prompt with a response. Until there are responses it is a sample; then equal ones of a prompt are merged.
    """

    rows: list[Row]
    """Those of the same prompt stand together."""
    places: list[int]
    """Where in the step's batch its samples stand; every sample's random numbers are named by its place."""
    parents: list[int] = field(default_factory=list)
    """The number of every row's prompt among `prompts`, from 0 in order; by default each row has a pass of its own."""
    rollout: Rollout = field(default_factory=Rollout)
    sources: list[str] = field(default_factory=list)
    """Where each response is from: student, teacher or gold."""
    samples: list[int] = field(default_factory=list)
    """The row of every sample; rows are in the order of their first samples."""
    weights: list[list[float]] | None = None
    """How often each token of each row counts; 0: not at all. None: once each."""
    trees: list[Expansion] = field(default_factory=list)
    """Of expected rollouts, what was found of every prompt's tree; its paths are the prompt's rows."""
    scores: Scores | None = None
    forward: Forward | None = None
    """The student's forward pass over the prompts, with gradient; None: the update makes one of its own."""
    prefix: KVCache | Sequence[int] | None = None
    """The shared prefix: its KV cache, or its ids to be part of the forward pass."""
    hidden: Tensor | None = None
    """(N, H) the student's hidden states at the positions that predict the response tokens, detached."""

    def __post_init__(self) -> None:
        self.parents = self.parents or list(range(len(self.rows)))
        self.samples = self.samples or list(range(len(self.rows)))

    @property
    def prompts(self) -> list[list[int]]:
        """Each that goes through the student once."""
        return list({parent: row.prompt for parent, row in zip(self.parents, self.rows, strict=True)}.values())

    @property
    def teacher_prompts(self) -> list[list[int]]:
        """Those of the teacher, in the same order."""
        return list({parent: row.teacher_prompt for parent, row in zip(self.parents, self.rows, strict=True)}.values())

    @property
    def families(self) -> list[list[list[int]]]:
        """The responses of every prompt."""
        found: dict[int, list[list[int]]] = {}
        for parent, response in zip(self.parents, self.rollout.responses, strict=True):
            found.setdefault(parent, []).append(response)
        return list(found.values())

    @property
    def segments(self) -> Tensor:
        """(N,) the row of every response token."""
        lengths = torch.tensor([len(response) for response in self.rollout.responses])
        return torch.arange(len(self.rows)).repeat_interleave(lengths)

    @property
    def numbers(self) -> Tensor:
        """(N,) the place of the first sample of every response token's row: a number of the row within the step."""
        firsts = dict(zip(reversed(self.samples), reversed(self.places), strict=True))
        return torch.tensor([firsts[row] for row in range(len(self.rows))])[self.segments]

    def take(self, whole: MicroBatch, prompts: range) -> None:
        """Fill in the responses of the prompts that have these numbers in `whole`."""
        rows = [row for row, parent in enumerate(whole.parents) if parent in prompts]
        self.rows, self.places = [whole.rows[i] for i in rows], [whole.places[i] for i in rows]
        self.parents, self.samples = [whole.parents[i] - prompts.start for i in rows], list(range(len(rows)))
        self.rollout, self.sources = whole.rollout.select(rows), [whole.sources[i] for i in rows]
        self.weights = None if whole.weights is None else [whole.weights[i] for i in rows]
        self.trees = whole.trees[prompts.start : prompts.stop]

    def merge(self) -> None:
        """Make equal responses of a prompt one row that counts as often as it was sampled."""
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
        """Let response tokens with these ids count for nothing."""
        weights = self.weights or [[1.0] * len(response) for response in self.rollout.responses]
        self.weights = [
            [0.0 if token in ids else weight for token, weight in zip(response, row, strict=True)]
            for response, row in zip(self.rollout.responses, weights, strict=True)
        ]


@dataclass
class OnPolicy:
    """Responses of the student as it is, one micro-batch after the other.

    Args:
        student: Samples, unless there is a `sampler`.
        teacher: Scores.
        encoder: The task in the student's tokens.
        batches: The rows of each step.
        settings: The section `rollout`.
        vocab_size: Ids from here on are padding.
        seed: Of the run.
        micro_tokens: Most tokens in a micro-batch of the update.
        rollout_tokens: Most tokens that are sampled together.
        reuse: Whether the update goes back through the forward pass that sampling began with.
        sampler: Samples with a copy of the student's weights, in place of the student.
        processes: Those that do the step together; each has a share of its rows.
        share: Whether the responses of a prompt share the student's pass over it.
        merge: Whether equal responses of a prompt that share its pass are one row.
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
    """The micro-batch that is being worked on, for the record of a step that fails."""

    # ------------------------------------------------------------------ a step

    def split(self, step: int) -> list[list[MicroBatch]]:
        """The micro-batches of every process; a function of the rows of all alone."""
        each, room = self.settings.per_prompt, self.settings.room
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
        """Each micro-batch with its responses and scores."""
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
        """For a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Resume from what `state` gave; the rest of `state` is returned."""
        return dict(state)

    # ------------------------------------------------------------------ responses

    @torch.no_grad()
    def _sample_all(
        self, step: int, batches: list[MicroBatch], prefix: KVCache | Sequence[int] | None, clock: Clock
    ) -> list[Callable[[], Scores]]:
        """Fill in the responses of all micro-batches; how each one's scores are had, which the teacher is asked for."""
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
                    batch.take(every, range(first, first := first + len(batch.prompts)))
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
        """Most tokens of a sample while it is decoded, when it has the keys and values of its prompt to itself."""
        return len(row.prompt) + self.settings.room

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
        """Whether a response that `body` writes is at its end."""
        ends = set(body.model.end_ids)
        closed = self.encoder.closed if self._until_closed else lambda ids: False
        return lambda ids: ids[-1] in ends or closed(ids)

    @property
    def _until_closed(self) -> bool:
        """Whether a response ends where the prompt calls it closed; stop strings of free text always end it."""
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
    """The responses of a step, and the scores that the teacher was asked for."""

    step: int
    batches: list[MicroBatch]
    scores: list[Callable[[], Scores]]


@dataclass
class Ahead(OnPolicy):
    """Responses of a whole step, sampled before any of them is learned from.

    One step off policy, step n begins by sampling the responses of step n+1; then it updates on those of step n, which
    the student sampled before update n-1. What was sampled ahead is part of a checkpoint: the student that sampled it
    is gone by then. Its scores are asked for again, and are the same.
    """

    steps: int = 0
    """How many steps the run has; nothing is sampled for one that will not come."""
    _now: _Sampled | None = None
    _next: _Sampled | None = None
    _following: _Sampled | None = None

    def begin(self, step: int, clock: Clock) -> list[MicroBatch]:
        """This process's micro-batches of a step. If it fails, `state` is what it was before."""
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
        if self.processes.sharded:  # none may fail between the passes, where others wait for it
            with self.processes.together(), clock("score"):
                known = [scores() for scores in now.scores]
            self._now = _Sampled(step, now.batches, [lambda scores=scores: scores for scores in known])  # type: ignore[misc]
        return now.batches

    def scored(
        self, step: int, batches: list[MicroBatch], prefix: KVCache | Sequence[int], clock: Clock
    ) -> Iterator[MicroBatch]:
        """Each micro-batch with the scores that were asked for."""
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
        """What was sampled ahead by all processes."""
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
        """Resume from what `state` gave; the rest of `state` is returned."""
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
    """Neighbours whose sizes are at most `most` together, or one alone."""
    start = used = 0
    for i, size in enumerate(sizes):
        if i > start and used + size > most:
            yield slice(start, i)
            start, used = i, 0
        used += size
    yield slice(start, len(sizes))


def _joined(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Micro-batches that have no responses yet as one."""
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
