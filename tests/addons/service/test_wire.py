"""Messages: what is sent arrives, and what was not sent by us is a WireError and nothing else."""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gatespace.addons.service import wire
from gatespace.errors import GatespaceError, RunError

HEAD = wire.HeadInfo("a" * 64, 24, "float32", (2, 2), True, 0.1, 30.0, 1)
MESSAGES: list[tuple[Any, list[wire.Array]]] = [
    (wire.Hello(1, "n" * 16, "x", "t" * 64, 32, "top_k", 64, None), [wire.ids_array([1, 2, 3])]),
    (
        wire.Welcome(
            id=2**63 - 1,
            nonce="n" * 16,
            session="s" * 32,
            server="i" * 16,
            model="ein Lehrer λ",
            fingerprint="f" * 64,
            tokenizer="t" * 64,
            numerics="v1/hidden",
            kept=True,
            vocab_size=7,
            payloads=("hidden", "top_k"),
            k=1,
            width=2,
            dtype="float32",
            position_bytes=8,
            limits=wire.Limits(1, 2, 3, 4, None),
            lease=2.5,
            head=HEAD,
        ),
        [],
    ),
    (wire.HeadRequest(3, "s" * 32, "a" * 64, 0), []),
    (wire.HeadPart(3, "a" * 64, 0), [wire.Array("uint8", (3,), b"abc")]),
    (wire.ScoreRequest(4, "s" * 32), list(wire.request_arrays([[1, 2], [3]], [[4], [5, 6]]))),
    (wire.ScoreReply(4, "hidden", 2, 9, 1), [wire.array_of(torch.randn(3, 2).bfloat16())]),
    (
        wire.ScoreReply(4, "top_k", 2, 9, 1),
        [
            wire.array_of(torch.ones(3, 2, dtype=torch.int32)),
            wire.array_of(torch.randn(3, 2)),
            wire.array_of(torch.randn(3)),
            wire.array_of(torch.randn(3)),
        ],
    ),
    (wire.Ping(5), []),
    (wire.Pong(5, "i" * 16, True, 1, 2, False), []),
    (wire.StatusRequest(6), []),
    (wire.StatusReply(6, "i" * 16, "m", "f", False, 1.5, *range(10), 2.5, 0.5, 1, 2, 3, 4), []),
    (wire.failure(RunError("what", got="got", why="why", instead="instead"), code=wire.BUSY, id=4, retry=True), []),
    (wire.Bye("s" * 32), []),
    (wire.Draining("i" * 16, 3), []),
]
NAMES = [type(message).__name__ for message, _ in MESSAGES]


def raw(message: Any, arrays: Any = ()) -> list[bytes]:
    return [bytes(frame) for frame in wire.encode(message, arrays)]


@pytest.mark.parametrize(("message", "arrays"), MESSAGES, ids=NAMES)
def test_what_is_sent_arrives(message: Any, arrays: list[wire.Array]) -> None:
    packet = wire.decode(raw(message, arrays))
    assert packet.message == message
    assert type(packet.message) is type(message)
    assert [(a.dtype, a.shape, bytes(a.data)) for a in packet.arrays] == [
        (a.dtype, a.shape, bytes(a.data)) for a in arrays
    ]


def test_every_message_has_its_test() -> None:
    assert {type(message) for message, _ in MESSAGES} == {*wire.Message.__args__}


@given(
    st.lists(
        st.tuples(*[st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5)] * 2), min_size=1, max_size=6
    )
)
def test_questions_arrive(rows: list[tuple[list[int], list[int]]]) -> None:
    prompts, responses = map(list, zip(*rows, strict=True))
    packet = wire.decode(raw(wire.ScoreRequest(1, "s" * 8), wire.request_arrays(prompts, responses)))
    assert wire.request_rows(packet) == (prompts, responses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (0, 4)])
