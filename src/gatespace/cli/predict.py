"""`gatespace predict`: a label or response for every line, streamed in batches, so input may exceed memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

import typer

from gatespace.cli import run_options as options
from gatespace.cli.evaluate import BatchSize, ConfigFile, Device, MaxNewTokens, ModelName, Precision, Prefill
from gatespace.errors import UsageError

if TYPE_CHECKING:
    from gatespace.cli.found_model import Found
    from gatespace.cli.progress import RunProgress
    from gatespace.config import TextConfig
    from gatespace.evaluation.calibration import LabelProbabilities
    from gatespace.models.encode import Encoder

_STDIN = Path("-")
_TABLES = (".csv", ".tsv", ".parquet")
_JSON_LINES = (".jsonl", ".ndjson")
Row = Mapping[str, object]


def predict(
    model: ModelName,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", show_default=False, help="Texts, one per line, or a table; - is standard input."
        ),
    ] = _STDIN,
    field: Annotated[
        str | None,
        typer.Option(
            "--field",
            "--column",
            metavar="NAME",
            show_default="as in the model's table, or text",
            help="The column of a table, or the key of JSON lines, that has the text.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="Write .jsonl or .csv; resumes after a stop."
        ),
    ] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Score all labels; generate nothing.")] = False,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="P", min=0, max=1, show_default=False, help="No label where the most probable one is below P."
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
    """Label texts, one per line, with a trained model; or respond to prompts.

    Prints one line per line: the label, a tab, the text. A text without a
    legal label in its response, or one too long for the model, has an empty
    label (null in JSON); empty lines keep their place. FILE may also be a
    .csv, .tsv, .parquet or .jsonl file with a column of texts; its other
    columns are kept in JSON and CSV.

    \b
    gatespace predict runs/train texts.txt
    gatespace predict runs/train tweets.jsonl --field text --json
    gatespace predict runs/train tweets.csv --column body --probabilities -o labels.csv
    cat texts.txt | gatespace predict runs/train | cut -f1 | sort | uniq -c

    With --probabilities the label is the most probable one of the task, with
    its probability among the labels between two tabs; JSON and CSV have the
    probability of every label, the margin to the second, and the mass that
    the model gives to the labels together. --threshold gives no label to
    texts on which the model is not confident enough.

    A model of a text task (task.text) responds: FILE has the columns of its
    prompt template, or its conversations; lines of text are prompts where the
    template has one column, and turns of a user where it has conversations.
    Prints one response per line, with its own line breaks as spaces; JSON
    keeps them.

    With --output a stopped command loses nothing: what is done is in a file
    next to the output, and the same command resumes.
    """
    from gatespace.cli.found_model import ModelOptions, find, task_section
    from gatespace.cli.prediction_file import check_output
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
    if output is not None:
        check_output(output)
    with RunProgress(quiet=quiet or output is None, job="predict") as progress, ExitStack() as stack:
        note = progress.note if output is not None else RunProgress(quiet=quiet).note
        section = task_section(model, asked)
        text = section.text
        if text is not None and (probabilities or threshold is not None):
            raise UsageError("only labels have probabilities", got=f"{model}, whose responses are free text")
        if text is None:
            if field is None and file.suffix.lower() in (*_TABLES, *_JSON_LINES):
                field = "text" if section.table is None else section.table.text_column
            lines, total = _lines(file, field, stack, note)
        else:
            lines, total = _prompts(text, file, field, stack, note)
        found = find(model, asked, report=note, rows=False)
        labeller = Labeller(found, probabilities=probabilities or threshold is not None, threshold=threshold)
        if output is not None:
            _write(labeller, lines, total, output, progress)
        elif not _print(labeller, lines, as_json=as_json, at_once=file == _STDIN and sys.stdin.isatty()):
            return
    if not quiet:
        for line in labeller.notes():
            sys.stderr.write(f"{line}\n")


def _print(labeller: Labeller, lines: Iterator[Line], *, as_json: bool, at_once: bool) -> bool:
    """Print a line for every line; return False if the reader closed the pipe."""
    # At a terminal every line is labelled immediately.
    size = 1 if at_once else labeller.found.batch_size
    try:
        while batch := list(islice(lines, size)):
            labeller.label(batch)
            for one in batch:
                labeller.count(one.record())
                # A lone surrogate, which JSON can contain, cannot be encoded.
                text = one.shown(as_json=as_json).encode("utf-8", "replace").decode("utf-8")
                sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python would raise for the same pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _write(labeller: Labeller, lines: Iterator[Line], total: int | None, output: Path, progress: RunProgress) -> None:
    """Write a record for every line to the file `output`, resuming a stopped command."""
    from gatespace.cli.console import stopped
    from gatespace.cli.prediction_file import PredictionFile

    size = labeller.found.batch_size
    with PredictionFile(output, labeller.recipe()) as file:
        done = 0
        empty = Line(0, "", scored=labeller.probabilities, said=labeller.said)
        for record in file.resume((line.text for line in lines), size, empty.record()):
            labeller.count(record)
            done += 1
        if done:
            progress.note(f"the first {done} texts were labelled before the command was stopped")
        progress.begin(done)
        try:
            while batch := list(islice(lines, size)):
                labeller.label(batch)
                records = [one.record() for one in batch]
                file.append(records)
                for record in records:
                    labeller.count(record)
                done += len(batch)
                if total is not None:
                    progress.generating(done, total)
            file.finish(labeller.found.prompt.labels if labeller.probabilities else None)
        except KeyboardInterrupt as interrupt:
            progress.close()
            left = f": the labels of {done} texts are in {file.path}, and the same command resumes"
            raise typer.Exit(stopped(interrupt, left)) from None
    progress.note(f"wrote {output}")


# ---------------------------------------------------------------------------------------------------- labels


@dataclass
class Line:
    """One input text, and its label once known."""

    number: int
    text: str
    label: str | None = None
    raw: str | None = None
    likely: LabelProbabilities | None = None
    scored: bool = False
    """Whether labels are scored rather than generated."""
    said: str = "label"
    """What `label` is: ``label``, or ``response`` for free text."""
    others: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, for the record."""

    def record(self) -> dict[str, Any]:
        """The line as a JSON record."""
        found: dict[str, Any] = {"line": self.number, self.said: self.label, "text": self.text}
        if not self.scored:
            return found | {"raw": self.raw} | self.others
        names = ("confidence", "margin", "mass", "probabilities")
        likely = {name: None if self.likely is None else getattr(self.likely, name) for name in names}
        return found | likely | self.others

    def shown(self, *, as_json: bool) -> str:
        """The line as printed; line breaks in the text become spaces."""
        if as_json:
            return json.dumps(self.record(), ensure_ascii=False)
        if self.said == "response":
            return " ".join((self.label or "").splitlines())
        cells = [self.label or ""]
        if self.scored:
            cells.append("" if self.likely is None else f"{self.likely.confidence:.4f}")
        return "\t".join([*cells, " ".join(self.text.splitlines())])


