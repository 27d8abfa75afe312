"""A study's results as one file without weights: pack, read safely, and merge with those of other machines."""

from __future__ import annotations

from pathlib import Path


def open_archive(path: Path) -> Path:
    """Unpack a study's archive into a temporary folder, removed when this process ends."""
    from gatespace.addons.archive.unpack import opened

    return opened(path)
