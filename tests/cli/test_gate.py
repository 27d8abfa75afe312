from __future__ import annotations

import itertools
import json
import math

import pytest
from typer.testing import CliRunner

from gatespace import signals
from gatespace.cli.app import app
from gatespace.cli.gate import GRID, TYPICAL, cube_statistics, notes
from gatespace.gating.coefficients import Gate, named_points

CUBE = [*itertools.product((0.0, 1.0), repeat=3), (0.5, 0.5, 0.5)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def read(run, *args):
    result = run("gate", *args, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "text, abcd",
    [
        ("G5", (4, 0, -1, 0)),
        ("H2", (4, 4, -1.5, 4)),
        ("HG5,d+4", (4, 0, -1, 4)),
        ("hg4d-2", (0, 4, -1, -2)),
        ("4,0,-1,0", (4, 0, -1, 0)),
        ("-4,0,0,0", (-4, 0, 0, 0)),
        ("-.5,-1e1,2,-0.25", (-0.5, -10, 2, -0.25)),
        ("entropy-only(4)", (-4, 0, 0, 0)),
        ("gap-only:-2", (0, 0, 0, -2)),
    ],
)
def test_table_equals_the_formula(run, text, abcd):
    (point,) = read(run, text)["points"]
    a, b, c, d = abcd
    assert point["input"] == text
    assert point["gate"] == list(abcd)
    assert [(row["h"], row["u"], row["gap"]) for row in point["table"]] == CUBE
    for row in point["table"]:
        expected = sigmoid(a * row["h"] + b * row["u"] + c + d * row["gap"])
        assert row["lam"] == pytest.approx(expected, rel=1e-14)
    lams = [row["lam"] for row in point["table"]]
    assert point["lam_range"] == pytest.approx([min(lams), max(lams)], rel=1e-14)


@pytest.mark.parametrize(
    "text, logits",
    [
        ("4,0,-1,0,jsd=2", (-1, 5)),
        ("4,0,-1,0,jsd=-2,position=1", (-3, 4)),
        ("1,0,0,0,log_ratio=.5", (-math.inf, math.inf)),
        ("0,0,1,-2,swing=-2", (1 - 2 - 6, 1 + 2)),
    ],
)
def test_range_of_lam_counts_further_signals_in_their_registered_ranges(run, text, logits):
    signals.register("swing", range=(-1.0, 3.0))(lambda tokens: 4 * tokens.position / tokens.length - 1)
    try:
        (point,) = read(run, text)["points"]
    finally:
        signals.unregister("swing")
    assert point["lam_range"] == pytest.approx([1 / (1 + math.exp(-x)) if x > -math.inf else 0.0 for x in logits])
    assert any("log_ratio unbounded" in note for note in point["notes"]) == ("log_ratio" in text)


def test_json_schema(run):
    data = read(run, "G5", "static:0.388", "4,0,-1,0,jsd=2")
    assert set(data) == {"points", "at", "grid"}
    keys = {
        "input", "name", "gate", "extra", "lam_range", "entropy_only", "gap_only", "table", "saturation", "mean_lam",
        "notes",
    }  # fmt: skip
    for point in data["points"]:
        assert set(point) == keys
        assert len(point["gate"]) == 4
        assert 0 <= point["saturation"] <= 1
        assert set(point["table"][0]) == {"h", "u", "gap", "lam"}
    g5, static, extra = data["points"]
    assert (g5["name"], static["name"], extra["name"]) == ("G5", "static:0.388", None)
    assert static["gate"][2] == pytest.approx(math.log(0.388 / 0.612), rel=1e-14)
    assert static["mean_lam"] == pytest.approx(0.388, rel=1e-12)
    assert extra["extra"] == {"jsd": 2.0}


def test_restrictions_or_the_reason_why_not(run):
    g5, h2, g4, static = read(run, "G5", "H2", "G4", "static:0.5")["points"]
    assert g5["entropy_only"] == {"gate": [-4.0, 0.0, 0.0, 0.0]}
    assert g5["gap_only"] == {"na": "gap-only keeps d, and d = 0 here"}
    assert h2["gap_only"] == {"gate": [0.0, 0.0, 0.0, 4.0]}
    assert g4["entropy_only"] == {"na": "entropy-only keeps a, and a = 0 here"}
    assert static["entropy_only"].keys() == static["gap_only"].keys() == {"na"}


def test_an_infinite_bias_is_still_json(run):
    zero, one = read(run, "static:0", "static:1")["points"]
    assert (zero["gate"][2], one["gate"][2]) == ("-inf", "inf")
    assert (zero["mean_lam"], one["mean_lam"]) == (0.0, 1.0)
    assert zero["saturation"] == one["saturation"] == 1.0
    assert Gate(*map(float, one["gate"])) == Gate.static(1)


@pytest.mark.parametrize("text", ["G3", "H2", "G4", "-4,0,0,0", "static:0.99", "static:0.7"])
def test_cube_statistics_equal_a_plain_loop_over_the_whole_grid(text):
    gate, n = Gate.parse(text), GRID
    middle = [(i + 0.5) / n for i in range(n)]
    a, b, c, d = gate.abcd
    lams = [sigmoid(a * h + b * u + c + d * gap) for h in middle for u in middle for gap in middle]
    mean, saturation = cube_statistics(gate)
    assert mean == pytest.approx(math.fsum(lams) / n**3, rel=1e-10)
    assert saturation == pytest.approx(sum(lam <= 0.02 or lam >= 0.98 for lam in lams) / n**3, abs=1e-12)


def test_mean_over_the_cube_is_near_the_integral():
    # ∫ σ(4h-1) dh over [0, 1] = [log(1 + e^(4h-1))]/4
    exact = (math.log1p(math.exp(3)) - math.log1p(math.exp(-1))) / 4
    assert cube_statistics(Gate.named("G5"))[0] == pytest.approx(exact, abs=1e-4)


def test_at_adds_a_row(run):
    data = read(run, "4,0,-1,0,jsd=2", "G2", "--at", "h=.3, gap=1,jsd=.5")
    assert data["at"] == {"h": 0.3, "u": TYPICAL, "gap": 1.0, "jsd": 0.5}
    first, second = (point["table"] for point in data["points"])
    assert len(first) == len(CUBE) + 1
    assert first[-1] == {**data["at"], "lam": pytest.approx(sigmoid(4 * 0.3 - 1 + 2 * 0.5))}
    assert second[-1]["lam"] == pytest.approx(sigmoid(4 * 0.3 + 4 * TYPICAL - 1.5))


def test_without_points_all_named_points(run):
    points = read(run)["points"]
    assert [point["name"] for point in points] == list(named_points())


# ---------------------------------------------------------------------------------------------- text


def test_report(run):
    result = run("gate", "G5", "H2", "static:0.388")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for words in ("G5 4 0 -1 0 0.269", "N/A (gap-only", ".731", ".388", "constant λ", "uniform grid"):
        assert words in text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("G5", ["λ rises with h"]),
        ("entropy-only:4", ["λ falls with h", "λ ≤ 0.5 always"]),
        ("gap-only:2", ["λ rises with gap", "λ ≥ 0.5 always", "gradient"]),
        ("G4", ["every token of a response shares one λ", "needs u"]),
        ("H3", ["λ rises with h and u, falls with gap", "needs u"]),
        ("static:.3", ["constant λ"]),
        ("-4,0,0,0,jsd=2", ["λ rises with jsd, falls with h", "jsd counted as 0"]),
        ("-4,0,0,0,jsd=-2", ["λ falls with h and jsd", "λ ≤ 0.5 always"]),
    ],
)
def test_notes(text, expected):
    found = notes(Gate.parse(text))
    for note in expected:
        assert any(note in sentence for sentence in found), found
    assert any("0.5 always" in sentence for sentence in found) == any("0.5 always" in note for note in expected)


