"""Without verl the helpers cannot be imported, and are not looked through for examples; the tests say why they skip."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("verl") else ["batches.py", "engines.py", "two_ranks.py"]
