"""The pieces of work of a study, as a process does them that may be on another machine.

A job is plain data: what to do, and a whole configuration. All that it leaves behind is in its folder.
"""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatespace.config import TeachConfig, TrainConfig, parse_config
from gatespace.config.address import is_address
from gatespace.errors import GatespaceError
from gatespace.files import atomic_write, claim
from gatespace.study.store import DONE, READS

Job = dict[str, Any]
Outcome = dict[str, Any]


def teach_job(config: TeachConfig) -> Job:
    """Make a model."""
    return {"do": "teach", "config": _plain(config)}


def baseline_job(config: TrainConfig, role: str, folder: Path) -> Job:
    """Evaluate the student or the teacher of `config` as it is."""
    return {"do": "baseline", "config": _plain(config), "role": role, "folder": str(folder)}


def train_job(config: TrainConfig) -> Job:
    """Train a student at a point."""
    return {"do": "train", "config": _plain(config)}


def execute(job: Job) -> Outcome:
    """Do a job, and say how it went. No error leaves this function: it belongs to the job, not to the study."""
    try:
        {"teach": _teach, "baseline": _baseline, "train": _train}[job["do"]](job)
    except GatespaceError as error:
        return {"state": "failed", "error": str(error), "details": ""}
    except Exception as error:
        return {"state": "failed", "error": f"{type(error).__name__}: {error}", "details": traceback.format_exc()}
    finally:
        gc.collect()  # the next job of this process needs the room
    return {"state": "done"}


class Reads:
    """Progress of a run that writes down every read of a held-out split, in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / READS
        self._open = ""

    def note(self, text: str) -> None: ...
    def step(self, step: int, steps: int, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None: ...

    def evaluating(self, split: str, done: int, total: int) -> None:
        """The first answers of an evaluation are there."""
        if self._open != split:
            self._open = split
            self.record(split, total)

    def evaluated(self, step: int, evaluation: Any) -> None:
        """It is over; the next one is another read."""
        self._open = ""

    def record(self, split: str, rows: int) -> None:
        """Write down one read."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"split": split, "rows": rows}) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


def _teach(job: Job) -> None:
    from gatespace.training import run

    config = parse_config(TeachConfig, job["config"])
    run.teach(config, Reads(config.output))


def _train(job: Job) -> None:
    from gatespace.training import run

    config = parse_config(TrainConfig, job["config"])
    run.train(config, Reads(config.output))


def _baseline(job: Job) -> None:
    from gatespace.evaluation import evaluate, write
    from gatespace.training.setup import material, open_model, placement

    config, role, folder = parse_config(TrainConfig, job["config"]), job["role"], Path(job["folder"])
    with claim(folder):
        data, pair, settings = material(config.task, "distill"), config.pair, config.evaluation
        about = {"model": getattr(pair, role), "task": data.task.name, "digest": data.task.digest}
        if is_address(getattr(pair, role)):
            # A service scores responses and answers no prompts: its accuracy is for those who run it to measure.
            _baseline_is(folder, about | {"source": "a service", "unmeasured": "a service answers no prompts"})
            return
        place = placement(config.engine)
        model = open_model(
            getattr(pair, role),
            f"pair.{role}",
            role=role,
            task=data.task,
            device=place.device,
            dtype=place.dtype,
            revision=getattr(pair, f"{role}_revision"),
            trust_remote_code=pair.trust_remote_code,
        )
        reads = Reads(folder)
        for split in settings.final:
            reads.record(split, min(len(data.task.rows(split)), settings.limit or len(data.task.rows(split))))
            evaluation = evaluate(
                model,
                data.task,
                data.prompt,
                split=split,
                limit=settings.limit,
                max_new_tokens=settings.max_new_tokens,
                batch_size=settings.batch_size,
            )
            write(evaluation, folder)
        _baseline_is(folder, about | {"source": str(model.source)})


def _baseline_is(folder: Path, about: Mapping[str, Any]) -> None:
    atomic_write(folder / "baseline.json", json.dumps(about, indent=2) + "\n")
    atomic_write(folder / DONE, "")


def _plain(config: TeachConfig | TrainConfig) -> dict[str, Any]:
    from gatespace.config import dump_config

    return dump_config(config)
