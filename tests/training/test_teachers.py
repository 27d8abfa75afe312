"""Several teachers, each row with its own; and a teacher that averages its student's weights. On the tiny pair."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from gatespace.cli.estimate import estimate
from gatespace.config import StudyConfig, TrainConfig, parse_config
from gatespace.errors import UsageError
from gatespace.files import read
from gatespace.models import TinyPair, load_model
from gatespace.report import build_report
from gatespace.study.check import check_study
from gatespace.study.plan import make_plan
from gatespace.study.results import read_results
from gatespace.tasks import Task
from gatespace.teacher.average import AverageTeacher
from gatespace.training.checkpoint import tensors_file, tensors_of
from gatespace.training.clock import Clock
from gatespace.training.job import Job
from gatespace.training.progress import Silent
from gatespace.training.rollouts import MicroBatch
from gatespace.training.setup import material
from gatespace.training.train import opened as open_run
from gatespace.training.train import train
from tests.study.test_runner import run

from .conftest import assert_resumes, written

Make = Callable[..., TrainConfig]
Open = Callable[[TrainConfig], Any]


@pytest.fixture(scope="session")
def narrow(shared_place: Path, tiny: TinyPair) -> Path:
    """A second teacher: of the student's width, which is not the first one's, and with weights of its own."""
    folder = shared_place / "narrow"
    with FileLock(shared_place / "narrow.lock"):
        if not folder.exists():
            model = load_model(str(tiny.student))
            draw = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for parameter in model.network.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
            model.save(folder)
    return folder


@pytest.fixture(scope="session")
def table(shared_place: Path, synthetic: Task) -> dict[str, Any]:
    """The synthetic messages; two rows of three have the first teacher."""
    path = shared_place / "named.jsonl"
    rows = [
        {"text": row.text, "label": row.label, "who": "wide" if i % 3 else "slim"}
        for i, row in enumerate(synthetic.train[:120])
    ]
    with FileLock(shared_place / "named.lock"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {"source": str(path), "labels": list(synthetic.labels), "teacher_column": "who"}
    return {"table": found, "brief": True, "split": None}


@pytest.fixture
def make(train_config: Make, table: dict[str, Any], tiny: TinyPair, taught: Path, narrow: Path, tmp_path: Path) -> Make:
    """A run with two teachers; `pair` and `task` replace those of it."""

    def build(name: str = "run", **settings: Any) -> TrainConfig:
        two = {"teacher": None, "teachers": {"wide": str(taught / "model"), "slim": str(narrow)}}
        pair = {"student": str(tiny.student), **settings.pop("pair", two)}
        settings["teacher"] = {"cache": None, **settings.pop("teacher", {})}
        task = {"name": None, "brief": False, **settings.pop("task", table)}
        return train_config(pair=pair, task=task, **{"output": str(tmp_path / name), **settings})

    return build


@pytest.fixture
def opened() -> Any:
    with ExitStack() as stack:

        def build(config: TrainConfig) -> Job:
            job = stack.enter_context(open_run(config))
            job.prepare()
            return job

        yield build


class Kept(Silent):
    """Reads the checkpoint of every step after it; a run that is done has none."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors = folder / "checkpoints", list[dict[str, torch.Tensor]]()

    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        if step > 1:
            self.tensors.append(tensors_of(tensors_file(self.folder, step - 1)))


# ---------------------------------------------------------------------------------------------------- several teachers


