from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from statsmodels.stats.anova import anova_lm

from gatespace.evidence.groups import Difference, anova, block_claim, decisive, mixed
from gatespace.evidence.records import Mixed
from gatespace.gating.coefficients import NotApplicable
from tests.evidence import oracle


def table(points=6, seeds=3, *, effect=0.0, seed=0):
    rng = np.random.default_rng(seed)
    by_seed = rng.normal(0, 1, seeds)
    return {
        f"P{i}": {s: float(70 + effect * i + by_seed[s] + rng.normal()) for s in range(seeds)} for i in range(points)
    }


def by_formula(values):
    rows = [(p, s, v) for p, found in values.items() for s, v in found.items()]
    frame = pd.DataFrame(rows, columns=["point", "seed", "acc"])
    return anova_lm(smf.ols("acc ~ C(point) + C(seed)", frame).fit(), typ=2)


def test_anova_equals_sums_of_squares():
    values = table()
    found = anova(values)
    f, seed_f, mse = oracle.two_way(values)
    assert (found.f, found.seed_f, found.sd**2) == pytest.approx((f, seed_f, mse), rel=1e-9)
    assert (found.points, found.seeds, found.runs, found.df, found.note) == (6, 3, 18, (5, 10), "")


@pytest.mark.parametrize("missing", [(), (("P0", 1),), (("P1", 0), ("P4", 2), ("P5", 2))])
def test_anova_equals_the_formula_also_where_runs_are_missing(missing):
    values = table(seed=4, effect=0.3)
    for point, seed in missing:
        del values[point][seed]
    found, expected = anova(values), by_formula(values)
    f, p = expected.loc["C(point)", ["F", "PR(>F)"]]
    assert found.f == pytest.approx(f, rel=1e-9)
    assert found.p == pytest.approx(p, abs=0.05), "by permutation, and these errors are normal"
    assert (found.seed_f, found.seed_p) == pytest.approx(tuple(expected.loc["C(seed)", ["F", "PR(>F)"]]), rel=1e-9)
    assert found.note == (f"{len(missing)} of 18 runs are missing" if missing else "")


def test_anova_finds_what_is_there():
    assert anova(table(effect=3.0)).p == 1 / 5000, "no permutation separates the points as well"


def test_the_p_of_anova_is_the_share_of_permutations_within_seeds():
    """Three points and three seeds have 6³ permutations: all of them, by the formula's F."""
    values = table(3, 3, seed=1, effect=0.8)
    observed, every = by_formula(values).loc["C(point)", "F"], []
    for orders in itertools.product(itertools.permutations(values), repeat=3):
        permuted = {p: {s: values[orders[s][i]][s] for s in range(3)} for i, p in enumerate(values)}
        every.append(oracle.two_way(permuted)[0])
    exact = np.mean(np.array(every) >= observed - 1e-9)
    assert anova(values).p == pytest.approx(exact, abs=0.02)
    assert anova(values).p == anova(values).p


def test_anova_of_errors_that_are_not_normal():
    """A run that collapses now and then: F's own p would fire too rarely or too often, permutations do not."""
    alarms = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        values = {
            f"P{i}": {s: float(70 - 30 * (random.random() < 0.1) + random.normal()) for s in range(5)} for i in range(4)
        }
        alarms += anova(values).p <= 0.05
    assert alarms / 300 <= 0.05 + 0.026  # two standard errors


@pytest.mark.parametrize(
    "values, reason",
    [
        ({}, "fewer than two points"),
        ({"G1": {1: 70.0, 2: 71.0}}, "fewer than two points"),
        ({"G1": {1: 70.0}, "G2": {1: 71.0}}, "one seed"),
        ({"G1": {1: 70.0}, "G2": {2: 71.0}}, "do not separate"),
        ({"G1": {1: 70.0, 2: 71.0}, "G2": {1: 71.0}}, "too few runs"),
        ({"G1": {1: 70.0, 2: 71.0, 3: 72.0}, "G2": {1: 71.0, 2: 72.0, 3: 73.0}}, "without an error"),
        ({"G1": {1: 70.0, 2: 70.0}, "G2": {1: 70.0, 2: 70.0}}, "without an error"),
    ],
)
def test_anova_that_cannot_be_says_why(values, reason):
    found = anova(values)
    assert isinstance(found, NotApplicable)
    assert reason in found.reason


def test_anova_false_alarms():
    """5 % of 400 studies without a difference (SE 1.1 %)."""
    alarms = sum(anova(table(4, 3, seed=s)).p < 0.05 for s in range(400))
    assert alarms / 400 == pytest.approx(0.05, abs=0.033)


# ------------------------------------------------------------------------------------------------------ blocks


def cells(values):
    return [Difference(task, seed, left, right, value) for task, seed, left, right, value in values]


TWO_TASKS = cells(
    [
        ("emotion", 42, "G1", "E", 3.0),
        ("emotion", 42, "G2", "E", 1.0),
        ("emotion", 2, "G1", "E", 0.0),
        ("emotion", 2, "G2", "E", -1.0),
        ("hate", 42, "G1", "E", 4.0),
        ("hate", 2, "G1", "E", 0.5),
    ]
)


