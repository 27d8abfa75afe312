"""The search: warm-up, proposals at the first rung, successive halving over the others.

All random choices come from named streams and all decisions from recorded scores, so that a search which was killed
and resumed, on any number of workers, ends with the same trials.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gatespace.addons.tune.folder import Ledger, TuneFolder
from gatespace.addons.tune.gates import Place, Signals
from gatespace.addons.tune.jobs import reached, read_rows
from gatespace.addons.tune.proposals import Proposal, propose
from gatespace.addons.tune.race import Decision, decide, pairing, score
from gatespace.addons.tune.settings import NO_BUDGET, Budget, Rung, TuneConfig
from gatespace.config import StudyConfig, TrainConfig, dump_config, in_setting, parse_config
from gatespace.config.study import AxesConfig, PublishedConfig
from gatespace.errors import RunError, UsageError, unknown_name
from gatespace.gating.coefficients import Gate
from gatespace.plugins import plugins_digest
from gatespace.runs import RunFolder
from gatespace.seeding import stream
from gatespace.study.engines import Engine
from gatespace.study.outlook import Job, outline
from gatespace.study.plan import ROLES, model_name, slug, train_config

HALF = 0.5
"""The constant λ that every gate has to beat."""


@dataclass(frozen=True)
class Candidate:
    """Something that may win: a gate, a constant λ or a published method.

    Args:
        number: Its place among all.
        kind: static, point (named in the file), proposal or published.
        label: How tables name it.
        gate: None of a published method.
        method: The published method.
        lr: Its learning rate; None: the study's.
        place: Where its gate is in the search space.
    """

    number: int
    kind: str
    label: str
    gate: Gate | None
    method: PublishedConfig | None
    lr: float | None
    place: Place | None

    @property
    def id(self) -> str:
        """Its name in records."""
        return f"c{self.number:03d}"

    @property
    def is_gate(self) -> bool:
        """Whether its λ depends on the token."""
        return self.gate is not None and not self.gate.is_static

    @property
    def goal(self) -> dict[str, Any]:
        """Its settings of `objective`."""
        if self.method is not None:
            return {"method": self.method.method, "params": self.method.params}
        return {"method": "gated", "gate": str(self.gate)}

    def as_json(self) -> dict[str, Any]:
        """For records."""
        return {
            "kind": self.kind,
            "label": self.label,
            "gate": None if self.gate is None else str(self.gate),
            "method": None if self.method is None else dump_config(self.method),
            "lr": self.lr,
            "place": None if self.place is None else self.place._asdict(),
        }

    @classmethod
    def from_json(cls, number: int, record: Mapping[str, Any]) -> Candidate:
        """From its record."""
        return cls(
            number,
            record["kind"],
            record["label"],
            None if record["gate"] is None else Gate.parse(record["gate"]),
            None if record["method"] is None else parse_config(PublishedConfig, record["method"]),
            record["lr"],
            None if record["place"] is None else Place(**record["place"]),
        )


class Cost(NamedTuple):
    """Of a rung, at most: candidates, runs that are begun or resumed, and steps."""

    candidates: int
    runs: int
    steps: int


@dataclass(frozen=True)
class Spec:
    """What is searched, and with what.

    Args:
        study: The study file, named as the search's folder is.
        task: The task of it.
        config: The section `tune`.
        folder: Where all of it is.
        threads: Of each run.
        workers: Runs at once.
        budget: Of search and verdict together.
    """

    study: StudyConfig
    task: str
    config: TuneConfig
    folder: TuneFolder
    threads: int | None = None
    workers: int = 1
    budget: Budget = NO_BUDGET

    @classmethod
    def of(cls, study: StudyConfig, config: TuneConfig, folder: TuneFolder, **more: Any) -> Spec:
        """Of one task of a study, with all that it names checked."""
        task = config.task or next(iter(study.tasks))
        if task not in study.tasks:
            raise unknown_name("task (tune.task)", task, study.tasks)
        if config.task is None and len(study.tasks) > 1:
            raise UsageError(
                "tune.task: a gate is searched for on one task", instead=f"one of {', '.join(study.tasks)}"
            )
        one = study.tasks[task].model_copy(update={"sweep": True, "points": ("G5",)})
        # Of the study's own plan only models and published methods are left.
        own = study.model_copy(
            update={
                "name": f"{study.name}-tune",
                "tasks": {task: one},
                "points": ("G5",),
                "axes": AxesConfig(isolation=None, static=(), published=study.axes.published),
                "seeds": (config.seeds[0],),
                "selection_seed": None,
                "replication": None,
            }
        )
        spec = cls(own, task, config, folder, **more)
        spec.check()
        return spec

    def check(self) -> None:
        """Raise where a candidate cannot be trained."""
        from gatespace.gating import signals
        from gatespace.gating.configured import build_objective

        with in_setting("tune.channels"):
            for channel in self.config.channels:
                signals.get(channel)
        run = self.base
        for setting, usual in (("evaluation.patience", None), ("checkpoint.select", "last")):
            section, _, name = setting.partition(".")
            if getattr(getattr(run, section), name) != usual:
                raise UsageError(
                    f"{setting}: candidates are compared after the same steps",
                    instead=f"{setting}: {'null' if usual is None else usual}",
                )
        for candidate in self.fixed():
            own = self.run_config(candidate, self.config.seeds[0])
            with in_setting(candidate.label):
                sources = own.rollout.source.shares()
                build_objective(own.objective, expected=own.rollout.expected is not None, sources=sources)

    @property
    def base(self) -> TrainConfig:
        """The study's training, with any objective."""
        return train_config(self.study, self.task, self.config.seeds[0], {})

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """Those of the file, or by the study's steps."""
        return self.config.ladder(self.base.steps)

    @property
    def is_text(self) -> bool:
        """Whether responses are free text, which have a score, and no labels, which have a log-loss."""
        return self.base.task.text is not None

    def run_config(self, candidate: Candidate, seed: int, output: RunFolder | None = None) -> TrainConfig:
        """The whole configuration of a candidate's run: all rungs are parts of this one training."""
        made = {role: model_name(self.study, self.task, role) for role in ROLES}
        whole = train_config(
            self.study,
            self.task,
            seed,
            candidate.goal,
            rollout=candidate.method.rollout if candidate.method is not None else None,
            models={role: str(self.folder.model(name).model) for role, name in made.items() if name is not None},
            cache=str(self.folder.scores),
            output=None if output is None else output.path,
            threads=self.threads,
        )
        settings = dump_config(whole)
        settings["steps"] = self.rungs[-1].steps
        settings["evaluation"] |= {"every": 0, "split": "val", "final": ["val"], "probabilities": not self.is_text}
        settings["checkpoint"] |= {"model": False}
        if candidate.lr is not None:
            settings["optimizer"] |= {"lr": candidate.lr}
        return parse_config(TrainConfig, settings, where=f"tune: {candidate.label}")

    # ------------------------------------------------------------------ candidates

    def fixed(self, signals: Signals | None = None) -> list[Candidate]:
        """Candidates that are always there: constants, points of the family, published methods."""
        gates: dict[Gate, tuple[str, str]] = {}
        for lam in sorted({*self.config.lam, HALF}):
            gates[Gate.static(lam)] = ("static", Gate.static(lam).label)
        for text in self.config.points:
            with in_setting("tune.points"):
                gate = Gate.parse(text)
            gates.setdefault(gate, ("static" if gate.is_static else "point", gate.label))
        found: list[Candidate] = []
        for lr in self.config.lr or (None,):
            for gate, (kind, label) in gates.items():
                place = None if signals is None else signals.place(gate)
                found.append(Candidate(len(found), kind, _label(label, lr), gate, None, lr, place))
            for method in self.study.axes.published:
                found.append(Candidate(len(found), "published", _label(method.point, lr), None, method, lr, None))
        return found

    def costs(self, proposals: int) -> list[Cost]:
        """The most that each rung costs."""
        return self.costs_from(0, len(self.fixed()) + proposals)

    def costs_from(self, place: int, count: int) -> list[Cost]:
        """The most that a rung with so many candidates and those after it cost."""
        before = self.rungs[place - 1] if place else None
        done, found = 0 if before is None else before.steps * before.seeds, []
        for rung in self.rungs[place:]:
            whole = rung.steps * rung.seeds
            found.append(Cost(count, count * rung.seeds, count * (whole - done)))
            count, done = min(count, math.ceil(self.config.keep * count) + 1), whole  # and the best gate
        return found

    def verdict_cost(self) -> Cost:
        """The most that the verdict costs: winner, twin, λ = 0.5, best constant, best published method."""
        arms = 4 + bool(self.study.axes.published)
        runs = arms * len(self.config.fresh)
        return Cost(arms, runs, runs * self.rungs[-1].steps)

    def grid_steps(self, candidates: int) -> int:
        """Training steps of a full grid: every candidate at all steps and seeds of the last rung."""
        return candidates * self.rungs[-1].steps * self.rungs[-1].seeds

    def identity(self) -> dict[str, Any]:
        """What must stay the same when a search is resumed."""
        study = dump_config(self.study)
        for key in ("workers", "resources", "output", "keep_models", "tune", "plugins", "about"):
            del study[key]
        plugins = plugins_digest(self.study.plugins) if self.study.plugins else None
        tune = dump_config(self.config)
        del tune["fresh"]  # more of them may be added
        return {"study": study, "plugins": plugins, "tune": tune}


