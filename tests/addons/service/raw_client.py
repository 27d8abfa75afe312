"""A client of a teacher service made of the bare socket, which sends anything; and a brake for the model."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import zmq
from torch import Tensor

from gatespace.addons.service import wire
from gatespace.addons.service.backend import Scorer
from gatespace.addons.service.keys import ClientKeys, service_address
from gatespace.files import Closing
from gatespace.models import Model
from gatespace.teacher.scores import ScoreSpec

PATIENCE = 600.0
"""Seconds after which a test fails rather than waits."""
CAP = 8


def some_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PREFIX = some_ids(37, seed=1)
QUESTIONS = [
    (some_ids(prompt, 10 + row), some_ids(response, 50 + row))
    for row, (prompt, response) in enumerate(
        zip((20, 35, 1, 48, 49, 60, 17, 33, 16, 90), (4, 1, 8, 3, 2, 7, 5, 8, 6, 8), strict=True)
    )
]


PROMPTS, RESPONSES = [prompt for prompt, _ in QUESTIONS], [response for _, response in QUESTIONS]


def spec(model: Model, **changes: Any) -> ScoreSpec:
    """What the tests ask for, unless they change it."""
    values = {"prefix": tuple(PREFIX), "max_new_tokens": CAP, "vocab_size": model.vocab_size, "k": 5}
    return ScoreSpec(**{**values, **changes})


class RawClient(Closing):
    """A DEALER socket, each wait with a deadline."""

    def __init__(self, address: str, model: Model, *, keys: ClientKeys | None = None, identity: bytes = b"") -> None:
        self.model = model
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        if keys is not None:
            keys.apply(self.socket)
        self.socket.connect(service_address(address).tcp)
        self.session = ""
        self.ids = itertools.count(1000)

    def close(self) -> None:
        self.socket.close()

    def send(self, message: wire.Message, arrays: Sequence[wire.Array] = ()) -> list[wire.Frame]:
        frames = wire.encode(message, arrays)
        self.socket.send_multipart(frames)
        return frames

    def frames(self, timeout: float = PATIENCE) -> list[bytes]:
        assert self.socket.poll(round(timeout * 1000)), "no answer"
        return self.socket.recv_multipart()

    def packet(self, timeout: float = PATIENCE) -> wire.Packet:
        return wire.decode(self.frames(timeout))

    def silent(self, timeout: float) -> bool:
        return not self.socket.poll(round(timeout * 1000))

    def ask(self, message: wire.Message, arrays: Sequence[wire.Array] = ()) -> Any:
        self.send(message, arrays)
        return self.packet().message

    def hello(self, *, prefix: Sequence[int] = PREFIX, **changes: Any) -> Any:
        """The answer to a hello; a session from here on, if it is a welcome."""
        values: dict[str, Any] = {
            "id": next(self.ids),
            "nonce": secrets.token_hex(8),
            "client": "a test",
            "tokenizer": wire.vocabulary_digest(self.model.tokenizer.get_vocab()),
            "max_new_tokens": CAP,
            "payload": "hidden",
            "k": 5,
            "vocab_size": None,
        }
        hello = wire.Hello(**values | changes)
        answer = self.ask(hello, [wire.ids_array(prefix)])
        while getattr(answer, "id", None) != hello.id or isinstance(answer, wire.ScoreReply):  # of something before
            answer = self.packet().message
        if isinstance(answer, wire.Welcome):
            self.session = answer.session
        return answer

    def request(self, questions: Sequence[tuple[list[int], list[int]]], id: int | None = None) -> int:
        id = next(self.ids) if id is None else id
        arrays = wire.request_arrays([prompt for prompt, _ in questions], [response for _, response in questions])
        self.send(wire.ScoreRequest(id, self.session), arrays)
        return id

    def reply(self, id: int) -> wire.Packet:
        packet = self.packet()
        assert isinstance(packet.message, wire.ScoreReply), packet.message
        assert packet.message.id == id
        return packet

    def score(self, questions: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
        """The values of the reply: hidden states; or ids, log-probs, the token's own, and the tail."""
        return [wire.tensor_of(buffer) for buffer in self.reply(self.request(questions)).arrays]


class Brake:
    """Holds the model before each batch until `go`, so that it is known what waits."""

    def __init__(self, monkeypatch: Any) -> None:
        self._go = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)
        score = Scorer.score

        def held(scorer: Scorer, batch: Any) -> Any:
            self.waiting.release()
            assert self._go.acquire(timeout=PATIENCE)
            return score(scorer, batch)

        monkeypatch.setattr(Scorer, "score", held)

    def reached(self) -> None:
        """Wait until the model has a batch."""
        assert self.waiting.acquire(timeout=PATIENCE)

    def go(self, batches: int = 1) -> None:
        self._go.release(batches)


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.002)
