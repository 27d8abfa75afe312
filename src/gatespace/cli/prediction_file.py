"""The output file of `gatespace predict`: it grows beside its place, resumes after a stop, and appears there whole.

On its way it is JSON lines whatever its form: a line is there once its end is, also after a power cut.
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
    """Raise where predictions cannot be written to `path`; before the model is loaded, which takes long."""
    if path.suffix not in FORMS:
        raise UsageError("unknown output format", got=path.name, instead=f"one of {', '.join(FORMS)}")
    if path.exists():
        raise UsageError("the output exists already", got=path, instead="another name, or remove it first")
    if not path.parent.is_dir():
        raise UsageError("there is no such folder", got=path.parent)


class PredictionFile(Closing):
    """Predictions on their way to a file.

    Args:
        output: The file. It must not be there.
        recipe: All that the predictions depend on beside the texts. What was begun with another one is left alone.
    """

    def __init__(self, output: Path, recipe: Mapping[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
        self.output, self.path = output, output.with_name(f"{output.name}.{key}.part")
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written", why=error.strerror or str(error)) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError("another process is writing this output", got=self.path) from None
        except OSError:
            pass  # a file system without locks

    def resume(self, texts: Iterator[str], batch: int) -> Iterator[dict[str, Any]]:
        """The predictions that are there already, in whole batches; their texts are taken from `texts`.

        Texts go through the network in the same batches as without a stop, so that the predictions are the same.
        """
        self._file.seek(0)
        sizes = [len(line) for line in self._file if line.endswith(b"\n")]
        done = len(sizes) // batch * batch
        self._file.truncate(sum(sizes[:done]))
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            record = json.loads(line)
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
        # A lone surrogate has no form in UTF-8; its escape says the same in JSON.
        lines = [json.dumps(one, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n" for one in records]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self.path} cannot be written", got=error.strerror or error) from error

    def finish(self, labels: Sequence[str] | None, said: str = "label") -> None:
        """All predictions are there: give the file its form and its name.

        Args:
            labels: Those with a column of their own in CSV; None: no probabilities.
            said: The key of what was predicted.
        """
        os.fsync(self._file.fileno())
        if self.output.suffix == ".csv":
            table = self.path.with_suffix(".csv.tmp")
            self._file.seek(0)
            with table.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                _write_csv(csv.writer(file), (json.loads(line) for line in self._file), labels, said)
                file.flush()
                os.fsync(file.fileno())
            os.replace(table, self.output)
            self.path.unlink()
        else:
            os.replace(self.path, self.output)
        sync_folder(self.output.parent)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _write_csv(writer: Any, records: Iterable[Mapping[str, Any]], labels: Sequence[str] | None, said: str) -> None:
    columns = ["line", said, "text", *(["raw"] if labels is None else ["confidence", "margin", "mass"])]
    writer.writerow([*columns, *(f"p_{label}" for label in labels or ())])
    for record in records:
        shares = record.get("probabilities") or {}
        writer.writerow([*(record[column] for column in columns), *(shares.get(label) for label in labels or ())])
