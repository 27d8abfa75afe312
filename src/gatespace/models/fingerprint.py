"""One hash for all that a network computes with: what a stored score or a finished run is filed under."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

# Entries of a configuration that cannot change what a network computes from given weights.
_WITHOUT_EFFECT = re.compile(
    r"_.*|transformers_version|architectures|(torch_)?dtype|use_cache|\w+_token_id|id2label|label2id|initializer_range"
    r"|output_attentions|output_hidden_states|return_dict"
)


def network_fingerprint(network: Any) -> str:
    """SHA-256 over the names, types, shapes and bytes of all weights and over the configuration that has an effect."""
    config = json.dumps(_with_effect(network.config.to_dict()), sort_keys=True, default=str)
    digest = hashlib.sha256(b"gatespace model 1\n" + config.encode() + b"\n")
    weights = sorted(network.state_dict().items())
    with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
        for line in pool.map(_line, weights):
            digest.update(line)
    return digest.hexdigest()


def network_state(network: Any) -> list[tuple[str, int, int]]:
    """A list that differs as soon as a weight was replaced or changed in place, as by an optimizer; cheap to make."""
    return [
        (name, weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for name, weight in network.state_dict().items()
    ]


def _with_effect(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _with_effect(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (isinstance(key, str) and _WITHOUT_EFFECT.fullmatch(key))
    }


def _line(item: tuple[str, Tensor]) -> bytes:
    name, weight = item
    raw: Any = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{name} {weight.dtype} {list(weight.shape)} {hashlib.sha256(raw).hexdigest()}\n".encode()
