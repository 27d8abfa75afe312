"""What paired differences may claim: better, no better, or undecided and how many seeds it would take."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gatespace.addons.tune.folder import TuneFolder
from gatespace.addons.tune.page import notes
from gatespace.addons.tune.search import Search
from gatespace.addons.tune.verdict import (
    Verdict,
    check_looks,
    compare,
    detectable,
    in_words,
    judge,
    power_text,
    references,
)
from gatespace.config import parse_config
from gatespace.config.objective import ObjectiveConfig
from gatespace.errors import UsageError
from gatespace.evidence.paired import paired, seeds_needed

from .test_search import Scripted, searched
from .test_settings import spec

MARGIN = 0.01


def judged(*differences: float):
    left = {seed: 1.0 + value for seed, value in enumerate(differences)}
    return compare("static:0.5", "λ = 0.5", paired(left, dict.fromkeys(left, 1.0)), MARGIN)


@pytest.mark.parametrize(
    "differences, state",
    [
        ((0.05, 0.06, 0.04, 0.05, 0.07, 0.05), "better"),
        ((0.05,) * 6, "better"),
        ((0.0,) * 6, "no better"),
        ((-0.05, -0.06, -0.04, -0.05, -0.07, -0.05), "no better"),
        ((0.001, 0.002, 0.0015, 0.001, 0.002, 0.001), "no better"),  # there, and not worth having
        ((0.05, -0.06, 0.04, 0.05, -0.07, 0.05), "undecided"),
        ((0.05, 0.06, 0.04, 0.05, 0.07), "undecided"),  # five seeds cannot show anything by the exact test
    ],
)
def test_states(differences: tuple[float, ...], state: str) -> None:
    assert judged(*differences).state == state


def test_how_many_more_seeds_would_decide() -> None:
    assert judged(0.05, 0.06, 0.04, 0.05, 0.07).more == 1
    noisy = judged(0.05, -0.06, 0.04, 0.05, -0.07, 0.05)
    test = paired(dict(enumerate((0.05, -0.06, 0.04, 0.05, -0.07, 0.05))), dict.fromkeys(range(6), 0.0))
    assert test
    assert test.sd
    soonest = min(seeds_needed(test.sd, goal) for goal in (test.mean, MARGIN - test.mean) if goal > 0)
    assert noisy.more == soonest - 6
    assert judged(0.0, 0.0, 0.0, 0.0, 0.0, 0.0).more == 0


def test_why_names_the_strongest_reference_the_better_sign_and_one_number_of_seeds() -> None:
    good, better = judged(*[0.05, 0.06] * 3), judged(*[0.15, 0.16] * 3)
    said = in_words("better", (better, good), "nats of log-loss")
    assert said.startswith(
        "The tuned gate is better than all 2 references; least so than static:0.5 (λ = 0.5): +0.0550 ["
    )
    assert "positive means that the gate is better" in said
    bad = judged(*[-0.05, -0.06] * 3)
    assert in_words("no better", (good, bad), "nats").startswith("The tuned gate is no better than static:0.5")
    unsure = judged(0.05, -0.06, 0.04, 0.05, -0.07, 0.05)
    said = in_words("undecided", (good, unsure), "nats")
    assert said.endswith(f"About {unsure.more} more seeds would decide.")


def concluded(folder: Path, means: dict[str, float], looks: int = 1) -> tuple[Search, Verdict]:
    """The verdict of a search whose best constant is 0.98, with these mean scores on test."""
    search = searched(folder, Scripted(lam=0.98), fresh=[*range(11, 17)])
    noise = (0.003, -0.002, 0.001, -0.003, 0.002, -0.001)

    def run(label: str, place: int) -> SimpleNamespace:
        luck = noise[(place * (1 + [*means].index(label))) % 6]
        score = SimpleNamespace(calibration=SimpleNamespace(log_loss=1.0 - means[label] + luck))
        spec = SimpleNamespace(point=label, seed=11 + place)
        return SimpleNamespace(spec=spec, scores={"val": score, "test": score}, lam=0.9 + 0.001 * place)

    done = [run(label, place) for label in means for place in range(6)]
    results: Any = SimpleNamespace(done=done, looks=(None,) * looks)
    return search, judge(search, results)


NONE = {"static:0.98": 0.0, "static:0.5": 0.0, "twin-rkl(tuned)": 0.0, "twin(tuned)": 0.0, "tuned": 0.0}


@pytest.mark.parametrize(
    "means, state, use, settings",
    [
        ({}, "no better", "static:0.98 (a constant λ)", "static:0.98"),
        ({"tuned": 0.2}, "better", "the gate G5", "G5"),
        ({"static:0.98": -0.1}, "no better", "static:0.5 (a constant λ)", "static:0.5"),
        # Better than both constants and than the twin of its mean λ, but not than the one that its loss felt.
        (
            {"tuned": 0.2, "twin-rkl(tuned)": 0.2},
            "no better",
            "static:0.9025 (a constant λ)",
            "static:0.9025",
        ),
    ],
)
def test_the_simplest_candidate_that_nothing_beats_is_to_be_used(
    means: dict[str, float], state: str, use: str, settings: Any, tmp_path: Path
) -> None:
    search, verdict = concluded(tmp_path, NONE | means)
    assert [*references(search)] == [label for label in NONE if label != "tuned"]
    assert verdict.state == state
    assert verdict.sentence == f"Use {use}: the simplest candidate that nothing was shown to beat."
    assert verdict.settings == {"objective": {"gate": settings}}
    assert parse_config(ObjectiveConfig, verdict.settings["objective"])
    assert notes(search, verdict)[0] == verdict.power


def test_intervals_are_adjusted_for_the_number_of_looks(tmp_path: Path) -> None:
    _, first = concluded(tmp_path, NONE | {"tuned": 0.01})
    _, third = concluded(tmp_path, NONE | {"tuned": 0.01}, looks=3)
    for one, again in zip(first.against, third.against, strict=True):
        assert one.low is not None
        assert again.low is not None
        assert again.low < one.low
    assert "look 3 at these test results" in third.why


def test_a_channel_that_hardly_varies_is_named(tmp_path: Path) -> None:
    search, verdict = concluded(tmp_path, NONE)
    search.warm_up["channels"]["position"][1] = 0.002
    search.warm_up["used"].remove("position")
    assert any(
        line.startswith("Channels left out, since") and "position (SD 0.002)" in line for line in notes(search, verdict)
    )


@pytest.mark.parametrize("seeds, references", [(6, 3), (9, 2)])
def test_a_detectable_gain_is_called_better_in_four_of_five_verdicts(seeds: int, references: int) -> None:
    """By the rule itself: `paired` and `compare` of every reference, which share the gate's runs."""
    gain = detectable(seeds, references)
    assert gain is not None
    draw = np.random.default_rng(1)

    def is_better() -> bool:
        own = draw.standard_normal(seeds) / math.sqrt(2)
        others = draw.standard_normal((references, seeds)) / math.sqrt(2)
        tests = [paired(dict(enumerate(own + gain)), dict(enumerate(other))) for other in others]
        return all(compare("", "", test, MARGIN).state == "better" for test in tests)

    assert sum(is_better() for _ in range(200)) / 200 == pytest.approx(0.8, abs=0.09)
    assert detectable(5, references) is None  # by the exact test, five seeds show nothing


