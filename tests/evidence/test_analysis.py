from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from gatespace.evidence.analysis import analyse
from gatespace.evidence.paired import bh
from gatespace.evidence.reach import level_of
from gatespace.evidence.records import ALL_TASKS, BlockClaim, Choice, Mixed, Paired, WinCount
from gatespace.gating.coefficients import NotApplicable
from gatespace.seeding import stream
from gatespace.study.records import Look
from tests.evidence import oracle
from tests.sample_study import sample_results, with_labels


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return sample_results(tmp_path_factory.mktemp("study"), tasks=("emotion", "hate"), rows=200, steps=4)


@pytest.fixture(scope="module")
def found(results):
    return analyse(results)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicated")
    return sample_results(
        folder, seeds=(42,), replication_seeds=(2, 3), rows=150, steps=4, replicated=(("H1", "entropy-only(-4)"),)
    )


def percent(results, task, point, seed):
    score = results.run(task, point, seed).scores["test"]
    return 100 * score.correct / score.count


def test_one_per_pair_of_points_in_the_order_of_the_plan(results, found):
    pairs = dict.fromkeys((c.task, c.axis, c.left, c.right) for c in results.comparisons)
    assert [(c.task, c.axis, c.left, c.right) for c in found.comparisons] == list(pairs)


def test_every_comparison_is_that_of_its_runs(results, found):
    checked = 0
    for c in found.comparisons:
        if c.status != "comparable":
            continue
        expected = [percent(results, c.task, c.left, s) - percent(results, c.task, c.right, s) for s in (42, 2, 3)]
        assert c.all.seeds == (42, 2, 3)
        assert c.all.differences == pytest.approx(expected, abs=1e-9)
        assert c.fresh.seeds == (2, 3)
        assert c.fresh.mean == pytest.approx(fmean(expected[1:]), abs=1e-9)
        assert len(c.run_ids) == 6
        assert c.run_ids[0] == results.run(c.task, c.left, 42).spec.id
        assert [seed for seed, _ in c.mcnemar] == [42, 2, 3]
        for (_, test), difference in zip(c.mcnemar, expected, strict=True):
            assert test.difference == pytest.approx(difference, abs=1e-9)
            assert test.n == 200
        assert c.bootstrap.mean == pytest.approx(c.all.mean, abs=1e-5)
        assert not c.bootstrap.over_seeds
        checked += 1
    assert checked > 100


def test_not_applicable_stays_with_its_reason(found):
    none = [c for c in found.comparisons if c.status == "n/a"]
    assert len(none) == 10 + 6
    assert {c.reason for c in none} == {"gap-only keeps d, and d = 0 here", "entropy-only keeps a, and a = 0 here"}
    assert all(c.all is None and c.fresh is None and c.bh is None and c.run_ids == () for c in none)


def test_the_restriction_axis_has_the_papers_structure(found):
    group = found.group("restriction")
    assert (group.comparable, group.not_applicable, group.missing) == (36, 16, 0)
    # cells that share an arm on the same side have covariance 1/12; ties are left out
    pairs = [
        ((c.task, c.left), (c.task, c.right))
        for c in found.comparisons
        if c.axis == "restriction" and c.all is not None and c.all.mean != 0
    ]
    shared = sum((a == x) + (b == y) for (a, b), (x, y) in itertools.permutations(pairs, 2))
    variance = len(pairs) / 4 + shared / 12
    assert group.wins.null_variance == pytest.approx(variance)
    assert group.wins.effective_n == pytest.approx(len(pairs) ** 2 / (4 * variance))
    assert group.wins.ties == 36 - len(pairs)
    assert found.group("restriction", task="emotion").comparable == 20
    assert found.group("restriction", task="hate").comparable == 16
    assert found.group("restriction", restriction="entropy-only").comparable == 20
    assert found.group("restriction", task="emotion", restriction="gap-only").comparable == 8
    assert found.group("restriction", task="weather") is None


