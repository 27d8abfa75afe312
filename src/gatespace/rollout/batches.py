"""Many texts in batches that fit into memory, texts of like length together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gatespace.models.load import Model
from gatespace.models.sizes import sizes_of


def batches_of(
    model: Model | None, prompts: Sequence[Sequence[int]], *, more: int, batch_size: int, each: int = 1
) -> Iterator[list[int]]:
    """The places of `prompts`, shortest first, in batches.

    Args:
        model: By its sizes a batch has room for a number of tokens (`Sizes.rollout_tokens`); None: for any number.
        prompts: Token ids.
        more: Tokens of each row beside its prompt.
        batch_size: Most rows of a batch.
        each: Rows of each prompt.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    room = None if model is None else sizes_of(model).rollout_tokens(model.dtype.itemsize)
    most = max(1, batch_size // each)
    for start in range(0, len(order), most):
        part: list[int] = []
        for row in order[start : start + most]:
            # Rows grow longer: padded to this one, the batch would have too many tokens.
            if part and room is not None and (len(part) + 1) * each * (len(prompts[row]) + more) > room:
                yield part
                part = []
            part.append(row)
        yield part
