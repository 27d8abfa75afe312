"""Client of the teacher service; its scores are bitwise those of a teacher in this process.

The teacher's head is downloaded once; every reply carries hidden states. Together they give the full distribution.
Scores have the same cache keys as those of a `LocalTeacher`, so runs share them wherever the teacher runs.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq
from msgspec.structs import replace
from torch import Tensor

from gatespace.addons.service import wire
from gatespace.addons.service.keys import ClientKeys, connect, is_loopback, service_address
from gatespace.config.base import Name, Place, Section
from gatespace.config.sections import Positive
from gatespace.errors import RunError, UsageError
from gatespace.files import Closing
from gatespace.gating.projection import Head
from gatespace.models.cache_root import cache_root
from gatespace.retry import backoff
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.scores import (
    Form,
    RowScores,
    Scores,
    ScoreSpec,
    TeacherAwayError,
    TeacherStats,
    check_questions,
)

_HEARTBEAT = 2.0  # max seconds between heartbeats while waiting for a reply
_TICK = 50  # milliseconds between checks for timeouts and retries while waiting for a reply
_SOON = 5.0  # seconds of waiting for a first reply before a message to the user
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
"""Seconds before a retry."""
_LINGER = 500  # milliseconds to send the last message
_LARGEST_HEAD = 16 << 30  # bytes
_PARTS_AT_ONCE = 4
_HEADS = 8  # heads kept on disk; the oldest are removed


class Options(Section):
    """`teacher.options` of a teacher at zmq://HOST:PORT."""

    timeout: Positive = 60.0
    """Seconds without a reply after which a request is retried over a new connection."""

    patience: Positive = 600.0
    """Seconds without a reply after which the run writes a checkpoint and stops."""

    client_key: Place | None = None
    """The file of this client's secret key, from `gatespace teacher keygen`; null: no encryption, on this machine
    only."""

    server_key: Name | None = None
    """The public key of the service, or the file that holds it; null: no encryption, on this machine only."""


