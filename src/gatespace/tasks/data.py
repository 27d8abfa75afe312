"""The interface of tasks (`AnyTask`), and classification tasks: labels, their definitions, and examples."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

from gatespace.errors import UsageError, unknown_name
from gatespace.seeding import permutation
from gatespace.tasks.parser import label_key

SPLITS = ("train", "val", "test")


class AnyExample(Protocol):
    """A row of a task."""

    @property
    def text(self) -> str:
        """Identifies its prompt; the task's prompt makes messages from it."""
        ...

    @property
    def gold(self) -> str:
        """The task's prompt makes a right response from it."""
        ...

    @property
    def where(self) -> str:
        """Where the row was read, for errors; "" if unknown."""
        ...

    @property
    def teacher(self) -> str:
        """The name of its teacher; "" if it names none."""
        ...


Row = TypeVar("Row", bound=AnyExample)


class AnyTask(ABC):
    """Interface of tasks: rows of three splits, and how a response is judged.

    `Task` has labels; `gatespace.tasks.text.TextTask` has references to compare responses with.
    """

    name: str
    source: str
    """Where the rows come from."""
    notes: tuple[str, ...]
    """Notes for the user on how they were read."""
    metric: str
    """Name of the mean of `judge` over a split."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Hash of all that a run can see of this task, wherever its rows were loaded from."""

    @abstractmethod
    def judge(self, row: Any, response: str | None) -> float:
        """Score of a parsed response, from 0 to 1; None is one that could not be parsed."""

    @abstractmethod
    def describe(self) -> str:
        """One line: sizes, and what a user should know about rows."""

    def rows(self, split: str) -> list[Any]:
        """The examples of ``train``, ``val`` or ``test``."""
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        rows: list[Any] = getattr(self, split)
        return rows

    def lessons(self, rows: Sequence[Any]) -> list[Any]:
        """The rows to train a teacher on: one for every right response to `rows`."""
        return list(rows)

    @cached_property
    def test_in_train(self) -> tuple[int, ...]:
        """Indices of the test rows whose exact text is also in train."""
        known = {row.text for row in self.rows("train")}
        return tuple(index for index, row in enumerate(self.rows("test")) if row.text in known)


def digest_of(parts: Iterable[str], person: bytes) -> str:
    """Hash of texts and their boundaries."""
    state = hashlib.blake2b(digest_size=16, person=person)
    for part in parts:
        body = part.encode("utf-8", "surrogatepass")
        state.update(str(len(body)).encode("ascii") + b":" + body)
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class Example:
    """A text and its gold label; the name of its teacher, if it names one; file and line, if known."""

    text: str
    label: str
    teacher: str = ""
    where: str = field(default="", compare=False, repr=False)

    @property
    def gold(self) -> str:
        """The label."""
        return self.label

    @property
    def columns(self) -> dict[str, str]:
        """Columns for templates."""
        return {"text": self.text, "label": self.label}


class Baseline(NamedTuple):
    """A label given to every text, and the accuracy of doing so."""

    label: str
    accuracy: float


@dataclass(frozen=True)
class Task(AnyTask):
    """Texts to classify with one label each.

    Args:
        name: E.g. ``tweeteval/hate``.
        labels: The canonical label strings, in the order of the data's integers.
        definitions: A brief sentence for every label, or empty.
        train: Training rows.
        val: Rows to select by.
        test: Rows to report on.
        dropped: Number of rows with an empty text dropped per split.
        question: What is asked about a text.
        source: Where the rows come from.
        notes: Notes for the user on how they were read.
    """

    name: str
    labels: tuple[str, ...]
    definitions: Mapping[str, str]
    train: list[Example]
    val: list[Example]
    test: list[Example]
    dropped: Mapping[str, int] = field(default_factory=dict)
    question: str = "Which label fits the text best?"
    source: str = ""
    notes: tuple[str, ...] = ()

    metric = "accuracy"

    def __post_init__(self) -> None:
        check_labels(self.labels, self.definitions)
        legal = set(self.labels)
        for split in SPLITS:
            for index, row in enumerate(self.rows(split)):
                if row.label not in legal:
                    raise UsageError(
                        f"row {index} of {self.name}'s {split} has an unknown label",
                        got=repr(row.label),
                        instead=f"one of: {', '.join(self.labels)}",
                    )
                check_text(row.where or f"row {index} of {self.name}'s {split}", row.text)
        if not self.train:
            raise UsageError(f"{self.name} has no training rows", got=self.source or None)

    def rows(self, split: str) -> list[Example]:
        """The examples of ``train``, ``val`` or ``test``."""
        return super().rows(split)

    def judge(self, row: Example, response: str | None) -> float:
        """1 for the right label, 0 for any other and for none."""
        return float(response == row.label)

    @cached_property
    def digest(self) -> str:
        """Hash of all that a run can see of this task, wherever its rows were loaded from."""
        parts = [self.question, *self.labels, *(self.definitions.get(label, "") for label in self.labels)]
        for split in SPLITS:
            parts.append(f"{split} {len(self.rows(split))}")
            parts.extend(part for row in self.rows(split) for part in (row.text, row.label))
        parts += [part for row in self.train if row.teacher for part in ("teacher", row.text, row.teacher)]
        return digest_of(parts, b"gatespace.task.1")

    def best_constant(self, split: str = "test") -> Baseline:
        """The most frequent label of `split`, and the accuracy of giving it to every text."""
        counts = Counter(row.label for row in self.rows(split))
        label = max(self.labels, key=counts.__getitem__)
        return Baseline(label, counts[label] / counts.total() if counts else float("nan"))

    def describe(self) -> str:
        """One line: sizes, labels, dropped rows, overlap of test and train, best constant."""
        sizes = "/".join(str(len(self.rows(split))) for split in SPLITS)
        lost = {split: count for split, count in self.dropped.items() if count}
        rows_lost = ", ".join(f"{split} {count}" for split, count in lost.items()) or "none"
        parts = [
            f"{self.name}: train/val/test {sizes}",
            f"labels {', '.join(self.labels)}",
            f"empty rows dropped: {rows_lost}",
            f"test texts also in train: {len(self.test_in_train)}",
        ]
        if self.test:
            label, accuracy = self.best_constant()
            parts.append(f"best constant {label} {accuracy:.3f}")
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
        raise UsageError("a task has at least two labels", got=repr(labels))
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


def split_rows(
    examples: Sequence[Row], fractions: Mapping[str, float], seed: int, *, stratify: bool = False
) -> dict[str, list[Row]]:
    """Divide rows into named parts that have no text in common.

    Rows with the same text (up to surrounding white space) stay together, because a teacher trained on a row also knows
    its duplicate. Sizes are therefore exact only up to such groups. Rows keep their order.

    Args:
        examples: The rows.
        fractions: Part → share of the rows, e.g. ``{"teacher": 0.6, "distill": 0.4}``. Shares that sum to less than 1
            leave rows unused.
        seed: The same rows, fractions and seed give the same parts.
        stratify: Divide the rows of each right response (label) separately, so that all parts have the same mix.

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
    strata: dict[str, list[list[int]]] = {}
    for group in groups.values():
        strata.setdefault(examples[group[0]].gold if stratify else "", []).append(group)

    chosen: dict[str, list[int]] = {part: [] for part in fractions}
    for stratum, members in strata.items():
        size = sum(map(len, members))
        ends = [round(share * size) for share in accumulate(fractions.values())]
        placed = 0
        for position in permutation(len(members), seed, "tasks", "split_rows", stratum):
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
