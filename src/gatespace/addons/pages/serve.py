"""Answers over HTTP, for the browser on this machine and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from gatespace.errors import GatespaceError, UsageError

__all__ = ["Answer", "loopback_server", "page_server"]

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
_SECONDS_TO_SPEAK = 30


class Answer(NamedTuple):
    """What a request is answered with.

    Args:
        status: Of the answer.
        text: Its body.
        kind: What the body is.
        policy: The content security policy of the header; a page may have a stricter one in itself.
    """

    status: HTTPStatus
    text: str
    kind: str = "text/plain"
    policy: str = "default-src 'none'; frame-ancestors 'none'"


def page_server(page: Callable[[], str], *, port: int = 0) -> ThreadingHTTPServer:
    """A server of one page on the loopback address; `serve_forever` starts it.

    Args:
        page: Makes the page, anew for every request, so that a reload shows what has come since.
        port: 0: one that is free.
    """

    def answer(target: str) -> Answer:
        if target.partition("?")[0] != "/":
            return Answer(HTTPStatus.NOT_FOUND, "only / is served here\n")
        return Answer(HTTPStatus.OK, page(), "text/html", "frame-ancestors 'none'")

    return loopback_server(answer, port=port)


def loopback_server(answer: Callable[[str], Answer], *, port: int = 0) -> ThreadingHTTPServer:
    """A server on the loopback address that can be read from and nothing else.

    Args:
        answer: Of a path with its query, by any thread.
        port: 0: one that is free.
    """

    class Handler(BaseHTTPRequestHandler):
        server_version = "gatespace"
        sys_version = ""
        timeout = _SECONDS_TO_SPEAK

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            # A page of another site whose name leads here must not read what is served: its Host gives it away.
            if (self.headers.get("Host") or "").rpartition(":")[0] not in _NAMES:
                self._send(Answer(HTTPStatus.FORBIDDEN, "not a name of this machine\n"), with_body)
                return
            try:
                found = answer(self.path)
            except GatespaceError as error:
                found = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n")
            self._send(found, with_body)

        def _send(self, found: Answer, with_body: bool) -> None:
            body = found.text.encode("utf-8", "backslashreplace")
            self.send_response(found.status)
            for name, value in {
                "Content-Type": f"{found.kind}; charset=utf-8",
                "Content-Length": str(len(body)),
                "Content-Security-Policy": found.policy,
                "Cache-Control": "no-store",
                "Cross-Origin-Resource-Policy": "same-origin",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Referrer-Policy": "no-referrer",
            }.items():
                self.send_header(name, value)
            try:
                self.end_headers()
                if with_body:
                    self.wfile.write(body)
            except ConnectionError:  # the browser has left
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the terminal is for the address and for errors."""

    try:
        server = ThreadingHTTPServer((_HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(
            "the page cannot be served at this port", got=port, why=str(error), instead="another --port, or 0 for any"
        ) from None
    server.daemon_threads = True
    return server
