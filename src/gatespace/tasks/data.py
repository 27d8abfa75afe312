"""Tasks: rows of three splits, and how a response to a row is judged."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from gatespace.errors import UsageError, unknown_name
from gatespace.seeding import permutation
from gatespace.tasks.parser import label_key
from gatespace.tasks.scores import Metric, find_metric

if TYPE_CHECKING:
    from gatespace.tasks.prompt import Prompt

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class Example:
    """A row: a text, and the right response to it.

    Args:
        text: What is asked about, or the user's turn; if rows are conversations, all turns as JSON.
        label: The label, or for free text the first reference, which teachers train on.
        others: Further references.
        columns: The cells of a free-text row, for custom metrics and the teacher's own prompt.
        teacher: The name of its teacher; "" if it names none.
        where: File and line, or the number of the row, for errors; "" if unknown.
    """

    text: str
    label: str
    others: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    teacher: str = ""
    where: str = field(default="", compare=False, repr=False)

    @property
    def gold(self) -> str:
        """The right response: `label`."""
        return self.label

    @property
    def references(self) -> tuple[str, ...]:
        """All right responses."""
        return (self.label, *self.others)


class Baseline(NamedTuple):
    """A label given to every text, and the accuracy of doing so."""

    label: str
    accuracy: float


@dataclass(frozen=True)
class Task:
    """Rows with right responses: labels, or free text.

    Args:
        name: E.g. ``tweeteval/hate``.
        train: Training rows.
        val: Rows to select by.
        test: Rows to report on.
        labels: The canonical label strings, in the order of the data's integers; empty: responses are free text.
        definitions: A brief sentence for every label, or empty.
        question: What is asked about a text that gets a label.
        metric: The name of the metric that judges responses, for model selection and reports.
        also: Further metrics in evaluations.
        prompt: How a free-text row becomes a prompt; None: as `Prompt.of` makes it from the labels.
        dropped: Number of rows with an empty text dropped per split.
        source: Where the rows come from.
        notes: Notes for the user on how they were read.
    """

    name: str
    train: list[Example]
    val: list[Example]
    test: list[Example]
    labels: tuple[str, ...] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)
    question: str = "Which label fits the text best?"
    metric: str = "accuracy"
    also: tuple[str, ...] = ()
    prompt: Prompt | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt is None:
            check_labels(self.labels, self.definitions)
        if not self.train:
            raise UsageError(f"{self.name} has no training rows", got=self.source or None)
        if self.metric in self.also or len({*self.also}) < len(self.also):
            raise UsageError("also: a metric is named once", got=", ".join((self.metric, *self.also)))
        for split in SPLITS:
            for index, row in enumerate(self.rows(split)):
                self._check(row, row.where or f"row {index} of {self.name}'s {split}")

    def _check(self, row: Example, where: str) -> None:
        if self.labels and row.label not in self.labels:
            labels = ", ".join(self.labels)
            raise UsageError(f"{where} has an unknown label", got=repr(row.label), instead=f"one of: {labels}")
        check_text(where, row.text, *row.references, *row.columns.values())
        for metric in self.metrics:
            for reference in row.references:
                if why := metric.refuses(reference):
                    raise UsageError(
                        f"{where}: a reference cannot be compared by the metric {metric.name}",
                        got=repr(reference[:80]),
                        why=why,
                        instead="another metric, or another reference",
                    )

    def rows(self, split: str) -> list[Example]:
        """The rows of ``train``, ``val`` or ``test``."""
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        rows: list[Example] = getattr(self, split)
        return rows

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """`metric`, and those of `also`."""
        return tuple(map(find_metric, (self.metric, *self.also)))

    def judge(self, row: Example, response: str | None) -> float:
        """Score of a parsed response, from 0 to 1; None is one that could not be parsed."""
        return self.metrics[0](response or "", row.references, row.columns)

    def judge_also(self, row: Example, response: str | None) -> dict[str, float]:
        """Metric of `also` → score."""
        return {metric.name: metric(response or "", row.references, row.columns) for metric in self.metrics[1:]}

    def lessons(self, rows: Sequence[Example]) -> list[Example]:
        """The rows to train a teacher on: one for every right response to `rows`."""
        return [replace(row, label=reference, others=()) for row in rows for reference in row.references]

    @cached_property
    def test_in_train(self) -> tuple[int, ...]:
        """Indices of the test rows whose exact text is also in train."""
        train = {row.text for row in self.train}
        return tuple(index for index, row in enumerate(self.test) if row.text in train)

    @cached_property
    def digest(self) -> str:
        """Hash of all that a run can see of this task, wherever its rows were loaded from."""
        state = hashlib.blake2b(digest_size=16, person=b"gatespace.task.1" if self.labels else b"gatespace.text.1")
        for part in self._labelled() if self.labels else self._written():
            body = part.encode("utf-8", "surrogatepass")
            state.update(str(len(body)).encode("ascii") + b":" + body)
        return state.hexdigest()

    def _labelled(self) -> Iterator[str]:
        yield from (self.question, *self.labels, *(self.definitions.get(label, "") for label in self.labels))
        if (self.metric, self.also) != ("accuracy", ()):
            yield json.dumps([self.metric, *self.also])
        for split in SPLITS:
            yield f"{split} {len(self.rows(split))}"
            yield from (part for row in self.rows(split) for part in (row.text, row.label))
        yield from (part for row in self.train if row.teacher for part in ("teacher", row.text, row.teacher))

    def _written(self) -> Iterator[str]:
        prompt = self.prompt
        assert prompt is not None
        settings = (self.metric, self.also, prompt.conversations, prompt.system, prompt.stop, prompt.thinking)
        yield json.dumps([*settings, prompt.max_prompt_tokens, prompt.too_long])
        for split in SPLITS:
            yield f"{split} {len(self.rows(split))}"
            for row in self.rows(split):
                yield row.text
                yield json.dumps([row.references, sorted(row.columns.items()), *([row.teacher] if row.teacher else [])])

    def best_constant(self, split: str = "test") -> Baseline:
        """The most frequent label of `split`, and the accuracy of giving it to every text."""
        counts = Counter(row.label for row in self.rows(split))
        label = max(self.labels, key=counts.__getitem__)
        return Baseline(label, counts[label] / counts.total() if counts else float("nan"))

    def describe(self) -> str:
        """One line: sizes, labels or references, metrics, dropped rows, overlap of test and train, best constant."""
        references = [len(row.references) for split in SPLITS for row in self.rows(split)]
        dropped = ", ".join(f"{split} {count}" for split, count in self.dropped.items() if count)
        parts = [
            f"{self.name}: train/val/test {'/'.join(str(len(self.rows(split))) for split in SPLITS)}",
            f"labels {', '.join(self.labels)}"
            if self.labels
            else f"references per prompt {min(references)} to {max(references)}",
            f"judged by {', '.join((self.metric, *self.also))}",
            f"empty rows dropped: {dropped or 'none'}",
            f"test texts also in train: {len(self.test_in_train)}",
        ]
        if self.test and self.labels:
            parts.append("best constant {} {:.3f}".format(*self.best_constant()))
        return "; ".join(parts)


def check_text(where: str, *texts: str) -> None:
    """Raise if a text has a lone surrogate, which JSON can contain and no tokenizer can encode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{where}: half of a character (a lone surrogate)",
                got=repr(text[max(0, error.start - 20) : error.end + 20]),
                why="it has no UTF-8 form, so no model can read it",
                instead="remove it; an escape such as \\ud83d needs its second half",
            ) from None