class Labeller:
    """Labels lines batch by batch, and counts those that get no label.

    Args:
        found: The model.
        probabilities: Use the most probable label of the task instead of a generated response.
        threshold: No label below this probability.
    """

    def __init__(self, found: Found, *, probabilities: bool, threshold: float | None) -> None:
        self.found, self.probabilities, self.threshold = found, probabilities, threshold
        self.said = "label" if found.prompt.labels else "response"
        self._texts = self._too_long = self._unlabelled = self._replaced = 0

    def recipe(self) -> dict[str, Any]:
        """Everything that labels depend on besides the texts."""
        found, prompt = self.found, self.found.prompt
        return {
            "model": found.model.fingerprint(),
            "tokenizer": found.model.tokenizer_digest(),
            "prompt": [*astuple(cast("Any", prompt))],
            "device": str(found.model.device),
            "batch_size": found.batch_size,
            "how": ["probabilities", self.threshold] if self.probabilities else ["greedy", found.max_new_tokens],
        }

    def label(self, lines: Sequence[Line]) -> None:
        """Label the lines of a batch in place."""
        from gatespace.models.encode import Encoder

        taken = {*Line(0, "", scored=self.probabilities, said=self.said).record()}
        taken |= {f"p_{label}" for label in self.found.prompt.labels if self.probabilities}
        for line in lines:
            line.scored, line.said = self.probabilities, self.said
            line.others = {_free(name, taken, line.others): value for name, value in line.others.items()}
        asked = [line for line in lines if line.text.strip()]
        if not asked:
            return
        found = self.found
        # The shared prefix of earlier texts need not be shared by these.
        encoder = Encoder(found.prompt, found.model.tokenizer, [line.text for line in asked])
        new = found.max_new_tokens
        if self.probabilities:
            new = max(len(encoder.gold(label)) for label in found.prompt.labels)
        room = (found.model.window or 1 << 30) - new - len(encoder.prefix)
        fitting = [line for line in asked if len(encoder.suffix(line.text)) <= room]
        (self._score if self.probabilities else self._generate)(fitting, encoder)

    def _generate(self, lines: Sequence[Line], encoder: Encoder) -> None:
        from gatespace.rollout import greedy

        found, texts = self.found, [line.text for line in lines]
        responses = greedy(
            found.model, encoder, texts, max_new_tokens=found.max_new_tokens, batch_size=found.batch_size
        )
        for line, response in zip(lines, responses, strict=True):
            line.raw = response.text
            line.label = found.prompt.parse(response.text)

    def _score(self, lines: Sequence[Line], encoder: Encoder) -> None:
        from gatespace.evaluation.calibration import LabelProbabilities
        from gatespace.rollout import score_labels

        found = self.found
        scores = score_labels(found.model, encoder, [line.text for line in lines], batch_size=found.batch_size)
        for line, log_probs in zip(lines, scores, strict=True):
            line.likely = LabelProbabilities.of(found.prompt.labels, log_probs)
            if self.threshold is None or line.likely.confidence >= self.threshold:
                line.label = line.likely.label

    def count(self, record: Mapping[str, Any]) -> None:
        """Count the result of a line, labelled now or before the command was stopped."""
        from gatespace.tasks.prompt import SURROGATE

        if record["text"].strip():
            tried = record["confidence" if self.probabilities else "raw"] is not None
            self._texts += 1
            self._too_long += not tried
            self._unlabelled += tried and record[self.said] is None
            self._replaced += SURROGATE.search(record["text"]) is not None

    def notes(self) -> Iterator[str]:
        """Final notes on texts without a label."""
        of = f"of {self._texts}"
        if self.threshold is not None:
            yield f"{self._unlabelled} {of} texts are below the threshold of {self.threshold:g} and have no label"
        elif self._unlabelled:
            yield f"{self._unlabelled} {of} responses had no legal label"
        if self._too_long:
            yield f"{self._too_long} {of} texts are too long for the model and have no label"
        if self._replaced:
            yield f"{self._replaced} {of} texts have half of a character (a lone surrogate), shown to the model as �"


