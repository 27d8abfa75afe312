"""What the score cache stores: the key of a score, and an entry that proves itself.

A score depends on the teacher, on how it is computed, and on the tokens before it, and on nothing else; its key is a
hash of exactly these. An entry carries its key and a checksum over key and payload, so that neither a damaged payload
nor a sound payload found under another key can pass for a score.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from gatespace.errors import UsageError

VERSION = 1
MAX_KEY = 64  # bytes
_HEADER = struct.Struct("<3sBBQ16s")  # magic, version, length of the key, length of the payload, checksum
_MAGIC = b"GSC"
_PERSON_KEY = b"gatespace.key.1"  # 16 bytes at most; to change it is to lose every stored score
_PERSON_ENTRY = b"gatespace.sum.1"


def score_key(*, fingerprint: str, numerics: str, prompt: Sequence[int], response_prefix: Sequence[int]) -> bytes:
    """The key of the score at one position: 32 bytes.

    Args:
        fingerprint: The teacher's weights and configuration (`Model.fingerprint`).
        numerics: All else that can change a number: precision, canonical shape, payload, temperature.
        prompt: Token ids of the prompt, prefill included.
        response_prefix: Token ids of the response before the position.
    """
    hasher = _start(fingerprint, numerics, prompt)
    hasher.update(_ids(response_prefix))
    return hasher.digest()


def prefix_keys(*, fingerprint: str, numerics: str, prompt: Sequence[int], response: Sequence[int]) -> list[bytes]:
    """The keys of all positions of a response: position t has `response_prefix=response[:t]`. One pass."""
    hasher = _start(fingerprint, numerics, prompt)
    encoded = _ids(response)
    keys: list[bytes] = []
    for end in range(8, len(encoded) + 8, 8):
        keys.append(hasher.digest())  # digest leaves the hasher as it is
        hasher.update(encoded[end - 8 : end])
    return keys


def _start(fingerprint: str, numerics: str, prompt: Sequence[int]) -> hashlib.blake2b:
    # Every part but the last has its length before it, so that no two different calls have one encoding.
    hasher = hashlib.blake2b(digest_size=32, person=_PERSON_KEY)
    for part in (fingerprint.encode(), numerics.encode(), _ids(prompt)):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher


def _ids(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}q", *tokens)
    except struct.error as error:
        raise UsageError("token ids must be integers of 64 bits", got=str(error)) from error


# ---------------------------------------------------------------------------------------------------- entries


def pack(key: bytes, payload: bytes) -> bytes:
    """The entry of `payload` under `key`."""
    return _HEADER.pack(_MAGIC, VERSION, len(key), len(payload), _checksum(key, payload)) + key + payload


def unpack(key: bytes, entry: bytes) -> bytes | None:
    """The payload of an entry; None where it is damaged or is not the entry of `key`."""
    start = _HEADER.size + len(key)
    if len(entry) < start:
        return None
    magic, version, key_length, length, checksum = _HEADER.unpack_from(entry)
    if (magic, version, key_length, length) != (_MAGIC, VERSION, len(key), len(entry) - start):
        return None
    payload = entry[start:]
    if entry[_HEADER.size : start] != key or checksum != _checksum(key, payload):
        return None
    return payload


def key_of(beginning: bytes) -> bytes | None:
    """The key that the beginning of an entry names. Not verified: whoever uses it checks that it leads back here."""
    if len(beginning) < _HEADER.size:
        return None
    length = _HEADER.unpack_from(beginning)[2]
    key = beginning[_HEADER.size : _HEADER.size + length]
    return key if 0 < len(key) == length else None


def _checksum(key: bytes, payload: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=16, person=_PERSON_ENTRY)
    hasher.update(bytes([len(key)]))
    hasher.update(key)
    hasher.update(payload)
    return hasher.digest()
