"""What paired differences may claim: better, no better, or undecided and how many seeds it would take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gatespace.addons.tune.folder import TuneFolder
from gatespace.addons.tune.verdict import Verdict, check_looks, compare, in_words
from gatespace.errors import UsageError
from gatespace.evidence.paired import paired, seeds_needed

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


def test_the_sentence_names_the_strongest_reference() -> None:
    good, better = judged(*[0.05, 0.06] * 3), judged(*[0.15, 0.16] * 3)
    said = in_words(Verdict("better", "", "nats of log-loss", "4,0,-1,0", (better, good)))
    assert said.startswith("Better by 0.0550 [+0.0")
    bad = judged(*[-0.05, -0.06] * 3)
    assert in_words(Verdict("no better", "", "nats", "4,0,-1,0", (good, bad))).startswith("No better than static:0.5")
    unsure = judged(0.05, -0.06, 0.04, 0.05, -0.07, 0.05)
    said = in_words(Verdict("undecided", "", "nats", "4,0,-1,0", (good, unsure), unsure.more))
    assert f"about {unsure.more} more seeds would decide" in said


def test_a_fresh_seed_whose_test_results_were_seen_cannot_be_left_out(tmp_path: Path) -> None:
    own = spec({"fresh": [11, 12, 13]})
    own = replace(own, folder=TuneFolder(tmp_path))
    check_looks(own)
    own.folder.look({"digest": "d", "runs": 12, "seeds": {"messages": [11, 12]}})
    check_looks(own)  # one more is no choice among them
    with pytest.raises(UsageError, match=r"tune\.fresh: \[12\] are left out"):
        check_looks(replace(own, config=own.config.model_copy(update={"fresh": (11, 13)})))
