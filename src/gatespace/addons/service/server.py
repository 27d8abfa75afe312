"""Server of the teacher service: many students, in other processes or on other machines, share one model.

Connections arrive at the `Front`, which bounds what they may send. Behind it are two threads: the socket thread
handles messages and tracks clients and their requests (`Schedule`); the model thread runs jobs in order (`Scorer`).
Because scores are batch-invariant (see `gatespace.teacher.local`), rows of several clients share a forward pass, and
each client gets bitwise the scores of a teacher in its own process.

A client is its connection: a session belongs to the ROUTER identity that sent the Hello, replies go there, and no
client can act for another. The identity of a live connection cannot be taken over.
"""

from __future__ import annotations

import queue
import secrets
import signal
import socket as sockets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

import torch

from gatespace.addons.service import wire
from gatespace.addons.service.backend import Backend, LocalBackend, Prepared, Scored, Scorer
from gatespace.addons.service.front import Front
from gatespace.addons.service.keys import DOMAIN, ServerKeys, check_bind
from gatespace.addons.service.schedule import Request, Row, Schedule, ServerLimits, Session
from gatespace.errors import GatespaceError, RunError, UsageError, missing_extra
from gatespace.files import Closing
from gatespace.models.load import Model
from gatespace.teacher.scores import ScoreSpec, TeacherAwayError

try:
    import zmq
    from zmq.auth.thread import ThreadAuthenticator
except ImportError as error:
    raise missing_extra("the teacher service", module="pyzmq", extra="service") from error

__all__ = ["ServerLimits", "TeacherServer"]

_HEARTBEAT = 5.0  # seconds between heartbeats; a connection that misses three is closed
_HANDSHAKE = 10.0  # seconds for a new connection to complete ZeroMQ's handshake, with the right keys
_LINGER = 5.0  # seconds to send the last replies on shutdown
_BUFFERED = 64  # messages queued per connection; beyond it, incoming ones are held back, outgoing ones dropped
_MESSAGES = 128  # max messages handled between two looks at the model's results
_POLL = 0.2  # max seconds between checks for expired sessions and shutdown
_MINUTE = 60.0
_COUNTERS = (
    "requests", "failures", "dropped", "rows", "tokens", "computed_tokens", "passes", "batches", "merged"
)  # fmt: skip
"""Fields of `wire.StatusReply`."""

Job = Callable[[], Callable[[], None]]
"""Runs in the model thread; what it returns runs in the socket thread."""


class _StopNow(BaseException):
    """Aborts the model's current job."""


class _Refusal(Exception):
    """Raised to answer a message with a Failure."""

    def __init__(self, code: str, error: GatespaceError, *, retry: bool = False) -> None:
        super().__init__(code)
        self.code, self.error, self.retry = code, error, retry


