"""What a teacher service and its clients say to each other: versioned, typed messages and plain buffers.

A message is a list of frames. The first is four bytes, ``GST`` and the version, and a msgpack header: one of the
structures below and the type and shape of every buffer. The others are the buffers, raw and little-endian. Nothing in
a message is ever executed, and nothing is allocated on its word: sizes are compared with the frames that are really
there, under limits that stand here. Whatever else arrives is a `WireError`, and never another exception.

No sockets here, and no torch until a tensor is asked for.

=============== =============== =========================================================
who asks        who answers     buffers
=============== =============== =========================================================
Hello           Welcome         prefix (P,) int32
HeadRequest     HeadPart        part of the head's bytes (B,) uint8
ScoreRequest    ScoreReply      lengths (R, 2) int32, tokens (T,) int32; the scores
Ping            Pong
StatusRequest   StatusReply
Bye                             of either side: it goes
                Draining        the server takes no new work and finishes what it has
                Failure         instead of any answer, or to a message that says nothing
=============== =============== =========================================================

An answer carries the `id` of its question. A question may be repeated under its id: it has one answer.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from gatespace.errors import GatespaceError, missing_extra

try:
    import msgspec
    from msgspec import Meta, Struct
except ImportError as error:
    raise missing_extra("the teacher service", module="msgspec", extra="service") from error

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
"""Counts up with every change that an older side would not understand."""
MAGIC = b"GST"

MAX_FRAMES = 5
"""Header and buffers of a message."""
MAX_HEADER = 32 << 10
"""Bytes of the header."""
MAX_BYTES = 64 << 20
"""Bytes of a message. Whoever asks for more than fits into an answer is refused, and asks twice."""
MAX_ROWS = 1024
"""Rows of a request."""
MAX_TOKENS = 1 << 18
"""Prompt and response tokens of a request; also of a prefix."""
MAX_REQUEST = MAX_HEADER + 8 * MAX_ROWS + 4 * MAX_TOKENS + 64
"""Bytes of the largest message that a client sends. No frame of it is larger than `MAX_FRAME`."""
MAX_FRAME = 4 * MAX_TOKENS
"""Bytes of the largest frame that a client sends."""
MAX_NEW_TOKENS = 1 << 16
PART_BYTES = 1 << 20
"""Bytes of a part of the head; the last one is shorter."""

WIDTHS = {"uint8": 1, "int32": 4, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value, by the name of its type, which is torch's."""
_FLOATS = ("bfloat16", "float16", "float32")

# Codes of a Failure. A client decides by `retry`; the code is for people and tests.
VERSION_CODE = "version"
"""Another wire version."""
MALFORMED = "malformed"
"""Not a message, or not one that a client sends."""
PAIR = "pair"
"""Student and teacher do not speak of the same tokens, or the teacher cannot do what the run needs."""
SESSION = "session"
"""No such session for this connection: say hello (again)."""
BUSY = "busy"
"""Too much is queued: wait, and ask again under the same id."""
DRAINING = "draining"
"""The server is about to end."""
LIMIT = "limit"
"""More rows, tokens or bytes than are answered at once."""
QUESTION = "question"
"""Tokens that this teacher cannot score."""
DUPLICATE = "duplicate"
"""An id that stands for another question already."""
SCORING = "scoring"
"""The model failed on these rows."""


class WireError(GatespaceError, ValueError):
    """Bytes that are no message, or a message that cannot be sent.

    Args:
        version: The version that the bytes claim, where it is another one than ours.
    """

    version: int | None = None


# ---------------------------------------------------------------------------------------------------- messages

Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=2048)]
Token = Annotated[str, Meta(min_length=8, max_length=128)]
"""A nonce, a session or an instance: letters that say nothing."""
Payload = Literal["hidden", "top_k"]


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """How much a server takes at once. A client divides what is more."""

    rows: Positive
    """Rows of a request."""
    tokens: Positive
    """Prompt and response tokens of a request."""
    reply_bytes: Positive
    """Bytes of scores of a request: response tokens times `Welcome.position_bytes`."""
    requests: Positive
    """Requests of a client that are under way at a time."""
    row_tokens: Positive | None
    """Prefix, prompt and response of a row together; None: no limit but that of a request."""


class HeadInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """The teacher's LM head: what `gatespace.gating.projection.Head` needs beside its bytes.

    The bytes are those of the weight, row by row, and after them those of the bias, both of type `dtype`.
    """

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Of the bytes."""
    bytes: Annotated[int, Meta(ge=1, le=2**48)]
    dtype: Literal["bfloat16", "float16", "float32"]
    shape: tuple[Positive, Positive]
    """Rows and columns of the weight."""
    bias: bool
    scale: float
    softcap: float | None
    parts: Positive
    """Into how many parts of `PART_BYTES` the bytes are cut."""


class Hello(Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """A client begins. Buffers: prefix (P,) int32, what all its prompts begin with."""

    id: Id
    nonce: Token
    """Random; the answer repeats it."""
    client: Name
    """Who asks, for people."""
    tokenizer: Name
    """`vocabulary_digest` of the student's tokens, which is all that a divergence depends on; or
    `Model.tokenizer_digest()`, to ask for the same chat template too."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_NEW_TOKENS)]
    payload: Payload
    k: Positive
    vocab_size: Positive | None
    """Ids from here on are padding; None: as the teacher's tokenizer has it."""


class Welcome(Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    """The server knows the client from here on, by its connection and `session`."""

    id: Id
    nonce: Token
    session: Token
    server: Token
    """Of this start of the server."""
    model: Name
    fingerprint: Name
    """`Model.fingerprint()` of the teacher."""
    tokenizer: Name
    """As the client has named it."""
    numerics: Text
    """What else the bits of a score depend on: `LocalTeacher`'s, so that both have the same keys in a score cache."""
    kept: bool
    """Whether scores may be kept under fingerprint and numerics; not those of a teacher that is known by its name
    only, where other weights would find them."""
    vocab_size: Positive
    payloads: Annotated[tuple[Name, ...], Meta(max_length=8)]
    """All that the server offers."""
    k: Positive
    """First choices per position: no more than there are ids."""
    width: Positive
    """Columns of a hidden state."""
    dtype: Literal["bfloat16", "float16", "float32"]
    """Of a hidden state."""
    position_bytes: Positive
    """Bytes of the scores of one response token."""
    limits: Limits
    lease: float
    """Seconds of silence after which the server forgets the client; a Ping in time keeps the session."""
    head: HeadInfo | None
    """For the payload hidden."""


class HeadRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="head_request"):
    """One part of the head."""

    id: Id
    session: Token
    sha256: Name
    part: Count


class HeadPart(Struct, frozen=True, forbid_unknown_fields=True, tag="head_part"):
    """Buffers: (B,) uint8, the bytes of the head from `part` times `PART_BYTES` on."""

    id: Id
    sha256: Name
    part: Count


class ScoreRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="score_request"):
    """Rows to score. Buffers: `question_arrays`, that is lengths (R, 2) int32 of prompt (without the prefix) and
    response, and tokens (T,) int32, row by row, the prompt before the response."""

    id: Id
    session: Token


class ScoreReply(Struct, frozen=True, forbid_unknown_fields=True, tag="score_reply"):
    """The scores of all N response tokens, row by row.

    Buffers for hidden: (N, H) hidden states at the positions that predict the tokens. For top_k: ids (N, K) int32,
    log-probabilities (N, K) float32, that of the token itself (N,) float32, and the mass outside the first choices
    (N,) float32.
    """

    id: Id
    payload: Payload
    rows: Count
    computed_tokens: Count
    """The request's part of the tokens that went through the network,"""
    passes: Count
    """and of the passes; all clients' parts add up to what was done."""


class Ping(Struct, frozen=True, forbid_unknown_fields=True, tag="ping"):
    """Is somebody there? With a session, it keeps it."""

    id: Id
    session: Token | None = None


class Pong(Struct, frozen=True, forbid_unknown_fields=True, tag="pong"):
    """Yes."""

    id: Id
    server: Token
    known: bool
    """Whether the session that was named is this connection's."""
    mine: Count
    """Requests of this client that wait or are computed,"""
    queued: Count
    """and of all."""
    draining: bool


class StatusRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="status_request"):
    """How is it going? Needs no session."""

    id: Id


class StatusReply(Struct, frozen=True, forbid_unknown_fields=True, tag="status_reply"):
    """Counters since the server started."""

    id: Id
    server: Token
    model: Name
    fingerprint: Name
    draining: bool
    uptime: float
    """Seconds."""
    clients: Count
    requests: Count
    """Answered with scores."""
    failures: Count
    """Answered with a Failure, of any code."""
    dropped: Count
    """Messages without an answer: over the rate, or to a client that is gone."""
    rows: Count
    tokens: Count
    """Response tokens scored."""
    computed_tokens: Count
    """Prompt and response tokens that went through the network."""
    passes: Count
    batches: Count
    """Turns of the model; of several clients where `merged`."""
    merged: Count
    tokens_per_second: float
    """Response tokens, over the last minute."""
    busy: float
    """Share of the time since the start in which the model worked."""
    queued: Count
    """Requests that wait or are computed."""
    queued_rows: Count
    cache_hits: Count
    """Positions,"""
    cache_misses: Count
    """and those that were not there."""


class Failure(Struct, frozen=True, forbid_unknown_fields=True, tag="failure"):
    """Why there is no answer; an error of gatespace's family, in its four parts. Made by `failure`."""

    id: Id | None
    """Of the question; None where it could not be read."""
    code: Name
    what: Text
    got: Text | None
    why: Text
    instead: Text
    retry: bool
    """Whether the same question may have an answer later. With code ``session``: after a new Hello."""


class Bye(Struct, frozen=True, forbid_unknown_fields=True, tag="bye"):
    """The sender goes, and expects nothing more. The session of a client ends with it."""

    session: Token | None = None


class Draining(Struct, frozen=True, forbid_unknown_fields=True, tag="draining"):
    """The server ends soon. What is under way is answered; the rest has to wait for its successor."""

    server: Token
    pending: Count
    """Requests of this client that are still answered."""


Message = (
    Hello
    | Welcome
    | HeadRequest
    | HeadPart
    | ScoreRequest
    | ScoreReply
    | Ping
    | Pong
    | StatusRequest
    | StatusReply
    | Failure
    | Bye
    | Draining
)


# ---------------------------------------------------------------------------------------------------- frames

