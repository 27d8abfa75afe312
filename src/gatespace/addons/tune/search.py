"""The search: warm-up, proposals at the first rung, successive halving over the others.

All random choices come from named streams and all decisions from recorded scores, so a search that is killed and
resumed, on any number of workers, ends with the same trials.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from gatespace.addons.tune.folder import Ledger, Record
from gatespace.addons.tune.gates import Place, Signals
from gatespace.addons.tune.jobs import reached, read_rows
from gatespace.addons.tune.plan import Candidate, Cost, Spec, steps_of, with_lr
from gatespace.addons.tune.proposals import Proposal, propose
from gatespace.addons.tune.race import decide, score
from gatespace.addons.tune.settings import HALF
from gatespace.config import dump_config
from gatespace.errors import RunError, UsageError
from gatespace.gating.coefficients import Gate
from gatespace.runs import RunFolder
from gatespace.seeding import stream
from gatespace.study.engines import Engine
from gatespace.study.outlook import Job, outline
from gatespace.study.plan import ROLES, model_name, slug


class Search:
    """State and execution of a search.

    Args:
        spec: The search specification.
        engine: Runs the jobs.
        watch: Called with a line about each ended job, and the maximum number of seconds left, None if unknown.
        note: Called with messages for the user.
    """

    def __init__(
        self,
        spec: Spec,
        engine: Engine,
        *,
        watch: Callable[[str, float | None], None],
        note: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.warm_up: Record = {}
        """Score of the untrained student, name of the metric, channels."""
        self.candidates: dict[str, Candidate] = {}
        self.scores: dict[str, list[float]] = {}
        """Candidate → its score at every rung reached."""
        self.errors: dict[str, str] = {}
        """Candidate → why it failed."""
        self.decisions: list[Record] = []
        """One per rung."""
        self.winner: Candidate | None = None
        """The best gate of the last rung; None if all gates were significantly worse than another candidate."""
        self._engine, self._watch, self._note = engine, watch, note
        self._ledger = Ledger(spec.folder.records_file)
        self._began = self._clock = time.monotonic()
        self._done = self._left = 0
        """Training steps done by this process, and the maximum number left."""

    @property
    def leader(self) -> Candidate:
        """The best candidate of the last rung, of any kind."""
        return self.candidates[self.decisions[-1]["incumbent"]]

    @property
    def steps(self) -> int:
        """Training steps of the search."""
        last = [self.spec.rungs[len(found) - 1] for found in self.scores.values()]
        return sum(rung.steps * rung.seeds for rung in last)

    def best(self, kind: str) -> Candidate | None:
        """The best candidate of a kind, among those that advanced farthest."""
        own = [one for one in self.candidates.values() if one.kind == kind and one.id in self.scores]
        return max(own, key=lambda one: (len(self.scores[one.id]), self.scores[one.id][-1]), default=None)

    # ------------------------------------------------------------------ the search

    def go(self) -> Search:
        """Run the rest of the search."""
        spec, ledger = self.spec, self._ledger
        self._begin()
        measured = json.loads(spec.folder.warm_up.read_bytes())
        signals = Signals.of(measured["values"], measured["weights"])
        self.warm_up = ledger.once("warm-up", lambda: _described(signals, measured))
        plan = ledger.once("plan", lambda: {"proposals": self._affordable(measured["seconds"], signals)})
        always, count, batch = spec.fixed(signals), int(plan["proposals"]), spec.config.batch
        self._add(len(always), lambda: always, further=count)
        for first in range(0, count, batch):
            some = min(batch, count - first)
            self._add(some, partial(self._propose, some, signals, first), further=count - first - some)
        alive = [*self.scores]
        for place in range(len(spec.rungs)):
            if place:
                self._score(alive, place)
                alive = [name for name in alive if len(self.scores[name]) == place + 1]
            self.decisions.append(ledger.once("decision", partial(self._decide, alive, place), rung=place))
            alive = self.decisions[-1]["kept"]
            dropped = [one for name, one in self.candidates.items() if name not in alive]
            for one, seed in product(dropped, spec.config.seeds):  # each is larger than two students' weights
                shutil.rmtree(self._run(one, seed).checkpoints, ignore_errors=True)
        ledger.close()
        self.winner = next((one for name in alive if (one := self.candidates[name]).is_gate), None)
        if self.winner is None:
            self._check_that_gates_were_judged()
        return self

    def _begin(self) -> None:
        """Check that the folder holds this search or none, then train the models and measure the signals."""
        spec, own = self.spec, self.spec.identity()
        if (before := self._ledger.peek()) is not None and before.get("settings") != own:
            raise UsageError(
                "this folder holds another search",
                got=str(spec.folder),
                why=_difference(before.get("settings"), own),
                instead="another --output, or remove this one",
            )
        self._ledger.once("begin", lambda: {"settings": own})
        if self._ledger.peek() is None:
            if isinstance(spec.budget, int):
                spec.affordable()  # raises before anything is trained
            self._make_models()
            if not spec.folder.warm_up.exists():
                self._measure()

    def _make_models(self) -> None:
        """Train the study's models, and run nothing else of it."""
        spec = self.spec
        names = {model_name(spec.study, spec.task, role) for role in ROLES}
        _, work = outline(spec.folder, spec.study, spec.threads)
        jobs = {one.name: one.job() for one in work if one.name in names and not one.folder.is_done}
        errors = self._do({name: (job, name, 0) for name, job in jobs.items() if job is not None})
        for name, error in errors.items():
            raise RunError(f"a model could not be made: {name}", got=error)

    def _measure(self) -> None:
        spec, config = self.spec, self.spec.config
        gate = Gate(extra={name: 1.0 for name in config.channels if name not in ("h", "u", "gap")})
        probe = Candidate("", "point", "warm-up", str(gate))
        seed = stream(config.seed, "tune", "warm-up") >> 1
        settings = dump_config(spec.run_config(probe, seed, RunFolder(spec.folder.warm_up.parent)))
        job: Job = {"do": "warm-up", "config": settings, "channels": list(config.channels)}
        job |= {"batches": config.warm_up, "file": str(spec.folder.warm_up)}
        if errors := self._do({"warm-up": (job, "warm-up: signals measured", 0)}):
            raise RunError("the signals could not be measured", got=errors["warm-up"])

    def _affordable(self, seconds: Mapping[str, float], signals: Signals) -> int:
        """Number of proposals the budget allows. Recorded, so that a resumed search keeps it despite other timings."""
        spec, most = self.spec, self.spec.config.proposals
        if not signals.channels and most:
            signals.solve(Place(HALF, 1.0, {}))  # raises, explaining why there is no gate to find
        spent = time.monotonic() - self._began

        def price(costs: Sequence[Cost]) -> float:
            if isinstance(spec.budget, int):
                return steps_of(costs)
            runs = sum(cost.runs for cost in costs) + costs[-1].runs  # the verdict evaluates on two splits
            work = runs * (seconds["load"] + seconds["evaluate"]) + steps_of(costs) * seconds["step"]
            return spent + work / max(1, spec.workers)

        allowed = spec.affordable(price)
        if allowed < most:
            self._note(f"the budget allows {allowed} of {most} proposals")
        return allowed

    def _propose(self, count: int, signals: Signals, first: int) -> list[Candidate]:
        known = [
            (Proposal(Place(**one.place), one.lr), self.scores[one.id][0])
            for one in self.candidates.values()
            if one.place is not None and one.is_gate and one.id in self.scores
        ]
        found: list[Candidate] = []
        for place, lr in propose(count, self.spec.config, signals.channels, known, first=first):
            gate, number = signals.solve(place), len(self.candidates) + len(found)
            label = with_lr(",".join(f"{value:.3g}" for value in gate.abcd), lr)
            label += "".join(f",{name}={value:.3g}" for name, value in gate.extra.items())
            found.append(Candidate(f"c{number:03d}", "proposal", label, str(gate), None, lr, place._asdict()))
        return found

    def _add(self, count: int, make: Callable[[], list[Candidate]], *, further: int) -> None:
        """Record `count` candidates and score them at the first rung. `make` is called unless all are recorded."""
        made: list[Record] = [{}] * count
        if self._ledger.peek(count - 1) is None:
            made = [vars(one) for one in make()]
        names = [f"c{len(self.candidates) + place:03d}" for place in range(count)]
        for name, one in zip(names, made, strict=True):
            self.candidates[name] = Candidate.of(self._ledger.once("candidate", partial(dict, one), id=name))
        self._score(names, 0, further=further)

    def _score(self, names: Sequence[str], place: int, *, further: int = 0) -> None:
        """Train candidates up to a rung and record their scores. `further` more will be proposed after them."""
        rung = self.spec.rungs[place]
        some = [self.candidates[name] for name in names]
        jobs: dict[str, tuple[Job, str, int]] = {}
        recorded = sum(self._ledger.peek(ahead) is not None for ahead in range(len(some)))
        for one in some[recorded:]:
            for seed, run in self._runs(one, place).items():
                if reached(run, rung.steps) is None:
                    job = {"do": "rung", "config": dump_config(self.spec.run_config(one, seed, run))}
                    title = f"rung {place + 1}/{len(self.spec.rungs)}: {one.label} seed {seed}"
                    jobs[run.path.name] = (job | {"until": rung.steps}, title, rung.steps - run.last_step())
        later = self.spec.costs(len(some) if place else len(self.candidates) + further, place)[1:]
        self._left = further * rung.steps * rung.seeds + sum(steps for _, _, steps in jobs.values())
        self._left += sum(cost.steps for cost in later) + self.spec.verdict_cost().steps
        failed = self._do(jobs)
        errors = {
            one.id: failed[run.path.name]
            for one in some
            for run in self._runs(one, place).values()
            if run.path.name in failed
        }
        if errors and len(errors) == len(some) and (place or len(some) > 1 or not self.scores):
            why = "where all fail, the cause is seldom the candidates: none of it is recorded"
            error = next(iter(errors.values()))
            raise RunError("no candidate could be trained", got=error, why=why, instead="the same command tries again")
        for one in some:
            made = partial(self._scored, one, place, errors.get(one.id))
            record = self._ledger.once("score", made, candidate=one.id, rung=place)
            if record["score"] is None:
                self.errors[one.id] = record["error"]
            else:
                self.scores.setdefault(one.id, []).append(record["score"])

    def _scored(self, candidate: Candidate, place: int, error: str | None) -> dict[str, Any]:
        rows = None if error else read_rows(self._runs(candidate, place), self.spec.rungs[place].steps)
        if rows is None:
            return {"score": None, "error": error or "its runs are not there"}
        if not math.isfinite(value := score(rows)):
            return {"score": None, "error": "its score is not a finite number: it has diverged"}
        return {"score": value, "seeds": {str(seed): score({seed: values}) for seed, values in rows.items()}}

    def _decide(self, alive: Sequence[str], place: int) -> dict[str, Any]:
        config, rungs = self.spec.config, self.spec.rungs
        found = {}
        for name in alive:
            rows = read_rows(self._runs(self.candidates[name], place), rungs[place].steps)
            assert rows is not None, "it has a score at this rung"
            found[name] = rows
        gates = {name for name in alive if self.candidates[name].is_gate}
        keep = 1.0 if place == len(rungs) - 1 else config.keep
        return decide(found, gates=gates, keep=keep, level=config.alpha / len(rungs))

    def _check_that_gates_were_judged(self) -> None:
        """Raise if no gate is left because those that should have advanced failed: that is not a verdict."""
        gates = {name for name, one in self.candidates.items() if one.is_gate}
        judged = [made for made in self.decisions if gates & {*made["score"]}]
        if not judged or gates & {*judged[-1]["kept"]}:
            failed = [f"{self.candidates[name].label}: {self.errors[name]}" for name in gates & {*self.errors}]
            raise RunError(
                "no gate is left to be judged",
                got=sorted(failed)[0] if failed else "no gate among the candidates",
                instead="more tune.points or tune.proposals, or what the error says; with another --output",
            )

    # ------------------------------------------------------------------ jobs

    def _run(self, candidate: Candidate, seed: int) -> RunFolder:
        return self.spec.folder.trial(f"{candidate.id}-{slug(candidate.label)}-s{seed}")

    def _runs(self, candidate: Candidate, place: int) -> dict[int, RunFolder]:
        seeds = self.spec.config.seeds[: self.spec.rungs[place].seeds]
        return {seed: self._run(candidate, seed) for seed in seeds}

    def _do(self, jobs: Mapping[str, tuple[Job, str, int]]) -> dict[str, str]:
        """Run name → (job, title, steps) with as many at once as the engine has slots; return name → error."""
        waiting, running, errors = [*jobs], set[str](), dict[str, str]()
        while waiting or running:
            self.spec.folder.check_claim()
            while waiting and len(running) < self._engine.slots:
                running.add(name := waiting.pop(0))
                self._engine.start(name, jobs[name][0])
            for name, outcome in self._engine.wait(0.5):
                running.discard(name)
                _, title, steps = jobs[name]
                self._left, self._done = self._left - steps, self._done + steps
                if not self._done:
                    self._clock = time.monotonic()  # models and warm-up do not count towards the time per step
                if outcome["state"] == "failed":
                    errors[name] = outcome["error"]
                    self._note(f"{title} failed: {outcome['error'].splitlines()[0]}")
                else:
                    rate = (time.monotonic() - self._clock) / self._done if self._done else None
                    self._watch(title, None if rate is None else rate * max(self._left, 0))
        return errors


def _described(signals: Signals, measured: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "channels": {name: [signals.mean(column), signals.sd(column)] for name, column in signals.values.items()},
        "used": list(signals.channels),
        "tokens": len(signals.weights),
        "metric": measured["metric"],
        "score": measured["score"],
    }


def _difference(before: Any, now: Any, path: str = "") -> str:
    """The first setting in which two searches differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**now, **before}:
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    return f"its {path or 'settings'} is {json.dumps(before)}, not {json.dumps(now)}"
