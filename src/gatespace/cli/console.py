"""Output of all commands: consoles that never parse user text as markup, tables, errors, JSON, the version."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from gatespace.errors import GatespaceError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def gatespace_version() -> str:
    """The version of the installed distribution, or of the source if gatespace is not installed."""
    from importlib import metadata

    import gatespace

    try:
        return metadata.version("gatespace")
    except metadata.PackageNotFoundError:
        return str(getattr(gatespace, "__version__", "unknown"))


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a command as Ctrl-C does."""


def stop_on_sigterm() -> None:
    """Make SIGTERM raise `Terminated`, once: a second one ends the process. For the main thread.

    Python raises it wherever it is, and drops what is raised in a destructor or callback: then the signal comes again.
    """

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    def dropped(error: sys.UnraisableHookArgs, usual: Any = sys.unraisablehook) -> None:
        if not isinstance(error.exc_value, KeyboardInterrupt):
            usual(error)
            return
        number = signal.SIGTERM if isinstance(error.exc_value, Terminated) else signal.SIGINT
        if number == signal.SIGTERM:
            signal.signal(number, stop)
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()  # not now: this too is in the destructor

    signal.signal(signal.SIGTERM, stop)
    sys.unraisablehook = dropped


def stopped(interrupt: KeyboardInterrupt, then: str = "") -> int:
    """Print that a command was stopped, and `then`; return its exit code."""
    terminated = isinstance(interrupt, Terminated)
    if terminated or then:
        sys.stderr.write(f"stopped{' by SIGTERM' if terminated else ''}{then}\n")
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


def console(*, stderr: bool = False) -> Console:
    """A Rich console on standard output or standard error that prints text literally."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def table(title: str, *columns: str, numbers: Collection[str] = ()) -> Table:
    """A table in the common style, its first column bold; columns in `numbers` are right-aligned."""
    from rich import box
    from rich.table import Table

    found = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        found.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    found.columns[0].style = "bold"
    return found


def print_error(error: GatespaceError) -> None:
    """Write an error to standard error: what, got, why and instead, one line each."""
    details = [("got", error.got), ("why", error.why), ("instead", error.instead)]
    lines = [("error", error.what), *((f"  {label}", text) for label, text in details if text)]
    if not sys.stderr.isatty():
        for label, text in lines:
            sys.stderr.write(f"{label}: {_printable(text)}\n")
        return
    from rich.text import Text

    styles = {"error": "bold red", "  instead": "green"}
    out = console(stderr=True)
    for label, text in lines:
        out.print(Text.assemble((f"{label}: ", styles.get(label, "dim")), _printable(text)), soft_wrap=True)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print the warnings about a result, one paragraph each."""
    from rich.text import Text

    out = console()
    for text in warnings:
        out.print(Text.assemble(("warning: ", "bold yellow"), _printable(text)), soft_wrap=not out.is_terminal)


def print_json(value: Any) -> None:
    """Write strict JSON to standard output; infinite numbers must already be text (see `json_number`)."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def json_number(value: float) -> float | str:
    """`value`, or the text "inf" or "-inf", which Python's float() reads back."""
    return value if abs(value) != float("inf") else str(value)


def _printable(text: str) -> str:
    """`text` with control characters escaped, so that an argument cannot control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
