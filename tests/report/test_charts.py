"""Figures: their words, and the numbers that they are drawn from."""

from __future__ import annotations

import re
from statistics import fmean

import pytest

from gatespace.evidence.analysis import analyse
from gatespace.report.charts import all_charts
from gatespace.report.view import View
from tests.sample_study import sample_results

from .conftest import parse, sentences


@pytest.fixture(scope="module")
def charts(whole):
    return {chart.name: chart for chart in all_charts(View(whole.results, analyse(whole.results), {}))}


def cells(chart):
    keys = [column.key for column in chart.data.columns]
    return [dict(zip(keys, row, strict=True)) for row in chart.data.rows]


def test_every_figure_has_words_and_numbers(whole):
    page = parse(whole.html)
    charts = page.all("svg")
    assert len(charts) > 20
    for chart in charts:
        assert chart.attributes["role"] == "img"
        title, description = chart.children[:2]
        assert (title.tag, description.tag) == ("title", "desc")
        assert len(title.text) > 5
        assert re.search(r"\d", description.text), title.text  # what is to be seen, not what kind of figure it is
    for figure in page.all("figure"):
        assert figure.all("details")[0].all("td"), sentences(figure)[:60]


def test_a_forest_has_every_comparison_and_its_seeds(whole, charts):
    rows = cells(charts["forest-static-hate"])
    assert len(rows) == 13
    for row in rows:
        point = row["row"].split(" − ")[0]
        runs = [(whole.results.run("hate", point, s), whole.results.run("hate", "static:0.5", s)) for s in (42, 2, 3)]
        each = [100 * (a.scores["test"].accuracy - b.scores["test"].accuracy) for a, b in runs]
        assert row["mean"] == pytest.approx(fmean(each))
        assert [float(text) for text in row["each"].split(", ")] == pytest.approx(each, abs=0.006)
        assert row["fresh"] == pytest.approx(fmean(each[1:]))


def test_the_grid_has_the_points_without_a_gap_coefficient(charts):
    assert [row["point"] for row in cells(charts["abc-emotion"])] == ["G1", "G2", "G3", "G4", "G5"]


def test_a_restriction_that_cannot_be_is_not_missing(charts):
    rows = {row["point"]: row for row in cells(charts["restrictions-hate"])}
    assert rows["G4"]["entropy-only"] == rows["G4"]["gap-only"] == "N/A"
    assert isinstance(rows["H1"]["gap-only"], float)


def test_curves_are_means_over_seeds(whole, charts):
    row = next(r for r in cells(charts["curves-emotion"]) if (r["point"], r["what"]) == ("G5", "loss"))
    curves = [whole.results.run("emotion", "G5", seed).curve() for seed in (42, 2, 3, 7, 8)]
    assert row["first"] == pytest.approx(fmean(curve[0]["loss"] for curve in curves))
    assert row["last"] == pytest.approx(fmean(curve[-1]["loss"] for curve in curves))


def test_many_labels_are_not_drawn(tmp_path):
    tasks = {"many": ("own", tuple(f"label {i}" for i in range(13)))}
    results = sample_results(
        tmp_path, tasks=tasks, points=("G5",), rows=60, steps=2, seeds=(1,), twins=(), published=()
    )
    names = {chart.name for chart in all_charts(View(results, analyse(results), {}))}
    assert "confusion-many" not in names
    assert "lambda-many" in names
