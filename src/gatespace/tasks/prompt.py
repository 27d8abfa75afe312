"""The prompt of a task: what the model is shown, and how its response begins. `parser` is its counterpart.

Everything that is the same for all texts comes first and the text last, so that the shared prefix, whose KV cache is
computed once, is as long as possible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from string import Formatter
from typing import Any, Protocol

from gatespace.errors import UsageError
from gatespace.tasks.data import Example, Task
from gatespace.tasks.parser import parse_label

Turn = dict[str, str]
"""``{"role": …, "content": …}``."""

PREFILL = '{"label": "'
"""The assistant's turn starts with this, so that the first decoded token is the first token of a label."""

_THOUGHT = "</think>"
SURROGATE = re.compile("[\ud800-\udfff]")

# Different kinds of first characters, so that the prefix these renderings share is shared by all.
_PROBES = ("a", "Zebra", "@user", "7 days", '"quoted"', "#tag", "…", "😀", "(", "é", ":", "文")


class Tokenizer(Protocol):
    """Interface of a tokenizer. A chat template is used if there is one; Hugging Face tokenizers fit."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`."""
        ...


class Template:
    """A text with columns in braces: ``Describe: {mr}``; a brace itself is doubled.

    Examples:
        >>> Template("Q: {question} ({{sic}})").fill({"question": "Why?"})
        'Q: Why? ({sic})'
    """

    def __init__(self, text: str) -> None:
        try:
            self._parts = list(Formatter().parse(text))
        except ValueError as error:
            raise UsageError("this is not a template", got=repr(text), why=str(error), instead=_BRACES) from error
        for _, name, spec, conversion in self._parts:
            if name == "" or spec or conversion:
                raise UsageError("braces hold the name of a column and nothing else", got=repr(text), instead=_BRACES)
        self.columns = tuple(dict.fromkeys(name for _, name, _, _ in self._parts if name is not None))

    def fill(self, cells: Mapping[str, str]) -> str:
        """The text with the cells filled in."""
        return "".join(before + (cells[name] if name is not None else "") for before, name, _, _ in self._parts)


_BRACES = '"Describe: {mr}"; a brace itself is written twice: {{ or }}'


@dataclass(frozen=True)
class TeacherPrompt:
    """What a teacher is shown instead of the student's turns.

    Args:
        template: The user's turn, over the row's columns and `prompt`, the student's turn; None: the student's turns.
        system: The system's turn; None: the student's.
        examples: Few-shot turns: (user, assistant), ….
    """

    template: str | None = None
    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()

    def turns(self, turns: Sequence[Turn], row: Example) -> list[Turn]:
        """The teacher's turns, from the student's `turns` for a row."""
        head = [*takewhile(lambda turn: turn["role"] in ("system", "developer"), turns)]
        rest = [*turns[len(head) :]]
        if self.system is not None:
            head = [{"role": "system", "content": self.system}] if self.system else []
        if self.template is not None:
            rest = [{"role": "user", "content": self._filled(self.template, rest[-1]["content"], row)}]
        shots = [
            {"role": role, "content": content}
            for shot in self.examples
            for role, content in zip(("user", "assistant"), shot, strict=True)
        ]
        return [*head, *shots, *rest]

    def _filled(self, text: str, student_turn: str, row: Example) -> str:
        template, columns = Template(text), row.columns or {"text": row.text, "label": row.label}
        cells, where = {"prompt": student_turn, **columns}, row.where or repr(row.text[:80])
        if missing := [column for column in template.columns if column not in cells]:
            raise UsageError(
                f"teacher.prompt.prompt: {where} has no column {missing[0]!r}",
                got=f"columns {', '.join(map(repr, columns))}; and 'prompt', the student's turn",
                instead="name it in task.text.columns" if row.columns else "",
            )
        if template.columns and not any(cells[column].strip() for column in template.columns):
            raise UsageError(f"teacher.prompt.prompt: {where}: the prompt is empty", why="its columns have no text")
        return template.fill(cells)


