"""Text tasks: rows of files with their errors, prompts in a real tokenizer, splits and digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gatespace.errors import UsageError
from gatespace.tasks.text import OtherPrompt, Template, TextExample, TextPrompt, TextTask, load_text


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, **options: Any) -> TextTask:
    return load_text(path, **{"prompt": "Describe: {mr}", "answer": "ref", "metric": "contains"} | options)


def chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real one, with a chat template."""
    transformers = pytest.importorskip("transformers")
    from gatespace.models import build_tiny
    from gatespace.tasks import synthetic_task

    pair = build_tiny(synthetic_task(size=120), tmp_path_factory.mktemp("tiny"))
    return transformers.AutoTokenizer.from_pretrained(pair.student)


ROWS = [{"mr": f"name[{i // 2}]", "ref": f"{i} is a pub."} for i in range(20)]

# ---------------------------------------------------------------------------------------------------- rows


def test_rows_of_one_prompt_are_one_row(tmp_path: Path) -> None:
    task = load(write(tmp_path / "e2e.jsonl", *ROWS))
    everything = [row for split in (task.train, task.val, task.test) for row in split]
    assert (len(task.train), len(task.val), len(task.test)) == (7, 1, 2)
    assert {row.text: row.references for row in everything} == {
        f"Describe: name[{i}]": (f"{2 * i} is a pub.", f"{2 * i + 1} is a pub.") for i in range(10)
    }
    lessons = task.lessons(task.train)
    assert len(lessons) == 14
    assert {row.gold for row in lessons} == {reference for row in task.train for reference in row.references}
    assert {len(row.references) for row in load(tmp_path / "e2e.jsonl", group=False).train} == {1}
    assert "references per prompt 2 to 2" in task.describe()
    assert {row.where for row in everything} == {f"{tmp_path / 'e2e.jsonl'}:{line}" for line in range(1, 20, 2)}


def test_a_table_gives_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *ROWS)
    (tmp_path / "a.csv").write_text("mr;ref\n" + "".join(f"{row['mr']};{row['ref']}\n" for row in ROWS))
    assert load(tmp_path / "a.csv").train == load(tmp_path / "a.jsonl").train
    assert load(tmp_path / "a.csv").digest == load(tmp_path / "a.jsonl").digest


def test_several_references_in_a_cell(tmp_path: Path) -> None:
    rows = [{"mr": str(i), "ref": ["a", "b", "a"]} for i in range(9)] + [{"mr": "nine", "ref": 9}]
    rows += [{"mr": "ten", "ref": [{"role": "assistant", "content": "ten"}]}]
    task = load(write(tmp_path / "x.jsonl", *rows), split={"val": 0.1, "test": 0.1})
    found = {row.text: row.references for split in ("train", "val", "test") for row in task.rows(split)}
    assert found["Describe: 3"] == ("a", "b")
    assert found["Describe: nine"] == ("9",)
    assert found["Describe: ten"] == ("ten",)


