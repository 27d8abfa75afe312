"""Classification data of one's own: JSONL, CSV, TSV, Parquet, or a dataset of the Hugging Face Hub."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from gatespace.errors import UsageError, unknown_name
from gatespace.seeding import stream
from gatespace.tasks.data import SPLITS, Example, Task, check_labels, split_rows
from gatespace.tasks.hub import SPLIT_NAMES, check_column, hub_splits, optional_module
from gatespace.tasks.parser import label_key

CARVED: Mapping[str, float] = MappingProxyType({"val": 0.1, "test": 0.2})
"""The shares of the training rows that become val and test where the source has none."""

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?")


class _Row(NamedTuple):
    where: str
    text: object
    label: object


def load_table(
    source: str | Path | Mapping[str, str | Path],
    *,
    labels: Sequence[str],
    definitions: Mapping[str, str],
    text_column: str = "text",
    label_column: str = "label",
    split: Mapping[str, float] = CARVED,
    seed: int = 0,
    name: str | None = None,
    question: str = "Which label fits the text best?",
) -> Task:
    """A task from rows with a text and a label.

    Rows with an empty text are dropped and counted. Any other bad row is an error that names its file and line.

    Args:
        source: A file (its rows are train), a folder with train, val and test files, a mapping of split to file, or a
            Hub dataset as ``owner/name`` or ``owner/name:config``. Files end in .jsonl, .csv, .tsv or .parquet.
        labels: All labels. A row gives its label as a string, in any case and with any of space, underscore and
            hyphen between its words, or as the integer index into this list. Where a Hub dataset or its integers have
            names, the names count.
        definitions: A brief sentence for each label for the prompt; ``{}`` for none.
        text_column: The column or key of the text.
        label_column: The column or key of the label.
        split: Shares of train that become ``val`` and ``test`` where the source has no such split.
        seed: Of that choice.
        name: Of the task; by default made from the source.
        question: What the prompt asks about a text.
    """
    check_labels(labels, definitions)
    found, shown = _read(source, text_column, label_column)
    legal = tuple(labels)
    reader = _label_reader(legal)
    rows: dict[str, list[Example]] = {}
    dropped: dict[str, int] = {}
    for part, given in found.items():
        rows[part] = []
        dropped[part] = 0
        for row in given:
            example = _example(row, reader, text_column, label_column, legal)
            if example.text.strip():
                rows[part].append(example)
            else:
                dropped[part] += 1
        if not rows[part]:
            raise UsageError(f"{shown} has no rows with text for {part}")
    _carve(rows, split, seed)
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
    )


def _carve(rows: dict[str, list[Example]], split: Mapping[str, float], seed: int) -> None:
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


def _label_reader(labels: tuple[str, ...]) -> Callable[[object], str | None]:
    exact = set(labels)
    by_key = {label_key(label): label for label in labels}

    def read(value: object) -> str | None:
        if isinstance(value, str):
            found = value if value in exact else by_key.get(label_key(value))
            if found is not None or not (value.strip().isascii() and value.strip().isdigit()):
                return found
            value = int(value)  # CSV knows no integers
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
            return labels[value]
        return None

    return read


def _example(
    row: _Row,
    reader: Callable[[object], str | None],
    text_column: str,
    label_column: str,
    labels: tuple[str, ...],
) -> Example:
    if not isinstance(row.text, str):
        raise UsageError(f"{row.where}: {text_column!r} is not a string", got=repr(row.text))
    label = reader(row.label)
    if label is None:
        raise UsageError(
            f"{row.where}: {label_column!r} is not a label",
            got=repr(row.label),
            instead=f"one of {', '.join(labels)}, or an integer from 0 to {len(labels) - 1}",
        )
    return Example(row.text, label)


# ---------------------------------------------------------------------------------------------------- sources


def _read(
    source: str | Path | Mapping[str, str | Path], text_column: str, label_column: str
) -> tuple[dict[str, Iterator[_Row]], str]:
    if isinstance(source, Mapping):
        files = {split: Path(path).expanduser() for split, path in source.items()}
        for split in files:
            if split not in SPLITS:
                raise unknown_name("split", split, SPLITS)
        if "train" not in files:
            raise UsageError("a mapping of split to file names train", got=", ".join(files) or "nothing")
        shown = str(files["train"])
    else:
        path = Path(source).expanduser()
        if path.is_dir():
            files = _files_of(path)
        elif path.is_file() or path.suffix.lower() in _READERS:
            files = {"train": path}
        elif hub := _HUB_NAME.fullmatch(str(source)):
            return _from_hub(hub["name"], hub["config"], text_column, label_column), str(source)
        else:
            raise UsageError("neither a file, a folder nor the name of a Hub dataset", got=repr(str(source)))
        shown = str(path)
    return {split: _rows_of(path, text_column, label_column) for split, path in files.items()}, shown


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


def _from_hub(name: str, config: str | None, text_column: str, label_column: str) -> dict[str, Iterator[_Row]]:
    splits = hub_splits(
        name,
        config,
        text_column=text_column,
        label_column=label_column,
        otherwise="download it and give the path of the file",
    )

    def rows(split: str) -> Iterator[_Row]:
        texts, labels, names = splits[split].texts, splits[split].labels, splits[split].names
        for number, (text, label) in enumerate(zip(texts, labels, strict=True), start=1):
            # By name, because the order of the user's list need not be that of the dataset.
            named = names[label] if names and isinstance(label, int) and 0 <= label < len(names) else label
            yield _Row(f"{name}, {split} row {number}", text, named)

    return {split: rows(split) for split in splits}


# ---------------------------------------------------------------------------------------------------- files


def _rows_of(path: Path, text_column: str, label_column: str) -> Iterator[_Row]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path} has an ending that is not known", instead=f"one of {', '.join(_READERS)}")
    if not path.is_file():
        raise UsageError("no such file", got=path)
    for where, row in reader(path):
        for column in (text_column, label_column):
            check_column(column, row, where=where)
        yield _Row(where, row[text_column], row[label_column])


def _decoded(path: Path) -> str:
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8", got=f"byte {content[error.start]:#04x}") from error


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
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


def _separated(path: Path, delimiter: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    reader = csv.reader(io.StringIO(_decoded(path), newline=""), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"  # where the row begins; a quoted text may run over several lines
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            raise UsageError(f"{where}: not a row of a table", why=str(error)) from error
        if not cells:
            continue
        if columns is None:
            columns = [cell.strip() for cell in cells]
            continue
        if len(cells) != len(columns):
            raise UsageError(
                f"{where}: {len(cells)} cells under {len(columns)} columns",
                got=_short(delimiter.join(cells)),
                instead="a text with a delimiter in it stands in double quotes",
            )
        yield where, dict(zip(columns, cells, strict=True))


def _csv(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    return _separated(path, ",")


def _tsv(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    return _separated(path, "\t")


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    parquet = optional_module("pyarrow.parquet", feature="reading Parquet", otherwise="give JSONL or CSV")
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow's own family of errors, known only once it is imported
        raise UsageError(f"{path} cannot be read as Parquet", got=f"{type(error).__name__}: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Mapping[str, object]]]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}


def _short(text: str, limit: int = 120) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
