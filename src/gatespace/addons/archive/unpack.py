"""Read an archive that may come from anywhere.

The manifest comes first and says all: every name is checked before anything is written, and what follows has to be
those regular files in that order with those sizes and hashes. So no link, device, name outside of the folder or file
larger than announced is ever written, and memory is bounded. Nothing is imported or unpickled. An archive has no times:
all files get one, by which a run's duration is not known.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

from gatespace.addons.archive.pack import FORMAT, MANIFEST
from gatespace.errors import GatespaceError, UsageError
from gatespace.runs import ARCHIVE, StudyFolder

MOST_FILES = 200_000
MOST_BYTES = 4 << 30
"""Of all files together, unpacked."""
MOST_MANIFEST = 64 << 20
_MOST_MEMORY = 128 << 20
"""Of the decompressor; what `pack` writes needs 9 MB."""
_CHUNK = 1 << 20
_BLOCK = tarfile.BLOCKSIZE

_opened: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Hash of an archive → where it is unpacked, until this process ends."""


class Entry(NamedTuple):
    """A file of an archive."""

    path: str
    bytes: int
    sha256: str


def opened(path: Path) -> Path:
    """The folder that an archive is unpacked into, once per process and content."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = path.name.removesuffix(ARCHIVE) or "study"
    if digest not in _opened:
        place = tempfile.TemporaryDirectory(prefix="gatespace-")
        try:
            unpack(path, Path(place.name) / name)
        except BaseException:
            place.cleanup()
            raise
        _opened[digest] = place
    return next(Path(_opened[digest].name).iterdir())


def unpack(path: Path, folder: Path) -> None:
    """Unpack an archive into a new folder; an error, and no folder, where it is not one that `pack` could write."""
    folder.mkdir(parents=True)
    try:
        _unpack(path, folder)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, lzma.LZMAError | tarfile.HeaderError | EOFError):
            raise _bad(path, str(error)) from None
        raise


def _unpack(path: Path, folder: Path) -> None:
    with path.open("rb") as file:
        source, now = _Xz(file), time.time()
        size = _header(path, source, MANIFEST)
        if size > MOST_MANIFEST:
            raise _bad(path, f"its {MANIFEST} has {size} bytes, more than {MOST_MANIFEST}")
        entries = _entries(path, source.read(size))
        source.read(-size % _BLOCK)
        for entry in entries:
            if _header(path, source, entry.path) != entry.bytes:
                raise _bad(path, f"{entry.path} has another size than its {MANIFEST} says")
            place, digest = folder / entry.path, hashlib.sha256()
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as target:
                for start in range(0, entry.bytes, _CHUNK):
                    data = source.read(min(_CHUNK, entry.bytes - start))
                    digest.update(data)
                    target.write(data)
            os.utime(place, (now, now))
            source.read(-entry.bytes % _BLOCK)
            if digest.hexdigest() != entry.sha256:
                raise _bad(path, f"{entry.path} has another hash than its {MANIFEST} says")
        if any(source.read(_BLOCK)):
            raise _bad(path, f"it has files that its {MANIFEST} does not name")
    known = {one.relative_to(folder).as_posix() for one in StudyFolder(folder).records()}
    if extra := sorted({entry.path for entry in entries} - known):
        raise _bad(path, f"{extra[0]} is not a record of a study")
    if not StudyFolder(folder).exists:
        raise _bad(path, "it has no study file")


def _header(path: Path, source: _Xz, name: str) -> int:
    """The size of the next file, which has to be a regular one of this name."""
    # Not by `TarFile`, which would follow headers of other kinds and hold whatever size they announce in memory.
    info = tarfile.TarInfo.frombuf(source.read(_BLOCK), "utf-8", "surrogateescape")
    if info.type != tarfile.REGTYPE or info.name != name or info.size < 0:
        raise _bad(path, f"{info.name!r} is in the place of the regular file {name!r}")
    return info.size


def _entries(path: Path, data: bytes) -> list[Entry]:
    """What the manifest names; an error where anything about it is not as `pack` writes it."""
    try:
        found: Any = json.loads(data)
        form = found["format"]
        if form != FORMAT:
            raise _bad(path, f"its format is {form!r}, and this release reads {FORMAT!r}")
        entries = [Entry(**one) for one in found["files"]]
        faulty = next((entry.path for entry in entries if not _sound(entry)), None)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, GatespaceError):
            raise
        raise _bad(path, f"its {MANIFEST} is damaged: {error}") from None
    if faulty is not None:
        raise _bad(path, f"its {MANIFEST} names {faulty!r}, which no study has")
    if len(entries) > MOST_FILES or sum(entry.bytes for entry in entries) > MOST_BYTES:
        raise _bad(path, f"it has more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB")
    names = {entry.path for entry in entries}
    above = {str(parent) for name in names for parent in Path(name).parents}
    if len(names) < len(entries) or names & above:
        raise _bad(path, f"its {MANIFEST} names a file twice, or as a folder")
    return entries


def _sound(entry: Entry) -> bool:
    name = entry.path
    return (
        isinstance(name, str)
        and isinstance(entry.bytes, int)
        and isinstance(entry.sha256, str)
        and entry.bytes >= 0
        and name.isprintable()
        and "\\" not in name
        and not {"", ".", ".."} & {*name.split("/")}  # an absolute name begins with an empty part
    )


class _Xz:
    """Decompresses exactly as much as is asked for."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY)

    def read(self, size: int) -> bytes:
        parts = []
        while size:
            data = self._file.read(_CHUNK) if self._xz.needs_input else b""
            if self._xz.eof or (self._xz.needs_input and not data):
                raise EOFError("it ends too early")
            parts.append(self._xz.decompress(data, max_length=size))
            size -= len(parts[-1])
        return b"".join(parts)


def _bad(path: Path, why: str) -> UsageError:
    return UsageError(
        "this is not an archive of a study, or a damaged one",
        got=str(path),
        why=why,
        instead="a file that `gatespace pack` has written, or the folder of a study",
    )