@dataclass(frozen=True)
class Prompt:
    """What a model is shown of a row, where its response ends, and how it is parsed. Equal prompts render the same.

    Args:
        fixed: What precedes every text that gets a label.
        labels: The legal labels; empty: responses are free text.
        prefill: How the assistant's turn begins; "" leaves all of it to the model.
        conversations: Whether a row's text is a conversation as JSON; else it is the user's turn.
        system: The system's turn before all others; "" for none.
        stop: Stop strings; they are not part of the response.
        thinking: Whether a model that can think before it responds does so. Its thinking is not judged.
        max_prompt_tokens: The longest prompt; None: as long as fits.
        too_long: What happens beyond it: refuse is an error, truncate cuts the end of the longest turn.
        teacher: What a teacher is shown instead, with the same right responses; None: this prompt.
    """

    fixed: str = ""
    labels: tuple[str, ...] = ()
    prefill: str = ""
    conversations: bool = False
    system: str = ""
    stop: tuple[str, ...] = ()
    thinking: bool = False
    max_prompt_tokens: int | None = None
    too_long: str = "refuse"
    teacher: TeacherPrompt | None = None

    def __post_init__(self) -> None:
        for label in self.labels:
            if not _answer(label).startswith(self.prefill):
                raise UsageError(
                    "a prefill is the beginning of every right answer",
                    got=repr(self.prefill),
                    why=f"the right answer for {label!r} is {_answer(label)}",
                    instead=f"{PREFILL!r} or ''",
                )

    @classmethod
    def of(cls, task: Task, prefill: str | None = None, *, brief: bool = False) -> Prompt:
        """The prompt for `task`.

        Args:
            task: Gives the prompt of free text, or the question, the labels and their definitions.
            prefill: How the assistant's turn begins; None: as the task has it, and `PREFILL` before labels.
            brief: Only the labels, for models trained from scratch, which cannot follow instructions.
        """
        if task.prompt is not None:
            return task.prompt if prefill is None else replace(task.prompt, prefill=prefill)
        prefill = PREFILL if prefill is None else prefill
        if brief:
            return cls(f"{' | '.join(task.labels)}\n", task.labels, prefill)
        defined = [
            f"- {label}: {task.definitions[label]}" if label in task.definitions else f"- {label}"
            for label in task.labels
        ]
        fixed = "\n".join(
            [
                f"{task.question} Choose exactly one label.",
                "",
                "Labels:",
                *defined,
                "",
                "Answer with one line of strict JSON and nothing else:",
                _answer(f"<{'|'.join(task.labels)}>"),
                "",
                "Format examples:",
                _answer(task.labels[0]),
                _answer(task.labels[-1]),
                "",
                "Text: ",
            ]
        )
        return cls(fixed, task.labels, prefill)

    @property
    def closes(self) -> bool:
        """Whether a right response is complete by itself, before the token that ends the turn."""
        return bool(self.labels)

    @property
    def shorter(self) -> str:
        """What makes long prompts fit, for errors."""
        cut = "" if self.labels or self.teacher else "task.text.max_prompt_tokens with too_long: truncate, "
        return f"{cut}shorter texts"

    @property
    def tail(self) -> int | None:
        """`closed` needs only this many last tokens of a response; None: all of it."""
        # A token is at least a byte: the bytes of the longest stop string, plus 4 for a cut-off character.
        return None if self.labels else max((len(text.encode()) + 4 for text in self.stop), default=0)

    # ------------------------------------------------------------------------------------------------ what is shown

    def text(self, row: Example) -> str:
        """What `messages` makes the chat from: the row's text, or the teacher's turns as JSON."""
        if self.teacher is None:
            return row.text
        return json.dumps(self.teacher.turns(self._turns(row.text), row), ensure_ascii=False)

    def messages(self, text: str, tokenizer: Tokenizer | None = None) -> list[Turn]:
        """The chat, in which no text spells an added token of the tokenizer."""
        if self.teacher is None:
            return self._turns(text, tokenizer)
        return [{**turn, "content": harmless(turn["content"], tokenizer)} for turn in json.loads(text)]

    def _turns(self, text: str, tokenizer: Tokenizer | None = None) -> list[Turn]:
        turns = json.loads(text) if self.conversations else [{"role": "user", "content": text}]
        if self.system:
            turns = [{"role": "system", "content": self.system}, *turns]
        turns = [{**turn, "content": harmless(turn["content"], tokenizer)} for turn in turns]
        if self.labels:
            turns[-1]["content"] = self.fixed + turns[-1]["content"].strip()
        return turns

    def plain(self, messages: Sequence[Turn]) -> str:
        """The chat and the prefill for a model without a chat template: a single turn, or turns with their roles."""
        if len(messages) == 1:
            content = messages[0]["content"]
            return f"{content}\n\nAnswer: {self.prefill}".rstrip(" ") if self.labels else content + self.prefill
        turns = [f"{turn['role']}: {turn['content']}" for turn in messages]
        return "\n\n".join([*turns, f"assistant: {self.prefill}".rstrip(" ")])

    def render(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """The token ids that the model continues: chat template, messages, prefill."""
        return self.encode(tokenizer, self.messages(text, tokenizer))

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Turn]) -> list[int]:
        """The token ids of messages and prefill; if too many and `too_long` is truncate, the longest turn is cut."""
        ids = self._encode(tokenizer, messages)
        most = self.max_prompt_tokens
        while most is not None and len(ids) > most and self.too_long == "truncate":
            longest = max(range(len(messages)), key=lambda i: len(messages[i]["content"]))
            content = messages[longest]["content"]
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
            messages = [*messages[:longest], {**messages[longest], "content": kept}, *messages[longest + 1 :]]
            ids = self._encode(tokenizer, messages)
        return ids

    def _encode(self, tokenizer: Tokenizer, messages: Sequence[Turn]) -> list[int]:
        chat: Any = tokenizer
        template = _template(getattr(chat, "chat_template", None))
        if template is None:
            ids = list(tokenizer.encode(self.plain(messages)))
            # Some tokenizers append an end token, after which nothing can be generated.
            closed = len(ids) > 1 and ids[-1] == getattr(chat, "eos_token_id", None)
            return ids[:-1] if closed else ids
        options = {"enable_thinking": self.thinking} if "enable_thinking" in template else {}
        try:
            opened: str = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # a template is a program in a sandbox, and may raise anything
            roles = f"turns of {', '.join(turn['role'] for turn in messages)}"
            raise UsageError(
                "the model's chat template cannot be used",
                got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                why="it comes with the tokenizer, and transformers runs it in a sandbox",
                instead=f"a model whose template takes {roles if len(messages) > 1 else 'one turn of a user'}; or "
                "correct chat_template.jinja beside it",
            ) from None
        # The template has already written the special tokens.
        return list(tokenizer.encode(opened + self.prefill, add_special_tokens=False))

    def prefix(self, tokenizer: Tokenizer) -> list[int] | None:
        """The longest token prefix that the prompts of different texts have in common; None: known only from the texts.

        It is computed, not assumed: the fixed part need not end at a token boundary.
        """
        if not self.labels or self.teacher is not None:
            return None
        shared: list[int] | None = None
        for text in _PROBES:
            ids = self.render(tokenizer, text)
            shared = ids if shared is None else shared[: shared_length(shared, ids)]
        return shared or []

    # ------------------------------------------------------------------------------------------------ the response

    def golds(self, rows: Iterable[Example]) -> list[str]:
        """All golds that right responses to `rows` are made from: all labels, or the references to train on."""
        return [*self.labels] or list(dict.fromkeys(row.label for row in rows))

    def gold_response(self, gold: str) -> str:
        """The right response after the prefill, e.g. ``hate"}``."""
        if not self.labels:
            return gold.removeprefix(self.prefill)
        if gold not in self.labels:
            raise UsageError("not a label of this prompt", got=repr(gold), instead=", ".join(self.labels))
        return _answer(gold).removeprefix(self.prefill)

    def closed(self, response: str) -> bool:
        """Whether nothing generated after this response counts: its JSON is complete, or it has a stop string."""
        if not self.labels:
            return any(text in response for text in self.stop)
        answer = self.prefill + response
        start = answer.find("{")
        if start < 0 or "}" not in answer:
            return False
        try:
            json.JSONDecoder().raw_decode(answer, start)
        except (json.JSONDecodeError, RecursionError):
            return False
        return True

    def parse(self, response: str) -> str | None:
        """What is judged of a response: its label, None if it has no legal one; or its text without thinking."""
        if self.labels:
            return parse_label(self.prefill + response, self.labels)
        for text in self.stop:
            response = response.partition(text)[0]
        if self.thinking:
            response = response.rpartition(_THOUGHT)[2] if _THOUGHT in response else ""
        return (self.prefill + response).strip()