def _free(name: str, taken: Collection[str], columns: Collection[str]) -> str:
    """The name of a column in the output: another one where a prediction has the same."""
    if name in taken:
        while name in taken or name in columns:
            name = f"input_{name}"
    return name


# ---------------------------------------------------------------------------------------------------- lines


def _lines(
    file: Path, field: str | None, stack: ExitStack, note: Callable[[str], None]
) -> tuple[Iterator[Line], int | None]:
    """The lines of the input, and their number if known."""
    if file.suffix.lower() in _TABLES:
        column = field or "text"
        lines = [
            Line(number, "") if row is None else _line(number, where, column, row)
            for number, (where, row) in enumerate(_rows(file, (column,), note), start=1)
        ]
        return iter(lines), len(lines)
    if file == _STDIN:
        if sys.stdin.isatty():
            sys.stderr.write("reading texts from the keyboard, one per line; Ctrl-D ends\n")
        return _read_lines(sys.stdin.buffer, str(file), field), None
    if file.suffix.lower() == ".json":
        raise UsageError(
            "predict reads lines of text, JSON lines, or a table",
            got=file,
            instead="a .txt, .jsonl, .csv, .tsv or .parquet file",
        )
    try:
        stream = stack.enter_context(file.open("rb"))
        total = None
        if file.is_file():  # not a pipe, which can be read only once
            total = sum(1 for _ in stream)
            stream.seek(0)
        return _read_lines(stream, str(file), field), total
    except OSError as error:
        raise UsageError(f"{file} cannot be read", why=error.strerror or str(error)) from None


