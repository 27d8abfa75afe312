"""The folder of a search: the folder of the verdict's study, plus the records and runs of the search.

tune.jsonl        append-only: warm-up, plan, candidates, scores and decisions, in the order of the search
warm-up/          signals.json: signals at the tokens of the first prompts, and timings
search/ID/        a run per candidate and seed, paused at its rungs
tune.html         the page
verdict.json      what `gatespace tune --json` prints
                  everything else is the verdict's study, see `StudyFolder`

A search is a function of its settings and tune.jsonl. A killed search replays from the start, reading what is recorded
and reusing finished runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gatespace.errors import RunError
from gatespace.files import JsonLines, Mark, encode, read
from gatespace.runs import RunFolder, StudyFolder

Record = dict[str, Any]


class TuneFolder(StudyFolder):
    """A search on disk."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.records_file = self.path / "tune.jsonl"
        self.warm_up = self.path / "warm-up" / "signals.json"
        self.page = self.path / "tune.html"

    def trial(self, name: str) -> RunFolder:
        """The run of a candidate at a seed."""
        return RunFolder(self.path / "search" / name)


class Ledger:
    """The records of a search, in order: each is made once, then read from the file when resuming."""

    def __init__(self, path: Path) -> None:
        self._known, self._next = read(path), 0
        whole = b"".join(map(encode, self._known))
        self._log = JsonLines(path)
        self._log.cut(Mark(len(whole), hashlib.sha256(whole).hexdigest()))  # drop a line torn by a kill

    def once(self, what: str, make: Callable[[], Mapping[str, Any]], **about: Any) -> Record:
        """The next record, from the file or made now.

        Args:
            what: Its kind.
            make: Returns its content.
            about: Further keys, which a record in the file must match.
        """
        head = {"step": self._next, "what": what, **about}
        if (record := self.peek()) is None:
            self._log.path.parent.mkdir(parents=True, exist_ok=True)
            record = json.loads(encode(head | dict(make())))
            self._log.append(record)
            self._log.sync()
        elif any(record.get(key) != value for key, value in head.items()):
            raise RunError(
                "this search goes another way than its records",
                got=f"{self._log.path}: line {self._next + 1} is {record.get('what')!r}, not {what!r}",
                why="a search is a function of its settings and its records",
                instead="the release of gatespace that began it, or another --output",
            )
        self._next += 1
        return record

    def peek(self, ahead: int = 0) -> Record | None:
        """The next record, or a later one, if the file has it."""
        place = self._next + ahead
        return self._known[place] if place < len(self._known) else None

    def close(self) -> None:
        """Close the file."""
        self._log.close()
