"""The detectable difference of a group: what the rule that prints *supported* finds in 80 % of studies."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gatespace.evidence.groups import Difference, block_claim
from gatespace.evidence.paired import holm, minimum_detectable
from gatespace.evidence.power import BLOCKS, MULTIPLIERS, TESTS, detectable
from gatespace.report.findings import _NULL_LEADS, _doubts
from gatespace.seeding import stream


def test_it_is_what_the_rule_supports_in_80_percent_of_studies():
    """Seven groups, of which one differs, at seven fresh seeds and a selection seed, judged as the report does."""
    random = np.random.default_rng(stream(0, "power of the rule"))
    effect, supported, studies = detectable(1.0, 7, 7), 0, 400
    for _ in range(studies):
        differences = [Difference("t", s, "G", "E", effect + random.normal()) for s in range(8)]
        every, fresh = block_claim(differences), block_claim(differences, exclude_seed=0)
        adjusted = holm([fresh.p, *random.uniform(size=6)])[0]
        supported += not [*_doubts(every, fresh, fresh, adjusted, 0)]
    assert supported / studies == pytest.approx(0.8, abs=0.05)  # SE .02
    assert effect == pytest.approx(1.9, abs=0.05)
    assert minimum_detectable(1.0, 7) == pytest.approx(1.27, abs=0.01), "that of one t-test, which is too small"


@pytest.mark.parametrize(("blocks", "tests"), [(6, 4), (12, 7)])
def test_the_table_is_that_of_its_script(blocks, tests):
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "detectable.py"
    spec = importlib.util.spec_from_file_location("detectable", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    cell = MULTIPLIERS[BLOCKS.index(blocks)][TESTS.index(tests)]
    assert script.multiple(blocks, tests, draws=2000) == pytest.approx(cell, rel=0.04)
    assert detectable(3.0, blocks, tests) == pytest.approx(3 * cell)


def test_more_blocks_detect_less_and_more_tests_more():
    for tests in (1, 5, 7, 28, 100):
        values = [detectable(1.0, n, tests) for n in range(6, 80)]
        assert values == sorted(values, reverse=True)
    for n in (6, 11, 40):
        values = [detectable(1.0, n, tests) for tests in range(1, 300)]
        assert values == sorted(values)
    assert detectable(1.0, 5, 1) is None
    assert detectable(1.0, 240, 7) == pytest.approx(detectable(1.0, 60, 7) / 2)


def test_how_often_a_study_without_a_difference_shows_a_lead():
    """The figure that a report prints, for seven groups related as axes with common points are."""
    random = np.random.default_rng(stream(0, "leads"))
    studies, groups = 4000, 7
    noise = math.sqrt(0.35) * random.standard_normal((studies, 1, 7))
    noise = noise + math.sqrt(0.65) * random.standard_normal((studies, groups, 7))

    def p_of(values):
        n = values.shape[-1]
        return 2 * stats.t.sf(abs(values.mean(-1) / values.std(-1, ddof=1)) * math.sqrt(n), n - 1)

    for selects in (True, False):
        every, fresh = p_of(noise), p_of(noise[..., 1:] if selects else noise)
        lead = ((every < 0.05) | (fresh < 0.05)) & ~((every < 0.05) & (fresh < 0.05 / groups))
        assert 1 - (1 - _NULL_LEADS[selects]) ** groups == pytest.approx(lead.any(1).mean(), abs=0.03)
