"""The cache of what gatespace fetched or built, and atomic creation of folders in it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gatespace.errors import UsageError

RECORD = "gatespace.json"
"""A file in every folder written by gatespace. A folder without it is never replaced."""


def cache_root() -> Path:
    """$GATESPACE_CACHE, else `gatespace` in the platform's user cache folder. It need not exist yet."""
    chosen = os.environ.get("GATESPACE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gatespace"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "gatespace" / "Cache"
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification ignores relative paths.
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "gatespace"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` on exit, or is removed on error.

    An earlier folder written by gatespace is replaced; one without its record is refused, not overwritten.
    """
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    fresh = folder.with_name(f".{folder.name}.new-{unique}")
    fresh.mkdir()
    try:
        yield fresh
        # safetensors writes files that only their owner can read; the folder's mode follows the umask.
        mode = fresh.stat().st_mode & 0o666
        for file in fresh.rglob("*"):
            if file.is_file():
                file.chmod(mode)
        refuse_foreign(folder)
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old-{unique}")
            folder.rename(old)
            fresh.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of `new_folder(folder)`. The caller must hold the folder's lock."""
    for pattern in (f".{folder.name}.new-*", f".{folder.name}.old-*"):
        for left in folder.parent.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def write_record(folder: Path, entries: dict[str, Any]) -> None:
    """Mark a folder as ours, and record its contents."""
    text = json.dumps({"written_by": "gatespace", **entries}, indent=2, sort_keys=True)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` wrote, or an empty dict."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def refuse_foreign(folder: Path) -> None:
    """Raise if `folder` exists, is not empty and was not written by gatespace."""
    ours = folder.is_dir() and ((folder / RECORD).is_file() or not any(folder.iterdir()))
    if folder.exists() and not ours:
        raise UsageError(
            "refusing to overwrite a folder that gatespace did not create",
            got=str(folder),
            why=f"it is not empty and has no {RECORD}",
            instead="name a new folder",
        )
