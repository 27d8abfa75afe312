"""The parser: a table of what models write, and fuzzing."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatespace.tasks import parse_label
from gatespace.tasks.parser import SCAN_LIMIT, label_key

HATE = ("not-hate", "hate")
EMOTION = ("anger", "joy", "optimism", "sadness")
IRONY = ("ironic", "non_ironic")


@pytest.mark.parametrize(
    "text, labels, label",
    [
        # JSON
        ('{"label": "hate"}', HATE, "hate"),
        ('{"label": "not-hate"}', HATE, "not-hate"),
        ('{"label":"not hate"}', HATE, "not-hate"),
        ('{"label" : "NOT_HATE" }', HATE, "not-hate"),
        ('{"Label": " Joy "}', EMOTION, "joy"),
        ('Sure! ```json\n{\n  "label": "joy"\n}\n```', EMOTION, "joy"),
        ('{"label": "joy"} {"label": "anger"}', EMOTION, "joy"),
        ('optimism? {"label": "joy"}', EMOTION, "joy"),
        ('{"label": "non_ironic"}', IRONY, "non_ironic"),
        ('{"label": "non-ironic"}', IRONY, "non_ironic"),
        ('{"label": "not\\u002dhate"}', HATE, "not-hate"),
        ("x" * 300 + '{"label": "joy"}', EMOTION, "joy"),
        # an illegal label in JSON: the scan decides
        ('{"label": "hateful"}', HATE, None),
        ('{"label": "happiness"} which is joy', EMOTION, "joy"),
        ('{"label": "happiness"} {"label": "joy"}', EMOTION, "joy"),
        ('{"label": "very sad, sadness"}', EMOTION, "sadness"),
        ('{"label": ""}', HATE, None),
        # no JSON, or JSON that breaks off
        ('{"label": "not-hate', HATE, "not-hate"),
        ('{"label": "hate', HATE, "hate"),
        ("{'label': 'joy'}", EMOTION, "joy"),
        ("not hate", HATE, "not-hate"),
        ("Not_Hate.", HATE, "not-hate"),
        ("This is not   hate at all", HATE, "not-hate"),
        ("this is hate, not love", HATE, "hate"),
        ("hate—because of the insult", HATE, "hate"),
        ("- joy", EMOTION, "joy"),
        ("**Joy**", EMOTION, "joy"),
        ("joy or optimism", EMOTION, "optimism"),  # the longest first
        ("positive, not negative", ("negative", "positive"), "positive"),  # equally long: the first in the text
        ("is it offensive or not? offensive.", ("not-offensive", "offensive"), "offensive"),
        ("non_ironic", IRONY, "non_ironic"),
        # parts of words are not labels
        ("hateful", HATE, None),
        ("nothate", HATE, None),
        ("non-hate", HATE, None),
        ("hate-free", HATE, None),
        ("enjoyable", EMOTION, None),
        ("", HATE, None),
        ("no idea", HATE, None),
        # the first 200 characters, and what stands right behind them
        ("x" * (SCAN_LIMIT - 4) + " hate", HATE, None),
        ("x" * (SCAN_LIMIT - 5) + " hate", HATE, "hate"),
        ("x" * (SCAN_LIMIT - 5) + " hateful", HATE, None),
        ("x" * (SCAN_LIMIT - 5) + " hate-free", HATE, None),
        # labels of other kinds
        ("-1", ("-1", "0", "1"), "-1"),
        ("score 1", ("-1", "0", "1"), "1"),
        ('{"label": "C++"}', ("C", "C++"), "C++"),
        ("C++!", ("C", "C++"), "C++"),
        ("❤", ("❤", "😍"), "❤"),
        ("Good News everyone", ("good news", "bad news"), "good news"),
    ],
)
def test_table(text: str, labels: tuple[str, ...], label: str | None) -> None:
    assert parse_label(text, labels) == label


@pytest.mark.parametrize(
    "separator", [*"-_ \t\n\u00a0\u2010\u2011\u2013\u2014\u2212\u00ad\u200b\ufeff", " - ", "--", "  "]
)
def test_not_hate_is_never_hate(separator: str) -> None:
    written = f"not{separator}hate"
    for text in (
        written,
        written.upper(),
        f"It is {written}.",
        f'{{"label": "{written}',
        json.dumps({"label": written}),
    ):
        assert parse_label(text, HATE) == "not-hate", repr(text)


def test_a_list_of_labels_will_do() -> None:
    assert parse_label("joy", list(EMOTION)) == "joy"


# ---------------------------------------------------------------------------------------------------- fuzz

WORDS = [
    "not",
    "hate",
    "Hate",
    "non",
    "label",
    '"label": "',
    '"',
    "{",
    "}",
    "-",
    "_",
    " ",
    "\\",
    "\\u00",
    "\n",
    "joy",
    ":",
    "a",
]
TEXTS = st.one_of(st.text(), st.text(st.characters()), st.lists(st.sampled_from(WORDS)).map("".join))
LABELS = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5).map(tuple)


@settings(max_examples=1000)
@given(TEXTS, st.sampled_from([HATE, EMOTION, IRONY]))
def test_any_text_gives_a_legal_label_or_none(text: str, labels: tuple[str, ...]) -> None:
    assert parse_label(text, labels) in (*labels, None)


@settings(max_examples=300)
@given(TEXTS, LABELS)
def test_any_labels(text: str, labels: tuple[str, ...]) -> None:
    assert parse_label(text, labels) in (*labels, None)


@settings(max_examples=1000)
@given(st.lists(st.sampled_from(WORDS)).map("".join))
def test_hate_is_read_only_where_it_stands_alone(text: str) -> None:
    """An independent statement: without the JSON form, "hate" needs a free-standing hate and no not-hate."""
    if parse_label(text, HATE) == "hate" and '"label"' not in text:
        assert not re.search(r"(?<!\w)(?<!\w-)not[\s_-]+hate(?!\w|-\w)", text[:SCAN_LIMIT], re.IGNORECASE)
        assert re.search(r"(?<!\w)(?<!\w-)hate(?!\w|-\w)", text[:SCAN_LIMIT], re.IGNORECASE)


SPELLINGS = [str, str.upper, str.title, lambda label: re.sub(r"[-_ ]", " ", label), lambda label: f"  {label}\n"]
SPELLINGS += [lambda label: re.sub(r"[-_ ]", "_", label), lambda label: re.sub(r"[-_ ]", "-", label)]


@pytest.mark.parametrize("labels", [HATE, EMOTION, IRONY, ("good news", "bad news", "open question", "open offer")])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_label_in_every_spelling(labels: tuple[str, ...], spelling: object) -> None:
    for label in labels:
        written = spelling(label)  # type: ignore[operator]
        assert label_key(written) == label_key(label)
        for text in (written, json.dumps({"label": written}), f"The answer is: {written}."):
            first = parse_label(text, labels)
            assert first == label
            assert parse_label(first, labels) == label


@pytest.mark.parametrize(
    "hostile, expected",
    [
        pytest.param('"label":"\\' * 50_000, None, id="escapes"),  # the first JSON label counts, and is not legal
        pytest.param('"label": ' * 50_000, None, id="keys"),
        pytest.param(" " * 500_000, "hate", id="blanks"),
        pytest.param('"label"' + " " * 500_000, "hate", id="blanks behind a key"),
        pytest.param("not " * 100_000, "hate", id="words"),
    ],
)
def test_long_hostile_texts(hostile: str, expected: str | None) -> None:
    """The search is linear in the text: a pattern that backtracks would take minutes over each of these."""
    assert parse_label(hostile + ' {"label": "hate"}', HATE) == expected
    assert parse_label(hostile + " hate", HATE) is None  # without JSON, only the beginning is scanned
