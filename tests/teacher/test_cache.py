"""The score cache with real processes, real kills and real damage."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lmdb
import pytest
from lmdb.verify import verify

from gatespace.errors import UsageError
from gatespace.teacher.cache import CacheStats, ScoreCache, prefix_keys, score_key
from tests.teacher import cache_workers
from tests.teacher.cache_workers import items, key, payload, served_right

ROOT = Path(__file__).resolve().parents[2]


def start(work: str, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, cache_workers.__file__, work, str(folder), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, f"exit {process.returncode}\n{err}"
    return out


def size(folder: Path) -> int:
    return (folder / "data.mdb").stat().st_size


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x41]))


# ---------------------------------------------------------------------------------------------------- keys


def test_prefix_keys_are_the_keys_of_the_positions() -> None:
    response = [5, 0, 2**40, 7]
    keys = prefix_keys(fingerprint="f", numerics="n", prompt=[1, 2], response=response)
    assert keys == [
        score_key(fingerprint="f", numerics="n", prompt=[1, 2], response_prefix=response[:t]) for t in range(4)
    ]
    assert prefix_keys(fingerprint="f", numerics="n", prompt=[1, 2], response=[]) == []
    # The same in every process and version: another value here means that every stored score is lost.
    assert keys[2].hex() == "ff315f4ad9bd32b34542d6291dcaa86af85f0b90a435f4f5c68149670fd31e4f"


def test_no_two_calls_share_a_key() -> None:
    calls = [
        ("f", "n", [1, 2], []),
        ("f", "n", [1], [2]),
        ("f", "n", [], [1, 2]),
        ("f", "n", [2, 1], []),
        ("fn", "", [1, 2], []),
        ("", "fn", [1, 2], []),
        ("f", "n", [1, 2, 0], []),
        ("f", "n", [258], []),
        ("f", "n", [1, 2], [0]),
        ("f", "n", [1, 2], [0, 0]),
    ]
    keys = {score_key(fingerprint=f, numerics=n, prompt=p, response_prefix=r) for f, n, p, r in calls}
    assert len(keys) == len(calls)
    assert {len(one) for one in keys} == {32}


def test_token_ids_that_are_none() -> None:
    with pytest.raises(UsageError, match="token ids"):
        score_key(fingerprint="f", numerics="n", prompt=[0.5], response_prefix=[])  # type: ignore[list-item]


# ---------------------------------------------------------------------------------------------------- one process


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    stored = [(key(n), os.urandom(length)) for n, length in enumerate([0, 1, 900, 1_000, 4_096, 100_000])]
    keys = [one for one, _ in stored]
    with ScoreCache(tmp_path / "deep" / "cache", max_mb=4) as cache:
        assert cache.get_many(keys) == [None] * 6
        cache.put_many(iter(stored))
        assert cache.get_many([*keys[::-1], b"none"]) == [value for _, value in stored[::-1]] + [None]
        assert cache.stats == CacheStats(hits=6, misses=7, damaged=0, written=6, evicted=0)
        assert cache.get_many([]) == []
        cache.put_many([])
    with ScoreCache(tmp_path / "deep" / "cache", max_mb=4, readonly=True) as cache:
        assert cache.get_many(keys) == [value for _, value in stored]
        cache.put_many([(b"new", b"x")])
        assert cache.get_many([b"new"]) == [None]
        assert cache.stats.written == 0
        assert cache.notes == []


def test_an_existing_key_keeps_its_entry(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=4) as cache:
        cache.put_many([(b"a", b"first"), (b"a", b"second")])
        cache.put_many([(b"a", b"third"), (b"b", b"b")])
        assert cache.get_many([b"a", b"b"]) == [b"first", b"b"]
        assert cache.stats.written == 2


@pytest.mark.parametrize(
    "low, high, max_mb", [(1_000, 1_000, 1), (1_000, 100_000, 2), (100_000, 100_000, 4), (2_300, 2_400, 3)]
)
def test_bound_holds_and_the_oldest_go(tmp_path: Path, low: int, high: int, max_mb: int) -> None:
    rng = random.Random(f"{low} {high}")
    with ScoreCache(tmp_path, max_mb=max_mb) as cache:
        keys: list[bytes] = []
        written = 0
        while written < 6 * max_mb << 20:
            batch = [key(len(keys) + n) for n in range(rng.choice([1, 3, 24, 60]))]
            values = [payload(one, low, high) for one in batch]
            cache.put_many(zip(batch, values, strict=True))
            assert size(tmp_path) <= max_mb << 20
            assert cache.get_many(batch[-1:]) == values[-1:]
            keys += batch
            written += sum(map(len, values))
        found = cache.get_many(keys)
        assert all(got in (None, payload(one, low, high)) for one, got in zip(keys, found, strict=True))
        kept = [got is not None for got in found]
        assert kept == sorted(kept), "something older was kept than something dropped"
        assert cache.stats.written == len(keys)
        assert cache.stats.evicted == len(keys) - sum(kept)
        assert cache.notes == []
        # Most of the bound is of use.
        assert sum(len(got) for got in found if got is not None) > 0.35 * (max_mb << 20)
    assert verify(str(tmp_path)) == []


def test_an_entry_too_large_for_the_bound(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=1) as cache:
        cache.put_many([(b"a", b"a"), (b"large", bytes(500_000)), (b"b", b"b")])
        assert cache.get_many([b"a", b"large", b"b"]) == [b"a", None, b"b"]
        assert len(cache.notes) == 1
        assert "500" in cache.notes[0]


def test_a_smaller_bound(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=8) as cache:
        cache.put_many(items(range(1400)))
        assert size(tmp_path) > 5 << 20
    with ScoreCache(tmp_path, max_mb=2) as cache:
        assert size(tmp_path) <= 2 << 20
        kept = served_right(cache, range(1400))
        assert 200 < kept < 500
        assert served_right(cache, range(1400 - kept, 1400)) == kept
        cache.put_many(items(range(1400, 2000)))
        assert size(tmp_path) <= 2 << 20
        assert served_right(cache, range(1900, 2000)) == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.json", "data.mdb", "lock.mdb"]
    assert verify(str(tmp_path)) == []


# ---------------------------------------------------------------------------------------------------- damage


def test_a_flipped_byte_of_a_payload(tmp_path: Path) -> None:
    reported: list[str] = []
    with ScoreCache(tmp_path, max_mb=4) as cache:
        cache.put_many(items(range(40)))
    at = (tmp_path / "data.mdb").read_bytes().find(payload(key(7))[:64])
    flip(tmp_path / "data.mdb", at + 30)
    with ScoreCache(tmp_path, max_mb=4, report=reported.append) as cache:
        assert cache.get_many([key(6), key(7)]) == [payload(key(6)), None]
        assert cache.get_many([key(7)]) == [None]
        assert (cache.stats.damaged, cache.stats.hits, cache.stats.misses) == (1, 1, 2)
        assert len(reported) == 1
        assert "damaged" in reported[0]
        cache.put_many(items(range(40)))
        assert cache.stats.written == 1
        assert served_right(cache, range(40)) == 40
        assert cache.stats.damaged == 1


@pytest.mark.parametrize("at", [0, 3, 4, 5, 14, 40, 61, -1, None])
def test_a_stored_value_changed_through_lmdb(tmp_path: Path, at: int | None) -> None:
    """Every field of an entry, and (None) its last part gone."""
    with ScoreCache(tmp_path, max_mb=4) as cache:
        cache.put_many([(key(1), payload(key(1))), (key(2), payload(key(2)))])
    with lmdb.open(str(tmp_path), max_dbs=4, map_size=4 << 20) as env:
        scores = env.open_db(b"scores")
        with env.begin(write=True, db=scores) as txn:
            places = [place for place, _ in txn.cursor() if place[:8] == (1).to_bytes(8, "big")]
            place = places[0] if at is not None and at >= 0 else places[-1]
            if at is None:
                txn.delete(place)
            else:
                value = bytearray(txn.get(place) or b"")
                value[at] ^= 1
                txn.put(place, bytes(value))
    with ScoreCache(tmp_path, max_mb=4) as cache:
        assert cache.get_many([key(1), key(2)]) == [None, payload(key(2))]
        assert cache.stats.damaged == 1
        cache.put_many(items(range(1, 3)))
        assert served_right(cache, range(1, 3)) == 2


def test_a_sound_entry_under_another_key(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=4) as cache:
        cache.put_many([(key(1), payload(key(1))), (key(2), payload(key(2)))])
    with lmdb.open(str(tmp_path), max_dbs=4, map_size=4 << 20) as env:
        index = env.open_db(b"index")
        with env.begin(write=True, db=index) as txn:
            one, two = txn.get(key(1)), txn.get(key(2))
            assert one is not None
            assert two is not None
            txn.put(key(1), two)
            txn.put(key(2), one)
    with ScoreCache(tmp_path, max_mb=4) as cache:
        assert cache.get_many([key(1), key(2)]) == [None, None]
        assert cache.stats.damaged == 2


def test_flips_anywhere_in_the_file(tmp_path: Path) -> None:
    """No flip crashes a process or gives a wrong payload, in the values, in LMDB's tree or in its meta pages."""
    with ScoreCache(tmp_path / "sound", max_mb=2) as cache:
        cache.put_many(items(range(700)))  # more than fits: free pages and their list are there too
        cache.put_many(items(range(150)))
    rng = random.Random(3)
    pages = size(tmp_path / "sound") // 4096
    names = []
    for trial in range(60):
        copy = tmp_path / str(trial)
        shutil.copytree(tmp_path / "sound", copy)
        names.append(copy.name)
        page = rng.randrange(2) if trial < 10 else rng.randrange(pages)
        for _ in range(1 if trial % 3 else 40):
            # Headers and pointers are at the beginning of a page; a third of the trials strikes many pages.
            offset = rng.randrange(160) if trial % 2 else rng.randrange(4096)
            flip(copy / "data.mdb", page * 4096 + offset)
            page = rng.randrange(pages)
    lines = finish(start("flipped", tmp_path, *names)).splitlines()
    assert len(lines) == 60
    results = [tuple(map(int, line.split()[1:])) for line in lines]
    assert all(damaged and notes for served, damaged, notes in results if served < 150)
    assert any(served < 150 for served, _, _ in results)
    assert any(0 < served < 150 for served, _, _ in results), "one damaged value must not cost the others"


