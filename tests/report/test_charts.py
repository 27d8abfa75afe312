"""Figures: their words, and the numbers that they are drawn from."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from statistics import fmean

import pytest
from scipy import stats

from gatespace.evidence.analysis import analyse
from gatespace.report import drawing
from gatespace.report.charts import all_charts
from gatespace.report.view import View
from gatespace.study.results import _warnings
from tests.sample_study import sample_results, with_labels

from .conftest import parse, sentences


@pytest.fixture(scope="module")
def charts(whole):
    return {chart.name: chart for chart in all_charts(View(whole.results, whole.analysis, {}))}


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


def test_a_ranking_goes_from_the_best_down(whole, charts):
    rows = cells(charts["ranking-hate"])
    shares = [row["accuracy"] for row in rows]
    assert shares == sorted(shares, reverse=True)
    found = {row["point"]: row for row in rows}
    runs = [whole.results.run("hate", "H1", seed).scores["test"].accuracy for seed in (42, 2, 3)]
    assert found["H1"]["accuracy"] == pytest.approx(fmean(runs))
    low, high = stats.t.interval(0.95, 2, fmean(runs), stats.sem(runs))
    assert (found["H1"]["low"], found["H1"]["high"]) == pytest.approx((max(0, low), min(1, high)))
    assert [found[p]["low"] for p in ("start", "teacher")] == [None, None]  # of one model over texts: another kind
    stats_of = [whole.results.run("hate", "H1", seed).lam_stats for seed in (42, 2, 3)]
    assert found["H1"]["lam_rkl"] == pytest.approx(fmean(one.rkl_mean for one in stats_of))
    kinds = [found[p]["kind"] for p in ("H1", "todi", "twin(H1)", "start", "teacher")]
    assert kinds == ["family", "published method", "matched twin", "untouched student", "teacher"]


def test_the_numbers_of_a_ranking_do_not_overlap(tmp_path):
    results = sample_results(tmp_path, points=("G2", "G5"), rows=60, steps=2)
    runs = {
        key: replace(run, scores={**run.scores, "test": with_labels(run.scores["test"], correct=60)})
        for key, run in results.runs.items()
    }
    results = replace(results, runs=runs)
    chart = next(c for c in all_charts(View(results, analyse(results))) if c.name == "ranking-emotion")
    with drawing._style():
        figure = chart.draw()
        figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    assert len(boxes) >= len(chart.data.rows)
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)
    assert not [1 for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]


def test_accuracy_stands_against_the_mean_of_lambda(whole, charts):
    rows = {row["point"]: row for row in cells(charts["against-lambda-hate"])}
    assert "todi" not in rows  # it has no gate
    stats_of = [whole.results.run("hate", "G5", seed).lam_stats.mean for seed in (42, 2, 3)]
    assert rows["G5"]["lam"] == pytest.approx(fmean(stats_of))


def test_validation_goes_from_the_untouched_student_to_the_end(whole, charts):
    row = next(r for r in cells(charts["curves-hate"]) if (r["point"], r["what"][:8]) == ("G5", "accuracy"))
    assert row["first"] == pytest.approx(42.0, abs=10)
    runs = [whole.results.run("hate", "G5", seed).scores["val"].accuracy for seed in (42, 2, 3, 7, 8)]
    assert row["last"] == pytest.approx(100 * fmean(runs))


def test_weights_kept_from_before_training_are_a_score_at_step_0_and_nothing_gained(whole):
    run = whole.results.run("hate", "G5", 42)
    kept = replace(run, chosen_step=0, scores=whole.results.baselines["hate"].start)
    curve = View(whole.results, whole.analysis, {}).validation(kept)
    assert curve[run.chosen_step] == next(
        one["accuracy"] for one in run.evaluations() if one["step"] == run.chosen_step
    )
    assert curve[0] == kept.scores["val"].accuracy
    for one, kind in ((kept, "nothing gained"), (replace(kept, chosen_step=run.chosen_step), "nothing learned")):
        found = dict(_warnings({one.spec.id: one}, whole.results.baselines))[one.spec.id]
        assert kind in [concern.kind for concern in found]


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