def test_groups_are_block_means_of_their_comparisons(found):
    for group in found.groups:
        mine = [
            c
            for c in found.comparisons
            if c.axis == group.axis
            and c.status == "comparable"
            and group.task in (ALL_TASKS, c.task)
            and group.restriction in (None, c.restriction)
        ]
        assert isinstance(group.all, BlockClaim)
        assert isinstance(group.wins, WinCount)
        assert group.mean == pytest.approx(fmean(c.all.mean for c in mine))
        assert (group.wins.wins, group.wins.losses) == (
            sum(c.all.mean > 0 for c in mine),
            sum(c.all.mean < 0 for c in mine),
        )
        for block in group.all.blocks:
            values = [c.all.differences[c.all.seeds.index(block.seed)] for c in mine if c.task == block.task]
            assert block.mean == pytest.approx(fmean(values))
            assert block.cells == len(values)
        assert {b.seed for b in group.fresh.blocks} == {2, 3}
        assert group.fresh.excluded_seed == 42


def test_holm_over_the_claims(found):
    claimed = [g for g in found.groups if g.claimed]
    assert {(g.axis, g.restriction) for g in claimed} == {
        ("restriction", "entropy-only"),
        ("restriction", "gap-only"),
        ("static", None),
        ("isolation", "mean-matched"),
        ("control", None),
        ("published", None),
        ("gap", None),
    }
    assert {g.task for g in claimed} == {ALL_TASKS}
    raw = sorted(g.fresh.p for g in claimed)
    assert min(g.holm for g in claimed) == pytest.approx(min(1.0, 7 * raw[0]))
    assert all(g.holm is None for g in found.groups if not g.claimed)
    assert isinstance(found.group("restriction").mixed, Mixed)
    assert isinstance(found.group("static").mixed, Mixed)
    assert isinstance(found.group("restriction", task="hate").mixed, NotApplicable)


def test_bh_over_all_comparisons_from_fresh_seeds(found):
    judged = [c for c in found.comparisons if c.fresh is not None and c.fresh.p is not None]
    assert len(judged) > 100
    assert [c.bh for c in judged] == bh([c.fresh.p for c in judged])
    assert all(c.bh is None for c in found.comparisons if c not in judged)
    assert all(c.holm is None for c in found.comparisons), "nothing was replicated"


def test_anova_per_task(results, found):
    for task in ("emotion", "hate"):
        values = {p: {s: percent(results, task, p, s) for s in (42, 2, 3)} for p in results.points(task)}
        f, _, mse = oracle.two_way(values)
        assert found.anova[task].f == pytest.approx(f, rel=1e-8)
        assert found.anova[task].sd == pytest.approx(math.sqrt(mse), rel=1e-8)


def test_selection_is_on_validation_and_the_other_is_optimistic(results, found):
    chosen = found.selection["emotion"]
    val, test = (
        {
            p: fmean(results.run("emotion", p, s).scores[split].accuracy for s in (42, 2, 3))
            for p in results.points("emotion", "point")
        }
        for split in ("val", "test")
    )
    assert chosen.chosen.label == max(val, key=val.get)
    assert chosen.chosen.test == pytest.approx(test[chosen.chosen.label])
    assert chosen.observed.label == max(test, key=test.get)
    assert chosen.optimism == pytest.approx(100 * (max(test.values()) - chosen.chosen.test))
    assert set(chosen.sides) == {"family", "entropy-only", "gap-only", "static", "published"}
    assert chosen.sides["static"].observed.label == "static:0.5"
    assert chosen.sides["gap-only"].chosen.label.startswith("gap-only(")


def test_the_best_on_validation_is_chosen_whatever_test_says(results, found):
    label = next(p for p in results.points("emotion", "point") if p != found.selection["emotion"].observed.label)
    runs = {
        key: replace(run, scores={**run.scores, "val": with_labels(run.scores["val"], correct=run.scores["val"].count)})
        if (run.spec.task, run.spec.point) == ("emotion", label)
        else run
        for key, run in results.runs.items()
    }
    selection = analyse(replace(results, runs=runs)).selection["emotion"]
    assert (selection.chosen.label, selection.chosen.val) == (label, 1.0)
    assert selection.observed == found.selection["emotion"].observed


