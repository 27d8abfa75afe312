"""A page as one file, that no text in it can break, and over HTTP for this machine only; what was built for it."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gatespace.addons.pages.explore import build_explorer
from gatespace.addons.pages.page import page_server, render, safe_json
from gatespace.errors import RunError, UsageError

ROOT = Path(__file__).resolve().parents[3]
WEB = ROOT / "web"
STATIC = ROOT / "src/gatespace/addons/pages/static"
HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "a\u2028b\u2029c", "\ud800 alone", "&lt;b&gt;", "]]>"]


class Elements(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            about, text = self.scripts[-1]
            self.scripts[-1] = (about, text + data)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_ends_the_data(text):
    data = {"schema": 1, "strings": [text], text: None}
    page = render("explorer", title=text, data=data)
    page.encode("utf-8", "surrogatepass" if "\ud800" in page.split("<style>")[0] else "strict")
    about, program = Elements(page).scripts
    assert about[0] == {"type": "application/json", "id": "data"}
    assert json.loads(about[1]) == data
    assert program[1] == (STATIC / "explorer.js").read_text()
    assert not set("<>&\u2028\u2029") & set(safe_json(data))


def test_the_policy_allows_this_program_only(gated):
    page = build_explorer([gated]).html
    allowed = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    for kind, name in (("script", "explorer.js"), ("style", "explorer.css")):
        digest = base64.b64encode(hashlib.sha256((STATIC / name).read_bytes()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in allowed
    assert allowed.startswith("default-src 'none';")
    assert not re.search(r"""(src|href)=["']https?:""", page)


# ---------------------------------------------------------------------- over HTTP


@pytest.fixture
def served():
    answers = iter(["<p>one λ", "<p>two", RunError("no page", why="a test"), "<p>four"])

    def page() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with page_server(page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address
        server.shutdown()
        thread.join()


def ask(address, path="/", *, method="GET", host=None):
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), dict(reply.getheaders())


def test_every_load_reads_anew_and_an_error_is_told(served):
    assert served[0] == "127.0.0.1"
    status, body, headers = ask(served)
    assert (status, body, headers["Content-Type"]) == (200, "<p>one λ", "text/html; charset=utf-8")
    assert headers["Cache-Control"] == "no-store"
    assert ask(served, "/?x=1")[1] == "<p>two"
    assert ask(served)[:2] == (500, "no page\n  why: a test\n")
    assert ask(served, method="HEAD")[:2] == (200, "")


def test_only_this_machine_and_only_the_page(served):
    port = served[1]
    assert ask(served, "/etc/passwd")[0] == 404
    assert ask(served, host=f"evil.example:{port}")[0] == 403
    assert ask(served, host=f"127.0.0.1.evil.example:{port}")[0] == 403
    assert ask(served, host=f"localhost:{port}")[0] == 200
    assert ask(served, method="POST")[0] == 501


def test_a_port_that_is_taken():
    with page_server(lambda: "") as server, pytest.raises(UsageError, match="another --port"):
        page_server(lambda: "", port=server.server_address[1])


# ---------------------------------------------------------------------- what was built


def test_built_files_are_of_these_sources():
    if not WEB.is_dir():
        pytest.skip("the sources of the front end (web/) are not here")
    names = [path.relative_to(WEB).as_posix() for path in (WEB / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted([*names, "build.mjs", "package-lock.json"]):
        digest.update(name.encode() + b"\0" + (WEB / name).read_bytes() + b"\0")
    assert (STATIC / "SOURCES.txt").read_text().strip() == digest.hexdigest(), "run `npm run build` in web/"


def test_building_again_gives_the_same(tmp_path):
    node = shutil.which("node")
    if node is None or not (WEB / "node_modules/esbuild").is_dir():
        pytest.skip("no Node with the packages of web/ here (npm ci)")
    subprocess.run([node, "build.mjs", "--out", str(tmp_path)], cwd=WEB, check=True, capture_output=True, timeout=60)
    names = sorted(path.name for path in STATIC.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (STATIC / name).read_bytes(), name


def test_built_files_are_small_and_have_their_licences():
    assert sum(path.stat().st_size for path in STATIC.iterdir()) <= 300_000
    licences = (STATIC / "LICENSES.txt").read_text()
    assert "preact" in licences
    assert "The MIT License" in licences
