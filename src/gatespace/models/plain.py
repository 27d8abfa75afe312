"""Forward passes over rows of tokens: what they take and return, and the plain ones.

Plain passes are the network's own forward over whole padded sequences. Their cache holds token ids instead of keys and
values, and everything is recomputed. Slow, but it works for every architecture, and is the reference for packed passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from gatespace.models.load import Model
from gatespace.models.tree import Parents, paths


@dataclass(frozen=True)
class KVCache:
    """What later passes need of a forward pass: per layer keys and values (Hkv, N, D), rows one after another."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    lengths: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...] = ()
    """Of plain passes, which have no layers: the token ids of every row. Everything is recomputed from them."""

    def detached(self) -> KVCache:
        """The same values without gradient."""
        return replace(self, layers=tuple((key.detach(), value.detach()) for key, value in self.layers))

    def leaves(self) -> KVCache:
        """The same values as leaves of a new graph; `backward` passes their gradients on."""
        fresh = self.detached()
        for pair in fresh.layers:
            for tensor in pair:
                tensor.requires_grad_()
        return fresh

    def row(self, place: int) -> KVCache:
        """A copy of one row's cache."""
        start, length = sum(self.lengths[:place]), self.lengths[place]
        span = slice(start, start + length)
        return KVCache(tuple((key[:, span].clone(), value[:, span].clone()) for key, value in self.layers), (length,))

    @staticmethod
    def joined(caches: Sequence[KVCache]) -> KVCache:
        """The rows of several caches, in this order."""
        layers = [zip(*some, strict=True) for some in zip(*(cache.layers for cache in caches), strict=True)]
        return KVCache(
            tuple((torch.cat(keys, 1), torch.cat(values, 1)) for keys, values in layers),
            tuple(length for cache in caches for length in cache.lengths),
        )

    def backward(self, leaves: KVCache) -> None:
        """Backpropagate the gradients accumulated in `leaves` through this graph."""
        pairs = [
            (mine, leaf.grad)
            for own, other in zip(self.layers, leaves.layers, strict=True)
            for mine, leaf in zip(own, other, strict=True)
            if mine.requires_grad and leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([mine for mine, _ in pairs], [grad for _, grad in pairs])


@dataclass(frozen=True)
class Forward:
    """Output of a pass: hidden states (N, H) after the final norm, and the KV caches of prefix and rows."""

    hidden: Tensor
    cache: KVCache
    prefix: KVCache | None
    continued: bool = False
    """Whether rows continue earlier ones, so that `cache` is not all of their context, or are trees."""
    windows: tuple[int | None, ...] = ()
    """The sliding window of every layer; None: full attention."""

    def last(self) -> Tensor:
        """(B, H) hidden states at the last token of every row."""
        ends = torch.tensor(self.cache.lengths, device=self.hidden.device).cumsum(0) - 1
        return self.hidden[ends]


class Decoding(ABC):
    """Rows being decoded token by token, without gradient."""

    @abstractmethod
    def step(self, ids: Tensor) -> Tensor:
        """Append one token to every row, ids (B,) on the device; returns its hidden states (B, H)."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""


class Body(ABC):
    """Runs the body of a model over rows of tokens."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.device = model.device

    @abstractmethod
    def forward(
        self,
        rows: Sequence[Sequence[int]],
        *,
        prefix: KVCache | Sequence[int] | None = None,
        past: KVCache | None = None,
        shape: Callable[[int], tuple[int, int]] | None = None,
        parents: Parents = None,
    ) -> Forward:
        """Hidden states of all tokens of `rows`; the arguments are described at `PackedBody.forward`."""

    def prefix_cache(self, ids: Sequence[int]) -> KVCache | None:
        """The KV cache of the shared prefix; None if it is empty."""
        return self.forward([ids]).cache if ids else None

    @abstractmethod
    def decoding(self, forward: Forward, most: int) -> Decoding:
        """Start decoding after the rows of `forward`, at most `most` tokens each."""


def _cache(rows: Sequence[Sequence[int]]) -> KVCache:
    """The cache of a plain pass."""
    return KVCache((), tuple(len(row) for row in rows), tuple(tuple(row) for row in rows))


class PlainBody(Body):
    """Runs the body of a model over whole sequences."""

    def forward(
        self,
        rows: Sequence[Sequence[int]],
        *,
        prefix: KVCache | Sequence[int] | None = None,
        past: KVCache | None = None,
        shape: Callable[[int], tuple[int, int]] | None = None,
        parents: Parents = None,
    ) -> Forward:
        if parents is not None:
            return self._trees(rows, parents, prefix, past, shape)
        root = prefix.ids[0] if isinstance(prefix, KVCache) else tuple(prefix or ())
        before = [root + (past.ids[i] if past is not None else ()) for i in range(len(rows))]
        whole = [[*first, *row] for first, row in zip(before, rows, strict=True)]
        longest = max(len(row) for row in whole)
        if shape is not None:
            longest = max(len(first) + shape(i)[0] for i, first in enumerate(before))
        hidden = self._states(self._padded(whole, longest), torch.tensor([len(row) for row in whole]).to(self.device))
        new = [states[len(first) : len(row)] for states, first, row in zip(hidden, before, whole, strict=True)]
        return Forward(torch.cat(new), _cache(rows), _cache([root]) if root else None)

    def _trees(
        self,
        rows: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int] | None],
        prefix: KVCache | Sequence[int] | None,
        past: KVCache | None,
        shape: Callable[[int], tuple[int, int]] | None,
    ) -> Forward:
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
            past=None if past is None else _cache([past.ids[row] for row in owner]),
            shape=None if shape is None else lambda way: shape(owner[way]),
        )
        places = [(row, place) for row, way in zip(owner, ways, strict=True) for place in way]
        where = {token: at for at, token in enumerate(places)}
        index = [where[row, place] for row, tokens in enumerate(rows) for place in range(len(tokens))]
        hidden = forward.hidden[torch.tensor(index, device=self.device)]
        return Forward(hidden, _cache(rows), forward.prefix)

    def prefix_cache(self, ids: Sequence[int]) -> KVCache | None:
        return _cache([ids]) if ids else None

    def _padded(self, rows: Sequence[Sequence[int]], longest: int) -> Tensor:
        return torch.tensor([[*row, *[self.model.pad_id] * (longest - len(row))] for row in rows], device=self.device)

    def _states(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, H) from padded rows (B, T) and their lengths (B,)."""
        mask = (torch.arange(ids.shape[1], device=self.device) < lengths[:, None]).long()
        hidden: Tensor = self.model.body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return hidden

    def decoding(self, forward: Forward, most: int) -> PlainDecoding:
        return PlainDecoding(self, forward)


class PlainDecoding(Decoding):
    """Rows being decoded, recomputed from the start each time."""

    def __init__(self, body: PlainBody, forward: Forward) -> None:
        self._body = body
        before = forward.prefix.ids[0] if forward.prefix is not None else ()
        rows = [before + row for row in forward.cache.ids]
        self._lengths = [len(row) for row in rows]
        self._ids = body._padded(rows, max(self._lengths))
        self._used = torch.tensor(self._lengths, device=body.device)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        rows = torch.arange(len(ids), device=ids.device)
        self._ids = pad(self._ids, (0, 1), value=self._body.model.pad_id)
        self._ids[rows, self._used] = ids
        self._lengths = [length + 1 for length in self._lengths]
        self._used = self._used + 1
        return self._body._states(self._ids, self._used)[rows, self._used - 1]

    def keep(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        index = torch.tensor(rows, device=self._ids.device)
        self._ids, self._used = self._ids[index, : max(self._lengths)], self._used[index]
