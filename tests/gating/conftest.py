"""One thread per test process, so that parallel workers do not fight for cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def narrow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest slices of the vocabulary (64 ids), whatever width is the fastest on this machine."""
    monkeypatch.setattr("gatespace.gating.fused._CPU_TILE", 1)
