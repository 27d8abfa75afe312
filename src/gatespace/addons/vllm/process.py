"""A vLLM server as a child process: start it, wait for it, and stop it with all its children."""

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

from gatespace.addons.vllm.server import ServerAwayError, VllmServer
from gatespace.errors import RunError, UsageError
from gatespace.files import Closing

_TAIL = 4000
"""Bytes of the log shown in an error."""
_END = 30.0
"""Seconds for a server to exit once it is killed or has stopped listening."""


class VllmProcess(Closing):
    """A vLLM server on this machine, on a free loopback port.

    vLLM has its own environment; `python` is its interpreter. Starts the module rather than the script `vllm serve`,
    which does not work in the CPU build.

    Args:
        python: The interpreter of an environment with vLLM.
        model: A model folder.
        log: File for its output.
        dtype: ``float32`` or ``bfloat16``.
        max_model_len: Longest prompt and response.
        max_logprobs: Max log-probabilities per position.
        weights: Whether new weights can be loaded (vLLM's development endpoints).
        options: Extra server options.
        environment: Extra environment variables.
        patience: Seconds to become ready.
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
        command = [os.path.abspath(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", "--dtype", dtype]
        command += ["--max-model-len", str(max_model_len), "--max-logprobs", str(max_logprobs), "--enforce-eager"]
        # Otherwise the model's generation_config.json sets the defaults of a request.
        self._command = [*command, "--generation-config", "vllm", *options]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        variables["VLLM_SERVER_DEV_MODE"] = "1" if weights else "0"
        self._variables = variables | dict(environment or {})
        self._patience = patience
        self._start("wb")

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the server, also its process group id."""
        return self._process.pid

    def restart(self) -> None:
        """Restart it at the same address, running or not."""
        self.kill()
        self._start("ab")

    def kill(self) -> None:
        """Kill it immediately, like a crash."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_END)

    def close(self, seconds: float = 20.0) -> None:
        """Terminate it; kill it after `seconds`."""
        atexit.unregister(self.close)
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self.kill()  # its children may outlive it

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If the block fails because the server has exited, raise an error with the end of its log."""
        try:
            yield
        except RunError as error:
            if not _is_away(error):
                raise
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END)  # it stops listening before it exits
            if self.alive:
                raise
            raise RunError(
                "the vLLM server that was started here has ended",
                got=error.what,
                why=self._tail(),
                instead="the same command, which resumes from the last checkpoint if it is a run's",
            ) from error

    def _start(self, mode: str) -> None:
        with self.log.open(mode) as output:
            # Own process group: the engine is a child of the server, and both have to stop.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,
            )
        atexit.register(self.close)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self._patience
        with VllmServer(self.address, timeout=5, patience=1) as server:
            while True:
                if not self.alive:
                    raise RunError(
                        "the vLLM server has ended before it was ready",
                        got=f"exit code {self._process.returncode}",
                        why=self._tail(),
                    )
                with suppress(ServerAwayError):
                    server.card()
                    return
                if time.monotonic() > end:
                    raise RunError(f"the vLLM server was not ready after {self._patience:.0f} s", why=self._tail())

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL))
            return file.read().decode("utf-8", "replace").strip()


def check_python(python: str | Path) -> None:
    """Raise unless this is an executable file."""
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
