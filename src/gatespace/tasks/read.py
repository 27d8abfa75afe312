"""Tasks from your own data: JSONL, CSV, TSV, Parquet, or a dataset of the Hugging Face Hub."""

from __future__ import annotations

import csv
import importlib
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
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from gatespace.errors import MissingExtraError, UsageError, missing_extra
from gatespace.seeding import stream
from gatespace.tasks.data import SPLITS, Example, Task, check_labels, split_rows
from gatespace.tasks.parser import label_key
from gatespace.tasks.prompt import Prompt, Template, Turn

CARVED: Mapping[str, float] = MappingProxyType({"val": 0.1, "test": 0.2})
"""The shares of the training rows that become val and test if the source has none."""
SPLIT_NAMES = {"train": "train", "validation": "val", "valid": "val", "val": "val", "dev": "val", "test": "test"}

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?")
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_TRIED = 20
"""Rows by which the delimiter is found."""
_TABLE_COLUMNS = "text_column, label_column and teacher_column of task.table name the columns"
_TEXT_COLUMNS = "prompt, messages, answer, columns and teacher_column of task.text name the columns"

Source = str | Path | Mapping[str, str | Path]
Cells = Mapping[str, Any]
Rows = Iterator[tuple[str, Cells | None]]
"""Where a row is, and its cells; None if all of them are empty."""


# ---------------------------------------------------------------------------------------------------- tasks


def load_table(
    source: Source,
    *,
    labels: Sequence[str],
    definitions: Mapping[str, str],
    text_column: str = "text",
    label_column: str = "label",
    metric: str = "accuracy",
    teacher_column: str | None = None,
    carve: Mapping[str, float] = CARVED,
    carve_seed: int = 0,
    name: str | None = None,
    question: str = "Which label fits the text best?",
) -> Task:
    """Load a task of texts and labels.

    Rows with an empty text are dropped and counted. Any other bad row is an error that names its file and line. Files
    are UTF-8; the delimiter may be a comma, a semicolon, a tab or a bar.

    Args:
        source: A file (its rows are train), a folder with train, val and test files, a mapping of split to file, or a
            Hub dataset as ``owner/name`` or ``owner/name:config``. Files end in .jsonl, .csv, .tsv or .parquet.
        labels: All labels. A row gives its label as a string, in any case and with any of space, underscore and
            hyphen between its words, or as the integer index into this list; an integer that is one label by its text
            and another by its index is an error. If a Hub dataset has names for its integers, the names count.
        definitions: A brief sentence for each label for the prompt; ``{}`` for none.
        text_column: The column or key of the text.
        label_column: The column or key of the label.
        metric: A name of `gatespace.tasks.scores`.
        teacher_column: The column or key that names a training row's teacher; None: rows name none.
        carve: Shares of train that become ``val`` and ``test`` if the source has no such split.
        carve_seed: Of that choice.
        name: Of the task; by default the source.
        question: What the prompt asks about a text.
    """
    check_labels(labels, definitions)
    by_key = {label_key(label): label for label in labels}

    def example(where: str, cells: Cells) -> Example | None:
        text, label = cells[text_column], cells[label_column]
        if _is_empty(text) and _is_empty(label):
            return None
        if not isinstance(text, str):
            raise UsageError(f"{where}: {text_column!r} is not a string", got=repr(text))
        readings = _labels_of(label, labels, by_key)
        if not readings:
            raise UsageError(
                f"{where}: {label_column!r} is not a label",
                got=repr(label),
                instead=f"one of {', '.join(labels)}, or an integer from 0 to {len(labels) - 1}",
            )
        if len(readings) > 1:
            named, indexed = readings
            raise UsageError(
                f"{where}: {label_column!r} can be read as two labels",
                got=label,
                why=f"there is a label {named!r}, and number {label} of the list of labels, from 0, is {indexed!r}",
                instead=f'"{named}" or "{indexed}", as text in quotation marks',
            )
        return Example(text, readings[0]) if text.strip() else None

    return _load(
        source,
        (text_column, label_column),
        example,
        settings=_TABLE_COLUMNS,
        teacher_column=teacher_column,
        carve=carve,
        carve_seed=carve_seed,
        name=name,
        labels=tuple(labels),
        definitions=dict(definitions),
        question=question,
        metric=metric,
    )


