"""The child process of a vLLM server, with a stand-in that starts at once; test_engine.py has a real vLLM."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gatespace.addons.vllm.process import VllmProcess
from gatespace.addons.vllm.server import VllmServer
from gatespace.errors import RunError, UsageError
from tests.addons.vllm.scripted import members

SERVER = """
import http.server, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "model"}]}')

subprocess.Popen(["sleep", "60"])  # as vLLM's engine is a child of its server
print("options:", *sys.argv[1:], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return program(tmp_path / "python", SERVER)


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def process(python: Path, tmp_path: Path) -> Iterator[VllmProcess]:
    with VllmProcess(python, "some/model", log=tmp_path / "vllm.log", options=["--seed", "1"]) as process:
        yield process


def test_it_listens_and_ends_with_its_children(process: VllmProcess) -> None:
    with VllmServer(process.address) as server:
        assert server.card().id == "model"
    assert "--model some/model" in process.log.read_text()
    assert "--seed 1" in process.log.read_text()
    assert len(members(process.pid)) == 2
    process.close()
    assert not process.alive
    assert not members(process.pid)


def test_it_is_restarted_at_the_same_address(process: VllmProcess) -> None:
    before, address = process.pid, process.address
    process.restart()
    assert (process.address, process.alive) == (address, True)
    assert process.pid != before
    assert not members(before)
    assert process.log.read_text().count("options:") == 2


def test_an_error_because_it_has_ended_shows_its_log(process: VllmProcess) -> None:
    with VllmServer(process.address, wait=False) as server:
        with pytest.raises(RunError, match="something else"), process.watched():
            raise RunError("something else")
        os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="started here has ended") as caught, process.watched():
            server.card()
    assert "options:" in caught.value.why


def test_one_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    broken = program(tmp_path / "broken", "import sys\nprint('no such model')\nsys.exit(3)")
    with pytest.raises(RunError, match="ended before it was ready") as caught:
        VllmProcess(broken, "some/model", log=tmp_path / "vllm.log")
    assert (caught.value.got, caught.value.why) == ("exit code 3", "no such model")


def test_one_that_never_listens_is_given_up(tmp_path: Path) -> None:
    silent = program(tmp_path / "silent", "import time\ntime.sleep(60)")
    with pytest.raises(RunError, match="not ready after 1 s"):
        VllmProcess(silent, "some/model", log=tmp_path / "vllm.log", patience=1.0)


def test_what_is_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Python with vLLM"):
        VllmProcess(tmp_path, "some/model", log=tmp_path / "vllm.log")
