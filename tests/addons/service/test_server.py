"""The teacher as a service, on real sockets: the bits of a teacher in this process, for all who may connect, and no
harm from anything else that arrives."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch import Tensor

from gatespace.addons.service import server as server_module
from gatespace.addons.service import wire
from gatespace.addons.service.backend import LocalBackend
from gatespace.addons.service.command import fetch_status
from gatespace.addons.service.keys import ClientKeys, ServerKeys, read_pair, service_address, write_keys
from gatespace.addons.service.server import ServerLimits, TeacherServer
from gatespace.errors import RunError, UsageError
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import Model, TinyPair, load_model
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from tests.addons.service.raw_client import CAP, PREFIX, QUESTIONS, Brake, RawClient, some_ids, spec, until

ANYWHERE = "tcp://127.0.0.1:0"


@pytest.fixture
def server(model: Model) -> Iterator[TeacherServer]:
    with TeacherServer(model, ANYWHERE) as server:
        yield server


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brake]:
    brake = Brake(monkeypatch)
    yield brake
    brake.go(1000)


@functools.cache
def twin(model: Model) -> Model:
    """The same model once more: the one that is served belongs to the server's thread."""
    return load_model(model.name, dtype=model.head.weight.dtype)


def local(model: Model, questions: Any, payload: str = "hidden", k: int = 5) -> list[Tensor]:
    """What a teacher in this process says."""
    teacher = LocalTeacher(twin(model), spec(model, payload=payload, k=k))
    scores = teacher.score([prompt for prompt, _ in questions], [response for _, response in questions]).payload
    if isinstance(scores, TeacherTopK):
        assert scores.sampled_log_probs is not None
        return [scores.ids[0].int(), scores.log_probs[0], scores.sampled_log_probs[0]]
    return [scores[0]]


def same(found: list[Tensor], right: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and a.equal(b) for a, b in zip(found, right, strict=True))


def healthy(server: TeacherServer, model: Model, keys: ClientKeys | None = None) -> None:
    """A good client has the right bits."""
    with RawClient(server.address, model, keys=keys) as client:
        assert isinstance(client.hello(), wire.Welcome)
        assert same(client.score(QUESTIONS[:3]), local(model, QUESTIONS[:3]))


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("payload", ["hidden", "top_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_client_has_the_bits_of_a_local_teacher(dtype: torch.dtype, payload: str, tiny: TinyPair) -> None:
    model = load_model(str(tiny.teacher), dtype=dtype)
    with TeacherServer(model, ANYWHERE) as server, RawClient(server.address, model) as client:
        welcome = client.hello(payload=payload)
        assert isinstance(welcome, wire.Welcome)
        own = LocalTeacher(twin(model), spec(model, payload=payload))
        assert (welcome.fingerprint, welcome.numerics) == (model.fingerprint(), own.numerics)
        assert (welcome.vocab_size, welcome.limits.row_tokens) == (model.vocab_size, 1024)
        for questions in (QUESTIONS, QUESTIONS[4:5], QUESTIONS[::-1]):
            found, right = client.score(questions), local(model, questions, payload)
            if payload == "top_k":
                tail = found.pop()
                torch.testing.assert_close(tail, 1 - right[1].exp().sum(-1), rtol=0, atol=1e-5)
            assert same(found, right)
            assert sum(part.nbytes for part in found) + (len(found[0]) * 4 if payload == "top_k" else 0) == (
                welcome.position_bytes * sum(len(response) for _, response in questions)
            )


def test_the_head_comes_in_parts(model: Model, server: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setattr("gatespace.addons.service.wire.PART_BYTES", 100_000)
    with RawClient(server.address, model) as client:
        info = client.hello().head
        assert info.parts > 2
        parts = []
        for part in range(info.parts):
            client.send(wire.HeadRequest(next(client.ids), client.session, info.sha256, part))
            packet = client.packet()
            assert isinstance(packet.message, wire.HeadPart)
            parts.append(bytes(packet.arrays[0].data))
        raw = b"".join(parts)
        assert hashlib.sha256(raw).hexdigest() == info.sha256
        assert wire.tensor_of(wire.Array(info.dtype, info.shape, raw)).equal(model.head.weight)
        for sha, part in ((info.sha256, info.parts), ("0" * 64, 0)):
            answer = client.ask(wire.HeadRequest(next(client.ids), client.session, sha, part))
            assert (answer.code, answer.retry) == (wire.QUESTION, False)
    with RawClient(server.address, model) as client:
        assert client.hello(payload="top_k").head is None


@pytest.mark.parametrize("payload", ["hidden", "top_k"])
def test_several_clients_share_passes(payload: str, model: Model, server: TeacherServer, brake: Brake) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.address, model)) for _ in range(4)]
        for client in clients:
            assert isinstance(client.hello(payload=payload), wire.Welcome)
        # The first keeps the model while the others ask: theirs then go through it together.
        first = clients[0].request(QUESTIONS[:1])
        brake.reached()
        asked = [(client, client.request([question])) for client, question in zip(clients, QUESTIONS[1:5], strict=True)]
        until(lambda: server.status().queued == 5)
        brake.go(2)
        replies = [clients[0].reply(first)] + [client.reply(id) for client, id in asked]
        for question, packet in zip(QUESTIONS, replies, strict=False):
            right = local(model, [question], payload)
            assert same([wire.tensor_of(buffer) for buffer in packet.arrays[: len(right)]], right)
        status = server.status()
        assert (status.batches, status.merged, status.rows, status.requests) == (2, 1, 5, 5)
        # 35 + 1 + 48 + 49 tokens and their responses fit into one pass of 512.
        assert status.passes == 2
        assert sum(packet.message.passes for packet in replies) == status.passes
        assert sum(packet.message.computed_tokens for packet in replies) == status.computed_tokens


