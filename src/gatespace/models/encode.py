"""A task's prompt in the ids of one tokenizer: what all prompts share, and what is a text's own."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from gatespace.errors import RunError
from gatespace.tasks import Prompt
from gatespace.tasks.prompt import shared_length

_KEPT = 2
"""How many pairs of prompt and tokenizer leave their renderings to later encoders of the process."""
_kept: OrderedDict[tuple[Prompt, str], dict[str, list[int]]] = OrderedDict()


class Encoder:
    """Prompts and responses as token ids.

    Args:
        prompt: The prompt of the task.
        tokenizer: A model's tokenizer, with its chat template.
        texts: Every text that will be classified; what all their prompts begin with is the shared prefix.
        share: False: the prefix is empty, and each prompt is whole.
    """

    def __init__(self, prompt: Prompt, tokenizer: Any, texts: Iterable[str], *, share: bool = True) -> None:
        self.prompt = prompt
        self.tokenizer = tokenizer
        known = _renderings(prompt, tokenizer)
        for text in (texts := list(texts)):
            if text not in known:
                known[text] = prompt.render(tokenizer, text)
        self._rendered = {text: known[text] for text in texts}
        self.prefix: list[int] = prompt.prefix(tokenizer) if share else []
        for ids in self._rendered.values():
            # One token at least is a row's own: it is where the first token of the response is predicted.
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

    def gold(self, label: str, end: int | None = None) -> list[int]:
        """The right response, and the id that ends it where one is given."""
        ids = self.tokenizer.encode(self.prompt.gold_response(label), add_special_tokens=False)
        return [*ids, *([] if end is None else [end])]

    def decode(self, ids: Sequence[int]) -> str:
        """A response as text, without the tokens that end it."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def closed(self, ids: Sequence[int]) -> bool:
        """Whether the response is complete: nothing that is generated after it counts."""
        return self.prompt.closed(self.decode(ids))


def _renderings(prompt: Prompt, tokenizer: Any) -> dict[str, list[int]]:
    """Text → ids, as encoders before this one have rendered them with the same prompt and an equal tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # what it does is not known by its content
        return {}
    traits = (type(tokenizer).__qualname__, tokenizer.chat_template, tokenizer.special_tokens_map)
    key = (prompt, hashlib.sha256(f"{traits}{backend.to_str()}".encode("utf-8", "surrogatepass")).hexdigest())
    found = _kept.setdefault(key, {})
    _kept.move_to_end(key)
    while len(_kept) > _KEPT:
        _kept.popitem(last=False)
    return found