@pytest.mark.parametrize("payload, micro_tokens", [("hidden", 90), ("hidden", 10**6), ("top_k", 90)])
def test_a_row_has_the_loss_and_the_gradient_of_a_run_with_its_teacher(
    make: Make, opened: Open, payload: str, micro_tokens: int
) -> None:
    more: dict[str, Any] = {"engine": {"micro_tokens": micro_tokens}, "teacher": {"payload": payload, "k": 12}}
    more["rollout"] = {"per_prompt": 2}
    if payload == "top_k":
        more["objective"] = {"support": "bucket"}
    several = opened(make(**more))
    teachers = several.config.pair.teachers or {}
    alone = {name: opened(make(name, pair={"teacher": model}, **more)) for name, model in teachers.items()}
    if payload == "hidden":
        scored = [job.teachers[""].score([[1]], [[2]]).payload for job in alone.values()]
        assert len({one.shape[-1] for one in scored if isinstance(one, torch.Tensor)}) == 2
    for job in (several, *alone.values()):
        job.model.network.zero_grad()
    names: list[str] = []
    batch = several.rollouts(0, Clock())
    for part in batch.parts:
        (name,) = {row.teacher for row in part.rows}
        names.append(name)
        assert {row.example.teacher for row in part.rows} == {name}
        part.scores = part.ask()
        out = several.loss(0, part)
        out.loss.backward()
        # The same rows in the run with that teacher, with a forward pass of its own over the whole prompt.
        single = alone[name]
        part.forward, part.prefix = None, several.encoder.prefix
        part.scores = single.teachers[""].score([row.prompt for row in part.rows], part.rollout.responses)
        expected = single.loss(0, part)
        expected.loss.backward()
        for column in ("per_token", "lam", "forward_kl", "reverse_kl"):
            torch.testing.assert_close(getattr(out, column), getattr(expected, column), rtol=2e-4, atol=1e-6)
    batch.backward()
    assert set(names) == {"wide", "slim"}
    assert len(names) == 2 if micro_tokens > 90 else len(names) > 2
    assert names == sorted(names, key=names.index)  # rows of a teacher stand together
    for name, parameter in several.model.network.named_parameters():
        parts = [dict(job.model.network.named_parameters())[name].grad for job in alone.values()]
        total = sum(part for part in parts if part is not None)
        assert isinstance(total, torch.Tensor)
        torch.testing.assert_close(parameter.grad, total, rtol=1e-3, atol=1e-5)


def test_one_name_for_all_rows_gives_the_bytes_of_one_teacher(
    make: Make, table: dict[str, Any], taught: Path, narrow: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) | {"who": "wide"} for line in Path(table["table"]["source"]).read_text().splitlines()]
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = {**table, "table": {**table["table"], "source": str(tmp_path / "same.jsonl")}}
    several = train(make("several", task=same))
    single = train(make("single", task=same, pair={"teacher": str(taught / "model")}))
    assert several["fingerprint"] == single["fingerprint"]
    found = read(tmp_path / "several" / "metrics.jsonl")
    assert all(set(record.pop("teachers")) == {"wide"} for record in found)
    assert found == read(tmp_path / "single" / "metrics.jsonl")
    identities = [json.loads((tmp_path / name / "identity.json").read_text()) for name in ("several", "single")]
    assert identities[0]["identity"] != identities[1]["identity"]


def test_a_killed_run_of_several_teachers_ends_with_the_same_bytes(
    make: Make, taught: Path, narrow: Path, tmp_path: Path
) -> None:
    """One of the teachers moves; a cache of scores is shared by the others and changes nothing."""
    pair = {"teacher": None, "teachers": {"wide": str(taught / "model"), "slim": "self-ema"}}
    more: dict[str, Any] = {"pair": pair, "steps": 5, "rollout": {"staleness": 1}, "engine": {"micro_tokens": 200}}
    cached = make("whole", teacher={"cache": str(tmp_path / "scores")}, **more)
    whole = assert_resumes(cached, make("killed", **more), 3)
    found = read(tmp_path / "whole" / "metrics.jsonl")
    for record in found:
        parts = record["teachers"]
        tokens = sum(part["tokens"] for part in parts.values())
        assert tokens == record["tokens"]
        assert sum(part["rows"] for part in parts.values()) == record["rows"]
        for name in ("lam_mean", "forward_kl", "reverse_kl"):
            mean = sum(part[name] * part["tokens"] for part in parts.values()) / tokens
            assert mean == pytest.approx(record[name], rel=1e-9)
    for name, sums in whole["run"]["teachers"].items():
        mine = [record["teachers"][name] for record in found if name in record["teachers"]]
        assert sums["tokens"] == sum(part["tokens"] for part in mine)
        assert sums["lam_mean"] == pytest.approx(sum(p["lam_mean"] * p["tokens"] for p in mine) / sums["tokens"])
    named = {record["teacher"] for record in read(tmp_path / "whole" / "tokens.jsonl")}
    assert named <= {"wide", "slim"}
    assert named


