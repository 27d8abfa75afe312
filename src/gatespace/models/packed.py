"""A model's body over packed tokens: no padding, and what rows have in common is computed once.

The tokens of all rows lie one after another in a single sequence, so every linear layer sees real tokens only.
Attention alone knows about rows: it is registered with transformers under the name `gatespace`, takes each row apart,
and lets it look at the shared prefix, at the KV cache of the row from an earlier pass, and at its own
new tokens. Causal attention makes this exact, and gradient flows back through all three: one forward pass over a prompt
serves sampling and update alike.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from gatespace.errors import UsageError
from gatespace.models.load import Model
from gatespace.models.tree import Parents, depths, paths

_NAME = "gatespace"
_one_pass = threading.Lock()
"""Two threads in one network would reset its attention under each other, and get other numbers without an error."""
_HARMLESS = {"sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions"}
_ROOM = 32
"""Rows whose lengths are equal up to this many tokens attend together."""
LONG = 1 << 17
"""Queries times keys of a row above which its attention weights are not kept; 340 tokens after a prefix of 60."""


@dataclass(frozen=True)
class KVCache:
    """The KV cache of a forward pass: per layer (Hkv, N, D), rows one after another."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    lengths: tuple[int, ...]

    def detached(self) -> KVCache:
        """The same numbers without gradient."""
        return KVCache(tuple((key.detach(), value.detach()) for key, value in self.layers), self.lengths)

    def leaves(self) -> KVCache:
        """The same numbers as the start of a new graph, whose gradients are handed on by `backward`."""
        fresh = self.detached()
        for pair in fresh.layers:
            for tensor in pair:
                tensor.requires_grad_()
        return fresh

    def row(self, place: int) -> KVCache:
        """That of one row, in memory of its own."""
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
        """Continue in this graph with the gradients that `leaves` have gathered."""
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
    """What a pass gives: hidden states (N, H) after the final norm, and the KV caches of prefix and rows."""

    hidden: Tensor
    cache: KVCache
    prefix: KVCache | None
    continued: bool = False
    """Whether the rows went on from an earlier pass, so that `cache` is not all that they have, or are trees."""

    def last(self) -> Tensor:
        """(B, H) hidden states at the last token of every row."""
        ends = torch.tensor(self.cache.lengths, device=self.hidden.device).cumsum(0) - 1
        return self.hidden[ends]


