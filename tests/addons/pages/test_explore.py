from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from scipy import stats

from gatespace.addons.pages.explore import build_explorer, find_runs, payload
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate, named_points
from gatespace.runs import StudyFolder
from gatespace.study.plan import make_plan
from tests.addons.pages.conftest import GATE, own_copy, records
from tests.sample_study import set_correct


def test_columns_are_what_was_recorded(runs):
    found = find_runs([runs])
    data = json.loads(json.dumps(payload(found)))
    assert [run["id"] for run in data["runs"]] == ["gated", "todi"]
    assert data["signals"] == ["h", "u", "gap", "student_entropy"]
    strings, token, response = data["strings"], 0, 0

    def text(index):
        return None if index < 0 else strings[index]

    for place, folder in enumerate(("gated", "todi")):
        for line in records(runs / folder):
            of = {name: column[response] for name, column in data["responses"].items()}
            assert (of["run"], of["step"], of["row"], of["start"]) == (place, line["step"], line["row"], token)
            assert bool(of["ended"]) is line["ended"]
            for name in ("text", "gold", "label", "source"):
                assert text(of[name]) == line[name]
            for i, written in enumerate(line["tokens"]):
                assert text(data["tokens"]["text"][token]) == written
                for name in (*data["signals"], "lam", "forward_kl", "reverse_kl"):
                    assert data["tokens"][name][token] == line["values"].get(name, [None] * 99)[i]
                count = data["top"]["count"]
                for who in ("teacher", "student"):
                    ids = data["top"][who][token * count : (token + 1) * count]
                    shares = data["top"][f"{who}_p"][token * count : (token + 1) * count]
                    assert [[text(i), p] for i, p in zip(ids, shares, strict=True)] == line[f"{who}_top"][i]
                token += 1
            response += 1
    assert (token, response) == (len(data["tokens"]["text"]), len(data["responses"]["run"]))
    assert {name: tuple(one["abcd"]) for name, one in data["points"].items()} == {
        name: gate.abcd for name, gate in named_points().items()
    }


def test_a_run_says_what_it_was(runs, gated):
    run = payload(find_runs([gated]))["runs"][0]
    summary = json.loads((gated / "summary.json").read_text())
    assert run["gate"] == {"abcd": [4, 4, -1.5, 2], "extra": {"student_entropy": 1}}
    assert (run["kind"], run["seed"], run["top_k"], run["done"], run["label"]) == ("point", 3, 8, True, GATE)
    assert run["lam"]["mean"] == summary["run"]["lam_mean"]
    assert run["scores"]["val"]["correct"] == summary["evaluation"]["val"]["metrics"]["correct"]
    assert run["course"]["step"] == [1, 2, 3, 4]
    other = payload(find_runs([runs / "todi"]))["runs"][0]
    assert (other["gate"], other["label"], other["kind"]) == (None, "todi", "published")


def test_too_many_tokens_are_thinned_evenly(runs, tmp_path):
    def long(lines):
        lines[:] = [{**line, "step": step} for step in range(1, 11) for line in lines[:8]]

    big = own_copy(runs / "gated", tmp_path / "big", long)
    small = len([t for line in records(runs / "todi") for t in line["ids"]])
    most = 2 * small + 40
    data = payload(find_runs([big, runs / "todi"]), most_tokens=most)
    few, all_ = data["runs"]
    assert most * 0.8 < len(data["tokens"]["text"]) <= most
    assert all_["shown"] == all_["recorded"]  # the smaller run keeps everything
    assert few["shown"] < few["recorded"] == 80
    steps = [s for s, run in zip(data["responses"]["step"], data["responses"]["run"], strict=True) if run == 0]
    counts = [steps.count(step) for step in range(1, 11)]
    assert max(counts) - min(counts) <= 1
    other = own_copy(big, tmp_path / "other")
    shown = [run["shown"] for run in payload(find_runs([big, other]), most_tokens=most)["runs"]]
    assert abs(shown[0] - shown[1]) <= 1  # runs that have much share alike


def test_a_study_is_read_with_its_points(runs, tmp_path):
    from gatespace.config import StudyConfig, parse_config

    config = parse_config(
        StudyConfig,
        {
            "name": "mine",
            "tasks": {"messages": {"task": {"name": "synthetic", "brief": True}}},
            "train": {"pair": {"student": "tiny-student", "teacher": "tiny"}, "steps": 4},
            "points": ["G5", "H1"],
            "seeds": [1, 2],
        },
    )
    study = StudyFolder(tmp_path / "study")
    study.begin(config, workers=1, threads=1)
    plan = make_plan(config, {})
    done = [spec for spec in plan.runs.values() if spec.kind == "point" and (spec.point, spec.seed) != ("H1", 2)]
    for spec in done:
        folder = own_copy(runs / "gated", study.run(spec.id).path)
        identity = json.loads((folder / "identity.json").read_text())
        identity["content"]["gate"] = ",".join(map(str, spec.gate))
        (folder / "identity.json").write_text(json.dumps(identity))
        summary = json.loads((folder / "summary.json").read_text())
        set_correct(summary["evaluation"]["val"]["metrics"], 10 + 2 * spec.seed)
        (folder / "summary.json").write_text(json.dumps(summary))
    found = find_runs([study.path])
    data = payload(found)
    assert (found.kind, found.title, found.home) == ("study", "mine", study.path)
    assert [run["id"] for run in data["runs"]] == [spec.id for spec in done]  # runs that have not begun are not there
    marks = {mark["label"]: mark for mark in data["marks"]}
    assert set(marks) == {"G5", "H1"}
    two = stats.t.interval(0.95, 1, 0.65, stats.sem([0.6, 0.7]))
    assert marks["G5"]["accuracy"] == pytest.approx(0.65)
    assert (marks["G5"]["low"], marks["G5"]["high"]) == pytest.approx((max(0, two[0]), min(1, two[1])))
    one = stats.binomtest(12, 20).proportion_ci(method="wilson")
    assert (marks["H1"]["low"], marks["H1"]["high"]) == pytest.approx((one.low, one.high))
    assert marks["H1"]["gate"]["abcd"] == [4, 4, -1.5, 2]


