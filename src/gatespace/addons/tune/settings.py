"""The `tune` section of a study file or of a file for `gatespace train`, and budgets."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AllowInfNan, Field, Strict, model_validator

from gatespace.config import StudyConfig, TrainConfig, load_config, parse_config
from gatespace.config.base import Count, CountOrZero, Fault, Name, Section, Seed
from gatespace.config.sections import Positive
from gatespace.config.study import Labels, Seeds
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate

_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
HALF = 0.5
"""The constant λ that every gate must beat."""
EDGES = (0.02, 0.98)
"""Constants that always compete, since the best one may be near 0 or 1."""
Inner = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0, lt=1)]


def _rising(values: tuple[float, ...]) -> tuple[float, ...]:
    if any(low >= high for low, high in pairwise(values)):
        raise ValueError("must be a list of rising numbers")
    return values


class Rung(Section):
    """A rung of successive halving."""

    steps: Count
    """Total steps of a candidate when it is judged."""

    seeds: Count
    """Number of seeds."""


class TuneConfig(Section):
    """How `gatespace tune` searches, and what its verdict needs."""

    task: Name | None = None
    """The task of the study whose gate is searched for; null: its only one."""

    channels: Annotated[Labels, Field(min_length=1)] = ("h", "u", "gap")
    """Signals that a gate may depend on: h, u, gap, and any others by name."""

    lam: Annotated[tuple[Inner, ...], Field(min_length=1), AfterValidator(_rising)] = (0.15, 0.3, 0.5, 0.7, 0.85)
    """Values of the mean gate, rising. Each is also a candidate as a constant."""

    spread: Annotated[tuple[Positive, Positive], AfterValidator(_rising)] = (0.5, 4.0)
    """Minimum and maximum standard deviation of the gate's logit over the tokens of the warm-up."""

    lr: Annotated[tuple[Positive, ...], AfterValidator(_rising)] = ()
    """Learning rates to also search over, rising; constants, points and methods are tried at each. []: the study's."""

    points: tuple[Name, ...] = ("G1", "G2", "G3", "G4", "G5")
    """Points of the family that are candidates in addition to the proposals."""

    sampler: Literal["tpe", "gp"] = "tpe"
    """Optuna's sampler: tree-structured Parzen estimators, or a Gaussian process."""

    proposals: CountOrZero = 24
    """Maximum number of gates that Optuna proposes; a budget may allow fewer."""

    batch: Count = 8
    """Proposals per round. All runs of a round are done, on any number of workers, before the next is proposed."""

    rungs: tuple[Rung, ...] = ()
    """Rungs, e.g. [{steps: 10, seeds: 1}, {steps: 30, seeds: 2}, {steps: 60, seeds: 4}]. []: a sixth, a half and all of
    the study's steps, at one, two and all `seeds`. The last rung's steps are those of the verdict."""

    keep: Inner = 0.3
    """The share of candidates that advances from a rung, rounded up; fewer if some are significantly worse."""

    alpha: Inner = 0.05
    """Level of the search's paired tests, for one candidate over all rungs. That of the verdict is .05."""

    seeds: Seeds = (1, 2, 3, 4)
    """Seeds of the search."""

    fresh: Seeds = (101, 102, 103, 104, 105, 106)
    """Seeds of the verdict, which have no part in the choice. More of them may be added later."""

    margin: Positive = 0.01
    """The smallest difference worth having, in nats of log-loss or in the score of a text task: a gate whose gain is
    shown to be smaller is no better."""

    warm_up: Count = 2
    """Batches of prompts whose tokens the signals are measured at, before any training."""

    seed: Seed = 0
    """Seed of the proposals and the warm-up."""

    @model_validator(mode="after")
    def _is_consistent(self) -> TuneConfig:
        if again := sorted({*self.seeds} & {*self.fresh}):
            raise Fault("fresh", f"{again} are seeds of the search and not fresh")
        if len(self.fresh) < 2:
            raise Fault("fresh", "a paired difference has an error from two seeds on", instead="at least 6")
        for before, after in pairwise(self.rungs):
            if after.steps <= before.steps or after.seeds < before.seeds:
                raise Fault("rungs", "must have rising steps, and never fewer seeds than before")
        if self.rungs and self.rungs[-1].seeds > len(self.seeds):
            raise Fault("rungs", f"has {self.rungs[-1].seeds} seeds, and `seeds` names {len(self.seeds)}")
        return self

    def ladder(self, steps: int) -> tuple[Rung, ...]:
        """The rungs of the file, or defaults for runs of `steps` steps."""
        if self.rungs:
            return self.rungs
        wanted = [(max(1, steps // 6), 1), (max(1, steps // 2), min(2, len(self.seeds))), (steps, len(self.seeds))]
        return tuple(Rung(steps=done, seeds=seeds) for done, seeds in dict(wanted).items())


Budget = int | float
"""Limit for a search and its verdict: training steps (int), or seconds of wall time (float)."""


def parse_budget(text: str) -> Budget:
    """Parse a budget.

    Examples:
        >>> parse_budget("2h"), parse_budget("90 min"), parse_budget("5000 steps")
        (7200.0, 5400.0, 5000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)|(\d+)\s*steps?", text.strip())
    found = 0 if match is None else int(match[3]) if match[3] else float(match[1]) * _UNITS[match[2]]
    if not found:
        raise UsageError("--budget: must be a time or a number of steps", got=text, instead="2h, 30min, 5000steps")
    return found


# ---------------------------------------------------------------------------------------------------- a train file


class _TrainFile(TrainConfig):
    """A file for `gatespace train` with a `tune` section."""

    tune: TuneConfig = TuneConfig()
    """Settings of the search."""


def study_of_train_file(path: Path, sets: list[str]) -> StudyConfig:
    """Build a study from a file for `gatespace train`; the file's own gate or method is among the candidates."""
    config = load_config(_TrainFile, path, sets)
    given: dict[str, Any] = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    plugins, tune, objective = given.pop("plugins", ()), given.pop("tune", {}), given.pop("objective", {})
    train = {key: value for key, value in given.items() if key not in ("task", "seed", "output")}
    train["objective"] = {k: v for k, v in objective.items() if k not in ("method", "gate", "params", "shuffle")}
    own, published = config.objective, []
    if own.method in ("gated", "static"):
        gate = own.gate if own.method == "gated" else f"static:{own.params.get('lam', HALF)}"
        gate = gate if isinstance(gate, str) else str(Gate.parse(gate))
        points = tune.get("points", list(TuneConfig().points))
        if gate not in points and ("gate" in objective or own.method == "static"):
            tune = {**tune, "points": [*points, gate]}
    else:
        published = [{"method": own.method, "params": dict(own.params)}]
    name = "".join(char for char in path.stem if char.isalnum() or char in "_.") or "task"
    task = config.task.model_dump(mode="json", by_alias=True, exclude_unset=True)
    settings = {
        "name": path.stem,
        "tasks": {name: {"task": task}},
        "train": train,
        "axes": {"published": published},
        "plugins": list(plugins),
        "tune": tune,
    }
    return parse_config(StudyConfig, settings, where=str(path))
