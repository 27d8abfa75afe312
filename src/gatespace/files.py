"""Crash-safe files of a run folder: a run can resume after a kill at any moment.

Whole files are replaced by an atomic rename. Logs grow line by line; what a killed run wrote past its last checkpoint
is truncated on resume, so that the final log has the same bytes as that of a run that was never killed. A checkpoint
records length and hash of the logs up to it. One process at a time locks the folder. No torch here.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from gatespace.errors import RunError, UsageError

__all__ = [
    "Closing",
    "Folder",
    "JsonLines",
    "Mark",
    "atomic_write",
    "claim",
    "encode",
    "is_claimed",
    "read",
    "sync_folder",
]

_LOCK = ".lock"
_CHUNK = 1 << 20
_MOMENTS = 20
"""Attempts to get the lock: `is_claimed` in another process may hold it for a moment."""


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` atomically: readers see either all of the old or all of the new."""
    data = content.encode() if isinstance(content, str) else content
    path = Path(path)
    # One name per target: leftovers of a kill are overwritten by the next write.
    beside = path.with_name(f".{path.name}.tmp")
    with _io(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.unlink(missing_ok=True)
            with beside.open("xb") as file:  # a link of this name is not followed
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def claim(folder: Path) -> Iterator[int]:
    """Lock a run folder, creating it if needed; an error if another process holds it.

    The lock ends with the process, however that ends. Yields the lock's file descriptor.
    """
    folder = Path(folder)
    with _io(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for moment in range(_MOMENTS):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    break  # a file system without locks: proceed without one
                if moment == _MOMENTS - 1:
                    raise UsageError(
                        "another process is running in this run folder",
                        got=folder,
                        why="two runs in one folder would mix their records",
                        instead="wait for it, or choose another output folder",
                    ) from None
                time.sleep(0.01)
        yield handle
    finally:
        os.close(handle)


def is_claimed(folder: Path) -> bool:
    """Whether a process currently holds `folder` by `claim`."""
    try:
        handle = os.open(Path(folder) / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(handle)
    return False


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one JSON line: keys sorted, floats by repr, so that equal records have equal bytes.

    Non-finite numbers become null, which every JSON reader accepts.

    Examples:
        >>> encode({"step": 1, "loss": float("nan"), "lam": 0.1})
        b'{"lam": 0.1, "loss": null, "step": 1}\\n'
    """
    try:
        text = json.dumps(_finite(record), sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError("a record holds something that JSON cannot represent", got=error) from None
    # A broken tokenizer can emit a lone surrogate, which has no UTF-8 form; it is escaped instead.
    return text.encode("utf-8", "backslashreplace") + b"\n"


class Folder:
    """The folder of a run or study. Reading changes nothing; `claim` it to write."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()
        self._claim: int | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def claim(self) -> Iterator[Self]:
        """Lock the folder, creating it if needed; an error if another process holds it."""
        with claim(self.path) as self._claim:
            try:
                yield self
            finally:
                self._claim = None

    def check_claim(self) -> None:
        """Raise if the claimed folder is gone: a write would create half a folder."""
        if self._claim is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path / _LOCK), os.fstat(self._claim)):
                return
        raise RunError(
            "the output folder was deleted, moved or replaced while this was writing to it",
            got=self.path,
            why="what was written is no longer there",
            instead="the same command starts again, from the beginning",
        )


class Closing:
    """Base class of context managers that call `close` on exit."""

    def close(self) -> None:
        """Release resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Mark(NamedTuple):
    """A position in a log, and the hash of everything before it."""

    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class JsonLines(Closing):
    """A log: one JSON object with an integer `step` per line.

    Every record is a single write to the operating system, so a kill loses at most the line being written.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._handle: int | None = None
        self._size, self._hash = 0, hashlib.sha256()
        """Size and hash of everything before the next record."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        _step(record, self.path)
        line = memoryview(encode(record))
        self._size += len(line)
        self._hash.update(line)
        with _io(self.path):
            if self._handle is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._handle = os.open(self.path, flags, 0o644)
            while line:
                line = line[os.write(self._handle, line) :]

    @property
    def mark(self) -> Mark:
        """The end of the log, for a checkpoint."""
        return Mark(self._size, self._hash.hexdigest())

    def cut(self, mark: Mark) -> None:
        """Truncate the log at `mark`; call before the first `append` of a process.

        An error if the content before the mark has changed.
        """
        self.close()
        self._size, self._hash = mark.bytes, hashlib.sha256()
        with _io(self.path):
            there = self.path.stat().st_size if self.path.exists() else None
            if mark.bytes and there is not None:
                with self.path.open("rb") as file:
                    for start in range(0, mark.bytes, _CHUNK):
                        self._hash.update(file.read(min(_CHUNK, mark.bytes - start)))
            if self.mark != mark:
                changed = "it is missing" if there is None else "lines were changed, added or removed"
                raise RunError(
                    f"{self.path.name} is not what the run wrote before its checkpoint",
                    got=f"{self.path}: {changed}",
                    why="a checkpoint knows length and hash of the records before it, and the run's would be others",
                    instead=f"the file as it was; or start again: remove {self.path.parent}, or choose another output",
                )
            if there is not None and there > mark.bytes:
                os.truncate(self.path, mark.bytes)

    def sync(self) -> None:
        """Make appended records durable (fsync); call before a checkpoint that relies on them."""
        if self._handle is not None:
            with _io(self.path):
                os.fsync(self._handle)

    def close(self) -> None:
        """Close the file; a later `append` reopens it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, without an incomplete last line; empty if there is no file."""
    return [record for _, record in _records(Path(path))]


# ---------------------------------------------------------------------------------------------------- helpers


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Complete lines and their records; a line without its newline is incomplete."""
    with _io(path):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if not isinstance(record, dict):
                    raise RunError(
                        f"line {number} of {path.name} is damaged",
                        got=path,
                        why="lines are written whole, so something else has changed the file",
                        instead="remove the run folder and start again",
                    )
                yield line, record


def _step(record: Mapping[str, Any], path: Path) -> int:
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        raise UsageError(f"a record of {path.name} needs a whole number `step`", got=repr(step))
    return step


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


@contextmanager
def _io(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be read or written", got=error.strerror or error) from error