def test_kinds_are_not_mixed_and_all_have_their_turn(model: Model, brake: Brake) -> None:
    limits = ServerLimits(teachers=1)  # and a kind that was put away is made again
    with TeacherServer(model, ANYWHERE, limits=limits) as server, contextlib.ExitStack() as stack:
        hidden, top, short = [stack.enter_context(RawClient(server.address, model)) for _ in range(3)]
        hidden.hello()
        top.hello(payload="top_k", k=3)
        short.hello(prefix=PREFIX[:5])
        asked = [client.request(QUESTIONS[i : i + 2]) for i, client in enumerate((hidden, top, short))]
        brake.go(100)
        assert same([wire.tensor_of(hidden.reply(asked[0]).arrays[0])], local(model, QUESTIONS[:2]))
        found = [wire.tensor_of(part) for part in top.reply(asked[1]).arrays]
        assert same(found[:3], local(model, QUESTIONS[1:3], "top_k", k=3))
        short_right = LocalTeacher(twin(model), spec(model, prefix=tuple(PREFIX[:5])))
        right = short_right.score(*map(list, zip(*QUESTIONS[2:4], strict=True))).payload
        assert isinstance(right, Tensor)
        assert same([wire.tensor_of(short.reply(asked[2]).arrays[0])], [right[0]])
        assert len(server._scorer._teachers) == 1


def test_a_client_with_little_does_not_wait_for_one_with_much(model: Model, brake: Brake) -> None:
    limits = ServerLimits(batch_tokens=300, quantum=100)
    with (
        TeacherServer(model, ANYWHERE, limits=limits) as server,
        RawClient(server.address, model) as greedy,
        RawClient(server.address, model) as modest,
    ):
        greedy.hello()
        modest.hello()
        many = [greedy.request(QUESTIONS) for _ in range(6)]
        brake.reached()
        until(lambda: server.status().queued == 6)
        one = modest.request(QUESTIONS[3:4])
        until(lambda: server.status().queued == 7)
        brake.go(2)
        # One batch was at the model before it came; it is in the next one, before thousands of tokens.
        assert same([wire.tensor_of(modest.reply(one).arrays[0])], local(model, QUESTIONS[3:4]))
        assert server.status().queued >= 5
        brake.go(1000)
        right = local(model, QUESTIONS)
        for id in many:  # each was divided over several batches
            assert same([wire.tensor_of(greedy.reply(id).arrays[0])], right)


