"""The paper checked against its own numbers: tables recomputed, and an audit. Does not import torch.

Every audit entry has its numbers, and `says`, a summary built from them.
"""

from __future__ import annotations

import math
import statistics
from functools import cache
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from gatespace.addons.paper import counts, tables
from gatespace.addons.paper.facts import SEEDS, facts, hundredths, seed_accuracies
from gatespace.addons.paper.tables import SELECTION_SEED, Row, nine
from gatespace.evidence.counts import win_count
from gatespace.evidence.groups import Difference, anova, block_claim
from gatespace.evidence.paired import seeds_needed
from gatespace.evidence.records import Anova, BlockClaim, WinCount
from gatespace.gating.coefficients import Gate, NotApplicable
from gatespace.seeding import stream

SIMULATIONS = 99_999


def recompute() -> dict[str, Any]:
    """Every table with printed values, computed values and whether they match, plus the audit."""
    return {
        "nine": nine(),
        "seed_sds": tables.seed_sds(),
        "not_applicable": tables.not_applicable(),
        "d_on_g2": tables.d_on_g2(),
        "best_observed": tables.best_observed(),
        "named_cells": tables.named_cells(),
        "sampling_errors": tables.sampling_errors(),
        "statements": tables.statements(),
        "whole_counts": tables.whole_counts(),
        "win_counts": counts.win_counts(),
        "cells": counts.cells(),
        "mean_deltas": counts.mean_deltas(),
        "audit": audit(),
    }


def audit() -> dict[str, Row]:
    """Topic → numbers and a summary."""
    return {
        "fresh_seeds": _fresh_seeds(),
        "expected_without_effect": _without_effect(),
        "group_claim": _group_claim(),
        "power": _power(),
        "omnibus": _omnibus(),
        "hate_grid_range": _hate_range(),
        "seed_sds": _seed_sds(),
        "majority_class": _majority(),
        "duplicates": _duplicates(),
        "shared_comparators": _shared(),
        "adding_d": _adding_d(),
        "infeasible_aggregate": _infeasible(),
        "mean_lambda": _mean_lambda(),
        "static_baseline": _static(),
        "reference_band": _band(),
        "what_survives": _survives(),
    }


def _fresh_seeds() -> Row:
    rows = nine()
    pairs = [(s, d) for row in rows for s, d in zip(row["seeds"], row["differences"], strict=True)]
    single = [difference for seed, difference in pairs if seed != SELECTION_SEED]
    on_chosen, on_fresh = statistics.fmean(row["delta_1seed"] for row in rows), statistics.fmean(single)
    means, singles = _signs([row["fresh_mean"] for row in rows]), _signs(single)
    return {
        "selection_seed": SELECTION_SEED,
        "mean_on_selection_seed": on_chosen,
        "mean_on_fresh_seeds": on_fresh,
        "fresh_means": means,
        "single_differences": singles,
        "says": f"Seed {SELECTION_SEED} both selects the nine comparisons and counts in their replication. On it their "
        f"mean is {on_chosen:+.2f} pp, on the fresh seeds 2 and 3 it is {on_fresh:+.2f} pp: {means['positive']} of the "
        f"nine means are positive, {means['zero']} is zero, {means['negative']} are negative, and the {len(single)} "
        f"single differences split {singles['positive']} to {singles['negative']}.",
    }


def _without_effect() -> Row:
    """The nine if seed 42 is as printed and points differ by noise alone on the other two seeds."""
    rows, noise = nine(), {task: row["residual_sd"] for task, row in _omnibus()["tasks"].items()}
    runs = list(dict.fromkeys((row["task"], row[side]) for row in rows for side in ("a", "b")))
    left, right = ([runs.index((row["task"], row[side])) for row in rows] for side in ("a", "b"))
    generator = np.random.default_rng(stream(0, "paper", "no effect"))
    fresh = len(SEEDS) - 1
    # A run is drawn once for all comparisons that share it. The sum over n seeds has √n times the SD of one.
    sums = generator.normal(size=(SIMULATIONS, len(runs))) * [math.sqrt(fresh) * noise[task] for task, _ in runs]
    selected = np.array([row["delta_1seed"] for row in rows])
    means = (selected + sums[:, left] - sums[:, right]) / (1 + fresh)
    positive = sum(row["mean"] > 0 for row in rows)
    at_least = float(((means > 0).sum(axis=1) >= positive).mean())
    shrink = float((abs(means) < abs(selected)).all(axis=1).mean())
    expected, observed = float(selected.mean()) / (1 + fresh), statistics.fmean(row["mean"] for row in rows)
    return {
        "model": f"seed {SELECTION_SEED} as printed; on the other seeds each run is normal noise about a common mean, "
        "with its task's residual SD, shared by all comparisons that use the run",
        "noise_sd": noise,
        "positive": positive,
        "p_as_many_positive": at_least,
        "p_all_shrink": shrink,
        "expected_mean": expected,
        "mean": observed,
        "p_mean": float((means.mean(axis=1) >= observed).mean()),
        "simulations": SIMULATIONS,
        "says": f"{positive} of nine three-seed means stay positive and all nine shrink, which is to be expected "
        f"without any effect: with seed {SELECTION_SEED} as printed and noise alone on seeds 2 and 3 (residual SD of "
        f"the task, runs shared as they are), at least {positive} are positive with probability {at_least:.2f}, all "
        f"nine shrink with probability {shrink:.2f}, and the expected mean of the nine is {expected:+.2f} pp (printed: "
        f"{observed:+.2f} pp).",
    }


