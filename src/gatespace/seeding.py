"""Random numbers by name: every random choice of gatespace names its stream.

A stream is a 64-bit seed that depends on the user's seed and on the names of what is being drawn, e.g.
``stream(42, "rollout", step)``. Two choices with different names never share numbers, so that adding a choice, or
making one of them in another process or in another order, leaves all others as they were.
"""

from __future__ import annotations

import hashlib
import random

_PERSON = b"gatespace.seed.1"  # 16 bytes at most; to change it is to change every number of every run


def stream(seed: int, *names: str | int) -> int:
    """The seed of the named stream: an integer in [0, 2**64), the same in every process and every version.

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
    """A generator at the start of the named stream.

    Python promises the same numbers in later versions for `random()` only, not for `shuffle`, `choice` or `sample`.
    What has to be repeatable for years is therefore built on `random()`, as `permutation` is.
    """
    return random.Random(stream(seed, *names))


def permutation(length: int, seed: int, *names: str | int) -> list[int]:
    """The numbers 0 … length-1 in the random order of the named stream."""
    draw = generator(seed, *names).random
    keys = [draw() for _ in range(length)]
    return sorted(range(length), key=keys.__getitem__)


def _integer(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        # not of the family in gatespace.errors: the two modules know nothing of each other
        raise TypeError(f"{what} must be an integer, got {value!r}")
    return value


def _encoded(part: str | int) -> bytes:
    # Type and length stand before the content, so that no two lists of parts have one encoding.
    if isinstance(part, str):
        kind, body = b"s", part.encode("utf-8", "surrogatepass")
    else:
        kind, body = b"i", str(_integer("the name of a stream, where it is no string,", part)).encode("ascii")
    return kind + str(len(body)).encode("ascii") + b":" + body
