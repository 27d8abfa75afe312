"""The paper's own numbers, where the study has the same task and the same comparison.

They come from another pair of models (Qwen3-32B → Qwen3-4B): they stand beside a study's numbers for orientation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from gatespace.study.records import StudyResults

__all__ = ["Nine", "best_observed", "d_on_g2", "nine", "paper_task", "per_seed"]

PAPER_SEEDS = (42, 2, 3)
SOURCE = "The paper's numbers are of Qwen3-32B → Qwen3-4B and stand beside for orientation."


@dataclass(frozen=True)
class Nine:
    """A row of the paper's Table 3seed, in pp."""

    one_seed: float
    mean: float
    sd: float
    low: float
    high: float
    p: float


def paper_task(results: StudyResults, task: str) -> str | None:
    """The paper's name of a task that has the same data, or None."""
    baseline = results.baselines.get(task)
    name = baseline.name if baseline is not None else str(results.config.tasks[task].task.get("name", ""))
    short = name.removeprefix("tweeteval/")
    return short if name.startswith("tweeteval/") and short in _facts()["per_seed_accuracy"] else None


def nine(task: str) -> Mapping[tuple[str, str], Nine]:
    """(left, right) → the paper's row, of a task by its name in the paper."""
    found = {}
    for row in _facts()["nine"]:
        if row["task"] == task:
            right = f"twin({row['a']})" if row["b"].startswith("static") else row["b"]
            low, high = row["ci95"]
            found[row["a"], right] = Nine(row["delta_1seed"], row["mean_3seed"], row["sd"], low, high, row["p"])
    return found


def per_seed(task: str) -> Mapping[str, Mapping[int, float]]:
    """Point → seed → accuracy."""
    twins = {f"static{row['lam']:g}": f"twin({row['config']})" for row in _of(task, "mean_matched_lambda")}
    table = _facts()["per_seed_accuracy"][task]
    return {
        twins.get(point, point): {int(seed): share for seed, share in row["acc"].items()}
        for point, row in table.items()
    }


def d_on_g2(task: str) -> Mapping[float, float]:
    """d → difference to G2 at seed 42, in pp."""
    return {float(d): value for d, value in _facts()["delta_vs_G2_pp"].get(task, {}).items()}


def best_observed(task: str) -> Mapping[str, float]:
    """Side → the best accuracy on test at seed 42."""
    row = _facts()["best_observed"].get(task, {})
    names = {
        "static": "static05",
        "gap-only": "gap_only_best",
        "entropy-only": "entropy_only_best",
        "family": "ours_best",
    }
    return {side: row[key] for side, key in names.items() if key in row}


def _of(task: str, key: str) -> list[dict[str, Any]]:
    return [row for row in _facts()[key] if row["task"] == task]


@cache
def _facts() -> Mapping[str, Any]:
    from gatespace.addons.paper.facts import facts

    return facts()
