"""Tasks as values, and how rows are divided."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gatespace.errors import UsageError
from gatespace.tasks import Example, Task, split_rows

ROWS = [Example(f"text {index}", "ab"[index % 5 == 0]) for index in range(200)]


def task(**changes: object) -> Task:
    values: dict[str, object] = {
        "name": "t",
        "labels": ("a", "b"),
        "definitions": {},
        "train": ROWS,
        "val": [],
        "test": [],
    }
    return Task(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"labels": ("a",)}, "at least two labels"),
        ({"labels": "ab"}, "at least two labels"),
        ({"labels": ("a", "")}, "one line of text"),
        ({"labels": ("a", 'b"')}, "one line of text"),
        ({"labels": ("not-a", "Not_A")}, "the parser reads them as one"),
        ({"definitions": {"a": "first"}}, "no definition of b"),
        ({"definitions": {"a": "first", "c": "third"}}, "unknown label in the definitions 'c'"),
        ({"test": [Example("x", "c")]}, "row 0 of t's test has an unknown label"),
        ({"train": []}, "no training rows"),
    ],
)
def test_what_cannot_be_a_task(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        task(**changes)


def test_baseline_duplicates_and_digest() -> None:
    made = task(test=[Example("text 3", "b"), Example("new", "a"), Example("text 4 ", "a"), Example("text 5", "b")])
    assert made.test_in_train == (0, 3)
    assert made.best_constant() == ("a", 0.5)
    assert made.best_constant("train") == ("a", 0.8)
    assert math.isnan(made.best_constant("val").accuracy)
    assert "200/0/4" in made.describe()
    assert "test texts also in train: 2" in made.describe()
    assert made.digest == task(test=list(made.test), source="elsewhere").digest
    assert made.digest != task(test=made.test[:3]).digest
    assert made.digest != task(test=made.test, definitions={"a": "x", "b": "y"}).digest
    with pytest.raises(UsageError, match="unknown split 'dev'"):
        made.rows("dev")


# ---------------------------------------------------------------------------------------------------- split_rows


def test_parts_are_disjoint_complete_and_repeatable() -> None:
    parts = split_rows(ROWS, {"teacher": 0.6, "distill": 0.4}, 7)
    assert {name: len(rows) for name, rows in parts.items()} == {"teacher": 120, "distill": 80}
    assert sorted(row.text for rows in parts.values() for row in rows) == sorted(row.text for row in ROWS)
    assert parts == split_rows(ROWS, {"teacher": 0.6, "distill": 0.4}, 7)
    assert parts != split_rows(ROWS, {"teacher": 0.6, "distill": 0.4}, 8)
    for rows in parts.values():
        assert rows == sorted(rows, key=ROWS.index)


def test_split_is_pinned() -> None:
    parts = split_rows(ROWS[:10], {"x": 0.5, "y": 0.5}, 0)
    assert [ROWS.index(row) for row in parts["x"]] == [1, 3, 6, 8, 9]


def test_shares_below_one_leave_rows_out() -> None:
    parts = split_rows(ROWS, {"few": 0.1}, 0)
    assert len(parts["few"]) == 20


@given(
    st.lists(st.tuples(st.sampled_from([*"abcdefgh", "a ", " b"]), st.sampled_from("xy")), min_size=12, max_size=60),
    st.integers(0, 5),
)
def test_no_text_stands_in_two_parts(pairs: list[tuple[str, str]], seed: int) -> None:
    rows = [Example(text, label) for text, label in pairs]
    assume(max(Counter(text.strip() for text, _ in pairs).values()) < len(pairs) / 4)
    parts = split_rows(rows, {"one": 0.5, "two": 0.5}, seed)
    one, two = ({row.text.strip() for row in part} for part in parts.values())
    assert not one & two
    assert Counter(row for part in parts.values() for row in part) == Counter(rows)


@pytest.mark.parametrize(
    "fractions", [{}, {"a": 0.7, "b": 0.4}, {"a": 0.0, "b": 1.0}, {"a": -0.5}, {"a": float("nan")}]
)
def test_shares_that_make_no_sense(fractions: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="shares of a split"):
        split_rows(ROWS, fractions, 0)


def test_a_part_without_rows_is_an_error() -> None:
    with pytest.raises(UsageError, match="no row is left for tiny"):
        split_rows(ROWS[:10], {"big": 0.99, "tiny": 0.01}, 0)


def test_tasks_need_no_torch() -> None:
    code = "import gatespace.tasks, sys; sys.exit(', '.join({'torch', 'numpy', 'datasets'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)
