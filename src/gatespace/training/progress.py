"""Progress of a run, for the command line or a study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gatespace.evaluation import Evaluation


class Progress(Protocol):
    """Callbacks of a run."""

    def note(self, text: str) -> None:
        """Information for the user."""

    def warn(self, text: str) -> None:
        """Something is wrong with the run."""

    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """A step is done."""

    def evaluating(self, split: str, done: int, total: int) -> None:
        """An evaluation has responses to `done` of `total` rows."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation is done."""


class Silent:
    """Ignores all progress."""

    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None: ...
    def evaluating(self, split: str, done: int, total: int) -> None: ...
    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...


SILENT: Progress = Silent()
