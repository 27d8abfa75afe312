"""Rows that are prefix trees: responses to one prompt, with common prefixes stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Parents = Sequence[Sequence[int] | None] | None
"""Per row, the place of each token's parent, -1 for the context before the row; see `PackedBody.forward`."""


@dataclass(frozen=True)
class Tree:
    """The prefix tree of token sequences."""

    tokens: list[int]
    """Each after its parent."""
    parents: list[int]
    """The place of each token's parent; -1: it is the first of its sequence."""
    paths: list[list[int]]
    """For every sequence, the places of its tokens."""

    def after(self, count: int) -> list[int]:
        """The parents if `count` tokens in a line precede the tree in its row."""
        return [*range(-1, count - 1), *(parent + count if parent >= 0 else count - 1 for parent in self.parents)]


def tree_of(sequences: Sequence[Sequence[int]]) -> Tree:
    """The prefix tree of `sequences`.

    Examples:
        >>> tree_of([[5, 6], [5, 7], [5, 6]])
        Tree(tokens=[5, 6, 7], parents=[-1, 0, 0], paths=[[0, 1], [0, 2], [0, 1]])
    """
    tree = Tree([], [], [])
    known: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        place, path = -1, []
        for token in sequence:
            here = (place, token)
            if here not in known:
                known[here] = len(tree.tokens)
                tree.tokens.append(token)
                tree.parents.append(place)
            place = known[here]
            path.append(place)
        tree.paths.append(path)
    return tree


def depths(parents: Sequence[int] | None, length: int) -> Sequence[int]:
    """Depth of each token of a row: the number of its ancestors in the row. None: the row is a line."""
    if parents is None:
        return range(length)
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def paths(parents: Sequence[int] | None, length: int) -> list[list[int]]:
    """The paths from the root of a row to its leaves, as places of tokens."""
    if parents is None:
        return [[*range(length)]]
    ways: list[list[int]] = []
    for leaf in sorted(set(range(length)) - set(parents)):
        way = [leaf]
        while parents[way[-1]] >= 0:
            way.append(parents[way[-1]])
        ways.append(way[::-1])
    return ways
