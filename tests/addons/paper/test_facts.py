"""The paper's results beside those of a study."""

from __future__ import annotations

import csv
import io

import pytest

from gatespace.addons.paper.facts import SEEDS, facts
from gatespace.evidence.analysis import analyse
from gatespace.report.table import csv_text
from gatespace.report.tables import file_tables
from gatespace.report.view import View
from tests.sample_study import sample_results


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The tables of a study on two tasks of the paper and one that is not."""
    results = sample_results(
        tmp_path_factory.mktemp("study"),
        tasks=("emotion", "hate", "weather"),
        points=("G2", "G4", "G5", "H1", "H2", "H3", "H4", "HG4,d+2"),
        rows=40,
        steps=4,
        replication_seeds=(7,),
        published=(),
    )
    tables = file_tables(View(results, analyse(results)))
    return {table.name: list(csv.DictReader(io.StringIO(csv_text(table)))) for table in tables}


def test_the_paper_stands_beside_its_own_tasks(tables):
    table = {(row["task"], row["left"], row["right"]): row for row in tables["replication"]}
    row = table["hate", "H1", "entropy-only(-4)"]
    printed = [float(row[f"paper_{key}"]) for key in ("one_seed_pp", "mean_pp", "sd_pp", "low_pp", "high_pp", "p")]
    assert printed == [4.21, 1.73, 2.18, -3.69, 7.15, 0.30]
    assert ("hate", "G4", "twin(G4)") in table
    assert table["emotion", "G5", "twin(G5)"]["paper_mean_pp"] == ""  # replicated here, not in the paper
    seeds = {(row["task"], row["point"]): row for row in tables["per-seed"]}
    assert [float(seeds["hate", "twin(G4)"][f"paper_seed_{s}"]) for s in (42, 2, 3)] == [0.5202, 0.5444, 0.5195]
    assert float(seeds["hate", "twin(G4)"]["paper_sd_pp"]) == pytest.approx(1.42, abs=0.005)
    gap = {(row["task"], row["left"]): row["paper_pp"] for row in tables["comparisons-gap"]}
    assert [gap["hate", point] for point in ("H1", "H2", "H3", "H4")] == ["3.27", "1.89", "1.35", "1.45"]
    assert gap["hate", "HG4,d+2"] == ""  # on G4: the table of the paper is on G2
    best = {(row["task"], row["side"]): row["paper_observed"] for row in tables["best-observed"]}
    assert best["emotion", "family"] == "0.7868"


def test_another_task_has_none_of_its_numbers(tables):
    for name in ("replication", "per-seed", "comparisons-gap", "best-observed"):
        rows = [row for row in tables[name] if row["task"] == "weather"]
        assert rows
        assert not any(value for row in rows for key, value in row.items() if key.startswith("paper"))


def test_seeds_are_those_of_the_papers_columns():
    known = facts()["seeds"]
    assert list(SEEDS) == known["column_order_per_seed_table"]["value"]
    assert SEEDS[0] == known["single_seed"]["value"]
