"""The front of a teacher service: takes connections and passes their bytes to ZeroMQ's socket and back.

libzmq collects all frames of a message before an application sees one, whatever they add up to: its limits are those of
a frame, and of whole messages that wait. So the front counts. Of a connection it passes on at most `WINDOW` bytes, and
of all connections `TOTAL`, beyond the messages that have arrived whole, of which the server informs it; the bytes
themselves may be encrypted and say nothing here. A connection that has filled its window is not read from until a
message of it is whole, and closed after `STALLED` seconds without one.

It also sees to it that file handles suffice: there is a number of connections, above which the one that was silent
longest makes room; and where handles run out all the same, new connections wait (libzmq would try again at once, for
ever).

Behind it ZeroMQ listens on a Unix socket in a folder that only this user can enter, so that nothing bypasses the front.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from gatespace.addons.service.wire import MAX_FRAME
from gatespace.config.address import Address
from gatespace.errors import UsageError
from gatespace.files import Closing

WINDOW = 4 * MAX_FRAME
"""Bytes of a connection that no whole message accounts for; a client's messages are much smaller."""
TOTAL = 16 * WINDOW
"""Of all connections; beyond it, the one with the most is closed."""
STALLED = 10.0  # seconds until a connection with a full window is closed
_PAUSE = 1.0  # seconds until the next attempt where there are no file handles
_CHUNK = 1 << 16  # bytes that are read at a time
_TICK = 0.2  # seconds between checks for timeouts
_HANDLES = 3  # of a connection: here, towards ZeroMQ, and ZeroMQ's own
_SPARE = 64  # handles for all else that the process does
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _Way:
    """One direction of a connection: what was read and not yet written."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.pending = memoryview(b"")

    def read(self) -> int | None:
        """How many bytes there are to write now; None where the source has ended."""
        with suppress(BlockingIOError):
            self.pending = memoryview(self.source.recv(_CHUNK))
            return len(self.pending) or None
        return 0

    def write(self) -> None:
        with suppress(BlockingIOError):
            self.pending = self.pending[self.sink.send(self.pending) :]


class _Connection:
    def __init__(self, outer: socket.socket, inner: socket.socket) -> None:
        self.outer, self.inner = outer, inner
        self.ways = incoming, _ = _Way(outer, inner), _Way(inner, outer)
        self.incoming = incoming
        self.unaccounted = 0
        """Bytes that no whole message accounts for."""
        self.heard = time.monotonic()
        """When it was made, or its last whole message was received."""
        self.stalled: float | None = None
        """Since when its window is full."""


class Front(Closing):
    """Listens, in a thread of its own.

    Args:
        place: Where; port 0 is any free one.
        connections: How many at a time, where file handles suffice.
        report: Called with a message when a connection is closed for its size, and when there are no file handles.
    """

    def __init__(self, place: Address, *, connections: int, report: Callable[[str], None]) -> None:
        handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if handles != resource.RLIM_INFINITY:
            connections = min(connections, max(2, (handles - _SPARE) // _HANDLES))
        self._most, self._report = connections, report
        self._listener = _listen(place)
        short = len(tempfile.gettempdir()) < 60  # the path of a Unix socket has about 100 characters
        self._folder = tempfile.TemporaryDirectory(prefix="gatespace-", dir=None if short else "/tmp")
        self.inner_address = f"ipc://{self._folder.name}/zmq"
        """Where ZeroMQ's socket has to listen before `start`."""
        self._connections: dict[str, _Connection] = {}
        """By the name of the socket towards ZeroMQ, which the other end knows it by."""
        self._made = 0
        self._unaccounted = 0
        self._counting = threading.Lock()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, _READ)
        self._selector.register(self._listener, _READ)
        self._resume: float | None = None
        """When to accept connections again, after file handles were missing."""
        self.error: BaseException | None = None
        """What has ended its thread."""
        self._noted = False
        self._end: float | None = None
        """When what has not been sent is given up."""
        self._thread = threading.Thread(target=self._run, name="gatespace-teacher-front", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host, an IPv6 number in brackets, and port."""
        host, port, *_ = self._listener.getsockname()
        return (f"[{host}]" if ":" in host else host), port

    def start(self) -> None:
        """Accept connections."""
        self._thread.start()

    def end(self, seconds: float) -> None:
        """Accept no more connections, and end when ZeroMQ's socket has closed those that there are."""
        self._end = time.monotonic() + seconds
        self._wake()

    def close(self) -> None:
        """Wait for the end."""
        if self._end is None:
            self.end(0.0)
        if self._thread.ident is not None:
            self._thread.join()
        for connection in list(self._connections.values()):
            self._drop(connection)
        for one in (self._selector, self._listener, self._wake_receiver, self._wake_sender):
            one.close()
        self._folder.cleanup()

    def received(self, handle: int, sizes: Iterable[int], *, encrypted: bool) -> None:
        """A whole message was received. For the thread of ZeroMQ's socket.

        Args:
            handle: ZeroMQ's file handle of the connection (`zmq.SRCFD`).
            sizes: Bytes of its frames.
            encrypted: Whether CURVE wraps them.
        """
        try:
            end = socket.socket(fileno=handle)
            try:
                connection = self._connections[end.getpeername()]
            finally:
                end.detach()
        except (OSError, KeyError):
            return  # it is gone
        full = connection.unaccounted >= WINDOW
        self._count(connection, -sum(_bytes_of_frame(size, encrypted) for size in sizes))
        connection.heard = time.monotonic()
        if full:
            self._wake()

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        try:
            while self._end is None:
                self._turn()
            if self._resume is None:
                self._selector.unregister(self._listener)
            self._listener.close()
            while self._connections and time.monotonic() < self._end:
                self._turn()
        except BaseException as error:
            self.error = error

    def _turn(self) -> None:
        for key, _ in self._selector.select(_TICK):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_receiver:
                with suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
            elif key.data.outer.fileno() >= 0:  # it may have been closed for another one's sake
                self._pass(key.data)
        self._check_timeouts(time.monotonic())

    def _pass(self, connection: _Connection) -> None:
        """Pass on what has arrived, and wait for what can be done next."""
        try:
            for way in connection.ways:
                if not way.pending and (way is not connection.incoming or connection.unaccounted < WINDOW):
                    size = way.read()
                    if size is None:  # it has ended, and all before is written
                        return self._drop(connection)
                    if way is connection.incoming:
                        self._count(connection, size)
                if way.pending:
                    way.write()
        except OSError:
            return self._drop(connection)
        if self._unaccounted > TOTAL:
            most = max(self._connections.values(), key=lambda one: one.unaccounted)
            self._drop_for_size(most)
            if most is connection:
                return None
        self._watch(connection)
        return None

    def _watch(self, connection: _Connection) -> None:
        incoming, outgoing = connection.ways
        full = connection.unaccounted >= WINDOW
        if not full:
            connection.stalled = None
        elif connection.stalled is None:
            connection.stalled = time.monotonic()
        for end, source, sink, waits in (
            (connection.outer, incoming, outgoing, full),
            (connection.inner, outgoing, incoming, False),
        ):
            events = (0 if source.pending or waits else _READ) | (_WRITE if sink.pending else 0)
            before = self._selector.get_map().get(end)
            if before is None and events:
                self._selector.register(end, events, connection)
            elif before is not None and not events:
                self._selector.unregister(end)
            elif before is not None and before.events != events:
                self._selector.modify(end, events, connection)

    def _check_timeouts(self, now: float) -> None:
        for connection in [one for one in self._connections.values() if one.stalled is not None]:
            assert connection.stalled is not None
            if connection.unaccounted < WINDOW:
                self._watch(connection)
            elif now - connection.stalled >= STALLED:
                self._drop_for_size(connection)
        if self._end is None and self._resume is not None and now >= self._resume:
            self._resume = None
            self._selector.register(self._listener, _READ)

    def _accept(self) -> None:
        try:
            outer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            return self._wait(error)
        try:
            connection = self._connect(outer)
        except OSError as error:
            outer.close()
            return self._wait(error)
        if len(self._connections) > self._most:
            self._drop(min(self._connections.values(), key=lambda one: one.heard))
        self._watch(connection)  # the latest, so not the one that made room
        return None

    def _connect(self, outer: socket.socket) -> _Connection:
        outer.setblocking(False)
        outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for peers of an old protocol without heartbeats
        if hasattr(socket, "TCP_KEEPIDLE"):
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        inner = socket.socket(socket.AF_UNIX)
        try:
            os.close(os.dup(inner.fileno()))  # an error here where ZeroMQ would have no handle for its end
            self._made += 1
            name = f"{self._folder.name}/{self._made}"
            inner.bind(name)
            os.unlink(name)  # the sockets keep it
            inner.connect(self.inner_address.removeprefix("ipc://"))
            inner.setblocking(False)
        except OSError:
            inner.close()
            raise
        connection = self._connections[name] = _Connection(outer, inner)
        return connection

    def _wait(self, error: OSError) -> None:
        self._selector.unregister(self._listener)
        self._resume = time.monotonic() + _PAUSE
        if not self._noted:
            self._noted = True
            self._report(f"new connections have to wait: {error.strerror} (ulimit -n is the number of open files)")

    def _drop_for_size(self, connection: _Connection) -> None:
        with suppress(OSError):
            peer = connection.outer.getpeername()[0]
            self._report(f"{peer} was disconnected: {connection.unaccounted >> 20} MiB of unfinished messages")
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._count(connection, -connection.unaccounted)
        name = connection.inner.getsockname()
        for end in (connection.outer, connection.inner):
            with suppress(KeyError):
                self._selector.unregister(end)
            end.close()
        del self._connections[name]

    def _count(self, connection: _Connection, size: int) -> None:
        with self._counting:
            size = max(size, -connection.unaccounted)
            connection.unaccounted += size
            self._unaccounted += size

    def _wake(self) -> None:
        with suppress(OSError):  # its buffer is full, or the front has ended
            self._wake_sender.send(b"!")


def _listen(place: Address) -> socket.socket:
    host = place.host.strip("[]")
    try:
        family = socket.getaddrinfo(host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server(
            (host, place.port), family=family, backlog=128, dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6()
        )
    except OSError as error:
        raise UsageError(
            "the teacher cannot be served here",
            got=f"{place.tcp}: {error.strerror}",
            instead="another port; 0 is any free one",
        ) from error
    listener.setblocking(False)
    return listener


def _bytes_of_frame(size: int, encrypted: bool) -> int:
    """What a frame takes on the wire, by ZMTP 3; peers of older versions take no less."""
    body = size + 33 * encrypted  # name and nonce of a command, flags, authentication
    return body + (2 if body <= 255 else 9)
