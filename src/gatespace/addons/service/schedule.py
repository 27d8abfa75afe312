"""The clients of a teacher service, their pending requests, and whose rows are scored next.

Clients take turns, so that one with much to score does not keep one with little waiting: in a turn each of them gets
rows of about `quantum` tokens scored, whatever the size of its requests. Rows of one `ScoreSpec` go into one batch,
whichever client they come from. The number of clients, their requests and the bytes of the replies are bounded.
No sockets and no torch here, and one thread.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from gatespace.addons.service.wire import MAX_BYTES, MAX_HEADER, MAX_ROWS, MAX_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from gatespace.teacher.scores import ScoreSpec


@dataclass(frozen=True)
class ServerLimits:
    """How much a server accepts."""

    rows: int = MAX_ROWS  # rows of a request
    tokens: int = MAX_TOKENS  # prompt and response tokens of a request
    reply_bytes: int = MAX_BYTES - MAX_HEADER  # bytes of the scores of a request
    clients: int = 256  # clients at a time; the idle client that was silent longest makes room for a new one
    client_queue: int = 8  # pending requests of a client
    queue: int = 256  # pending requests of all clients
    pending_bytes: int = 1 << 30  # bytes of the replies to all pending requests
    batch_tokens: int = 4096  # prompt and response tokens of a batch
    quantum: int = 512  # tokens that a client gets scored in its turn
    teachers: int = 4  # teachers, each with the KV cache of its prefix, that are kept ready
    lease: float = 900.0  # seconds of silence after which an idle client's session ends
    drain: float = 60.0  # seconds in which a server that ends finishes its pending requests


@dataclass(eq=False)
class Session:
    """A client, by its connection."""

    identity: bytes  # of the connection, given by the ROUTER socket
    id: str
    nonce: str  # of its Hello: one that is repeated has one session
    name: str
    spec: ScoreSpec
    position_bytes: int
    seen: float  # when its last message came, or its last reply was sent
    pending: dict[int, Request] = field(default_factory=dict)
    waiting: deque[Row] = field(default_factory=deque)  # rows of pending requests that are in no batch yet


@dataclass(eq=False)
class Request:
    """Rows that a client wants scored, and their scores so far."""

    session: Session
    id: int
    prompts: list[list[int]]
    responses: list[list[int]]
    scores: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """By row; written by the thread of the model."""
    computed_tokens: int = 0
    passes: int = 0
    reply_bytes: int = field(init=False)  # of all its scores

    def __post_init__(self) -> None:
        self.reply_bytes = sum(map(len, self.responses)) * self.session.position_bytes


class Row(NamedTuple):
    """One row of a request."""

    request: Request
    number: int

    @property
    def prompt(self) -> list[int]:
        """After the shared prefix."""
        return self.request.prompts[self.number]

    @property
    def response(self) -> list[int]:
        """The prompt's continuation."""
        return self.request.responses[self.number]


class Schedule:
    """The clients of a server and their requests."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.sessions: dict[bytes, Session] = {}
        self._turns: deque[Session] = deque()
        """Clients with waiting rows; the next one first."""

    @property
    def pending(self) -> list[Request]:
        """The requests of all clients that have no reply yet."""
        sessions = list(self.sessions.values())  # copies: other threads may ask
        return [request for session in sessions for request in list(session.pending.values())]

    # ------------------------------------------------------------------ clients

    def join(self, session: Session) -> bool:
        """Add a client, in place of an earlier session of its connection; False where all others are busy."""
        self.leave(session.identity)
        if len(self.sessions) >= self.limits.clients:
            idle = [other for other in self.sessions.values() if not other.pending]
            if not idle:
                return False
            self.leave(min(idle, key=lambda other: other.seen).identity)
        self.sessions[session.identity] = session
        return True

    def leave(self, identity: bytes) -> None:
        """Remove a client and its requests."""
        session = self.sessions.pop(identity, None)
        if session is not None:
            session.pending.clear()
            if session in self._turns:
                self._turns.remove(session)

    def expire(self, now: float) -> None:
        """Remove idle clients that have been silent too long."""
        for session in list(self.sessions.values()):
            if not session.pending and now - session.seen >= self.limits.lease:
                self.leave(session.identity)

    # ------------------------------------------------------------------ requests

    def full(self, request: Request) -> str:
        """Why a request cannot be accepted now; empty where it can."""
        mine, pending, limits = request.session.pending, self.pending, self.limits
        if len(mine) >= limits.client_queue:
            return f"{len(mine)} requests of this client are pending"
        if len(pending) >= limits.queue:
            return f"{len(pending)} requests of all clients are pending"
        size = sum(other.reply_bytes for other in pending)
        if pending and size + request.reply_bytes > limits.pending_bytes:
            return f"replies of {size >> 20} MiB are pending"
        return ""

    def add(self, request: Request) -> None:
        """Accept a request."""
        session = request.session
        session.pending[request.id] = request
        session.waiting.extend(Row(request, number) for number in range(len(request.prompts)))
        if session not in self._turns:
            self._turns.append(session)

    def finish(self, request: Request) -> bool:
        """Remove a request that has its reply, or has failed; False where its client is gone."""
        session = request.session
        if session.pending.get(request.id) is not request:
            return False
        del session.pending[request.id]
        session.seen = time.monotonic()
        session.waiting = deque(row for row in session.waiting if row.request is not request)
        if not session.waiting and session in self._turns:
            self._turns.remove(session)
        return True

    def batch(self) -> list[Row]:
        """The rows to score next, all of one spec: that of the next client in turn. Empty where no row waits.

        Clients of that spec take turns until the batch is full. Clients of other specs are then next.
        """
        if not self._turns:
            return []
        spec = self._turns[0].spec
        turns = deque(session for session in self._turns if session.spec == spec)
        others = [session for session in self._turns if session.spec != spec]
        rows: list[Row] = []
        left = self.limits.batch_tokens
        while turns and left > 0:
            session = turns.popleft()
            quantum = min(self.limits.quantum, left)
            while session.waiting and quantum > 0:
                row = session.waiting.popleft()
                rows.append(row)
                quantum -= len(row.prompt) + len(row.response)
                left -= len(row.prompt) + len(row.response)
            if session.waiting:
                turns.append(session)
        self._turns = deque([*others, *turns])
        return rows
