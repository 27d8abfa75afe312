"""Runs whose teacher is a service: the numbers of one in this process, whatever happens to the service."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gatespace.addons.service.client import RemoteTeacher
from gatespace.addons.service.wire import vocabulary_digest
from gatespace.cli.app import app
from gatespace.config import TrainConfig, parse_config
from gatespace.errors import RunError, UsageError
from gatespace.files import read
from gatespace.models import Model, TinyPair, build_tiny
from gatespace.tasks import synthetic_task
from gatespace.teacher.scores import ScoreSpec, TeacherAwayError
from gatespace.training.train import train
from tests.addons.service.services import Nursery, Service
from tests.training.conftest import Listener
from tests.training.test_resume import assert_same_numbers

Make = Callable[..., TrainConfig]
PAYLOADS: dict[str, dict[str, Any]] = {
    "hidden": {"teacher": {"payload": "hidden", "cache": None}},
    "top_k": {"teacher": {"payload": "top_k", "k": 12, "cache": None}, "objective": {"support": "bucket"}},
}


class Eventful(Listener):
    """Does something after a step."""

    def __init__(self, **events: Callable[[], None]) -> None:
        super().__init__()
        self._events = events

    def step(self, step: int, steps: int, record: Any, timing: Any) -> None:
        super().step(step, steps, record, timing)
        if f"step{step}" in self._events:
            self._events[f"step{step}"]()


@pytest.fixture(scope="module")
def nursery(shared_place: Path) -> Iterator[Nursery]:
    found = Nursery(shared_place / "cache")
    yield found
    found.close()


@pytest.fixture
def service(nursery: Nursery, taught: Path) -> Iterator[Service]:
    found = nursery.start(taught / "model")
    yield found
    found.end()


@pytest.fixture
def make(train_config: Make, tmp_path: Path) -> Make:
    """A run of six steps in several micro-batches; with an address its teacher is there."""

    def build(name: str, service: Service | None = None, **settings: Any) -> TrainConfig:
        teacher: dict[str, Any] = settings.pop("teacher", {})
        if service is not None:
            teacher = {**teacher, "options": {"timeout": 1.0, "patience": 600.0, **teacher.get("options", {})}}
        whole: dict[str, Any] = {
            "steps": 6,
            "engine": {"micro_tokens": 150},
            "checkpoint": {"every": 4},
            "output": str(tmp_path / name),
            "teacher": teacher,
            **settings,
        }
        if service is not None:
            whole["pair"] = {"teacher": service.address}
        return train_config(**whole)

    return build


# ---------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_remote_run_is_a_local_run(payload: str, make: Make, service: Service, student: Model) -> None:
    """To the byte, though somebody else asks the same service at the same time."""
    settings = PAYLOADS[payload]
    patient = {**settings, "teacher": {**settings["teacher"], "options": {"timeout": 60.0, "patience": 600.0}}}
    local, remote = make("local", **settings), make("remote", service, **patient)
    train(local)
    over = threading.Event()
    wrong: list[str] = []

    def other() -> None:
        digest = vocabulary_digest(student.tokenizer.get_vocab())
        spec = ScoreSpec((5, 6), 3, student.vocab_size, "top_k", 3)
        with RemoteTeacher(service.address, spec, tokenizer_digest=digest) as t:
            first = None
            while not over.is_set() and not wrong:
                found = t.score([[7, 8], [9]], [[10, 11], [12]]).payload.log_probs  # type: ignore[union-attr]
                first = found if first is None else first
                if not first.equal(found):
                    wrong.append("another answer")

    thread = threading.Thread(target=other)
    thread.start()
    listener = Listener()
    try:
        summary = train(remote, listener)
    finally:
        over.set()
        thread.join(600)
    assert not wrong
    assert_same_numbers(remote.output, local.output, but=("model/README.md",))  # it says where the teacher was
    assert summary["run"]["steps"] == 6
    assert listener.notes == []
    where = json.loads((remote.output / "environment.json").read_text())["teacher"]
    assert where["address"] == service.address
    assert where["model"].endswith("model")
    assert "teacher" not in json.loads((local.output / "environment.json").read_text())
    timings = read(remote.output / "timings.jsonl")
    assert all(timing["teacher_tokens"] > 0 for timing in timings)
    assert train(remote, listener) == summary
    assert "this run is done" in listener.notes[-1]


@pytest.mark.slow
@pytest.mark.parametrize("payload, staleness", [("hidden", 0), ("top_k", 0), ("hidden", 1)])
def test_a_killed_service_is_started_again(
    payload: str, staleness: int, make: Make, service: Service, nursery: Nursery, taught: Path
) -> None:
    settings = {**PAYLOADS[payload], "rollout": {"staleness": staleness}}
    local, remote = make("local", **settings), make("remote", service, **settings)
    train(local)
    services = [service]

    def again() -> None:
        services[-1].kill()
        services.append(nursery.start(taught / "model", services[-1].port))

    def in_the_middle() -> None:
        # It gets the next question and has no time to answer it.
        services[-1].signal(signal.SIGSTOP)
        threading.Timer(0.3, again).start()

    listener = Eventful(step1=again, step3=in_the_middle)
    try:
        train(remote, listener)
    finally:
        for one in services[1:]:
            one.end()
    assert len(services) == 3
    assert sum("was restarted; continuing" in note for note in listener.notes) == 2
    assert_same_numbers(remote.output, local.output, but=("model/README.md",))  # it says where the teacher was


@pytest.mark.slow
def test_a_slow_service_is_waited_for(make: Make, service: Service) -> None:
    local, remote = make("local"), make("remote", service, teacher={"options": {"timeout": 0.4}, "cache": None})
    train(local)

    class Patient(Eventful):
        def note(self, text: str) -> None:
            super().note(text)
            if "has not replied" in text:
                service.signal(signal.SIGCONT)

    listener = Patient(step2=lambda: service.signal(signal.SIGSTOP))
    train(remote, listener)
    assert any("has not replied for 0.4 s; retrying" in note for note in listener.notes)
    assert any("has replied after" in note for note in listener.notes)
    assert_same_numbers(remote.output, local.output, but=("model/README.md",))  # it says where the teacher was


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_service_that_stays_away_ends_the_run_which_can_go_on(
    staleness: int, make: Make, nursery: Nursery, taught: Path
) -> None:
    service = nursery.start(taught / "model")
    settings: dict[str, Any] = {"checkpoint": {"every": 50}, "rollout": {"staleness": staleness}}
    local = make("local", **settings)
    remote = make("remote", service, teacher={"options": {"timeout": 0.3, "patience": 3.0}, "cache": None}, **settings)
    train(local)
    listener = Eventful(step3=service.kill)
    with pytest.raises(TeacherAwayError, match="could not run: the teacher at") as caught:
        train(remote, listener)
    done = listener.steps[-1]
    assert done == 3 or (done == 4 and staleness == 1)  # what was asked ahead may have been answered before the end
    assert caught.value.what.startswith(f"step {done + 1} could not")
    assert caught.value.instead == f"check the teacher; the same command then resumes from step {done}"
    assert caught.value.exit_code == 1
    assert [path.name for path in (remote.output / "checkpoints").iterdir()] == [f"step-00000{done}"]
    with pytest.raises(TeacherAwayError):  # it is still away: nothing is lost
        train(remote, listener)
    service = nursery.start(taught / "model", service.port)
    listener = Listener()
    train(remote, listener)
    service.end()
    assert listener.steps == list(range(done + 1, 7))
    assert any(f"resuming from step {done} of 6" in note for note in listener.notes)
    assert_same_numbers(remote.output, local.output, but=("model/README.md",))  # it says where the teacher was


# ---------------------------------------------------------------------------------------------------- refusals


def test_a_service_with_another_tokenizer_is_refused(make: Make, nursery: Nursery, shared_place: Path) -> None:
    other = build_tiny(synthetic_task(seed=77, size=300))
    service = nursery.start(other.teacher)
    config = make("remote", service)
    with pytest.raises(UsageError, match=r"pair.teacher: .* do not have the same vocabulary"):
        train(config)
    service.end()
    assert not (config.output / "metrics.jsonl").exists()
    assert not (config.output / "identity.json").exists()


@pytest.mark.slow
def test_a_service_that_comes_back_with_another_model_is_refused(
    make: Make, nursery: Nursery, taught: Path, tiny: TinyPair
) -> None:
    service = nursery.start(taught / "model")
    local, remote = make("local"), make("remote", service, teacher={"cache": None})
    train(local)
    services = [service]

    def another() -> None:
        services[-1].kill()
        services.append(nursery.start(tiny.teacher, service.port))

    with pytest.raises(TeacherAwayError, match="has changed"):
        train(remote, Eventful(step2=another))
    with pytest.raises(UsageError, match="this folder holds another run") as caught:
        train(remote)
    assert "changed: teacher" in caught.value.why
    services[-1].kill()
    services.append(nursery.start(taught / "model", service.port))
    listener = Listener()
    train(remote, listener)
    services[-1].end()
    assert listener.steps == [3, 4, 5, 6]
    assert_same_numbers(remote.output, local.output, but=("model/README.md",))  # it says where the teacher was


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"pair": {"teacher": "zmq://nowhere"}}, "pair.teacher: is not an address"),
        ({"pair": {"teacher": "zmq://host:99999"}}, "pair.teacher: is not an address"),
        ({"pair": {"teacher": "tcp://127.0.0.1:5555"}}, "pair.teacher: there is no kind of teacher called tcp"),
        ({"pair": {"teacher": "t", "student": "zmq://h:1"}}, "pair.student: only a teacher can be a service"),
        ({"pair": {"teacher": "zmq://h:1", "teacher_revision": "v1"}}, "pair.teacher_revision: a teacher that is"),
        ({"pair": {"teacher": "zmq://h:1", "teacher_device": "cpu"}}, "pair.teacher_device: a teacher that is"),
        (
            {"pair": {"teacher": "zmq://h:1"}, "rollout": {"from": {"student": 0.5, "teacher": 0.5}}},
            "rollout.from.teacher: a teacher that is a service scores responses and",
        ),
        ({"pair": {"teacher": "t"}, "rollout": {"staleness": 2}}, "rollout.staleness: must be less than or equal to 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(TrainConfig, settings)
    assert words in str(caught.value)


def test_what_a_service_cannot_be_used_for(make: Make, service: Service) -> None:
    with pytest.raises(UsageError, match=r"teacher\.options: a client of a service with keys needs"):
        train(make("remote", service, teacher={"options": {"server_key": "x" * 40}}))
    outside = make("remote", Service(0, "zmq://192.0.2.1:5555"))
    with pytest.raises(UsageError, match=r"pair\.teacher: a teacher on another machine"):
        train(outside)


def test_commands_know_an_address(service: Service, tmp_path: Path) -> None:
    def call(*words: object) -> Any:
        return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [*map(str, words)])

    words = ["--student", "tiny", "--task", "synthetic", "--brief", "--steps", "2", "--batch-size", "4"]
    words += ["--set", "engine.precision=fp32", "--set", "engine.threads=1", "--set", "rollout.max_new_tokens=6"]
    words += ["--set", "evaluation.limit=8", "--output", str(tmp_path / "run")]
    dry = call("train", "--teacher", "zmq://127.0.0.1:1", *words, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.stderr
    estimate = json.loads(dry.stdout)["estimate"]
    assert any("the teacher at zmq://127.0.0.1:1 was not contacted" in note for note in estimate["notes"])
    assert "teacher_parameters" not in estimate
    assert "teacher_weights" not in estimate["memory_bytes"]
    assert "# note" in call("train", "--teacher", "zmq://127.0.0.1:1", *words, "--dry-run").stdout
    done = call("train", "--teacher", service.address, *words, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["run"]["steps"] == 2
    wrong = call("evaluate", service.address, "--task", "synthetic")
    assert wrong.exit_code != 0
    assert "scores responses and" in str(wrong.exception) + wrong.stderr
    taught = call("teach", "--model", service.address, "--task", "synthetic", "--output", tmp_path / "teach")
    assert "a teacher service, not a model" in str(taught.exception) + taught.stderr


def test_an_error_of_a_step_is_not_taken_for_a_teacher_that_is_away(make: Make, service: Service) -> None:
    config = make("remote", service, optimizer={"lr": 1e30, "clip": None})
    with pytest.raises(RunError, match=r"step \d failed") as caught:
        train(config)
    assert not isinstance(caught.value, TeacherAwayError)
    assert list(config.output.glob("failed-step-*.json"))