def test_the_cache_is_shared(model: Model, tmp_path: Path) -> None:
    with (
        ScoreCache(tmp_path / "scores", max_mb=16) as cache,
        TeacherServer(LocalBackend(model, cache=cache), ANYWHERE) as server,
        RawClient(server.address, model) as one,
        RawClient(server.address, model) as other,
    ):
        one.hello()
        other.hello()
        first = one.score(QUESTIONS)
        passes = server.status().passes
        assert same(other.score(QUESTIONS), first)
        status = server.status()
        assert status.passes == passes
        assert status.cache_hits == status.cache_misses == status.tokens // 2


# ---------------------------------------------------------------------------------------------------- ids and queues


def test_a_repeated_request_is_computed_once(model: Model, server: TeacherServer, brake: Brake) -> None:
    with RawClient(server.address, model) as client:
        client.hello()
        for _ in range(3):
            client.request(QUESTIONS[:2], id=77)
        brake.reached()
        changed = client.ask(wire.ScoreRequest(77, client.session), wire.request_arrays([[1]], [[2]]))
        assert (changed.id, changed.code, changed.retry) == (77, wire.DUPLICATE, False)
        brake.go(100)
        first = client.frames()
        assert client.silent(0.05)
        assert server.status().batches == 1
        assert client.ask(wire.Ping(1, client.session)).mine == 0
        # A reply that was lost is computed again, to the bit.
        client.request(QUESTIONS[:2], id=77)
        assert client.frames() == first
        # Of another client, the id is another one.
        with RawClient(server.address, model) as other:
            other.hello()
            other.request(QUESTIONS[2:3], id=77)
            assert same([wire.tensor_of(other.reply(77).arrays[0])], local(model, QUESTIONS[2:3]))


def test_nothing_is_left_of_a_client_that_says_bye(model: Model, server: TeacherServer) -> None:
    with RawClient(server.address, model) as client:
        client.hello()
        client.score(QUESTIONS[:2])
        client.send(wire.Bye(client.session))
        until(lambda: not server._schedule.sessions)
        client.request(QUESTIONS[:1])
        assert client.packet().message.code == wire.SESSION


def test_too_much_is_refused_for_now(model: Model, brake: Brake) -> None:
    limits = ServerLimits(client_queue=2, queue=3)
    with (
        TeacherServer(model, ANYWHERE, limits=limits) as server,
        RawClient(server.address, model) as one,
        RawClient(server.address, model) as other,
    ):
        one.hello()
        other.hello()
        asked = [one.request(QUESTIONS[:1]), one.request(QUESTIONS[1:2])]
        third = one.request(QUESTIONS[2:3])
        refused = one.packet().message
        assert (refused.id, refused.code, refused.retry) == (third, wire.BUSY, True)
        theirs = other.request(QUESTIONS[:1])
        other.request(QUESTIONS[1:2])
        assert other.packet().message.code == wire.BUSY
        brake.go(1000)
        for id in asked:
            one.reply(id)
        other.reply(theirs)
        one.request(QUESTIONS[2:3], id=third)
        assert same([wire.tensor_of(one.reply(third).arrays[0])], local(model, QUESTIONS[2:3]))


def test_bytes_of_answers_are_bounded(model: Model, brake: Brake) -> None:
    size = 4 * 128 * sum(len(response) for _, response in QUESTIONS)
    limits = ServerLimits(pending_bytes=size + 1, reply_bytes=size)
    with TeacherServer(model, ANYWHERE, limits=limits) as server, RawClient(server.address, model) as client:
        client.hello()
        first = client.request(QUESTIONS)
        client.request(QUESTIONS[:1])
        assert client.packet().message.code == wire.BUSY
        client.request([*QUESTIONS, QUESTIONS[0]])
        refused = client.packet().message
        assert (refused.code, refused.retry) == (wire.LIMIT, False)
        brake.go(100)
        client.reply(first)


