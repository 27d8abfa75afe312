"""Your own data, labels and free text: every format, every way in which a row can be bad."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gatespace.errors import MissingExtraError, UsageError
from gatespace.tasks import Example, Task, load_table, load_text
from gatespace.tasks.read import _READERS

LABELS = ("not spam", "spam")
DEFINITIONS = {"not spam": "Wanted.", "spam": "Unwanted."}


def load(source: object, **options: object) -> Task:
    return load_table(source, **({"labels": LABELS, "definitions": DEFINITIONS} | options))  # type: ignore[arg-type]


def texts(path: Path, **options: Any) -> Task:
    return load_text(path, **{"prompt": "Describe: {mr}", "answer": "ref", "metric": "contains"} | options)


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def many(count: int) -> list[dict[str, object]]:
    return [{"text": f"mail {index}", "label": index % 2} for index in range(count)]


def chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def test_one_file_is_carved(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "mails.jsonl", many(100))
    task = load(path)
    assert (len(task.train), len(task.val), len(task.test)) == (70, 10, 20)
    assert task.name == str(path)
    assert sorted(row.text for split in ("train", "val", "test") for row in task.rows(split)) == sorted(
        f"mail {index}" for index in range(100)
    )
    assert all(row.label == LABELS[int(row.text.split()[1]) % 2] for row in task.train + task.val + task.test)
    assert task == load(str(path))
    assert task.test != load(path, carve_seed=1).test
    other = load(path, carve={"val": 0.3, "test": 0.3}, name="mails", question="Is it spam?")
    assert (len(other.train), len(other.val), len(other.test), other.name) == (40, 30, 30, "mails")
    assert other.question == "Is it spam?"


@pytest.mark.parametrize("carve", [{"val": 0.1}, {"val": 0.5, "test": 0.5}, {"val": 0.1, "tset": 0.1}])
def test_shares_are_checked(carve: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no val and no test rows"):
        load(jsonl(tmp_path / "mails.jsonl", many(20)), carve=carve)


def test_folder_and_mapping(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", many(20))
    jsonl(tmp_path / "validation.jsonl", many(4))
    (tmp_path / "README.md").write_text("about", encoding="utf-8")
    task = load(tmp_path)
    assert (len(task.train), len(task.val), len(task.test)) == (16, 4, 4)
    files = {"train": tmp_path / "train.jsonl", "val": tmp_path / "validation.jsonl", "test": tmp_path / "train.jsonl"}
    task = load(files)
    assert (len(task.train), len(task.val), len(task.test)) == (20, 4, 20)
    assert len(task.test_in_train) == 20
    for named in ({"train", "dev"}, {"test"}):
        with pytest.raises(UsageError, match="train at least"):
            load(dict.fromkeys(named, tmp_path / "train.jsonl"))
    jsonl(tmp_path / "dev.jsonl", many(4))
    with pytest.raises(UsageError, match=r"two files for val in .*\n  got: dev.jsonl and validation.jsonl"):
        load(tmp_path)
    (tmp_path / "dev.jsonl").unlink()
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(UsageError, match="no training file"):
        load(tmp_path)


@pytest.mark.parametrize("label", ["spam", "SPAM", " Spam ", 1, "1"])
def test_labels_by_string_or_index(label: object, tmp_path: Path) -> None:
    task = load(
        {split: jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": label}]) for split in ("train", "val", "test")}
    )
    assert task.train == [Example("x", "spam")]


@pytest.mark.parametrize(
    "labels, values",
    [(("no", "yes"), (0, 1)), (("0", "1"), (0, 1)), (("5", "7"), (7, 5)), (("-1", "1"), (-1,)), (("1", "0"), ("0",))],
)
def test_csv_and_jsonl_give_the_same_labels(
    labels: tuple[str, ...], values: tuple[object, ...], tmp_path: Path
) -> None:
    lines = jsonl(tmp_path / "a.jsonl", [{"text": f"mail {value}", "label": value} for value in values])
    cells = tmp_path / "a.csv"
    cells.write_text("text,label\n" + "".join(f"mail {value},{value}\n" for value in values))
    ours, theirs = (
        load(dict.fromkeys(("train", "val", "test"), path), labels=labels, definitions={}) for path in (lines, cells)
    )
    assert ours.train == theirs.train
    assert ours.digest == theirs.digest


def test_an_integer_that_is_one_label_by_its_text_and_another_by_its_place_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": "1"}, {"text": "y", "label": 1}])
    message = (
        r"a.jsonl:2: 'label' can be read as two labels\n  got: 1\n"
        r"  why: there is a label '1', and number 1 of the list of labels, from 0, is '0'\n"
        r'  instead: "1" or "0", as text'
    )
    with pytest.raises(UsageError, match=message):
        load(dict.fromkeys(("train", "val", "test"), path), labels=("1", "0"), definitions={})


def test_csv_and_tsv(tmp_path: Path) -> None:
    rows = 'id,body,kind\n1,"hello, you",spam\n2,"two\nlines ""quoted""",not_spam\n\n3,   ,spam\n4,a\u2028b,0\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    (tmp_path / "a.tsv").write_text("body\tkind\nhello, you\tspam\n", encoding="utf-8")
    task = load(
        {"train": tmp_path / "a.csv", "val": tmp_path / "a.tsv", "test": tmp_path / "a.tsv"},
        text_column="body",
        label_column="kind",
    )
    assert task.train == [
        Example("hello, you", "spam"),
        Example('two\nlines "quoted"', "not spam"),
        Example("a\u2028b", "not spam"),
    ]
    assert task.val == [Example("hello, you", "spam")]
    assert task.dropped == {"train": 1, "val": 0, "test": 0}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "x", "label": 0}\n\n{"text": "x", "label": 2}\n', r"a.jsonl:3: 'label' is not a label"),
        ("a.jsonl", '{"text": "x", "label": "span"}\n', r"a.jsonl:1: 'label' is not a label\n  got: 'span'"),
        ("a.jsonl", '{"text": "x", "label": true}\n', r"a.jsonl:1: 'label' is not a label\n  got: True"),
        ("a.jsonl", '{"text": "x", "label": -1}\n', r"a.jsonl:1: 'label' is not a label\n  got: -1"),
        ("a.jsonl", '{"text": "x", "label": 0}\n{"text": null, "label": 0}\n', r"a.jsonl:2: 'text' is not a string"),
        ("a.jsonl", '{"text": "x", "label": 0}\n{"body": "x", "label": 0}\n', r"a.jsonl:2 has no column 'text'"),
        ("a.jsonl", '{"text": "x", "label": 0}\n{"text": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", "[" * 100_000 + "\n", r"a.jsonl:1: not JSON"),
        ("a.jsonl", '["x", 0]\n', r"a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"text": " ", "label": 0}\n', r"no rows with text for train"),
        ("a.jsonl", "", r"no rows with text for train"),
        ("a.csv", 'text,label\n"two\nlines",spam\nx,span\n', r"a.csv:4: 'label' is not a label\n  got: 'span'"),
        ("a.csv", "text,label\nx,spam\na, b,spam\n", r"a.csv:3: 3 cells under 2 columns"),
        ("a.csv", 'text,label\n"x,spam\n', r"a.csv:2: not a row of a table(.|\n)*instead: .* doubled"),
        ("a.csv", "body,label\nx,spam\n", r"a.csv:2 has no column 'text'(.|\n)*text_column"),
        ("a.xlsx", "", r"a.xlsx has an unknown file extension"),
        ("a.jsonl", "".join(f'{{"text": "x{i}", "label": 0}}\n' for i in range(9)) + '{"text": "\\ud83d", "label": 0}\n', r"a.jsonl:10: half of a character"),  # noqa: E501
    ],
)  # fmt: skip
def test_bad_rows_are_named_by_file_and_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    with pytest.raises(UsageError, match=message):
        load(tmp_path / name)


