"""The jobs of a study and their state, read from its folder. Describing them needs no torch; running them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from typing import Any

from gatespace.config import StudyConfig, TeachConfig, TrainConfig, dump_config
from gatespace.runs import RunFolder, State, StudyFolder
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
from gatespace.study.records import RunSpec

Job = dict[str, Any]
"""A piece of work as plain data: what to do, and a complete configuration. Executed by `gatespace.study.jobs`."""

_SAME_FAILURES = 3
"""Give up a task after this many runs with the same error: the rest would fail too."""


@dataclass(frozen=True)
class Work:
    """A job of a study and its output folder."""

    name: str
    title: str
    task: str
    folder: RunFolder
    needs: tuple[str, ...]
    job: Callable[[], Job | None]
    """Builds the job; None while it depends on an undecided base."""
    run: RunSpec | None = None
    steps: int = 0


@dataclass
class Outlook:
    """The state of a study."""

    work: list[Work]
    states: dict[str, State]
    blocked: dict[str, str] = field(default_factory=dict)
    """Job that cannot run → why."""

    def of(self, state: State) -> list[Work]:
        """Jobs in a state."""
        return [work for work in self.work if self.states[work.name] == state]

    def count(self, state: State) -> int:
        """Number of jobs in a state."""
        return len(self.of(state))

    def errors(self) -> dict[str, str]:
        """Failed job → its error."""
        return {work.name: work.folder.error() for work in self.of("failed")}

    def seconds_left(self, workers: int) -> float | None:
        """Estimated seconds for the remaining runs; None before the first is done."""
        took = [work.folder.seconds() for work in self.of("done") if work.run is not None]
        known = [seconds for seconds in took if seconds is not None]
        if not known:
            return None
        left = [1.0 for work in self.of("waiting") if work.run is not None and work.name not in self.blocked]
        left += [1 - work.folder.last_step() / work.steps for work in self.of("running") if work.run is not None]
        return fsum(known) / len(known) * fsum(left) / workers


def read_outlook(folder: StudyFolder, work: list[Work] | None = None) -> Outlook:
    """Read the state of a study from its folder. Callers that poll pass the `work` from `outline`."""
    if work is None:
        _, work = outline(folder, folder.config())
    running = folder.running()
    states = {one.name: one.folder.state for one in work}
    for name, state in states.items():
        if state == "waiting" and name in running:  # on another machine, whose lock is not visible here
            states[name] = "running"
    return Outlook(work, states, blocked(work, states))


def blocked(work: list[Work], states: Mapping[str, State]) -> dict[str, str]:
    """Map each job that waits for something that failed to the reason."""
    found: dict[str, str] = {}
    failing = {task: error for task in {one.task for one in work} if (error := _common_error(work, states, task))}
    for one in work:  # dependencies come first
        if states[one.name] != "waiting":
            continue
        for need in one.needs:
            if states[need] == "failed":
                found[one.name] = f"{need} failed"
            elif need in found:
                found[one.name] = found[need]
        if one.run is not None and one.task in failing:
            found.setdefault(one.name, f"the first runs of {one.task} all failed: {failing[one.task]}")
    return found


def _common_error(work: list[Work], states: Mapping[str, State], task: str) -> str:
    """The error that every run of a task has failed with so far, or "" if there is none."""
    runs = [one for one in work if one.task == task and one.run is not None]
    failed = [one for one in runs if states[one.name] == "failed"]
    if len(failed) < _SAME_FAILURES or any(states[one.name] == "done" for one in runs):
        return ""
    errors = {one.folder.error() for one in failed}
    return errors.pop().splitlines()[0] if len(errors) == 1 else ""


# ---------------------------------------------------------------------------------------------------- work


def outline(folder: StudyFolder, config: StudyConfig, threads: int | None = None) -> tuple[Plan, list[Work]]:
    """The current plan and all its jobs: for each task models and baselines first, then its runs seed by seed.

    A missing model, as in results unpacked from an archive, is a job only if an unfinished job needs it.
    """
    plan = make_plan(config, {task: base.point for task, base in folder.bases().items()})
    work: list[Work] = []
    for task in config.tasks:
        runs = [run for run in plan.runs.values() if run.task == task]
        if runs:
            own = _models_and_baselines(folder, config, task, threads)
            own += [_run(folder, plan, run, threads) for run in _by_seed(runs)]
            needed = {need for one in own if not one.folder.is_done for need in one.needs}
            names = {model_name(config, task, role) for role in ROLES} - needed
            work += [one for one in own if one.name not in names or one.folder.exists]
    return plan, work


def _by_seed(runs: list[RunSpec]) -> list[RunSpec]:
    """Order a task's runs by seed, so that a stopped study has whole seeds. Dependencies, which may be at another seed,
    still come first."""
    seeds = {seed: place for place, seed in enumerate(dict.fromkeys(run.seed for run in runs))}
    places: dict[str, int] = {}
    for run in runs:
        places[run.id] = max([seeds[run.seed], *(places[need] for need in run.needs)])
    return sorted(runs, key=lambda run: places[run.id])


def check_job(folder: StudyFolder, config: StudyConfig) -> Job | None:
    """The job that checks a study before it runs, or None if nothing is left to do."""
    _, work = outline(folder, config)
    if all(one.folder.state == "done" for one in work):
        return None
    done = {one.name for one in work if one.folder.state == "done"}
    made: dict[str, dict[str, str]] = {}
    for task in dict.fromkeys(one.task for one in work):
        names = {role: model_name(config, task, role) for role in ROLES}
        made[task] = {role: str(folder.model(name).model) for role, name in names.items() if name and name in done}
    return {"config": dump_config(config), "made": made}


def _models_and_baselines(folder: StudyFolder, config: StudyConfig, task: str, threads: int | None) -> list[Work]:
    """Jobs that train a task's models, and that evaluate student and teacher before distillation."""
    common = train_config(config, task, config.seeds[0], {}, models=made_models(folder, config, task), threads=threads)
    work: list[Work] = []
    for role in ROLES:
        needs: tuple[str, ...] = ()
        if (name := model_name(config, task, role)) is not None:
            place = folder.model(name)
            settings = teach_config(config, task, role, output=place.path, threads=threads)
            assert settings is not None
            title, job = f"teach the {role} of {task}", partial(_job, "teach", settings)
            work.append(Work(name, title, task, place, (), job, steps=settings.steps))
            needs = (name,)
        name = baseline_name(config, task, role)
        place = folder.baseline(name)
        title, job = f"evaluate the {role} of {task}", partial(_job, "baseline", common, role=role, folder=str(place))
        work.append(Work(name, title, task, place, needs, job))
    return work


