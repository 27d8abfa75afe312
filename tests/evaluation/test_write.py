"""What an evaluation leaves on disk."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gatespace.errors import RunError
from gatespace.evaluation import Evaluation, Prediction, measure, write

LABELS = ("joy", "anger")
TEXTS = ('he said "no"\n', "😀 é\u2028\u0085 end", "half a pair \ud83d", "")


@pytest.fixture
def evaluation() -> Evaluation:
    predictions = [
        Prediction(0, TEXTS[0], ("anger",), "anger", 1.0, 'anger"}'),
        Prediction(1, TEXTS[1], ("joy",), "anger", 0.0, 'anger"}'),
        Prediction(2, TEXTS[2], ("joy",), None, 0.0, "jo\ufffd\n", ended=False),
        Prediction(3, TEXTS[3], ("joy",), "joy", 1.0, 'joy"}'),
    ]
    gold, said = [row.gold for row in predictions], [row.response for row in predictions]
    return Evaluation(
        task="t",
        task_digest="0" * 32,
        split="test",
        available=9,
        max_new_tokens=32,
        metrics=measure(gold, said, LABELS),
        duplicates=1,
        without_duplicates=measure(gold[1:], said[1:], LABELS),
        predictions=predictions,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_files_that_say_what_was_found(evaluation: Evaluation, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "new"
    assert write(evaluation, folder) == (folder / "predictions-test.jsonl", folder / "evaluation-test.json")
    first = contents(folder)
    write(evaluation, folder)
    assert contents(folder) == first
    assert {*first} == {"predictions-test.jsonl", "evaluation-test.json"}
    # splitlines would also break at the separators in the second text
    lines = (folder / "predictions-test.jsonl").read_text(encoding="utf-8").splitlines()
    assert [Prediction.from_json(json.loads(line)) for line in lines] == evaluation.predictions
    summary = json.loads((folder / "evaluation-test.json").read_text(encoding="utf-8"))
    assert summary == evaluation.as_json()
    assert (summary["task"], summary["split"], summary["available"], summary["ended"]) == ("t", "test", 9, 3)
    assert summary["metrics"]["accuracy"] == 0.5
    assert summary["metrics"]["best_constant"] == {"label": "joy", "accuracy": 0.75}
    assert (summary["duplicates"], summary["without_duplicates"]["count"]) == (1, 3)
    assert [row["label"] for row in summary["metrics"]["per_label"]] == ["joy", "anger"]


def test_splits_stand_beside_each_other_and_are_replaced(evaluation: Evaluation, tmp_path: Path) -> None:
    write(evaluation, tmp_path)
    write(replace(evaluation, split="val", predictions=evaluation.predictions[:1]), tmp_path)
    assert len(contents(tmp_path)) == 4
    write(replace(evaluation, predictions=evaluation.predictions[:2]), tmp_path)
    assert contents(tmp_path)["predictions-test.jsonl"].count(b"\n") == 2
    assert contents(tmp_path)["predictions-val.jsonl"].count(b"\n") == 1


def test_a_failure_leaves_no_half_file(evaluation: Evaluation, tmp_path: Path) -> None:
    (tmp_path / "evaluation-test.json").mkdir()
    with pytest.raises(RunError, match="cannot be read or written"):
        write(evaluation, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["evaluation-test.json", "predictions-test.jsonl"]
    with pytest.raises(RunError, match="cannot be read or written"):
        write(evaluation, tmp_path / "predictions-test.jsonl")