class PackedBody:
    """Runs the body of a model over packed rows.

    Args:
        model: The model.
        checkpointing: Activation checkpointing: keep the inputs and the keys and values of each layer only, and run the
            layer again in the backward pass. The same bits for less memory and about a third more time.
    """

    def __init__(self, model: Model, *, checkpointing: bool = False) -> None:
        _register()
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        self._recomputed = _recomputable(model) if checkpointing else []
        if not getattr(model.body, "_supports_attention_backend", False):
            raise UsageError(
                "this architecture does not let its attention be replaced",
                got=type(model.body).__name__,
                instead="engine.packed: false",
            )

    def forward(
        self,
        rows: Sequence[Sequence[int]],
        *,
        prefix: KVCache | Sequence[int] | None = None,
        past: KVCache | None = None,
        after: Sequence[int] | None = None,
        shape: Callable[[int], tuple[int, int]] | None = None,
        parents: Parents = None,
    ) -> Forward:
        """Hidden states of all tokens of `rows`.

        Args:
            rows: Token ids, at least one per row.
            prefix: What stands before every row: the KV cache from an earlier pass, or ids to include in this pass.
            past: The KV cache of rows from an earlier pass, after the prefix.
            after: The row that each row continues, counted over the rows of `past` and then over those of this pass,
                where it must be one that continues none; -1: it begins after the prefix. None: the row of `past` at the
                same place.
            shape: The padded lengths of row i in attention: of its own tokens, and of those of the row that it
                continues. The bits of a row's result depend on them, not on the other rows; the ways from the root of a
                tree to its leaves attend one by one. None: short rows together, long rows together.
            parents: Rows that are trees: for each of the row's tokens the place of the token that it follows, which
                stands before it in the row, or -1 where it follows what stands before the row. A token sees its
                ancestors only. None, for all rows or for one: every token follows the one before it. The KV cache of
                a tree is not continued.
        """
        inline = tuple(prefix) if prefix is not None and not isinstance(prefix, KVCache) else ()
        before = len(inline) if not isinstance(prefix, KVCache) else prefix.lengths[0]
        lengths = tuple(len(row) for row in rows)
        if after is None:
            after = range(len(rows)) if past is not None else [-1] * len(rows)
        known = (*(past.lengths if past is not None else ()), *lengths, 0)
        behind = [known[place] for place in after]
        ids = [*inline, *(token for row in rows for token in row)]
        positions = [
            *range(len(inline)),
            *(
                before + start + depth
                for row, (start, tokens) in enumerate(zip(behind, rows, strict=True))
                for depth in depths(parents and parents[row], len(tokens))
            ),
        ]
        plan = _Rows(
            lengths,
            prefix=prefix if isinstance(prefix, KVCache) else None,
            inline=len(inline),
            past=past,
            after=after,
            behind=behind,
            shape=shape,
            parents=parents,
            dtype=self.dtype,
        )
        given = torch.tensor([ids, positions], device=self.device)
        hidden = self._run(given[0], given[1], plan)
        layers, plan.complete = plan.record, True
        cache = KVCache(tuple((k[:, len(inline) :], v[:, len(inline) :]) for k, v in layers), lengths)
        if inline:
            root: KVCache | None = KVCache(
                tuple((k[:, : len(inline)], v[:, : len(inline)]) for k, v in layers), (len(inline),)
            )
        else:
            root = prefix if isinstance(prefix, KVCache) else None
        return Forward(hidden[len(inline) :], cache, root, any(behind) or parents is not None)

    def prefix_cache(self, ids: Sequence[int]) -> KVCache | None:
        """The KV cache of the shared prefix; None if it is empty."""
        return self.forward([ids]).cache if ids else None

    def decoding(self, forward: Forward, room: int) -> Decoding:
        """Start decoding after the rows of `forward`, up to `room` tokens each, without gradient."""
        return Decoding(self, forward, room)

    def _run(self, ids: Tensor, positions: Tensor, plan: _Plan) -> Tensor:
        body = self.model.body
        config: Any = body.config
        _check_positions(config, plan.longest)
        with _packed_attention(config), self._checkpointing(config):
            output = body(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                gatespace_plan=plan,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @contextmanager
    def _checkpointing(self, config: Any) -> Iterator[None]:
        """Layers of transformers ask three attributes of theirs; what is inside of them stays in evaluation mode."""
        layers = self._recomputed if torch.is_grad_enabled() else []
        again = partial(
            checkpoint,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), _packed_attention(config)),
        )
        for layer in layers:
            layer._gradient_checkpointing_func = again
            layer.gradient_checkpointing = layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.gradient_checkpointing = layer.training = False


@contextmanager
def _packed_attention(config: Any) -> Iterator[None]:
    """For one pass only: the same network may be saved, generated with or trained elsewhere in between."""
    with _one_pass:
        before = config._attn_implementation
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = before


def _recomputable(model: Model) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.body.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            "the layers of this architecture cannot be recomputed",
            got=type(model.body).__name__,
            instead="engine.activation_checkpointing: false, and fewer engine.micro_tokens",
        )
    return layers


