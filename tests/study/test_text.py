"""A study of a text task: trained, compared by scores, and reported in the words of its metric."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from gatespace.evidence.analysis import analyse
from gatespace.report import build_report
from gatespace.study.results import read_results

from .conftest import settings, study
from .test_runner import run as do

pytestmark = pytest.mark.slow


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    names = [f"{what} {i}" for what in ("boat", "lamp", "tent") for i in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"mr": name, "ref": f"The {name} is here."}) + "\n" for name in names))
    return path


def test_a_study_of_labels_and_free_text_names_the_metric_of_each(rows: Path, tmp_path: Path) -> None:
    text = {"source": str(rows), "prompt": "Where is the {mr}?", "answer": "ref", "metric": "token_f1"}
    config = study(
        tasks={**settings()["tasks"], "places": {"task": {"text": text}}},
        teach={"teacher": {"model": "tiny", "steps": 15, "optimizer": {"lr": 3e-3}}},
        train={
            "steps": 1,
            "batch_size": 4,
            "pair": {"student": "tiny"},
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_new_tokens": 10},
            "evaluation": {"max_new_tokens": 10, "limit": 12},
            "engine": {"precision": "fp32"},
        },
        points=["G5"],
        seeds=[42],
        axes={"static": [0.5], "restrictions": False, "gap": False, "isolation": None},
    )
    folder = tmp_path / "study"
    do(config, folder)
    results = read_results(folder)
    assert not results.problems
    metrics = {"messages": "accuracy", "places": "token_f1"}
    assert {(run.spec.task, run.scores["test"].metric) for run in results.done} == {*metrics.items()}
    written = build_report(folder, png=False)
    page = written.html.read_text()
    for task, metric in metrics.items():
        assert f"{task} ({metric})" in page
        assert f"{task}: all points by test {metric}" in page
    for name in ("points", "baselines", "per-seed", "comparisons-static"):
        table = list(csv.DictReader((folder / "tables" / f"{name}.csv").read_text().splitlines()))
        assert {(row["task"], row["metric"]) for row in table} == {*metrics.items()}
    assert "length" in (folder / "tables" / "responses.csv").read_text().splitlines()[0].split(",")


def test_a_study_of_free_text_ends_in_a_report(rows: Path, tmp_path: Path) -> None:
    text = {"source": str(rows), "prompt": "Where is the {mr}?", "answer": "ref", "metric": "token_f1"}
    changes = {
        "tasks": {"places": {"task": {"text": {**text, "also": ["exact"]}}}},
        "teach": {"teacher": {"model": "tiny", "steps": 20, "optimizer": {"lr": 3e-3}}},
        "train": {
            "steps": 1,
            "batch_size": 4,
            "pair": {"student": "tiny"},
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_new_tokens": 10},
            "evaluation": {"max_new_tokens": 10},
            "engine": {"precision": "fp32"},
        },
        "points": ["G5"],
        "axes": {"static": [0.5], "restrictions": False, "gap": False, "isolation": None},
    }
    folder = tmp_path / "study"
    do(study(**changes), folder)
    results = read_results(folder)
    assert not results.problems
    assert len(results.done) == 4
    for run in results.done:
        score, found = run.scores["test"], run.predictions("test")
        assert score.metric == "token_f1"
        assert score.accuracy == pytest.approx(sum(row.score for row in found) / len(found))
    analysis = analyse(results)
    (compared,) = [one for one in analysis.comparisons if one.axis == "static"]
    assert compared.all is not None
    assert compared.mcnemar == ()
    assert compared.bootstrap is not None
    assert compared.bootstrap.mean == pytest.approx(compared.all.mean, abs=1e-4)
    written = build_report(folder, png=False)
    page = written.html.read_text()
    assert "token_f1" in page
    assert "accuracy, mean %" not in page
    assert "Responses in free text" in page
    table = (folder / "tables" / "responses.csv").read_text()
    assert "exact" in table.splitlines()[0]
