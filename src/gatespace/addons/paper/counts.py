"""What can and cannot be derived about the paper's win counts and mean differences.

The 36 cells are not printed, but some accuracies are, and the best of each side, the ends of a grid, and differences
from which others follow. So every run of seed 42 has a range of correct responses, often a single number, and every
cell is won, lost or undecided.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gatespace.addons.paper.facts import SEEDS, facts
from gatespace.evidence.counts import Cell

Row = dict[str, Any]

GROUPS = ("emotion_gap", "emotion_entropy", "hate_gap", "hate_entropy")


class Range(NamedTuple):
    """Correct responses of a run at seed 42: at least `low`, at most `high`."""

    low: int
    high: int

    @property
    def exact(self) -> bool:
        """Whether it is a single number."""
        return self.low == self.high


def known_counts(task: str) -> dict[str, Range]:
    """Point or restriction → known range of its correct responses at seed 42."""
    n = facts()["tasks"][task]["n_test"]["value"]
    found: dict[str, Range] = {}
    for point, run in facts()["per_seed_accuracy"][task].items():
        count = run["correct"]["42"]
        found[point] = Range(count, count)
    derived = facts()["derived_seed42_accuracy"][task]
    for name, entry in derived.items():
        point = name.split(" ")[0]
        if name != "bounds" and not name.startswith(("static", "best")) and point not in found:
            found[point] = Range(entry["correct"], entry["correct"])
    for name, ends in derived["bounds"].items():
        if isinstance(ends, list):
            found[name] = Range(round(ends[0] * n), round(ends[1] * n))
    _static, *best = facts()["best_observed"][task]["correct"]  # no run has more than the best of its side
    for row in facts()["comparisons_36"][task]:
        for side, most in zip(("gap_only", "entropy_only", "config"), best, strict=True):
            if row[side] is not None:
                found.setdefault(row[side], Range(0, most))
    return found


def cells() -> list[Row]:
    """The 36 cells, each with the known bounds of its difference in correct responses."""
    rows = []
    for task, points in facts()["comparisons_36"].items():
        counts = known_counts(task)
        for row in points:
            for side in ("gap_only", "entropy_only"):
                if row[side] is None:
                    continue
                left, right = counts[row["config"]], counts[row[side]]
                rows.append(
                    {
                        "task": task,
                        "group": f"{task}_{side.removesuffix('_only')}",
                        "left": row["config"],
                        "right": row[side],
                        # None if nothing is known on that side
                        "at_least": left.low - right.high if left.low else None,
                        "at_most": left.high - right.low if right.low else None,
                        "outcome": _outcome(left, right),
                    }
                )
    return rows


def _outcome(left: Range, right: Range) -> str:
    low, high = left.low - right.high, left.high - right.low
    if low > 0:
        return "win"
    if high < 0:
        return "loss"
    if low == high == 0:
        return "tie"
    if low == 0:
        return "win or tie"
    return "loss or tie" if high == 0 else "unknown"


def win_counts() -> list[Row]:
    """Per group: cells known to be won or lost, undecided ones, and whether the published count fits."""
    found = cells()
    rows = []
    for group in GROUPS:
        outcomes = [row["outcome"] for row in found if row["group"] == group]
        counts = {"cells": len(outcomes), "won": outcomes.count("win"), "lost": outcomes.count("loss")}
        rows.append(_counted(group, **counts, won_unnamed=_unnamed_wins(group)))
    for total, parts in (("emotion_total", rows[:2]), ("hate_total", rows[2:4]), ("wins", rows[:4])):
        keys = ("cells", "won", "won_unnamed", "lost")
        rows.append(_counted(total, **{key: sum(part[key] for part in parts) for key in keys}))
    rows.append(_isolation())
    return rows


def _unnamed_wins(group: str) -> int:
    """Number of cells won without knowing which.

    Three of four HG5 points are above G5, and HG5,d+4 is one of them. G5 is above entropy-only(-4) and above every
    gap-only run, hence so are two of the other three.
    """
    if not group.startswith("emotion"):
        return 0
    counts = known_counts("emotion")
    rivals = [row["right"] for row in cells() if row["group"] == group and row["left"].startswith("HG5")]
    above = all(counts["G5"].low >= counts[rival].high for rival in rivals)
    return facts()["counts"]["HG5_vs_G5_positive"]["value"][0] - 1 if above else 0


def _isolation() -> Row:
    """The 26 dynamic points against their static twins, of which only those in text and tables are known."""
    printed = {(row["task"], row["a"]): row["delta_1seed"] for row in facts()["nine"] if row["axis"] == "isolation"}
    for cell in facts()["named_cells_seed42_pp"]:
        if cell["cell"].endswith("mean-matched static"):
            printed[cell["task"], cell["cell"].split(" ")[0]] = cell["delta"]
    known = [delta for (task, _), delta in printed.items() if task in facts()["comparisons_36"]]
    won, lost = sum(delta > 0 for delta in known), sum(delta < 0 for delta in known)
    return _counted("mean_match", cells=facts()["counts"]["mean_match"]["value"][1], won=won, lost=lost)


def _counted(group: str, *, cells: int, won: int, lost: int, won_unnamed: int = 0) -> Row:
    printed = facts()["counts"][group]
    published = printed["value"][0] if isinstance(printed["value"], list) else printed["value"]
    at_least, at_most = won + won_unnamed, cells - lost
    return {
        "group": group,
        "cells": cells,
        "won": won,
        "won_unnamed": won_unnamed,
        "lost": lost,
        "undecided": at_most - at_least,
        "at_least": at_least,
        "at_most": at_most,
        "published": published,
        "verdict": verdict(published, at_least, at_most),
        "src": printed["src"],
    }


def verdict(published: int, at_least: int, at_most: int) -> str:
    """Whether a published count is derived, possible or contradicted."""
    if not at_least <= published <= at_most:
        return "contradicted"
    return "derived" if at_least == at_most else "possible"


# ------------------------------------------------------------------------------------------------------ the means


def mean_deltas() -> list[Row]:
    """The published mean differences per group: what they imply for the open cells, and whether that is feasible.

    `needed` is the sum that the printed mean leaves for the open cells, in correct responses; `needed_widest` the same
    if every printed accuracy was rounded to four digits in the most favourable way. `minimum` is the smallest sum of
    the open cells if the published count makes each of them a lead.
    """
    found = cells()
    rows = []
    for group in GROUPS:
        task = group.split("_")[0]
        n = facts()["tasks"][task]["n_test"]["value"]
        mine = [row for row in found if row["group"] == group]
        known = [row for row in mine if row["at_least"] is not None and row["at_least"] == row["at_most"]]
        open_cells = [row for row in mine if row not in known]
        total = sum(row["at_least"] for row in known)
        printed, wins = facts()["mean_delta_pp"][group], facts()["counts"][group]["value"][0]
        must_lead = wins == len(mine) - sum(row["outcome"] == "loss" for row in mine)
        strict = _minimum(group, open_cells, lead=1) if must_lead else None
        loose = _minimum(group, open_cells, lead=0) if must_lead else None
        needed = _whole(printed["value"], 0.005, len(mine), n, total)
        widest = _whole(printed["value"], 0.015, len(mine), n, total)
        rows.append(
            {
                "group": group,
                "cells": len(mine),
                "printed": printed["value"],
                "known_cells": len(known),
                "known_sum": total,
                "open_cells": len(open_cells),
                "needed": needed,
                "needed_widest": widest,
                "minimum": strict,
                "minimum_with_ties": loose,
                "feasible": strict is None or strict <= widest[1],
                "feasible_with_ties": loose is None or loose <= needed[1],
                "smallest_mean": None if strict is None else 100 * (total + strict) / n / len(mine),
                "src": printed["src"],
            }
        )
    return rows


def _whole(mean: float, half: float, cells_: int, n: int, known: int) -> list[int]:
    """Bounds in whole correct responses that a printed mean implies, minus the known sum."""
    low, high = ((mean + sign * half) * cells_ * n / 100 for sign in (-1, 1))
    return [math.ceil(low - 1e-9) - known, math.floor(high + 1e-9) - known]


def _minimum(group: str, open_cells: list[Row], *, lead: int) -> int:
    """Smallest sum of the open cells if each is a lead of at least `lead`, with HG5 points as in `_unnamed_wins`."""
    least = [lead if row["at_least"] is None else row["at_least"] for row in open_cells]
    unnamed = [i for i, row in enumerate(open_cells) if row["left"].startswith("HG5") and row["outcome"] == "unknown"]
    counts = known_counts(group.split("_")[0])
    for i in unnamed[: _unnamed_wins(group)]:
        least[i] = counts["G5"].low + lead - counts[open_cells[i]["right"]].high
    return sum(max(value, lead) for value in least)


# ------------------------------------------------------------------------------------------------ shared comparators


def null_cells() -> list[Cell]:
    """The 36 cells with the runs they share, won and lost as published: 33 and 3."""
    found = cells()
    won = facts()["counts"]["wins"]["value"]
    return [
        Cell(1.0 if i < won else -1.0, ((row["task"], row["left"]),), ((row["task"], row["right"]),))
        for i, row in enumerate(found)
    ]


def sharing() -> list[Row]:
    """Number of cells that each restriction is compared in."""
    found = cells()
    rows = []
    for task in facts()["comparisons_36"]:
        mine = [row for row in found if row["task"] == task]
        for restriction in dict.fromkeys(row["right"] for row in mine):
            served = sum(row["right"] == restriction for row in mine)
            rows.append({"task": task, "restriction": restriction, "cells": served, "of": len(mine)})
    return sorted(rows, key=lambda row: -row["cells"])


def above_static() -> Row:
    """Hate at seed 42: static λ = 0.5 against the restrictions and the known runs of the family."""
    static, gap, entropy, _ = facts()["best_observed"]["hate"]["correct"]
    n = facts()["tasks"]["hate"]["n_test"]["value"]
    family = [row["config"] for row in facts()["comparisons_36"]["hate"]]
    exact = {point: counts.low for point, counts in known_counts("hate").items() if counts.exact and point in family}
    return {
        "static": static / n,
        "best_gap_only": gap / n,
        "best_entropy_only": entropy / n,
        "family_known": len(exact),
        "family_above": sum(count > static for count in exact.values()),
        "seed": SEEDS[0],
    }
