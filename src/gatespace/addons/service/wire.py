"""Wire format of the teacher service: versioned, typed messages with plain buffers.

A message is a list of frames. The first is four bytes, ``GST`` and the version, then a msgpack header: one of the
structs below, and the dtype and shape of every buffer. The others are the buffers, raw and little-endian. Nothing in
a message is ever executed, and no declared size is trusted: sizes are checked against the received frames and the
limits below. Anything else raises `WireError`, and never another exception.

=============== =============== =========================================================
client          server          buffers
=============== =============== =========================================================
Hello           Welcome         prefix (P,) int32
HeadRequest     HeadPart        part of the head's bytes (B,) uint8
ScoreRequest    ScoreReply      lengths (R, 2) int32, tokens (T,) int32; the scores
Ping            Pong
StatusRequest   StatusReply
Bye             Bye             the sender disconnects
                Draining        the server accepts no new requests and finishes pending ones
                Failure         instead of any reply, or for a message that cannot be decoded
=============== =============== =========================================================

A reply carries the `id` of its request. A request may be resent under its id; a reply is used once.

No sockets here, and no torch until a tensor is converted.
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

from gatespace.errors import GatespaceError, UsageError, missing_extra

try:
    import msgspec
    from msgspec import Meta, Struct
except ImportError as error:
    raise missing_extra("the teacher service", module="msgspec", extra="service") from error

if TYPE_CHECKING:
    from torch import Tensor

if sys.byteorder != "little":
    raise UsageError("the teacher service needs a little-endian machine", got=sys.byteorder)

VERSION = 2  # incremented with every incompatible change
MAGIC = b"GST"

MAX_FRAMES = 5  # header and buffers of a message
MAX_HEADER = 32 << 10  # bytes of the header
MAX_BYTES = 64 << 20
"""Bytes of a message. A request whose reply would be larger is refused; the client splits it."""
MAX_ROWS = 1024  # rows per request
MAX_TOKENS = 1 << 18  # prompt and response tokens per request; also of a prefix
MAX_FRAME = 4 * MAX_TOKENS  # bytes of the largest frame from a client
MAX_NEW_TOKENS = 1 << 16
PART_BYTES = 1 << 20  # bytes of a part of the head; the last one is shorter

WIDTHS = {"uint8": 1, "int32": 4, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per value, by torch dtype name."""
FLOATS = ("bfloat16", "float16", "float32")

# Codes of a Failure. Clients act on `retry` and on the codes version and session; the rest are for people and tests.
VERSION_CODE = "version"  # another wire version
MALFORMED = "malformed"  # not a message, or not one that a client sends
PAIR = "pair"  # different vocabularies, or the teacher cannot do what the run needs
SESSION = "session"  # this connection has no such session: a new Hello is needed
BUSY = "busy"  # the queue is full: retry later, under the same id
DRAINING = "draining"  # the server is shutting down
LIMIT = "limit"  # too many rows, tokens or bytes in a request
QUESTION = "question"  # tokens that this teacher cannot score
DUPLICATE = "duplicate"  # the id belongs to a pending request with other rows
SCORING = "scoring"  # the model failed on these rows


class WireError(GatespaceError, ValueError):
    """Bytes that are not a valid message, or a message that cannot be sent."""

    version: int | None = None  # the sender's version, if it is not ours


# ---------------------------------------------------------------------------------------------------- messages

Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=2048)]
Token = Annotated[str, Meta(min_length=8, max_length=128)]  # a random nonce, session or server instance
Payload = Literal["hidden", "top_k"]
Float = Literal["bfloat16", "float16", "float32"]


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """How much a server accepts at once. Clients split their rows accordingly."""

    rows: Positive  # rows per request
    tokens: Positive  # prompt and response tokens per request
    reply_bytes: Positive  # bytes of scores per request: response tokens times `Welcome.position_bytes`
    requests: Positive  # pending requests per client
    row_tokens: Positive | None
    """Prefix, prompt and response tokens per row; None: only the limit per request."""


class HeadInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """The teacher's LM head: what `gatespace.gating.projection.Head` needs besides its bytes.

    The bytes are the weight in row-major order, then the bias, both of type `dtype`.
    """

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Hash of the bytes."""
    bytes: Annotated[int, Meta(ge=1, le=2**48)]
    dtype: Float
    shape: tuple[Positive, Positive]  # rows and columns of the weight
    bias: bool
    scale: float
    softcap: float | None
    parts: Positive  # number of parts of `PART_BYTES`


class Hello(Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """Begins a client's session. Buffers: prefix (P,) int32, shared by all its prompts."""

    id: Id
    nonce: Token  # random; echoed in the reply
    client: Name  # human-readable name
    tokenizer: Name
    """`vocabulary_digest` of the student's tokens, all that a divergence depends on; or `Model.tokenizer_digest()`,
    which also requires the same chat template."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_NEW_TOKENS)]
    payload: Payload
    k: Positive
    vocab_size: Positive | None  # ids from here on are padding; None: as in the teacher's tokenizer


class Welcome(Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    """The session of a client; it belongs to the connection that sent the Hello."""

    id: Id
    nonce: Token
    session: Token
    server: Token  # random; new on every server start
    model: Name
    fingerprint: Name  # `Model.fingerprint()` of the teacher
    tokenizer: Name  # as in Hello
    numerics: Text
    """What else the bits of a score depend on: `LocalTeacher.numerics`, so that cache keys agree."""
    kept: bool
    """Whether scores may be cached under fingerprint and numerics; false for a teacher known only by name, which may
    serve other weights later."""
    vocab_size: Positive
    payloads: Annotated[tuple[Name, ...], Meta(max_length=8)]
    """All payloads the server offers."""
    k: Positive  # of the payload top_k; at most the vocabulary size
    width: Positive  # hidden size
    dtype: Float  # of a hidden state
    position_bytes: Positive  # bytes of scores per response token
    limits: Limits
    lease: float  # seconds of silence after which the session of an idle client ends; a Ping extends it
    head: HeadInfo | None  # for the payload hidden


class HeadRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="head_request"):
    """Requests one part of the head."""

    id: Id
    session: Token
    sha256: Name
    part: Count


class HeadPart(Struct, frozen=True, forbid_unknown_fields=True, tag="head_part"):
    """One part of the head. Buffers: (B,) uint8, from byte `part` times `PART_BYTES` on."""

    id: Id
    sha256: Name
    part: Count


class ScoreRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="score_request"):
    """Rows to score. Buffers (`request_arrays`): lengths (R, 2) int32 of prompt (without the prefix) and response;
    tokens (T,) int32, row by row, prompt before response."""

    id: Id
    session: Token


class ScoreReply(Struct, frozen=True, forbid_unknown_fields=True, tag="score_reply"):
    """The scores of all N response tokens, row by row.

    Buffers for hidden: (N, H) hidden states at the positions that predict the tokens. For top_k: ids (N, K) int32,
    log-probabilities (N, K) float32, that of the token itself (N,) float32, and the tail mass outside the top k (N,)
    float32.
    """

    id: Id
    payload: Payload
    rows: Count
    computed_tokens: Count  # the request's share of the tokens in forward passes
    passes: Count
    """The request's share of the forward passes; shares of all requests add up to the total."""


class Ping(Struct, frozen=True, forbid_unknown_fields=True, tag="ping"):
    """A heartbeat; extends the session, if given."""

    id: Id
    session: Token | None = None


class Pong(Struct, frozen=True, forbid_unknown_fields=True, tag="pong"):
    """The reply to a heartbeat."""

    id: Id
    server: Token
    known: bool  # whether the session in the Ping is this connection's
    mine: Count  # pending requests of this client
    queued: Count  # pending requests of all clients
    draining: bool


class StatusRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="status_request"):
    """Requests the server's counters; needs no session."""

    id: Id


class StatusReply(Struct, frozen=True, forbid_unknown_fields=True, tag="status_reply"):
    """Counters since the server started."""

    id: Id
    server: Token
    model: Name
    fingerprint: Name
    draining: bool
    uptime: float  # seconds
    clients: Count
    requests: Count  # answered with scores
    failures: Count  # answered with a Failure, of any code
    dropped: Count  # replies that could not be sent, and messages that get none
    rows: Count
    tokens: Count  # response tokens scored
    computed_tokens: Count  # prompt and response tokens in forward passes
    passes: Count
    batches: Count
    merged: Count  # batches with rows of several clients
    tokens_per_second: float  # response tokens, over the last minute
    busy: float  # share of the uptime in which the model computed
    queued: Count  # pending requests
    queued_rows: Count
    cache_hits: Count  # positions found in the server's score cache
    cache_misses: Count