def test_baselines(results, found):
    base = found.baselines["hate"]
    start = results.baselines["hate"].start["test"]
    runs = [r.scores["test"] for r in results.done if r.spec.task == "hate" and r.spec.kind == "point"]
    assert base.start == start.accuracy
    assert base.best_constant_label == start.best_constant.label
    assert base.runs == 39
    assert base.gain == pytest.approx(100 * (fmean(r.accuracy for r in runs) - start.accuracy))
    assert base.done == sum(r.spec.task == "hate" for r in results.done)
    assert (base.rows, base.duplicates) == (200, 7)


def test_equal_results_give_equal_evidence(results, found):
    assert analyse(results) == found


def test_no_nan_anywhere(found):
    def walk(value):
        if isinstance(value, float):
            assert math.isfinite(value)
        elif is_dataclass(value):
            for field in fields(value):
                walk(getattr(value, field.name))
        elif isinstance(value, dict):
            for part in value.values():
                walk(part)
        elif isinstance(value, tuple | list):
            for part in value:
                walk(part)

    walk(found)


def test_an_effect_is_found(tmp_path):
    results = sample_results(tmp_path, effect=8.0, noise=0.3, rows=500, seeds=(1, 2, 3, 4, 5), steps=2, twins=())
    found = analyse(results)
    group = found.group("restriction")
    assert 5 < group.mean < 11
    assert group.fresh.low > 0
    assert group.wins.correlated_p < 0.01
    assert found.group("restriction", restriction="entropy-only").holm < 0.05
    cell = found.comparison("emotion", "H1", "entropy-only(-4)")
    assert cell.bootstrap.over_seeds
    assert cell.bootstrap.low > 0


# ------------------------------------------------------------------------------------------------- replication


def test_replicated_comparisons_are_the_headline(replicated):
    found = analyse(replicated)
    cell = found.comparison("emotion", "H1", "entropy-only(-4)")
    assert cell.role == "replication"
    assert cell.all.seeds == (42, 2, 3)
    assert cell.fresh.seeds == (2, 3)
    assert cell.holm == pytest.approx(cell.fresh.p), "the only headline"
    other = found.comparison("emotion", "H2", "entropy-only(-4)")
    assert (other.role, other.all.n, other.fresh, other.holm, other.bh) == ("sweep", 1, None, None, None)
    group = found.group("restriction")
    assert [b.cells for b in group.all.blocks] == [1, 1, 1]
    assert "over the 1 of 20 cells" in group.all.note
    assert group.wins.cells == 20


def test_selection_seed_alone_confirms_nothing(replicated):
    found = analyse(replicated)
    group = found.group("isolation", restriction="mean-matched")
    assert isinstance(group.all, BlockClaim)
    assert isinstance(group.fresh, NotApplicable)
    assert isinstance(found.anova["emotion"].p, float)


# ---------------------------------------------------------------------------------------------- what is missing


def test_failed_and_waiting_runs(tmp_path):
    results = sample_results(
        tmp_path,
        rows=80,
        steps=2,
        failed={"emotion-H1-s2": "out of memory", "todi": "no"},
        waiting=["emotion-G5-s42", "emotion-G5-s2", "emotion-G5-s3"],
    )
    found = analyse(results)
    cell = found.comparison("emotion", "H1", "entropy-only(-4)")
    assert (cell.status, cell.all.seeds, cell.reason) == ("comparable", (42, 3), "not both runs are done at seed 2")
    gone = found.comparison("emotion", "G4", "todi")
    assert (gone.status, gone.all, gone.fresh, gone.bootstrap, gone.mcnemar) == ("missing", None, None, None, ())
    assert found.comparison("emotion", "G5", "twin(G5)").status == "missing"
    group = found.group("restriction")
    assert (group.comparable, group.missing) == (19, 1)
    assert "17 of 19 cells" in group.all.note
    assert "G5" in found.selection["emotion"].note
    assert isinstance(found.selection["emotion"].chosen, Choice)
    assert found.selection["emotion"].chosen.label not in ("G5", "H1")
    assert isinstance(found.selection["emotion"].sides["published"].observed, Choice)
    assert "missing" in found.anova["emotion"].note


