from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gatespace.errors import MissingExtraError, RunError, UsageError
from gatespace.training.trackers import Trackers, open_trackers

NAMES = ("tensorboard", "wandb", "trackio")
WRITE = """
import sys
from pathlib import Path
from gatespace.training.trackers import open_trackers
name, folder, done, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with open_trackers([name], folder, {"objective": {"gate": "G5"}}, step=done) as trackers:
    for step in range(done + 1, last + 1):
        trackers.log(step, {"step": step, "loss": done + 1 / step, "lam_hist": [1], "lam_mean": None})
    assert trackers.notes == [], trackers.notes
"""


def installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not installed(name), reason=f"the package {name} is not installed")


def write(name: str, folder: Path, done: int, last: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WRITE, name, str(folder), str(done), str(last)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=folder.parent, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "", "a tracker wrote to the command's output"
    return result


class Own:
    """A tracker of the test's own, in its own right: it keeps what it is told and fails when told to."""

    def __init__(self, fails_at: int = 0, *, fails_to_close: bool = False) -> None:
        self.fails_at, self.fails_to_close = fails_at, fails_to_close
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network\nis down")
        self.told.append((step, values))

    def close(self) -> None:
        self.closed += 1
        if self.fails_to_close:
            raise OSError("disk")


# ---------------------------------------------------------------------------------------------------- all of them


def test_one_that_fails_is_noted_once_and_the_rest_go_on() -> None:
    good, bad, notes = Own(), Own(fails_at=2, fails_to_close=True), []
    trackers = Trackers({"bad": bad, "good": good}, notes.append)
    for step in (1, 2, 3):
        trackers.log(step, {"step": step, "loss": 0.5})
    assert (trackers.names, bad.closed, good.closed) == (("good",), 1, 0)
    trackers.close()
    trackers.close()
    assert [step for step, _ in good.told] == [1, 2, 3]
    assert [step for step, _ in bad.told] == [1]
    assert (bad.closed, good.closed) == (1, 1)
    assert notes == ["the tracker bad failed at step 2 and is no longer used: ConnectionError: the network is down"]
    assert trackers.notes == notes


def test_one_that_cannot_be_closed_is_noted() -> None:
    other = Own()
    with Trackers({"a": Own(fails_to_close=True), "b": other}) as trackers:
        trackers.log(1, {})
    assert trackers.notes == ["the tracker a could not be closed: OSError: disk"]
    assert other.closed == 1


def test_only_finite_numbers_are_handed_on() -> None:
    own = Own()
    Trackers({"own": own}).log(
        4, {"step": 4, "a": 1, "b": None, "c": float("nan"), "d": "x", "e": [1.0], "f": True, "g": {"h": 2.5}}
    )
    assert own.told == [(4, {"a": 1.0, "f": 1.0, "g/h": 2.5})]


def test_none_is_fine(tmp_path: Path) -> None:
    with open_trackers([], tmp_path, {}) as trackers:
        trackers.log(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_name_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'wandb'"):
        open_trackers(["wandv"], tmp_path, {})


def test_one_that_is_not_installed_is_an_error_before_any_other_is_opened(tmp_path: Path) -> None:
    absent = [name for name in NAMES if not installed(name)]
    if not absent:
        pytest.skip("all trackers are installed")
    present = [name for name in NAMES if installed(name)]
    with pytest.raises(MissingExtraError, match=rf"gatespace\[{absent[0]}\]"):
        open_trackers([*present, absent[0]], tmp_path, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(installed("wandb"), reason="wandb is installed")
def test_a_folder_of_that_name_is_not_taken_for_the_package(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    code = "from gatespace.training.trackers import open_trackers; open_trackers(['wandb'], '.', {})"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "MissingExtraError" in result.stderr
    assert "gatespace[wandb]" in result.stderr


# ---------------------------------------------------------------------------------------------------- the real ones


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
    code = "from gatespace.training.trackers import open_trackers; open_trackers(['wandb'], '.', {})"
    environment = {**os.environ, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    assert RunError.__name__ in result.stderr
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