class Failure(Struct, frozen=True, forbid_unknown_fields=True, tag="failure"):
    """Why there is no reply: a GatespaceError in its four parts. Built by `failure`."""

    id: Id | None  # of the request; None if it could not be decoded
    code: Name
    what: Text
    got: Text | None
    why: Text
    instead: Text
    retry: bool
    """Whether the same request may succeed later. With code ``session``: after a new Hello."""


class Bye(Struct, frozen=True, forbid_unknown_fields=True, tag="bye"):
    """The sender disconnects. A client's session ends with it."""

    session: Token | None = None


class Draining(Struct, frozen=True, forbid_unknown_fields=True, tag="draining"):
    """The server is shutting down. Pending requests are answered; others have to wait for its successor."""

    server: Token
    pending: Count  # requests of this client that will still be answered


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
    """A buffer with its dtype and shape; `data` is little-endian and row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: Frame

    @property
    def nbytes(self) -> int:
        """Bytes implied by dtype and shape."""
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
    """Encode a message as frames."""
    header = _Header(message, tuple(_Buffer(buffer.dtype, buffer.shape) for buffer in arrays))
    frames: list[Frame] = [_START + _ENCODER.encode(header), *(buffer.data for buffer in arrays)]
    _check_sizes([memoryview(frame).nbytes for frame in frames])
    _check(message, arrays)
    return frames


def decode(frames: Sequence[Frame]) -> Packet:
    """Decode a message; raise `WireError` for anything else. Buffers are not copied."""
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
            "the other side uses another version of the wire format",
            got=f"version {start[-1]}, here {VERSION}",
            instead="the same gatespace on both sides",
        )
        refused.version = start[-1]
        raise refused
    try:
        header = _DECODER.decode(views[0][len(_START) :])
    except Exception as error:  # includes invalid UTF-8 and unbounded nesting
        raise _malformed("its header cannot be decoded", str(error)) from None
    if len(header.buffers) != len(views) - 1:
        raise _malformed(f"it has {len(views) - 1} buffers and declares {len(header.buffers)}")
    arrays = tuple(Array(one.dtype, one.shape, view) for one, view in zip(header.buffers, views[1:], strict=True))
    _check(header.message, arrays)
    return Packet(header.message, arrays)


def _check_sizes(sizes: Sequence[int]) -> None:
    if not 1 <= len(sizes) <= MAX_FRAMES:
        raise _malformed(f"a message has 1 to {MAX_FRAMES} frames", f"{len(sizes)}")
    if sizes[0] > MAX_HEADER:
        raise _malformed(f"a header has at most {MAX_HEADER} bytes", f"{sizes[0]}")
    if sum(sizes) > MAX_BYTES:
        raise _malformed(f"a message has at most {MAX_BYTES} bytes", f"{sum(sizes)}")


def _layout(message: Message) -> list[tuple[tuple[str, ...], int]]:
    """The buffers of a message: allowed types and number of dimensions."""
    match message:
        case Hello():
            return [(("int32",), 1)]
        case HeadPart():
            return [(("uint8",), 1)]
        case ScoreRequest():
            return [(("int32",), 2), (("int32",), 1)]
        case ScoreReply(payload="hidden"):
            return [(FLOATS, 2)]
        case ScoreReply():
            return [(("int32",), 2), (("float32",), 2), (("float32",), 1), (("float32",), 1)]
    return []


def _check(message: Message, arrays: Sequence[Array]) -> None:
    """Raise unless the buffers fit the message and a Welcome is consistent."""
    name, layout = type(message).__name__, _layout(message)
    if len(arrays) != len(layout):
        raise _malformed(f"{name} has {len(layout)} buffers", f"{len(arrays)}")
    for place, (buffer, (dtypes, dimensions)) in enumerate(zip(arrays, layout, strict=True)):
        if buffer.dtype not in dtypes or len(buffer.shape) != dimensions:
            raise _malformed(f"buffer {place} of {name} has another type", f"{buffer.dtype} {buffer.shape}")
        size = memoryview(buffer.data).nbytes
        if size != buffer.nbytes:
            raise _malformed(f"buffer {place} has {size} bytes, and {buffer.nbytes} by its type and shape")
    match message:
        case Hello() if arrays[0].shape[0] > MAX_TOKENS:
            raise _malformed(f"a prefix has at most {MAX_TOKENS} tokens", f"{arrays[0].shape[0]}")
        case HeadPart() if arrays[0].shape[0] > PART_BYTES:
            raise _malformed(f"a part of the head has at most {PART_BYTES} bytes", f"{arrays[0].shape[0]}")
        case ScoreRequest():
            _check_rows(*arrays)
        case ScoreReply(payload="top_k"):
            ids, log_probs, sampled, tail = (buffer.shape for buffer in arrays)
            if ids != log_probs or not ids[:1] == sampled == tail:
                raise _malformed("the buffers of ScoreReply have different lengths")
        case Welcome():
            _check_welcome(message)


def _check_rows(lengths: Array, tokens: Array) -> None:
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


def _check_welcome(welcome: Welcome) -> None:
    head = welcome.head
    if not all(map(math.isfinite, [welcome.lease, *([head.scale, head.softcap or 0.0] if head is not None else [])])):
        raise _malformed("a number of Welcome is not finite")
    if head is not None:
        values = head.shape[0] * (head.shape[1] + head.bias)
        if head.bytes != values * WIDTHS[head.dtype] or head.parts != -(-head.bytes // PART_BYTES):
            raise _malformed("the size of the head in Welcome does not follow from its type and shape")


def _malformed(why: str, got: str | None = None) -> WireError:
    return WireError("not a message of the teacher service", got=None if got is None else got[:200], why=why)


# ---------------------------------------------------------------------------------------------------- buffers


def ids_array(ids: Sequence[int]) -> Array:
    """Pack ids as (N,) int32."""
    try:
        values = array("i", ids)
    except (TypeError, OverflowError) as error:
        raise WireError("token ids are integers of 32 bits", got=str(error)) from error
    return Array("int32", (len(ids),), values.tobytes())


def ids_of(buffer: Array) -> list[int]:
    """Unpack the values of an int32 buffer, row by row."""
    values = array("i")
    values.frombytes(buffer.data)
    return values.tolist()


def request_arrays(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return the buffers of a ScoreRequest."""
    rows = list(zip(prompts, responses, strict=True))
    lengths = ids_array([len(part) for row in rows for part in row])
    tokens = ids_array([id for prompt, response in rows for id in (*prompt, *response)])
    return Array("int32", (len(rows), 2), lengths.data), tokens


