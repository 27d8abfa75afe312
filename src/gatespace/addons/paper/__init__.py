"""The paper's published numbers: its tables recomputed, an audit, and a reference for a study's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.report.view import Reference


def reference() -> Reference:
    """The paper's results, for reports of studies on the paper's tasks."""
    from gatespace.addons.paper.facts import PaperReference

    return PaperReference()
