"""Teacher scores on disk, computed once: later steps, epochs, seeds and runs look them up.

A score depends on the teacher, on how it is computed and on the tokens before it; its key is a hash of exactly these.
An entry has a checksum over key and payload, so that neither a damaged payload nor an intact one under another key is
served as a score.

The cache is one SQLite file shared by several processes. It only saves time, so problems with it only cost time: a
damaged entry is a miss; at the first error of SQLite this process says so and computes all scores itself from then on,
and a damaged file is deleted for the next process. The file has a rollback journal instead of a write-ahead log because
the index of such a log is memory-mapped: the kernel kills (SIGBUS) a process that touches it after truncation. Here
every access is a `read` or a `write`, whose failure can be handled.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gatespace.errors import UsageError
from gatespace.files import Closing

__all__ = ["FILE", "CacheStats", "ScoreCache", "prefix_keys"]

FILE = "gatespace-scores-2.sqlite"
"""The name has the format version, so that no version reads another's file."""
_PERSON_KEY = b"gatespace.key.1"  # at most 16 bytes; changing it loses every stored score
_PERSON_ENTRY = b"gatespace.sum.2"
_SELECT = 128  # keys per query; fixed, so that SQLite compiles it once
_PATIENCE = 10.0  # seconds that a call waits for other processes
_QUERY = f"SELECT key, checksum, payload FROM scores WHERE key IN ({', '.join('?' * _SELECT)})"
_INSERT = "INSERT OR IGNORE INTO scores (key, checksum, payload) VALUES (?, ?, ?)"
# Ids ascend with time. Two subqueries, because SQLite answers a single min or max from an index and scans for both.
_DELETE_OLDEST = """DELETE FROM scores WHERE id <= (SELECT min(id) FROM scores)
    + ((SELECT max(id) FROM scores) - (SELECT min(id) FROM scores)) / 8"""
# Pages hold several hidden states of 1 to 4 KiB. synchronous=OFF: no fsync. A killed process loses nothing; after a
# power failure the file may be damaged, which is detected like any other damage.
_PRAGMAS = ("page_size=16384", "journal_mode=TRUNCATE", "synchronous=OFF", "mmap_size=0", "cell_size_check=ON")
_TABLE = """CREATE TABLE IF NOT EXISTS scores
    (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, checksum BLOB, payload BLOB)"""
_ERRORS = (sqlite3.Error, OSError, UnicodeError)  # UnicodeError: a message that quotes damaged bytes
# Errors of SQLite where the file may be intact but other processes or the system refuse; all others mean damage.
_REFUSALS = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)

T = TypeVar("T")


@dataclass
class CacheStats:
    """What this process did with a cache since it opened it."""

    hits: int = 0
    misses: int = 0
    """Keys that were not found; a damaged entry is a miss too."""
    damaged: int = 0
    """Damaged entries, each counted once. None was served."""
    written: int = 0
    evicted: int = 0


