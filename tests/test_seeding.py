"""Streams of random numbers: pinned, so that a change of them cannot pass unseen."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatespace.seeding import generator, permutation, stream

NAMES = st.lists(st.one_of(st.text(), st.integers()), max_size=4)


@pytest.mark.parametrize(
    "arguments, seed",
    [((0,), 11323220686391207141), ((42, "rollout", 7), 9590613337703676605), ((-1, ""), 2331484521852823511)],
)
def test_pinned_streams(arguments: tuple[int, ...], seed: int) -> None:
    assert stream(*arguments) == seed


def test_pinned_draws() -> None:
    assert generator(42, "x").random() == 0.7932283196971441
    assert permutation(8, 0, "p") == [2, 0, 1, 7, 5, 4, 3, 6]


def test_same_in_another_process_whatever_its_hash_seed() -> None:
    code = "from gatespace.seeding import stream; print(stream(42, 'rollout', 7))"
    for hash_seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True)
        assert int(done.stdout) == stream(42, "rollout", 7), done.stderr


@given(st.integers(), NAMES, NAMES)
def test_different_names_are_different_streams(seed: int, left: list[str | int], right: list[str | int]) -> None:
    assert 0 <= stream(seed, *left) < 2**64
    same = [(type(part), part) for part in left] == [(type(part), part) for part in right]
    assert (stream(seed, *left) == stream(seed, *right)) == same


def test_names_do_not_run_together() -> None:
    variants = [("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ("abc", ""), ("1",), (1,), ("", "abc")]
    assert len({stream(0, *names) for names in variants}) == len(variants)


@pytest.mark.parametrize("length", [0, 1, 100])
def test_permutation_holds_every_number_once(length: int) -> None:
    assert sorted(permutation(length, 3, "any")) == list(range(length))


@pytest.mark.parametrize("arguments", [("42",), (True,), (1.0,), (1, 2.5), (1, None)])
def test_other_types_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        stream(*arguments)  # type: ignore[arg-type]