def _signs(values: list[float]) -> dict[str, int]:
    above, below = sum(value > 1e-9 for value in values), sum(value < -1e-9 for value in values)
    return {"positive": above, "zero": len(values) - above - below, "negative": below}


def _group_claim() -> Row:
    cells = [
        Difference(row["task"], seed, row["a"], row["b"], d)
        for row in facts()["nine"]
        for seed, d in tables.differences(row).items()
    ]
    whole, fresh = block_claim(cells), block_claim(cells, exclude_seed=SELECTION_SEED)
    assert isinstance(whole, BlockClaim)
    assert isinstance(fresh, BlockClaim)
    return {
        "all_seeds": _claim(whole),
        "fresh_seeds": _claim(fresh),
        "says": f"As one claim over the nine, by means of (task, seed) blocks: {whole.mean:+.2f} pp, p = {whole.p:.3f} "
        f"over {whole.n} blocks with the selection seed, and {fresh.mean:+.2f} pp, p = {fresh.p:.2f} (sign-flip "
        f"{fresh.sign_flip_p:.2f}) over {fresh.n} blocks without it.",
    }


def _claim(claim: BlockClaim) -> Row:
    return {
        "blocks": claim.n,
        "mean": claim.mean,
        "sd": claim.sd,
        "t": claim.t,
        "p": claim.p,
        "ci": [claim.low, claim.high],
        "sign_flip": {"p": claim.sign_flip_p, "floor": claim.sign_flip_floor},
        "mde": claim.mde,
    }


def _power() -> Row:
    rows = nine()
    mdes = [row["mde"] for row in rows]
    needed = {f"{sd:.1f}": seeds_needed(sd, 1.0) for sd in (1.0, 1.5, 2.0)}
    visible = sum(abs(row["mean"]) >= row["mde"] for row in rows)
    return {
        "mde": {"smallest": min(mdes), "largest": max(mdes)},
        "means_at_least_their_mde": visible,
        "seeds_needed_for_1pp_by_sd": needed,
        "sign_flip_floor": rows[0]["sign_flip"]["floor"],
        "says": f"With three seeds and the SDs of these rows only gaps of {min(mdes):.1f} to {max(mdes):.1f} pp would "
        f"be found in 80 % of repetitions; {visible or 'none'} of the nine means is as large. An exact sign-flip "
        f"test of three pairs cannot give a p below {rows[0]['sign_flip']['floor']:.2f}. To find 1 pp takes "
        f"{', '.join(map(str, needed.values()))} seeds where the SD of the differences is {', '.join(needed)} pp.",
    }


@cache
def _omnibus() -> Row:
    tasks: dict[str, Row] = {}
    for task, runs in facts()["per_seed_accuracy"].items():
        found = anova({point: {s: v / 100 for s, v in seed_accuracies(task, point).items()} for point in runs})
        assert isinstance(found, Anova)
        numbers = {"f": found.f, "df": list(found.df), "p": found.p}
        tasks[task] = numbers | {"residual_sd": found.sd, "points": found.points}
    parts = [f"{task} F({r['df'][0]}, {r['df'][1]}) = {r['f']:.2f}, p = {r['p']:.2f}" for task, r in tasks.items()]
    return {
        "tasks": tasks,
        "says": f"No task shows a difference among its replicated points (two-way ANOVA, point + seed): "
        f"{'; '.join(parts)}.",
    }


def _hate_range() -> Row:
    """The range of the five grid points on hate, against that of five runs that differ by noise alone."""
    printed, points = facts()["grid_range_pp"]["hate"]["value"], 5
    sd = _omnibus()["tasks"]["hate"]["residual_sd"]
    limit = sd * float(stats.studentized_range.ppf(0.95, points, math.inf))
    p = float(stats.studentized_range.sf(printed / sd, points, math.inf))
    return {
        "range": printed,
        "noise_sd": sd,
        "noise_95": limit,
        "p": p,
        "says": f"Hate's range of {printed:.2f} pp over the grid, printed as 4 σ of test sampling, is within seed "
        f"noise: {points} runs that differ by noise alone (SD {sd:.2f} pp, hate's residual SD) have a range above "
        f"{limit:.1f} pp in 5 % of grids and one of at least {printed:.2f} pp in {100 * p:.0f} %.",
    }


