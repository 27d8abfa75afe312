"""Whether the Hugging Face Hub can be reached, found out in seconds: its own client tries again for half a minute."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from gatespace.errors import missing_extra

TIMEOUT = 3.0
"""Seconds after which the Hub counts as out of reach."""


def hub_reachable() -> bool:
    """Whether the Hub answers. False without asking where the user has set HF_HUB_OFFLINE."""
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise missing_extra("loading a model", module="huggingface_hub", extra="train") from error
    return not constants.is_offline_mode() and _answers(constants.ENDPOINT)


@cache
def _answers(address: str) -> bool:
    try:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "gatespace"})
        urllib.request.urlopen(request, timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return True  # an answer, if not the one that was asked for
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing its bars, which would stand in the middle of ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """An error of a library in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
