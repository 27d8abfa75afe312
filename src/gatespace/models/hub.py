"""The Hugging Face Hub and its libraries, where models are loaded from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gatespace.tasks.hub import hub_reachable as hub_reachable


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
