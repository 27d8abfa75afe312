"""Students that train low-rank adapters (LoRA, through PEFT) instead of their own weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gatespace.errors import UsageError, missing_extra
from gatespace.models.load import Model
from gatespace.seeding import stream

ALL_LINEAR = "all-linear"


def with_lora(
    model: Model,
    *,
    r: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    seed: int = 0,
) -> Model:
    """The model with adapters, which alone are trainable. Initially they change nothing.

    The layers of `model` itself are wrapped, so it must not be used any more. `dropout` draws from torch's global
    generator, and only in training mode.

    Args:
        model: Any model without adapters.
        r: Rank of the adapters.
        alpha: The adapters' output is multiplied by alpha / r.
        dropout: Dropout rate of an adapter's inputs in training.
        targets: Names of the layers, e.g. ``["q_proj", "v_proj"]``, or all linear layers but the head.
        seed: Of the adapters' initial values.
    """
    peft = _peft()
    if hasattr(model.network, "peft_config"):
        raise UsageError("the model has adapters already", got=model.name, instead="merged(model) first")
    if r < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise UsageError(
            "LoRA has r ≥ 1, alpha > 0 and 0 ≤ dropout < 1", got=f"r={r}, alpha={alpha}, dropout={dropout}"
        )
    head = model.network.get_output_embeddings()
    names = targets if targets == ALL_LINEAR else [targets] if isinstance(targets, str) else list(targets)
    config = peft.LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, task_type="CAUSAL_LM")
    try:
        network = peft.get_peft_model(model.network, config)
    except ValueError as error:
        linear = {
            name.rpartition(".")[2] for name, part in model.network.named_modules() if isinstance(part, nn.Linear)
        }
        raise UsageError(
            "no layer for LoRA",
            got=f"targets {targets!r}",
            why=str(error).splitlines()[0],
            instead=f"{ALL_LINEAR}, or some of: {', '.join(sorted(linear))}",
        ) from error
    if network.get_base_model().get_output_embeddings() is not head:
        raise UsageError(
            "the head cannot have an adapter",
            got=f"targets {targets!r}",
            why="losses are made from hidden states and the rows of the head, without the whole logits",
        )
    _initialise(network, seed)
    return Model(network.eval(), model.tokenizer, model.name, model.source)


def merged(model: Model) -> Model:
    """A copy of the model with its adapters merged into the weights. `model` is unchanged."""
    if not hasattr(model.network, "merge_and_unload"):
        raise UsageError("the model has no adapters", got=model.name)
    if getattr(model.network, "is_quantized", False):
        raise UsageError(
            "the adapters of a quantised model are not merged",
            got=model.name,
            why="quantised weights would round most of them away",
            instead="save(), which writes the adapters; or the student without quantisation",
        )
    wrapped: Any = copy.deepcopy(model.network)
    network = wrapped.merge_and_unload(safe_merge=True)
    for parameter in network.parameters():
        parameter.grad = None
    return Model(network.requires_grad_(True).eval(), model.tokenizer, model.name, model.source)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise missing_extra("a LoRA student", module="peft", extra="lora") from error
    return peft


@torch.no_grad()
def _initialise(network: nn.Module, seed: int) -> None:
    """PEFT's own initialisation (A uniform, B zero), drawn from named streams instead of the global one."""
    for name, parameter in network.named_parameters():
        if ".lora_A." in name:
            draw = torch.Generator().manual_seed(stream(seed, "models", "lora", name) % 2**63)
            values = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=draw)
            parameter.copy_(values)