@pytest.mark.parametrize("cut", [0, 5000, -4096 * 20])
def test_a_file_that_was_cut(tmp_path: Path, cut: int) -> None:
    with ScoreCache(tmp_path, max_mb=2) as cache:
        cache.put_many(items(range(150)))
    os.truncate(tmp_path / "data.mdb", cut if cut >= 0 else size(tmp_path) + cut)
    finish(start("flipped", tmp_path.parent, tmp_path.name))


def test_after_a_power_failure_the_tree_is_verified(tmp_path: Path) -> None:
    """A file that looks untouched, but of an earlier boot and never synced, with a page that did not arrive."""
    writer = start("write_for_ever", tmp_path, 0)
    assert writer.stdout is not None
    while int(writer.stdout.readline()) < 150:
        pass
    writer.kill()
    writer.communicate()
    with ScoreCache(tmp_path, max_mb=2) as cache:
        assert served_right(cache, range(150)) == 150
        assert cache.notes == []
    state = json.loads((tmp_path / "cache.json").read_text())
    look = os.stat(tmp_path / "data.mdb")
    data = (tmp_path / "data.mdb").read_bytes()
    for page in range(2, len(data) // 4096):
        if data[page * 4096 + 10] in (1, 2):  # branch and leaf pages
            with (tmp_path / "data.mdb").open("r+b") as file:
                file.seek(page * 4096)
                file.write(bytes(4096))
    os.utime(tmp_path / "data.mdb", ns=(look.st_atime_ns, look.st_mtime_ns))
    state |= {"boot": "another", "synced": False, "look": [look.st_ino, look.st_size, look.st_mtime_ns]}
    (tmp_path / "cache.json").write_text(json.dumps(state).ljust(512))
    assert finish(start("flipped", tmp_path.parent, tmp_path.name)).split() == [tmp_path.name, "0", "1", "1"]


# ---------------------------------------------------------------------------------------------------- processes


def test_several_processes_at_once(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=2) as cache:
        processes = [start("share", tmp_path, rank, 60) for rank in range(3)]
        while any(process.poll() is None for process in processes):
            served_right(cache, range(700))
            assert size(tmp_path) <= 2 << 20
        totals = [tuple(map(int, finish(process).split())) for process in processes]
        written, evicted, without_room = map(sum, zip(*totals, strict=True))
        assert written >= 610 or without_room
        assert evicted > 0
        assert cache.stats.damaged == 0
        assert cache.notes == []
    assert verify(str(tmp_path)) == []


def test_a_writer_killed_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(5)
    first = 0
    with ScoreCache(tmp_path / "watched", max_mb=2) as watcher:  # one folder with a reader, one without
        for turn in range(14):
            folder = tmp_path / ("watched" if turn % 2 else "alone")
            writer = start("write_for_ever", folder, first)
            assert writer.stdout is not None
            seen = ""
            if turn > 2:  # the first are killed while the cache is being made
                seen = "".join(writer.stdout.readline() for _ in range(rng.randrange(1, 20)))
            time.sleep(rng.random() * 0.12)
            writer.send_signal(signal.SIGKILL)
            out, err = writer.communicate()
            assert writer.returncode == -signal.SIGKILL, err
            lines = (seen + out).split("\n")[:-1]
            done = int(lines[-1]) + 7 if lines else first
            if folder.name == "alone":
                if (folder / "data.mdb").exists() and size(folder):
                    assert verify(str(folder)) == []
                with ScoreCache(folder, max_mb=2) as cache:
                    assert served_right(cache, range(max(first, done - 100), done)) == min(100, done - first)
                    cache.put_many([(f"{turn}".encode(), b"still writable")])
                    assert cache.get_many([f"{turn}".encode()]) == [b"still writable"]
                    assert (cache.stats.damaged, cache.notes) == (0, [])
            else:
                assert served_right(watcher, range(max(first, done - 100), done)) == min(100, done - first)
            first = done + 7
        assert first > 300
        assert (watcher.stats.damaged, watcher.notes) == (0, [])


def test_a_killed_reader_holds_no_pages(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=2) as cache:
        cache.put_many(items(range(100)))
        reader = start("hold", tmp_path)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        reader.kill()
        reader.communicate()
        for first in range(100, 1500, 20):
            cache.put_many(items(range(first, first + 20)))
        assert served_right(cache, range(1400, 1500)) == 100
        assert cache.notes == []


def test_a_reader_that_never_ends_costs_only_caching(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=2) as cache:
        reader = start("hold", tmp_path)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        for first in range(0, 1500, 20):
            cache.put_many(items(range(first, first + 20)))
            assert size(tmp_path) <= 2 << 20
        assert len(cache.notes) == 1
        assert "reader" in cache.notes[0]
        reader.communicate("")
        for first in range(1500, 1600, 20):
            cache.put_many(items(range(first, first + 20)))
        assert served_right(cache, range(1540, 1600)) == 60


def test_another_process_grows_the_file(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=1) as cache:
        cache.put_many(items(range(20)))
        finish(start("grow", tmp_path, 8, 900))
        assert size(tmp_path) > 2 << 20
        assert served_right(cache, range(1000, 1900)) == 900
        cache.put_many(items(range(20, 40)))
        assert served_right(cache, range(40)) == 40
        assert cache.notes == []
    assert verify(str(tmp_path)) == []


def test_fork(tmp_path: Path) -> None:
    """Parent and child go on, and so does a thread of the parent that reads all the while."""
    with ScoreCache(tmp_path, max_mb=4) as cache:
        cache.put_many(items(range(30)))
        stop = threading.Event()
        counts: list[int] = []

        def read() -> None:
            while not stop.is_set():
                counts.append(served_right(cache, range(30)))

        reader = threading.Thread(target=read)
        reader.start()
        for turn in range(5):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    cache.put_many(items(range(100 + turn, 101 + turn)))
                    assert served_right(cache, range(30)) == 30
                    assert cache.notes == []
                    assert cache._file is not None
                    with cache._file.begin() as txn:  # LMDB knows the child as a process of its own
                        txn.stat()
                        assert str(os.getpid()) in cache._file.env.readers()
                    cache.close()
                    code = 0
                finally:
                    os._exit(code)
            cache.put_many(items(range(200 + turn, 201 + turn)))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        reader.join()
        assert set(counts) == {30}
        assert served_right(cache, range(100, 105)) == served_right(cache, range(200, 205)) == 5
        assert (cache.stats.damaged, cache.notes) == (0, [])
    assert verify(str(tmp_path)) == []


def test_a_full_disk_ends_the_writing_and_nothing_else(tmp_path: Path) -> None:
    assert finish(start("full_disk", tmp_path)) == "went on\n"
    assert verify(str(tmp_path)) == []
    with ScoreCache(tmp_path, max_mb=64) as cache:
        assert served_right(cache, range(510)) == 50


# ---------------------------------------------------------------------------------------------------- errors


def test_folders_that_are_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "a.txt").write_text("mine")
    with lmdb.open(str(tmp_path / "other")) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"b")
    shutil.copytree(tmp_path / "other", tmp_path / "named")
    (tmp_path / "named" / "cache.json").write_text('{"mine": true}')
    for name in ("file", "papers", "other", "named"):
        with pytest.raises(UsageError, match="not a score cache"):
            ScoreCache(tmp_path / name)
    assert os.listdir(tmp_path / "papers") == ["a.txt"]
    assert sorted(os.listdir(tmp_path / "other")) == ["data.mdb", "lock.mdb"]
    with lmdb.open(str(tmp_path / "named")) as env, env.begin() as txn:
        assert txn.get(b"a") == b"b"
    for name in ("nowhere", "papers"):
        with pytest.raises(UsageError, match="no score cache in"):
            ScoreCache(tmp_path / name, readonly=True)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("place", ["database", "state"])