def _label(label: str, lr: float | None) -> str:
    return label if lr is None else f"{label} lr={lr:g}"


# ---------------------------------------------------------------------------------------------------- running it


@dataclass(frozen=True)
class Outcome:
    """What a search has found.

    Args:
        spec: What was searched.
        signals: Of the warm-up.
        warm_up: Its record: score of the untouched student, name of the metric.
        candidates: By id.
        scores: Candidate → its score at every rung that it has reached.
        decisions: Of every rung.
        errors: Candidate → why it failed.
        winner: The best gate of the last rung; None where all gates were clearly worse than something else.
        steps: Training steps of the search.
    """

    spec: Spec
    signals: Signals
    warm_up: Mapping[str, Any]
    candidates: Mapping[str, Candidate]
    scores: Mapping[str, Sequence[float]]
    decisions: Sequence[Mapping[str, Any]]
    errors: Mapping[str, str]
    winner: Candidate | None
    steps: int

    def best(self, kind: str) -> Candidate | None:
        """The best candidate of a kind: of those that came farthest."""
        own = [one for one in self.candidates.values() if one.kind == kind and one.id in self.scores]
        return max(own, key=lambda one: (len(self.scores[one.id]), self.scores[one.id][-1]), default=None)

    @property
    def leader(self) -> Candidate:
        """The best candidate of the last rung, whatever it is."""
        return self.candidates[self.decisions[-1]["incumbent"]]


