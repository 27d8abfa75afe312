"""Memory of a network from its shapes: weights, activations saved per token, KV cache.

Functions of shapes alone: they work for a network without weights, and give the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from gatespace.config import LoraConfig
from gatespace.models.attention import LONG
from gatespace.models.load import Model

ROOM = 6 << 30
"""Budget in bytes for the activations of a micro-batch, or for the KV cache of rows decoded together."""
_LEAST = 64
"""Least token limit of a batch."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network, in elements."""

    all: int
    body: int
    """Weights multiplied with every token: without embedding and head."""
    trained: int
    layers: int
    hidden: int
    inner: int
    heads: int
    queries: int
    """Total width of all query heads."""
    keys: int
    """Total width of all key heads, equal to that of values."""
    normed: bool
    """Whether queries and keys have their own norms."""
    norms: int
    """Norms of a layer over the hidden size: two, or four in Gemma 2 and 3."""
    capped: bool
    """Whether attention logits have a soft cap, whose tanh the backward pass needs besides the weights."""

    def planned(self, *, checkpointing: bool = False) -> int:
        """Bytes per token for planning micro-batches, in half precision.

        About twice what autograd saves. The rest is for attention weights and the backward pass; a better estimate
        would divide batches differently, and so change the last bits of every run.
        """
        layer = (34 * self.hidden + 6 * self.inner) * 2
        return self.layers * 3 * self.hidden * 4 + layer if checkpointing else self.layers * layer

    def kept(self, *, checkpointing: bool = False) -> int:
        """Elements per token that autograd saves for the backward pass, without attention weights.

        Counted for Llama, Qwen3 and Gemma 2 with the packed body. With activation checkpointing: the input, key and
        value of every layer, and everything in the layer being recomputed.
        """
        # Gate, up, activation and product; queries, keys and values, packed and as rows; norms, in float32 too.
        layer = 4 * self.inner + 3 * self.queries + 4 * self.keys + (2 + 3 * self.norms) * self.hidden
        layer += 3 * (self.queries + self.keys) if self.normed else 0
        layers = self.layers * (self.hidden + 2 * self.keys) + layer if checkpointing else self.layers * layer
        return layers + 4 * self.hidden  # the last norm

    def most_keys(self, prefix: int) -> int:
        """The most keys of a row after `prefix` tokens whose attention weights are saved (see `attention.LONG`)."""
        return int((prefix + math.isqrt(prefix * prefix + 4 * LONG)) // 2)

    def attention(self, keys: int, *, checkpointing: bool = False) -> int:
        """Attention weights saved for a token that attends to `keys` keys, in elements."""
        return self.heads * keys * (2 if self.capped else 1) * (1 if checkpointing else self.layers)

    def cached(self) -> int:
        """KV cache of a token, in elements."""
        return 2 * self.layers * self.keys

    def micro_tokens(self, *, checkpointing: bool = False, prefix: int = 0) -> int:
        """Tokens of a micro-batch that need about `ROOM`; fewer if a long shared prefix makes attention dominate."""
        more = self.most_keys(prefix) - self.most_keys(0)  # not included in `planned`
        needed = 2 * (self.kept(checkpointing=checkpointing) + self.attention(more, checkpointing=checkpointing))
        return max(_LEAST, ROOM // max(self.planned(checkpointing=checkpointing), needed))

    def rollout_tokens(self, itemsize: int) -> int:
        """Token limit of rows decoded together: their KV cache, and the copy that decoding writes to."""
        return max(_LEAST, ROOM // (2 * self.cached() * itemsize))


def sizes_of(model: Model, lora: LoraConfig | None = None) -> Sizes:
    """The sizes of a model, with or without weights; `lora`: adapters that it is yet to get."""
    network: Any = model.network
    config: Any = network.config.get_text_config()
    tensors = list(network.parameters())
    head = model.head.weight
    embedding = getattr(network.get_input_embeddings(), "weight", head)
    whole = sum(p.numel() for p in tensors)
    hidden, heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", None) or 1)
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    trained = sum(p.numel() for p in tensors if p.requires_grad) if lora is None else _adapters(model, lora)
    layers = int(config.num_hidden_layers)
    norms = [name for name, part in network.named_modules() if type(part).__name__.endswith("Norm")]
    own = [name for name in norms if name.endswith(("q_norm", "k_norm"))]
    return Sizes(
        all=whole,
        body=whole - head.numel() - (0 if embedding is head else embedding.numel()),
        trained=trained,
        layers=layers,
        hidden=hidden,
        inner=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        heads=heads,
        queries=heads * width,
        keys=int(getattr(config, "num_key_value_heads", None) or heads) * width,
        normed=bool(own),
        norms=max(2, (len(norms) - len(own)) // layers),
        capped=bool(getattr(config, "attn_logit_softcapping", None)),
    )


def _adapters(model: Model, lora: LoraConfig) -> int:
    """Number of adapter weights."""
    head = model.network.get_output_embeddings()
    layers = [
        part
        for name, part in model.network.named_modules()
        if isinstance(part, nn.Linear)
        and part is not head
        and (lora.targets == "all-linear" or name.rpartition(".")[2] in lora.targets)
    ]
    return sum(lora.r * (layer.in_features + layer.out_features) for layer in layers)
