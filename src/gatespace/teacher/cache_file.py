"""The file behind the score cache: an LMDB environment that may be opened by anyone at any time, after anything.

LMDB keeps a file sound through SIGKILL, but it trusts what it reads: a damaged page of its tree can crash the process.
A value is covered by the checksum of its entry; the tree around the values is covered here. `cache.json` records what
the data file looked like after our own last write. A file that looks otherwise (bytes changed from outside, or a
power failure) is walked by LMDB's offline verifier before LMDB sees it, and emptied if it is broken: every
score can be computed again. The walk takes some 7 s per million entries and happens only then.

Layout: `index` maps a key to a sequence number; `scores` maps (sequence number, part) to a part of the entry. Parts are
a fraction of a page, so that the file never needs a run of free pages and cannot fail by fragmentation, whatever the
mix of sizes; sequence numbers only grow, so that new entries fill pages at one end of the tree and the oldest empty
them at the other.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
from lmdb.verify import VerifyError, verify

from gatespace.errors import RunError, UsageError

FORMAT = 1
STATE, DATA, LOCK, SHRUNK = "cache.json", "data.mdb", "lock.mdb", "shrunk"
_WHAT = "gatespace teacher scores"
_STATE_BYTES = 512
_READERS = 512  # processes and threads that read at one moment
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheFile:
    """An open cache. `note` is told what was found and done; `evict` makes room in a file that is too large."""

    env: lmdb.Environment
    index: lmdb._Database
    scores: lmdb._Database

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        readonly: bool,
        note: Callable[[str], None],
        evict: Callable[[CacheFile, int], None],
    ) -> None:
        self.folder, self.max_bytes, self.readonly = folder, max_bytes, readonly
        self._note, self._evict = note, evict
        self._wrote = False
        self.emptied = False
        try:
            self._guard = self._claim()
        except OSError as error:
            raise self._failure(error) from error
        try:
            self._open()
        except BaseException as error:
            os.close(self._guard)
            if isinstance(error, OSError | lmdb.Error):
                raise self._failure(error) from error
            raise

    def begin(self, *, write: bool = False) -> lmdb.Transaction[bytes]:
        """A transaction on the file as it is now, however large another process has made it."""
        for _ in range(8):
            try:
                return self.env.begin(write=write)
            except lmdb.MapResizedError:
                self.env.set_mapsize(0)  # adopts the size on disk
            except lmdb.ReadersFullError:
                if not self.env.reader_check():  # slots of killed processes
                    raise
        return self.env.begin(write=write)

    @property
    def limit(self) -> int:
        """Pages that the file may have: the bound, or that of another process if it is larger."""
        return int(self.env.info()["map_size"]) // self.page

    @property
    def page(self) -> int:
        """Bytes of a page."""
        return int(self.env.stat()["psize"])

    def used(self, txn: lmdb.Transaction[bytes]) -> int:
        """Pages that hold something within `txn`."""
        stats = [txn.stat(), *(txn.stat(db) for db in (self._about, self.index, self.scores))]
        return 2 + sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)

    def committed(self) -> None:
        """To be called after a write: the file looks as it does through us."""
        self._wrote = True
        self._record(synced=False)

    def close(self, *, sync: bool) -> None:
        """Close; with `sync`, after all has reached the disk."""
        try:
            if sync and self._wrote and not self.readonly:
                before = self._look()
                self.env.sync(True)
                # If another process wrote meanwhile, its pages may not be on the disk.
                self._record(synced=before == self._look())
        finally:
            self.env.close()
            os.close(self._guard)

    # ------------------------------------------------------------------------------------------------ opening

    def _claim(self) -> int:
        # cache.json is made before anything else and never replaced: it says whose folder this is, and its lock says
        # who has the cache open (shared) or looks after the file alone (exclusive).
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise self._foreign("a file")
        if not self.readonly:
            folder.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
        if STATE not in names:
            if self.readonly:
                raise UsageError(f"there is no score cache in {folder}", instead="open it once without readonly")
            if names:
                raise self._foreign(f"a folder with {', '.join(sorted(names)[:5])} and no {STATE}")
        flags = os.O_RDONLY if self.readonly else os.O_RDWR | os.O_CREAT
        return os.open(folder / STATE, flags, 0o644)

    def _open(self) -> None:
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            # Others have it open, so one of them has looked after it; or one is doing so now, and this waits for it.
            fcntl.flock(self._guard, fcntl.LOCK_SH)
            alone = False
        state = self._state()
        if alone:
            self._check(state)
        self._start(self.max_bytes)
        if alone and not self.readonly and self._size() > self.max_bytes:
            self._shrink()
        if alone:
            fcntl.flock(self._guard, fcntl.LOCK_SH)

    def _check(self, state: dict[str, Any] | None) -> None:
        data = self.folder / DATA
        if not data.exists() or not data.stat().st_size:  # new, or killed while it was being made
            if self.readonly:
                raise UsageError(f"there is no score cache in {self.folder}", instead="open it once without readonly")
            return
        # A file that looks the same holds the same bytes only if they reached the disk or are in the page cache of
        # this boot: sync=False orders nothing on the disk, so that after a power failure the tree may name pages that
        # were never written.
        same = state is not None and state.get("look") == self._look()
        if state and same and (state.get("synced") is True or (_boot() and state.get("boot") == _boot())):
            return
        try:
            problems = verify(str(data))
        except VerifyError as error:
            problems = [str(error)]
        if not problems:
            if not self.readonly:
                self._record(synced=False)
            return
        if state is None:
            raise self._foreign(f"{DATA} and {STATE} that are not those of a cache, or both damaged")
        self.emptied = True
        if self.readonly:
            raise UsageError(f"the score cache in {self.folder} is damaged", got=problems[0])
        self._note(f"the score cache in {self.folder} was damaged and has been emptied ({problems[0]})")
        for name in (DATA, LOCK):
            (self.folder / name).unlink(missing_ok=True)

    def _start(self, map_size: int) -> None:
        # sync=False: a commit is a write to the page cache, no fsync per batch. A killed process loses nothing by it;
        # a power failure can lose the last commits or break the tree, for which see _check, and the checksum of each
        # entry refuses values that did not arrive. writemap=False: commits go through write(), so that a full disk is
        # an error of the commit and not a SIGBUS, and a stray pointer cannot reach the file.
        self.env = lmdb.open(
            str(self.folder),
            map_size=map_size,
            readonly=self.readonly,
            create=False,
            sync=False,
            writemap=False,
            readahead=False,
            mode=0o644,
            max_dbs=4,
            max_readers=_READERS,
        )
        try:
            self.env.reader_check()
            self._databases()
        except BaseException:
            self.env.close()
            raise

    def _databases(self) -> None:
        fresh = False
        with self.begin() as txn:
            if not txn.stat()["entries"]:
                fresh = True
            elif txn.get(b"gatespace") is None:
                raise self._foreign("an LMDB file of something else")
        if fresh:
            if self.readonly:
                raise UsageError(f"there is no score cache in {self.folder}", instead="open it once without readonly")
            with self.begin(write=True) as txn:  # another process may have been quicker, which does no harm
                about = self.env.open_db(b"gatespace", txn=txn)
                self.env.open_db(b"index", txn=txn)
                self.env.open_db(b"scores", txn=txn)
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                txn.put(b"format", str(FORMAT).encode(), db=about, overwrite=False)
                txn.put(b"created", now.encode(), db=about, overwrite=False)
            self.committed()
        self._about = self.env.open_db(b"gatespace", create=False)
        with self.begin() as txn:
            self._supported((txn.get(b"format", db=self._about) or b"?").decode("ascii", "replace"))
        self.index = self.env.open_db(b"index", create=False)
        self.scores = self.env.open_db(b"scores", create=False)

    def _supported(self, number: object) -> None:
        if str(number) != str(FORMAT):
            raise UsageError(
                f"the score cache in {self.folder} has another format",
                got=f"format {number}, known here: {FORMAT}",
                why="it was made by another version of gatespace",
                instead="another folder, or the version of gatespace that made it",
            )

    def _shrink(self) -> None:
        # The bound is smaller than it was. Room to work in comes from a map that is larger than the file for now.
        small = self.folder / SHRUNK
        try:
            self.env.set_mapsize(self._size() + self._size() // 4 + (1 << 20))
            self._evict(self, self.max_bytes // self.page)
            shutil.rmtree(small, ignore_errors=True)
            small.mkdir()
            self.env.copy(str(small), compact=True)
            self.env.close()
            os.replace(small / DATA, self.folder / DATA)
            (self.folder / LOCK).unlink(missing_ok=True)
            self.committed()
        except (OSError, lmdb.Error) as error:
            self.env.close()
            self._note(
                f"the score cache in {self.folder} is larger than its bound and could not be made smaller: {error}"
            )
        shutil.rmtree(small, ignore_errors=True)
        self._start(self.max_bytes)

    # ------------------------------------------------------------------------------------------------ state

    def _state(self) -> dict[str, Any] | None:
        text = os.pread(self._guard, _STATE_BYTES, 0)
        if not text:
            # Made just now, by this process or by one that was killed in between: nothing else of ours can be here.
            names = sorted({entry.name for entry in self.folder.iterdir()} - {STATE, LOCK})
            if names:
                raise self._foreign(f"a folder with {', '.join(names[:5])} and an empty {STATE}")
            if not self.readonly:
                self._write_state({"what": _WHAT, "format": FORMAT})
            return {}
        try:
            state = json.loads(text)
        except ValueError:
            return None
        if not isinstance(state, dict) or state.get("what") != _WHAT:
            return None
        self._supported(state.get("format"))
        return state

    def _record(self, *, synced: bool) -> None:
        state = {"what": _WHAT, "format": FORMAT, "look": self._look(), "boot": _boot(), "synced": synced}
        with contextlib.suppress(OSError):  # costs a verification at the next opening, no more
            self._write_state(state)

    def _write_state(self, state: dict[str, Any]) -> None:
        # One write within one page: a kill leaves the old state or the new one.
        os.pwrite(self._guard, json.dumps(state).ljust(_STATE_BYTES - 1).encode() + b"\n", 0)

    def _look(self) -> list[int]:
        status = os.stat(self.folder / DATA)
        return [status.st_ino, status.st_size, status.st_mtime_ns]

    def _size(self) -> int:
        return os.stat(self.folder / DATA).st_size

    # ------------------------------------------------------------------------------------------------ errors

    def _foreign(self, got: str) -> UsageError:
        return UsageError(
            f"{self.folder} is not a score cache",
            got=got,
            why="a cache deletes what it finds broken, so it only ever uses a folder of its own",
            instead="an empty or a new folder",
        )

    def _failure(self, error: OSError | lmdb.Error) -> UsageError | RunError:
        number = error.errno if isinstance(error, OSError) else error.code
        if number in _NO_PERMISSION:
            return UsageError(
                f"no permission to use the score cache in {self.folder}",
                got=str(error),
                instead="another folder for the cache, or no cache",
            )
        if number in _NO_SPACE:
            return RunError(f"no room on the disk for a score cache in {self.folder}", got=str(error))
        if "already open" in str(error):
            return UsageError(
                f"the score cache in {self.folder} is already open in this process",
                why="LMDB cannot open a file twice in one process",
                instead="share the open cache, or close it first",
            )
        return RunError(f"the score cache in {self.folder} cannot be opened", got=str(error))


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
