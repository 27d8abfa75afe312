"""Access control of the teacher service: CURVE keys, the list of allowed clients, and the loopback rule.

A key is 32 bytes, written as 40 characters of Z85. A key pair is two files: NAME.key holds the secret key, readable by
its owner only; NAME.pub holds the public key, for the other side. A server with keys accepts only the clients in its
list, encrypted; a server without keys listens on a loopback address only. No torch here.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gatespace.addons.service.wire import MAX_BYTES
from gatespace.config.address import Address, parse_address
from gatespace.config.base import Fault
from gatespace.errors import UsageError, missing_extra

try:
    import zmq
except ImportError as error:
    raise missing_extra("the teacher service", module="pyzmq", extra="service") from error

DOMAIN = "gatespace"
"""ZAP domain of the authenticator that decides which clients may connect."""
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class KeyPair:
    """One side's keys, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ServerKeys:
    """The server's own keys, and the public keys of the clients that may connect."""

    pair: KeyPair
    allowed: frozenset[bytes]

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE server. Without an authenticator for `DOMAIN` in its context, no client can connect."""
        socket.curve_server = True
        socket.curve_secretkey = self.pair.secret
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this public key may connect; called by pyzmq's authenticator."""
        return domain == DOMAIN and key in self.allowed


@dataclass(frozen=True)
class ClientKeys:
    """A client's own keys, and the public key of its server."""

    pair: KeyPair
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE client. With a wrong key on either side there is no reply, so use a deadline."""
        socket.curve_publickey = self.pair.public
        socket.curve_secretkey = self.pair.secret
        socket.curve_serverkey = self.server


# ---------------------------------------------------------------------------------------------------- files


class KeyFiles(NamedTuple):
    """Files of a key pair."""

    secret: Path
    public: Path


def write_keys(path: Path) -> KeyFiles:
    """Write a key pair to `path`.key and `path`.pub. Existing files are never replaced."""
    path = Path(path).expanduser()
    files = KeyFiles(path.with_name(f"{path.name}.key"), path.with_name(f"{path.name}.pub"))
    for file in files:
        if os.path.lexists(file):
            raise UsageError("a key is not written over a file", got=str(file), instead="another name, or remove it")
    public, secret = zmq.curve_keypair()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, key, mode in ((files.secret, secret, 0o600), (files.public, public, 0o644)):
            # Set the mode before writing any content.
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as handle:
                handle.write(key + b"\n")
    except OSError as error:
        raise UsageError("the keys cannot be written", got=f"{error.filename}: {error.strerror}") from error
    return files


def read_pair(path: Path) -> KeyPair:
    """Read the key pair of a secret file; refuse a file that others can read."""
    path = Path(path).expanduser()
    text = _text(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UsageError(
            "a secret key must be readable by its owner only",
            got=f"{path} with mode {mode:04o}",
            instead=f"chmod 600 {path}, or new keys if others may have read it",
        )
    secret = _key(text.strip(), str(path))
    return KeyPair(zmq.curve_public(secret), secret)


def read_public(key: str | Path) -> bytes:
    """Read a public key: its 40 characters, or a file that holds them."""
    if isinstance(key, str) and _KEY.fullmatch(key) and not Path(key).is_file():
        return key.encode()
    path = Path(key).expanduser()
    return _key(_text(path).strip(), str(path))


def read_allowed(path: Path) -> frozenset[bytes]:
    """Read a list of clients: one public key per line, optionally followed by a name. Lines "# …" are comments.

    A folder means all its *.pub files.
    """
    path = Path(path).expanduser()
    keys = frozenset(_listed(path))
    if not keys:
        raise UsageError("a list of clients without a key allows no client", got=str(path))
    return keys


def server_keys(key: Path, allow: Path) -> ServerKeys:
    """Read a server's keys from its secret file and its list of clients."""
    return ServerKeys(read_pair(key), read_allowed(allow))


