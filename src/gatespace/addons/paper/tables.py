"""The paper's tables, computed again from its per-seed accuracies (four digits, as printed)."""

from __future__ import annotations

import math
import statistics
from functools import cache
from typing import Any

from gatespace.addons.paper.facts import agrees, facts, hundredths, seed_accuracies
from gatespace.evidence.paired import paired
from gatespace.evidence.records import Paired
from gatespace.gating.coefficients import Gate, NotApplicable

Row = dict[str, Any]


def selection_seed() -> int:
    """The seed of the paper's sweeps, on which the nine comparisons were chosen."""
    return int(facts()["seeds"]["single_seed"]["value"])


def nine() -> list[Row]:
    """Table 3seed: mean, SD, t, p and interval of the nine replicated comparisons, beside what is printed.

    The paper subtracts printed accuracies; `from_counts` subtracts correct answers, from which the last digit differs.
    """
    return list(_all_nine())


@cache
def _all_nine() -> tuple[Row, ...]:
    return tuple(_nine(printed) for printed in facts()["nine"])


def differences(row: Row) -> dict[int, float]:
    """Seed → difference of the two printed accuracies of one of the nine, in pp."""
    left, right = (seed_accuracies(row["task"], row[side]) for side in ("a", "b"))
    return {seed: (left[seed] - right[seed]) / 100 for seed in left}


def _nine(printed: Row) -> Row:
    values = differences(printed)
    found = _over_seeds(values)
    fresh = [value for seed, value in values.items() if seed != selection_seed()]
    runs = facts()["per_seed_accuracy"][printed["task"]]
    left, right = runs[printed["a"]], runs[printed["b"]]
    exact = _over_seeds({int(s): 100 * (left["correct"][s] - right["correct"][s]) / left["n"] for s in left["correct"]})
    return {
        "axis": printed["axis"],
        "task": printed["task"],
        "a": printed["a"],
        "b": printed["b"],
        "mean": found.mean,
        "sd": found.sd,
        "t": found.t,
        "p": found.p,
        "ci": [found.low, found.high],
        "fresh_mean": statistics.fmean(fresh),
        "seeds": list(found.seeds),
        "differences": list(found.differences),
        "delta_1seed": values[selection_seed()],
        "sign_flip": {"p": found.sign_flip_p, "floor": found.sign_flip_floor},
        "mde": found.mde,
        "printed": {
            "delta_1seed": printed["delta_1seed"],
            "mean": printed["mean_3seed"],
            "sd": printed["sd"],
            "ci": printed["ci95"],
            "p": printed["p"],
        },
        "match": _match(printed, found) and agrees(printed["delta_1seed"], values[selection_seed()]),
        "from_counts": {
            "mean": exact.mean,
            "sd": exact.sd,
            "p": exact.p,
            "ci": [exact.low, exact.high],
            "match": _match(printed, exact),
        },
        "src": printed["src"],
    }


def _over_seeds(values: dict[int, float]) -> Paired:
    found = paired(values, dict.fromkeys(values, 0.0))  # differences of whole hundredths stay exact
    assert isinstance(found, Paired)
    return found


def _match(printed: Row, found: Paired) -> bool:
    pairs = [
        (printed["mean_3seed"], found.mean),
        (printed["sd"], found.sd),
        (printed["ci95"][0], found.low),
        (printed["ci95"][1], found.high),
        (printed["p"], found.p),
    ]
    return all(value is not None and agrees(expected, value) for expected, value in pairs)


def seed_sds() -> list[Row]:
    """The across-seed SDs in the caption of Table 3seed-percfg."""
    rows = []
    for task, runs in facts()["per_seed_accuracy"].items():
        for point, run in runs.items():
            values = [value / 100 for value in seed_accuracies(task, point).values()]
            sd = statistics.stdev(values)
            printed = run["sd_pp_printed"]
            rows.append(
                {
                    "task": task,
                    "point": point,
                    "accuracies": [value / 100 for value in values],
                    "printed": printed,
                    "recomputed": sd,
                    "match": agrees(printed, sd),
                    "src": run["src"],
                }
            )
    return rows


