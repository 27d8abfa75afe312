"""From file and overrides to a configuration, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given

from gatespace.config import (
    ObjectiveConfig,
    PairConfig,
    RolloutConfig,
    SourceConfig,
    SplitConfig,
    TaskConfig,
    TeachConfig,
    TrainConfig,
    dump_config,
    dump_yaml,
    load_config,
    parse_config,
)
from gatespace.errors import UsageError
from tests.config.strategies import Data, trains

TEACHER = "pair.teacher=some/teacher"


def train(*overrides: str, path: Path | None = None) -> TrainConfig:
    return load_config(TrainConfig, path, [TEACHER, *overrides])


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_papers() -> None:
    config = train()
    assert (config.optimizer.lr, config.batch_size, config.steps, config.seed) == (1e-6, 72, 100, 42)
    assert (config.rollout.per_prompt, config.rollout.temperature, config.rollout.top_p) == (1, 1.0, 1.0)
    assert config.rollout.source.shares() == {"student": 1.0}
    assert (config.evaluation.max_new_tokens, config.evaluation.final) == (32, ("val", "test"))
    assert (config.objective.top_k, config.objective.stop_gradient, config.objective.support) == (8, False, "full")
    assert config.task.split is not None
    assert list(config.task.split.shares().items()) == [("teacher", 0.6), ("distill", 0.4)]
    teach = load_config(TeachConfig)
    assert (teach.optimizer.lr, teach.steps, teach.batch_size, teach.evaluation.every) == (1e-4, 120, 24, 20)


def test_a_section_of_teach_keeps_its_own_defaults_when_it_is_written_in_part(tmp_path: Path) -> None:
    path = written(tmp_path, "evaluation: {batch_size: 8}\noptimizer: {clip: null}\n")
    teach = load_config(TeachConfig, path, ["evaluation.limit=5"])
    assert (teach.evaluation.batch_size, teach.evaluation.limit, teach.evaluation.every) == (8, 5, 20)
    assert (teach.optimizer.clip, teach.optimizer.lr) == (None, 1e-4)


def test_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        # a comment
        task:
          table: {source: mails.csv, labels: [yes, no, 'off'], definitions: {yes: A., no: Unwanted., off: C.}}
        pair: {teacher: runs/teach}
        objective: {gate: [4, 0, -1, 0]}
        optimizer: {lr: 1e-6, betas: [0.9, 1E-1]}
        rollout: {from: {gold: 0.25, teacher: .75}}
        evaluation:
        steps: 0x10
        """,
    )
    config = load_config(TrainConfig, path)
    assert config.task.name is None
    assert config.task.table is not None
    assert config.task.table.labels == ("yes", "no", "off")
    assert config.task.table.definitions["no"] == "Unwanted."
    assert config.objective.gate == (4.0, 0.0, -1.0, 0.0)
    assert (config.optimizer.lr, config.optimizer.betas, config.steps) == (1e-6, (0.9, 0.1), 16)
    assert config.rollout.source == SourceConfig(teacher=0.75, gold=0.25)
    assert config.evaluation == TrainConfig(pair=PairConfig(teacher="t")).evaluation


@given(trains)
def test_dump_and_load_is_the_identity(data: Data) -> None:
    config = parse_config(TrainConfig, data)
    text = dump_yaml(config)
    assert yaml.safe_load(text)["pair"]["teacher"] == config.pair.teacher  # also for readers of YAML 1.1
    again = parse_config(TrainConfig, load_text(text))
    assert again == config
    assert dump_yaml(again) == text
    assert parse_config(TrainConfig, json.loads(json.dumps(dump_config(config)))) == config


def load_text(text: str) -> Data:
    from gatespace.config.text import read_yaml

    data: Data = read_yaml(text, where="text")
    return data


def test_dump_to_file_and_load(tmp_path: Path) -> None:
    config = train("objective.gate={a: 4, student_entropy: 2}", "task.split=null", "teacher.cache=null")
    assert load_config(TrainConfig, written(tmp_path, dump_yaml(config))) == config
    teach = load_config(TeachConfig, None, ["lora={}", "output=somewhere"])
    assert load_config(TeachConfig, written(tmp_path, dump_yaml(teach))) == teach
    assert "betas: [0.9, 0.999]" in dump_yaml(teach)


def test_empty_file_and_empty_headings(tmp_path: Path) -> None:
    assert load_config(TeachConfig, written(tmp_path, "# nothing\n")) == TeachConfig()
    assert load_config(TeachConfig, written(tmp_path, "optimizer:\nlora:\ntask:\n  split:\n")) == TeachConfig(
        task=TaskConfig(split=None)
    )


# ---------------------------------------------------------------------------------------------------- overrides


def test_overrides_change_one_value_each(tmp_path: Path) -> None:
    path = written(tmp_path, "optimizer: {lr: 1e-3, clip: 2}\nsteps: 7\n")
    config = train(
        "optimizer.lr=5e-5", "steps=8", "steps=9", "evaluation.final=[test]", "optimizer.clip=null", path=path
    )
    assert (config.optimizer.lr, config.steps, config.evaluation.final, config.optimizer.clip) == (
        5e-5,
        9,
        ("test",),
        None,
    )
    assert train("optimizer.lr=5e-5", path=path).optimizer.clip == 2.0


