"""Alarms of runs that really collapse: what raises them, thresholds, memory, and an end with a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gatespace.config import TrainConfig, parse_config
from gatespace.config.sections import ALARMS
from gatespace.errors import UsageError
from gatespace.evaluation import measure
from gatespace.files import read
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import TinyPair, load_model
from gatespace.training import checkpoint
from gatespace.training.metrics import agreement, repeated
from gatespace.training.progress import Silent
from gatespace.training.train import train
from gatespace.training.warnings import CERTAIN, AlarmError, Alarms

Make = Callable[..., TrainConfig]
Records = list[dict[str, Any]]


class Listener(Silent):
    """Keeps warnings and steps."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.steps: list[int] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, step: int, steps: int, record: Any, timing: Any) -> None:
        self.steps.append(step)


@pytest.fixture
def collapsing(train_config: Make, taught: Path) -> Make:
    """A student that knows the task as well as its teacher does, and a learning rate that destroys it."""

    def make(**settings: Any) -> TrainConfig:
        usual: dict[str, Any] = {
            "pair": {"student": str(taught / "model")},
            "steps": 6,
            "optimizer": {"lr": 0.3},
            "rollout": {"max_new_tokens": 16},
            "trace": {"tokens_every": 1},
            "alarms": {"window": 1, "repeated": 0.02},
        }
        return train_config(
            **{
                name: {**usual.get(name, {}), **value} if isinstance(value, dict) else value
                for name, value in {**usual, **settings}.items()
            }
        )

    return make


def raised(config: TrainConfig, records: Records) -> list[tuple[int, str]]:
    """Step and name of the alarms of some records."""
    alarms = Alarms(config)
    return [(alarm.step, alarm.alarm) for record in records for alarm in alarms.see(record)]


def oracle(config: TrainConfig, records: Records) -> list[tuple[int, str]]:
    """The same from all records at once, by the words of the documentation."""

    def mean(rows: Records, name: str) -> float | None:
        known = [row[name] for row in rows if row[name] is not None]
        return math.fsum(known) / len(known) if known else None

    first = records[: config.alarms.window]

    def badness(name: str, rows: Records) -> float | None:
        """Larger is worse."""
        ended, length = mean(rows, "ended"), mean(rows, "response_length")
        ours, theirs = mean(rows, "student_entropy_nats"), mean(rows, "teacher_entropy_nats")
        assert ended is not None
        assert length is not None
        if name == "truncated":
            return 1 - ended
        if name == "length":
            factor = length / mean(first, "response_length")  # type: ignore[operator]
            return max(factor, 1 / factor) if mean(first, "ended") >= 0.5 else factor  # type: ignore[operator]
        if name == "entropy":
            return None if ours is None or theirs is None or theirs < CERTAIN else -ours / theirs
        if name == "teacher":
            h, share = mean(rows, "h"), mean(rows, "teacher_entropy_share")
            return h if h is None or share is None else min(h, share)
        columns = {"overlap": "top_k_overlap", "repeated": "repeated_ngrams", "legal": "legal_answers"}
        value = mean(rows, columns[name])
        return value if name == "repeated" or value is None else -value

    found = []
    for name in ALARMS:
        limit = getattr(config.alarms, name)
        span = config.alarms.window
        if name in ("entropy", "overlap", "legal"):
            limit = -limit if limit is not None else None
        if name in ("entropy", "overlap", "teacher"):
            span = max(span, config.trace.tokens_every)
        on = False
        for end in range(1 if name == "teacher" else 2 * span, len(records) + 1):
            now = badness(name, records[max(0, end - span) : end])
            before = now if name == "teacher" else badness(name, records[end - 2 * span : end - span])
            if limit is None or now is None or before is None:
                continue
            if now < limit:
                on = False
            elif not on and now >= before:
                on = True
                found.append((end, name))
    return sorted(found)