def test_block_means_and_the_seed_that_is_left_out():
    found = block_claim(TWO_TASKS)
    assert [(b.task, b.seed, b.mean, b.cells) for b in found.blocks] == [
        ("emotion", 42, 2.0, 2),
        ("emotion", 2, -0.5, 2),
        ("hate", 42, 4.0, 1),
        ("hate", 2, 0.5, 1),
    ]
    mean, sd = oracle.mean_sd([2.0, -0.5, 4.0, 0.5])
    assert (found.mean, found.sd) == pytest.approx((mean, sd))
    assert found.p == pytest.approx(oracle.t_two_sided(mean / (sd / 2), 3), abs=1e-8)
    assert found.sign_flip_p == oracle.sign_flip([4, -1, 8, 1])
    assert found.excluded_seed is None
    fresh = block_claim(TWO_TASKS, exclude_seed=42)
    assert [(b.task, b.seed) for b in fresh.blocks] == [("emotion", 2), ("hate", 2)]
    assert (fresh.mean, fresh.excluded_seed, fresh.n) == (0.0, 42, 2)


def test_many_cells_of_a_block_count_once():
    one = cells([("t", s, "G1", "E", v) for s, v in ((1, 1.0), (2, 2.0), (3, 4.0))])
    many = cells([("t", s, f"G{i}", "E", v) for s, v in ((1, 1.0), (2, 2.0), (3, 4.0)) for i in range(30)])
    assert block_claim(one).p == pytest.approx(block_claim(many).p)


def test_blocks_of_a_task_are_over_the_same_cells():
    some = cells(
        [("t", 42, "G1", "E", 9.0), ("t", 42, "G2", "E", 1.0), ("t", 2, "G2", "E", 2.0), ("t", 3, "G2", "E", 3.0)]
    )
    found = block_claim(some)
    assert [b.mean for b in found.blocks] == [1.0, 2.0, 3.0]
    assert "over the 1 of 2 cells that have every seed" in found.note


@pytest.mark.parametrize(
    "some, seed, reason",
    [
        ([], None, "no comparable runs"),
        (TWO_TASKS[:2], 42, "no seed other than"),
        (cells([("t", 1, "G1", "E", 1.0), ("t", 2, "G2", "E", 1.0)]), None, "no cell was run at every seed"),
    ],
)
def test_a_claim_that_cannot_be_says_why(some, seed, reason):
    found = block_claim(some, exclude_seed=seed)
    assert isinstance(found, NotApplicable)
    assert reason in found.reason


def test_one_block_has_a_mean_only():
    found = block_claim(TWO_TASKS[:2])
    assert (found.n, found.mean, found.p) == (1, 2.0, None)
    assert "one block" in found.note


# ------------------------------------------------------------------------------------------------- mixed model


def simulated(rng, *, shared_sd=1.0, run_sd=1.0, mean=0.0, seeds=3):
    """13 points against one comparator: cells of a block share its run."""
    found = []
    for task in ("a", "b"):
        for seed in range(seeds):
            right = rng.normal(0, shared_sd)
            found += [Difference(task, seed, f"G{i}", "E", mean + rng.normal(0, run_sd) - right) for i in range(13)]
    return found


def test_mixed_model_knows_the_variances():
    found = mixed(simulated(np.random.default_rng(1), seeds=40, mean=0.5))
    assert isinstance(found, Mixed)
    assert found.label == "anticonservative"
    assert found.variances["block"] == pytest.approx(1.0, rel=0.4)
    assert found.variances["residual"] == pytest.approx(1.0, rel=0.2)
    # cells that share a run do not make the mean as sure as their number says
    assert found.se == pytest.approx(math.sqrt((1 + 1 / 13) / 80), rel=0.25)
    assert found.low < 0.5 < found.high


def test_mixed_model_equals_statsmodels_where_its_hessian_can_be_inverted():
    some = simulated(np.random.default_rng(1), seeds=8, mean=0.5)
    frame = pd.DataFrame([{"value": d.value, "block": f"{d.task}{d.seed}"} for d in some])
    model = smf.mixedlm("value ~ 1", frame, groups="block").fit()  # one factor needs no crossing
    found = mixed(some)
    assert (found.mean, found.se) == pytest.approx((model.fe_params.iloc[0], model.bse_fe.iloc[0]), rel=1e-3)
    assert found.p == pytest.approx(model.pvalues.iloc[0], rel=1e-2)


@pytest.mark.parametrize("shared_sd", [0.0, 0.3, 1.0, 30.0])
def test_mixed_model_equals_the_analysis_of_variance_of_a_balanced_design(shared_sd):
    """13 cells in each of 6 blocks: the best variances have a closed form, also where the one of blocks is 0."""
    for seed in range(5):
        some = simulated(np.random.default_rng(seed), shared_sd=shared_sd, mean=50.0)
        values = np.array([d.value for d in some]).reshape(6, 13)
        between = 13 * values.mean(1).var(ddof=1)
        within = values.var(1, ddof=1).mean()
        if between < within:
            between = within = values.var(ddof=1)
        found = mixed(some)
        assert found.mean == pytest.approx(values.mean())
        assert found.se == pytest.approx(math.sqrt(between / values.size), rel=1e-3)
        assert found.variances["residual"] == pytest.approx(within, rel=1e-3)
        assert found.variances["block"] == pytest.approx((between - within) / 13, rel=1e-3, abs=1e-3)