def test_clients_make_room_and_are_forgotten(model: Model) -> None:
    with (
        TeacherServer(model, ANYWHERE, limits=ServerLimits(clients=2, lease=2.0)) as server,
        contextlib.ExitStack() as s,
    ):
        clients = [s.enter_context(RawClient(server.address, model)) for _ in range(3)]
        for client in clients:
            client.hello()
        clients[0].request(QUESTIONS[:1])
        refused = clients[0].packet().message
        assert (refused.code, refused.retry) == (wire.SESSION, True)
        clients[0].hello()
        clients[0].score(QUESTIONS[:1])
        until(lambda: server.status().clients == 0)
        assert not clients[0].ask(wire.Ping(5, clients[0].session)).known
        clients[0].hello()
        assert clients[0].ask(wire.Ping(6, clients[0].session)).known


def test_a_hello_that_is_repeated_has_one_session(model: Model, server: TeacherServer) -> None:
    with RawClient(server.address, model) as client:
        first = client.hello(id=4, nonce="12345678")
        again = client.hello(id=4, nonce="12345678")
        assert first == again
        assert client.hello(id=5, nonce="87654321").session != first.session
        assert server.status().clients == 1


def test_a_client_that_goes_leaves_nothing(model: Model, server: TeacherServer, brake: Brake) -> None:
    with RawClient(server.address, model) as client:
        client.hello()
        for row in range(4):
            client.request(QUESTIONS[row : row + 1])
        until(lambda: server.status().queued == 4)
    brake.reached()
    brake.go(1000)
    until(lambda: server.status().clients == 0 and server.status().queued == 0)
    healthy(server, model)


def test_a_client_that_does_not_read(model: Model, server: TeacherServer) -> None:
    """It blocks nobody, has a bounded share of the memory, and has its answers when it reads and asks again."""
    with RawClient(server.address, model) as client:
        client.socket.setsockopt(zmq.RCVHWM, 1)  # for the next connection
        place = service_address(server.address).tcp
        client.socket.disconnect(place)
        client.socket.connect(place)
        head = client.hello().head
        for part in range(400):
            client.send(wire.HeadRequest(part, client.session, head.sha256, 0))
        until(lambda: server.status().dropped > 0)
        healthy(server, model)
        while not client.silent(1):  # an answer is dropped as long as there is no room for it
            client.frames()
        assert client.ask(wire.Ping(5, client.session)).known
        assert same(client.score(QUESTIONS[:1]), local(model, QUESTIONS[:1]))


# ---------------------------------------------------------------------------------------------------- the end


def test_drain_finishes_what_is_under_way(model: Model, brake: Brake) -> None:
    server = TeacherServer(model, ANYWHERE)
    server.start()
    with RawClient(server.address, model) as client, RawClient(server.address, model) as late:
        client.hello()
        asked = [client.request(QUESTIONS[row : row + 1]) for row in range(3)]
        until(lambda: server.status().queued == 3)
        server.drain()
        told = client.packet().message
        assert isinstance(told, wire.Draining)
        assert told.pending == 3
        client.request(QUESTIONS[5:6], id=999)
        refused = client.packet().message
        assert (refused.id, refused.code, refused.retry) == (999, wire.DRAINING, True)
        assert late.hello().code == wire.DRAINING
        assert late.ask(wire.Ping(1)).draining
        brake.go(1000)
        for row, id in enumerate(asked):
            assert same([wire.tensor_of(client.reply(id).arrays[0])], local(model, QUESTIONS[row : row + 1]))
        assert isinstance(client.packet().message, wire.Bye)
        server.join(600)


