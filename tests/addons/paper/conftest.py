from __future__ import annotations

import pytest

from gatespace.addons.paper.audit import recompute
from tests.cli.conftest import gatespace, python, run

__all__ = ["gatespace", "python", "run"]


@pytest.fixture(scope="session")
def found():
    return recompute()
