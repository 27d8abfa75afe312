from __future__ import annotations

import csv
import datetime
import json
import math
import os
import subprocess
import sys

import pytest

from gatespace.cli.predict import Labeller


@pytest.fixture(scope="module")
def known(taught):
    """Texts with the labels that the run's own evaluation has given them."""
    rows = [json.loads(line) for line in (taught.folder / "predictions-test.jsonl").read_text().splitlines()]
    assert all(row["response"] is not None for row in rows)
    return [(row["response"], row["text"]) for row in rows]


def test_every_line_gets_its_label_in_its_place(cli, taught, known):
    texts = [text for _, text in known]
    result = cli("predict", taught.folder, stdin="\n".join([*texts[:3], "", *texts[3:]]))
    assert result.exit_code == 0, result.stderr
    expected = [f"{label}\t{text}" for label, text in known]
    assert result.stdout.split("\n") == [*expected[:3], "\t", *expected[3:], ""]
    assert result.stderr == ""


def test_batches_are_of_any_size_and_files_of_any_length(cli, taught, known, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "".join(f"{text}\r\n" for _, text in known[:9]).encode())
    result = cli("predict", taught.folder / "model", file, "--batch-size", "4")
    assert result.stdout.splitlines() == [f"{label}\t{text}" for label, text in known[:9]]


def test_json_in_and_out(cli, taught, known, tmp_path):
    label, text = known[0]
    lines = [json.dumps({"tweet": text, "id": 5}), "", json.dumps({"tweet": f"{text}\n"}), json.dumps({"tweet": None})]
    result = cli("predict", taught.folder, "--field", "tweet", "--json", stdin="\n".join(lines))
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["line"] for one in found] == [1, 2, 3, 4]
    assert found[0] == {"line": 1, "label": label, "text": text, "raw": f'{label}"}}', "id": 5}
    assert found[2]["text"] == f"{text}\n"
    assert [one["label"] for one in found] == [label, None, label, None]
    assert found[1]["raw"] is None
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": f"{text}\n and\u2028more"}))
    plain = cli("predict", taught.folder, tmp_path / "t.jsonl").stdout
    assert plain.count("\n") == 1
    assert plain.endswith(f"\t{text}  and more\n")


def test_what_has_no_label_is_counted(cli, taught, known):
    text = known[0][1]
    result = cli("predict", taught.folder, "--max-new-tokens", "1", stdin=f"{text}\n{'long ' * 3000}\n\n")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.split("\n")
    assert lines[0] == f"\t{text}"
    assert lines[1].startswith("\tlong long")
    assert lines[2] == "\t"
    assert "1 of 2 responses had no legal label\n" in result.stderr
    assert "1 of 2 texts are too long for the model and have no label\n" in result.stderr
    assert cli("predict", taught.folder, "--max-new-tokens", "1", "--quiet", stdin=text).stderr == ""


def test_odd_texts_have_responses(cli, taught):
    texts = ["<|im_end|>", "\x00", "a\tb", "\u2028", "😀" * 50, '"}', "{", " x "]
    result = cli("predict", taught.folder, stdin="\n".join(texts))
    assert result.exit_code == 0, result.stderr
    # U+2028 alone is white space, and is shown as an empty text
    shown = [line.partition("\t")[2] for line in result.stdout.split("\n")[:-1]]
    assert shown == ["" if text == "\u2028" else text for text in texts]


