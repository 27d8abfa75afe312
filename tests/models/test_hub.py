"""The Hub's side of loading, against a server on this machine that speaks the Hub's protocol, and against none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from gatespace.errors import UsageError
from gatespace.models import TinyPair, load_model
from gatespace.models.hub import hub_reachable
from gatespace.models.packaged import PACKAGED

CLOSED = "http://127.0.0.1:9"
HUB_NAME, WHEEL_VARIABLE = PACKAGED["smollm2"].hub_id, PACKAGED["smollm2"].variable
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """One model, under the Hub's name of SmolLM2."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        resolve = f"/{HUB_NAME}/resolve/"
        if path == "/":
            self.reply(200, b"hello")
        elif path.startswith(f"/api/models/{HUB_NAME}"):
            files = {file.name: file.stat().st_size for file in self.folder.iterdir()} | {"onnx/model.json": 1}
            tree = [{"type": "file", "path": name, "size": size, "oid": "0"} for name, size in files.items()]
            about = {"id": HUB_NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            if path.endswith("/additional_chat_templates"):
                self.reply(404, b"", error="EntryNotFound")
            else:
                self.reply(200, json.dumps(tree if "/tree/" in path else about).encode(), "application/json")
        elif path.startswith(resolve) and path.removeprefix(resolve).split("/")[0] in ("main", COMMIT):
            file = self.folder / path.removeprefix(resolve).partition("/")[2]
            if file.is_file():
                self.reply(200, file.read_bytes())
            else:
                self.reply(404, b"", error="EntryNotFound")
        else:
            self.reply(404, b"", error="RepoNotFound")

    def reply(self, status: int, body: bytes, kind: str = "application/octet-stream", error: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "X-Error-Code": error,
        }
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tiny: TinyPair) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Hub,), {"folder": tiny.student}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_loading_from_a_hub(hub: str, tiny: TinyPair, tmp_path: Path) -> None:
    code = f"""
from huggingface_hub import constants
from gatespace.errors import UsageError
from gatespace.models import load_model, packaged_folder
model = load_model("{HUB_NAME}")
print(model.source, model.fingerprint())
print(load_model("hub:{HUB_NAME}", revision="{COMMIT}").source)
try:
    load_model("nobody/nothing")
except UsageError as error:
    print(error.what, error.why)
told = []
folder = packaged_folder("smollm2", report=told.append)
print(folder, len(told))
constants.ENDPOINT = "{CLOSED}"
print(load_model("smollm2").source)
print(load_model("{HUB_NAME}").source)
"""
    drop = (WHEEL_VARIABLE, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    # of a process of its own, because the Hub's client reads them when it is imported
    env |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "GATESPACE_CACHE": str(tmp_path / "cache")}
    env |= {"no_proxy": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    source, pinned, nothing, folder, *without_hub = done.stdout.splitlines()
    assert source == f"{HUB_NAME}@{COMMIT} {load_model(str(tiny.student)).fingerprint()}"
    assert pinned == f"{HUB_NAME}@{COMMIT}"
    assert "no such model folder: nobody/nothing; nor could a model of that name be loaded from the Hub" in nothing
    assert "no such id" in nothing
    assert folder == f"{tmp_path / 'cache' / 'models' / 'smollm2-hub'} 1"
    assert {file.name for file in Path(folder.split()[0]).iterdir()} == {file.name for file in tiny.student.iterdir()}
    # both the folder and the Hub's own cache outlive the connection
    assert without_hub == [f"{HUB_NAME}@{COMMIT}"] * 2


def test_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    with pytest.raises(UsageError, match=r"^no such model folder: org/name; nor could") as raised:
        load_model("org/name")
    assert "out of reach" in raised.value.why
    assert "smollm2" in raised.value.instead


def test_reach(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub_reachable()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub_reachable()
    monkeypatch.setattr(constants, "ENDPOINT", f"{hub}/nothing")  # an answer is an answer
    assert hub_reachable()
    monkeypatch.setattr(constants, "ENDPOINT", "no address")
    assert not hub_reachable()
