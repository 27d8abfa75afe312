"""verl's reward for a task of labels: 1 where the answer names the right one. It serves validation, not the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gatespace.tasks import parse_label
from gatespace.tasks.prompt import PREFILL


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any], **_: Any
) -> dict[str, float]:
    """The score, and whether a legal label was found at all. The prompt ends in the beginning of the answer."""
    found = parse_label(PREFILL + solution_str, list(extra_info["labels"]))
    return {"score": float(found == ground_truth), "parsed": float(found is not None)}
