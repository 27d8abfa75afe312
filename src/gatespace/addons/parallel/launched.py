"""What a launcher of several processes has told this one. No torch here."""

from __future__ import annotations

import os


def launched() -> tuple[int, int] | None:
    """(rank, size) by the variables that torchrun, `accelerate launch` and `--processes` set; None: it is alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    return int(os.environ["RANK"]), size


def is_first() -> bool:
    """Whether this process speaks to the user."""
    return (launched() or (0, 1))[0] == 0


def is_joint(error: BaseException | None) -> bool:
    """Whether all processes have this error, so that the first one alone needs to tell of it."""
    return error is not None and (getattr(error, "joint", False) or is_joint(error.__cause__))
