"""A task's prompts in the ids of one tokenizer: a shared prefix, and a suffix per text."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from gatespace.errors import RunError, UsageError
from gatespace.tasks.data import Example
from gatespace.tasks.prompt import Prompt, shared_length

_KEPT = 2
"""Number of (prompt, tokenizer) pairs whose rendered prompts later encoders of the process reuse."""
_kept: OrderedDict[tuple[Prompt, str], dict[str, list[int]]] = OrderedDict()


class Encoder:
    """Prompts and responses as token ids.

    Args:
        prompt: The prompt of the task.
        tokenizer: A model's tokenizer, with its chat template.
        texts: The texts of all rows to be prompted; what all their prompts begin with is the shared prefix.
        share: False: the prefix is empty, and suffixes are whole prompts.
    """

    def __init__(self, prompt: Prompt, tokenizer: Any, texts: Iterable[str], *, share: bool = True) -> None:
        self.prompt = prompt
        self.tokenizer = tokenizer
        known = _renderings(prompt, tokenizer)
        for text in (texts := list(texts)):
            if text not in known:
                known[text] = prompt.render(tokenizer, text)
        self._rendered = {text: known[text] for text in texts}
        self._golds: dict[str, list[int]] = {}
        start = prompt.prefix(tokenizer) if share else []
        self.prefix: list[int] = next(iter(self._rendered.values()), []) if start is None else start
        for ids in self._rendered.values():
            # At least one token stays in the suffix: it predicts the first token of the response.
            self.prefix = self.prefix[: shared_length(self.prefix, ids[:-1])]

    def suffix(self, text: str) -> list[int]:
        """The prompt for `text` after the shared prefix."""
        ids = self._rendered.get(text)
        if ids is None:
            ids = self.prompt.render(self.tokenizer, text)
            if ids[: len(self.prefix)] != self.prefix or len(ids) == len(self.prefix):
                raise RunError(
                    "a prompt does not begin like the others",
                    got=repr(text[:80]),
                    why="the shared prefix was taken from other texts",
                    instead="give the encoder every text it will see",
                )
            self._rendered[text] = ids
        return ids[len(self.prefix) :]

    def lengths(self, rows: Iterable[Example]) -> list[int]:
        """Prompt length of each row after the shared prefix."""
        return [len(self.suffix(self.prompt.text(row))) for row in rows]

    def gold(self, gold: str, end: int | None = None) -> list[int]:
        """The gold response (of a label or a reference), followed by the id `end` if given."""
        if gold not in self._golds:
            response = self.prompt.gold_response(gold)
            self._golds[gold] = list(self.tokenizer.encode(response, add_special_tokens=False))
        return [*self._golds[gold], *([] if end is None else [end])]

    def longest_gold(self, rows: Iterable[Example], end: int | None = None) -> int:
        """Tokens of the longest gold response to `rows`."""
        return max(len(self.gold(gold, end)) for gold in self.prompt.golds(rows))

    def check(self, rows: Iterable[Example], window: int | None = None, new_tokens: int = 0) -> None:
        """Raise if a prompt is longer than allowed, or leaves no room for a response in the context window."""
        most = self.prompt.max_prompt_tokens
        for row in rows:
            length = len(self.prefix) + len(self.suffix(self.prompt.text(row)))
            where = row.where or repr(row.text[:80])
            if most is not None and length > most:
                raise UsageError(
                    f"{where}: the prompt is longer than task.text.max_prompt_tokens",
                    got=f"{length} tokens, of {most}",
                    instead="a larger max_prompt_tokens, or too_long: truncate",
                )
            if window is not None and length + new_tokens > window:
                raise UsageError(
                    f"{where}: prompt and response do not fit into the context window",
                    got=f"{length} tokens of the prompt and {new_tokens} of a response, of {window}",
                    instead=f"a smaller max_new_tokens, or {self.prompt.shorter}",
                )

    def decode(self, ids: Sequence[int]) -> str:
        """A response as text, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def closed(self, ids: Sequence[int]) -> bool:
        """Whether the response is complete: nothing generated after it counts."""
        tail = self.prompt.tail
        return tail != 0 and self.prompt.closed(self.decode(ids if tail is None else ids[-tail:]))


def _renderings(prompt: Prompt, tokenizer: Any) -> dict[str, list[int]]:
    """Text → ids, as rendered by earlier encoders with the same prompt and an equal tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # its behaviour is not determined by its content
        return {}
    traits = (type(tokenizer).__qualname__, tokenizer.chat_template, tokenizer.special_tokens_map)
    key = (prompt, hashlib.sha256(f"{traits}{backend.to_str()}".encode("utf-8", "surrogatepass")).hexdigest())
    found = _kept.setdefault(key, {})
    _kept.move_to_end(key)
    while len(_kept) > _KEPT:
        _kept.popitem(last=False)
    return found
