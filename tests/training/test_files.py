from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatespace.errors import RunError, UsageError
from gatespace.files import JsonLines, atomic_write, claim, encode, read

RECORDS = [{"step": 0, "accuracy": 0.1 + 0.2}, {"step": 1, "text": "ü\n\u2028"}, {"step": 2}, {"step": 2, "x": [1]}]


def written(path: Path, records: list[dict[str, object]]) -> bytes:
    with JsonLines(path) as log:
        for record in records:
            log.append(record)
    return path.read_bytes()


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


# ---------------------------------------------------------------------------------------------------- records


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_exactly(value: float) -> None:
    assert json.loads(encode({"x": value}))["x"].hex() == value.hex()


def test_equal_records_have_equal_bytes_whatever_the_order_of_their_keys() -> None:
    assert encode({"b": 1, "a": {"d": 1, "c": 2}}) == encode({"a": {"c": 2, "d": 1}, "b": 1})


def test_what_is_not_finite_is_null_and_the_line_is_json_for_strict_readers() -> None:
    def strict(name: str) -> None:
        raise AssertionError(name)

    line = encode({"x": [math.nan, (math.inf, 1.0)], "y": {"z": -math.inf}})
    assert json.loads(line, parse_constant=strict) == {"x": [None, [None, 1.0]], "y": {"z": None}}


def test_half_a_character_of_a_cut_response_is_no_obstacle() -> None:
    assert json.loads(encode({"text": "a\ud800b"})) == {"text": "a\ud800b"}


def test_what_json_cannot_hold_is_an_error_and_leaves_no_trace(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    with pytest.raises(UsageError, match="JSON"):
        log.append({"step": 1, "x": object()})
    for step in (None, True, 1.0, "1"):
        with pytest.raises(UsageError, match="step"):
            log.append({"step": step})
    assert read(log.path) == []


def test_records_are_read_as_they_were_appended(tmp_path: Path) -> None:
    content = written(tmp_path / "deep" / "log.jsonl", RECORDS)
    assert read(tmp_path / "deep" / "log.jsonl") == RECORDS
    assert content.count(b"\n") == len(RECORDS)


# ---------------------------------------------------------------------------------------------------- truncation


@pytest.mark.parametrize("step,left", [(-1, 0), (0, 1), (1, 2), (2, 4), (9, 4)])
def test_records_of_later_steps_go(tmp_path: Path, step: int, left: int) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    written(log.path, RECORDS)
    assert log.truncate_after(step) == left
    assert log.path.read_bytes() == b"".join(map(encode, RECORDS[:left]))


def test_wherever_the_last_line_was_torn_the_log_ends_as_if_it_never_was(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.jsonl", RECORDS)
    for size in range(len(whole) + 1):
        log = JsonLines(tmp_path / "log.jsonl")
        log.path.write_bytes(whole[:size])
        assert read(log.path) == RECORDS[: whole[:size].count(b"\n")]
        left = log.truncate_after(2)
        assert log.path.read_bytes() == whole[: whole[:size].rfind(b"\n") + 1]
        for record in RECORDS[left:]:
            log.append(record)
        log.close()
        assert log.path.read_bytes() == whole


def test_a_log_goes_on_after_truncation_in_the_same_file(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    for step in (1, 2, 3):
        log.append({"step": step})
    log.truncate_after(1)
    log.append({"step": 2, "again": True})
    log.close()
    assert read(log.path) == [{"step": 1}, {"step": 2, "again": True}]


def test_a_later_step_before_an_earlier_one_goes_too(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    written(log.path, [{"step": 1}, {"step": 5}, {"step": 2}, {"step": 6}])
    assert log.truncate_after(2) == 2
    assert read(log.path) == [{"step": 1}, {"step": 2}]


def test_a_hole_before_the_checkpoint_is_an_error_where_every_step_must_be_there(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    before = written(log.path, [{"step": 1}, {"step": 3}, {"step": 4}])
    with pytest.raises(RunError, match="no record of step 2"):
        log.truncate_after(3, complete=True)
    assert log.path.read_bytes() == before
    assert log.truncate_after(1, complete=True) == 1
    with pytest.raises(RunError, match="no record of step 1"):
        JsonLines(tmp_path / "absent.jsonl").truncate_after(1, complete=True)
    assert JsonLines(tmp_path / "absent.jsonl").truncate_after(-1) == 0


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b"[1]\n", b'{"step": 1\n'])
def test_a_damaged_line_is_named_and_not_dropped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode({"step": 1}) + damage + encode({"step": 2}))
    with pytest.raises(RunError, match="line 2"):
        JsonLines(path).truncate_after(1)
    with pytest.raises(RunError, match="line 2"):
        read(path)


def test_a_writer_killed_at_any_moment_leaves_whole_lines_and_at_most_one_torn(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gatespace.files import JsonLines\n"
        "log = JsonLines(Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    log.append({'step': step, 'text': 'x' * 50_000})\n"
        "    if step == 20: print('go', flush=True)\n"
    )
    path = tmp_path / "log.jsonl"
    writer = python(code, path)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "go\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    steps = [record["step"] for record in read(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 20
    assert JsonLines(path).truncate_after(10) == 11
    assert path.read_bytes().endswith(b"\n")


# ---------------------------------------------------------------------------------------------------- whole files


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "summary.json"
    atomic_write(path, "ü")
    (tmp_path / "new" / ".summary.json.tmp").write_text("left by a killed writer, and longer than what comes")
    atomic_write(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["summary.json"]


def test_a_reader_never_sees_a_half_written_file_of_a_writer_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gatespace.files import atomic_write\n"
        "for turn in range(10**9):\n"
        "    atomic_write(Path(sys.argv[1]), bytes([turn % 256]) * 3_000_000)\n"
        "    if turn == 0: print('go', flush=True)\n"
    )
    path = tmp_path / "file"
    for _ in range(3):
        writer = python(code, path)
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(10):
            content = path.read_bytes()
            assert len(content) == 3_000_000
            assert content.count(content[:1]) == 3_000_000
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        content = path.read_bytes()
        assert content.count(content[:1]) == 3_000_000


def test_trouble_with_the_disk_is_an_error_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError, match="cannot be read or written"):
        atomic_write(tmp_path / "file" / "x", "")
    with pytest.raises(RunError, match="cannot be read or written"):
        JsonLines(tmp_path / "file" / "x").append({"step": 1})
    if Path("/dev/full").exists():
        with pytest.raises(RunError, match="space"):
            JsonLines(Path("/dev/full")).append({"step": 1})


# ---------------------------------------------------------------------------------------------------- one at a time


def test_a_run_folder_is_held_by_one_process_until_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gatespace.files import claim\n"
        "with claim(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()\n"
    )
    folder = tmp_path / "run"
    holder = python(code, folder)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match="another process"), claim(folder):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with claim(folder):
        pass
    with claim(folder):  # given back at the end, too
        pass


def test_the_files_need_no_torch() -> None:
    code = "import sys, gatespace.files; print('torch' in sys.modules)"
    assert python(code).communicate()[0] == "False\n"
