"""Growing pauses between retries, for clients of services that may be away for a while."""

from __future__ import annotations

import secrets

from gatespace.seeding import generator


class Backoff:
    """Pauses that double from `first` to `longest` seconds, each shortened at random by up to a half.

    Clients that lost a server together must not come back together, so each draws numbers of its own. No result of a
    run depends on them.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._random = generator(secrets.randbits(62), "backoff").random

    def pause(self, failures: int) -> float:
        """Seconds to wait after the given number of failures in a row, at least one."""
        whole: float = min(self._longest, self._first * 2.0 ** min(failures - 1, 16))
        return whole * (0.5 + 0.5 * self._random())
