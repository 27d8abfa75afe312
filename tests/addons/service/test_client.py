"""A teacher elsewhere says what one in this process says, and its client is not led astray by what goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from gatespace.addons.service import wire
from gatespace.addons.service.client import RemoteTeacher
from gatespace.addons.service.keys import ServerKeys, client_keys, read_pair, write_keys
from gatespace.addons.service.server import ServerLimits, TeacherServer
from gatespace.errors import RunError, UsageError
from gatespace.gating.tokens import TeacherTopK
from gatespace.models import Model
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import Scores, TeacherAwayError

from .raw_client import CAP, PROMPTS, QUESTIONS, RESPONSES, spec

Client = Callable[..., RemoteTeacher]


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[TeacherServer]:
    with TeacherServer(model, "tcp://127.0.0.1:0") as server:
        yield server


@pytest.fixture
def client(model: Model) -> Iterator[Client]:
    made: list[RemoteTeacher] = []
    asked = ("payload", "k", "vocab_size")

    def make(address: str, **settings: Any) -> RemoteTeacher:
        wanted = spec(model, **{name: settings.pop(name) for name in asked if name in settings})
        digest = wire.vocabulary_digest(model.tokenizer.get_vocab())
        settings = {"tokenizer_digest": digest, "timeout": 20.0, "patience": 600.0, **settings}
        made.append(RemoteTeacher(address, wanted, **settings))
        return made[-1]

    yield make
    for teacher in made:
        teacher.close()


def assert_same(found: Scores, wanted: Scores) -> None:
    if isinstance(wanted.payload, TeacherTopK):
        assert isinstance(found.payload, TeacherTopK)
        assert found.payload.sampled_log_probs is not None
        assert wanted.payload.sampled_log_probs is not None
        assert found.payload.ids.equal(wanted.payload.ids)
        assert found.payload.log_probs.equal(wanted.payload.log_probs)
        assert found.payload.sampled_log_probs.equal(wanted.payload.sampled_log_probs)
        assert found.head is wanted.head is None
    else:
        assert isinstance(found.payload, torch.Tensor)
        assert found.payload.dtype == wanted.payload.dtype
        assert found.payload.equal(wanted.payload)
        assert found.head is not None
        assert wanted.head is not None
        assert found.head.weight.equal(wanted.head.weight)
        assert (found.head.scale, found.head.softcap) == (wanted.head.scale, wanted.head.softcap)


# ---------------------------------------------------------------------------------------------------- the same scores


@pytest.mark.parametrize("payload", ["hidden", "top_k"])
def test_remote_is_local_to_the_bit(payload: str, server: TeacherServer, model: Model, client: Client) -> None:
    settings: dict[str, Any] = {"payload": payload, "k": 9, "vocab_size": 400}
    local = LocalTeacher(model, spec(model, **settings))
    remote = client(server.address, **settings)
    assert (remote.fingerprint, remote.numerics) == (model.fingerprint(), local.numerics)
    assert remote.about() == {"address": server.address, "model": model.name, "numerics": local.numerics}
    assert remote.vocab_size == 400
    wanted = local.score(PROMPTS, RESPONSES)
    assert_same(remote.score(PROMPTS, RESPONSES), wanted)
    assert (remote.stats.rows, remote.stats.tokens) == (local.stats.rows, local.stats.tokens)
    assert remote.stats.computed_tokens == local.stats.computed_tokens
    assert remote.stats.passes >= 1
    # one by one, and several under way at once
    waiting = [remote.ask([prompt], [response]) for prompt, response in QUESTIONS]
    for place in (3, 0, 9, *range(10)):
        assert_same(waiting[place](), local.score([PROMPTS[place]], [RESPONSES[place]]))


def test_more_than_a_server_takes_at_once_is_divided(model: Model, client: Client) -> None:
    wanted = LocalTeacher(model, spec(model)).score(PROMPTS, RESPONSES)
    width = model.head.weight.shape[1] * 4
    for limits, at_least in (
        (ServerLimits(rows=5, client_queue=1), 2),
        (ServerLimits(tokens=98), 6),
        (ServerLimits(reply_bytes=9 * width, client_queue=2), 7),
    ):
        with TeacherServer(model, "tcp://127.0.0.1:0", limits=limits) as server:
            remote = client(server.address)
            assert_same(remote.score(PROMPTS, RESPONSES), wanted)
            assert server.status().requests >= at_least
            remote.close()


def test_two_clients_at_once(server: TeacherServer, model: Model, client: Client) -> None:
    kinds: list[dict[str, Any]] = [{"payload": "hidden"}, {"payload": "top_k", "k": 5}]
    wanted = [LocalTeacher(model, spec(model, **kind)).score(PROMPTS, RESPONSES) for kind in kinds]
    remotes = [client(server.address, **kind) for kind in kinds]
    found: list[list[Scores]] = [[], []]

    def work(place: int) -> None:
        for _ in range(5):
            found[place].append(remotes[place].score(PROMPTS, RESPONSES))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for place in range(2):
        assert len(found[place]) == 5
        for scores in found[place]:
            assert_same(scores, wanted[place])


@pytest.mark.parametrize("payload", ["hidden", "top_k"])
def test_local_and_remote_share_a_cache(
    payload: str, server: TeacherServer, model: Model, client: Client, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"payload": payload, "k": 7}
    with ScoreCache(tmp_path / "scores") as cache:
        local = LocalTeacher(model, spec(model, **settings), cache=cache)
        remote = client(server.address, cache=cache, **settings)
        wanted = local.score(PROMPTS[:6], RESPONSES[:6])
        before = server.status().requests
        assert_same(remote.score(PROMPTS[:6], RESPONSES[:6]), wanted)  # from the cache alone
        assert server.status().requests == before
        assert remote.stats.computed_tokens == 0
        both = remote.score(PROMPTS, RESPONSES)  # half of it
        assert server.status().requests == before + 1
        passes = local.stats.passes
        assert_same(local.score(PROMPTS, RESPONSES), both)  # what the remote one has left
        assert local.stats.passes == passes


def test_the_head_is_fetched_once(
    server: TeacherServer, model: Model, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path))
    first = client(server.address).score(PROMPTS[:1], RESPONSES[:1])
    (kept,) = (tmp_path / "heads").iterdir()
    written = kept.stat().st_mtime_ns
    again = client(server.address).score(PROMPTS[:1], RESPONSES[:1])
    assert_same(again, first)
    assert kept.stat().st_mtime_ns == written
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert_same(client(server.address).score(PROMPTS[:1], RESPONSES[:1]), first)
    assert kept.read_bytes() == content
    assert first.head is not None
    assert first.head.weight.equal(model.head.weight)


def test_encrypted(model: Model, client: Client, tmp_path: Path) -> None:
    ours, theirs, stranger = (write_keys(tmp_path / name) for name in ("client", "server", "stranger"))
    keys = ServerKeys(read_pair(theirs.secret), frozenset([read_pair(ours.secret).public]))
    with TeacherServer(model, "tcp://127.0.0.1:0", keys=keys) as server:
        remote = client(server.address, keys=client_keys(ours.secret, theirs.public))
        wanted = LocalTeacher(model, spec(model)).score(PROMPTS, RESPONSES)
        assert_same(remote.score(PROMPTS, RESPONSES), wanted)
        for wrong in (
            client_keys(stranger.secret, theirs.public),
            client_keys(ours.secret, stranger.public),
            None,
        ):
            with pytest.raises(TeacherAwayError, match="has not replied") as caught:
                client(server.address, keys=wrong, timeout=0.4, patience=1.0)
            assert ("keys" in caught.value.why) == (wrong is not None)


# ---------------------------------------------------------------------------------------------------- refusals


def test_what_is_refused(server: TeacherServer, client: Client) -> None:
    with pytest.raises(UsageError, match="do not have the same vocabulary"):
        client(server.address, tokenizer_digest="0" * 64)
    with pytest.raises(UsageError, match="needs an encrypted connection"):
        client("zmq://teacher.example.org:5555")
    with pytest.raises(UsageError, match="is not an address"):
        client("zmq://127.0.0.1")
    with pytest.raises(UsageError, match="no kind of teacher called ftp"):
        client("ftp://127.0.0.1:1")
    with pytest.raises(UsageError, match="'hidden' or 'top_k'"):
        client(server.address, payload="all")
    with pytest.raises(UsageError, match="fewer rows"):
        client(server.address, vocab_size=10**6)
    remote = client(server.address)
    with pytest.raises(UsageError, match="nothing to score"):
        remote.score([], [])
    with pytest.raises(RunError, match="no token of its own"):
        remote.score([[]], [[5]])
    with pytest.raises(RunError, match="wrong length"):
        remote.score([[5]], [[5] * (CAP + 1)])
    with pytest.raises(RunError, match="not tokens"):
        remote.score([[10**6]], [[5]])
    assert remote.score(PROMPTS[:1], RESPONSES[:1]).head is not None  # it goes on after errors
    remote.close()
    with pytest.raises(UsageError, match="is closed"):
        remote.score(PROMPTS[:1], RESPONSES[:1])


# ---------------------------------------------------------------------------------------------------- by script


class Actor:
    """A ROUTER in a thread that says what a script has it say."""

    def __init__(self, play: Callable[[Actor], None]) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 10_000
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"zmq://127.0.0.1:{port}"
        self.heard: list[wire.Message] = []
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.asking = b""
        self._thread = threading.Thread(target=self._run, args=(play,), daemon=True)
        self._thread.start()

    def _run(self, play: Callable[[Actor], None]) -> None:
        try:
            play(self)
        except BaseException as error:
            self.error = error

    def hear(self, kind: type[Any], *, pong: bool | None = True) -> wire.Packet:
        """The next message of a kind; pings are answered on the way, unless `pong` is None."""
        while True:
            self.asking, *frames = self.socket.recv_multipart()
            packet = wire.decode(frames)
            self.heard.append(packet.message)
            if isinstance(packet.message, kind):
                return packet
            if isinstance(packet.message, wire.Ping) and pong is not None:
                self.say(wire.Pong(packet.message.id, "server-1", pong, 0, 0, False))

    def say(self, message: wire.Message, arrays: Any = (), *, to: bytes | None = None) -> None:
        self.socket.send_multipart([to or self.asking, *wire.encode(message, arrays)])

    def welcome(self, **changed: Any) -> str:
        hello = self.hear(wire.Hello).message
        session = f"session-{len(self.heard)}"
        limits = wire.Limits(rows=100, tokens=10_000, reply_bytes=1 << 20, requests=8, row_tokens=None)
        told: dict[str, Any] = {
            "id": hello.id,
            "nonce": hello.nonce,
            "session": session,
            "server": "server-1",
            "model": "actor",
            "fingerprint": "f",
            "tokenizer": hello.tokenizer,
            "numerics": "n",
            "kept": True,
            "vocab_size": hello.vocab_size,
            "payloads": ("top_k",),
            "k": 2,
            "width": 4,
            "dtype": "float32",
            "position_bytes": 24,
            "limits": limits,
            "lease": 60.0,
            "head": None,
        }
        self.say(wire.Welcome(**{**told, **changed}))
        return session

    def reply(self, packet: wire.Packet, *, id: int | None = None, value: float = -1.0, k: int = 2) -> None:
        _, responses = wire.request_rows(packet)
        count = sum(map(len, responses))
        tensors = [
            torch.ones(count, k, dtype=torch.int32),
            torch.full((count, k), value),
            torch.full((count,), value),
            torch.zeros(count),
        ]
        message = wire.ScoreReply(packet.message.id if id is None else id, "top_k", len(responses), 3, 1)
        self.say(message, [wire.array_of(tensor) for tensor in tensors])

    def close(self) -> None:
        self._thread.join(600)
        self.socket.close()
        self._context.term()
        if self.error is not None:
            raise self.error


@pytest.fixture
def stage() -> Iterator[Callable[..., Actor]]:
    actors: list[Actor] = []

    def make(play: Callable[[Actor], None]) -> Actor:
        actors.append(Actor(play))
        return actors[-1]

    yield make
    for actor in actors:
        actor.close()


def asked(actor: Actor, client: Client, **settings: Any) -> tuple[RemoteTeacher, list[str]]:
    notes: list[str] = []
    whole = {"payload": "top_k", "k": 2, "timeout": 2.0, "patience": 600.0, "report": notes.append}
    return client(actor.address, **{**whole, **settings}), notes


def value_of(scores: Scores) -> float:
    assert isinstance(scores.payload, TeacherTopK)
    return float(scores.payload.log_probs.unique())


def test_a_lost_request_is_repeated_under_its_id(stage: Callable[..., Actor], client: Client) -> None:
    ids: list[int] = []

    def play(actor: Actor) -> None:
        actor.welcome()
        ids.append(actor.hear(wire.ScoreRequest).message.id)  # and is silent about it, but answers pings
        again = actor.hear(wire.ScoreRequest)
        ids.append(again.message.id)
        actor.reply(again)
        actor.reply(again, value=-9.0)  # once more, late, and another one at that: nobody's question any more
        actor.reply(actor.hear(wire.ScoreRequest), value=-2.0)

    remote, notes = asked(stage(play), client)
    assert value_of(remote.score([[1]], [[2, 3]])) == -1.0
    assert value_of(remote.score([[1]], [[2]])) == -2.0
    assert ids[0] == ids[1]
    assert notes == []  # it was there all the time


def test_a_busy_server_is_retried_later(stage: Callable[..., Actor], client: Client) -> None:
    moments: list[float] = []

    def play(actor: Actor) -> None:
        actor.welcome()
        busy = RunError("too much to do")
        for _ in range(4):
            packet = actor.hear(wire.ScoreRequest)
            moments.append(time.monotonic())
            actor.say(wire.failure(busy, code=wire.BUSY, id=packet.message.id, retry=True))
        actor.reply(actor.hear(wire.ScoreRequest))

    remote, _ = asked(stage(play), client, timeout=5.0)
    assert value_of(remote.score([[1]], [[2]])) == -1.0
    pauses = [later - before for before, later in pairwise(moments)]
    assert all(pause >= 0.049 * 2**place for place, pause in enumerate(pauses))  # the least, half of the longest


def test_a_lost_session_is_begun_again(stage: Callable[..., Actor], client: Client) -> None:
    sessions: list[str] = []

    def play(actor: Actor) -> None:
        actor.welcome()
        for _ in range(2):
            packet = actor.hear(wire.ScoreRequest)
            lost = RunError("no such session")
            actor.say(wire.failure(lost, code=wire.SESSION, id=packet.message.id, retry=True))
            sessions.append(actor.welcome(server="server-2"))
        packet = actor.hear(wire.ScoreRequest)
        sessions.append(packet.message.session)
        actor.reply(packet)

    remote, notes = asked(stage(play), client)
    assert value_of(remote.score([[1]], [[2]])) == -1.0
    assert sessions[-1] == sessions[-2]
    assert sum("was restarted; continuing" in note for note in notes) == 1


def test_a_server_that_ends_is_waited_for(stage: Callable[..., Actor], client: Client) -> None:
    def play(actor: Actor) -> None:
        actor.welcome()
        packet = actor.hear(wire.ScoreRequest)
        actor.say(wire.Draining("server-1", 1))
        actor.reply(packet)
        refused = actor.hear(wire.ScoreRequest).message.id
        actor.say(wire.failure(RunError("it is ending"), code=wire.DRAINING, id=refused, retry=True))
        actor.say(wire.Bye())
        actor.welcome()
        again = actor.hear(wire.ScoreRequest)
        assert again.message.id == refused
        actor.reply(again, value=-3.0)

    remote, _ = asked(stage(play), client, timeout=3.0)
    assert value_of(remote.score([[1]], [[2]])) == -1.0
    assert value_of(remote.score([[1]], [[2]])) == -3.0


def test_a_hello_that_was_lost_is_repeated(stage: Callable[..., Actor], client: Client) -> None:
    """By a server that ended before it could reply, and whose successor answers heartbeats only."""

    def play(actor: Actor) -> None:
        actor.hear(wire.Hello)
        actor.welcome()

    actor = stage(play)
    asked(actor, client)
    first, again = (message for message in actor.heard if isinstance(message, wire.Hello))
    assert first == again  # so that it begins one session


def test_garbage_is_no_reply(stage: Callable[..., Actor], client: Client) -> None:
    def play(actor: Actor) -> None:
        actor.welcome()
        actor.hear(wire.ScoreRequest)
        actor.socket.send_multipart([actor.asking, wire.MAGIC + bytes([wire.VERSION]) + b" what?"])
        actor.reply(actor.hear(wire.ScoreRequest), value=-4.0)

    remote, _ = asked(stage(play), client)
    assert value_of(remote.score([[1]], [[2]])) == -4.0


@pytest.mark.parametrize("change", ["shape", "rows", "kind"])
def test_a_reply_to_another_request_is_an_error(change: str, stage: Callable[..., Actor], client: Client) -> None:
    def play(actor: Actor) -> None:
        actor.welcome()
        packet = actor.hear(wire.ScoreRequest)
        if change == "shape":
            actor.reply(packet, k=3)
        elif change == "rows":
            longer = wire.Packet(packet.message, wire.request_arrays([[1], [1]], [[2], [2]]))
            actor.reply(longer)
        else:
            hidden = wire.ScoreReply(packet.message.id, "hidden", 1, 0, 0)
            actor.say(hidden, [wire.array_of(torch.zeros(1, 4))])

    remote, _ = asked(stage(play), client)
    with pytest.raises(RunError, match="has replied to another request"):
        remote.score([[1]], [[2]])


def test_another_teacher_than_before_is_refused(stage: Callable[..., Actor], client: Client) -> None:
    def play(actor: Actor) -> None:
        actor.welcome()
        actor.hear(wire.ScoreRequest)
        actor.say(wire.Bye())
        actor.welcome(server="server-2", fingerprint="other")

    remote, _ = asked(stage(play), client)
    with pytest.raises(TeacherAwayError, match="has changed") as caught:
        remote.score([[1]], [[2]])
    assert "fingerprint is other, and was f" in str(caught.value)


def test_another_version_is_refused(stage: Callable[..., Actor], client: Client) -> None:
    def play(actor: Actor) -> None:
        actor.hear(wire.Hello)
        actor.socket.send_multipart([actor.asking, b"GST\x63\x90"])

    with pytest.raises(UsageError, match="another version of the wire format"):
        asked(stage(play), client)


def test_what_the_model_cannot_do_is_the_runs_error(stage: Callable[..., Actor], client: Client) -> None:
    def play(actor: Actor) -> None:
        actor.welcome()
        packet = actor.hear(wire.ScoreRequest)
        failed = RunError("the model failed", got="nan", why="it is broken", instead="another one")
        actor.say(wire.failure(failed, code=wire.SCORING, id=packet.message.id))

    remote, _ = asked(stage(play), client)
    with pytest.raises(RunError, match="the model failed") as caught:
        remote.score([[1]], [[2]])
    assert not isinstance(caught.value, TeacherAwayError)
    assert (caught.value.got, caught.value.why, caught.value.instead) == ("nan", "it is broken", "another one")


def test_not_running(client: Client) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    notes: list[str] = []
    with pytest.raises(TeacherAwayError, match=f"the teacher at zmq://127.0.0.1:{port} has not replied") as caught:
        client(f"zmq://127.0.0.1:{port}", timeout=0.3, patience=1.0, report=notes.append)
    assert any("has not replied for 0.3 s; retrying" in note for note in notes)
    assert "teacher serve" in caught.value.instead


def test_busy(stage: Callable[..., Actor], client: Client) -> None:
    def play(actor: Actor) -> None:
        actor.welcome()
        packet = actor.hear(wire.ScoreRequest)
        began = time.monotonic()
        while time.monotonic() - began < 1.0:  # pings are answered: the question is known
            ping = actor.hear(wire.Ping, pong=None).message
            actor.say(wire.Pong(ping.id, "server-1", True, 1, 1, False))
        actor.reply(packet, value=-5.0)

    remote, notes = asked(actor := stage(play), client, timeout=0.4)
    assert value_of(remote.score([[1]], [[2]])) == -5.0
    assert any("is busy" in note for note in notes)
    assert sum(isinstance(message, wire.ScoreRequest) for message in actor.heard) == 1
    assert sum(isinstance(message, wire.Hello) for message in actor.heard) == 1
