"""The paper's tables, recomputed from its per-seed accuracies (four digits, as printed).

A `match` of None means that the printed value cannot be computed from the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

from gatespace.addons.paper.facts import SEEDS, agrees, facts, hundredths, seed_accuracies
from gatespace.evidence.paired import paired
from gatespace.evidence.records import Paired
from gatespace.gating.coefficients import Gate, NotApplicable

Row = dict[str, Any]
SELECTION_SEED = SEEDS[0]
_DYNAMIC = (("emotion", "HG5,d+4"), ("hate", "G4"), ("offensive", "H1"))
"""The dynamic points that have a static twin over seeds."""


def _check(printed: Any, value: Any, src: str, *, decimals: int | Sequence[int] = 2, **names: Any) -> Row:
    """Compare one or several printed figures with the computed ones."""
    row = {**names, "printed": printed, "recomputed": value, "match": None, "src": src}
    if value is not None:
        pairs = list(zip(printed, value, strict=True)) if isinstance(printed, list) else [(printed, value)]
        digits = [decimals] * len(pairs) if isinstance(decimals, int) else decimals
        row["match"] = all(agrees(a, b, n) for (a, b), n in zip(pairs, digits, strict=True))
    return row


def _percents(task: str, point: str) -> list[float]:
    """Printed accuracies over seeds, in %."""
    return [value / 100 for value in seed_accuracies(task, point).values()]


# ---------------------------------------------------------------------------------------------------- over seeds


def nine() -> list[Row]:
    """Table 3seed: mean, SD, t, p and interval of the nine replicated comparisons, with the printed values.

    The paper subtracts printed accuracies. `from_counts` subtracts correct responses: its last digit differs.
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
    runs = facts()["per_seed_accuracy"][printed["task"]]
    left, right = runs[printed["a"]], runs[printed["b"]]
    exact = _over_seeds({int(s): 100 * (left["correct"][s] - right["correct"][s]) / left["n"] for s in left["correct"]})
    single = values[SELECTION_SEED]
    return {
        **{key: printed[key] for key in ("axis", "task", "a", "b")},
        **_statistics(found),
        "t": found.t,
        "fresh_mean": statistics.fmean(value for seed, value in values.items() if seed != SELECTION_SEED),
        "seeds": list(found.seeds),
        "differences": list(found.differences),
        "delta_1seed": single,
        "sign_flip": {"p": found.sign_flip_p, "floor": found.sign_flip_floor},
        "mde": found.mde,
        "printed": {
            "delta_1seed": printed["delta_1seed"],
            "mean": printed["mean_3seed"],
            "sd": printed["sd"],
            "ci": printed["ci95"],
            "p": printed["p"],
        },
        "match": _matches(printed, found) and agrees(printed["delta_1seed"], single),
        "from_counts": {**_statistics(exact), "match": _matches(printed, exact)},
        "src": printed["src"],
    }


def _over_seeds(values: dict[int, float]) -> Paired:
    found = paired(values, dict.fromkeys(values, 0.0))  # differences of integer hundredths stay exact
    assert isinstance(found, Paired)
    return found


def _statistics(found: Paired) -> Row:
    return {"mean": found.mean, "sd": found.sd, "p": found.p, "ci": [found.low, found.high]}


def _matches(printed: Row, found: Paired) -> bool:
    expected = (printed["mean_3seed"], printed["sd"], *printed["ci95"], printed["p"])
    values = (found.mean, found.sd, found.low, found.high, found.p)
    return all(value is not None and agrees(a, value) for a, value in zip(expected, values, strict=True))


def seed_sds() -> list[Row]:
    """The across-seed SDs in the caption of Table 3seed-percfg."""
    rows = []
    for task, runs in facts()["per_seed_accuracy"].items():
        for point, run in runs.items():
            values = _percents(task, point)
            sd = statistics.stdev(values)
            names = {"task": task, "point": point, "accuracies": [value / 100 for value in values]}
            rows.append(_check(run["sd_pp_printed"], sd, run["src"], **names))
    return rows


# ---------------------------------------------------------------------------------------------------- one seed


