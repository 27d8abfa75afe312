"""The front of the service: how much a connection may send before a message is whole, and how many there may be."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from gatespace.addons.service import front as front_module
from gatespace.addons.service import wire
from gatespace.addons.service.front import TOTAL, WINDOW, Front
from gatespace.addons.service.keys import client_keys, service_address, write_keys
from gatespace.config.address import Address
from gatespace.models import Model, TinyPair

from .raw_client import QUESTIONS, RawClient, until
from .services import Nursery, Service

MIB = 1 << 20
MOST = (TOTAL >> 20) + 64
"""MiB by which a service may grow: the limit of all connections, and what a message and its reply take."""
# What ZMTP 3 begins with: greeting, and the command READY of a DEALER.
SHAKEN = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
SHAKEN += b"\x04\x1c\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
LONG_MORE = b"\x03"


@pytest.fixture(scope="module")
def log(shared_place: Path) -> Iterator[IO[bytes]]:
    with (shared_place / "service.log").open("w+b", buffering=0) as file:
        yield file


@pytest.fixture(scope="module")
def nursery(shared_place: Path, log: IO[bytes]) -> Iterator[Nursery]:
    found = Nursery(shared_place / "cache", stderr=log)
    yield found
    found.close()


def served(service: Service, model: Model, keys: tuple[str, ...]) -> None:
    """A good client has its scores."""
    own = client_keys(keys[2], keys[3]) if keys else None
    with RawClient(service.address, model, keys=own) as client:
        for _ in range(600):  # "busy" asks a client to wait, and ours does
            reply = client.hello()
            if not (isinstance(reply, wire.Failure) and reply.retry):
                break
            time.sleep(0.1)
        assert isinstance(reply, wire.Welcome)
        client.score(QUESTIONS[:2])


@pytest.fixture(params=["plain", "keys"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """Files: the server's, those it allows; the client's, the server's public one."""
    if request.param == "plain":
        return ()
    own, other = write_keys(tmp_path / "server"), write_keys(tmp_path / "client")
    return str(own.secret), str(other.public), str(other.secret), str(own.public)


def test_an_endless_message_does_not_fill_the_memory(
    keys: tuple[str, ...], nursery: Nursery, log: IO[bytes], tiny: TinyPair, model: Model
) -> None:
    service = nursery.start(tiny.teacher, keys=keys[:2], stalled=0.3)
    place = service_address(service.address)
    served(service, model, keys)
    before = service.peak()
    # A message of 1 GiB, of frames that are allowed, before any greeting. The frames are one buffer.
    with RawClient(service.address, model, keys=client_keys(*keys[2:]) if keys else None) as attacker:
        events = attacker.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        frame = bytes(MIB)
        for _ in range(1024):
            attacker.socket.send(frame, zmq.SNDMORE, copy=False)
        attacker.socket.send(b"")
        served(service, model, keys)
        assert events.poll(600_000)
        assert recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED
        attacker.socket.disable_monitor()
    # And many connections with less than a window each.
    lines = []
    for _ in range(0 if keys else 60):
        line = socket.create_connection((place.host, place.port), timeout=600)
        lines.append(line)
        try:
            line.sendall(SHAKEN)
            for _ in range(3):
                line.sendall(LONG_MORE + struct.pack(">Q", MIB) + frame)
        except ConnectionError:
            continue
    served(service, model, keys)
    assert service.peak() - before < MOST
    for line in lines:
        line.close()
    os.lseek(log.fileno(), 0, os.SEEK_SET)
    assert b"127.0.0.1 was disconnected: 4 MiB of unfinished messages" in log.read()
    service.end()


def test_a_flood_of_greetings_does_not_fill_the_memory(nursery: Nursery, tiny: TinyPair, model: Model) -> None:
    service = nursery.start(tiny.teacher)
    served(service, model, ())
    before = service.peak()
    with RawClient(service.address, model) as attacker:
        vocabulary = wire.vocabulary_digest(model.tokenizer.get_vocab())
        for number in range(10_000):  # none of the replies is read
            hello = wire.Hello(number, f"{number:08d}", "x" * 200, vocabulary, 8, "hidden", 5, None)
            attacker.send(hello, [wire.ids_array([5])])
            if number % 1000 == 0:
                served(service, model, ())
    served(service, model, ())
    assert service.peak() - before < MOST
    service.end()


