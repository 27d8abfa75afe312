"""The identity of a run changes with every setting that can change numbers, and with no other."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from gatespace.config import (
    LoraConfig,
    TeachConfig,
    TrainConfig,
    describe,
    dump_config,
    dump_yaml,
    identity,
    load_config,
    parse_config,
)
from gatespace.config.identity import CONTENT, LATER, LEFT_OUT, settings_of
from gatespace.config.text import read_yaml
from gatespace.errors import UsageError
from gatespace.plugins import provided

# Every setting is here with another value than its default, or is left out of the identity: a new one has to be put on
# one of the two lists.
TASK: dict[str, Any] = {
    "task.name": "tweeteval/hate",
    "task.root": "elsewhere",
    "task.table": {"source": "mails.csv", "labels": ["a", "b"]},
    "task.table.source": "other.csv",
    "task.table.labels": ["b", "a"],
    "task.table.definitions": {"a": "First.", "b": "Second."},
    "task.table.text_column": "body",
    "task.table.label_column": "kind",
    "task.table.metric": "near",
    "task.table.teacher_column": "who",
    "task.table.carve.val": 0.2,
    "task.table.carve.test": 0.1,
    "task.table.carve_seed": 1,
    "task.table.name": "mails",
    "task.table.question": "Which?",
    "task.text": {"source": "chats.jsonl", "messages": "messages"},
    "task.text.source": "other.jsonl",
    "task.text.prompt": "{question}",
    "task.text.messages": "chat",
    "task.text.answer": "reply",
    "task.text.metric": "bleu",
    "task.text.also": ["chrf"],
    "task.text.columns": ["topic"],
    "task.text.teacher_column": "who",
    "task.text.system": "Be brief.",
    "task.text.stop": ["END"],
    "task.text.thinking": True,
    "task.text.max_prompt_tokens": 100,
    "task.text.too_long": "truncate",
    "task.text.group": False,
    "task.text.carve.val": 0.2,
    "task.text.carve.test": 0.1,
    "task.text.carve_seed": 1,
    "task.text.name": "chats",
    "task.prefill": "",
    "task.brief": True,
    "task.split": None,
    "task.split.teacher": 0.5,
    "task.split.distill": 0.3,
    "task.split_seed": 1,
}
OPTIMIZER = {
    "optimizer.lr": 1e-5,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip": None,
    "optimizer.states": "8bit",
    "optimizer.warmup_steps": 5,
    "optimizer.schedule": "cosine",
    "optimizer.min_lr_ratio": 0.1,
}
ENGINE = {
    "engine.precision": "bf16",
    "engine.micro_tokens": 4096,
    "engine.activation_checkpointing": True,
    "engine.deterministic": True,
}
EVALUATION = {
    "evaluation.limit": 10,
    "evaluation.max_new_tokens": 8,
    "evaluation.batch_size": 32,
    "evaluation.final": ["test"],
    "evaluation.probabilities": True,
    "evaluation.patience": 3,
    "checkpoint.select": "best",
}
LORA = {"r": 8, "alpha": 16.0, "targets": ["q_proj"]}
RUN = {"steps": 7, "batch_size": 7, "seed": 7, "plugins": ["mine.py"]}
COUNTED: dict[type[TrainConfig] | type[TeachConfig], dict[str, Any]] = {
    TrainConfig: {
        **TASK,
        "pair.student": "other",
        "pair.teacher": "other",
        "pair.teachers": {"math": "other"},
        "pair.ema_decay": 0.9,
        "pair.student_revision": "v1",
        "pair.teacher_revision": "v1",
        "pair.teacher_quantization": "int8",
        "pair.student_quantization": "nf4",
        "pair.trust_remote_code": True,
        "pair.lora": {},
        **{f"pair.lora.{key}": value for key, value in LORA.items()},
        "objective.method": "jsd",
        "objective.gate": "G4",
        "objective.params": {"beta": 0.5},
        "objective.top_k": 5,
        "objective.temperature": 2.0,
        "objective.stop_gradient": True,
        "objective.shuffle": True,
        "objective.support": "bucket",
        "objective.support_k": 4,
        "objective.entropy": "full",
        "rollout.from.student": 0.25,
        "rollout.from.teacher": 0.25,
        "rollout.from.gold": 0.25,
        "rollout.temperature": 0.5,
        "rollout.top_p": 0.9,
        "rollout.max_new_tokens": 8,
        "rollout.per_prompt": 2,
        "rollout.stop": "eos",
        "rollout.staleness": 1,
        "rollout.engine": "vllm",
        "evaluation.engine": "vllm",
        "teacher.payload": "top_k",
        "teacher.k": 32,
        "teacher.prompt": {"system": "Be brief."},
        "teacher.prompt.prompt": "{question}",
        "teacher.prompt.system": "",
        "teacher.prompt.examples": [{"user": "x", "assistant": "y"}],
        **OPTIMIZER,
        **ENGINE,
        **EVALUATION,
        **RUN,
    },
    TeachConfig: {
        **TASK,
        "model": "other",
        "revision": "v1",
        "trust_remote_code": True,
        "lora": {},
        **{f"lora.{key}": value for key, value in LORA.items()},
        **OPTIMIZER,
        **ENGINE,
        **EVALUATION,
        **RUN,
    },
}
OTHER = {
    "output": "elsewhere",
    "engine.device": "cuda:1",
    "pair.teacher_device": "cuda:1",
    "engine.threads": 3,
    "engine.parallel": "fsdp",
    "teacher.cache": None,
    "teacher.cache_mb": 1,
    "teacher.options": {"timeout": 5},
    "rollout.options": {"server": "vllm://127.0.0.1:8000"},
    "evaluation.every": 3,
    "evaluation.split": "test",
    "checkpoint.every": 3,
    "checkpoint.keep": 3,
    "checkpoint.model": False,
    "alarms.window": 5,
    "alarms.truncated": None,
    "alarms.length": 2.0,
    "alarms.teacher": None,
    "alarms.entropy": None,
    "alarms.overlap": 0.1,
    "alarms.repeated": 0.9,
    "alarms.legal": None,
    "alarms.stop_on": ["repeated"],
    "trace.tokens_every": 3,
    "trace.rollouts": 3,
    "trace.trackers": ["wandb"],
}
# What has to be set as well, so that the value is allowed. It is in both of the compared configurations.
BESIDE: dict[str, dict[str, Any]] = {
    "pair.student_quantization": {"pair.lora": {}},
    "task.table.": {"task.table": {"source": "mails.csv", "labels": ["a", "b"]}},
    "task.text.": {"task.text": {"source": "chats.jsonl", "messages": "messages"}},
    "task.text.prompt": {"task.text": {"source": "chats.jsonl", "prompt": "{x}", "answer": "y"}},
    "task.text.too_long": {"task.text.max_prompt_tokens": 100},
    "teacher.prompt.": {"teacher.prompt": {"system": "Be brief."}},
    "pair.lora.": {"pair.lora": {}},
    "pair.teachers": {"pair.teacher": None, "pair.teachers": {"math": "one"}},
    "pair.ema_decay": {"pair.teacher": "self-ema"},
    "lora.": {"lora": {}},
    "objective.params": {"objective.method": "jsd"},
    "objective.support_k": {"objective.support": "bucket"},
    "teacher.payload": {"objective.support": "bucket"},
    "rollout.options": {"rollout.engine": "vllm"} if provided("samplers") else {},
    "evaluation.engine": {"rollout.engine": "vllm"},
    "rollout.from.student": {"rollout.from": {"student": 0.5, "teacher": 0.25, "gold": 0.25}},
    "rollout.from.teacher": {"rollout.from": {"student": 0.5, "teacher": 0.5, "gold": 0.0}},
    "rollout.from.gold": {"rollout.from": {"student": 0.5, "teacher": 0.0, "gold": 0.5}},
}
CASES = [(cls, path) for cls, settings in COUNTED.items() for path in settings]
IDLE = [(cls, path) for cls in COUNTED for path in LEFT_OUT if path in {line.path for line in describe(cls)}]


def with_value(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    return {**data, key: with_value(data.get(key) or {}, rest, value) if rest else value}


def pair_of(cls: type[Any], path: str, value: Any) -> tuple[Any, Any]:
    """Two configurations that differ in one setting."""
    if any(name in str(value) for name in ("vllm", "wandb")) and not (provided("samplers") and provided("trackers")):
        pytest.skip("the add-ons that have this are not there")
    data: dict[str, Any] = {"pair": {"teacher": "t"}} if cls is TrainConfig else {}
    data["task"] = {} if path.startswith(("task.table", "task.text")) else {"split": {"teacher": 0.6, "distill": 0.4}}
    for start, settings in BESIDE.items():
        if path.startswith(start):
            for other, beside in settings.items():
                data = with_value(data, other, beside)
    changed = with_value(data, path, value)
    if path.startswith("rollout.from."):  # a share can only change with another one
        other = "teacher" if path.endswith("student") else "student"
        given = changed["rollout"]["from"]
        changed = with_value(changed, f"rollout.from.{other}", 1 - sum(v for k, v in given.items() if k != other))
    return parse_config(cls, data), parse_config(cls, changed)


@pytest.mark.parametrize("cls", COUNTED)
def test_every_setting_is_on_one_of_two_lists(cls: type[Any]) -> None:
    known = {line.path for line in describe(cls)}
    counted, left_out = set(COUNTED[cls]), {path for path in LEFT_OUT if path in known}
    assert counted | left_out == known
    assert not counted & left_out


def test_nothing_is_left_out_that_does_not_exist() -> None:
    known = {line.path for cls in COUNTED for line in describe(cls)}
    assert set(LEFT_OUT) <= known
    assert set(OTHER) == set(LEFT_OUT)
    assert {path for paths in CONTENT.values() for path in paths} <= known
    data = ({}, {"table": {"source": "t.csv", "labels": ["a", "b"]}}, {"text": {"source": "t.csv", "messages": "m"}})
    configs = [parse_config(TrainConfig, {"pair": {"teacher": "t"}, "task": task}) for task in data]
    known_settings = {path: value for config in configs[::-1] for path, value in settings_of(config).items()}
    for path, value in LATER.items():
        assert known_settings[path] == value


@pytest.mark.parametrize("cls, path", CASES)
def test_identity_changes_with(cls: type[Any], path: str) -> None:
    before, after = pair_of(cls, path, COUNTED[cls][path])
    changed = {key for key in settings_of(before) | settings_of(after) if _at(before, key) != _at(after, key)}
    assert any(key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.") for key in changed)
    assert identity(before) != identity(after)


@pytest.mark.parametrize("cls, path", IDLE)
def test_identity_does_not_change_with(cls: type[Any], path: str) -> None:
    before, after = pair_of(cls, path, OTHER[path])
    assert before != after
    assert identity(before) == identity(after)


def _at(config: Any, path: str) -> object:
    return settings_of(config).get(path, "absent")


def test_identity_is_stable() -> None:
    # A known value: another one here means a new identity for every run of every study.
    settings = b'{"alpha":32.0,"r":16,"targets":"all-linear"}'
    text = b'{"content":{},"kind":"LoraConfig","settings":%b,"version":"gatespace.config.1"}' % settings
    assert identity(LoraConfig()) == sha256(text).hexdigest()
    config = load_config(TrainConfig, None, ["pair.teacher=t"])
    assert identity(config) == "741f1017a6673accc679a6372a13003883367175598448e64a3963b490e501ae"
    assert identity(TeachConfig()) == "4d250980311347705c87c955277ee86cd3c8a9ebcc7097c24fcfa34af65f68b7"
    assert identity(parse_config(TrainConfig, read_yaml(dump_yaml(config), where=""))) == identity(config)
    tables = {  # from before rows could name their teachers
        "f8e367c1e05c69dc7e18bb1b5ceb4d655f578946bc87f8ecf256543b272423ee": {
            "table": {"source": "t.csv", "labels": ["a", "b"]}
        },
        "37c034c1d06b62c40117d5753185fa89ef2bef5958b5dc2671bcdd278c130352": {
            "text": {"source": "t.csv", "messages": "m"}
        },
    }
    for known, task in tables.items():
        assert identity(parse_config(TrainConfig, {"pair": {"teacher": "t"}, "task": task})) == known
    reordered = dict(reversed(dump_config(config).items()))
    assert identity(parse_config(TrainConfig, reordered)) == identity(config)
    for spellings in (
        [{"a": 4, "d": 2}, {"d": 2.0, "a": 4.0}],
        [[4, 0, -1, 0], [4.0, -0.0, -1.0, 0.0]],
    ):
        given = [{"pair": {"teacher": "t"}, "objective": {"gate": gate}} for gate in spellings]
        assert len({identity(parse_config(TrainConfig, data)) for data in given}) == 1


@pytest.mark.parametrize("name, paths", [(name, paths) for name, paths in CONTENT.items() if name != "model"])
def test_content_stands_in_place_of_the_way_to_it(name: str, paths: tuple[str, ...]) -> None:
    for path in paths:
        before, after = pair_of(TrainConfig, path, COUNTED[TrainConfig][path])
        if path in ("task.table", "task.text"):  # its other settings are the same
            same = {"split": before.task.split, "prefill": before.task.prefill}
            after = after.model_copy(update={"task": after.task.model_copy(update=same)})
        assert identity(before) != identity(after)
        assert identity(before, content={name: "x"}) == identity(after, content={name: "x"})
        assert identity(before, content={name: "x"}) != identity(before, content={name: "y"})
        assert identity(before, content={name: "x"}) != identity(before)


def test_content_of_teach() -> None:
    left, right = TeachConfig(model="here"), TeachConfig(model="there", revision="v2")
    assert identity(left, content={"model": "x"}) == identity(right, content={"model": "x"})
    with pytest.raises(UsageError, match="did you mean 'model'"):
        identity(left, content={"modle": "x"})
