"""Prompts and responses as ids: what is shared, what is a text's own, and when an answer is whole."""

from __future__ import annotations

import copy
import json
from typing import Any, ClassVar

import pytest

from gatespace.errors import RunError, UsageError
from gatespace.models import Model
from gatespace.models.encode import Encoder
from gatespace.tasks import Prompt, Task
from gatespace.tasks.prompt import Tokenizer

ODD = ["a", "@user you", "😀 wow", '"q"', "two\nlines", "x" * 200, "(", "7 days", "文字"]


@pytest.fixture
def texts(task: Task) -> list[str]:
    return [row.text for row in task.train[:40]] + ODD


@pytest.mark.parametrize("brief", [True, False])
@pytest.mark.parametrize("prefill", ['{"label": "', ""])
def test_prefix_and_suffix_are_the_whole_prompt(
    brief: bool, prefill: str, task: Task, student: Model, texts: list[str]
) -> None:
    prompt = Prompt.of(task, prefill=prefill, brief=brief)
    encoder = Encoder(prompt, student.tokenizer, texts)
    # nearly all of the fixed part is shared
    fixed = student.tokenizer.encode(prompt.fixed.rstrip(), add_special_tokens=False)
    assert len(encoder.prefix) >= len(fixed) - 1
    for text in texts:
        assert encoder.suffix(text)
        assert encoder.prefix + encoder.suffix(text) == prompt.render(student.tokenizer, text)


def test_nothing_is_shared_on_demand(task: Task, student: Model, texts: list[str]) -> None:
    prompt = Prompt.of(task)
    encoder = Encoder(prompt, student.tokenizer, texts, share=False)
    assert encoder.prefix == []
    assert encoder.suffix(texts[0]) == prompt.render(student.tokenizer, texts[0])
    assert encoder.suffix("never seen") == prompt.render(student.tokenizer, "never seen")


class Counting(Prompt):
    """A prompt that knows how often it was rendered."""

    rendered: ClassVar[list[str]] = []

    def render(self, tokenizer: Tokenizer, text: str) -> list[int]:
        self.rendered.append(text)
        return super().render(tokenizer, text)


def test_an_equal_tokenizer_finds_its_renderings(task: Task, student: Model, texts: list[str]) -> None:
    prompt = Counting(Prompt.of(task).fixed, task.labels)

    def made(tokenizer: Any, prompt: Prompt = prompt) -> tuple[Encoder, set[str]]:
        Counting.rendered.clear()
        encoder = Encoder(prompt, tokenizer, texts)
        return encoder, {text for text in Counting.rendered if text in texts}

    equal = copy.deepcopy(student.tokenizer)
    other, marked = copy.deepcopy(equal), copy.deepcopy(equal)
    other.chat_template = "{{ messages[0]['content'] }} now:"
    marked.add_tokens(["you"])
    first, rendered = made(student.tokenizer)
    assert rendered == set(texts)
    second, rendered = made(equal)
    assert rendered <= set(ODD)  # some of them are among the probes that find the prefix
    assert len(rendered) < len(ODD)
    assert (second.prefix, [*map(second.suffix, texts)]) == (first.prefix, [*map(first.suffix, texts)])
    for tokenizer, where in ((other, prompt), (marked, prompt), (equal, Counting("Else: ", task.labels))):
        encoder, rendered = made(tokenizer, where)
        assert rendered == set(texts)
        for text in texts:
            assert encoder.prefix + encoder.suffix(text) == Prompt.render(where, tokenizer, text)


class Letters:
    """A tokenizer whose ids are the letters; no chat template."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


class Cut(Prompt):
    """A prompt that is the text alone."""

    def render(self, tokenizer: object, text: str) -> list[int]:
        return [ord(letter) for letter in "shared" + text]


def test_every_row_has_a_token_of_its_own() -> None:
    prompt = Cut("", ("x", "y"))
    assert Encoder(prompt, Letters(), []).prefix == [ord(letter) for letter in "shared"]
    encoder = Encoder(prompt, Letters(), ["one", ""])
    assert encoder.suffix("") == [ord("d")]
    assert encoder.suffix("one") == [ord(letter) for letter in "done"]
    # an empty text that was not named beforehand has none
    with pytest.raises(RunError, match="does not begin like the others"):
        Encoder(prompt, Letters(), ["one"]).suffix("")


def test_texts_that_were_not_named(task: Task, student: Model, texts: list[str]) -> None:
    prompt = Prompt.of(task)
    encoder = Encoder(prompt, student.tokenizer, texts)
    for text in ("never seen before", "¿qué?"):
        assert encoder.prefix + encoder.suffix(text) == prompt.render(student.tokenizer, text)


def test_a_text_that_begins_unlike_the_others() -> None:
    class Joined(Cut):
        def render(self, tokenizer: object, text: str) -> list[int]:
            return [ord(letter) for letter in (text if text.startswith("!") else "shared" + text)]

    encoder = Encoder(Joined("", ("x", "y")), Letters(), ["one"])
    for _ in range(2):  # the second time, too
        with pytest.raises(RunError, match="give the encoder every text"):
            encoder.suffix("!other")
    named = Encoder(Joined("", ("x", "y")), Letters(), ["one", "!other"])
    assert named.prefix == []
    assert named.suffix("!other") == [ord(letter) for letter in "!other"]


def test_gold_answers(task: Task, student: Model) -> None:
    prompt = Prompt.of(task)
    encoder = Encoder(prompt, student.tokenizer, [])
    end = student.turn_end
    assert end is not None
    for label in task.labels:
        ids = encoder.gold(label, end)
        assert ids[-1] == end
        assert ids[:-1] == encoder.gold(label)
        text = encoder.decode(ids)
        assert json.loads(prompt.prefill + text) == {"label": label}
        assert encoder.closed(ids)
        assert encoder.closed(ids[:-1])
        # whole only when the last token of it is there
        assert not any(encoder.closed(ids[:stop]) for stop in range(len(ids) - 1))
    with pytest.raises(UsageError, match="not a label"):
        encoder.gold("no such label")


def test_decoded_text_has_no_special_tokens(task: Task, student: Model) -> None:
    encoder = Encoder(Prompt.of(task), student.tokenizer, [])
    ids = student.tokenizer.encode("joy<|im_end|><|endoftext|>", add_special_tokens=False)
    assert encoder.decode(ids) == "joy"
    assert encoder.decode([]) == ""
