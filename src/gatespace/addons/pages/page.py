"""Browser pages: as one self-contained file, or over HTTP on this machine only.

A page's data holds untrusted text from models and datasets. It is escaped so that no text can break out of the data,
and the page's content security policy lets a browser run only the bundled script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from gatespace.errors import GatespaceError, RunError, UsageError

__all__ = ["page_server", "render", "safe_json"]

_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<div id="app"><noscript><p>This page computes what it shows, and needs JavaScript.</p></noscript></div>
<script type="application/json" id="data">{data}</script>
<script>{js}</script>
</body>
</html>
"""
_HOST = "127.0.0.1"
_SECONDS_TO_SPEAK = 30


# ---------------------------------------------------------------------------------------------------- one file


def render(name: str, *, title: str, data: Any) -> str:
    """Render a front-end page with its data embedded.

    Args:
        name: Name of a bundle in `static`, e.g. ``explorer``.
        title: Title of the page.
        data: JSON-serializable values.
    """
    js, css = (_asset(f"{name}.{kind}") for kind in ("js", "css"))
    # Only this script and this style sheet.
    policy = (
        f"default-src 'none'; script-src '{_digest(js)}'; style-src '{_digest(css)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(policy=policy, title=html.escape(title), css=css, js=js, data=safe_json(data))


def safe_json(data: Any) -> str:
    """Serialize `data` as JSON that is safe to embed in HTML, whatever its texts.

    Examples:
        >>> safe_json(["</script>"])
        '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _asset(name: str) -> str:
    text = (resources.files("gatespace.addons.pages") / "static" / name).read_text(encoding="utf-8")
    if "</script" in text.lower() or "</style" in text.lower():
        raise RunError(f"{name} would end the element that it is in", instead="build it again: npm run build")
    return text


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# ---------------------------------------------------------------------------------------------------- over HTTP


def page_server(page: Callable[[], str], *, port: int = 0) -> ThreadingHTTPServer:
    """Return a read-only server of one page on the loopback address; `serve_forever` starts it.

    Args:
        page: Builds the page for every request, so that a reload shows new data.
        port: 0: any free port.
    """

    class Handler(BaseHTTPRequestHandler):
        server_version = "gatespace"
        sys_version = ""
        timeout = _SECONDS_TO_SPEAK

        def do_GET(self) -> None:
            self._handle(with_body=True)

        def do_HEAD(self) -> None:
            self._handle(with_body=False)

        def _handle(self, *, with_body: bool) -> None:
            # DNS rebinding: a page of another site whose name resolves here sends that name as Host.
            if (self.headers.get("Host") or "").rpartition(":")[0] not in (_HOST, "localhost"):
                self._send(HTTPStatus.FORBIDDEN, "not a name of this machine\n", with_body)
            elif self.path.partition("?")[0] != "/":
                self._send(HTTPStatus.NOT_FOUND, "only / is served here\n", with_body)
            else:
                try:
                    self._send(HTTPStatus.OK, page(), with_body, "text/html", "frame-ancestors 'none'")
                except GatespaceError as error:
                    self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n", with_body)

        def _send(
            self,
            status: HTTPStatus,
            text: str,
            with_body: bool,
            kind: str = "text/plain",
            policy: str = "default-src 'none'; frame-ancestors 'none'",  # the page embeds a stricter one
        ) -> None:
            body = text.encode("utf-8", "backslashreplace")
            self.send_response(status)
            for name, value in {
                "Content-Type": f"{kind}; charset=utf-8",
                "Content-Length": str(len(body)),
                "Content-Security-Policy": policy,
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
            except ConnectionError:  # the browser has disconnected
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal is for the address and for errors."""

    try:
        server = ThreadingHTTPServer((_HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(
            "the page cannot be served at this port", got=port, why=str(error), instead="another --port, or 0 for any"
        ) from None
    server.daemon_threads = True
    return server
