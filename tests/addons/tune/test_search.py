"""A whole search on a tiny pair: the same trials however often it is stopped, and no step twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gatespace.addons.tune.folder import Ledger, TuneFolder
from gatespace.addons.tune.jobs import perform
from gatespace.addons.tune.plan import Spec
from gatespace.addons.tune.proposals import Proposal, propose
from gatespace.addons.tune.search import Search
from gatespace.addons.tune.settings import TuneConfig, parse_budget
from gatespace.config import parse_config
from gatespace.errors import RunError, UsageError
from gatespace.gating.coefficients import Gate
from gatespace.study.jobs import execute

from .test_settings import study

TUNE: dict[str, Any] = {
    "rungs": [{"steps": 1, "seeds": 1}, {"steps": 2, "seeds": 2}],
    "channels": ["h", "position"],  # the entropies of untrained models hardly vary
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


def searched(folder: Path, engine: Any, *, budget: str | None = None, **settings: Any) -> Search:
    config = parse_config(TuneConfig, TUNE | settings)
    limit = None if budget is None else parse_budget(budget)
    own = study(train=TRAIN, axes={"published": []})
    spec = Spec.of(own, config, TuneFolder(folder), threads=1, budget=limit)
    with spec.folder.claim():
        return Search(spec, engine, watch=lambda *_: None, note=lambda _: None).go()


@pytest.fixture(autouse=True)
def own_cache(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATESPACE_CACHE", str(shared_folder / "tune-cache"))


@pytest.mark.slow
def test_a_search_that_is_stopped_again_and_again_has_the_same_trials(tmp_path: Path) -> None:
    engine = Inline()
    found = searched(tmp_path / "whole", engine)
    kinds = [one.kind for one in found.candidates.values()]
    assert kinds[:6] == ["static", "static", "static", "point", "proposal", "proposal"]
    assert {*kinds[6:]} <= {"static"}  # the grid of constants may have been extended
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
    assert jobs == 1 + len(kinds) + 2 * sum(len(scores) == 2 for scores in found.scores.values())  # warm-up and rungs

    nothing = Inline(0)
    assert searched(tmp_path / "whole", nothing).decisions == found.decisions  # all of it is read from the records
    with pytest.raises(UsageError, match=r"another search[\s\S]*keep"):
        searched(tmp_path / "whole", nothing, keep=0.9)
    assert searched(tmp_path / "whole", nothing, fresh=[11, 12, 13]).winner == found.winner


class Scripted(Inline):
    """An engine whose runs have scores by a formula, in place of training: G5 is best, and some runs fail."""

    def __init__(self, fails: str = "", *, rung: int = 1, nan: str = "", lam: float = 0.0, gate: float = 0.8) -> None:
        super().__init__()
        self.fails, self.rung, self.nan = fails, rung, nan
        self.lam, self.gate = lam, gate
        """The best constant, 0: all are alike; and the probability that G5 gives to the right label."""

    def probability(self, name: str, gate: Gate, row: int) -> float | None:
        if self.nan and re.search(self.nan, name):
            return None
        if gate.is_static:
            return 0.5 - (abs(gate.lam() - self.lam) if self.lam else 0.0) + row / 100
        noise = 0.0 if gate.name == "G5" else 0.02 * (-1) ** row + 0.001  # proposals are a bit better, by luck
        return (self.gate if gate.name == "G5" or self.gate == 0.5 else 0.5) + noise + row / 100

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        name, job = self._started.pop()
        self.done += 1
        if job["do"] == "warm-up":
            columns = {name: [(i * 7919 % (97 + len(name))) / 97 for i in range(90)] for name in job["channels"]}
            measured = {"values": columns, "weights": [1.0] * 90, "score": -1.0, "metric": "log-loss"}
            Path(job["file"]).parent.mkdir(parents=True)
            Path(job["file"]).write_text(json.dumps(measured | {"seconds": {"load": 1, "step": 1, "evaluate": 1}}))
        elif self.fails and re.search(self.fails, name) and job["until"] >= self.rung:
            return [(name, {"state": "failed", "error": f"{name} is out of memory", "details": ""})]
        else:
            place = TuneFolder(job["config"]["output"]).path / f"step-{job['until']}"
            place.mkdir(parents=True)
            gate = Gate.parse(job["config"]["objective"]["gate"])
            rows = [{"gold": "a", "probabilities": {"a": self.probability(name, gate, row)}} for row in range(4)]
            (place / "predictions-val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (place / "evaluation-val.json").write_text("{}")
        return [(name, {"state": "done"})]


def test_a_failed_candidate_is_left_out_with_its_error_also_after_a_kill(tmp_path: Path) -> None:
    found = searched(tmp_path, Scripted("c00[34]"))
    assert found.errors["c003"] == "c003-G5-s1 is out of memory"
    assert [*found.errors] == ["c003", "c004"]
    assert not {*found.errors} & {*found.scores}
    assert found.winner is not None
    assert found.winner.id == "c005"
    records = tmp_path / "tune.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    first = next(place for place, line in enumerate(lines) if b'"what": "score"' in line)
    for kept in (first, first + 1, first + 2):  # killed before, between and after these scores were recorded
        records.write_bytes(b"".join(lines[:kept]))
        searched(tmp_path, Scripted("c00[34]"))
        assert records.read_bytes() == b"".join(lines)


def test_an_outage_is_not_recorded_as_failed_candidates(tmp_path: Path) -> None:
    for fails in ("c00[0-3]", "c00[45]"):  # all of the first round, all of the second
        with pytest.raises(RunError, match="no candidate could be trained"):
            searched(tmp_path / "out", Scripted(fails), batch=2)
    searched(tmp_path / "out", Scripted(), batch=2)
    searched(tmp_path / "whole", Scripted(), batch=2)
    assert (tmp_path / "out" / "tune.jsonl").read_bytes() == (tmp_path / "whole" / "tune.jsonl").read_bytes()


def test_a_candidate_without_a_finite_score_has_failed(tmp_path: Path) -> None:
    found = searched(tmp_path, Scripted(nan="c000"))
    assert "diverged" in found.errors["c000"]
    assert found.winner is not None
    assert found.winner.label == "G5"


def test_no_gate_is_no_verdict_where_gates_failed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no gate is left to be judged[\s\S]*out of memory"):
        searched(
            tmp_path / "late", Scripted("c00[345]", rung=2), keep=0.99
        )  # good at the first rung, lost at the second
    with pytest.raises(RunError, match="no gate among the candidates"):
        searched(tmp_path / "none", Scripted(), points=[], proposals=0)


def test_a_budget_in_steps_allows_fewer_proposals_or_none(tmp_path: Path) -> None:
    nothing = Inline(0)
    with pytest.raises(UsageError, match="too small even without proposals"):
        # 4 of four candidates, 3 × 3 of three, 5 × 4 of constants, and 5 × 2 × 2 of the verdict
        searched(tmp_path, nothing, budget="52steps")
    assert Ledger(tmp_path / "tune.jsonl").peek(1) is None  # so that a larger budget goes on
    found = searched(tmp_path, Scripted(), budget="57steps")
    assert sum(one.kind == "proposal" for one in found.candidates.values()) == 1


@pytest.mark.parametrize("rungs", [TUNE["rungs"], TUNE["rungs"][-1:]])
@pytest.mark.parametrize(
    "best, added, last",
    [
        (0.99, ["static:0.995", "static:0.99875"], "static:0.995"),
        (0.01, ["static:0.005", "static:0.00125"], "static:0.005"),
        (0.9999, ["static:0.995", "static:0.99875"], "static:0.99875"),  # near enough to 1
        (0.6, [], "static:0.5"),
    ],
)
def test_the_grid_of_constants_is_extended_until_its_best_is_inside(
    best: float, added: list[str], last: str, rungs: list[dict[str, int]], tmp_path: Path
) -> None:
    found = searched(tmp_path, Scripted(lam=best), rungs=rungs)
    constants = {one.label: one.id for one in found.candidates.values() if one.kind == "static"}
    assert sorted(constants) == sorted(["static:0.02", "static:0.5", "static:0.98", *added])
    chosen = found.best("static")
    assert chosen is not None
    assert chosen.label == last
    # The best and its neighbours are compared at the seeds of the last rung, as the gates are.
    order = sorted(constants, key=lambda label: float(label.partition(":")[2]))
    middle = order.index(last)
    for label in order[max(0, middle - 1) : middle + 2]:
        assert len(found.scores[constants[label]]) == len(rungs)
        assert len(found.by_seed[constants[label]]) == 2
    decided = found.decisions[-1]["score"]
    assert constants[last] in decided


def test_a_constant_that_fails_is_left_out_of_the_extended_grid(tmp_path: Path) -> None:
    found = searched(tmp_path, Scripted("static_0.995|static-0.995|static:0.995|c006", lam=0.99))
    assert [*found.errors] == ["c006"]
    chosen = found.best("static")
    assert chosen is not None
    assert chosen.label == "static:0.98"


def test_of_gates_within_one_standard_error_the_one_with_the_fewest_channels_wins(tmp_path: Path) -> None:
    found = searched(tmp_path, Scripted(gate=0.5), keep=0.99, channels=["h", "u", "gap"])
    assert found.winner is not None
    assert found.winner.label == "G5"
    assert found.scores[found.winner.id][-1] < max(found.scores[name][-1] for name in ("c004", "c005"))


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
    assert 0 in [value for one in propose(8, config, channels, [], first=0) for value in one.place.direction.values()]


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
