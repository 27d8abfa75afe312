"""Utilities for the Hugging Face Hub and its libraries."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from gatespace.errors import missing_extra

TIMEOUT = 3.0
"""Seconds after which the Hub counts as unreachable. Its own client retries for half a minute."""


def hub_reachable() -> bool:
    """Whether the Hub responds. False without a request if HF_HUB_OFFLINE is set."""
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
        return True  # a response, even if an error
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers, which would mix with ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """A library's error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