def test_the_power_is_that_of_the_rule_and_the_sd_of_the_search(tmp_path: Path) -> None:
    search, _ = concluded(tmp_path, NONE)
    least = detectable(6, len(references(search)))
    assert least is not None
    shift = {"1": 0.1, "2": -0.1}  # the only candidates at the last rung that are no gates: SD √2 × 0.1 apart
    for name, known in search.by_seed.items():
        if not search.candidates[name].is_gate:
            search.by_seed[name] = {seed: known[seed] + shift.get(seed, 0.0) for seed in known}
    told = f"6 fresh seeds will show a gain of about {0.1 * math.sqrt(2) * least:.1g} nats of log-loss here (power .8)."
    assert power_text(search) == told


def test_a_fresh_seed_whose_test_results_were_seen_cannot_be_left_out(tmp_path: Path) -> None:
    own = spec({"fresh": [11, 12, 13]})
    own = replace(own, folder=TuneFolder(tmp_path))
    check_looks(own)
    own.folder.look({"digest": "d", "runs": 12, "seeds": {"messages": [11, 12]}})
    check_looks(own)  # one more is no choice among them
    with pytest.raises(UsageError, match=r"tune\.fresh: \[12\] are left out"):
        check_looks(replace(own, config=own.config.model_copy(update={"fresh": (11, 13)})))
