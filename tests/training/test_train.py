"""Whole runs on the tiny pair: what they write, what they refuse, and how they fail."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.config import TeachConfig, TrainConfig, load_config, parse_config
from gatespace.errors import RunError, UsageError
from gatespace.evaluation import evaluate
from gatespace.files import read
from gatespace.models import Model, TinyPair, load_model
from gatespace.tasks import Prompt, Task
from gatespace.training import checkpoint
from gatespace.training.distill import DistillationLoss
from gatespace.training.train import teach, train

from .conftest import TASK, Listener

Make = Callable[..., TrainConfig]


def assert_predicts_as_recorded(folder: Path, task: Task, *, dtype: torch.dtype = torch.float32) -> None:
    path = folder / "config.yaml"
    kind: type[TrainConfig] | type[TeachConfig] = TrainConfig if "pair:" in path.read_text() else TeachConfig
    settings = load_config(kind, path).evaluation
    model = load_model(str(folder / "model"), dtype=dtype)
    validation = None
    for split in settings.final:
        found = evaluate(
            model,
            task,
            Prompt.of(task, brief=True),
            settings,
            split=split,
            probabilities=settings.probabilities,
        ).judged_with(validation)
        validation = found if split == "val" else validation
        lines = [json.loads(line) for line in (folder / f"predictions-{split}.jsonl").read_text().splitlines()]
        assert [(line["response"], line["raw"]) for line in lines] == [(p.response, p.raw) for p in found.predictions]
        assert json.loads((folder / f"evaluation-{split}.json").read_text()) == found.as_json()


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.network.named_parameters()}


def assert_finite(records: list[dict[str, Any]]) -> None:
    for record in records:
        assert math.isfinite(record["loss"])
        assert record["grad_norm"] > 0


# ---------------------------------------------------------------------------------------------------- whole runs


def test_teach(taught: Path, tiny: TinyPair, synthetic: Task) -> None:
    names = {"config.yaml", "done", "environment.json", "evaluation-val.json", "evaluations.jsonl", "identity.json"}
    names |= {"metrics.jsonl", "model", "predictions-val.jsonl", "summary.json", "timings.jsonl", ".lock"}
    assert set(os.listdir(taught)) == names  # no checkpoint, and nothing half-written
    records = read(taught / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 61))
    assert_finite(records)
    assert records[-1]["loss"] < 0.2 * records[0]["loss"]
    assert records[-1]["token_accuracy"] > 0.7
    assert [record["step"] for record in read(taught / "evaluations.jsonl")] == [0, 30]
    summary = json.loads((taught / "summary.json").read_text())
    assert summary["steps"] == 60
    model = load_model(str(taught / "model"))
    assert summary["fingerprint"] == model.fingerprint() != load_model(str(tiny.teacher)).fingerprint()
    metrics = summary["evaluation"]["val"]["metrics"]
    assert metrics["accuracy"] > 0.65 > 0.4 > metrics["best_constant"]["accuracy"]
    assert read(taught / "evaluations.jsonl")[0]["accuracy"] < 0.4
    assert_predicts_as_recorded(taught, synthetic)


def test_train(train_config: Make, synthetic: Task, tiny: TinyPair) -> None:
    config = train_config(
        steps=40,
        batch_size=16,
        optimizer={"lr": 4e-3},
        evaluation={"every": 20, "limit": {"val": 60}, "final": ["val", "test"], "probabilities": True},
        checkpoint={"every": 15},
        trace={"tokens_every": 20, "rollouts": 3},
    )
    listener = Listener()
    summary = train(config, listener)
    folder = config.output
    names = {"config.yaml", "done", "environment.json", "identity.json", "evaluations.jsonl", "metrics.jsonl"}
    names |= {"tokens.jsonl", "timings.jsonl", "model", "summary.json", ".lock"}
    names |= {"predictions-val.jsonl", "predictions-test.jsonl", "evaluation-val.json", "evaluation-test.json"}
    assert set(os.listdir(folder)) == names
    assert listener.steps == list(range(1, 41))
    assert load_config(TrainConfig, folder / "config.yaml") == config

    records = read(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == listener.steps
    assert_finite(records)
    assert all(0 < record["lam_mean"] < 1 and sum(record["lam_hist"]) == record["tokens"] for record in records)
    assert all(record["rows"] == 16 for record in records)
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert not {"wall", "cpu", "cache_hits"} & set(records[0])
    timings = read(folder / "timings.jsonl")
    assert set(timings[0]["wall"]) == {"rollout", "score", "update", "optimizer"}
    assert timings[0]["cache_misses"] == records[0]["tokens"]
    tokens = read(folder / "tokens.jsonl")
    assert [record["step"] for record in tokens] == [1, 1, 1, 21, 21, 21]
    assert all(len(record["values"]["lam"]) == len(record["ids"]) > 0 for record in tokens)

    run = summary["run"]
    total = sum(record["tokens"] for record in records)
    mean = sum(record["lam_mean"] * record["tokens"] for record in records) / total
    assert (run["steps"], run["tokens"], run["rows"]) == (40, total, 640)
    assert run["lam_mean"] == pytest.approx(mean, rel=1e-9)
    assert summary == json.loads((folder / "summary.json").read_text())
    looks = read(folder / "evaluations.jsonl")
    assert [look["step"] for look in looks] == [0, 20]
    assert looks[0]["accuracy"] < 0.35
    before, after = math.log(len(synthetic.labels)), summary["evaluation"]["test"]["calibration"]["log_loss"]
    assert after < before  # that of knowing nothing
    rows = {split: (found["metrics"]["count"], found["available"]) for split, found in summary["evaluation"].items()}
    assert rows == {"val": (60, len(synthetic.val)), "test": (len(synthetic.test), len(synthetic.test))}
    assert [look["count"] for look in looks] == [60, 60]
    assert summary["evaluation"]["val"]["metrics"]["accuracy"] > looks[0]["accuracy"] + 0.2
    model = load_model(str(folder / "model"))
    assert summary["fingerprint"] == model.fingerprint()
    assert_predicts_as_recorded(folder, synthetic)


def test_a_finished_run_is_neither_repeated_nor_replaced(train_config: Make, tiny: TinyPair) -> None:
    config = train_config(steps=1)
    first = train(config)
    stamps = {path: path.stat().st_mtime_ns for path in config.output.rglob("*") if path.name != ".lock"}
    listener = Listener()
    # settings that cannot change numbers are not asked to be the same
    assert train(train_config(steps=1, checkpoint={"every": 1}, teacher={"cache": None}), listener) == first
    assert listener.steps == []
    assert any("this run is done" in note for note in listener.notes)
    teaching = {"task": TASK, "model": str(tiny.teacher), "output": str(config.output), "steps": 1}
    # a setting without effect on numbers differs too, and stands first in the file
    longer = train_config(steps=2, checkpoint={"every": 1}, trace={"rollouts": 1})
    others: dict[str, TrainConfig | TeachConfig] = {
        "its seed is 42, not 7": train_config(steps=1, seed=7),
        "its steps is 1, not 2": longer,
        "its optimizer.lr is 0.002, not 0.01": train_config(steps=1, optimizer={"lr": 0.01}),
        "its gate is": train_config(steps=1, objective={"gate": "G4"}),
        "its objective.shuffle is false, not true": train_config(steps=1, objective={"shuffle": True}),
        "its precision is fp32, not bf16": train_config(steps=1, engine={"precision": "bf16"}),
        "changed: teacher": train_config(steps=1, pair={"teacher": str(tiny.teacher)}),
        "not a run of this command": parse_config(TeachConfig, teaching),
    }
    for why, other in others.items():
        with pytest.raises(UsageError, match="output: this folder holds another run") as caught:
            teach(other) if isinstance(other, TeachConfig) else train(other)
        assert why in caught.value.why
        assert caught.value.exit_code == 2
    assert {p: p.stat().st_mtime_ns for p in config.output.rglob("*") if p.name != ".lock"} == stamps


def test_bfloat16_follows_float32(train_config: Make, synthetic: Task, tmp_path: Path) -> None:
    runs = {}
    for precision in ("fp32", "bf16"):
        # the right answers, so that both learn from the same tokens
        engine, rollout = {"precision": precision}, {"from": {"gold": 1.0}}
        config = train_config(engine=engine, rollout=rollout, steps=4, output=str(tmp_path / precision))
        summary = train(config)
        runs[precision] = [record["loss"] for record in read(config.output / "metrics.jsonl")]
    assert runs["bf16"] == pytest.approx(runs["fp32"], rel=0.02)
    assert runs["bf16"] != runs["fp32"]
    model = load_model(str(config.output / "model"))
    assert model.fingerprint() == summary["fingerprint"]
    assert {p.dtype for p in weights(model).values()} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in weights(model).values())
    assert_predicts_as_recorded(config.output, synthetic, dtype=torch.bfloat16)


def test_lora(train_config: Make, tiny: TinyPair, synthetic: Task) -> None:
    config = train_config(pair={"lora": {"r": 4, "alpha": 8.0}}, optimizer={"lr": 0.02}, steps=6)
    train(config)
    records = read(config.output / "metrics.jsonl")
    assert_finite(records)
    assert records[-1]["loss"] < records[0]["loss"]
    folder = config.output / "model"
    assert not list(folder.glob("adapter*"))
    model, base = load_model(str(folder)), load_model(str(tiny.student))
    assert set(weights(model)) == set(weights(base))
    changed = {name for name, p in weights(model).items() if not torch.equal(p, weights(base)[name])}
    assert changed
    assert all("_proj" in name for name in changed)  # embeddings and norms have no adapters
    assert_predicts_as_recorded(config.output, synthetic)


def test_top_k_of_the_teacher(train_config: Make, tmp_path: Path) -> None:
    more: dict[str, Any] = {"objective": {"support": "bucket"}, "evaluation": {"final": []}}
    more["teacher"] = {"payload": "top_k", "k": 16}
    config = train_config(**more)
    train(config)
    records = read(config.output / "metrics.jsonl")
    assert_finite(records)
    assert all(0.1 < record["tail_mass"] < 1 for record in records)  # an untrained student knows none of the sixteen
    assert records[0]["forward_kl"] > 1
    # a cache that knows everything gives the same run
    again = train_config(**more, output=str(tmp_path / "again"))
    train(again)
    assert (again.output / "metrics.jsonl").read_bytes() == (config.output / "metrics.jsonl").read_bytes()
    assert all(timing["cache_misses"] == 0 for timing in read(again.output / "timings.jsonl"))


def test_shuffled_lam(train_config: Make) -> None:
    objective = {"gate": [1.5, -1.0, 0.3, 2.5]}
    common = {"steps": 3, "evaluation": {"final": []}}
    own = train_config(objective=objective, **common)
    made = {}
    for name, seed in (("one", 42), ("two", 42), ("three", 7)):
        settings = train_config(
            objective={**objective, "shuffle": True}, seed=seed, output=f"{own.output}-{name}", **common
        )
        made[name] = (train(settings), read(settings.output / "metrics.jsonl"), read(settings.output / "tokens.jsonl"))
    plain, records = train(own), read(own.output / "metrics.jsonl")
    (summary, shuffled, tokens), again, other = made.values()
    assert again == (summary, shuffled, tokens)
    assert other[0]["fingerprint"] != summary["fingerprint"] != plain["fingerprint"]
    # The first step has the same responses, and therefore the same λ on other tokens.
    for name in ("lam_mean", "lam_sd", "lam_hist", "lam_saturated", "h", "gap", "reverse_kl", "response_length"):
        assert shuffled[0][name] == records[0][name], name
    assert shuffled[0]["loss"] != records[0]["loss"]
    assert [record["kappa_share"] for record in shuffled] == [0.0, None, 0.0]
    assert records[0]["kappa_share"] > 1e-3
    # What is recorded is what was applied.
    for line in tokens:
        values = line["values"]
        names = ("lam", "reverse_kl", "forward_kl", "loss")
        for lam, reverse, forward, loss in zip(*(values[name] for name in names), strict=True):
            assert loss == pytest.approx(lam * reverse + (1 - lam) * forward, rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_without_its_model(train_config: Make, precision: str) -> None:
    engine = {"precision": precision}
    config = train_config(engine=engine)
    with_model = train(config)
    config = train_config(engine=engine, checkpoint={"model": False}, output=f"{config.output}-without")
    summary = train(config)
    assert summary == {**with_model, "model": None}
    assert json.loads((config.output / "summary.json").read_text()) == summary
    assert summary["fingerprint"] == load_model(str(train_config().output / "model")).fingerprint()
    assert not (config.output / "model").exists()
    assert (config.output / "done").exists()
    listener = Listener()
    assert train(config.model_copy(update={"checkpoint": train_config().checkpoint}), listener) == summary
    assert any("its model was not kept" in note for note in listener.notes)
    assert listener.steps == []


def test_records_of_tokens_look_at_few_logits_at_a_time(
    train_config: Make, student: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a vocabulary of 152k the logits of all tokens, and what is made of them, would take 25 GB."""
    found, most, logits = [], [], DistillationLoss.logits

    def counted(*args: Any) -> Any:
        both = logits(*args)
        most.append(len(both[0]))
        return both

    monkeypatch.setattr(DistillationLoss, "logits", counted)
    for name, tokens in (("all", 1000), ("few", 2)):
        config = train_config(steps=1, output=str(tmp_path / name), evaluation={"final": []})
        monkeypatch.setattr("gatespace.training.metrics.LOGITS_BYTES", 4 * tokens * student.vocab_size)
        train(config)
        found.append((read(config.output / "metrics.jsonl"), read(config.output / "tokens.jsonl")))
    assert most[0] > 2 == max(most[1:])
    assert sum(most[1:]) == most[0]
    whole, parts = ([value for line in lines for top in line["student_top"] for _, value in top] for _, lines in found)
    assert parts == pytest.approx(whole, rel=1e-4)
    for name in ("kappa_share", "student_entropy_nats", "teacher_entropy_nats", "teacher_entropy_share"):
        shares = [metrics[0].pop(name) for metrics, _ in found]
        assert shares[0] == pytest.approx(shares[1], rel=1e-3)
    assert found[0][0] == found[1][0]


