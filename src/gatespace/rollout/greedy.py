"""Greedy answers to many texts, as in evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gatespace.errors import UsageError
from gatespace.models.body import body_of
from gatespace.models.encode import Encoder
from gatespace.models.load import Model
from gatespace.rollout.batches import batches_of
from gatespace.rollout.labels import label_log_probs, label_responses
from gatespace.rollout.native import Rollout, Sampling, sample


@dataclass(frozen=True)
class Answer:
    """The response of a model: what it generated after the prefill."""

    ids: tuple[int, ...]
    text: str
    ended: bool
    labels: tuple[float, ...] | None = None
    """Log-probability of each label's response, where it was asked for."""


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
    labels: bool = False,
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
        labels: Look up the log-probabilities of all labels too, after the same forward passes over the prompts.
    """
    if writer is not None and labels:
        raise UsageError("label probabilities come from the model in this process", got=type(writer).__name__)
    ends = set(model.end_ids)
    prompts = [encoder.suffix(text) for text in texts]
    answers: dict[int, Answer] = {}
    sampling = Sampling(temperature=0, max_new_tokens=max_new_tokens)

    def stop(ids: list[int]) -> bool:
        return ids[-1] in ends or encoder.closed(ids)

    responses = label_responses(encoder) if labels else []
    more = len(encoder.prefix) + max(max_new_tokens, sum(map(len, responses)))
    groups = batches_of(model if writer is None else None, prompts, more=more, batch_size=batch_size)
    body = body_of(model) if writer is None else None
    with torch.no_grad():
        prefix = body.prefix_cache(encoder.prefix) if body is not None and texts else None
        for batch in groups:
            log_probs: list[tuple[float, ...] | None] = [None] * len(batch)
            if writer is not None:
                whole = [[*encoder.prefix, *prompts[i]] for i in batch]
                rollout = writer.sample(whole, sampling=sampling, stop=stop)
            else:
                assert body is not None
                asked = [prompts[i] for i in batch]
                forward = body.forward(asked, prefix=prefix)
                if labels:
                    found = label_log_probs(body, asked, responses, vocab_size=model.vocab_size, forward=forward)
                    log_probs = [tuple(row) for row in found.tolist()]
                rollout = sample(body, forward, vocab_size=model.vocab_size, sampling=sampling, stop=stop)
            for i, ids, ended, row in zip(batch, rollout.responses, rollout.ended, log_probs, strict=True):
                answers[i] = Answer(tuple(ids), encoder.decode(ids), ended, row)
            if progress is not None:
                progress(len(answers), len(prompts))
    return [answers[i] for i in range(len(texts))]
