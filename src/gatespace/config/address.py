"""Address of a teacher outside this process: `zmq://host:port`, or `vllm://host:port/model`."""

from __future__ import annotations

import re
from typing import NamedTuple

from gatespace.config.base import Fault
from gatespace.plugins import provided

_FORM = re.compile(
    r"(?P<scheme>[a-z]+)://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})(?:/(?P<model>[^\s?#]+?)?)?/?"
)


class Address(NamedTuple):
    """Protocol and location of a service."""

    scheme: str
    host: str
    """Host name or IP address, IPv6 in brackets."""
    port: int
    model: str | None = None
    """Which model, if a vLLM server has several."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}" + (f"/{self.model}" if self.model else "")

    @property
    def tcp(self) -> str:
        """As a socket endpoint."""
        return f"tcp://{self.host}:{self.port}"


def is_address(name: str) -> bool:
    """Whether `name` is an address rather than a model."""
    return "://" in name


def parse_address(name: str, field: str = "") -> Address:
    """Parse an address; raises a `Fault` in `field` if invalid.

    Examples:
        >>> parse_address("zmq://127.0.0.1:5555").tcp
        'tcp://127.0.0.1:5555'
    """
    scheme = name.partition("://")[0]
    known = provided("teachers")
    if scheme not in known:
        forms = " or ".join(f"{one}://HOST:PORT" for one in known)
        raise Fault(field, f"there is no kind of teacher called {scheme}://", instead=forms or "the folder of a model")
    match = _FORM.fullmatch(name)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise Fault(field, "is not an address", instead=f"{scheme}://HOST:PORT, e.g. {scheme}://127.0.0.1:5555")
    return Address(match["scheme"], match["host"], int(match["port"]), match["model"])
