from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gatespace.cli.app import app
from tests.explore.conftest import own_copy, records


def run(*args):
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, ["explore", *map(str, args)])


def test_it_writes_a_page_and_says_where(gated, tmp_path):
    copy = own_copy(gated, tmp_path / "run")
    result = run(copy)
    assert result.exit_code == 0, result.output
    count = len(records(copy))
    assert f"of {count} responses, 1 run" in result.output
    assert "explorer.html" in result.output
    assert (copy / "explorer.html").read_text().startswith("<!doctype html>")


def test_json_and_what_is_left_out(runs, tmp_path):
    page = tmp_path / "x.html"
    result = run(runs, "--output", page, "--gate", "-4,0,0,0", "--gate", "H2", "--tokens", "60", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert said["html"] == str(page)
    assert said["bytes"] == page.stat().st_size
    assert said["runs"] == 2
    assert said["responses"] < said["recorded"] == len(records(runs / "gated")) + len(records(runs / "todi"))
    assert said["tokens"] <= 60


@pytest.mark.parametrize(
    "args, words",
    [
        (["nowhere"], "there is no such folder"),
        (["{run}", "--gate", "G99"], "unknown gate"),
        (["{run}", "--gate", "1,2,3,4,jsd=1"], "was not recorded"),
        (["{run}", "--serve", "--json"], "--serve writes nothing"),
    ],
)
def test_mistakes_are_told_without_a_traceback(gated, args, words):
    result = run(*[arg.replace("{run}", str(gated)) for arg in args])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