def test_lam_over_the_run_is_that_of_its_records(train_config: Make) -> None:
    config = train_config(steps=4, objective={"gate": [1.5, -1.0, 0.3, 2.5]}, evaluation={"final": []})
    run = train(config)["run"]
    records = read(config.output / "metrics.jsonl")
    tokens = sum(record["tokens"] for record in records)
    mean = sum(record["tokens"] * record["lam_mean"] for record in records) / tokens
    squares = sum(r["tokens"] * (r["lam_sd"] ** 2 + (r["lam_mean"] - mean) ** 2) for r in records)
    assert run["lam_sd"] == pytest.approx(math.sqrt(squares / tokens), rel=1e-12)
    config = train_config(steps=1, batch_size=2, output=f"{config.output}-one", evaluation={"final": []})
    run = train(config)["run"]  # all tokens of this one are written down, to six digits
    lines = [line["values"] for line in read(config.output / "tokens.jsonl")]
    lam, rkl = ([value for line in lines for value in line[name]] for name in ("lam", "reverse_kl"))
    assert len(lam) == run["tokens"]
    weighted = sum(a * b for a, b in zip(lam, rkl, strict=True)) / sum(rkl)
    assert run["lam_rkl_mean"] == pytest.approx(weighted, rel=1e-5)
    assert run["lam_rkl_mean"] != pytest.approx(run["lam_mean"], rel=1e-3)


