"""The score cache with real processes, real kills and real damage."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from gatespace.errors import UsageError
from gatespace.teacher import cache as module
from gatespace.teacher.cache import FILE, CacheStats, ScoreCache, prefix_keys
from tests.teacher import cache_workers
from tests.teacher.cache_workers import damage, items, key, payload, served_right

ROOT = Path(__file__).resolve().parents[2]


def start(work: str, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, cache_workers.__file__, work, str(folder), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT
    )


def finish(process: subprocess.Popen[str], timeout: int = 120) -> str:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{err}"
    return out


def size(folder: Path) -> int:
    return (folder / FILE).stat().st_size


def execute(folder: Path, statement: str, *arguments: object) -> list[tuple[object, ...]]:
    """What SQLite itself answers."""
    with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as database:
        return database.execute(statement, arguments).fetchall()


def is_whole(folder: Path) -> bool:
    return execute(folder, "PRAGMA integrity_check") == [("ok",)]


# ---------------------------------------------------------------------------------------------------- keys


def one_key(fingerprint: str, numerics: str, prompt: list[int], response: list[int]) -> bytes:
    """The key after `response`."""
    return prefix_keys(fingerprint=fingerprint, numerics=numerics, prompt=prompt, response=[*response, 0])[-1]


def test_prefix_keys_are_the_keys_of_the_positions() -> None:
    response = [5, 0, 2**40, 7]
    keys = prefix_keys(fingerprint="f", numerics="n", prompt=[1, 2], response=response)
    assert keys == [one_key("f", "n", [1, 2], response[:t]) for t in range(4)]
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
    keys = {one_key(*call) for call in calls}
    assert len(keys) == len(calls)
    assert {len(one) for one in keys} == {32}


def test_token_ids_that_are_none() -> None:
    with pytest.raises(UsageError, match="token ids"):
        prefix_keys(fingerprint="f", numerics="n", prompt=[0.5], response=[])  # type: ignore[list-item]


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
    with ScoreCache(tmp_path / "deep" / "cache", max_mb=4) as cache:
        assert cache.get_many(keys * 50) == [value for _, value in stored] * 50
        assert cache.notes == []


def test_an_existing_key_keeps_its_entry(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=4) as cache, ScoreCache(tmp_path, max_mb=4) as other:
        cache.put_many([(b"a", b"first"), (b"a", b"second")])
        other.put_many([(b"a", b"third"), (b"b", b"b")])
        assert cache.get_many([b"a", b"b"]) == [b"first", b"b"]
        assert (cache.stats.written, other.stats.written) == (1, 1)


def test_the_format_of_this_version(tmp_path: Path) -> None:
    """Entries as every process of this version writes them: a change of the format needs another file name."""
    with ScoreCache(tmp_path, max_mb=4):
        pass
    checksum = hashlib.blake2b(bytes([1]) + b"k" + b"payload", digest_size=16, person=b"gatespace.sum.2").digest()
    execute(tmp_path, "INSERT INTO scores (key, checksum, payload) VALUES (?, ?, ?)", b"k", checksum, b"payload")
    with ScoreCache(tmp_path, max_mb=4) as cache:
        assert cache.get_many([b"k"]) == [b"payload"]
    assert FILE == "gatespace-scores-2.sqlite"


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
        assert sum(len(got) for got in found if got is not None) > 0.5 * (max_mb << 20)
    assert is_whole(tmp_path)


def test_an_entry_too_large_for_the_bound(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=1) as cache:
        cache.put_many([(b"a", b"a"), (b"large", bytes(500_000)), (b"b", b"b")])
        assert cache.get_many([b"a", b"large", b"b"]) == [b"a", None, b"b"]
        assert len(cache.notes) == 1
        assert "too small for some entries: 500000 bytes" in cache.notes[0]


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
        assert cache.notes == []
    assert is_whole(tmp_path)


# ---------------------------------------------------------------------------------------------------- damage


def test_a_flipped_byte_of_a_payload(tmp_path: Path) -> None:
    reported: list[str] = []
    with ScoreCache(tmp_path, max_mb=4) as cache:
        cache.put_many(items(range(40)))
    data = bytearray((tmp_path / FILE).read_bytes())
    data[data.find(payload(key(7))[:64]) + 30] ^= 0x41
    (tmp_path / FILE).write_bytes(data)
    with ScoreCache(tmp_path, max_mb=4, report=reported.append) as cache:
        assert cache.get_many([key(6), key(7)]) == [payload(key(6)), None]
        assert cache.get_many([key(7)]) == [None]
        assert (cache.stats.damaged, cache.stats.hits, cache.stats.misses) == (1, 1, 2)
        assert len(reported) == 1
        assert "damaged entries" in reported[0]
        cache.put_many(items(range(40)))
        assert cache.stats.written == 1
        assert served_right(cache, range(40)) == 40
        assert cache.stats.damaged == 1


@pytest.mark.parametrize(
    "change",
    [
        "payload = x'00'",
        "payload = 'text'",
        "payload = NULL",
        "payload = 7",
        "checksum = NULL",
        "payload = (SELECT payload FROM scores WHERE id = 2)",
        "(payload, checksum) = (SELECT payload, checksum FROM scores WHERE id = 2)",
    ],
)
def test_an_entry_that_is_not_the_one_that_was_stored(tmp_path: Path, change: str) -> None:
    with ScoreCache(tmp_path, max_mb=4) as cache:
        cache.put_many(items(range(1, 3)))
        execute(tmp_path, f"UPDATE scores SET {change} WHERE id = 1")
        assert cache.get_many([key(1), key(2)]) == [None, payload(key(2))]
        assert cache.stats.damaged == 1
        cache.put_many(items(range(1, 3)))
        assert served_right(cache, range(1, 3)) == 2


@pytest.mark.parametrize("trials", [60, pytest.param(600, marks=pytest.mark.long)])
def test_pages_zeroed_swapped_and_flipped_and_files_cut(tmp_path: Path, trials: int) -> None:
    """No damage ends a process or gives a wrong payload, whether it comes before the file is opened or after."""
    lines = finish(start("attack", tmp_path, 0, trials), timeout=900).splitlines()
    assert len(lines) == trials
    hits = set()
    noticed = 0
    for line in lines:
        _, kind, when, served, damaged = line.split()
        if int(served) < 100:
            hits.add((kind, when))
            noticed += int(damaged) > 0
    assert len(hits) == 8, "the attack must do damage"
    assert noticed > trials / 2
    assert any(0 < int(line.split()[3]) < 100 for line in lines), "one damaged value must not cost the others"


@pytest.mark.parametrize("content", [b"", b"none of ours" * 1000, b"SQLite format 3\0"])
def test_a_file_with_other_content(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with ScoreCache(tmp_path, max_mb=2) as cache:
        cache.put_many(items(range(20)))
        assert served_right(cache, range(20)) == 20
        assert len(cache.notes) == cache.stats.damaged == bool(content)


def test_another_process_replaces_a_damaged_file(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=2) as cache:
        cache.put_many(items(range(100)))
        served_right(cache, range(100))
        damage(tmp_path / FILE, "zeroed", random.Random(0))
        with ScoreCache(tmp_path, max_mb=2) as other:
            served_right(other, range(100))
            other.put_many(items(range(100, 120)))
            assert served_right(other, range(100, 120)) == 20
        assert served_right(cache, range(120)) == 20
        assert (cache.stats.damaged, cache.notes) == (0, [])


def test_the_folder_is_deleted_while_it_is_used(tmp_path: Path) -> None:
    with ScoreCache(tmp_path / "cache", max_mb=2) as cache:
        cache.put_many(items(range(20)))
        shutil.rmtree(tmp_path / "cache")
        assert served_right(cache, range(20)) == 0
        cache.put_many(items(range(20)))
        assert served_right(cache, range(20)) == 20
        assert cache.notes == []


# ---------------------------------------------------------------------------------------------------- processes


def test_several_processes_at_once(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=2) as cache:
        processes = [start("share", tmp_path, rank, 60) for rank in range(3)]
        while any(process.poll() is None for process in processes):
            served_right(cache, range(700))
            assert size(tmp_path) <= 2 << 20
        totals = [tuple(map(int, finish(process).split())) for process in processes]
        written, evicted = (sum(counts) for counts in zip(*totals, strict=True))
        assert written >= 610
        assert evicted > 0
        assert served_right(cache, range(610)) == written - evicted
        assert cache.stats.damaged == 0
        assert cache.notes == []
    assert is_whole(tmp_path)


def test_a_writer_killed_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(5)
    first = 0
    with ScoreCache(tmp_path / "watched", max_mb=2) as watcher:  # one folder with a reader, one without
        for turn in range(14):
            folder = tmp_path / ("watched" if turn % 2 else "alone")
            if turn < 6:  # killed while the cache is being made
                shutil.rmtree(folder, ignore_errors=True)
            writer = start("write_for_ever", folder, first)
            assert writer.stdout is not None
            writer.stdout.readline()
            if turn >= 6:
                writer.stdout.readline()
            time.sleep(rng.random() * (0.15 if turn >= 6 else 0.02))
            writer.send_signal(signal.SIGKILL)
            out, err = writer.communicate()
            assert writer.returncode == -signal.SIGKILL, err
            lines = out.split("\n")[:-1]
            done = int(lines[-1]) + 7 if lines else first
            with ScoreCache(folder, max_mb=2) if turn % 2 == 0 else contextlib.nullcontext(watcher) as cache:
                assert served_right(cache, range(max(first, done - 100), done)) == min(100, done - first)
                cache.put_many([(f"{turn}".encode(), b"still writable")])
                assert cache.get_many([f"{turn}".encode()]) == [b"still writable"]
                assert (cache.stats.damaged, cache.notes) == (0, [])
            assert is_whole(folder)
            first = done + 7


def test_a_reader_that_never_ends_costs_only_caching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    with ScoreCache(tmp_path, max_mb=2) as cache:
        cache.put_many(items(range(20)))
        for killed in (False, True):
            reader = start("hold", tmp_path)
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
            began = time.monotonic()
            for first in range(100, 400, 20):
                cache.put_many(items(range(first, first + 20)))
            assert time.monotonic() - began < 10, "every call waited"
            assert served_right(cache, range(400)) == 20
            assert len(cache.notes) == 1
            assert "held by another process" in cache.notes[0]
            if killed:
                reader.kill()
            reader.communicate("")
        cache.put_many(items(range(1500, 1560)))
        assert served_right(cache, range(1500, 1560)) == 60


def test_each_process_keeps_to_its_own_bound(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=1) as small, ScoreCache(tmp_path, max_mb=8) as large:
        large.put_many(items(range(900)))
        assert size(tmp_path) > 2 << 20
        assert served_right(small, range(900)) == 900
        small.put_many(items(range(900, 920)))
        assert 20 < served_right(small, range(920)) < 250
        assert served_right(large, range(900, 920)) == 20
        assert small.notes == large.notes == []
    assert is_whole(tmp_path)


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
            mine = cache._database
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    cache.put_many(items(range(100 + turn, 101 + turn)))
                    assert served_right(cache, range(30)) == 30
                    assert cache.notes == []
                    assert cache._database is not mine  # SQLite allows no connection in two processes
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
    assert is_whole(tmp_path)


# ---------------------------------------------------------------------------------------------------- no cache


def test_a_full_disk_ends_the_writing_and_nothing_else(tmp_path: Path) -> None:
    assert finish(start("full_disk", tmp_path)) == "went on\n"
    assert is_whole(tmp_path)
    with ScoreCache(tmp_path, max_mb=64) as cache:
        assert served_right(cache, range(510)) == 50


@pytest.mark.parametrize("stored", [0, 10])
def test_a_read_only_folder(stored: int) -> None:
    """What is there is served, nothing is written, and no error is raised."""
    with tempfile.TemporaryDirectory() as name:  # where another user gets in, other than in tmp_path
        Path(name).chmod(0o755)
        folder = Path(name) / "cache"
        if stored:
            with ScoreCache(folder) as cache:
                cache.put_many(items(range(stored)))
            folder.chmod(0o555)
            (folder / FILE).chmod(0o444)
        Path(name).chmod(0o555)
        try:
            served, *notes = finish(start("read_only", folder)).splitlines()
        finally:
            Path(name).chmod(0o755)
            if stored:
                folder.chmod(0o755)
    assert int(served) == stored
    assert len(notes) == 1
    assert ("is no longer written to" if stored else "cannot be used") in notes[0]


def test_misuse(tmp_path: Path) -> None:
    for bound in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="MiB"):
            ScoreCache(tmp_path / "never", max_mb=bound)  # type: ignore[arg-type]
    assert not (tmp_path / "never").exists()
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="needs a folder"):
        ScoreCache(tmp_path / "mine.txt")
    cache = ScoreCache(tmp_path, max_mb=1)
    cache.put_many([(b"a", b"b")])
    cache.close()
    cache.close()
    with pytest.raises(UsageError, match="closed"):
        cache.get_many([b"a"])
    with pytest.raises(UsageError, match="closed"):
        cache.put_many([(b"a", b"b")])
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_torch_is_not_needed() -> None:
    code = "import sys; import gatespace.teacher.cache; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
