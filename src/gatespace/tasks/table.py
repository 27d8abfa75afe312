"""Your own classification data: JSONL, CSV, TSV, Parquet, or a dataset of the Hugging Face Hub."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from gatespace.errors import UsageError, unknown_name
from gatespace.seeding import stream
from gatespace.tasks.data import SPLITS, Example, Task, check_labels, split_rows
from gatespace.tasks.data import Row as AnyRow
from gatespace.tasks.hub import LABEL_COLUMNS, SPLIT_NAMES, check_column, hub_splits, optional_module
from gatespace.tasks.parser import label_key

CARVED: Mapping[str, float] = MappingProxyType({"val": 0.1, "test": 0.2})
"""The shares of the training rows that become val and test if the source has none."""

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?")

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_TRIED = 20
"""Rows by which the delimiter is found."""

Rows = Iterator[tuple[str, Mapping[str, object] | None]]
"""Where a row is, and its cells; None if all of them are empty."""


class _Row(NamedTuple):
    where: str
    text: object
    label: object

    @property
    def is_empty(self) -> bool:
        return all(cell is None or (isinstance(cell, str) and not cell.strip()) for cell in (self.text, self.label))


def load_table(
    source: str | Path | Mapping[str, str | Path],
    *,
    labels: Sequence[str],
    definitions: Mapping[str, str],
    text_column: str = "text",
    label_column: str = "label",
    teacher_column: str | None = None,
    split: Mapping[str, float] = CARVED,
    seed: int = 0,
    name: str | None = None,
    question: str = "Which label fits the text best?",
) -> Task:
    """Load a task of texts and labels.

    Rows with an empty text are dropped and counted. Any other bad row is an error that names its file and line. Files
    are UTF-8, or UTF-16 with a byte order mark; the delimiter may be a comma, a semicolon, a tab or a bar.

    Args:
        source: A file (its rows are train), a folder with train, val and test files, a mapping of split to file, or a
            Hub dataset as ``owner/name`` or ``owner/name:config``. Files end in .jsonl, .csv, .tsv or .parquet.
        labels: All labels. A row gives its label as a string, in any case and with any of space, underscore and
            hyphen between its words, or as the integer index into this list; an integer that is one label by its text
            and another by its index is an error. If a Hub dataset has names for its integers, the names count.
        definitions: A brief sentence for each label for the prompt; ``{}`` for none.
        text_column: The column or key of the text.
        label_column: The column or key of the label.
        teacher_column: The column or key that names a training row's teacher; None: rows name none.
        split: Shares of train that become ``val`` and ``test`` if the source has no such split.
        seed: Of that split.
        name: Of the task; by default the source.
        question: What the prompt asks about a text.
    """
    check_labels(labels, definitions)
    notes: list[str] = []
    found, shown = read_source(source, (text_column, label_column), notes, for_train=teacher_column)
    legal = tuple(labels)
    readings = _label_reader(legal)
    rows: dict[str, list[Example]] = {}
    dropped: dict[str, int] = {}
    for part, given in found.items():
        rows[part] = []
        dropped[part] = 0
        for where, cells in given:
            row = _Row(where, None, None) if cells is None else _Row(where, cells[text_column], cells[label_column])
            example = None if row.is_empty else _example(row, readings, text_column, label_column, legal)
            if example is not None and example.text.strip():
                named = "" if cells is None or part != "train" else teacher_of(where, cells, teacher_column)
                rows[part].append(replace(example, teacher=named, where=where))
            else:
                dropped[part] += 1
        if not rows[part]:
            raise UsageError(f"{shown} has no rows with text for {part}")
        if dropped[part]:
            notes.append(f"{shown}: rows of {part} without a text, which are left out: {dropped[part]}")
    carve(rows, split, seed)
    return Task(
        name=name or shown,
        labels=legal,
        definitions=dict(definitions),
        train=rows["train"],
        val=rows["val"],
        test=rows["test"],
        dropped=dropped,
        question=question,
        source=shown,
        notes=tuple(dict.fromkeys(notes)),
    )


def carve(rows: dict[str, list[AnyRow]], split: Mapping[str, float], seed: int) -> None:
    """Give val and test their shares of the training rows if they have none; arguments as in `load_table`."""
    for part in split:
        if part not in ("val", "test"):
            raise unknown_name("split to carve from train", part, ("val", "test"))
    missing = [part for part in SPLITS if part not in rows]
    for part in missing:
        if part not in split:
            raise UsageError(
                f"there are no {part} rows, and no share of train is given for them",
                got=f"split={dict(split)}",
                instead=f"a {part} file, or split={{'{part}': 0.1, …}}",
            )
    if missing:
        shares = {part: split[part] for part in missing}
        left = 1.0 - sum(shares.values())
        if left <= 0:
            raise UsageError("the shares of val and test leave nothing of train", got=dict(split))
        named = stream(seed, "tasks", "table", "carve", *missing)
        rows.update(split_rows(rows["train"], {"train": left, **shares}, named))


# ---------------------------------------------------------------------------------------------------- one row


def teacher_of(where: str, cells: Mapping[str, object], column: str | None) -> str:
    """The name of a row's teacher; "" if there is no such column."""
    name = "" if column is None else cells[column]
    if column is not None and (not isinstance(name, str) or not name.strip()):
        raise UsageError(f"{where}: {column!r} names no teacher", got=repr(name), instead="a name of pair.teachers")
    return str(name).strip()