def not_applicable() -> Row:
    """N/A cells by the rule (gap-only keeps d, entropy-only keeps a), and the remaining cells."""
    configs, counts = facts()["configs"], facts()["counts"]
    per_task: dict[str, Row] = {}
    named_alike = True
    for task, rows in facts()["comparisons_36"].items():
        none = {"gap_only": 0, "entropy_only": 0}
        for row in rows:
            gate = Gate(*configs[task][row["config"]]["abcd"])
            for side, restricted in (("gap_only", gate.gap_only()), ("entropy_only", gate.entropy_only())):
                label = None if isinstance(restricted, NotApplicable) else restricted.label
                none[side] += label is None
                named_alike = named_alike and row[side] == label
        per_task[task] = {"points": len(rows), **none, "comparable": 2 * len(rows) - sum(none.values())}
    total = {key: sum(row[key] for row in per_task.values()) for key in next(iter(per_task.values()))}
    checks = [
        ("points", "cells", total["points"], counts["cells"]["value"]),
        ("gap-only N/A (d = 0)", "todi_na", total["gap_only"], counts["todi_na"]["value"]),
        ("entropy-only N/A (a = 0)", "eopd_na", total["entropy_only"], counts["eopd_na"]["value"]),
        ("comparable", "comparable", total["comparable"], counts["comparable"]["value"]),
    ]
    for task, row in per_task.items():
        printed = counts["comparable"]["split"][task]
        checks.append((f"comparable on {task}", "comparable", row["comparable"], printed))
    return {
        "tasks": per_task,
        "total": total,
        "checks": [_check(printed, value, counts[key]["src"], what=what) for what, key, value, printed in checks],
        "restrictions_named_alike": named_alike,
    }


def d_on_g2() -> list[Row]:
    """Table d-on-G2. A delta can be checked if the H point's accuracy is printed elsewhere; else it defines it.

    G2 is taken from the range of the grid (its best point minus the printed range), not from this table.
    """
    table, derived = facts()["delta_vs_G2_pp"], facts()["derived_seed42_accuracy"]
    rows = []
    for task, best in (("hate", "G4"), ("emotion", "G5")):
        g2 = seed_accuracies(task, best)[42] - round(100 * facts()["grid_range_pp"][task]["value"])
        n = facts()["tasks"][task]["n_test"]["value"]
        for d, point in (("+2", "H1"), ("+4", "H2"), ("-2", "H3"), ("-4", "H4")):
            known = point in facts()["per_seed_accuracy"][task]
            delta = (seed_accuracies(task, point)[42] - g2) / 100 if known else None
            row = _check(table[task][d], delta, table["src"], task=task, d=d, point=point)
            row |= {"examples": round(row["printed"] * n / 100), "g2": g2 / 10_000}
            rows.append(row | {"g2_derived": derived[task]["G2"]["acc"]})
    return rows


def best_observed() -> list[Row]:
    """Table best-observed: the best of each side at seed 42, with the best known from other tables."""
    rows = []
    for task, printed in facts()["best_observed"].items():
        runs = facts()["per_seed_accuracy"][task]
        known = {point: seed_accuracies(task, point)[42] / 10_000 for point in runs}
        derived = facts()["derived_seed42_accuracy"][task]
        known |= {k.split(" ")[0]: v["acc"] for k, v in derived.items() if k != "bounds" and k[0] in "GH"}
        sides: dict[str, tuple[str, tuple[str, ...]]] = {
            "static05": ("static λ=0.5", ()),
            "gap_only_best": ("gap-only", ("gap-only",)),
            "entropy_only_best": ("entropy-only", ("entropy-only",)),
            "ours_best": ("family", ("G", "H")),
        }
        for key, (side, prefixes) in sides.items():
            row = {"task": task, "side": side, "printed": printed[key], "src": printed["src"]}
            row |= {"best_known": None, "match": None, "consistent": None}
            mine = {point: acc for point, acc in known.items() if point.startswith(prefixes)}
            if mine:
                point = max(mine, key=lambda name: mine[name])
                row["best_known"] = {"point": point, "accuracy": mine[point]}
                row["consistent"] = mine[point] <= printed[key] + 1e-9
                same = agrees(printed[key], mine[point], 4)
                # Most runs of restrictions are not printed, so the best known is only a lower bound.
                row["match"] = same if same or key == "ours_best" else None
            rows.append(row)
    return rows


