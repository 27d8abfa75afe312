"""HTTP client for a stock vLLM server.

Every wait has a deadline: a request is cut off after `timeout`, even if bytes keep trickling in, and retried with
backoff until `patience` runs out. A server that is gone is waited for; a refusal is an error at once; so is a reply
that does not match the request exactly. It uses the standard library's client: with one connection per request there
is nothing to pool, and JSON dominates the time of a reply, not transport.
"""

from __future__ import annotations

import http.client
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from gatespace.config.address import Address, parse_address
from gatespace.config.base import Fault
from gatespace.errors import RunError, UsageError, missing_extra
from gatespace.files import Closing
from gatespace.retry import backoff

try:
    import msgspec
except ImportError as error:
    raise missing_extra("a vLLM server", module="msgspec", extra="service") from error

LARGEST = 512 << 20
"""Max bytes of a reply."""
_CHUNK = 1 << 20
_PASSING = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of a server that is busy or not ready yet."""
_BROKEN = 3
"""Internal errors (500) after which a request counts as refused."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
_HEALTH = 10.0
"""Timeout of the health check in seconds."""

T = TypeVar("T")


class ServerAwayError(RunError):
    """A server has not replied within the caller's patience."""


class RefusedError(RunError):
    """A server has replied with an error."""

    status = 0
    detail = ""


def server_address(text: str) -> Address:
    """Parse an address ``vllm://HOST:PORT`` or ``vllm://HOST:PORT/MODEL``."""
    with suppress(Fault):
        if (address := parse_address(text)).scheme == "vllm":
            return address
    raise UsageError(
        "not the address of a vLLM server", got=text, instead="vllm://HOST:PORT, or vllm://HOST:PORT/MODEL"
    )


# ---------------------------------------------------------------------------------------------------- replies