def test_mixed_model_of_runs_that_say_all():
    """A difference is that of its two runs, and where both are in the model no residual is left."""
    rng = np.random.default_rng(3)
    some = []
    for seed in range(30):
        left, right = rng.normal(70, 1.0, 5), rng.normal(68, 2.0, 4)
        some += [Difference("t", seed, f"G{i}", f"E{j}", left[i] - right[j]) for i in range(5) for j in range(4)]
    found = mixed(some)
    assert isinstance(found, Mixed)
    assert found.variances["left"] == pytest.approx(1.0, rel=0.4)
    assert found.variances["right"] == pytest.approx(4.0, rel=0.4)
    assert found.variances["residual"] < 1e-4
    # every run counts once, however many cells it is in
    assert found.mean == pytest.approx(np.mean([d.value for d in some]), abs=1e-3)
    assert found.se == pytest.approx(math.sqrt((1 / 5 + 4 / 4) / 30), rel=0.25)
    shuffled = mixed([some[i] for i in rng.permutation(len(some))])
    assert (shuffled.mean, shuffled.se) == pytest.approx((found.mean, found.se), rel=1e-3)


@pytest.mark.parametrize(
    "some, reason",
    [
        ([], "too few"),
        (TWO_TASKS[:2], "too few"),
        (cells([("t", s, f"G{i}", "E", 1.0) for s in (1, 2) for i in range(5)]), "the same difference"),
        (cells([("t", s, f"G{i}", "E", math.nan) for s in (1, 2) for i in range(5)]), "is not fitted"),
    ],
)
def test_mixed_model_that_cannot_be_says_why(some, reason):
    found = mixed(some)
    assert isinstance(found, NotApplicable)
    assert reason in found.reason


def against(effects, *, seeds=5, noise=0.5):
    """One cell per right side, each with its effect and the same small noise per seed."""
    rng = np.random.default_rng(3)
    return [
        Difference("t", s, "G", right, effect + noise * rng.normal())
        for right, effect in effects.items()
        for s in range(seeds)
    ]


def test_a_point_that_turns_the_sign_of_a_group_decides_it():
    differences = against({"todi": -0.5, "akl": -0.4, "eopd": 24.0})
    claim = block_claim(differences)
    assert claim.mean > 7
    found = decisive(differences, claim)
    assert found.point == "eopd"
    assert found.without == block_claim([d for d in differences if d.right != "eopd"])
    assert found.without.mean < 0


def test_a_point_that_is_only_noisy_decides_nothing():
    differences = against({"todi": 2.0, "akl": 2.2, "far": 0.0}, noise=0.1)
    spread = [d._replace(value=d.value + (30 if d.seed % 2 else -22)) if d.right == "far" else d for d in differences]
    claim = block_claim(spread)
    assert claim.low < 0 < claim.high
    assert decisive(spread, claim) is None


def test_a_point_whose_removal_leaves_out_a_task_decides_nothing():
    first = against({"todi": -0.5, "akl": -0.4}, noise=0.1)
    second = [d._replace(task="other") for d in against({"eopd": 24.0}, noise=0.1)]
    claim = block_claim([*first, *second])
    assert claim.mean > 0 > block_claim(first).mean
    assert decisive([*first, *second], claim) is None


@pytest.mark.parametrize("rights", [{"quiet": 3, "noisy": 3}, {"quiet": 3, "noisy": 1}, {"quiet": 2, "noisy": 2}])
def test_without_any_effect_hardly_a_point_decides(rights):
    """Studies of four groups on two tasks, one with four times the noise of the other."""
    fired, studies = 0, 100
    random = np.random.default_rng(7)
    for _ in range(studies):
        groups = []
        points = {(t, s, i): random.normal() for t in rights for s in range(5) for i in range(3)}
        for _ in range(4):
            others = {(t, s, i): random.normal() for t in rights for s in range(5) for i in range(3)}
            groups.append(
                [
                    Difference(
                        t, s, f"G{i}", f"other{i}", (points[t, s, i] - others[t, s, i]) * (1 + 3 * (t == "noisy"))
                    )
                    for t, cells in rights.items()
                    for s in range(5)
                    for i in range(cells)
                ]
            )
        fired += any(decisive(group, block_claim(group), level=0.05 / 4) for group in groups)
    assert fired / studies <= 0.05


@pytest.mark.parametrize(
    "effects", [{"todi": 0.05, "akl": -0.1, "eopd": 0.1}, {"todi": 5.0, "akl": 4.0, "eopd": 9.0}, {"todi": 3.0}]
)
def test_means_next_to_0_and_groups_that_agree_are_decided_by_none(effects):
    differences = against(effects)
    assert decisive(differences, block_claim(differences)) is None
    assert decisive([], block_claim([])) is None
