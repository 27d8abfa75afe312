"""Which rows a step sees: every row once per epoch, by seed and step alone; and how they are divided."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatespace.errors import UsageError
from gatespace.models import Model
from gatespace.models.encode import Encoder
from gatespace.tasks import Example, Prompt, Task
from gatespace.training.batches import Batches, Row, micro_batches


@pytest.fixture
def encoder(student: Model, synthetic: Task) -> Encoder:
    texts = [row.text for row in synthetic.train[:23]]
    return Encoder(Prompt.of(synthetic, brief=True), student.tokenizer, texts)


@pytest.fixture
def examples(synthetic: Task) -> list[Example]:
    return synthetic.train[:23]


def indices(batches: Batches, steps: range) -> list[int]:
    return [row.index for step in steps for row in batches.at(step)]


@pytest.mark.parametrize("size", [1, 5, 23, 60])
def test_every_epoch_is_a_permutation(examples: list[Example], encoder: Encoder, size: int) -> None:
    seen = indices(Batches(examples, encoder, batch_size=size, seed=3), range(-(-4 * 23 // size)))
    epochs = [seen[start : start + 23] for start in range(0, 4 * 23, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(23)) not in epochs


def test_a_step_is_a_function_of_seed_and_number(examples: list[Example], encoder: Encoder) -> None:
    straight = Batches(examples, encoder, batch_size=6, seed=3)
    forward = [indices(straight, range(step, step + 1)) for step in range(30)]
    for step in (29, 0, 11, 3, 4, 28):  # as a run that is taken up again asks: not from the beginning, not in order
        fresh = Batches(examples, encoder, batch_size=6, seed=3)
        assert indices(fresh, range(step, step + 1)) == forward[step]
        assert indices(straight, range(step, step + 1)) == forward[step]
    other = Batches(examples, encoder, batch_size=6, seed=4)
    assert indices(other, range(30)) != [index for step in forward for index in step]


def test_the_order_does_not_depend_on_the_batch_size(examples: list[Example], encoder: Encoder) -> None:
    small, large = (Batches(examples, encoder, batch_size=size, seed=0) for size in (4, 10))
    assert indices(small, range(20)) == indices(large, range(8))


def test_a_row_holds_its_example_and_its_prompt(examples: list[Example], encoder: Encoder, student: Model) -> None:
    rows = Batches(examples, encoder, batch_size=23, seed=0).at(0)
    assert encoder.prefix
    for row in rows:
        assert row.example == examples[row.index]
        assert encoder.prefix + row.prompt == encoder.prompt.render(student.tokenizer, row.example.text)


def test_nothing_to_train_on(encoder: Encoder) -> None:
    with pytest.raises(UsageError, match="no rows to train on"):
        Batches([], encoder, batch_size=2, seed=0)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), bound=st.integers(1, 90), room=st.integers(1, 10))
def test_parts_hold_all_rows_in_order_within_the_bound(lengths: list[int], bound: int, room: int) -> None:
    rows = [Row(i, Example("a", "b"), [0] * length, []) for i, length in enumerate(lengths)]
    parts = micro_batches(rows, bound, room)
    assert [row.index for part in parts for row in part] == list(range(len(rows)))
    sizes = [[len(row.prompt) + room for row in part] for part in parts]
    assert all(part for part in parts)
    assert all(sum(size) <= bound or len(size) == 1 for size in sizes)  # a row that is too long is alone
    for before, after in pairwise(sizes):
        assert sum(before) + after[0] > bound  # no part ends early


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=12),
    st.integers(1, 120),
    st.integers(1, 12),
)
def test_a_family_is_divided_only_where_it_does_not_fit(families: list[tuple[int, int]], bound: int, room: int) -> None:
    rows, numbers = [], []
    for number, (length, members) in enumerate(families):
        rows += [Row(len(rows) + i, Example("", None), [0] * length, []) for i in range(members)]
        numbers += [number] * members
    parts = micro_batches(rows, bound, room, numbers)
    assert [row.index for part in parts for row in part] == list(range(len(rows)))
    found = [[numbers[row.index] for row in part] for part in parts]
    for part in found:
        size = sum(families[number][0] for number in set(part)) + room * len(part)
        assert size <= bound or len(part) == 1
    for before, after in pairwise(found):
        prompt, members = families[after[0]]
        if before[-1] == after[0]:  # divided: it began a part, and would not have fitted into one
            assert before[0] == before[-1]
            assert prompt + room * members > bound