# ---------------------------------------------------------------------------------------------------- failure


def test_numbers_that_explode_stop_the_run(train_config: Make, tiny: TinyPair) -> None:
    config = train_config(optimizer={"lr": 1e30}, steps=5, checkpoint={"every": 1})
    with pytest.raises(RunError, match=r"step 2 failed: .*not finite") as caught:
        train(config)
    assert caught.value.exit_code == 1
    assert "failed-step-2.json" in caught.value.why
    folder = config.output
    assert not (folder / "done").exists()
    assert not (folder / "summary.json").exists()
    assert not (folder / "model").exists()
    assert [record["step"] for record in read(folder / "metrics.jsonl")] == [1]
    failed = json.loads((folder / "failed-step-2.json").read_text())
    assert failed["step"] == 2
    assert "not finite" in failed["error"]
    assert len(failed["rows"]) == 6
    assert all(set(row) == {"index", "text", "gold", "response"} for row in failed["rows"])
    kept = checkpoint.latest(folder / "checkpoints")  # the weights before the failure
    assert kept is not None
    assert kept.step == 1
    assert all(bool(tensor.isfinite().all()) for tensor in kept.tensors.values())
    with pytest.raises(RunError, match="step 2 failed"):  # nothing about it depends on chance
        train(config)
    assert json.loads((folder / "failed-step-2.json").read_text()) == failed


