"""A model's body over packed tokens: no padding, and shared prefixes are computed once.

The tokens of all rows are concatenated into a single sequence, so linear layers see real tokens only. Only attention
knows about rows: it is registered with transformers under the name `gatespace`, unpacks the rows, and lets each attend
to the shared prefix, to the KV cache of the row from an earlier pass, and to its own new tokens, within the layer's
window. Causal attention makes this exact, and gradient flows back through all three: one forward pass over a prompt
serves both sampling and update.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gatespace.errors import UsageError
from gatespace.models.attention import Rule, attention, is_long, mask_of, written_out
from gatespace.models.load import Model
from gatespace.models.plain import Body, Decoding, Forward, KVCache
from gatespace.models.tree import Parents, depths, paths

_NAME = "gatespace"
_one_pass = threading.Lock()
"""Two threads in one network would reset each other's attention, and silently get other numbers."""
_HARMLESS = {"sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions"}
_LENGTH_STEP = 32
"""Rows whose lengths round up to the same multiple of this attend together."""


class PackedBody(Body):
    """Runs the body of a model over packed rows.

    Args:
        model: The model.
        checkpointing: Activation checkpointing: save only the inputs, keys and values of each layer, and recompute the
            layer in the backward pass. The same bits for less memory and about a third more time. None: every second
            layer in passes with long rows, if the network supports it.
    """

    def __init__(self, model: Model, *, checkpointing: bool | None = False) -> None:
        _register()
        super().__init__(model)
        self.dtype = model.dtype
        self._recomputed = _recomputable(model) if checkpointing is not False else []
        self._recomputes_short = bool(checkpointing)
        if checkpointing and not self._recomputed:
            raise UsageError(
                "the layers of this architecture cannot be recomputed",
                got=type(model.body).__name__,
                instead="engine.activation_checkpointing: false, and fewer engine.micro_tokens",
            )
        if not getattr(model.body, "_supports_attention_backend", False):
            raise UsageError(
                "this architecture does not let its attention be replaced",
                got=type(model.body).__name__,
                instead="another model, or GATESPACE_CHECK=plain",
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
            prefix: Precedes every row: the KV cache from an earlier pass, or ids to include in this pass.
            past: The KV cache of rows from an earlier pass, after the prefix.
            after: Index of the row that each row continues, over the rows of `past` and then those of this pass, where
                it must be one that continues none; -1: it begins after the prefix. None: the row of `past` at the same
                place.
            shape: The padded lengths of row i in attention: of its own tokens, and of those of the row that it
                continues. The bits of a row's result depend on them, not on the other rows; the paths of a tree attend
                one by one. None: short rows together, long rows together.
            parents: For rows that are trees: the place of each token's parent, which precedes it in the row, or -1 if
                it follows the context before the row. A token sees its ancestors only. None, for all rows or for one:
                every token follows the one before it. The KV cache of a tree cannot be continued.
        """
        inline = tuple(prefix) if prefix is not None and not isinstance(prefix, KVCache) else ()
        lengths = tuple(len(row) for row in rows)
        if after is None:
            after = range(len(rows)) if past is not None else [-1] * len(rows)
        plan = _Rows(
            lengths,
            prefix=prefix if isinstance(prefix, KVCache) else None,
            inline=len(inline),
            past=past,
            after=after,
            shape=shape,
            parents=parents,
            dtype=self.dtype,
        )
        ids = torch.tensor([*inline, *(token for row in rows for token in row)])
        given = torch.stack([ids, plan.positions]).to(self.device)
        hidden = self._run(given[0], given[1], plan)
        layers, plan.complete = plan.record, True
        cache = KVCache(tuple((k[:, len(inline) :], v[:, len(inline) :]) for k, v in layers), lengths)
        if inline:
            root: KVCache | None = KVCache(
                tuple((k[:, : len(inline)], v[:, : len(inline)]) for k, v in layers), (len(inline),)
            )
        else:
            root = prefix if isinstance(prefix, KVCache) else None
        continued = any(plan.behind) or parents is not None
        return Forward(hidden[len(inline) :], cache, root, continued, tuple(plan.windows))

    def decoding(self, forward: Forward, most: int) -> PackedDecoding:
        """Start decoding after the rows of `forward`, at most `most` tokens each, without gradient."""
        return PackedDecoding(self, forward, most)

    def _run(self, ids: Tensor, positions: Tensor, plan: _Plan) -> Tensor:
        body = self.model.body
        config: Any = body.config
        _check_positions(config, plan.longest)
        with _packed_attention(config), self._checkpointing(config, plan):
            output = body(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                gatespace_plan=plan,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @contextmanager
    def _checkpointing(self, config: Any, plan: _Plan) -> Iterator[None]:
        """Set the three attributes that transformers layers check; their submodules stay in evaluation mode."""
        layers = self._recomputed if self._recomputes_short else self._recomputed[::2] if plan.long else []
        layers = layers if torch.is_grad_enabled() else []
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
    """Use packed attention for one pass only: in between, the network may be saved or used elsewhere."""
    with _one_pass:
        before = config._attn_implementation
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = before


def _recomputable(model: Model) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.body.modules() if isinstance(module, GradientCheckpointingLayer)]


class PackedDecoding(Decoding):
    """Rows being decoded token by token, without gradient.

    The KV cache is in fixed-size buffers. A step never synchronises with the device, and all steps between two calls of
    `keep` run the same operations on the same memory: the network compiles to one graph for all of them.
    """

    def __init__(self, body: PackedBody, forward: Forward, most: int) -> None:
        if forward.continued:
            raise UsageError("decoding starts after a pass over whole prompts", got="a pass over continuations")
        self._body = body
        prefix, cache = forward.prefix, forward.cache
        if len({key.device for key, _ in cache.layers}) > 1:
            raise UsageError(
                "a model that is spread over several devices can score but not generate",
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
                buffer = tensor.new_zeros(rows, heads, before + longest + most, width)
                if prefix is not None:
                    buffer[:, :, :before] = prefix.layers[layer][side].detach()
                own = tensor.detach().index_select(1, index).view(heads, rows, longest, width)
                buffer[:, :, before : before + longest] = own.transpose(0, 1)
                buffers.append(buffer)
            layers.append((buffers[0], buffers[1]))
        self._plan = _Decode(layers, [before + length for length in cache.lengths], forward.windows)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        self._plan.begin()
        hidden = self._body._run(ids, self._plan.used, self._plan)
        self._plan.used += 1
        return hidden

    def keep(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self._body.device)
        layers = [(key[index], value[index]) for key, value in self._plan.layers]
        self._plan = _Decode(layers, [self._plan.lengths[row] for row in rows], self._plan.windows)


# ---------------------------------------------------------------------- attention


class _Plan(ABC):
    """How the tokens of one pass attend; passed through the network's keyword arguments."""

    longest: int
    """The most keys that any token sees."""
    long = False
    """Whether there are rows whose attention weights are not saved."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """(Hq, N, D) from (Hq, N, D), (Hkv, N, D), (Hkv, N, D)."""


@dataclass(frozen=True)
class _Group:
    """Rows that attend together, padded to one shape."""

    rows: int
    length: int
    index: Tensor | slice
    """(rows·length,) index of each place's token in the pass; padding repeats the row's last token."""
    real: Tensor | None = None
    """Places that are not padding; None: all of them."""
    past: Tensor | None = None
    """(rows·longest past,) index of each place's key, in `past` and then in the pass."""
    seen: Tensor | None = None
    """(rows or 1, length, keys) which keys a query sees: its ancestors and itself. None: causal, the row's own keys
    being the last."""
    first: bool = False
    """Whether this is the prefix, which nothing precedes."""


class _Rows(_Plan):
    """Rows of new tokens, each after the prefix and perhaps after an earlier row.

    Args:
        lengths: Tokens of each row.
        prefix: The KV cache of the prefix, from an earlier pass.
        inline: Tokens of a prefix that is part of this pass, before all rows.
        past: As in `PackedBody.forward`, and so are `after`, `shape` and `parents`.
        dtype: Of the masks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        prefix: KVCache | None,
        inline: int,
        past: KVCache | None,
        after: Sequence[int],
        shape: Callable[[int], tuple[int, int]] | None,
        parents: Parents,
        dtype: torch.dtype,
    ) -> None:
        self.prefix, self.past, self.dtype = prefix, past, dtype
        self.record: list[tuple[Tensor, Tensor]] = []
        self.windows: list[int | None] = []
        self.complete = False
        before = inline if prefix is None else prefix.lengths[0]
        past_lengths = past.lengths if past is not None else ()
        preceding = (*past_lengths, *lengths, 0)
        self.behind = [preceding[row] for row in after]
        """Tokens of the row that each row continues."""
        self.within = max(after) >= len(past_lengths)
        """Whether rows continue rows of this pass."""
        self.positions = _positions(lengths, inline, before, self.behind, parents)
        """(N,) of the tokens of the pass, the prefix first."""
        self.longest = 1 + int(self.positions.max())
        offsets = torch.tensor([inline, *lengths]).cumsum(0)
        past_offsets = torch.tensor([0, *past_lengths]).cumsum(0)
        begins = torch.cat([past_offsets[:-1], past_offsets[-1] + offsets])[[*after]]
        lines = _Lines.of(lengths, offsets, parents, paths_apart=shape is not None)
        self.groups = _groups(lines, inline, before, self.behind, begins, shape)
        self.order = _order(self.groups)
        self.long = any(group.seen is None or is_long(*group.seen.shape[-2:]) for group in self.groups)
        self._there: dict[torch.device, tuple[list[_Group], Tensor | None]] = {}
        self._masks: dict[tuple[int, int | None, torch.device], Tensor] = {}

    def _on(self, device: torch.device) -> tuple[list[_Group], Tensor | None]:
        """Groups and order on a layer's device: a network may span several."""
        if device not in self._there:
            moved = []
            for group in self.groups:
                tensors: dict[str, Any] = {
                    name: t.to(device) for name, t in vars(group).items() if torch.is_tensor(t) and name != "seen"
                }
                moved.append(replace(group, **tensors))
            self._there[device] = moved, None if self.order is None else self.order.to(device)
        return self._there[device]

    def _mask(self, place: int, window: int | None, device: torch.device) -> Tensor | None:
        """(rows or 1, 1, length, keys) mask of a group, created once for all layers with this window."""
        group = self.groups[place]
        seen = group.seen
        if seen is None:
            return None
        if window is not None and window >= seen.shape[2]:
            window = None
        key = place, window, device
        if key not in self._masks:
            if window is not None:
                own = self.positions[group.index].view(group.rows, -1)
                if len(seen) == 1:  # rows differ in padding only
                    own = own.amax(0, keepdim=True)
                # The context before a row has positions from 0 on.
                keys = torch.cat([torch.arange(seen.shape[2] - group.length).expand(len(own), -1), own], 1)
                seen = seen & (keys[:, None] > own[:, :, None] - window)
            self._masks[key] = mask_of(seen, self.dtype).to(device)
        return self._masks[key]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if not self.complete:  # afterwards layers may be recomputed in any order
            if layer != len(self.record):
                raise UsageError(
                    "the layers of this network do not run one after another",
                    instead="another model, or GATESPACE_CHECK=plain",
                )
            self.record.append((key, value))
            self.windows.append(rule.window)
        groups, order = self._on(key.device)
        shared = self.prefix.layers[layer] if self.prefix is not None else None
        sources = self.past.layers[layer] if self.past is not None else (key, value)
        if self.past is not None and self.within:
            sources = torch.cat([sources[0], key], 1), torch.cat([sources[1], value], 1)
        outputs = []
        for place, group in enumerate(groups):
            if group.first:
                shared = key[:, group.index], value[:, group.index]
            seen = []
            for side, new in enumerate((key, value)):
                parts = [] if shared is None else [shared[side].expand(group.rows, -1, -1, -1)]
                if group.past is not None:
                    parts.append(_unpack(sources[side], group.past, group.rows))
                if not group.first:
                    parts.append(_unpack(new, group.index, group.rows))
                seen.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0])
            mask = self._mask(place, rule.window, key.device)
            output = attention(_unpack(query, group.index, group.rows), seen[0], seen[1], mask, rule)
            joined = output.transpose(0, 1).flatten(1, 2)
            outputs.append(joined if group.real is None else joined.index_select(1, group.real))
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return rows if order is None else rows.index_select(1, order)


