"""Metrics of a run for trackers, besides the files of its folder.

The files are the record; a tracker displays it. So a configured tracker that cannot be opened is an error before
training, and one that fails later is closed with a note while the run continues. A resumed run continues in the same
place; the steps that it repeats after its checkpoint log the same numbers again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from gatespace.errors import GatespaceError, RunError
from gatespace.files import Closing
from gatespace.plugins import provider


class Tracker(Protocol):
    """Receives the metrics of a run. Entry points of `gatespace.trackers` open one."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers of a step."""

    def close(self) -> None:
        """Finish."""


class Trackers(Closing):
    """All open trackers of a run, possibly none."""

    def __init__(self, opened: Mapping[str, Tracker], report: Callable[[str], None] | None = None) -> None:
        self._open = dict(opened)
        self._report = report
        self.notes: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that are still in use."""
        return tuple(self._open)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass on the numbers among `values`. Never fails: a tracker that does is closed and noted once."""
        numbers = scalars(values)
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(step, numbers)
            except Exception as error:
                self._close(name, f"the tracker {name} failed at step {step} and is no longer used: {_line(error)}")

    def close(self) -> None:
        """Finish all of them; what cannot be finished is noted."""
        for name in list(self._open):
            self._close(name)

    def _close(self, name: str, reason: str = "") -> None:
        tracker = self._open.pop(name)
        if reason:
            self._note(reason)
        try:
            with redirect_stdout(sys.stderr):
                tracker.close()
        except Exception as error:
            if not reason:
                self._note(f"the tracker {name} could not be closed: {_line(error)}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if self._report is not None:
            self._report(text)


def open_trackers(
    names: Sequence[str],
    folder: Path,
    settings: Mapping[str, Any],
    *,
    step: int = 0,
    report: Callable[[str], None] | None = None,
) -> Trackers:
    """Open the trackers of a run, before anything is trained.

    Args:
        names: Entry points, e.g. tensorboard, wandb, trackio.
        folder: The run's folder.
        settings: The run's configuration as JSON data.
        step: The step of the checkpoint that the run resumes from.
        report: Called with a message when a tracker is closed because it failed.
    """
    openers = {name: provider("trackers", name, kind="tracker") for name in names}
    opened: dict[str, Tracker] = {}
    for name, opener in openers.items():
        try:
            with redirect_stdout(sys.stderr):  # keeps the command's stdout clean
                opened[name] = opener(Path(folder).absolute(), dict(settings), step=step)
        except Exception as error:
            Trackers(opened).close()
            if isinstance(error, GatespaceError):
                raise
            raise RunError(
                f"the tracker {name} could not be opened",
                got=_line(error),
                instead=f"leave {name} out of trace.trackers",
            ) from error
    return Trackers(opened, report)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by name, without its step; nested names are joined by a slash.

    Examples:
        >>> scalars({"step": 3, "loss": 0.5, "lam_mean": None, "lam_hist": [1, 2], "seconds": {"score": 1}})
        {'loss': 0.5, 'seconds/score': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif name != "step" and isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
