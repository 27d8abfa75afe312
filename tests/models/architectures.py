"""Networks of many architectures, small, with weights large enough for attention to matter; and what they compute,
found by running them over one whole row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from gatespace.models import Model

VOCABULARY = 1100  # more than the tokenizer of the tiny pair has
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

_MIXED = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 8, "sliding_window": 20, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 20, "layer_types": _MIXED},
    "Mistral": {"sliding_window": 20},
    "Cohere2": {"sliding_window": 20, "layer_types": _MIXED},
    # windows that stand in the mask only
    "Phimoe": {"sliding_window": 20, "num_local_experts": 4},
    "Qwen2Moe": {
        "sliding_window": 20,
        "use_sliding_window": True,
        "layer_types": _MIXED[::-1],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
"""Architectures with sliding windows and soft caps, and settings with which both are felt."""


def made(tokenizer: Any, kind: str, *, std: float = 0.3, dtype: torch.dtype = torch.float32, **settings: Any) -> Model:
    """A model of the architecture `kind`, e.g. ``Llama``; None among the settings leaves the default."""
    chosen = {name: value for name, value in (SMALL | settings).items() if value is not None}
    network = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**chosen))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std, generator=draw)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
    return Model(network.to(dtype).eval(), tokenizer, kind, "made here")


def some_ids(count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, 400, (count,), generator=draw).tolist()


def some_rows(lengths: Sequence[int], seed: int) -> list[list[int]]:
    return [some_ids(length, 1000 * seed + row) for row, length in enumerate(lengths)]


def alone(model: Model, row: Sequence[int]) -> Tensor:
    """(S, H) hidden states of one row, by the network's own forward, without padding and without a mask."""
    states: Tensor = model.body(input_ids=torch.tensor([list(row)]), use_cache=False).last_hidden_state[0]
    return states


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())
