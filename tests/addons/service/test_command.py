"""`gatespace teacher` in real processes: serve, status, keygen, and the end by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gatespace.addons.service import wire
from gatespace.addons.service.keys import ClientKeys, client_keys
from gatespace.models import Model, TinyPair
from gatespace.teacher.local import LocalTeacher
from tests.addons.service.raw_client import PROMPTS, QUESTIONS, RESPONSES, RawClient, spec

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tiny: TinyPair) -> Path:
    return tiny.teacher


@contextmanager
def serving(folder: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A service in a process of its own, and the line it printed when it was ready."""
    command = [sys.executable, "-m", "gatespace", "teacher", "serve", "--model", str(folder), "--json"]
    command += ["--precision", "fp32", "--bind", "tcp://127.0.0.1:0", *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    # A reading without an end is ended by the end of the process.
    watch = threading.Timer(600, process.kill)
    watch.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        watch.cancel()
        process.kill()
        process.communicate()


def scored(address: str, model: Model, keys: ClientKeys | None = None) -> bool:
    """Whether the service has the bits of the model in this process."""
    right = LocalTeacher(model, spec(model)).score(PROMPTS[:3], RESPONSES[:3]).payload
    with RawClient(address, model, keys=keys) as client:
        welcome = client.hello()
        assert isinstance(welcome, wire.Welcome)
        return bool(client.score(QUESTIONS[:3])[0].equal(right[0]))  # type: ignore[index]


def test_serve_until_told_to_end(folder: Path, model: Model, run: Any, tmp_path: Path) -> None:
    with serving(folder, "--cache", str(tmp_path / "scores")) as (process, ready):
        assert ready["event"] == "ready"
        assert ready["fingerprint"] == model.fingerprint()
        assert ready["keys"] is False
        assert scored(ready["address"], model)
        assert scored(ready["address"], model)
        told = json.loads(run("teacher", "status", ready["address"], "--timeout", "60", "--json").stdout)
        assert (told["requests"], told["rows"], told["passes"], told["server"]) == (2, 6, 1, ready["instance"])
        assert told["cache_hits"] == told["cache_misses"] == told["tokens"] // 2
        shown = run("teacher", "status", ready["address"], "--timeout", "60")
        assert shown.exit_code == 0
        assert "2 requests, 6 rows" in shown.stdout
        assert "13 of 26 positions" in shown.stdout
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        events = [json.loads(line) for line in out.splitlines()]
        assert events[-1]["event"] == "ended"
        assert events[-1]["requests"] == 2
        assert any(event.get("text", "").startswith("shutting down") for event in events)
        assert err == ""


def test_serve_with_keys(folder: Path, model: Model, run: Any, tmp_path: Path) -> None:
    made = {}
    for name in ("server", "client", "stranger"):
        result = run("teacher", "keygen", str(tmp_path / name), "--json")
        assert result.exit_code == 0
        made[name] = json.loads(result.stdout)
    clients = tmp_path / "clients"
    clients.write_text(f"{made['client']['public_key']} the only one\n")
    secret, allow, public = made["server"]["secret"], str(clients), made["server"]["public"]
    # Any address goes, with keys.
    place = ("--bind", "tcp://0.0.0.0:0")
    with serving(folder, "--cache", "none", "--key", secret, "--allow", allow, *place) as (process, ready):
        address = ready["address"].replace("0.0.0.0", "127.0.0.1")
        assert ready["keys"] is True
        assert scored(address, model, client_keys(made["client"]["secret"], public))
        known = ("--key", made["client"]["secret"], "--server-key", public)
        assert run("teacher", "status", address, "--timeout", "60", *known).exit_code == 0
        for options in ((), ("--key", made["stranger"]["secret"], "--server-key", public)):
            result = run("teacher", "status", address, "--timeout", "0.3", *options)
            assert result.exit_code == 1
            assert "does not reply" in result.stderr
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
        assert (process.returncode, err) == (0, "")
        assert json.loads(out.splitlines()[-1])["clients"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("serve", "--model", "x", "--bind", "tcp://0.0.0.0:5555"), "this machine only"),
        (("serve", "--model", "x", "--bind", "nowhere"), "not the address"),
        (("serve", "--model", "x", "--key", "a.key"), "--key needs --allow"),
        (("serve", "--model", "x", "--allow", "list"), "--allow needs --key"),
        (("serve", "--model", "x", "--key", "a.key", "--allow", "list"), "cannot be read"),
        (("serve", "--model", "no such model"), "no such model"),
        (("serve", "--model", "x", "--precision", "fp7"), "precision"),
        (("serve", "--model", "x", "--engine", "vlm"), "did you mean 'vllm'"),
        (("serve", "--model", "x", "--engine", "vllm"), "--engine vllm needs --vllm"),
        (("serve", "--model", "x", "--vllm", "bin/python"), "no meaning with --engine native"),
        (("serve", "--model", "x", "--vllm-args", "--seed 1"), "no meaning with --engine native"),
        (("serve", "--model", "x", "--engine", "vllm", "--vllm", "no/python"), "no Python with vLLM"),
        (("serve", "--model", "x", "--engine", "vllm", "--vllm", "http://a:1"), "not the address of a vLLM server"),
        (
            ("serve", "--model", "x", "--engine", "vllm", "--vllm", "vllm://a:1", "--vllm-args", "-x"),
            "are for a vLLM that is started here",
        ),
        (("serve", "--model", "no such model", "--engine", "vllm", "--vllm", "vllm://a:1"), "no such model"),
        (("serve", "--model", "x", "--engine", "vllm", "--vllm", "vllm://a:1", "--precision", "fp7"), "precision"),
        (("status", "http://x:1"), "no kind of teacher called http"),
        (("status", "--key", "a.key"), "needs"),
        (("sreve",), "did you mean 'serve'"),
    ],
)
def test_mistakes(args: tuple[str, ...], message: str, run: Any) -> None:
    result = run("teacher", *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_keygen_replaces_nothing(run: Any, tmp_path: Path) -> None:
    shown = run("teacher", "keygen", str(tmp_path / "a"))
    assert shown.exit_code == 0
    assert "which only you can read" in shown.stdout
    assert (tmp_path / "a.key").read_text().strip() not in shown.stdout
    again = run("teacher", "keygen", str(tmp_path / "a"))
    assert again.exit_code == 2
    assert "not written over" in again.stderr


def test_status_needs_no_torch(python: Callable[..., Any]) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from gatespace.cli.app import main\n"
        "sys.argv = ['gatespace', 'teacher', 'status', 'zmq://127.0.0.1:9', '--timeout', '0.2']\n"
        "main()"
    )
    result = python("-c", script)
    assert result.returncode == 1
    assert "does not reply" in result.stderr
