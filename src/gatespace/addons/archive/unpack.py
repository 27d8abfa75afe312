"""Unpack an archive from an untrusted source.

The manifest comes first and is complete: every name is checked before anything is written, and the rest must be exactly
those regular files in that order with those sizes and hashes. So no link, device, name outside the folder or oversized
file is ever written, and memory is bounded. Nothing is imported or unpickled. An archive has no file times: all files
get the same one, so a run's duration is unknown.
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
"""Total size of unpacked files."""
MOST_MANIFEST = 64 << 20
_MOST_MEMORY = 128 << 20
"""For the decompressor; archives of `pack` need 9 MB."""
_CHUNK = 1 << 20
_BLOCK = tarfile.BLOCKSIZE

_opened: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Hash of an archive → folder it is unpacked in, until this process ends."""


class Entry(NamedTuple):
    """A file in an archive."""

    path: str
    bytes: int
    sha256: str


def opened(path: Path) -> Path:
    """Unpack an archive, once per process and content, and return the folder."""
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
    """Unpack an archive into a new folder; raises, leaving no folder, unless `pack` could have written it."""
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
    """The size of the next file, which must be a regular file with this name."""
    # `TarFile` would follow other kinds of headers and allocate whatever size they announce.
    info = tarfile.TarInfo.frombuf(source.read(_BLOCK), "utf-8", "surrogateescape")
    if info.type != tarfile.REGTYPE or info.name != name or info.size < 0:
        raise _bad(path, f"{info.name!r} is in the place of the regular file {name!r}")
    return info.size


def _entries(path: Path, data: bytes) -> list[Entry]:
    """The files in the manifest; raises if it deviates from what `pack` writes."""
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
        and not {"", ".", ".."} & {*name.split("/")}  # an absolute name starts with an empty part
    )


class _Xz:
    """Decompresses exactly as many bytes as requested."""

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
