"""Which claims a study could support, computed before anything is trained.

The only bound that holds whatever the results is that of the exact sign-flip test: with n differences its p is at least
2 / 2ⁿ. (The t-test has none.) So a claim is out of reach if n is too small. Pure counting: no SciPy here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from gatespace.study.records import Comparison

Cell = TypeVar("Cell", bound=Hashable)

ALPHA = 0.05
"""Significance level of every claim."""


def sign_flip_floor(n: int) -> float:
    """Return the smallest possible two-sided sign-flip p of n differences."""
    return min(1.0, 2.0 / 2.0**n)


def least_differences(family: int = 1, alpha: float = ALPHA) -> int:
    """Return the smallest n whose sign-flip p can be below `alpha` after Holm's adjustment over `family` tests.

    Examples:
        >>> least_differences(), least_differences(9), least_differences(29)
        (6, 9, 11)
    """
    return next(n for n in range(1, 1024) if family * sign_flip_floor(n) < alpha)


def level_of(looks: int) -> float:
    """Return the level of claims at this look: .05 at the first, .05 / looks² from then on.

    Dividing by the number of looks alone is not enough, as every look but the last had a higher level: simulated, a
    claim without any effect then comes out in up to 7.7 % of studies, with the square in about 5 % at most.
    """
    return ALPHA / max(looks, 1) ** 2


def part_of(cell: Comparison) -> str | None:
    """Return the part of its axis that a comparison belongs to: the restriction, or what a twin is matched on."""
    if cell.axis == "isolation":
        return "RKL-matched" if cell.right.startswith("twin-rkl(") else "mean-matched"
    return cell.restriction


def is_split(axis: str, *, selects: bool) -> bool:
    """Whether claims are about the parts of an axis: twins always; restrictions unless fixed in advance."""
    return selects or axis == "isolation"


def whole_cells(cells: Mapping[Cell, Iterable[int]]) -> tuple[list[Cell], list[int]]:
    """Return the cells of a task that have every seed that any of them has, and those seeds: its blocks."""
    held = {cell: set(seeds) for cell, seeds in cells.items()}
    seeds = list(dict.fromkeys(seed for given in cells.values() for seed in given))
    return [cell for cell, own in held.items() if len(own) == len(seeds)], seeds


@dataclass(frozen=True)
class Claim:
    """A kind of claim in a study, and whether it could be supported.

    Args:
        kind: ``group``, the claim that reports make: one side is ahead overall. Or ``single``: one comparison by
            itself, after Holm's adjustment over `family`.
        axis: What the two sides differ in.
        restriction: The part of that axis, see `part_of`.
        tasks: Number of tasks with such comparisons.
        comparisons: Number of comparisons over tasks, not counting seeds.
        family: Number of tests in Holm's adjustment; 1 for a group, whose exact test is not adjusted.
        fresh: Fresh (task, seed) blocks of the group, or fresh seeds of a single comparison.
        least_p: Lower bound of the exact p, adjusted.
        possible: Whether that is below .05.
        seeds_needed: Minimum number of seeds, including the selection seed if there is one.
    """

    kind: Literal["group", "single"]
    axis: str
    restriction: str | None
    tasks: int
    comparisons: int
    family: int
    fresh: int
    least_p: float
    possible: bool
    seeds_needed: int


@dataclass(frozen=True)
class Reach:
    """The claims that a study could support, whatever its results."""

    selection_seed: int | None
    claims: tuple[Claim, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no claim of a report could be supported."""
        return not any(claim.possible for claim in self.claims if claim.kind == "group")

    @property
    def seeds_needed(self) -> int:
        """Minimum number of seeds at which some group claim could be supported."""
        return min((claim.seeds_needed for claim in self.claims if claim.kind == "group"), default=0)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        claims = [asdict(claim) for claim in self.claims]
        return {"level": ALPHA, "selection_seed": self.selection_seed, "claims": claims}


def reach(comparisons: Sequence[Comparison], selection_seed: int | None) -> Reach:
    """Return what could be supported if every planned run were done.

    Args:
        comparisons: All cells of the plan.
        selection_seed: The seed used for selection; all others are fresh. None: the comparisons were fixed in
            advance, all seeds are fresh, and an axis is one group (of each kind of twin).
    """
    chooses = selection_seed is not None
    cells: dict[tuple[str, str | None], dict[tuple[str, str, str], set[int]]] = {}
    replicated: set[tuple[str, str | None, str, str, str]] = set()
    for cell in comparisons:
        if cell.status != "comparable":
            continue
        part = part_of(cell) if is_split(cell.axis, selects=chooses) else None
        key, pair = (cell.axis, part), (cell.task, cell.left, cell.right)
        seeds = cells.setdefault(key, {}).setdefault(pair, set())
        if cell.seed != selection_seed:
            seeds.add(cell.seed)
        if cell.role == "replication":
            replicated.add((*key, *pair))
    claims: list[Claim] = []
    for (axis, restriction), pairs in cells.items():
        of_task: dict[str, dict[Hashable, set[int]]] = {}
        for pair, seeds in pairs.items():
            of_task.setdefault(pair[0], {})[pair] = seeds
        blocks = [whole_cells(mine) for mine in of_task.values()]
        fresh = sum(len(seeds) for whole, seeds in blocks if whole)
        needed = math.ceil(least_differences() / len(of_task)) + chooses
        about = {"axis": axis, "restriction": restriction, "tasks": len(of_task), "comparisons": len(pairs)}
        claims.append(_claim("group", fresh, 1, needed, about))
        # Holm is over the replicated comparisons if there are any, see `analysis`; else over the axis.
        own = [s for pair, s in pairs.items() if not replicated or (axis, restriction, *pair) in replicated]
        if own:
            family = len(replicated) or len(pairs)
            needed = least_differences(family) + chooses
            about["comparisons"] = len(own)
            claims.append(_claim("single", max(map(len, own)), family, needed, about))
    return Reach(selection_seed, tuple(claims))


def _claim(kind: Literal["group", "single"], fresh: int, family: int, needed: int, about: Mapping[str, Any]) -> Claim:
    least = min(1.0, family * sign_flip_floor(fresh))
    return Claim(
        kind=kind, **about, family=family, fresh=fresh, least_p=least, possible=least < ALPHA, seeds_needed=needed
    )