def load_text(
    source: Source,
    *,
    prompt: str | None = None,
    messages: str | None = None,
    answer: str | None = None,
    metric: str = "exact",
    also: Sequence[str] = (),
    columns: Sequence[str] = (),
    teacher_column: str | None = None,
    group: bool = True,
    carve: Mapping[str, float] = CARVED,
    carve_seed: int = 0,
    name: str | None = None,
    **how: Any,
) -> Task:
    """Load a task of prompts and free-text references. A bad row is an error that names its file and line.

    Args:
        source: As in `load_table`.
        prompt: A template over columns, e.g. ``Describe: {mr}``; or `messages`.
        messages: The column of a conversation: a list of ``{"role": …, "content": …}``, as JSON in text files.
        answer: The column of the right response: a text, a number, a list of texts that are all right, or a list with
            one message. None: the conversation's last turn, by the assistant.
        metric: A name of `gatespace.tasks.scores`.
        also: Further metrics.
        columns: Further columns for custom metrics.
        teacher_column: The column that names a training row's teacher; None: rows name none.
        group: Merge rows of one prompt and teacher into one, with the references of all.
        carve: Shares of train that become ``val`` and ``test`` if the source has no such split.
        carve_seed: Of that choice.
        name: Of the task; by default the source.
        how: Settings of `Prompt`: system, prefill, stop, thinking, max_prompt_tokens, too_long.
    """
    if (prompt is None) == (messages is None) or (answer or messages) is None:
        raise UsageError(
            "a text task has a prompt template and an answer, or messages", got=f"{prompt!r}, {messages!r}"
        )
    template = None if prompt is None else Template(prompt)
    if template is not None and not template.columns:
        raise UsageError("prompt: the template names no column", got=repr(prompt), instead='e.g. "Describe: {mr}"')
    shown = template.columns if template is not None else (messages or "",)
    wanted = tuple(dict.fromkeys((*shown, *([] if answer is None else [answer]), *columns)))

    def example(where: str, cells: Cells) -> Example | None:
        if all(cells[column] in (None, "") for column in wanted):
            return None
        if answer is not None:
            references = _references(where, answer, cells[answer])
        else:
            references = _last_turn(where, messages or "", cells)
        text = row_text(where, cells, template, messages)
        kept = {column: "" if cells[column] is None else _as_text(cells[column]) for column in wanted}
        return Example(text, references[0], references[1:], kept)

    return _load(
        source,
        wanted,
        example,
        settings=_TEXT_COLUMNS,
        teacher_column=teacher_column,
        carve=carve,
        carve_seed=carve_seed,
        name=name,
        group=group,
        metric=metric,
        also=tuple(also),
        prompt=Prompt(conversations=messages is not None, **how),
    )


def _load(
    source: Source,
    columns: Sequence[str],
    example: Callable[[str, Cells], Example | None],
    *,
    settings: str,
    teacher_column: str | None,
    carve: Mapping[str, float],
    carve_seed: int,
    name: str | None,
    group: bool = False,
    **task: Any,
) -> Task:
    """The task of a source's rows; `example` makes a row from its cells, or None if it is empty."""
    notes: list[str] = []
    given, shown = read_source(source, columns, notes, settings=settings, for_train=teacher_column)
    rows: dict[str, list[Example]] = {}
    dropped: dict[str, int] = {}
    for part, found in given.items():
        rows[part], dropped[part] = [], 0
        for where, cells in found:
            row = None if cells is None else example(where, cells)
            if cells is None or row is None:
                dropped[part] += 1
                continue
            teacher = _teacher(where, cells, teacher_column) if part == "train" else ""
            rows[part].append(replace(row, teacher=teacher, where=where))
        if not rows[part]:
            raise UsageError(f"{shown} has no rows with text for {part}")
        if dropped[part]:
            notes.append(f"{shown}: empty rows of {part}, which are left out: {dropped[part]}")
        if group:
            rows[part] = _grouped(rows[part])
    _carve(rows, carve, carve_seed)
    train, val, test = (rows[part] for part in SPLITS)
    return Task(
        name or shown, train, val, test, dropped=dropped, source=shown, notes=tuple(dict.fromkeys(notes)), **task
    )


def _carve(rows: dict[str, list[Example]], shares: Mapping[str, float], seed: int) -> None:
    """Give val and test their shares of the training rows if they have none."""
    missing = [part for part in ("val", "test") if part not in rows]
    if not missing:
        return
    if not {*missing} <= {*shares} or sum(shares[part] for part in missing) >= 1:
        raise UsageError(
            f"there are no {' and no '.join(missing)} rows, and the shares of train for them do not give any",
            got=f"carve={dict(shares)}",
            instead=f"a {missing[0]} file, or shares such as {dict(CARVED)}",
        )
    carved = {part: shares[part] for part in missing}
    named = stream(seed, "tasks", "table", "carve", *missing)
    rows.update(split_rows(rows["train"], {"train": 1.0 - sum(carved.values()), **carved}, named))


