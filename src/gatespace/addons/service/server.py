"""A teacher as a service: many students, in other processes or on other machines, have one model.

Two threads. One has the socket: it reads messages, refuses what cannot be answered, keeps the queue and the clients
(`Schedule`), and waits in one poll for messages, results and the wish to end. The other has the model (`ModelThread`).
Because the bits of a score depend on its row alone (see `gatespace.teacher.local`), rows of several clients go through
the model together, and each client has what a teacher in its own process would have said.

A client is its connection: a session belongs to the ROUTER identity that said hello, answers go there, and nobody
speaks for another, whatever ids it names. The identity of a connection that lives cannot be taken over.
"""

from __future__ import annotations

import secrets
import signal
import socket as sockets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from gatespace.addons.service import wire
from gatespace.addons.service.backend import Backend, LocalBackend
from gatespace.addons.service.keys import DOMAIN, ServerKeys, check_bind, endpoint
from gatespace.addons.service.schedule import Kind, Rates, Request, Schedule, ServerLimits, Session, question_digest
from gatespace.addons.service.worker import ModelThread, Opened, Opening, Ready, Scored
from gatespace.errors import GatespaceError, RunError, UsageError, missing_extra
from gatespace.models.load import Model
from gatespace.teacher.cache import ScoreCache

try:
    import zmq
    from zmq.auth.thread import ThreadAuthenticator
except ImportError as error:
    raise missing_extra("the teacher service", module="pyzmq", extra="service") from error

__all__ = ["ServerLimits", "TeacherServer"]

_HEARTBEAT = 5.0
"""Seconds between heartbeats of a connection; after three of silence it is closed."""
_HANDSHAKE = 10.0
"""Seconds in which a connection has to show that it speaks ZeroMQ, with the right keys."""
_LINGER = 5.0
"""Seconds in which the last answers leave when the server ends."""
_WATER = 64
"""Messages of a connection that wait to be read, or to be sent; what is more is held back, or dropped."""
_TURN = 128
"""Messages that are read before the model is looked after again."""
_KNOWN = 64
"""Kinds of which it is remembered what clients are told."""
_MINUTE = 60.0


class _EnoughError(BaseException):
    """Somebody wishes that the service ends at once."""


