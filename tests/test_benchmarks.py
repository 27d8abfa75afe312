"""The benchmarks run, and what they computed is right; how fast they were is not asked here."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def _run(script: str, *arguments: str, cache: Path | None = None) -> dict[str, Any]:
    """The JSON of a quick run."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick", "--json", *arguments],
        env=os.environ | ({} if cache is None else {"GATESPACE_CACHE": str(cache)}),
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.long
def test_loss_benchmark_measures_and_is_right() -> None:
    rows = _run("loss.py", "--check")["results"]  # --check: exit 1 where a number is inaccurate
    assert {(row["contender"], row["dtype"]) for row in rows} == {
        (contender, dtype) for contender in ("naive", "gatespace") for dtype in ("fp32", "bf16")
    }


@pytest.mark.slow
@pytest.mark.long
def test_step_benchmark_measures_every_contender_on_the_same_work(tmp_path: Path) -> None:
    found = _run("step.py", "--batch", "3", "--precision", "bf16", "--per-prompt", "1,3", cache=tmp_path)
    several = [row for row in found["results"] if row["per_prompt"] == 3]
    rows = {row["contender"]: row for row in found["results"] if row["per_prompt"] == 1}
    assert list(rows) == ["trl", "trl-autocast", "plain", "gatespace-cold", "gatespace-warm"]
    assert [row["contender"] for row in several] == list(rows)
    for row in several[2:]:
        assert 1 <= row["mean_length"] <= 8
    assert 0 < several[3]["misses"] <= 9 * several[3]["mean_length"]  # equal responses are asked once
    assert several[4]["misses"] == 0
    ours = {target["ours"] for target in found["targets"] if target["other"] == target["ours"]}
    assert ours == {"gatespace-cold", "gatespace-warm"}
    for name, row in rows.items():
        if name.startswith("trl") and "unavailable" in row:
            assert "cannot be imported" in row["unavailable"]  # a peer need not be there; it must not fail otherwise
            continue
        phases = sum(row[f"wall_{phase}"] for phase in ("rollout", "score", "update", "optimizer"))
        assert 0 < phases <= row["wall"] * 1.001
        assert phases > 0.8 * row["wall"]
        assert 1 <= row["mean_length"] <= 8
        assert row["peak_mib"] > 0
    cold, warm = rows["gatespace-cold"], rows["gatespace-warm"]
    assert cold["hits"] == 0
    assert cold["misses"] == 3 * cold["mean_length"]
    assert (warm["hits"], warm["misses"]) == (cold["misses"], 0)


@pytest.mark.slow
@pytest.mark.long
def test_ladder_computes_the_same_on_every_rung(tmp_path: Path) -> None:
    rungs = ("whole", "prefix-rollout", "fused", "warm", "engine-warm")
    # --check: exit 1 where fp32 rungs differ, a rung does not run, or a warm cache is not warm
    found = _run("ladder.py", "--check", "--batch", "3", "--rungs", ",".join(rungs), "--profile", cache=tmp_path)
    rows = {row["rung"]: row for row in found["results"]}
    assert tuple(rows) == rungs
    assert rows["whole"]["gradient_norm"] > 0
    assert rows["prefix-rollout"]["same_responses"] == 6  # two steps of three rows: the sampler is fed by named streams
    assert 0 < found["largest_difference"]["fp32"]["gradient_error"] < 1e-4
    assert found["largest_difference"]["bf16"]["gradient_error"] < 0.2
    for row in rows.values():
        assert sum(row["limit_wall_parts"].values()) == pytest.approx(row["limit_wall"])
        assert row["share_wall"] > 0  # how large it is, is a matter of the machine and the moment
    assert "teacher" in rows["fused"]["limit_wall_parts"]
    assert "teacher" not in rows["warm"]["limit_wall_parts"]
    (profile,) = found["profiles"].values()
    assert sum(profile.values()) == pytest.approx(1)
    assert {"matrix products", "copies and fills", "optimizer"} < profile.keys()


