"""Many tests at once: Holm for the claims that are made, Benjamini-Hochberg for the sweep that is looked through."""

from __future__ import annotations

from collections.abc import Sequence

from statsmodels.stats.multitest import multipletests  # type: ignore[import-untyped]


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p adjusted after Holm: below .05, and the chance of even one false claim among all of them is below .05.

    Example:
        >>> holm([0.01, None, 0.04])
        [0.02, None, 0.04]
    """
    return _adjusted(ps, "holm")


def bh(ps: Sequence[float | None]) -> list[float | None]:
    """p adjusted after Benjamini and Hochberg: of those below .05, 5 % are expected to be false."""
    return _adjusted(ps, "fdr_bh")


def _adjusted(ps: Sequence[float | None], method: str) -> list[float | None]:
    known = [p for p in ps if p is not None]
    if not known:
        return [None] * len(ps)
    corrected = iter(multipletests(known, method=method)[1])
    return [None if p is None else float(next(corrected)) for p in ps]