def test_no_file_handles(nursery: Nursery, log: IO[bytes], tiny: TinyPair, model: Model) -> None:
    service = nursery.start(tiny.teacher)
    served(service, model, ())
    hard = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)[1]

    def notes() -> int:
        os.lseek(log.fileno(), 0, os.SEEK_SET)
        return log.read().count(b"new connections have to wait: Too many open files")

    assert notes() == 0
    with RawClient(service.address, model) as early:
        assert isinstance(early.hello(), wire.Welcome)
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{service.pid}/fd")), hard))
        place = service_address(service.address)
        lines = [socket.create_connection((place.host, place.port), timeout=600) for _ in range(50)]
        until(notes)
        early.score(QUESTIONS[:1])
        with RawClient(service.address, model) as late:
            for line in lines:
                line.close()
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (hard, hard))
            assert isinstance(late.hello(), wire.Welcome)
            late.score(QUESTIONS[:1])
    assert notes() == 1
    service.end()


@pytest.fixture
def front() -> Iterator[tuple[Front, socket.socket, list[str]]]:
    """A front without ZeroMQ: the socket behind it is a plain one, for a test to look at."""
    notes: list[str] = []
    found = Front(Address("zmq", "127.0.0.1", 0), connections=4, report=notes.append)
    behind = socket.socket(socket.AF_UNIX)
    behind.bind(found.inner_address.removeprefix("ipc://"))
    behind.listen()
    behind.settimeout(600)
    found.start()
    yield found, behind, notes
    found.close()
    behind.close()


def test_it_pauses_where_there_are_no_handles(
    front: tuple[Front, socket.socket, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, behind, notes = front
    attempts: list[int] = []
    monkeypatch.setattr(front_module, "_PAUSE", 1e6)
    connect = Front._connect

    def failing(self: Front, outer: socket.socket) -> object:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return connect(self, outer)

    monkeypatch.setattr(Front, "_connect", failing)
    lines = [socket.create_connection(found.address, timeout=600) for _ in range(5)]
    until(lambda: found._resume is not None)
    for _ in range(3):  # turns of its loop
        found._wake()
    assert len(attempts) == 1
    for expected in (2, 3):
        until(lambda: found._resume is not None)
        found._resume = 0.0
        found._wake()
        until(lambda expected=expected: len(attempts) >= expected)
    behind.accept()[0].close()
    assert len(notes) == 1
    for line in lines:
        line.close()


def test_the_silent_make_room(front: tuple[Front, socket.socket, list[str]]) -> None:
    found, behind, _ = front
    lines, ends = [], []
    for _ in range(5):
        lines.append(socket.create_connection(found.address, timeout=600))
        ends.append(behind.accept()[0])
    assert lines[0].recv(1) == b""
    until(lambda: len(found._connections) == 4)
    lines[4].sendall(b"both ways")
    assert ends[4].recv(100) == b"both ways"
    ends[4].sendall(b"!")
    assert lines[4].recv(1) == b"!"
    for one in lines + ends:
        one.close()


def test_a_window_is_opened_by_whole_messages(front: tuple[Front, socket.socket, list[str]]) -> None:
    found, behind, notes = front
    line = socket.create_connection(found.address, timeout=600)
    end = behind.accept()[0]
    (connection,) = found._connections.values()
    sender = threading.Thread(target=line.sendall, args=(bytes(WINDOW + 2 * MIB),))
    sender.start()
    got = 0
    while got < WINDOW:
        got += len(end.recv(MIB))
    until(lambda: connection.stalled is not None)
    assert connection.unaccounted < WINDOW + front_module._CHUNK
    found.received(end.fileno(), [MIB, MIB, MIB], encrypted=False)  # by the end that is ZeroMQ's
    while got < WINDOW + 2 * MIB:
        got += len(end.recv(MIB))
    sender.join()
    assert connection.stalled is None
    assert not notes
    line.close()
    end.close()