def test_models_are_loaded_once(make: Make, opened: Open, narrow: Path, taught: Path) -> None:
    model = str(taught / "model")
    pair = {"teacher": None, "teachers": {"wide": model, "slim": str(narrow), "again": f"{model}/../model"}}
    job = opened(make(pair=pair))
    assert job.models["teachers.wide"] is job.models["teachers.again"]
    teachers = job.teachers
    assert teachers["wide"] is teachers["again"]
    assert len(teachers.distinct) == 2
    for name in ("wide", "slim", "slim"):
        teachers[name].score([[1]], [[2]])
    assert teachers.stats.rows == 3
    with pytest.raises(UsageError, match="names no teacher"):
        teachers[""]


def test_labels_are_scored_by_the_teacher_of_their_row(make: Make, opened: Open) -> None:
    more = {"objective": {"support": "labels"}}
    several = opened(make(**more))
    parts = {part.rows[0].teacher: part for part in several.rollouts(0, Clock()).parts}
    for name, model in (several.config.pair.teachers or {}).items():
        alone, rows = opened(make(name, pair={"teacher": model}, **more)), parts[name].rows
        part = MicroBatch([replace(row, teacher="") for row in rows], parts[name].places)
        alone.rollouts._respond(0, [part], Clock())
        torch.testing.assert_close(parts[name].ask(), part.ask())