class Decoding:
    """Rows that are being continued token by token, without gradient.

    Keys and values lie in buffers of fixed size. A step asks the device for nothing, and all steps between two calls of
    `keep` run the same operations on the same memory: the network compiles to one graph for all of them.
    """

    def __init__(self, body: PackedBody, forward: Forward, room: int) -> None:
        if forward.continued:
            raise UsageError("decoding starts after a pass over whole prompts", got="a pass over continuations")
        self._body = body
        prefix, cache = forward.prefix, forward.cache
        if len({key.device for key, _ in cache.layers}) > 1:
            raise UsageError(
                "a model that is spread over several devices scores, and writes nothing",
                got=body.model.name,
                instead="one device: pair.teacher_device: cuda:1",
            )
        before = prefix.lengths[0] if prefix is not None else 0
        rows, longest = len(cache.lengths), max(cache.lengths)
        index = _padded(torch.tensor(cache.lengths), longest)[0].to(body.device)
        layers: list[tuple[Tensor, Tensor]] = []
        for layer, pair in enumerate(cache.layers):
            buffers = []
            for side, tensor in enumerate(pair):
                heads, _, width = tensor.shape
                buffer = tensor.new_zeros(rows, heads, before + longest + room, width)
                if prefix is not None:
                    buffer[:, :, :before] = prefix.layers[layer][side].detach()
                own = tensor.detach().index_select(1, index).view(heads, rows, longest, width)
                buffer[:, :, before : before + longest] = own.transpose(0, 1)
                buffers.append(buffer)
            layers.append((buffers[0], buffers[1]))
        self._plan = _Decode(layers, [before + length for length in cache.lengths])

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Append one token to every row, by ids (B,) on the device; (B, H) hidden states there."""
        self._plan.begin()
        hidden = self._body._run(ids, self._plan.used, self._plan)
        self._plan.used += 1
        return hidden

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        index = torch.tensor(rows, device=self._body.device)
        layers = [(key[index], value[index]) for key, value in self._plan.layers]
        self._plan = _Decode(layers, [self._plan.lengths[row] for row in rows])


# ---------------------------------------------------------------------- attention


class _Plan(ABC):
    """How the tokens of one pass attend; reached through the keyword arguments of the network."""

    longest: int
    """The most keys that any token sees."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(Hq, N, D) from (Hq, N, D), (Hkv, N, D), (Hkv, N, D)."""


@dataclass(frozen=True)
class _Group:
    """Rows that attend together, padded to one shape."""

    rows: int
    length: int
    index: Tensor | slice
    """(rows·length,) where in the pass each place's token lies; padding repeats the row's last token."""
    real: Tensor | None
    """Places that are not padding; None: there is none."""
    past: Tensor | None
    """(rows·longest past,) where each place's key lies, in `past` and then in the pass."""
    mask: Tensor | None
    """(rows or 1, 1, length, keys) 0 where a key may be seen, -inf elsewhere. None: a query sees all keys up to its
    own, the last ones being those of the row itself."""


