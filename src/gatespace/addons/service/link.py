"""A client's side of a conversation with a teacher service: questions that are repeated until they are answered.

Servers are killed, restarted, stopped and overrun, and messages are lost with them. So a question has an id under
which it may be asked again and has one answer; a server that does not know the client is greeted again; one that is
silent gets a new connection. No wait is without end: after `timeout` somebody is told, after `patience` it is an error.

All of it happens in the calls of one thread. Between them, what the server sends is collected by the socket.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from gatespace.addons.service import wire
from gatespace.addons.service.keys import ClientKeys
from gatespace.config.address import Address
from gatespace.errors import RunError, UsageError
from gatespace.seeding import generator
from gatespace.teacher.scores import TeacherAwayError

_PING = 2.0
"""Seconds between two questions whether the server is there, while an answer is waited for."""
_REGREET = 4
"""Pings after which somebody who is there is greeted again."""
_SOON = 5.0
"""Seconds after which a server that was not there from the start is said to be waited for."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
"""Seconds before something is tried again; twice as many each time."""
_LAST_WORD = 500
"""Milliseconds that a farewell may take."""

Body = Callable[[int, str], tuple[wire.Message, Sequence[wire.Array]]]
"""From an id and a session to a message."""


@dataclass(eq=False)
class Question:
    """Something that was asked, until it is answered."""

    id: int
    body: Body
    sent: float | None = None
    """When it went out; None: it is still to go, or to go again."""
    not_before: float = 0.0
    refusals: int = 0
    answer: wire.Packet | None = None


