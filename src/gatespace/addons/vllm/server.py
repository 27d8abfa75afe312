"""A stock vLLM server with a model, spoken to over HTTP.

Every wait has a deadline: an exchange is cut off after `timeout`, however slowly its bytes arrive, and repeated with
growing pauses until `patience` is over. Vanished servers are waited for; what a server refuses is an error at once; and
an answer that is not exactly what was asked for is an error too, and never a number. The standard library's client is
used: one connection per exchange needs no pool, and the answers' size is in their JSON, not in the transport.
"""

from __future__ import annotations

import http.client
import math
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from gatespace.errors import RunError, UsageError, missing_extra
from gatespace.seeding import generator

try:
    import msgspec
except ImportError as error:
    raise missing_extra("a vLLM server", module="msgspec", extra="service") from error

SCHEME = "vllm"
LARGEST = 512 << 20
"""Bytes; no answer makes us set aside more."""
_FORM = re.compile(rf"{SCHEME}://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{{1,5}})(?:/(?P<model>[^\s?#]+?)?)?/?")
_PIECE = 1 << 20
_PASSING = frozenset({408, 425, 429, 502, 503, 504})
"""Answers of a server that is busy, or not there yet."""
_BROKEN = 3
"""How often a server may fail within (500) before we believe it."""
_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
_SOON = 10.0
"""Seconds in which a server says whether it is well."""

T = TypeVar("T")


class ServerAwayError(RunError):
    """A server has not answered within the caller's patience."""


class RefusedError(RunError):
    """A server has answered that it will not, or cannot, do what it was asked for."""

    status = 0
    detail = ""


class Place(NamedTuple):
    """Where a vLLM server is, and which of its models is meant (None: its only one)."""

    host: str
    port: int
    model: str | None

    def __str__(self) -> str:
        return f"{SCHEME}://{self.host}:{self.port}" + (f"/{self.model}" if self.model else "")


def parse_place(address: str) -> Place:
    """The server at ``vllm://host:port`` or ``vllm://host:port/model``.

    Example:
        >>> parse_place("vllm://127.0.0.1:8000/Qwen/Qwen3-32B")
        Place(host='127.0.0.1', port=8000, model='Qwen/Qwen3-32B')
    """
    match = _FORM.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(
            "not the address of a vLLM server", got=address, instead="vllm://HOST:PORT, or vllm://HOST:PORT/MODEL"
        )
    return Place(match["host"], int(match["port"]), match["model"])


# ---------------------------------------------------------------------------------------------------- what comes back