CELLS = "text,label\nx,spam\nét,spam\n"


@pytest.mark.parametrize(
    "content, line",
    [(CELLS.encode("cp1252"), 3), (b"\xef\xbb\xbf" + CELLS.encode("cp1252"), 3), (CELLS.encode("utf-16"), 1)],
)
def test_bytes_that_are_not_utf8_are_named(content: bytes, line: int, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    message = rf'a.csv:{line}: not UTF-8\n  instead: save it as UTF-8; in Excel, as "CSV UTF-8"'
    with pytest.raises(UsageError, match=message):
        load(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "content, wanted, cells",
    [
        ("a, b;label\nx;spam\ny;spam\n", (), {"a, b": "x", "label": "spam"}),  # a comma in a column's name
        ("text;label;\nx, y;spam;\n", (), {"text": "x, y", "label": "spam", "": ""}),
        ("text (a, b)\tlabel\nx\tspam\n", (), {"text (a, b)": "x", "label": "spam"}),
        ("text\nx, y\nz\n", ("text",), {"text": "x, y"}),  # one column, without quotes
        ("body;label\nx;spam\n", ("text",), {"body": "x", "label": "spam"}),  # so that its columns can be listed
        ("text,label\nx,spam\na, b,spam\n", (), {"text": "x", "label": "spam"}),
    ],
)
def test_the_delimiter_is_found(content: str, wanted: Sequence[str], cells: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    assert next(iter(_READERS[".csv"](tmp_path / "a.csv", wanted, [])))[1] == cells


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("delimiter, name", [(";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "")])
def test_what_spreadsheets_write_is_read(delimiter: str, name: str, encoding: str, tmp_path: Path) -> None:
    rows = [["text", "label"], ["", ""], ["one, two; three", "spam"], ["fünf", "not spam"], [" ", ""], ["", "", "", ""]]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows(rows)
    path = tmp_path / "a.csv"
    path.write_bytes(text.getvalue().encode(encoding))
    task = load(dict.fromkeys(("train", "val", "test"), path))
    assert task.train == [Example("one, two; three", "spam"), Example("fünf", "not spam")]
    assert task.dropped == dict.fromkeys(("train", "val", "test"), 3)
    assert (f"{path}: cells are separated by {name}" in task.notes) == bool(name)
    assert f"{path}: empty rows of train, which are left out: 3" in task.notes


def test_empty_rows_of_jsonl_are_left_out(tmp_path: Path) -> None:
    rows = [{"text": "x", "label": "spam"}, {"text": None, "label": None}, {"text": "", "label": " "}]
    task = load(dict.fromkeys(("train", "val", "test"), jsonl(tmp_path / "a.jsonl", rows)))
    assert (task.train, task.dropped["train"]) == ([Example("x", "spam")], 2)


@pytest.mark.parametrize(
    "source, options, message",
    [
        ("none.csv", {}, "no such file"),
        ("owner/name/more", {}, "neither a file, a folder nor the name of a Hub dataset"),
        ("", {"definitions": {"not spam": "Wanted."}}, "no definition of spam"),
    ],
)
def test_sources_that_are_none(source: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(source, **options)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(
            MissingExtraError, match=r"reading Parquet needs .*\n.*'.\[tasks\]' in a clone of gatespace; or"
        ):
            load(path)
        return
    columns = {"text": ["x", "", "y"], "label": [0, 1, 1]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    task = load(dict.fromkeys(("train", "val", "test"), path))
    assert task.train == [Example("x", "not spam"), Example("y", "spam")]
    assert task.dropped["train"] == 1
    pyarrow.parquet.write_table(pyarrow.table(columns | {"label": [0, 1, 7]}), path)
    with pytest.raises(UsageError, match=r"a.parquet, row 3: 'label' is not a label"):
        load(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        load(path)


def test_a_hub_dataset_without_the_package() -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"loading owner/name from the Hugging Face Hub needs"):
            load("owner/name:config")
    else:
        pytest.skip("the package datasets is here")


def test_hub_integers_go_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real dataset of the package `datasets`, from a folder in place of the network."""
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["Spam", "not_spam"])}
    )
    data = tmp_path / "owner" / "name"
    data.mkdir(parents=True)
    for split, texts in {"train": [f"mail {i}" for i in range(10)], "test": ["x", "y"]}.items():
        rows = datasets.Dataset.from_dict(
            {"text": texts, "label": [i % 2 for i in range(len(texts))]}, features=features
        )
        rows.to_parquet(str(data / f"{split}.parquet"))
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: load_dataset(str(tmp_path / name), config))
    task = load("owner/name")
    assert task.test == [Example("x", "spam"), Example("y", "not spam")]
    assert (len(task.train), len(task.val), task.name) == (9, 1, "owner/name")
    with pytest.raises(UsageError, match="has no column 'body'"):
        load("owner/name", text_column="body")


# ---------------------------------------------------------------------------------------------------- free text

ROWS = [{"mr": f"name[{i // 2}]", "ref": f"{i} is a pub."} for i in range(20)]


def test_rows_of_one_prompt_are_one_row(tmp_path: Path) -> None:
    task = texts(jsonl(tmp_path / "e2e.jsonl", ROWS))
    everything = [row for split in (task.train, task.val, task.test) for row in split]
    assert (len(task.train), len(task.val), len(task.test)) == (7, 1, 2)
    assert {row.text: row.references for row in everything} == {
        f"Describe: name[{i}]": (f"{2 * i} is a pub.", f"{2 * i + 1} is a pub.") for i in range(10)
    }
    lessons = task.lessons(task.train)
    assert len(lessons) == 14
    assert {row.label for row in lessons} == {reference for row in task.train for reference in row.references}
    assert {len(row.references) for row in texts(tmp_path / "e2e.jsonl", group=False).train} == {1}
    assert "references per prompt 2 to 2" in task.describe()
    assert {row.where for row in everything} == {f"{tmp_path / 'e2e.jsonl'}:{line}" for line in range(1, 20, 2)}


def test_a_table_gives_the_same_rows(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.csv").write_text("mr;ref\n" + "".join(f"{row['mr']};{row['ref']}\n" for row in ROWS))
    assert texts(tmp_path / "a.csv").train == texts(tmp_path / "a.jsonl").train
    assert texts(tmp_path / "a.csv").digest == texts(tmp_path / "a.jsonl").digest


def test_several_references_in_a_cell(tmp_path: Path) -> None:
    rows = [{"mr": str(i), "ref": ["a", "b", "a"]} for i in range(9)] + [{"mr": "nine", "ref": 9}]
    rows += [{"mr": "ten", "ref": [{"role": "assistant", "content": "ten"}]}]
    task = texts(jsonl(tmp_path / "x.jsonl", rows), carve={"val": 0.1, "test": 0.1})
    found = {row.text: row.references for split in ("train", "val", "test") for row in task.rows(split)}
    assert found["Describe: 3"] == ("a", "b")
    assert found["Describe: nine"] == ("9",)
    assert found["Describe: ten"] == ("ten",)


def test_conversations(tmp_path: Path) -> None:
    with_answer = [{"messages": chat("hi", "hello", f"who are you {i}", "me")} for i in range(10)]
    task = texts(jsonl(tmp_path / "c.jsonl", with_answer), prompt=None, messages="messages", answer=None)
    row = next(row for row in task.train if "4" in row.text)
    assert row.references == ("me",)
    assert task.prompt is not None
    assert task.prompt.conversations
    assert [turn["content"] for turn in task.prompt.messages(row.text)] == ["hi", "hello", "who are you 4"]
    beside = [{"chat": json.dumps(chat("hi", "hello", f"who are you {i}")), "reply": "me"} for i in range(10)]
    other = texts(jsonl(tmp_path / "d.jsonl", beside), prompt=None, messages="chat", answer="reply")
    assert [row.text for row in other.train] == [row.text for row in task.train]
    parts = [
        {"messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in row["messages"]]}
        for row in with_answer
    ]
    third = texts(jsonl(tmp_path / "e.jsonl", parts), prompt=None, messages="messages", answer=None)
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
    ([{"role": "robot", "content": "x"}], "why: turn 1, role: Input should be 'system'"),
    ([{"role": "user", "content": " "}], "why: turn 1, content: String should match"),
    ([{"role": "user"}], "why: turn 1, content: Field required"),
    ([{"role": "user", "content": [{"type": "image", "text": None}]}], "why: turn 1, content: Input should be a valid"),
    ([{"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": "1"}]}], "calls of tools as text"),
    (chat("hi"), "the conversation does not end with the right response"),
    ([{"role": "assistant", "content": "x"}], "there is nothing to respond to"),
    ("hi", """"role": "user", "content": "…"}"""),
    ([{"from": "human", "value": "hi"}], """"role": "user", "content": "…"}"""),
    ({"role": "user"}, "'messages' is no conversation"),
    ([], "'messages' is no conversation"),
    (chat("hi \ud83d", "ho"), "unable to parse raw data as a unicode string"),
]


@pytest.mark.parametrize(("row", "options", "message"), BAD)
def test_bad_rows_have_a_number(tmp_path: Path, row: dict[str, Any], options: dict[str, Any], message: str) -> None:
    good = [{"mr": f"m{i}", "ref": f"{i}"} for i in range(9)]
    with pytest.raises(UsageError) as error:
        texts(jsonl(tmp_path / "bad.jsonl", [*good[:2], row, *good[2:]]), **options)
    assert message in str(error.value)


@pytest.mark.parametrize(("turns", "message"), BAD_CHATS)
def test_bad_conversations_have_a_number(tmp_path: Path, turns: Any, message: str) -> None:
    with pytest.raises(UsageError, match=r"bad\.jsonl:1: ") as error:
        texts(jsonl(tmp_path / "bad.jsonl", [{"messages": turns}]), prompt=None, messages="messages", answer=None)
    assert message in str(error.value)


def test_a_template_that_names_a_missing_column(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"e2e.jsonl:1 has no column 'name'"):
        texts(jsonl(tmp_path / "e2e.jsonl", ROWS), prompt="{name}: {mr}")
    with pytest.raises(UsageError, match="names no column"):
        texts(tmp_path / "e2e.jsonl", prompt="Say something.")


def test_what_changes_the_digest(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "e2e.jsonl", ROWS)
    variants = [
        {},
        {"metric": "exact"},
        {"also": ("exact",)},
        {"prompt": "{mr}"},
        {"group": False},
        {"carve_seed": 1},
        {"system": "s"},
        {"stop": ("x",)},
        {"thinking": True},
        {"max_prompt_tokens": 9},
        {"max_prompt_tokens": 9, "too_long": "truncate"},
    ]
    assert len({texts(path, **options).digest for options in variants}) == len(variants)
    assert texts(path, name="other").digest == texts(path).digest


def test_further_columns(tmp_path: Path) -> None:
    rows = [{**row, "id": i} for i, row in enumerate(ROWS)]
    path = jsonl(tmp_path / "e2e.jsonl", rows)
    assert texts(path, columns=("id",)).rows("train")[0].columns["id"].isdigit()
    assert "id" not in texts(path).rows("train")[0].columns


# ---------------------------------------------------------------------------------------------------- real files


def test_e2e(text_data: Path) -> None:
    task = load_text(
        {"train": text_data / "e2e" / "devset.csv", "test": text_data / "e2e" / "testset_w_refs.csv"},
        prompt="Describe: {mr}",
        answer="ref",
        metric="token_f1",
        carve={"val": 0.1},
    )
    assert len(task.train) + len(task.val) == 547
    assert len(task.test) == 630
    assert not task.test_in_train
    assert sum(len(row.references) for row in task.test) > 4000


def test_gsm8k(text_data: Path) -> None:
    task = load_text(text_data / "gsm8k", prompt="{question}", answer="answer", metric="number", carve={"val": 0.02})
    assert len(task.train) + len(task.val) == 7473
    assert len(task.test) == 1319
    assert all(task.judge(row, row.label) == 1 for row in task.test)
    assert all(task.judge(row, row.label.partition("####")[2]) == 1 for row in task.test)
