"""The records of a run while they grow: each look reads only what has come since the last one.

Logs grow by whole lines. A run that goes on from a checkpoint cuts its logs and writes them anew from there, a folder
may vanish and come back, and a copy may take the place of a file. Whatever happens, what is held is what the files say.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Budget", "Records", "Tail", "thinned"]

MOST_POINTS = 240
"""Of a curve that is sent: a chart has about as many pixels."""
_RECENT = 20


class Budget:
    """How many bytes one look may read, so that long logs do not keep a page waiting."""

    def __init__(self, left: int) -> None:
        self.left = left


class Tail:
    """A log of JSON objects, one per line, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.behind = False
        """Whether there is more than the budgets have allowed."""
        self._offset = 0
        self._file: tuple[int, int] | None = None
        self._last = b""

    def read(self, budget: Budget) -> tuple[bool, list[dict[str, Any]]]:
        """(Whether all that was read before is void, the records that have come since)."""
        try:
            file = self.path.open("rb")
        except OSError:
            return self._forget(), []
        with file:
            about = os.fstat(file.fileno())
            same = self._file == (about.st_dev, about.st_ino) and self._offset <= about.st_size and self._is_last(file)
            anew = False if same else self._forget()
            self._file = (about.st_dev, about.st_ino)
            wanted = about.st_size - self._offset
            if wanted <= 0 or budget.left <= 0:
                self.behind = wanted > 0
                return anew, []
            file.seek(self._offset)
            data = file.read(min(wanted, budget.left))
            if len(data) < wanted and not data.endswith(b"\n"):
                data += file.readline()  # the budget bends for the line that it ends in
        budget.left -= len(data)
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)  # what has no end yet is not whole
        self._offset += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        self.behind = len(data) < wanted
        return anew, [record for line in lines if (record := _record(line)) is not None]

    def _is_last(self, file: Any) -> bool:
        """Whether the last line that was read still stands where it stood."""
        file.seek(self._offset - len(self._last))
        return bool(file.read(len(self._last)) == self._last)

    def _forget(self) -> bool:
        held = self._offset > 0
        self._offset, self._file, self._last, self.behind = 0, None, b"", False
        return held


class Records:
    """What the log files of one run say, held as columns."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._evaluations, self._timings = (
            Tail(folder / f"{name}.jsonl") for name in ("metrics", "evaluations", "timings")
        )
        self.steps, self.loss, self.lam = array("q"), array("d"), array("d")
        self.accuracies: dict[int, float] = {}
        """Step → accuracy on validation."""
        self._pace: deque[float] = deque(maxlen=_RECENT)
        self.version = 0
        """When it changed last, by the count of whoever looks."""

    @property
    def behind(self) -> bool:
        """Whether the files have more."""
        return self._metrics.behind or self._evaluations.behind

    @property
    def step(self) -> int:
        """The last one."""
        return self.steps[-1] if self.steps else 0

    @property
    def seconds_per_step(self) -> float | None:
        """Over the last steps."""
        return math.fsum(self._pace) / len(self._pace) if self._pace else None

    def read(self, budget: Budget, version: int) -> None:
        """Take in what has come; `version` is that of the look."""
        anew, records = self._metrics.read(budget)
        if anew:
            del self.steps[:], self.loss[:], self.lam[:]
        for record in records:
            self._take(record)
        again, evaluations = self._evaluations.read(budget)
        if again:
            self.accuracies.clear()
        for record in evaluations:
            # Test is for the end: what is seen on the way must not be what decides.
            if record.get("split") == "val" and isinstance(record.get("step"), int):
                self.accuracies[record["step"]] = _number(record.get("accuracy"))
        void, timings = self._timings.read(budget)
        if void:
            self._pace.clear()
        for record in timings[-_RECENT:]:
            wall = record.get("wall")
            self._pace.append(math.fsum(map(_number, wall.values())) if isinstance(wall, dict) else math.nan)
        if anew or again or records or evaluations:
            self.version = version

    def _take(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        while self.steps and self.steps[-1] >= step:
            del self.steps[-1], self.loss[-1], self.lam[-1]
        self.steps.append(step)
        self.loss.append(_number(record.get("loss")))
        self.lam.append(_number(record.get("lam_mean")))

    def curves(self, final: tuple[int, float] | None = None, most: int = MOST_POINTS) -> dict[str, Any]:
        """The columns as JSON has them, thinned. `final` is the evaluation at the end."""
        accuracies = self.accuracies | ({} if final is None else {final[0]: final[1]})
        evaluated = sorted(accuracies)
        return {
            "step": thinned(self.steps, most, last=True),
            "loss": thinned(self.loss, most),
            "lam": thinned(self.lam, most),
            "evaluated": evaluated,
            "accuracy": [plain(accuracies[step]) for step in evaluated],
        }


def thinned(values: Sequence[float], most: int, *, last: bool = False) -> list[float | None]:
    """`values` in at most `most` groups of equal size: the mean of each, or its last value.

    Example:
        >>> thinned([1.0, 3.0, float("nan"), 5.0, 7.0], 3)
        [2.0, 5.0, 7.0]
    """
    size = max(1, math.ceil(len(values) / most))
    groups = (values[start : start + size] for start in range(0, len(values), size))
    return [plain(group[-1]) if last else plain(_mean(group)) for group in groups]


def plain(value: float | None) -> float | None:
    """A number as JSON has it, in as many digits as a chart can show; None where there is none."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