class Card(msgspec.Struct):
    """A model as listed by the server."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class Logprobs(msgspec.Struct):
    """Log-probabilities of the generated tokens."""

    token_logprobs: list[float | None]


class Choice(msgspec.Struct):
    """The reply to one prompt. Positions stay raw JSON until `read_position`, as most are never needed."""

    index: int
    finish_reason: str | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Completion(msgspec.Struct):
    choices: list[Choice]
    usage: _Usage | None = None


class _Models(msgspec.Struct):
    data: list[Card]


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Entry(msgspec.Struct):
    logprob: float


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_position = msgspec.json.Decoder(dict[int, _Entry] | None)


def read_position(raw: msgspec.Raw, token: int) -> dict[int, float]:
    """Return id → log-probability at a prompt position; `token`, the one at that position, must be among the ids."""
    try:
        entries = _position.decode(raw)
    except _UNREADABLE as error:
        raise RunError("a vLLM server has sent a position that cannot be read", got=_short(str(error))) from None
    if not entries:
        raise RunError("a vLLM server has sent nothing for a position", got=_short(bytes(raw)))
    found = {id: entry.logprob for id, entry in entries.items()}
    for id, value in found.items():
        if id < 0 or not is_log_prob(value):
            raise RunError("a vLLM server has sent an invalid log-probability", got=f"{value} for token {id}")
    if token not in found:
        raise RunError("a vLLM server has not sent the log-probability of the token itself", got=f"token {token}")
    return found


def is_log_prob(value: float) -> bool:
    """Whether this is a log-probability, up to rounding."""
    return math.isfinite(value) and value <= 1e-3


# ---------------------------------------------------------------------------------------------------- server


class VllmServer(Closing):
    """Sends requests to one server; thread-safe.

    Args:
        address: ``vllm://HOST:PORT[/MODEL]``.
        timeout: Seconds after which a request is cut off and retried. Doubles after each timeout, as the server may
            just be loaded.
        patience: Seconds without success after which `ServerAwayError` is raised.
        wait: Whether to wait if nothing listens at the address. False: raise `ServerAwayError` at once, for a caller
            that can restart the server.
        report: Called with a message when a request takes longer than `timeout`.
        concurrency: Max concurrent requests of `submit`.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 60.0,
        patience: float = 600.0,
        wait: bool = True,
        report: Callable[[str], None] | None = None,
        concurrency: int = 4,
    ) -> None:
        self.address = server_address(address)
        self.interruptions = 0
        """Number of failed attempts; after one, a different server may reply."""
        self._timeout, self._patience, self._wait = timeout, patience, wait
        self._report = report or (lambda text: None)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="gatespace-vllm")
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()

    def __str__(self) -> str:
        return f"the vLLM server at {self.address}"

    def close(self) -> None:
        """Abort running requests."""
        self._closing.set()
        with self._lock:
            for sock in self._sockets:
                _cut(sock)
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ requests

    def card(self) -> Card:
        """Return the model of the address; raise if the server lacks it, or has several and none is named."""
        cards = self._call("/v1/models", _Models).data
        wanted, names = self.address.model, ", ".join(card.id for card in cards) or "none"
        if wanted is None and len(cards) != 1:
            raise UsageError(f"{self} does not have exactly one model", got=names, instead=f"{self.address}/MODEL")
        for card in cards:
            if wanted in (None, card.id):
                return card
        raise UsageError(f"{self} does not have this model", got=wanted, instead=f"one of: {names}")

    def version(self) -> str:
        """Return the version of vLLM."""
        return self._call("/version", _Version).version

    def healthy(self) -> bool:
        """Return whether the server reports healthy; one attempt."""
        try:
            status, _ = self._exchange("/health", None, _HEALTH)
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def tokenize(self, model: str, text: str) -> list[int]:
        """Tokenize `text` with the server's tokenizer."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._call("/tokenize", _Tokens, body).tokens

    def complete(self, prompts: Sequence[Sequence[int]], body: dict[str, Any]) -> list[Choice]:
        """Complete prompts of token ids, in order; the ids the server echoes are compared with them."""
        sent = [list(prompt) for prompt in prompts]
        body = {**body, "prompt": sent, "stream": False, "return_token_ids": True, "skip_special_tokens": False}
        reply = self._call("/v1/completions", _Completion, body)
        choices = sorted(reply.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(sent))):
            raise RunError(f"{self} has not replied to every row once", got=f"{len(choices)} of {len(sent)} rows")
        for prompt, choice in zip(sent, choices, strict=True):
            if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt:
                raise RunError(f"{self} has read different tokens than were sent", got=_short(choice.prompt_token_ids))
            if "prompt_logprobs" in body and len(choice.prompt_logprobs or ()) != len(prompt):
                got = f"{len(choice.prompt_logprobs or ())} of {len(prompt)}"
                raise RunError(f"{self} has not sent log-probabilities of every position", got=got)
        tokens, counted = sum(map(len, sent)), None if reply.usage is None else reply.usage.prompt_tokens
        if counted != tokens:
            raise RunError(f"{self} has counted different tokens than were sent", got=counted, instead=str(tokens))
        return choices

    def command(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Send a command and ignore its reply; it must be idempotent."""
        self._reply(path, msgspec.json.encode(body or {}))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work`, one or more requests, in a thread of this client."""
        return self._pool.submit(work)

    # ------------------------------------------------------------------ attempts

    def _call(self, path: str, kind: type[T], body: dict[str, Any] | None = None) -> T:
        """Decode the reply to a GET, or to a POST of `body`."""
        reply = self._reply(path, None if body is None else msgspec.json.encode(body))
        try:
            return msgspec.json.decode(reply, type=kind)
        except _UNREADABLE as error:
            raise RunError(
                f"the reply of {self} to {path} cannot be read", got=_short(reply), why=_short(str(error))
            ) from None

    def _reply(self, path: str, content: bytes | None) -> bytes:
        """Return the body of a reply with status 200; retry within `patience`."""
        start = time.monotonic()
        timeout, failures, broken = self._timeout, 0, 0
        while True:
            nobody = False
            left = start + self._patience - time.monotonic()
            try:
                status, reply = self._exchange(path, content, max(0.05, min(timeout, left)))
            except TimeoutError:
                reason = "no reply in time"
                timeout *= 2
            except (OSError, http.client.HTTPException) as error:
                reason = _short(str(error) or type(error).__name__)
                nobody = isinstance(error, ConnectionRefusedError)
            else:
                if status == 200:
                    return reply
                broken += status == 500
                reason = f"HTTP {status}: {_detail(reply)}"
                if status not in _PASSING and (status != 500 or broken == _BROKEN):
                    refusal = RefusedError(f"{self} refuses {path}", got=reason)
                    refusal.status, refusal.detail = status, _detail(reply)
                    raise refusal
            if self._closing.is_set():
                raise ServerAwayError(f"the connection to {self} was closed")
            self.interruptions += 1
            failures += 1
            passed = time.monotonic() - start
            rest = self._patience - passed
            if rest <= 0 or (nobody and not self._wait):
                raise ServerAwayError(
                    f"{self} has not replied for {passed:.0f} s",
                    got=reason,
                    instead="start the server again, then the same command: a run resumes from its last checkpoint",
                )
            if passed >= self._timeout:
                self._report(f"{self} has not replied for {passed:.0f} s ({reason}); retrying")
            self._closing.wait(min(rest, backoff(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)))

    def _exchange(self, path: str, content: bytes | None, seconds: float) -> tuple[int, bytes]:
        """Return status and body; raise `TimeoutError` after `seconds`, even if bytes keep trickling in."""
        host = self.address.host.strip("[]")
        connection = http.client.HTTPConnection(host, self.address.port, timeout=seconds)
        late = threading.Event()
        try:
            connection.connect()
            sock = connection.sock
            with self._lock:
                self._sockets.add(sock)

            def cut() -> None:
                late.set()
                _cut(sock)

            watch = threading.Timer(seconds, cut)
            watch.daemon = True
            watch.start()
            try:
                headers = {"Connection": "close"} | ({} if content is None else {"Content-Type": "application/json"})
                connection.request("GET" if content is None else "POST", path, content, headers)
                with connection.getresponse() as response:
                    status, body = response.status, _body(response)
                if late.is_set() or self._closing.is_set():  # a cut can look like the end of a reply
                    raise ConnectionAbortedError("cut off")
                return status, body
            except (OSError, http.client.HTTPException):
                if late.is_set():
                    raise TimeoutError("no reply in time") from None
                raise
            finally:
                watch.cancel()
                with self._lock:
                    self._sockets.discard(sock)
        finally:
            connection.close()


def _body(response: http.client.HTTPResponse) -> bytes:
    chunks, size = [], 0
    while chunk := response.read(_CHUNK):
        size += len(chunk)
        if size > LARGEST:
            raise RunError("the reply of a vLLM server is too large", got=f"more than {LARGEST >> 20} MiB")
        chunks.append(chunk)
    if response.length:  # read() with a size does not report truncation
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(chunks)


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _detail(reply: bytes) -> str:
    """Return an error's message: OpenAI's format, FastAPI's, or the raw bytes."""
    with suppress(Exception):
        found = msgspec.json.decode(reply)
        inner = found.get("error", found)
        return _short(inner.get("message") or inner.get("detail") or inner)
    return _short(reply)


def _short(what: object) -> str:
    text = what.decode("utf-8", "replace") if isinstance(what, bytes) else str(what)
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]} …"
