"""Named random streams: every random choice in gatespace names its stream.

A stream is a 64-bit seed derived from the user's seed and the names of what is drawn, e.g.
``stream(42, "rollout", step)``. Choices with different names never share numbers, so adding a choice, or making one in
another process or order, leaves all others unchanged.
"""

from __future__ import annotations

import hashlib
import random

_PERSON = b"gatespace.seed.1"  # at most 16 bytes; changing it changes every number of every run


def stream(seed: int, *names: str | int) -> int:
    """Return the seed of the named stream: an integer in [0, 2**64), the same in every process and version.

    Examples:
        >>> stream(42, "rollout", 7) == stream(42, "rollout", 7)
        True
        >>> stream(42, "rollout", 7) == stream(42, "rollout", "7")
        False
    """
    digest = hashlib.blake2b(digest_size=8, person=_PERSON)
    for part in (_integer("a seed", seed), *names):
        digest.update(_encoded(part))
    return int.from_bytes(digest.digest(), "big")


def generator(seed: int, *names: str | int) -> random.Random:
    """Return a generator at the start of the named stream.

    Python guarantees the same numbers across versions only for `random()`, not for `shuffle`, `choice` or `sample`.
    Whatever must stay reproducible is therefore built on `random()`, like `permutation`.
    """
    return random.Random(stream(seed, *names))


def permutation(length: int, seed: int, *names: str | int) -> list[int]:
    """Return the numbers 0 … length-1 in the random order of the named stream."""
    draw = generator(seed, *names).random
    keys = [draw() for _ in range(length)]
    return sorted(range(length), key=keys.__getitem__)


def _integer(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        # not a GatespaceError: this module does not import gatespace.errors
        raise TypeError(f"{what} must be an integer, got {value!r}")
    return value


def _encoded(part: str | int) -> bytes:
    # Type and length precede the content, so that no two lists of parts have the same encoding.
    if isinstance(part, str):
        kind, body = b"s", part.encode("utf-8", "surrogatepass")
    else:
        kind, body = b"i", str(_integer("the name of a stream, where it is no string,", part)).encode("ascii")
    return kind + str(len(body)).encode("ascii") + b":" + body
