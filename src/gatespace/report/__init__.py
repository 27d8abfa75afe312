"""The report of a study: tables, figures and one page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.report.page import ReportFiles, build_report

__all__ = ["ReportFiles", "build_report"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from gatespace.report import page

        return getattr(page, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
