"""Teacher scores on disk, so that the teacher is asked once: later steps, epochs, seeds and runs read its answer.

Several processes share one cache. A cache is there to save time and for nothing else, so that trouble with it costs
time and nothing else: a damaged entry is a miss, a full disk ends the writing, and both are counted or noted. Only
opening a folder that cannot be a cache is an error.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gatespace.errors import GatespaceError, UsageError, missing_extra
from gatespace.teacher.cache_entry import MAX_KEY, key_of, pack, prefix_keys, score_key, unpack

if TYPE_CHECKING:
    import lmdb

    from gatespace.teacher.cache_file import CacheFile

__all__ = ["CacheStats", "ScoreCache", "prefix_keys", "score_key"]

# A page holds four parts. Parts that fill it alone would waste half of it on a hidden state of 2 to 3 kB.
_PARTS = 4
_PAGE_HEADER, _NODE_HEADER = 32, 24  # bytes; LMDB's own and the key, rounded up
_ATTEMPTS = 6
# Pages that a transaction frees can be used from the next but one on, so a part of the file is kept free for them, and
# a transaction is a small part of that.
_BATCH = 64  # a transaction fills one page in so many


@dataclass
class CacheStats:
    """What this process did with a cache since it opened it."""

    hits: int = 0
    misses: int = 0
    """Keys asked for in vain; a damaged entry is a miss too."""
    damaged: int = 0
    """Entries found damaged, each counted once, and one for a file that had to be emptied. None was served."""
    written: int = 0
    evicted: int = 0


class ScoreCache:
    """Teacher scores on disk, shared by processes; LMDB, on a local file system.

    Args:
        folder: A folder of its own; made if it is not there.
        max_mb: Bound on the size of the data file on disk, in MiB; the oldest entries make room. Where processes that
            share a cache name different bounds, the largest holds while they run. A smaller one than before takes
            effect when the cache is next opened by a single process.
        readonly: Never write; `put_many` does nothing.
        report: Is told each note, once; `notes` keeps them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_mb: int = 4096,
        readonly: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(max_mb, bool) or not isinstance(max_mb, int) or max_mb < 1:
            raise UsageError("the bound of a score cache is a whole number of MiB, at least 1", got=repr(max_mb))
        self.folder = Path(folder).expanduser().absolute()
        self.max_mb = max_mb
        self.readonly = readonly
        self.stats = CacheStats()
        self.notes: list[str] = []
        self._report = report
        self._lock = threading.RLock()
        self._condemned: set[bytes] = set()  # keys whose entry is known to be damaged, not yet replaced
        self._reading = True
        self._writing = not readonly
        self._closed = False
        self._file: CacheFile | None = self._opened()
        _OPEN.add(self)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payloads under `keys`, None where there is none or a damaged one."""
        with self._lock:
            found: list[bytes | None] = [None] * len(keys)
            file = self._ready() if self._reading else None
            if file is not None:
                import lmdb

                try:
                    with file.begin() as txn, txn.cursor(file.scores) as cursor:
                        found = [self._checked(file, txn, cursor, key) for key in keys]
                except lmdb.Error as error:
                    self._reading = self._writing = False
                    self._note(f"the score cache in {self.folder} cannot be read and is no longer used: {error}")
            self.stats.hits += sum(payload is not None for payload in found)
            self.stats.misses += sum(payload is None for payload in found)
            return found

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Store payloads under keys, in one transaction (in several if they are a large part of the whole cache).

        A key that is there keeps its entry, so that all readers see one payload; a damaged entry is replaced.
        """
        entries: dict[bytes, bytes] = {}
        for key, payload in items:  # to the end, before the lock that all writers share is taken
            entries.setdefault(key, pack(_key(key), payload))
        with self._lock:
            file = self._ready() if self._writing and entries else None
            if file is None:
                return
            import lmdb

            try:
                self._put(file, list(entries.items()))
            except (lmdb.Error, OSError) as error:
                # A commit that failed has changed nothing that readers see.
                self._writing = False
                self._note(f"the score cache in {self.folder} is no longer written to: {error}")

    def close(self) -> None:
        """Bring what was written to the disk and close."""
        with self._lock:
            self._closed = True
            self._let_go(sync=True)
            _OPEN.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ reading

    def _checked(
        self, file: CacheFile, txn: lmdb.Transaction[bytes], cursor: lmdb.Cursor[bytes], key: bytes
    ) -> bytes | None:
        number = txn.get(_key(key), db=file.index)
        if number is None:
            return None
        payload = unpack(key, _entry(cursor, number))
        if payload is None and key not in self._condemned:
            self._condemned.add(key)
            self.stats.damaged += 1
            self._note(f"the score cache in {self.folder} has damaged entries; they are not used")
        return payload

    # ------------------------------------------------------------------------------------------------ writing

    def _put(self, file: CacheFile, entries: list[tuple[bytes, bytes]]) -> None:
        import lmdb

        part = (file.page - _PAGE_HEADER) // _PARTS - _NODE_HEADER
        pages = [2 + len(entry) // part // _PARTS for _, entry in entries]
        start = 0
        while start < len(entries):
            budget, end, size = file.limit // _BATCH, start, 0
            while end < len(entries) and (end == start or size + pages[end] <= budget):
                size += pages[end]
                end += 1
            batch, start = entries[start:end], end
            if size > file.limit // 8:
                self._note(f"the score cache in {self.folder} is too small for entries of {len(batch[0][1])} bytes")
                continue
            for _ in range(_ATTEMPTS):
                try:
                    self._insert(file, batch, part=part, needed=size)
                    break
                except lmdb.MapFullError:
                    self._relieve(file)
            else:
                self._note(f"the score cache in {self.folder} had no room for some entries: a reader holds its pages")

    def _insert(self, file: CacheFile, batch: list[tuple[bytes, bytes]], *, part: int, needed: int) -> None:
        written: list[bytes] = []
        with file.begin(write=True) as txn, txn.cursor(file.scores) as cursor:
            target = file.limit - _reserve(file.limit) - needed
            evicted = _evict(file, txn, cursor, target=target, spare=file.limit // _BATCH)
            last = int.from_bytes(cursor.key()[:8], "big") if cursor.last() else 0
            for key, entry in batch:
                number = txn.get(key, db=file.index)
                if number is not None:
                    if unpack(key, _entry(cursor, number)) is not None:
                        continue
                    _remove(cursor, number)
                last += 1
                number = last.to_bytes(8, "big")
                txn.put(key, number, db=file.index)
                for at in range(0, len(entry), part):
                    place = number + (at // part).to_bytes(4, "big")
                    cursor.put(place, entry[at : at + part], append=True)
                written.append(key)
        self.stats.written += len(written)
        self.stats.evicted += evicted
        self._condemned.difference_update(written)
        if written or evicted:
            file.committed()

    def _relieve(self, file: CacheFile) -> None:
        # The reserve was not enough, or killed readers hold pages. Small transactions, because each needs pages of its
        # own before it frees any, and several, because freed pages come back two transactions later.
        import lmdb

        file.env.reader_check()
        for _ in range(16):
            try:
                with file.begin(write=True) as txn, txn.cursor(file.scores) as cursor:
                    target = file.used(txn) - file.limit // 256
                    evicted = _evict(file, txn, cursor, target=target, spare=0)
            except lmdb.MapFullError:
                return
            self.stats.evicted += evicted
            file.committed()

    def _fit(self, file: CacheFile, pages: int) -> None:
        evicted = -1
        while evicted:
            with file.begin(write=True) as txn, txn.cursor(file.scores) as cursor:
                evicted = _evict(file, txn, cursor, target=pages - _reserve(pages), spare=0, most=1024)
            self.stats.evicted += evicted

    # ------------------------------------------------------------------------------------------------ the file

    def _opened(self) -> CacheFile:
        try:
            from gatespace.teacher.cache_file import CacheFile
        except ImportError as error:
            raise missing_extra("the score cache", module="lmdb", extra="train") from error
        file = CacheFile(
            self.folder, max_bytes=self.max_mb << 20, readonly=self.readonly, note=self._note, evict=self._fit
        )
        self.stats.damaged += file.emptied
        return file

    def _ready(self) -> CacheFile | None:
        if self._closed:
            raise UsageError(f"the score cache in {self.folder} is closed")
        if self._file is None:  # after a fork
            try:
                self._file = self._opened()
            except GatespaceError as error:
                self._reading = self._writing = False
                self._note(f"the score cache in {self.folder} is no longer used: {error}")
        return self._file

    def _let_go(self, *, sync: bool) -> None:
        import lmdb

        file, self._file = self._file, None
        if file is not None:
            try:
                file.close(sync=sync)
            except (lmdb.Error, OSError) as error:
                self._note(f"the score cache in {self.folder} could not be brought to the disk: {error}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            if self._report is not None:
                self._report(text)


# ---------------------------------------------------------------------------------------------------- entries


def _reserve(pages: int) -> int:
    return pages // 8 + 64


def _key(key: bytes) -> bytes:
    if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY:
        raise UsageError(f"a key of the score cache has 1 to {MAX_KEY} bytes", got=repr(key), instead="score_key(...)")
    return key


def _entry(cursor: lmdb.Cursor[bytes], number: bytes) -> bytes:
    parts: list[bytes] = []
    more = cursor.set_range(number)
    while more and cursor.key()[:8] == number:
        parts.append(cursor.value())
        more = cursor.next()
    return b"".join(parts)


def _remove(cursor: lmdb.Cursor[bytes], number: bytes) -> None:
    if cursor.set_range(number):
        while cursor.key()[:8] == number and cursor.delete():
            pass  # delete moves on to the next


def _evict(
    file: CacheFile,
    txn: lmdb.Transaction[bytes],
    cursor: lmdb.Cursor[bytes],
    *,
    target: int,
    spare: int,
    most: int | None = None,
) -> int:
    """Drop the oldest entries if more than `target` pages are used, until `spare` fewer are; returns how many."""
    evicted = 0
    goal = target
    while file.used(txn) > goal and (most is None or evicted < most):
        goal = target - spare
        for _ in range(4):
            if not cursor.first():
                return evicted
            number, key = cursor.key()[:8], key_of(cursor.value())
            if key is not None and txn.get(key, db=file.index) == number:
                txn.delete(key, db=file.index)
            _remove(cursor, number)
            evicted += 1
    return evicted


# ---------------------------------------------------------------------------------------------------- fork

# A child must not use its parent's LMDB environment, and closing it there would free the parent's reader slots. So it
# is closed before the fork, in the parent, and both open it again when they next need it.
_OPEN: weakref.WeakSet[ScoreCache] = weakref.WeakSet()
_FORKING: list[ScoreCache] = []


def _before_fork() -> None:
    for cache in sorted(_OPEN, key=id):
        cache._lock.acquire()
        cache._let_go(sync=False)
        _FORKING.append(cache)


def _in_parent() -> None:
    while _FORKING:
        _FORKING.pop()._lock.release()


def _in_child() -> None:
    while _FORKING:
        _FORKING.pop()._lock = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
