"""What other processes do to a cache in the tests; run as `python cache_workers.py WORK FOLDER ...`."""

from __future__ import annotations

import hashlib
import itertools
import os
import resource
import sys
from pathlib import Path

from gatespace.errors import GatespaceError
from gatespace.teacher.cache import ScoreCache


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def payload(key: bytes, low: int = 1_000, high: int = 8_000) -> bytes:
    """The one right payload of a key; its size is one of [low, high], by the key."""
    size = low + int.from_bytes(key[:4], "big") % (high - low + 1)
    return hashlib.shake_128(key).digest(size)


def items(numbers: range) -> list[tuple[bytes, bytes]]:
    return [(key(number), payload(key(number))) for number in numbers]


def served_right(cache: ScoreCache, numbers: range) -> int:
    """How many of the numbers are served; all that are, rightly."""
    keys = [key(number) for number in numbers]
    found = cache.get_many(keys)
    assert all(got in (None, payload(one)) for one, got in zip(keys, found, strict=True)), "a wrong payload was served"
    return sum(got is not None for got in found)


def write_for_ever(folder: Path, start: str) -> None:
    cache = ScoreCache(folder, max_mb=2)
    for first in itertools.count(int(start), 7):
        cache.put_many(items(range(first, first + 7)))
        served_right(cache, range(max(0, first - 20), first))
        print(first, flush=True)


def share(folder: Path, rank: str, rounds: str) -> None:
    """Writes what others write too, and more than fits; reads all the time."""
    with ScoreCache(folder, max_mb=2) as cache:
        served = 0
        for turn in range(int(rounds)):
            first = turn * 10 + int(rank) * 5
            cache.put_many(items(range(first, first + 10)))
            served += served_right(cache, range(first, first + 10))
            served_right(cache, range(max(0, first - 300), first))
        # What is there keeps its age, so that with writers far apart what the last one writes may be what goes next.
        assert served > 0
        # On a busy machine a reader may be put to sleep in its transaction, and then holds its pages for that long.
        assert all("a reader holds its pages" in note for note in cache.notes), cache.notes
        assert cache.stats.damaged == 0
        print(cache.stats.written, cache.stats.evicted, len(cache.notes))


def grow(folder: Path, max_mb: str, count: str) -> None:
    with ScoreCache(folder, max_mb=int(max_mb)) as cache:
        cache.put_many(items(range(1000, 1000 + int(count))))
        assert served_right(cache, range(1000, 1000 + int(count))) == int(count)


def hold(folder: Path) -> None:
    """Stays inside a read transaction until it is killed."""
    cache = ScoreCache(folder, max_mb=2)
    assert cache._file is not None
    with cache._file.begin() as txn:
        txn.stat()
        print("reading", flush=True)
        sys.stdin.read()


def full_disk(folder: Path) -> None:
    """A limit on the size of files makes the kernel refuse the write, as a full disk does."""
    reported: list[str] = []
    with ScoreCache(folder, max_mb=64, report=reported.append) as cache:
        cache.put_many(items(range(50)))
        size = (folder / "data.mdb").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100_000, resource.RLIM_INFINITY))
        cache.put_many(items(range(50, 500)))
        assert len(reported) == 1, reported
        assert "no longer written" in reported[0], reported
        assert cache.notes == reported
        assert served_right(cache, range(500)) == 50
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        cache.put_many(items(range(500, 510)))
        assert served_right(cache, range(500, 510)) == 0
    print("went on")


def flipped(root: Path, *names: str) -> None:
    """Opens, reads and writes damaged caches."""
    for name in names:
        with ScoreCache(root / name, max_mb=2) as cache:
            served = served_right(cache, range(150))
            damaged = cache.stats.damaged
            cache.put_many(items(range(150)))
            assert served_right(cache, range(150)) == 150, name
        print(name, served, damaged, len(cache.notes), flush=True)


def no_permission(folder: Path) -> None:
    import gatespace.teacher.cache_file  # noqa: F401 - while it may be read

    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        ScoreCache(folder)
    except GatespaceError as error:
        print(error.exit_code, error)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
