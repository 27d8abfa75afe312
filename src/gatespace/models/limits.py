"""How far packed passes compute what a network computes: beyond, its attention or its positions depend on more than
they know of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gatespace.errors import UsageError

_HARMLESS = {"sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions"}


def check_attention(module: Any, tokens: int, mask: object, arguments: Mapping[str, Any]) -> None:
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


def check_positions(config: Any, tokens: int) -> None:
    """Raise if the code of a position depends on the length of the text: what is kept would then be out of date."""
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