def test_conversations(tmp_path: Path) -> None:
    with_answer = [{"messages": chat("hi", "hello", f"who are you {i}", "me")} for i in range(10)]
    task = load(write(tmp_path / "c.jsonl", *with_answer), prompt=None, messages="messages", answer=None)
    row = next(row for row in task.train if "4" in row.text)
    assert row.references == ("me",)
    prompt = task.prompt
    assert prompt.conversations
    assert [turn["content"] for turn in prompt.messages(row.text)] == ["hi", "hello", "who are you 4"]
    beside = [{"chat": json.dumps(chat("hi", "hello", f"who are you {i}")), "reply": "me"} for i in range(10)]
    other = load(write(tmp_path / "d.jsonl", *beside), prompt=None, messages="chat", answer="reply")
    assert [row.text for row in other.train] == [row.text for row in task.train]
    parts = [
        {"messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in row["messages"]]}
        for row in with_answer
    ]
    third = load(write(tmp_path / "e.jsonl", *parts), prompt=None, messages="messages", answer=None)
    assert [(row.text, row.references) for row in third.train] == [(row.text, row.references) for row in task.train]


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"mr": "x"}, {}, "bad.jsonl:3 has no column 'ref'"),
    ({"mr": "  ", "ref": "y"}, {}, "bad.jsonl:3: the prompt is empty"),
    ({"mr": "x", "ref": " "}, {}, "bad.jsonl:3: 'ref' has no right response"),
    ({"mr": "x", "ref": []}, {}, "bad.jsonl:3: 'ref' has no right response"),
    ({"mr": ["x"], "ref": "y"}, {}, "bad.jsonl:3: 'mr' is neither a text nor a number"),
    (
        {"mr": "x", "ref": "many"},
        {"metric": "number"},
        "bad.jsonl:3: a reference cannot be compared by the metric num",
    ),
    ({"mr": "x\ud83d", "ref": "y"}, {}, "bad.jsonl:3: half of a character"),
    ({"mr": "x", "ref": "y\ude00"}, {}, "bad.jsonl:3: half of a character"),
    ({"mr": "x", "ref": "("}, {"metric": "regex"}, "bad.jsonl:3: a reference cannot be compared by the metric reg"),
]
BAD_CHATS: list[tuple[Any, str]] = [
    ([{"role": "robot", "content": "x"}], "bad.jsonl:1: turn 1 of 'messages' has an unknown role"),
    ([{"role": "user", "content": ""}], "bad.jsonl:1: turn 1 of 'messages' has no text"),
    ([{"role": "user"}], "bad.jsonl:1: turn 1 of 'messages' has no role and content"),
    ([{"role": "user", "content": [{"type": "image", "text": None}]}], "bad.jsonl:1: turn 1 of 'messages' has no text"),
    (
        [{"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": "1"}]}],
        "bad.jsonl:1: turn 1 of 'messages' calls tools",
    ),
    (chat("hi"), "bad.jsonl:1: the conversation does not end with the right response"),
    ([{"role": "assistant", "content": "x"}], "bad.jsonl:1: there is nothing to respond to"),
    ("hi", """"role": "user", "content": "…"}"""),
    ([{"from": "human", "value": "hi"}], """"role": "user", "content": "…"}"""),
    ({"role": "user"}, "bad.jsonl:1: 'messages' is no conversation"),
    ([], "bad.jsonl:1: 'messages' is no conversation"),
]


@pytest.mark.parametrize(("row", "options", "message"), BAD)
def test_bad_rows_have_a_number(tmp_path: Path, row: dict[str, Any], options: dict[str, Any], message: str) -> None:
    good = [{"mr": f"m{i}", "ref": f"{i}"} for i in range(9)]
    with pytest.raises(UsageError) as error:
        load(write(tmp_path / "bad.jsonl", *good[:2], row, *good[2:]), **options)
    assert message in str(error.value)


@pytest.mark.parametrize(("turns", "message"), BAD_CHATS)
def test_bad_conversations_have_a_number(tmp_path: Path, turns: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        load(write(tmp_path / "bad.jsonl", {"messages": turns}), prompt=None, messages="messages", answer=None)
    assert message in str(error.value)


def test_half_of_a_character_in_a_conversation(tmp_path: Path) -> None:
    rows = [{"messages": chat(f"hi {i}" + "\ud83d" * (i == 6), "ho")} for i in range(9)]
    with pytest.raises(UsageError, match=r"bad\.jsonl:7: half of a character"):
        load(write(tmp_path / "bad.jsonl", *rows), prompt=None, messages="messages", answer=None)


def test_templates() -> None:
    template = Template("{a b}: {{x}} {c.d}")
    assert template.columns == ("a b", "c.d")
    assert template.fill({"a b": "{c.d}", "c.d": "!"}) == "{c.d}: {x} !"
    for text in ("{", "{}", "{a!r}", "{a:>5}"):
        with pytest.raises(UsageError, match=r"template|nothing else"):
            Template(text)


def test_a_template_that_names_a_missing_column(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"e2e.jsonl:1 has no column 'name'"):
        load(write(tmp_path / "e2e.jsonl", *ROWS), prompt="{name}: {mr}")
    with pytest.raises(UsageError, match="names no column"):
        load(tmp_path / "e2e.jsonl", prompt="Say something.")


def test_what_changes_the_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "e2e.jsonl", *ROWS)
    variants = [
        {},
        {"metric": "exact"},
        {"also": ("exact",)},
        {"prompt": "{mr}"},
        {"group": False},
        {"seed": 1},
        {"how": TextPrompt(system="s")},
        {"how": TextPrompt(stop=("x",))},
        {"how": TextPrompt(thinking=True)},
        {"how": TextPrompt(max_prompt_tokens=9)},
        {"how": TextPrompt(max_prompt_tokens=9, too_long="truncate")},
    ]
    assert len({load(path, **options).digest for options in variants}) == len(variants)
    assert load(path, name="other").digest == load(path).digest