def test_all_points_fit_the_width():
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["gate"])
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout


def test_markup_in_a_point_is_text(run):
    result = run("gate", "[red]G5[/red]")
    assert result.exit_code == 2
    assert "'[red]G5[/red]'" in result.stderr


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "args, words",
    [
        (["G55"], ["unknown gate 'G55'", "did you mean 'G5'?"]),
        (["static:1.5"], ["a static λ lies in [0, 1]", "got: 1.5"]),
        (["1,2,3"], ["four coefficients", "4,0,-1,0"]),
        (["-4"], ["four coefficients"]),
        (["-1,2"], ["four coefficients"]),
        (["4,0,-1,0,jsd"], ["signal=coefficient"]),
        (["nan,0,0,0"], ["NaN"]),
        ([""], ["unknown gate"]),
        (["G5", "--at", "h=2"], ["h lies in [0, 1]"]),
        (["G5", "--at", "h"], ["signal=value"]),
        (["G5", "--at", "gpa=.5"], ["unknown signal 'gpa'", "did you mean 'gap'?"]),
        (["G5", "--at", "jsd=.5"], ["unknown signal 'jsd'"]),
        (["4,0,-1,0,jds=2"], ["unknown signal 'jds'", "did you mean 'jsd'?"]),
        (["0,0,0,0,jsd=1", "--at", "jsd=inf"], ["finite"]),
    ],
)
def test_bad_input_exits_2_and_says_why(run, args, words):
    result = run("gate", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("args", [["-4,0,0,0", "--json"], ["--json", "-4,0,0,0"], ["--json", "--", "-4,0,0,0"]])
def test_a_point_may_start_with_a_dash(gatespace, args):
    result = gatespace("gate", *args)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["points"][0]["gate"] == [-4.0, 0.0, 0.0, 0.0]