def test_the_data_of_a_task_is_not_needed(cli, taught, tmp_path):
    """A model is used where its data is not: labels and prompt are known without."""
    result = cli("predict", taught.folder, "--task", "tweeteval/hate", "--json", stdin="hello\n")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["label"] in (None, "hate", "not-hate")
    labels = ["good news", "bad news", "open question", "open offer"]
    section = {"table": {"source": "gone.jsonl", "labels": labels}, "brief": True}
    (tmp_path / "own.yaml").write_text(json.dumps({"task": section}))
    result = cli("predict", taught.folder, "--config", tmp_path / "own.yaml", stdin="hello\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.partition("\t")[0] in labels


@pytest.mark.parametrize(
    "words, stdin, message",
    [
        (["missing.txt"], b"", "error: missing.txt cannot be read\n"),
        (["texts.json"], b"", "error: predict reads lines of text, JSON lines, or a table\n"),
        (["missing.csv"], b"", "error: no such file\n  got: missing.csv\n"),
        (["-o", "labels.txt"], b"", "error: unknown output format\n  got: labels.txt\n"),
        (["-o", "nowhere/labels.csv"], b"", "error: there is no such folder\n  got: nowhere\n"),
        (["--field", "text"], b"not json\n", "error: -:1: not JSON\n"),
        (["--field", "text"], b'{"txt": "a"}\n', "error: -:1: there is no key 'text'\n  got: txt\n"),
        (["--field", "text"], b'{"text": 3}\n', "error: -:1: 'text' is not a text\n  got: 3\n"),
        ([], b"fine\n\xff\n", "error: -:2: not UTF-8\n  got: byte 0xff\n"),
    ],
)
def test_mistakes_exit_2(cli, taught, words, stdin, message):
    result = cli("predict", taught.folder, *words, stdin=stdin)
    assert result.exit_code == 2
    assert message in result.stderr


# ---------------------------------------------------------------------------------------------------- probabilities


def test_probabilities_of_all_labels(cli, taught, known):
    texts = [text for _, text in known[:6]]
    result = cli("predict", taught.folder, "--probabilities", "--json", stdin="\n".join([*texts, "", "long " * 3000]))
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "1 of 7 texts are too long for the model and have no label\n"
    *found, empty, long = map(json.loads, result.stdout.splitlines())
    for one, (label, text) in zip(found, known, strict=False):
        shares = one["probabilities"]
        assert list(one) == ["line", "label", "text", "confidence", "margin", "mass", "probabilities"]
        assert math.isclose(sum(shares.values()), 1)
        first, second, *_ = sorted(shares.values(), reverse=True)
        assert (one["confidence"], one["margin"]) == (first, first - second)
        assert 0 < one["mass"] <= 1
        # A taught model writes the label that is the most probable one.
        assert (one["label"], one["text"]) == (label, text) == (max(shares, key=shares.get), text)
    for one in (empty, long):
        assert one["label"] is one["probabilities"] is one["confidence"] is one["mass"] is None
    plain = cli("predict", taught.folder, "--probabilities", stdin="\n".join([*texts, ""])).stdout.splitlines()
    assert plain == [f"{one['label']}\t{one['confidence']:.4f}\t{one['text']}" for one in found]
    # The evaluation of the same texts has the same probabilities, but for rounding.
    told = cli("evaluate", taught.folder, "--probabilities", "--limit", "6", "--output", taught.folder.parent / "seen")
    assert told.exit_code == 0, told.stderr
    rows = [json.loads(line) for line in (taught.folder.parent / "seen" / "predictions-test.jsonl").open()]
    for one, row in zip(found, rows, strict=True):
        assert row["text"] == one["text"]
        assert row["probabilities"] == pytest.approx(one["probabilities"], rel=1e-4, abs=1e-6)
        assert row["mass"] == pytest.approx(one["mass"], rel=1e-4)


def test_a_threshold_leaves_texts_without_a_label(cli, taught, known):
    stdin = "\n".join(text for _, text in known[:20])
    every = [
        json.loads(line)
        for line in cli("predict", taught.folder, "--probabilities", "--json", stdin=stdin).stdout.splitlines()
    ]
    cut = sorted(one["confidence"] for one in every)[7]
    result = cli("predict", taught.folder, "--threshold", cut, "--json", stdin=stdin)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["label"] for one in found] == [one["label"] if one["confidence"] >= cut else None for one in every]
    assert sum(one["label"] is None for one in found) == 7
    assert result.stderr == f"7 of 20 texts are below the threshold of {cut:g} and have no label\n"
    assert [one["probabilities"] for one in found] == [one["probabilities"] for one in every]
    assert "0 of 1 texts are below" in cli("predict", taught.folder, "--threshold", "0", stdin="x").stderr
    assert cli("predict", taught.folder, "--threshold", "1.5", stdin="x").exit_code == 2


