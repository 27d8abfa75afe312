"""Whose rows are scored next: who is known to a teacher service, what waits, and what was answered.

Clients take turns, so that a client with much to ask does not keep one with little waiting: in a turn each of them has
rows of about `quantum` tokens scored, whatever the size of its requests. Rows of one kind go into one batch, whoever
asked. All that is kept is bounded: clients, requests of each and of all, the bytes of their answers, and the answers
that are kept in case they got lost. No sockets and no torch here, and one thread.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gatespace.addons.service.wire import MAX_BYTES, MAX_HEADER, MAX_ROWS, MAX_TOKENS, Frame


@dataclass(frozen=True)
class ServerLimits:
    """How much a server takes on."""

    rows: int = MAX_ROWS
    """Rows of a request."""
    tokens: int = MAX_TOKENS
    """Prompt and response tokens of a request."""
    reply_bytes: int = MAX_BYTES - MAX_HEADER
    """Bytes of scores of a request."""
    clients: int = 256
    """Clients that are known at a time; the idle one that was silent longest makes room."""
    client_queue: int = 8
    """Requests of a client that are under way."""
    queue: int = 256
    """Requests of all clients that are under way,"""
    pending_bytes: int = 1 << 30
    """and the bytes of their answers."""
    answers_bytes: int = 256 << 20
    """Bytes of answers that are kept in case a client asks again."""
    batch_tokens: int = 4096
    """Prompt and response tokens of a batch."""
    quantum: int = 512
    """Tokens that a client has scored in its turn."""
    teachers: int = 4
    """Kinds of questions, each with its own shared prefix, that are kept ready."""
    rate: float = 2000.0
    """Messages of a connection per second; what is more is dropped."""
    lease: float = 900.0
    """Seconds of silence after which a client that waits for nothing is forgotten."""
    drain: float = 60.0
    """Seconds in which a server that ends finishes what is under way."""


@dataclass(frozen=True)
class Kind:
    """What questions have in common that can be scored together: the arguments of a `LocalTeacher`."""

    prefix: tuple[int, ...]
    max_new_tokens: int
    payload: str
    k: int
    vocab_size: int


@dataclass(eq=False)
class Session:
    """A client, known by its connection."""

    identity: bytes
    id: str
    nonce: str
    """Of its hello: a hello that is repeated has one session."""
    name: str
    kind: Kind
    position_bytes: int
    seen: float
    """When it last said something, or was answered."""
    waiting: deque[Request] = field(default_factory=deque)
    """Requests with rows that have not been handed out."""
    under_way: dict[int, Request] = field(default_factory=dict)


@dataclass(eq=False)
class Request:
    """Rows that a client wants scored, and how far that has got."""

    session: Session
    id: int
    digest: bytes
    prompts: list[list[int]]
    responses: list[list[int]]
    reply_bytes: int
    handed_out: int = 0
    """Rows."""
    scored: int = 0
    """Rows; the worker counts these,"""
    pieces: list[Any] = field(default_factory=list)
    """and adds their scores here."""
    computed_tokens: int = 0
    passes: int = 0

    def size(self, row: int) -> int:
        """Tokens of a row."""
        return len(self.prompts[row]) + len(self.responses[row])


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a request."""

    request: Request
    start: int
    stop: int


@dataclass(frozen=True)
class Batch:
    """Rows of one kind, of one client or several."""

    kind: Kind
    parts: tuple[Part, ...]

    @property
    def clients(self) -> int:
        """How many have rows in it."""
        return len({part.request.session.identity for part in self.parts})


@dataclass(frozen=True)
class Answer:
    """A reply that was sent, kept in case it got lost."""

    digest: bytes
    frames: Sequence[Frame]
    nbytes: int