def request_rows(packet: Packet) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts and responses of a ScoreRequest."""
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
    """Return a tensor's buffer, for dtypes in `WIDTHS`; no copy if it is contiguous on the CPU."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in WIDTHS:
        raise WireError("tensors of this type cannot be sent", got=dtype, instead=", ".join(WIDTHS))
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return Array(dtype, tuple(tensor.shape), memoryview(raw))


def tensor_of(buffer: Array) -> Tensor:
    """Copy a buffer into a new tensor."""
    import torch

    dtype: torch.dtype = getattr(torch, buffer.dtype)
    if not math.prod(buffer.shape):
        return torch.empty(buffer.shape, dtype=dtype)
    return torch.frombuffer(bytearray(buffer.data), dtype=dtype).view(buffer.shape)


# ---------------------------------------------------------------------------------------------------- failures


def failure(error: GatespaceError, *, code: str, id: int | None = None, retry: bool = False) -> Failure:
    """Return an error as a message, its texts clipped to fit."""
    what, why, instead = map(_clipped, (error.what, error.why, error.instead))
    return Failure(id, code, what, None if error.got is None else _clipped(error.got), why, instead, retry)


def _clipped(text: str) -> str:
    return text[:1000].encode("utf-8", "replace").decode()


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Hash all tokens with their ids, as given by `tokenizer.get_vocab()`."""
    content = json.dumps(sorted(vocabulary.items()))
    return hashlib.sha256(b"gatespace vocabulary 1\n" + content.encode()).hexdigest()