def not_applicable() -> Row:
    """N/A cells by the rule (gap-only keeps d, entropy-only keeps a), and the cells that remain."""
    configs, counts = facts()["configs"], facts()["counts"]
    per_task: dict[str, Row] = {}
    named_alike = True
    for task, rows in facts()["comparisons_36"].items():
        gates = {row["config"]: Gate(*configs[task][row["config"]]["abcd"]) for row in rows}
        cut = {name: {"gap_only": gate.gap_only(), "entropy_only": gate.entropy_only()} for name, gate in gates.items()}
        for row in rows:
            for side, restricted in cut[row["config"]].items():
                label = None if isinstance(restricted, NotApplicable) else restricted.label
                named_alike = named_alike and row[side] == label
        none = {
            side: sum(isinstance(c[side], NotApplicable) for c in cut.values()) for side in ("gap_only", "entropy_only")
        }
        per_task[task] = {"points": len(gates), **none, "comparable": 2 * len(gates) - sum(none.values())}
    total = {key: sum(row[key] for row in per_task.values()) for key in next(iter(per_task.values()))}
    split = counts["comparable"]["split"]
    checks = [
        ("points", "cells", total["points"], counts["cells"]["value"]),
        ("gap-only N/A (d = 0)", "todi_na", total["gap_only"], counts["todi_na"]["value"]),
        ("entropy-only N/A (a = 0)", "eopd_na", total["entropy_only"], counts["eopd_na"]["value"]),
        ("comparable", "comparable", total["comparable"], counts["comparable"]["value"]),
        *((f"comparable on {t}", "comparable", per_task[t]["comparable"], split[t]) for t in per_task),
    ]
    return {
        "tasks": per_task,
        "total": total,
        "checks": [
            {
                "what": what,
                "printed": printed,
                "recomputed": value,
                "match": printed == value,
                "src": counts[key]["src"],
            }
            for what, key, value, printed in checks
        ],
        "restrictions_named_alike": named_alike,
    }


def d_on_g2() -> list[Row]:
    """Table d-on-G2. A delta can be checked where the H point's accuracy is printed elsewhere; else it defines it.

    G2 is taken from the range of the grid (its best point minus the printed range), not from this table.
    """
    table, derived = facts()["delta_vs_G2_pp"], facts()["derived_seed42_accuracy"]
    rows = []
    for task in ("hate", "emotion"):
        best = {"hate": "G4", "emotion": "G5"}[task]
        g2 = seed_accuracies(task, best)[42] - round(100 * facts()["grid_range_pp"][task]["value"])
        for d, point in (("+2", "H1"), ("+4", "H2"), ("-2", "H3"), ("-4", "H4")):
            printed = table[task][d]
            known = point in facts()["per_seed_accuracy"][task]
            delta = (seed_accuracies(task, point)[42] - g2) / 100 if known else None
            n = facts()["tasks"][task]["n_test"]["value"]
            rows.append(
                {
                    "task": task,
                    "d": d,
                    "point": point,
                    "printed": printed,
                    "recomputed": delta,
                    "match": None if delta is None else agrees(printed, delta),
                    "examples": round(printed * n / 100),
                    "g2": g2 / 10_000,
                    "g2_derived": derived[task]["G2"]["acc"],
                    "src": table["src"],
                }
            )
    return rows


def best_observed() -> list[Row]:
    """Table best-observed: the best of each side at seed 42, beside the best that is known from other tables."""
    rows = []
    for task, printed in facts()["best_observed"].items():
        runs = facts()["per_seed_accuracy"][task]
        known = {point: seed_accuracies(task, point)[42] / 10_000 for point in runs}
        derived = facts()["derived_seed42_accuracy"][task]
        known |= {k.split(" ")[0]: v["acc"] for k, v in derived.items() if k != "bounds" and k[0] in "GH"}
        groups = {
            "static05": ("static λ=0.5", None),
            "gap_only_best": ("gap-only", "gap-only"),
            "entropy_only_best": ("entropy-only", "entropy-only"),
            "ours_best": ("family", ("G", "H")),
        }
        for key, (side, prefix) in groups.items():
            mine = {point: acc for point, acc in known.items() if prefix and point.startswith(prefix)}
            point = max(mine, key=lambda name: mine[name]) if mine else None
            # Of the restrictions most runs are not printed: the best known can only be a lower bound for the best.
            sure = key == "ours_best" or (point is not None and agrees(printed[key], mine[point], 4))
            rows.append(
                {
                    "task": task,
                    "side": side,
                    "printed": printed[key],
                    "best_known": None if point is None else {"point": point, "accuracy": mine[point]},
                    "match": agrees(printed[key], mine[point], 4) if sure and point is not None else None,
                    "consistent": None if point is None else mine[point] <= printed[key] + 1e-9,
                    "src": printed["src"],
                }
            )
    return rows


def named_cells() -> list[Row]:
    """Single differences that the text names, at seed 42."""
    sides = {
        "G4 vs mean-matched static": ("G4", "static0.556"),
        "HG4,d+2 vs gap-only(+2)": ("HG4,d+2", "gap-only(+2)"),
        "H1 vs entropy-only(-4)": ("H1", "entropy-only(-4)"),
    }
    rows = []
    for cell in facts()["named_cells_seed42_pp"]:
        delta = None
        if cell["cell"] in sides:
            left, right = (seed_accuracies(cell["task"], point)[42] for point in sides[cell["cell"]])
            delta = (left - right) / 100
        rows.append(
            {
                "task": cell["task"],
                "cell": cell["cell"],
                "printed": cell["delta"],
                "recomputed": delta,
                "match": None if delta is None else agrees(cell["delta"], delta),
                "src": cell["src"],
            }
        )
    return rows


