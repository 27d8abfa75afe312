"""A page that is one file: its structure, its look, its program and its data, with nothing to fetch.

What stands in the data was written by models and found in the world. It is put into the page so that no text can end
the data and begin something else, and the page's policy lets a browser run only the program that was built with it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

from gatespace.errors import RunError

__all__ = ["policy", "render", "safe_json"]

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


def render(name: str, *, title: str, data: Any, connect: bool = False) -> str:
    """The page `name` of the front end, with `data` in it.

    Args:
        name: Of a bundle in `static`, e.g. ``explorer``.
        title: Of the page.
        data: Values that JSON knows.
        connect: Whether the page may ask the server that it came from for more.
    """
    js, css = (_asset(f"{name}.{kind}") for kind in ("js", "css"))
    return _PAGE.format(
        policy=policy(js, css, connect=connect), title=html.escape(title), css=css, js=js, data=safe_json(data)
    )  # fmt: skip


def policy(js: str, css: str, *, connect: bool = False) -> str:
    """The content security policy of a page with this program and this look: these two, and nothing from elsewhere."""
    server = "connect-src 'self'; " if connect else ""
    return (
        f"default-src 'none'; script-src '{_digest(js)}'; style-src '{_digest(css)}'; {server}"
        "base-uri 'none'; form-action 'none'"
    )


def safe_json(data: Any) -> str:
    """`data` as JSON that means nothing to HTML, whatever its texts are.

    Example:
        >>> safe_json(["</script>"])
        '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _asset(name: str) -> str:
    text = (resources.files("gatespace.addons.pages") / "static" / name).read_text(encoding="utf-8")
    if "</script" in text.lower() or "</style" in text.lower():
        raise RunError(f"{name} would end the element that it stands in", instead="build it again: npm run build")
    return text


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