def test_nothing_is_done(tmp_path):
    results = sample_results(tmp_path, points=["G4", "H1"], rows=20, steps=2, seeds=(42,))
    empty = replace(
        results,
        runs={k: replace(r, state="waiting", scores={}) for k, r in results.runs.items()},
        baselines={},
    )
    found = analyse(empty)
    assert {c.status for c in found.comparisons} == {"missing", "n/a"}
    assert all(isinstance(g.wins, NotApplicable) and isinstance(g.all, NotApplicable) for g in found.groups)
    assert isinstance(found.anova["emotion"], NotApplicable)
    assert isinstance(found.selection["emotion"].chosen, NotApplicable)
    assert found.baselines["emotion"].start is None
    assert all(c.holm is None and c.bh is None for c in found.comparisons)


def test_one_seed(tmp_path):
    found = analyse(sample_results(tmp_path, points=["G4", "G5", "H1"], rows=60, steps=2, seeds=(42,), shuffled=()))
    cell = found.comparison("emotion", "H1", "entropy-only(-4)")
    assert isinstance(cell.all, Paired)
    assert (cell.all.p, cell.fresh, cell.bh) == (None, None, None)
    assert len(cell.mcnemar) == 1
    assert "seeds fixed" in cell.bootstrap.resampled
    assert isinstance(found.anova["emotion"], NotApplicable)


def test_predictions_that_are_gone_or_not_those_scored(tmp_path):
    results = sample_results(tmp_path, points=["G5"], rows=40, steps=2, published=())
    (results.run("emotion", "G5", 42).folder / "predictions-test.jsonl").unlink()
    path = results.run("emotion", "static:0.5", 2).folder / "predictions-test.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]))
    path = results.run("emotion", "twin(G5)", 3).folder / "predictions-test.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "label": row["gold"]}) + "\n" for row in rows))
    found = analyse(results)
    assert [seed for seed, _ in found.comparison("emotion", "G5", "twin(G5)").mcnemar] == [2]
    cell = found.comparison("emotion", "G5", "static:0.5")
    assert [seed for seed, _ in cell.mcnemar] == [3]
    assert cell.bootstrap.seeds == 1
    assert cell.all.n == 3


def test_needs_no_torch():
    script = "import sys, gatespace.evidence.analysis; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_comparisons_that_were_fixed_before_have_no_selection_seed_and_one_claim_per_axis(tmp_path):
    seeds, tasks = (11, 12, 13), ("emotion", "offensive", "hate")
    results = sample_results(tmp_path, seeds=seeds, tasks=tasks, rows=60, steps=2, nine=True, waiting=["hate-G4-s13"])
    found = analyse(results)
    assert results.selection_seed is None
    assert len(found.comparisons) == 9
    for c in found.comparisons:
        assert c.fresh == c.all
        assert c.holm is not None
    ours = {(c.task, c.left, c.right): c.all.seeds for c in found.comparisons}
    assert ours.pop(("hate", "G4", "twin(G4)")) == (11, 12)
    assert {*ours.values()} == {seeds}
    # A block is all comparisons of a task on the axis: the twin that has no partner at seed 13 takes no cell with it.
    claimed = {g.axis: g for g in found.groups if g.claimed}
    blocks = {axis: [(b.task, b.seed) for b in group.fresh.blocks] for axis, group in claimed.items()}
    every = [(task, seed) for task in tasks for seed in seeds]
    assert sorted(blocks["restriction"]) == sorted(every)
    assert sorted(blocks["isolation"]) == sorted({*every} - {("hate", 13)})
    claims = [(g.axis, g.restriction) for g in found.groups if g.holm is not None]
    assert claims == [("restriction", None), ("isolation", "mean-matched")]


