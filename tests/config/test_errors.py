"""Every kind of wrong setting is a `UsageError` with its dotted path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gatespace.config import TrainConfig, load_config, parse_config
from gatespace.errors import UsageError

TABLE = "source: mails.csv, labels: [x, y]"

# override → path of the problem, and a part of what is said
WRONG = [
    ("steps=0", "steps", "greater than or equal to 1"),
    ("steps=true", "steps", "must be a whole number\n  got: True"),
    ("steps=1.0", "steps", "must be a whole number"),
    ("steps='7'", "steps", "must be a whole number"),
    ("steps=null", "steps", "got: null"),
    ("seed=-1", "seed", "greater than or equal to 0"),
    (f"seed={2**63}", "seed", "less than"),
    ("output=", "output", "must be a path"),
    ("output=''", "output", "must be a path"),
    ("output=~nobody-has-this-name/x", "output", "must be a path"),
    ("optimizer.lr=0", "optimizer.lr", "greater than 0"),
    ("optimizer.lr=.inf", "optimizer.lr", "finite"),
    ("optimizer.lr=.nan", "optimizer.lr", "finite"),
    ("optimizer.lr=fast", "optimizer.lr", "must be a number\n  got: 'fast'"),
    ("optimizer.betas=[0.9, 1]", "optimizer.betas.1", "less than 1"),
    ("optimizer.betas=[0.9]", "optimizer.betas.1", "is needed and not given"),
    ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas", "2 items at most"),
    ("optimizer.betas=0.9", "optimizer.betas", "must be a list"),
    ("optimizer.schedule=cosin", "optimizer.schedule", "did you mean 'cosine'?"),
    ("optimizer=adam", "optimizer", "must be a mapping of settings"),
    ("optimizer=[]", "optimizer", "must be a mapping of settings"),
    ("engine.device=gpu", "engine.device", "cuda"),
    ("engine.deterministic=1", "engine.deterministic", "true or false"),
    ("engine.precision=fp16", "engine.precision", "must be one of auto, fp32, bf16"),
    ("evaluation.final=[val, tset]", "evaluation.final.1", "did you mean 'test'?"),
    ("evaluation.final=[val, val]", "evaluation.final", "twice"),
    ("trace.trackers=[wandb, wandb]", "trace.trackers", "twice"),
    ("rollout.from.student=0.5", "rollout.from", "must sum to 1, not 0.5"),
    ("rollout.from.teacher=-1", "rollout.from.teacher", "greater than or equal to 0"),
    ("rollout.top_p=0", "rollout.top_p", "greater than 0"),
    ("rollout.stop=never", "rollout.stop", "must be one of json, eos"),
    ("teacher.cache=''", "teacher.cache", "must not be empty"),
    ("pair.lora.targets=5", "pair.lora.targets", "all-linear, or a list"),
    ("pair.lora.targets=[]", "pair.lora.targets", "all-linear, or a list"),
    ("pair.student=5", "pair.student", "must be a text"),
    ("task.split={}", "task.split", "must sum to more than 0"),
    ("task.split={teacher: 0.7, distill: 0.4}", "task.split", "at most 1"),
    ("task.name=null", "task.name", "a name or a table"),
    (f"task={{name: synthetic, table: {{{TABLE}}}}}", "task.name", "not both"),
    (f"task={{root: here, table: {{{TABLE}}}}}", "task.root", "instead: table.source"),
    ("task.text={source: x}", "task.text.prompt", "a prompt or messages"),
    ('task.text={source: x, prompt: "{a}"}', "task.text.answer", "which column"),
    ('task.text={source: x, prompt: "{a}", answer: y, messages: z}', "task.text.messages", "not both"),
    ("task.text={source: x, messages: z, too_long: truncate}", "task.text.too_long", "needs max_prompt_tokens"),
    ("task={name: synthetic, text: {source: x, messages: z}}", "task.name", "no meaning beside task.text"),
    ("task={brief: true, text: {source: x, messages: z}}", "task.brief", "no meaning beside task.text"),
    ("teacher.prompt={}", "teacher.prompt", "adds nothing"),
    ("task.table={labels: [x, y]}", "task.table.source", "is needed"),
    ("task.table={source: 5, labels: [x, y]}", "task.table.source", "a file, a folder"),
    ("task.table={source: {tran: x}, labels: [x, y]}", "task.table.source", "'tran' is not a split"),
    ("task.table={source: {val: x}, labels: [x, y]}", "task.table.source", "must name train"),
    ("task.table={source: x, labels: [x]}", "task.table.labels", "at least two"),
    ("task.table={source: x, labels: [x, x]}", "task.table.labels", "twice"),
    ("task.table={source: x, labels: [x, true]}", "task.table.labels.1", "must be a text"),
    (f"task.table={{{TABLE}, definitions: {{x: 1}}}}", "task.table.definitions.x", "must be a text"),
    (f"task.table={{{TABLE}, carve: {{val: 0.5, test: 0.5}}}}", "task.table.carve", "leave nothing"),
    ("objective.gate=null", "objective.gate", "needs a gate"),
    ("objective.gate=''", "objective.gate", "must be a name"),
    ("objective.gate=5", "objective.gate", "must be a name"),
    ("objective.gate={}", "objective.gate", "must be a name"),
    ("objective.gate=[1, 2, 3]", "objective.gate", "four coefficients a, b, c, d, not 3"),
    ("objective.gate=[1, 2, 3, .inf]", "objective.gate", "finite number"),
    (f"objective.gate=[1, 2, 3, {10**400}]", "objective.gate", "finite number"),
    (f"objective={{method: todi, params: {{beta: {10**400}}}}}", "objective.params", "the value of beta"),
    (f"optimizer.lr={10**400}", "optimizer.lr", "must be a number"),
    (f"steps={'9' * 5000}", "steps", "not YAML"),
    ("objective.gate={a: true}", "objective.gate", "a of the gate must be a finite number"),
    ("objective.params={x: 1}", "objective.params", "no parameters but its gate"),
    ("objective={method: todi, gate: G5}", "objective.gate", "has no gate"),
    ("objective={method: todi, params: [1]}", "objective.params", "must be a mapping"),
    ("objective={method: todi, params: {beta: [1]}}", "objective.params", "the value of beta"),
    ("objective={method: todi, params: {beta: .nan}}", "objective.params", "the value of beta"),
    ("objective={method: todi, stop_gradient: true}", "objective.stop_gradient", "no meaning without a gate"),
    ("objective={method: todi, shuffle: true}", "objective.shuffle", "no meaning without a gate"),
    ("objective={method: static, shuffle: true}", "objective.shuffle", "no meaning without a gate"),
    ("objective={method: jsd, support: bucket}", "objective.support", "its own support"),
    ("objective.support_k=4", "objective.support_k", "full has no K"),
    ("objective.temperature=0", "objective.temperature", "greater than 0"),
    ("objective.top_k=0", "objective.top_k", "greater than or equal to 1"),
]


def failing(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(TrainConfig, path, ["pair.teacher=t", *overrides])
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("override, path, message", WRONG)
def test_wrong_value(override: str, path: str, message: str) -> None:
    error = failing(override)
    assert error.startswith(f"--set {path}: ")
    assert message in error


# Cross checks blame a setting that need not have been given.
@pytest.mark.parametrize(
    "overrides, message",
    [
        (("objective.support=bucket", "objective.entropy=full"), "objective.entropy: full needs"),
        (("objective.support=bucket", "objective.top_k=65"), "objective.top_k: the teacher sends its top 64 only"),
        (("objective.support=bucket", "objective.support_k=65"), "objective.support_k: the teacher sends its top 64"),
        (("objective.support=bucket", "objective.temperature=2"), "objective.temperature: with a top-K teacher"),
    ],
)
def test_what_a_top_k_cannot_tell(overrides: tuple[str, ...], message: str) -> None:
    assert message in failing("teacher.payload=top_k", *overrides)


def test_probabilities_come_from_the_model_itself() -> None:
    pytest.importorskip("gatespace.addons.vllm")
    error = failing("rollout.engine=vllm", "evaluation={engine: vllm, probabilities: true}")
    assert "evaluation.probabilities: probabilities of labels come from the model in this process" in error


@pytest.mark.parametrize(
    "overrides",
    [
        ("support=bucket",),
        ("support=renorm", "temperature=2"),
        ("method=sampled_reverse_kl",),
        ("method=iw_opd",),
        ("method=revisiting_opd",),
        ("support=hybrid", "top_k=64"),
    ],
)
def test_what_a_top_k_can_tell(overrides: tuple[str, ...]) -> None:
    given = [f"objective.{override}" for override in overrides]
    load_config(TrainConfig, None, ["pair.teacher=t", "teacher.payload=top_k", *given])


@pytest.mark.parametrize(
    "override, path, nearest",
    [
        ("stesp=1", "stesp", "steps"),
        ("objectve.gate=G5", "objectve", "objective"),
        ("objective.gat=G5", "objective.gat", "gate"),
        ("objective.Top_K=5", "objective.Top_K", "top_k"),
        ("pair.lora.rr=5", "pair.lora.rr", "r"),
        ("task.split.distil=0.1", "task.split.distil", "distill"),
        ("rollout.from.studnet=1", "rollout.from.studnet", "student"),
        ("evaluation.max_tokens=1", "evaluation.max_tokens", "max_new_tokens"),
    ],
)
def test_unknown_key(override: str, path: str, nearest: str) -> None:
    error = failing(override)
    assert f"--set {path}: unknown key" in error
    assert f"did you mean {nearest!r}? known: " in error


def test_files_know_one_spelling_only() -> None:
    error = failing("rollout.source={student: 1}")
    assert error.startswith("--set rollout.source: unknown key")
    assert "known: from, temperature" in error


def test_all_problems_at_once_and_where_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 0\nsede: 1\n", encoding="utf-8")
    lines = failing("batch_size=x", path=path).splitlines()
    assert lines[0] == "3 settings are wrong"
    assert f"  {path}: steps: must be greater than or equal to 1, got 0" in lines
    assert "  --set batch_size: must be a whole number, got 'x'" in lines
    assert any(line.startswith(f"  {path}: sede: unknown key (instead: did you mean 'seed'?") for line in lines)


def test_required() -> None:
    with pytest.raises(UsageError, match=r"^pair.teacher: is needed and not given"):
        load_config(TrainConfig)
    with pytest.raises(UsageError, match=r"^pair.teacher: is needed and not given"):
        parse_config(TrainConfig, {"pair": {}})


def test_not_a_mapping() -> None:
    with pytest.raises(UsageError, match=r"^the configuration: must be a mapping of settings"):
        parse_config(TrainConfig, [1])  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "text, message",
    [
        ("steps: 1\nseed: 2\nsteps: 3\n", ":3:1: the key 'steps' appears here and in line 1"),
        ("objective:\n  gate: G5\n  'gate': G4\n", ":3:3: the key 'gate' appears here and in line 2"),
        ("steps: [1\n", ":2:1: "),
        ("steps: {a: b: c}\n", ":1:"),
        ("- steps\n", "a configuration is a mapping of settings\n  got: list"),
        ("just text\n", "a configuration is a mapping of settings\n  got: str"),
        ("a: 1\n---\nb: 2\n", "document"),
        ("? [a, b]\n: 1\n", "a key must be a text"),
        ("pair: !!python/object/apply:os.system ['echo']\n", "could not determine a constructor"),
        ("a: &x {b: *x}\n", "recursive"),
        ("a: \x07\n", "not YAML"),
        ("a: !!int x\n", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("<<: {steps: 3}\n", "<<: unknown key"),
        ("1: 2\n", "1: unknown key"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    error = failing(path=path)
    assert message in error
    assert str(path) in error


def test_nested_aliases_do_not_fill_the_memory(tmp_path: Path) -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30)]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(["l0: &l0 [x]", *levels, "steps: *l29"]), encoding="utf-8")
    assert "steps: must be a whole number, got [[[" in failing(path=path)


def test_unreadable_files(tmp_path: Path) -> None:
    assert failing(path=tmp_path / "none.yaml").startswith("no such file\n  got: ")
    assert "cannot be read" in failing(path=tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"output: caf\xe9\n")
    assert failing(path=path) == f"{path}: not UTF-8\n  got: byte 0xe9"
    path.write_bytes(b"\xef\xbb\xbfsteps: 3\n")
    assert load_config(TrainConfig, path, ["pair.teacher=t"]).steps == 3
    if os.geteuid() != 0:
        path.chmod(0)
        assert "cannot be read" in failing(path=path)
