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
from gatespace.files import JsonLines, Mark, atomic_write, claim, encode, read

RECORDS = [{"step": 0, "accuracy": 0.1 + 0.2}, {"step": 1, "text": "ü\n\u2028"}, {"step": 2}, {"step": 2, "x": [1]}]


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


# ---------------------------------------------------------------------------------------------------- records


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_exactly(value: float) -> None:
    assert json.loads(encode({"x": value}))["x"].hex() == value.hex()


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"b": 1, "a": {"d": 1, "c": 2}}, {"a": {"c": 2, "d": 1}, "b": 1}),
        ({"x": [math.nan, (math.inf, 1.0)], "y": {"z": -math.inf}}, {"x": [None, [None, 1.0]], "y": {"z": None}}),
        ({"text": "a\ud800b"}, {"text": "a\ud800b"}),  # half a character of a truncated response
    ],
)
def test_lines_are_strict_json_with_sorted_keys(record: dict[str, object], line: dict[str, object]) -> None:
    assert json.loads(encode(record), parse_constant=pytest.fail) == line
    assert encode(record) == encode(line)


def test_what_json_cannot_hold_is_an_error_and_leaves_no_trace(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    with pytest.raises(UsageError, match="JSON"):
        log.append({"step": 1, "x": object()})
    for step in (None, True, 1.0, "1"):
        with pytest.raises(UsageError, match="step"):
            log.append({"step": step})
    assert read(log.path) == []


# ---------------------------------------------------------------------------------------------------- truncation


def marked(path: Path) -> tuple[JsonLines, list[Mark]]:
    """A log, and the marks before, between and after its records."""
    log = JsonLines(path)
    marks = [log.mark]
    for record in RECORDS:
        log.append(record)
        marks.append(log.mark)
    log.close()
    return log, marks


@pytest.mark.parametrize("left", range(5))
def test_records_after_a_mark_go(tmp_path: Path, left: int) -> None:
    log, marks = marked(tmp_path / "log.jsonl")
    assert marks[0] == Mark()
    for again in (log, JsonLines(log.path)):  # by the process that wrote it, or by another
        again.cut(marks[left])
        assert log.path.read_bytes() == b"".join(map(encode, RECORDS[:left]))
        assert again.mark == marks[left]
        for record in RECORDS[left:]:
            again.append(record)
        assert again.mark == marks[-1]
        again.close()


def test_wherever_the_last_line_was_torn_the_log_ends_as_if_it_never_was(tmp_path: Path) -> None:
    log, marks = marked(tmp_path / "log.jsonl")
    whole = log.path.read_bytes()
    for size in range(marks[2].bytes, len(whole) + 1):
        log.path.write_bytes(whole[:size])
        assert read(log.path) == RECORDS[: whole[:size].count(b"\n")]
        log.cut(marks[2])
        for record in RECORDS[2:]:
            log.append(record)
        log.close()
        assert log.path.read_bytes() == whole


def test_what_lies_before_the_mark_must_be_what_it_was(tmp_path: Path) -> None:
    log, marks = marked(tmp_path / "log.jsonl")
    whole = log.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for damage in (
        [lines[0], lines[0], *lines[1:]],
        lines[1:],
        [lines[0].replace(b"0.3", b"0.4"), *lines[1:]],
        [lines[1], lines[0], *lines[2:]],
        [whole[: marks[2].bytes - 1]],
        [],
    ):
        log.path.write_bytes(b"".join(damage))
        with pytest.raises(RunError, match=r"log\.jsonl is not what the run wrote before its checkpoint"):
            JsonLines(log.path).cut(marks[2])
        assert log.path.read_bytes() == b"".join(damage)
    log.path.unlink()
    with pytest.raises(RunError, match="it is missing"):
        JsonLines(log.path).cut(marks[2])
    JsonLines(log.path).cut(Mark())
    assert not log.path.exists()


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b"[1]\n", b'{"step": 1\n'])
def test_a_damaged_line_is_named_and_not_dropped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode({"step": 1}) + damage + encode({"step": 2}))
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


# ---------------------------------------------------------------------------------------------------- whole files


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "summary.json"
    atomic_write(path, "ü")
    (tmp_path / "new" / ".summary.json.tmp").write_text("left by a killed writer, and longer than what comes")
    atomic_write(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["summary.json"]


def test_a_link_of_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".file.tmp").symlink_to(tmp_path / "victim")
    atomic_write(tmp_path / "file", "new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert ((tmp_path / "file").read_text(), (tmp_path / "file").is_symlink()) == ("new", False)


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