def test_rows_of_text_tasks_name_their_teachers(make: Make, table: dict[str, Any], tmp_path: Path) -> None:
    """Rows of one prompt are one row only where they have the same teacher; held-out rows need none."""
    rows = [json.loads(line) for line in Path(table["table"]["source"]).read_text().splitlines()]
    twice = [*rows, {**rows[0], "who": "wide"}, {**rows[0], "label": "other"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in twice))
    held_out = [{"text": row["text"], "label": row["label"]} for row in rows[:12]]
    for split in ("val", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    text = {"source": str(tmp_path), "prompt": "{text}", "answer": "label", "teacher_column": "who"}
    own = {"cache": None, "prompt": {"prompt": "{text} It is {label}"}}
    summary = train(make(task={"text": text, "split": None}, teacher=own, steps=1))
    assert set(summary["run"]["teachers"]) == {"wide", "slim"}
    config = make(task={"text": text, "split": None})
    data = material(config.task, "distill")
    assert [row.teacher for row in data.rows if row.text == rows[0]["text"]] == ["slim", "wide"]
    unnamed = {"text": {**text, "teacher_column": None}, "split": None}
    other = material(make(task=unnamed, pair={"teacher": "t"}).task, "distill")
    assert data.task.digest != other.task.digest


def test_bad_rows_are_refused_with_their_number(make: Make, table: dict[str, Any], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Path(table["table"]["source"]).read_text().splitlines()]

    def attempt(kind: str, **changed: Any) -> None:
        path = tmp_path / f"{kind}.jsonl"
        given = [rows[0], {**rows[1], **changed}, *rows[2:]]
        path.write_text("".join(json.dumps({k: v for k, v in row.items() if v != "gone"}) + "\n" for row in given))
        if kind == "text":
            text = {"source": str(path), "prompt": "{text}", "answer": "label", "teacher_column": "who"}
            train(make(task={"text": text, "split": None}))
        else:
            train(make(task={**table, "table": {**table["table"], "source": str(path)}}))

    for kind in ("table", "text"):
        with pytest.raises(UsageError, match=rf"{kind}\.jsonl:2: the row names no teacher of pair\.teachers") as error:
            attempt(kind, who="wyde")
        assert "wide, slim" in str(error.value)
        with pytest.raises(UsageError, match=rf"{kind}\.jsonl:2: 'who' names no teacher"):
            attempt(kind, who="  ")
        with pytest.raises(UsageError, match=rf"{kind}\.jsonl:2 has no column 'who'"):
            attempt(kind, who="gone")
    with pytest.raises(UsageError, match="synthetic, row 1: the row names no teacher"):
        train(make(task={"name": "synthetic", "brief": True}))


TWO = {"a": "one", "b": "two"}


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"pair": {"teacher": "x", "teachers": TWO}}, "pair.teachers: a pair has a teacher or teachers, not both"),
        ({"pair": {}}, "pair.teacher: is needed and not given"),
        ({"pair": {"teachers": {}}}, "pair.teachers"),
        ({"pair": {"teachers": TWO, "teacher_revision": "v1"}}, "pair.teacher_revision"),
        ({"pair": {"teacher": "x", "ema_decay": 0.5}}, "pair.ema_decay"),
        ({"pair": {"teacher": "self-ema", "teacher_quantization": "int8"}}, "cannot be averaged"),
        ({"pair": {"teachers": TWO}, "rollout": {"from": {"teacher": 1.0}}}, "rollout.from.teacher"),
        ({"pair": {"teachers": TWO}, "teacher": {"options": {"c": {"patience": 1}}}}, "teacher.options.c"),
        (
            {"pair": {"teachers": TWO}, "task": {"table": {"source": "x.csv", "labels": ["a", "b"]}}},
            "task.table.teacher_column",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_config(TrainConfig, settings)
    assert words in str(error.value)


def test_options_of_one_teacher() -> None:
    options = {"timeout": 5, "a": {"server_key": "a.pub"}, "b": {"timeout": 9}}
    config = parse_config(TrainConfig, {"pair": {"teachers": TWO}, "teacher": {"options": options}})
    assert config.alone("teachers.a").teacher.options == {"timeout": 5, "server_key": "a.pub"}
    assert config.alone("teachers.b").teacher.options == {"timeout": 9}
    assert config.alone("teachers.b").pair.teacher == "two"


def test_a_teacher_with_other_tokens_is_refused_by_its_name(make: Make, taught: Path, tmp_path: Path) -> None:
    model = load_model(str(taught / "model"))
    model.tokenizer.add_tokens(["<another>"])
    model.network.resize_token_embeddings(len(model.tokenizer))
    model.save(tmp_path / "other")
    pair = {"teacher": None, "teachers": {"wide": str(taught / "model"), "slim": str(tmp_path / "other")}}
    for more in ({}, {"objective": {"support": "labels"}}):
        with pytest.raises(UsageError, match=r"pair\.teachers\.slim: student and teacher do not have the same vocab"):
            train(make(pair=pair, **more))


@pytest.mark.slow
def test_estimates_and_studies_know_several_teachers(make: Make, table: dict[str, Any], tmp_path: Path) -> None:
    config = make()
    found = estimate(config, lambda text: None)
    single = [
        estimate(make(pair={"teacher": model}), lambda text: None) for model in (config.pair.teachers or {}).values()
    ]
    weights = [one["memory_bytes"]["teacher_weights"] for one in single]
    assert found["memory_bytes"]["teacher_weights"] == sum(weights)
    trained = {
        "steps": 1,
        "batch_size": 6,
        "rollout": {"max_new_tokens": 8},
        "evaluation": {"limit": 6, "max_new_tokens": 8},
        "engine": {"precision": "fp32", "threads": 1},
        "pair": {"student": config.pair.student, "teachers": config.pair.teachers},
    }
    settings = {"name": "two", "tasks": {"t": {"task": table}}, "train": trained, "points": ["G5"]}
    settings["axes"] = {"restrictions": False, "static": [], "gap": False, "isolation": None}
    study = parse_config(StudyConfig, settings)
    check_study(study, {"t": {}})
    run(study, tmp_path / "study")
    results = read_results(tmp_path / "study")
    assert not results.problems
    assert set(results.done[0].teachers) == {"wide", "slim"}
    (baseline,) = [path for path in (tmp_path / "study" / "baselines").iterdir() if "-teacher-" in path.name]
    about = json.loads((baseline / "baseline.json").read_text())
    assert about["model"] == config.pair.teachers
    assert "several teachers" in about["unmeasured"]
    build_report(tmp_path / "study", png=False)
    made = parse_config(StudyConfig, settings | {"teach": {"teacher": {"model": "tiny"}}})
    with pytest.raises(UsageError, match="teachers: the study makes a teacher"):
        make_plan(made)


# ---------------------------------------------------------------------------------------------------- a moving average


@pytest.mark.parametrize("kind", ["fp32", "bf16", "lora"])
def test_the_average_is_that_of_the_weights(kind: str, make: Make, narrow: Path, tmp_path: Path) -> None:
    """Against the definition, from the weights of every step; and a killed run has the same bytes."""
    pair: dict[str, Any] = {"teacher": None, "teachers": {"wide": "self-ema", "slim": str(narrow)}, "ema_decay": 0.75}
    pair |= {"lora": {"r": 4}} if kind == "lora" else {}
    more: dict[str, Any] = {"engine": {"precision": "bf16" if kind == "bf16" else "fp32"}, "steps": 5}
    more |= {"pair": pair, "optimizer": {"lr": 3e-2}, "checkpoint": {"every": 1, "keep": 9}}
    kept = Kept(tmp_path / "whole")
    train(make("whole", **more), kept)
    saved = kept.tensors
    names = [name.removeprefix("average/") for name in saved[0] if name.startswith("average/")]
    assert set(names) == {name.removeprefix("weight/") for name in saved[0] if name.startswith("weight/")}
    assert all(saved[0][f"average/{name}"].dtype == torch.float32 for name in names)
    moved = 0.0
    for name in names:
        for before, after in pairwise(saved):
            average = 0.75 * before[f"average/{name}"].double() + 0.25 * after[f"weight/{name}"].double()
            torch.testing.assert_close(after[f"average/{name}"].double(), average, rtol=1e-6, atol=1e-7)
            moved = max(moved, float((average - saved[0][f"average/{name}"].double()).abs().max()))
    assert moved > 1e-3
    assert_resumes(make("whole", **more), make("killed", **more), 3)


def test_the_first_average_is_the_start_and_scores_are_those_of_the_moment(
    make: Make, opened: Open, tiny: TinyPair
) -> None:
    job = opened(make(pair={"teacher": "self-ema", "ema_decay": 0.5}))
    teacher = job.teachers[""]
    assert isinstance(teacher, AverageTeacher)
    row = job.rollouts.batches.at(0)[0]
    response = job.encoder.gold("good news", None)
    start = {name: p.detach().clone() for name, p in job.model.network.named_parameters()}
    for name, p in teacher.model.network.named_parameters():
        assert torch.equal(p, start[name])
    before = teacher.score([row.prompt], [response]).payload
    with torch.no_grad():
        for p in job.model.network.parameters():
            p.mul_(1.5)
    for follower in job.optimizer.followers:
        follower.follow(job.optimizer.masters)
    expected = load_model(str(tiny.student))
    with torch.no_grad():
        for p in expected.network.parameters():
            p.mul_(1.25)
    scores = teacher.score([row.prompt], [response])
    whole = [*job.encoder.prefix, *row.prompt, *response]
    with torch.no_grad():
        hidden = expected.network.model(torch.tensor([whole])).last_hidden_state[0]
    assert isinstance(scores.payload, torch.Tensor)
    torch.testing.assert_close(scores.payload[0], hidden[len(whole) - len(response) - 1 : -1], rtol=2e-4, atol=2e-4)
    assert not torch.equal(scores.payload, before)  # type: ignore[arg-type]
    assert scores.head is not None
    torch.testing.assert_close(scores.head.weight, expected.head.weight)


def test_scores_of_a_moving_teacher_are_not_cached(make: Make, tmp_path: Path) -> None:
    """Nor found: a run of `self` has left those of the weights that both begin with."""
    prompt = {"objective": {"gate": "G5"}, "rollout": {"temperature": 1.7}, "optimizer": {"lr": 3e-2}}
    train(make("self", pair={"teacher": "self"}, teacher={"cache": str(tmp_path / "scores")}, **prompt))
    (file,) = (tmp_path / "scores").glob("*.sqlite")
    count = "SELECT count(*) FROM scores"
    with sqlite3.connect(file) as database:
        left = database.execute(count).fetchone()
    pair = {"teacher": "self-ema", "ema_decay": 0.5}
    train(make("cached", pair=pair, teacher={"cache": str(tmp_path / "scores")}, **prompt))
    with sqlite3.connect(file) as database:
        assert database.execute(count).fetchone() == left
    train(make("plain", pair=pair, **prompt))
    assert written(tmp_path / "cached") == written(tmp_path / "plain")
    found = {name: json.loads((tmp_path / name / "identity.json").read_text()) for name in ("self", "plain")}
    assert found["plain"]["content"]["teacher"] == f"self-ema {found['self']['content']['teacher']}"
    assert found["plain"]["identity"] != found["self"]["identity"]
    train(make("slower", pair={"teacher": "self-ema"}, steps=1, **prompt))
    slower = json.loads((tmp_path / "slower" / "identity.json").read_text())
    assert slower["content"]["teacher"] == found["plain"]["content"]["teacher"]
