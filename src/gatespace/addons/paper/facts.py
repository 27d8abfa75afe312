"""The paper's figures as published, each with its location in the paper, and as a reference for reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from gatespace.report.view import Published

SEEDS: tuple[int, ...] = (42, 2, 3)
"""The paper's seeds; the first is that of its sweeps, on which comparisons were selected."""


@cache
def facts() -> Mapping[str, Any]:
    """All published figures. `_about` explains units and provenance; `src` is a label in the paper: ``tab:3seed``."""
    text = resources.files("gatespace.addons.paper").joinpath("data", "paper_facts.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def hundredths(share: float) -> int:
    """A printed four-digit accuracy as an integer in hundredths of a percentage point."""
    return round(share * 10_000)


def seed_accuracies(task: str, point: str) -> dict[int, int]:
    """Seed → printed accuracy in hundredths of a pp, in the order of the paper's columns."""
    return {int(seed): hundredths(acc) for seed, acc in facts()["per_seed_accuracy"][task][point]["acc"].items()}


def agrees(printed: float, value: float, decimals: int = 2) -> bool:
    """Whether `value` rounds to the printed one. A half may round either way."""
    return abs(value - printed) <= 0.5 * float(f"1e-{decimals}") + 1e-9


class PaperReference:
    """The paper's results under the names that studies use for tasks and points."""

    seeds = SEEDS
    note = "The paper's numbers are of Qwen3-32B → Qwen3-4B and are shown for orientation."

    def accuracies(self, data: str) -> dict[str, dict[int, float]]:
        """Point → seed → accuracy on test; empty for data not in the paper."""
        task = _task(data)
        twins = {f"static{row['lam']:g}": f"twin({row['config']})" for row in _rows("mean_matched_lambda", task)}
        return {
            twins.get(point, point): {int(seed): share for seed, share in row["acc"].items()}
            for point, row in facts()["per_seed_accuracy"].get(task, {}).items()
        }

    def differences(self, data: str) -> dict[tuple[str, str], Published]:
        """(left, right) → difference in pp: Table 3seed, and Table d-on-G2 at the first seed."""
        task = _task(data)
        h_points = {"+2": "H1", "+4": "H2", "-2": "H3", "-4": "H4"}
        on_g2 = facts()["delta_vs_G2_pp"].get(task, {})
        found = {(h_points[d], "G2"): Published(delta) for d, delta in on_g2.items()}
        for row in _rows("nine", task):
            right = f"twin({row['a']})" if row["b"].startswith("static") else row["b"]
            over_seeds = (row["mean_3seed"], row["sd"], *row["ci95"], row["p"])
            found[row["a"], right] = Published(row["delta_1seed"], *over_seeds)
        return found

    def best(self, data: str) -> dict[str, float]:
        """Side → its best accuracy on test at the first seed."""
        sides = {"static05": "static", "gap_only_best": "gap-only", "entropy_only_best": "entropy-only"}
        sides["ours_best"] = "family"
        row = facts()["best_observed"].get(_task(data), {})
        return {side: row[key] for key, side in sides.items() if key in row}


def _task(data: str) -> str:
    """The paper's name for a dataset; "" if it is not in the paper."""
    name = data.removeprefix("tweeteval/")
    return name if name != data and name in facts()["per_seed_accuracy"] else ""


def _rows(key: str, task: str) -> list[dict[str, Any]]:
    return [row for row in facts()[key] if row["task"] == task]
