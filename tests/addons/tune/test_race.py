"""Decisions of a rung, from scores whose means and errors are known."""

from __future__ import annotations

import math
from statistics import fmean, stdev, variance

import pytest
from scipy import stats

from gatespace.addons.tune.race import decide, difference
from gatespace.seeding import generator

ROWS = 200


def scores(name: str, seeds: tuple[int, ...], better: float = 0.0, own: float = 0.05) -> dict[int, list[float]]:
    """Rows that are hard are hard for all; a seed has its own luck."""
    row = generator(0, "rows")
    hard = [row.random() for _ in range(ROWS)]
    return {seed: [h + better + own * generator(seed, name, i).random() for i, h in enumerate(hard)] for seed in seeds}


def test_the_difference_of_one_seed_is_that_of_its_rows() -> None:
    one, other = scores("a", (1,)), scores("b", (1,), better=0.002)
    cells = [a - b for a, b in zip(one[1], other[1], strict=True)]
    found = difference(one, other)
    assert found.mean == pytest.approx(fmean(cells))
    assert found.se == pytest.approx(stdev(cells) / math.sqrt(ROWS))
    assert found.p == pytest.approx(float(stats.ttest_1samp(cells, 0.0, alternative="less").pvalue))


def test_the_error_over_seeds_is_at_least_that_of_the_seeds() -> None:
    one = {seed: [value + 0.1 * seed for value in row] for seed, row in scores("a", (1, 2, 3)).items()}
    other = scores("b", (1, 2, 3))
    means = [fmean(one[seed]) - fmean(other[seed]) for seed in (1, 2, 3)]
    assert difference(one, other).se >= math.sqrt(variance(means) / 3) * (1 - 1e-12)
    assert difference(one, one) == difference(other, other)  # nothing differs: nothing is worse
    assert difference(one, one).p == 1.0


def test_the_best_share_goes_on_without_those_that_are_clearly_worse() -> None:
    found = {name: scores(name, (1, 2)) for name in ("c0", "c1", "c2")} | {"bad": scores("bad", (1, 2), -1.0)}
    made = decide(found, gates={"c0", "bad"}, keep=0.9, level=0.01)
    assert made["incumbent"] != "bad"
    assert {*made["kept"]} == {"c0", "c1", "c2"}
    assert made["differences"]["bad"]["p"] < 0.01
    assert len(decide(found, gates={"c0", "bad"}, keep=0.5, level=0.01)["kept"]) == 2


def test_at_one_seed_the_share_decides_alone() -> None:
    found = {"good": scores("good", (1,)), "bad": scores("bad", (1,), -1.0)}
    made = decide(found, gates={"good"}, keep=1.0, level=0.01)
    assert made["kept"] == ["good", "bad"]
    assert made["differences"]["bad"]["p"] < 1e-6
    assert decide(found, gates={"good"}, keep=0.5, level=0.01)["kept"] == ["good"]


def test_the_best_gate_stays_unless_it_is_clearly_worse() -> None:
    found = {f"s{i}": scores(f"s{i}", (1,), better=0.02) for i in range(5)}
    near = found | {"gate": scores("gate", (1,), better=0.0199)}
    last = sorted(near, key=lambda name: -fmean(near[name][1]))
    made = decide(near, gates={"gate"}, keep=0.01, level=1e-9)
    assert made["kept"] == [*dict.fromkeys([last[0], "gate"])]
    far = {name: scores(name, (1, 2), better=0.02) for name in found} | {"gate": scores("gate", (1, 2), better=-1.0)}
    assert "gate" not in decide(far, gates={"gate"}, keep=0.01, level=0.01)["kept"]
