"""Free text from one end to the other: a teacher is made, a student distilled, killed and resumed, on the tiny pair."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from gatespace.config import EvaluationConfig, TeachConfig, TrainConfig, parse_config
from gatespace.config.sections import TeacherPromptConfig
from gatespace.errors import UsageError
from gatespace.evaluation import evaluate
from gatespace.files import read
from gatespace.models import load_model
from gatespace.models.encode import Encoder
from gatespace.rollout import greedy
from gatespace.tasks.configured import configured_prompt, configured_rows, load_configured_task, teacher_prompt
from gatespace.training.distill import Distillation
from gatespace.training.setup import material
from gatespace.training.train import opened, teach, train
from gatespace.training.warnings import AlarmError

from .conftest import assert_resumes

COLOURS = ("red", "blue", "green", "black", "white", "brown")
THINGS = ("bike", "boat", "lamp", "map", "coat", "tent", "clock", "desk", "bridge", "kettle", "ladder", "window")
COMMON = {
    "engine": {"precision": "fp32", "threads": 1},
    "evaluation": {"every": 0, "limit": 8, "max_new_tokens": 14, "final": ["val", "test"]},
}


@pytest.fixture(scope="session")
def task(shared_place: Path) -> dict[str, Any]:
    """Things with their colours, and two sentences about each."""
    path = shared_place / "things.jsonl"
    with FileLock(shared_place / "things.lock"):
        rows = [
            {"thing": thing, "colour": colour, "ref": ref}
            for thing, colour in itertools.product(THINGS, COLOURS)
            for ref in (f"The {thing} is {colour}.", f"It is a {colour} {thing}.")
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = "thing[{thing}], colour[{colour}]"
    return {"text": {"source": str(path), "prompt": prompt, "answer": "ref", "metric": "token_f1", "also": ["exact"]}}


@pytest.fixture(scope="session")
def text_teacher(shared_place: Path, task: dict[str, Any]) -> Path:
    output = shared_place / "text-teacher"
    settings = {
        **COMMON,
        "task": task,
        "model": "tiny",
        "steps": 50,
        "batch_size": 16,
        "optimizer": {"lr": 3e-3},
        "output": str(output),
    }
    with FileLock(shared_place / "text-teacher.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATESPACE_CACHE", str(shared_place / "cache"))
        teach(parse_config(TeachConfig, {**settings, "evaluation": {**COMMON["evaluation"], "every": 50}}))
    return output


def distillation(task: Mapping[str, Any], taught: Path, output: Path, **more: Any) -> TrainConfig:
    settings = {
        **COMMON,
        "task": task,
        "pair": {"student": "tiny", "teacher": str(taught / "model")},
        "steps": 5,
        "batch_size": 6,
        "rollout": {"max_new_tokens": 14, "per_prompt": 2},
        "teacher": {"cache": None},
        "optimizer": {"lr": 2e-3},
        "checkpoint": {"every": 2},
        "trace": {"tokens_every": 2, "rollouts": 2},
        "output": str(output),
    }
    for name, value in more.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
    return parse_config(TrainConfig, settings)


def words(text: str) -> list[str]:
    return [word for word in text.lower().replace(".", "").split() if word not in ("a", "an", "the")]


def f1(response: str, reference: str) -> float:
    left, right = words(response), words(reference)
    rest, common = list(right), 0
    for word in left:
        if word in rest:
            rest.remove(word)
            common += 1
    return 2 * common / (len(left) + len(right)) if left and right else float(left == right)


def test_a_teacher_learns_what_the_references_say(text_teacher: Path) -> None:
    start = json.loads((text_teacher / "evaluations.jsonl").read_text().splitlines()[0])
    found = json.loads((text_teacher / "evaluation-test.json").read_text())
    assert (start["metric"], start["step"]) == ("token_f1", 0)
    assert start["score"] < 0.2
    assert found["metrics"]["score"] > 0.5
    assert found["metrics"]["truncated"] < 0.5
    rows = [json.loads(line) for line in (text_teacher / "predictions-test.jsonl").read_text().splitlines()]
    assert len(rows) == 8 < found["available"]
    for row in rows:
        assert row["score"] == pytest.approx(max(f1(row["response"], reference) for reference in row["references"]))
        assert row["also"]["exact"] == float(row["response"] in row["references"])
        assert row["response"] == row["raw"].strip()
    assert found["metrics"]["score"] == pytest.approx(sum(row["score"] for row in rows) / 8)


def test_a_teacher_learns_every_reference_and_a_student_every_prompt(task: dict[str, Any]) -> None:
    config = parse_config(TeachConfig, {"task": task}).task
    loaded = load_configured_task(config)
    lessons, prompts = (configured_rows(config, loaded, part) for part in ("teacher", "distill"))
    assert len(lessons) == 2 * len({row.text for row in lessons})
    assert len(prompts) == len({row.text for row in prompts})
    assert not {row.text for row in lessons} & {row.text for row in prompts}


def test_a_killed_distillation_ends_with_the_same_bytes(
    task: dict[str, Any], text_teacher: Path, tmp_path: Path
) -> None:
    task = {"text": {**task["text"], "stop": ["\n"]}}
    runs = (distillation(task, text_teacher, tmp_path / name) for name in ("whole", "killed"))
    whole = assert_resumes(*runs, 3)
    assert whole["evaluation"]["test"]["metrics"]["metric"] == "token_f1"
    tokens = read(tmp_path / "whole" / "tokens.jsonl")
    assert all(row["text"].startswith("thing[") and row["gold"].endswith(".") for row in tokens)
    steps = read(tmp_path / "whole" / "metrics.jsonl")
    assert [step["rows"] for step in steps] == [12] * 5
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_gold_responses_end_their_turn(task: dict[str, Any], text_teacher: Path, tmp_path: Path) -> None:
    config = distillation(task, text_teacher, tmp_path / "gold", steps=1, rollout={"from": {"gold": 1.0}})
    train(config)
    tokens = read(tmp_path / "gold" / "tokens.jsonl")
    assert tokens
    for row in tokens:
        assert row["ended"]
        assert row["label"] == row["gold"]


def test_stop_texts_end_a_response(task: dict[str, Any], text_teacher: Path) -> None:
    model = load_model(str(text_teacher / "model"))
    settings = parse_config(TeachConfig, {"task": {"text": {**task["text"], "stop": [" is"]}}}).task
    loaded = load_configured_task(settings)
    prompt, texts = configured_prompt(settings, loaded), [row.text for row in loaded.rows("test")[:6]]
    found = greedy(model, Encoder(prompt, model.tokenizer, texts), texts, max_new_tokens=14)
    assert any(" is" in one.text for one in found)
    for one in found:
        assert one.text.count(" is") <= 1
        assert " is" not in (prompt.parse(one.text) or "")
        assert one.ended or len(one.ids) == 14


def test_conversations_are_trained_on(text_teacher: Path, tmp_path: Path) -> None:
    rows = [
        [
            {"role": "system", "content": "Name the colour."},
            {"role": "user", "content": f"thing[{thing}], colour[{colour}]"},
            {"role": "assistant", "content": f"{colour}."},
        ]
        for thing, colour in itertools.product(THINGS, COLOURS)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    task = {"text": {"source": str(tmp_path / "chats.jsonl"), "messages": "messages", "metric": "contains"}}
    config = distillation(task, text_teacher, tmp_path / "run", steps=1, pair={"student": str(text_teacher / "model")})
    found = train(config)
    assert found["evaluation"]["val"]["metrics"]["metric"] == "contains"
    row = json.loads((tmp_path / "run" / "predictions-test.jsonl").read_text().splitlines()[0])
    assert [turn["role"] for turn in json.loads(row["text"])] == ["system", "user"]
    assert row["references"][0].rstrip(".") in COLOURS


def test_what_does_not_fit_is_refused_with_its_row(task: dict[str, Any], text_teacher: Path, tmp_path: Path) -> None:
    rows = Path(task["text"]["source"]).read_text().splitlines()
    long = json.dumps({"thing": "bike " * 1200, "colour": "red", "ref": "It is red."})
    (tmp_path / "long.jsonl").write_text("\n".join([*rows[:6], long, *rows[6:]]))
    text = {**task["text"], "source": str(tmp_path / "long.jsonl")}
    pair = {"student": str(text_teacher / "model")}

    def run(name: str, **settings: Any) -> None:
        task = {"text": {**text, **settings}, "split": None}
        train(distillation(task, text_teacher, tmp_path / name, steps=1, pair=pair))

    with pytest.raises(UsageError) as error:
        run("a")
    assert "context window" in str(error.value)
    assert "long.jsonl:7" in str(error.value)
    with pytest.raises(UsageError, match=r"long\.jsonl:7: the prompt is longer than task\.text\.max_prompt_tokens"):
        run("b", max_prompt_tokens=60)
    run("c", max_prompt_tokens=60, too_long="truncate")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"evaluation": {"probabilities": True}}, r"task\.text has none"),
        ({"objective": {"support": "labels"}}, "over labels"),
        ({"alarms": {"stop_on": ["legal"]}}, r"alarms\.stop_on: legal is about labels"),
    ],
)
def test_labels_are_needed_for_what_is_about_labels(task: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        distillation(task, Path("teacher"), Path("run"), **settings)


def test_alarms_of_free_text_are_measured(task: dict[str, Any], text_teacher: Path, tmp_path: Path) -> None:
    """A cap that cuts every response raises the alarm that says so; of labels nothing is known."""
    config = distillation(
        task,
        text_teacher,
        tmp_path / "run",
        rollout={"max_new_tokens": 2},
        alarms={"window": 1, "stop_on": ["truncated"]},
        trace={"tokens_every": 1},
    )
    with pytest.raises(AlarmError, match=r"truncated") as error:
        train(config)
    assert "task.text.stop" in str(error.value)
    record = read(tmp_path / "run" / "metrics.jsonl")[0]
    assert record.get("legal_answers") is None
    for name in ("student_entropy_nats", "teacher_entropy_nats", "top_k_overlap", "repeated_ngrams", "ended"):
        assert record[name] is not None


# ---------------------------------------------------------------------------------------------------- teacher's prompt


def test_a_teacher_scores_after_its_own_prompt(task: dict[str, Any], text_teacher: Path, tmp_path: Path) -> None:
    """What it is shown is what a plain pass over that prompt and the response gives."""
    own = {
        "system": "Use the answer.",
        "prompt": "thing[{thing}]: {ref}",
        "examples": [{"user": "thing[x]", "assistant": "It is red."}],
    }
    config = distillation(task, text_teacher, tmp_path / "run", teacher={"prompt": own})
    with opened(config) as job:
        assert isinstance(job, Distillation)
        job.prepare()
        row: Any = job.data.rows[0]
        other = job.teacher_encoder.prompt
        turns = other.messages(other.text(row))
        assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
        assert turns[-1]["content"] == f"thing[{row.columns['thing']}]: {row.references[0]}"
        response = job.encoder.gold("It is blue.", job.model.turn_end)
        asked = job.rollouts.batches.at(0)
        first = next(one for one in asked if one.example is not None)
        payload: Any = job.teachers[""].score([first.teacher_prompt], [response]).payload
        whole = [*job.teacher_encoder.prefix, *first.teacher_prompt, *response]
        assert whole == [*other.render(job.model.tokenizer, other.text(first.example)), *response]
        with torch.no_grad():
            found = job.models["teacher"].network.model(torch.tensor([whole])).last_hidden_state[0]
        expected = found[len(whole) - len(response) - 1 : -1]
        torch.testing.assert_close(payload[0], expected, rtol=2e-4, atol=2e-4)


def test_a_teacher_is_evaluated_by_what_it_is_shown(task: dict[str, Any], text_teacher: Path) -> None:
    model, settings = load_model(str(text_teacher / "model")), parse_config(TeachConfig, {"task": task}).task
    loaded = load_configured_task(settings)
    student = configured_prompt(settings, loaded)
    assert teacher_prompt(None, student) is student
    own = parse_config(TeacherPromptConfig, {"prompt": "thing[{thing}], colour[red]"})
    found = evaluate(model, loaded, teacher_prompt(own, student), EvaluationConfig(limit=12, max_new_tokens=14))
    assert [row.text for row in found.predictions] == [row.text for row in loaded.rows("test")[:12]]
    assert sum("red" in (row.response or "") for row in found.predictions) > 8


def test_a_teacher_prompt_is_the_same_at_all_seeds(task: dict[str, Any], text_teacher: Path, tmp_path: Path) -> None:
    """Nothing of a run's seed can be in it, and a folder that was begun with one is not resumed with another."""
    by_seed = {"prompt": {"prompt": "thing[{thing}] {seed}"}}
    with pytest.raises(UsageError, match=r"things\.jsonl:\d+ has no column 'seed'"):
        train(distillation(task, text_teacher, tmp_path / "run", teacher=by_seed))
    assert not (tmp_path / "run" / "config.yaml").exists()
    one, other = ({"prompt": {"prompt": f"thing[{{thing}}] {word}"}} for word in ("one", "two"))
    made = distillation(task, text_teacher, tmp_path / "run", steps=1, teacher=one)
    train(made)
    with pytest.raises(UsageError, match=r"teacher\.prompt\.prompt"):
        train(distillation(task, text_teacher, tmp_path / "run", steps=1, teacher=other))


@pytest.mark.parametrize("messages", [False, True])
def test_gsm8k_from_one_end_to_the_other(text_data: Path, short_smollm2: Path, tmp_path: Path, messages: bool) -> None:
    """The real model's own weights and tokenizer, few of its layers, few rows."""
    rows = [json.loads(line) for line in (text_data / "gsm8k" / "test.jsonl").read_text().splitlines()[:12]]
    if messages:
        rows = [{"chat": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"messages": "chat"} if messages else {"prompt": "{question}"}
    task = {"text": {"source": str(tmp_path / "rows.jsonl"), "answer": "answer", "metric": "number", **asked}}
    config = distillation(
        {**task, "split": None},
        tmp_path,
        tmp_path / "run",
        steps=1,
        batch_size=2,
        pair={"student": str(short_smollm2), "teacher": str(short_smollm2)},
        rollout={"max_new_tokens": 40, "per_prompt": 1},
        evaluation={"limit": 1, "max_new_tokens": 40},
    )
    found = train(config)["evaluation"]["test"]["metrics"]
    assert found["metric"] == "number"
    assert found["length"] <= 40
    assert material(config.task, "distill").prompt.closes is False