def check_labels(labels: Sequence[str], definitions: Mapping[str, str]) -> None:
    """Raise if the parser cannot tell the labels apart, or they are not the ones defined."""
    if isinstance(labels, str) or len(labels) < 2:
        raise UsageError(
            "a task has at least two labels", got=repr(labels), instead="prompt=Prompt() for free-text responses"
        )
    seen: dict[str, str] = {}
    for label in labels:
        key = label_key(label) if isinstance(label, str) else ""
        if not key or '"' in label or "\n" in label:
            raise UsageError(
                "a label is one line of text without quotation marks",
                got=repr(label),
                why="the model generates it as a JSON string on one line",
            )
        if key in seen:
            raise UsageError(
                "two labels differ in case, spaces, underscores or hyphens only",
                got=f"{seen[key]!r} and {label!r}",
                why="the parser reads them as one",
            )
        seen[key] = label
    for label in definitions:
        if label not in labels:
            raise unknown_name("label in the definitions", str(label), labels)
    missing = [label for label in labels if label not in definitions]
    if definitions and missing:
        raise UsageError(
            "some labels have a definition and others have none",
            got=f"no definition of {', '.join(missing)}",
            instead="define every label, or none with definitions={}",
        )


def split_rows(examples: Sequence[Example], fractions: Mapping[str, float], seed: int) -> dict[str, list[Example]]:
    """Divide rows into named parts that have no text in common.

    Rows with the same text (up to surrounding white space) stay together, because a teacher trained on a row also knows
    its duplicate. Sizes are therefore exact only up to such groups. Rows keep their order.

    Args:
        examples: The rows.
        fractions: Part → share of the rows, e.g. ``{"teacher": 0.6, "distill": 0.4}``. Shares that sum to less than 1
            leave rows unused.
        seed: The same rows, fractions and seed give the same parts.

    Examples:
        >>> rows = [Example(f"text {i}", "ab"[i % 2]) for i in range(10)]
        >>> parts = split_rows(rows, {"teacher": 0.6, "distill": 0.4}, seed=1)
        >>> len(parts["teacher"]), len(parts["distill"])
        (6, 4)
    """
    _check_fractions(fractions)
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(examples):
        groups.setdefault(row.text.strip(), []).append(index)
    members = list(groups.values())
    ends = [round(share * len(examples)) for share in accumulate(fractions.values())]
    chosen: dict[str, list[int]] = {part: [] for part in fractions}
    placed = 0
    for position in permutation(len(members), seed, "tasks", "split_rows", ""):
        for part, end in zip(fractions, ends, strict=True):
            if placed < end:
                chosen[part].extend(members[position])
                break
        placed += len(members[position])
    empty = [part for part, indices in chosen.items() if not indices]
    if empty:
        raise UsageError(
            f"no row is left for {', '.join(empty)}",
            got=f"{len(examples)} rows with {len(groups)} different texts, {dict(fractions)}",
            instead="more rows or a larger share",
        )
    return {part: [examples[index] for index in sorted(indices)] for part, indices in chosen.items()}


def _check_fractions(fractions: Mapping[str, float]) -> None:
    total = sum(fractions.values())
    if not fractions or not all(share > 0 for share in fractions.values()) or not total <= 1 + 1e-9:
        raise UsageError(
            "the shares of a split are above 0 and sum to 1 at most",
            got=dict(fractions),
            instead='e.g. {"teacher": 0.6, "distill": 0.4}',
        )
