"""Settings for every test: Hypothesis repeats the same examples on every machine and never judges by time.

And the real model and the real tweets, for those who need them, and at the end what was skipped, by reason.
"""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from gatespace.models import Model, TinyPair
    from gatespace.tasks import Task

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# A shell without job control starts what is in the background deaf to Ctrl-C, and so would be all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per reason to skip: each is a hole."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.write_sep("=", f"{len(skipped)} skipped, by reason")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")


def rounding(model: Model) -> float:
    """How far apart two ways of computing the same in float32 may be, relative to the whole, forward and back.

    A sum of n terms in an unforeseen order has a relative error of about 2⁻²⁴·√n, n at most the network's widest sum.
    Each layer adds its own going forward and going back, in both computations, and independently: √(2·2·layers).
    """
    config = model.network.config
    return 2**-24 * math.sqrt(config.intermediate_size) * math.sqrt(2 * 2 * config.num_hidden_layers)


@pytest.fixture(scope="session")
def task() -> Task:
    """A generated task, for tests that need no other."""
    from gatespace.tasks import synthetic_task

    return synthetic_task(size=600)


@pytest.fixture(scope="session")
def tiny(task: Task, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """The untrained tiny pair of that task."""
    from gatespace.models import build_tiny

    return build_tiny(task, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in the user's own cache, so that it is fetched and converted once for ever.

    Workers that ask at the same time wait for the first of them.
    """
    from gatespace.errors import RunError
    from gatespace.models import packaged_folder

    try:
        return packaged_folder("smollm2", report=print)
    except RunError as error:
        if "neither on a Hub" not in error.what:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this test run see, and no other test run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def short_smollm2(smollm2: Path, shared_folder: Path) -> Path:
    """SmolLM2's first three layers: the real weights and widths, for what depth adds nothing to but time."""
    from filelock import FileLock

    from gatespace.models import load_model

    folder = shared_folder / "short-smollm2"
    with FileLock(shared_folder / "short-smollm2.lock"):
        if not folder.exists():
            model = load_model(str(smollm2))
            model.body.layers = model.body.layers[:3]
            model.network.config.num_hidden_layers = 3
            model.tokenizer.save_pretrained(folder)
            model.network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tweeteval() -> Path:
    """The folder with the real tweets."""
    places = [os.environ.get("GATESPACE_TWEETEVAL"), Path(__file__).resolve().parents[2] / "shared" / "tweeteval"]
    for place in places:
        if place and (Path(place) / "hate" / "train_text.txt").is_file():
            return Path(place)
    pytest.skip(f"no TweetEval files in $GATESPACE_TWEETEVAL or {places[-1]}")


@pytest.fixture(scope="session")
def text_data() -> Path:
    """The folder with E2E and GSM8K."""
    places = [os.environ.get("GATESPACE_TEXT"), Path(__file__).resolve().parents[2] / "shared" / "text"]
    for place in places:
        if place and (Path(place) / "e2e" / "devset.csv").is_file():
            return Path(place)
    pytest.skip(f"no text-to-text data in $GATESPACE_TEXT or {places[-1]}")