@pytest.fixture
def poisoned(tiny: TinyPair, tmp_path: Path) -> Path:
    """A model that is sound but for one word, which some texts have."""
    model = load_model(str(tiny.teacher))
    (word,) = model.tokenizer.encode(" lamp", add_special_tokens=False)
    with torch.no_grad():
        model.network.get_input_embeddings().weight[word, 3] = math.nan
    model.save(tmp_path / "poisoned")
    return tmp_path / "poisoned"


def test_the_micro_batch_that_failed_is_saved(train_config: Make, poisoned: Path, synthetic: Task) -> None:
    config = train_config(pair={"student": str(poisoned)}, engine={"micro_tokens": 100}, batch_size=40)
    with pytest.raises(RunError, match=r"step 1 failed: .*not finite"):
        train(config)
    folder = config.output
    failed = json.loads((folder / "failed-step-1.json").read_text())
    texts = [row["text"] for row in failed["rows"]]
    # nothing after the micro-batch with the word was looked at, and it is there itself
    assert 3 < len(texts) < 40
    assert any("the lamp" in text for text in texts[-4:])
    assert not any("the lamp" in text for text in texts[:-4])
    assert all(row["gold"] in synthetic.labels for row in failed["rows"])
    assert len(failed["losses"]) > 0
    assert not (folder / "done").exists()