class TeacherServer:
    """Serves a model.

    Args:
        teacher: A model, whose weights must not change from here on; or a backend, which stays the caller's.
        bind: ``tcp://host:port``; port 0 or * has the system choose. Without `keys` it must be a loopback address.
        cache: Of a model: scores computed before, and from now on.
        keys: CURVE keys and the clients that may come in.
        limits: How much is taken on.
        packed: Of a model: as in `body_of`.
        report: Is told what is worth a line.

    Example:
        with TeacherServer(model, "tcp://127.0.0.1:0") as server:
            RemoteTeacher(server.address, ...)
    """

    def __init__(
        self,
        teacher: Model | Backend,
        bind: str = "tcp://127.0.0.1:5555",
        *,
        cache: ScoreCache | None = None,
        keys: ServerKeys | None = None,
        limits: ServerLimits | None = None,
        packed: bool | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        place = check_bind(bind, secured=keys is not None)
        self.limits = limits or ServerLimits()
        self.instance = secrets.token_hex(8)
        self._backend: Backend = (
            LocalBackend(teacher, cache=cache, packed=packed) if isinstance(teacher, Model) else teacher
        )
        self.fingerprint = self._backend.fingerprint
        self._name = self._backend.name[:256]
        self._row_tokens = self._backend.reach
        self._cache = cache
        self._report = report or (lambda text: None)
        self._schedule = Schedule(self.limits)
        self._rates = Rates(self.limits.rate)
        self._openings: OrderedDict[bytes, tuple[wire.Hello, Kind]] = OrderedDict()
        """Hellos that wait for the model, by connection: one each."""
        self._opening: tuple[bytes, wire.Hello] | None = None
        """The one that the model is at."""
        self._opened_last = False
        self._known: OrderedDict[Kind, Ready] = OrderedDict()
        self._started = time.monotonic()
        self._busy = 0.0
        self._requests = self._failures = self._dropped = 0
        self._rows = self._tokens = self._computed = self._passes = self._batches = self._merged = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=4096)
        self._draining: float | None = None
        """When what is under way is given up."""
        self._wishes = 0
        """How often somebody has wished that the server ends."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # A byte here ends the poll: from the model's thread, from any other, or from a signal handler.
        self._bell, self._bell_rope = sockets.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._context = zmq.Context()
        self._guard: ThreadAuthenticator | None = None
        self._closed = False
        try:
            if keys is not None:
                self._guard = ThreadAuthenticator(self._context)
                self._guard.start()
                self._guard.configure_curve_callback(DOMAIN, keys)
            self._socket = self._bound(place.tcp, place.ipv6, keys)
        except BaseException:
            self._release()
            raise
        self.endpoint = endpoint(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._worker = ModelThread(self._backend, teachers=self.limits.teachers, wake=self._ring_bell)

    @property
    def address(self) -> str:
        """``zmq://host:port``, as a configuration names it."""
        return self.endpoint.zmq

    # ------------------------------------------------------------------ life

    def run(self, *, signals: Sequence[int] = (), ready: Callable[[], None] | None = None) -> None:
        """Serve until somebody calls `drain` or `stop`. The calling thread has the model.

        That should be the main thread: OpenMP gives a second thread that computes a team of its own, and with more
        threads than cores they wait for each other by sleeping, which costs a fifth of the speed.

        Args:
            signals: These call `drain`; for the main thread only.
            ready: Is called once the service can be used and told to end.
        """
        socket = threading.Thread(target=self._serve_quietly, name="gatespace-teacher-socket", daemon=True)
        try:
            with suppress(_EnoughError), self._drained_by(signals):
                if ready is not None:
                    ready()
                socket.start()
                self._worker.work()
        finally:
            self.stop()
            if socket.ident is not None:
                socket.join(_LINGER)
            self._close()
        if self._error is not None:
            raise self._error

    def _serve_quietly(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._error = error
        finally:
            self._worker.end()

    @contextmanager
    def _drained_by(self, signals: Sequence[int]) -> Iterator[None]:
        if not signals:
            yield
            return

        def told(*_: object) -> None:
            self.drain()
            if self._wishes > 1:
                raise _EnoughError  # out of whatever the model is at

        before = {number: signal.signal(number, told) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._thread = threading.Thread(target=self._run_quietly, name="gatespace-teacher-socket", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Take no new work, finish what is under way, and end; a second time: end at once.

        May be called from any thread and from a signal handler.
        """
        self._wishes += 1
        self._ring_bell()

    def stop(self) -> None:
        """End at once, that is after the batch the model is at."""
        self._wishes += 2
        self._ring_bell()

    def join(self, timeout: float) -> None:
        """Wait until a server that was started has ended; an error of its thread is raised here."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise RunError("the teacher service has not ended", got=f"{timeout:g} s")
        if self._error is not None:
            raise RunError("the teacher service has failed", got=repr(self._error)) from self._error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.join(self.limits.drain + 2 * _LINGER)

    def _run_quietly(self) -> None:
        self._worker.start()
        try:
            self._serve()
        except BaseException as error:
            self._error = error
        finally:
            self._close()

    def _ring_bell(self) -> None:
        with suppress(OSError):  # it rings already, or nobody is there any more
            self._bell_rope.send(b"!")

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._worker.stop(_LINGER):
            self._report("the model was still at a batch when the server ended")
        self._release()

    def _release(self) -> None:
        socket = getattr(self, "_socket", None)
        if socket is not None:
            socket.close(linger=round(_LINGER * 1000))
        if self._guard is not None:
            self._guard.stop()
        self._context.term()  # waits for the last answers, no longer than they may linger
        self._bell.close()
        self._bell_rope.close()

    def _bound(self, address: str, ipv6: bool, keys: ServerKeys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer that reaches nobody is an error, not silence
            socket.setsockopt(zmq.ROUTER_HANDOVER, 0)  # nobody takes the identity of another
            socket.setsockopt(zmq.SNDHWM, _WATER)
            socket.setsockopt(zmq.RCVHWM, _WATER)
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME)  # of a frame; a larger one ends the connection
            socket.setsockopt(zmq.HANDSHAKE_IVL, round(_HANDSHAKE * 1000))
            socket.setsockopt(zmq.HEARTBEAT_IVL, round(_HEARTBEAT * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(3 * _HEARTBEAT * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TTL, round(3 * _HEARTBEAT * 1000))
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # for peers of an old protocol, which has no heartbeats
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
            socket.setsockopt(zmq.IPV6, int(ipv6))
            if keys is not None:
                keys.apply(socket)
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise UsageError(
                "the teacher cannot be served here",
                got=f"{address}: {error.strerror}",
                instead="another port; 0 has the system choose one",
            ) from error
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    # ------------------------------------------------------------------ the loop

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.fileno(), zmq.POLLIN)
        while not self._ended():
            poller.poll(self._patience())
            self._quieten()
            while (result := self._worker.take()) is not None:
                self._take(result)
            for _ in range(_TURN):
                if not self._read():
                    break
            self._schedule.expire(time.monotonic())
            if self._wishes and self._draining is None:
                self._begin_to_drain()
            if self._worker.idle:
                self._hand_out()
        for identity in list(self._schedule.sessions):
            self._send(identity, wire.encode(wire.Bye()))

    def _ended(self) -> bool:
        if self._wishes > 1:
            return True
        if self._draining is None:
            return False
        finished = not self._schedule.queued and not self._openings and self._worker.idle
        if not finished and time.monotonic() >= self._draining:
            self._report(f"{self._schedule.queued} requests were given up after {self.limits.drain:g} s")
            return True
        return finished

    def _patience(self) -> int:
        """Milliseconds until something has to be done even if nothing happens. Messages left unread end the wait."""
        now = time.monotonic()
        due = [now + self.limits.lease]
        due += [max(s.seen + self.limits.lease, now + 1) for s in self._schedule.sessions.values() if not s.under_way]
        if self._draining is not None:
            due.append(self._draining)
        return max(0, round((min(due) - now) * 1000) + 1)

    def _quieten(self) -> None:
        with suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass

    def _begin_to_drain(self) -> None:
        self._draining = time.monotonic() + self.limits.drain
        self._report(f"ending: {self._schedule.queued} requests are under way, new ones are refused")
        for identity, (hello, _) in self._openings.items():
            self._refuse_draining(identity, hello.id)
        self._openings.clear()
        for identity, session in list(self._schedule.sessions.items()):
            self._send(identity, wire.encode(wire.Draining(self.instance, len(session.under_way))))

    def _hand_out(self) -> None:
        # Newcomers come first, but no two of them while rows wait.
        while self._openings and not (self._opened_last and self._schedule.queued):
            identity, (hello, kind) = self._openings.popitem(last=False)
            if kind in self._known:
                self._welcome(identity, hello, kind, self._known[kind])
                continue
            self._opening = (identity, hello)
            self._opened_last = True
            self._worker.submit(Opening(kind, identity))
            return
        self._opened_last = False
        batch = self._schedule.batch()
        if batch is not None:
            self._batches += 1
            self._merged += batch.clients > 1
            self._worker.submit(batch)

    def _take(self, result: Opened | Scored) -> None:
        if isinstance(result, Opened):
            assert self._opening is not None
            (identity, hello), self._opening = self._opening, None
            if result.ready is None:
                error = result.error or RunError("the teacher has failed")
                self._report(f"a client was refused: {error.what}")
                code = wire.PAIR if isinstance(error, UsageError) else wire.SCORING
                self._refuse(identity, hello.id, code, error, retry=result.passing)
                return
            self._known[result.job.kind] = result.ready
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
            self._welcome(identity, hello, result.job.kind, result.ready)
            return
        now = time.monotonic()
        self._busy += result.seconds
        self._rows += result.rows
        self._tokens += result.tokens
        self._computed += result.computed_tokens
        self._passes += result.passes
        self._recent.append((now, result.tokens))
        for request, frames in result.replies:
            if self._schedule.is_under_way(request):
                request.session.seen = now
                self._schedule.finish(request, frames)
                self._requests += 1
                self._send(request.session.identity, frames)
        for request, error, passing in result.failures:
            if self._schedule.is_under_way(request):
                request.session.seen = now
                self._schedule.finish(request, None)
                self._report(f"rows of {request.session.name} could not be scored: {error.what} {error.got or ''}")
                failure = wire.failure(error, code=wire.SCORING, id=request.id, retry=passing)
                self._send_failure(request.session.identity, failure)

    # ------------------------------------------------------------------ messages

    def _read(self) -> bool:
        """Deal with a message; False: there is none."""
        try:
            identity = self._socket.recv(zmq.NOBLOCK)
            frames: list[bytes] = []
            while self._socket.getsockopt(zmq.RCVMORE):
                frame = self._socket.recv(zmq.NOBLOCK)
                if len(frames) <= wire.MAX_FRAMES:  # one too many tells, the rest is not kept
                    frames.append(frame)
        except zmq.Again:
            return False
        now = time.monotonic()
        if not self._rates.allows(identity, now):
            self._dropped += 1
            return True
        try:
            packet = wire.decode(frames)
        except wire.WireError as error:
            code = wire.MALFORMED if error.version is None else wire.VERSION_CODE
            self._send_failure(identity, wire.failure(error, code=code))
            return True
        session = self._schedule.sessions.get(identity)
        if session is not None:
            session.seen = now
        match packet.message:
            case wire.Hello() as hello:
                self._hello(identity, hello, packet)
            case wire.ScoreRequest() as asked:
                if self._is_known(identity, session, asked.session, asked.id) and session is not None:
                    self._score(session, asked, packet)
            case wire.HeadRequest() as asked_head:
                if self._is_known(identity, session, asked_head.session, asked_head.id):
                    self._head_part(identity, asked_head)
            case wire.Ping() as ping:
                self._pong(identity, session, ping)
            case wire.StatusRequest() as asked_status:
                self._send(identity, wire.encode(self.status(asked_status.id)))
            case wire.Bye() as bye:
                if session is not None and bye.session == session.id:
                    self._schedule.leave(identity)
            case wire.Failure() | wire.Draining():
                self._dropped += 1  # an error about an error would go on for ever
            case other:
                what = f"clients do not say {type(other).__name__}"
                self._refuse(identity, other.id, wire.MALFORMED, UsageError(what))
        return True

    def _is_known(self, identity: bytes, session: Session | None, named: str, id: int) -> bool:
        if session is not None and secrets.compare_digest(session.id.encode(), named.encode()):
            return True
        why = "the server was restarted, the connection was lost, or nothing was heard for long"
        error = RunError("no such session", why=why, instead="say hello again")
        self._refuse(identity, id, wire.SESSION, error, retry=True)
        return False

    def _hello(self, identity: bytes, hello: wire.Hello, packet: wire.Packet) -> None:
        if self._draining is not None:
            self._refuse_draining(identity, hello.id)
            return
        vocab_size = hello.vocab_size or self._backend.vocab_size
        prefix = wire.ids_of(packet.arrays[0])
        try:
            self._check_pair(hello, vocab_size, prefix)
        except GatespaceError as error:
            self._report(f"{hello.client} was refused: {error.what}")
            self._refuse(identity, hello.id, wire.PAIR, error)
            return
        k = min(hello.k, vocab_size) if hello.payload == "top_k" else 1
        kind = Kind(tuple(prefix), hello.max_new_tokens, hello.payload, k, vocab_size)
        if kind in self._known:
            self._welcome(identity, hello, kind, self._known[kind])
        elif identity in self._openings or len(self._openings) < self.limits.clients:
            self._openings[identity] = (hello, kind)
        else:
            crowd = RunError("too many clients want to begin at once", instead="wait, and ask again")
            self._refuse(identity, hello.id, wire.BUSY, crowd, retry=True)

    def _check_pair(self, hello: wire.Hello, vocab_size: int, prefix: list[int]) -> None:
        known = self._backend.tokenizers
        if hello.tokenizer not in known:
            raise UsageError(
                "student and teacher do not have the same vocabulary",
                got=f"digest {hello.tokenizer[:16]}, and {' or '.join(sorted(d[:16] for d in known))} here",
                why="a divergence compares the two models id by id",
                instead="two models of one family, with tokenizers of the same version",
            )
        if hello.payload not in self._backend.payloads:
            raise UsageError(
                f"this teacher does not give the payload {hello.payload}",
                got=hello.payload,
                why="vLLM computes it, and tells of first choices only",
                instead="teacher.payload: top_k, with objective.support: bucket or hybrid",
            )
        rows = self._backend.rows
        if vocab_size > rows:
            raise UsageError("the teacher's head has fewer rows than ids are asked for", got=f"{rows}, {vocab_size}")
        if prefix and not 0 <= min(prefix) <= max(prefix) < self._backend.vocab_size:
            raise UsageError("the shared prefix has ids that are no tokens", got=f"{min(prefix)} to {max(prefix)}")
        if self._row_tokens is not None and len(prefix) + 1 + hello.max_new_tokens > self._row_tokens:
            raise UsageError(
                "prefix and response are longer than the teacher's reach",
                got=f"{len(prefix)} + 1 + {hello.max_new_tokens} tokens",
                instead=f"{self._row_tokens} at most; max_new_tokens can be smaller",
            )

    def _welcome(self, identity: bytes, hello: wire.Hello, kind: Kind, ready: Ready) -> None:
        self._known.move_to_end(kind)
        if self._draining is not None:
            self._refuse_draining(identity, hello.id)
            return
        session = self._schedule.sessions.get(identity)
        if session is None or (session.nonce, session.kind) != (hello.nonce, kind):
            session = Session(
                identity=identity,
                id=secrets.token_hex(16),
                nonce=hello.nonce,
                name=hello.client,
                kind=kind,
                position_bytes=ready.position_bytes,
                seen=time.monotonic(),
            )
            if not self._join(session, hello):
                return
        backend = self._backend
        welcome = wire.Welcome(
            id=hello.id,
            nonce=hello.nonce,
            session=session.id,
            server=self.instance,
            model=self._name,
            fingerprint=self.fingerprint,
            tokenizer=hello.tokenizer,
            numerics=ready.numerics,
            kept=backend.kept,
            vocab_size=kind.vocab_size,
            payloads=backend.payloads,
            k=ready.k,
            width=backend.width,
            dtype=backend.dtype,  # type: ignore[arg-type]  # one of those that travel
            position_bytes=ready.position_bytes,
            limits=wire.Limits(
                rows=self.limits.rows,
                tokens=self.limits.tokens,
                reply_bytes=self.limits.reply_bytes,
                requests=self.limits.client_queue,
                row_tokens=self._row_tokens,
            ),
            lease=self.limits.lease,
            head=ready.head,
        )
        if not self._send(identity, wire.encode(welcome)):
            self._schedule.leave(identity)

    def _join(self, session: Session, hello: wire.Hello) -> bool:
        if self._schedule.join(session):
            return True
        error = RunError("too many clients", got=f"{len(self._schedule.sessions)}", instead="wait, and ask again")
        self._refuse(session.identity, hello.id, wire.BUSY, error, retry=True)
        return False

    def _score(self, session: Session, asked: wire.ScoreRequest, packet: wire.Packet) -> None:
        identity = session.identity
        digest = question_digest(*(buffer.data for buffer in packet.arrays))
        running, answer = session.under_way.get(asked.id), self._schedule.answer(session, asked.id)
        before = running or answer
        if before is not None:
            if before.digest != digest:
                error = UsageError("the id stands for another question", got=f"id {asked.id}", instead="a new id")
                self._refuse(identity, asked.id, wire.DUPLICATE, error)
            elif answer is not None:
                self._send(identity, answer.frames)
            return  # one that is under way will have its answer
        if self._draining is not None:
            self._refuse_draining(identity, asked.id)
            return
        prompts, responses = wire.questions_of(packet)
        reply_bytes = sum(map(len, responses)) * session.position_bytes
        try:
            self._check_size(len(prompts), packet.arrays[1].shape[0], reply_bytes)
        except GatespaceError as error:
            self._refuse(identity, asked.id, wire.LIMIT, error)
            return
        try:
            self._check_rows(session.kind, prompts, responses)
        except GatespaceError as error:
            self._refuse(identity, asked.id, wire.QUESTION, error)
            return
        why = self._schedule.full(session, reply_bytes)
        if why is not None:
            busy = RunError("the teacher has too much to do", why=why, instead="wait, and ask again")
            self._refuse(identity, asked.id, wire.BUSY, busy, retry=True)
            return
        self._schedule.add(Request(session, asked.id, digest, prompts, responses, reply_bytes))

    def _check_size(self, rows: int, tokens: int, reply_bytes: int) -> None:
        limits = self.limits
        for what, got, limit in (
            ("rows", rows, limits.rows),
            ("tokens", tokens, limits.tokens),
            ("bytes of scores", reply_bytes, limits.reply_bytes),
        ):
            if got > limit:
                raise UsageError(
                    f"the request has too many {what}", got=str(got), instead=f"{limit} at most, in several requests"
                )

    def _check_rows(self, kind: Kind, prompts: list[list[int]], responses: list[list[int]]) -> None:
        longest = max(map(len, responses))
        if longest > kind.max_new_tokens:
            raise UsageError(
                "a response is longer than was said at hello",
                got=f"{longest}",
                instead=f"{kind.max_new_tokens} at most",
            )
        reach = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
        if self._row_tokens is not None and len(kind.prefix) + reach > self._row_tokens:
            raise UsageError(
                "a row is longer than the teacher's reach",
                got=f"{len(kind.prefix)} + {reach} tokens",
                instead=f"{self._row_tokens} at most",
            )
        for what, rows, size in (
            ("prompt", prompts, self._backend.vocab_size),
            ("response", responses, kind.vocab_size),
        ):
            low, high = min(map(min, rows)), max(map(max, rows))
            if low < 0 or high >= size:
                raise UsageError(
                    f"a {what} has ids that are no tokens", got=f"{low} to {high}", instead=f"below {size}"
                )

    def _head_part(self, identity: bytes, asked: wire.HeadRequest) -> None:
        head = self._worker.head
        if head is None or asked.sha256 != head.info.sha256 or asked.part >= head.info.parts:
            error = UsageError("no such part of the head", got=f"{asked.sha256[:16]}, part {asked.part}")
            self._refuse(identity, asked.id, wire.QUESTION, error)
            return
        self._send(identity, wire.encode(wire.HeadPart(asked.id, asked.sha256, asked.part), [head.part(asked.part)]))

    def _pong(self, identity: bytes, session: Session | None, ping: wire.Ping) -> None:
        known = session is not None and ping.session == session.id
        mine = len(session.under_way) if session is not None and known else 0
        pong = wire.Pong(ping.id, self.instance, known, mine, self._schedule.queued, self._draining is not None)
        self._send(identity, wire.encode(pong))

    # ------------------------------------------------------------------ answers

    def status(self, id: int = 0) -> wire.StatusReply:
        """Counters since the start."""
        now = time.monotonic()
        uptime = max(now - self._started, 1e-9)
        while self._recent and now - self._recent[0][0] > _MINUTE:
            self._recent.popleft()
        cache = None if self._cache is None else self._cache.stats
        return wire.StatusReply(
            id=id,
            server=self.instance,
            model=self._name,
            fingerprint=self.fingerprint,
            draining=self._draining is not None,
            uptime=uptime,
            clients=len(self._schedule.sessions),
            requests=self._requests,
            failures=self._failures,
            dropped=self._dropped,
            rows=self._rows,
            tokens=self._tokens,
            computed_tokens=self._computed,
            passes=self._passes,
            batches=self._batches,
            merged=self._merged,
            tokens_per_second=sum(tokens for _, tokens in self._recent) / min(uptime, _MINUTE),
            busy=min(1.0, self._busy / uptime),
            queued=self._schedule.queued,
            queued_rows=self._schedule.queued_rows,
            cache_hits=0 if cache is None else cache.hits,
            cache_misses=0 if cache is None else cache.misses,
        )

    def _refuse_draining(self, identity: bytes, id: int) -> None:
        error = RunError("the teacher service is ending", instead="ask again when it is back")
        self._refuse(identity, id, wire.DRAINING, error, retry=True)

    def _refuse(
        self, identity: bytes, id: int | None, code: str, error: GatespaceError, *, retry: bool = False
    ) -> None:
        self._send_failure(identity, wire.failure(error, code=code, id=id, retry=retry))

    def _send_failure(self, identity: bytes, failure: wire.Failure) -> None:
        self._failures += 1
        self._send(identity, wire.encode(failure))

    def _send(self, identity: bytes, frames: Sequence[wire.Frame]) -> bool:
        """Send without waiting. A client that is gone is forgotten; one that does not read has to ask again."""
        try:
            # Whether there is room is decided with the first frame, so that a message goes whole or not at all.
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._dropped += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._dropped += 1
            self._schedule.leave(identity)
            return False
        return True
