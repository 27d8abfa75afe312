"""Parser of responses: the label in a response to the prompt of `gatespace.tasks.prompt`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache

SCAN_LIMIT = 200
"""Without a legal label in JSON, a label must be within this many characters from the start."""

# White space, underscores, hyphens and dashes of all kinds, and zero-width characters: any of them may separate the
# words of a label.
_SEPARATOR = r"[\s_\-\u2010-\u2015\u2212\u00ad\u200b-\u200d\u2060\ufeff]"
_INNER = re.compile(rf"(?<!{_SEPARATOR})(?<!^){_SEPARATOR}+(?!{_SEPARATOR}|\Z)")
# The bound on the length keeps the search linear in the text; no label is that long.
_JSON = re.compile(r'"label"\s{0,20}:\s{0,20}("(?:[^"\\]|\\.){0,400}")', re.IGNORECASE | re.DOTALL)


def label_key(label: str) -> str:
    """The same key for all spellings of a label.

    Examples:
        >>> label_key("not-hate") == label_key("Not_Hate") == label_key(" not hate ")
        True
    """
    return _INNER.sub(" ", label.casefold().strip().strip("_"))


def parse_label(text: str, labels: Sequence[str]) -> str | None:
    """The label in `text`, or None if there is no legal one. Never raises.

    The first ``"label": "..."`` counts. If there is none, or its content is not a legal label, the first 200 characters
    are scanned for a legal label as whole words, the longest label first, and among equally long ones the first in the
    text. Case does not matter, nor whether spaces, underscores or hyphens join the words of a label.

    Args:
        text: What the model generated, with the prefill in front of it if there was one.
        labels: The legal labels. The answer is one of them, spelled as here.

    Examples:
        >>> parse_label('{"label": "Not Hate"}', ["not-hate", "hate"])
        'not-hate'
        >>> parse_label("I would say: hate.", ["not-hate", "hate"])
        'hate'
        >>> parse_label('{"label": "hateful"}', ["not-hate", "hate"]) is None
        True
    """
    legal, patterns = _compiled(tuple(labels))
    if match := _JSON.search(text):
        label = legal.get(label_key(_unquoted(match[1])))
        if label is not None:
            return label
    # Case folding is per character: the folded start of a text is the start of the folded text.
    limit = len(text[:SCAN_LIMIT].casefold())
    # Two more characters, to see what follows a label at the limit: a cut "hateful" is not "hate".
    folded = text[: SCAN_LIMIT + 2].casefold()
    best: tuple[int, int, str] | None = None
    for pattern, length, label in patterns:
        if best is not None and length < -best[0]:
            break
        match = pattern.search(folded)
        if match and match.end() <= limit and (best is None or match.start() < best[1]):
            best = (-length, match.start(), label)
    return best[2] if best else None


@lru_cache(maxsize=64)
def _compiled(labels: tuple[str, ...]) -> tuple[dict[str, str], tuple[tuple[re.Pattern[str], int, str], ...]]:
    legal: dict[str, str] = {}
    for label in labels:
        if key := label_key(label):
            legal.setdefault(key, label)
    longest_first = sorted(legal.items(), key=lambda item: -len(item[0]))
    return legal, tuple((_pattern(key), len(key), label) for key, label in longest_first)


def _pattern(key: str) -> re.Pattern[str]:
    words = rf"{_SEPARATOR}+".join(re.escape(word) for word in key.split(" "))
    # A hyphen joins: neither "non-hate" nor "hate-free" says "hate". A long dash ends a word: "hate—because".
    joint = r"[\-\u2010-\u2013\u2212\u00ad\u200b-\u200d\u2060\ufeff]"
    return re.compile(rf"(?<!\w)(?<!\w{joint}){words}(?!\w)(?!{joint}\w)")


def _unquoted(quoted: str) -> str:
    try:
        value = json.loads(quoted, strict=False)
    except ValueError:
        return quoted[1:-1]
    return value if isinstance(value, str) else quoted[1:-1]
