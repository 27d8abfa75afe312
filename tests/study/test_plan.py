"""The plan: which runs and comparisons a study file means, checked against the paper's own counts."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

from gatespace.cli.estimate import estimate
from gatespace.cli.study_file import load_study
from gatespace.config import StudyConfig, parse_config
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate
from gatespace.runs import StudyFolder
from gatespace.study.check import check_study
from gatespace.study.outlook import outline
from gatespace.study.plan import (
    NINE,
    baseline_name,
    check,
    ending,
    make_plan,
    model_name,
    objective,
    slug,
    teach_config,
    train_config,
)

from .conftest import settings, study


@pytest.fixture(scope="module")
def paper() -> StudyConfig:
    return load_study("paper")


@pytest.fixture(scope="module")
def facts():
    """The paper's figures, which an add-on has."""
    return pytest.importorskip("gatespace.addons.paper.facts").facts


def test_the_papers_cells_are_those_of_the_paper(paper, facts):
    plan = check(paper)
    published = facts()["comparisons_36"]
    for task in ("emotion", "hate"):
        cells = [c for c in plan.comparisons if (c.task, c.axis, c.seed) == (task, "restriction", 42)]
        found = {(c.left, c.restriction): c.right if c.status == "comparable" else None for c in cells}
        wanted = {}
        for row in published[task]:
            wanted[row["config"], "gap-only"] = row["gap_only"]
            wanted[row["config"], "entropy-only"] = row["entropy_only"]
        assert found == wanted
        comparable = [c for c in cells if c.status == "comparable"]
        assert len(comparable) == facts()["counts"]["comparable"]["split"][task]
    counts = Counter((c.restriction, c.status) for c in plan.comparisons if c.axis == "restriction" and c.seed == 42)
    assert counts["gap-only", "n/a"] == facts()["counts"]["todi_na"]["value"] == 10
    assert counts["entropy-only", "n/a"] == facts()["counts"]["eopd_na"]["value"] == 6
    assert all(c.reason for c in plan.comparisons if c.status == "n/a")


def test_the_papers_points_have_its_coefficients(paper, facts):
    plan = make_plan(paper)
    for task in ("emotion", "hate"):
        points = {r.point: r.gate for r in plan.runs.values() if r.task == task and r.kind == "point"}
        assert points == {name: tuple(v["abcd"]) for name, v in facts()["configs"][task].items()}
        assert len(points) == 13
        restrictions = {r.point: r.gate for r in plan.runs.values() if r.task == task and r.kind == "restriction"}
        published = facts()["restrictions"]
        wanted = published["gap_only"]["value"] | published["entropy_only"]["value"]
        assert restrictions == {name: tuple(abcd) for name, abcd in wanted.items()}


def test_nine_comparisons_are_the_papers(facts):
    for (task, left, right), row in zip(NINE, facts()["nine"], strict=True):
        theirs = f"twin({row['a']})" if row["b"].startswith("static") else row["b"]
        assert (task, left, right) == (row["task"], row["a"], theirs)


def test_replication_is_on_fresh_seeds_and_keeps_the_selecting_one_apart(paper):
    plan = make_plan(paper)
    fresh = [c for c in plan.comparisons if c.role == "replication"]
    assert {c.seed for c in fresh} == {2, 3}
    assert len(fresh) == 9 * 2
    # What the sweep has is not listed again for the sweep's seed, and what it has not is.
    emotion = [c for c in plan.comparisons if (c.task, c.left, c.right) == ("emotion", "HG5,d+4", "entropy-only(-4)")]
    assert sorted((c.seed, c.role) for c in emotion) == [(2, "replication"), (3, "replication"), (42, "sweep")]
    offensive = {r.point for r in plan.runs.values() if r.task == "offensive"}
    assert offensive == {"H1", "G2", "entropy-only(-4)", "gap-only(+2)", "twin(H1)"}


