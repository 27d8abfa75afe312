"""`gatespace methods`: all objectives in a line each, one in full, and the study that compares them."""

from __future__ import annotations

import json
import re

from gatespace.gating.objectives import OBJECTIVES, described


def test_one_line_each(run):
    result = run("methods")
    for name, kind in OBJECTIVES.items():
        assert re.search(rf"^ *{name} +{re.escape(described(kind)['summary'])} *$", result.stdout, re.M), name


def test_one_in_full(run):
    result = run("methods", "taid")
    text = " ".join(result.stdout.split())
    assert "alpha=0.0005" in text
    assert "a state over steps" in text and "arXiv:2501.16937" in text  # noqa: PT018
    assert "Departures: The restriction gap-only (0,0,0,d) is not ToDi" in " ".join(
        run("methods", "todi").stdout.split()
    )
    assert run("methods", "tiad").exit_code == 2


def test_json(run):
    found = {one["name"]: one for one in json.loads(run("methods", "--json").stdout)["methods"]}
    assert list(found) == list(OBJECTIVES)
    assert found["tip"]["parameters"] == {"share": 0.5, "alpha": 1.0, "gamma": 0.0}
    assert found["todi"]["needs"] == ["the teacher's full distribution"]
    assert found["iw_opd"]["needs"] == ["the sampled token"]


def test_the_shipped_study_has_every_published_method_with_its_rollouts(cli):
    plan = json.loads(cli("plan", "methods", "--json").stdout)
    labels = {run["point"].partition(" ")[0] for run in plan["runs"] if run["kind"] == "published"}
    assert labels == set(OBJECTIVES) - {"gated", "static"}
    assert {comparison["status"] for comparison in plan["comparisons"]} == {"comparable"}
