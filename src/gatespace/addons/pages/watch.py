"""The live page of a study: a server on the loopback address that only reads, for whoever has the token.

The address of a folder's page, its port and its token, is kept in the user's cache, readable by the user alone. A page
that is open finds the server again after a restart, and a bookmark stays good.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from gatespace.addons.pages.page import render
from gatespace.addons.pages.serve import Answer, loopback_server
from gatespace.addons.pages.watch_snapshot import SCHEMA, Watcher
from gatespace.errors import UsageError
from gatespace.models.cache_root import cache_root

__all__ = ["Watch", "watch_server"]

_TOKEN_BYTES = 24
_PRIVATE = 0o600


@dataclass(frozen=True)
class Watch:
    """A server that is bound, and its address; `server.serve_forever` starts it."""

    server: ThreadingHTTPServer
    token: str

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server.server_address[1])

    @property
    def url(self) -> str:
        """What a browser opens."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"


def watch_server(folder: Path, *, port: int | None = None, new_address: bool = False) -> Watch:
    """A server of the live page of `folder`.

    Args:
        folder: Of a study or a run; it need not be there yet.
        port: None: the one it had before, if that is free, else any; 0: any that is free.
        new_address: Forget the token of earlier times, so that addresses which others have seen are void.
    """
    place = Path(folder).expanduser().absolute()
    kept = None if new_address else _kept(place)
    token = secrets.token_urlsafe(_TOKEN_BYTES) if kept is None else kept[1]
    answer = _answers(Watcher(place), token)
    try:
        server = loopback_server(answer, port=kept[0] if kept is not None and port is None else port or 0)
    except UsageError:
        if port is not None or kept is None:
            raise
        server = loopback_server(answer)  # another watcher of this folder has the port
    watch = Watch(server, token)
    if kept is None or port is not None:
        _keep(place, watch)
    return watch


def _answers(watcher: Watcher, token: str) -> Callable[[str], Answer]:
    def answer(target: str) -> Answer:
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        given = query.get("token", [""])[-1]
        # Without the token nobody learns even what there is. How long the comparison takes tells nothing either.
        if not hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode()):
            return Answer(
                HTTPStatus.FORBIDDEN, "the address that `gatespace watch` printed has a token: use all of it\n"
            )
        if parts.path == "/":
            title = f"{watcher.folder.name} – gatespace watch"
            page = render("watch", title=title, data={"schema": SCHEMA}, connect=True)
            return Answer(HTTPStatus.OK, page, "text/html", "frame-ancestors 'none'")
        if parts.path == "/snapshot":
            found = watcher.snapshot(query.get("since", [""])[-1])
            return Answer(HTTPStatus.OK, json.dumps(found, allow_nan=False), "application/json")
        return Answer(HTTPStatus.NOT_FOUND, "only / and /snapshot are served here\n")

    return answer


# ---------------------------------------------------------------------------------------------------- the address


def _place_of(folder: Path) -> Path:
    return cache_root() / "watch" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"


def _kept(folder: Path) -> tuple[int, str] | None:
    """(Port, token) of earlier times; None where there are none, or where others could have read them."""
    path = _place_of(folder)
    try:
        about = path.stat()
        if about.st_mode & 0o077 or about.st_uid != os.getuid():
            return None
        found = json.loads(path.read_text("utf-8"))
        port, token = int(found["port"]), str(found["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (port, token) if 0 < port < 65536 and len(token) >= _TOKEN_BYTES and token.isascii() else None


def _keep(folder: Path, watch: Watch) -> None:
    path = _place_of(folder)
    text = json.dumps({"folder": str(folder), "port": watch.port, "token": watch.token}) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except OSError:  # the page works without; only a restart has another address
        with suppress(OSError):
            beside.unlink()
