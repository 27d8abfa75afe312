"""Models: loading and saving, the pair check, models that need no Hub, and adapters."""

from __future__ import annotations

from gatespace.models.load import Model, load_model
from gatespace.models.lora import merged, with_lora
from gatespace.models.pair import PairReport, check_pair
from gatespace.models.smollm2 import smollm2_folder
from gatespace.models.tiny import TinyPair, build_tiny

__all__ = [
    "Model",
    "PairReport",
    "TinyPair",
    "build_tiny",
    "check_pair",
    "load_model",
    "merged",
    "smollm2_folder",
    "with_lora",
]
