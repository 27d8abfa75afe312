"""Probability of each label after a prompt: all labels share one forward pass, as a tree.

A label is its whole response, up to the token that closes the JSON object: `hate"}` and not `hate`, which could
continue as `hateful"}`. So no label's response is a prefix of another's: labels are mutually exclusive, and their
probabilities sum to at most 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.gating.log_probs import token_log_probs
from gatespace.models.body import Body, Forward, KVCache, body_of, response_states
from gatespace.models.encode import Encoder
from gatespace.models.load import Model
from gatespace.models.sizes import sizes_of


def label_responses(encoder: Encoder, end: int | None = None) -> list[list[int]]:
    """Return the token ids of every label's response, in the order of the prompt's labels.

    The responses end where the JSON object closes, as sampled ones do; pass `end`, the end-of-turn id, if sampling
    goes on to the end of the turn.
    """
    return [encoder.gold(label, end) for label in encoder.prompt.labels]


def label_log_probs(
    body: Body,
    prompts: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    *,
    prefix: KVCache | Sequence[int] | None = None,
    vocab_size: int,
    forward: Forward | None = None,
) -> Tensor:
    """(B, L) log-probability of each label's whole response after each prompt, with gradient if enabled.

    Each prompt and each prefix shared by labels goes through the network once. The result is float32 (float64 for a
    float64 network). Other tokenisations of a label are not counted.

    Args:
        body: The body.
        prompts: Token ids after the prefix, at least one each.
        labels: Token ids of every label's response; see `label_responses`.
        prefix: As in `PackedBody.forward`.
        vocab_size: Ids from here on are padding.
        forward: An existing forward pass over the prompts; None: run it here.
    """
    _check(labels)
    # Labels with a common prefix share its hidden states: each state goes through the head once.
    nodes: dict[tuple[int, ...], int] = {}
    firsts: list[int] = []
    predicted_by: list[int] = []
    for ids in labels:
        for place in range(len(ids)):
            if (before := tuple(ids[:place])) not in nodes:
                nodes[before] = len(nodes)
                firsts.append(len(predicted_by))
            predicted_by.append(nodes[before])
    states = response_states(body, prompts, [labels] * len(prompts), prefix=prefix, forward=forward)
    device, count = states.device, len(prompts)
    hidden = states.unflatten(0, (count, -1))[:, torch.tensor(firsts, device=device)].flatten(0, 1)
    base = torch.arange(count, device=device)[:, None] * len(nodes)
    rows = (base + torch.tensor(predicted_by, device=device)).flatten()
    tokens = torch.tensor([token for ids in labels for token in ids], device=device).repeat(count)
    found = token_log_probs(hidden, body.model.head, rows, tokens, vocab_size).view(count, -1)
    return torch.stack([part.sum(-1) for part in found.split([len(ids) for ids in labels], 1)], 1)


@torch.no_grad()
def score_labels(
    model: Model,
    encoder: Encoder,
    texts: Sequence[str],
    *,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[float, ...]]:
    """Return the log-probability of every label's response to every text, without generating.

    Args:
        model: The model.
        encoder: Must cover all of `texts`.
        texts: Texts to score.
        batch_size: Maximum texts per batch.
        progress: Called with the number of texts done and the total.
    """
    labels, body = label_responses(encoder), body_of(model)
    prompts = [encoder.suffix(text) for text in texts]
    prefix = body.prefix_cache(encoder.prefix) if texts else None
    found: dict[int, tuple[float, ...]] = {}
    more = len(encoder.prefix) + sum(map(len, labels))
    for batch in batches_of(model, prompts, more=more, batch_size=batch_size):
        asked = [prompts[i] for i in batch]
        log_probs = label_log_probs(body, asked, labels, prefix=prefix, vocab_size=model.vocab_size)
        found |= {i: tuple(row) for i, row in zip(batch, log_probs.tolist(), strict=True)}
        if progress is not None:
            progress(len(found), len(prompts))
    return [found[i] for i in range(len(texts))]


def batches_of(
    model: Model | None, prompts: Sequence[Sequence[int]], *, more: int, batch_size: int, each: int = 1
) -> Iterator[list[int]]:
    """Yield batches of indices into `prompts`, shortest first.

    Args:
        model: Limits the tokens of a batch by its sizes (`Sizes.rollout_tokens`); None: no limit.
        prompts: Token ids.
        more: Tokens of each row in addition to its prompt.
        batch_size: Maximum rows per batch.
        each: Rows per prompt.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    room = None if model is None else sizes_of(model).rollout_tokens(model.dtype.itemsize)
    most = max(1, batch_size // each)
    for start in range(0, len(order), most):
        part: list[int] = []
        for row in order[start : start + most]:
            # This row is the longest so far: padded to it, the batch would have too many tokens.
            if part and room is not None and (len(part) + 1) * each * (len(prompts[row]) + more) > room:
                yield part
                part = []
            part.append(row)
        yield part


def _check(labels: Sequence[Sequence[int]]) -> None:
    if not labels or not all(labels):
        raise UsageError("every label is at least one token", got=[list(ids) for ids in labels])
    known = {tuple(ids) for ids in labels}
    inner = {tuple(ids[:stop]) for ids in labels for stop in range(len(ids))}
    if len(known) < len(labels) or known & inner:
        raise UsageError(
            "a label's response is not the beginning of another one's",
            got=[list(ids) for ids in labels],
            why="their probabilities would count the same responses twice",
            instead="responses that end with the token that closes them",
        )
