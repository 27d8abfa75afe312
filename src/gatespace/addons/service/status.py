"""How a teacher service is doing, asked from outside. No torch here."""

from __future__ import annotations

import secrets
import time

from gatespace.addons.service import wire
from gatespace.addons.service.keys import ClientKeys, endpoint
from gatespace.errors import GatespaceError, RunError, missing_extra

try:
    import zmq
except ImportError as error:
    raise missing_extra("the teacher service", module="pyzmq", extra="service") from error


def ask_status(address: str, *, keys: ClientKeys | None = None, timeout: float = 5.0) -> wire.StatusReply:
    """The counters of the service at ``zmq://host:port``; an error if it does not answer within `timeout` seconds."""
    place = endpoint(address)
    deadline = time.monotonic() + timeout
    asked = secrets.randbits(62)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_HEADER)
        socket.setsockopt(zmq.IPV6, int(place.ipv6))
        if keys is not None:
            keys.apply(socket)
        socket.connect(place.tcp)
        socket.send_multipart(wire.encode(wire.StatusRequest(asked)))
        while socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            answer = wire.decode(socket.recv_multipart()).message
            if isinstance(answer, wire.StatusReply) and answer.id == asked:
                return answer
            if isinstance(answer, wire.Failure):
                raise GatespaceError(answer.what, got=answer.got, why=answer.why, instead=answer.instead)
    raise RunError(
        "the teacher service does not answer",
        got=f"{address}, {timeout:g} s",
        why="nobody listens there, it is out of reach, or the keys of one side are not those the other expects",
    )
