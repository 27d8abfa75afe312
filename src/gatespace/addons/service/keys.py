"""Who may talk to a teacher service: CURVE keys, the list of clients, and the rule about addresses.

A key is 32 bytes, written as 40 characters of Z85. A pair of keys is two files: NAME.key holds the secret one and is
readable by its owner only, NAME.pub the public one, for the other side. A server with keys talks to the clients in its
list and to nobody else, encrypted; one without keys is to be had on this machine only. No torch here.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gatespace.errors import UsageError, missing_extra

try:
    import zmq
except ImportError as error:
    raise missing_extra("the teacher service", module="pyzmq", extra="service") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEME = "zmq://"
DOMAIN = "gatespace"
"""ZAP's name for those who ask whether a client may come in."""

_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ADDRESS = re.compile(r"(?:zmq|tcp)://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.\-*]+):(?P<port>\d{1,5}|\*)")


@dataclass(frozen=True)
class KeyPair:
    """A side's keys, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ServerKeys:
    """The server's own keys, and the public keys of the clients that may come in."""

    pair: KeyPair
    allowed: frozenset[bytes]

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE server. Its context needs an authenticator for `DOMAIN`: without, nobody comes in."""
        socket.curve_server = True
        socket.curve_secretkey = self.pair.secret
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this public key may come in, as pyzmq's authenticator asks."""
        return domain == DOMAIN and key in self.allowed


@dataclass(frozen=True)
class ClientKeys:
    """A client's own keys, and the public key of the server that it means to talk to."""

    pair: KeyPair
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE client. With a wrong key on either side it is never answered: have a deadline."""
        socket.curve_publickey = self.pair.public
        socket.curve_secretkey = self.pair.secret
        socket.curve_serverkey = self.server


# ---------------------------------------------------------------------------------------------------- files


class KeyFiles(NamedTuple):
    """The files of a pair of keys."""

    secret: Path
    public: Path


def write_keys(path: Path) -> KeyFiles:
    """Make a pair of keys: `path`.key and `path`.pub. Existing files are never replaced."""
    path = Path(path).expanduser()
    files = KeyFiles(path.with_name(f"{path.name}.key"), path.with_name(f"{path.name}.pub"))
    for file in files:
        if os.path.lexists(file):
            raise UsageError("a key is not written over a file", got=str(file), instead="another name, or remove it")
    public, secret = zmq.curve_keypair()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for file, key, mode in ((files.secret, secret, 0o600), (files.public, public, 0o644)):
            # The mode is there before the content is.
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as handle:
                handle.write(key + b"\n")
    except OSError as error:
        raise UsageError("the keys cannot be written", got=f"{error.filename}: {error.strerror}") from error
    return files


def read_pair(path: Path) -> KeyPair:
    """The keys of a secret file. One that others can read is refused: it is no secret any more."""
    path = Path(path).expanduser()
    text = _text(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UsageError(
            "a secret key must be readable by its owner only",
            got=f"{path} with mode {mode:04o}",
            instead=f"chmod 600 {path}, or new keys if somebody may have read it",
        )
    secret = _key(text.strip(), str(path))
    return KeyPair(zmq.curve_public(secret), secret)


def read_public(key: str | Path) -> bytes:
    """A public key: its 40 characters, or the file that has them."""
    if isinstance(key, str) and _KEY.fullmatch(key) and not Path(key).is_file():
        return key.encode()
    path = Path(key).expanduser()
    return _key(_text(path).strip(), str(path))


def read_allowed(path: Path) -> frozenset[bytes]:
    """The clients of a list: a public key per line, and after it a name, for people. Lines "# …" say nothing.

    A folder stands for all its files *.pub.
    """
    path = Path(path).expanduser()
    keys = frozenset(_listed(path))
    if not keys:
        raise UsageError("a list of clients that has no key lets nobody in", got=str(path))
    return keys


def server_keys(key: Path, allow: Path) -> ServerKeys:
    """The keys of a server, from its secret file and its list of clients."""
    return ServerKeys(read_pair(key), read_allowed(allow))


def client_keys(client_key: str | Path | None, server_key: str | Path | None) -> ClientKeys | None:
    """The keys of a client, from its secret file and the server's public key; None where neither is given."""
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
        if words and set(words[0]) != {"#"}:  # a key may begin with that character, and has no spaces
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
        # What stands there may be a secret: it is not repeated.
        raise UsageError(
            "not a key", got=where, why="a key is 40 characters of Z85", instead="gatespace teacher keygen"
        )
    return text.encode()


# ---------------------------------------------------------------------------------------------------- addresses


class Endpoint(NamedTuple):
    """Where a service is."""

    host: str
    port: str

    @property
    def tcp(self) -> str:
        """As ZeroMQ has it."""
        return f"tcp://{self.host}:{self.port}"

    @property
    def zmq(self) -> str:
        """As a configuration has it."""
        return f"{SCHEME}{self.host}:{self.port}"

    @property
    def ipv6(self) -> bool:
        """Whether it needs the newer protocol."""
        return self.host.startswith("[")

    @property
    def loopback(self) -> bool:
        """Whether nobody outside this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def endpoint(address: str, *, serving: bool = False) -> Endpoint:
    """The parts of ``zmq://host:port`` or ``tcp://host:port``; where one is `serving`, * may stand for either."""
    found = _ADDRESS.fullmatch(address)
    host, port = (found["host"], found["port"]) if found else ("", "")
    # 0 has the system choose.
    good = port == "*" or (port.isdigit() and (0 if serving else 1) <= int(port) <= 65535)
    if not good or (not serving and "*" in (host, port)):
        raise UsageError(
            "not the address of a teacher service",
            got=address,
            instead="tcp://127.0.0.1:5555" if serving else "zmq://host:port",
        )
    if serving and host == "localhost":
        host = "127.0.0.1"  # ZeroMQ binds to numbers and to names of interfaces
    return Endpoint(host, port)


def check_bind(address: str, *, secured: bool) -> Endpoint:
    """Where to serve. Without keys, only on this machine: whoever reaches the service may use it."""
    place = endpoint(address, serving=True)
    if not secured and not place.loopback:
        raise UsageError(
            "a teacher without keys is served on this machine only",
            got=address,
            why="whoever reaches it could use it, and read along",
            instead="tcp://127.0.0.1:PORT; or --key and --allow, with keys that `gatespace teacher keygen` makes",
        )
    return place