def test_drain_has_a_deadline(model: Model, brake: Brake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LINGER", 0.2)
    notes: list[str] = []
    server = TeacherServer(model, ANYWHERE, limits=ServerLimits(drain=0.2), report=notes.append)
    server.start()
    with RawClient(server.address, model) as client:
        client.hello()
        client.request(QUESTIONS[:1])
        brake.reached()
        server.drain()
        assert isinstance(client.packet().message, wire.Draining)
        assert isinstance(client.packet().message, wire.Bye)  # though the model is still at its batch
        brake.go()
        server.join(600)
    assert any("given up" in note for note in notes)


def test_the_address_is_free_afterwards_and_taken_before(model: Model) -> None:
    with TeacherServer(model, ANYWHERE) as server:
        with pytest.raises(UsageError, match="cannot be served here"):
            TeacherServer(model, server.address)
        bind = server.address
    with TeacherServer(model, bind) as again:
        assert again.instance != server.instance
        healthy(again, model)
        assert fetch_status(again.address).requests == 1
    with pytest.raises(RunError, match="does not reply"):
        fetch_status(again.address, timeout=0.2)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "0" * 64}, "same vocabulary"),
        ({"vocab_size": 10**6}, "fewer rows"),
        ({"prefix": [5, 10**6]}, "not tokens"),
        ({"prefix": [-1]}, "not tokens"),
        ({"prefix": [5] * 1020}, "reach"),
        ({"max_new_tokens": 60_000}, "reach"),
    ],
)
def test_pairs_that_do_not_match(changes: dict[str, Any], message: str, model: Model, server: TeacherServer) -> None:
    with RawClient(server.address, model) as client:
        refused = client.hello(**changes)
        assert isinstance(refused, wire.Failure)
        assert (refused.code, refused.retry) == (wire.PAIR, False)
        assert message in refused.what
        assert server.status().clients == 0
        assert isinstance(client.hello(tokenizer=model.tokenizer_digest()), wire.Welcome)


@pytest.mark.parametrize(
    ("prompt", "response", "message"),
    [
        ([5], [7] * (CAP + 1), "too long"),
        ([5], [10**6], "not tokens"),
        ([-1], [7], "not tokens"),
        ([5, 10**6], [7], "not tokens"),
        ([5] * 1000, [7], "reach"),
    ],
)
def test_questions_that_cannot_be_scored(
    prompt: list[int], response: list[int], message: str, model: Model, server: TeacherServer
) -> None:
    with RawClient(server.address, model) as client:
        client.hello()
        id = client.request([QUESTIONS[0], (prompt, response)])
        refused = client.packet().message
        assert (refused.id, refused.code, refused.retry) == (id, wire.QUESTION, False)
        assert message in refused.what
        assert server.status().batches == 0
        client.score(QUESTIONS[:1])