def test_a_newer_format(tmp_path: Path, place: str) -> None:
    with ScoreCache(tmp_path, max_mb=1) as cache:
        cache.put_many(items(range(3)))
    if place == "database":
        with lmdb.open(str(tmp_path), max_dbs=4) as env:
            about = env.open_db(b"gatespace")
            with env.begin(write=True, db=about) as txn:
                assert txn.get(b"created")
                txn.put(b"format", b"2")
    else:
        (tmp_path / "cache.json").write_text(
            (tmp_path / "cache.json").read_text().replace('"format": 1', '"format": 2')
        )
    with pytest.raises(UsageError, match="another format") as caught:
        ScoreCache(tmp_path, max_mb=1)
    assert "format 2" in str(caught.value)


def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        printed = finish(start("no_permission", tmp_path / "cache"))
    finally:
        tmp_path.chmod(0o755)
    assert printed.startswith("2 no permission to use the score cache")


def test_misuse(tmp_path: Path) -> None:
    for bound in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="MiB"):
            ScoreCache(tmp_path / "never", max_mb=bound)  # type: ignore[arg-type]
    assert not (tmp_path / "never").exists()
    cache = ScoreCache(tmp_path, max_mb=1)
    with pytest.raises(UsageError, match="already open in this process"):
        ScoreCache(tmp_path, max_mb=1)
    for bad in (b"", b"x" * 65, "text"):
        with pytest.raises(UsageError, match="key of the score cache"):
            cache.get_many([bad])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="key of the score cache"):
            cache.put_many([(bad, b"")])  # type: ignore[list-item]
    cache.put_many([(b"a", b"b")])
    cache.close()
    cache.close()
    with pytest.raises(UsageError, match="closed"):
        cache.get_many([b"a"])
    with ScoreCache(tmp_path, max_mb=1) as again:
        assert again.get_many([b"a"]) == [b"b"]


def test_imports_are_late_and_a_missing_package_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['lmdb'] = None\n"
        "from pathlib import Path\n"
        "from gatespace.teacher.cache import ScoreCache\n"
        "assert 'torch' not in sys.modules\n"
        "from gatespace.errors import MissingExtraError\n"
        "try: ScoreCache(Path(sys.argv[1]))\n"
        "except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "gatespace[train]" in done.stdout
