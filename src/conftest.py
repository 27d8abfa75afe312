"""Doctests of code for an engine run only where that engine is installed."""

from __future__ import annotations

from importlib.util import find_spec

absent = [engine for engine in ("trl", "verl") if find_spec(engine) is None]
collect_ignore = [f"gatespace/{place}" for name in absent for place in (f"addons/{name}", f"integrations/{name}.py")]
