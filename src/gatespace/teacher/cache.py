"""Teacher scores on disk, computed once: later steps, epochs, seeds and runs look them up.

A score depends on the teacher, on how it is computed and on the tokens before it; its key is a hash of exactly these.
An entry has a checksum over key and payload, so that neither a damaged payload nor an intact one under another key is
served as a score.

The cache is one SQLite file shared by several processes. It only saves time, so problems with it only cost time: a
damaged entry is a miss, a damaged file is replaced by an empty one, a full or read-only disk stops writing, and each is
reported once. The file has a rollback journal instead of a write-ahead log because the index of such a log is
memory-mapped: the kernel kills (SIGBUS) a process that touches it after truncation. Here every access is a `read` or a
`write`, whose failure can be handled.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_PAGE = 16384  # several hidden states of 1 to 4 KiB per page
_SELECT = 128  # keys per query; fixed, so that SQLite compiles it once
_SHARE = 8  # a transaction takes at most 1/8 of the pages
_PATIENCE = 10.0  # seconds that a call waits for other processes
_IMPATIENCE = 0.05  # after a call has timed out
_ATTEMPTS = 3  # retries with the file that replaces a damaged or deleted one
_QUERY = f"SELECT key, checksum, payload FROM scores WHERE key IN ({', '.join('?' * _SELECT)})"
# synchronous=OFF: no fsync. A killed process loses nothing; after a power failure the file may be damaged, which is
# detected like any other damage.
_PRAGMAS = (f"page_size={_PAGE}", "journal_mode=TRUNCATE", "synchronous=OFF", "mmap_size=0", "cell_size_check=ON")
_TABLE = "CREATE TABLE scores (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, checksum BLOB, payload BLOB)"
_SCHEMA = [("scores", _TABLE), ("sqlite_autoindex_scores_1", None)]
# SQLite's errors where the file may be intact but the system refuses; every other error means damage.
_REFUSALS = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)
# One lock for all caches of a process, held during a fork: a child must not inherit a transaction of another thread.
_LOCK = threading.RLock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)

T = TypeVar("T")


@dataclass
class CacheStats:
    """What this process did with a cache since it opened it."""

    hits: int = 0
    misses: int = 0
    """Keys that were not found; a damaged entry is a miss too."""
    damaged: int = 0
    """Entries found damaged, each counted once, and one for each deleted file. None was served."""
    written: int = 0
    evicted: int = 0


class ScoreCache(Closing):
    """Teacher scores on disk, shared by processes, on a local file system.

    Args:
        folder: Created if missing; other files in it are left alone.
        max_mb: Size limit of the file, in MiB; the oldest entries are evicted. Each process that shares a cache applies
            its own limit.
        report: Called with a message when something is wrong with the cache, once per kind of problem. `notes` keeps
            these messages.
    """

    def __init__(self, folder: Path, *, max_mb: int = 4096, report: Callable[[str], None] | None = None) -> None:
        if isinstance(max_mb, bool) or not isinstance(max_mb, int) or max_mb < 1:
            raise UsageError("the bound of a score cache is a whole number of MiB, at least 1", got=repr(max_mb))
        self.folder = Path(folder).expanduser().absolute()
        if os.path.isfile(self.folder):
            raise UsageError("the score cache needs a folder", got=f"the file {self.folder}", instead="a new folder")
        self.path = self.folder / FILE
        self.max_mb = max_mb
        self.stats = CacheStats()
        self.notes: list[str] = []
        self._report = report
        self._noted: set[str] = set()
        self._damaged: set[bytes] = set()  # keys whose entry is known to be damaged, not yet replaced
        self._reading = self._writing = True
        self._closed = False
        self._database: sqlite3.Connection | None = None
        self._opened: tuple[int, int | None] = (0, None)  # process and inode of the connection
        self._patience = _PATIENCE
        with _LOCK:
            self._attempt(self._shrink, writes=True)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payloads under `keys`, None where missing or damaged."""
        with _LOCK:
            self._check_open()
            entries = self._attempt(lambda database: _select(database, keys), writes=False) or []
            found: dict[bytes, bytes] = {}
            for key, checksum, payload in entries:
                if _is_sound(key, checksum, payload):
                    found[key] = payload
                elif key not in self._damaged:
                    self._damaged.add(key)
                    self.stats.damaged += 1
                    self._note("has damaged entries; they are not used")
            payloads = [found.get(key) for key in keys]
            misses = payloads.count(None)
            self.stats.hits += len(keys) - misses
            self.stats.misses += misses
            return payloads

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Store payloads under keys.

        An existing key keeps its entry, so that all readers see one payload; a damaged entry is replaced.
        """
        entries: dict[bytes, bytes] = {}
        for key, payload in items:
            entries.setdefault(key, payload)
        with _LOCK:
            self._check_open()
            if entries:
                self._attempt(lambda database: self._insert(database, entries), writes=True)

    def close(self) -> None:
        """Close the file."""
        with _LOCK:
            self._closed = True
            self._disconnect()

    # ------------------------------------------------------------------------------------------------ writing

    def _insert(self, database: sqlite3.Connection, entries: dict[bytes, bytes]) -> None:
        limit = self._limit(database)
        for batch, pages in self._batches(entries, limit):
            repaired = self._damaged.intersection(batch)
            with database:
                database.execute("BEGIN IMMEDIATE")
                evicted = _evict(database, limit - pages)
                database.executemany("DELETE FROM scores WHERE key = ?", [(key,) for key in repaired])
                written = database.executemany(
                    "INSERT OR IGNORE INTO scores (key, checksum, payload) VALUES (?, ?, ?)",
                    [(key, _checksum(key, payload), payload) for key, payload in batch.items()],
                ).rowcount
            self._damaged -= repaired
            self.stats.written += written
            self.stats.evicted += evicted

    def _batches(self, entries: dict[bytes, bytes], limit: int) -> Iterator[tuple[dict[bytes, bytes], int]]:
        """Entries for one transaction, and the most pages that it takes."""
        batch: dict[bytes, bytes] = {}
        size = 0
        for key, payload in entries.items():
            pages = 2 * (1 + len(payload) // _PAGE)  # as many again for the index
            if pages > limit // _SHARE:
                self._note("is too small for some entries", f"{len(payload)} bytes")
                continue
            if size + pages > limit // _SHARE:
                yield batch, size
                batch, size = {}, 0
            batch[key] = payload
            size += pages
        if batch:
            yield batch, size

    def _shrink(self, database: sqlite3.Connection) -> None:
        """Shrink a file that exceeds the limit."""
        limit = self._limit(database)
        if _pragma(database, "page_count") <= limit:
            return
        with database:
            database.execute("BEGIN IMMEDIATE")
            evicted = _evict(database, limit - limit // _SHARE)
        self.stats.evicted += evicted
        database.execute("VACUUM")

    def _limit(self, database: sqlite3.Connection) -> int:
        return (self.max_mb << 20) // _pragma(database, "page_size")

    # ------------------------------------------------------------------------------------------------ the file

    def _attempt(self, work: Callable[[sqlite3.Connection], T], *, writes: bool) -> T | None:
        """What `work` returns; None if the cache cannot do it, which is noted."""
        for _ in range(_ATTEMPTS):
            if not (self._writing if writes else self._reading):
                return None
            try:
                result = work(self._connect())
                self._wait_for(_PATIENCE)
                return result
            except (sqlite3.Error, UnicodeError, OSError) as error:  # UnicodeError: a message that quotes damaged bytes
                if not self._recover(error, writes=writes):
                    return None
        self._stop("it is damaged repeatedly")
        return None

    def _recover(self, error: sqlite3.Error | UnicodeError | OSError, *, writes: bool) -> bool:
        """Recover from `error` if possible; returns whether to retry."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            self._wait_for(_IMPATIENCE)
            self._note("is held by another process; meanwhile scores are computed")
            return False
        if code == sqlite3.SQLITE_READONLY_DBMOVED:
            self._disconnect()
            return True
        if not isinstance(error, OSError) and not self._is_refusal(code):
            try:
                self._discard()
                self._note("was damaged and has been emptied", error)
                return True
            except OSError as trouble:
                error = trouble
        if writes and self._database is not None:
            self._writing = False
            self._note("is no longer written to", error)
        else:
            self._stop(error)
        return False

    def _is_refusal(self, code: int) -> bool:
        if code == sqlite3.SQLITE_IOERR_SHORT_READ:  # a truncated file
            return False
        if code == sqlite3.SQLITE_READONLY:  # a damaged file may claim it
            return not (os.access(self.path, os.W_OK) and os.access(self.folder, os.W_OK))
        return code & 0xFF in _REFUSALS

    def _connect(self) -> sqlite3.Connection:
        """The open file, reopened after a fork or if another process has deleted or replaced it."""
        if self._database is not None and self._opened == (os.getpid(), _inode(self.path)):
            return self._database
        self._disconnect()
        self.folder.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self.path, timeout=self._patience, isolation_level=None, check_same_thread=False)
        self._opened = (os.getpid(), _inode(self.path))
        try:
            for pragma in _PRAGMAS:
                database.execute(f"PRAGMA {pragma}")
            database.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
            if database.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall() != _SCHEMA:
                raise sqlite3.DatabaseError("the schema is damaged")
        except BaseException:
            database.close()
            raise
        database.text_factory = bytes  # a damaged entry may hold text that is not UTF-8
        self._database = database
        return database

    def _discard(self) -> None:
        """Delete the file, unless another process has done so."""
        if self._opened[1] == _inode(self.path):
            for suffix in ("", "-journal", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self._disconnect()
        self._damaged.clear()
        self.stats.damaged += 1

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _wait_for(self, seconds: float) -> None:
        if self._database is not None and self._patience != seconds:
            self._database.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")
        self._patience = seconds

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the score cache in {self.folder} is closed")

    def _stop(self, reason: object) -> None:
        self._reading = self._writing = False
        self._disconnect()
        self._note("cannot be used", reason)

    def _note(self, what: str, detail: object = None) -> None:
        if what not in self._noted:
            self._noted.add(what)
            note = f"the score cache in {self.folder} {what}" + (f": {detail}" if detail is not None else "")
            self.notes.append(note)
            if self._report is not None:
                self._report(note)


# ---------------------------------------------------------------------------------------------------- the database


def _select(database: sqlite3.Connection, keys: Sequence[bytes]) -> list[tuple[bytes, bytes, bytes]]:
    """(key, checksum, payload) of the keys present."""
    entries: list[tuple[bytes, bytes, bytes]] = []
    for start in range(0, len(keys), _SELECT):
        some: list[bytes | None] = [*keys[start : start + _SELECT]]
        entries += database.execute(_QUERY, some + [None] * (_SELECT - len(some)))
    return entries


def _evict(database: sqlite3.Connection, most: int) -> int:
    """Delete the oldest entries until at most `most` pages are used; returns how many were deleted."""
    evicted = 0
    while _pragma(database, "page_count") - _pragma(database, "freelist_count") > most:
        ((first, last),) = database.execute("SELECT (SELECT min(id) FROM scores), (SELECT max(id) FROM scores)")
        if first is None:
            raise sqlite3.DatabaseError("pages are lost")
        deleted = database.execute("DELETE FROM scores WHERE id <= ?", (first + (last - first) // 64,)).rowcount
        if not deleted:
            raise sqlite3.DatabaseError("entries are out of order")
        evicted += deleted
    return evicted


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


# ---------------------------------------------------------------------------------------------------- entries


def _is_sound(key: object, checksum: object, payload: object) -> bool:
    return isinstance(key, bytes) and isinstance(payload, bytes) and checksum == _checksum(key, payload)


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