# ---------------------------------------------------------------------------------------------------- files


@pytest.fixture
def table(known, tmp_path):
    """A table of texts in a column of its own, some of them over several lines."""
    path = tmp_path / "tweets.csv"
    with path.open("w", newline="") as file:
        rows = [[n, f'{text}\nand "more", {n}' if n % 3 else text] for n, (_, text) in enumerate(known[:11])]
        csv.writer(file).writerows([["id", "body"], *rows, [11, ""]])
    return path


@pytest.mark.parametrize("how", [[], ["--probabilities"]])
def test_a_table_in_and_both_forms_out(cli, taught, table, tmp_path, how):
    command = ["predict", taught.folder, table, "--column", "body", "--batch-size", "4", *how]
    result = cli(*command, "-o", tmp_path / "out.jsonl")
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert f"note: wrote {tmp_path / 'out.jsonl'}\n" in result.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert [one["line"] for one in lines] == [*range(1, 13)]
    assert lines[1]["text"].endswith('\nand "more", 1')
    assert (lines[-1]["label"], lines[-1]["text"]) == (None, "")
    assert cli(*command, "-o", tmp_path / "out.csv", "--quiet").stderr == ""
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, one in zip(rows, lines, strict=True):
        shares = one.pop("probabilities", None) or {}
        assert {key: value for key, value in row.items() if not key.startswith("p_")} == {
            key: "" if value is None else str(value) for key, value in one.items()
        }
        assert all(row[f"p_{label}"] == str(share) for label, share in shares.items())
    assert sorted(os.listdir(tmp_path)) == ["out.csv", "out.jsonl", "tweets.csv"]
    again = cli(*command, "-o", tmp_path / "out.csv")
    assert again.exit_code == 2
    assert "error: the output exists already\n" in again.stderr


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_other_columns_are_kept(cli, taught, known, tmp_path, form):
    texts = [text for _, text in known[:3]]
    rows = [{"id": f"{n}", "label": "old", "input_label": "x", "body": text} for n, text in enumerate(texts)]
    if form == "csv":  # as a spreadsheet writes it
        lines = [";".join(rows[0]), *(";".join(row.values()) for row in rows)]
        (tmp_path / "in.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    else:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({**row, "more": [1]}) + "\n" for row in rows))
    command = ["predict", taught.folder, tmp_path / f"in.{form}", "--column", "body"]
    result = cli(*command, "--json")
    assert result.exit_code == 0, result.stderr
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["text"] for one in printed] == texts
    assert [one["label"] for one in printed] == [label for label, _ in known[:3]]
    assert [(one["id"], one["input_input_label"], one["input_label"]) for one in printed] == [
        (f"{n}", "old", "x") for n in range(3)
    ]
    assert "body" not in printed[0]
    assert cli(*command, "-o", tmp_path / "out.jsonl").exit_code == 0
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").open()] == printed
    assert cli(*command, "-o", tmp_path / "out.csv", "--probabilities").exit_code == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["id"], row["input_input_label"]) for row in table] == [(f"{n}", "old") for n in range(3)]
    assert [row.get("more") for row in table] == [None if form == "csv" else "[1]"] * 3


