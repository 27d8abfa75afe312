"""A whole search on a tiny pair: the same trials however often it is stopped, and no step twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gatespace.addons.tune.folder import Ledger, TuneFolder
from gatespace.addons.tune.jobs import perform
from gatespace.addons.tune.proposals import Proposal, propose
from gatespace.addons.tune.search import Outcome, Search, Spec
from gatespace.addons.tune.settings import Budget, TuneConfig
from gatespace.config import parse_config
from gatespace.errors import RunError, UsageError
from gatespace.study.jobs import execute

from .test_settings import study

TUNE: dict[str, Any] = {
    "rungs": [{"steps": 1, "seeds": 1}, {"steps": 2, "seeds": 2}],
    "lam": [0.5],
    "points": ["G5"],
    "proposals": 2,
    "batch": 1,
    "keep": 0.4,
    "seeds": [1, 2],
    "fresh": [11, 12],
    "warm_up": 1,
}
TRAIN: dict[str, Any] = {
    "pair": {"student": "tiny", "teacher": "tiny"},
    "steps": 2,
    "batch_size": 2,
    "optimizer": {"lr": 2e-3},
    "rollout": {"max_new_tokens": 3},
    "evaluation": {"max_new_tokens": 3, "limit": 6},
    "engine": {"precision": "fp32", "threads": 1},
    "trace": {"tokens_every": 0},
}


class Stopped(Exception):
    """The search's process is gone."""


class Inline:
    """An engine that does its jobs in this process, and stops the search after some of them."""

    slots = 1

    def __init__(self, jobs: int = 1000) -> None:
        self.left, self.done = jobs, 0
        self._started: list[tuple[str, dict[str, Any]]] = []

    def start(self, name: str, job: dict[str, Any]) -> None:
        self._started.append((name, job))

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        if self.left == 0:
            raise Stopped
        self.left -= 1
        self.done += 1
        name, job = self._started.pop()
        return [(name, execute(job, perform))]

    def close(self) -> None: ...


def searched(folder: Path, engine: Inline, *, budget: str | None = None, **settings: Any) -> Outcome:
    config = parse_config(TuneConfig, TUNE | settings)
    more = {} if budget is None else {"budget": Budget.parse(budget)}
    spec = Spec.of(study(train=TRAIN, axes={"published": []}), config, TuneFolder(folder), threads=1, **more)
    with spec.folder.claim():
        return Search(spec, engine, watch=lambda *_: None, note=lambda _: None).go()


