"""Rows that are trees against every response on its own: hidden states and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.models import Model
from gatespace.models.body import response_states
from gatespace.models.packed import PackedBody
from gatespace.models.plain import PlainBody
from gatespace.models.tree import depths, paths, tree_of
from tests.models.architectures import WINDOWS, alone, distance, made, some_ids, some_rows
from tests.models.test_packed import gradients, weighed

PREFIX = some_ids(11, seed=1)
PROMPTS = some_rows((7, 40, 1, 12), seed=2)
RESPONSES = [
    [[5, 6, 7], [5, 6, 8, 9], [5, 6, 7], [9]],  # one twice, one of a single token
    [[4]],
    [[3, 4, 5, 6, 7], [3, 4]],
    [[6], [7]],
]


def expected(model: Model) -> Tensor:
    parts = []
    for prompt, responses in zip(PROMPTS, RESPONSES, strict=True):
        for ids in responses:
            states = alone(model, [*PREFIX, *prompt, *ids])
            parts.append(states[len(PREFIX) + len(prompt) - 1 : -1])
    hidden = torch.cat(parts)
    weighed(hidden).backward()
    return hidden


def at_once(body: Any, responses: Sequence[Sequence[Sequence[int]]] = RESPONSES) -> Tensor:
    return response_states(body, PROMPTS, responses, prefix=PREFIX)


def after_the_prompts(body: Any, responses: Sequence[Sequence[Sequence[int]]] = RESPONSES) -> Tensor:
    forward = body.forward(PROMPTS, prefix=PREFIX)
    return response_states(body, PROMPTS, responses, forward=forward)


def beside_the_prompts(body: PackedBody, earlier: int, shaped: bool) -> Tensor:
    """Trees that continue rows of the same pass or of a pass before it, as a whole or leaf by leaf."""
    trees = [tree_of([ids[:-1] for ids in some]) for some in RESPONSES]
    some = [row for row, tree in enumerate(trees) if tree.tokens]
    first = body.forward(PROMPTS[:earlier], prefix=PREFIX) if earlier else None
    prompts = PROMPTS[earlier:]
    rows = [*prompts, *(trees[row].tokens for row in some)]
    rooms = [-(-len(prompt) // 16) * 16 for prompt in PROMPTS]
    shapes = [*((room, 0) for room in rooms[earlier:]), *((6, rooms[row]) for row in some)]
    forward = body.forward(
        rows,
        prefix=PREFIX if first is None else first.prefix,
        past=None if first is None else first.cache,
        after=[*[-1] * len(prompts), *some],
        parents=[*[None] * len(prompts), *(trees[row].parents for row in some)],
        shape=shapes.__getitem__ if shaped else None,
    )
    states = forward.hidden.split([len(row) for row in rows])
    ends = [*([] if first is None else first.last().split(1)), *(found[-1:] for found in states[: len(prompts)])]
    after = dict(zip(some, states[len(prompts) :], strict=True))
    parts = [[end, *([after[row][path]] if path else [])] for row, end in enumerate(ends) for path in trees[row].paths]
    hidden = torch.cat([part for pair in parts for part in pair])
    weighed(hidden).backward()
    return hidden


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("earlier", [0, 1, 4])
def test_rows_continue_rows_of_their_pass(
    earlier: int, shaped: bool, long: bool, student: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        monkeypatch.setattr("gatespace.models.packed.LONG", 100)
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64)
    right, right_gradients = gradients(model, lambda: expected(model))
    hidden, own_gradients = gradients(model, lambda: beside_the_prompts(PackedBody(model), earlier, shaped))
    assert distance(hidden, right) < 1e-13
    assert own_gradients.keys() == right_gradients.keys()
    for name, gradient in right_gradients.items():
        assert distance(own_gradients[name], gradient) < 1e-12, name


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("kind", [PackedBody, PlainBody])
@pytest.mark.parametrize("way", [at_once, after_the_prompts], ids=lambda way: way.__name__)
def test_a_tree_agrees_with_each_of_its_responses(
    way: Any, kind: Any, long: bool, student: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        monkeypatch.setattr("gatespace.models.attention.LONG", 100)
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64)
    agree(model, kind(model), way, 1e-13)


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("window", [2, 4, 15])  # within a response, across its prompt, across the prefix
@pytest.mark.parametrize("way", [at_once, after_the_prompts], ids=lambda way: way.__name__)
def test_a_window_is_counted_along_the_path(
    way: Any, window: int, long: bool, student: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        monkeypatch.setattr("gatespace.models.attention.LONG", 100)
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64, sliding_window=window)
    agree(model, PackedBody(model, checkpointing=long), way, 1e-13)


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("way", [at_once, after_the_prompts], ids=lambda way: way.__name__)
def test_trees_of_architectures_with_windows_and_caps(
    way: Any, kind: str, student: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatespace.models.attention.LONG", 300)  # some trees are above
    model = made(student.tokenizer, kind, **WINDOWS[kind])
    agree(model, PackedBody(model), way, 5e-6)


def agree(model: Model, body: Any, way: Any, tolerance: float) -> None:
    right, right_gradients = gradients(model, lambda: expected(model))

    def found() -> Tensor:
        hidden: Tensor = way(body)
        weighed(hidden).backward()
        return hidden

    hidden, own_gradients = gradients(model, found)
    assert hidden.shape == right.shape
    assert distance(hidden, right) < tolerance
    assert own_gradients.keys() == right_gradients.keys()
    for name, gradient in right_gradients.items():
        assert distance(own_gradients[name], gradient) < 10 * tolerance, name


@pytest.mark.parametrize("way", [at_once, after_the_prompts], ids=lambda way: way.__name__)
def test_the_real_architecture_agrees(way: Any, student: Model) -> None:
    with torch.no_grad():
        right = torch.cat([way(PackedBody(student), [[some[n % len(some)]] for some in RESPONSES]) for n in range(4)])
        hidden = way(PackedBody(student), [[some[n % len(some)] for n in range(4)] for some in RESPONSES])
    lengths = [len(some[n % len(some)]) for some in RESPONSES for n in range(4)]
    parts = hidden.split(lengths)
    again = torch.cat([parts[4 * row + n] for n in range(4) for row in range(len(RESPONSES))])
    assert distance(again, right) < 1e-6


def test_shared_beginnings_go_through_the_network_once(student: Model) -> None:
    body, seen = PackedBody(student), []
    run = body._run
    body._run = lambda ids, *rest: seen.append(len(ids)) or run(ids, *rest)  # type: ignore[method-assign]
    at_once(body)
    # prompts, and 5 6 7 · 8 of the first, 3 4 5 6 of the third: last tokens predict nothing
    assert seen == [len(PREFIX) + sum(map(len, PROMPTS)) + 3 - 1 + 1 + 4]


def test_a_tree_is_not_continued(student: Model) -> None:
    body = PackedBody(student)
    forward = body.forward([[3, 4, 5]], parents=[[-1, 0, 0]])
    with pytest.raises(UsageError, match="decoding starts after a pass over whole prompts"):
        body.decoding(forward, 4)


def test_shapes_of_trees() -> None:
    tree = tree_of([[5, 6], [], [5, 7, 8], [9]])
    assert tree.paths == [[0, 1], [], [0, 2, 3], [4]]
    assert tree.after(2) == [-1, 0, 1, 2, 2, 4, 1]
    assert depths(tree.after(2), 7) == [0, 1, 2, 3, 3, 4, 2]
    assert paths(tree.parents, 5) == [[0, 1], [0, 2, 3], [4]]
