"""Greedy decoding of many texts, for evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from gatespace.errors import UsageError
from gatespace.models.body import body_of
from gatespace.models.encode import Encoder
from gatespace.models.load import Model
from gatespace.rollout.labels import batches_of, label_log_probs, label_responses
from gatespace.rollout.native import Sampler, Sampling, sample
from gatespace.seeding import generator


@dataclass(frozen=True)
class Answer:
    """A model's response, without the prefill."""

    ids: tuple[int, ...]
    text: str
    ended: bool
    labels: tuple[float, ...] | None = None
    """Log-probability of each label's response, if requested."""
    samples: tuple[str, ...] = ()
    """Sampled responses, if requested."""


@dataclass(frozen=True)
class Draws:
    """Samples of every text, in addition to its greedy answer.

    Args:
        count: Samples per text.
        temperature: Sampling temperature.
        seed: Each sample draws from the stream (seed, "evaluate", index of the text, index of the sample).
    """

    count: int
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError("there is at least one sample", got=self.count)
        if not self.temperature > 0:
            raise UsageError("samples need a temperature above 0", got=self.temperature)


def greedy(
    model: Model,
    encoder: Encoder,
    texts: Sequence[str],
    *,
    max_new_tokens: int = 32,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
    writer: Sampler | None = None,
    labels: bool = False,
    draws: Draws | None = None,
) -> list[Answer]:
    """Decode greedily until the answer is closed or the turn ends.

    Args:
        model: Its body generates, unless there is a `writer`.
        encoder: Must cover all of `texts`.
        texts: Texts to answer.
        max_new_tokens: Maximum response length.
        batch_size: Maximum texts per batch; texts are batched by length, fewer if they are long
            (`Sizes.rollout_tokens`).
        progress: Called with the number of texts done and the total.
        writer: Generates in place of the model, with the same weights.
        labels: Also compute log-probabilities of all labels, sharing the forward passes over the prompts.
        draws: Also sample, sharing the same forward passes.
    """
    if writer is not None and (labels or draws):
        raise UsageError(
            "label probabilities and samples come from the model in this process", got=type(writer).__name__
        )
    ends = set(model.end_ids)
    prompts = [encoder.suffix(text) for text in texts]
    answers: dict[int, Answer] = {}
    sampling = Sampling(temperature=0, max_new_tokens=max_new_tokens)

    def stop(ids: list[int]) -> bool:
        return ids[-1] in ends or encoder.closed(ids)

    responses = label_responses(encoder) if labels else []
    more = len(encoder.prefix) + max(max_new_tokens, sum(map(len, responses)))
    each = 1 if draws is None else draws.count
    groups = batches_of(model if writer is None else None, prompts, more=more, batch_size=batch_size, each=each)
    body = body_of(model) if writer is None else None
    with torch.no_grad():
        prefix = body.prefix_cache(encoder.prefix) if body is not None and texts else None
        for batch in groups:
            log_probs: list[tuple[float, ...] | None] = [None] * len(batch)
            written: list[tuple[str, ...]] = [()] * len(batch)
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
                if draws is not None:
                    drawn = sample(
                        body,
                        forward,
                        vocab_size=model.vocab_size,
                        sampling=replace(sampling, temperature=draws.temperature),
                        stop=stop,
                        draws=[generator(draws.seed, "evaluate", i, k).random for i in batch for k in range(each)],
                        parents=[row for row in range(len(batch)) for _ in range(each)],
                    )
                    decoded = (encoder.decode(ids) for ids in drawn.responses)
                    written = [tuple(islice(decoded, each)) for _ in batch]
            columns = (rollout.responses, rollout.ended, log_probs, written)
            for i, ids, ended, row, some in zip(batch, *columns, strict=True):
                answers[i] = Answer(tuple(ids), encoder.decode(ids), ended, row, some)
            if progress is not None:
                progress(len(answers), len(prompts))
    return [answers[i] for i in range(len(texts))]
