"""Front of the teacher service: a proxy between client connections and ZeroMQ's socket that bounds their memory.

libzmq buffers all frames of a message before the application sees any, without a limit on their sum: it limits only the
size of a frame and the number of queued messages. So the front counts bytes. Beyond complete messages, which the server
reports to it, it forwards at most `WINDOW` bytes per connection and `TOTAL` over all; it cannot parse the bytes, which
may be encrypted. A connection with a full window is not read until one of its messages is complete, and is closed
after `STALLED` seconds without one.

It also keeps the process within its file handles: beyond a maximum number of connections, the one silent longest is
closed; if handles run out all the same, new connections wait (libzmq would retry in a busy loop).

Behind it ZeroMQ listens on a Unix socket in a folder that only this user can enter, so nothing bypasses the front.
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
"""Max bytes of incomplete messages per connection; a client's messages are much smaller."""
TOTAL = 16 * WINDOW
"""The same over all connections; beyond it, the largest is closed."""
STALLED = 10.0  # seconds until a connection with a full window is closed
_PAUSE = 1.0  # seconds until the next attempt when out of file handles
_CHUNK = 1 << 16  # bytes per read
_TICK = 0.2  # seconds between checks for timeouts
_HANDLES = 3  # per connection: client side, ZeroMQ side, and ZeroMQ's own
_SPARE = 64  # handles for the rest of the process
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _Way:
    """One direction of a connection, with the bytes read but not yet written."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.pending = memoryview(b"")

    def read(self) -> int | None:
        """Read a chunk; return its size, or None at the end of the source."""
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
        """Bytes of incomplete messages."""
        self.heard = time.monotonic()
        """When it was opened, or its last complete message was received."""
        self.stalled: float | None = None
        """When its window became full."""


class Front(Closing):
    """Listens and forwards bytes in its own thread.

    Args:
        place: Address to listen on; port 0 is any free port.
        connections: Max concurrent connections, if file handles allow.
        report: Called with a message when a connection is closed for its size, or when file handles run out.
    """

    def __init__(self, place: Address, *, connections: int, report: Callable[[str], None]) -> None:
        handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if handles != resource.RLIM_INFINITY:
            connections = min(connections, max(2, (handles - _SPARE) // _HANDLES))
        self._most, self._report = connections, report
        self._listener = _listen(place)
        short = len(tempfile.gettempdir()) < 60  # a Unix socket's path is limited to about 100 characters
        self._folder = tempfile.TemporaryDirectory(prefix="gatespace-", dir=None if short else "/tmp")
        self.inner_address = f"ipc://{self._folder.name}/zmq"
        """Where ZeroMQ's socket must listen before `start`."""
        self._connections: dict[str, _Connection] = {}
        """By the path of the inner socket, which ZeroMQ's end sees as its peer."""
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
        """When to accept connections again after running out of file handles."""
        self.error: BaseException | None = None
        """The exception that ended the thread."""
        self._noted = False
        self._end: float | None = None
        """Deadline for sending what is left."""
        self._thread = threading.Thread(target=self._run, name="gatespace-teacher-front", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host (IPv6 in brackets) and port."""
        host, port, *_ = self._listener.getsockname()
        return (f"[{host}]" if ":" in host else host), port

    def start(self) -> None:
        """Accept connections."""
        self._thread.start()

    def end(self, seconds: float) -> None:
        """Accept no more connections; end once ZeroMQ's socket has closed the open ones, or after `seconds`."""
        self._end = time.monotonic() + seconds
        self._wake()

    def close(self) -> None:
        """End and release everything."""
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
        """Account for a complete message. Called from the thread of ZeroMQ's socket.

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
            return  # already closed
        full = connection.unaccounted >= WINDOW
        self._count(connection, -sum(_bytes_of_frame(size, encrypted) for size in sizes))
        connection.heard = time.monotonic()
        if full:
            self._wake()

    # ------------------------------------------------------------------ thread

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
            elif key.data.outer.fileno() >= 0:  # it may have been closed in this turn to make room
                self._pass(key.data)
        self._check_timeouts(time.monotonic())

    def _pass(self, connection: _Connection) -> None:
        """Forward what has arrived, and register for the next events."""
        try:
            for way in connection.ways:
                if not way.pending and (way is not connection.incoming or connection.unaccounted < WINDOW):
                    size = way.read()
                    if size is None:  # end of the source, and everything before is written
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
        self._watch(connection)  # the newest, so not the one just dropped
        return None

    def _connect(self, outer: socket.socket) -> _Connection:
        outer.setblocking(False)
        outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for peers on an old protocol without heartbeats
        if hasattr(socket, "TCP_KEEPIDLE"):
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        inner = socket.socket(socket.AF_UNIX)
        try:
            os.close(os.dup(inner.fileno()))  # fails if ZeroMQ would have no handle for its end
            self._made += 1
            name = f"{self._folder.name}/{self._made}"
            inner.bind(name)
            os.unlink(name)  # the sockets keep the name
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
        with suppress(OSError):  # the buffer is full, or the front has ended
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
    """Bytes of a frame on the wire under ZMTP 3; older versions take no less."""
    body = size + 33 * encrypted  # command name and nonce, flags, authentication
    return body + (2 if body <= 255 else 9)