def test_a_run_that_is_still_being_written(gated, tmp_path):
    copy = own_copy(gated, tmp_path / "running")
    for name in ("done", "summary.json"):
        (copy / name).unlink()
    whole = len(records(copy))
    with (copy / "tokens.jsonl").open("a") as file:
        file.write('{"step": 9, "row')
    run = payload(find_runs([copy]))["runs"][0]
    assert (run["done"], run["recorded"], run["lam"], run["scores"]) == (False, whole, None, {})


def test_a_run_of_an_earlier_release(gated, tmp_path):
    copy = own_copy(gated, tmp_path / "old")
    summary = json.loads((copy / "summary.json").read_text())
    del summary["run"]["lam_sd"]
    metrics = summary["evaluation"]["val"]["metrics"]
    metrics["majority"], best = {"label": "joy", "accuracy": 0.0}, metrics.pop("best_constant")
    (copy / "summary.json").write_text(json.dumps(summary))
    run = payload(find_runs([copy]))["runs"][0]
    assert (run["lam"]["sd"], run["lam"]["mean"]) == (None, summary["run"]["lam_mean"])
    assert run["scores"]["val"]["best_constant"] == best["accuracy"]


def test_static_and_shuffled_runs(gated, tmp_path):
    config = (gated / "config.yaml").read_text()
    static = own_copy(gated, tmp_path / "static")
    text = re.sub(
        r"objective:\n  method: gated\n  gate: .*\n  params: \{\}",
        "objective:\n  method: static\n  gate: null\n  params: {lam: 1.0}",
        config,
    )
    (static / "config.yaml").write_text(text)
    shuffled = own_copy(gated, tmp_path / "shuffled")
    (shuffled / "config.yaml").write_text(config.replace("shuffle: false", "shuffle: true"))
    one, other = payload(find_runs([static, shuffled]))["runs"]
    assert (one["gate"]["abcd"], one["kind"], one["label"]) == ([0, 0, "inf", 0], "static", "static:1")
    assert (other["kind"], other["label"]) == ("control", f"shuffled({GATE})")


def test_conversations_are_shown_turn_by_turn(gated, tmp_path):
    def change(lines):
        for line in lines:
            line["text"] = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1\n2"}])

    found = find_runs([own_copy(gated, tmp_path / "chats", change)])
    run = replace(found.runs[0], settings={**found.runs[0].settings, "task": {"text": {"messages": "chat"}}})
    data = payload(replace(found, runs=(run,)))
    assert {data["strings"][text] for text in data["responses"]["text"]} == {"system: Be brief.\nuser: 1\n2"}


def test_runs_of_one_name_are_told_apart(gated, tmp_path):
    copy = own_copy(gated, tmp_path / "gated")
    assert [run["id"] for run in payload(find_runs([gated, copy, gated]))["runs"]] == ["gated", "gated (2)"]


# ---------------------------------------------------------------------- mistakes


def test_mistakes_are_errors_with_a_way_out(runs, gated, tmp_path):
    def error(*args, **more):
        with pytest.raises(UsageError) as caught:
            build_explorer(*args, **more)
        return str(caught.value)

    assert "there is no such folder" in error([tmp_path / "none"])
    assert "not the folder of a run or a study" in error([tmp_path])
    assert "not a run of `gatespace train`" in error([runs.parent / "taught"])
    assert "nothing to explore" in error([])
    assert "two gates" in error([gated], gates=[Gate()] * 3)
    assert "signals here: h, u, gap, student_entropy" in error([gated], gates=[Gate.parse("0,0,0,0,jsd=1")])
    silent = own_copy(gated, tmp_path / "silent")
    (silent / "tokens.jsonl").unlink()
    assert "trace.tokens_every" in error([silent])


def test_where_it_is_written(gated, tmp_path):
    copy = own_copy(gated, tmp_path / "run")
    made = build_explorer([copy])
    assert made.write() == copy / "explorer.html"
    assert made.write(tmp_path / "deep" / "x.html").read_text() == made.html
    assert made.write(tmp_path) == tmp_path / "explorer.html"


def test_it_needs_no_torch(gated, tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path;"
        "from gatespace.addons.pages.explore import build_explorer;"
        f"print(build_explorer([Path({str(gated)!r})]).write(Path({str(tmp_path / 'x.html')!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.html").exists()


def test_rounding_of_the_record_is_all_that_separates_lam(gated):
    """λ from the recorded signals is the λ of training, up to the six digits of the record."""
    gate = Gate.parse(GATE)
    for line in records(gated):
        values = line["values"]
        for i, lam in enumerate(values["lam"]):
            own = gate.lam(**{name: values[name][i] for name in ("h", "u", "gap", "student_entropy")})
            assert math.isclose(own, lam, abs_tol=1e-5)
