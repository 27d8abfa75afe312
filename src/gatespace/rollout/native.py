"""The native sampler: batched decoding with one random stream per sample.

A response therefore depends neither on the rest of the batch nor on how it is split, up to rounding of its logits.
Samples of one prompt share its forward pass, and on a CPU they are a single row until their tokens differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.projection import Head, Projection, logits_buffer
from gatespace.gating.vocabulary import prefix_sums
from gatespace.models.body import Body, Decoding, Forward

_SPARSE = 0.75
"""Ended rows are dropped once fewer than this share is active: moving the others costs a copy."""
_SYNC_EVERY = 8
"""Maximum decoding steps between two device-to-host syncs."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: Divides the logits; 0 is greedy.
        top_p: Sample from the most probable tokens that together have at least this mass.
        max_new_tokens: Maximum response length.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError("a temperature is not negative", got=self.temperature)
        if not 0 < self.top_p <= 1:
            raise UsageError("top_p is a mass in (0, 1]", got=self.top_p)
        if self.max_new_tokens < 1:
            raise UsageError("max_new_tokens is at least 1", got=self.max_new_tokens)


@dataclass
class Rollout:
    """Responses to every row of a forward pass."""

    responses: list[list[int]] = field(default_factory=list)
    log_probs: list[list[float]] = field(default_factory=list)
    """Log-probabilities of the tokens under the distribution they were sampled from; at temperature 0, under the
    model's."""
    ended: list[bool] = field(default_factory=list)
    """Whether the response ended by itself, not by `max_new_tokens`."""

    def select(self, rows: Sequence[int]) -> Rollout:
        """Return the rollout of a subset of rows."""
        return Rollout(
            [self.responses[row] for row in rows],
            [self.log_probs[row] for row in rows],
            [self.ended[row] for row in rows],
        )


class Sampler(Protocol):
    """Samples in place of the student, with a copy of its weights, e.g. vLLM."""

    def sync(self) -> float:
        """Copy the student's current weights; raise unless they have arrived.

        Returns the largest difference of a log-probability, in nats.
        """
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
        """Generate a response to every prompt (full token ids)."""
        ...


