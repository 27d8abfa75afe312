"""Lines in, labels out, batch by batch, so that the input may be longer than the memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gatespace.errors import UsageError

if TYPE_CHECKING:
    from gatespace.cli.found_model import Found, ModelOptions

_STDIN = Path("-")
_TABLES = (".csv", ".tsv", ".parquet", ".json")
_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Line:
    """One text of the input."""

    number: int
    text: str


@dataclass
class Labelled:
    """A text with its label; None where there is none."""

    line: Line
    label: str | None = None
    raw: str | None = None


@dataclass
class Counts:
    """What is printed at the end."""

    texts: int = 0
    unparsed: int = 0
    too_long: int = 0


def label_lines(
    model: str, file: Path, options: ModelOptions, *, field: str | None, as_json: bool, quiet: bool
) -> None:
    """Label every line of `file`, and print a line for each."""
    with ExitStack() as stack:
        stream = _opened(file, stack)
        if field is None and file.suffix in _JSON_LINES:
            field = "text"
        counts = Counts()
        try:
            lines = _lines(stream, str(file), field)
            # At a terminal every line gets its label at once.
            at_once = 1 if file == _STDIN and sys.stdin.isatty() else None
            _label(model, lines, counts, options, at_once=at_once, as_json=as_json, quiet=quiet)
        except BrokenPipeError:
            # The reader has enough. Python would complain about the same pipe once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
    if quiet:
        return
    if counts.unparsed:
        sys.stderr.write(f"{counts.unparsed} of {counts.texts} responses had no legal label\n")
    if counts.too_long:
        sys.stderr.write(f"{counts.too_long} of {counts.texts} texts are too long for the model and have no label\n")


def answered(found: Found, lines: Sequence[Line], counts: Counts) -> list[Labelled]:
    """The labels of a batch, in its order."""
    from gatespace.models.encode import Encoder
    from gatespace.rollout import greedy

    result = [Labelled(line) for line in lines]
    asked = [one for one in result if one.line.text.strip()]
    counts.texts += len(asked)
    if not asked:
        return result
    # A prefix that held for texts before need not hold for these.
    encoder = Encoder(found.prompt, found.model.tokenizer, [one.line.text for one in asked])
    room = _context(found) - found.max_new_tokens - len(encoder.prefix)
    fitting = [one for one in asked if len(encoder.suffix(one.line.text)) <= room]
    counts.too_long += len(asked) - len(fitting)
    answers = greedy(
        found.model,
        encoder,
        [one.line.text for one in fitting],
        max_new_tokens=found.max_new_tokens,
        batch_size=found.batch_size,
    )
    for one, answer in zip(fitting, answers, strict=True):
        one.raw = answer.text
        one.label = found.prompt.parse(answer.text)
        counts.unparsed += one.label is None
    return result


def shown(one: Labelled, *, as_json: bool) -> str:
    """The line that is printed; a text of several lines is put on one."""
    if as_json:
        record = {"line": one.line.number, "label": one.label, "text": one.line.text, "raw": one.raw}
        return json.dumps(record, ensure_ascii=False)
    return f"{one.label or ''}\t{' '.join(one.line.text.splitlines())}"


def _label(
    model: str,
    lines: Iterator[Line],
    counts: Counts,
    options: ModelOptions,
    *,
    at_once: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from gatespace.cli.found_model import find
    from gatespace.cli.progress import RunProgress

    found = find(model, options, report=RunProgress(quiet=quiet).note, rows=False)
    while batch := list(islice(lines, at_once or found.batch_size)):
        for one in answered(found, batch, counts):
            text = shown(one, as_json=as_json)
            # A lone surrogate, as JSON can spell one, has no form in any encoding.
            sys.stdout.write(text.encode("utf-8", "replace").decode("utf-8") + "\n")
        sys.stdout.flush()


def _opened(file: Path, stack: ExitStack) -> BinaryIO:
    if file == _STDIN:
        if sys.stdin.isatty():
            sys.stderr.write("reading texts from the keyboard, one per line; Ctrl-D ends\n")
        return sys.stdin.buffer
    if file.suffix in _TABLES:
        raise UsageError("predict reads lines of text, or JSON lines", got=file, instead="a .txt or .jsonl file")
    try:
        return stack.enter_context(file.open("rb"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read", why=error.strerror or str(error)) from None


def _lines(stream: BinaryIO, name: str, field: str | None) -> Iterator[Line]:
    """Lines end at line feeds alone: a text may hold the other characters that Unicode calls line breaks."""
    for number, data in enumerate(stream, start=1):
        try:
            text = data.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x}"
            raise UsageError(f"{name}:{number}: not UTF-8", got=byte, instead="iconv -t utf-8") from None
        yield Line(number, text if field is None else _from_json(text, f"{name}:{number}", field))


def _from_json(text: str, where: str, field: str) -> str:
    if not text.strip():
        return ""
    try:
        record = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise UsageError(f"{where}: not JSON", got=text[:80]) from None
    if not isinstance(record, dict) or field not in record:
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"{where}: there is no key {field!r}", got=keys, instead="--field with the text's key")
    value = record[field]
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where}: {field!r} is not a text", got=repr(value)[:80])
    return value or ""


def _context(found: Found) -> int:
    """Most tokens that the model can read."""
    config = found.model.network.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 1 << 30)
