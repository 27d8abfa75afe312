"""Runs a study: whatever is not done yet, in an order that its needs allow, and again after any kill.

The runner keeps nothing in memory that the store does not have. What a run's numbers are depends on its configuration
alone, never on when, where or after how many attempts it was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import fsum

from gatespace.config import StudyConfig
from gatespace.files import claim
from gatespace.study.engines import Engine
from gatespace.study.outlook import Outlook, Work, blocked, look, outline
from gatespace.study.points import CANDIDATES, GRID
from gatespace.study.records import Base, RunSpec, State
from gatespace.study.store import Store

__all__ = ["Outlook", "Work", "look", "outline", "run_study"]


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
            hopeless = blocked(self.store, self.work, self.states)
            for work in self._ready(hopeless):
                if len(self.running) >= self.engine.slots:
                    break
                job = work.job()
                if job is not None:
                    self.engine.start(work.name, job)
                    self.running.add(work.name)
                    self.states[work.name] = "running"
            outlook = Outlook(self.work, self.states, hopeless)
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
