"""A server that replies as vLLM does, with the numbers of a real model, or by a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from gatespace.models import Model, load_model


@dataclass
class Reply:
    """Bytes, and how they are sent."""

    content: bytes = b""
    status: int = 200
    length: int | None = None
    """What the header says; None: the truth."""
    head: bytes | None = None
    """Instead of a status line and headers."""
    every: float = 0.0
    """Seconds between two bytes."""
    before: float = 0.0


@dataclass
class Scripted:
    """The server. `script` maps a path to what is done with the body of a request; other paths reply as vLLM would."""

    model: Model
    script: dict[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    max_logprobs: int = 16
    padding: int = 0
    """Ids that are no tokens, each more probable than any that is."""
    all_rows: bool = False
    """Whether probabilities of prompts are over all rows of the head, padding too, as in vLLM."""
    weights: bool = False
    """Whether it loads new weights, as in vLLM's development mode."""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    port: int = 0
    """0: any that is free."""

    def __enter__(self) -> Scripted:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve({})

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                self._serve(json.loads(content))

            def _serve(self, body: dict[str, Any]) -> None:
                outer.asked.append((self.path, body))
                found = outer.script.get(self.path, outer.usual(self.path))(body)
                reply = found if isinstance(found, Reply) else Reply(json.dumps(found).encode())
                length = len(reply.content) if reply.length is None else reply.length
                head = f"HTTP/1.1 {reply.status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode()
                whole = (head if reply.head is None else reply.head) + reply.content
                outer.closing.wait(reply.before)
                pieces = [whole] if not reply.every else [whole[i : i + 1] for i in range(len(whole))]
                try:
                    for piece in pieces:
                        self.wfile.write(piece)
                        self.wfile.flush()
                        if reply.every and outer.closing.wait(reply.every):
                            return
                except OSError:
                    pass  # the client has gone
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def address(self) -> str:
        return f"vllm://127.0.0.1:{self.port}"

    # ------------------------------------------------------------------ as vLLM would

    def usual(self, path: str) -> Callable[[dict[str, Any]], Any]:
        if self.weights and path in ("/collective_rpc", "/reset_prefix_cache"):
            return self.load
        return {
            "/v1/models": lambda body: {"data": [{"id": "model", "root": "/models/tiny", "max_model_len": 256}]},
            "/health": lambda body: Reply(),
            "/version": lambda body: {"version": "0.0.1"},
            "/tokenize": lambda body: {"tokens": self.model.tokenizer.encode(body["prompt"], add_special_tokens=False)},
            "/v1/completions": self.complete,
        }.get(path, lambda body: Reply(b'{"detail": "Not Found"}', 404))

    def complete(self, body: dict[str, Any]) -> Any:
        k = body.get("prompt_logprobs")
        if k is not None and k > self.max_logprobs:
            message = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
            return Reply(json.dumps({"error": {"message": message}}).encode(), 400)
        choices = [
            {"index": index, "finish_reason": "length", "prompt_token_ids": ids}
            | ({} if k is None else {"prompt_logprobs": self._scored(ids, k)})
            | (self._generated(ids, body) if "logprobs" in body else {})
            for index, ids in enumerate(body["prompt"])
        ]
        return {"choices": choices[::-1], "usage": {"prompt_tokens": sum(map(len, body["prompt"]))}}

    def load(self, body: dict[str, Any]) -> Any:
        if body:
            assert body["method"] == "reload_weights"
            self.model = load_model(body["kwargs"]["weights_path"])
        return Reply()

    @torch.no_grad()
    def _generated(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        """Greedily, by the network's own forward over the whole text at every token."""
        assert body["temperature"] == 0
        written: list[int] = []
        values: list[float] = []
        network: Any = self.model.network
        while len(written) < body["max_tokens"] and (not written or written[-1] not in body["stop_token_ids"]):
            logits = network(input_ids=torch.tensor([[*ids, *written]])).logits[0, -1, : self.model.vocab_size]
            value, token = torch.log_softmax(logits.float(), -1).max(-1)
            written.append(int(token))
            values.append(float(value))
        return {"token_ids": written, "logprobs": {"token_logprobs": values}}

    @torch.no_grad()
    def _scored(self, ids: list[int], k: int) -> list[Any]:
        size = self.model.vocab_size
        network: Any = self.model.network
        logits = network(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        log_probs = torch.log_softmax(logits if self.all_rows else logits[:, :size], -1)
        scored: list[Any] = [None]
        for position, token in zip(log_probs, ids[1:], strict=True):
            values, top = position.topk(max(0, k - self.padding))
            pairs = [(size + i, -1e-4) for i in range(min(k, self.padding))]
            pairs += [*zip(top.tolist(), values.tolist(), strict=True), (token, position[token].item())]
            # As a map has no order that could be relied on, it comes in a bad one.
            scored.append({str(id): {"logprob": value, "rank": 1, "decoded_token": "x"} for id, value in pairs[::-1]})
        return scored


def later(seconds: float, work: Callable[[], object]) -> threading.Thread:
    """Do something from another thread, a little later."""

    def run() -> None:
        time.sleep(seconds)
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def members(group: int) -> list[str]:
    """The processes of a group that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(status.parent.name)
    return found
