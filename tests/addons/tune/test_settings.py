"""The section `tune`, budgets, and what is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gatespace.addons.tune.folder import TuneFolder
from gatespace.addons.tune.plan import Spec
from gatespace.addons.tune.settings import Rung, TuneConfig, parse_budget, study_of_train_file
from gatespace.config import StudyConfig, parse_config
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate
from gatespace.study.plan import make_plan


def study(**settings: Any) -> StudyConfig:
    whole: dict[str, Any] = {
        "name": "s",
        "tasks": {"messages": {"task": {"name": "synthetic", "brief": True}}},
        "train": {"pair": {"student": "tiny", "teacher": "tiny"}, "steps": 60},
        "axes": {"published": ["todi"]},
    }
    return parse_config(StudyConfig, whole | settings)


def spec(config: dict[str, Any] | None = None, **settings: Any) -> Spec:
    return Spec.of(study(**settings), parse_config(TuneConfig, config or {}), TuneFolder(Path("nowhere")))


def test_budgets() -> None:
    assert parse_budget("2h") == 7200
    assert parse_budget("1.5 min") == 90
    steps = parse_budget("300steps")
    assert (steps, type(steps)) == (300, int)
    for wrong in ("", "2", "h", "-2h", "0h", "2 weeks", "0.5steps"):
        with pytest.raises(UsageError, match="--budget"):
            parse_budget(wrong)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"fresh": [1, 2, 3, 4, 5, 6]}, "fresh"),
        ({"fresh": [101]}, "fresh"),
        ({"lam": [0.5, 0.3]}, "lam"),
        ({"lam": [0.0, 0.5]}, "lam"),
        ({"spread": [4.0, 0.5]}, "spread"),
        ({"lr": [2e-3, 1e-3]}, "lr"),
        ({"channels": []}, "channels"),
        ({"rungs": [{"steps": 10, "seeds": 2}, {"steps": 20, "seeds": 1}]}, "rungs"),
        ({"rungs": [{"steps": 10, "seeds": 9}]}, "rungs"),
        ({"sampler": "random"}, "sampler"),
        ({"proposal": 3}, "proposals"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse_config(TuneConfig, settings)


@pytest.mark.parametrize(
    "settings, more, named",
    [
        ({"task": "other"}, {}, "other"),
        ({"channels": ["h", "entropi"]}, {}, "entropi"),
        ({"points": ["G9"]}, {}, "G9"),
        ({}, {"axes": {"published": ["tody"]}}, "tody"),
        ({}, {"train": {"pair": {"teacher": "tiny"}, "evaluation": {"patience": 2, "every": 5}}}, "patience"),
    ],
)
def test_what_cannot_be_searched_is_an_error(settings: dict[str, Any], more: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        spec(settings, **more)


def test_several_tasks_need_a_choice() -> None:
    one = {"task": {"name": "synthetic", "brief": True}}
    with pytest.raises(UsageError, match=r"tune\.task"):
        spec(tasks={"a": one, "b": one})
    assert spec({"task": "b"}, tasks={"a": one, "b": one}).task == "b"


def test_the_study_s_own_points_and_axes_are_no_matter() -> None:
    named = {"points": {"mine": "4,0,-1,2"}, "axes": {"isolation": {"points": ["mine"]}, "published": ["akl"]}}
    own = spec(**named)
    make_plan(own.study)  # which would not know the point
    assert own.fixed()[-1].label == "akl"


def test_rungs_follow_from_the_steps_of_the_study() -> None:
    assert spec().rungs == (Rung(steps=10, seeds=1), Rung(steps=30, seeds=2), Rung(steps=60, seeds=4))
    assert TuneConfig().ladder(1) == (Rung(steps=1, seeds=4),)


def test_candidates_have_the_static_of_every_mean_the_grid_and_the_published() -> None:
    found = spec({"lam": [0.2, 0.8], "lr": [1e-3, 2e-3]}).fixed()
    constants = ["static:0.02", "static:0.2", "static:0.5", "static:0.8", "static:0.98"]
    labels = [*constants, "G1", "G2", "G3", "G4", "G5", "todi"]
    assert [one.label for one in found] == [f"{label} lr={lr}" for lr in ("0.001", "0.002") for label in labels]
    assert [one.id for one in found][:2] == ["c000", "c001"]


def test_the_largest_cost_is_that_of_every_rung_at_its_largest() -> None:
    own = spec({"proposals": 11, "keep": 0.25})  # constants of lam and both edges, G1 to G5, todi
    assert len(own.fixed()) == 7 + 5 + 1
    first, second, third = own.costs(22)
    assert (first.candidates, first.steps) == (22, 220)
    assert (second.candidates, second.steps) == (7, 7 * (60 - 10))
    assert (third.candidates, third.steps) == (3 + 5, 3 * (240 - 60) + 5 * 240)  # five constants from the start
    assert own.grid_steps(22) == 22 * 240
    assert own.verdict_cost().steps == 6 * 6 * 60


def test_no_run_of_the_search_reads_test() -> None:
    own = spec()
    run = own.run_config(own.fixed()[0], 1)
    assert run.evaluation.final == ("val",)
    assert run.evaluation.split == "val"
    assert run.evaluation.probabilities
    assert run.steps == 60


def test_a_file_for_train_becomes_a_study(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "task: {name: synthetic, brief: true}\npair: {student: tiny, teacher: tiny}\nsteps: 12\nseed: 3\n"
        "objective: {gate: H2, top_k: 5}\ntune: {proposals: 4}\n"
    )
    found = study_of_train_file(file, ["steps=24", "tune.batch=2"])
    assert found.name == "my"
    tuned = parse_config(TuneConfig, found.tune)
    assert (tuned.proposals, tuned.batch, tuned.points[-1]) == (4, 2, "H2")
    run = Spec.of(found, tuned, TuneFolder(tmp_path)).base
    assert (run.steps, run.objective.top_k, run.task.name) == (24, 5, "synthetic")
    with pytest.raises(UsageError, match="proposals"):
        study_of_train_file(file, ["tune.proposal=2"])


@pytest.mark.parametrize(
    "objective, gate",
    [
        ("{gate: {a: 4.5, c: -1, drift: 2}}", Gate(a=4.5, c=-1, extra={"drift": 2})),  # as `tune` prints its winner
        ("{gate: [1, 0, 0, 3]}", Gate(a=1, d=3)),
        ("{method: static, params: {lam: 0.35}}", Gate.static(0.35)),
    ],
)
def test_the_gate_of_a_file_for_train_is_a_candidate_in_every_spelling(
    objective: str, gate: Gate, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"task: {{name: synthetic}}\npair: {{student: tiny, teacher: tiny}}\nobjective: {objective}\n")
    found = study_of_train_file(file, [])
    own = Spec.of(found, parse_config(TuneConfig, found.tune), TuneFolder(tmp_path))
    assert gate in [Gate.parse(one.gate) for one in own.fixed() if one.gate is not None]


def test_a_text_task_is_searched_by_its_metric() -> None:
    text = {"source": "t.csv", "prompt": "{q}", "answer": "ref", "metric": "token_f1"}
    own = spec(tasks={"texts": {"task": {"text": text}}})
    assert own.is_text
    run = own.run_config(own.fixed()[0], 1)
    assert not run.evaluation.probabilities  # only labels have them
    assert run.evaluation.final == ("val",)
