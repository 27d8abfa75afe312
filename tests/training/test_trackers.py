"""Trackers of a run: what they get, and that none can fail it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gatespace.errors import RunError, UsageError
from gatespace.training import trackers as module
from gatespace.training.trackers import Trackers, open_trackers


def ignore(text: str) -> None: ...


class Own:
    """A tracker that keeps what it gets, and fails when asked to."""

    def __init__(self, fails_at: int = 0, *, fails_to_close: bool = False) -> None:
        self.fails_at, self.fails_to_close = fails_at, fails_to_close
        self.got: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network\nis down")
        self.got.append((step, values))

    def close(self) -> None:
        self.closed += 1
        if self.fails_to_close:
            raise OSError("disk")


def test_one_that_fails_is_noted_once_and_the_rest_go_on() -> None:
    good, bad, notes = Own(), Own(fails_at=2, fails_to_close=True), []
    trackers = Trackers({"bad": bad, "good": good}, notes.append)
    for step in (1, 2, 3):
        trackers.log(step, {"step": step, "loss": 0.5})
    assert (bad.closed, good.closed) == (1, 0)
    trackers.close()
    trackers.close()
    assert [step for step, _ in good.got] == [1, 2, 3]
    assert [step for step, _ in bad.got] == [1]
    assert (bad.closed, good.closed) == (1, 1)
    assert len(notes) == 2
    assert "bad failed at step 2" in notes[0]
    assert "ConnectionError: the network is down" in notes[0]
    assert "bad could not be closed" in notes[1]


def test_only_finite_numbers_are_passed_on() -> None:
    own = Own()
    Trackers({"own": own}, ignore).log(
        4, {"step": 4, "a": 1, "b": None, "c": float("nan"), "d": "x", "e": [1.0], "f": True, "g": {"h": 2.5}}
    )
    assert own.got == [(4, {"a": 1.0, "f": 1.0, "g/h": 2.5})]


def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown tracker 'nobody'"):
        open_trackers(["nobody"], tmp_path, {}, step=0, report=ignore)


def opener(opened: dict[str, Own], name: str) -> Any:
    """As an entry point gives it."""

    def open_own(folder: Path, settings: dict[str, Any], *, step: int) -> Own:
        print("hello")
        if settings.get("refuse") == name:
            raise ConnectionError("no\nlogin")
        opened[name] = Own()
        return opened[name]

    return open_own


def test_one_that_cannot_be_opened_is_an_error_and_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: dict[str, Own] = {}
    monkeypatch.setattr(module, "provider", lambda group, name, *, kind: opener(opened, name))
    with open_trackers(["a", "b"], tmp_path, {}, step=0, report=ignore):
        assert set(opened) == {"a", "b"}
    assert capsys.readouterr().out == ""  # the command's output is its own
    with pytest.raises(RunError, match="the tracker b could not be opened\n  got: ConnectionError: no login"):
        open_trackers(["a", "b"], tmp_path, {"refuse": "b"}, step=0, report=ignore)
    assert (opened["a"].closed, opened["b"].closed) == (1, 1)