def _seed_sds() -> Row:
    """The ratio of the largest to the smallest SD of three seeds if all runs of a task have the same variance."""
    rows, (low, high) = tables.seed_sds(), facts()["other"]["across_seed_sd_range_pp"]["value"]
    sds = [row["recomputed"] for row in rows]
    within = {
        task: math.sqrt(statistics.fmean(row["recomputed"] ** 2 for row in rows if row["task"] == task))
        for task in facts()["per_seed_accuracy"]
    }
    df = len(SEEDS) - 1
    generator = np.random.default_rng(stream(0, "paper", "SDs of equal variances"))
    drawn = np.sqrt(generator.chisquare(df, (SIMULATIONS, len(rows))) / df) * [within[row["task"]] for row in rows]
    ratios, ratio = drawn.max(axis=1) / drawn.min(axis=1), max(sds) / min(sds)
    median, share = float(np.median(ratios)), float((ratios >= ratio).mean())
    return {
        "ratio": ratio,
        "median_ratio_of_equal_variances": median,
        "p": share,
        "within_sd": within,
        "simulations": SIMULATIONS,
        "says": f"SDs across seeds of {low:.2f} to {high:.2f} pp, called an order of magnitude apart, are as far apart "
        f"as equal variances make them: {len(sds)} SDs of three seeds each, with one variance per task, have a median "
        f"ratio of largest to smallest of {median:.0f}; here it is {ratio:.1f}.",
    }


def _majority() -> Row:
    tasks: dict[str, Row] = {}
    for task, runs in facts()["per_seed_accuracy"].items():
        printed = [acc for run in runs.values() for acc in run["acc"].values()]
        printed += [acc for key, acc in facts()["best_observed"].get(task, {}).items() if key not in ("correct", "src")]
        majority = facts()["tasks"][task]["external"]["majority_acc"]
        below = sum(hundredths(acc) < hundredths(majority) for acc in printed)
        tasks[task] = {"majority": majority, "best_printed": max(printed), "below": below, "of": len(printed)}
    hate = tasks["hate"]
    return {
        "tasks": tasks,
        "says": f"On hate, giving every text the label not-hate is right in {hate['majority']:.4f} of cases. "
        f"{hate['below']} of the {hate['of']} printed hate accuracies are below that, the best at "
        f"{hate['best_printed']:.4f}. Accuracy alone says little there; TweetEval's metric, macro-F1, is not given.",
    }


def _duplicates() -> Row:
    tasks = {
        task: {"rows": known["external"]["test_rows_whose_text_is_in_train"], "of": known["n_test"]["value"]}
        for task, known in facts()["tasks"].items()
    }
    hate = tasks["hate"]
    return {
        "tasks": tasks,
        "says": f"{hate['rows']} of the {hate['of']} hate test texts ({100 * hate['rows'] / hate['of']:.1f} %) stand "
        f"verbatim in train (offensive {tasks['offensive']['rows']}, emotion {tasks['emotion']['rows']}): accuracy is "
        "needed with and without them.",
    }


def _shared() -> Row:
    generator = np.random.default_rng(stream(0, "paper", "win count"))
    found = win_count(counts.null_cells(), generator=generator, simulations=SIMULATIONS)
    assert isinstance(found, WinCount)
    sharing = counts.sharing()
    most = sharing[0]
    return {
        "most_shared": most,
        "sharing": sharing,
        **{key: value for key, value in vars(found).items() if key not in ("ties", "note")},
        "says": f"Cells share runs: {most['restriction']} is the comparator of {most['cells']} of the {most['of']} "
        f"{most['task']} cells. Where nothing differs, the number of wins among {found.cells} cells has variance "
        f"{found.null_variance:.1f} and not {found.naive_variance:.0f}: it is worth {found.effective_n:.1f} "
        f"independent cells. Independent cells would give {found.wins} of {found.cells} a p of {found.naive_p:.0e}, "
        f"runs that are shared as they are {found.correlated_p:.0e}. Both take the published count as it is, and speak "
        "of the runs of one seed, not of other seeds.",
    }