@pytest.fixture(autouse=True)
def own_cache(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATESPACE_CACHE", str(shared_folder / "tune-cache"))


@pytest.mark.slow
def test_a_search_that_is_stopped_again_and_again_has_the_same_trials(tmp_path: Path) -> None:
    engine = Inline()
    found = searched(tmp_path / "whole", engine)
    assert [one.kind for one in found.candidates.values()] == ["static", "point", "proposal", "proposal"]
    assert found.winner is not None
    assert found.winner.is_gate
    assert found.steps == sum({1: 1, 2: 4}[len(scores)] for scores in found.scores.values())
    folder = TuneFolder(tmp_path / "whole")
    for run in (tmp_path / "whole" / "search").iterdir():
        trial = folder.trial(run.name)
        assert all(read["split"] == "val" for read in trial.log("reads"))
        steps = [record["step"] for record in trial.log("metrics")]
        assert steps == [1, 2] if trial.is_done else steps == [1]
        assert not trial.checkpoints.exists()  # done, or dropped

    jobs = 0
    for most in (1, 2, 3, 2, 1000):
        engine = Inline(most)
        try:
            again = searched(tmp_path / "stopped", engine)
        except Stopped:
            with (tmp_path / "stopped" / "tune.jsonl").open("ab") as file:
                file.write(b'{"what": "score", "sco')  # torn by the kill
        jobs += engine.done
    whole = (tmp_path / "whole" / "tune.jsonl").read_bytes()
    assert (tmp_path / "stopped" / "tune.jsonl").read_bytes() == whole
    assert again.winner == found.winner
    assert jobs == 1 + 4 + 2 * sum(len(scores) == 2 for scores in found.scores.values())  # warm-up and both rungs

    nothing = Inline(0)
    assert searched(tmp_path / "whole", nothing).decisions == found.decisions  # all of it is read from the records
    with pytest.raises(UsageError, match=r"another search[\s\S]*keep"):
        searched(tmp_path / "whole", nothing, keep=0.9)
    assert searched(tmp_path / "whole", nothing, fresh=[11, 12, 13]).winner == found.winner


@pytest.mark.slow
def test_a_budget_in_steps_allows_fewer_proposals_or_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too small even without proposals"):
        searched(tmp_path / "small", Inline(), budget="5steps")
    ledger = Ledger(tmp_path / "small" / "tune.jsonl")
    assert (ledger.peek(1) or {})["what"] == "warm-up"
    assert ledger.peek(2) is None  # what was planned is not recorded: a larger budget goes on


def test_a_record_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "tune.jsonl")
    ledger.once("begin", lambda: {"x": 0.1})
    ledger.once("plan", lambda: {"proposals": 3})
    ledger.close()
    again = Ledger(tmp_path / "tune.jsonl")
    assert again.once("begin", lambda: pytest.fail("it is there"))["x"] == 0.1
    with pytest.raises(RunError, match="another way"):
        again.once("score", dict)


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_proposals_are_a_function_of_what_is_known(sampler: str) -> None:
    config = TuneConfig(sampler=sampler, batch=4, lr=(1e-3, 2e-3))  # type: ignore[arg-type]
    channels = ("h", "gap")
    first = propose(4, config, channels, [], first=0)
    assert first == propose(4, config, channels, [], first=0)
    assert first != propose(4, config, channels, [], first=4)
    known = [(one, one.place.direction["h"]) for one in first]
    outside = (Proposal(first[0].place._replace(spread=99.0), 1e-3), 1.0)  # a named point may lie outside
    second = propose(4, config, channels, [*known, outside], first=4)
    assert second == propose(4, config, channels, [*known, outside], first=4)
    for one in (*first, *second):
        assert one.place.lam in config.lam
        assert one.lr in config.lr
        assert config.spread[0] <= one.place.spread <= config.spread[1]
        assert sum(value**2 for value in one.place.direction.values()) == pytest.approx(1)


@pytest.mark.long
@pytest.mark.slow
def test_killed_five_times_at_random_the_command_ends_with_the_same_verdict(tmp_path: Path) -> None:
    settings = {"name": "killed", "tasks": {"messages": {"task": {"name": "synthetic", "brief": True}}}}
    file = tmp_path / "study.yaml"
    file.write_text(json.dumps(settings | {"train": TRAIN, "tune": TUNE, "axes": {"published": ["todi"]}}))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def begun(output: Path) -> subprocess.Popen[str]:
        words = ["tune", str(file), "--output", str(output), "--workers", "2", "--threads", "1", "--json"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-m", "gatespace", *words], env=environment, **pipes)

    began = time.monotonic()
    whole = begun(tmp_path / "whole")
    told, errors = whole.communicate()
    assert whole.returncode == 0, errors
    seconds = time.monotonic() - began
    draw = random.Random(1)
    for _ in range(5):
        victim = begun(tmp_path / "killed")
        try:
            victim.wait(draw.uniform(0.1, 0.5) * seconds)
        except subprocess.TimeoutExpired:
            victim.send_signal(signal.SIGKILL)
        victim.communicate()
    last = begun(tmp_path / "killed")
    again, errors = last.communicate()
    assert last.returncode == 0, errors

    def without_places(text: str) -> Any:
        return json.loads(text.replace(str(tmp_path / "killed"), str(tmp_path / "whole")))

    assert without_places(again) == json.loads(told)
    assert json.loads(told)["verdict"]["state"] in ("better", "no better", "undecided")
    for name in ("tune.jsonl", "tables/comparisons-isolation.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert "Is a gate worth having?" in (tmp_path / "whole" / "tune.html").read_text(encoding="utf-8")
