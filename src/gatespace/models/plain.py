"""The same passes as `packed`, with the network's own forward over whole padded sequences.

Its cache holds token ids instead of keys and values, and everything is recomputed. Slow, but it works for every
architecture, and is the reference for packed passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gatespace.models.load import Model
from gatespace.models.tree import Parents, paths


@dataclass(frozen=True)
class TokenCache:
    """The token ids of a pass, row by row."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(row) for row in self.rows)

    def detached(self) -> TokenCache:
        return self

    def leaves(self) -> TokenCache:
        return self

    def backward(self, leaves: TokenCache) -> None:
        """Nothing to do: every pass includes the prefix."""


@dataclass(frozen=True)
class PlainForward:
    """Hidden states (N, H) of the new tokens, rows one after another."""

    hidden: Tensor
    cache: TokenCache
    prefix: TokenCache | None

    def last(self) -> Tensor:
        """(B, H) hidden states at the last token of every row."""
        ends = torch.tensor(self.cache.lengths, device=self.hidden.device).cumsum(0) - 1
        return self.hidden[ends]


class PlainBody:
    """Runs the body of a model over whole sequences."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.device = model.device

    def forward(
        self,
        rows: Sequence[Sequence[int]],
        *,
        prefix: TokenCache | Sequence[int] | None = None,
        past: TokenCache | None = None,
        shape: Callable[[int], tuple[int, int]] | None = None,
        parents: Parents = None,
    ) -> PlainForward:
        """Hidden states of all tokens of `rows`; arguments as in `PackedBody.forward`."""
        if parents is not None:
            return self._trees(rows, parents, prefix, past, shape)
        root = prefix.rows[0] if isinstance(prefix, TokenCache) else tuple(prefix or ())
        before = [root + (past.rows[i] if past is not None else ()) for i in range(len(rows))]
        whole = [[*first, *row] for first, row in zip(before, rows, strict=True)]
        longest = max(len(row) for row in whole)
        if shape is not None:
            longest = max(len(first) + shape(i)[0] for i, first in enumerate(before))
        hidden = self._states(self._padded(whole, longest), torch.tensor([len(row) for row in whole]).to(self.device))
        new = [states[len(first) : len(row)] for states, first, row in zip(hidden, before, whole, strict=True)]
        cache = TokenCache(tuple(tuple(row) for row in rows))
        return PlainForward(torch.cat(new), cache, TokenCache((root,)) if root else None)

    def _trees(
        self,
        rows: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int] | None],
        prefix: TokenCache | Sequence[int] | None,
        past: TokenCache | None,
        shape: Callable[[int], tuple[int, int]] | None,
    ) -> PlainForward:
        """Each path from the root of a tree to a leaf becomes a row."""
        owner: list[int] = []
        ways: list[list[int]] = []
        for row, tree in enumerate(parents):
            for way in paths(tree, len(rows[row])):
                owner.append(row)
                ways.append(way)
        forward = self.forward(
            [[rows[row][place] for place in way] for row, way in zip(owner, ways, strict=True)],
            prefix=prefix,
            past=None if past is None else TokenCache(tuple(past.rows[row] for row in owner)),
            shape=None if shape is None else lambda way: shape(owner[way]),
        )
        places = [(row, place) for row, way in zip(owner, ways, strict=True) for place in way]
        where = {token: at for at, token in enumerate(places)}
        index = [where[row, place] for row, tokens in enumerate(rows) for place in range(len(tokens))]
        hidden = forward.hidden[torch.tensor(index, device=self.device)]
        return PlainForward(hidden, TokenCache(tuple(tuple(row) for row in rows)), forward.prefix)

    def prefix_cache(self, ids: Sequence[int]) -> TokenCache | None:
        """The shared prefix; None if it is empty."""
        return TokenCache((tuple(ids),)) if ids else None

    def _padded(self, rows: Sequence[Sequence[int]], longest: int) -> Tensor:
        return torch.tensor([[*row, *[self.model.pad_id] * (longest - len(row))] for row in rows], device=self.device)

    def _states(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, H) from padded rows (B, T) and their lengths (B,)."""
        mask = (torch.arange(ids.shape[1], device=self.device) < lengths[:, None]).long()
        hidden: Tensor = self.model.body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return hidden

    def decoding(self, forward: PlainForward, room: int) -> PlainDecoding:
        """Start decoding after the rows of `forward`."""
        return PlainDecoding(self, forward)


class PlainDecoding:
    """Rows being decoded token by token, recomputed from the start each time."""

    def __init__(self, body: PlainBody, forward: PlainForward) -> None:
        self._body = body
        before = forward.prefix.rows[0] if forward.prefix is not None else ()
        rows = [before + row for row in forward.cache.rows]
        self._lengths = [len(row) for row in rows]
        self._ids = body._padded(rows, max(self._lengths))
        self._used = torch.tensor(self._lengths, device=body.device)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Append one token to every row, ids (B,) on the device; returns its hidden states (B, H)."""
        rows = torch.arange(len(ids), device=ids.device)
        self._ids = pad(self._ids, (0, 1), value=self._body.model.pad_id)
        self._ids[rows, self._used] = ids
        self._lengths = [length + 1 for length in self._lengths]
        self._used = self._used + 1
        return self._body._states(self._ids, self._used)[rows, self._used - 1]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._lengths = [self._lengths[row] for row in rows]
        index = torch.tensor(rows, device=self._ids.device)
        self._ids, self._used = self._ids[index, : max(self._lengths)], self._used[index]