class RemoteTeacher(Closing):
    """A `Teacher` that scores through `gatespace teacher serve`.

    Args:
        address: ``zmq://host:port``.
        spec: Score specification.
        tokenizer_digest: `wire.vocabulary_digest` of the student's tokens; a teacher with another vocabulary refuses.
        keys: CURVE keys; required unless the teacher is on this machine.
        timeout: Seconds without a reply after which a request is retried over a new connection.
        patience: Seconds without a reply after which `TeacherAwayError` is raised.
        cache: Cached scores; hits send no message.
        report: Called with a message when the teacher does not reply, or was restarted.
        device: Device of the scores.
    """

    def __init__(
        self,
        address: str,
        spec: ScoreSpec,
        *,
        tokenizer_digest: str,
        keys: ClientKeys | None = None,
        timeout: float = 60.0,
        patience: float = 600.0,
        cache: ScoreCache | None = None,
        report: Callable[[str], None] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if spec.payload not in ("hidden", "top_k"):
            raise UsageError("a payload is 'hidden' or 'top_k'", got=spec.payload)
        self.stats = TeacherStats()
        self._spec, self._device = spec, torch.device(device)
        payload: wire.Payload = "hidden" if spec.payload == "hidden" else "top_k"
        name = f"{platform.node()}:{os.getpid()}"[:256]
        hello = wire.Hello(0, "", name, tokenizer_digest, spec.max_new_tokens, payload, spec.k, spec.vocab_size)
        self._connection = Connection(
            address, hello, wire.ids_array(spec.prefix), keys=keys, timeout=timeout, patience=patience, report=report
        )
        try:
            self._welcome = welcome = self._connection.open()
            self._check(welcome)
            self.fingerprint, self.numerics = welcome.fingerprint, welcome.numerics
            self.vocab_size = welcome.vocab_size
            self.dtype: torch.dtype = getattr(torch, welcome.dtype)
            head = None if welcome.head is None else self._head(welcome.head, report)
            self._cache = cache if welcome.kept else None
            dtype = self.dtype if spec.payload == "hidden" else torch.float32
            self._form = Form(self.fingerprint, self.numerics, spec.payload, welcome.k, dtype, self._device, head)
        except BaseException:
            self.close()
            raise

    def about(self) -> dict[str, str]:
        """What a run records about the teacher."""
        return {"address": str(self._connection.address), "model": self._welcome.model, "numerics": self.numerics}

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()

    # ------------------------------------------------------------------ scores

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """Score all tokens of `responses`, each continuing its prompt (without the shared prefix)."""
        return self.ask(prompts, responses)()

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """Send without waiting; calling the result waits and returns the scores."""
        check_questions(prompts, responses, self._spec.max_new_tokens)
        self.stats.rows += len(responses)
        self.stats.tokens += sum(map(len, responses))
        rows = RowScores(self._form, self._cache, self._spec.prefix, prompts, responses)
        requests: list[tuple[list[int], Request]] = []
        for part in self._divided(rows.missing, prompts, responses):
            arrays = wire.request_arrays([prompts[row] for row in part], [responses[row] for row in part])
            requests.append((part, self._connection.submit(wire.ScoreRequest(0, ""), arrays)))
        known: list[Scores] = []

        def scores() -> Scores:
            if not known:
                packets = self._connection.replies([request for _, request in requests])
                for (part, _), packet in zip(requests, packets, strict=True):
                    rows.fill(part, self._rows(packet, [len(responses[row]) for row in part]))
                known.append(rows.scores())
            return known[0]

        return scores

    def _divided(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Split rows in order into as few requests as the server's limits allow. Scores do not depend on it."""
        limits, prefix = self._welcome.limits, len(self._spec.prefix)
        most = max(1, limits.reply_bytes // self._welcome.position_bytes)
        parts: list[list[int]] = []
        tokens = written = 0
        for row in rows:
            size = len(prompts[row]) + len(responses[row])
            if size > limits.tokens or (limits.row_tokens is not None and prefix + size > limits.row_tokens):
                raise RunError(
                    f"a prompt and its response are too long for the teacher at {self._connection.address}",
                    got=f"{prefix + size} tokens",
                )
            fits = tokens + size <= limits.tokens and written + len(responses[row]) <= most
            if not parts or len(parts[-1]) == limits.rows or not fits:
                parts.append([])
                tokens = written = 0
            parts[-1].append(row)
            tokens += size
            written += len(responses[row])
        return parts

    def _rows(self, packet: wire.Packet, lengths: Sequence[int]) -> Sequence[Tensor]:
        """Rows of a reply in cache layout: hidden states; or ids, log-probabilities and the sampled token's own."""
        reply, count, welcome = packet.message, sum(lengths), self._welcome
        expected: list[tuple[str, tuple[int, ...]]] = [(welcome.dtype, (count, welcome.width))]
        if self._spec.payload == "top_k":
            expected = [("int32", (count, welcome.k)), ("float32", (count, welcome.k)), *[("float32", (count,))] * 2]
        found = [(buffer.dtype, buffer.shape) for buffer in packet.arrays]
        if not isinstance(reply, wire.ScoreReply) or reply.rows != len(lengths) or found != expected:
            raise RunError(f"the teacher at {self._connection.address} has replied to another request", got=found)
        self.stats.computed_tokens += reply.computed_tokens
        self.stats.passes += reply.passes
        whole, *others = [wire.tensor_of(buffer) for buffer in packet.arrays]
        if self._spec.payload == "top_k":
            log_probs, sampled, _ = others  # the tail follows from the others
            whole = torch.cat([whole.float(), log_probs, sampled[:, None]], 1)
        rows: tuple[Tensor, ...] = whole.split(list(lengths))
        return rows

    def _check(self, welcome: wire.Welcome) -> None:
        """Raise if the server's Welcome is inconsistent."""
        head, wrong = welcome.head, ""
        if welcome.vocab_size != self._spec.vocab_size:
            wrong = f"{welcome.vocab_size} ids instead of {self._spec.vocab_size}"
        elif self._spec.payload == "hidden":
            if head is None:
                wrong = "hidden states without a head"
            elif head.shape[0] < welcome.vocab_size or head.shape[1] != welcome.width:
                wrong = f"a head of {head.shape[0]} by {head.shape[1]} for {welcome.vocab_size} ids"
            elif head.bytes > _LARGEST_HEAD:
                wrong = f"a head of {head.bytes} bytes"
        if wrong:
            raise UsageError(f"the teacher at {self._connection.address} cannot be used in this pair", got=wrong)

    # ------------------------------------------------------------------ the head

    def _head(self, info: wire.HeadInfo, report: Callable[[str], None] | None) -> Head:
        """Load the head from disk or from the server."""
        path = cache_root() / "heads" / info.sha256
        content: bytes | bytearray | None = _read_head(path, info)
        if content is None:
            content = self._download(info)
            if hashlib.sha256(content).hexdigest() != info.sha256:
                raise RunError(f"the head of the teacher at {self._connection.address} is damaged", got=info.sha256)
            try:
                _write_head(path, content)
            except OSError as error:
                if report is not None:
                    report(f"the teacher's head is not kept for later runs: {error}")
        rows, columns = info.shape
        split = rows * columns * wire.WIDTHS[info.dtype]
        view = memoryview(content)
        weight = wire.tensor_of(wire.Array(info.dtype, info.shape, view[:split]))
        bias = wire.tensor_of(wire.Array(info.dtype, (rows,), view[split:])) if info.bias else None
        # Cloned into torch's own memory, like model weights: the last bits of a product depend on alignment.
        weight, bias = weight.clone().to(self._device), None if bias is None else bias.clone().to(self._device)
        return Head(weight, bias, info.scale, info.softcap)

    def _download(self, info: wire.HeadInfo) -> bytearray:
        content = bytearray(info.bytes)
        requests: dict[int, Request] = {}
        for part in range(info.parts):
            for ahead in range(part, min(part + _PARTS_AT_ONCE, info.parts)):
                if ahead not in requests:
                    requests[ahead] = self._connection.submit(wire.HeadRequest(0, "", info.sha256, ahead))
            ((message, arrays),) = self._connection.replies([requests[part]])
            requests[part].reply = None
            span = slice(part * wire.PART_BYTES, min((part + 1) * wire.PART_BYTES, info.bytes))
            right = isinstance(message, wire.HeadPart) and (message.sha256, message.part) == (info.sha256, part)
            if not right or arrays[0].nbytes != span.stop - span.start:
                raise RunError(f"the teacher at {self._connection.address} has sent another part of its head")
            content[span] = arrays[0].data
        return content


def _read_head(path: Path, info: wire.HeadInfo) -> bytes | None:
    try:
        content = path.read_bytes() if path.stat().st_size == info.bytes else b""
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == info.sha256 else None


def _write_head(path: Path, content: bytes | bytearray) -> None:
    """Save a head for later runs, atomically; safe across processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    heads = sorted(path.parent.iterdir(), key=lambda head: head.stat().st_mtime, reverse=True)
    for old in heads[_HEADS:]:
        old.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- connection


@dataclass(eq=False)
class Request:
    """A request and, once received, its reply."""

    message: wire.ScoreRequest | wire.HeadRequest
    """The session is filled in on sending."""
    arrays: Sequence[wire.Array]
    sent: float | None = None
    """None: to be sent or resent."""
    not_before: float = 0.0
    refusals: int = 0
    reply: wire.Packet | None = None


class Connection(Closing):
    """Client side of a session; survives restarts of the server.

    Servers are killed, restarted, suspended and overloaded, and messages are lost with them. ZeroMQ reconnects by
    itself, with backoff. A server that does not know the session gets a new Hello, and a request is resent under its
    id until it has a reply. Every wait is bounded: after `timeout` the user gets a message, after `patience` an error.
    Everything runs in the calling thread; between calls, the socket buffers what the server sends.

    Args:
        address: ``zmq://host:port``.
        hello: The Hello; its id and nonce are filled in.
        prefix: The buffer of the Hello.
        keys: CURVE keys of an encrypted connection.
        timeout: Seconds of silence after which to reconnect.
        patience: Seconds without a reply after which `TeacherAwayError` is raised.
        report: Called with a message when the teacher does not reply, or was restarted.
    """

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        prefix: wire.Array,
        *,
        keys: ClientKeys | None,
        timeout: float,
        patience: float,
        report: Callable[[str], None] | None,
    ) -> None:
        self.address = service_address(address)
        if keys is None and not is_loopback(self.address):
            raise UsageError(
                "a teacher on another machine needs an encrypted connection",
                got=address,
                why="anyone on the network path could read and change prompts and scores",
                instead="teacher.options: {client_key: …, server_key: …}, which `gatespace teacher keygen` makes",
            )
        self._hello, self._prefix, self._keys = hello, prefix, keys
        self._timeout, self._patience = timeout, patience
        self._report = report or (lambda text: None)
        self._ids = itertools.count(1)
        self._pending: dict[int, Request] = {}
        self._welcome: wire.Welcome | None = None
        """The latest; a later one must come from the same teacher."""
        self._session: str | None = None
        self._greeted = False
        """Whether the current Hello has been sent."""
        self._forget_session()
        self._heartbeat = min(_HEARTBEAT, timeout / 3)
        self._ping = (0, 0.0)
        """Id and send time of the last heartbeat."""
        self._next_ping = self._heard = self._progress = time.monotonic()
        """Times of: the next heartbeat; the last message received; the last Welcome or reply received."""
        self._notes = 0
        self._closed = False
        self._context = zmq.Context()
        self._socket = connect(self._context, self.address, keys, timeout=timeout)

    def open(self) -> wire.Welcome:
        """Begin a session; return the server's Welcome."""
        self._wait(lambda: self._session is not None)
        assert self._welcome is not None
        return self._welcome

    def submit(self, message: wire.ScoreRequest | wire.HeadRequest, arrays: Sequence[wire.Array] = ()) -> Request:
        """Send a request without waiting. Its id and session are filled in."""
        self._check_open()
        request = Request(replace(message, id=next(self._ids)), arrays)
        self._pending[request.message.id] = request
        self._send_requests(time.monotonic())
        return request

    def replies(self, requests: Sequence[Request]) -> list[wire.Packet]:
        """Wait for the replies to requests."""
        self._wait(lambda: all(request.reply is not None for request in requests))
        return [request.reply for request in requests if request.reply is not None]

    def close(self) -> None:
        """End the session."""
        if not self._closed:
            self._closed = True
            if self._session is not None:
                self._send(wire.Bye(self._session))
            self._socket.close(linger=_LINGER)
            self._context.term()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the connection to the teacher at {self.address} is closed")

    # ------------------------------------------------------------------ waiting

    def _wait(self, done: Callable[[], bool]) -> None:
        self._check_open()
        start = self._heard = self._progress = time.monotonic()
        self._next_ping = start + self._heartbeat
        self._notes = 0
        while not done():
            now = time.monotonic()
            self._check_time(now)
            self._send_heartbeat(now)
            self._send_requests(now)
            if self._socket.poll(_TICK):
                self._receive()
        waited = time.monotonic() - start
        if self._notes and waited > self._timeout:
            self._report(f"the teacher at {self.address} has replied after {_seconds(waited)}")

    def _check_time(self, now: float) -> None:
        away = now - self._progress
        if away > self._patience:
            wrong_key = ", or one of the keys is wrong, which a server does not say" if self._keys is not None else ""
            raise TeacherAwayError(
                f"the teacher at {self.address} has not replied for {_seconds(away)}",
                why=f"it is not running there{wrong_key}; teacher.options.patience is {_seconds(self._patience)}",
                instead="check that `gatespace teacher serve` is running there",
            )
        if away > self._timeout * (self._notes + 1):
            self._notes += 1
            if now - self._heard < self._timeout / 2:
                self._report(f"the teacher at {self.address} is busy; {_seconds(away)} so far")
            else:
                self._report(f"the teacher at {self.address} has not replied for {_seconds(away)}; retrying")
        elif self._welcome is None and self._notes == 0 and away > _SOON:
            self._notes += 1
            limit = f"up to {_seconds(self._patience)}, teacher.options.patience"
            self._report(f"waiting for the teacher at {self.address} ({limit})")

    # ------------------------------------------------------------------ sending

    def _send_heartbeat(self, now: float) -> None:
        if now >= self._next_ping:
            self._next_ping = now + self._heartbeat
            self._ping = (next(self._ids), now)
            self._send(wire.Ping(self._ping[0], self._session))
            self._greeted = False  # a Hello may have been lost: resend it with every heartbeat
        if self._session is None and not self._greeted:
            self._greeted = self._send(self._hello, [self._prefix])

    def _send_requests(self, now: float) -> None:
        if self._session is None or self._welcome is None:
            return
        room = self._welcome.limits.requests - sum(request.sent is not None for request in self._pending.values())
        due = [request for request in self._pending.values() if request.sent is None and request.not_before <= now]
        for request in due[: max(0, room)]:
            if self._send(replace(request.message, session=self._session), request.arrays):
                request.sent = now

    def _send(self, message: wire.Message, arrays: Sequence[wire.Array] = ()) -> bool:
        try:
            self._socket.send_multipart(wire.encode(message, arrays), zmq.NOBLOCK)
        except zmq.Again:  # not connected, or the buffer is full
            return False
        return True

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> None:
        """Handle all messages that have arrived."""
        while True:
            try:
                packet = wire.decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            except wire.WireError as error:
                if error.version is not None:
                    raise UsageError(error.what, got=error.got, why=error.why, instead=error.instead) from error
                continue  # the retry replaces it
            self._heard = time.monotonic()
            self._handle(packet)

    def _handle(self, packet: wire.Packet) -> None:
        match packet.message:
            case wire.Welcome() as welcome if self._session is None and welcome.nonce == self._hello.nonce:
                self._begin(welcome)
            case wire.ScoreReply() | wire.HeadPart() as reply:
                # Ignore a reply to a request that already has one, or from an earlier session.
                request = self._pending.pop(reply.id, None)
                if request is not None:
                    request.reply = packet
                    self._progress = self._heard
            case wire.Pong() as pong if self._session is not None and pong.id == self._ping[0]:
                if not pong.known:
                    self._forget_session()
                elif pong.mine == 0:
                    # Replies are ordered before the Pong, so requests sent before the heartbeat were lost.
                    for request in self._pending.values():
                        if request.sent is not None and request.sent < self._ping[1]:
                            request.sent = None
            case wire.Failure() as failure:
                self._fail(failure)
            case wire.Bye():
                self._forget_session()

    def _begin(self, welcome: wire.Welcome) -> None:
        before = self._welcome
        if before is not None:
            for name in ("fingerprint", "numerics", "tokenizer", "vocab_size", "k", "width", "dtype"):
                old, new = getattr(before, name), getattr(welcome, name)
                if old != new:
                    raise TeacherAwayError(
                        f"the teacher at {self.address} has changed",
                        got=f"its {name} is {new}, and was {old} ({welcome.model}, {before.model})",
                        why="scores of two teachers do not belong in one run",
                        instead="start the one that the run began with",
                    )
            if welcome.server != before.server:
                self._report(f"the teacher at {self.address} was restarted; continuing")
        self._welcome, self._session = welcome, welcome.session
        self._progress = self._heard

    def _fail(self, failure: wire.Failure) -> None:
        request = self._pending.get(failure.id) if failure.id is not None else None
        if failure.code == wire.SESSION:
            if self._session is not None:
                self._forget_session()
        elif failure.retry:
            if request is not None:  # a Hello is resent with the next heartbeat
                request.refusals += 1
                pause = backoff(request.refusals, first=_FIRST_PAUSE, longest=min(_LONGEST_PAUSE, self._timeout))
                request.sent, request.not_before = None, self._heard + pause
        elif request is not None or failure.id == self._hello.id or failure.code == wire.VERSION_CODE:
            kind: type[RunError | UsageError] = UsageError if self._welcome is None else TeacherAwayError
            if request is not None:
                del self._pending[request.message.id]
                kind = RunError
            what = f"the teacher at {self.address}: {failure.what}"
            raise kind(what, got=failure.got, why=failure.why, instead=failure.instead)

    def _forget_session(self) -> None:
        """Start over: a new Hello, then all pending requests."""
        self._session, self._greeted = None, False
        self._hello = replace(self._hello, id=next(self._ids), nonce=secrets.token_hex(16))
        for request in self._pending.values():
            request.sent, request.not_before = None, 0.0


def _seconds(count: float) -> str:
    return f"{count:.0f} s" if count >= 10 else f"{count:.1g} s"
