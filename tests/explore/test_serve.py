from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gatespace.errors import RunError, UsageError
from gatespace.explore.serve import page_server


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
    connection = http.client.HTTPConnection(*address, timeout=600)
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


def test_the_command_serves_until_interrupted(gated):
    command = [sys.executable, "-m", "gatespace", "explore", str(gated), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[1])
        status, body, _ = ask(("127.0.0.1", port))
        assert status == 200
        assert "<!doctype html>" in body
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()
        process.stdout.close()
    assert not Path(gated / "explorer.html").exists()
