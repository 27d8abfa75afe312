"""Teacher services in processes of their own, to be killed, suspended and restarted.

Run as a module it imports torch and transformers once, and forks for each start of a service.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[3]


def serve(order: dict[str, Any], answer: int) -> None:
    """In the child: load the model and serve it until the end."""
    import torch

    from gatespace.addons.service import front
    from gatespace.addons.service.keys import server_keys
    from gatespace.addons.service.server import ServerLimits, TeacherServer
    from gatespace.models import load_model

    torch.set_num_threads(1)
    front.STALLED = order["stalled"]
    model = load_model(order["model"])
    server = TeacherServer(
        model,
        f"tcp://127.0.0.1:{order['port']}",
        keys=server_keys(*map(Path, order["keys"])) if order["keys"] else None,
        limits=ServerLimits(**order["limits"]),
        report=lambda text: print(text, file=sys.stderr, flush=True),
    )
    signal.signal(signal.SIGTERM, lambda *_: server.drain())
    os.write(answer, (json.dumps({"pid": os.getpid(), "address": server.address}) + "\n").encode())
    server.run()


def nursery() -> None:
    import msgspec  # noqa: F401
    import zmq  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the children have ended
    for line in sys.stdin:
        if os.fork() == 0:
            code = 1
            try:
                serve(json.loads(line), sys.stdout.fileno())
                code = 0
            except BaseException as error:
                print(f"service: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os.write(sys.stdout.fileno(), (json.dumps({"error": str(error)}) + "\n").encode())
            finally:
                os._exit(code)


@dataclass
class Service:
    """A service that runs."""

    pid: int
    address: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As power cuts do; and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        """Wherever it is."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)

    def peak(self) -> int:
        """The most memory that it has had, in MiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) >> 10

    def wait(self) -> None:
        while Path(f"/proc/{self.pid}").exists():
            state = Path(f"/proc/{self.pid}/stat")
            try:
                if state.read_text().rpartition(")")[2].split()[0] == "Z":
                    return
            except OSError:
                return


class Nursery:
    """Starts services."""

    def __init__(self, cache: Path, stderr: IO[bytes] | None = None) -> None:
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._started: list[Service] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="services-", dir="/tmp")  # killed ones leave a folder there
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.addons.service.services"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "GATESPACE_CACHE": str(cache),
                "TMPDIR": self._scratch.name,
            },
        )

    def start(
        self, model: Path, port: int = 0, *, keys: Sequence[str] = (), stalled: float = 10.0, **limits: Any
    ) -> Service:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"model": str(model), "port": port, "keys": keys, "stalled": stalled, "limits": limits}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        service = Service(answer["pid"], answer["address"])
        self._started.append(service)
        return service

    def close(self) -> None:
        for service in self._started:
            with contextlib.suppress(ProcessLookupError):
                service.signal(signal.SIGKILL)
        self._process.kill()
        self._process.communicate()
        self._scratch.cleanup()


if __name__ == "__main__":
    nursery()
