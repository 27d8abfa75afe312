from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def known(taught):
    """Texts with the labels that the run's own evaluation has given them."""
    rows = [json.loads(line) for line in (taught.folder / "predictions-test.jsonl").read_text().splitlines()]
    assert all(row["label"] is not None for row in rows)
    return [(row["label"], row["text"]) for row in rows]


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
    assert found[0] == {"line": 1, "label": label, "text": text, "raw": f'{label}"}}'}
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
        (["texts.csv"], b"", "error: predict reads lines of text, or JSON lines\n"),
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
