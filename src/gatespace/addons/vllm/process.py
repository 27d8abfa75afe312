"""A vLLM server as a child process: started, waited for, and ended with all its own children."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gatespace.addons.vllm.server import ServerAwayError, VllmServer
from gatespace.errors import RunError, UsageError

_LAST = 4000
"""Bytes of the log that an error shows."""
_LAST_BREATH = 30.0
"""Seconds in which a server that does not listen any more ends."""


class VllmProcess:
    """A vLLM server on this machine, on a free port of the loopback.

    vLLM lives in an environment of its own; `python` is the interpreter there. The module is started and not the
    script `vllm serve`, which the CPU build does not have in working order.

    Args:
        python: The interpreter of an environment with vLLM.
        model: A model folder.
        log: Where its output goes.
        dtype: ``float32`` or ``bfloat16``.
        max_model_len: The longest prompt and response.
        max_logprobs: Most first choices per position that can be asked for.
        weights: Whether new weights can be loaded (vLLM's development endpoints).
        options: Further options of the server.
        environment: Further variables.
        patience: Seconds until it has to be ready.
    """

    def __init__(
        self,
        python: str | Path,
        model: str | Path,
        *,
        log: Path,
        dtype: str = "bfloat16",
        max_model_len: int = 512,
        max_logprobs: int = 64,
        weights: bool = False,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        patience: float = 300.0,
    ) -> None:
        check_python(python)
        port = _free_port()
        self.address = f"vllm://127.0.0.1:{port}"
        self.log = log
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", "--dtype", dtype]
        command += ["--max-model-len", str(max_model_len), "--max-logprobs", str(max_logprobs), "--enforce-eager"]
        # Otherwise a model's own taste in temperature and top_k stands in for what a request leaves open.
        self._command = [*command, "--generation-config", "vllm", *options]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        variables["VLLM_SERVER_DEV_MODE"] = "1" if weights else "0"
        self._variables = variables | dict(environment or {})
        self._patience = patience
        self._start("wb")

    def _start(self, mode: str) -> None:
        with self.log.open(mode) as output:
            # A group of its own: the engine is a child of the server, and both have to go.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,
            )
        atexit.register(self.stop)
        try:
            self._wait(self._patience)
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """Start it again at the same address, whatever has become of it."""
        self.kill()
        self._start("ab")

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the server, which is also the number of its process group."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once, as a crash would."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(30)

    def stop(self, seconds: float = 20.0) -> None:
        """Ask it to end, and see that it does."""
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self.kill()  # its children may outlive it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Say why the server has ended, where that is why something has failed."""
        try:
            yield
        except RunError as error:
            if not _is_away(error):
                raise
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_BREATH)  # it stops listening before it ends
            if self.alive:
                raise
            raise RunError(
                "the vLLM server that was started here has ended",
                got=error.what,
                why=_tail(self.log),
                instead="the same command, which goes on from the last checkpoint if it is a run's",
            ) from error

    def _wait(self, patience: float) -> None:
        end = time.monotonic() + patience
        server = VllmServer(self.address, timeout=5, patience=1)
        try:
            while True:
                if self._process.poll() is not None:
                    raise RunError(
                        "the vLLM server has ended before it was ready",
                        got=f"exit code {self._process.returncode}",
                        why=_tail(self.log),
                    )
                with suppress(ServerAwayError):
                    server.card()
                    return
                if time.monotonic() > end:
                    raise RunError(f"the vLLM server was not ready after {patience:.0f} s", why=_tail(self.log))
        finally:
            server.close()


def check_python(python: str | Path) -> None:
    """Raise unless there is a program of this name."""
    path = Path(python).expanduser()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UsageError("no Python with vLLM", got=python, instead="make test-vllm makes .venv-vllm/bin/python")


def _is_away(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ServerAwayError):
        error = error.__cause__
    return error is not None


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST))
        return file.read().decode("utf-8", "replace").strip()
