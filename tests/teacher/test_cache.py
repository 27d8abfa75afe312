"""The score cache with real processes, real kills and real damage."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gatespace.errors import UsageError
from gatespace.teacher import cache as module
from gatespace.teacher.cache import FILE, CacheStats, ScoreCache, prefix_keys
from tests.teacher import cache_workers
from tests.teacher.cache_workers import items, key, payload, served_right

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
    with ScoreCache(tmp_path / "deep" / "cache", max_mb=4, report=pytest.fail) as cache:
        assert cache.get_many(keys * 50) == [value for _, value in stored] * 50


def test_an_existing_key_keeps_its_entry(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=4) as cache, ScoreCache(tmp_path, max_mb=4) as other:
        cache.put_many([(b"a", b"first"), (b"a", b"second")])
        other.put_many([(b"a", b"third"), (b"b", b"b")])
        assert cache.get_many([b"a", b"b"]) == [b"first", b"b"]
        assert (cache.stats.written, other.stats.written) == (1, 1)


@pytest.mark.parametrize("low, high, max_mb", [(1_000, 1_000, 1), (1_000, 100_000, 2), (2_300, 2_400, 3)])
def test_the_limit_holds_and_the_oldest_go(tmp_path: Path, low: int, high: int, max_mb: int) -> None:
    rng = random.Random(f"{low} {high}")
    with ScoreCache(tmp_path, max_mb=max_mb, report=pytest.fail) as cache:
        keys: list[bytes] = []
        largest = 0
        while sum(len(payload(one, low, high)) for one in keys) < 6 * max_mb << 20:
            batch = [key(len(keys) + n) for n in range(rng.choice([1, 3, 24]))]
            values = [payload(one, low, high) for one in batch]
            cache.put_many(zip(batch, values, strict=True))
            largest = max(largest, sum(map(len, values)))
            assert size(tmp_path) <= (max_mb << 20) + 2 * largest + 65536, "at most one batch above"
            assert cache.get_many(batch) == values
            keys += batch
        found = cache.get_many(keys)
        assert all(got in (None, payload(one, low, high)) for one, got in zip(keys, found, strict=True))
        kept = [got is not None for got in found]
        assert kept == sorted(kept), "something older was kept than something dropped"
        assert cache.stats.evicted == cache.stats.written - sum(kept)
        assert sum(len(got) for got in found if got is not None) > 0.5 * (max_mb << 20)
    with ScoreCache(tmp_path, max_mb=1):
        assert size(tmp_path) <= 1 << 20
    assert is_whole(tmp_path)


# ---------------------------------------------------------------------------------------------------- damage


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
    notes: list[str] = []
    with ScoreCache(tmp_path, max_mb=4, report=notes.append) as cache:
        cache.put_many(items(range(1, 3)))
        execute(tmp_path, f"UPDATE scores SET {change} WHERE id = 1")
        assert cache.get_many([key(1), key(2)]) == [None, payload(key(2))]
        assert cache.get_many([key(1)]) == [None]
        assert cache.stats.damaged == len(notes) == 1
        cache.put_many(items(range(1, 3)))
        assert served_right(cache, range(1, 3)) == 2


@pytest.mark.parametrize("trials", [60, pytest.param(600, marks=pytest.mark.long)])
def test_pages_zeroed_swapped_and_flipped_and_files_cut(tmp_path: Path, trials: int) -> None:
    """No damage ends a process or gives a wrong payload, whether it comes before the file is opened or after."""
    lines = finish(start("attack", tmp_path, 0, trials), timeout=900).splitlines()
    assert len(lines) == trials
    assert len({line.split()[1] for line in lines if int(line.split()[3]) < 100}) == 4, "the attack must do damage"
    assert any(0 < int(line.split()[3]) < 100 for line in lines), "one damaged value must not cost the others"


@pytest.mark.parametrize("content", [b"none of ours" * 1000, b"SQLite format 3\0"])
def test_a_file_with_other_content_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    notes: list[str] = []
    for done in (False, True):
        with ScoreCache(tmp_path, max_mb=2, report=notes.append) as cache:
            cache.put_many(items(range(20)))
            assert served_right(cache, range(20)) == 20 * done
    (note,) = notes
    assert "is damaged and is deleted" in note


# ---------------------------------------------------------------------------------------------------- processes


def test_several_processes_at_once(tmp_path: Path) -> None:
    with ScoreCache(tmp_path, max_mb=2, report=pytest.fail) as cache:
        processes = [start("share", tmp_path, rank, 60) for rank in range(3)]
        while any(process.poll() is None for process in processes):
            served_right(cache, range(700))
        totals = [tuple(map(int, finish(process).split())) for process in processes]
        written, evicted = (sum(counts) for counts in zip(*totals, strict=True))
        assert written >= 610
        assert evicted > 0
        assert served_right(cache, range(610)) == written - evicted
        assert cache.stats.damaged == 0
    assert is_whole(tmp_path)


def test_a_writer_killed_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(5)
    first = 0
    for turn in range(10):
        if turn < 4:  # killed while the cache is being made
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        writer = start("write_for_ever", tmp_path / "cache", first)
        assert writer.stdout is not None
        writer.stdout.readline()
        if turn >= 4:
            writer.stdout.readline()
        time.sleep(rng.random() * (0.15 if turn >= 4 else 0.02))
        writer.send_signal(signal.SIGKILL)
        out, err = writer.communicate()
        assert writer.returncode == -signal.SIGKILL, err
        lines = out.split("\n")[:-1]
        done = int(lines[-1]) + 7 if lines else first
        with ScoreCache(tmp_path / "cache", max_mb=2, report=pytest.fail) as cache:
            assert served_right(cache, range(max(first, done - 100), done)) == min(100, done - first)
            cache.put_many([(f"{turn}".encode(), b"still writable")])
            assert cache.get_many([f"{turn}".encode()]) == [b"still writable"]
            assert cache.stats.damaged == 0
        assert is_whole(tmp_path / "cache")
        first = done + 7


# ---------------------------------------------------------------------------------------------------- no cache


@pytest.mark.parametrize("trouble", ["hold", "full", "moved", "read_only"])
def test_trouble_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    """A file that other processes or the system refuse is left alone, and everything is a miss from then on."""
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    notes: list[str] = []
    with ScoreCache(tmp_path / "cache", report=notes.append) as cache:
        cache.put_many(items(range(50)))
        with contextlib.closing(sqlite3.connect(tmp_path / "cache" / FILE, isolation_level=None)) as other:
            if trouble == "hold":  # a reader that never ends
                other.execute("BEGIN")
                other.execute("SELECT count(*) FROM scores").fetchall()
            elif trouble == "full":
                assert cache._database is not None
                cache._database.execute("PRAGMA max_page_count = 40")
            elif trouble == "moved":
                (tmp_path / "cache").rename(tmp_path / "moved")
            else:
                assert cache._database is not None
                cache._database.execute("PRAGMA query_only = ON")
            began = time.monotonic()
            for start in range(100, 400, 20):
                cache.put_many(items(range(start, start + 20)))
            assert time.monotonic() - began < 5, "every call waited"
        assert served_right(cache, range(50)) == 0
    (note,) = notes
    assert "cannot be used; scores are computed" in note
    with ScoreCache(tmp_path / ("moved" if trouble == "moved" else "cache"), report=pytest.fail) as cache:
        assert served_right(cache, range(50)) == 50


def test_misuse(tmp_path: Path) -> None:
    for limit in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="MiB"):
            ScoreCache(tmp_path / "never", max_mb=limit)  # type: ignore[arg-type]
    assert not (tmp_path / "never").exists()
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="needs a folder"):
        ScoreCache(tmp_path / "mine.txt")
    cache = ScoreCache(tmp_path, max_mb=1)
    cache.close()
    cache.close()
    with pytest.raises(UsageError, match="closed"):
        cache.get_many([b"a"])
    with pytest.raises(UsageError, match="closed"):
        cache.put_many([(b"a", b"b")])


def test_torch_is_not_needed() -> None:
    code = "import sys; import gatespace.teacher.cache; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
