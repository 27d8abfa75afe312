"""Run a study: all unfinished jobs, in dependency order; resumes after a kill.

The runner has no state that is not also in the study's folder. A run's numbers depend only on its configuration, never
on when, where or after how many attempts it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import fsum

from gatespace.config import StudyConfig
from gatespace.evaluation.metrics import metric_of
from gatespace.runs import Base, State, StudyFolder
from gatespace.study.engines import Engine
from gatespace.study.outlook import Outlook, Work, blocked, outline
from gatespace.study.points import CANDIDATES, GRID
from gatespace.study.records import RunSpec

__all__ = ["run_study"]


def run_study(
    config: StudyConfig,
    folder: StudyFolder,
    engine: Engine,
    *,
    threads: int,
    retry: bool = False,
    watch: Callable[[Outlook], None] = lambda outlook: None,
    note: Callable[[str], None] = lambda text: None,
) -> Outlook:
    """Run the unfinished jobs of a study, close the engine, and return the study's state.

    Args:
        config: The study file.
        folder: Its folder.
        engine: Runs the jobs.
        threads: Threads per run.
        retry: Retry failed runs.
        watch: Called with the outlook about twice a second.
        note: Called with messages for the user.
    """
    try:
        with folder.claim():
            return _Runner(config, folder, engine, threads, note).go(retry, watch)
    finally:
        engine.close()


class _Runner:
    def __init__(
        self, config: StudyConfig, folder: StudyFolder, engine: Engine, threads: int, note: Callable[[str], None]
    ) -> None:
        self.config, self.folder, self.engine, self.threads, self.note = config, folder, engine, threads, note
        self.running: set[str] = set()
        self._refresh()

    def _refresh(self) -> None:
        """Reload the plan, its jobs and their states from the folder."""
        self.plan, self.work = outline(self.folder, self.config, self.threads)
        self.states = {work.name: self._state(work) for work in self.work}

    def _state(self, work: Work) -> State:
        """A folder locked by another process counts as waiting: `claim` will raise."""
        if work.name in self.running:
            return "running"
        state = work.folder.state
        return "waiting" if state == "running" else state

    def go(self, retry: bool, watch: Callable[[Outlook], None]) -> Outlook:
        if retry:
            for work in self.work:
                work.folder.clear_failure()
            self._refresh()
        written: set[str] | None = None
        while True:
            self.folder.check_claim()
            if self._choose_bases():
                self._refresh()
            hopeless = blocked(self.work, self.states)
            for work in self._ready(hopeless):
                if len(self.running) >= self.engine.slots:
                    break
                job = work.job()
                if job is not None:
                    self.engine.start(work.name, job)
                    self.running.add(work.name)
                    self.states[work.name] = "running"
            if self.running != written:
                written = set(self.running)
                self.folder.now_running(written)
            outlook = Outlook(self.work, self.states, hopeless)
            watch(outlook)
            if not self.running:
                return outlook
            self._wait()

    def _wait(self) -> None:
        """Wait for jobs to end and record failures."""
        work_of = {work.name: work for work in self.work}
        for name, outcome in self.engine.wait(0.5):
            self.running.discard(name)
            if outcome["state"] == "failed":
                self.folder.check_claim()
                work_of[name].folder.fail(outcome["error"], outcome["details"])
                self.note(f"{name} failed: {outcome['error'].splitlines()[0]}")
            self.states[name] = work_of[name].folder.state

    def _ready(self, hopeless: Mapping[str, str]) -> Iterator[Work]:
        done = {name for name, state in self.states.items() if state == "done"}
        for work in self.work:
            if self.states[work.name] == "waiting" and work.name not in hopeless and done.issuperset(work.needs):
                yield work

    def _choose_bases(self) -> bool:
        """Choose bases on validation once all their candidates have ended."""
        chosen = False
        for task in self.plan.open_bases:
            runs = [run for run in self.plan.runs.values() if run.task == task and run.point in CANDIDATES]
            if any(self.states[run.id] not in ("done", "failed") for run in runs):
                continue
            means = self._validation(runs)
            if not means:
                continue
            best = max(GRID, key=lambda point: means.get(point, -1.0))  # ties: the first
            text = f"mean validation accuracy over {len(self.config.seeds)} seeds, of {', '.join(means)}"
            self.folder.choose(task, Base(best, text, means))
            self.note(f"{task}: HG points are built on {best}, the best on validation ({means[best]:.4f})")
            chosen = True
        return chosen

    def _validation(self, runs: list[RunSpec]) -> dict[str, float]:
        """Candidate → mean validation accuracy, for candidates finished at every seed."""
        means: dict[str, float] = {}
        for point in dict.fromkeys(run.point for run in runs):
            own = [run for run in runs if run.point == point and run.seed in self.config.seeds]
            summaries = [self.folder.run(run.id).summary() for run in own]
            values = [metric_of(found["evaluation"]["val"]["metrics"])[1] for found in summaries if found is not None]
            if len(values) == len(own):
                means[point] = fsum(values) / len(values)
        return means
