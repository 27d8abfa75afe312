"""The pieces of work of a study, as a process does them that may be on another machine.

A job is plain data: what to do, and a whole configuration. All that it leaves behind is in its folder. An engine that
reaches other machines adds what they need to know:

    version    the gatespace that planned the job
    cwd        where relative paths begin, if there is such a folder
    patience   seconds to wait for a folder that a lost worker still holds
    scores     the folder of scores that is to be one of the machine's own
    depot      a URL through which results go, and the study's folder, whose place a scratch folder takes
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gatespace import __version__
from gatespace.config import TeachConfig, TrainConfig, parse_config
from gatespace.config.address import is_address
from gatespace.errors import GatespaceError, RunError
from gatespace.files import atomic_write, claim, is_claimed
from gatespace.models.cache_root import cache_root
from gatespace.study.outlook import Job as Job
from gatespace.study.store import DONE, READS

Outcome = dict[str, Any]


def folder_of(job: Job) -> Path:
    """The folder that a job leaves behind."""
    return Path(job["folder"] if job["do"] == "baseline" else job["config"]["output"])


def relocated(value: Any, before: Path, after: Path) -> Any:
    """Plain data in which every path at or below `before` is one at or below `after`."""
    if isinstance(value, Mapping):
        return {key: relocated(one, before, after) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [relocated(one, before, after) for one in value]
    if isinstance(value, str) and (value == str(before) or value.startswith(f"{before}{os.sep}")):
        return str(after) + value[len(str(before)) :]
    return value


def scratch_of(name: str) -> Path:
    """This machine's own folder for the work on a study, by the URL or the folder of its results."""
    return cache_root() / "studies" / hashlib.sha256(name.encode()).hexdigest()[:16]


def execute(job: Job) -> Outcome:
    """Do a job, and say how it went. No error leaves this function: it belongs to the job, not to the study."""
    try:
        _check_version(job)
        if os.path.isdir(job.get("cwd", "")):
            os.chdir(job["cwd"])
        if "depot" in job:
            from gatespace.addons.cluster.scratch import execute_in_scratch

            execute_in_scratch(job)
        else:
            if "scores" in job:
                own = scratch_of(job["scores"]) / "scores"
                job = {**job, "config": relocated(job["config"], Path(job["scores"]), own)}
            _wait_for(folder_of(job), job.get("patience", 0))
            perform(job)
    except GatespaceError as error:
        return {"state": "failed", "error": str(error), "details": ""}
    except Exception as error:
        return {"state": "failed", "error": f"{type(error).__name__}: {error}", "details": traceback.format_exc()}
    finally:
        gc.collect()  # the next job of this process needs the room
    return {"state": "done"}


def perform(job: Job, publish: Callable[[bytes], None] = lambda line: None) -> None:
    """Do a job in the folder that it names. `publish` is told of every read of a held-out split."""
    {"teach": _teach, "baseline": _baseline, "train": _train}[job["do"]](job, Reads(folder_of(job), publish))


def _check_version(job: Job) -> None:
    if job.get("version", __version__) != __version__:
        raise RunError(
            "this worker has another gatespace than the study",
            got=f"{__version__} at {os.uname().nodename}",
            why=f"the study was planned by {job['version']}, and two versions need not give the same numbers",
            instead="the same version on all nodes",
        )


def _wait_for(folder: Path, patience: float) -> None:
    """A worker whose node was lost may hold the folder for a while after the cluster has given it up."""
    deadline = time.monotonic() + patience
    while is_claimed(folder) and time.monotonic() < deadline:
        time.sleep(0.5)


class Reads:
    """Progress of a run that writes down every read of a held-out split, in the run's folder.

    Args:
        folder: Of the run.
        publish: Is given the line too, before the read goes on.
    """

    def __init__(self, folder: Path, publish: Callable[[bytes], None] = lambda line: None) -> None:
        self._path, self._publish = folder / READS, publish
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
        line = (json.dumps({"split": split, "rows": rows}) + "\n").encode()
        self._publish(line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def _teach(job: Job, reads: Reads) -> None:
    from gatespace.training import run

    run.teach(parse_config(TeachConfig, job["config"]), reads)


def _train(job: Job, reads: Reads) -> None:
    from gatespace.training import run

    run.train(parse_config(TrainConfig, job["config"]), reads)


def _baseline(job: Job, reads: Reads) -> None:
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