def test_a_block_without_all_its_fixed_comparisons_does_not_count(tmp_path):
    seeds = (11, 12, 13)
    key = "offensive-gap-only(+2)-s12"
    results = sample_results(tmp_path, seeds=seeds, tasks=("offensive",), rows=60, steps=2, nine=True, waiting=[key])
    claim = analyse(results).group("restriction").fresh
    assert [(b.seed, b.cells) for b in claim.blocks] == [(11, 3), (13, 3)]


# ------------------------------------------------------------------------------------- families, twins and looks


def test_the_two_twins_of_a_point_are_two_groups(tmp_path):
    results = sample_results(tmp_path, points=["G2", "G5"], rows=60, steps=2, twins=("lam", "rkl"), published=())
    found = analyse(results)
    assert found.group("isolation") is None, "two different constants have no common mean"
    for part, prefix in (("mean-matched", "twin("), ("RKL-matched", "twin-rkl(")):
        group = found.group("isolation", restriction=part)
        assert group.claimed
        assert {cell.right for cell in group.all.cells} == {f"{prefix}G2)", f"{prefix}G5)"}
        assert {block.cells for block in group.all.blocks} == {2}
        assert isinstance(group.mixed, Mixed | NotApplicable)


def test_a_planned_group_counts_before_it_is_run(tmp_path):
    options = {"points": ["G4", "H1"], "rows": 60, "steps": 2, "published": ("todi",)}
    done = analyse(sample_results(tmp_path / "a", **options))
    part = analyse(sample_results(tmp_path / "b", **options, waiting=["todi", "twin(G4)", "twin(H1)", "shuffled(G5)"]))
    planned, tested = ([g for g in part.groups if g.claimed and (g.holm is not None) == is_done] for is_done in (0, 1))
    assert {g.axis for g in planned} == {"published", "isolation"}
    family = sum(g.claimed for g in done.groups)
    assert len(planned) + len(tested) == family
    smallest = min(tested, key=lambda g: g.judged.p)
    assert smallest.holm == pytest.approx(min(1.0, family * smallest.judged.p))


def test_a_later_look_lowers_the_level_and_widens_the_intervals_of_groups(results, found):
    looks = tuple(Look(str(i), 10 * i, {}) for i in range(1, 4))
    third = analyse(replace(results, looks=looks))
    assert (found.level, third.level) == (0.05, 0.05 / 9)
    for one, other in zip(found.groups, third.groups, strict=True):
        assert one.all.mean == other.all.mean
        assert (one.all.confidence, other.all.confidence) == (0.95, 1 - 0.05 / 9)
        assert other.all.low < one.all.low < one.all.high < other.all.high
    assert third.comparisons == found.comparisons, "single comparisons are not claimed, and not adjusted"


def test_false_claims_over_several_looks():
    """Seven groups without a difference, related as axes with common points are, and two more seeds at every look."""
    random = np.random.default_rng(stream(0, "looks"))
    studies, groups, looks = 4000, 7, 9
    shape = (studies, groups, 7 + 2 * (looks - 1))
    noise = math.sqrt(0.35) * random.standard_normal((studies, 1, shape[2]))
    noise = noise + math.sqrt(0.65) * random.standard_normal(shape)

    def p_of(values):
        n = values.shape[-1]
        return 2 * stats.t.sf(abs(values.mean(-1) / values.std(-1, ddof=1)) * math.sqrt(n), n - 1)

    def ever(level_at, last):
        claimed = np.zeros(studies, dtype=bool)
        for look in range(1, last + 1):
            seeds, level = 7 + 2 * (look - 1), level_at(look)
            fresh, every = p_of(noise[..., 1:seeds]), p_of(noise[..., :seeds])
            claimed |= ((fresh < level / groups) & (every < level)).any(1)
        return claimed.mean()

    assert ever(lambda look: 0.05, 4) > 0.08
    assert ever(level_of, 4) <= 0.05
    assert ever(level_of, 9) <= 0.05
    assert ever(lambda look: 0.05 / look, 9) > 0.055, "dividing by the number of looks is not enough"