def test_a_run_that_collapses_raises_alarms(collapsing: Make) -> None:
    config, listener = collapsing(), Listener()
    summary = train(config, listener)
    records, alarms = read(config.output / "metrics.jsonl"), read(config.output / "alarms.jsonl")
    found = {alarm["alarm"] for alarm in alarms}
    assert found >= {"truncated", "length", "overlap", "repeated", "legal"}, found
    assert [(alarm["step"], alarm["alarm"]) for alarm in alarms] == raised(config, records)
    assert sorted((alarm["step"], alarm["alarm"]) for alarm in alarms) == oracle(config, records)
    assert records[0]["legal_answers"] > 0.5 > records[-1]["legal_answers"]
    # each on the console, with what helps; in the summary, and below the results those that are still on
    assert len(listener.warnings) == len(alarms)
    for text, alarm in zip(listener.warnings, alarms, strict=True):
        assert text == f"alarm {alarm['alarm']}: {alarm['seen']} {alarm['helps']}"
        assert "sually" in alarm["helps"]
    assert [{**one, "on": None} for one in summary["alarms"]] == [{**one, "on": None} for one in alarms]
    on = [one for one in summary["alarms"] if one["on"]]
    assert {one["alarm"] for one in on} == set(Alarms(config, records).on)
    assert [text for text in summary["warnings"] if text.startswith("alarm ")] != []
    assert json.loads((config.output / "summary.json").read_text())["alarms"] == summary["alarms"]

    # thresholds: what was seen raises an alarm, a hair beyond it does not, and null switches one off
    worst = {
        "truncated": max(1 - record["ended"] for record in records[1:]),
        "repeated": max(record["repeated_ngrams"] for record in records[1:]),
        "overlap": min(record["top_k_overlap"] for record in records[1:]),
        "legal": min(record["legal_answers"] for record in records[1:]),
    }
    for name, value in worst.items():
        beyond = math.nextafter(value, 2 if name in ("truncated", "repeated") else -1)
        for limit, wanted in ((value, True), (beyond, False), (None, False)):
            if limit is None or 0 <= limit <= 1:
                changed = collapsing(alarms={name: limit})
                assert (name in dict(map(reversed, raised(changed, records)))) == wanted, (name, limit)  # type: ignore[call-overload]

    # no alarm has a part in the numbers
    quiet = collapsing(
        alarms=dict.fromkeys(ALARMS),
        output=str(config.output.parent / "quiet"),
    )
    assert train(quiet)["alarms"] == []
    assert (quiet.output / "metrics.jsonl").read_bytes() == (config.output / "metrics.jsonl").read_bytes()
    assert not (quiet.output / "alarms.jsonl").exists()


def test_a_student_that_is_certain_where_its_teacher_is_not(train_config: Make, taught: Path, tiny: TinyPair) -> None:
    pair = {"student": str(taught / "model"), "teacher": str(tiny.teacher)}
    config = train_config(pair=pair, steps=8, optimizer={"lr": 1e-6}, alarms={"window": 2}, evaluation={"final": []})
    train(config)
    records, alarms = read(config.output / "metrics.jsonl"), read(config.output / "alarms.jsonl")
    assert {"teacher", "entropy", "overlap"} <= {alarm["alarm"] for alarm in alarms}
    assert sorted((alarm["step"], alarm["alarm"]) for alarm in alarms) == oracle(config, records)
    (entropy,) = (alarm for alarm in alarms if alarm["alarm"] == "entropy")
    measured = [record for record in records if record["student_entropy_nats"] is not None]
    assert [record["step"] for record in measured] == [1, 3, 5, 7]
    last = [record for record in measured if record["step"] <= entropy["step"]][-1]
    assert entropy["seen"].startswith(f"Step {last['step']}: ")  # what was measured, not the window
    assert entropy["value"] == last["student_entropy_nats"] / last["teacher_entropy_nats"] < 0.1


def test_a_student_that_learns_is_left_in_peace(train_config: Make, taught: Path) -> None:
    config = train_config(
        pair={"student": str(taught / "model")}, steps=6, optimizer={"lr": 1e-5}, alarms={"window": 1}
    )
    summary = train(config)
    assert summary["alarms"] == []
    assert not any(text.startswith("alarm") for text in summary["warnings"])


