"""Scheduler of the teacher service: clients, their pending requests, and which rows are scored next.

Round-robin over clients, so that a large client does not starve a small one: each turn scores rows of about `quantum`
tokens, whatever the size of the client's requests. Rows with the same `ScoreSpec` share a batch, whichever client they
come from. The number of clients, their requests and the bytes of the replies are bounded. No sockets, no torch; runs
in one thread.
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

    rows: int = MAX_ROWS  # rows per request
    tokens: int = MAX_TOKENS  # prompt and response tokens per request
    reply_bytes: int = MAX_BYTES - MAX_HEADER  # bytes of scores per request
    clients: int = 256  # clients at a time; a new one evicts the idle client silent longest
    client_queue: int = 8  # pending requests per client
    queue: int = 256  # pending requests of all clients
    pending_bytes: int = 1 << 30  # bytes of the replies to all pending requests
    batch_tokens: int = 4096  # prompt and response tokens per batch
    quantum: int = 512  # tokens scored per client and turn
    teachers: int = 4  # teachers kept ready, each with the KV cache of its prefix
    lease: float = 900.0  # seconds of silence after which an idle client's session ends
    drain: float = 60.0  # seconds to finish pending requests on shutdown


@dataclass(eq=False)
class Session:
    """A client's session on one connection."""

    identity: bytes  # of the connection, assigned by the ROUTER socket
    id: str
    nonce: str  # of its Hello; a resent Hello keeps its session
    name: str
    spec: ScoreSpec
    position_bytes: int
    seen: float  # time of its last message or reply
    pending: dict[int, Request] = field(default_factory=dict)
    waiting: deque[Row] = field(default_factory=deque)  # rows of pending requests not yet in a batch


@dataclass(eq=False)
class Request:
    """Rows to score for a client, and their scores so far."""

    session: Session
    id: int
    prompts: list[list[int]]
    responses: list[list[int]]
    scores: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """By row; written by the model thread."""
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
        """Prompt tokens after the shared prefix."""
        return self.request.prompts[self.number]

    @property
    def response(self) -> list[int]:
        """Response tokens."""
        return self.request.responses[self.number]


class Schedule:
    """A server's clients and their requests."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.sessions: dict[bytes, Session] = {}
        self._turns: deque[Session] = deque()
        """Clients with waiting rows; the next one first."""

    @property
    def pending(self) -> list[Request]:
        """Requests of all clients without a reply."""
        sessions = list(self.sessions.values())  # copies, since other threads may call this
        return [request for session in sessions for request in list(session.pending.values())]

    # ------------------------------------------------------------------ clients

    def join(self, session: Session) -> bool:
        """Add a client, replacing its connection's earlier session; False if full and no client is idle."""
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
        """Why a request cannot be accepted now; empty if it can."""
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
        """Remove a request that is answered or has failed; False if its client is gone."""
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
        """Return the rows to score next, all with the spec of the next client in turn; empty if none wait.

        Clients with that spec take turns until the batch is full. Clients with other specs come next.
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