def _label_reader(labels: tuple[str, ...]) -> Callable[[object], list[str]]:
    """Cell → the labels it can mean: none, one, or two if an integer is one by its text and another by its index."""
    by_key = {label_key(label): label for label in labels}

    def readings(value: object) -> list[str]:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            return []
        text = str(value)
        named, digits = by_key.get(label_key(text)), text.strip()
        if isinstance(value, str) and named is not None:
            return [named]  # text is a label first: CSV has no integers
        place = int(digits) if digits.isascii() and digits.isdigit() else len(labels)
        placed = labels[place] if place < len(labels) else None
        return list(dict.fromkeys(label for label in (named, placed) if label is not None))

    return readings


def _example(
    row: _Row,
    readings: Callable[[object], list[str]],
    text_column: str,
    label_column: str,
    labels: tuple[str, ...],
) -> Example:
    if not isinstance(row.text, str):
        raise UsageError(f"{row.where}: {text_column!r} is not a string", got=repr(row.text))
    found = readings(row.label)
    if not found:
        raise UsageError(
            f"{row.where}: {label_column!r} is not a label",
            got=repr(row.label),
            instead=f"one of {', '.join(labels)}, or an integer from 0 to {len(labels) - 1}",
        )
    if len(found) > 1:
        named, placed = found
        raise UsageError(
            f"{row.where}: {label_column!r} can be read as two labels",
            got=row.label,
            why=f"there is a label {named!r}, and number {row.label} of the list of labels, from 0, is {placed!r}",
            instead=f'"{named}" or "{placed}", as text in quotation marks',
        )
    return Example(row.text, found[0])


# ---------------------------------------------------------------------------------------------------- sources


def read_source(
    source: str | Path | Mapping[str, str | Path],
    columns: Sequence[str],
    notes: list[str],
    *,
    settings: str = LABEL_COLUMNS,
    for_train: str | None = None,
) -> tuple[dict[str, Rows], str]:
    """Split → its rows, all of which have `columns`; and the source as shown to a user.

    Args:
        source: As in `load_table`.
        columns: Required; a file's rows may have more.
        notes: Gets oddities of a file.
        settings: Which settings name the columns, for errors.
        for_train: One more column, required of training rows.
    """
    more = () if for_train is None else (for_train,)
    if isinstance(source, Mapping):
        files = {split: place_of(path) for split, path in source.items()}
        for split in files:
            if split not in SPLITS:
                raise unknown_name("split", split, SPLITS)
        if "train" not in files:
            raise UsageError("a mapping of split to file names train", got=", ".join(files) or "nothing")
        shown = str(files["train"])
    else:
        path = place_of(source)
        if path.is_dir():
            files = _files_of(path)
        elif path.is_file() or path.suffix.lower() in _READERS:
            files = {"train": path}
        elif hub := _HUB_NAME.fullmatch(str(source)):
            return _from_hub(hub["name"], hub["config"], columns, settings, more), str(source)
        else:
            raise UsageError("neither a file, a folder nor the name of a Hub dataset", got=repr(str(source)))
        shown = str(path)
    wanted = {split: (*columns, *more) if split == "train" else columns for split in files}
    return {split: read_rows(path, wanted[split], notes, settings=settings) for split, path in files.items()}, shown


def place_of(source: str | Path) -> Path:
    """A path with ~ and environment variables ($DATA/rows.csv) expanded."""
    return Path(os.path.expandvars(source)).expanduser()