# ---------------------------------------------------------------------------------------------------- one row


def _is_empty(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _teacher(where: str, cells: Cells, column: str | None) -> str:
    if column is None:
        return ""
    name = cells[column]
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"{where}: {column!r} names no teacher", got=repr(name), instead="a name of pair.teachers")
    return name.strip()


def _labels_of(value: object, labels: Sequence[str], by_key: Mapping[str, str]) -> list[str]:
    """The labels that a cell can mean: none, one, or two if an integer is one by its text and another by its index."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return []
    text = str(value)
    named, digits = by_key.get(label_key(text)), text.strip()
    if isinstance(value, str) and named is not None:
        return [named]  # text is a label first: CSV has no integers
    index = int(digits) if digits.isascii() and digits.isdigit() else len(labels)
    indexed = labels[index] if index < len(labels) else None
    return list(dict.fromkeys(label for label in (named, indexed) if label is not None))


def row_text(where: str, cells: Cells, template: Template | None, messages: str | None) -> str:
    """The text of a free-text row, from its cells. The assistant's last turn is not part of it."""
    if template is not None:
        texts = {column: _text(where, column, cells[column]) for column in template.columns}
        if not any(part.strip() for part in texts.values()):
            raise UsageError(f"{where}: the prompt is empty", got=repr(texts), why="its columns have no text")
        return template.fill(texts)
    assert messages is not None
    turns = _conversation(where, messages, cells[messages])
    if turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        raise UsageError(
            f"{where}: there is nothing to respond to",
            got=f"a last turn of {turns[-1]['role']}" if turns else "no turn before the right response",
            instead="a turn of user before it",
        )
    return json.dumps(turns, ensure_ascii=False)