Frame = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Array:
    """A buffer with the type and shape of its values; `data` is little-endian and row by row."""

    dtype: str
    shape: tuple[int, ...]
    data: Frame

    @property
    def nbytes(self) -> int:
        """What type and shape make of it."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


class Packet(NamedTuple):
    """A message and its buffers."""

    message: Message
    arrays: tuple[Array, ...] = ()


class _Buffer(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    dtype: Name
    shape: Annotated[tuple[Count, ...], Meta(max_length=2)]


class _Header(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    message: Message
    buffers: Annotated[tuple[_Buffer, ...], Meta(max_length=MAX_FRAMES - 1)]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)
_START = MAGIC + bytes([VERSION])


def encode(message: Message, arrays: Sequence[Array] = ()) -> list[Frame]:
    """The frames of a message."""
    for place, buffer in enumerate(arrays):
        if buffer.dtype not in WIDTHS or memoryview(buffer.data).nbytes != buffer.nbytes:
            raise _malformed(f"buffer {place} is not of the size that its type and shape have")
    _check(message, arrays)
    header = _Header(message, tuple(_Buffer(buffer.dtype, buffer.shape) for buffer in arrays))
    frames: list[Frame] = [_START + _ENCODER.encode(header), *(buffer.data for buffer in arrays)]
    _check_sizes([memoryview(frame).nbytes for frame in frames])
    return frames


def decode(frames: Sequence[Frame]) -> Packet:
    """The message in `frames`; a `WireError` for anything that is none. Buffers are not copied."""
    try:
        views = [memoryview(frame).cast("B") for frame in frames[: MAX_FRAMES + 1]]
    except (TypeError, ValueError, BufferError) as error:
        raise _malformed("frames are contiguous bytes", str(error)) from error
    _check_sizes([view.nbytes for view in views])
    start = views[0][: len(_START)].tobytes()
    if len(start) < len(_START) or start[: len(MAGIC)] != MAGIC:
        raise _malformed("it does not begin like a message of gatespace")
    if start != _START:
        refused = WireError(
            "the other side speaks another version of the wire",
            got=f"version {start[-1]}, here {VERSION}",
            instead="the same gatespace on both sides",
        )
        refused.version = start[-1]
        raise refused
    try:
        header = _DECODER.decode(views[0][len(_START) :])
    except Exception as error:  # also of text that is no UTF-8, and of nesting without end
        raise _malformed("its header cannot be read", str(error)) from None
    if len(header.buffers) != len(views) - 1:
        raise _malformed(f"it has {len(views) - 1} buffers and speaks of {len(header.buffers)}")
    arrays: list[Array] = []
    for place, (buffer, view) in enumerate(zip(header.buffers, views[1:], strict=True)):
        if buffer.dtype not in WIDTHS:
            raise _malformed(f"buffer {place} has an unknown type", repr(buffer.dtype))
        found = Array(buffer.dtype, buffer.shape, view)
        if found.nbytes != view.nbytes:
            raise _malformed(f"buffer {place} has {view.nbytes} bytes, and {found.nbytes} by its type and shape")
        arrays.append(found)
    _check(header.message, arrays)
    return Packet(header.message, tuple(arrays))


def _check_sizes(sizes: Sequence[int]) -> None:
    if not 1 <= len(sizes) <= MAX_FRAMES:
        raise _malformed(f"a message has 1 to {MAX_FRAMES} frames", f"{len(sizes)}")
    if sizes[0] > MAX_HEADER:
        raise _malformed(f"a header has at most {MAX_HEADER} bytes", f"{sizes[0]}")
    if sum(sizes) > MAX_BYTES:
        raise _malformed(f"a message has at most {MAX_BYTES} bytes", f"{sum(sizes)}")


def _check(message: Message, arrays: Sequence[Array]) -> None:
    """Raise unless the buffers are those of the message, and numbers that have to be finite are."""
    found = [(buffer.dtype, len(buffer.shape)) for buffer in arrays]
    if isinstance(message, Hello):
        wanted = [("int32", 1)]
    elif isinstance(message, HeadPart):
        wanted = [("uint8", 1)]
    elif isinstance(message, ScoreRequest):
        wanted = [("int32", 2), ("int32", 1)]
    elif isinstance(message, ScoreReply):
        wanted = [("int32", 2), ("float32", 2), ("float32", 1), ("float32", 1)]
        if message.payload == "hidden":
            wanted = [(found[0][0] if found and found[0][0] in _FLOATS else "bfloat16", 2)]
    else:
        wanted = []
    kind = type(message).__name__
    if found != wanted:
        raise _malformed(f"the buffers of {kind} are others", f"{found}, not {wanted}")
    if isinstance(message, Hello) and arrays[0].shape[0] > MAX_TOKENS:
        raise _malformed(f"a prefix has at most {MAX_TOKENS} tokens", f"{arrays[0].shape[0]}")
    if isinstance(message, HeadPart) and arrays[0].shape[0] > PART_BYTES:
        raise _malformed(f"a part of the head has at most {PART_BYTES} bytes", f"{arrays[0].shape[0]}")
    if isinstance(message, ScoreRequest):
        _check_question(*arrays)
    if isinstance(message, ScoreReply) and message.payload == "top_k":
        ids, log_probs, sampled, tail = arrays
        if ids.shape != log_probs.shape or not ids.shape[:1] == sampled.shape == tail.shape:
            raise _malformed("the buffers of ScoreReply do not belong together")
    if isinstance(message, Welcome):
        head = message.head
        finite = [message.lease, *([head.scale, head.softcap or 0.0] if head is not None else [])]
        if not all(map(math.isfinite, finite)):
            raise _malformed("a number of Welcome is not finite")
        if head is not None:
            values = head.shape[0] * (head.shape[1] + head.bias)
            if head.bytes != values * WIDTHS[head.dtype] or head.parts != -(-head.bytes // PART_BYTES):
                raise _malformed("the head of Welcome has not the size that its type and shape have")


def _check_question(lengths: Array, tokens: Array) -> None:
    rows, columns = lengths.shape
    if columns != 2 or not 1 <= rows <= MAX_ROWS:
        raise _malformed(f"a request has 1 to {MAX_ROWS} rows, each with two lengths", f"{lengths.shape}")
    if tokens.shape[0] > MAX_TOKENS:
        raise _malformed(f"a request has at most {MAX_TOKENS} tokens", f"{tokens.shape[0]}")
    counts = ids_of(lengths)
    if min(counts) < 1:
        raise _malformed("prompts and responses have at least one token", f"{min(counts)}")
    if sum(counts) != tokens.shape[0]:
        raise _malformed("the lengths of the rows do not add up to the tokens", f"{sum(counts)}, {tokens.shape[0]}")


def _malformed(what: str, got: str | None = None) -> WireError:
    return WireError("not a message of the teacher service", got=None if got is None else got[:200], why=what)


# ---------------------------------------------------------------------------------------------------- buffers


def ids_array(ids: Sequence[int]) -> Array:
    """(N,) int32."""
    return Array("int32", (len(ids),), _packed(ids))


def ids_of(buffer: Array) -> list[int]:
    """The values of an int32 buffer, row by row."""
    values = array("i")
    values.frombytes(buffer.data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def question_arrays(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """The buffers of a ScoreRequest."""
    rows = list(zip(prompts, responses, strict=True))
    lengths = [len(part) for row in rows for part in row]
    tokens = [id for prompt, response in rows for id in (*prompt, *response)]
    return Array("int32", (len(rows), 2), _packed(lengths)), ids_array(tokens)


def questions_of(packet: Packet) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses of a ScoreRequest."""
    lengths, tokens = map(ids_of, packet.arrays)
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    start = 0
    for prompt, response in zip(lengths[::2], lengths[1::2], strict=True):
        prompts.append(tokens[start : start + prompt])
        responses.append(tokens[start + prompt : start + prompt + response])
        start += prompt + response
    return prompts, responses