def test_the_shipped_replication_runs_the_nine_at_fresh_seeds_alone():
    config = load_study("replication")
    plan = check(config)
    seeds = (11, 12, 13, 14, 15, 16)
    cells = {(c.task, c.left, c.right): [] for c in plan.comparisons}
    for c in plan.comparisons:
        assert (c.role, c.status) == ("replication", "comparable")
        cells[c.task, c.left, c.right].append(c.seed)
    assert cells == {cell: [*seeds] for cell in cells}
    assert {*cells} == {*NINE}
    arms = {task: {r.point for r in plan.runs.values() if r.task == task} for task in config.tasks}
    restrictions = {"entropy-only(-4)", "gap-only(+2)", "static:0.5"}
    assert arms == {
        "emotion": {"HG5,d+4", "twin(HG5,d+4)", "entropy-only(-4)", "static:0.5"},
        "offensive": {"H1", "G2", "twin(H1)", *restrictions},
        "hate": {"H1", "HG4,d+2", "G4", "twin(G4)", *restrictions},
    }
    assert len(plan.runs) == 6 * (4 + 6 + 7)
    assert config.choosing_seed is None
    pilot = check(load_study("replication", ["name=pilot", "seeds=[7]"]))
    assert {run.seed for run in pilot.runs.values()} == {7}
    assert len(pilot.runs) == 17


def test_runs_of_a_task_are_done_seed_by_seed(tmp_path):
    _, work = outline(StudyFolder(tmp_path), load_study("replication"))
    order = [(one.run.task, one.run.seed) for one in work if one.run is not None]
    blocks = [key for key, _ in groupby(order)]
    assert blocks == [(task, seed) for task in ("emotion", "offensive", "hate") for seed in range(11, 17)]


@pytest.mark.parametrize("axes", [{}, {"isolation": {"reuse": "first-seed"}}])
def test_what_a_run_needs_is_done_before_it_whatever_its_seed(tmp_path, axes):
    config = study(points="paper", base="best", seeds=[42, 2, 3], axes={"published": [], **axes})
    seen: set[str] = set()
    for one in outline(StudyFolder(tmp_path), config)[1]:
        assert seen.issuperset(one.needs)
        seen.add(one.name)


def test_the_papers_twins_take_the_first_seeds_mean(paper):
    plan = make_plan(paper)
    twin = plan.find("hate", "twin(G4)", 3)
    assert twin is not None
    source = plan.find("hate", "G4", 42)
    assert source is not None
    assert twin.needs == (source.id,)
    own = make_plan(study())
    assert own.find("messages", "twin(G5)", 2).needs == (own.find("messages", "G5", 2).id,)


def test_a_run_that_several_cells_need_is_planned_once():
    plan = make_plan(study(points=["G2", "G5", "H1", "entropy-only(-4)"], seeds=[1]))
    labels = [run.point for run in plan.runs.values()]
    assert len(labels) == len(set(labels))
    gates = Counter(run.gate for run in plan.runs.values() if run.kind in ("point", "restriction", "static"))
    assert set(gates.values()) == {1}
    cells = [c for c in plan.comparisons if c.right == "entropy-only(-4)"]
    assert {"G2", "G5", "H1"} <= {c.left for c in cells}
    assert plan.find("messages", "entropy-only(-4)", 1).kind == "point"


def test_a_base_that_is_open_leaves_the_points_on_it_open():
    config = study(points="paper", seeds=[42])
    plan = make_plan(config)
    assert plan.open_bases == ("messages",)
    open_runs = [run for run in plan.runs.values() if run.point.startswith("HG*")]
    assert len(open_runs) == 4
    assert all(run.gate is None and len(run.needs) == 4 for run in open_runs)
    later = make_plan(config, {"messages": "G4"})
    assert later.open_bases == ()
    assert later.find("messages", "HG4,d+2", 42).gate == (0, 4, -1, 2)
    cell = next(c for c in later.comparisons if (c.left, c.restriction) == ("HG4,d+2", "entropy-only"))
    assert cell.status == "n/a"
    # What does not hang on the base keeps its id.
    assert {run.id for run in plan.runs.values() if "HG" not in run.point} == {
        run.id for run in later.runs.values() if "HG" not in run.point
    }
    assert len([r for r in later.runs.values() if r.kind == "point"]) == 13


def test_g1_as_a_base_has_points_of_its_own():
    plan = make_plan(study(points="paper", base="G1"))
    assert plan.find("messages", "HG1,d-4", 42).gate == (2, 2, 0, -4)


@pytest.mark.parametrize(
    "change",
    [
        {"train": {**settings()["train"], "steps": 4}},
        {"train": {**settings()["train"], "optimizer": {"lr": 2e-3}}},
        {"teach": {**settings()["teach"], "teacher": {"model": "tiny", "steps": 41}}},
        {"tasks": {"messages": {"task": {"name": "synthetic"}}}},
        {"train": {**settings()["train"], "evaluation": {"every": 1, "patience": 2}}},
        {"train": {**settings()["train"], "evaluation": {"every": 1}, "checkpoint": {"select": "best"}}},
    ],
    ids=["steps", "lr", "teacher", "task", "patience", "select"],
)
def test_what_can_change_numbers_changes_every_id(change):
    before, after = make_plan(study()), make_plan(study(**change))
    assert not set(before.runs) & set(after.runs)


