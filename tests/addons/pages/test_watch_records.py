"""Logs that grow, are cut, are written anew and vanish, while they are read."""

from __future__ import annotations

import os

import pytest

from gatespace.addons.pages.watch_records import Budget, Records, Tail, thinned
from tests.explore.watched import lines, record


def steps(tail: Tail, budget: int = 10**6) -> tuple[bool, list[int]]:
    anew, records = tail.read(Budget(budget))
    return anew, [one["step"] for one in records]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(path, record(1), record(2))
    return path


def test_only_what_is_new_and_whole(log):
    tail = Tail(log)
    assert steps(tail) == (False, [1, 2])
    assert steps(tail) == (False, [])
    lines(log, record(3), tail=b'{"step": 4, "lo')
    assert steps(tail) == (False, [3])
    lines(log, tail=b'ss": 1.5}\n')
    assert steps(tail) == (False, [4])
    budget = Budget(10**6)
    lines(log, record(5))
    assert tail.read(budget)[1][0]["step"] == 5
    assert budget.left == 10**6 - len(log.read_bytes().splitlines(keepends=True)[-1])


def test_a_log_that_was_cut_is_read_anew(log):
    tail = Tail(log)
    steps(tail)
    os.truncate(log, len(log.read_bytes().splitlines(keepends=True)[0]))
    assert steps(tail) == (True, [1])
    lines(log, record(2, loss=9.0), record(3))
    assert steps(tail) == (False, [2, 3])


def test_a_log_that_was_cut_and_has_grown_beyond_where_it_was(log):
    tail = Tail(log)
    steps(tail)
    os.truncate(log, len(log.read_bytes().splitlines(keepends=True)[0]))
    lines(log, record(2, loss=123456.789), record(3), record(4))
    assert steps(tail) == (True, [1, 2, 3, 4])


def test_a_log_that_was_replaced(log):
    tail = Tail(log)
    steps(tail)
    log.rename(log.with_name("old"))
    assert steps(tail) == (True, [])
    assert steps(tail) == (False, [])
    lines(log, record(1), record(2), record(3))
    assert steps(tail) == (False, [1, 2, 3])
    other = log.with_name("other")
    other.write_bytes(log.read_bytes())
    other.replace(log)
    assert steps(tail) == (True, [1, 2, 3])


def test_a_long_log_is_read_in_parts(log):
    lines(log, *(record(step) for step in range(3, 40)))
    tail, seen = Tail(log), []
    for _ in range(100):
        _, found = steps(tail, 500)
        assert found
        seen += found
        if not tail.behind:
            break
    assert seen == list(range(1, 40))
    assert len(seen) > len(found) > 0
    lines(log, record(40))
    assert (steps(tail, 0), tail.behind) == ((False, []), True)


def test_a_line_that_is_no_record_is_passed_over(log):
    lines(log, tail=b"nonsense\n[1]\n\xff\xfe\n")
    lines(log, record(3))
    assert steps(Tail(log)) == (False, [1, 2, 3])


def test_columns_follow_their_files(tmp_path):
    records = Records(tmp_path)
    records.read(Budget(10**6), 1)
    assert (records.step, records.version, records.seconds_per_step) == (0, 0, None)
    lines(tmp_path / "metrics.jsonl", record(1, lam_mean=None), record(2), record(3, loss=None), {"loss": 1.0})
    lines(tmp_path / "timings.jsonl", {"step": 1, "wall": {"a": 1.0, "b": 0.5}}, {"step": 2, "wall": {"a": 0.5}})
    for split, step, accuracy in (("val", 0, 0.25), ("test", 1, 0.9), ("val", 2, 0.5)):
        lines(tmp_path / "evaluations.jsonl", {"split": split, "step": step, "accuracy": accuracy})
    records.read(Budget(10**6), 2)
    assert (records.step, records.version, records.seconds_per_step) == (3, 2, 1.0)
    curves = records.curves(final=(3, 0.75))
    assert (curves["step"], curves["loss"][2], curves["lam"][0]) == ([1, 2, 3], None, None)
    assert curves["loss"][0] == pytest.approx(record(1)["loss"], rel=1e-5)
    assert (curves["evaluated"], curves["accuracy"]) == ([0, 2, 3], [0.25, 0.5, 0.75])
    records.read(Budget(10**6), 3)
    assert records.version == 2
    os.truncate(tmp_path / "metrics.jsonl", (tmp_path / "metrics.jsonl").read_bytes().index(b"\n") + 1)
    (tmp_path / "evaluations.jsonl").unlink()
    records.read(Budget(10**6), 4)
    assert (records.step, records.version, records.accuracies) == (1, 4, {})
    lines(tmp_path / "metrics.jsonl", record(5), record(4))
    records.read(Budget(10**6), 5)
    assert list(records.steps) == [1, 4]


def test_thinning_keeps_ends_and_means():
    assert thinned([1.0, 2.0], 2) == [1.0, 2.0]
    assert thinned([1.0, 2.0, 6.0], 2) == [1.5, 6.0]
    assert thinned([1, 2, 3], 2, last=True) == [2, 3]
    assert thinned([float("nan"), float("nan"), 1.0, float("inf")], 2) == [None, None]
    assert thinned([], 2) == []
    many = thinned([float(i) for i in range(1001)], 100)
    assert len(many) <= 100
    assert many[0] == 5.0
