"""The responses of a step and the teacher's scores of them, by micro-batch.

If the update is a single micro-batch, it backpropagates through the same forward pass over the prompts that sampling
started from. If there are several, the whole step is sampled first: a decoding step costs little more for many rows
than for few. Responses to a prompt share its forward pass, and equal ones are merged into one weighted row. One step
off policy (`rollout.staleness: 1`), the responses of the next step are sampled before the update, so that a remote
teacher scores them while the student updates.
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
from gatespace.teacher.several import Teachers
from gatespace.training.batches import Batches, Row, micro_batches
from gatespace.training.clock import Clock
from gatespace.training.processes import ONE, Processes


@dataclass
class MicroBatch:
    """Rows of a step that go through the update together; fields are filled in from first to last.

    A row is a prompt with a response: one sample each, until equal responses to a prompt are merged. All rows have the
    same teacher.
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
    ask: Callable[[], Any] = lambda: None
    """Returns the teacher's scores, which have been requested; None without a teacher."""
    scores: Any = None
    """The teacher's `Scores` of all response tokens, or its logits of the labels."""
    forward: Forward | None = None
    """The student's forward pass over the prompts, with gradient; None: the update runs its own."""
    prefix: KVCache | Sequence[int] | None = None
    """The shared prefix: its KV cache, or its ids to be part of the forward pass."""
    hidden: Tensor | None = None
    """(N, H) the student's hidden states at the positions that predict the response tokens, or its (B, L) logits of the
    labels, detached."""

    def __post_init__(self) -> None:
        self.parents = self.parents or list(range(len(self.rows)))
        self.samples = self.samples or list(range(len(self.rows)))

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts, each computed once by the student."""
        return list({parent: row.prompt for parent, row in zip(self.parents, self.rows, strict=True)}.values())

    @property
    def families(self) -> list[list[list[int]]]:
        """Responses grouped by prompt."""
        families: dict[int, list[list[int]]] = {}
        for parent, response in zip(self.parents, self.rollout.responses, strict=True):
            families.setdefault(parent, []).append(response)
        return list(families.values())

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

    def free(self) -> None:
        """Drop the tensors, so that only one micro-batch of a step holds them."""
        self.hidden = self.scores = self.forward = None
        self.ask = lambda: None


@dataclass
class Batch:
    """This process's micro-batches of a step."""

    parts: Sequence[MicroBatch]
    most: int
    """The largest number of micro-batches of any process."""
    prefix: KVCache | None = None
    """The KV cache of the prefix that all prompts share, with gradient; None: it is in each part's own pass."""
    leaves: KVCache | None = None
    """The same values, as leaves at which the parts' gradients accumulate."""

    def backward(self) -> None:
        """Backpropagate the parts' accumulated gradients through the shared prefix."""
        if self.prefix is not None and self.leaves is not None:
            self.prefix.backward(self.leaves)