def sampling_errors() -> list[Row]:
    """Binomial SE of one model's accuracy, at the mean accuracy of the task's table."""
    decimals = {"emotion": 1, "hate": 1, "offensive": 2}
    rows = []
    for task, runs in facts()["per_seed_accuracy"].items():
        n = facts()["tasks"][task]["n_test"]["value"]
        p = statistics.fmean(value / 10_000 for point in runs for value in seed_accuracies(task, point).values())
        se = 100 * math.sqrt(p * (1 - p) / n)
        printed = facts()["sampling_se_pp"][task]
        rows.append(
            {
                "task": task,
                "n": n,
                "accuracy": p,
                "printed": printed["value"],
                "recomputed": se,
                "match": agrees(printed["value"], se, decimals[task]),
                "src": printed["src"],
            }
        )
    return rows


def statements() -> list[Row]:
    """Figures in the text that follow from the tables."""
    other, counts, rows = facts()["other"], facts()["counts"], nine()
    sds = [row["recomputed"] for row in seed_sds()]
    shrink = [row["delta_1seed"] / row["mean"] for row in rows]
    half = [(row["ci"][1] - row["ci"][0]) / 2 / row["sd"] for row in rows]
    best = [value / 100 for value in seed_accuracies("emotion", "HG5,d+4").values()]
    positive = sum(row["mean"] > 0 for row in rows)
    smaller = sum(abs(row["mean"]) < abs(row["delta_1seed"]) for row in rows)
    errors = {row["task"]: row["recomputed"] for row in sampling_errors()}
    # The three dynamic points that have a static twin; over all points of the table it begins at 0.33.
    dynamic = [statistics.stdev(v / 100 for v in seed_accuracies(t, p).values()) for t, p in _DYNAMIC]
    headline = [row["mean"] for row in rows if row["mean"] > 0]
    found: list[tuple[str, Any, Any, bool, str]] = []

    def add(what: str, fact: Row, value: Any, decimals: int) -> None:
        printed = fact["value"]
        pairs = zip(printed, value, strict=True) if isinstance(printed, list) else [(printed, value)]
        found.append((what, printed, value, all(agrees(a, b, decimals) for a, b in pairs), fact["src"]))

    add("single-seed / three-seed, range", other["shrink_factor"], [min(shrink), max(shrink)], 1)
    add(
        "p of the nine, range",
        other["p_range"],
        [min(r["p"] for r in rows), max(r["p"] for r in rows)],
        2,
    )
    add("SD across seeds, range", other["across_seed_sd_range_pp"], [min(sds), max(sds)], 2)
    add("SD of dynamic runs with a twin, range", other["dynamic_sd_range_pp"], [min(dynamic), max(dynamic)], 1)
    add("half-width of the interval, in SDs", other["ci_halfwidth_in_sd"], half[0], 1)
    add("positive among the nine", counts["nine_positive"], [positive, len(rows)], 0)
    add("headline magnitudes", other["headline_pp"], [min(headline), max(headline)], 1)
    add("hate grid range in σ", {"value": 4, "src": facts()["grid_range_pp"]["hate"]["src"]}, 3.64 / errors["hate"], 0)
    add(
        "emotion grid range in σ",
        {"value": 0.5, "src": facts()["grid_range_pp"]["emotion"]["src"]},
        0.56 / errors["emotion"],
        1,
    )
    printed_best = other["emotion_HG5_d4_3seed"]
    mean, sd = statistics.fmean(best) / 100, statistics.stdev(best)
    matches = agrees(printed_best["value"][0], mean, 4) and agrees(printed_best["value"][1], sd)
    found.append(("emotion HG5,d+4 over seeds", printed_best["value"], [mean, sd], matches, printed_best["src"]))
    found.append(("three-seed mean below single-seed", 9, smaller, smaller == 9, "tab:3seed"))
    keys = ("what", "printed", "recomputed", "match", "src")
    return [dict(zip(keys, row, strict=True)) for row in found]


_DYNAMIC = (("emotion", "HG5,d+4"), ("hate", "G4"), ("offensive", "H1"))


def whole_counts() -> Row:
    """Is every printed accuracy a whole number of right answers? Nothing else could be printed."""
    checked = wrong = 0
    for runs in facts()["per_seed_accuracy"].values():
        for run in runs.values():
            for seed, acc in run["acc"].items():
                checked += 1
                wrong += hundredths(run["correct"][seed] / run["n"]) != hundredths(acc)
    return {"accuracies": checked, "not_a_count": wrong}
