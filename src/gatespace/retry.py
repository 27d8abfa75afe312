"""Growing pauses between retries, for clients of services that may be away for a while."""

from __future__ import annotations

import secrets

_random = secrets.SystemRandom().random


def backoff(failures: int, *, first: float, longest: float) -> float:
    """Seconds to wait after `failures` failures in a row: `first`, doubled each time, at most `longest`.

    Each pause is shortened at random by up to a half: clients that lost a server together must not come back together.
    No result of a run depends on it.
    """
    whole: float = min(longest, first * 2.0 ** min(failures - 1, 16))
    return whole * (0.5 + 0.5 * _random())