class _Decode(_Plan):
    """Rows with one new token each.

    Args:
        layers: Buffers of keys and values (rows, Hkv, K, D).
        lengths: Tokens of each row in them.
        windows: The sliding window of every layer.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], lengths: list[int], windows: Sequence[int | None]) -> None:
        self.layers, self.lengths = layers, lengths
        self.longest = max(lengths)
        first = layers[0][0]
        size = first.shape[2]
        self.windows = [None if window is None or window >= size else window for window in windows]
        self.used = torch.tensor(lengths, device=first.device)
        self.rows = torch.arange(len(lengths), device=first.device)
        places = torch.arange(size, device=first.device)
        self.masks: dict[tuple[int, int | None], Tensor] = {}
        """(rows, Hkv, K) by Hkv and window."""
        for heads, window in {(key.shape[1], window) for (key, _), window in zip(layers, self.windows, strict=True)}:
            seen = places < self.used[:, None]
            if window is not None:
                seen &= places >= self.used[:, None] - window
            self.masks[heads, window] = mask_of(seen, first.dtype).repeat(1, heads, 1)

    def begin(self) -> None:
        """Unmask the tokens that are now appended, and mask those that leave a window."""
        self.lengths = [length + 1 for length in self.lengths]
        self.longest += 1
        for (_, window), mask in self.masks.items():
            mask[self.rows, :, self.used] = 0.0
            if window is not None:
                left = self.used - window
                # Until a token leaves the window, the first one stays visible.
                mask[self.rows, :, left.clamp(min=0)] = mask.new_zeros(1).where(left < 0, -torch.inf)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        keys, values = self.layers[layer]
        keys[self.rows, :, self.used] = key.transpose(0, 1)
        values[self.rows, :, self.used] = value.transpose(0, 1)
        rows, shared, width = len(keys), keys.shape[1], keys.shape[3]
        # The whole buffers, though their ends are still empty: a slice would have to be copied for the matmul.
        _, output, _ = written_out(
            query.transpose(0, 1).reshape(rows * shared, -1, width),
            keys.flatten(0, 1),
            values.flatten(0, 1),
            self.masks[shared, self.windows[layer]].view(rows * shared, 1, -1),
            rule.scale,
            rule.softcap,
        )
        return output.view(rows, len(query), -1).transpose(0, 1)


def _serve(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    gatespace_plan: _Plan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: (1, heads, N, D) each."""
    if gatespace_plan is None:
        raise UsageError(
            "this architecture does not pass keyword arguments to its attention",
            instead="another model, or GATESPACE_CHECK=plain",
        )
    _check_attention(module, attention_mask, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(scale, softcap or None, _window(module, others, gatespace_plan.longest))
    output = gatespace_plan.attend(module.layer_idx, query[0], key[0], value[0], rule)
    return output.transpose(0, 1)[None], None


def _check_attention(module: Any, mask: object, arguments: Mapping[str, Any]) -> None:
    """Raise if a layer needs more than softmax attention with a soft cap and a sliding window."""
    changes = sorted(name for name, value in arguments.items() if value is not None and name not in _HARMLESS)
    if mask is not None:
        changes.append("a mask of its own")
    if changes:  # e.g. sinks of GPT-OSS: a probe may miss small effects
        raise UsageError(
            f"packed passes do not know attention with {', '.join(changes)}",
            got=type(module).__name__,
            instead="another model, or GATESPACE_CHECK=plain",
        )


def _window(module: Any, arguments: Mapping[str, Any], tokens: int) -> int | None:
    """How many positions back a token of this layer sees, including itself; None: all of `tokens`."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else "sliding"
    # Some architectures apply it only in their mask, and packed passes have no mask.
    name = "attention_chunk_size" if "chunk" in kind else "sliding_window" if "sliding" in kind else ""
    window: int | None = arguments.get("sliding_window", getattr(config, name, None))
    if window is None:
        return None
    # Chunks are another mask. A setting that the network's code does not use may be left over from another network.
    homes = [sys.modules.get(base.__module__) for base in type(module).__mro__]
    made = "chunk" not in kind and any(hasattr(home, "create_sliding_window_causal_mask") for home in homes)
    if not made and tokens > window:
        raise UsageError(
            "packed passes do not know the window of this network, and these texts are longer",
            got=f"{tokens} tokens, window {window}",
            instead="another model, or GATESPACE_CHECK=plain",
        )
    return window


def _check_positions(config: Any, tokens: int) -> None:
    """Raise if position encodings depend on the length of the text: the KV cache would then be stale."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, Mapping))]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            reach = rope.get("original_max_position_embeddings")
            reach = reach or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            if tokens > reach:
                raise UsageError(
                    "the positions of this network change with the length of the text from here on",
                    got=f"{tokens} tokens, {rope['rope_type']} positions up to {reach}",
                    instead="another model, or GATESPACE_CHECK=plain",
                )


def _register() -> None:
    from transformers import AttentionInterface

    # No mask is registered under this name, so transformers makes none.
    AttentionInterface.register(_NAME, _serve)


def _padded(lengths: Tensor, longest: int, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows·longest,) indices of the tokens of rows that begin at `offsets`, and which of them are not padding."""
    if offsets is None:
        offsets = lengths.cumsum(0) - lengths
    time = torch.arange(longest, device=lengths.device)
    index = offsets[:, None] + torch.minimum(time, lengths[:, None] - 1)
    return index.flatten(), (time < lengths[:, None]).flatten().nonzero()[:, 0]


def _positions(lengths: Sequence[int], inline: int, before: int, behind: Sequence[int], parents: Parents) -> Tensor:
    """(N,) positions of the tokens of a pass: the inline prefix, then each row after all that precedes it."""
    positions = [*range(inline)]
    for row, (length, continued) in enumerate(zip(lengths, behind, strict=True)):
        positions += [before + continued + depth for depth in depths(parents[row] if parents else None, length)]
    return torch.tensor(positions)


class _Lines(NamedTuple):
    """What attends as one sequence: the rows of a pass, or the paths from root to leaf of rows that are trees."""

    rows: Sequence[int]
    """The row that each line is from."""
    lengths: Sequence[int]
    offsets: Tensor
    """Where each line begins in a list of the tokens of all lines."""
    trees: Parents = None
    """Parents of rows that attend as trees."""
    tokens: Tensor | None = None
    """For each token of that list, its index in the pass; None: the list is the pass."""
    first: Tensor | None = None
    """For each token of that list, whether this is the first line that it is in: the others compute it again."""

    @classmethod
    def of(cls, lengths: Sequence[int], offsets: Tensor, parents: Parents, *, paths_apart: bool) -> _Lines:
        """The lines of rows; with `paths_apart`, every path of a tree is its own line."""
        if parents is None or not paths_apart:
            return cls(range(len(lengths)), lengths, offsets, parents)
        lines = [(row, path) for row, tree in enumerate(parents) for path in paths(tree, lengths[row])]
        tokens = torch.cat([offsets[row] + torch.tensor(path) for row, path in lines])
        first = torch.zeros(len(tokens), dtype=torch.bool)
        first[np.unique(tokens.numpy(), return_index=True)[1]] = True
        sizes = [len(path) for _, path in lines]
        return cls([row for row, _ in lines], sizes, torch.tensor([0, *sizes]).cumsum(0), None, tokens, first)

    def padded(self, members: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """As `_Group.index` and `_Group.real` for some of the lines, padded to `length`."""
        lengths = torch.tensor([self.lengths[line] for line in members])
        index, real = _padded(lengths, length, self.offsets[[*members]])
        if self.tokens is None or self.first is None:
            return index, real
        return self.tokens[index], real[self.first[index[real]]]


def _groups(
    lines: _Lines,
    inline: int,
    before: int,
    behind: Sequence[int],
    begins: Tensor,
    shape: Callable[[int], tuple[int, int]] | None,
) -> list[_Group]:
    """Divide lines into groups of one padded shape, after the group of the inline prefix.

    Args:
        lines: The lines.
        inline: Tokens of the inline prefix.
        before: Tokens of the prefix, inline or not.
        behind: Tokens of the row that each row continues.
        begins: Where the keys of that row begin, in `past` and then in the pass.
        shape: As in `PackedBody.forward`.
    """
    groups: list[_Group] = []
    if inline:
        causal = None if is_long(inline, inline) else _ancestors(None, inline)[None]
        groups.append(_Group(1, inline, slice(0, inline), seen=causal, first=True))
    sizes: dict[tuple[int, int], list[int]] = {}
    for line, (row, length) in enumerate(zip(lines.rows, lines.lengths, strict=True)):
        size = shape(row) if shape is not None else (_up(length), _up(behind[row]))
        sizes.setdefault(size, []).append(line)
    for (length, past_length), members in sizes.items():
        rows = [lines.rows[line] for line in members]
        if shape is None:  # no longer than needed
            length = max(lines.lengths[line] for line in members)
            past_length = max(behind[row] for row in rows)
        index, real = lines.padded(members, length)
        trees = [None if lines.trees is None else lines.trees[line] for line in members]
        is_tree = any(tree is not None for tree in trees)
        causal_kernel = not past_length and not is_tree and is_long(length, before + length) and before <= length
        if causal_kernel and shape is not None:
            groups.append(_Group(len(members), length, index, real))
        elif causal_kernel:
            for line in members:  # a view, not a copy: autograd would save the copy of a long row
                start, stop = int(lines.offsets[line]), int(lines.offsets[line]) + lines.lengths[line]
                groups.append(_Group(1, stop - start, slice(start, stop)))
        else:
            continued = torch.tensor([behind[row] for row in rows])
            past_index = _padded(continued, past_length, begins[rows])[0] if past_length else None
            seen = _seen(trees, length, before, continued, past_length)
            groups.append(_Group(len(members), length, index, real, past_index, seen))
    return groups


def _seen(
    trees: Sequence[Sequence[int] | None], length: int, before: int, continued: Tensor, past_length: int
) -> Tensor:
    """As `_Group.seen`: keys of the prefix, of the rows that are continued, padded to `past_length`, and of the row."""
    is_tree = any(tree is not None for tree in trees)
    own = torch.stack([_ancestors(tree, length) for tree in (trees if is_tree else [None])])
    parts = [torch.ones(1, length, before, dtype=torch.bool).expand(len(own), -1, -1), own]
    if past_length:
        visible = (torch.arange(past_length) < continued[:, None])[:, None].expand(-1, length, -1)
        parts = [part.expand(len(trees), -1, -1) for part in parts]
        parts.insert(1, visible)
    return torch.cat(parts, -1)


def _order(groups: Sequence[_Group]) -> Tensor | None:
    """(N,) where the output of each token of the pass is in that of the groups; None: in the same place."""
    tokens = []
    for group in groups:
        if isinstance(group.index, slice):
            tokens.append(torch.arange(group.index.start, group.index.stop))
        else:
            tokens.append(group.index if group.real is None else group.index[group.real])
    order = torch.cat(tokens)
    return None if bool((order.diff() > 0).all()) else order.argsort()


def _unpack(tensor: Tensor, index: Tensor | slice, rows: int) -> Tensor:
    """(rows, heads, S, D) from (heads, N, D)."""
    if isinstance(index, slice):
        return tensor[None, :, index]
    heads, _, width = tensor.shape
    return tensor.index_select(1, index).view(heads, rows, -1, width).transpose(0, 1)


def _ancestors(parents: Sequence[int] | None, length: int) -> Tensor:
    """(length, length) which tokens of a row each token sees; padding sees at least itself."""
    if parents is None:
        return torch.ones(length, length, dtype=torch.bool).tril()
    seen = np.eye(length, dtype=bool)
    for place, parent in enumerate(parents):
        if parent >= 0:
            seen[place] |= seen[parent]
    return torch.from_numpy(seen)


def _up(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP
