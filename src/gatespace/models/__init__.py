"""Models: loading and saving, the pair check, models without the Hub, and adapters."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.models.load import Model as Model
    from gatespace.models.load import load_model as load_model
    from gatespace.models.lora import merged as merged
    from gatespace.models.lora import with_lora as with_lora
    from gatespace.models.packaged import packaged_folder as packaged_folder
    from gatespace.models.pair import PairReport as PairReport
    from gatespace.models.pair import check_pair as check_pair
    from gatespace.models.tiny import TinyPair as TinyPair
    from gatespace.models.tiny import build_tiny as build_tiny

# Imported lazily: code that only needs the cache folder does not wait for torch.
_NAMES = {
    "load": ("Model", "load_model"),
    "lora": ("merged", "with_lora"),
    "packaged": ("packaged_folder",),
    "pair": ("PairReport", "check_pair"),
    "tiny": ("TinyPair", "build_tiny"),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"gatespace.models.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
