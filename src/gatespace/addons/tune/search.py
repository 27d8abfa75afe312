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
from gatespace.addons.tune.plan import CONSTANTS, LEAST_CONSTANT, Candidate, Cost, Spec, steps_of, with_lr
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
        watch: Called with a line about each ended job.
        note: Called with messages for the user.
    """

    def __init__(
        self, spec: Spec, engine: Engine, *, watch: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.warm_up: Record = {}
        """Score of the untrained student, name of the metric, channels."""
        self.candidates: dict[str, Candidate] = {}
        self.scores: dict[str, list[float]] = {}
        """Candidate → its score at every rung reached."""
        self.by_seed: dict[str, dict[str, float]] = {}
        """Candidate → its score by seed at the last rung reached."""
        self.errors: dict[str, str] = {}
        """Candidate → why it failed."""
        self.decisions: list[Record] = []
        """One per rung."""
        self.winner: Candidate | None = None
        """The gate with the fewest channels within one standard error of the best gate of the last rung; None if all
        gates were significantly worse than another candidate."""
        self._engine, self._watch, self._note = engine, watch, note
        self._ledger = Ledger(spec.folder.records_file)
        self._began = time.monotonic()

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
        self._add(always)
        for first in range(0, count, batch):
            self._add(self._propose(min(batch, count - first), signals, first))
        alive, last = list[str](), len(spec.rungs) - 1
        for place in range(last + 1):
            if place:
                self._score(alive, place)
            if place == last:
                self._bracket(signals, last)
            alive = [name for name, known in self.scores.items() if len(known) == place + 1]
            self.decisions.append(ledger.once("decision", partial(self._decide, alive, place), rung=place))
            alive = self.decisions[-1]["kept"]
            dropped = [one for name, one in self.candidates.items() if name not in alive]
            for one, seed in product(dropped, spec.config.seeds):  # each is larger than two students' weights
                if place == last or one.kind != "static":  # `_bracket` may resume a constant
                    shutil.rmtree(self._run(one, seed).checkpoints, ignore_errors=True)
        ledger.close()
        gates = [self.candidates[name] for name in alive if self.candidates[name].is_gate]  # best first
        apart, scores = self.decisions[-1]["differences"], self.decisions[-1]["score"]
        near = [g for g in gates if g == gates[0] or scores[gates[0].id] - scores[g.id] <= apart[g.id]["se"]]
        self.winner = min(near, key=lambda one: one.complexity, default=None)
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
        errors = self._do({name: (job, name) for name, job in jobs.items() if job is not None})
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
        if errors := self._do({"warm-up": (job, "warm-up: signals measured")}):
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
            if (actual := signals.place(gate)) is not None:
                place = place._replace(spread=actual.spread)  # coefficients are bounded
            label = with_lr(",".join(f"{value:.3g}" for value in gate.abcd), lr)
            label += "".join(f",{name}={value:.3g}" for name, value in gate.extra.items())
            found.append(Candidate(f"c{number:03d}", "proposal", label, str(gate), None, lr, place._asdict()))
        return found

    def _add(self, some: Sequence[Candidate]) -> None:
        """Record candidates and score them at the first rung."""
        for one in some:
            self.candidates[one.id] = Candidate.of(self._ledger.once("candidate", partial(vars, one), id=one.id))
        self._score([one.id for one in some], 0)

    def _score(self, names: Sequence[str], place: int) -> None:
        """Train candidates up to a rung and record their scores."""
        rung = self.spec.rungs[place]
        some = [self.candidates[name] for name in names]
        jobs: dict[str, tuple[Job, str]] = {}
        recorded = sum(self._ledger.peek(ahead) is not None for ahead in range(len(some)))
        for one in some[recorded:]:
            for seed, run in self._runs(one, place).items():
                if reached(run, rung.steps) is None:
                    job = {"do": "rung", "config": dump_config(self.spec.run_config(one, seed, run))}
                    title = f"rung {place + 1}/{len(self.spec.rungs)}: {one.label} seed {seed}"
                    jobs[run.path.name] = (job | {"until": rung.steps}, title)
        failed = self._do(jobs)
        runs = {run.path.name: one.id for one in some for run in self._runs(one, place).values()}
        errors = {runs[name]: failed[name] for name in runs if name in failed}
        first = all(len(known) <= place for known in self.scores.values())  # none has come so far yet
        if errors and len(errors) == len(some) and (first or len(some) > 1):
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
                self.by_seed[one.id] = record["seeds"]

    def _bracket(self, signals: Signals, last: int) -> None:
        """Train the best constant and its neighbours to the last rung, until the best is between two others there.

        The neighbour of the smallest or largest constant is a new candidate, four times as near to 0 or 1.
        """
        for _ in range(CONSTANTS):
            if (best := self.best("static")) is None:
                return
            grid = [one for one in self.candidates.values() if (one.kind, one.lr) == ("static", best.lr)]
            grid.sort(key=lambda one: Gate.parse(str(one.gate)).c)
            middle, lam = grid.index(best), Gate.parse(str(best.gate)).lam()
            near = [best, *grid[max(middle - 1, 0) : middle], *grid[middle + 1 : middle + 2]]
            behind = [one for one in near if one.id not in self.errors and len(self.scores[one.id]) <= last]
            if behind:
                name = behind[0].id
            elif len(near) < 3 and min(lam, 1 - lam) > LEAST_CONSTANT:
                further = lam / 4 if middle == 0 else 1 - (1 - lam) / 4
                one = Candidate.gated(len(self.candidates), "static", Gate.static(round(further, 6)), best.lr, signals)
                self._add([one])
                name = one.id
            else:
                return
            while name not in self.errors and len(self.scores[name]) <= last:
                self._score([name], len(self.scores[name]))

    def _scored(self, candidate: Candidate, place: int, error: str | None) -> dict[str, Any]:
        rows = None if error else read_rows(self._runs(candidate, place), self.spec.rungs[place].steps)
        if rows is None:
            return {"score": None, "error": error or "its runs are not there"}
        if not math.isfinite(value := score(rows)):
            return {"score": None, "error": "its score is not a finite number: it has diverged"}
        return {"score": value, "seeds": {str(seed): score({seed: values}) for seed, values in rows.items()}}

    def _decide(self, alive: Sequence[str], place: int) -> dict[str, Any]:
        config, rungs = self.spec.config, self.spec.rungs
        rows = {name: read_rows(self._runs(self.candidates[name], place), rungs[place].steps) for name in alive}
        found = {name: known for name, known in rows.items() if known is not None}  # all: each has a score here
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

    def _do(self, jobs: Mapping[str, tuple[Job, str]]) -> dict[str, str]:
        """Run name → (job, title) with as many at once as the engine has slots; return name → error."""
        waiting, running, errors = [*jobs], set[str](), dict[str, str]()
        while waiting or running:
            self.spec.folder.check_claim()
            while waiting and len(running) < self._engine.slots:
                running.add(name := waiting.pop(0))
                self._engine.start(name, jobs[name][0])
            for name, outcome in self._engine.wait(0.5):
                running.discard(name)
                title = jobs[name][1]
                if outcome["state"] == "failed":
                    errors[name] = outcome["error"]
                    self._note(f"{title} failed: {outcome['error'].splitlines()[0]}")
                else:
                    self._watch(title)
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
