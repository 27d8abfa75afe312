"""Greedy answers to many texts, as in evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gatespace.models.body import body_of
from gatespace.models.encode import Encoder
from gatespace.models.load import Model
from gatespace.models.sizes import sizes_of
from gatespace.rollout.native import Rollout, Sampling, sample


@dataclass(frozen=True)
class Answer:
    """The response of a model: what it generated after the prefill."""

    ids: tuple[int, ...]
    text: str
    ended: bool


class Writer(Protocol):
    """Generates in place of a model, with the same weights: vLLM, for one."""

    def sample(
        self, prompts: Sequence[Sequence[int]], *, sampling: Sampling, stop: Callable[[list[int]], bool]
    ) -> Rollout:
        """Continue every prompt, each of them whole."""
        ...


def greedy(
    model: Model,
    encoder: Encoder,
    texts: Sequence[str],
    *,
    max_new_tokens: int = 32,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
    writer: Writer | None = None,
) -> list[Answer]:
    """The most probable token each time, until the answer is closed or ended.

    Args:
        model: Its body writes, unless there is a `writer`.
        encoder: Knows all of `texts`.
        texts: What is classified.
        max_new_tokens: The longest answer.
        batch_size: Most texts that are answered together; texts of like length are, and fewer where they are long
            (`Sizes.rollout_tokens`).
        progress: Called with the number of texts answered so far and the number of all.
        writer: Writes in place of the model.
    """
    ends = set(model.end_ids)
    prompts = [encoder.suffix(text) for text in texts]
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    answers: dict[int, Answer] = {}
    sampling = Sampling(temperature=0, max_new_tokens=max_new_tokens)

    def stop(ids: list[int]) -> bool:
        return ids[-1] in ends or encoder.closed(ids)

    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if writer is None:
        room = sizes_of(model).rollout_tokens(model.dtype.itemsize)
        more = len(encoder.prefix) + max_new_tokens
        groups = list(_within(room, groups, [len(prompt) + more for prompt in prompts]))
    body = body_of(model) if writer is None else None
    with torch.no_grad():
        prefix = body.prefix_cache(encoder.prefix) if body is not None and texts else None
        for batch in groups:
            if writer is not None:
                whole = [[*encoder.prefix, *prompts[i]] for i in batch]
                rollout = writer.sample(whole, sampling=sampling, stop=stop)
            else:
                assert body is not None
                forward = body.forward([prompts[i] for i in batch], prefix=prefix)
                rollout = sample(body, forward, vocab_size=model.vocab_size, sampling=sampling, stop=stop)
            for i, ids, ended in zip(batch, rollout.responses, rollout.ended, strict=True):
                answers[i] = Answer(tuple(ids), encoder.decode(ids), ended)
            if progress is not None:
                progress(len(answers), len(order))
    return [answers[i] for i in range(len(texts))]


def _within(room: int, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> Iterator[list[int]]:
    """The groups, in which rows grow longer, divided where one has more than `room` tokens, padded to its longest."""
    for group in groups:
        part: list[int] = []
        for row in group:
            if part and (len(part) + 1) * sizes[row] > room:
                yield part
                part = []
            part.append(row)
        yield part