def made_models(folder: StudyFolder, config: StudyConfig, task: str) -> dict[str, str]:
    """Role → folder of a model that the study trains for a task."""
    names = {role: model_name(config, task, role) for role in ROLES}
    return {role: str(folder.model(name).model) for role, name in names.items() if name is not None}


def _run(folder: StudyFolder, plan: Plan, run: RunSpec, threads: int | None) -> Work:
    config, point, place = plan.config, plan.points[run.task, run.point], folder.run(run.id)

    def whole(lam: float | None) -> TrainConfig:
        return train_config(
            config,
            run.task,
            run.seed,
            objective(point, lam=lam),
            rollout=point.rollout,
            models=made_models(folder, config, run.task),
            cache=str(folder.scores),
            output=place.path,
            threads=threads,
        )

    def job() -> Job | None:
        if point.match is not None:
            return _job("train", whole(_twin_lam(folder, config, run, point.match)))
        if point.gate is None and point.method is None:
            return None  # base not chosen yet
        return _job("train", whole(None))

    models = (name for role in ROLES if (name := model_name(config, run.task, role)) is not None)
    needs = (*models, *(baseline_name(config, run.task, role) for role in ROLES), *run.needs)
    title = f"{run.task} {run.point} seed {run.seed}"
    return Work(run.id, title, run.task, place, needs, job, run, whole(0.5).steps)


def _twin_lam(folder: StudyFolder, config: StudyConfig, run: RunSpec, match: str) -> float:
    """Mean λ of the dynamic run that a twin is matched to."""
    found = folder.run(run.needs[0]).summary()
    assert found is not None, "a twin waits for its dynamic run"
    lam = float(found["run"]["lam_mean" if match == "lam" else "lam_rkl_mean"])
    decimals = None if config.axes.isolation is None else config.axes.isolation.decimals
    return lam if decimals is None else round(lam, decimals)


def _job(do: str, config: TeachConfig | TrainConfig, **more: str) -> Job:
    return {"do": do, "config": dump_config(config), **more}