class ScoreCache(Closing):
    """Teacher scores on disk, shared by processes, on a local file system. Not to be used across a fork.

    Args:
        folder: Created if missing; other files in it are left alone.
        max_mb: Size limit of the file, in MiB; when it is exceeded, the oldest entries are evicted. Each process that
            shares a cache applies its own limit.
        report: Called with a message when something is wrong with the cache.
    """

    def __init__(self, folder: Path, *, max_mb: int = 4096, report: Callable[[str], None] | None = None) -> None:
        if isinstance(max_mb, bool) or not isinstance(max_mb, int) or max_mb < 1:
            raise UsageError("the size limit of a score cache is a whole number of MiB, at least 1", got=repr(max_mb))
        self.folder = Path(folder).expanduser().absolute()
        if os.path.isfile(self.folder):
            raise UsageError("the score cache needs a folder", got=f"the file {self.folder}", instead="a new folder")
        self.path = self.folder / FILE
        self.stats = CacheStats()
        self._limit = max_mb << 20
        self._report = report
        self._damaged: set[bytes] = set()  # keys whose entry is known to be damaged, not yet replaced
        self._closed = False
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self.path, _PATIENCE, isolation_level=None, check_same_thread=False)
            self._prepare(self._database)
        except _ERRORS as error:
            self._give_up(error)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payloads under `keys`, None where missing or damaged."""
        payloads: dict[bytes, bytes] = {}
        for key, checksum, payload in self._attempt(lambda database: _select(database, keys)) or ():
            if isinstance(key, bytes) and isinstance(payload, bytes) and checksum == _checksum(key, payload):
                payloads[key] = payload
            elif key not in self._damaged:
                if not self._damaged and not self.stats.damaged:
                    self._note("has damaged entries, which are not used")
                self._damaged.add(key)
                self.stats.damaged += 1
        hits = sum(key in payloads for key in keys)
        self.stats.hits += hits
        self.stats.misses += len(keys) - hits
        return [payloads.get(key) for key in keys]

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Store payloads under keys.

        An existing key keeps its entry, so that all readers see one payload; a damaged entry is replaced.
        """
        entries = [(key, _checksum(key, payload), payload) for key, payload in items]

        def insert(database: sqlite3.Connection) -> None:
            replaced = self._damaged.intersection(key for key, _, _ in entries)
            with database:
                database.execute("BEGIN IMMEDIATE")
                self.stats.evicted += _evict(database, self._limit)
                database.executemany("DELETE FROM scores WHERE key = ?", [(key,) for key in replaced])
                self.stats.written += database.executemany(_INSERT, entries).rowcount
            self._damaged -= replaced

        if entries:
            self._attempt(insert)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._closed = True
            self._disconnect()

    # ------------------------------------------------------------------------------------------------ the file

    def _prepare(self, database: sqlite3.Connection) -> None:
        for pragma in _PRAGMAS:
            database.execute(f"PRAGMA {pragma}")
        database.execute(_TABLE)
        database.text_factory = bytes  # a damaged entry may hold text that is not UTF-8
        if self.path.stat().st_size > self._limit:
            self.stats.evicted += _evict(database, self._limit)
            database.execute("VACUUM")

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `work` returns; None without a usable file."""
        with self._lock:
            if self._closed:
                raise UsageError(f"the score cache in {self.folder} is closed")
            if self._database is None:
                return None
            try:
                return work(self._database)
            except _ERRORS as error:
                self._give_up(error)
                return None

    def _give_up(self, error: Exception) -> None:
        """Go on without the file, and delete it if it is damaged."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        refused = code & 0xFF in _REFUSALS and code != sqlite3.SQLITE_IOERR_SHORT_READ  # of a truncated file
        self._disconnect()
        if refused or isinstance(error, OSError):
            self._note(f"cannot be used; scores are computed: {error}")
            return
        with suppress(OSError):
            for suffix in ("", "-journal"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self._note(f"is damaged and is deleted; scores are computed: {error}")

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _note(self, what: str) -> None:
        if self._report is not None:
            self._report(f"the score cache in {self.folder} {what}")


def _select(database: sqlite3.Connection, keys: Sequence[bytes]) -> list[tuple[bytes, bytes, bytes]]:
    """(key, checksum, payload) of the keys present."""
    entries: list[tuple[bytes, bytes, bytes]] = []
    for start in range(0, len(keys), _SELECT):
        part: list[bytes | None] = [*keys[start : start + _SELECT]]
        entries += database.execute(_QUERY, part + [None] * (_SELECT - len(part)))
    return entries


def _evict(database: sqlite3.Connection, limit: int) -> int:
    """Delete the oldest entries until the used pages take at most `limit` bytes; returns how many were deleted."""
    evicted = 0
    while (
        _pragma(database, "page_size") * (_pragma(database, "page_count") - _pragma(database, "freelist_count")) > limit
    ):
        deleted = database.execute(_DELETE_OLDEST).rowcount
        if not deleted:
            raise sqlite3.DatabaseError("its pages hold no entries")
        evicted += deleted
    return evicted


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


def _checksum(key: bytes, payload: bytes) -> bytes:
    hasher = hashlib.blake2b(bytes([len(key)]) + key, digest_size=16, person=_PERSON_ENTRY)
    hasher.update(payload)
    return hasher.digest()


# ---------------------------------------------------------------------------------------------------- keys


def prefix_keys(*, fingerprint: str, numerics: str, prompt: Sequence[int], response: Sequence[int]) -> list[bytes]:
    """The keys of all positions of a response, 32 bytes each: position t has the key of the response `response[:t]`.

    Args:
        fingerprint: The teacher's weights and configuration (`Model.fingerprint`).
        numerics: All else that can change a number: precision, canonical shape, payload, hardware.
        prompt: Token ids of the prompt, including the prefill.
        response: Token ids of the response.
    """
    # Every part but the last is length-prefixed, so that no two different calls have the same encoding.
    hasher = hashlib.blake2b(digest_size=32, person=_PERSON_KEY)
    for part in (fingerprint.encode(), numerics.encode(), _ids(prompt)):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    encoded = _ids(response)
    keys: list[bytes] = []
    for end in range(8, len(encoded) + 8, 8):
        keys.append(hasher.digest())  # digest does not change the hasher
        hasher.update(encoded[end - 8 : end])
    return keys


def _ids(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}q", *tokens)
    except struct.error as error:
        raise UsageError("token ids must be integers of 64 bits", got=str(error)) from error