def test_teaching_stops_too(poisoned: Path, tmp_path: Path) -> None:
    settings = {
        "task": TASK,
        "model": str(poisoned),
        "steps": 4,
        "batch_size": 24,
        "engine": {"precision": "fp32"},
        "evaluation": {"every": 0},
        "output": str(tmp_path / "teach"),
    }
    with pytest.raises(RunError, match=r"step \d failed: the loss is not finite") as caught:
        teach(parse_config(TeachConfig, settings))
    assert caught.value.exit_code == 1
    done = len(read(tmp_path / "teach" / "metrics.jsonl"))
    failed = json.loads((tmp_path / "teach" / f"failed-step-{done + 1}.json").read_text())
    assert len(failed["rows"]) == 24
    assert any("the lamp" in row["text"] for row in failed["rows"])
    assert not (tmp_path / "teach" / "done").exists()


def test_a_model_that_is_not_finite_is_named(
    train_config: Make, poisoned: Path, student: Model, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"step 1 failed: .*teacher.*not finite"):
        train(train_config(pair={"teacher": str(poisoned)}, batch_size=40, teacher={"cache": None}))
    with torch.no_grad():
        student.network.model.norm.weight[0] = math.nan
    student.save(tmp_path / "broken")
    with pytest.raises(UsageError, match=r"pair\.student: .* computes numbers that are not finite"):
        train(train_config(pair={"student": str(tmp_path / "broken")}))
