"""A study's results as one file, without weights: packed, read safely, and joined with those of other machines."""

from __future__ import annotations

from pathlib import Path


def open_archive(path: Path) -> Path:
    """The folder that an archive of a study is unpacked into; it is removed when this process ends."""
    from gatespace.addons.archive.unpack import opened

    return opened(path)
