"""The section of label probabilities, against a reading of the runs' own bins and curves."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from statistics import fmean

import pytest

from gatespace.evidence.analysis import analyse
from gatespace.report import build_report
from gatespace.report.charts import all_charts
from gatespace.report.view import View

from ..sample_study import sample_results
from .conftest import Built, made, parse, sentences


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    options = {"twins": (), "shuffled": (), "published": (), "seeds": (1, 2)}
    return made(tmp_path_factory.mktemp("likely"), points=("G5", "H1"), rows=90, steps=4, probabilities=True, **options)


def test_bins_of_all_seeds_are_one_and_curves_are_means(built):
    view = View(built.results, analyse(built.results), {})
    chart = next(chart for chart in all_charts(view) if chart.name == "reliability-emotion")
    keys = [column.key for column in chart.data.columns]
    rows = [dict(zip(keys, row, strict=True)) for row in chart.data.rows]
    chosen = view.analysis.selection["emotion"].chosen.label
    found = [run.scores["test"].calibration for run in view.done("emotion", chosen).values()]
    assert len(found) == 2
    mine = [row for row in rows if row["model"] == chosen]
    for low in range(15):
        bins = [one.bins[low] for one in found if one.bins[low].count]
        shown = [row for row in mine if row["rows_of"] == f"confidence {low / 15:.2f} to {(low + 1) / 15:.2f}"]
        if not bins:
            assert not shown
            continue
        right = sum(round(one.count * one.accuracy) for one in bins)
        assert shown[0]["rows"] == sum(one.count for one in bins)
        assert shown[0]["accuracy"] == pytest.approx(right / shown[0]["rows"])
        assert min(one.confidence for one in bins) <= shown[0]["confidence"] <= max(one.confidence for one in bins)
    half = next(row for row in mine if row["rows_of"] == "the most confident 50 %")
    assert half["accuracy"] == pytest.approx(fmean(one.curve[49] for one in found))
    assert (half["rows"], half["confidence"]) == (90, None)
    assert {row["model"] for row in rows} == {"start", chosen, "teacher"}
    assert f"(ECE {100 * fmean(one.ece for one in found):.1f} %)" in chart.finding


def test_every_point_has_its_row(built):
    rows = {row["model"]: row for row in csv.DictReader(io.StringIO(built.table("calibration")))}
    assert {"start", "teacher", "G5", "H1", "static:0.5"} <= rows.keys()
    found = [built.results.run("emotion", "H1", seed).scores["test"].calibration for seed in (1, 2)]
    for name in ("accuracy", "prior_corrected", "auc", "confidence", "log_loss", "brier", "ece", "aurc", "mass"):
        assert float(rows["H1"][name]) == pytest.approx(fmean(getattr(one, name) for one in found))
    assert float(rows["H1"]["coverage_0.9"]) == pytest.approx(fmean(one.coverage_at[1].coverage for one in found))
    assert float(rows["H1"]["reached_0.9"]) == pytest.approx(fmean(one.coverage_at[1].reached for one in found))
    assert (rows["H1"]["seeds"], rows["teacher"]["seeds"]) == ("2", "")


def test_the_section_is_there_with_probabilities_alone(built, small):
    section = next(node for node in parse(built.html).all("section") if node.attributes.get("id") == "probabilities")
    assert len(section.all("svg")) == 1
    assert "coverage for 90 %" in sentences(section)
    assert 'id="probabilities"' not in small.html
    assert not (small.files.html.parent / "tables" / "calibration.csv").exists()


def test_a_study_with_another_outcome_says_so_and_still_shows_accuracy(tmp_path):
    results = sample_results(tmp_path / "study", points=("G5",), rows=60, steps=4, seeds=(1, 2), probabilities=True)

    def by(scores):
        return {split: score.by("auc") for split, score in scores.items()}

    runs = {name: replace(run, scores=by(run.scores)) for name, run in results.runs.items()}
    baselines = {
        task: replace(known, start=by(known.start), teacher=by(known.teacher))
        for task, known in results.baselines.items()
    }
    results = replace(results, runs=runs, baselines=baselines)
    files = build_report(results, tmp_path / "report", png=False)
    tables = {path.stem: path.read_text() for path in files.tables if path.suffix == ".md"}
    assert "macro AUC, mean %" in tables["points"]
    assert "macro AUC" in tables["comparisons-static"]
    assert "accuracy, %" in tables["calibration"]
    assert "macro AUC on validation" not in files.html.read_text()  # the training curve is of the responses
    found = next(c for c in analyse(results).comparisons if (c.left, c.right) == ("G5", "static:0.5"))
    areas = [
        [100 * results.run("emotion", point, seed).scores["test"].calibration.auc for seed in (1, 2)]
        for point in ("G5", "static:0.5")
    ]
    assert found.all.mean == pytest.approx(fmean(areas[0]) - fmean(areas[1]))
    assert (found.mcnemar, found.bootstrap) == ((), None)  # single responses have no AUC