def test_bits_of_tensors_arrive(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).view(shape)
    for way in (tensor, tensor.t().contiguous().t() if len(shape) == 2 else tensor):
        buffer = wire.array_of(way)
        found = wire.tensor_of(buffer)
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert found.contiguous().view(torch.uint8).equal(bits.view(found.contiguous().view(torch.uint8).shape))
    assert bytes(wire.ids_array([1, -2]).data) == b"\x01\0\0\0\xfe\xff\xff\xff"


def test_types_that_do_not_travel() -> None:
    with pytest.raises(wire.WireError, match="type"):
        wire.array_of(torch.zeros(2, dtype=torch.float64))
    for ids in ([2**31], [0.5], ["a"]):
        with pytest.raises(wire.WireError, match="32 bits"):
            wire.ids_array(ids)  # type: ignore[arg-type]


def header(message: Any, buffers: Any) -> bytes:
    return wire.MAGIC + bytes([wire.VERSION]) + msgspec.msgpack.encode([message, buffers])


PING = {"type": "ping", "id": 1, "session": None}
ASKED = {"type": "score_request", "id": 1, "session": "s" * 8}


def question(lengths: list[int], tokens: int) -> list[bytes]:
    rows = len(lengths) // 2
    frame = struct.pack(f"<{len(lengths)}i", *lengths)
    return [header(ASKED, [["int32", [rows, 2]], ["int32", [tokens]]]), frame, b"\0" * (4 * tokens)]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"GS"],
        [wire.MAGIC + bytes([wire.VERSION])],
        [b"\x80\x04\x95"],
        [header(PING | {"id": -1}, [])],
        [header(PING | {"id": 2**63}, [])],
        [header(PING | {"id": True}, [])],
        [header(PING | {"more": 1}, [])],
        [header(PING | {"type": "pickle"}, [])],
        [header({"id": 1}, [])],
        [header(PING | {"session": "s" * 129}, [])],
        [header(PING, []) + b"\0"],
        [header(PING, [["int32", [1]]]), b"\0" * 4],
        [header(PING, []), b""],
        [header(ASKED, [["int32", [1, 2]], ["int32", [2]]]), struct.pack("<2i", 1, 1)],
        [header(ASKED, [["int64", [1, 2]], ["int32", [2]]]), b"\0" * 16, b"\0" * 8],
        [header(ASKED, [["int32", [2**40, 2]], ["int32", [2]]]), b"\0" * 16, b"\0" * 8],
        [header(ASKED, [["int32", [1, 2, 1]], ["int32", [2]]]), b"\0" * 8, b"\0" * 8],
        [header(ASKED, [["int32", [-1, -2]], ["int32", [2]]]), b"\0" * 8, b"\0" * 8],
        question([], 0),
        question([1, 0], 1),
        question([3, -1], 2),
        question([1, 1], 3),
        question([2**31 - 1, 2**31 - 1], 3),
        question([1, 1] * (wire.MAX_ROWS + 1), 2 * wire.MAX_ROWS + 2),
        question([wire.MAX_TOKENS, 1], wire.MAX_TOKENS + 1),
        [b"x" * (wire.MAX_HEADER + 1)],
        [header(PING, []), *[b""] * wire.MAX_FRAMES],
        [wire.MAGIC + bytes([wire.VERSION]) + b"\x91" * 30_000],
        [wire.MAGIC + bytes([wire.VERSION]) + b"\x92\x82\xa4type\xa1\xff\xa1x\x90\x90"],
        [wire.MAGIC + bytes([wire.VERSION]) + b"\x92\xdd\xff\xff\xff\xff"],
        [1],
        [None],
        ["GST"],
        [memoryview(b"abcdef")[::2]],
    ],
)
def test_what_is_no_message(frames: list[Any]) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(frames)
    assert isinstance(caught.value, GatespaceError)
    assert caught.value.version is None
    assert len(str(caught.value)) < 1000


