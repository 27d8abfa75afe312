"""`gatespace explore`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gatespace.cli.app import app
from tests.addons.pages.conftest import own_copy, records
from tests.addons.pages.test_page import ask


def run(*args):
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, [*map(str, args)])


def test_explore_writes_a_page_and_says_where(gated, tmp_path):
    copy = own_copy(gated, tmp_path / "run")
    result = run("explore", copy)
    assert result.exit_code == 0, result.output
    count = len(records(copy))
    assert f"of {count} responses, 1 run" in result.output
    assert "explorer.html" in result.output
    assert (copy / "explorer.html").read_text().startswith("<!doctype html>")


def test_json_and_what_is_left_out(runs, tmp_path):
    page = tmp_path / "x.html"
    result = run("explore", runs, "--output", page, "--gate", "-4,0,0,0", "--gate", "H2", "--tokens", "60", "--json")
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
def test_mistakes_of_explore_are_told_without_a_traceback(gated, args, words):
    result = run("explore", *[arg.replace("{run}", str(gated)) for arg in args])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_explore_serves_until_interrupted(gated):
    command = [sys.executable, "-m", "gatespace", "explore", str(gated), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[1])
        status, body, _ = ask(("127.0.0.1", port))
        assert status == 200
        assert "<!doctype html>" in body
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.stdout.close()
    assert not (gated / "explorer.html").exists()
