"""Tasks whose responses are free text: prompts from a template or from conversations, responses judged by a metric."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar

from gatespace.errors import UsageError
from gatespace.tasks.data import SPLITS, AnyExample, AnyTask, check_text, digest_of
from gatespace.tasks.prompt import AnyPrompt, Tokenizer, harmless
from gatespace.tasks.scores import Metric, find_metric
from gatespace.tasks.table import CARVED, carve, read_source, teacher_of

ROLES = ("system", "developer", "user", "assistant", "tool")
TOO_LONG = ("refuse", "truncate")
_TURNS = '[{"role": "user", "content": "…"}, …]'
_THOUGHT = "</think>"
_SETTINGS = "prompt, messages, answer, columns and teacher_column of task.text name the columns"


@dataclass(frozen=True, slots=True)
class TextExample:
    """A prompt with its reference responses.

    Args:
        text: The user's turn; if rows are conversations, all turns as JSON.
        references: At least one.
        columns: The row's cells, for custom metrics.
        where: File and line, or the number of the row.
        teacher: The name of its teacher; "" if it names none.
    """

    text: str
    references: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    where: str = field(default="", compare=False)
    teacher: str = ""

    @property
    def gold(self) -> str:
        """The first reference, which teachers train on."""
        return self.references[0]


class Template:
    """A text with columns in braces: ``Describe: {mr}``; a brace itself is doubled.

    Examples:
        >>> Template("Q: {question} ({{sic}})").fill({"question": "Why?"})
        'Q: Why? ({sic})'
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._parts = [(before, name, spec, kind) for before, name, spec, kind in Formatter().parse(text)]
        except ValueError as error:
            raise UsageError("this is not a template", got=repr(text), why=str(error), instead=_BRACES) from error
        for _, name, spec, kind in self._parts:
            if name == "" or spec or kind:
                raise UsageError("braces hold the name of a column and nothing else", got=repr(text), instead=_BRACES)
        self.columns = tuple(dict.fromkeys(name for _, name, _, _ in self._parts if name is not None))

    def fill(self, cells: Mapping[str, str]) -> str:
        """The text with the cells filled in."""
        return "".join(before + (cells[name] if name is not None else "") for before, name, _, _ in self._parts)


_BRACES = '"Describe: {mr}"; a brace itself is written twice: {{ or }}'


# ---------------------------------------------------------------------------------------------------- the prompt


