"""Progress display of a running study: a live table on a terminal, otherwise a line per finished run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from gatespace.cli.console import console
from gatespace.cli.progress import duration
from gatespace.evaluation.metrics import metric_of
from gatespace.files import Closing

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table

    from gatespace.runs import State
    from gatespace.study.outlook import Outlook, Work

_SECONDS_BETWEEN_LINES = 30.0
_RECENT = 5


class StudyView(Closing):
    """Shows the progress of a study, with validation scores only: test is for the end."""

    def __init__(self, workers: int, *, quiet: bool = False) -> None:
        self._workers, self._quiet = workers, quiet
        self._live: Live | None = None
        self._states: dict[str, State] = {}
        self._last_line = -math.inf

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Show a note to the user."""
        self.say(f"note: {text}")

    def update(self, outlook: Outlook) -> None:
        """Show the state of the study."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(live_table(outlook, self._workers))
            return
        before, self._states = self._states, dict(outlook.states)
        over = [work for work in outlook.work if self._states[work.name] in ("done", "failed")]
        ended = [work for work in over if before and before.get(work.name) != self._states[work.name]]
        for work in ended:
            self.say(f"[{outlook.count('done')}/{len(outlook.work)}] {_ended(work)}{self._left(outlook)}")
        now, running = time.monotonic(), outlook.of("running")
        if ended:
            self._last_line = now
        elif running and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            steps = [f"{work.title} ({step})" if (step := _step(work)) else work.title for work in running]
            self.say(f"running: {', '.join(steps)}{self._left(outlook)}")

    def _left(self, outlook: Outlook) -> str:
        seconds = outlook.seconds_left(self._workers)
        return f" · {duration(seconds)} left" if seconds else ""

    def say(self, text: str) -> None:
        """Print a line."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.console.print(text, soft_wrap=True)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def live_table(outlook: Outlook, workers: int) -> Group:
    """Counts, running jobs, and the most recently ended ones."""
    from rich.console import Group

    over = [*outlook.of("done"), *outlook.of("failed")]
    recent = sorted(over, key=lambda work: work.folder.ended_at() or 0.0)[-_RECENT:]
    return Group(_table(outlook, [*recent, *outlook.of("running")]), headline(outlook, workers))


def headline(outlook: Outlook, workers: int) -> str:
    """One line: how many jobs are done, and the time left."""
    parts = [f"{outlook.count('done')} of {len(outlook.work)} done", f"{outlook.count('running')} running"]
    if failed := outlook.count("failed"):
        parts.append(f"{failed} failed")
    if outlook.blocked:
        parts.append(f"{len(outlook.blocked)} cannot be done")
    if seconds := outlook.seconds_left(workers):
        parts.append(f"about {duration(seconds)} left")
    return " · ".join(parts)


def status_table(outlook: Outlook) -> Table:
    """Table of all jobs that are not waiting."""
    return _table(outlook, [work for work in outlook.work if outlook.states[work.name] != "waiting"])


def validation(work: Work) -> float | None:
    """Validation accuracy, or mean score for free text; None if not evaluated."""
    summary = work.folder.summary() if work.run is not None else None
    found = work.folder.evaluation("val") if summary is None else summary["evaluation"]["val"]
    return None if found is None else metric_of(found["metrics"])[1]


def _table(outlook: Outlook, work: Iterable[Work]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for column in ("step", "val", "time"):
        table.add_column(column, justify="right")
    for one in work:
        table.add_row(one.title, outlook.states[one.name], _step(one), _accuracy(one), _seconds(one))
    return table


def _ended(work: Work) -> str:
    """The line for an ended job."""
    if error := work.folder.error():
        return f"{work.title}: FAILED: {error.splitlines()[0]}"
    accuracy = _accuracy(work)
    found = " · ".join(filter(None, [f"val {accuracy}" if accuracy else "", _seconds(work)]))
    return f"{work.title}: {found}" if found else work.title


def _step(work: Work) -> str:
    return f"{work.folder.last_step()}/{work.steps}" if work.steps else ""


def _accuracy(work: Work) -> str:
    found = validation(work)
    return "" if found is None else f"{found:.4f}"


def _seconds(work: Work) -> str:
    seconds = work.folder.seconds()
    return "" if seconds is None else duration(seconds)