def test_twenty_steps_that_learn_raise_no_false_alarm(train_config: Make) -> None:
    """Of steps 1 and 11 alone, neither of which has a legal answer, it looked like a student that learns nothing."""
    settings: dict[str, Any] = {"steps": 20, "batch_size": 4, "seed": 4, "optimizer": {"lr": 3e-3}}
    config = train_config(trace={"tokens_every": 10}, **settings)
    summary = train(config)
    legal = [record["legal_answers"] for record in read(config.output / "metrics.jsonl")]
    assert legal[0] == legal[10] == 0
    assert None not in legal
    assert summary["evaluation"]["val"]["metrics"]["parse_failures"] == 0
    assert summary["alarms"] == []


def test_a_final_evaluation_withdraws_an_alarm(train_config: Make, taught: Path) -> None:
    """Responses sampled at a high temperature are often illegal, and greedy ones never."""
    notes: list[str] = []
    listener = Listener()
    listener.note = notes.append  # type: ignore[method-assign]
    pair, alarms = {"student": str(taught / "model")}, {"window": 1, "legal": 0.99}
    settings: dict[str, Any] = {"pair": pair, "steps": 4, "rollout": {"temperature": 1.5}, "optimizer": {"lr": 1e-6}}
    config = train_config(alarms=alarms, **settings)
    summary = train(config, listener)
    (raised_alarm,) = summary["alarms"]
    counted = [record["legal_answers"] for record in read(config.output / "metrics.jsonl")][raised_alarm["step"] - 1]
    assert raised_alarm["seen"] == (
        f"Step {raised_alarm['step']}: {round(6 * counted)} of 6 responses had a legal answer."
    )
    assert not raised_alarm["on"]
    assert not any(text.startswith("alarm") for text in summary["warnings"])
    assert notes[-1] == "alarm legal withdrawn: 12 of 12 final answers are legal"

    # one that the evaluation bears out stays
    on = Alarms(config, read(config.output / "metrics.jsonl"))
    assert on.withdraw([measure(["a", "b"], ["a", None], ("a", "b"))]) == ""
    assert "legal" in on.on


GOOD: dict[str, Any] = {
    "rows": 4,
    "h": 0.3,
    "teacher_entropy_share": 0.1,
    "ended": 1.0,
    "response_length": 5.0,
    "repeated_ngrams": 0.0,
    "legal_answers": 1.0,
    "student_entropy_nats": 0.5,
    "teacher_entropy_nats": 0.5,
    "top_k_overlap": 0.8,
}


@pytest.mark.parametrize(
    "name, bad, harmless",
    [
        ("teacher", {"h": 0.99, "teacher_entropy_share": 0.95}, {"h": 0.99}),
        ("truncated", {"ended": 0.4}, {"ended": 0.6}),
        ("length", {"response_length": 20.0}, {"response_length": 19.0}),
        ("entropy", {"student_entropy_nats": 0.04}, {"student_entropy_nats": 0.04, "teacher_entropy_nats": 0.04}),
        ("overlap", {"top_k_overlap": 0.25}, {"top_k_overlap": 0.35}),
        ("repeated", {"repeated_ngrams": 0.35}, {"repeated_ngrams": 0.25}),
        ("legal", {"legal_answers": 0.25}, {"legal_answers": 0.5}),
    ],
)
def test_each_alarm_fires_and_is_silent(
    train_config: Make, name: str, bad: dict[str, float], harmless: dict[str, float]
) -> None:
    config = train_config(alarms={"window": 2})
    steps = [{"step": step, **GOOD, **(bad if step > 2 else {})} for step in range(1, 7)]
    assert [alarm for _, alarm in raised(config, steps)] == [name]
    steps = [{"step": step, **GOOD, **(harmless if step > 2 else {})} for step in range(1, 7)]
    assert raised(config, steps) == []


