"""The explorer: what gates do to the tokens of runs, as one page for a browser. Nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.addons.pages.build import Explorer, build_explorer

__all__ = ["Explorer", "build_explorer"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from gatespace.addons.pages import build

        return getattr(build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