class _Rows(_Plan):
    def __init__(
        self,
        lengths: Sequence[int],
        *,
        prefix: KVCache | None,
        inline: int,
        past: KVCache | None,
        after: Sequence[int],
        behind: Sequence[int],
        shape: Callable[[int], tuple[int, int]] | None,
        parents: Parents,
        dtype: torch.dtype,
    ) -> None:
        self.prefix, self.inline, self.past = prefix, inline, past
        self.record: list[tuple[Tensor, Tensor]] = []
        self.complete = False
        before = inline if prefix is None else prefix.lengths[0]
        deepest = [1 + max(depths(parents and parents[row], length)) for row, length in enumerate(lengths)]
        self.longest = before + max(sum(pair) for pair in zip(deepest, behind, strict=True))
        offsets = torch.tensor([inline, *lengths]).cumsum(0)
        *past_offsets, past_tokens = accumulate(past.lengths if past is not None else (), initial=0)
        sources = torch.cat([torch.tensor(past_offsets, dtype=torch.long), past_tokens + offsets])
        self.within = max(after) >= len(past_offsets)
        """Whether rows continue rows of this pass."""
        owners: Sequence[int] = range(len(lengths))
        places: tuple[Tensor, Tensor] | None = None
        if shape is not None and parents is not None:
            owners, lengths, offsets, places = _ways(lengths, offsets, parents)
            parents = None
        sizes: dict[tuple[int, int], list[int]] = {}
        for row, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
            size = shape(owner) if shape is not None else (_up(length), _up(behind[owner]))
            sizes.setdefault(size, []).append(row)
        self.groups, targets = [], []
        for (room, past_room), rows in sizes.items():
            own = torch.tensor([lengths[row] for row in rows])
            length = room if shape is not None else int(own.max())
            index, real = _padded(own, length, offsets[rows])
            if places is not None:
                real = real[places[1][index[real]]]
                index = places[0][index]
            time = torch.arange(length)
            past_index = None
            trees = [parents[row] for row in rows] if parents is not None else []
            line = all(tree is None for tree in trees)
            if not past_room and line and _is_long(length, before + length) and before <= length:
                if shape is not None:
                    targets.append(index[real])
                    self.groups.append(_Group(len(rows), length, index, real, None, None))
                    continue
                for row in rows:  # as it lies in the pass: a copy of a long row would have to be kept
                    span = slice(int(offsets[row]), int(offsets[row]) + lengths[row])
                    targets.append(torch.arange(span.start, span.stop))
                    self.groups.append(_Group(1, lengths[row], span, None, None, None))
                continue
            seen_here = (time[:, None] >= time)[None] if line else torch.stack([_ancestors(t, length) for t in trees])
            parts = [torch.ones(1, length, before, dtype=torch.bool).expand(len(seen_here), -1, -1), seen_here]
            if past_room:
                seen = torch.tensor([behind[owners[row]] for row in rows])
                longest = past_room if shape is not None else int(seen.max())
                past_index, _ = _padded(seen, longest, sources[[after[owners[row]] for row in rows]])
                visible = (torch.arange(longest) < seen[:, None])[:, None].expand(-1, length, -1)
                parts = [part.expand(len(rows), -1, -1) for part in parts]
                parts.insert(1, visible)
            mask = _mask(torch.cat(parts, -1), dtype)
            targets.append(index[real])
            self.groups.append(_Group(len(rows), length, index, real, past_index, mask))
        self.order = torch.cat(targets).argsort()
        time = torch.arange(inline)
        long = _is_long(inline, inline)
        self.prefix_mask = None if long else _mask((time[:, None] >= time)[None], dtype)
        self._there: dict[torch.device, tuple[list[_Group], Tensor, Tensor | None]] = {}

    def _on(self, device: torch.device) -> tuple[list[_Group], Tensor, Tensor | None]:
        """Groups, order and mask of the prefix on a layer's device: a network may be spread over several."""
        if device not in self._there:
            moved = []
            for group in self.groups:
                tensors: dict[str, Any] = {name: t.to(device) for name, t in vars(group).items() if torch.is_tensor(t)}
                moved.append(replace(group, **tensors))
            mask = None if self.prefix_mask is None else self.prefix_mask.to(device)
            self._there[device] = moved, self.order.to(device), mask
        return self._there[device]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if not self.complete:  # afterwards layers are recomputed in any order
            if layer != len(self.record):
                raise UsageError(
                    "the layers of this network do not run one after another", instead="engine.packed: false"
                )
            self.record.append((key, value))
        groups, order, prefix_mask = self._on(key.device)
        shared = self.prefix.layers[layer] if self.prefix is not None else None
        before = []
        if self.inline:
            shared = key[:, : self.inline], value[:, : self.inline]
            first = query[:, : self.inline]
            before.append(_attention(first[None], shared[0][None], shared[1][None], prefix_mask, scale)[0])
        sources = self.past.layers[layer] if self.past is not None else (key, value)
        if self.past is not None and self.within:
            sources = torch.cat([sources[0], key], 1), torch.cat([sources[1], value], 1)
        outputs = []
        for group in groups:
            seen = []
            for side, new in enumerate((key, value)):
                parts = [] if shared is None else [shared[side].expand(group.rows, -1, -1, -1)]
                if group.past is not None:
                    parts.append(_unpack(sources[side], group.past, group.rows))
                parts.append(_unpack(new, group.index, group.rows))
                seen.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0])
            output = _attention(_unpack(query, group.index, group.rows), seen[0], seen[1], group.mask, scale)
            joined = output.transpose(0, 1).flatten(1, 2)
            outputs.append(joined if group.real is None else joined.index_select(1, group.real))
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1).index_select(1, order)
        return torch.cat([*before, rows], 1) if before else rows