def test_a_profile_s_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    times = {"mm": 4.0, "addmm": 2.0, "bmm": 1.0, "_softmax": 0.5, "copy_": 1.5, "mul": 0.5, "_fused_adamw_": 0.5}
    assert importlib.import_module("ladder").shares(times) == {
        "matrix products": 0.6,
        "copies and fills": 0.15,
        "attention products": 0.1,
        "softmax": 0.05,
        "elementwise work and reductions": 0.05,
        "optimizer": 0.05,
    }


@pytest.mark.slow
@pytest.mark.long
def test_sweep_shares_the_teacher_and_changes_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    # Exit code 0: weights, records and predictions of both sides are the same, and the independent teacher read
    # exactly what the prompts and responses are. One worker: how much is shared does not depend on the moment.
    found = _run("sweep.py", "--threads", "1", "--output", str(kept), cache=tmp_path / "cache")
    assert found["differences"] == []
    assert found["points"] == ["G5", "H1", "entropy-only(-4)", "gap-only(+2)", "static:0.5", "twin(G5)"]
    shared, independent = found["results"]
    assert (shared["side"], independent["side"]) == ("shared", "independent")
    for name in ("runs", "steps", "response_tokens", "scores_asked"):
        assert shared[name] == independent[name]
    assert (shared["runs"], shared["steps"]) == (6, 12)
    # Nothing but the cache differs, and it does: whole runs on disk, compared here once more by themselves.
    runs = sorted(path.name for path in (kept / "shared" / "runs").iterdir())
    assert len(runs) == 6
    for run in runs:
        ours, theirs = (json.loads((kept / side / "runs" / run / "summary.json").read_text()) for side in _SIDES)
        assert ours["fingerprint"] == theirs["fingerprint"]
    assert list((kept / "shared" / "scores").iterdir())
    assert not (kept / "independent" / "scores").exists()
    # The first step is the same for all points, so that five of six runs find its scores.
    steps = [_timings(kept / "independent" / "runs" / run) for run in runs]
    (first,) = {step[0]["teacher_tokens"] for step in steps}
    assert sum(line["teacher_tokens"] for step in steps for line in step) == independent["teacher_tokens"]
    assert 0 < shared["teacher_tokens"] <= independent["teacher_tokens"] - 5 * first
    assert 0 < shared["scores_cached"] < shared["scores_asked"]
    assert independent["scores_cached"] == 0
    for row in found["results"]:
        assert row["step_wall_score"] + row["step_wall_rest"] == pytest.approx(sum(row["step_wall_phases"].values()))
        assert row["wall"] == pytest.approx(sum(row["wall_parts"]))
        assert len(row["wall_parts"]) == 2

    student, large = found["student"], found["large_pair"]
    assert student["rows"] == 12 * 6
    fed = student["response_tokens"] - student["rows"]
    assert student["prompt_tokens"] + fed == independent["teacher_tokens"]
    prefix = student["prefix_tokens"] // 6
    assert student["backward_tokens"] == 12 * prefix + student["prompt_tokens"] + fed
    assert student["forward_tokens"] == student["backward_tokens"] + fed
    learned = 4e9 * (2 * student["forward_tokens"] + 4 * student["backward_tokens"])
    costs = [2 * 32e9 * (row["teacher_tokens"] + 6 * prefix) + learned for row in found["results"]]
    assert large["ratio"] == pytest.approx(costs[0] / costs[1])
    assert found["ratios"]["teacher_tokens"] < large["ratio"] < large["ratio_with_evaluation"] < 1
    measured, whole = found["plan"]["measured"], found["plan"]["whole"]
    # G5: entropy-only, static, twin. H1: both restrictions, static; its point without d is not in the grid.
    assert (measured["comparisons"], measured["runs_alone"], measured["runs"]) == (6, 12, 6)
    assert (whole["runs"], whole["runs_alone"]) == (152, 2 * whole["comparisons"])

    # What must be the same is looked at: one answer and one count are changed behind its back.
    from gatespace.study.results import read_results

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sweep = importlib.import_module("sweep")
    answers, timings = (kept / "independent" / "runs" / runs[0] / name for name in ("predictions-val.jsonl", _TIMINGS))
    answers.write_text(answers.read_text().replace('"index": 3', '"index": 4'))
    timings.write_text(timings.read_text().replace(f'"teacher_tokens": {first},', f'"teacher_tokens": {first + 1},'))
    results = {side: read_results(kept / side) for side in _SIDES}
    assert sweep.differences(results) == [f"{runs[0]}: predictions-val.jsonl differs"]
    (wrong,) = sweep.miscounts(results["independent"], student)
    assert runs[0] in wrong


