"""The paper held against its own numbers: its tables computed again, and an audit. Needs no torch."""

from __future__ import annotations

from typing import Any

from gatespace.addons.paper import counts as paper_counts
from gatespace.addons.paper import tables as paper_tables
from gatespace.addons.paper.audit import audit
from gatespace.addons.paper.facts import facts

__all__ = ["audit", "facts", "recompute"]


def recompute() -> dict[str, Any]:
    """Every table with what is printed, what is computed and whether they match; then the audit.

    A `match` of None means that what is printed cannot be computed from anything else that is printed.
    """
    return {
        "nine": paper_tables.nine(),
        "seed_sds": paper_tables.seed_sds(),
        "not_applicable": paper_tables.not_applicable(),
        "d_on_g2": paper_tables.d_on_g2(),
        "best_observed": paper_tables.best_observed(),
        "named_cells": paper_tables.named_cells(),
        "sampling_errors": paper_tables.sampling_errors(),
        "statements": paper_tables.statements(),
        "whole_counts": paper_tables.whole_counts(),
        "win_counts": paper_counts.win_counts(),
        "cells": paper_counts.cells(),
        "mean_deltas": paper_counts.mean_deltas(),
        "audit": audit(),
    }
