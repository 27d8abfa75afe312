"""The choice between packed and plain passes, and hidden states of responses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.models.load import Model
from gatespace.models.packed import PackedBody
from gatespace.models.plain import Body, Decoding, Forward, KVCache, PlainBody
from gatespace.models.tree import tree_of

__all__ = ["Body", "Decoding", "Forward", "KVCache", "body_of", "response_states"]


def body_of(model: Model, *, packed: bool | None = None, checkpointing: bool | None = False) -> Body:
    """The body of `model`, packed or plain.

    Args:
        model: A model.
        packed: True: packed, or an error that says why not. False: plain. None: packed if a probe agrees with the
            network's own forward, else plain.
        checkpointing: As in `PackedBody`; plain passes have none.
    """
    reason = "GATESPACE_CHECK is plain" if packed is False else _unfit(model)
    if not reason:
        return PackedBody(model, checkpointing=checkpointing)
    if checkpointing:
        raise UsageError(
            "activation checkpointing needs packed passes",
            got=model.name,
            why=reason,
            instead="engine.activation_checkpointing: false",
        )
    if packed:
        raise UsageError(
            "this network cannot run over packed tokens",
            got=model.name,
            why=reason,
            instead="another model, or GATESPACE_CHECK=plain",
        )
    if packed is None:  # shown once per model and reason by Python's default filter
        warnings.warn(f"{model.name} runs in plain passes, which are exact and slow: {reason}", stacklevel=2)
    return PlainBody(model)


def _unfit(model: Model) -> str:
    """Why packed passes differ from the network's own forward, or "". Probed once per model."""
    if model.unpackable is None:
        model.unpackable = _probe(model)
    return model.unpackable


@torch.no_grad()
def _probe(model: Model) -> str:
    size = model.vocab_size
    # Long enough for a window or a position bias to show; different lengths, a shared prefix, a second pass.
    first = [(7 * i + 3) % size for i in range(24)]
    rows = [[(11 * i + 5 * row + 1) % size for i in range(9 + 14 * row)] for row in range(2)]
    try:
        packed, plain = PackedBody(model), PlainBody(model)
        forward = packed.forward([row[:6] for row in rows], prefix=first)
        found = packed.forward([row[6:] for row in rows], prefix=forward.prefix, past=forward.cache).hidden
    except (UsageError, TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if len(forward.cache.layers) != getattr(model.body.config, "num_hidden_layers", len(forward.cache.layers)):
        return "layers without attention mix tokens in another way"
    expected = plain.forward(
        [row[6:] for row in rows], prefix=first, past=plain.forward([r[:6] for r in rows]).cache
    ).hidden
    distance = (found.double() - expected.double()).norm() / expected.double().norm()
    allowed = 0.1 if model.head.weight.dtype.itemsize < 4 else 1e-3
    return "" if distance <= allowed else f"a probe differs from the network's own forward by {float(distance):.2g}"


def response_states(
    body: Body,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[Sequence[int]]],
    *,
    prefix: KVCache | Sequence[int] | None = None,
    forward: Forward | None = None,
) -> Tensor:
    """(N, H) hidden states at the positions that predict the tokens of `responses`, one response after another.

    A prompt is computed once, and so are common prefixes of its responses. Gradient flows back through all of it.

    Args:
        body: The body.
        prompts: After the prefix, at least one token each.
        responses: At least one for every prompt, of at least one token.
        prefix: As in `PackedBody.forward`.
        forward: An earlier forward pass over the prompts; None: it is run here.
    """
    # The last token of a response predicts nothing.
    trees = [tree_of([ids[:-1] for ids in some]) for some in responses]
    single = all(len(some) == 1 for some in responses)
    if forward is None:
        fed = [[*prompt, *tree.tokens] for prompt, tree in zip(prompts, trees, strict=True)]
        parents = None if single else [tree.after(len(p)) for p, tree in zip(prompts, trees, strict=True)]
        hidden = body.forward(fed, prefix=prefix, parents=parents).hidden
        starts = _starts([len(row) for row in fed])
        ends = [start + len(prompt) - 1 for start, prompt in zip(starts, prompts, strict=True)]
        nodes = [end + 1 for end in ends]
    else:
        hidden = forward.last()
        ends = nodes = list(range(len(prompts)))
        if any(tree.tokens for tree in trees):
            # Every row needs a token.
            fed = [tree.tokens or [some[0][0]] for tree, some in zip(trees, responses, strict=True)]
            parents = None if single else [tree.parents or [-1] for tree in trees]
            after = body.forward(fed, prefix=forward.prefix, past=forward.cache, parents=parents)
            hidden = torch.cat([hidden, after.hidden])
            nodes = [len(prompts) + start for start in _starts([len(row) for row in fed])]
    index = [
        at
        for end, first, tree in zip(ends, nodes, trees, strict=True)
        for path in tree.paths
        for at in (end, *(first + place for place in path))
    ]
    return hidden.index_select(0, torch.tensor(index, device=hidden.device))


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]
