"""Tables against an independent reading of the predictions that lie in the runs' folders."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats

from gatespace.evidence.analysis import analyse
from gatespace.evidence.groups import Difference, mixed
from gatespace.report.findings import find
from gatespace.report.page import page
from gatespace.report.table import csv_text
from gatespace.report.tables import file_tables, page_tables
from gatespace.report.view import Published, View
from gatespace.study.plan import NINE
from tests.sample_study import sample_results

from .conftest import Built

T_975 = {1: 12.706204736, 2: 4.302652730, 3: 3.182446305, 4: 2.776445105}
"""Of Student's t, by degrees of freedom."""


def rows(built: Built, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(built.table(name))))


def read(built: Built, run_id: str, split: str = "test") -> list[tuple[str, str | None]]:
    text = (built.results.folder / "runs" / run_id / f"predictions-{split}.jsonl").read_text()
    return [(row["gold"], row["label"]) for row in map(json.loads, text.splitlines())]


def share(pairs) -> float:
    return sum(gold == said for gold, said in pairs) / len(pairs)


def accuracies(built: Built, task: str, point: str) -> dict[int, float]:
    specs = [run.spec for run in built.results.runs.values() if (run.spec.task, run.spec.point) == (task, point)]
    return {spec.seed: 100 * share(read(built, spec.id)) for spec in specs}


def macro_f1(pairs, labels) -> float:
    f1 = []
    for label in labels:
        right = sum(gold == said == label for gold, said in pairs)
        total = sum(gold == label for gold, _ in pairs) + sum(said == label for _, said in pairs)
        f1.append(2 * right / total if total else 0.0)
    return fmean(f1)


def test_every_run_has_its_counts(whole):
    table = {row["runs"]: row for row in rows(whole, "runs")}
    assert table.keys() == whole.results.runs.keys()
    for run_id, run in list(whole.results.runs.items())[::17]:
        pairs = read(whole, run_id)
        row = table[run_id]
        assert int(row["correct"]) == sum(gold == said for gold, said in pairs)
        assert int(row["count"]) == len(pairs)
        assert float(row["accuracy"]) == pytest.approx(share(pairs), abs=1e-15)
        assert row["weights"] == run.fingerprint
        assert row["commit"] == "0123456789ab"
        assert int(row["parse_failures"]) == sum(said is None for _, said in pairs)
        assert float(row["macro_f1"]) == pytest.approx(macro_f1(pairs, run.scores["test"].labels.confusion), abs=1e-12)


def test_points_have_mean_and_sd_over_the_sweep(whole):
    for row in rows(whole, "points")[::9]:
        found = accuracies(whole, row["task"], row["point"])
        values = [found[seed] for seed in whole.results.seeds]
        assert 100 * float(row["accuracy"]) == pytest.approx(fmean(values))
        assert float(row["sd_pp"]) == pytest.approx(stdev(values))
        start = whole.results.baselines[row["task"]].start["test"].accuracy
        assert float(row["above_start_pp"]) == pytest.approx(fmean(values) - 100 * start)


