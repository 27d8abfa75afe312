"""The small study of the core's tests, for the cluster's."""

from __future__ import annotations

from pathlib import Path

from tests.study.conftest import cli_run, own_cache, shared_cache

__all__ = ["cli_run", "filled", "own_cache", "shared_cache"]


def filled(folder: Path, **files: str) -> Path:
    """A folder with files; ``__`` in a name is a ``/``."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
