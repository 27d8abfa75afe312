"""The errors of gatespace: what went wrong, what was given, why it matters, what to do instead.

The CLI prints them without a traceback and exits with `exit_code`: 2 for a mistake in the call or the configuration,
1 for a run that failed, 3 for one stopped by an alarm (`gatespace.training.warnings`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GatespaceError(Exception):
    """Base class of all errors that gatespace raises on purpose."""

    exit_code = 1
    raised_by: int | None = None
    """Rank of the process it came from, if all processes of a run raise it; None: only this process does."""

    def __init__(self, what: str, *, got: object = None, why: str = "", instead: str = "") -> None:
        # __reduce__ carries all four, so that an error can be pickled between processes.
        super().__init__(what)
        self.what = what
        self.got = None if got is None else str(got)
        self.why = why
        self.instead = instead

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.got, self.why, self.instead)

    def __str__(self) -> str:
        parts = [self.what]
        if self.got is not None:
            parts.append(f"got: {self.got}")
        if self.why:
            parts.append(f"why: {self.why}")
        if self.instead:
            parts.append(f"instead: {self.instead}")
        return "\n  ".join(parts)


def _rebuild(kind: type[GatespaceError], what: str, got: str | None, why: str, instead: str) -> GatespaceError:
    return kind(what, got=got, why=why, instead=instead)


class UsageError(GatespaceError, ValueError):
    """The call, a name, a file or a configuration is wrong; nothing was run."""

    exit_code = 2


class MissingExtraError(UsageError, ImportError):
    """An optional dependency is needed but not installed."""


class RunError(GatespaceError, RuntimeError):
    """A run started and failed."""

    exit_code = 1


def missing_extra(feature: str, *, module: str, extra: str) -> MissingExtraError:
    """Return the error for `feature`, which needs the package `module`; `extra` installs it."""
    return MissingExtraError(
        f"{feature} needs the package {module!r}, which is not installed",
        instead=f"pip install '.[{extra}]' in a clone of gatespace",
    )


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, suggesting the closest known one."""
    options = sorted(known)
    folded = {option.casefold(): option for option in options}
    near = difflib.get_close_matches(name.casefold(), list(folded), n=1, cutoff=0.5)
    hint = f"did you mean {folded[near[0]]!r}? " if near else ""
    return UsageError(
        f"unknown {kind} {name!r}",
        instead=f"{hint}known: {', '.join(options)}",
    )
