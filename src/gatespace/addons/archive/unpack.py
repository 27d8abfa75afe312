"""Unpack an archive from an untrusted source, with `tarfile` and its filter for data.

What an archive can take is bounded before anything is written. Only plain ustar headers of regular files are read, so a
name has at most 256 characters, and no link, device or extended header exists. The files must be those of the manifest,
which comes first, in its order and with its sizes. Nothing is imported or unpickled. An archive has no file times: all
files get the same one, so a run's duration is unknown.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, Any, cast

from gatespace.addons.archive.pack import FORMAT, MANIFEST
from gatespace.errors import RunError, UsageError
from gatespace.runs import ARCHIVE, StudyFolder

MOST_BYTES = 4 << 30
"""Total size of unpacked files."""
MOST_FILES = 100_000
MOST_MANIFEST = 16 << 20
_MOST_MEMORY = 128 << 20
"""For the decompressor; archives of `pack` need 9 MB."""

_opened: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Hash of an archive → folder it is unpacked in, until this process ends."""


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
    """Unpack an archive into a new folder; raises, leaving no folder, if it is damaged, too large or no study."""
    if not hasattr(tarfile, "data_filter"):
        raise RunError(
            "this Python cannot unpack archives safely",
            why="its tarfile has no filter for untrusted files",
            instead="Python 3.11.4 or later",
        )
    folder.mkdir(parents=True)
    try:
        with path.open("rb") as file, tarfile.open(fileobj=cast("Any", _Xz(file)), mode="r|", tarinfo=_Member) as tar:
            _extract(tar, folder)
        if not StudyFolder(folder).exists:
            raise tarfile.TarError("it has no study file")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, lzma.LZMAError | tarfile.TarError | EOFError | NotADirectoryError | IsADirectoryError):
            raise UsageError(
                "this is not an archive of a study, or a damaged one",
                got=str(path),
                why=str(error),
                instead="a file that `gatespace pack` has written, or the folder of a study",
            ) from None
        raise


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    manifest = tar.next()
    if manifest is None or manifest.name != MANIFEST or manifest.size > MOST_MANIFEST:
        raise tarfile.TarError(f"it does not begin with a {MANIFEST} of at most {MOST_MANIFEST >> 20} MiB")
    content = tar.extractfile(manifest)
    assert content is not None  # a regular file
    try:
        record = json.loads(content.read())
        form, files = record["format"], [(entry["path"], entry["bytes"]) for entry in record["files"]]
        total = sum(abs(size) for _, size in files)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise tarfile.TarError(f"its {MANIFEST} is damaged: {type(error).__name__}") from None
    if form != FORMAT:
        raise tarfile.TarError(f"its format is {form!r:.50}, and this release reads {FORMAT!r}")
    if len(files) > MOST_FILES or not total <= MOST_BYTES:  # nan too
        raise tarfile.TarError(f"it has more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB")
    if total > (free := shutil.disk_usage(folder).free):
        raise RunError(
            "there is too little disk space for this archive",
            got=f"{free / 1e6:.0f} MB free in {folder.parent}, and it has {total / 1e6:.0f} MB",
            instead="free some, or set TMPDIR to a folder of a larger disk",
        )
    now = int(time.time())
    for name, size in files:
        member = tar.next()
        if member is None or (member.name, member.size) != (name, size):
            raise tarfile.TarError(f"its files are not those of its {MANIFEST}: {str(name)!r:.300}")
        member.mtime = now
        tar.extract(member, folder, filter="data")
    if tar.next() is not None:
        raise tarfile.TarError(f"it has files that its {MANIFEST} does not name")


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Read a header; only of a regular file. `TarFile` would allocate whatever size another kind announces."""
        member = super().frombuf(buf, encoding, errors)
        if member.type != tarfile.REGTYPE or member.size < 0:
            raise tarfile.TarError(f"{member.name!r} is not a regular file")
        return member


class _Xz:
    """Decompresses as many bytes as requested, with bounded memory, which `lzma.open` has no option for."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY)

    def read(self, size: int = -1) -> bytes:
        while not self._xz.eof:
            data = self._file.read(1 << 16) if self._xz.needs_input else b""
            if self._xz.needs_input and not data:
                raise EOFError("it ends too early")
            if part := self._xz.decompress(data, max_length=size):
                return part
        return b""
