"""Progress of a run on standard error: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from gatespace.cli.console import console
from gatespace.files import Closing

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from gatespace.evaluation import Evaluation

_SECONDS_BETWEEN_LINES = 10.0
_PARTS = ("rollout", "score", "update", "optimizer")


class RunProgress(Closing):
    """The `Progress` of `gatespace.training.progress` for a user at a terminal or with a log file.

    Args:
        quiet: Print nothing.
        job: Name of the bar.
    """

    def __init__(self, *, quiet: bool = False, job: str = "train") -> None:
        self._quiet, self._job = quiet, job
        self._bar: Progress | None = None
        self._main: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._began: float | None = None
        self._done_before = 0
        """Steps done before this process, excluded from the timing."""
        self._last_line = 0.0
        self._accuracy = ""

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                # Takes the remaining width, so that a long text does not push out the bar.
                TextColumn("{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
                console=console(stderr=True),
                expand=True,
            )
            self._bar.start()
            self._main = self._bar.add_task(self._job, total=None, start=False, text="loading")
        return self

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()

    # ------------------------------------------------------------------ what a run reports

    def note(self, text: str) -> None:
        """Print a note for the user."""
        self._print(f"note: {text}")

    def warn(self, text: str) -> None:
        """Print a warning about the run."""
        self._print(f"warning: {text}")

    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Show a finished step."""
        first = self._began is None
        if self._began is None:
            self._began, self._done_before = time.monotonic() - sum(timing["wall"].values()), step - 1
        left, found, spent = self._left(step, steps), _described(record), _spending(timing)
        if self._bar is not None:
            self._advance(step, steps, f"{_joined([left, *found, self._accuracy])}\n{_joined(spent)}")
        elif self._is_due() or first or step == steps:
            self._print(_joined([f"step {step}/{steps}", *found, *spent, self._accuracy, left]))

    def evaluating(self, split: str, done: int, total: int) -> None:
        """Show that an evaluation has responses to `done` of `total` texts."""
        if self._bar is None:
            if done < total and self._is_due():
                self._print(f"evaluate {split}: {done}/{total} texts")
            return
        if self._evaluation is None:
            self._evaluation = self._bar.add_task(f"evaluate {split}", total=total, text="texts")
        self._bar.update(self._evaluation, completed=done)
        if done >= total:
            self._bar.remove_task(self._evaluation)
            self._evaluation = None

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Print the result of an evaluation."""
        found = evaluation.metrics
        self._accuracy = f"{evaluation.split} {found.score:.3f}"
        shown = f"after step {step}: {evaluation.split} {found.metric} {found.score:.3f}"
        if (labels := found.labels) is None:
            self._print(f"{shown}, {found.length:.0f} tokens per response, {found.truncated:.1%} cut off")
            return
        failed = f", {labels.parse_failures} of {found.count} without a label" if labels.parse_failures else ""
        self._print(
            f"{shown} (best constant {labels.best_constant.accuracy:.3f}), balanced {labels.balanced_accuracy:.3f}, "
            f"macro-F1 {labels.macro_f1:.3f}{failed}"
        )

    # ------------------------------------------------------------------ what `evaluate` and `predict` report

    def begin(self, done: int = 0) -> None:
        """Start the clock, once models and data are loaded; the first `done` texts are not timed."""
        self._began = self._last_line = time.monotonic()
        self._done_before = done

    def generating(self, done: int, total: int) -> None:
        """Show that there are responses to `done` of `total` texts."""
        left = self._left(done, total)
        if self._bar is not None:
            self._advance(done, total, left)
        elif left and self._is_due():
            self._print(f"{done}/{total} texts · {left}")

    # ------------------------------------------------------------------ helpers

    def _left(self, done: int, total: int) -> str:
        """Estimated time left at this process's rate; "" at the end."""
        if self._began is None or done <= self._done_before or done >= total:
            return ""
        each = (time.monotonic() - self._began) / (done - self._done_before)
        return f"{duration((total - done) * each)} left"

    def _is_due(self) -> bool:
        """Whether the next line is due; if so, restart the interval."""
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True

    def _advance(self, done: int, total: int, text: str) -> None:
        assert self._bar is not None
        assert self._main is not None
        self._bar.start_task(self._main)
        self._bar.update(self._main, total=total, completed=done, text=text)

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, soft_wrap=True)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def _described(record: Mapping[str, Any]) -> list[str]:
    """The metrics of a step that its objective has."""
    parts = [f"loss {record['loss']:.4g}"]
    if record.get("lam_mean") is not None:
        parts.append(f"λ {record['lam_mean']:.3f} ± {record['lam_sd']:.3f}")
    if record.get("token_accuracy") is not None:
        parts.append(f"tokens right {record['token_accuracy']:.3f}")
    return parts


def _spending(timing: Mapping[str, Any]) -> list[str]:
    """Seconds of a step by part, and the cache hit rate."""
    wall = timing["wall"]
    split = ", ".join(f"{name} {wall[name]:.2g}" for name in _PARTS if wall.get(name, 0) >= 0.001)
    parts = [f"{sum(wall.values()):.2g} s ({split})"]
    hits, misses = timing.get("cache_hits"), timing.get("cache_misses")
    if hits is not None and misses is not None and hits + misses:
        parts.append(f"cache {hits / (hits + misses):.0%}")
    return parts


def _joined(parts: Iterable[str]) -> str:
    return " · ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """Seconds as text.

    Examples:
        >>> duration(5), duration(200), duration(9000)
        ('5 s', '3 min 20 s', '2 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