def _joined(content: object) -> object:
    """The text of a turn whose content is a list of parts, as OpenAI writes them."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


class _Turn(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined), Field(pattern=r"\S")]
    tool_calls: Annotated[None, BeforeValidator(lambda calls: calls or None)] = None


_TURNS = TypeAdapter(Annotated[list[_Turn], Field(min_length=1)])


def _conversation(where: str, column: str, value: object) -> list[Turn]:
    """The turns of a conversation, checked."""
    try:
        turns = _TURNS.validate_json(value) if isinstance(value, str) else _TURNS.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        numbered = [f"turn {part + 1}" if isinstance(part, int) else part for part in first["loc"]]
        raise UsageError(
            f"{where}: {column!r} is no conversation",
            got=repr(first["input"])[:80],
            why=": ".join([", ".join(numbered), first["msg"]]).removeprefix(": "),
            instead='[{"role": "user", "content": "…"}, …]: texts only, calls of tools as text too',
        ) from None
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def _last_turn(where: str, column: str, cells: Cells) -> tuple[str, ...]:
    last = _conversation(where, column, cells[column])[-1]
    if last["role"] != "assistant":
        raise UsageError(
            f"{where}: the conversation does not end with the right response",
            got=f"a last turn of {last['role']}",
            why="task.text.answer names no column",
            instead="a last turn of assistant, or answer: NAME",
        )
    return (last["content"].strip(),)


def _text(where: str, column: str, value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where}: {column!r} is neither a text nor a number", got=repr(value)[:80])
    return str(value)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _references(where: str, column: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if values and all(isinstance(item, dict) for item in values):  # a completion, as TRL writes it
        if len(values) > 1:
            raise UsageError(f"{where}: {column!r} has several turns", got=repr(value)[:80], instead="one of assistant")
        values = [turn["content"] for turn in _conversation(where, column, values)]
    texts = tuple(dict.fromkeys(_text(where, column, item).strip() for item in values))
    if not texts or not all(texts):
        raise UsageError(f"{where}: {column!r} has no right response", got=repr(value)[:80])
    return texts


def _grouped(rows: Sequence[Example]) -> list[Example]:
    groups: dict[tuple[str, str], Example] = {}
    for row in rows:
        first = groups.setdefault((row.text, row.teacher), row)
        _, *others = dict.fromkeys((*first.references, *row.references))
        groups[row.text, row.teacher] = replace(first, others=tuple(others))
    return list(groups.values())


# ---------------------------------------------------------------------------------------------------- sources


def read_source(
    source: Source,
    columns: Sequence[str],
    notes: list[str],
    *,
    settings: str = _TABLE_COLUMNS,
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

    def wanted(split: str) -> tuple[str, ...]:
        return (*columns, *([for_train] if for_train is not None and split == "train" else ()))

    if isinstance(source, Mapping):
        files = {split: path_of(path) for split, path in source.items()}
        if "train" not in files or not {*files} <= {*SPLITS}:
            raise UsageError("a mapping names files of train, val and test, and train at least", got=", ".join(files))
        shown = str(files["train"])
    else:
        path = path_of(source)
        shown = str(path)
        if path.is_dir():
            files = _files_of(path)
        elif path.is_file() or path.suffix.lower() in _READERS:
            files = {"train": path}
        elif hub := _HUB_NAME.fullmatch(str(source)):
            splits = hub_splits(hub["name"], hub["config"], otherwise="download it and give the path of the file")
            rows = {split: _hub_rows(f"{source}, {split}", data, wanted(split)) for split, data in splits.items()}
            return {split: _checked(rows[split], wanted(split), settings) for split in rows}, str(source)
        else:
            raise UsageError("neither a file, a folder nor the name of a Hub dataset", got=repr(str(source)))
    return {split: read_rows(path, wanted(split), notes, settings=settings) for split, path in files.items()}, shown


def path_of(source: str | Path) -> Path:
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


def _checked(rows: Rows, columns: Sequence[str], settings: str) -> Rows:
    """The rows, with an error for one that lacks a column."""
    for where, cells in rows:
        for column in columns if cells is not None else ():
            if column not in (cells or {}):
                raise UsageError(
                    f"{where} has no column {column!r}",
                    got=f"columns {', '.join(map(repr, cells or ()))}",
                    instead=settings,
                )
        yield where, cells


# ---------------------------------------------------------------------------------------------------- the Hub


def hub_splits(name: str, config: str | None, *, otherwise: str) -> dict[str, Any]:
    """Split → its `datasets.Dataset`, of those of a Hub dataset that are named like train, val or test."""
    datasets = _optional("datasets", feature=f"loading {name} from the Hugging Face Hub", otherwise=otherwise)
    shown = f"{name} ({config})" if config else name
    try:
        loaded = datasets.load_dataset(name, config).with_format(None)
    except Exception as error:  # anything the network, the Hub's client or the dataset's format may raise
        raise UsageError(
            f"{shown} could not be loaded from the Hugging Face Hub",
            got=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            why="the Hub is out of reach from here, or has no such dataset",
            instead=otherwise,
        ) from error
    splits: dict[str, Any] = {}
    for split, rows in loaded.items():
        if split in SPLIT_NAMES:
            splits.setdefault(SPLIT_NAMES[split], rows)
    if "train" not in splits:
        raise UsageError(f"{shown} has no split named train", got=", ".join(map(str, loaded)))
    return splits


def _hub_rows(where: str, rows: Any, wanted: Sequence[str]) -> Rows:
    """An integer with a name is replaced by it, because the order of the user's labels need not be the dataset's."""
    if {*wanted} <= {*rows.column_names}:
        rows = rows.select_columns([*wanted])  # others, images say, are not decoded
    names = {column: getattr(feature, "names", None) or () for column, feature in rows.features.items()}
    for number, cells in enumerate(rows, start=1):
        named = {
            column: names[column][value] if isinstance(value, int) and 0 <= value < len(names[column]) else value
            for column, value in cells.items()
        }
        yield f"{where} row {number}", named


def _optional(name: str, *, feature: str, otherwise: str) -> Any:
    """A package of the extra `tasks`, or an error that says how to get it or do without."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = missing_extra(feature, module=name, extra="tasks")
        raise MissingExtraError(missing.what, instead=f"{missing.instead}; or {otherwise}") from error


# ---------------------------------------------------------------------------------------------------- files


def read_rows(path: Path, columns: Sequence[str], notes: list[str], *, settings: str) -> Rows:
    """The rows of a file, all of which have `columns`."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path} has an unknown file extension", instead=f"one of {', '.join(_READERS)}")
    if not path.is_file():
        why = "" if path.is_absolute() else "paths are relative to the working directory"
        raise UsageError("no such file", got=path, why=why)
    yield from _checked(reader(path, columns, notes), columns, settings)


def _decoded(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
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
    """The delimiter that gives the header all wanted columns, then several, then as many as the first rows have.

    `csv.Sniffer` knows nothing of the wanted columns, and takes letters for delimiters in tables of one column.
    """

    def fit(delimiter: str) -> tuple[bool, ...]:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter)
        try:
            header, *rows = islice((cells for cells in reader if any(map(str.strip, cells))), _TRIED)
        except (csv.Error, ValueError):
            return (False,)
        columns = {*map(str.strip, header)}
        return {*wanted} <= columns, len(header) > 1, all(len(cells) == len(header) for cells in rows)

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
    parquet = _optional("pyarrow.parquet", feature="reading Parquet", otherwise="give JSONL or CSV")
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
