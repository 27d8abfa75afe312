from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gatespace.errors import UsageError
from gatespace.tasks.guess import guess_task


def rows(path: Path, *given: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


def test_labels(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", *({"id": i, "text": f"text {i}", "label": "ab"[i % 2]} for i in range(20)))
    found = guess_task(source)
    assert found.task == {
        "table": {"source": source, "labels": ["a", "b"], "text_column": "text", "label_column": "label"}
    }
    assert "a label task" in found.said
    assert "text" in guess_task(source, metric="exact").task


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_labels_of_a_spreadsheet(tmp_path: Path, delimiter: str, encoding: str) -> None:
    lines = [["Id", "Text", "Label", ""], *([str(i), f"für {i}", "ab"[i % 2], ""] for i in range(20))]
    (tmp_path / "a.csv").write_text("".join(f"{delimiter.join(line)}\r\n" for line in lines), encoding=encoding)
    found = guess_task(str(tmp_path / "a.csv")).task["table"]
    assert (found["labels"], found["text_column"], found["label_column"]) == (["a", "b"], "Text", "Label")


def test_many_labels_are_free_text(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", *({"text": f"text {i}", "label": f"a longer answer {i}"} for i in range(20)))
    found = guess_task(source).task["text"]
    assert (found["prompt"], found["answer"]) == ("{text}", "label")


def test_conversations(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    assert guess_task(source).task["text"]["messages"] == "messages"


def test_free_text_and_its_metric(tmp_path: Path) -> None:
    long = rows(tmp_path / "a.jsonl", {"mr": "name[x]", "ref": "A pub in the city centre."})
    found = guess_task(long)
    assert (found.task["text"]["prompt"], found.task["text"]["answer"]) == ("{mr}", "ref")
    assert found.task["text"]["metric"] in ("rouge_l", "token_f1")
    assert repr("{mr}") in found.said
    sums = rows(tmp_path / "b.jsonl", {"question": "1+1?", "answer": "It is\n#### 2"})
    assert guess_task(sums).task["text"]["metric"] == "number"
    names = rows(tmp_path / "c.jsonl", {"left": "a long question", "right": "Paris"})
    assert guess_task(names).task["text"] == {
        "source": names, "prompt": "{left}", "answer": "right", "metric": "exact",
    }  # fmt: skip
    asked = guess_task(long, prompt="Describe {mr}!", metric="bleu").task["text"]
    assert (asked["prompt"], asked["metric"]) == ("Describe {mr}!", "bleu")


def test_what_cannot_be_guessed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which columns"):
        guess_task(rows(tmp_path / "a.jsonl", {"a": "x", "b": "y", "c": "z"}))
    with pytest.raises(UsageError, match="half of a character"):
        guess_task(rows(tmp_path / "b.jsonl", *({"text": "x", "label": one} for one in ["a", "b\ud83d"] * 8)))


def test_real_files(text_data: Path) -> None:
    e2e = guess_task(str(text_data / "e2e" / "devset.csv")).task["text"]
    assert (e2e["prompt"], e2e["answer"]) == ("{mr}", "ref")
    gsm8k = guess_task(str(text_data / "gsm8k")).task["text"]
    assert (gsm8k["prompt"], gsm8k["answer"], gsm8k["metric"]) == ("{question}", "answer", "number")