def _prompts(
    text: TextConfig, file: Path, field: str | None, stack: ExitStack, note: Callable[[str], None]
) -> tuple[Iterator[Line], int | None]:
    """The prompts of a text task: from rows with its columns, or from plain lines if it has a single column."""
    from gatespace.tasks.prompt import Template
    from gatespace.tasks.read import row_text

    template = None if text.prompt is None else Template(text.prompt)
    columns = (text.messages or "",) if template is None else template.columns

    def spoken(cell: object) -> object:
        """A text that is no conversation is the user's turn of one."""
        is_text = template is None and isinstance(cell, str) and not cell.lstrip().startswith("[{")
        return [{"role": "user", "content": cell}] if is_text else cell

    if field is not None and len(columns) > 1:
        raise UsageError("--field: the prompt has several columns", got=", ".join(columns), instead="without it")
    if file.suffix.lower() in (*_TABLES, *_JSON_LINES):
        given = _rows(file, columns if field is None else (field,), note)
        cells = [
            (where, row if row is None or field is None else {columns[0]: spoken(row[field])}) for where, row in given
        ]

        def is_empty(row: Mapping[str, object]) -> bool:
            return not any(str(row[name]).strip() for name in columns if row[name] is not None)

        texts = [
            "" if row is None or is_empty(row) else row_text(where, row, template, text.messages)
            for where, row in cells
        ]
        lines = [
            Line(number, one, others={} if row is None else _others(row))
            for number, (one, (_, row)) in enumerate(zip(texts, given, strict=True), start=1)
        ]
        return iter(lines), len(lines)
    if len(columns) > 1:
        raise UsageError(
            "the prompt has several columns, and lines of text have one",
            got=", ".join(columns),
            instead="a .jsonl, .csv, .tsv or .parquet file with these columns",
        )
    plain, total = _lines(file, field, stack, note)

    def filled() -> Iterator[Line]:
        for line in plain:
            cell = {columns[0]: spoken(line.text)}
            where = f"{file}:{line.number}"
            prompt = row_text(where, cell, template, text.messages) if line.text.strip() else ""
            yield Line(line.number, prompt, others=line.others)

    return filled(), total


def _rows(file: Path, columns: Sequence[str], note: Callable[[str], None]) -> list[tuple[str, Row | None]]:
    """Where a row of a table is, and its cells; None for an empty row."""
    from gatespace.tasks.read import read_rows

    notes: list[str] = []
    rows = list(read_rows(file, columns, notes, settings="--column names the column of the texts"))
    for text in notes:
        note(text)
    return rows


def _line(number: int, where: str, column: str, row: Row) -> Line:
    text = row[column]
    if not isinstance(text, str | None):
        raise UsageError(f"{where}: {column!r} is not a text", got=repr(text)[:80])
    return Line(number, text or "", others=_others({name: cell for name, cell in row.items() if name != column}))


def _others(row: Row) -> dict[str, Any]:
    """Cells as JSON has them; Parquet has dates and more."""
    cells: dict[str, Any] = json.loads(json.dumps({name: cell for name, cell in row.items() if name}, default=str))
    return cells


def _read_lines(stream: BinaryIO, name: str, field: str | None) -> Iterator[Line]:
    """Read lines, split at line feeds only: a text may contain other Unicode line breaks."""
    for number, data in enumerate(stream, start=1):
        try:
            text = data.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x}"
            raise UsageError(f"{name}:{number}: not UTF-8", got=byte, instead="save it as UTF-8") from None
        if field is None or not text.strip():
            yield Line(number, text if field is None else "")
        else:
            yield _from_json(number, text, f"{name}:{number}", field)


def _from_json(number: int, text: str, where: str, field: str) -> Line:
    try:
        record = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise UsageError(f"{where}: not JSON", got=text[:80]) from None
    if not isinstance(record, dict) or field not in record:
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"{where}: there is no key {field!r}", got=keys, instead="--field with the text's key")
    return _line(number, where, field, record)