def _answer(label: str) -> str:
    return json.dumps({"label": label}, ensure_ascii=False)


def _template(template: object) -> str | None:
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def harmless(text: str, tokenizer: Any) -> str:
    """The text with a space in every added token of the tokenizer that it spells, which could end the turn.

    Added tokens without a name count too: many chat templates mark turns with such tokens. A lone surrogate, which no
    tokenizer can encode, is replaced.
    """
    text = SURROGATE.sub("\ufffd", text)
    if tokenizer is None:
        return text
    tokens, normalized = _added_tokens(tokenizer, len(tokenizer) if isinstance(tokenizer, Sized) else 0)
    for _ in range(8):  # a rest or a space can make another token
        if tokens.search(text) is None:
            if tokens.search(normal := normalized(text)) is None:
                break
            text = normal
        text = tokens.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
    return text


@lru_cache(maxsize=4)
def _added_tokens(tokenizer: Any, size: int) -> tuple[re.Pattern[str], Callable[[str], str]]:
    """A pattern of the added tokens, and the tokenizer's normalisation, after which it may look for them."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    normalized: Callable[[str], str] = str if normalizer is None else normalizer.normalize_str
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    contents = {*map(str, added), *getattr(tokenizer, "all_special_tokens", ())}
    contents = {token.strip() for content in contents for token in (content, normalized(content))}
    tokens = sorted((re.escape(token) for token in contents if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(tokens) or "(?!)"), normalized


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
