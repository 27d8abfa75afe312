"""`GATESPACE_CHECK`: run without some of the exact speed-ups, so that tests and benchmarks can compare both ways.

It is not a setting and not part of a run's identity: it is set only to compare numbers.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from gatespace.errors import unknown_name

VARIABLE = "GATESPACE_CHECK"


class Checking(NamedTuple):
    """What `GATESPACE_CHECK` says; the defaults are those of every real run."""

    packed: bool | None = None
    """Networks run over packed tokens; None: where the architecture allows it."""
    share_prefix: bool = True
    """What all prompts have in common is computed once per batch."""
    share_prompt: bool = True
    """A prompt is computed once for all of its responses, and equal responses once."""
    reuse_rollout: bool = True
    """The update goes back through the rollout's own pass over the prompts."""
    fused: bool = True
    """The loss is computed from hidden states in chunks."""


_WORDS = {
    "packed": ("packed", True),
    "plain": ("packed", False),
    "no-prefix": ("share_prefix", False),
    "no-prompt": ("share_prompt", False),
    "no-reuse": ("reuse_rollout", False),
    "unfused": ("fused", False),
}


def checking() -> Checking:
    """Read the variable: words separated by commas, e.g. ``plain,unfused``."""
    words = [word for word in os.environ.get(VARIABLE, "").split(",") if word]
    for word in words:
        if word not in _WORDS:
            raise unknown_name(f"word of {VARIABLE}", word, _WORDS)
    return Checking()._replace(**dict(_WORDS[word] for word in words))
