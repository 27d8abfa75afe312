"""How a study looks while it runs: a live table on a terminal, a line per finished run elsewhere."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gatespace.cli.console import console
from gatespace.cli.progress import duration

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table

    from gatespace.study.records import State
    from gatespace.study.runner import Outlook, Work
    from gatespace.study.store import Store

_SECONDS_BETWEEN_LINES = 30.0
_RECENT = 5


class StudyView:
    """Tells a user how a study goes on. Accuracies are those on validation: test is for the end."""

    def __init__(self, store: Store, workers: int, *, quiet: bool = False) -> None:
        self._store, self._workers, self._quiet = store, workers, quiet
        self._live: Live | None = None
        self._states: dict[str, State] = {}
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Something that a user should know."""
        self._say(f"note: {text}")

    def update(self, outlook: Outlook) -> None:
        """How the study stands."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(live_table(outlook, self._store, self._workers))
            return
        before, self._states = self._states, dict(outlook.states)
        ended = [work for work in outlook.work if _has_ended(work.name, before, self._states)]
        for work in ended:
            self._say(f"[{outlook.count('done')}/{len(outlook.work)}] {_told(work, self._store)}{self._left(outlook)}")
        if ended or not before:
            self._last_line = time.monotonic()
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            running = [f"{work.title} ({step_of(work)})" for work in outlook.work if _is(outlook, work, "running")]
            self._say(f"running: {', '.join(running)}{self._left(outlook)}")

    def _left(self, outlook: Outlook) -> str:
        seconds = outlook.seconds_left(self._workers)
        return f" · {duration(seconds)} left" if seconds else ""

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        if self._live is not None:
            self._live.console.print(text, soft_wrap=True)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def live_table(outlook: Outlook, store: Store, workers: int) -> Group:
    """Counts, what is running, and what has ended last."""
    from rich.console import Group

    recent = sorted(
        (work for work in outlook.work if _is(outlook, work, "done") or _is(outlook, work, "failed")),
        key=lambda work: _ended_at(work, store),
    )[-_RECENT:]
    running = [work for work in outlook.work if _is(outlook, work, "running")]
    table = _work_table()
    for work in (*recent, *running):
        table.add_row(work.title, outlook.states[work.name], step_of(work), _accuracy(work, store), _seconds(work))
    return Group(table, headline(outlook, workers))


def headline(outlook: Outlook, workers: int) -> str:
    """One line: how many are done, and how long the rest takes."""
    parts = [f"{outlook.count('done')} of {len(outlook.work)} done", f"{outlook.count('running')} running"]
    if failed := outlook.count("failed"):
        parts.append(f"{failed} failed")
    if outlook.blocked:
        parts.append(f"{len(outlook.blocked)} cannot be done")
    if seconds := outlook.seconds_left(workers):
        parts.append(f"about {duration(seconds)} left")
    return " · ".join(parts)


def status_table(outlook: Outlook, store: Store) -> Table:
    """Everything that is not simply waiting."""
    table = _work_table()
    for work in outlook.work:
        if not _is(outlook, work, "waiting"):
            state = outlook.states[work.name]
            table.add_row(work.title, state, step_of(work), _accuracy(work, store), _seconds(work))
    return table


def step_of(work: Work) -> str:
    """How far a run is."""
    from gatespace.study.store import progress_of

    return f"{progress_of(work.folder)}/{work.steps}" if work.steps else ""


def validation(work: Work, store: Store) -> float | None:
    """Accuracy on validation of a run that is done."""
    summary = store.summary(work.folder) if work.run is not None else None
    if summary is None:
        try:
            text = (work.folder / "evaluation-val.json").read_text()
        except FileNotFoundError:
            return None
        return float(json.loads(text)["metrics"]["accuracy"])
    return float(summary["evaluation"]["val"]["metrics"]["accuracy"])


def _work_table() -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for column in ("step", "val", "time"):
        table.add_column(column, justify="right")
    return table


def _told(work: Work, store: Store) -> str:
    if error := store.error(work.folder):
        return f"{work.title}: FAILED: {error.splitlines()[0]}"
    parts = [work.title]
    if accuracy := _accuracy(work, store):
        parts.append(f"val {accuracy}")
    if took := _seconds(work):
        parts.append(took)
    return ": ".join([parts[0], " · ".join(parts[1:])]) if parts[1:] else parts[0]


def _accuracy(work: Work, store: Store) -> str:
    found = validation(work, store)
    return "" if found is None else f"{found:.4f}"


def _seconds(work: Work) -> str:
    from gatespace.study.store import seconds_of

    seconds = seconds_of(work.folder)
    return "" if seconds is None else duration(seconds)


def _ended_at(work: Work, store: Store) -> float:
    from gatespace.study.store import DONE, ERROR

    for name in (DONE, ERROR):
        try:
            return (work.folder / name).stat().st_mtime
        except FileNotFoundError:
            continue
    return 0.0


def _has_ended(name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    return bool(before) and now[name] in ("done", "failed") and before.get(name) != now[name]


def _is(outlook: Outlook, work: Work, state: State) -> bool:
    return outlook.states[work.name] == state
