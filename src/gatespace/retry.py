"""Exponential backoff between retries, for clients of services that may be unavailable."""

from __future__ import annotations

import secrets

_random = secrets.SystemRandom().random


def backoff(failures: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after `failures` consecutive failures: `first`, doubled each time, up to `longest`.

    Jitter shortens each pause by up to a half, so that clients that lost a server together do not reconnect together.
    No result of a run depends on it.
    """
    whole: float = min(longest, first * 2.0 ** min(failures - 1, 16))
    return whole * (0.5 + 0.5 * _random())
