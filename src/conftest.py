"""Code for an engine is looked at for examples only where that engine is installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [f"gatespace/addons/{engine}" for engine in ("trl", "verl") if find_spec(engine) is None]