Watch = Callable[[str, int, int], None]
"""Called with a line about a run that has ended, its steps, and the steps that are left at most."""


class Search:
    """Runs a search.

    Args:
        spec: What is searched.
        engine: Does the runs.
        watch: Follows it.
        note: Called with a message that a user should see.
    """

    def __init__(self, spec: Spec, engine: Engine, *, watch: Watch, note: Callable[[str], None]) -> None:
        self.spec, self.engine, self._watch, self._note = spec, engine, watch, note
        self._began = time.monotonic()
        self.ledger = Ledger(spec.folder.records_file)
        self._errors: dict[str, str] = {}
        self._expected = self._left = 0
        """Candidates in all, and the steps that are left at most."""

    def go(self) -> Outcome:
        """Do all that is left of it."""
        spec, ledger = self.spec, self.ledger
        own = json.loads(json.dumps(spec.identity()))
        if (before := ledger.peek()) is not None and before.get("settings") != own:
            raise UsageError(
                "this folder holds another search",
                got=str(spec.folder),
                why=_difference(before.get("settings"), own),
                instead="another --output, or remove this one",
            )
        ledger.once("begin", lambda: {"settings": own})
        if ledger.peek() is None:
            self._make_models()
            self._measure()
        found = json.loads(spec.folder.warm_up.read_bytes())
        signals = Signals.of(found["values"], found["weights"])
        warm_up = ledger.once("warm-up", lambda: _described(signals, found))
        proposals = ledger.once("plan", lambda: self._plan(found["seconds"], signals))["proposals"]
        candidates: dict[str, Candidate] = {}
        scores: dict[str, list[float]] = {}
        always = spec.fixed(signals)
        self._expected = len(always) + proposals
        self._add(candidates, scores, len(always), lambda: always)
        for first in range(0, proposals, spec.config.batch):
            count = min(spec.config.batch, proposals - first)

            def proposed(first: int = first, count: int = count) -> list[Candidate]:
                known = [
                    (Proposal(one.place, one.lr), scores[one.id][0])
                    for one in candidates.values()
                    if one.place is not None and one.is_gate and one.id in scores
                ]
                made = propose(count, spec.config, signals.channels, known, first=first)
                return [_proposed(one, signals) for one in made]

            self._add(candidates, scores, count, proposed)
        return self._race(signals, warm_up, candidates, scores)

    def _race(
        self,
        signals: Signals,
        warm_up: Mapping[str, Any],
        candidates: dict[str, Candidate],
        scores: dict[str, list[float]],
    ) -> Outcome:
        spec, rungs = self.spec, self.spec.rungs
        alive, decisions = [*scores], []
        for place in range(len(rungs)):
            if place:
                self._score([candidates[name] for name in alive], scores, place)
                alive = [name for name in alive if len(scores[name]) == place + 1]
            made = partial(self._decide, alive, candidates, place, last=place == len(rungs) - 1)
            decision = self.ledger.once("decision", made, rung=place)
            decisions.append(decision)
            for name in [name for name in alive if name not in decision["kept"]]:
                for seed in spec.config.seeds:  # as large as two students and more each, and never used again
                    shutil.rmtree(self._run(candidates[name], seed).checkpoints, ignore_errors=True)
            alive = [*decision["kept"]]
        gates = [name for name in alive if candidates[name].is_gate]
        self.ledger.close()
        return Outcome(
            spec,
            signals,
            warm_up,
            candidates,
            scores,
            decisions,
            self._errors,
            candidates[gates[0]] if gates else None,
            sum(rungs[len(found) - 1].steps * rungs[len(found) - 1].seeds for found in scores.values()),
        )

    def _decide(
        self, alive: Sequence[str], candidates: Mapping[str, Candidate], place: int, *, last: bool
    ) -> dict[str, Any]:
        config, rung = self.spec.config, self.spec.rungs[place]
        found = {}
        for name in alive:
            rows = read_rows(self._runs(candidates[name], place), rung.steps)
            assert rows is not None, "it has a score at this rung"
            found[name] = rows
        gates = {name for name in alive if candidates[name].is_gate}
        level = config.alpha / len(self.spec.rungs)
        made: Decision = decide(found, gates=gates, keep=1.0 if last else config.keep, level=level)
        return {
            "incumbent": made.incumbent,
            "kept": made.kept,
            "differences": {name: vars(one) for name, one in made.differences.items()},
            "pairing": pairing(found, made.incumbent),
            "score": {name: score(rows) for name, rows in found.items()},
        }

    # ------------------------------------------------------------------ steps of it

    def _make_models(self) -> None:
        """Make the models that the study makes, and nothing else of it."""
        spec = self.spec
        names = {model_name(spec.study, spec.task, role) for role in ROLES}
        _, work = outline(spec.folder, spec.study, spec.threads)
        jobs = {one.name: one.job() for one in work if one.name in names and not one.folder.is_done}
        errors = self._do({name: (job, name, 0) for name, job in jobs.items() if job is not None})
        if errors:
            raise RunError(f"a model could not be made: {next(iter(errors))}", got=next(iter(errors.values())))

    def _measure(self) -> None:
        spec, config = self.spec, self.spec.config
        if spec.folder.warm_up.exists():
            return
        further = {name: 1.0 for name in config.channels if name not in ("h", "u", "gap")}
        probe = Candidate(0, "point", "warm-up", Gate(extra=further), None, None, None)
        seed = stream(config.seed, "tune", "warm-up") >> 1
        settings = dump_config(spec.run_config(probe, seed, RunFolder(spec.folder.warm_up.parent)))
        job: Job = {"do": "warm-up", "config": settings, "channels": list(config.channels)}
        job |= {"batches": config.warm_up, "file": str(spec.folder.warm_up)}
        errors = self._do({"warm-up": (job, "warm-up: signals measured", 0)})
        if errors:
            raise RunError("the signals could not be measured", got=errors["warm-up"])

    def _plan(self, seconds: Mapping[str, float], signals: Signals) -> dict[str, Any]:
        """How many proposals the budget allows. A time becomes a number here, once: a resumed search keeps it."""
        spec, budget, most = self.spec, self.spec.budget, self.spec.config.proposals
        if not signals.channels and most:
            signals.solve(Place(HALF, 1.0, {}))  # raises: says why there is no gate to be found
        spent = time.monotonic() - self._began

        def price(proposals: int) -> float:
            costs = [*spec.costs(proposals), spec.verdict_cost()]
            if budget.steps is not None:
                return sum(cost.steps for cost in costs)
            runs, steps = sum(cost.runs for cost in costs), sum(cost.steps for cost in costs)
            runs += costs[-1].runs  # the verdict's are evaluated on two splits
            work = runs * (seconds["load"] + seconds["evaluate"]) + steps * seconds["step"]
            return spent + work / max(1, spec.workers)

        limit = budget.steps or budget.seconds
        if limit is None:
            return {"proposals": most}
        if price(0) > limit:
            what = f"{price(0):.0f} {'steps' if budget.steps else 's'}"
            raise UsageError(
                "--budget: too small even without proposals",
                got=f"{limit:.0f} {'steps' if budget.steps else 's'}",
                why=f"the fixed candidates and the verdict take up to {what}",
                instead="fewer tune.points, tune.lam, tune.rungs or tune.fresh; or a larger budget",
            )
        allowed = max(count for count in range(most + 1) if price(count) <= limit)
        if allowed < most:
            self._note(f"the budget allows {allowed} of {most} proposals")
        return {"proposals": allowed}

    def _add(
        self,
        candidates: dict[str, Candidate],
        scores: dict[str, list[float]],
        count: int,
        make: Callable[[], list[Candidate]],
    ) -> None:
        """Record so many candidates, and score them at the first rung. `make` gives all of them, before any of them is
        among `candidates`, and is called only where one is not recorded yet."""
        made = None if all(self.ledger.peek(place) is not None for place in range(count)) else make()
        added = []
        for place in range(count):
            number = len(candidates) + place
            record = self.ledger.once(
                "candidate",
                lambda place=place: made[place].as_json(),  # type: ignore[misc,index]
                id=f"c{number:03d}",
            )
            added.append(Candidate.from_json(number, record))
        candidates |= {one.id: one for one in added}
        self._score(added, scores, 0)

    def _score(self, some: Sequence[Candidate], scores: dict[str, list[float]], place: int) -> None:
        """Bring candidates to a rung, and record their scores there: those of all of them, or none."""
        rung, errors = self.spec.rungs[place], {}
        if self.ledger.peek() is None:
            jobs = {}
            for candidate in some:
                for seed, run in self._runs(candidate, place).items():
                    if reached(run, rung.steps) is None:
                        settings = dump_config(self.spec.run_config(candidate, seed, run))
                        job = {"do": "rung", "config": settings, "until": rung.steps}
                        title = f"rung {place + 1}/{len(self.spec.rungs)}: {candidate.label} seed {seed}"
                        jobs[run.path.name] = (job, title, rung.steps - run.last_step())
            self._left = sum(steps for _, _, steps in jobs.values()) + self._later(len(scores), len(some), place)
            failed = self._do(jobs)
            errors = {
                one.id: failed[run.path.name]
                for one in some
                for run in self._runs(one, place).values()
                if run.path.name in failed
            }
            if some and len(errors) == len(some) and (place or not scores):
                raise RunError("no candidate could be trained", got=next(iter(errors.values())))
        for one in some:
            record = self.ledger.once(
                "score",
                lambda: self._scored(one, place, errors.get(one.id)),  # noqa: B023
                candidate=one.id,
                rung=place,
            )
            if record["score"] is None:
                self._errors[one.id] = record["error"]
            else:
                scores.setdefault(one.id, []).append(record["score"])

    def _later(self, scored: int, now: int, place: int) -> int:
        """The most steps after these runs: of further proposals, later rungs and the verdict."""
        spec = self.spec
        count = now if place else self._expected
        rungs, first = spec.costs_from(place, count)[1:], spec.rungs[0]
        further = 0 if place else (count - scored - now) * first.steps * first.seeds
        return further + sum(cost.steps for cost in rungs) + spec.verdict_cost().steps

    def _scored(self, candidate: Candidate, place: int, error: str | None) -> dict[str, Any]:
        rows = None if error else read_rows(self._runs(candidate, place), self.spec.rungs[place].steps)
        if rows is None:
            return {"score": None, "error": error or "its runs are not there"}
        return {"score": score(rows), "seeds": {str(seed): score({seed: values}) for seed, values in rows.items()}}

    def _run(self, candidate: Candidate, seed: int) -> RunFolder:
        return self.spec.folder.trial(f"{candidate.id}-{slug(candidate.label)}-s{seed}")

    def _runs(self, candidate: Candidate, place: int) -> dict[int, RunFolder]:
        seeds = self.spec.config.seeds[: self.spec.rungs[place].seeds]
        return {seed: self._run(candidate, seed) for seed in seeds}

    def _do(self, jobs: Mapping[str, tuple[Job, str, int]]) -> dict[str, str]:
        """Do jobs, as many at once as the engine has slots; returns the errors of those that failed."""
        waiting, errors = [*jobs], dict[str, str]()
        running: set[str] = set()
        while waiting or running:
            self.spec.folder.check_claim()
            while waiting and len(running) < self.engine.slots:
                name = waiting.pop(0)
                self.engine.start(name, jobs[name][0])
                running.add(name)
            for name, outcome in self.engine.wait(0.5):
                running.discard(name)
                _, title, steps = jobs[name]
                self._left -= steps
                if outcome["state"] == "failed":
                    errors[name] = outcome["error"]
                    self._note(f"{title} failed: {outcome['error'].splitlines()[0]}")
                else:
                    self._watch(title, steps, self._left)
        return errors


def _proposed(proposal: Proposal, signals: Signals) -> Candidate:
    gate = signals.solve(proposal.place)
    label = _label(",".join(f"{value:.3g}" for value in gate.abcd), proposal.lr)
    label += "".join(f",{name}={value:.3g}" for name, value in gate.extra.items())
    return Candidate(0, "proposal", label, gate, None, proposal.lr, proposal.place)


def _described(signals: Signals, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "channels": {name: [signals.mean(column), signals.sd(column)] for name, column in signals.values.items()},
        "used": list(signals.channels),
        "tokens": len(signals.weights),
        "metric": found["metric"],
        "score": found["score"],
    }


def _difference(before: Any, now: Any, path: str = "") -> str:
    """The first setting in which two searches differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**now, **before}:
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    return f"its {path or 'settings'} is {json.dumps(before)}, not {json.dumps(now)}"
