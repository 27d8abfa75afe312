"""Utilities for the Hugging Face Hub and its libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gatespace.tasks.hub import hub_reachable as hub_reachable


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