_SIDES, _TIMINGS = ("shared", "independent"), "timings.jsonl"


def _timings(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / _TIMINGS).read_text().splitlines()]


@pytest.mark.slow
def test_cache_benchmark_measures_every_contender_on_the_same_entries() -> None:
    found = _run("cache.py", "--beside", "gatespace.teacher.cache:ScoreCache")  # an error where a payload is not right
    names = {row["contender"] for row in found["results"]}
    assert {"gatespace", "beside"} <= names <= {"gatespace", "beside", "lmdb"}
    assert len(found["results"]) == 3 * len(names)
    assert all(row[f"{what}_us"] > 0 for row in found["results"] for what in ("put", "get", "miss"))
    assert set(found["warm"]["score_ms"]) == names
    assert 0.1 < found["ratios"]["beside"] < 10


@pytest.mark.slow
def test_score_benchmark_counts_what_goes_through_the_teacher(tmp_path: Path) -> None:
    found = _run("score.py", "--threads", "1", "--per-prompt", "1,3", cache=tmp_path)["results"]
    assert [(row["per_prompt"], row["hits"]) for row in found] == [(1, 0), (1, 0.9), (3, 0), (3, 0.9)]
    for row in found:
        assert row["rows"]
        assert row["needed_tokens"] <= row["pass_tokens"]
        assert row["needed_tokens"] <= row["whole_tokens"]
    assert found[0]["needed_tokens"] == found[0]["whole_tokens"]
    assert found[2]["needed_tokens"] < 0.7 * found[2]["whole_tokens"]


@pytest.mark.slow
@pytest.mark.long
def test_power_benchmark_compares_kinds_of_rollout(tmp_path: Path) -> None:
    found = _run("power.py", "--kinds", "1,4", "--seeds", "3", cache=tmp_path)
    one, four = found["results"]
    for row in (one, four):
        assert row["runs"] == 6 * 3
        values = [[row["accuracies"][arm][seed] for seed in ("1", "2", "3")] for arm in row["arms"]]
        pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
        gaps = [[x - y for x, y in zip(a, b, strict=True)] for a, b in pairs]
        assert row["sd"] ** 2 == pytest.approx(sum(statistics.variance(gap) for gap in gaps) / 15)
        assert row["cpu_hours_needed"] == pytest.approx(2 * row["seeds_needed"] * row["cpu_seconds_per_run"] / 3600)
        still = [[row["accuracies"][arm][seed] for seed in ("1", "2", "3")] for arm in ("G2", "G5", "static:0.5")]
        gaps = [[x - y for x, y in zip(still[i], still[j], strict=True)] for i, j in ((0, 1), (0, 2), (1, 2))]
        assert row["without_d"]["sd"] ** 2 == pytest.approx(statistics.fmean(map(statistics.variance, gaps)))
    (ratio,) = found["ratios"]
    assert ratio["without_d"]["cpu_hours"] == pytest.approx(
        four["without_d"]["cpu_hours_needed"] / one["without_d"]["cpu_hours_needed"]
    )
    assert ratio["cpu_hours"] == pytest.approx(four["cpu_hours_needed"] / one["cpu_hours_needed"])
    assert ratio["sd_range"][0] <= ratio["sd_range"][1]


