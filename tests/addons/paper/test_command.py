from __future__ import annotations

import json

import pytest

NO_TORCH = """
import sys
sys.argv = ["gatespace", "paper", *{args!r}]
from gatespace.cli.app import main
try:
    main()
finally:
    print("TORCH", "torch" in sys.modules, "scipy" in sys.modules, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def text():
    from typer.testing import CliRunner

    from gatespace.cli.app import app

    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, ["paper"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_the_promised_keys(run):
    result = run("paper", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert {"nine", "audit"} <= set(found)
    assert len(found["nine"]) == 9
    for row in found["nine"]:
        assert {"axis", "task", "a", "b", "mean", "sd", "t", "p", "ci", "fresh_mean"} <= set(row)
        assert all(isinstance(row[key], float) for key in ("mean", "sd", "t", "p", "fresh_mean"))
        low, high = row["ci"]
        assert low < row["mean"] < high
    assert {
        "fresh_seeds", "omnibus", "majority_class", "duplicates", "shared_comparators", "infeasible_aggregate",
        "mean_lambda",
    } <= set(found["audit"])  # fmt: skip
    first = found["nine"][0]
    assert (first["axis"], first["task"], first["a"], first["b"]) == ("restriction", "hate", "H1", "entropy-only(-4)")
    assert [round(first[key], 6) for key in ("mean", "sd", "t", "p")] == [1.73, 2.182865, 1.372713, 0.3035]
    assert [round(end, 6) for end in first["ci"]] == [-3.692537, 7.152537]


def test_json_is_strict(run):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads(run("paper", "--json").stdout, parse_constant=refuse)


def test_printed_and_computed_stand_side_by_side(text):
    lines = [line.split() for line in text.splitlines()]
    at = next(i for i, line in enumerate(lines) if line[:3] == ["H1", "-", "entropy-only(-4)"])
    assert lines[at - 1] == ["hate,", "restriction", "+1.73", "2.18", "[-3.69,", "+7.15]", "0.30"]
    assert lines[at][3:] == ["+1.7300", "2.1829", "[-3.6925,", "+7.1525]", "0.3035", "yes"]
    assert ["hate", "static:0.556", "1.42", "1.4178", "yes"] in lines
    assert ["comparable", "36", "36", "yes"] in lines
    assert ["both", "tasks", "36", "19", "4", "2", "11", "23", "to", "34", "33", "possible"] in lines
    assert "NO" not in text.split()


def test_the_audit_is_in_sentences(text):
    flat = " ".join(text.split())
    assert "On it their mean is +1.90 pp, on the fresh seeds 2 and 3 it is +0.28 pp" in flat
    assert "has variance 22.3 and not 9: it is worth 14.5 independent cells" in flat
    assert "right in 0.5785 of cases" in flat
    assert "231 of the 2970 hate test texts" in flat
    assert "these sum to at least 26" in flat
    assert "57 of 57 figures that can be computed match" in flat


def test_fits_into_80_columns(text):
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_needs_no_torch(python, args):
    result = python("-c", NO_TORCH.format(args=args))
    assert result.returncode == 0, result.stderr
    assert "TORCH False True" in result.stderr


def test_piped_output_has_no_escape_codes(gatespace):
    result = gatespace("paper")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout


def test_help_teaches(run):
    result = run("paper", "--help")
    assert result.exit_code == 0
    assert "gatespace paper --json | jq '.nine[0]'" in result.stdout
    assert "paper" in [line.split()[1] for line in run("--help").stdout.splitlines() if line.startswith("│")]


def test_says_which_extra_is_missing(python):
    script = """
import sys
sys.modules["scipy"] = None
sys.argv = ["gatespace", "paper"]
from gatespace.cli.app import main
main()
"""
    result = python("-c", script)
    assert result.returncode == 2
    assert "needs the package 'scipy'" in result.stderr
    assert "pip install '.[evidence]'" in result.stderr


def test_takes_no_arguments(run):
    assert run("paper", "now").exit_code == 2