class TeacherServer(Closing):
    """Serves a model; as a context manager, in its own threads.

    Args:
        teacher: A model, whose weights must not change; or a backend, which the caller closes.
        bind: ``tcp://host:port``; port 0 or * is any free port. Without `keys` it must be a loopback address.
        keys: CURVE keys and the clients that may connect.
        limits: Queue, batch and size limits.
        report: Called with a message when a client is refused, rows cannot be scored, or the server shuts down.

    Examples:
        with TeacherServer(model, "tcp://127.0.0.1:0") as server:
            RemoteTeacher(server.address, ...)
    """

    def __init__(
        self,
        teacher: Model | Backend,
        bind: str = "tcp://127.0.0.1:5555",
        *,
        keys: ServerKeys | None = None,
        limits: ServerLimits | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        place = check_bind(bind, secured=keys is not None)
        self.limits = limits or ServerLimits()
        self.instance = secrets.token_hex(8)
        """Random; new on every start."""
        self._backend = teacher if isinstance(teacher, Backend) else LocalBackend(teacher)
        self.fingerprint = self._backend.fingerprint
        self._report = report or (lambda text: None)
        self._schedule = Schedule(self.limits)
        self._preparing: set[tuple[bytes, str]] = set()
        """Hellos waiting for the model, by connection and nonce."""
        self._stops = 0
        """1: finish pending requests, then stop; more: stop at once."""
        self._deadline: float | None = None
        """When a draining server gives up pending requests."""
        self._started = time.monotonic()
        self._busy = 0.0
        self._counters = Counter(dict.fromkeys(_COUNTERS, 0))
        self._recent: deque[tuple[float, int]] = deque(maxlen=4096)
        """Times and numbers of response tokens scored."""
        self._scorer = Scorer(self._backend, limit=self.limits.teachers)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: deque[Callable[[], None]] = deque()
        self._scoring = False
        """Whether a batch is queued or running."""
        self._threads = torch.get_num_threads()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # A byte here wakes the poll: sent by the model thread, any other thread, or a signal handler.
        self._wake_receiver, self._wake_sender = sockets.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._front = Front(place, connections=2 * self.limits.clients, report=self._report)
        self._encrypted = keys is not None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._authenticator: ThreadAuthenticator | None = None
        try:
            if keys is not None:
                self._authenticator = ThreadAuthenticator(self._context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(DOMAIN, keys)
                keys.apply(self._socket)
            self._bind()
        except BaseException:
            self._release()
            raise
        self.address = "zmq://{}:{}".format(*self._front.address)
        """``zmq://host:port``, as in a configuration."""

    def _bind(self) -> None:
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # a reply to an unknown client is an error, not silently dropped
            (zmq.ROUTER_HANDOVER, 0),  # no client can take another's identity
            (zmq.SNDHWM, _BUFFERED),
            (zmq.RCVHWM, _BUFFERED),
            (zmq.MAXMSGSIZE, wire.MAX_FRAME),  # per frame; a larger one closes the connection
            (zmq.HANDSHAKE_IVL, round(_HANDSHAKE * 1000)),
            (zmq.HEARTBEAT_IVL, round(_HEARTBEAT * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, round(3 * _HEARTBEAT * 1000)),
            (zmq.HEARTBEAT_TTL, round(3 * _HEARTBEAT * 1000)),
        ):
            self._socket.setsockopt(option, value)
        self._socket.bind(self._front.inner_address)
        self._front.start()

    # ------------------------------------------------------------------ lifecycle

    def run(self, *, signals: Sequence[int] = (), ready: Callable[[], None] | None = None) -> None:
        """Serve until `drain` or `stop` is called. The model runs in the calling thread.

        That should be the main thread: OpenMP gives every computing thread its own team, and with more threads than
        cores they wait for each other by sleeping, which costs a fifth of the speed.

        Args:
            signals: Signals that call `drain`; main thread only.
            ready: Called once the service accepts connections.
        """
        socket_thread = threading.Thread(target=self._serve, name="gatespace-teacher-socket", daemon=True)
        try:
            with suppress(_StopNow), self._draining_on(signals):
                if ready is not None:
                    ready()
                socket_thread.start()
                self._compute()
        finally:
            self.stop()
            if socket_thread.ident is not None:
                socket_thread.join(_LINGER)
            self._release()
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        """Serve in its own threads."""

        def run() -> None:
            try:
                self.run()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="gatespace-teacher-model", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Accept no new requests, finish the pending ones, and stop; a second call stops at once.

        Safe from any thread and from a signal handler.
        """
        self._stops += 1
        self._wake()

    def stop(self) -> None:
        """Stop after the current batch."""
        self._stops += 2
        self._wake()

    def join(self, timeout: float) -> None:
        """Wait until a started server has stopped; raise errors of its threads."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise RunError("the teacher service has not ended", got=f"{timeout:g} s")
        if self._error is not None:
            raise RunError("the teacher service has failed", got=repr(self._error)) from self._error

    def close(self) -> None:
        """Stop and wait."""
        self.stop()
        self.join(self.limits.drain + 2 * _LINGER)

    def __enter__(self) -> Self:
        self.start()
        return self

    @contextmanager
    def _draining_on(self, signals: Sequence[int]) -> Iterator[None]:
        def handle(*_: object) -> None:
            self.drain()
            if self._stops > 1:
                raise _StopNow

        before = {number: signal.signal(number, handle) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wake(self) -> None:
        with suppress(OSError):  # the buffer is full, or the server has stopped
            self._wake_sender.send(b"!")

    def _release(self) -> None:
        self._front.end(2 * _LINGER)
        self._socket.close(linger=round(_LINGER * 1000))
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()  # waits for the last replies, up to the linger time
        self._front.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    # ------------------------------------------------------------------ model thread

    def _compute(self) -> None:
        """Run jobs until the socket thread ends."""
        torch.set_num_threads(self._threads)  # OpenMP keeps the number per thread
        job: Job | None
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=_POLL)  # the timeout lets the main thread handle signals
                except queue.Empty:
                    continue
                if job is None:
                    return
                self._results.append(job())
                self._wake()
        finally:
            self._scorer.close()

    def _prepare(self, identity: bytes, hello: wire.Hello, spec: ScoreSpec) -> Callable[[], None]:
        try:
            return partial(self._finish_hello, identity, hello, spec, self._scorer.prepare(spec))
        except Exception as error:  # a model can raise anything
            return partial(self._finish_hello, identity, hello, spec, _scoring_refusal(error))

    def _score(self, batch: Sequence[Row]) -> Callable[[], None]:
        return partial(self._finish_batch, self._scorer.score(batch))

    # ------------------------------------------------------------------ socket thread

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake_receiver.fileno(), zmq.POLLIN)
            while not self._ended():
                if self._front.error is not None:
                    raise self._front.error
                poller.poll(round(_POLL * 1000))
                with suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
                while self._results:
                    self._results.popleft()()
                for _ in range(_MESSAGES):
                    if not self._receive():
                        break
                self._schedule.expire(time.monotonic())
                if not self._scoring:
                    self._next_batch()
            for identity in list(self._schedule.sessions):
                self._send(identity, wire.Bye())
        except BaseException as error:
            self._error = error
        finally:
            self._jobs.put(None)

    def _ended(self) -> bool:
        if self._stops != 1:
            return self._stops > 1
        pending = len(self._schedule.pending)
        if self._deadline is None:
            self._deadline = time.monotonic() + self.limits.drain
            self._report(f"shutting down: {pending} requests are pending, new ones are refused")
            for identity, session in list(self._schedule.sessions.items()):
                self._send(identity, wire.Draining(self.instance, len(session.pending)))
        if not pending and not self._preparing and not self._scoring:
            return True
        if time.monotonic() < self._deadline:
            return False
        self._report(f"{pending} requests were given up after {self.limits.drain:g} s")
        return True

    def _next_batch(self) -> None:
        batch = self._schedule.batch()
        if batch:
            self._counters["batches"] += 1
            self._counters["merged"] += len({row.request.session.id for row in batch}) > 1
            self._scoring = True
            self._jobs.put(partial(self._score, batch))

    def _finish_batch(self, result: Scored) -> None:
        self._scoring = False
        self._busy += result.seconds
        self._counters += result.counters
        self._recent.append((time.monotonic(), result.counters["tokens"]))
        for request, frames in result.replies:
            if self._schedule.finish(request):
                self._counters["requests"] += 1
                self._send_frames(request.session.identity, frames)
        for request, error in result.failures:
            if self._schedule.finish(request):
                refusal = _scoring_refusal(error)
                problem = f"{refusal.error.what} {refusal.error.got or ''}"
                self._report(f"rows of {request.session.name} could not be scored: {problem}")
                self._send_failure(request.session.identity, request.id, refusal)

    # ------------------------------------------------------------------ messages

    def _receive(self) -> bool:
        """Handle one message; False if there is none."""
        try:
            first = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        identity, frames = first.bytes, self._socket.recv_multipart()
        with suppress(zmq.ZMQError):  # peers on the first protocol version lack it: they get one window in total
            self._front.received(int(first.get(zmq.SRCFD)), map(len, frames), encrypted=self._encrypted)
        try:
            packet = wire.decode(frames)
        except wire.WireError as error:
            code = wire.MALFORMED if error.version is None else wire.VERSION_CODE
            self._send_failure(identity, None, _Refusal(code, error))
            return True
        session = self._schedule.sessions.get(identity)
        if session is not None:
            session.seen = time.monotonic()
        try:
            self._handle(identity, session, packet)
        except _Refusal as refusal:
            self._refuse(identity, packet.message, refusal)
        return True

    def _handle(self, identity: bytes, session: Session | None, packet: wire.Packet) -> None:
        match packet.message:
            case wire.Hello() as hello:
                self._hello(identity, hello, wire.ids_of(packet.arrays[0]))
            case wire.ScoreRequest() as asked:
                self._score_request(_known(session, asked.session), asked.id, packet)
            case wire.HeadRequest() as asked:
                _known(session, asked.session)
                self._head_request(identity, asked)
            case wire.Ping() as ping:
                known = session is not None and ping.session == session.id
                mine = len(session.pending) if session is not None and known else 0
                queued, draining = len(self._schedule.pending), self._stops > 0
                self._send(identity, wire.Pong(ping.id, self.instance, known, mine, queued, draining))
            case wire.StatusRequest() as asked:
                self._send(identity, self.status(asked.id))
            case wire.Bye() as bye:
                if session is not None and bye.session == session.id:
                    self._schedule.leave(identity)
            case wire.Failure() | wire.Draining():
                self._counters["dropped"] += 1  # a Failure in reply to a Failure could loop forever
            case other:
                raise _Refusal(wire.MALFORMED, UsageError(f"clients do not send {type(other).__name__}"))

    def _hello(self, identity: bytes, hello: wire.Hello, prefix: list[int]) -> None:
        self._check_draining()
        vocab_size = hello.vocab_size or self._backend.vocab_size
        self._check_pair(hello, vocab_size, prefix)
        k = min(hello.k, vocab_size) if hello.payload == "top_k" else 1
        spec = ScoreSpec(tuple(prefix), hello.max_new_tokens, vocab_size, hello.payload, k)
        if len(self._preparing) >= self.limits.clients:
            raise _busy("too many clients connect at once")
        if (identity, hello.nonce) not in self._preparing:  # clients resend their Hello
            self._preparing.add((identity, hello.nonce))
            self._jobs.put(partial(self._prepare, identity, hello, spec))

    def _finish_hello(self, identity: bytes, hello: wire.Hello, spec: ScoreSpec, result: Prepared | _Refusal) -> None:
        self._preparing.remove((identity, hello.nonce))
        try:
            if isinstance(result, _Refusal):
                raise result
            self._check_draining()
            self._welcome(identity, hello, spec, result)
        except _Refusal as refusal:
            self._refuse(identity, hello, refusal)

    def _check_pair(self, hello: wire.Hello, vocab_size: int, prefix: list[int]) -> None:
        backend, error = self._backend, None
        if hello.tokenizer not in backend.tokenizers:
            known = " or ".join(sorted(digest[:16] for digest in backend.tokenizers))
            error = UsageError(
                "student and teacher do not have the same vocabulary",
                got=f"digest {hello.tokenizer[:16]}, and {known} here",
                why="a divergence compares the two models id by id",
                instead="two models of one family, with tokenizers of the same version",
            )
        elif hello.payload not in backend.payloads:
            error = UsageError(
                f"this teacher does not give the payload {hello.payload}",
                got=hello.payload,
                why="vLLM computes it, which gives top-k log-probabilities only",
                instead="teacher.payload: top_k, with objective.support: bucket or hybrid",
            )
        elif vocab_size > backend.rows:
            got = f"{backend.rows}, {vocab_size}"
            error = UsageError("the teacher's head has fewer rows than the student has ids", got=got)
        elif prefix and not 0 <= min(prefix) <= max(prefix) < backend.vocab_size:
            error = UsageError("the shared prefix has ids that are not tokens", got=f"{min(prefix)} to {max(prefix)}")
        elif backend.reach is not None and len(prefix) + 1 + hello.max_new_tokens > backend.reach:
            error = UsageError(
                "prefix and response are longer than the teacher's reach",
                got=f"{len(prefix)} + 1 + {hello.max_new_tokens} tokens",
                instead=f"{backend.reach} at most; max_new_tokens can be smaller",
            )
        if error is not None:
            raise _Refusal(wire.PAIR, error)

    def _welcome(self, identity: bytes, hello: wire.Hello, spec: ScoreSpec, prepared: Prepared) -> None:
        backend, limits = self._backend, self.limits
        session = self._schedule.sessions.get(identity)
        if session is None or (session.nonce, session.spec) != (hello.nonce, spec):
            session = Session(
                identity=identity,
                id=secrets.token_hex(16),
                nonce=hello.nonce,
                name=hello.client,
                spec=spec,
                position_bytes=prepared.position_bytes,
                seen=time.monotonic(),
            )
            if not self._schedule.join(session):
                raise _busy("too many clients")
        welcome = wire.Welcome(
            id=hello.id,
            nonce=hello.nonce,
            session=session.id,
            server=self.instance,
            model=backend.name[:256],
            fingerprint=self.fingerprint,
            tokenizer=hello.tokenizer,
            numerics=prepared.numerics,
            kept=backend.cacheable,
            vocab_size=spec.vocab_size,
            payloads=backend.payloads,
            k=spec.k,
            width=backend.width,
            dtype=backend.dtype,  # type: ignore[arg-type]  # one of wire.FLOATS
            position_bytes=prepared.position_bytes,
            limits=wire.Limits(limits.rows, limits.tokens, limits.reply_bytes, limits.client_queue, backend.reach),
            lease=limits.lease,
            head=prepared.head,
        )
        if not self._send(identity, welcome):
            self._schedule.leave(identity)

    def _score_request(self, session: Session, id: int, packet: wire.Packet) -> None:
        request = Request(session, id, *wire.request_rows(packet))
        before = session.pending.get(id)
        if before is not None:
            if (before.prompts, before.responses) != (request.prompts, request.responses):
                error = UsageError("the id belongs to another request", got=f"id {id}", instead="a new id")
                raise _Refusal(wire.DUPLICATE, error)
            return  # already pending
        self._check_draining()
        self._check_request(request)
        if why := self._schedule.full(request):
            raise _busy("the teacher has too many requests", why)
        self._schedule.add(request)

    def _check_request(self, request: Request) -> None:
        limits, backend, spec = self.limits, self._backend, request.session.spec
        prompts, responses = request.prompts, request.responses
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        longest = len(spec.prefix) + max(lengths)
        for code, what, got, most in (
            (wire.LIMIT, "the request has too many rows", len(prompts), limits.rows),
            (wire.LIMIT, "the request has too many tokens", sum(lengths), limits.tokens),
            (wire.LIMIT, "the request has too many bytes of scores", request.reply_bytes, limits.reply_bytes),
            (wire.QUESTION, "a response is too long", max(map(len, responses)), spec.max_new_tokens),
            (wire.QUESTION, "a row is longer than the teacher's reach", longest, backend.reach or longest),
            (wire.QUESTION, "a prompt has ids that are not tokens", max(map(max, prompts)), backend.vocab_size - 1),
            (wire.QUESTION, "a response has ids that are not tokens", max(map(max, responses)), spec.vocab_size - 1),
            (wire.QUESTION, "a row has ids that are not tokens", -min(map(min, [*prompts, *responses])), 0),
        ):
            if got > most:
                raise _Refusal(code, UsageError(what, got=str(got), instead=f"{most} at most"))

    def _head_request(self, identity: bytes, asked: wire.HeadRequest) -> None:
        head = self._scorer.head
        if head is None or asked.sha256 != head.info.sha256 or asked.part >= head.info.parts:
            error = UsageError("no such part of the head", got=f"{asked.sha256[:16]}, part {asked.part}")
            raise _Refusal(wire.QUESTION, error)
        self._send(identity, wire.HeadPart(asked.id, asked.sha256, asked.part), [head.part(asked.part)])

    # ------------------------------------------------------------------ replies

    def status(self, id: int = 0) -> wire.StatusReply:
        """Return the counters since the start."""
        now = time.monotonic()
        uptime = max(now - self._started, 1e-9)
        recent = sum(tokens for moment, tokens in list(self._recent) if now - moment <= _MINUTE)
        pending = self._schedule.pending
        cache = None if self._backend.cache is None else self._backend.cache.stats
        return wire.StatusReply(
            id=id,
            server=self.instance,
            model=self._backend.name[:256],
            fingerprint=self.fingerprint,
            draining=self._stops > 0,
            uptime=uptime,
            clients=len(self._schedule.sessions),
            tokens_per_second=recent / min(uptime, _MINUTE),
            busy=min(1.0, self._busy / uptime),
            queued=len(pending),
            queued_rows=sum(len(request.prompts) for request in pending),
            cache_hits=0 if cache is None else cache.hits,
            cache_misses=0 if cache is None else cache.misses,
            **{name: self._counters[name] for name in _COUNTERS},
        )

    def _refuse(self, identity: bytes, message: wire.Message, refusal: _Refusal) -> None:
        if isinstance(message, wire.Hello) and not refusal.retry:
            self._report(f"{message.client} was refused: {refusal.error.what}")
        self._send_failure(identity, getattr(message, "id", None), refusal)

    def _send_failure(self, identity: bytes, id: int | None, refusal: _Refusal) -> None:
        self._counters["failures"] += 1
        self._send(identity, wire.failure(refusal.error, code=refusal.code, id=id, retry=refusal.retry))

    def _send(self, identity: bytes, message: wire.Message, arrays: Sequence[wire.Array] = ()) -> bool:
        return self._send_frames(identity, wire.encode(message, arrays))

    def _send_frames(self, identity: bytes, frames: Sequence[wire.Frame]) -> bool:
        """Send without blocking. Remove a client that is gone; one that does not receive has to retry."""
        try:
            # ZeroMQ checks for room at the first frame, so a message is sent whole or not at all.
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._counters["dropped"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._counters["dropped"] += 1
            self._schedule.leave(identity)
            return False
        return True

    def _check_draining(self) -> None:
        if self._stops:
            error = RunError("the teacher service is ending", instead="retry when it is back")
            raise _Refusal(wire.DRAINING, error, retry=True)


# ---------------------------------------------------------------------------------------------------- refusals


def _known(session: Session | None, named: str) -> Session:
    """The connection's session, if the message names it."""
    if session is not None and secrets.compare_digest(session.id.encode(), named.encode()):
        return session
    why = "the server was restarted, the connection was lost, or the client was silent for long"
    raise _Refusal(wire.SESSION, RunError("no such session", why=why, instead="a new Hello"), retry=True)


def _busy(what: str, why: str = "") -> _Refusal:
    return _Refusal(wire.BUSY, RunError(what, why=why, instead="wait, and retry"), retry=True)


def _scoring_refusal(error: Exception) -> _Refusal:
    """Refusal for a model error. A retry may succeed after running out of memory, or once vLLM is back."""
    retry = isinstance(error, (MemoryError, torch.OutOfMemoryError, TeacherAwayError))
    if isinstance(error, GatespaceError):
        return _Refusal(wire.PAIR if isinstance(error, UsageError) else wire.SCORING, error, retry=retry)
    text = str(error).strip().splitlines()
    got = f"{type(error).__name__}: {text[0][:300] if text else ''}"
    return _Refusal(wire.SCORING, RunError("the teacher has failed", got=got), retry=retry)