class Card(msgspec.Struct):
    """A model of a server, as it lists it."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class Entry(msgspec.Struct):
    """A token that was possible at a position."""

    logprob: float


class Written(msgspec.Struct):
    """What is told of the tokens that were written."""

    token_logprobs: list[float | None]


class Choice(msgspec.Struct):
    """The answer to one prompt. Positions stay JSON until they are read: most are never looked at."""

    index: int
    finish_reason: str | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: Written | None = None


class Usage(msgspec.Struct):
    """How many tokens a server has counted."""

    prompt_tokens: int


class Completion(msgspec.Struct):
    """The answer to a list of prompts."""

    choices: list[Choice]
    usage: Usage | None = None


class _Models(msgspec.Struct):
    data: list[Card]


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Done(msgspec.Struct):
    pass


_position = msgspec.json.Decoder(dict[int, Entry] | None)
_decoders: dict[type, Any] = {}


def read_position(raw: msgspec.Raw) -> dict[int, float]:
    """Token → log-probability at one position; an error where there is nothing, or what is no log-probability."""
    try:
        entries = _position.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RunError("a vLLM server has sent a position that cannot be read", got=_short(str(error))) from None
    if not entries:
        raise RunError("a vLLM server has sent nothing for a position", got=_short(bytes(raw)))
    found = {id: entry.logprob for id, entry in entries.items()}
    for id, value in found.items():
        if id < 0 or not math.isfinite(value) or value > 1e-3:
            raise RunError("a vLLM server has sent what is no log-probability", got=f"{value} for token {id}")
    return found


# ---------------------------------------------------------------------------------------------------- the server


class VllmServer:
    """Speaks to one server; may be used from several threads.

    Args:
        address: ``vllm://host:port[/model]``.
        timeout: Seconds after which an exchange is given up and repeated. The next one is given twice as long, for a
            server may be slow because there is much to do.
        patience: Seconds without success after which `ServerAwayError` is raised.
        wait: Whether a server is waited for where nobody listens. False: it is away at once, for somebody who can do
            more about it than wait.
        report: Is told what a user should know.
        at_once: Most exchanges at a time that `later` begins.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 60.0,
        patience: float = 600.0,
        wait: bool = True,
        report: Callable[[str], None] | None = None,
        at_once: int = 4,
    ) -> None:
        self.place = parse_place(address)
        self.timeout, self.patience = timeout, patience
        self._wait = wait
        self.interruptions = 0
        """How often an exchange broke off: whoever answers the next one may be another server."""
        self._report = report or (lambda text: None)
        self._jitter = generator(secrets.randbits(62), "vllm", "pause").random
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="gatespace-vllm")
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()

    def __str__(self) -> str:
        return f"the vLLM server at {self.place}"

    def close(self) -> None:
        """Give up what is under way."""
        self._closing.set()
        with self._lock:
            for open in self._sockets:
                _cut(open)
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ questions

    def card(self) -> Card:
        """The model that is meant; an error where the server does not have it, or has several."""
        cards = self.call("GET", "/v1/models", None, _Models).data
        names = ", ".join(card.id for card in cards) or "none"
        if self.place.model is None and len(cards) != 1:
            raise UsageError(f"{self} has not one model", got=names, instead=f"{self.place}/MODEL")
        for card in cards:
            if self.place.model in (None, card.id):
                return card
        raise UsageError(f"{self} does not have this model", got=self.place.model, instead=f"one of: {names}")

    def version(self) -> str:
        """The version of vLLM."""
        return self.call("GET", "/version", None, _Version).version

    def healthy(self) -> bool:
        """Whether the server says of itself that it is well. One exchange, and no waiting."""
        try:
            status, _ = self._exchange("GET", "/health", None, _SOON)
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def tokenize(self, model: str, text: str) -> list[int]:
        """The ids of `text` as the server's tokenizer has them."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self.call("POST", "/tokenize", body, _Tokens).tokens

    def complete(self, prompts: Sequence[Sequence[int]], body: dict[str, Any]) -> list[Choice]:
        """The answers to token-id prompts, in their order. What was read is compared with what was sent."""
        sent = [list(prompt) for prompt in prompts]
        body = {**body, "prompt": sent, "stream": False, "return_token_ids": True, "skip_special_tokens": False}
        answer = self.call("POST", "/v1/completions", body, Completion)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(sent))):
            raise RunError(f"{self} has not answered every row once", got=f"{len(choices)} of {len(sent)} rows")
        for prompt, choice in zip(sent, choices, strict=True):
            if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt:
                raise RunError(f"{self} has read other tokens than it was sent", got=_short(choice.prompt_token_ids))
        if answer.usage is None or answer.usage.prompt_tokens != sum(map(len, sent)):
            got = None if answer.usage is None else answer.usage.prompt_tokens
            raise RunError(
                f"{self} has counted other tokens than it was sent", got=got, instead=str(sum(map(len, sent)))
            )
        return choices

    def later(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work`, an exchange or several, in a thread of this server."""
        return self._pool.submit(work)

    # ------------------------------------------------------------------ exchanges

    def call(self, method: str, path: str, body: dict[str, Any] | None, kind: type[T]) -> T:
        """One question and its answer, however many exchanges it takes."""
        content = None if body is None else msgspec.json.encode(body)
        status, answer = self._answer(method, path, content)
        if status != 200:
            raise self._refusal(path, status, answer)
        return self._decoded(path, answer, kind)

    def tell(self, path: str, body: dict[str, Any] | None = None) -> None:
        """A command that has no answer but that it is done; it must be one that may be repeated."""
        status, answer = self._answer("POST", path, msgspec.json.encode(body or {}))
        if status != 200:
            raise self._refusal(path, status, answer)

    def _answer(self, method: str, path: str, content: bytes | None) -> tuple[int, bytes]:
        begun = time.monotonic()
        seconds, pause, broken = self.timeout, _PAUSE, 0
        while True:
            nobody = False
            left = begun + self.patience - time.monotonic()
            try:
                status, answer = self._exchange(method, path, content, max(0.05, min(seconds, left)))
            except TimeoutError:
                reason = "no answer in time"
                seconds *= 2
            except (OSError, http.client.HTTPException) as error:
                reason = _short(str(error) or type(error).__name__)
                nobody = isinstance(error, ConnectionRefusedError)
            else:
                broken += status == 500
                if status not in _PASSING and (status != 500 or broken == _BROKEN):
                    return status, answer
                reason = f"HTTP {status}: {_detail(answer)}"
            if self._closing.is_set():
                raise ServerAwayError(f"{self} is not asked any more", why="this side was closed")
            self.interruptions += 1
            passed = time.monotonic() - begun
            rest = self.patience - passed
            if rest <= 0 or (nobody and not self._wait):
                raise ServerAwayError(
                    f"{self} has not answered for {passed:.0f} s",
                    got=reason,
                    instead="start it again, and then this run: it goes on from its last checkpoint",
                )
            if passed >= self.timeout:
                self._report(f"{self} has not answered for {passed:.0f} s ({reason}); trying again")
            self._closing.wait(min(rest, pause * (0.5 + 0.5 * self._jitter())))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _exchange(self, method: str, path: str, content: bytes | None, seconds: float) -> tuple[int, bytes]:
        """Status and body; a `TimeoutError` after `seconds`, even if single bytes keep coming."""
        host = self.place.host.strip("[]")
        connection = http.client.HTTPConnection(host, self.place.port, timeout=seconds)
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
                connection.request(method, path, content, headers)
                with connection.getresponse() as response:
                    status, body = response.status, _body(response)
                if late.is_set() or self._closing.is_set():  # a cut can look like the end of an answer
                    raise ConnectionAbortedError("cut off")
                return status, body
            except (OSError, http.client.HTTPException):
                if late.is_set():
                    raise TimeoutError("no answer in time") from None
                raise
            finally:
                watch.cancel()
                with self._lock:
                    self._sockets.discard(sock)
        finally:
            connection.close()

    def _decoded(self, path: str, answer: bytes, kind: type[T]) -> T:
        decoder = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.json.Decoder(kind))
        try:
            found: T = decoder.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RunError(
                f"the answer of {self} to {path} cannot be read", got=_short(answer), why=_short(str(error))
            ) from None
        return found

    def _refusal(self, path: str, status: int, answer: bytes) -> RefusedError:
        error = RefusedError(f"{self} refuses {path}", got=f"HTTP {status}: {_detail(answer)}")
        error.status, error.detail = status, _detail(answer)
        return error


# ---------------------------------------------------------------------------------------------------- helpers


def _body(response: http.client.HTTPResponse) -> bytes:
    pieces, size = [], 0
    while piece := response.read(_PIECE):
        size += len(piece)
        if size > LARGEST:
            raise RunError("the answer of a vLLM server is too large", got=f"more than {LARGEST >> 20} MiB")
        pieces.append(piece)
    if response.length:  # read() with a size does not say so itself
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _detail(answer: bytes) -> str:
    """What an error says: OpenAI's form, FastAPI's, or the bytes themselves."""
    with suppress(Exception):
        found = msgspec.json.decode(answer)
        inner = found.get("error", found)
        return _short(inner.get("message") or inner.get("detail") or inner)
    return _short(answer)


def _short(what: object) -> str:
    text = what.decode("utf-8", "replace") if isinstance(what, bytes) else str(what)
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]} …"