def array_of(tensor: Tensor) -> Array:
    """The buffer of a tensor of one of the types in `WIDTHS`; of one on the CPU it is a view where that is possible."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in WIDTHS:
        raise WireError("tensors of this type do not travel", got=dtype, instead=", ".join(WIDTHS))
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if sys.byteorder == "big" and WIDTHS[dtype] > 1:
        flat = flat.view(torch.uint8).view(-1, WIDTHS[dtype]).flip(1).contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    data = memoryview(raw)
    return Array(dtype, tuple(tensor.shape), data)


def tensor_of(buffer: Array) -> Tensor:
    """A tensor of its own memory with the values of a buffer."""
    import torch

    dtype: torch.dtype = getattr(torch, buffer.dtype)
    if not math.prod(buffer.shape):
        return torch.empty(buffer.shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(buffer.data), dtype=torch.uint8)
    if sys.byteorder == "big" and WIDTHS[buffer.dtype] > 1:
        flat = flat.view(-1, WIDTHS[buffer.dtype]).flip(1).contiguous().reshape(-1)
    return flat.view(dtype).view(buffer.shape)


def _packed(ids: Sequence[int]) -> bytes:
    try:
        values = array("i", ids)
    except (TypeError, OverflowError) as error:
        raise WireError("token ids are integers of 32 bits", got=str(error)) from error
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


# ---------------------------------------------------------------------------------------------------- failures


def failure(error: GatespaceError, *, code: str, id: int | None = None, retry: bool = False) -> Failure:
    """The message of an error, cut to what a message may hold."""
    what, why, instead = map(_clipped, (error.what, error.why, error.instead))
    return Failure(id, code, what, None if error.got is None else _clipped(error.got), why, instead, retry)


def _clipped(text: str) -> str:
    return text[:1000].encode("utf-8", "replace").decode()


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """A hash of all tokens with their ids, as `tokenizer.get_vocab()` has them."""
    content = json.dumps(sorted(vocabulary.items()))
    return hashlib.sha256(b"gatespace vocabulary 1\n" + content.encode()).hexdigest()