@dataclass(frozen=True)
class TextPrompt(AnyPrompt):
    """The prompt of a text task.

    Args:
        conversations: Whether a row's text is a conversation as JSON; else it is the user's turn.
        system: The system's turn before all others; "" for none.
        prefill: How the assistant's turn begins.
        stop: Stop strings; they are not part of the response.
        thinking: Whether a model that can think before it responds does so. Its thinking is not judged.
        max_prompt_tokens: The longest prompt; None: as long as fits.
        too_long: What happens beyond it: refuse is an error, truncate cuts the end of the longest turn.
    """

    conversations: bool = False
    system: str = ""
    prefill: str = ""
    stop: tuple[str, ...] = ()
    thinking: bool = False
    max_prompt_tokens: int | None = None
    too_long: str = "refuse"

    labels: ClassVar[tuple[str, ...]] = ()  # type: ignore[misc]
    closes = False
    shorter = "task.text.max_prompt_tokens with too_long: truncate, shorter texts"

    @property
    def tail(self) -> int:  # type: ignore[override]
        """A token is at least a byte: the bytes of the longest stop string, plus 4 for a cut-off character."""
        return max((len(text.encode()) + 4 for text in self.stop), default=0)

    def messages(self, text: str, tokenizer: Tokenizer | None = None) -> list[dict[str, str]]:
        """The system's turn and the row's turns."""
        turns = json.loads(text) if self.conversations else [{"role": "user", "content": text}]
        if self.system:
            turns = [{"role": "system", "content": self.system}, *turns]
        return [{**turn, "content": harmless(turn["content"], tokenizer)} for turn in turns]

    def plain(self, messages: Sequence[dict[str, str]]) -> str:
        """A single turn as it is; several, each with its role."""
        if len(messages) == 1:
            return messages[0]["content"] + self.prefill
        turns = [f"{turn['role']}: {turn['content']}" for turn in messages]
        return "\n\n".join([*turns, f"assistant: {self.prefill}".rstrip(" ")])

    def encode(self, tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
        """The token ids; if too many and `too_long` is truncate, the longest turn is cut."""
        ids = super().encode(tokenizer, messages)
        most = self.max_prompt_tokens
        while most is not None and len(ids) > most and self.too_long == "truncate":
            place = max(range(len(messages)), key=lambda i: len(messages[i]["content"]))
            content = messages[place]["content"]
            if not content:
                raise UsageError(
                    "task.text.max_prompt_tokens: too few for the chat template alone",
                    got=f"{most}, and {len(ids)} tokens without any text",
                    instead=f"more than {len(ids)}",
                )
            chat: Any = tokenizer
            tokens = tokenizer.encode(content, add_special_tokens=False)
            kept = chat.decode(tokens[: max(0, len(tokens) - (len(ids) - most))]).rstrip("\ufffd")
            # Some tokenizers do not round-trip.
            kept = kept if content.startswith(kept) and kept != content else content[: len(content) // 2]
            messages = [*messages[:place], {**messages[place], "content": kept}, *messages[place + 1 :]]
            ids = super().encode(tokenizer, messages)
        return ids

    def prefix(self, tokenizer: Tokenizer) -> None:
        """None: known only from the texts, which include a template's start."""

    def golds(self, rows: Iterable[AnyExample]) -> list[str]:
        """The references to train on."""
        return list(dict.fromkeys(row.gold for row in rows))

    def gold_response(self, gold: str) -> str:
        """The reference, without the prefill if it begins with it."""
        return gold.removeprefix(self.prefill)

    def closed(self, response: str) -> bool:
        """Whether it contains a stop string."""
        return any(text in response for text in self.stop)

    def parse(self, response: str) -> str:
        """The response up to the first stop string, without thinking."""
        for text in self.stop:
            response = response.partition(text)[0]
        if self.thinking:
            response = response.rpartition(_THOUGHT)[2] if _THOUGHT in response else ""
        return (self.prefill + response).strip()


# ---------------------------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class TextTask(AnyTask):
    """Prompts whose responses are compared with references.

    Args:
        name: In reports.
        train: Training rows.
        val: Rows to select by.
        test: Rows to report on.
        metric: For model selection and reports.
        also: Further metrics in evaluations.
        prompt: How a row becomes a prompt. `gatespace.tasks.configured` may override its prefill.
        template: The template of the rows' texts, if any.
        source: Where the rows come from.
        notes: Notes for the user on how they were read.
    """

    name: str
    train: list[TextExample]
    val: list[TextExample]
    test: list[TextExample]
    metric: str = "exact"
    also: tuple[str, ...] = ()
    prompt: TextPrompt = TextPrompt()
    template: Template | None = field(default=None, compare=False)
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.train:
            raise UsageError(f"{self.name} has no training rows", got=self.source or None)
        if self.metric in self.also or len({*self.also}) < len(self.also):
            raise UsageError("also: a metric is named once", got=", ".join((self.metric, *self.also)))
        for split in SPLITS:
            for row in self.rows(split):
                check_text(row.where or f"{self.name}, {split}", row.text, *row.references, *row.columns.values())
        for metric in self.metrics:
            for split in SPLITS:
                for row in self.rows(split):
                    for reference in row.references:
                        if why := metric.refuses(reference):
                            raise UsageError(
                                f"{row.where or f'{self.name}, {split}'}: a reference cannot be compared by the metric "
                                f"{metric.name}",
                                got=repr(reference[:80]),
                                why=why,
                                instead="another metric, or another reference",
                            )

    def rows(self, split: str) -> list[TextExample]:
        """The examples of ``train``, ``val`` or ``test``."""
        return super().rows(split)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """`metric`, and those of `also`."""
        return tuple(map(find_metric, (self.metric, *self.also)))

    def judge(self, row: TextExample, response: str | None) -> float:
        """The metric's score."""
        return self.metrics[0](response or "", row.references, row.columns)

    def judge_all(self, row: TextExample, response: str) -> dict[str, float]:
        """Metric of `also` → score."""
        return {metric.name: metric(response, row.references, row.columns) for metric in self.metrics[1:]}

    def lessons(self, rows: Sequence[TextExample]) -> list[TextExample]:
        """One row for every reference."""
        return [replace(row, references=(reference,)) for row in rows for reference in row.references]

    @cached_property
    def digest(self) -> str:
        """Hash of all that a run can see of this task, wherever its rows were loaded from."""
        return digest_of(self._parts(), b"gatespace.text.1")

    def _parts(self) -> Iterator[str]:
        prompt = self.prompt
        settings = (self.metric, self.also, prompt.conversations, prompt.system, prompt.stop, prompt.thinking)
        yield json.dumps([*settings, prompt.max_prompt_tokens, prompt.too_long])
        for split in SPLITS:
            yield f"{split} {len(self.rows(split))}"
            for row in self.rows(split):
                yield row.text
                yield json.dumps([row.references, sorted(row.columns.items()), *([row.teacher] if row.teacher else [])])

    def describe(self) -> str:
        """One line: sizes, references, metrics, overlap of test and train."""
        sizes = "/".join(str(len(self.rows(split))) for split in SPLITS)
        references = [len(row.references) for split in SPLITS for row in self.rows(split)]
        return "; ".join(
            [
                f"{self.name}: train/val/test {sizes}",
                f"references per prompt {min(references)} to {max(references)}",
                f"judged by {', '.join((self.metric, *self.also))}",
                f"test prompts also in train: {len(self.test_in_train)}",
            ]
        )


@dataclass(frozen=True)
class OtherPrompt(AnyPrompt):
    """The teacher's own prompt for the rows of a task, with the same right responses.

    Args:
        student: The prompt of the task.
        template: The user's turn; None: the turns of the task.
        system: The system's turn; None: the task's.
        examples: Few-shot turns.
    """

    student: AnyPrompt
    template: Template | None = None
    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefill", "labels", "thinking", "closes", "tail"):
            object.__setattr__(self, name, getattr(self.student, name))

    def text(self, row: Any) -> str:
        """All turns, as JSON."""
        turns = self.student.messages(row.text)
        head = [*takewhile(lambda turn: turn["role"] in ("system", "developer"), turns)]
        rest = turns[len(head) :]
        if self.system is not None:
            head = [{"role": "system", "content": self.system}] if self.system else []
        if self.template is not None:
            cells = {"prompt": rest[-1]["content"], **row.columns}
            named, where = self.template.columns, row.where or repr(row.text[:80])
            if missing := [column for column in named if column not in cells]:
                raise UsageError(
                    f"teacher.prompt.prompt: {where} has no column {missing[0]!r}",
                    got=f"columns {', '.join(map(repr, row.columns))}; and 'prompt', the student's turn",
                    instead="" if self.labels else "name it in task.text.columns",
                )
            if named and not any(cells[column].strip() for column in named):
                raise UsageError(f"teacher.prompt.prompt: {where}: the prompt is empty", why="its columns have no text")
            rest = [{"role": "user", "content": self.template.fill(cells)}]
        shots = [
            {"role": role, "content": content}
            for shot in self.examples
            for role, content in zip(("user", "assistant"), shot, strict=True)
        ]
        return json.dumps([*head, *shots, *rest], ensure_ascii=False)

    def messages(self, text: str, tokenizer: Tokenizer | None = None) -> list[dict[str, str]]:
        """The turns."""
        return [{**turn, "content": harmless(turn["content"], tokenizer)} for turn in json.loads(text)]

    def plain(self, messages: Sequence[dict[str, str]]) -> str:
        """As in the student's prompt; several turns, each with its role."""
        return (self.student if len(messages) == 1 else TextPrompt(prefill=self.prefill)).plain(messages)

    def prefix(self, tokenizer: Tokenizer) -> None:
        """None: depends on the texts."""

    def golds(self, rows: Iterable[AnyExample]) -> list[str]:
        """As for the student's prompt."""
        return self.student.golds(rows)

    def gold_response(self, gold: str) -> str:
        """As for the student's prompt."""
        return self.student.gold_response(gold)

    def closed(self, response: str) -> bool:
        """As for the student's prompt."""
        return self.student.closed(response)

    def parse(self, response: str) -> str | None:
        """As for the student's prompt."""
        return self.student.parse(response)


# ---------------------------------------------------------------------------------------------------- reading


def load_text(
    source: str | Path | Mapping[str, str | Path],
    *,
    prompt: str | None = None,
    messages: str | None = None,
    answer: str | None = None,
    metric: str = "exact",
    also: Sequence[str] = (),
    columns: Sequence[str] = (),
    teacher_column: str | None = None,
    group: bool = True,
    how: TextPrompt | None = None,
    split: Mapping[str, float] = CARVED,
    seed: int = 0,
    name: str | None = None,
) -> TextTask:
    """Load a text task from files or the Hub. A bad row is an error that names its file and line.

    Args:
        source: As in `gatespace.tasks.load_table`.
        prompt: A template over columns, e.g. ``Describe: {mr}``; or `messages`.
        messages: The column of a conversation: a list of ``{"role": …, "content": …}``, as JSON in text files.
        answer: The column of the right response: a text, a number, a list of texts that are all right, or a list with
            one message. None: the conversation's last turn, by the assistant.
        metric: A name of `gatespace.tasks.scores`.
        also: Further metrics.
        columns: Further columns for custom metrics.
        teacher_column: The column that names a training row's teacher; None: rows name none.
        group: Merge rows of one prompt and teacher into one, with the references of all.
        how: The other settings of the prompt.
        split: Shares of train that become ``val`` and ``test`` if the source has no such split.
        seed: Of that split.
        name: Of the task; by default the source.
    """
    if (prompt is None) == (messages is None):
        raise UsageError("a text task has a prompt template, or a column of messages", got=f"{prompt!r}, {messages!r}")
    if answer is None and messages is None:
        raise UsageError("answer: which column has the right response?", instead="answer: NAME")
    template = None if prompt is None else Template(prompt)
    used = template.columns if template is not None else (messages or "",)
    if template is not None and not used:
        raise UsageError("prompt: the template names no column", got=repr(prompt), instead=_BRACES)
    wanted = tuple(dict.fromkeys((*used, *([] if answer is None else [answer]), *columns)))
    notes: list[str] = []
    found, shown = read_source(source, wanted, notes, settings=_SETTINGS, for_train=teacher_column)
    rows: dict[str, list[TextExample]] = {}
    for part, given in found.items():
        rows[part], dropped = [], 0
        for where, cells in given:
            if cells is None or all(cells[column] in (None, "") for column in wanted):
                dropped += 1
                continue
            row = _example(where, {column: cells[column] for column in wanted}, template, messages, answer)
            named = teacher_of(where, cells, teacher_column) if part == "train" else ""
            rows[part].append(replace(row, teacher=named))
        if not rows[part]:
            raise UsageError(f"{shown} has no rows for {part}")
        if dropped:
            notes.append(f"{shown}: empty rows of {part}, which are left out: {dropped}")
        if group:
            rows[part] = _grouped(rows[part])
    carve(rows, split, seed)
    how = replace(how or TextPrompt(), conversations=messages is not None)
    return TextTask(
        name=name or shown,
        train=rows["train"],
        val=rows["val"],
        test=rows["test"],
        metric=metric,
        also=tuple(also),
        prompt=how,
        template=template,
        source=shown,
        notes=tuple(dict.fromkeys(notes)),
    )


def _example(
    where: str, cells: Mapping[str, object], template: Template | None, messages: str | None, answer: str | None
) -> TextExample:
    if answer is not None:
        references = _references(where, answer, cells[answer])
    else:
        assert messages is not None
        last = conversation(where, messages, cells[messages])[-1]
        if last["role"] != "assistant":
            raise UsageError(
                f"{where}: the conversation does not end with the right response",
                got=f"a last turn of {last['role']}",
                why="task.text.answer names no column",
                instead="a last turn of assistant, or answer: NAME",
            )
        references = (last["content"].strip(),)
    text = row_text(where, cells, template, messages)
    columns = {name: "" if value is None else _cell(value) for name, value in cells.items()}
    return TextExample(text, references, columns, where)


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def row_text(where: str, cells: Mapping[str, object], template: Template | None, messages: str | None) -> str:
    """The text of a row for `TextPrompt`, from its cells. The assistant's last turn is not part of it."""
    if template is not None:
        texts = {column: _text(where, column, cells[column]) for column in template.columns}
        if not any(part.strip() for part in texts.values()):
            raise UsageError(f"{where}: the prompt is empty", got=repr(texts), why="its columns have no text")
        return template.fill(texts)
    assert messages is not None
    turns = conversation(where, messages, cells[messages])
    if turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        raise UsageError(
            f"{where}: there is nothing to respond to",
            got=f"a last turn of {turns[-1]['role']}" if turns else "no turn before the right response",
            instead="a turn of user before it",
        )
    return json.dumps(turns, ensure_ascii=False)


def conversation(where: str, column: str, value: object) -> list[dict[str, str]]:
    """The turns of a conversation, checked."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{where}: {column!r} is no conversation", got=repr(value)[:80], why=str(error), instead=_TURNS
            ) from error
    if not isinstance(value, Sequence) or not value:
        raise UsageError(f"{where}: {column!r} is no conversation", got=repr(value)[:80], instead=_TURNS)
    turns = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
            raise UsageError(
                f"{where}: turn {number} of {column!r} has no role and content", got=repr(turn)[:80], instead=_TURNS
            )
        if turn["role"] not in ROLES:
            raise UsageError(
                f"{where}: turn {number} of {column!r} has an unknown role",
                got=repr(turn["role"]),
                instead=f"one of {', '.join(ROLES)}",
            )
        if turn.get("tool_calls"):
            raise UsageError(
                f"{where}: turn {number} of {column!r} calls tools",
                got=repr(turn["tool_calls"])[:80],
                why="a prompt holds the texts of turns only",
                instead="the call as text in its content",
            )
        content = turn["content"]
        if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):  # as OpenAI writes parts
            texts = [part.get("text") for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str) or not content.strip():
            raise UsageError(f"{where}: turn {number} of {column!r} has no text", got=repr(turn["content"])[:80])
        turns.append({"role": turn["role"], "content": content})
    return turns


def _text(where: str, column: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where}: {column!r} is neither a text nor a number", got=repr(value)[:80])
    return str(value)


def _references(where: str, column: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if values and all(isinstance(one, Mapping) for one in values):  # a completion, as TRL writes it
        if len(values) > 1:
            raise UsageError(f"{where}: {column!r} has several turns", got=repr(value)[:80], instead="one of assistant")
        values = [turn["content"] for turn in conversation(where, column, values)]
    texts = tuple(dict.fromkeys(_text(where, column, one).strip() for one in values))
    if not texts or not all(texts):
        raise UsageError(f"{where}: {column!r} has no right response", got=repr(value)[:80])
    return texts


def _grouped(rows: Sequence[TextExample]) -> list[TextExample]:
    known: dict[tuple[str, str], TextExample] = {}
    for row in rows:
        first = known.get((row.text, row.teacher))
        references = (*first.references, *row.references) if first is not None else row.references
        known[row.text, row.teacher] = replace(first or row, references=tuple(dict.fromkeys(references)))
    return list(known.values())