def client_keys(client_key: str | Path | None, server_key: str | Path | None) -> ClientKeys | None:
    """Read a client's keys from its secret file and the server's public key; None if neither is given."""
    if client_key is None and server_key is None:
        return None
    if client_key is None or server_key is None:
        missing = "its own key" if client_key is None else "the server's public key"
        raise UsageError(
            f"a client of a service with keys needs {missing} too",
            instead="gatespace teacher keygen makes keys; client_key is a file NAME.key, server_key a file NAME.pub",
        )
    return ClientKeys(read_pair(Path(client_key)), read_public(server_key))


def _listed(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        yield from (read_public(file) for file in sorted(path.glob("*.pub")))
        return
    for number, line in enumerate(_text(path).splitlines(), 1):
        words = line.split(maxsplit=1)
        if words and set(words[0]) != {"#"}:  # a key may begin with #, and has no spaces
            yield _key(words[0], f"{path}, line {number}")


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > 1 << 20:
            raise UsageError("not a file of keys", got=str(path), why="it is too large")
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise UsageError("the key cannot be read", got=f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError("not a file of keys", got=str(path)) from error


def _key(text: str, where: str) -> bytes:
    if not _KEY.fullmatch(text):
        # The text may be a secret: do not show it.
        raise UsageError(
            "not a key", got=where, why="a key is 40 characters of Z85", instead="gatespace teacher keygen"
        )
    return text.encode()


# ---------------------------------------------------------------------------------------------------- addresses


def service_address(name: str) -> Address:
    """Parse the address ``zmq://host:port`` of a service to connect to."""
    try:
        address = parse_address(name)
    except Fault as error:
        raise UsageError(f"the address of a teacher: {error.what}", got=name, instead=error.instead) from error
    if address.scheme != "zmq" or address.model is not None:
        raise UsageError("not the address of a teacher service", got=name, instead="zmq://HOST:PORT")
    return address


def connect(
    context: zmq.Context[zmq.Socket[bytes]], address: Address, keys: ClientKeys | None, *, timeout: float
) -> zmq.Socket[bytes]:
    """Return a client's socket. It reconnects automatically, also after `timeout` seconds without traffic.

    Sending while it is not connected raises `zmq.Again`.
    """
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.immediate = True
    socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
    socket.heartbeat_ivl, socket.heartbeat_timeout = round(1000 * timeout / 3), round(1000 * timeout)
    socket.maxmsgsize = MAX_BYTES
    socket.ipv6 = address.host.startswith("[")
    if keys is not None:
        keys.apply(socket)
    try:
        socket.connect(address.tcp)
    except zmq.ZMQError as error:
        socket.close()
        raise UsageError("this address cannot be connected to", got=address, why=str(error)) from error
    return socket


def check_bind(bind: str, *, secured: bool) -> Address:
    """Parse a bind address ``tcp://host:port``; host * is any, port 0 or * any free one (returned as port 0).

    Without keys it must be a loopback address, since anyone who can reach the service may use it.
    """
    scheme, _, place = bind.partition("://")
    host, _, port = place.rpartition(":")
    host = {"*": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host)  # localhost may mean ::1
    any_port = port in ("0", "*")
    try:
        address = parse_address(f"zmq://{host}:{1 if any_port else port}")
    except Fault:
        address = None
    if address is None or scheme not in ("tcp", "zmq"):
        raise UsageError("not the address of a teacher service", got=bind, instead="tcp://127.0.0.1:5555")
    if not secured and not is_loopback(address):
        raise UsageError(
            "a teacher without keys is served on this machine only",
            got=bind,
            why="anyone who can reach it could use it, and read all messages",
            instead="tcp://127.0.0.1:PORT; or --key and --allow, with keys that `gatespace teacher keygen` makes",
        )
    return address._replace(port=0) if any_port else address


def is_loopback(address: Address) -> bool:
    """Whether an address is reachable from this machine only."""
    if address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host.strip("[]")).is_loopback
    except ValueError:
        return False
