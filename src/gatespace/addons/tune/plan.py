"""Parts of a search: candidates, the configuration of their runs, and their maximum cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from gatespace.addons.tune.folder import Record, TuneFolder
from gatespace.addons.tune.gates import Place, Signals
from gatespace.addons.tune.settings import EDGES, HALF, Budget, Rung, TuneConfig
from gatespace.config import StudyConfig, TrainConfig, dump_config, in_setting, parse_config
from gatespace.config.study import AxesConfig, PublishedConfig
from gatespace.errors import UsageError, unknown_name
from gatespace.gating.coefficients import Gate
from gatespace.plugins import plugins_digest
from gatespace.runs import RunFolder
from gatespace.study.outlook import made_models
from gatespace.study.plan import train_config


@dataclass(frozen=True)
class Candidate:
    """A candidate of the search, as recorded.

    Args:
        id: c000, c001, …
        kind: static (a constant λ), point (a gate that the file names), proposal or published.
        label: Its name in tables.
        gate: As `Gate.parse` reads it; None for a published method.
        method: Settings of the published method, see `PublishedConfig`.
        lr: Its learning rate; None: the study's.
        place: The `Place` of its gate as a mapping; None if it has none, or the warm-up did not measure its signals.
    """

    id: str
    kind: str
    label: str
    gate: str | None = None
    method: Mapping[str, Any] | None = None
    lr: float | None = None
    place: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, record: Record) -> Candidate:
        """Build from a record, whose keys have lost their order."""
        known = {field.name: record[field.name] for field in fields(cls)}
        if known["place"] is not None:
            known["place"] = Place(**known["place"])._asdict()
        if known["method"] is not None:
            known["method"] = dump_config(parse_config(PublishedConfig, known["method"]))
        return cls(**known)

    @classmethod
    def gated(cls, number: int, kind: str, gate: Gate, lr: float | None, signals: Signals | None) -> Candidate:
        """A candidate with this gate."""
        place = None if signals is None else signals.place(gate)
        known = None if place is None else place._asdict()
        return cls(f"c{number:03d}", kind, with_lr(gate.label, lr), str(gate), None, lr, known)

    @property
    def complexity(self) -> tuple[int, int]:
        """Constants come before published methods and these before gates, which come by their number of channels."""
        if not self.is_gate:
            return int(self.kind == "published"), 0
        gate = Gate.parse(str(self.gate))
        return 2, sum(map(bool, (gate.a, gate.b, gate.d, *gate.extra.values())))

    @property
    def is_gate(self) -> bool:
        """Whether its λ depends on the token."""
        return self.kind in ("point", "proposal")

    @property
    def objective(self) -> dict[str, Any]:
        """Its `objective` settings."""
        if self.method is not None:
            return {"method": self.method["method"], "params": self.method["params"]}
        return {"method": "gated", "gate": self.gate}


CONSTANTS = 5
"""Constants trained to the last rung in addition to those that come so far by their scores, at most."""
LEAST_CONSTANT = 0.004
"""The grid of constants is not extended from a constant nearer to 0 or 1 than this."""


class Cost(NamedTuple):
    """Maximum cost of a rung or the verdict: candidates, runs started or resumed, and training steps."""

    candidates: int
    runs: int
    steps: int


def steps_of(costs: Sequence[Cost]) -> int:
    """Training steps in all."""
    return sum(cost.steps for cost in costs)


@dataclass(frozen=True)
class Spec:
    """Specification of a search.

    Args:
        study: Models, training and published methods of the study file, without the rest of its plan.
        task: The task to search on.
        config: The `tune` section.
        folder: The folder of the search.
        threads: Threads per run.
        workers: Runs at once.
        budget: For search and verdict together; None: no limit.
    """

    study: StudyConfig
    task: str
    config: TuneConfig
    folder: TuneFolder
    threads: int | None = None
    workers: int = 1
    budget: Budget | None = None

    @classmethod
    def of(cls, study: StudyConfig, config: TuneConfig, folder: TuneFolder, **more: Any) -> Spec:
        """Build and validate the search on one task of a study."""
        task = config.task or next(iter(study.tasks))
        if task not in study.tasks:
            raise unknown_name("task (tune.task)", task, study.tasks)
        if config.task is None and len(study.tasks) > 1:
            known = ", ".join(study.tasks)
            raise UsageError("tune.task: a gate is searched for on one task", instead=f"one of {known}")
        own = {
            "name": f"{study.name}-tune",
            "tasks": {task: study.tasks[task].model_copy(update={"sweep": True, "points": ("G5",)})},
            "points": ("G5",),
            "axes": AxesConfig(isolation=None, static=(), published=study.axes.published),
            "seeds": (config.seeds[0],),
            "selection_seed": None,
            "replication": None,
        }
        spec = cls(study.model_copy(update=own), task, config, folder, **more)
        spec._check()
        return spec

    def _check(self) -> None:
        """Raise if a candidate cannot be trained, or candidates could not be compared."""
        from gatespace.gating import signals
        from gatespace.gating.configured import build_objective

        with in_setting("tune.channels"):
            for channel in self.config.channels:
                signals.get(channel)
        same_steps = "candidates are compared after the same steps"
        if self.base.evaluation.patience is not None:
            raise UsageError(f"evaluation.patience: {same_steps}", instead="evaluation.patience: null")
        if self.base.checkpoint.select != "last":
            raise UsageError(f"checkpoint.select: {same_steps}", instead="checkpoint.select: last")
        for candidate in self.fixed():
            own = self.run_config(candidate, self.config.seeds[0])
            with in_setting(candidate.label):
                build_objective(own.objective, run=own)

    @cached_property
    def base(self) -> TrainConfig:
        """The study's training, with an arbitrary objective."""
        return train_config(self.study, self.task, self.config.seeds[0], {})

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """From the file, or from the study's steps."""
        return self.config.ladder(self.base.steps)

    @property
    def is_text(self) -> bool:
        """Whether responses are free text, judged by a score, rather than labels, judged by log-loss."""
        return self.base.task.text is not None

    def run_config(self, candidate: Candidate, seed: int, output: RunFolder | None = None) -> TrainConfig:
        """The complete configuration of a candidate's run, of which every rung is a part."""
        whole = train_config(
            self.study,
            self.task,
            seed,
            candidate.objective,
            rollout=None if candidate.method is None else candidate.method["rollout"],
            models=made_models(self.folder, self.study, self.task),
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

    def fixed(self, signals: Signals | None = None) -> list[Candidate]:
        """Candidates that are always included: constants, points of the family, published methods."""
        gates = {Gate.static(lam): "static" for lam in sorted({*self.config.lam, HALF, *EDGES})}
        for text in self.config.points:
            with in_setting("tune.points"):
                gate = Gate.parse(text)
            gates.setdefault(gate, "static" if gate.is_static else "point")
        found: list[Candidate] = []
        for lr in self.config.lr or (None,):
            for gate, kind in gates.items():
                found.append(Candidate.gated(len(found), kind, gate, lr, signals))
            for method in self.study.axes.published:
                label = with_lr(method.point, lr)
                found.append(Candidate(f"c{len(found):03d}", "published", label, None, dump_config(method), lr))
        return found

    def costs(self, count: int) -> list[Cost]:
        """Maximum cost of every rung, with `count` candidates at the first."""
        wholes = [0, *(rung.steps * rung.seeds for rung in self.rungs)]
        found = []
        for rung, (done, whole) in zip(self.rungs, pairwise(wholes), strict=True):
            more = CONSTANTS * (rung == self.rungs[-1])
            found.append(Cost(count + more, (count + more) * rung.seeds, count * (whole - done) + more * whole))
            count = min(count, math.ceil(self.config.keep * count) + 1)  # plus the best gate
        return found

    def verdict_cost(self) -> Cost:
        """Maximum cost of the verdict: winner, two twins, λ = 0.5, best constant, best published method."""
        arms = 5 + bool(self.study.axes.published)
        runs = arms * len(self.config.fresh)
        return Cost(arms, runs, runs * self.rungs[-1].steps)

    def affordable(self, price: Callable[[Sequence[Cost]], float] = steps_of) -> int:
        """Number of proposals that the budget allows, by the price of all rungs and the verdict."""
        fixed, most, budget = len(self.fixed()), self.config.proposals, self.budget
        if budget is None:
            return most
        prices = [price([*self.costs(fixed + count), self.verdict_cost()]) for count in range(most + 1)]
        if prices[0] > budget:
            unit = "steps" if isinstance(budget, int) else "s"
            raise UsageError(
                "--budget: too small even without proposals",
                got=f"{budget:.0f} {unit}",
                why=f"the fixed candidates and the verdict take up to {prices[0]:.0f} {unit}",
                instead="fewer tune.points, tune.lam, tune.rungs or tune.fresh; or a larger budget",
            )
        return max(count for count, one in enumerate(prices) if one <= budget)

    def grid_steps(self, candidates: int) -> int:
        """Training steps of a full grid: every candidate at all steps and seeds of the last rung."""
        return candidates * self.rungs[-1].steps * self.rungs[-1].seeds

    def identity(self) -> dict[str, Any]:
        """Settings that must not change when a search is resumed."""
        study, tune = dump_config(self.study), dump_config(self.config)
        for key in ("workers", "resources", "output", "keep_models", "tune", "plugins", "about"):
            del study[key]
        del tune["fresh"]  # more of them may be added
        plugins = plugins_digest(self.study.plugins) if self.study.plugins else None
        found: dict[str, Any] = json.loads(json.dumps({"study": study, "plugins": plugins, "tune": tune}))
        return found


def with_lr(label: str, lr: float | None) -> str:
    """A label with the learning rate, if that is searched over."""
    return label if lr is None else f"{label} lr={lr:g}"
