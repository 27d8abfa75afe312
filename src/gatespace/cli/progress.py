"""The progress of a run on standard error: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gatespace.cli.console import console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from gatespace.evaluation import Evaluation

_SECONDS_BETWEEN_LINES = 10.0
_PARTS = ("rollout", "score", "update", "optimizer")


class RunProgress:
    """The `Progress` of `gatespace.training.progress` for a user at a terminal or with a log file.

    Args:
        quiet: Print nothing.
        job: Name of the bar.
    """

    def __init__(self, *, quiet: bool = False, job: str = "train") -> None:
        self._quiet, self._job = quiet, job
        self._bar: Progress | None = None
        self._steps: TaskID | None = None
        self._evaluating: TaskID | None = None
        self._pace = _Pace()
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
                # It takes what is left of the width, so that a long text does not push out the bar.
                TextColumn("{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
                console=console(stderr=True),
                expand=True,
            )
            self._bar.start()
            self._steps = self._bar.add_task(self._job, total=None, start=False, text="loading")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    # ------------------------------------------------------------------ what a run reports

    def note(self, text: str) -> None:
        """Print something that a user should know."""
        self._say(f"note: {text}")

    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """A step is done."""
        if self._quiet:
            return
        first = self._pace.begin(time.monotonic() - sum(timing["wall"].values()), step - 1)
        left = self._pace.left(step, steps)
        found, spent = _described(record), _spending(timing)
        if self._bar is not None and self._steps is not None:
            self._bar.start_task(self._steps)
            text = f"{_joined([left, *found, self._accuracy])}\n{_joined(spent)}"
            self._bar.update(self._steps, total=steps, completed=step, text=text)
        elif first or step == steps or time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._say(_joined([f"step {step}/{steps}", *found, *spent, self._accuracy, left]))

    def evaluating(self, split: str, done: int, total: int) -> None:
        """An evaluation has responses to `done` of `total` texts."""
        if self._bar is None:
            if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES and done < total:
                self._last_line = time.monotonic()
                self._say(f"evaluate {split}: {done}/{total} texts")
            return
        if self._evaluating is None:
            self._evaluating = self._bar.add_task(f"evaluate {split}", total=total, text="texts")
        self._bar.update(self._evaluating, completed=done)
        if done >= total:
            self._bar.remove_task(self._evaluating)
            self._evaluating = None

    def begin(self) -> None:
        """Models and data are loaded; the time is measured from here."""
        self._last_line = time.monotonic()
        self._pace.begin(self._last_line)

    def generating(self, done: int, total: int) -> None:
        """A command that does nothing but generate has responses to `done` of `total` texts."""
        if self._quiet:
            return
        left = self._pace.left(done, total)
        if self._bar is not None and self._steps is not None:
            self._bar.start_task(self._steps)
            self._bar.update(self._steps, total=total, completed=done, text=left)
        elif left and time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._say(f"{done}/{total} texts · {left}")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation is done."""
        found = evaluation.metrics
        self._accuracy = f"{evaluation.split} {found.accuracy:.3f}"
        failed = f", {found.parse_failures} of {found.count} without a label" if found.parse_failures else ""
        self._say(
            f"after step {step}: {evaluation.split} accuracy {found.accuracy:.3f} "
            f"(majority {found.majority.accuracy:.3f}), macro-F1 {found.macro_f1:.3f}{failed}"
        )

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, soft_wrap=True)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


class _Pace:
    """The time that is left, estimated from what this process has done."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._before = 0

    def begin(self, now: float, before: int = 0) -> bool:
        """Start measuring, with `before` units done by an earlier process. Only the first call counts."""
        if self._began is not None:
            return False
        self._began, self._before = now, before
        return True

    def left(self, done: int, total: int) -> str:
        """The time left, in words; "" at the end."""
        self.begin(time.monotonic())
        if self._began is None or done <= self._before or done >= total:
            return ""
        each = (time.monotonic() - self._began) / (done - self._before)
        return f"{duration((total - done) * each)} left"


def _described(record: Mapping[str, Any]) -> list[str]:
    """The numbers of a step, as far as its objective has them."""
    parts = [f"loss {record['loss']:.4g}"]
    if record.get("lam_mean") is not None:
        parts.append(f"λ {record['lam_mean']:.3f} ± {record['lam_sd']:.3f}")
    if record.get("token_accuracy") is not None:
        parts.append(f"tokens right {record['token_accuracy']:.3f}")
    return parts


def _spending(timing: Mapping[str, Any]) -> list[str]:
    """The seconds of a step by part, and the cache's share of hits."""
    wall = timing["wall"]
    split = ", ".join(f"{name} {wall[name]:.2g}" for name in _PARTS if name in wall)
    parts = [f"{sum(wall.values()):.2g} s ({split})"]
    hits, misses = timing.get("cache_hits"), timing.get("cache_misses")
    if hits is not None and misses is not None and hits + misses:
        parts.append(f"cache {hits / (hits + misses):.0%}")
    return parts


def _joined(parts: Iterable[str]) -> str:
    return " · ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """Seconds as text.

    Example:
        >>> duration(5), duration(200), duration(9000)
        ('5 s', '3 min 20 s', '2 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
