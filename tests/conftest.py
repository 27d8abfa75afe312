"""Settings for every test: Hypothesis repeats the same examples on every machine and never judges by time.

And the real model and the real tweets, for those who need them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in the user's own cache, so that it is fetched and converted once for ever.

    Workers that ask at the same time wait for the first of them.
    """
    from gatespace.errors import RunError
    from gatespace.models import smollm2_folder

    try:
        return smollm2_folder(report=print)
    except RunError as error:
        if "neither on a Hub" not in error.what:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tweeteval() -> Path:
    """The folder with the real tweets."""
    places = [os.environ.get("GATESPACE_TWEETEVAL"), Path(__file__).resolve().parents[2] / "shared" / "tweeteval"]
    for place in places:
        if place and (Path(place) / "hate" / "train_text.txt").is_file():
            return Path(place)
    pytest.skip(f"no TweetEval files in $GATESPACE_TWEETEVAL or {places[-1]}")