@pytest.mark.parametrize(
    "change",
    [{"workers": 7}, {"keep_models": True}, {"output": "elsewhere"}, {"about": "x"}, {"seeds": [42, 2, 9]}],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_change_numbers_keeps_every_id(change):
    before, after = make_plan(study()), make_plan(study(**change))
    assert set(before.runs) <= set(after.runs)


def test_runs_that_may_end_early_do_so_by_one_rule():
    """All points of a task have it; the models before training are the same, and alarms change no run."""
    rule = {"evaluation": {"every": 2, "patience": 3}, "checkpoint": {"select": "best"}}
    plain, early = study(), study(train={**settings()["train"], **rule})
    assert ending(plain, "messages") == ""
    text = ending(early, "messages")
    assert "all points by the same rule" in text
    assert "3 evaluations on val in a row, one every 2 steps" in text
    assert "best evaluation on val" in text
    configs = [train_config(early, "messages", 2, goal) for goal in ({"gate": "G4"}, {"method": "todi"})]
    assert {(c.evaluation.patience, c.evaluation.every, c.checkpoint.select) for c in configs} == {(3, 2, "best")}
    looking = study(train={**settings()["train"], "evaluation": {"every": 2}})
    assert baseline_name(looking, "messages", "student") == baseline_name(early, "messages", "student")
    alarmed = study(train={**settings()["train"], "alarms": {"stop_on": ["repeated"]}})
    assert set(make_plan(alarmed).runs) == set(make_plan(plain).runs)


def test_isolation_asks_for_both_twins_of_every_point_and_seed():
    plan = make_plan(study(axes={}))
    for point in ("G4", "G5"):
        for seed in (42, 2):
            right = {c.right for c in plan.comparisons if (c.axis, c.left, c.seed) == ("isolation", point, seed)}
            assert right == {f"twin({point})", f"twin-rkl({point})"}
    one = make_plan(study(axes={"isolation": {"match": ["lam"]}}))
    assert one.runs.keys() < plan.runs.keys()  # no other run has another id


def test_shipped_studies_have_both_twins_but_the_published_one():
    twins = {
        name: {run.point.partition("(")[0] for run in make_plan(load_study(name)).runs.values() if run.kind == "twin"}
        for name in ("demo", "smollm2", "paper", "replication")
    }
    assert twins.pop("replication") == {"twin"}
    assert all(found == {"twin", "twin-rkl"} for found in twins.values())


def test_decimals_of_a_twin_count():
    one, two = (make_plan(study(axes={"isolation": {"decimals": d}})) for d in (None, 3))
    assert one.find("messages", "twin(G5)", 2).id != two.find("messages", "twin(G5)", 2).id
    assert one.find("messages", "G5", 2).id == two.find("messages", "G5", 2).id


def test_replicating_all_repeats_every_cell_that_can_be():
    plan = make_plan(study(seeds=[1], replication={"comparisons": "all", "seeds": [8, 9]}))
    cells = Counter((c.seed, c.status) for c in plan.comparisons)
    assert cells[1, "comparable"] == cells[8, "comparable"] == cells[9, "comparable"] > 0
    for cell in plan.comparisons:
        if cell.status == "comparable":
            assert plan.find(cell.task, cell.left, cell.seed)
            assert plan.find(cell.task, cell.right, cell.seed)


def test_every_comparable_cell_of_the_demo_has_its_two_runs():
    plan = make_plan(load_study("demo"))
    assert plan.open_bases == ()  # nothing is chosen on the way
    for cell in plan.comparisons:
        if cell.status == "comparable":
            for label in (cell.left, cell.right):
                assert plan.find(cell.task, label, cell.seed), (cell, label)


def test_own_points_by_name():
    plan = make_plan(study(points={"mine": {"a": 4, "c": -1}, "other": [0, 0, 0, -2]}, seeds=[1]))
    assert plan.find("messages", "mine", 1).gate == (4, 0, -1, 0)
    cells = {(c.left, c.restriction): c for c in plan.comparisons if c.axis == "restriction"}
    assert cells["mine", "entropy-only"].right == "entropy-only(-4)"
    assert cells["other", "gap-only"].right == "other"  # it is its own restriction


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"points": ["G5", "4,0,-1,0"]}, "named twice"),
        ({"points": ["G9"]}, "G9"),
        ({"points": {"one": "G5", "two": "4,0,-1,0"}}, "one point"),
        ({"replication": {"comparisons": [{"task": "x", "left": "G5", "right": "G4"}], "seeds": [5]}}, "x"),
        ({"replication": {"comparisons": "all", "seeds": [42]}}, "not fresh"),
        ({"replication": {"comparisons": "all"}}, "replication.seeds"),
        ({"axes": {"controls": {"shuffled": ["G99"]}}}, "axes.controls.shuffled"),
        ({"train": {"evaluation": {"final": ["val"]}}}, "test"),
        ({"train": {"seed": 3}}, "train.seed"),
        ({"train": {"objective": {"gate": "G5"}}}, "train.objective.gate"),
        ({"train": {"optimizer": {"lrr": 1}}}, "lrr"),
        ({"teach": {"teacher": {"stepps": 1}}}, "stepps"),
        ({"tasks": {}}, "tasks"),
        ({"tasks": {"a/b": {"task": {"name": "synthetic"}}}}, "a/b"),
        ({"tasks": {"a": {"task": {"name": "synthetic"}, "sweep": False}}}, "nothing to run"),
        ({"selection_seed": 5}, "selection_seed"),
        ({"seeds": []}, "seeds"),
    ],
)
def test_a_mistake_in_a_study_file_is_named(change, text):
    with pytest.raises(UsageError) as caught:
        check(parse_config(StudyConfig, settings(**change)))
    assert text in str(caught.value)