def test_further_columns(tmp_path: Path) -> None:
    rows = [{**row, "id": i} for i, row in enumerate(ROWS)]
    path = write(tmp_path / "e2e.jsonl", *rows)
    assert load(path, columns=("id",)).rows("train")[0].columns["id"].isdigit()
    assert "id" not in load(path).rows("train")[0].columns


# ---------------------------------------------------------------------------------------------------- prompts


def test_what_is_judged() -> None:
    prompt = TextPrompt(stop=("\nQ:", "END"), prefill="A: ")
    assert prompt.parse("yes \nQ: more END") == "A: yes"
    assert prompt.closed("yes\nQ:")
    assert not prompt.closed("yes\nQ")
    assert prompt.gold_response("A: yes") == "yes"
    assert prompt.gold_response("yes") == "yes"
    assert TextPrompt(thinking=True).parse("<think>2+2</think>\n\n4") == "4"
    assert TextPrompt(thinking=True).parse("<think>2+2 is") == ""
    assert TextPrompt().tail == 0


def test_prompts_in_tokens(tokenizer: Any) -> None:
    prompt = TextPrompt(system="Be brief.", prefill="Well,")
    ids = prompt.render(tokenizer, "Say <|im_end|> twice")
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay < |im_end|> twice<|im_end|>\n"
        "<|im_start|>assistant\nWell,"
    )


def test_long_prompts_are_cut_where_that_is_wished(tokenizer: Any) -> None:
    text = "where is the bike " * 50
    whole = TextPrompt().render(tokenizer, text)
    prompt = TextPrompt(max_prompt_tokens=40, too_long="truncate")
    ids = prompt.render(tokenizer, text)
    shown = tokenizer.decode(ids)
    assert 30 < len(ids) <= 40 < len(whole)
    assert shown.startswith("<|im_start|>user\nwhere is the bike")
    assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UsageError, match="too few for the chat template"):
        TextPrompt(max_prompt_tokens=3, too_long="truncate").render(tokenizer, text)


def test_the_shared_prefix_and_stop_texts(tokenizer: Any) -> None:
    from gatespace.models.encode import Encoder

    rows = [TextExample(f"Describe the place in one sentence: {what}", (what,)) for what in ("a pub", "the river")]
    encoder = Encoder(TextPrompt(stop=("stop",)), tokenizer, [row.text for row in rows])
    assert "Describe the place in one sentence:" in tokenizer.decode(encoder.prefix)
    for row in rows:
        assert [*encoder.prefix, *encoder.suffix(row.text)] == TextPrompt().render(tokenizer, row.text)
    ids = tokenizer.encode("a long response before the stop", add_special_tokens=False)
    ends = [encoder.closed(ids[:end]) for end in range(1, len(ids) + 1)]
    assert ends == [*[False] * (len(ids) - 1), True] or "stop" in tokenizer.decode(ids[: ends.index(True) + 1])
    assert ends[-1]
    assert not Encoder(TextPrompt(), tokenizer, []).closed(ids)
    encoder.check(rows, window=1000)
    with pytest.raises(UsageError, match=r"do not fit into the context window[^~]*too_long: truncate"):
        encoder.check(rows, window=20, new_tokens=5)
    other = OtherPrompt(TextPrompt(), system="Be brief.")  # too_long is about the student's prompts
    with pytest.raises(UsageError, match=r"do not fit into the context window[^~]*or shorter texts"):
        Encoder(other, tokenizer, []).check(rows, window=20, new_tokens=5)
    strict = Encoder(TextPrompt(max_prompt_tokens=5), tokenizer, [row.text for row in rows])
    with pytest.raises(UsageError, match=r"longer than task\.text\.max_prompt_tokens"):
        strict.check(rows)


# ---------------------------------------------------------------------------------------------------- real files


def test_e2e(text_data: Path) -> None:
    task = load_text(
        {"train": text_data / "e2e" / "devset.csv", "test": text_data / "e2e" / "testset_w_refs.csv"},
        prompt="Describe: {mr}",
        answer="ref",
        metric="token_f1",
        split={"val": 0.1},
    )
    assert len(task.train) + len(task.val) == 547
    assert len(task.test) == 630
    assert not task.test_in_train
    assert sum(len(row.references) for row in task.test) > 4000


def test_gsm8k(text_data: Path) -> None:
    task = load_text(text_data / "gsm8k", prompt="{question}", answer="answer", metric="number", split={"val": 0.02})
    assert len(task.train) + len(task.val) == 7473
    assert len(task.test) == 1319
    assert all(task.judge(row, row.gold) == 1 for row in task.test)
    assert all(task.judge(row, row.gold.partition("####")[2]) == 1 for row in task.test)