def test_a_failing_model_fails_its_rows_only(
    model: Model, server: TeacherServer, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = LocalTeacher._compute

    def fragile(teacher: LocalTeacher, prompts: Any, responses: Any) -> Any:
        if any(prompt[0] == 401 for prompt in prompts):
            raise ValueError("not this one")
        return compute(teacher, prompts, responses)

    monkeypatch.setattr(LocalTeacher, "_compute", fragile)
    with RawClient(server.address, model) as good, RawClient(server.address, model) as bad:
        good.hello()
        bad.hello()
        first = good.request(QUESTIONS[:1])
        brake.reached()
        fine, poison = good.request(QUESTIONS[1:3]), bad.request([([401, 5], [7])])
        until(lambda: server.status().queued == 3)
        brake.go(1000)
        good.reply(first)
        assert same([wire.tensor_of(good.reply(fine).arrays[0])], local(model, QUESTIONS[1:3]))
        refused = bad.packet().message
        assert (refused.id, refused.code, refused.retry) == (poison, wire.SCORING, False)
        assert "not this one" in refused.got
        assert server.status().merged == 1
        bad.score(QUESTIONS[:1])


# ---------------------------------------------------------------------------------------------------- strangers


def test_nobody_speaks_for_another(model: Model, server: TeacherServer, brake: Brake) -> None:
    with contextlib.ExitStack() as stack:
        owner, stranger, thief = [stack.enter_context(RawClient(server.address, model)) for _ in range(3)]
        owner.hello()
        thief.hello()  # has a session of its own
        asked = owner.request(QUESTIONS[:2])
        brake.reached()
        captured = wire.encode(
            wire.ScoreRequest(asked, owner.session), wire.request_arrays(*map(list, zip(*QUESTIONS[:2], strict=True)))
        )
        for other in (stranger, thief):
            other.socket.send_multipart(captured)
            refused = other.packet().message
            assert (refused.code, refused.retry) == (wire.SESSION, True)
            for message in (wire.HeadRequest(1, owner.session, "0", 0), wire.ScoreRequest(2, owner.session)):
                arrays = wire.request_arrays([[1]], [[2]]) if isinstance(message, wire.ScoreRequest) else ()
                assert other.ask(message, arrays).code == wire.SESSION
            pong = other.ask(wire.Ping(3, owner.session))
            assert (pong.known, pong.mine) == (False, 0)
            other.send(wire.Bye(owner.session))
        brake.go(1000)
        owner.reply(asked)
        assert thief.silent(0.05)
        assert owner.ask(wire.Ping(1, owner.session)).known


def test_an_identity_cannot_be_taken_over(model: Model, server: TeacherServer) -> None:
    with RawClient(server.address, model, identity=b"me") as owner:
        owner.hello()
        with RawClient(server.address, model, identity=b"me") as thief:
            thief.send(wire.Ping(1))
            assert thief.silent(0.3)
        assert same(owner.score(QUESTIONS[:1]), local(model, QUESTIONS[:1]))


def test_oversized_truncated_and_empty_messages(model: Model, server: TeacherServer) -> None:
    whole = wire.encode(wire.ScoreRequest(1, "x" * 32), wire.request_arrays([[1, 2]], [[3]]))
    hello = [b"GST\x09", b"GST", b"", b"\x00" * 100]
    strange: list[list[Any]] = [
        [b""],
        [b"", *whole],  # as a REQ socket would
        whole[:1],
        whole[:2],
        [*whole, b""],
        [*whole[:2], whole[2][:-1]],
        [whole[0][:-3], *whole[1:]],
        [b"x"] * 500,
        [b"\x91" * wire.MAX_HEADER],
        [whole[0], b"\0" * wire.MAX_FRAME, b"\0" * wire.MAX_FRAME],
        *([frame] for frame in hello),
    ]
    with RawClient(server.address, model) as client:
        for frames in strange:
            client.socket.send_multipart(frames)
            refused = client.packet().message
            assert isinstance(refused, wire.Failure), frames
            assert refused.code == (wire.VERSION_CODE if frames == [b"GST\x09"] else wire.MALFORMED)
        # What only servers say, and errors about errors.
        assert client.ask(wire.Pong(3, "x" * 8, True, 0, 0, False)).code == wire.MALFORMED
        client.send(wire.failure(RunError("x"), code=wire.BUSY))
        assert client.ask(wire.Ping(9)).id == 9
    with RawClient(server.address, model) as client:
        client.hello()
        client.socket.send(b"\0" * (wire.MAX_FRAME + 1))  # ends the connection, and with it the session
        client.request(QUESTIONS[:1])
        assert client.silent(0.2) or client.packet().message.code == wire.SESSION
    healthy(server, model)


def test_half_open_connections(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE", 0.3)
    monkeypatch.setattr(server_module, "_HEARTBEAT", 0.2)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    shaken = greeting + b"\x04" + bytes([len(ready)]) + ready
    cut = {
        "nothing": b"",
        "half a greeting": greeting[:11],
        "a greeting": greeting,
        "no heartbeat": shaken,
        "an enormous frame": shaken + b"\x02" + struct.pack(">Q", 2**62) + b"x" * 1000,
    }
    # To libzmq these are peers of the first protocol, which had neither handshakes nor heartbeats: they may stay.
    kept = {"http": b"GET / HTTP/1.1\r\n\r\n", "noise": random.Random(1).randbytes(5000)}
    with TeacherServer(model, ANYWHERE) as server, contextlib.ExitStack() as stack:
        lines = {}
        for name, said in (cut | kept).items():
            place = ("127.0.0.1", service_address(server.address).port)
            lines[name] = stack.enter_context(socket.create_connection(place, timeout=600))
            with contextlib.suppress(ConnectionError):
                lines[name].sendall(said)
        healthy(server, model)
        for name in cut:
            with contextlib.suppress(ConnectionError):
                while lines[name].recv(4096):  # until the server closes it; the socket's timeout is the deadline
                    pass
        healthy(server, model)


# ---------------------------------------------------------------------------------------------------- keys


def test_keys(model: Model, tmp_path: Path) -> None:
    mine, yours, wrong = (read_pair(write_keys(tmp_path / name).secret) for name in ("server", "client", "wrong"))
    keys = ServerKeys(mine, frozenset([yours.public]))
    with TeacherServer(model, ANYWHERE, keys=keys) as server, contextlib.ExitStack() as stack:
        strangers = [None, ClientKeys(wrong, mine.public), ClientKeys(yours, wrong.public)]
        clients = [stack.enter_context(RawClient(server.address, model, keys=stranger)) for stranger in strangers]
        for client in clients:
            client.send(wire.Ping(1))
        healthy(server, model, ClientKeys(yours, mine.public))
        assert all(client.silent(0.1) for client in clients)
        assert fetch_status(server.address, keys=ClientKeys(yours, mine.public)).requests == 1
        with pytest.raises(RunError, match="does not reply"):
            fetch_status(server.address, keys=ClientKeys(wrong, mine.public), timeout=0.3)


# ---------------------------------------------------------------------------------------------------- fuzz


def mutated(draw: random.Random, frames: list[bytes]) -> list[bytes]:
    """Frames that were damaged on purpose, once or a few times."""
    frames = list(frames)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        place = draw.randrange(len(frames)) if frames else 0
        frame = bytearray(frames[place]) if frames else bytearray()
        at = draw.randrange(len(frame)) if frame else 0
        match draw.randrange(9):
            case 0 if frame:
                frame[at] ^= 1 << draw.randrange(8)
            case 1 if frame:
                frame[at] = draw.choice((0, 1, 0x7F, 0x80, 0xC0, 0xFF))
            case 2:
                del frame[at:]
            case 3:
                frame[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 4 if frame:
                del frame[at : at + draw.randrange(1, 9)]
            case 5 if frames:
                frames.insert(place, bytes(frame))
                continue
            case 6 if len(frames) > 1:
                del frames[place]
                continue
            case 7 if frame:
                frame[at : at + 4] = struct.pack("<i", draw.choice((-1, 2**31 - 1, -(2**31), 0, 399)))
            case _:
                frame = bytearray(draw.randbytes(draw.randrange(40)))
        if frames:
            frames[place] = bytes(frame)
    return frames or [b""]


def test_ten_thousand_damaged_messages(model: Model) -> None:
    draw = random.Random(7)
    limits = ServerLimits(clients=16)
    with TeacherServer(model, ANYWHERE, limits=limits) as server, RawClient(server.address, model) as client:
        vocabulary = wire.vocabulary_digest(model.tokenizer.get_vocab())
        rows = wire.request_arrays(*map(list, zip(*QUESTIONS[:2], strict=True)))
        sent = 0
        while sent < 10_000:
            client.hello()
            head = server._scorer.head
            assert head is not None
            session = client.session
            valid = [
                wire.encode(wire.Hello(1, "n" * 16, "x", vocabulary, CAP, "hidden", 5, None), [wire.ids_array(PREFIX)]),
                wire.encode(wire.ScoreRequest(2, session), rows),
                wire.encode(wire.ScoreRequest(3, session), wire.request_arrays([some_ids(9, 1)], [some_ids(2, 2)])),
                wire.encode(wire.HeadRequest(4, session, head.info.sha256, 0)),
                wire.encode(wire.Ping(5, session)),
                wire.encode(wire.StatusRequest(6)),
                wire.encode(wire.Bye(session)),
                wire.encode(wire.failure(UsageError("x", got="y"), code=wire.BUSY, id=3)),
                wire.encode(wire.ScoreReply(7, "hidden", 1, 2, 3), [wire.array_of(torch.zeros(2, 3))]),
            ]
            for _ in range(25):  # fewer than the server keeps for a client that does not read
                client.socket.send_multipart(mutated(draw, [bytes(frame) for frame in draw.choice(valid)]))
                sent += 1
            # All that comes back are messages, and the server is there after each lot.
            client.send(wire.StatusRequest(123_456))
            while True:
                message = client.packet().message
                if isinstance(message, wire.StatusReply) and message.id == 123_456:
                    break
        assert server.status().failures > 2000
        assert server._thread is not None
        assert server._thread.is_alive()
        healthy(server, model)
