"""The output file of `gatespace predict`: written to a .part file, resumable, and renamed once complete.

The .part file is always JSON lines: a line counts once its newline is written, even after a power cut.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gatespace.errors import RunError, UsageError
from gatespace.files import Closing, sync_folder

FORMS = (".jsonl", ".ndjson", ".csv")


def check_output(path: Path) -> None:
    """Raise if predictions cannot be written to `path`; called before the slow loading of the model."""
    if path.suffix not in FORMS:
        raise UsageError("unknown output format", got=path.name, instead=f"one of {', '.join(FORMS)}")
    if path.exists():
        raise UsageError("the output exists already", got=path, instead="another name, or remove it first")
    if not path.parent.is_dir():
        raise UsageError("there is no such folder", got=path.parent)


class PredictionFile(Closing):
    """A file of predictions being written.

    Args:
        output: The file. It must not exist.
        recipe: Everything the predictions depend on besides the texts. A file begun with another recipe is left alone.
    """

    def __init__(self, output: Path, recipe: Mapping[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
        self.output, self.path = output, output.with_name(f"{output.name}.{key}.part")
        try:
            # A link of this name, which another user may have put there, is not followed.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._file = os.fdopen(os.open(self.path, flags, 0o666), "a+b")
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written", why=error.strerror or str(error)) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError("another process is writing this output", got=self.path) from None
        except OSError:
            pass  # the file system has no locks

    def resume(self, texts: Iterator[str], batch: int, empty: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the existing predictions of whole batches, consuming their texts from `texts`.

        Batches are the same as without a stop, and so are the predictions. Every record has the keys of `empty`.
        """
        self._file.seek(0)
        sizes = [len(line) for line in self._file if line.endswith(b"\n")]
        done = len(sizes) // batch * batch
        self._file.truncate(sum(sizes[:done]))
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if (
                not isinstance(record, dict)
                or not empty.keys() <= record.keys()
                or not isinstance(record["text"], str)
                or not isinstance(record.get("probabilities"), dict | None)
            ):
                raise UsageError(
                    f"line {number} of {self.path.name} is damaged",
                    got=self.path,
                    why="predictions are written in whole lines, so something else has changed the file",
                    instead=f"remove {self.path}; the command then starts again",
                )
            if record["text"] != next(texts, None):
                raise UsageError(
                    f"the input has changed: text {number} is different",
                    got=self.path,
                    why="it has the predictions of a stopped command with the same model and options",
                    instead=f"the same input, or remove {self.path}",
                )
            yield record

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add predictions, each with its `text`."""
        # A lone surrogate cannot be encoded in UTF-8; its escape is equivalent in JSON.
        lines = [json.dumps(one, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n" for one in records]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self.path} cannot be written", got=error.strerror or error) from error

    def finish(self, labels: Sequence[str] | None) -> None:
        """Convert the complete file to its final format and name.

        Args:
            labels: Labels with their own column in CSV; None: no probabilities.
        """
        os.fsync(self._file.fileno())
        if self.output.suffix == ".csv":
            table = self.path.with_suffix(".csv.tmp")
            self._file.seek(0)
            keys = list(dict.fromkeys(key for line in self._file for key in json.loads(line)))
            self._file.seek(0)
            table.unlink(missing_ok=True)
            with table.open("x", encoding="utf-8", errors="backslashreplace", newline="") as file:
                _write_csv(csv.writer(file), (json.loads(line) for line in self._file), keys, labels)
                file.flush()
                os.fsync(file.fileno())
            os.replace(table, self.output)
            self.path.unlink()
        else:
            os.replace(self.path, self.output)
        sync_folder(self.output.parent)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _write_csv(
    writer: Any, records: Iterable[Mapping[str, Any]], keys: Sequence[str], labels: Sequence[str] | None
) -> None:
    """A column for every key; `probabilities`, if there are `labels`, become a column per label."""
    columns = [key for key in keys if labels is None or key != "probabilities"]
    writer.writerow([*columns, *(f"p_{label}" for label in labels or ())])
    for record in records:
        shares = (record.get("probabilities") if labels else None) or {}
        cells = [record.get(column) for column in columns]
        cells = [json.dumps(cell, ensure_ascii=False) if isinstance(cell, dict | list) else cell for cell in cells]
        writer.writerow([*cells, *(shares.get(label) for label in labels or ())])
