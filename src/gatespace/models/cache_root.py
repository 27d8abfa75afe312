"""Where gatespace keeps what it has fetched or built, and how a folder appears there: whole or not at all."""

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
"""A file in every folder that gatespace has written. A folder without it is never replaced."""


def cache_root() -> Path:
    """$GATESPACE_CACHE, else the folder `gatespace` in the user's cache of this platform. It need not exist yet."""
    chosen = os.environ.get("GATESPACE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gatespace"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "gatespace" / "Cache"
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "gatespace"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` at the end, or vanishes if there is an error.

    An earlier folder of ours is replaced; one without our record is refused, for it would be lost.
    """
    _refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    fresh = folder.with_name(f".{folder.name}.new-{unique}")
    fresh.mkdir()
    try:
        yield fresh
        # safetensors writes files that only their owner can read; a folder is as readable as the umask has it.
        mode = fresh.stat().st_mode & 0o666
        for file in fresh.rglob("*"):
            if file.is_file():
                file.chmod(mode)
        _refuse_foreign(folder)
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
    """Remove what killed processes have left of `new_folder(folder)`. Only for those who hold the folder's lock."""
    for pattern in (f".{folder.name}.new-*", f".{folder.name}.old-*"):
        for left in folder.parent.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def write_record(folder: Path, entries: dict[str, Any]) -> None:
    """Mark a folder as ours, and say what is in it."""
    text = json.dumps({"written_by": "gatespace", **entries}, indent=2, sort_keys=True)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` wrote, or nothing."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _refuse_foreign(folder: Path) -> None:
    ours = folder.is_dir() and ((folder / RECORD).is_file() or not any(folder.iterdir()))
    if folder.exists() and not ours:
        raise UsageError(
            "a model is not written over what gatespace has not written itself",
            got=str(folder),
            why=f"it exists, is not empty and has no {RECORD}",
            instead="name a new folder",
        )
