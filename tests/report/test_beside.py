"""Results of a reference beside those of a study, against the paper's own numbers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from gatespace.evidence.analysis import analyse
from gatespace.report.beside import beside_charts, beside_tables, both, sentences
from gatespace.report.view import View
from gatespace.study.plan import NINE
from tests.sample_study import sample_results

TASKS = ("emotion", "offensive", "hate")


@pytest.fixture(scope="module")
def paper():
    return pytest.importorskip("gatespace.addons.paper").reference()


@pytest.fixture(scope="module")
def view(tmp_path_factory, paper):
    folder = tmp_path_factory.mktemp("nine")
    results = sample_results(
        folder, seeds=(11, 12, 13), tasks=TASKS, rows=120, steps=3, nine=True, probabilities=True,
        waiting=["hate-G4-s11", "hate-G4-s12", "hate-G4-s13", "offensive-G2-s12", "offensive-G2-s13"],
    )  # fmt: skip
    return View(results, analyse(results), {"paper": paper})


def test_the_papers_means_are_those_of_its_seeds(view, paper):
    rows = {(row.task, row.left, row.right): row for row in both(view, paper)}
    assert {*rows} == {*NINE}
    table = pytest.importorskip("gatespace.addons.paper.tables").nine()
    for printed in table:
        right = f"twin({printed['a']})" if printed["b"].startswith("static") else printed["b"]
        row = rows[printed["task"], printed["a"], right]
        assert row.theirs.mean == printed["printed"]["mean"]
        assert row.fresh == pytest.approx(printed["fresh_mean"], abs=1e-9)
    h1 = rows["hate", "H1", "entropy-only(-4)"]
    assert (h1.theirs.mean, round(h1.fresh, 2)) == (1.73, 0.49)


def test_whether_our_interval_contains_theirs_is_said_in_words(view, paper):
    said = {(row.task, row.left, row.right): row for row in both(view, paper)}
    assert said["hate", "G4", "twin(G4)"].verdict == "not run yet"
    assert said["offensive", "G2", "entropy-only(-4)"].verdict == "no interval"  # one seed
    checked = 0
    for row in said.values():
        if row.ours is None or row.ours.low is None:
            continue
        low, high = row.ours.low, row.ours.high
        mean, fresh = (low <= value <= high for value in (row.theirs.mean, row.fresh))
        words = {(True, True): "contains both", (True, False): "contains the mean only"}
        words |= {(False, True): "contains the fresh-seed mean only", (False, False): "contains neither"}
        assert row.verdict.startswith(words[mean, fresh])
        checked += 1
    assert checked == 7
    first, *each = sentences(view)
    counts = [int(n) for n in re.findall(r"(\d+) (?:contain the mean that|the mean of|contain 0)", first)]
    inside = [row for row in said.values() if row.ours is not None and row.ours.low is not None]
    assert counts == [
        sum(row.ours.low <= value <= row.ours.high for row, value in ((row, of(row)) for row in inside))
        for of in (lambda row: row.theirs.mean, lambda row: row.fresh, lambda row: 0.0)
    ]
    assert len(each) == 9
    assert each[0].startswith("emotion, HG5,d+4 minus entropy-only(-4): the paper has +0.63 pp over 3 seeds and ")
    assert any(text.endswith("not run here yet.") for text in each)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(-1.0, 2.0, "both"), (1.0, 2.0, "the mean only"), (0.0, 1.0, "the fresh-seed mean only"),
     (-2.0, -1.0, "neither: ours is lower"), (3.0, 4.0, "neither: ours is higher"), (0.8, 1.0, "neither")],
)  # fmt: skip
def test_verdicts(view, paper, low, high, words):
    from dataclasses import replace

    row = next(row for row in both(view, paper) if row.ours is not None and row.ours.low is not None)
    ours = replace(row.ours, low=low, high=high, mean=(low + high) / 2)
    theirs = row.theirs._replace(mean=1.5)
    assert replace(row, ours=ours, theirs=theirs, fresh=0.5).verdict == f"contains {words}"


def test_a_sweep_has_no_such_part(tmp_path, paper):
    results = sample_results(tmp_path, tasks=("hate",), points=["H1", "G4"], rows=40, steps=2)
    swept = View(results, analyse(results), {"paper": paper})
    assert sentences(swept) == beside_tables(swept) == beside_charts(swept) == []


def test_the_page_of_the_replication_is_filled_from_results(view):
    page = Path(__file__).parents[2] / "docs" / "make_replication.py"
    spec = importlib.util.spec_from_file_location("make_replication", page)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.filled(script.PAGE.read_text(encoding="utf-8"), view.results)
    assert "Not run yet" not in text
    assert "| hate | H1 | entropy-only(-4) | +1.73 | +0.49 |" in text.replace("\\", "")
    assert script.filled(text, view.results) == text
