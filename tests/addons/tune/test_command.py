"""`gatespace tune`: what it would do, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gatespace.cli.app import app


def tune(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"}).invoke(app, ["tune", *map(str, words)])


def test_a_dry_run_says_what_it_would_cost() -> None:
    told = tune("demo", "--dry-run", "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["candidates"][:3] == ["static:0.02", "static:0.15", "static:0.3"]
    assert found["candidates"][-3:] == ["todi", "eopd(pg=exact)", "akl"]
    assert [rung["steps"] for rung in found["rungs"]] == [5, 15, 30]
    most = sum(rung["steps_at_most"] for rung in found["rungs"]) + found["verdict"]["steps_at_most"]
    assert found["steps_at_most"] == most < found["grid_steps"]
    shown = tune("demo", "--dry-run", "--set", "tune.proposals=0")
    assert "rung 3: 30 steps" in shown.stdout
    assert "up to 0 proposals" in shown.stdout
    least = json.loads(tune("demo", "--dry-run", "--json", "--set", "tune.proposals=0").stdout)["steps_at_most"]
    some = json.loads(tune("demo", "--dry-run", "--json", "--budget", f"{least + 50}steps").stdout)
    assert 0 < some["proposals"] < found["proposals"]
    assert some["steps_at_most"] <= least + 50
    assert "known after the warm-up" in tune("demo", "--dry-run", "--budget", "2h").stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (["demo", "--budget", "soon"], "--budget"),
        (["demo", "--budget", "200steps", "--dry-run"], "too small"),
        (["demo", "--address", "auto"], "--address"),
        (["dmeo"], "unknown study"),
        (["nowhere.yaml"], "no such file"),
        (["demo", "--set", "tune.rung=[]"], "rungs"),
        (["demo", "--set", "tune.channels=[h, hh]"], "hh"),
        (["demo", "--set", "train.checkpoint.select=best"], "checkpoint.select"),
        (["demo", "--engine", "rai"], "rai"),
    ],
)
def test_mistakes_are_named(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = tune(*words)
    assert told.exit_code == 2, told.output
    assert said in told.output
    assert "Traceback" not in told.output
    assert not [*tmp_path.iterdir()]