def test_a_twin_of_a_static_point_is_refused():
    with pytest.raises(UsageError, match="no λ that depends on the token"):
        check(
            study(
                replication={
                    "comparisons": [{"task": "messages", "left": "G5", "right": "twin(static:0.5)"}],
                    "seeds": [7],
                }
            )
        )


def test_settings_of_a_task_come_before_those_of_the_study():
    tasks = {"messages": {**settings()["tasks"]["messages"], "train": {"steps": 9, "optimizer": {"clip": 0.5}}}}
    config = train_config(study(tasks=tasks), "messages", 5, {"gate": "G4"})
    assert (config.steps, config.optimizer.clip, config.optimizer.lr, config.seed) == (9, 0.5, 1e-3, 5)
    assert config.checkpoint.model is False


@pytest.mark.parametrize(
    ("label", "text"),
    [("entropy-only(-4)", "entropy-only-4"), ("gap-only(+2)", "gap-only+2"), ("twin(HG5,d+4)", "twin-HG5d+4")],
)
def test_slugs(label, text):
    assert slug(label) == text


def test_ids_are_file_names():
    for name in ("demo", "smollm2", "replication", "paper"):
        for run in make_plan(load_study(name)).runs.values():
            assert "/" not in run.id
            assert run.id.isascii()


def test_static_points_are_gates_of_the_family():
    plan = make_plan(study(axes={"static": [0.5, 0.25]}, seeds=[1]))
    run = plan.find("messages", "static:0.25", 1)
    assert run.gate == pytest.approx(Gate.static(0.25).abcd)


def test_a_published_method_with_rollouts_of_its_own() -> None:
    published = [
        {"method": "revisiting_opd", "rollout": {"top_p": 0.9}},
        "revisiting_opd",
        {"method": "distillm2", "rollout": {"from": {"student": 0.5, "teacher": 0.5}}, "label": "both"},
    ]
    config = study(axes={"published": published})
    plan = check(config)
    found = {point.label: point for point in plan.points.values() if point.kind == "published"}
    assert set(found) == {"revisiting_opd(top_p=0.9)", "revisiting_opd", "both"}
    task = next(iter(config.tasks))
    runs = {
        label: train_config(config, task, 1, objective(point), rollout=point.rollout) for label, point in found.items()
    }
    assert [runs[label].rollout.top_p for label in found] == [0.9, 1.0, 1.0]
    assert runs["both"].rollout.source.shares() == {"student": 0.5, "teacher": 0.5}
    assert {run.objective.method for run in runs.values()} == {"revisiting_opd", "distillm2"}
    ids = {run.point: run.id for run in plan.runs.values() if run.kind == "published"}
    assert len(set(ids.values())) == 3


