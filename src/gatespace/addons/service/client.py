"""A teacher elsewhere, that scores as one in this process would, to the bit.

Its hidden states come over the wire, and its head once; both together are its full distribution. Scores are kept in
the same cache under the same keys as those of a `LocalTeacher`, so that runs share them wherever their teacher is.
"""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gatespace.addons.service import wire
from gatespace.addons.service.keys import ClientKeys, endpoint
from gatespace.addons.service.link import Link, Question
from gatespace.config.address import Address, parse_address
from gatespace.config.base import Fault
from gatespace.errors import RunError, UsageError
from gatespace.files import Closing
from gatespace.gating.projection import Head
from gatespace.models.cache_root import cache_root
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.kept import Form, RowScores
from gatespace.teacher.local import LocalStats
from gatespace.teacher.scores import Scores, check_questions

_LARGEST_HEAD = 16 << 30
"""Bytes; no server makes a client set aside more."""
_PARTS_AT_ONCE = 4
_HEADS = 8
"""How many heads are kept on disk; the oldest go."""


@dataclass(frozen=True)
class _Piece:
    """Rows of a batch that are asked about in one message."""

    rows: list[int]
    question: Question


class RemoteTeacher(Closing):
    """Scores with a teacher that `gatespace teacher serve` has somewhere; it takes the place of a `LocalTeacher`.

    Args:
        address: ``zmq://host:port``.
        prefix: What all prompts begin with.
        max_new_tokens: The longest response that will be scored.
        payload: ``hidden``: last hidden states, exact for the whole vocabulary. ``top_k``: the `k` first choices.
        k: How many first choices.
        vocab_size: Ids from here on are padding. None: as the teacher's tokenizer has it.
        tokenizer_digest: `wire.vocabulary_digest` of the student's tokens; a teacher with others refuses.
        cache: Scores computed before; what is in it costs no message.
        timeout: Seconds without an answer after which the teacher is asked again.
        patience: Seconds without an answer after which `TeacherAwayError` is raised.
        keys: Of an encrypted connection; needed unless the teacher is on this machine.
        report: Is told what a user should know.
        device: Where the scores go.
        name: Who asks, for people who look at the server; None: this process.
    """

    def __init__(
        self,
        address: str | Address,
        prefix: Sequence[int],
        *,
        max_new_tokens: int = 32,
        payload: str = "hidden",
        k: int = 64,
        vocab_size: int | None = None,
        tokenizer_digest: str,
        cache: ScoreCache | None = None,
        timeout: float = 60.0,
        patience: float = 600.0,
        keys: ClientKeys | None = None,
        report: Callable[[str], None] | None = None,
        device: str | torch.device = "cpu",
        name: str | None = None,
    ) -> None:
        if payload not in ("hidden", "top_k"):
            raise UsageError("a payload is 'hidden' or 'top_k'", got=payload)
        self.address = address if isinstance(address, Address) else _parsed(address)
        self.prefix = list(prefix)
        self.stats = LocalStats()
        self._payload, self._longest = payload, max_new_tokens
        self._device = torch.device(device)
        _check_place(self.address, keys)
        who = (name or f"{platform.node()}:{os.getpid()}")[:256]
        buffers = (wire.ids_array(self.prefix),)

        def hello(id: int, nonce: str) -> tuple[wire.Message, Sequence[wire.Array]]:
            kind: wire.Payload = "hidden" if payload == "hidden" else "top_k"
            return wire.Hello(id, nonce, who, tokenizer_digest, max_new_tokens, kind, k, vocab_size), buffers

        self._link = Link(self.address, hello, timeout=timeout, patience=patience, keys=keys, report=report)
        try:
            welcome = self._link.open()
            self.fingerprint, self.numerics = welcome.fingerprint, welcome.numerics
            self.model_name, self.vocab_size = welcome.model, welcome.vocab_size
            self.dtype: torch.dtype = getattr(torch, welcome.dtype)
            self._k, self._width, self._limits = welcome.k, welcome.width, welcome.limits
            self._position_bytes = welcome.position_bytes
            self._check(welcome, vocab_size)
            head = None if welcome.head is None else self._fetched(welcome.head, report)
            # Of a teacher that is known by its name only, other weights would find the scores.
            self._cache = cache if welcome.kept else None
            self._form = Form(
                self.fingerprint,
                self.numerics,
                payload,
                self._k,
                self.dtype if payload == "hidden" else torch.float32,
                self._device,
                head,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take leave of the server."""
        self._link.close()

    # ------------------------------------------------------------------ scores

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each the continuation of its prompt (after the shared prefix)."""
        return self.ask(prompts, responses)()

    def ask(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Callable[[], Scores]:
        """Ask without waiting: what is returned waits and gives the scores."""
        check_questions(prompts, responses, self._longest)
        self.stats.rows += len(responses)
        self.stats.tokens += sum(map(len, responses))
        rows = RowScores(self._form, self._cache, self.prefix, prompts, responses)
        pieces = [self._asked(part, prompts, responses) for part in self._divided(rows.missing, prompts, responses)]
        known: list[Scores] = []

        def scores() -> Scores:
            if not known:
                packets = self._link.answers([piece.question for piece in pieces])
                for piece, packet in zip(pieces, packets, strict=True):
                    rows.fill(piece.rows, self._read(packet, [len(responses[row]) for row in piece.rows]))
                known.append(rows.scores())
            return known[0]

        return scores

    def _read(self, packet: wire.Packet, lengths: Sequence[int]) -> Sequence[Tensor]:
        """The rows of an answer as a cache has them: hidden states, or ids, log-probabilities and the token's own."""
        reply, count = packet.message, sum(lengths)
        wanted: list[tuple[str, tuple[int, ...]]]
        if self._payload == "hidden":
            wanted = [(str(self.dtype).removeprefix("torch."), (count, self._width))]
        else:
            choices, each = (count, self._k), (count,)
            wanted = [("int32", choices), ("float32", choices), ("float32", each), ("float32", each)]
        buffers = [(buffer.dtype, buffer.shape) for buffer in packet.arrays]
        if not isinstance(reply, wire.ScoreReply) or reply.rows != len(lengths) or buffers != wanted:
            raise RunError(f"the teacher at {self.address} has answered another question", got=buffers)
        self.stats.computed_tokens += reply.computed_tokens
        self.stats.passes += reply.passes
        tensors = [wire.tensor_of(buffer) for buffer in packet.arrays]
        if self._payload == "top_k":
            ids, log_probs, sampled, _ = tensors  # what the tail has follows from the others
            tensors = [torch.cat([ids.float(), log_probs, sampled[:, None]], 1)]
        rows: tuple[Tensor, ...] = tensors[0].split(list(lengths))
        return rows

    # ------------------------------------------------------------------ questions

    def _asked(self, rows: list[int], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> _Piece:
        arrays = wire.question_arrays([prompts[row] for row in rows], [responses[row] for row in rows])
        return _Piece(rows, self._link.ask(lambda id, session: (wire.ScoreRequest(id, session), arrays)))

    def _divided(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Consecutive rows in as few messages as the server's limits allow. No score depends on it."""
        limits, parts = self._limits, list[list[int]]()
        most = max(1, limits.reply_bytes // self._position_bytes)
        tokens = written = 0
        for row in rows:
            size = len(prompts[row]) + len(responses[row])
            if size > limits.tokens or len(self.prefix) + size > (limits.row_tokens or size + len(self.prefix)):
                raise RunError(
                    f"a prompt and its response are too long for the teacher at {self.address}",
                    got=f"{len(self.prefix) + size} tokens",
                )
            fits = tokens + size <= limits.tokens and written + len(responses[row]) <= most
            if not parts or len(parts[-1]) == limits.rows or not fits:
                parts.append([])
                tokens = written = 0
            parts[-1].append(row)
            tokens += size
            written += len(responses[row])
        return parts

    def _check(self, welcome: wire.Welcome, vocab_size: int | None) -> None:
        """Raise where a server says of itself what cannot be."""
        head, wrong = welcome.head, ""
        if vocab_size is not None and welcome.vocab_size != vocab_size:
            wrong = f"{welcome.vocab_size} ids instead of {vocab_size}"
        elif self._payload == "hidden":
            if head is None:
                wrong = "hidden states without a head"
            elif head.shape[0] < welcome.vocab_size or head.shape[1] != welcome.width:
                wrong = f"a head of {head.shape[0]} by {head.shape[1]} for {welcome.vocab_size} ids"
            elif head.bytes > _LARGEST_HEAD:
                wrong = f"a head of {head.bytes} bytes"
        if wrong:
            raise UsageError(f"the teacher at {self.address} cannot be the one of this pair", got=wrong)

    # ------------------------------------------------------------------ the head

    def _fetched(self, info: wire.HeadInfo, report: Callable[[str], None] | None) -> Head:
        """The head, from disk where it is there."""
        path = cache_root() / "heads" / info.sha256
        content: bytes | bytearray | None = _kept(path, info)
        if content is None:
            content = self._transferred(info)
            if _sha256(content) != info.sha256:
                raise RunError(f"the head of the teacher at {self.address} came damaged", got=info.sha256)
            try:
                _keep(path, content)
            except OSError as error:
                if report is not None:
                    report(f"the teacher's head is not kept for later runs: {error}")
        rows, columns = info.shape
        split = rows * columns * wire.WIDTHS[info.dtype]
        view = memoryview(content)
        weight = self._placed(wire.Array(info.dtype, info.shape, view[:split]))
        bias = self._placed(wire.Array(info.dtype, (rows,), view[split:])) if info.bias else None
        return Head(weight, bias, info.scale, info.softcap)

    def _placed(self, buffer: wire.Array) -> Tensor:
        # In memory of torch's own, as a model's weights are: the last bits of a product depend on where it begins.
        return wire.tensor_of(buffer).clone().to(self._device)

    def _transferred(self, info: wire.HeadInfo) -> bytearray:
        content = bytearray(info.bytes)

        def asked(part: int) -> Question:
            return self._link.ask(lambda id, session: (wire.HeadRequest(id, session, info.sha256, part), ()))

        waiting = [(part, asked(part)) for part in range(min(_PARTS_AT_ONCE, info.parts))]
        following = iter(range(len(waiting), info.parts))
        while waiting:
            part, question = waiting.pop(0)
            (packet,) = self._link.answers([question])
            span = slice(part * wire.PART_BYTES, min((part + 1) * wire.PART_BYTES, info.bytes))
            message = packet.message
            size = sum(buffer.nbytes for buffer in packet.arrays)
            right = isinstance(message, wire.HeadPart) and (message.sha256, message.part) == (info.sha256, part)
            if not right or size != span.stop - span.start:
                raise RunError(f"the teacher at {self.address} has sent another part of its head")
            content[span] = packet.arrays[0].data
            if (more := next(following, None)) is not None:
                waiting.append((more, asked(more)))
        return content


# ---------------------------------------------------------------------------------------------------- helpers


def _parsed(address: str) -> Address:
    try:
        return parse_address(address)
    except Fault as error:
        raise UsageError(f"the address of a teacher: {error.what}", got=address, instead=error.instead) from error


def _check_place(address: Address, keys: ClientKeys | None) -> None:
    if keys is None and not endpoint(str(address)).loopback:
        raise UsageError(
            "a teacher on another machine is asked over an encrypted connection only",
            got=address,
            why="prompts and scores would travel for all to read and to change",
            instead="teacher.client_key and teacher.server_key, which `gatespace teacher keygen` makes",
        )


def _sha256(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()


def _kept(path: Path, info: wire.HeadInfo) -> bytes | None:
    """What is on disk, if it is whole."""
    try:
        if path.stat().st_size != info.bytes:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    return content if _sha256(content) == info.sha256 else None


def _keep(path: Path, content: bytes | bytearray) -> None:
    """Write a head for later runs, whole or not at all; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    others = sorted(path.parent.iterdir(), key=lambda other: other.stat().st_mtime, reverse=True)
    for other in others[_HEADS:]:
        other.unlink(missing_ok=True)