def _adding_d() -> Row:
    """8 of 8 on G2 and 0 of 4 on hate's G4, if every order of the runs of a task is equally likely."""
    on_g2, on_g4 = facts()["counts"]["d_on_G2"]["value"][1], facts()["counts"]["HG4_vs_G4_positive"]["value"][1]
    tasks, grid = 2, 5
    each = on_g2 // tasks
    p_g2 = 2 * (1 / (each + 1)) ** tasks
    lowest = (grid / (grid + each)) ** tasks
    p_g4 = grid / (grid + on_g4)
    return {
        "on_g2": {"positive": on_g2, "of": on_g2, "p": p_g2, "p_if_g2_is_the_lowest_of_its_grid": lowest},
        "on_hate_g4": {"positive": 0, "of": on_g4, "p": p_g4},
        "says": f"Adding d to G2 improves {on_g2} of {on_g2} cells, but the {each} of a task share one run of G2: if d "
        f"does nothing, all {on_g2} have the same sign with p = {p_g2:.2f} (and the lowest of the {grid} grid points, "
        f"as G2 is on both tasks, is below all {on_g2} with p = {lowest:.2f}). Adding d to hate's G4 improves 0 of "
        f"{on_g4}: G4 was chosen as the best of {grid}, and the best of {grid} is above {on_g4} further runs with "
        f"p = {p_g4:.2f}. Neither shows that d helps or that granularities clash.",
    }


def _infeasible() -> Row:
    row = next(row for row in counts.mean_deltas() if row["group"] == "emotion_entropy")
    return {
        **row,
        "says": f"Emotion, entropy-only: a mean of {row['printed']:+.2f} pp over {row['cells']} cells is a sum of "
        f"{row['known_sum'] + row['needed'][0]} to {row['known_sum'] + row['needed'][1]} correct responses. "
        f"{row['known_cells']} cells are known and sum to {row['known_sum']}, which leaves {row['needed'][0]} to "
        f"{row['needed'][1]} for the other {row['open_cells']} (at most {row['needed_widest'][1]} however "
        "accuracies were rounded). If 11 of 12 lead, and 3 of 4 HG5 points are above G5, these sum to at least "
        f"{row['minimum']}, a mean of {row['smallest_mean']:+.2f} pp. The published figures fit together only if an "
        f"exact tie counts as a lead (then at least {row['minimum_with_ties']}).",
    }


def _mean_lambda() -> Row:
    points: list[Row] = []
    for task, configs in facts()["comparisons_36"].items():
        for row in configs:
            gate = Gate(*facts()["configs"][task][row["config"]]["abcd"])
            cut = gate.entropy_only()
            if isinstance(cut, NotApplicable):
                continue
            names = {"task": task, "point": row["config"], "restriction": cut.label}
            points.append(names | {"lam": list(gate.lam_range()), "restriction_lam": list(cut.lam_range())})
    g1 = next(row for row in points if row["point"] == "G1")
    return {
        "entropy_only": points,
        "says": "Matched magnitude does not match the mean of λ: entropy-only has no bias, so its λ is never above "
        f"{g1['restriction_lam'][1]:.1f}, while G1's is never below {g1['lam'][0]:.1f}. A difference between them can "
        "be a difference of the average KL weight alone.",
    }


def _static() -> Row:
    found = counts.above_static()
    return {
        **found,
        "says": f"On hate at seed {found['seed']}, the constant λ = 0.5 ({found['static']:.4f}) is above every "
        f"entropy-only ({found['best_entropy_only']:.4f}) and gap-only run ({found['best_gap_only']:.4f}), so a lead "
        f"over a restriction is not a lead over no gate: of the {found['family_known']} family runs known there, "
        f"{found['family_above']} are above it.",
    }


def _band() -> Row:
    printed = next(cell for cell in facts()["named_cells_seed42_pp"] if "sigma_printed" in cell)
    n, p = facts()["tasks"]["emotion"]["n_test"]["value"], facts()["best_observed"]["emotion"]["entropy_only_best"]
    sigma = 100 * (p * (1 - p) / n) ** 0.5
    one, two = abs(printed["delta"]) / sigma, abs(printed["delta"]) / (sigma * 2**0.5)
    return {
        "delta": printed["delta"],
        "printed_sigma": printed["sigma_printed"],
        "one_model": one,
        "two_models": two,
        "says": f"The reference band changes: 0.56 pp on emotion is called 0.5 σ in one place (SE of one model, here "
        f"{one:.2f}) and {printed['sigma_printed']} σ in another (SE of a difference of two, {two:.2f}). Neither knows "
        "that both models see the same examples, nor anything of seeds.",
    }


def _survives() -> Row:
    wins, cells = facts()["counts"]["wins"]["value"], facts()["counts"]["comparable"]["value"]
    return {
        "says": "What survives: the parameterization, with direction-aligned proxies of EOPD and ToDi as points of it, "
        f"and a lead over matched restrictions in {wins} of {cells} cells at one seed, which chance alone hardly gives "
        "but a different mean of λ may; no effect size, no single comparison, no ranking of points and no benefit of "
        "varying λ over tokens is shown.",
    }
