"""From run folders to the explorer's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gatespace.addons.pages.data import MOST_TOKENS, payload
from gatespace.addons.pages.page import render
from gatespace.addons.pages.sources import Found, find_runs
from gatespace.errors import UsageError
from gatespace.files import atomic_write
from gatespace.gating.coefficients import Gate

__all__ = ["FILE", "Explorer", "build_explorer"]

FILE = "explorer.html"
_SIDES = 2


@dataclass(frozen=True)
class Explorer:
    """The page and what it is about."""

    found: Found
    data: Any
    html: str

    @property
    def runs(self) -> int:
        """How many runs it shows."""
        return len(self.data["runs"])

    @property
    def responses(self) -> int:
        """How many responses it shows,"""
        return len(self.data["responses"]["run"])

    @property
    def recorded(self) -> int:
        """of so many that were recorded."""
        return int(sum(run["recorded"] for run in self.data["runs"]))

    @property
    def tokens(self) -> int:
        """How many tokens it shows."""
        return len(self.data["tokens"]["text"])

    def write(self, path: Path | None = None) -> Path:
        """Write the page, by default into the folder that it is about, and return where it is."""
        place = self.found.home / FILE if path is None else Path(path).expanduser()
        if place.is_dir():
            place /= FILE
        atomic_write(place, self.html)
        return place


def build_explorer(
    paths: Sequence[Path], *, gates: Sequence[Gate] = (), most_tokens: int = MOST_TOKENS
) -> Explorer:  # fmt: skip
    """The explorer of these runs, as they stand.

    Args:
        paths: Folders of runs or of a study.
        gates: One or two gates that the page starts with.
        most_tokens: How many tokens it holds at most.
    """
    if len(gates) > _SIDES:
        raise UsageError("the explorer holds two gates side by side", got=f"{len(gates)} gates", instead="one or two")
    found = find_runs(paths)
    data = payload(found, gates=gates, most_tokens=most_tokens, version=_version())
    for gate in gates:
        if unknown := sorted(set(gate.extra) - set(data["signals"])):
            raise UsageError(
                f"the signal {unknown[0]} was not recorded by these runs",
                got=str(gate),
                why="a browser can compute λ only from signals that tokens.jsonl has",
                instead=f"signals here: {', '.join(data['signals'])}",
            )
    return Explorer(found, data, render("explorer", title=f"{found.title} – gatespace explorer", data=data))


def _version() -> str:
    try:
        return metadata.version("gatespace")
    except metadata.PackageNotFoundError:
        return ""
