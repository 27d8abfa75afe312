from __future__ import annotations

import os
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve()


@pytest.fixture(scope="session")
def tweeteval() -> Path:
    """The folder with the real files."""
    places = [os.environ.get("GATESPACE_TWEETEVAL"), _HERE.parents[3] / "shared" / "tweeteval"]
    for place in places:
        if place and (Path(place) / "hate" / "train_text.txt").is_file():
            return Path(place)
    pytest.skip(f"no TweetEval files in $GATESPACE_TWEETEVAL or {places[-1]}")
