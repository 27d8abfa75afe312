from __future__ import annotations

import pytest

from gatespace.config.checking import VARIABLE, Checking, checking
from gatespace.errors import UsageError


def test_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert checking() == Checking(None, True, True, True, True)
    monkeypatch.setenv(VARIABLE, "plain,unfused")
    assert checking() == Checking(packed=False, fused=False)
    monkeypatch.setenv(VARIABLE, "plane")
    with pytest.raises(UsageError, match="did you mean 'plain'"):
        checking()
