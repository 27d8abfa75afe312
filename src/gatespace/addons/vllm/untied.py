"""A model folder whose head has a weight of its own.

Many small models share one matrix between embedding and head, and their folders have it once. An engine that takes new
weights from such a folder while it runs may renew the one and keep an old copy of the other without a word, as vLLM's
CPU build does. A folder that has both leaves nothing to be derived.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from gatespace.errors import UsageError
from gatespace.models.cache_root import new_folder, write_record
from gatespace.models.hub import without_progress_bars
from gatespace.models.load import Model
from gatespace.models.lora import merged


def save_untied(model: Model, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a normal model folder with an explicit head, whole or not at all. `model` stays as it is.

    Args:
        model: Any model; adapters are merged into the copy.
        folder: Replaced if gatespace has written it before.
        dtype: Precision of the written weights; None: the network's.
    """
    whole = merged(model) if hasattr(model.network, "merge_and_unload") else model
    network: Any = whole.network
    config = copy.deepcopy(network.config)
    config.tie_word_embeddings = False
    if config.get_text_config() is not config:
        config.get_text_config().tie_word_embeddings = False
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    if dtype is not None:
        state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    name = _head_name(network)
    state[name] = state[name].clone()  # no longer the storage of the embedding
    with torch.device("meta"):  # a shell: the weights are those of `network`
        twin: Any = type(network)(config)
    missing, unexpected = twin.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        raise UsageError(
            "this architecture cannot be written with a head of its own", got=f"{type(network).__name__}: {missing[:3]}"
        )
    twin.generation_config = network.generation_config
    with new_folder(folder) as fresh, without_progress_bars():
        twin.save_pretrained(fresh)
        whole.tokenizer.save_pretrained(fresh)
        write_record(fresh, {"name": model.name, "source": model.source})


def _head_name(network: Any) -> str:
    head = network.get_output_embeddings()
    name: str = next(name for name, module in network.named_modules() if module is head)
    return f"{name}.weight"