@dataclass
class Rollouts:
    """Samples responses of the current student and requests their scores.

    Args:
        student: Samples, unless there is a `sampler`.
        teachers: Score.
        encoder: The task in the student's tokens.
        batches: The rows of each step.
        settings: The section `rollout`.
        steps: Steps of the run; nothing is sampled beyond the last.
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
    teachers: Teachers
    encoder: Encoder
    batches: Batches
    settings: RolloutConfig
    steps: int
    vocab_size: int
    seed: int
    micro_tokens: int
    rollout_tokens: int
    reuse: bool = True
    sampler: Sampler | None = None
    processes: Processes = ONE
    share: bool = True
    merge: bool = True
    parts: list[MicroBatch] = field(default_factory=list)
    """Those of the step in progress, for the record of a failed step."""
    _sampled: dict[int, list[MicroBatch]] = field(default_factory=dict)
    """Step → its micro-batches: one step off policy, those of the next step too."""

    def __call__(self, step: int, clock: Clock) -> Batch:
        """This process's responses of a step. Waits for no scores, unless the student is sharded."""
        divided, ahead = self._split(step), self.settings.staleness
        self._sampled = {number: parts for number, parts in self._sampled.items() if ahead and number >= step}
        if ahead and step > 0 and step not in self._sampled:
            raise RunError(f"the responses of step {step + 1} were not sampled by the step before")
        self.parts = self._sampled.get(step) or divided[self.processes.rank]
        batch = Batch(self.parts, max(map(len, divided)))
        ids = self.encoder.prefix
        with self.student.model.whole(), self.processes.together():
            if len(self.parts) > 1 and not self.processes.sharded:
                # Several parts share one pass over the prefix. Not if sharded: layers are gathered at their outputs
                # only.
                with clock("update"):
                    batch.prefix = self.student.prefix_cache(ids)
                    batch.leaves = None if batch.prefix is None else batch.prefix.leaves()
            for part in self.parts:
                part.prefix = ids if batch.leaves is None else batch.leaves
            for number in range(step, min(step + 1 + ahead, self.steps)):
                if number not in self._sampled:
                    parts = self.parts if number == step else self._split(number)[self.processes.rank]
                    self._respond(number, parts, clock)
                    self._sampled[number] = parts
        if self.processes.sharded:  # one that fails between passes would leave the others waiting
            with self.processes.together(), clock("score"):
                for part in self.parts:
                    part.ask()
        return batch

    def state(self, done: int) -> dict[str, Any]:
        """Checkpoint state after `done` steps: the next step's responses, if sampled already (by weights now gone)."""
        if not self.settings.staleness or done not in self._sampled:
            return {}
        samples = [(part, row) for part in self._sampled[done] for row in part.samples]
        own = {
            "responses": [part.rollout.responses[row] for part, row in samples],
            "log_probs": [part.rollout.log_probs[row] for part, row in samples],
            "ended": [part.rollout.ended[row] for part, row in samples],
            "sources": [part.sources[row] for part, row in samples],
        }
        ranks = self.processes.gather(own)
        return {"ahead": {"number": done, **{name: [value for rank in ranks for value in rank[name]] for name in own}}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; scores are requested again, and are the same."""
        if (saved := state.get("ahead")) is None:
            return
        parts = self._split(saved["number"])[self.processes.rank]
        for part in parts:
            span = slice(part.places[0], part.places[-1] + 1)
            part.rollout = Rollout(saved["responses"][span], saved["log_probs"][span], saved["ended"][span])
            part.sources = saved["sources"][span]
            self._request(part)
        self._sampled = {saved["number"]: parts}

    def _split(self, step: int) -> list[list[MicroBatch]]:
        """The micro-batches of every process; depends on the step's rows alone."""
        each = self.settings.per_prompt
        rows = [row for row in self.batches.at(step) for _ in range(each)]
        families = [place // each for place in range(len(rows))] if self.share else None
        return divide(rows, self.processes, self.micro_tokens, self.settings.max_new_tokens, families)

    # ------------------------------------------------------------------ responses

    def _respond(self, step: int, parts: list[MicroBatch], clock: Clock) -> None:
        """Fill in the responses of a step's micro-batches, and request their scores."""
        before_update = self.settings.staleness == 0 and not self.processes.sharded
        reuse = self.reuse and before_update and len(parts) == 1
        if self.sampler is not None and "student" in self.settings.source.shares():
            with clock("rollout"):
                self.sampler.sync()
        prefix: Any = parts[0].prefix
        if not before_update:
            with clock("rollout"), torch.no_grad():
                prefix = self.student.prefix_cache(self.encoder.prefix)
        sizes = [sum(self._size(row) for row in part.rows) for part in parts]
        for span in _together(sizes, self.rollout_tokens):
            joined = _joined(parts[span])
            with clock("rollout"), torch.set_grad_enabled(reuse):
                forward = self.student.forward(joined.prompts, prefix=prefix)
                self._answer(step, joined, forward)
            first = 0
            for part in parts[span]:
                rows = range(first, first := first + len(part.rows))
                part.rollout, part.sources = joined.rollout.select(rows), [joined.sources[i] for i in rows]
                part.forward = forward if reuse else None
                with clock("score"):
                    self._request(part)

    def _request(self, part: MicroBatch) -> None:
        if self.merge and self.share:
            part.merge()
        teacher, prompts = self.teachers[part.rows[0].teacher], [row.teacher_prompt for row in part.rows]
        part.ask = cache(teacher.ask(prompts, part.rollout.responses))

    def _size(self, row: Row) -> int:
        """Most tokens of a sample during decoding, with its own copy of the prompt's KV cache."""
        return len(row.prompt) + self.settings.max_new_tokens

    def _answer(self, step: int, batch: MicroBatch, forward: Forward) -> None:
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
                drawn = self._gold([batch.rows[i].example.gold for i in chosen])
            else:
                drawn = self._sample(source, step, batch, chosen, forward)
            for i, ids, log_probs, ended in zip(chosen, drawn.responses, drawn.log_probs, drawn.ended, strict=True):
                batch.rollout.responses[i] = ids[:cap]
                batch.rollout.log_probs[i] = log_probs[:cap]
                batch.rollout.ended[i] = ended

    def _stop(self, body: Body) -> Callable[[list[int]], bool]:
        """Stop condition for the responses of `body`; stop strings of free text always end one."""
        ends = set(body.model.end_ids)
        until_closed = self.settings.stop == "json" or not self.encoder.prompt.closes
        closed = self.encoder.closed if until_closed else lambda ids: False
        return lambda ids: ids[-1] in ends or closed(ids)

    def _gold(self, golds: list[str]) -> Rollout:
        end = None if self.settings.stop == "json" and self.encoder.prompt.closes else self.student.model.turn_end
        responses = [self.encoder.gold(gold, end) for gold in golds]
        fits = [len(ids) <= self.settings.max_new_tokens for ids in responses]
        return Rollout(responses, [[0.0] * len(ids) for ids in responses], fits)

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
        if source == "teacher" or len(chosen) < len(batch.rows):  # a pass over the prompts of the chosen rows alone
            rows = {parent: batch.rows[i] for i, parent in zip(chosen, parents, strict=True)}
            parents = [sorted(rows).index(parent) for parent in parents]
            prompts = [rows[parent].prompt for parent in sorted(rows)]
            prefix: Any = None if forward.prefix is None else forward.prefix.detached()
            if source == "teacher":
                teacher = self.teachers[""]
                if not isinstance(teacher, LocalTeacher):
                    got = type(teacher).__name__
                    raise UsageError("only a teacher in this process can sample responses", got=got)
                body, prefix = teacher.body, teacher.prefix_cache
                prompts = [rows[parent].teacher_prompt for parent in sorted(rows)]
            with torch.no_grad():
                forward = body.forward(prompts, prefix=prefix)
        rollout = Rollout()
        for span in _together([self._size(batch.rows[i]) for i in chosen], self.rollout_tokens):
            drawn = sample(
                body,
                forward,
                vocab_size=self.vocab_size,
                sampling=sampling,
                stop=self._stop(body),
                draws=draws[span],
                parents=parents[span],
            )
            rollout.responses += drawn.responses
            rollout.log_probs += drawn.log_probs
            rollout.ended += drawn.ended
        return rollout


def divide(
    rows: Sequence[Row], processes: Processes, tokens: int, longest: int, families: Sequence[int] | None = None
) -> list[list[MicroBatch]]:
    """The micro-batches of every process, without responses; arguments as in `micro_batches`."""
    prompts = range(len(rows)) if families is None else families
    divided: list[list[MicroBatch]] = []
    for share in processes.shares(len(rows)):
        place, parts = share.start, []
        for members in micro_batches([rows[i] for i in share], tokens, longest, [prompts[i] for i in share]):
            places = list(range(place, place + len(members)))
            parts.append(MicroBatch(members, places, [prompts[i] - prompts[place] for i in places]))
            place += len(members)
        divided.append(parts)
    return divided


def _together(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Spans of items with a total size of at most `most`, or one item."""
    start = used = 0
    for i, size in enumerate(sizes):
        if i > start and used + size > most:
            yield slice(start, i)
            start, used = i, 0
        used += size
    yield slice(start, len(sizes))


def _joined(parts: Sequence[MicroBatch]) -> MicroBatch:
    """The prompts of several micro-batches, to be decoded together."""
    parents: list[int] = []
    for part in parts:
        first = parents[-1] + 1 if parents else 0
        parents += [first + parent for parent in part.parents]
    rows = [row for part in parts for row in part.rows]
    return MicroBatch(rows, [place for part in parts for place in part.places], parents)


def _pick(shares: dict[str, float], number: float) -> str:
    for name, share in shares.items():
        number -= share
        if number < 0:
            return name
    return list(shares)[-1]
