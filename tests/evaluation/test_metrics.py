"""Measures against counts made by hand, and against the definitions in exact fractions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatespace.errors import UsageError
from gatespace.evaluation import LabelRow, LabelStatistics, Metrics, Prediction, measure
from gatespace.tasks import Example, Prompt, Task

LABELS = ("anger", "joy", "optimism", "sadness")


def statistics(gold: Sequence[str], said: Sequence[str | None], labels: Sequence[str]) -> LabelStatistics:
    found = measure(gold, said, labels)
    assert found.labels is not None
    assert (found.metric, found.score, found.count) == ("accuracy", found.labels.accuracy, len(gold))
    return found.labels


def test_by_hand() -> None:
    gold = ["anger", "anger", "anger", "anger", "joy", "joy", "joy", "sadness", "sadness", "sadness"]
    said = ["anger", "anger", "joy", None, "joy", "anger", "optimism", "sadness", None, None]
    found = statistics(gold, said, LABELS)
    assert (found.correct, found.accuracy) == (4, 0.4)
    assert (found.parse_failures, found.parsed) == (3, 0.7)
    assert found.best_constant == ("anger", 0.4)
    assert found.balanced_accuracy == pytest.approx((2 / 4 + 1 / 3 + 1 / 3) / 3)  # no row is optimism
    assert found.per_label == [
        LabelRow("anger", precision=2 / 3, recall=0.5, f1=4 / 7, support=4, predicted=3, correct=2, unparsed=1),
        LabelRow("joy", precision=0.5, recall=1 / 3, f1=0.4, support=3, predicted=2, correct=1, unparsed=0),
        LabelRow("optimism", precision=0.0, recall=0.0, f1=0.0, support=0, predicted=1, correct=0, unparsed=0),
        LabelRow("sadness", precision=1.0, recall=1 / 3, f1=0.5, support=3, predicted=1, correct=1, unparsed=2),
    ]
    # (4/7 + 2/5 + 0 + 1/2) / 4
    assert found.macro_f1 == pytest.approx(103 / 280, abs=1e-15)
    assert found.confusion == {
        "anger": {"anger": 2, "joy": 1, "optimism": 0, "sadness": 0},
        "joy": {"anger": 1, "joy": 1, "optimism": 1, "sadness": 0},
        "optimism": {"anger": 0, "joy": 0, "optimism": 0, "sadness": 0},
        "sadness": {"anger": 0, "joy": 0, "optimism": 0, "sadness": 1},
    }


@pytest.mark.parametrize(
    "gold, said, accuracy, macro_f1, parsed",
    [
        # one label for all: accuracy of the best constant, macro-F1 far below it
        (["a", "a", "a", "b"], ["a", "a", "a", "a"], 0.75, Fraction(6, 7) / 3, 1.0),
        # a label that is neither there nor predicted still counts with 0
        (["a", "b"], ["a", "b"], 1.0, Fraction(2, 3), 1.0),
        (["a", "b", "c"], ["a", "b", "c"], 1.0, 1, 1.0),
        (["a", "b", "c"], ["b", "c", "a"], 0.0, 0, 1.0),
        # predicted, but no row has it
        (["a", "a"], ["c", "c"], 0.0, 0, 1.0),
        # nothing can be read: everything is wrong, and nothing is left out
        (["a", "b", "c"], [None, None, None], 0.0, 0, 0.0),
        # unparsed rows stay in the denominator of recall and are no one's false positives: P(a) = 1, R(a) = 1/2
        (["a", "a"], ["a", None], 0.5, Fraction(2, 3) / 3, 0.5),
        (["b"], ["b"], 1.0, Fraction(1, 3), 1.0),
    ],
)
def test_limits(
    gold: list[str], said: list[str | None], accuracy: float, macro_f1: Fraction | int, parsed: float
) -> None:
    found = statistics(gold, said, ("a", "b", "c"))
    assert found.accuracy == accuracy
    assert found.macro_f1 == pytest.approx(float(macro_f1), abs=1e-15)
    assert found.parsed == parsed
    assert found.parse_failures == said.count(None)


def rows_of(labels: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, str | None]]]:
    return st.lists(
        st.tuples(st.sampled_from(labels), st.one_of(st.none(), st.sampled_from(labels))), min_size=1, max_size=40
    )


@given(rows=rows_of(LABELS))
def test_the_definitions_in_fractions(rows: list[tuple[str, str | None]]) -> None:
    found = statistics([right for right, _ in rows], [said for _, said in rows], LABELS)
    f1s = []
    for row, label in zip(found.per_label, LABELS, strict=True):
        hits = sum(1 for right, said in rows if right == label and said == label)
        false_alarms = sum(1 for right, said in rows if right != label and said == label)
        missed = sum(1 for right, said in rows if right == label and said != label)
        precision = Fraction(hits, hits + false_alarms) if hits + false_alarms else Fraction(0)
        recall = Fraction(hits, hits + missed) if hits + missed else Fraction(0)
        # the harmonic mean, not the form in counts that the code uses
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else Fraction(0)
        f1s.append(f1)
        assert (row.precision, row.recall, row.f1) == (float(precision), float(recall), float(f1))
        assert row.support == hits + missed
        assert row.predicted == hits + false_alarms
        assert row.support == sum(found.confusion[label].values()) + row.unparsed
        assert row.predicted == sum(line[label] for line in found.confusion.values())
    assert found.macro_f1 == pytest.approx(float(sum(f1s) / len(LABELS)), abs=1e-15)
    right = [said == gold for gold, said in rows]
    assert found.accuracy == sum(right) / len(right)
    assert found.correct == sum(found.confusion[label][label] for label in LABELS)
    assert found.parse_failures == sum(row.unparsed for row in found.per_label)
    assert found.best_constant.accuracy == max(row.support for row in found.per_label) / len(rows)


@given(rows=rows_of(LABELS), order=st.permutations(range(40)))
def test_the_order_of_rows_does_not_matter(rows: list[tuple[str, str | None]], order: list[int]) -> None:
    shuffled = [rows[place] for place in order if place < len(rows)]
    gold, said = zip(*rows, strict=True)
    again, said_again = zip(*shuffled, strict=True)
    assert statistics(gold, said, LABELS) == statistics(again, said_again, LABELS)


def test_of_equally_frequent_labels_the_first_is_the_baseline() -> None:
    for labels in (("a", "b", "c"), ("b", "a", "c")):
        assert statistics(["b", "a", "b", "a", "c"], ["c"] * 5, labels).best_constant == (labels[0], 0.4)


@pytest.mark.parametrize(
    "gold, said, options, message",
    [
        ([], [], {}, "nothing to measure"),
        (["a"], ["a", "b"], {}, "1 rows, 2 predictions"),
        (["A"], ["a"], {}, "unknown gold label 'A'"),
        (["a"], ["c"], {}, "unknown predicted label 'c'"),
        (["a"], [""], {}, "unknown predicted label ''"),
        ([None], ["a"], {}, "unknown gold label 'None'"),
        (["a"], ["a"], {"labels": ("a", "a")}, "named once"),
    ],
)
def test_what_cannot_be_measured(
    gold: list[str], said: list[str | None], options: dict[str, object], message: str
) -> None:
    values: dict[str, object] = {"labels": ("a", "b"), **options}
    with pytest.raises(UsageError, match=message):
        measure(gold, said, **values)  # type: ignore[arg-type]


def test_as_json() -> None:
    found = measure(["joy", "anger", "joy"], ["joy", None, "anger"], LABELS)
    plain = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert plain == found.as_json()
    assert Metrics.from_json(plain) == found
    assert plain["best_constant"] == {"label": "joy", "accuracy": 2 / 3}
    assert [row["label"] for row in plain["per_label"]] == list(LABELS)
    assert plain["confusion"]["joy"] == {"anger": 1, "joy": 1, "optimism": 0, "sadness": 0}
    assert {*plain} == {*Metrics.__dataclass_fields__, *LabelStatistics.__dataclass_fields__} - {"labels"}
    before = {
        "accuracy": plain["accuracy"],
        "count": 3,
        "per_label": plain["per_label"],
        "confusion": plain["confusion"],
    }
    assert Metrics.from_json(before) == found  # as published before 0.2


def test_free_text() -> None:
    task = Task("t", [Example("a", "b")], [], [], prompt=Prompt(), metric="token_f1", also=("exact",))
    rows = [
        Prediction(i, "a", ("b",), "b", score, tokens=3 + i, ended=i > 0, also={"exact": float(i == 2)})
        for i, score in enumerate((0.25, 0.5, 1.0))
    ]
    found = Metrics.of(task, rows)
    assert (found.metric, found.score, found.count, found.length) == ("token_f1", 1.75 / 3, 3, 4)
    assert (found.truncated, found.also, found.figures, found.labels) == (1 / 3, {"exact": 1 / 3}, {}, None)
    assert found.sd == pytest.approx(0.3818813)
    assert Metrics.from_json(json.loads(json.dumps(found.as_json()))) == found
    with pytest.raises(UsageError, match="nothing to measure"):
        Metrics.of(task, [])


def test_predictions_are_read_as_they_were_written() -> None:
    row = Prediction(3, "x", ("joy",), None, 0.0, raw="?", tokens=1, probabilities={"joy": 0.5, "anger": 0.5}, mass=1.0)
    assert Prediction.from_json(json.loads(json.dumps(row.as_json()))) == row
    before = {"index": 3, "text": "x", "gold": "joy", "label": "joy", "raw": 'joy"}', "ended": True}  # before 0.2
    assert Prediction.from_json(before) == Prediction(3, "x", ("joy",), "joy", 1.0, raw='joy"}')


def test_without_torch() -> None:
    code = "import sys, gatespace.evaluation; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
