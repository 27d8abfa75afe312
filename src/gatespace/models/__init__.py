"""Models: loading and saving, the pair check, models without the Hub, and adapters."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.models.load import Model, load_model
    from gatespace.models.lora import merged, with_lora
    from gatespace.models.packaged import packaged_folder
    from gatespace.models.pair import PairReport, check_pair
    from gatespace.models.tiny import TinyPair, build_tiny

__all__ = [
    "Model",
    "PairReport",
    "TinyPair",
    "build_tiny",
    "check_pair",
    "load_model",
    "merged",
    "packaged_folder",
    "with_lora",
]

# Imported lazily: code that only needs the cache folder does not wait for torch.
_HOMES = {
    "Model": "load",
    "PairReport": "pair",
    "TinyPair": "tiny",
    "build_tiny": "tiny",
    "check_pair": "pair",
    "load_model": "load",
    "merged": "lora",
    "packaged_folder": "packaged",
    "with_lora": "lora",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"gatespace.models.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