def _files_of(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        split = SPLIT_NAMES.get(path.stem)
        if split is None or path.suffix.lower() not in _READERS:
            continue
        if split in files:
            raise UsageError(f"two files for {split} in {folder}", got=f"{files[split].name} and {path.name}")
        files[split] = path
    if "train" not in files:
        raise UsageError(
            f"no training file in {folder}",
            got=", ".join(path.name for path in sorted(folder.iterdir())[:10]) or "an empty folder",
            instead=f"train with one of {', '.join(_READERS)}",
        )
    return files


def _from_hub(
    name: str, config: str | None, columns: Sequence[str], settings: str, for_train: Sequence[str]
) -> dict[str, Rows]:
    otherwise = "download it and give the path of the file"
    splits = hub_splits(name, config, columns, otherwise=otherwise, settings=settings, for_train=for_train)

    def rows(split: str) -> Rows:
        # By name, because the order of the user's list of labels need not be that of the dataset.
        for number, cells in enumerate(splits[split].cells(), start=1):
            yield f"{name}, {split} row {number}", cells

    return {split: rows(split) for split in splits}


# ---------------------------------------------------------------------------------------------------- files


def read_rows(path: Path, columns: Sequence[str], notes: list[str], *, settings: str = LABEL_COLUMNS) -> Rows:
    """The rows of a file, all of which have `columns`."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path} has an unknown file extension", instead=f"one of {', '.join(_READERS)}")
    if not path.is_file():
        why = "" if path.is_absolute() else "paths are relative to the working directory"
        raise UsageError("no such file", got=path, why=why)
    for where, row in reader(path, columns, notes):
        if row is not None:
            for column in columns:
                check_column(column, row, where=where, instead=settings)
        yield where, row


def _decoded(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-16" if content.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8", instead='save it as UTF-8; in Excel, as "CSV UTF-8"') from error


def _jsonl(path: Path, wanted: Sequence[str], notes: list[str]) -> Rows:
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON", got=_short(line), why=str(error)) from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}: not a JSON object", got=_short(line))
        yield where, row


def _delimiter(content: str, wanted: Sequence[str], usual: str) -> str:
    """The delimiter that gives the header all wanted columns, then several, then as many as the first rows have."""

    def fit(delimiter: str) -> tuple[bool, ...]:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter)
        try:
            header, *rows = islice((cells for cells in reader if any(map(str.strip, cells))), _TRIED)
        except (csv.Error, ValueError):
            return (False,)
        named = {*map(str.strip, header)}
        return {*wanted} <= named, len(header) > 1, all(len(cells) == len(header) for cells in rows)

    return max(dict.fromkeys((usual, *_SEPARATORS)), key=fit)


def _separated(path: Path, wanted: Sequence[str], notes: list[str], usual: str) -> Rows:
    content = _decoded(path)
    delimiter = _delimiter(content, wanted, usual)
    if delimiter != usual:
        notes.append(f"{path}: cells are separated by {_SEPARATORS[delimiter]}")
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"  # where the row begins; a quoted text may span several lines
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            raise UsageError(
                f"{where}: not a row of a table",
                why=str(error),
                instead='a cell with quotes in it is quoted as a whole, and they are doubled: "say ""hi"" again"',
            ) from error
        if not any(map(str.strip, cells)):
            if cells and columns is not None:
                yield where, None
            continue
        if columns is None:
            columns = [cell.strip() for cell in cells]
            continue
        if len(cells) != len(columns):
            raise UsageError(
                f"{where}: {len(cells)} cells under {len(columns)} columns",
                got=_short(delimiter.join(cells)),
                instead="put double quotes around a cell that contains the delimiter",
            )
        yield where, dict(zip(columns, cells, strict=True))


def _parquet(path: Path, wanted: Sequence[str], notes: list[str]) -> Rows:
    parquet = optional_module("pyarrow.parquet", feature="reading Parquet", otherwise="give JSONL or CSV")
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow's own family of errors, known only once it is imported
        raise UsageError(f"{path} cannot be read as Parquet", got=f"{type(error).__name__}: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


_READERS: dict[str, Callable[[Path, Sequence[str], list[str]], Rows]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": partial(_separated, usual=","),
    ".tsv": partial(_separated, usual="\t"),
    ".parquet": _parquet,
}


FORMATS = tuple(_READERS)
"""How the names of tables end."""


def _short(text: str, limit: int = 120) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
