"""The tiny pair: the same bytes from every process, built once, and fit for its task."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gatespace.errors import UsageError
from gatespace.models import TinyPair, build_tiny, load_model
from gatespace.models.tiny import TinySize
from gatespace.tasks import Task


def content(pair: TinyPair) -> dict[str, bytes]:
    return {f"{place.name}/{file.name}": file.read_bytes() for place in pair for file in place.iterdir()}


def test_same_bytes_from_another_process(tiny: TinyPair, tmp_path: Path) -> None:
    code = """
import sys, pathlib, torch
from gatespace.models import build_tiny
from gatespace.tasks import synthetic_task
assert not {"transformers", "peft"} & sys.modules.keys(), "they are slow to import, and for `train` only"
torch.manual_seed(99)
build_tiny(synthetic_task(size=600), pathlib.Path(sys.argv[1]))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert content(TinyPair(tmp_path / "student", tmp_path / "teacher")) == content(tiny)


def test_several_build_at_once(task: Task, tiny: TinyPair, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        pairs = list(pool.map(lambda _: build_tiny(task, tmp_path), range(4)))
    assert len(set(pairs)) == 1
    assert content(pairs[0]) == content(tiny)
    assert {path.name for path in tmp_path.iterdir()} <= {"student", "teacher", ".lock"}


def test_a_finished_pair_is_kept_and_an_unfinished_one_is_finished(task: Task, tmp_path: Path) -> None:
    pair = build_tiny(task, tmp_path)
    kept = content(pair)
    times = {place: place.stat().st_mtime_ns for place in pair}
    assert build_tiny(task, tmp_path) == pair
    assert {place: place.stat().st_mtime_ns for place in pair} == times
    (pair.teacher / "gatespace.json").unlink()
    with pytest.raises(UsageError, match="refusing to overwrite"):
        build_tiny(task, tmp_path)
    for file in pair.teacher.iterdir():
        file.unlink()
    build_tiny(task, tmp_path)
    assert content(pair) == kept
    assert pair.student.stat().st_mtime_ns == times[pair.student]


def test_the_recipe_decides(task: Task, tiny: TinyPair, tmp_path: Path) -> None:
    first = content(build_tiny(task, tmp_path, seed=1))
    assert first["student/tokenizer.json"] == content(tiny)["student/tokenizer.json"]
    assert first["student/model.safetensors"] != content(tiny)["student/model.safetensors"]
    small = TinySize(hidden=32, layers=1, heads=2, tied=False, pad_to=16, spare=0)
    second = build_tiny(task, tmp_path, seed=1, student=small)  # replaces the first
    assert load_model(str(second.student)).network.config.hidden_size == 32
    assert content(second)["teacher/model.safetensors"] == first["teacher/model.safetensors"]


def test_the_cache_is_its_home(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path))
    pair = build_tiny(task)
    assert pair.student.is_relative_to(tmp_path)
    assert build_tiny(task, seed=3).student != pair.student


def test_global_random_numbers_are_left_alone(task: Task, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_tiny(task, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_vocabulary_holds_all_bytes(task: Task, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 259"):
        build_tiny(task, tmp_path, vocab_size=258)
    assert load_model(str(build_tiny(task, tmp_path, vocab_size=259).student)).vocab_size == 259
