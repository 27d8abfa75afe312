"""The first screen: sentences that say no more than the statistics do."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from gatespace.evidence.analysis import analyse
from gatespace.evidence.power import detectable
from gatespace.report.findings import find
from gatespace.report.view import View
from gatespace.study.records import Look
from gatespace.training.warnings import Concern
from tests.sample_study import sample_results, with_labels

SMALL = {"rows": 120, "steps": 4, "points": ("G2", "G5", "H1", "H3")}


def findings(folder, **options):
    results = sample_results(folder, **{**SMALL, **options})
    view = View(results, analyse(results))
    return find(view), view


def test_one_seed_is_descriptive_whatever_the_numbers(tmp_path):
    found, _ = findings(tmp_path, seeds=(42,), effect=20.0)
    assert {claim.verdict for claim in found.claims} == {"descriptive"}
    assert "One seed" in found.headline
    for text in (found.headline, *found.limits, *(claim.text for claim in found.claims)):
        assert "p =" not in text
        assert "CI" not in text
        assert "significan" not in text


def test_one_seed_on_several_tasks_is_still_one_seed(tmp_path):
    found, _ = findings(tmp_path, seeds=(42,), tasks=("emotion", "hate", "offensive"), effect=20.0)
    assert {claim.verdict for claim in found.claims} == {"descriptive"}


def test_three_seeds_never_support_a_claim_however_large(tmp_path):
    found, _ = findings(tmp_path, effect=15.0, noise=0.1)
    verdicts = {(claim.axis, claim.restriction): claim.verdict for claim in found.claims}
    assert verdicts["restriction", "entropy-only"] == "lead"
    assert "supported" not in verdicts.values()
    text = next(claim.text for claim in found.claims if claim.restriction == "entropy-only")
    assert "too few for a test without assumptions" in text


def test_many_seeds_and_a_large_effect_are_supported(tmp_path):
    found, view = findings(tmp_path, effect=12.0, noise=0.3, seeds=tuple(range(1, 10)))
    claim = next(claim for claim in found.claims if claim.restriction == "entropy-only")
    assert claim.verdict == "supported"
    group = view.analysis.group("restriction", restriction="entropy-only")
    assert f"mean +{group.all.mean:.2f} pp" in claim.text
    assert "Without the selection seed 1:" in claim.text
    # Points with d and without are both of the family: what is not there is not found.
    assert next(claim for claim in found.claims if claim.axis == "gap").verdict != "supported"


def test_what_is_not_there_is_said_with_what_would_show(tmp_path):
    found, view = findings(tmp_path, noise=1.0)
    claims = [claim for claim in found.claims if claim.verdict == "none"]
    assert claims
    for claim in claims:
        group = view.analysis.group(claim.axis, restriction=claim.restriction)
        assert claim.text.startswith("No detectable difference between")
        assert "2 seeds cannot support a difference, however large." in claim.text
        low, high = (f"{end:.2f}".replace("-", "−") for end in (group.all.low, group.all.high))
        assert f"95 % CI [{low}, {high}] over 3 seeds" in claim.text


def test_a_claim_over_a_part_of_the_comparisons_says_so(tmp_path):
    found, _ = findings(tmp_path, replication_seeds=(7, 8, 9), replicated=(("H1", "entropy-only(-4)"),))
    text = next(claim.text for claim in found.claims if claim.restriction == "entropy-only")
    assert "for the 1 of 4 comparisons that have all of them" in text


def test_training_stands_beside_start_teacher_and_best_constant(tmp_path):
    found, view = findings(tmp_path)
    known = view.analysis.baselines["emotion"]
    for share in (known.trained, known.start, known.teacher, known.best_constant):
        assert f"{100 * share:.1f} %" in found.training[0]


def test_runs_that_may_end_early_are_counted_with_their_rule(tmp_path):
    results = sample_results(tmp_path, **SMALL)
    plain = find(View(results, analyse(results))).training[0]
    train = {"pair": {"teacher": "t"}, "steps": 4, "evaluation": {"every": 1, "patience": 2}}
    config = results.config.model_copy(update={"train": train})
    name, run = next(iter(results.runs.items()))
    stopped = replace(run, cost=replace(run.cost, steps=3), alarms=(Concern("alarm legal", "Seen.", "Helps."),))
    early = replace(results, config=config, runs={**results.runs, name: stopped})
    text = find(View(early, analyse(early))).training[0]
    assert text.startswith(plain)
    assert "2 evaluations on val in a row" in text
    assert text.endswith(f"1 of {len(early.done)} runs ended early, after 3 of 4 steps.")


def test_runs_below_the_best_constant_are_counted(tmp_path):
    found, _ = findings(tmp_path, tasks={"lopsided": ("synthetic", ("yes", "no"))}, effect=-40.0)
    assert "below that label for all" in found.training[0]


def test_a_partial_study_says_so(tmp_path):
    found, _ = findings(tmp_path, failed={"G2": "RunError: it broke"}, waiting=("H3",))
    assert "3 failed, 3 not begun" in found.state
    assert "partial" in found.state


def test_nothing_done_is_not_an_error(tmp_path):
    every = dict.fromkeys(("G2", "G5", "H1", "H3"), "RunError: no")
    found, _ = findings(tmp_path, failed=every, published=(), twins=(), shuffled=())
    assert {claim.verdict for claim in found.claims} == {"missing"}
    assert found.headline == "No comparison can be made yet."


def test_what_cannot_be_compared_is_not_called_missing(tmp_path):
    found, _ = findings(tmp_path, points=("G4", "G5"))
    assert "gap-only" not in {claim.restriction for claim in found.claims}
    assert "missing" not in {claim.verdict for claim in found.claims}


def test_a_point_below_its_start_is_named_with_how_sure_that_is(tmp_path):
    options = {"published": ("todi", "akl", "eopd"), "rows": 200, "points": ("G2", "G5"), "start": 0.6}
    found, view = findings(tmp_path / "a", collapsed={"eopd": 35.0}, **options)
    assert found.notable[0].startswith("emotion: eopd (published method) ends below its start")
    assert "Beyond noise" in found.notable[0]
    claim = next(claim for claim in found.claims if claim.axis == "published")
    assert claim.decisive == "eopd"
    rest = view.analysis.group("published").decisive.without
    assert f"{rest.mean:+.2f} pp".replace("-", "−") in found.notable[1]
    assert "Published methods: the average is driven by eopd alone" in found.notable[1]
    none, _ = findings(tmp_path / "b", **options)
    assert none.notable == ()
    one, _ = findings(tmp_path / "c", collapsed={"eopd": 35.0}, seeds=(1,), **options)
    assert "With one seed, noise is not known" in one.notable[0]


def test_a_point_has_one_cause_and_one_sentence(tmp_path):
    """As in a study whose eopd was told to learn slower, ten times as fast and a tenth as fast."""
    concerns = {
        "below": Concern("below the start", "It fell.", "Usually a smaller learning rate helps."),
        "still": Concern("nothing learned", "It stood.", "Usually the learning rate is too small."),
        "burst": Concern("diverged", "It rose.", "Usually the learning rate is too large."),
        "teacher": Concern("alarm teacher", "It is uniform.", "Use another teacher."),
    }
    options = {**SMALL, "rows": 200, "published": ("todi", "eopd"), "start": 0.6, "collapsed": {"eopd": 35.0}}
    results = sample_results(tmp_path, **options)
    shown = {42: ("below", "still"), 2: ("burst", "below"), 3: ("burst", "still", "below")}

    def warned(runs):
        specs = {name: run.spec for name, run in results.runs.items()}
        about = {
            name: tuple(concerns[key] for key in runs.get(spec.point, {}).get(spec.seed, ()))
            for name, spec in specs.items()
        }
        return replace(results, warnings={name: found for name, found in about.items() if found})

    # beside a point that the report names as below its start, and one that it does not
    study = warned({"eopd": shown, "todi": {2: ("still",)}, "G2": {2: ("still",), 3: ("burst", "still")}})
    lines = study.warning_lines()
    assert sorted(line.partition(". ")[0] for line in lines) == [
        "emotion, below the start: eopd (seed 42, 2, 3)",
        "emotion, nothing learned: G2 (seed 2, 3); todi (seed 2)",
    ]
    found = find(View(study, analyse(study)))
    about = [text for text in (*found.notable, *found.warnings) if "eopd" in text and "driven by" not in text]
    assert len(about) == 1
    assert about[0].startswith("emotion: eopd (published method) ends below its start")
    assert about[0].endswith(concerns["below"].helps)

    # a teacher that is uniform explains all else, whatever most seeds show
    study = warned({"todi": {42: ("still",), 2: ("still",), 3: ("still", "teacher")}})
    assert study.warning_lines() == ["emotion, alarm teacher: todi (seed 3). Use another teacher."]


def test_a_claim_that_one_point_decides_is_not_supported(tmp_path):
    options = {"seeds": tuple(range(1, 10)), "noise": 0.3, "published": ("todi", "akl", "eopd")}
    found, _ = findings(tmp_path, collapsed={"eopd": 30.0}, **options)
    claim = next(claim for claim in found.claims if claim.axis == "published")
    assert (claim.verdict, claim.decisive) == ("lead", "eopd")
    assert "the average is driven by eopd alone" in claim.why


def test_there_is_one_detectable_difference(tmp_path):
    found, view = findings(tmp_path)
    number = median(c.all.mde for c in view.analysis.comparisons if c.all is not None)
    assert view.analysis.detectable["all"].pp == pytest.approx(number)
    assert [text for text in found.limits if f"over 3 seeds, detects about {number:.1f} pp" in text]


def test_a_task_that_all_points_solve_is_named(tmp_path):
    results = sample_results(tmp_path, **SMALL)
    assert find(View(results, analyse(results))).notable == ()
    alike = {
        key: replace(run, scores={**run.scores, "test": with_labels(run.scores["test"], correct=120)})
        for key, run in results.runs.items()
    }
    results = replace(results, runs=alike)
    found = find(View(results, analyse(results)))
    [text] = found.notable
    assert f"emotion: {len(alike)} of {len(alike)} runs are right on 120 of 120 test texts" in text
    assert [text for text in found.limits if "no variance to test it by" in text]
    assert not [text for text in found.limits if "0.0 pp" in text]


def test_a_task_on_which_nothing_was_learned_is_named(tmp_path):
    results = sample_results(tmp_path, **SMALL)
    constant = round(analyse(results).baselines["emotion"].best_constant * 120)
    stuck = {
        key: replace(run, scores={**run.scores, "test": with_labels(run.scores["test"], correct=constant)})
        for key, run in results.runs.items()
    }
    results = replace(results, runs=stuck)
    [text] = [one for one in find(View(results, analyse(results))).notable if "apart" in one]
    assert f"on {constant} of 120 test texts, as if all had the most frequent label" in text
    assert text.endswith("Usually more steps or a higher learning rate help.")


def test_runs_that_differ_in_more_than_the_gate_are_named(tmp_path):
    results = sample_results(tmp_path, **SMALL)
    seeds = sorted({run.spec.seed for run in results.done})

    def limits(teacher_of):
        runs = {
            key: replace(run, content={"teacher": teacher_of(run), "precision": "fp32"})
            for key, run in results.runs.items()
        }
        changed = replace(results, runs=runs)
        return [text for text in find(View(changed, analyse(changed))).limits if "different values" in text]

    assert limits(lambda run: "one") == []
    [text] = limits(lambda run: "one" if run.spec.seed == seeds[0] else "two")
    assert text.startswith("emotion: the runs have 2 different values of teacher by their fingerprints, never within")
    [text] = limits(lambda run: "one" if run.spec.seed == seeds[0] and run.spec.point == "G2" else "two")
    assert f"also within seed {seeds[0]}: differences there are not of the gate alone" in text


# ------------------------------------------------------------------------------------------------- what claims say

SEEDS = tuple(range(1, 10))


def claim_of(found, axis, restriction=None):
    [claim] = [claim for claim in found.claims if (claim.axis, claim.restriction) == (axis, restriction)]
    return claim


def test_a_gain_over_one_constant_names_it_and_its_points_and_does_not_claim_more(tmp_path):
    options = {"seeds": SEEDS, "noise": 0.3, "twins": ("lam", "rkl")}
    found, _ = findings(tmp_path, collapsed={"static:0.5": 12.0}, **options)
    claim = claim_of(found, "static")
    assert (claim.verdict, claim.about) == ("supported", "Constant λ = 0.5")
    assert claim.text.startswith("These 4 points (G2, G5, H1, H3), on average, are above λ = 0.5; 4 of 4 are: mean +")
    assert claim.text.endswith("The gain comes with the mean of λ; no gain from varying it was detected.")
    assert f"for the {len(found.claims)} planned group comparisons" in claim.text
    assert "(Constant λ = 0.5)" in found.headline
    assert {claim_of(found, "isolation", part).verdict for part in ("mean-matched", "RKL-matched")} <= {"none", "lead"}
    assert not [text for text in (found.headline, *(c.text for c in found.claims)) if "family" in text]
    loss, _ = findings(tmp_path / "loss", collapsed={"static:0.5": -12.0}, **options)
    assert "The loss comes with the mean of λ; no loss from varying it" in claim_of(loss, "static").text


def test_a_gain_from_varying_is_said_with_the_constants_that_show_it(tmp_path):
    options = {"seeds": SEEDS, "noise": 0.3, "effect": 12.0}
    both, _ = findings(tmp_path / "both", twins=("lam", "rkl"), **options)
    mean, rkl = (claim_of(both, "isolation", part) for part in ("mean-matched", "RKL-matched"))
    assert (mean.verdict, rkl.verdict) == ("supported", "supported")
    assert "are above constants λ of the same mean; 4 of 4 are" in mean.text
    assert "are above constants λ of the same RKL-weighted mean; 4 of 4 are" in rkl.text
    expected = (
        "A gain from varying λ is supported too, against constants λ of the same mean and constants λ of the same "
    )
    assert claim_of(both, "static").text.endswith(f"{expected}RKL-weighted mean.")
    points = [f"twin-rkl({point})" for point in SMALL["points"]]
    one, _ = findings(tmp_path / "one", twins=("lam", "rkl"), collapsed=dict.fromkeys(points, -12.0), **options)
    assert claim_of(one, "isolation", "RKL-matched").verdict != "supported"
    expected = (
        "against constants λ of the same mean and not against constants λ of the same RKL-weighted mean: that λ varies"
    )
    assert expected in claim_of(one, "static").text
    none, _ = findings(tmp_path / "none", twins=(), **options)
    assert claim_of(none, "static").text.endswith("is open: no matched constant was tested.")


def test_points_that_disagree_are_counted(tmp_path):
    found, _ = findings(tmp_path, seeds=SEEDS, noise=0.3, effect=12.0, collapsed={"H1": 14.0}, twins=())
    assert "; 3 of 4 are" in claim_of(found, "static").text


def test_a_claim_that_is_supported_at_a_second_look_says_so_in_its_verdict(tmp_path):
    results = sample_results(tmp_path, **SMALL, seeds=SEEDS, noise=0.3, effect=12.0)

    def seen(looks):
        again = replace(results, looks=tuple(Look(str(i), 10, {}) for i in range(looks)))
        return find(View(again, analyse(again)))

    for looks, words in ((1, "supported"), (2, "supported at a second look"), (3, "supported at a third look")):
        found = seen(looks)
        assert claim_of(found, "restriction", "entropy-only").verdict_text == words
        assert words.removeprefix("supported") in found.headline
        assert {c.verdict_text for c in found.claims if c.verdict == "none"} <= {"no detectable difference"}
    [text] = [text for text in seen(2).limits if text.startswith("Look 2")]
    assert "at look 2 their level is .05 / 2² = 0.013, and their intervals have a confidence of 98.75 %" in text
    assert "98.75 % CI [" in claim_of(seen(2), "restriction", "entropy-only").text


def test_a_difference_that_one_look_supports_may_be_a_lead_after_many(tmp_path):
    results = sample_results(tmp_path, **SMALL, seeds=tuple(range(1, 9)), noise=0.3, effect=3.0)
    once = find(View(results, analyse(results)))
    looks = tuple(Look(str(i), 10, {}) for i in range(9))
    often = replace(results, looks=looks)
    held = [(c.axis, c.restriction) for c in once.claims if c.verdict == "supported"]
    still = [(c.axis, c.restriction) for c in find(View(often, analyse(often))).claims if c.verdict == "supported"]
    assert held
    assert len(still) < len(held)
    assert {*still} <= {*held}


def test_the_detectable_difference_is_that_of_the_rule_and_per_task_where_noise_differs(tmp_path):
    options = {"seeds": SEEDS, "tasks": ("emotion", "hate"), "noise": 0.5, "points": ("G2", "G5"), "published": ()}
    found, view = findings(tmp_path, **options)
    claim = next(claim for claim in found.claims if claim.verdict == "none")
    group = view.analysis.group(claim.axis, restriction=claim.restriction)
    assert group.all.mde == detectable(group.all.sd, 16, len(found.claims))
    assert f"a true difference of about {group.all.mde:.1f} pp would be supported in 80 % of repetitions." in claim.text
    # The same on hate, eight times as far from its mean.
    far = {
        key: replace(
            run, scores={**run.scores, "test": with_labels(score, correct=max(0, 60 + 8 * (score.correct - 88)))}
        )
        if run.spec.task == "hate"
        else run
        for key, run in view.results.runs.items()
        for score in [run.scores["test"]]
    }
    results = replace(view.results, runs=far)
    uneven = View(results, analyse(results))
    texts = [claim.text for claim in find(uneven).claims if claim.verdict == "none"]
    assert any("for one task alone, whose noise differs: about " in text and " pp on hate" in text for text in texts)


def test_the_chance_of_a_lead_without_any_difference_is_said(tmp_path):
    found, view = findings(tmp_path, twins=("lam", "rkl"), seeds=SEEDS)
    tested = sum(group.holm is not None for group in view.analysis.groups)
    assert tested > 5
    expected = f"about {100 * (1 - (1 - 0.058) ** tested):.0f} % of studies with {tested} group comparisons would still"
    assert [text for text in found.limits if expected in text]