def test_a_teacher_that_is_uniform(train_config: Make, taught: Path, tmp_path: Path) -> None:
    def changed(name: str, change: Callable[[torch.nn.Module], None]) -> str:
        model = load_model(str(taught / "model"))
        with torch.no_grad():
            change(model.network)
        for part in (model.network, model.tokenizer):
            part.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    def zero(network: torch.nn.Module) -> None:
        for weights in network.parameters():
            weights.zero_()

    def one_of_twelve(network: Any) -> None:
        """At every token uncertain between the same twelve, as a teacher of random digits has to be."""
        for name, weights in network.named_parameters():
            weights.fill_(1.0 if "norm" in name else 0.0)
        for layer in (network.get_input_embeddings(), network.get_output_embeddings()):
            layer.weight.fill_(0.01)
            layer.weight[20:32] = 0.2

    config = train_config(pair={"teacher": changed("zero", zero)}, steps=2)
    listener = Listener()
    summary = train(config, listener)
    (alarm,) = summary["alarms"]
    assert (alarm["alarm"], alarm["step"], alarm["on"], round(alarm["value"], 6)) == ("teacher", 1, True, 1)
    assert "nearly uniform (mean h 1.00" in listener.warnings[0]
    assert listener.warnings[0] in summary["warnings"]
    with pytest.raises(AlarmError):
        train(
            train_config(
                pair={"teacher": str(tmp_path / "zero")},
                alarms={"stop_on": ["teacher"]},
                output=str(tmp_path / "stopped"),
            )
        )

    uncertain = train_config(pair={"teacher": changed("twelve", one_of_twelve)}, steps=2, output=str(tmp_path / "two"))
    assert train(uncertain)["alarms"] == []
    records = read(uncertain.output / "metrics.jsonl")
    assert min(record["h"] for record in records) > 0.99
    vocabulary = load_model(str(taught / "model")).vocab_size
    assert records[0]["teacher_entropy_share"] == pytest.approx(math.log(12) / math.log(vocabulary), rel=0.01)


def test_what_is_beyond_a_threshold_and_gets_better_raises_no_alarm(train_config: Make) -> None:
    config = train_config(alarms={"window": 2, "truncated": 0.5, "legal": None, "overlap": None})

    def steps(*ended: float) -> Records:
        empty = dict.fromkeys(("repeated_ngrams", "student_entropy_nats", "teacher_entropy_nats"))
        return [
            {"step": step, "ended": share, "response_length": 5.0, **empty} for step, share in enumerate(ended, start=1)
        ]

    assert raised(config, steps(0, 0, 0.1, 0.1, 0.2, 0.2)) == []
    assert raised(config, steps(0, 0, 0, 0, 0, 0)) == [(4, "truncated")]
    # raised once, and again only after it was within the threshold
    assert raised(config, steps(0, 0, 0, 0, 1, 1, 0, 0, 0, 0)) == [(4, "truncated"), (7, "truncated")]
    whole = steps(0, 0, 0, 0, 1, 1, 0, 0, 0, 0)
    for cut in range(len(whole)):
        resumed = Alarms(config, whole[:cut])
        after = [(alarm.step, alarm.alarm) for record in whole[cut:] for alarm in resumed.see(record)]
        assert after == [(step, name) for step, name in raised(config, whole) if step > cut]


def test_an_alarm_ends_a_run_with_a_checkpoint(collapsing: Make) -> None:
    stopping, names = collapsing(alarms={"stop_on": ["legal"]}), ["overlap", "legal"]
    listener = Listener()
    with pytest.raises(AlarmError) as error:
        train(stopping, listener)
    step = dict(map(reversed, raised(stopping, read(stopping.output / "metrics.jsonl"))))["legal"]  # type: ignore[call-overload]
    assert error.value.exit_code == 3
    assert f"after step {step} of 6" in error.value.what
    assert "alarms.stop_on" in error.value.instead
    assert "legal answer" in str(error.value.got)
    assert listener.steps == list(range(1, step + 1))
    found = checkpoint.latest(stopping.output / "checkpoints")
    assert found is not None
    assert found.step == step < 6
    assert not (stopping.output / "done").exists()

    # the same settings end it again, before any step; others let it go on, to the numbers of a run that never stopped
    with pytest.raises(AlarmError):
        train(collapsing(alarms={"stop_on": names}), again := Listener())
    assert again.steps == []
    train(collapsing(alarms={"stop_on": []}), again)
    assert again.steps == list(range(step + 1, 7))
    straight = collapsing(output=str(stopping.output.parent / "straight"))
    train(straight)
    for name in ("metrics.jsonl", "alarms.jsonl", "tokens.jsonl", "summary.json", "predictions-val.jsonl"):
        assert (stopping.output / name).read_bytes() == (straight.output / name).read_bytes(), name


