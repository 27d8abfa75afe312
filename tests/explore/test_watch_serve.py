"""Who may read the live page, and where it is found again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from gatespace.cli.app import app
from gatespace.errors import UsageError
from gatespace.explore.watch import watch_server
from tests.explore.test_serve import ask
from tests.explore.watched import begin


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path / "cache"))


@contextmanager
def served(folder, **options):
    watch = watch_server(folder, **options)
    with watch.server as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield watch
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def study(tmp_path):
    return begin(tmp_path / "study")[0].folder


def test_without_the_token_nothing(study):
    with served(study) as watch:
        address, token = watch.server.server_address, watch.token
        assert address[0] == "127.0.0.1"
        assert len(token) >= 32
        other = token[:-1] + ("a" if token[-1] != "a" else "b")
        wrong = ["", "?token=", f"?token={other}", f"?token={token}x", f"?token={token[:-1]}", "?token=%ff%ed%a0%80"]
        wrong += [f"?token={token}&token=x", f"?Token={token}"]
        for path in ("/", "/snapshot", "/other"):
            for query in wrong:
                status, body, headers = ask(address, path + query)
                assert (status, "token" in body, token in body) == (403, True, False)
                assert headers["Content-Type"].startswith("text/plain")
            assert ask(address, f"{path}?token={token}")[0] == (404 if path == "/other" else 200)


def test_other_names_of_this_machine_are_refused_even_with_the_token(study):
    with served(study) as watch:
        address, path = watch.server.server_address, f"/snapshot?token={watch.token}"
        for host in (
            "evil.example",
            f"evil.example:{watch.port}",
            f"127.0.0.1.evil.example:{watch.port}",
            "",
            "0.0.0.0:1",
        ):
            status, body, _ = ask(address, path, host=host)
            assert (status, "watched" in body) == (403, False)
        assert ask(address, path, host=f"localhost:{watch.port}")[0] == 200


def test_it_can_only_be_read(study):
    with served(study) as watch:
        address = watch.server.server_address
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(address, f"/?token={watch.token}", method=method)[0] == 501
        status, body, headers = ask(address, f"/snapshot?token={watch.token}", method="HEAD")
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) > 100


def test_headers_and_page(study):
    with served(study) as watch:
        address = watch.server.server_address
        status, body, headers = ask(address, f"/?token={watch.token}")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', body)[1]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src 'self';" in policy
        assert "unsafe" not in policy
        assert watch.token not in body
        _, text, told = ask(address, f"/snapshot?token={watch.token}")
        assert json.loads(text)["title"] == "watched"
        for found in (headers, told):
            assert "frame-ancestors 'none'" in found["Content-Security-Policy"]
            assert (found["Cache-Control"], found["Referrer-Policy"]) == ("no-store", "no-referrer")
            assert (found["X-Content-Type-Options"], found["Cross-Origin-Resource-Policy"]) == (
                "nosniff",
                "same-origin",
            )
            assert not any(name.lower().startswith("access-control") for name in found)
        assert told["Content-Security-Policy"].startswith("default-src 'none'")


def test_the_address_stays_and_only_its_owner_can_read_it(study, tmp_path):
    with served(study) as first:
        port, token = first.port, first.token
        (kept,) = (tmp_path / "cache" / "watch").iterdir()
        assert kept.stat().st_mode & 0o777 == 0o600
        with served(study) as beside:  # the port is taken, so another one
            assert (beside.token, beside.port == port) == (token, False)
    with served(study) as again:
        assert (again.port, again.token) == (port, token)
    with served(study / "elsewhere") as other:
        assert other.token != token
    with served(study, new_address=True) as new:
        assert new.token != token
        assert ask(new.server.server_address, f"/?token={token}")[0] == 403
    with served(study) as again:
        assert again.token == new.token
        kept.chmod(0o644)  # somebody may have read it
    with served(study) as last:
        assert last.token != new.token
    kept.chmod(0o600)
    kept.write_text('{"port": 70000, "token": "short"}')
    with served(study) as last:
        assert len(last.token) >= 32


def test_a_port_that_is_taken_is_told(study):
    with served(study) as watch, pytest.raises(UsageError, match="another --port"):
        watch_server(study, port=watch.port)


def test_a_cache_that_cannot_be_written_costs_only_the_address(study, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path / "file" / "cache"))
    with served(study) as watch:
        assert ask(watch.server.server_address, f"/?token={watch.token}")[0] == 200


def test_the_command_serves_until_interrupted(tmp_path):
    command = [sys.executable, "-m", "gatespace", "watch", str(tmp_path / "later"), "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        said = json.loads(process.stdout.readline())
        assert said["folder"] == str(tmp_path / "later")
        assert re.fullmatch(rf"http://127\.0\.0\.1:{said['port']}/\?token=[\w-]{{32}}", said["url"])
        path = said["url"].partition(str(said["port"]))[2].replace("/", "/snapshot", 1)
        assert json.loads(ask(("127.0.0.1", said["port"]), path)[1])["kind"] == "nothing"
        begin(tmp_path / "later")
        process.send_signal(signal.SIGINT)
        rest, heard = process.communicate(timeout=600)
    finally:
        process.kill()
    assert (process.returncode, rest) == (0, "")
    assert heard.splitlines() == [f"nothing in {tmp_path / 'later'} yet; the page shows it when it begins"]


def test_mistakes_are_told_without_a_traceback(tmp_path):
    (tmp_path / "notes.txt").touch()
    for words in ([tmp_path], [tmp_path / "notes.txt"], [tmp_path / "later", "--port", "99999"]):
        result = CliRunner().invoke(app, ["watch", *map(str, words)])
        assert result.exit_code == 2
        assert "Traceback" not in result.output
