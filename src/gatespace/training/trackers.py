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
from typing import Any, NamedTuple

from gatespace.errors import GatespaceError, RunError
from gatespace.files import Closing
from gatespace.plugins import provider


class Tracker(NamedTuple):
    """Receives the metrics of a run. Entry points of `gatespace.trackers` open one, or an object with these methods."""

    log: Callable[[int, dict[str, float]], object]
    """Log the numbers of a step."""
    close: Callable[[], object]


class Trackers(Closing):
    """All open trackers of a run, possibly none; `report` is called with a message when one is closed as it failed."""

    def __init__(self, trackers: Mapping[str, Tracker], report: Callable[[str], None]) -> None:
        self._open = dict(trackers)
        self._report = report

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass on the numbers among `values`. Never fails: a tracker that does is closed and noted once."""
        numbers = scalars(values)
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(step, numbers)
            except Exception as error:
                self._report(f"the tracker {name} failed at step {step} and is no longer used: {_line(error)}")
                self._close(name)

    def close(self) -> None:
        """Finish all of them; what cannot be finished is noted."""
        for name in list(self._open):
            self._close(name)

    def _close(self, name: str) -> None:
        try:
            with redirect_stdout(sys.stderr):
                self._open.pop(name).close()
        except Exception as error:
            self._report(f"the tracker {name} could not be closed: {_line(error)}")


def open_trackers(
    names: Sequence[str], folder: Path, settings: Mapping[str, Any], *, step: int, report: Callable[[str], None]
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
    trackers: dict[str, Tracker] = {}
    for name, opener in openers.items():
        try:
            with redirect_stdout(sys.stderr):  # keeps the command's stdout clean
                trackers[name] = opener(Path(folder).absolute(), dict(settings), step=step)
        except Exception as error:
            Trackers(trackers, report).close()
            if isinstance(error, GatespaceError):
                raise
            advice = f"what the tracker says, or leave {name} out of trace.trackers"
            raise RunError(f"the tracker {name} could not be opened", got=_line(error), instead=advice) from error
    return Trackers(trackers, report)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by name, without its step; nested names are joined by a slash.

    Examples:
        >>> scalars({"step": 3, "loss": 0.5, "lam_mean": None, "lam_hist": [1, 2], "seconds": {"score": 1}})
        {'loss': 0.5, 'seconds/score': 1.0}
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif name != "step" and isinstance(value, int | float) and math.isfinite(value):
            numbers[name] = float(value)
    return numbers


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