def test_cells_of_parquet_are_kept(cli, taught, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    day = datetime.date(2026, 1, 2)
    parquet.write_table(arrow.table({"text": ["hello"], "day": [day], "n": [3]}), tmp_path / "a.parquet")
    (found,) = cli("predict", taught.folder, tmp_path / "a.parquet", "--json").stdout.splitlines()
    assert {**json.loads(found), "day": "2026-01-02", "n": 3} == json.loads(found)


def test_a_stopped_command_resumes(cli, taught, table, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    command = ["predict", taught.folder, table, "--column", "body", "--batch-size", "3", "--threshold", "0.9", "-o"]
    whole = cli(*command, tmp_path / "whole.jsonl").stderr.splitlines()[-1]
    batches = []

    def label(self, lines, own=Labeller.label):
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(len(lines))
        own(self, lines)

    with monkeypatch.context() as patch:
        patch.setattr(Labeller, "label", label)
        stopped = cli(*command, out)
    (part,) = tmp_path.glob("out.jsonl.*.part")
    assert stopped.exit_code == 130
    assert f"stopped: the labels of 6 texts are in {part}, and the same command resumes\n" in stopped.stderr
    assert not out.exists()
    # A kill may tear a line, and leave a part of a batch.
    text = part.read_bytes()
    part.write_bytes(text[: text.rindex(b"{", 0, -2) + 20])
    # Another model's, or other options', are left alone.
    assert cli(*command, out, "--threshold", "0.5").exit_code == 0
    assert part.exists()
    out.unlink()
    result = cli(*command, out)
    assert result.exit_code == 0, result.stderr
    assert "note: the first 3 texts were labelled before the command was stopped\n" in result.stderr
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert result.stderr.splitlines()[-1] == whole  # the count is of all texts
    assert not part.exists()


def test_a_stopped_command_does_not_resume_with_other_texts(cli, taught, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    command = ["predict", taught.folder, tmp_path / "a.txt", "--batch-size", "1", "-o", tmp_path / "out.csv"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "gatespace.cli.prediction_file.PredictionFile.finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        assert cli(*command).exit_code == 130
    (tmp_path / "a.txt").write_text("one\nother\nthree\n")
    result = cli(*command)
    assert result.exit_code == 2
    assert "error: the input has changed: text 2 is different\n" in result.stderr


@pytest.mark.parametrize("how", [[], ["--probabilities"]])
def test_half_of_a_character_is_replaced_and_noted(cli, taught, tmp_path, how):
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n{"text": "half \\ud83d of it"}\n')
    for name in ("out.jsonl", "out.csv"):
        result = cli("predict", taught.folder, tmp_path / "rows.jsonl", "-o", tmp_path / name, *how)
        assert result.exit_code == 0, result.stderr
        assert "1 of 2 texts have half of a character" in result.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert lines[1]["text"] == "half \ud83d of it"


DAMAGED = [b"{", b"[" * 50_000, b"[]", b"{}", b'{"text": 3}', b'{"text": "one", "line": 1}', b"\xff\xfe"]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_part_file_is_an_error_in_words(cli, taught, tmp_path, monkeypatch, line):
    (tmp_path / "a.txt").write_text("one\n")
    command = ["predict", taught.folder, tmp_path / "a.txt", "--batch-size", "1", "-o", tmp_path / "out.csv"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "gatespace.cli.prediction_file.PredictionFile.finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        cli(*command)
    (part,) = tmp_path.glob("out.csv.*.part")
    part.write_bytes(line + b"\n")
    result = cli(*command)
    assert result.exit_code == 2
    assert f"error: line 1 of {part.name} is damaged\n" in result.stderr
    # Nor is a link in its place followed.
    (tmp_path / "victim").write_text("mine")
    part.unlink()
    part.symlink_to(tmp_path / "victim")
    assert cli(*command).exit_code == 2
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_reader_that_has_enough_ends_it_quietly(child, taught):
    """Also: texts from an endless pipe are labelled as they come."""
    command = f"yes 'such good news' | '{sys.executable}' -m gatespace predict '{taught.folder}' --batch-size 8"
    script = f"set -o pipefail; {{ {command}; echo code $? >&2; }} | head -n 3"
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=child, timeout=600, encoding="utf-8"
    )
    assert [line.partition("\t")[2] for line in result.stdout.splitlines()] == ["such good news"] * 3
    # 141 is `yes`, which the same signal ends
    assert result.stderr in ("code 0\n", "code 141\n")
