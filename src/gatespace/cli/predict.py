"""`gatespace predict`: a label for every line, batch by batch, so that the input may be larger than the memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from gatespace.cli import run_options as options
from gatespace.cli.evaluate import BatchSize, ConfigFile, Device, MaxNewTokens, ModelName, Precision, Prefill
from gatespace.errors import UsageError

if TYPE_CHECKING:
    from gatespace.cli.found_model import Found

_STDIN = Path("-")
_TABLES = (".csv", ".tsv", ".parquet", ".json")
_JSON_LINES = (".jsonl", ".ndjson")


def predict(
    model: ModelName,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="Texts, one per line; - is standard input.")
    ] = _STDIN,
    field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default="text for .jsonl", help="The lines are JSON, and this key has the text."
        ),
    ] = None,
    task: options.Task = None,
    root: options.Root = None,
    config: ConfigFile = None,
    brief: options.Brief = None,
    prefill: Prefill = None,
    batch_size: BatchSize = None,
    max_new_tokens: MaxNewTokens = None,
    precision: Precision = None,
    device: Device = "auto",
    plugins: options.Plugins = None,
    quiet: options.Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: line, label, text, and the raw response.")
    ] = False,
) -> None:
    """Label texts, one per line, with a trained model.

    Prints one line per line: the label, a tab, the text. A text without a
    legal label in its response, or one too long for the model, has an empty
    label (null in JSON); empty lines keep their place.

    \b
    gatespace predict runs/train texts.txt
    gatespace predict runs/train tweets.jsonl --field text --json
    cat texts.txt | gatespace predict runs/train | cut -f1 | sort | uniq -c
    """
    from gatespace.cli.found_model import ModelOptions, find
    from gatespace.cli.progress import RunProgress

    asked = ModelOptions(
        config=config,
        task=task,
        root=root,
        brief=brief,
        prefill=prefill,
        precision=precision,
        device=device,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        plugins=plugins or (),
    )
    counts = Counts()
    with ExitStack() as stack:
        stream = _opened(file, stack)
        if field is None and file.suffix in _JSON_LINES:
            field = "text"
        lines = _lines(stream, str(file), field)
        found = find(model, asked, report=RunProgress(quiet=quiet).note, rows=False)
        # At a terminal every line gets its label at once.
        at_once = 1 if file == _STDIN and sys.stdin.isatty() else found.batch_size
        try:
            while batch := list(islice(lines, at_once)):
                for one in _labelled(found, batch, counts):
                    # A lone surrogate, as JSON can spell one, has no form in any encoding.
                    text = _shown(one, as_json=as_json).encode("utf-8", "replace").decode("utf-8")
                    sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
        except BrokenPipeError:
            # The reader has enough. Python would complain about the same pipe once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
    if counts.unparsed and not quiet:
        sys.stderr.write(f"{counts.unparsed} of {counts.texts} responses had no legal label\n")
    if counts.too_long and not quiet:
        sys.stderr.write(f"{counts.too_long} of {counts.texts} texts are too long for the model and have no label\n")


# ---------------------------------------------------------------------------------------------------- labels


@dataclass
class Line:
    """One text of the input, and its label once there is one."""

    number: int
    text: str
    label: str | None = None
    raw: str | None = None


@dataclass
class Counts:
    """What is printed at the end."""

    texts: int = 0
    unparsed: int = 0
    too_long: int = 0


def _labelled(found: Found, lines: Sequence[Line], counts: Counts) -> Sequence[Line]:
    """The lines of a batch, labelled in place."""
    from gatespace.models.encode import Encoder
    from gatespace.rollout import greedy

    asked = [line for line in lines if line.text.strip()]
    counts.texts += len(asked)
    if not asked:
        return lines
    # A prefix that the texts before had in common need not be that of these.
    encoder = Encoder(found.prompt, found.model.tokenizer, [line.text for line in asked])
    room = _context(found) - found.max_new_tokens - len(encoder.prefix)
    fitting = [line for line in asked if len(encoder.suffix(line.text)) <= room]
    counts.too_long += len(asked) - len(fitting)
    responses = greedy(
        found.model,
        encoder,
        [line.text for line in fitting],
        max_new_tokens=found.max_new_tokens,
        batch_size=found.batch_size,
    )
    for line, response in zip(fitting, responses, strict=True):
        line.raw = response.text
        line.label = found.prompt.parse(response.text)
        counts.unparsed += line.label is None
    return lines


def _context(found: Found) -> int:
    """The most tokens that the model's context can hold."""
    return found.model.window or 1 << 30


def _shown(line: Line, *, as_json: bool) -> str:
    """What is printed of a line; a text of several lines is put on one."""
    if as_json:
        record = {"line": line.number, "label": line.label, "text": line.text, "raw": line.raw}
        return json.dumps(record, ensure_ascii=False)
    return f"{line.label or ''}\t{' '.join(line.text.splitlines())}"


# ---------------------------------------------------------------------------------------------------- lines


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
