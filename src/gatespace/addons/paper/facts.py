"""The paper's published figures, each with where it stands; what follows from them; and what they leave open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any


@cache
def facts() -> Mapping[str, Any]:
    """All of them. `_about` explains units and provenance; `src` names a label of the paper, e.g. ``tab:3seed``."""
    text = resources.files("gatespace.evidence").joinpath("data", "paper_facts.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def hundredths(share: float) -> int:
    """A printed accuracy of four digits as a whole number of hundredths of a percentage point."""
    return round(share * 10_000)


def seed_accuracies(task: str, point: str) -> dict[int, int]:
    """Seed → printed accuracy in hundredths of a pp, in the order of the paper's columns."""
    return {int(seed): hundredths(acc) for seed, acc in facts()["per_seed_accuracy"][task][point]["acc"].items()}


def agrees(printed: float, value: float, decimals: int = 2) -> bool:
    """Whether `value` rounds to what is printed. A half may be rounded either way."""
    return abs(value - printed) <= 0.5 * float(f"1e-{decimals}") + 1e-9