class Schedule:
    """The clients of a server and their requests."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.sessions: dict[bytes, Session] = {}
        self._ring: deque[Session] = deque()
        """Clients with rows to hand out; the next one first."""
        self._answers: OrderedDict[tuple[str, int], Answer] = OrderedDict()
        self._answers_bytes = 0
        self._pending_bytes = 0
        self.queued = 0
        """Requests under way."""
        self.queued_rows = 0

    # ------------------------------------------------------------------ clients

    def join(self, session: Session) -> bool:
        """Take a client in; False where there is no room. What was known of its connection before is forgotten."""
        self.leave(session.identity)
        if len(self.sessions) >= self.limits.clients:
            idle = [other for other in self.sessions.values() if not other.under_way]
            if not idle:
                return False
            self.leave(min(idle, key=lambda other: other.seen).identity)
        self.sessions[session.identity] = session
        return True

    def leave(self, identity: bytes) -> None:
        """Forget a client and all that it waits for."""
        session = self.sessions.pop(identity, None)
        if session is None:
            return
        for request in list(session.under_way.values()):
            self._remove(request)
        if session in self._ring:
            self._ring.remove(session)
        for key in [key for key in self._answers if key[0] == session.id]:
            self._answers_bytes -= self._answers.pop(key).nbytes

    def expire(self, now: float) -> None:
        """Forget clients that have been silent too long and wait for nothing."""
        for session in list(self.sessions.values()):
            if not session.under_way and now - session.seen >= self.limits.lease:
                self.leave(session.identity)

    # ------------------------------------------------------------------ requests

    def full(self, session: Session, reply_bytes: int) -> str | None:
        """Why another request of a client cannot be taken on now; None where it can."""
        if len(session.under_way) >= self.limits.client_queue:
            return f"{len(session.under_way)} requests of this client are under way"
        if self.queued >= self.limits.queue:
            return f"{self.queued} requests of all clients are under way"
        if self._pending_bytes + reply_bytes > max(self.limits.pending_bytes, reply_bytes):
            return f"{self._pending_bytes >> 20} MiB of answers are under way"
        return None

    def add(self, request: Request) -> None:
        """Take a request on."""
        session = request.session
        session.under_way[request.id] = request
        session.waiting.append(request)
        if len(session.waiting) == 1:
            self._ring.append(session)
        self.queued += 1
        self.queued_rows += len(request.prompts)
        self._pending_bytes += request.reply_bytes

    def is_under_way(self, request: Request) -> bool:
        """Whether anybody still waits for it."""
        return request.session.under_way.get(request.id) is request

    def finish(self, request: Request, frames: Sequence[Frame] | None) -> None:
        """A request has its answer, or None where it failed and may be asked again."""
        session = request.session
        self._remove(request)
        if frames is None or self.sessions.get(session.identity) is not session:
            return
        answer = Answer(request.digest, frames, sum(memoryview(frame).nbytes for frame in frames))
        self._answers[session.id, request.id] = answer
        self._answers_bytes += answer.nbytes
        mine = [key for key in self._answers if key[0] == session.id]
        for key in mine[: -self.limits.client_queue]:
            self._answers_bytes -= self._answers.pop(key).nbytes
        while self._answers_bytes > self.limits.answers_bytes:
            self._answers_bytes -= self._answers.popitem(last=False)[1].nbytes

    def answer(self, session: Session, id: int) -> Answer | None:
        """What was answered under an id, if it is still known."""
        return self._answers.get((session.id, id))

    def _remove(self, request: Request) -> None:
        if not self.is_under_way(request):
            return
        session = request.session
        del session.under_way[request.id]
        if request in session.waiting:
            session.waiting.remove(request)
            if not session.waiting and session in self._ring:
                self._ring.remove(session)
        self.queued -= 1
        self.queued_rows -= len(request.prompts)
        self._pending_bytes -= request.reply_bytes

    # ------------------------------------------------------------------ batches

    def batch(self) -> Batch | None:
        """The rows that are scored next, of the kind that the next client in turn asks for; None: nothing waits.

        Clients of that kind take turns until the batch is full. Those of other kinds then stand before them.
        """
        if not self._ring:
            return None
        kind = self._ring[0].kind
        turns = deque(session for session in self._ring if session.kind == kind)
        others = [session for session in self._ring if session.kind != kind]
        left = self.limits.batch_tokens
        parts: list[Part] = []
        while turns and left > 0:
            session = turns.popleft()
            left -= self._turn(session, min(self.limits.quantum, left), parts)
            if session.waiting:
                turns.append(session)
        self._ring = deque([*others, *turns])
        return Batch(kind, tuple(parts))

    def _turn(self, session: Session, tokens: int, parts: list[Part]) -> int:
        """Hand out rows of a client until they have as many tokens, at least one row; returns how many they have."""
        used = 0
        while session.waiting and used < tokens:
            request = session.waiting[0]
            start = stop = request.handed_out
            while stop < len(request.prompts) and used < tokens:
                used += request.size(stop)
                stop += 1
            request.handed_out = stop
            if parts and parts[-1].request is request:  # nobody else is there to take turns with
                start = parts.pop().start
            parts.append(Part(request, start, stop))
            if stop == len(request.prompts):
                session.waiting.popleft()
        return used


def question_digest(*buffers: Frame) -> bytes:
    """A hash of a question, by which it is known again."""
    digest = hashlib.blake2b(digest_size=16)
    for buffer in buffers:
        digest.update(memoryview(buffer).nbytes.to_bytes(8, "little"))
        digest.update(buffer)
    return digest.digest()


class Rates:
    """How fast each connection may talk: a bucket of a second's messages, for the connections heard of last."""

    def __init__(self, rate: float, *, known: int = 4096) -> None:
        self._rate = rate
        self._known = known
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def allows(self, identity: bytes, now: float) -> bool:
        """Whether a message of this connection is within its rate."""
        level, before = self._buckets.pop(identity, (self._rate, now))
        level = min(self._rate, level + (now - before) * self._rate)
        fine = level >= 1.0
        self._buckets[identity] = (level - 1.0 if fine else level, now)
        if len(self._buckets) > self._known:
            self._buckets.popitem(last=False)
        return fine
