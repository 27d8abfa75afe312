"""The real trackers: each is opened by its name, and a resumed run goes on in the same place."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gatespace.errors import MissingExtraError, UsageError
from gatespace.training.trackers import open_trackers

NAMES = ("tensorboard", "wandb", "trackio")
WRITE = """
import sys
from pathlib import Path
from gatespace.training.trackers import open_trackers
name, folder, done, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with open_trackers([name], folder, {"objective": {"gate": "G5"}}, step=done, report=sys.exit) as trackers:
    for step in range(done + 1, last + 1):
        trackers.log(step, {"step": step, "loss": done + 1 / step, "lam_hist": [1], "lam_mean": None})
"""


def installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not installed(name), reason=f"the package {name} is not installed")


def write(name: str, folder: Path, done: int, last: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WRITE, name, str(folder), str(done), str(last)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder.parent, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "", "a tracker wrote to the command's output"
    return result


def test_an_unknown_name_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'wandb'"):
        open_trackers(["wandv"], tmp_path, {}, step=0, report=print)


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_not_installed_is_an_error_that_names_its_extra(name: str, tmp_path: Path) -> None:
    if installed(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingExtraError, match=rf"pip install '\.\[{name}\]'"):
        open_trackers([name], tmp_path, {}, step=0, report=print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(installed("wandb"), reason="wandb is installed")
def test_a_folder_of_that_name_is_not_taken_for_the_package(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    result = subprocess.run(
        [sys.executable, "-c", WRITE, "wandb", ".", "0", "1"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "MissingExtraError" in result.stderr
    assert "'.[wandb]' in a clone" in result.stderr


@needs("tensorboard")
def test_tensorboard_shows_the_resumed_course_only(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    write("tensorboard", folder, 0, 5)
    write("tensorboard", folder, 3, 6)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert len(events.Scalars("loss")) == 6
    assert shown == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3, 4: 3.25, 5: 3.2, 6: 3 + 1 / 6})
    assert b"G5" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@needs("wandb")
def test_wandb_offline_goes_on_under_one_identity(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for done in (0, 3):
        write("wandb", folder, done, 5, WANDB_MODE="offline")
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    identity = (folder / "tracker-id").read_text()
    assert files
    assert {path.name for path in files} == {f"run-{identity}.wandb"}
    assert any(b"loss" in path.read_bytes() for path in files)


@needs("wandb")
def test_wandb_without_a_login_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    environment = {**os.environ, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    result = subprocess.run(
        [sys.executable, "-c", WRITE, "wandb", ".", "0", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    assert "RunError: the tracker wandb could not be opened" in result.stderr
    assert "WANDB_MODE=offline" in result.stderr


@needs("trackio")
def test_trackio_goes_on_in_the_same_run(tmp_path: Path) -> None:
    import sqlite3

    folder = tmp_path / "run"
    store = tmp_path / "store"
    for done, last in ((0, 3), (3, 5)):
        write("trackio", folder, done, last, TRACKIO_DIR=str(store))
    with sqlite3.connect(store / "gatespace.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [row[1] for row in rows] == [1, 2, 3, 4, 5]
    assert {row[0] for row in rows} == {f"run-{(folder / 'tracker-id').read_text()[:8]}"}
    assert "loss" in str(rows[0][2])
