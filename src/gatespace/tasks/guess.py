"""Guess the task of a table from its columns and cells, with a reason in a sentence."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from gatespace.errors import UsageError
from gatespace.tasks.data import check_text
from gatespace.tasks.read import path_of, read_source
from gatespace.tasks.scores import number_in

_MESSAGES = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue")
_LABELS = ("label", "labels", "class", "category", "intent", "sentiment")
_ANSWERS = (
    "answer", "answers", "ref", "reference", "references", "response", "completion", "output", "target", "summary",
    "highlights", "reply", "translation",
)  # fmt: skip
_MOST_LABELS = 50
_PER_LABEL = 4
"""With fewer rows per label it is not classification."""
_LOOKED_AT = 2000


@dataclass(frozen=True)
class Guess:
    """A section `task`, and the reason for it."""

    task: dict[str, Any]
    said: str


def guess_task(
    source: str, *, prompt: str | None = None, answer: str | None = None, metric: str | None = None
) -> Guess:
    """Guess the section `task` for a table.

    Args:
        source: A file or a folder.
        prompt: A template over columns; None: guessed.
        answer: The column of the right response; None: guessed.
        metric: A name; None: guessed from the right responses. If given, responses are free text.
    """
    if not path_of(source).exists():
        raise UsageError(
            "there is no such file or folder",
            got=source,
            instead="a file on this machine; for a Hub dataset use `gatespace train` with task.text",
        )
    found, _ = read_source(source, (), [])
    rows = [cells for _, (_, cells) in zip(range(_LOOKED_AT), found["train"], strict=False) if cells is not None]
    if not rows:
        raise UsageError("there are no rows", got=source)
    columns = [column for column in rows[0] if column]  # a spreadsheet may have empty columns at its end
    spelled = {column.casefold(): column for column in columns}
    if prompt is None and answer is None:
        for name in _MESSAGES:
            if (column := spelled.get(name)) is not None:
                how = {"source": source, "messages": column, "metric": metric or _metric([])}
                return Guess({"text": how}, f"a text task: {column!r} holds conversations, judged by {how['metric']}")
        label = next((spelled[name] for name in _LABELS if name in spelled), None)
        if label is not None and len(only := {str(row.get(label)).strip() for row in rows}) == 1:
            raise UsageError(
                f"all rows have the same {label}",
                got=f"{source}: {only.pop()!r} in {len(rows)} rows",
                why="there is nothing to learn where one response is always right",
                instead="rows with other labels; or --answer, where the right response is in another column",
            )
        if label is not None and metric is None and (labels := _labels(rows, label)):
            text = _longest(rows, [column for column in columns if column != label])
            table = {"source": source, "labels": labels, "text_column": text, "label_column": label}
            return Guess(
                {"table": table},
                f"a label task: {label!r} holds {len(labels)} labels ({', '.join(labels[:5])}"
                f"{', …' * (len(labels) > 5)}), {text!r} the text",
            )
    known = [spelled[name] for name in (*_ANSWERS, *_LABELS) if name in spelled]
    answer = answer or (known[0] if known else columns[-1] if len(columns) == 2 else None)
    if answer is None or (prompt is None and len(columns) < 2):
        raise UsageError(
            "which columns are the prompt and the right response?",
            got=", ".join(map(repr, columns)),
            instead='--prompt "Describe: {mr}" --answer ref',
        )
    template = prompt or f"{{{_longest(rows, [column for column in columns if column != answer])}}}"
    metric = metric or _metric([str(row.get(answer, "")) for row in rows])
    asked = {"source": source, "prompt": template, "answer": answer, "metric": metric}
    return Guess({"text": asked}, f"a text task: prompt {template!r}, right response {answer!r}, judged by {metric}")


def _labels(rows: Sequence[Mapping[str, object]], column: str) -> list[str]:
    """The labels of a column; none if its values are too many or too long to be labels."""
    cells = [str(row.get(column) if row.get(column) is not None else "").strip() for row in rows]
    labels = sorted({cell for cell in cells if cell})
    check_text(repr(column), *labels)
    short = all(len(label) <= 40 and "\n" not in label for label in labels)
    return labels if 2 <= len(labels) <= min(_MOST_LABELS, len(rows) // _PER_LABEL) and short else []


def _longest(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """The column with the longest texts."""
    if not columns:
        raise UsageError("there is no column of texts beside the right responses", got=", ".join(rows[0]))
    return max(columns, key=lambda column: fmean(len(str(row.get(column, ""))) for row in rows))


def _metric(answers: Sequence[str]) -> str:
    if answers and all(number_in(one) is not None and ("####" in one or len(one.split()) == 1) for one in answers):
        return "number"
    if answers and median(len(answer.split()) for answer in answers) <= 3:
        return "exact"
    return "rouge_l" if importlib.util.find_spec("rouge_score") is not None else "token_f1"