class Link:
    """Asks a server, whatever happens to it.

    Args:
        address: Where it is.
        hello: The greeting, given an id and a nonce.
        timeout: Seconds of silence after which a connection is given up and a new one tried.
        patience: Seconds without any answer after which `TeacherAwayError` is raised.
        keys: Of an encrypted connection.
        report: Is told what a user should know.
    """

    def __init__(
        self,
        address: Address,
        hello: Body,
        *,
        timeout: float = 60.0,
        patience: float = 600.0,
        keys: ClientKeys | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.address = address
        self.welcome: wire.Welcome | None = None
        """What the server said of itself at first, and has to say again whenever it is greeted again."""
        self._hello, self._keys, self._report = hello, keys, report
        self._timeout, self._patience = timeout, patience
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._ids = itertools.count(1)
        self._open: dict[int, Question] = {}
        self._session: str | None = None
        self._greeting: tuple[int, str, float] | None = None  # id, nonce, when
        # No number of a run depends on when something is repeated; clients that lost a server together must not
        # come back together, so each has a stream of its own.
        self._jitter = generator(secrets.randbits(62), "teacher", "pause").random
        self._failures = 0
        self._not_before = 0.0
        self._heard = self._progress = self._pinged = time.monotonic()
        self._last_ping: tuple[int, float] = (0, 0.0)
        self._noted = 0
        self._draining = False
        self._closed = False

    # ------------------------------------------------------------------ asking

    def open(self) -> wire.Welcome:
        """Greet the server; what it says of itself."""
        self._wait(lambda: self._session is not None)
        assert self.welcome is not None
        return self.welcome

    def ask(self, body: Body) -> Question:
        """Ask, and do not wait."""
        self._check_open()
        question = Question(next(self._ids), body)
        self._open[question.id] = question
        if self._session is not None:
            self._push(time.monotonic())
        return question

    def answers(self, questions: Sequence[Question]) -> list[wire.Packet]:
        """Wait for the answers."""
        self._wait(lambda: all(question.answer is not None for question in questions))
        return [question.answer for question in questions if question.answer is not None]

    def close(self) -> None:
        """Take leave."""
        if self._closed:
            return
        self._closed = True
        if self._socket is not None:
            if self._session is not None:
                self._send(wire.Bye(self._session))
            self._socket.close(linger=_LAST_WORD)
        self._context.term()

    # ------------------------------------------------------------------ waiting

    def _wait(self, done: Callable[[], bool]) -> None:
        self._check_open()
        began = time.monotonic()
        self._heard = self._progress = self._pinged = began
        self._noted = 0
        while not done():
            now = time.monotonic()
            away = now - self._progress
            if away > self._patience:
                raise self._away(away)
            if now - self._heard > self._timeout or self._unwelcome(now):
                self._note(f"the teacher at {self.address} has not answered for {_seconds(away)}; trying again")
                self._reset(now)
            elif away > self._timeout * (self._noted + 1):
                self._noted += 1
                self._note(f"the teacher at {self.address} is there and at work; {_seconds(away)} so far")
            elif self.welcome is None and self._noted == 0 and away > _SOON:
                self._noted += 1
                self._note(
                    f"waiting for the teacher at {self.address} (up to {_seconds(self._patience)}, teacher.patience)"
                )
            self._push(now)
            self._receive(self._pause(now))
        if self._noted and (waited := time.monotonic() - began) > self._timeout:
            self._note(f"the teacher at {self.address} has answered after {_seconds(waited)}")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the connection to the teacher at {self.address} is closed")

    def _unwelcome(self, now: float) -> bool:
        """Whether a greeting was lost on the way, though somebody is there."""
        return self._greeting is not None and now - self._greeting[2] > self._timeout

    def _pause(self, now: float) -> float:
        """How long nothing has to be done unless a message comes."""
        times = [self._progress + self._patience, self._heard + self._timeout, self._pinged + self._ping]
        times.append(self._progress + self._timeout * (self._noted + 1))
        if self._socket is None:
            times.append(self._not_before)
        times += [question.not_before for question in self._open.values() if question.sent is None]
        ahead = [moment - now for moment in times if moment > now]
        return max(0.001, min(ahead, default=0.001))

    @property
    def _ping(self) -> float:
        return min(_PING, self._timeout / 3)

    def _away(self, seconds: float) -> TeacherAwayError:
        reasons = ["it does not run, or not there"]
        if self._keys is not None:
            reasons.append("one of the keys is not the right one, which a server does not say")
        return TeacherAwayError(
            f"the teacher at {self.address} has not answered for {_seconds(seconds)}",
            why=f"{', or '.join(reasons)}; teacher.patience is {_seconds(self._patience)}",
            instead="see that `gatespace teacher serve` runs there",
        )

    # ------------------------------------------------------------------ sending

    def _push(self, now: float) -> None:
        """Send what is due."""
        if self._socket is None:
            if now < self._not_before:
                return
            self._connect()
        if self._session is None:
            if self._greeting is None:
                self._greeting = (next(self._ids), secrets.token_hex(16), now)
                self._send(*self._hello(*self._greeting[:2]))
        elif not self._draining:
            assert self.welcome is not None
            room = self.welcome.limits.requests - sum(question.sent is not None for question in self._open.values())
            for question in list(self._open.values()):
                if room > 0 and question.sent is None and question.not_before <= now:
                    if not self._send(*question.body(question.id, self._session)):
                        break
                    question.sent = now
                    room -= 1
        if now - self._pinged >= self._ping:
            self._pinged = now
            self._last_ping = (next(self._ids), now)
            self._send(wire.Ping(self._last_ping[0], self._session))

    def _send(self, message: wire.Message, arrays: Sequence[wire.Array] = ()) -> bool:
        assert self._socket is not None
        try:
            self._socket.send_multipart(wire.encode(message, arrays), zmq.NOBLOCK)
        except zmq.Again:  # much has been sent that nobody takes
            return False
        return True

    def _connect(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.maxmsgsize = wire.MAX_BYTES
        socket.tcp_keepalive = 1
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        socket.ipv6 = self.address.host.startswith("[")
        if self._keys is not None:
            self._keys.apply(socket)
        try:
            socket.connect(self.address.tcp)
        except zmq.ZMQError as error:
            socket.close()
            raise UsageError("this address cannot be connected to", got=self.address, why=str(error)) from error
        self._socket = socket

    # ------------------------------------------------------------------ receiving

    def _receive(self, seconds: float) -> None:
        """Wait for a message and take in all that are there."""
        if self._socket is None:
            time.sleep(seconds)
            return
        if not self._socket.poll(math.ceil(1000 * seconds)):
            return
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = time.monotonic()
            try:
                packet = wire.decode(frames)
            except wire.WireError as error:
                if error.version is not None:
                    raise UsageError(error.what, got=error.got, why=error.why, instead=error.instead) from error
                self._reset(now)  # what else comes this way cannot be relied on either
                return
            self._heard = now
            self._take(packet, now)

    def _take(self, packet: wire.Packet, now: float) -> None:
        message = packet.message
        if isinstance(message, wire.Welcome):
            self._greeted(message, now)
        elif isinstance(message, wire.ScoreReply | wire.HeadPart):
            # One that was answered before, or of somebody before, is nobody's question any more.
            question = self._open.pop(message.id, None)
            if question is not None:
                question.answer = packet
                self._progressed(now)
        elif isinstance(message, wire.Pong):
            self._ponged(message)
        elif isinstance(message, wire.Failure):
            self._refused(message, now)
        elif isinstance(message, wire.Draining):
            self._draining = True
        elif isinstance(message, wire.Bye):
            self._reset(now)

    def _greeted(self, welcome: wire.Welcome, now: float) -> None:
        if self._greeting is None or (welcome.id, welcome.nonce) != self._greeting[:2]:
            return
        if self.welcome is not None:
            self._same(self.welcome, welcome)
            if welcome.server != self.welcome.server:
                self._note(f"the teacher at {self.address} was started again; going on")
        self.welcome, self._session, self._greeting = welcome, welcome.session, None
        for question in self._open.values():
            question.sent = None
        self._progressed(now)

    def _same(self, before: wire.Welcome, now: wire.Welcome) -> None:
        """Raise unless it is the teacher of before: another one's scores would be another run's."""
        for name in ("fingerprint", "numerics", "tokenizer", "vocab_size", "k", "width", "dtype"):
            old, new = getattr(before, name), getattr(now, name)
            if old != new:
                raise TeacherAwayError(
                    f"the teacher at {self.address} is another one than before",
                    got=f"its {name} is {new}, and was {old} ({now.model}, {before.model})",
                    why="scores of two teachers do not belong into one run",
                    instead="start the one that the run began with",
                )

    def _ponged(self, pong: wire.Pong) -> None:
        if pong.id != self._last_ping[0]:
            return
        if self._session is None:
            # A server that has to get ready takes its time. One that was started in the meantime knows of no greeting.
            if self._greeting is not None and self._last_ping[1] - self._greeting[2] > _REGREET * self._ping:
                self._greeting = None
        elif not pong.known:
            self._forget_session()
        elif pong.mine == 0:
            # Answers come before this one where there are any. So a question from before the ping was lost.
            for question in self._open.values():
                if question.sent is not None and question.sent < self._last_ping[1]:
                    question.sent = None
        if pong.draining:
            self._draining = True

    def _refused(self, failure: wire.Failure, now: float) -> None:
        greeting = self._greeting is not None and failure.id == self._greeting[0]
        question = self._open.get(failure.id) if failure.id is not None else None
        if failure.code == wire.SESSION:
            if question is not None or not greeting:
                self._forget_session()
        elif failure.code == wire.DRAINING and question is not None:
            self._draining, question.sent = True, None  # what was asked before is still answered
        elif failure.retry and question is not None:
            question.refusals += 1
            question.sent, question.not_before = None, now + self._backed_off(question.refusals)
        elif failure.retry and greeting:
            self._reset(now)
        elif question is not None or greeting or (failure.id is None and failure.code == wire.VERSION_CODE):
            if question is not None:
                del self._open[question.id]
            first = UsageError if self.welcome is None else TeacherAwayError
            raise (first if question is None else RunError)(
                f"the teacher at {self.address}: {failure.what}",
                got=failure.got,
                why=failure.why,
                instead=failure.instead,
            )

    # ------------------------------------------------------------------ beginning again

    def _progressed(self, now: float) -> None:
        self._progress, self._failures = now, 0

    def _forget_session(self) -> None:
        if self._session is not None:
            self._session = self._greeting = None
        for question in self._open.values():
            question.sent = None

    def _reset(self, now: float) -> None:
        """Give the connection up; the next one is tried after a pause that grows."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._greeting = None
        self._draining = False
        self._forget_session()
        self._failures += 1
        self._heard, self._not_before = now, now + self._backed_off(self._failures)
        self._noted += 1

    def _backed_off(self, times: int) -> float:
        longest = min(_LONGEST_PAUSE, self._timeout)
        pause: float = min(longest, _FIRST_PAUSE * 2.0 ** min(times - 1, 16))
        return pause * (0.5 + 0.5 * self._jitter())

    def _note(self, text: str) -> None:
        if self._report is not None:
            self._report(text)


def _seconds(count: float) -> str:
    return f"{count:.0f} s" if count >= 10 else f"{count:.1g} s"