@pytest.mark.parametrize("axis", ["restriction", "isolation", "control", "static", "published", "gap"])
def test_comparisons_are_paired_by_seed(whole, axis):
    table = rows(whole, f"comparisons-{axis}")
    assert table
    for row in table[:: max(1, len(table) // 4)]:
        left, right = (accuracies(whole, row["task"], row[side]) for side in ("left", "right"))
        differences = [left[seed] - right[seed] for seed in left if seed in right]
        n = len(differences)
        assert int(row["n"]) == n >= 3
        assert float(row["mean_pp"]) == pytest.approx(fmean(differences), abs=1e-9)
        half = T_975[n - 1] * stdev(differences) / math.sqrt(n)
        assert float(row["low_pp"]) == pytest.approx(fmean(differences) - half, abs=1e-6)
        assert float(row["high_pp"]) == pytest.approx(fmean(differences) + half, abs=1e-6)
        fresh = [left[seed] - right[seed] for seed in left if seed in right and seed != whole.results.selection_seed]
        assert float(row["fresh_mean_pp"]) == pytest.approx(fmean(fresh), abs=1e-9)
        assert float(row["sign_flip_floor"]) == 2 / 2**n
        assert len(row["runs"].split()) == 2 * n
        assert set(row["runs"].split()) <= whole.results.runs.keys()


class Elsewhere:
    """Somebody's results on one of the tasks."""

    seeds = (5, 6)
    note = "Of another pair."

    def accuracies(self, data):
        return {"G5": {5: 0.5, 6: 0.6}} if data == "tweeteval/hate" else {}

    def differences(self, data):
        printed = {("H1", "G2"): Published(1.25), ("H1", "static:0.5"): Published(2.0, 1.5, 0.3, 1.0, 2.0, 0.04)}
        return printed if data == "tweeteval/hate" else {}

    def best(self, data):
        return {"family": 0.75} if data == "tweeteval/hate" else {}


@pytest.fixture(scope="module")
def referred(whole):
    """The tables of the whole study beside those of one reference."""
    view = View(whole.results, whole.analysis, {"other": Elsewhere()})
    return {table.name: table for table in file_tables(view)}


def test_published_results_stand_beside(referred):
    def cells(name, *key):
        table = list(csv.DictReader(io.StringIO(csv_text(referred[name]))))
        return next(row for row in table if tuple(row.values())[: len(key)] == key)

    g5 = cells("per-seed", "hate", "G5")
    assert [g5["other_seed_5"], g5["other_seed_6"]] == ["0.5", "0.6"]
    assert float(g5["other_sd_pp"]) == pytest.approx(100 * stdev([0.5, 0.6]))
    assert cells("per-seed", "emotion", "G5")["other_seed_5"] == ""
    assert cells("comparisons-gap", "hate", "H1", "G2")["other_pp"] == "1.25"
    again = cells("replication", "static", "hate", "H1", "static:0.5")  # here it is part of the sweep only
    assert [again[f"other_{key}"] for key in ("one_seed_pp", "mean_pp", "p")] == ["2.0", "1.5", "0.04"]
    assert cells("best-observed", "hate", "family")["other_observed"] == "0.75"
    for name in ("per-seed", "comparisons-gap", "replication", "best-observed"):
        assert referred[name].note.endswith("Of another pair.")


def test_a_difference_at_one_seed_is_no_replication(referred):
    keys = [column.csv_name for column in referred["replication"].columns[1:4]]
    assert keys == ["task", "left", "right"]
    assert ("hate", "H1", "G2") not in {row[1:4] for row in referred["replication"].rows}


@pytest.mark.parametrize("references", [{}, {"other": Elsewhere()}], ids=["none", "on other tasks"])
def test_without_published_results_there_are_no_such_columns(small, references):
    view = View(small.results, small.analysis, references)
    for table in file_tables(view):
        assert not [column for column in table.columns if "other" in column.key], table.name
        assert "another pair" not in table.note


def test_every_column_has_a_value_somewhere(referred):
    for table in referred.values():
        for i, column in enumerate(table.columns):
            if column.key not in ("note", "holm"):  # only where there is something to note, or a replication
                assert any(row[i] is not None for row in table.rows), (table.name, column.key)


def test_the_best_is_chosen_on_validation(whole):
    for task in whole.results.tasks:
        points = whole.results.points(task, "point")
        means = {}
        for split in ("val", "test"):
            for point in points:
                runs = [whole.results.run(task, point, seed) for seed in whole.results.seeds]
                means[split, point] = fmean(share(read(whole, run.spec.id, split)) for run in runs)
        row = next(r for r in rows(whole, "best-observed") if (r["task"], r["side"]) == (task, "family"))
        assert means["val", row["chosen"]] == pytest.approx(max(means["val", point] for point in points))
        assert float(row["chosen_test"]) == pytest.approx(means["test", row["chosen"]])
        assert means["test", row["observed"]] == pytest.approx(max(means["test", point] for point in points))


def test_confusions_are_counts_of_predictions(whole):
    for task in whole.results.tasks:
        table = [row for row in rows(whole, "confusion") if row["task"] == task]
        chosen = next(row["model"] for row in table if row["model"] not in ("start", "teacher"))
        counted: Counter[tuple[str, str]] = Counter()
        for run in whole.results.runs.values():
            if (run.spec.task, run.spec.point) == (task, chosen):
                counted.update((gold, said or "(none)") for gold, said in read(whole, run.spec.id))
        found = {(row["gold"], row["predicted"]): int(row["rows"]) for row in table if row["model"] == chosen}
        assert {pair: n for pair, n in found.items() if n} == counted


def test_texts_that_stand_in_train_are_left_out(whole):
    dropped = {row["task"]: int(row["duplicates"]) for row in rows(whole, "baselines")}
    assert any(dropped.values())
    for row in rows(whole, "points")[::11]:
        runs = [whole.results.run(row["task"], row["point"], seed) for seed in whole.results.seeds]
        left = [share(read(whole, run.spec.id)[dropped[row["task"]] :]) for run in runs]
        assert float(row["without_duplicates"]) == pytest.approx(fmean(left))


def test_a_mixed_model_that_is_not_fitted_says_so(small):
    analysis = small.analysis
    absent = mixed([Difference("t", seed, f"G{i}", "E", math.nan) for seed in (1, 2) for i in range(5)])
    view = View(small.results, replace(analysis, groups=tuple(replace(g, mixed=absent) for g in analysis.groups)))
    tables = {table.name: table for table in file_tables(view)}
    usual = rows(small, "groups")
    told = list(csv.DictReader(io.StringIO(csv_text(tables["groups"]))))
    assert all(row["mixed_pp"] == row["mixed_p"] == str(absent) for row in told)
    assert "is not fitted" in str(absent)
    assert [row["mean_pp"] for row in told] == [row["mean_pp"] for row in usual]  # the claim needs no second look
    assert "Group claims" in page(view, find(view), list(tables.values()), page_tables(view), [])


def test_no_number_is_nan_and_no_path_is_absolute(whole):
    for path in whole.files.tables:
        text = path.read_text(encoding="utf-8")
        assert "nan" not in text.replace("\n", ",").lower().split(","), path.name
        assert str(whole.results.folder) not in text


def test_secondary_outcomes_are_those_of_the_runs(tmp_path):
    tasks = ("emotion", "offensive", "hate")
    results = sample_results(tmp_path, seeds=(11, 12), tasks=tasks, rows=80, steps=30, nine=True, probabilities=True)
    view = View(results, analyse(results))
    (table,) = (table for table in file_tables(view) if table.name == "secondary")
    keys = [column.key for column in table.columns]
    rows = {row[1:4]: dict(zip(keys, row, strict=True)) for row in table.rows}
    assert {*rows} == {*NINE}
    for (task, left, right), row in rows.items():
        expected: dict[str, list[float]] = {"f1": [], "area": [], "loss": []}
        for seed in (11, 12):
            sides = [results.run(task, point, seed) for point in (left, right)]
            f1 = [100 * run.scores["test"].macro_f1 for run in sides]
            loss = [run.scores["val"].calibration.log_loss for run in sides]
            area = []
            for run in sides:
                known = {0: results.baselines[task].start["val"].accuracy}
                known |= {r["step"]: r["accuracy"] for r in run.evaluations() if r["split"] == "val"}
                known[run.cost.steps] = run.scores["val"].accuracy
                assert len(known) > 2
                steps = sorted(known)
                area.append(100 * np.trapezoid([known[s] for s in steps], steps) / steps[-1])
            for name, (one, other) in zip(expected, (f1, area, loss), strict=True):
                expected[name].append(one - other)
        for name, values in expected.items():
            interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
            found = [row[f"{name}_{part}"] for part in ("n", "mean", "low", "high")]
            assert found == pytest.approx([2, np.mean(values), interval.low, interval.high], abs=1e-9)