@pytest.mark.slow
@pytest.mark.long
def test_service_benchmark_measures_every_side_on_the_same_work(tmp_path: Path) -> None:
    # Exit code 0: what came over ZMQ has the bits of what was computed in the process.
    found = _run("service.py", "--threads", "1", cache=tmp_path)
    names = ["local-hidden", "zmq-hidden", "local-top_k", "zmq-top_k"]
    assert [row["contender"] for row in found["results"]] == names
    assert found["same_bits"] == {"hidden": True, "top_k": True}
    assert [turn["contender"] for turn in found["turns"]] == [*names, *names[1:], names[0]]
    assert 0 < found["tokens"] < found["read"]
    for row in found["results"]:
        assert row["tokens_per_second"] == pytest.approx(found["tokens"] / row["wall"])
    walls = {name: [turn["wall"] for turn in found["turns"] if turn["contender"] == name] for name in names}
    for payload in ("hidden", "top_k"):
        pairs = zip(walls[f"local-{payload}"], walls[f"zmq-{payload}"], strict=True)
        ratio = sum(local / remote for local, remote in pairs) / 2
        assert found["ratios"][f"zmq-{payload} / local-{payload}"] == pytest.approx(ratio)


@pytest.mark.slow
@pytest.mark.long
def test_killed_runs_end_as_if_nobody_had_killed_them(tmp_path: Path) -> None:
    found = _run("kills.py", cache=tmp_path)["results"]
    ours = found["gatespace"]
    assert ours["repeats"]
    assert ours["kills"] == ours["resumed"] == ours["same_loss"] == ours["same_bytes"] == 2
    assert "cannot be imported" in found["trl"].get("unavailable", "") or found["trl"]["kills"] == 2


@pytest.mark.slow
@pytest.mark.long
def test_tune_benchmark_ends_in_verdicts(tmp_path: Path) -> None:
    found = _run("tune.py", cache=tmp_path)
    _, search, grid, null, shuffled = found["results"]
    assert [one["case"] for one in found["results"]] == ["edge", "planted", "grid", "null", "null-all"]
    candidates = 3 + 2 + 1  # λ = 0.02, 0.5 and 0.98, proposals, G5
    for one in found["results"]:
        assert one["state"] in ("better", "no better", "undecided")
        assert one["sentence"].startswith("Use ")
        assert 0 < one["cost"]["search_to_grid"] <= 1
    assert grid["cost"]["search_steps"] == grid["cost"]["grid_steps"] >= 4 * candidates
    assert search["cost"]["search_steps"] < grid["cost"]["search_steps"]
    # A search in which no gate was left has no direction.
    assert set(null["direction"] or {}) <= {"noise"}
    assert set(shuffled["direction"] or {}) <= {"h_elsewhere", "u_elsewhere", "gap_elsewhere"}