def test_a_teacher_prompt_is_common_to_all_seeds_of_a_study():
    """Another prompt is other runs at every seed, and another evaluation of the teacher: none is taken over."""

    def planned(system):
        config = study(train={**settings()["train"], "teacher": {"prompt": {"system": system}}})
        prompts = {train_config(config, "messages", seed, {}).teacher.prompt.system for seed in config.seeds}
        assert prompts == {system}
        return {*make_plan(config).runs}, baseline_name(config, "messages", "teacher")

    (runs, teacher), (others, other) = planned("Be brief."), planned("Be long.")
    assert len(runs) == len(others)
    assert not runs & others
    assert teacher != other


def test_a_baseline_is_named_by_how_its_model_is_loaded():
    def named(**pair):
        config = study(train={**settings()["train"], "pair": {"lora": {}, **pair}}, teach={})
        return [baseline_name(config, "messages", role) for role in ("student", "teacher")]

    own = {"student": "a", "teacher": "b"}
    assert named(**own, teacher_quantization="nf4")[0] == named(**own)[0]
    assert named(**own, teacher_quantization="nf4")[1] != named(**own)[1]
    assert named(**own, student_quantization="nf4")[0] != named(**own)[0]
    assert named(student="a", teacher="self")[1] != named(student="c", teacher="self")[1]


def test_a_teacher_prompt_is_checked_before_any_run():
    def checked(**prompt):
        config = study(train={**settings()["train"], "pair": {"student": "tiny"}, "teacher": {"prompt": prompt}})
        return check_study(config, {"messages": {}})

    checked(prompt="{prompt} It is {label}.")
    with pytest.raises(UsageError, match="has no column 'hint'"):
        checked(prompt="{hint}")
    with pytest.raises(UsageError, match="do not fit into the context window"):
        checked(system="word " * 2000)


def test_a_teacher_of_free_text_is_evaluated_to_the_length_of_the_runs(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"q": "item {i}", "a": "{"word " * 50}{i}"}}\n' for i in range(40)))
    text = {"task": {"text": {"source": str(rows), "prompt": "{q}", "answer": "a"}}}

    def made(task, **teacher):
        train = {"pair": {"student": "tiny"}, "rollout": {"max_new_tokens": 96}, "evaluation": {"max_new_tokens": 96}}
        config = study(tasks={"t": task}, train=train, teach={"teacher": {"model": "tiny", **teacher}})
        return (
            config,
            teach_config(config, "t", "teacher").evaluation.max_new_tokens,
            model_name(config, "t", "teacher"),
        )

    config, cap, name = made(text)
    assert cap == 32  # of no evaluation: the model keeps its identity, and nothing is noted about it
    assert check_study(config, {"t": {}}) == []
    assert made(text, evaluation={"every": 5})[1] == 96
    assert made(text, evaluation={"every": 5, "max_new_tokens": 64})[1] == 64
    labels = settings()["tasks"]["messages"]
    assert made(labels, evaluation={"every": 5})[1:] == made(labels, evaluation={"every": 5, "max_new_tokens": 32})[1:]
    assert name == made(text, evaluation={"every": 0, "max_new_tokens": 32})[2]


def test_names_of_baselines_do_not_depend_on_what_rows_name() -> None:
    tasks = {
        "t-teacher-8bcd492c": {"table": {"source": "t.csv", "labels": ["a", "b"]}},
        "t-teacher-98b5015f": {"text": {"source": "t.csv", "messages": "m"}},
    }
    for known, task in tasks.items():
        given = {"name": "x", "tasks": {"t": {"task": task}}, "points": ["G5"]}
        one = parse_config(StudyConfig, {**given, "train": {"pair": {"student": "s", "teacher": "t"}}})
        assert baseline_name(one, "t", "teacher") == known


def test_models_with_other_tokens_can_be_compared_over_labels_only(short_smollm2):
    def checked(**objective):
        pair = {"student": "tiny", "teacher": str(short_smollm2)}
        config = study(train={**settings()["train"], "pair": pair, "objective": objective}, teach={})
        train = train_config(config, "messages", 1, {"gate": "G5", **objective})
        return check_study(config, {"messages": {}}), estimate(train, lambda text: None)["notes"]

    _, notes = checked(support="labels")
    assert any("different tokens" in note for note in notes)
    with pytest.raises(UsageError, match="do not have the same vocabulary"):
        checked(support="full")
