"""The course of a run: steps, records, evaluations, checkpoints; taken up again wherever it was killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gatespace.addons.parallel.ranks import ALONE, Ranks
from gatespace.addons.publish.card import write_card
from gatespace.addons.trackers import Trackers, open_trackers
from gatespace.config import CheckpointConfig, EvaluationConfig
from gatespace.errors import GatespaceError, RunError
from gatespace.evaluation import Evaluation, write
from gatespace.files import JsonLines, atomic_write
from gatespace.teacher.scores import TeacherAwayError
from gatespace.training import checkpoint
from gatespace.training.clock import Clock
from gatespace.training.optimizer import Optimizer

DONE = "done"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"


class Progress(Protocol):
    """Who is told how a run goes on."""

    def note(self, text: str) -> None:
        """Something that a user should know."""

    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """A step is done."""

    def evaluating(self, split: str, done: int, total: int) -> None:
        """An evaluation is under way."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation is done."""


class Silent:
    """Progress that nobody looks at."""

    def note(self, text: str) -> None: ...
    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None: ...
    def evaluating(self, split: str, done: int, total: int) -> None: ...
    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...


class Log(Protocol):
    """Where records go; see `JsonLines`."""

    def append(self, record: Mapping[str, Any]) -> None: ...
    def truncate_after(self, step: int, *, complete: bool = False) -> int: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class _Nowhere:
    """The log of a process that writes nothing."""

    def append(self, record: Mapping[str, Any]) -> None: ...
    def truncate_after(self, step: int, *, complete: bool = False) -> int:
        return 0

    def sync(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class Outcome:
    """What a step leaves behind."""

    record: dict[str, Any]
    """A function of the run's settings alone: the line in metrics.jsonl."""
    timing: dict[str, Any]
    """Whatever may differ between two runs with the same numbers: the line in timings.jsonl."""
    tokens: list[dict[str, Any]] = field(default_factory=list)
    """Lines of tokens.jsonl."""


@dataclass
class Course:
    """Everything that a loop needs of the run it drives."""

    folder: Path
    steps: int
    step: Callable[[int, Clock], Outcome]
    """Do the step with this number, counted from 0."""
    optimizer: Optimizer
    state: Callable[[], dict[str, Any]]
    """What a checkpoint holds beside tensors."""
    restore: Callable[[Mapping[str, Any]], None]
    evaluate: Callable[[str, Callable[[int, int], None]], Evaluation]
    """Evaluate on a split."""
    finish: Callable[[], dict[str, Any]]
    """Write the trained model where it is wanted; what it returns enters the summary."""
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    trackers: tuple[str, ...]
    settings: Mapping[str, Any]
    progress: Progress
    ranks: Ranks = ALONE
    """The processes that do the run together; the first one writes."""


def run(course: Course) -> dict[str, Any]:
    """Do what is left of a run, and return its summary."""
    folder, progress, ranks = course.folder, course.progress, course.ranks
    checkpoints = folder / CHECKPOINTS
    start = _restore(course, checkpoints)
    logs: dict[str, Log] = {}
    for name in ("metrics", "tokens", "evaluations", "timings"):
        logs[name] = JsonLines(folder / f"{name}.jsonl") if ranks.first else _Nowhere()
    with ranks.together():
        for name, log in logs.items():
            log.truncate_after(start if start else -1, complete=name == "metrics")
    names = course.trackers if ranks.first else ()
    with open_trackers(names, folder, course.settings, step=start, report=progress.note) as trackers:
        if start == 0 and course.evaluation.every:
            _look(course, logs["evaluations"], trackers, 0)
        for number in range(start, course.steps):
            clock = Clock()
            try:
                outcome = _step(course, number, clock)
            except TeacherAwayError as error:
                raise _to_be_continued(course, number, logs, error) from error
            done = number + 1
            for record in outcome.tokens:
                logs["tokens"].append(record)
            logs["metrics"].append(outcome.record)
            logs["timings"].append(outcome.timing)
            trackers.log(done, outcome.record)
            progress.step(done, course.steps, outcome.record, outcome.timing)
            if course.evaluation.every and done % course.evaluation.every == 0 and done < course.steps:
                _look(course, logs["evaluations"], trackers, done)
            every = course.checkpoint.every
            if every and (done % every == 0 or done == course.steps):
                _save(course, done, logs)
        results: dict[str, Any] = {}
        for split in course.evaluation.final:
            evaluation = _evaluate(course, split)
            if ranks.first:
                write(evaluation, folder)
            progress.evaluated(course.steps, evaluation)
            trackers.log(course.steps, {f"final/{split}/accuracy": evaluation.metrics.accuracy})
            results[split] = evaluation.as_json()
    for log in logs.values():
        log.close()
    summary = {"steps": course.steps, "evaluation": results, **course.finish()}
    if ranks.first:
        atomic_write(folder / SUMMARY, json.dumps(summary, indent=2, sort_keys=True) + "\n")
        write_card(folder)
        atomic_write(folder / DONE, "")
        shutil.rmtree(checkpoints, ignore_errors=True)
    return summary


def _restore(course: Course, checkpoints: Path) -> int:
    """Go on from the latest checkpoint; how many steps it has."""
    found = checkpoint.latest(checkpoints, report=course.progress.note)
    start = 0 if found is None else found.step
    course.ranks.agree(
        start,
        lambda steps: RunError(
            "the processes of this run see different checkpoints",
            got=", ".join(map(str, steps)),
            instead="an output folder that all machines share",
        ),
    )
    if found is not None:
        course.optimizer.restore(found.tensors)
        course.restore(found.state)
        course.progress.note(f"going on from step {start} of {course.steps}")
    return start


def _save(course: Course, done: int, logs: Mapping[str, Log]) -> None:
    for log in logs.values():
        log.sync()
    tensors, state = course.optimizer.tensors(), course.state()
    with course.ranks.together():
        if course.ranks.first:
            checkpoint.save(course.folder / CHECKPOINTS, done, tensors, state, keep=course.checkpoint.keep)


def _to_be_continued(course: Course, done: int, logs: Mapping[str, Log], error: TeacherAwayError) -> TeacherAwayError:
    """Keep the `done` steps of a run whose teacher has gone away in the next one; the error that says so."""
    course.optimizer.discard()
    kept = done > 0 and course.checkpoint.every > 0
    if kept:
        _save(course, done, logs)
    where = f"goes on from step {done}" if kept else "starts again"
    return TeacherAwayError(
        f"step {done + 1} could not be done: {error.what}",
        got=error.got,
        why=error.why,
        instead=f"see to the teacher; the same command then {where}",
    )


def _step(course: Course, number: int, clock: Clock) -> Outcome:
    try:
        return course.step(number, clock)
    except TeacherAwayError:
        raise
    except GatespaceError as error:
        if getattr(error, "elsewhere", False):
            raise  # the process in which it happened writes it down
        where = "" if course.ranks.size == 1 else f"-process-{course.ranks.rank}"
        saved = course.folder / f"failed-step-{number + 1}{where}.json"
        details = {"step": number + 1, "error": str(error), **getattr(error, "evidence", {})}
        atomic_write(saved, json.dumps(details, indent=2, ensure_ascii=True) + "\n")
        raise RunError(
            f"step {number + 1} failed: {error.what}",
            got=error.got,
            why=f"what the step saw is in {saved.name}; weights and records are those before it",
            instead=error.instead,
        ) from error


def _evaluate(course: Course, split: str) -> Evaluation:
    return course.evaluate(split, lambda done, total: course.progress.evaluating(split, done, total))


def _look(course: Course, log: Log, trackers: Trackers, step: int) -> None:
    evaluation = _evaluate(course, course.evaluation.split)
    metrics = evaluation.metrics
    record = {
        "step": step,
        "split": evaluation.split,
        "count": metrics.count,
        "accuracy": metrics.accuracy,
        "macro_f1": metrics.macro_f1,
        "parse_failures": metrics.parse_failures,
    }
    log.append(record)
    trackers.log(step, {f"eval/{key}": record[key] for key in ("accuracy", "macro_f1", "parse_failures")})
    course.progress.evaluated(step, evaluation)


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that is done, or None."""
    if not (folder / DONE).exists():
        return None
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # a kill may have come between the two
    summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    return summary
