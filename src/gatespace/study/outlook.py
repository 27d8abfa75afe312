"""What a study consists of and how it stands, seen from its folder. To describe work needs no torch; to do it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any

from gatespace.config import StudyConfig, TeachConfig, TrainConfig, dump_config
from gatespace.study.plan import (
    ROLES,
    Plan,
    baseline_name,
    make_plan,
    model_name,
    objective,
    teach_config,
    train_config,
)
from gatespace.study.points import Point
from gatespace.study.records import RunSpec, State
from gatespace.study.store import Store, progress_of, seconds_of

Job = dict[str, Any]
"""A piece of work as plain data: what to do, and a whole configuration. `gatespace.study.jobs` does it."""

_SAME_FAILURES = 3
"""A task whose first runs all fail alike is left: the rest would fail alike too."""


@dataclass(frozen=True)
class Work:
    """A piece of work and the folder that it leaves behind."""

    name: str
    title: str
    task: str
    folder: Path
    needs: tuple[str, ...]
    job: Callable[[], Job | None]
    """What to do; None where that hangs on something still open."""
    run: RunSpec | None = None
    steps: int = 0


@dataclass
class Outlook:
    """How a study stands."""

    work: list[Work]
    states: dict[str, State]
    blocked: dict[str, str] = field(default_factory=dict)
    """Work that cannot be done → why."""

    def count(self, state: State) -> int:
        """Pieces of work in a state."""
        return sum(1 for other in self.states.values() if other == state)

    def seconds_left(self, workers: int) -> float | None:
        """How long the rest will take by what was done so far; None where nothing was."""
        runs = [work for work in self.work if work.run is not None]
        took = [seconds_of(work.folder) for work in runs if self.states[work.name] == "done"]
        known = [seconds for seconds in took if seconds is not None]
        if not known:
            return None
        each = fsum(known) / len(known)
        left = fsum(
            each * (1 - progress_of(work.folder) / work.steps if self.states[work.name] == "running" else 1)
            for work in runs
            if self.states[work.name] in ("running", "waiting") and work.name not in self.blocked
        )
        return left / workers


def look(store: Store, work: list[Work] | None = None) -> Outlook:
    """How a study stands, seen from outside. `work` is that of `outline`, for those who look often."""
    if work is None:
        _, work = outline(store, store.config())
    running = store.running()
    states = {one.name: store.state(one.folder) for one in work}
    for name, state in states.items():
        if state == "waiting" and name in running:  # on another machine, whose hold on a folder does not show here
            states[name] = "running"
    return Outlook(work, states, blocked(store, work, states))


def outline(store: Store, config: StudyConfig, threads: int | None = None) -> tuple[Plan, list[Work]]:
    """The plan as it stands and all its pieces of work, models and baselines first."""
    plan = make_plan(config, {task: base.point for task, base in store.bases().items()})
    work: list[Work] = []
    for task in config.tasks:
        runs = [run for run in plan.runs.values() if run.task == task]
        if runs:
            work += _prepare(store, config, task, threads)
            work += [_run(store, plan, run, threads) for run in runs]
    return plan, work


# ---------------------------------------------------------------------------------------------------- work


def blocked(store: Store, work: list[Work], states: Mapping[str, State]) -> dict[str, str]:
    """Work that waits for something that failed."""
    blocked: dict[str, str] = {}
    hopeless = {task: error for task in {one.task for one in work} if (error := _hopeless(store, work, states, task))}
    for one in work:  # needs stand before what needs them
        if states[one.name] != "waiting":
            continue
        for need in one.needs:
            if states[need] == "failed":
                blocked[one.name] = f"{need} failed"
            elif need in blocked:
                blocked[one.name] = blocked[need]
        if one.run is not None and one.task in hopeless:
            blocked.setdefault(one.name, f"the first runs of {one.task} all failed: {hopeless[one.task]}")
    return blocked


def _hopeless(store: Store, work: list[Work], states: Mapping[str, State], task: str) -> str:
    runs = [one for one in work if one.task == task and one.run is not None]
    failed = [one for one in runs if states[one.name] == "failed"]
    if len(failed) < _SAME_FAILURES or any(states[one.name] == "done" for one in runs):
        return ""
    errors = {store.error(one.folder) for one in failed}
    return errors.pop().splitlines()[0] if len(errors) == 1 else ""


def _prepare(store: Store, config: StudyConfig, task: str, threads: int | None) -> list[Work]:
    """Models to be made for a task, and the evaluation of both models before anything is distilled."""
    common = train_config(config, task, config.seeds[0], {}, models=_models(store, config, task), threads=threads)
    work: list[Work] = []
    for role in ROLES:
        needs: tuple[str, ...] = ()
        if (name := model_name(config, task, role)) is not None:
            setting = teach_config(config, task, role, output=store.model(name), threads=threads)
            assert setting is not None
            title = f"teach the {role} of {task}"
            work.append(
                Work(name, title, task, store.model(name), (), partial(teach_job, setting), steps=setting.steps)
            )
            needs = (name,)
        name = baseline_name(config, task, role)
        job = partial(baseline_job, common, role, store.baseline(name))
        work.append(Work(name, f"evaluate the {role} of {task}", task, store.baseline(name), needs, job))
    return work


def _models(store: Store, config: StudyConfig, task: str) -> dict[str, str]:
    names = {role: model_name(config, task, role) for role in ROLES}
    return {role: str(store.model(name) / "model") for role, name in names.items() if name is not None}


def _run(store: Store, plan: Plan, run: RunSpec, threads: int | None) -> Work:
    config, point = plan.config, plan.points[run.task, run.point]

    def whole(lam: float | None) -> TrainConfig:
        return train_config(
            config,
            run.task,
            run.seed,
            objective(point, lam=lam),
            models=_models(store, config, run.task),
            cache=str(store.scores),
            output=store.run(run.id),
            threads=threads,
        )

    def job() -> Job | None:
        if point.kind == "twin":
            return train_job(whole(_twin_lam(store, plan, run, point)))
        if point.gate is None and point.method is None:
            return None  # its base is not chosen yet
        return train_job(whole(None))

    needs = (*(baseline_name(config, run.task, role) for role in ROLES), *run.needs)
    title = f"{run.task} {run.point} seed {run.seed}"
    return Work(run.id, title, run.task, store.run(run.id), needs, job, run, whole(0.5).steps)


def _twin_lam(store: Store, plan: Plan, run: RunSpec, point: Point) -> float:
    """The constant that a dynamic run had on average."""
    found = store.summary(store.run(run.needs[0]))
    assert found is not None, "a twin waits for its dynamic run"
    lam = float(found["run"]["lam_mean" if point.match == "lam" else "lam_rkl_mean"])
    isolation = plan.config.axes.isolation
    decimals = None if isolation is None else isolation.decimals
    return lam if decimals is None else round(lam, decimals)


# ---------------------------------------------------------------------------------------------------- jobs


def teach_job(config: TeachConfig) -> Job:
    """Make a model."""
    return {"do": "teach", "config": dump_config(config)}


def baseline_job(config: TrainConfig, role: str, folder: Path) -> Job:
    """Evaluate the student or the teacher of `config` as it is."""
    return {"do": "baseline", "config": dump_config(config), "role": role, "folder": str(folder)}


def train_job(config: TrainConfig) -> Job:
    """Train a student at a point."""
    return {"do": "train", "config": dump_config(config)}
