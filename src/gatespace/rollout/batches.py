"""Batch prompts by length, within the memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gatespace.models.load import Model
from gatespace.models.sizes import sizes_of


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