def test_more_bytes_than_a_message_has() -> None:
    block = bytes(wire.MAX_BYTES // 2 + 1)
    with pytest.raises(wire.WireError, match=r"not a message") as caught:
        wire.decode([header(PING, []), block, block])
    assert str(wire.MAX_BYTES) in caught.value.why


def test_another_version_says_so() -> None:
    with pytest.raises(wire.WireError, match="another version") as caught:
        wire.decode([wire.MAGIC + bytes([wire.VERSION + 1]) + b"whatever it says", b"x"])
    assert caught.value.version == wire.VERSION + 1
    assert "same gatespace" in caught.value.instead


@pytest.mark.parametrize(
    ("message", "arrays"),
    [
        (wire.Ping(1), [wire.ids_array([1])]),
        (wire.ScoreRequest(1, "s" * 8), [wire.ids_array([1])]),
        (wire.ScoreReply(1, "hidden", 1, 1, 1), [wire.ids_array([1])]),
        (wire.HeadPart(1, "a", 0), [wire.Array("uint8", (4,), b"abc")]),
        (wire.HeadPart(1, "a", 0), [wire.Array("uint8", (wire.PART_BYTES + 1,), bytes(wire.PART_BYTES + 1))]),
        (wire.Hello(1, "n" * 8, "x", "t", 8, "hidden", 1, None), [wire.ids_array([1] * (wire.MAX_TOKENS + 1))]),
        (msgspec.structs.replace(MESSAGES[1][0], lease=float("nan")), []),
        (msgspec.structs.replace(MESSAGES[1][0], head=msgspec.structs.replace(HEAD, bytes=25)), []),
    ],
)
def test_what_cannot_be_sent(message: Any, arrays: list[wire.Array]) -> None:
    with pytest.raises(wire.WireError):
        wire.encode(message, arrays)


def test_errors_travel_whatever_they_say() -> None:
    told = wire.failure(RunError("x" * 9000, got="\ud800", why="λ" * 9000, instead="😀" * 9000), code=wire.SCORING)
    found = wire.decode(raw(told)).message
    assert found == told
    assert isinstance(found, wire.Failure)
    assert found.got == "?"


# ---------------------------------------------------------------------------------------------------- fuzz


def survives(frames: list[bytes]) -> None:
    """It is a message, which then encodes again, or a WireError."""
    try:
        packet = wire.decode(frames)
    except wire.WireError as error:
        str(error)
        return
    again = wire.decode(raw(packet.message, packet.arrays))
    assert repr(again.message) == repr(packet.message)  # numbers that are none are unlike themselves
    if isinstance(packet.message, wire.ScoreRequest):
        prompts, responses = wire.request_rows(packet)
        assert all(prompts)
        assert all(responses)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=7))
@example([wire.MAGIC + bytes([wire.VERSION]) + b"\xc1"])
def test_noise(frames: list[bytes]) -> None:
    survives(frames)
    survives([wire.MAGIC + bytes([wire.VERSION]) + frames[0], *frames[1:]] if frames else [])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=800, deadline=None)
@given(data=st.data())
def test_damaged_messages(data: st.DataObject) -> None:
    frames = raw(*data.draw(st.sampled_from(MESSAGES)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[place])
        start = data.draw(st.integers(0, len(frame)))
        stop = data.draw(st.integers(start, min(len(frame), start + 8)))
        frame[start:stop] = data.draw(st.binary(max_size=8))
        frames[place] = bytes(frame)
    survives(frames)


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_headers_of_the_wrong_kind(data: st.DataObject) -> None:
    """Well-formed msgpack in the right places, with values of all kinds."""
    frames = raw(*data.draw(st.sampled_from(MESSAGES)))
    message, buffers = msgspec.msgpack.decode(frames[0][4:])
    key = data.draw(st.sampled_from(sorted(message)))
    message[key] = data.draw(values)
    if buffers and data.draw(st.booleans()):
        buffers[0] = data.draw(st.tuples(st.sampled_from([*wire.WIDTHS]) | st.text(), st.lists(values, max_size=3)))
    survives([header(message, buffers), *frames[1:]])


def test_no_torch(tmp_path: Any) -> None:
    script = (
        "import sys, gatespace.addons.service.wire, gatespace.addons.service.keys, gatespace.addons.service.command; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"
