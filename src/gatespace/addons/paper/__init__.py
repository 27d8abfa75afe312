"""The paper's published numbers: its tables recomputed, an audit, and its results beside those of a study."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.report.view import Reference


def reference() -> Reference:
    """The paper's results, for the reports of studies with a task of its own."""
    from gatespace.addons.paper.facts import PaperReference

    return PaperReference()
