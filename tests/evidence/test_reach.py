"""What a study could support: counting, held against the tests that the evidence itself uses."""

from __future__ import annotations

import pytest

from gatespace.cli.study_file import load_study
from gatespace.config import StudyConfig, parse_config
from gatespace.evidence.groups import Difference, block_claim
from gatespace.evidence.paired import holm, summarise
from gatespace.evidence.reach import ALPHA, least_differences, part_of, reach, sign_flip_floor
from gatespace.study.plan import make_plan


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 9])
def test_the_floor_is_what_the_most_extreme_results_have(n):
    best = summarise([1.0 + i / 1000 for i in range(n)])
    assert best.sign_flip_p == sign_flip_floor(n) == best.sign_flip_floor
    assert (best.sign_flip_p < ALPHA) == (n >= least_differences())
    assert best.p < best.sign_flip_p  # the t-test is no bound


@pytest.mark.parametrize("family", [1, 2, 9, 29])
def test_one_of_a_family_after_holm(family):
    enough = least_differences(family)
    for n, holds in ((enough - 1, False), (enough, True)):
        assert (holm([sign_flip_floor(n), *[1.0] * (family - 1)])[0] < ALPHA) == holds


def planned(seeds, tasks=1, **more):
    settings = {
        "name": "s",
        "tasks": {f"t{i}": {"task": {"name": "synthetic"}} for i in range(tasks)},
        "train": {"pair": {"student": "tiny-student", "teacher": "tiny"}},
        "points": ["G2", "G5", "H2"],
        "axes": {"published": ["todi", "akl"], "controls": {"shuffled": ["G5"]}},
        "seeds": seeds,
    }
    return make_plan(parse_config(StudyConfig, settings | more))


@pytest.mark.parametrize(
    ("seeds", "tasks", "more"),
    [
        ([1, 2, 3], 1, {}),
        ([1, 2, 3, 4, 5, 6], 1, {}),
        ([1, 2, 3, 4, 5, 6, 7], 1, {}),
        ([1, 2, 3, 4], 2, {}),
        ([1], 1, {"replication": {"comparisons": "all", "seeds": [2, 3, 4, 5, 6, 7]}}),
        (
            [1, 2],
            2,
            {
                "replication": {
                    "comparisons": [{"task": "t1", "left": "G5", "right": "static:0.5"}],
                    "seeds": [3, 4, 5, 6, 7, 8],
                }
            },
        ),
    ],
)
def test_group_claims_are_counted_as_the_evidence_will_count_them(seeds, tasks, more):
    plan = planned(seeds, tasks, **more)
    found = reach(plan.comparisons, seeds[0])
    for claim in (claim for claim in found.claims if claim.kind == "group"):
        cells = [c for c in plan.comparisons if (c.axis, part_of(c)) == (claim.axis, claim.restriction)]
        best = [
            Difference(c.task, c.seed, c.left, c.right, 1.0 + c.seed / 1000) for c in cells if c.status == "comparable"
        ]
        blocks = block_claim(best, exclude_seed=seeds[0])
        assert claim.fresh == blocks.n
        assert claim.least_p == blocks.sign_flip_floor
        assert claim.possible == (blocks.sign_flip_p is not None and blocks.sign_flip_p < ALPHA)


def test_the_seeds_that_it_names_are_enough_and_one_less_is_not():
    for tasks in (1, 2, 3):
        needed = reach(planned([1], tasks).comparisons, 1).seeds_needed
        assert reach(planned([*range(1, needed)], tasks).comparisons, 1).is_empty
        assert not reach(planned([*range(1, needed + 1)], tasks).comparisons, 1).is_empty
    single = next(c for c in reach(planned([1]).comparisons, 1).claims if (c.kind, c.axis) == ("single", "published"))
    assert single.family == 6  # three points, two methods
    for seeds, holds in ((single.seeds_needed - 1, False), (single.seeds_needed, True)):
        again = reach(planned([*range(seeds)]).comparisons, 0).claims
        assert next(c for c in again if (c.kind, c.axis) == ("single", "published")).possible == holds


def test_single_comparisons_that_are_replicated_are_one_family():
    more = {"comparisons": [{"task": "t0", "left": "G5", "right": "akl"}], "seeds": [2, 3, 4, 5, 6, 7]}
    claims = reach(planned([1], replication=more).comparisons, 1).claims
    (single,) = [claim for claim in claims if claim.kind == "single"]
    assert (single.axis, single.comparisons, single.family, single.possible) == ("published", 1, 1, True)


def test_the_demo_can_answer_and_three_seeds_cannot():
    plan = make_plan(load_study("demo"))
    assert all(c.possible for c in reach(plan.comparisons, 42).claims if c.kind == "group")
    few = make_plan(load_study("demo", ["seeds=[42,2,3]"]))
    assert reach(few.comparisons, 42).is_empty
    assert reach(few.comparisons, 42).seeds_needed == 7


def test_comparisons_that_were_fixed_before_need_no_seed_for_a_choice():
    found = reach(make_plan(load_study("replication")).comparisons, None)
    claims = {(c.axis, c.restriction, c.kind): (c.fresh, c.possible, c.seeds_needed) for c in found.claims}
    assert claims == {
        ("restriction", None, "group"): (18, True, 2),
        ("restriction", None, "single"): (6, False, 9),
        ("isolation", "mean-matched", "group"): (18, True, 2),
        ("isolation", "mean-matched", "single"): (6, False, 9),
    }
