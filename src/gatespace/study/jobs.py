"""Execution of a study's jobs by a worker, possibly on another machine.

A job is plain data: what to do, and a complete configuration. All of its output is in its folder.
"""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from gatespace.config import StudyConfig, TeachConfig, TrainConfig, parse_config
from gatespace.config.address import is_address
from gatespace.errors import GatespaceError
from gatespace.plugins import load_plugins
from gatespace.runs import RunFolder
from gatespace.study.outlook import Job as Job

Outcome = dict[str, Any]
"""``{"state": "done"}``, or ``{"state": "failed", "error": ..., "details": ...}``."""
Perform = Callable[[Job], None]
"""Runs a job or raises: `perform`, or an add-on's wrapper around it. Engines pass it to their workers."""


def folder_of(job: Job) -> RunFolder:
    """The output folder of a job."""
    return RunFolder(job["folder"] if job["do"] == "baseline" else job["config"]["output"])


def failed(error: str, details: str = "") -> Outcome:
    """The outcome of a job that failed."""
    return {"state": "failed", "error": error, "details": details}


def perform(job: Job, publish: Callable[[bytes], None] = lambda line: None) -> None:
    """Run a job in its folder. `publish` is called with every line of the log of held-out reads."""
    {"teach": _teach, "baseline": _baseline, "train": _train}[job["do"]](job, Reads(folder_of(job), publish))


def execute(job: Job, perform: Perform = perform) -> Outcome:
    """Run a job and return its outcome. Never raises an `Exception`: an error fails the job, not the study."""
    try:
        perform(job)
    except GatespaceError as error:
        return failed(str(error))
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}", traceback.format_exc())
    finally:
        gc.collect()  # the next job of this process needs the memory
        if not gc.get_freeze_count():  # the libraries are loaded: without this, each collection walks all their objects
            gc.freeze()
    return {"state": "done"}


def check(job: Job) -> Outcome:
    """Check the study of a job before it runs; the outcome holds notes, or the error itself."""
    from gatespace.study.check import check_study

    try:
        return {"state": "done", "notes": check_study(parse_config(StudyConfig, job["config"]), job["made"])}
    except GatespaceError as error:
        return failed(str(error)) | {"raised": error}
    except Exception as error:  # the runs will report it in full
        return {"state": "done", "notes": [f"the study could not be checked: {type(error).__name__}: {error}"]}


class Reads:
    """Progress callback that logs every read of a held-out split before its result is known.

    Args:
        run: The run's folder.
        publish: Also called with each line, before it is written to the folder.
    """

    def __init__(self, run: RunFolder, publish: Callable[[bytes], None] = lambda line: None) -> None:
        self._run, self._publish = run, publish
        self._split = ""

    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None: ...

    def evaluating(self, split: str, done: int, total: int) -> None:
        """Record a read at an evaluation's first responses."""
        if self._split != split:
            self._split = split
            self.record(split, total)

    def evaluated(self, step: int, evaluation: Any) -> None:
        """Reset: the next evaluation is another read."""
        self._split = ""

    def record(self, split: str, rows: int) -> None:
        """Record one read."""
        line = (json.dumps({"split": split, "rows": rows}) + "\n").encode()
        self._publish(line)
        self._run.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._run.reads_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def _teach(job: Job, reads: Reads) -> None:
    from gatespace.training.train import teach

    teach(parse_config(TeachConfig, job["config"]), reads)


def _train(job: Job, reads: Reads) -> None:
    from gatespace.training.train import train

    train(parse_config(TrainConfig, job["config"]), reads)


def _baseline(job: Job, reads: Reads) -> None:
    """Evaluate the student or teacher of a configuration before distillation."""
    from gatespace.evaluation import evaluate, write
    from gatespace.tasks.configured import teacher_prompt
    from gatespace.training.setup import ModelSpec, material, open_model, placement

    config, role = parse_config(TrainConfig, job["config"]), job["role"]
    load_plugins(config.plugins)
    with folder_of(job).claim() as folder:
        data, pair, settings = material(config.task, "distill"), config.pair, config.evaluation
        prompt = teacher_prompt(config.teacher.prompt, data.prompt) if role == "teacher" else data.prompt
        named = getattr(pair, role)
        about = {"model": named or pair.teachers, "task": data.task.name, "digest": data.task.digest}
        if named is None:
            why = "a held-out row has none of several teachers; `gatespace evaluate` measures each"
            folder.finish_baseline(about | {"source": "several teachers", "unmeasured": why})
            return
        if is_address(named):
            # A service scores responses but generates none, so its operator has to measure its accuracy.
            folder.finish_baseline(about | {"source": "a service", "unmeasured": "a service answers no prompts"})
            return
        place = placement(config.engine)
        model = open_model(ModelSpec.of(pair, role, device=place.device, dtype=place.dtype), data.task)
        validation = None
        for split in sorted(settings.final, key=lambda split: split != "val"):  # others are judged with it
            rows = len(data.task.rows(split))
            reads.record(split, min(rows, settings.limit_of(split) or rows))
            evaluation = evaluate(model, data.task, prompt, settings, split=split, probabilities=settings.probabilities)
            validation = evaluation if split == "val" else validation
            write(evaluation.judged_with(validation), folder.path)
        folder.finish_baseline(about | {"source": str(model.source)})