@torch.no_grad()
def sample(
    body: Body,
    forward: Forward,
    *,
    vocab_size: int,
    sampling: Sampling,
    stop: Callable[[list[int]], bool],
    draws: Sequence[Callable[[], float]] = (),
    parents: Sequence[int] | None = None,
    sync_every: int | None = None,
) -> Rollout:
    """Sample one or several continuations of every row of `forward`.

    Tokens stay on the device and are fed back to the network. Every `sync_every` tokens the host reads them, truncates
    each sample at its end and drops ended rows. Tokens past a sample's end are discarded without side effects, since
    every sample has its own random numbers. With `sync_every` = 1, samples of a row with equal tokens so far share one
    row, which branches where they differ.

    Args:
        body: The body that ran over the prompts.
        forward: Its forward pass over them.
        vocab_size: Ids from here on are padding and never sampled.
        sampling: How tokens are chosen.
        stop: Whether a response, including its last token, is complete.
        draws: Per sample, a source of uniform numbers in [0, 1); not needed at temperature 0.
        parents: The row of `forward` that each sample continues; None: one sample per row.
        sync_every: Tokens between host syncs. None: 1 on a CPU, where syncs are free; elsewhere at most 8 and an eighth
            of `max_new_tokens`, to limit discarded tokens.
    """
    if parents is None:
        parents = range(len(forward.cache.lengths))
    count, most = len(parents), sampling.max_new_tokens
    if sampling.temperature > 0 and len(draws) != count:
        raise UsageError("sampling needs a source of random numbers per row", got=f"{len(draws)} for {count} rows")
    if sync_every is None:
        sync_every = 1 if forward.hidden.device.type == "cpu" else max(1, min(_SYNC_EVERY, most // 8))
    numbers = [[draw() for draw in draws] or [0.0] * count for _ in range(most)]
    uniform = torch.tensor(numbers, dtype=torch.float64, device=forward.hidden.device)
    rollout = Rollout([[] for _ in range(count)], [[] for _ in range(count)], [False] * count)
    batch = _Batch(body, forward, vocab_size, sampling, uniform, parents, sync_every == 1)
    while True:
        batch.read(batch.decode(min(sync_every, most - batch.steps)), rollout, stop)
        if batch.steps == most or not batch.branch(rollout):
            return rollout


@dataclass
class _Batch:
    """Rows being decoded, each for one sample; if `shared`, for all samples of a prompt with the same tokens so far."""

    body: Body
    forward: Forward
    vocab_size: int
    sampling: Sampling
    uniform: Tensor
    """(max_new_tokens, samples) random numbers."""
    parents: Sequence[int]
    shared: bool
    steps: int = 0
    """Tokens decoded so far."""

    def __post_init__(self) -> None:
        self._hidden, self._tokens = self.forward.last().detach(), torch.empty(0)  # no tokens yet
        rows = sorted(set(self.parents)) if self.shared else list(self.parents)
        self._samples = [[sample] for sample in range(len(self.parents))]
        """The samples of every row; ended ones stay until their row is dropped."""
        if self.shared:
            self._samples = [[sample for sample, parent in enumerate(self.parents) if parent == row] for row in rows]
        self._index = self._sample_index()
        if rows != list(range(len(self._hidden))):
            self._hidden = self._hidden[torch.tensor(rows, device=self._hidden.device)]
            self._decoding.keep(rows)

    @cached_property
    def _decoding(self) -> Decoding:
        return self.body.decoding(self.forward, self.sampling.max_new_tokens)

    def _sample_index(self) -> Tensor:
        """(rows, M) the samples of every row, padded."""
        longest = max(map(len, self._samples))
        padded = [[*row, *[0] * (longest - len(row))] for row in self._samples]
        return torch.tensor(padded, device=self._hidden.device)

    def decode(self, steps: int) -> Tensor:
        """Decode `steps` tokens without a host sync; returns tokens and log-probabilities, (rows, M, steps, 2)."""
        block = []
        for step in range(self.steps, self.steps + steps):
            if step:
                self._hidden = self._decoding.step(self._tokens)
            logits = next_logits(self._hidden, self.body.model.head, self.vocab_size)
            tokens, log_probs = choose(logits, self.sampling, self.uniform[step][self._index])
            block.append(torch.stack([tokens.double(), log_probs.double()], -1))
            self._tokens = tokens[:, 0]
        self.steps += steps
        return torch.stack(block, 2)

    def read(self, block: Tensor, rollout: Rollout, stop: Callable[[list[int]], bool]) -> None:
        """Append a block of tokens to the samples that have not ended, up to their end."""
        for samples, row in zip(self._samples, block.tolist(), strict=True):
            for sample, tokens in zip(samples, row, strict=False):  # the rest is padding
                for token, log_prob in tokens:
                    if not rollout.ended[sample]:
                        rollout.responses[sample].append(int(token))
                        rollout.log_probs[sample].append(log_prob)
                        rollout.ended[sample] = stop(rollout.responses[sample])

    def branch(self, rollout: Rollout) -> bool:
        """Divide rows whose samples differ, and drop ended rows once they are many; False if all samples ended."""
        branches = [
            (row, active) for row, samples in enumerate(self._samples) for active in _by_last_token(samples, rollout)
        ]
        rows = [row for row, _ in branches]
        if not rows:
            return False
        if len(rows) < _SPARSE * len(self._samples) or len(set(rows)) < len(rows):
            self._decoding.keep(rows)
            self._samples = [active for _, active in branches]
        elif self.shared:
            self._samples = list((dict(enumerate(self._samples)) | dict(branches)).values())
        else:  # the device continues with its own tokens
            return True
        last = [rollout.responses[samples[0]][-1] for samples in self._samples]
        self._tokens, self._index = torch.tensor(last, device=self._hidden.device), self._sample_index()
        return True


def _by_last_token(samples: Sequence[int], rollout: Rollout) -> list[list[int]]:
    """Active samples of a row, grouped by their last token."""
    groups: dict[int, list[int]] = {}
    for sample in samples:
        if not rollout.ended[sample]:
            groups.setdefault(rollout.responses[sample][-1], []).append(sample)
    return list(groups.values())


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample M tokens per row of `logits` (B, V) by inverse CDF; return them with their log-probabilities.

    Args:
        logits: On any device.
        sampling: Temperature and top_p.
        uniform: (B, M) float64 in [0, 1), one number per token; ignored at temperature 0.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True).expand(uniform.shape)
        return tokens, logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)
    mass = torch.softmax(logits.double() / sampling.temperature, -1)
    if sampling.top_p < 1:
        sorted_mass, order = mass.sort(stable=True, dim=-1, descending=True)
        outside = prefix_sums(sorted_mass) - sorted_mass >= sampling.top_p
        mass = mass.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), 0.0)
    cumulative = prefix_sums(mass)
    total = cumulative[:, -1:]
    # the first id whose cumulative mass exceeds the point, so never one of mass 0
    tokens = torch.searchsorted(cumulative, uniform * total, right=True).clamp(max=logits.shape[1] - 1)
    return tokens, (mass.gather(1, tokens) / total).log()


def next_logits(hidden: Tensor, head: Head, vocab_size: int) -> Tensor:
    """(B, V) logits of the next token, in float32 or float64."""
    projection = Projection(hidden, head, vocab_size)
    rows = hidden.shape[0]
    out = logits_buffer(hidden, rows, vocab_size, projection.dtype)
    return projection.into(out, slice(0, rows), 0, vocab_size).contiguous()
