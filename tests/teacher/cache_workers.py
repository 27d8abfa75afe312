"""What other processes do to a cache in the tests; run as `python cache_workers.py WORK FOLDER ...`."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
import shutil
import sys
from pathlib import Path

from gatespace.teacher.cache import FILE, ScoreCache


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


@functools.cache
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
    print("begins", flush=True)
    cache = ScoreCache(folder, max_mb=2)
    for first in itertools.count(int(start), 7):
        cache.put_many(items(range(first, first + 7)))
        served_right(cache, range(max(0, first - 20), first))
        print(first, flush=True)


def share(folder: Path, rank: str, rounds: str) -> None:
    """Writes what others write too, and more than fits; reads all the time."""
    notes: list[str] = []
    with ScoreCache(folder, max_mb=2, report=notes.append) as cache:
        for turn in range(int(rounds)):
            first = turn * 10 + int(rank) * 5
            cache.put_many(items(range(first, first + 10)))
            served_right(cache, range(max(0, first - 300), first + 10))
        assert not notes, notes
        assert cache.stats.damaged == 0
        print(cache.stats.written, cache.stats.evicted)


def damage(path: Path, kind: str, rng: random.Random) -> None:
    """Zero, swap or flip pages of a file, or truncate it, and keep its time stamps."""
    page, look = 16384, path.stat()
    pages = look.st_size // page
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 4, 20])):
        # the first page has the header and the schema
        one, other = rng.choice([0, rng.randrange(pages)]) * page, rng.randrange(pages) * page
        if kind == "zeroed":
            data[one : one + page] = bytes(page)
        elif kind == "swapped":
            data[one : one + page], data[other : other + page] = data[other : other + page], data[one : one + page]
        elif kind == "flipped":
            data[one + rng.choice([rng.randrange(120), rng.randrange(page)])] ^= 1 << rng.randrange(8)
        else:
            del data[rng.choice([rng.randrange(1, len(data)), len(data) // page * page - page]) :]
            break
    with path.open("r+b") as file:  # the same file, which may be open
        file.write(data)
        file.truncate()
    os.utime(path, ns=(look.st_atime_ns, look.st_mtime_ns))


def attack(folder: Path, first: str, last: str) -> None:
    """Damages caches, before they are opened or while they are open, and uses them."""
    with ScoreCache(folder / "sound", max_mb=1) as cache:
        cache.put_many(items(range(100, 400)))  # more than fits: there are free pages too
        cache.put_many(items(range(100)))
        assert served_right(cache, range(100)) == 100
    for trial in range(int(first), int(last)):
        kind, rng = ("zeroed", "swapped", "flipped", "cut")[trial % 4], random.Random(trial)
        while_open = rng.random() < 0.5
        print(trial, kind, "open" if while_open else "closed", end=" ", flush=True)
        shutil.rmtree(folder / "hit", ignore_errors=True)
        shutil.copytree(folder / "sound", folder / "hit")
        if not while_open:
            damage(folder / "hit" / FILE, kind, rng)
        with ScoreCache(folder / "hit", max_mb=1) as cache:
            if while_open:
                served_right(cache, range(0, 100, 9))
                damage(folder / "hit" / FILE, kind, rng)
                if rng.random() < 0.5:
                    cache.put_many(items(range(400, 410)))
            served = served_right(cache, range(100))
            cache.put_many(items(range(100)))
            served_right(cache, range(100))
        for _ in range(4):  # each meets what damage is left, which may be where the tree changes
            with ScoreCache(folder / "hit", max_mb=1) as cache:
                served_right(cache, range(100))
                cache.put_many(items(range(100)))
                restored = served_right(cache, range(100))
        assert restored == 100, restored
        print(served, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
