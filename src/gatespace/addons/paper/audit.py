"""The paper checked against its own numbers: tables recomputed, and an audit. Does not import torch.

Every audit entry has its numbers, and `says`, a summary built from them.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from gatespace.addons.paper import counts, tables
from gatespace.addons.paper.facts import facts, hundredths, seed_accuracies
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
        "group_claim": _group_claim(),
        "power": _power(),
        "omnibus": _omnibus(),
        "majority_class": _majority(),
        "duplicates": _duplicates(),
        "shared_comparators": _shared(),
        "infeasible_aggregate": _infeasible(),
        "mean_lambda": _mean_lambda(),
        "static_baseline": _static(),
        "reference_band": _band(),
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
