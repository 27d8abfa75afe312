"""The prompt of a task: what the model is shown, and how its response begins. `parser` is its counterpart.

Everything that is the same for all texts comes first and the text last, so that the shared prefix, whose KV cache is
computed once, is as long as possible.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from gatespace.errors import UsageError
from gatespace.tasks.data import AnyExample, Task
from gatespace.tasks.parser import parse_label

PREFILL = '{"label": "'
"""The assistant's turn starts with this, so that the first decoded token is the first token of a label."""

SURROGATE = re.compile("[\ud800-\udfff]")

# Different kinds of first characters, so that the prefix these renderings share is shared by all.
_PROBES = ("a", "Zebra", "@user", "7 days", '"quoted"', "#tag", "…", "😀", "(", "é", ":", "文")


class Tokenizer(Protocol):
    """Interface of a tokenizer. A chat template is used if there is one; Hugging Face tokenizers fit."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`."""
        ...


class AnyPrompt(ABC):
    """Interface of prompts: what a model is shown of a row, where its response ends, and how it is parsed.

    A prompt is a value: equal ones render the same.
    """

    prefill: str
    """How the assistant's turn begins; "" leaves all of it to the model."""
    labels: tuple[str, ...]
    """The legal labels; none if responses are free text."""
    thinking: bool = False
    """Whether a model that can think before it responds does so."""
    closes: ClassVar[bool]
    """Whether a right response is complete by itself, before the token that ends the turn."""
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt; None: any number."""
    shorter: ClassVar[str] = "shorter texts"
    """What makes long prompts fit, for errors."""
    tail: int | None = None
    """`closed` needs only this many last tokens of a response; None: all of it."""

    def text(self, row: Any) -> str:
        """What `messages` makes the chat from."""
        found: str = row.text
        return found

    @abstractmethod
    def messages(self, text: str, tokenizer: Tokenizer | None = None) -> list[dict[str, str]]:
        """The chat for a row's text, in which no text spells an added token of the tokenizer."""

    @abstractmethod
    def plain(self, messages: Sequence[dict[str, str]]) -> str:
        """The chat and the prefill for a model without a chat template."""

    @abstractmethod
    def prefix(self, tokenizer: Tokenizer) -> list[int] | None:
        """The tokens that the prompts of all texts begin with; None: known only from the texts."""

    @abstractmethod
    def golds(self, rows: Iterable[AnyExample]) -> list[str]:
        """All golds that right responses to `rows` are made from."""

    @abstractmethod
    def gold_response(self, gold: str) -> str:
        """The right response after the prefill."""

    @abstractmethod
    def closed(self, response: str) -> bool:
        """Whether nothing generated after this response counts."""

    @abstractmethod
    def parse(self, response: str) -> str | None:
        """The parsed response, for the task to judge; None if it has nothing legal."""

    def render(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """The token ids that the model continues: chat template, messages, prefill."""
        return self.encode(tokenizer, self.messages(text, tokenizer))

    def encode(self, tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
        """The token ids of messages and prefill."""
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
            raise UsageError(
                "the model's chat template cannot be used",
                got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                why="it comes with the tokenizer, and transformers runs it in a sandbox",
                instead=f"a model whose template takes {_turns(messages)}; or correct chat_template.jinja beside it",
            ) from None
        # The template has already written the special tokens.
        return list(tokenizer.encode(opened + self.prefill, add_special_tokens=False))


@dataclass(frozen=True)
class Prompt(AnyPrompt):
    """The prompt of a task with labels.

    Args:
        fixed: What precedes every text.
        labels: The legal labels.
        prefill: How the assistant's turn begins; "" leaves all of it to the model.
    """

    fixed: str
    labels: tuple[str, ...]
    prefill: str = PREFILL

    closes = True

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
    def of(cls, task: Task, prefill: str = PREFILL, *, brief: bool = False) -> Prompt:
        """The prompt for `task`.

        Args:
            task: Gives the question, the labels and their definitions.
            prefill: How the assistant's turn begins.
            brief: Only the labels, for models trained from scratch, which cannot follow instructions.
        """
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

    def messages(self, text: str, tokenizer: Tokenizer | None = None) -> list[dict[str, str]]:
        """The chat for `text`: one user turn."""
        return [{"role": "user", "content": self.fixed + harmless(text, tokenizer).strip()}]

    def plain(self, messages: Sequence[dict[str, str]]) -> str:
        """The turn, and the start of the answer."""
        return f"{messages[0]['content']}\n\nAnswer: {self.prefill}".rstrip(" ")

    def prefix(self, tokenizer: Tokenizer, texts: Iterable[str] = ()) -> list[int]:
        """The longest token prefix that the renderings of different texts have in common.

        It is computed, not assumed: the fixed part need not end at a token boundary. `texts` are compared in addition
        to the built-in ones; with all texts of a task, every prompt begins with the result.
        """
        shared: list[int] | None = None
        for text in (*_PROBES, *texts):
            ids = self.render(tokenizer, text)
            shared = ids if shared is None else shared[: shared_length(shared, ids)]
        return shared or []

    def golds(self, rows: Iterable[AnyExample]) -> list[str]:
        """All labels, whatever `rows` have."""
        return [*self.labels]

    def gold_response(self, gold: str) -> str:
        """The right response after the prefill, e.g. ``hate"}``."""
        if gold not in self.labels:
            raise UsageError("not a label of this prompt", got=repr(gold), instead=", ".join(self.labels))
        return _answer(gold).removeprefix(self.prefill)

    def closed(self, response: str) -> bool:
        """Whether the JSON object is complete."""
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
        """The label in a response (what the model generated after the prefill), or None."""
        return parse_label(self.prefill + response, self.labels)


def _answer(label: str) -> str:
    return json.dumps({"label": label}, ensure_ascii=False)


def _template(template: object) -> str | None:
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _turns(messages: Sequence[dict[str, str]]) -> str:
    return f"turns of {', '.join(turn['role'] for turn in messages)}" if len(messages) > 1 else "one turn of a user"


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