def named_cells() -> list[Row]:
    """Individual differences mentioned in the text, at seed 42."""
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
        rows.append(_check(cell["delta"], delta, cell["src"], task=cell["task"], cell=cell["cell"]))
    return rows


def sampling_errors() -> list[Row]:
    """Binomial SE of one model's accuracy, at the mean accuracy of the task's table."""
    rows = []
    for task, decimals in (("emotion", 1), ("hate", 1), ("offensive", 2)):
        n, printed = facts()["tasks"][task]["n_test"]["value"], facts()["sampling_se_pp"][task]
        runs = facts()["per_seed_accuracy"][task]
        p = statistics.fmean(value / 10_000 for point in runs for value in seed_accuracies(task, point).values())
        se = 100 * math.sqrt(p * (1 - p) / n)
        rows.append(_check(printed["value"], se, printed["src"], decimals=decimals, task=task, n=n, accuracy=p))
    return rows


# ---------------------------------------------------------------------------------------------------- the text


def statements() -> list[Row]:
    """Figures in the text that follow from the tables."""
    other, counts, ranges, rows = facts()["other"], facts()["counts"], facts()["grid_range_pp"], nine()
    sds = [row["recomputed"] for row in seed_sds()]
    errors = {row["task"]: row["recomputed"] for row in sampling_errors()}
    shrink = [row["delta_1seed"] / row["mean"] for row in rows]
    ps = [row["p"] for row in rows]
    half = (rows[0]["ci"][1] - rows[0]["ci"][0]) / 2 / rows[0]["sd"]
    # Over all points of the table the range would start at 0.33.
    dynamic = [statistics.stdev(_percents(task, point)) for task, point in _DYNAMIC]
    positive = [row["mean"] for row in rows if row["mean"] > 0]
    best = _percents("emotion", "HG5,d+4")
    best_of_three = [statistics.fmean(best) / 100, statistics.stdev(best)]
    smaller = sum(abs(row["mean"]) < abs(row["delta_1seed"]) for row in rows)
    found: list[tuple[str, Row, Any, int | tuple[int, ...]]] = [
        ("single-seed / three-seed, range", other["shrink_factor"], [min(shrink), max(shrink)], 1),
        ("p of the nine, range", other["p_range"], [min(ps), max(ps)], 2),
        ("SD across seeds, range", other["across_seed_sd_range_pp"], [min(sds), max(sds)], 2),
        ("SD of dynamic runs with a twin, range", other["dynamic_sd_range_pp"], [min(dynamic), max(dynamic)], 1),
        ("half-width of the interval, in SDs", other["ci_halfwidth_in_sd"], half, 1),
        ("positive among the nine", counts["nine_positive"], [len(positive), len(rows)], 0),
        ("headline magnitudes", other["headline_pp"], [min(positive), max(positive)], 1),
        ("hate grid range in σ", {**ranges["hate"], "value": 4}, 3.64 / errors["hate"], 0),
        ("emotion grid range in σ", {**ranges["emotion"], "value": 0.5}, 0.56 / errors["emotion"], 1),
        ("emotion HG5,d+4 over seeds", other["emotion_HG5_d4_3seed"], best_of_three, (4, 2)),
        ("three-seed mean below single-seed", {"value": 9, "src": "tab:3seed"}, smaller, 0),
    ]
    return [
        _check(fact["value"], value, fact["src"], decimals=decimals, what=what) for what, fact, value, decimals in found
    ]


def whole_counts() -> Row:
    """Check that every printed accuracy is a whole number of correct responses, as it must be."""
    checked = wrong = 0
    for runs in facts()["per_seed_accuracy"].values():
        for run in runs.values():
            for seed, acc in run["acc"].items():
                checked += 1
                wrong += hundredths(run["correct"][seed] / run["n"]) != hundredths(acc)
    return {"accuracies": checked, "not_a_count": wrong}
