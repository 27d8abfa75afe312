"""A client and a service in another process, which is killed, suspended, ended and restarted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gatespace.addons.service.client import RemoteTeacher
from gatespace.addons.service.wire import vocabulary_digest
from gatespace.models import Model, TinyPair
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import Scores, TeacherAwayError

from .raw_client import PROMPTS, RESPONSES, spec
from .services import Nursery, Service
from .test_client import assert_same


@pytest.fixture(scope="module")
def wanted(model: Model) -> Scores:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return LocalTeacher(model, spec(model)).score(PROMPTS, RESPONSES)
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def nursery(shared_place: Path) -> Iterator[Nursery]:
    found = Nursery(shared_place / "cache")
    yield found
    found.close()


@pytest.fixture
def service(nursery: Nursery, tiny: TinyPair) -> Iterator[Service]:
    found = nursery.start(tiny.teacher)
    yield found
    found.end()


@pytest.fixture
def connect(model: Model) -> Iterator[Callable[..., tuple[RemoteTeacher, list[str]]]]:
    made: list[RemoteTeacher] = []

    def make(service: Service, *, timeout: float = 1.0, patience: float = 600.0) -> tuple[RemoteTeacher, list[str]]:
        notes: list[str] = []
        made.append(
            RemoteTeacher(
                service.address,
                spec(model),
                tokenizer_digest=vocabulary_digest(model.tokenizer.get_vocab()),
                timeout=timeout,
                patience=patience,
                report=notes.append,
            )
        )
        return made[-1], notes

    yield make
    for teacher in made:
        teacher.close()


Connect = Callable[..., tuple[RemoteTeacher, list[str]]]


@pytest.mark.slow
def test_killed_again_and_again(
    nursery: Nursery, service: Service, tiny: TinyPair, wanted: Scores, connect: Connect
) -> None:
    """Under questions of two clients, at moments that nobody chooses."""
    services, over = [service], threading.Event()
    found: list[Scores] = []
    broken: list[BaseException] = []

    def work() -> None:
        try:
            remote, _ = connect(service)
            while not over.is_set():
                waiting = [remote.ask(PROMPTS[place : place + 5], RESPONSES[place : place + 5]) for place in (0, 5)]
                halves = [one() for one in waiting]
                whole = torch.cat([half.payload for half in halves], 1)  # type: ignore[arg-type, misc]
                found.append(Scores(whole, halves[0].head))
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for pause in (0.5, 0.2, 0.35, 0.05):
        over.wait(pause)
        services[-1].kill()
        services.append(nursery.start(tiny.teacher, service.port))
    answered = len(found)
    while len(found) < answered + 4 and not broken:
        over.wait(0.05)
    over.set()
    for thread in threads:
        thread.join(600)
    services[-1].end()
    assert not broken, broken
    for scores in found:
        assert_same(scores, wanted)


def test_ended_in_good_order(
    nursery: Nursery, service: Service, tiny: TinyPair, wanted: Scores, connect: Connect
) -> None:
    """SIGTERM: what was asked is answered, the rest by the successor."""
    remote, notes = connect(service)
    assert_same(remote.score(PROMPTS, RESPONSES), wanted)
    waiting = remote.ask(PROMPTS, RESPONSES)
    service.signal(signal.SIGTERM)
    service.wait()
    successor = nursery.start(tiny.teacher, service.port)
    try:
        assert_same(waiting(), wanted)
        assert_same(remote.score(PROMPTS, RESPONSES), wanted)
    finally:
        successor.end()
    assert sum("was restarted" in note for note in notes) == 1


def test_stopped_for_a_while(service: Service, wanted: Scores, connect: Connect) -> None:
    remote, notes = connect(service, timeout=0.3)
    service.signal(signal.SIGSTOP)
    threading.Timer(1.0, service.signal, [signal.SIGCONT]).start()
    assert_same(remote.score(PROMPTS, RESPONSES), wanted)
    assert any("has not replied for 0.3 s; retrying" in note for note in notes)
    assert any("has replied after" in note for note in notes)


def test_gone_for_good(service: Service, connect: Connect) -> None:
    remote, _ = connect(service, timeout=0.3, patience=3.0)
    service.kill()
    with pytest.raises(TeacherAwayError, match="has not replied for 3 s"):
        remote.score(PROMPTS, RESPONSES)


def test_not_there_yet(nursery: Nursery, service: Service, tiny: TinyPair, wanted: Scores, connect: Connect) -> None:
    """A client that is started before its teacher."""
    service.kill()
    started: list[Service] = []
    thread = threading.Timer(0.5, lambda: started.append(nursery.start(tiny.teacher, service.port)))
    thread.start()
    remote, _ = connect(service, timeout=0.4)
    thread.join()
    assert_same(remote.score(PROMPTS, RESPONSES), wanted)
    started[0].end()


def test_a_client_that_vanishes_leaves_no_trace(service: Service, wanted: Scores, connect: Connect) -> None:
    for _ in range(3):
        vanishing, _ = connect(service)
        vanishing.ask(PROMPTS, RESPONSES)
        vanishing._connection._closed = True
        vanishing._connection._socket.close(linger=0)  # without a Bye, with a request pending
        remote, notes = connect(service)
        assert_same(remote.score(PROMPTS, RESPONSES), wanted)
        assert notes == []
