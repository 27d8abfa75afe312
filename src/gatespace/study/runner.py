"""Runs a study: whatever is not done yet, in an order that its needs allow, and again after any kill.

The runner keeps nothing in memory that the store does not have. What a run's numbers are depends on its configuration
alone, never on when, where or after how many attempts it was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from pathlib import Path

from gatespace.config import StudyConfig, TrainConfig
from gatespace.files import claim
from gatespace.study.engines import Engine
from gatespace.study.jobs import Job, baseline_job, teach_job, train_job
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
from gatespace.study.points import CANDIDATES, GRID, Point
from gatespace.study.records import Base, RunSpec, State
from gatespace.study.store import Store, progress_of, seconds_of

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
    return Outlook(work, states, _blocked(store, work, states))


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


def run_study(
    config: StudyConfig,
    store: Store,
    engine: Engine,
    *,
    threads: int,
    retry: bool = False,
    watch: Callable[[Outlook], None] = lambda outlook: None,
    note: Callable[[str], None] = lambda text: None,
) -> Outlook:
    """Do all that is left of a study, and say how it stands. The engine is closed.

    Args:
        config: The study file.
        store: Its folder.
        engine: Does the jobs.
        threads: Of each run.
        retry: Try failed runs again.
        watch: Is shown the outlook about twice a second.
        note: Is told what a user should know.
    """
    try:
        with claim(store.folder):
            return _Runner(config, store, engine, threads, watch, note).go(retry)
    finally:
        engine.close()


class _Runner:
    def __init__(
        self,
        config: StudyConfig,
        store: Store,
        engine: Engine,
        threads: int,
        watch: Callable[[Outlook], None],
        note: Callable[[str], None],
    ) -> None:
        self.config, self.store, self.engine, self.threads = config, store, engine, threads
        self.watch, self.note = watch, note
        self.running: set[str] = set()
        self._told: set[str] | None = None
        self.states: dict[str, State] = {}
        self._look()

    def _look(self) -> None:
        """See what is to be done, and how far it is, from the store."""
        self.plan, self.work = outline(self.store, self.config, self.threads)
        self.states = {work.name: "running" if work.name in self.running else self._settled(work) for work in self.work}

    def _settled(self, work: Work) -> State:
        """A folder that somebody else holds counts as open: `claim` will say so."""
        state = self.store.state(work.folder)
        return "waiting" if state == "running" else state

    def go(self, retry: bool) -> Outlook:
        if retry:
            for work in self.work:
                if self.states[work.name] == "failed":
                    self.store.forgive(work.folder)
            self._look()
        while True:
            if self._choose_bases():
                self._look()
            blocked = _blocked(self.store, self.work, self.states)
            for work in self._ready(blocked):
                if len(self.running) >= self.engine.slots:
                    break
                job = work.job()
                if job is not None:
                    self.engine.start(work.name, job)
                    self.running.add(work.name)
                    self.states[work.name] = "running"
            outlook = Outlook(self.work, self.states, blocked)
            if self.running != self._told:
                self._told = set(self.running)
                self.store.now_running(self._told)
            self.watch(outlook)
            if not self.running:
                return outlook
            folders = {work.name: work.folder for work in self.work}
            for name, outcome in self.engine.wait(0.5):
                self.running.discard(name)
                if outcome["state"] == "failed":
                    self.store.fail(folders[name], outcome["error"], outcome["details"])
                    self.note(f"{name} failed: {outcome['error'].splitlines()[0]}")
                self.states[name] = self.store.state(folders[name])

    def _ready(self, blocked: Mapping[str, str]) -> Iterator[Work]:
        done = {name for name, state in self.states.items() if state == "done"}
        for work in self.work:
            if self.states[work.name] == "waiting" and work.name not in blocked and done.issuperset(work.needs):
                yield work

    def _choose_bases(self) -> bool:
        """Choose the bases whose candidates are all done, on validation."""
        chosen = False
        for task in self.plan.open_bases:
            runs = [run for run in self.plan.runs.values() if run.task == task and run.point in CANDIDATES]
            if any(self.states[run.id] not in ("done", "failed") for run in runs):
                continue
            means = self._validation(runs)
            if not means:
                continue
            best = max(GRID, key=lambda point: means.get(point, -1.0))  # the first of equals
            text = f"mean validation accuracy over {len(self.config.seeds)} seeds, of {', '.join(means)}"
            self.store.choose(task, Base(best, text, means))
            self.note(f"{task}: HG points are built on {best}, the best on validation ({means[best]:.4f})")
            chosen = True
        return chosen

    def _validation(self, runs: list[RunSpec]) -> dict[str, float]:
        """Candidate → mean validation accuracy, of those that are done at every seed."""
        means: dict[str, float] = {}
        for point in dict.fromkeys(run.point for run in runs):
            own = [run for run in runs if run.point == point and run.seed in self.config.seeds]
            summaries = [self.store.summary(self.store.run(run.id)) for run in own]
            values = [found["evaluation"]["val"]["metrics"]["accuracy"] for found in summaries if found is not None]
            if len(values) == len(own):
                means[point] = fsum(values) / len(values)
        return means


# ---------------------------------------------------------------------------------------------------- work


def _blocked(store: Store, work: list[Work], states: Mapping[str, State]) -> dict[str, str]:
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