class _Decode(_Plan):
    """Rows with one new token each.

    Args:
        layers: Buffers of keys and values (rows, Hkv, K, D).
        lengths: How many tokens each row has in them.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], lengths: list[int]) -> None:
        self.layers, self.lengths = layers, lengths
        self.longest = max(lengths)
        first = layers[0][0]
        self.used = torch.tensor(lengths, device=first.device)
        self.rows = torch.arange(len(lengths), device=first.device)
        seen = torch.arange(first.shape[2], device=first.device) < self.used[:, None]
        mask = _mask(seen, first.dtype)
        self.masks = {heads: mask.repeat(1, heads, 1) for heads in {key.shape[1] for key, _ in layers}}
        """(rows, Hkv, K) by Hkv."""

    def begin(self) -> None:
        """The tokens that are now appended see themselves, and will be seen."""
        self.lengths = [length + 1 for length in self.lengths]
        self.longest += 1
        for mask in self.masks.values():
            mask[self.rows, :, self.used] = 0.0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.layers[layer]
        keys[self.rows, :, self.used] = key.transpose(0, 1)
        values[self.rows, :, self.used] = value.transpose(0, 1)
        rows, shared, width = len(keys), keys.shape[1], keys.shape[3]
        # The whole buffers, though their ends are still empty: a slice would have to be copied for the products.
        _, output = _written_out(
            query.transpose(0, 1).reshape(rows * shared, -1, width),
            keys.flatten(0, 1),
            values.flatten(0, 1),
            self.masks[shared].view(rows * shared, 1, -1),
            scale,
        )
        return output.view(rows, len(query), -1).transpose(0, 1)


def _is_long(length: int, keys: int) -> bool:
    return length * keys > LONG


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(B, Hq, S, D) from queries (B, Hq, S, D), keys and values (B, Hkv, K, D) and a mask (B or 1, 1, S, K).

    Long texts go through torch's fused kernel, which keeps no weights: they grow with the square of the length. Rows
    take turns, so that the bits of a row do not depend on how many others there are.
    """
    length, keys = query.shape[2], key.shape[2]
    if mask is not None and not _is_long(length, keys):
        result: Tensor = _Attention.apply(query, key, value, mask, scale)
        return result
    if mask is None and keys > length:
        # The kernel's causal mask is of a square. Keys before the first query get queries that nobody asks for.
        query = torch.cat([query.new_zeros(*query.shape[:2], keys - length, query.shape[3]), query], 2)
    rows = []
    for row in range(len(query)):
        here = slice(row, row + 1)
        rows.append(
            scaled_dot_product_attention(
                query[here],
                key[here],
                value[here],
                attn_mask=None if mask is None else mask[here if len(mask) > 1 else slice(1)],
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )[:, :, -length:]
        )
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax weights (B, S, K) and output (B, S, D), from a mask that can be expanded to (B, S, K)."""
    weights = torch.softmax(torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale), -1)
    return weights, torch.bmm(weights, value)


class _Attention(torch.autograd.Function):
    """Softmax attention with grouped queries, written out.

    The fused kernel of torch spends most of an update in its backward pass on a CPU at these sizes, and plain autograd
    keeps float32 copies of all weights. Here each pass over the weights is one call: scale and mask are taken along by
    the product, and the softmax computes in float32 inside, whatever the precision of what it reads and writes.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        rows, heads, length, width = query.shape
        shared = key.shape[1]
        ctx.shapes = query.shape, key.shape
        query = query.reshape(rows * shared, heads // shared * length, width)
        key, value = key.reshape(rows * shared, -1, width), value.reshape(rows * shared, -1, value.shape[-1])
        # (rows or 1, 1, S, K) → (rows·Hkv or 1, Hq/Hkv·S, K), as the products are laid out
        mask = mask.expand(-1, heads, -1, -1) if len(mask) > 1 else mask.expand(-1, heads // shared, -1, -1)
        mask = mask.reshape(-1, query.shape[1], key.shape[1])
        weights, output = _written_out(query, key, value, mask, scale)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scale = scale
        return output.view(rows, heads, length, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        query_shape, key_shape = ctx.shapes
        grad = grad.reshape(*query.shape[:2], -1)
        to_value = torch.bmm(weights.transpose(1, 2), grad)
        to_weights = torch.bmm(grad, value.transpose(1, 2))
        to_scores = torch.ops.aten._softmax_backward_data(to_weights, weights, -1, weights.dtype)
        to_query = torch.baddbmm(query, to_scores, key, beta=0, alpha=ctx.scale)
        to_key = torch.baddbmm(key, to_scores.transpose(1, 2), query, beta=0, alpha=ctx.scale)
        return to_query.view(query_shape), to_key.view(key_shape), to_value.view(*key_shape[:3], -1), None, None


def _serve(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    gatespace_plan: _Plan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: (1, heads, N, D) each."""
    if gatespace_plan is None:
        raise UsageError(
            "this architecture does not pass keyword arguments to its attention", instead="engine.packed: false"
        )
    _check_attention(module, gatespace_plan.longest, attention_mask, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = gatespace_plan.attend(module.layer_idx, query[0], key[0], value[0], scale)
    return output.transpose(0, 1)[None], None


def _check_attention(module: Any, tokens: int, mask: object, arguments: Mapping[str, Any]) -> None:
    """Raise if a layer asks for more than softmax attention over `tokens` tokens and all that stand before them."""
    changes = sorted(name for name, value in arguments.items() if value is not None and name not in _HARMLESS)
    if mask is not None:
        changes.append("a mask of its own")
    if changes:  # softcap of Gemma 2, sinks of GPT-OSS: too small to rely on a probe to see them
        raise UsageError(
            f"packed passes do not know attention with {', '.join(changes)}",
            got=type(module).__name__,
            instead="engine.packed: false",
        )
    window = _window(module, arguments)
    if window is not None and tokens > window:
        raise UsageError(
            "packed passes have no sliding window, and these texts are longer than the model's",
            got=f"{tokens} tokens, window {window}",
            instead="engine.packed: false",
        )


def _window(module: Any, arguments: Mapping[str, Any]) -> int | None:
    if "sliding_window" in arguments:
        passed: int | None = arguments["sliding_window"]
        return passed
    # Some architectures write it into their mask only, and no mask is made for packed passes.
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else "sliding"
    name = "attention_chunk_size" if "chunk" in kind else "sliding_window" if "sliding" in kind else ""
    window: int | None = getattr(config, name, None)
    return window


def _check_positions(config: Any, tokens: int) -> None:
    """Raise if the code of a position depends on the length of the text: its KV cache would then be out of date."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, Mapping))]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            reach = rope.get("original_max_position_embeddings")
            reach = reach or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            if tokens > reach:
                raise UsageError(
                    "the positions of this network change with the length of the text from here on",
                    got=f"{tokens} tokens, {rope['rope_type']} positions up to {reach}",
                    instead="engine.packed: false",
                )


def _register() -> None:
    from transformers import AttentionInterface

    # No mask is registered under this name, so transformers makes none.
    AttentionInterface.register(_NAME, _serve)


def _mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows or 1, 1, S, K): 0 where a key is seen, -inf elsewhere."""
    return torch.zeros(1, dtype=dtype, device=seen.device).where(seen, -torch.inf)[:, None]


def _padded(lengths: Tensor, longest: int, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows·longest,) indices of the tokens of rows that begin at `offsets`, and which of them are no padding."""
    if offsets is None:
        offsets = lengths.cumsum(0) - lengths
    time = torch.arange(longest, device=lengths.device)
    index = offsets[:, None] + torch.minimum(time, lengths[:, None] - 1)
    return index.flatten(), (time < lengths[:, None]).flatten().nonzero()[:, 0]


def _ways(
    lengths: Sequence[int], offsets: Tensor, parents: Sequence[Sequence[int] | None]
) -> tuple[list[int], list[int], Tensor, tuple[Tensor, Tensor]]:
    """The ways from root to leaf of rows that are trees, as lines.

    Returns:
        The row of each line, its length, and where it begins in a list of the tokens of all lines; for each token of
        that list its place in the pass, and whether this is the first line that it is in.
    """
    lines = [(row, way) for row, tree in enumerate(parents) for way in paths(tree, lengths[row])]
    places = torch.cat([offsets[row] + torch.tensor(way) for row, way in lines])
    first = torch.zeros(len(places), dtype=torch.bool)
    first[np.unique(places.numpy(), return_index=True)[1]] = True
    sizes = [len(way) for _, way in lines]
    return [row for row, _ in lines], sizes, torch.tensor([0, *sizes]).cumsum(0), (places, first)


def _unpack(tensor: Tensor, index: Tensor | slice, rows: int) -> Tensor:
    """(rows, heads, S, D) from (heads, N, D)."""
    if isinstance(index, slice):
        return tensor[None, :, index]
    heads, _, width = tensor.shape
    return tensor.index_select(1, index).view(heads, rows, -1, width).transpose(0, 1)


def _ancestors(parents: Sequence[int] | None, length: int) -> Tensor:
    """(length, length) which tokens of a row each of its tokens sees; padding sees at least itself."""
    if parents is None:
        return torch.ones(length, length, dtype=torch.bool).tril()
    seen = np.eye(length, dtype=bool)
    for place, parent in enumerate(parents):
        if parent >= 0:
            seen[place] |= seen[parent]
    return torch.from_numpy(seen)


def _up(length: int) -> int:
    return -(-length // _ROOM) * _ROOM
