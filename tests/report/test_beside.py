"""Results of a reference beside those of a study, against the paper's own numbers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from gatespace.evidence.analysis import analyse
from gatespace.report.beside import beside_charts, beside_tables, both, gap, sentences
from gatespace.report.drawing import render
from gatespace.report.view import View
from gatespace.study.plan import NINE
from tests.evidence import oracle
from tests.sample_study import sample_results, with_labels

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


def _welch(left, right):
    """Difference of two means and its 95 % interval, from the definition."""
    (a, sd_a), (b, sd_b) = oracle.mean_sd(left), oracle.mean_sd(right)
    va, vb = sd_a**2 / len(left), sd_b**2 / len(right)
    df = (va + vb) ** 2 / (va**2 / (len(left) - 1) + vb**2 / (len(right) - 1))
    half = oracle.t_quantile(0.05, df) * (va + vb) ** 0.5
    return a - b, a - b - half, a - b + half


def test_theirs_minus_ours_has_both_errors(view, paper):
    rows = {(row.task, row.left, row.right): row for row in both(view, paper)}
    assert rows["hate", "G4", "twin(G4)"].verdict == "not run yet"
    assert rows["offensive", "G2", "entropy-only(-4)"].verdict == "no interval"  # one seed
    compared = [row for row in rows.values() if row.gap is not None]
    assert len(compared) == 7
    for row in compared:
        mean, low, high = _welch(row.differences, row.ours.differences)
        assert row.gap == pytest.approx((mean, low, high), abs=1e-9)
        assert mean == pytest.approx(row.theirs.mean - row.ours.mean, abs=0.006)  # printed with two digits
        words = {(True, False): "theirs is higher", (False, True): "theirs is lower"}
        assert row.verdict == words.get((low > 0, high < 0), "no difference detected")
    first, *each = sentences(view)
    apart = sum(row.gap.low > 0 or row.gap.high < 0 for row in compared)
    assert f"8 of the 9 comparisons were run. Theirs minus ours excludes 0 in {apart or 'none'} of the 7;" in first
    assert len(each) == 9
    assert each[0].startswith("emotion, HG5,d+4 minus entropy-only(-4): the paper has +0.63 pp over 3 seeds; here ")
    gap_ = rows["emotion", "HG5,d+4", "entropy-only(-4)"].gap
    said = f"theirs minus ours: {gap_.mean:+.2f} [{gap_.low:+.2f}, {gap_.high:+.2f}] pp".replace("-", "−")
    assert said in each[0]
    assert any(text.endswith("not run here yet.") for text in each)


@pytest.mark.parametrize(("sds", "n"), [((1.0, 1.0), 6), ((2.0, 1.0), 12), ((1.0, 3.0), 6)])
def test_a_perfect_replication_is_flagged_in_about_5_percent(sds, n):
    rng = np.random.default_rng(5)
    gaps = [gap(rng.normal(0.5, sds[0], 3), rng.normal(0.5, sds[1], n)) for _ in range(2000)]
    flagged = fmean(found.low > 0 or found.high < 0 for found in gaps)
    assert 0.03 < flagged < 0.08


@pytest.mark.parametrize("constant", [True, False])
def test_no_verdict_on_a_task_whose_runs_did_not_learn(view, paper, constant):
    """They give one label to all texts, or are where the untrained student was."""
    runs, baselines = dict(view.results.runs), dict(view.results.baselines)
    if constant:
        for key, run in runs.items():
            if run.spec.task == "offensive" and run.scores:
                same = {split: with_labels(score, balanced_accuracy=0.5) for split, score in run.scores.items()}
                runs[key] = replace(run, scores=same)
    else:
        score = with_labels(baselines["offensive"].start["test"], balanced_accuracy=0.99)
        baselines["offensive"] = replace(baselines["offensive"], start={"test": score})
    stuck = View(replace(view.results, runs=runs, baselines=baselines), view.analysis, {"paper": paper})
    verdicts = {row.task: row.verdict for row in both(stuck, paper) if row.left == "H1"}
    assert verdicts["offensive"] == "no verdict: runs did not learn"
    assert "no verdict" not in verdicts["hate"]
    first, *each = sentences(stuck)
    assert "4 get no verdict: most runs on offensive did not learn." in first
    assert sum("no verdict: runs did not learn" in text for text in each) == 4
    grey, coloured = ("no verdict" in render(beside_charts(of))[0].inline for of in (stuck, view))
    assert (grey, coloured) == (True, False)


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


@pytest.mark.filterwarnings("error")
def test_one_side_may_be_constant():
    theirs = (1.0, 2.0, 3.0)
    assert gap(theirs, (0.1,) * 6) == pytest.approx((1.9, 1.9 - 2.484138, 1.9 + 2.484138), abs=1e-6)
    assert gap((0.1,) * 3, (0.1,) * 6) is None
    assert gap(theirs, (0.1,)) is None