def test_the_planted_pair_is_taught_what_the_benchmark_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tune = importlib.import_module("tune")
    # The same draws for every side: row i has the same text, up to the teacher's note.
    sides = {side: tune.rows(3, "train", 4000, side) for side in ("gold", "notes", "teacher")}
    shares: dict[tuple[int, str], list[bool]] = defaultdict(list)
    for gold, note, taught in zip(*sides.values(), strict=True):
        assert note["text"] == gold["text"]
        assert taught["text"] == f"{gold['text']} {note['label']}"
        kind = int(gold["text"].split()[1] in tune.KINDS[1])
        usual = tune.LABELS[int(gold["text"][-2:]) % 20 // tune.CUES]
        shares[kind, "varies"].append(gold["label"] != usual)
        shares[kind, "note is right"].append(note["label"] == gold["label"])
        shares[kind, "teacher follows the note"].append(taught["label"] == note["label"])
        assert taught["label"] in (note["label"], gold["label"])
    found = {name: sum(own) / len(own) for name, own in shares.items()}
    for name, on_first, on_second in (
        ("varies", tune.VARIES, 0.0),
        ("note is right", 1.0, 0.0),
        ("teacher follows the note", 1.0, tune.MISLED),
    ):
        assert [found[0, name], found[1, name]] == pytest.approx([on_first, on_second], abs=0.03)
    second = [row for row in tune.rows(3, "train", 4000, "student") if row["text"].split()[1] in tune.KINDS[1]]
    wrong = [row["label"] != tune.LABELS[int(row["text"][-2:]) % 20 // tune.CUES] for row in second]
    assert sum(wrong) / len(wrong) == pytest.approx(tune.GUESSED * 3 / 4, abs=0.03)


def test_the_edge_and_weak_cases_differ_from_the_planted_one_as_the_benchmark_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tune = importlib.import_module("tune")
    edge = {side: tune.rows(3, "train", 400, side, "edge") for side in ("gold", "notes")}
    assert all(row["text"].split()[1] in tune.KINDS[1] for row in edge["gold"])
    assert not any(gold["label"] == note["label"] for gold, note in zip(*edge.values(), strict=True))
    for share in tune.WEAK:
        gold, taught = (tune.rows(3, "train", 4000, side, f"weak-{share}") for side in ("gold", "teacher"))
        second = [row["text"].split()[1] in tune.KINDS[1] for row in gold]
        misled = [own["label"] != told["label"] for own, told in zip(gold, taught, strict=True)]
        expected = share * tune.MISLED  # of the second kind; the teacher is right on the first
        assert sum(misled) / sum(second) == pytest.approx(expected, abs=0.03)
        cues = {row["text"][-2:] for row, wrong in zip(gold, misled, strict=True) if wrong}
        assert len(cues) == round(share * 20)


def test_in_the_planted_case_a_gate_beats_every_constant_at_convergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The students of least loss under the planted teachers, in float64, without any training."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tune = importlib.import_module("tune")
    few, labels = 0.002, 4  # assumed of the teachers: the probability of a label that neither cue nor note names

    def teacher(**mass: float) -> torch.Tensor:
        rest = torch.full((labels,), few, dtype=torch.float64)
        for place, share in mass.items():
            rest[int(place[1:])] = share
        return rest / rest.sum()

    gold = {0: torch.tensor([1 - tune.VARIES, tune.VARIES, 0, 0]).double(), 1: torch.tensor([1, 0, 0, 0]).double()}
    shown = {
        0: [(1 - tune.VARIES, teacher(_0=1.0)), (tune.VARIES, teacher(_1=1.0))],
        1: [(1 / 3, teacher(_0=1 - tune.MISLED, **{f"_{note}": tune.MISLED})) for note in (1, 2, 3)],
    }

    def log_loss(kind: int, lam: float) -> float:
        logits = torch.zeros(labels, dtype=torch.float64, requires_grad=True)
        search = torch.optim.LBFGS([logits], max_iter=500, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            search.zero_grad()
            q = logits.log_softmax(-1)
            total = torch.zeros((), dtype=torch.float64)
            for share, p in shown[kind]:
                reverse, forward = (q.exp() * (q - p.log())).sum(), (p * (p.log() - q)).sum()
                total = total + share * (lam * reverse + (1 - lam) * forward)
            total.backward()
            return total

        search.step(loss)
        return -float(gold[kind] @ logits.detach().log_softmax(-1))

    constants = [(log_loss(0, lam) + log_loss(1, lam)) / 2 for lam in torch.linspace(0, 1, 21).tolist()]
    gated = (log_loss(0, 0.1) + log_loss(1, 0.9)) / 2
    # As quoted in docs/tune.md: the gate, the best constant, forward KL, reverse KL.
    assert [gated, min(constants), constants[0], constants[-1]] == pytest.approx([0.329, 0.413, 0.541, 0.448], abs=6e-4)
    assert (log_loss(0, 0.9) + log_loss(1, 0.1)) / 2 > min(constants)  # the opposite direction