def test_what_cannot_stop_a_run_is_refused(train_config: Make) -> None:
    with pytest.raises(UsageError, match="legal is switched off"):
        train_config(alarms={"legal": None, "stop_on": ["legal"]})
    with pytest.raises(UsageError, match=r"overlap is measured every trace\.tokens_every steps"):
        train_config(alarms={"stop_on": ["overlap"]}, trace={"tokens_every": 0})
    train_config(alarms={"stop_on": ["legal", "teacher"]}, trace={"tokens_every": 0})
    with pytest.raises(UsageError, match=r"alarms\.stop_on"):
        train_config(alarms={"stop_on": ["loss"]})


# ---------------------------------------------------------------------------------------------------- the numbers


def test_agreement_is_that_of_float64() -> None:
    draw = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(5, 700, generator=draw) * 3 for _ in range(2))
    found = agreement(student, teacher, 8)

    def entropy(p: torch.Tensor) -> list[float]:
        return [-math.fsum(x * math.log(x) for x in row if x > 0) for row in p.tolist()]

    both = [logits.double().softmax(-1) for logits in (student, teacher)]
    assert found["student_entropy_nats"] == pytest.approx(entropy(both[0]), rel=1e-5)
    assert found["teacher_entropy_nats"] == pytest.approx(entropy(both[1]), rel=1e-5)
    tops = [[set(sorted(range(700), key=lambda i, row=row: -row[i])[:8]) for row in p.tolist()] for p in both]
    wanted = [len(ours & theirs) / 8 for ours, theirs in zip(*tops, strict=True)]
    assert found["top_k_overlap"] == wanted
    assert agreement(student, student, 8)["top_k_overlap"] == [1.0] * 5

    # a teacher that is known by its top 16 has one outcome for the rest, and as many likeliest tokens
    p, ids = both[1].topk(16, dim=-1)
    known = agreement(student, TeacherTopK(ids[None], p.log()[None]), 8)
    rest = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
    assert known["teacher_entropy_nats"] == pytest.approx(entropy(rest), rel=1e-9)
    spread = torch.cat([p, ((1 - p.sum(-1, keepdim=True)) / 684).expand(-1, 684)], -1)
    for shares, whole in ((found["teacher_entropy_share"], both[1]), (known["teacher_entropy_share"], spread)):
        assert shares == pytest.approx([nats / math.log(700) for nats in entropy(whole)], rel=1e-5)
    assert known["top_k_overlap"] == wanted
    few = agreement(student, TeacherTopK(ids[None, :, :4], p[:, :4].log()[None]), 8)["top_k_overlap"]
    assert few == [
        len(set(ours.topk(4).indices.tolist()) & set(theirs.tolist())) / 4
        for ours, theirs in zip(both[0], ids[:, :4], strict=True)
    ]
    # where probability is 0, nothing is added
    certain = agreement(torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, -math.inf]]), 1)
    assert certain["student_entropy_nats"] == [0.0]


def test_repeated_ngrams_are_counted() -> None:
    draw = torch.Generator().manual_seed(4)
    for length in (0, 3, 4, 5, 40, 200):
        response = torch.randint(0, 3, (length,), generator=draw).tolist()
        grams = [response[i : i + 4] for i in range(length - 3)]
        again = sum(gram in grams[:i] for i, gram in enumerate(grams))
        assert repeated(response) == pytest.approx(again / len(grams) if grams else 0.0)


def test_defaults_are_in_force(taught: Path) -> None:
    alarms = parse_config(TrainConfig, {"pair": {"teacher": "t"}}).alarms
    assert None not in (getattr(alarms, name) for name in ("truncated", "length", "entropy", "overlap", "repeated"))
    assert alarms.stop_on == ()