def test_overrides_start_from_the_defaults_where_the_file_says_nothing() -> None:
    config = train("task.split.teacher=0.5", "optimizer.betas.1=0.95", "pair.lora.r=4")
    assert config.task.split == SplitConfig(teacher=0.5, distill=0.4)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.pair.lora is not None
    assert (config.pair.lora.r, config.pair.lora.alpha) == (4, 32.0)
    mixed = train("rollout.from.student=0.5", "rollout.from.gold=0.5")
    assert mixed.rollout.source.shares() == {"student": 0.5, "gold": 0.5}
    assert train("rollout.from={teacher: 1}").rollout.source.shares() == {"teacher": 1.0}


@pytest.mark.parametrize(
    "text, gate",
    [
        ("G5", "G5"),
        ("HG4,d+2", "HG4,d+2"),
        ("static:0.388", "static:0.388"),
        ("4,0,-1,0", "4,0,-1,0"),
        ("[4, 0, -1, -0.0]", (4.0, 0.0, -1.0, 0.0)),
        ("{d: -2, a: 4}", {"a": 4.0, "d": -2.0}),
    ],
)
def test_gate_by_override(text: str, gate: object) -> None:
    assert train(f"objective.gate={text}").objective.gate == gate


def test_quoted_and_empty_values() -> None:
    assert train('task.prefill=""').task.prefill == ""
    assert train('task.prefill=\'{"label": "\'').task.prefill == '{"label": "'
    assert train("pair.student='123'", "pair.student_revision=a=b").pair.student_revision == "a=b"
    assert train("evaluation.limit=").evaluation.limit is None


@pytest.mark.parametrize(
    "override, limits",
    [
        ("evaluation.limit=7", {"val": 7, "test": 7}),
        ("evaluation.limit={val: 300}", {"val": 300, "test": None}),
        ("evaluation.limit.val=300", {"val": 300, "test": None}),
    ],
)
def test_rows_of_all_splits_or_of_one_are_limited(override: str, limits: dict[str, int | None]) -> None:
    evaluation = train(override).evaluation
    assert {split: evaluation.limit_of(split) for split in limits} == limits


@pytest.mark.parametrize("value", ["0", "true", "1.5", "{}", "{val: 0}", "{dev: 3}", "[3]", "{val: {test: 3}}"])
def test_a_limit_that_is_none(value: str) -> None:
    with pytest.raises(UsageError, match=r"evaluation\.limit: (must be a whole number from 1, or|has no split 'dev')"):
        train(f"evaluation.limit={value}")


def test_an_override_leaves_other_users_of_an_alias_alone(tmp_path: Path) -> None:
    path = written(
        tmp_path, "task: {table: {source: a, labels: &labels [x, y]}}\npair: {teacher: t, lora: {targets: *labels}}\n"
    )
    config = load_config(TrainConfig, path, ["pair.lora.targets.0=z"])
    assert config.task.table is not None
    assert config.pair.lora is not None
    assert (config.task.table.labels, config.pair.lora.targets) == (("x", "y"), ("z", "y"))


@pytest.mark.parametrize(
    "override, message",
    [
        ("steps", "--set steps: not a setting"),
        ("=3", "not a setting"),
        ("a..b=3", "not a setting"),
        ("steps.x=3", "nothing below a value\n  got: 100"),
        ("optimizer.betas.2=0.5", "a list of 2 has no place '2'"),
        ("optimizer.betas.x=0.5", "a list of 2 has no place 'x'"),
        ("evaluation.final=[val", "--set evaluation.final:1:"),
        ("optimizer={lr: 1, lr: 2}", "--set optimizer:1:9: the key 'lr' appears here and in line 1"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        train(override)
    assert message in str(caught.value)


# ---------------------------------------------------------------------------------------------------- Python


def test_sections_are_frozen_and_made_by_name() -> None:
    config = RolloutConfig(source=SourceConfig(gold=1.0))
    assert dump_config(config)["from"] == {"student": 0.0, "teacher": 0.0, "gold": 1.0}
    with pytest.raises(ValueError, match="frozen"):
        config.top_p = 0.5  # type: ignore[misc]
    assert ObjectiveConfig(method="todi").gate is None
    assert TaskConfig(table={"source": Path("a.csv"), "labels": ["x", "y"]}).name is None  # type: ignore[arg-type]


def test_order_of_shares_does_not_depend_on_the_file() -> None:
    # split_rows gives other rows for another order
    assert list(SplitConfig(distill=0.4, teacher=0.6).shares()) == ["teacher", "distill"]
    data = {"split": {"distill": 0.4, "teacher": 0.6}}
    parsed = parse_config(TaskConfig, data)
    assert parsed.split is not None
    assert list(parsed.split.shares()) == ["teacher", "distill"]
    assert SplitConfig(teacher=1.0).shares() == {"teacher": 1.0}


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert train("output=~/runs").output == Path("/home/somebody/runs")


def test_config_needs_no_torch() -> None:
    others = ("torch", "gatespace.gating", "gatespace.tasks")
    code = f"import sys, gatespace.config; sys.exit(any(name in sys.modules for name in {others}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
