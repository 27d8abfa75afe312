"""The folder of a study: where everything lies, and what state each piece of work is in.

    study.yaml           the study file with every default written out
    store.json           what must stay the same when the study is taken up again
    running.json         what is being worked on, while somebody works on the study
    bases.json           bases that were chosen on validation
    models/…             runs of `teach`, one per task and role
    baselines/…          student before training and teacher, evaluated
    runs/ID/…            one folder per run
    scores/              the teacher's answers, shared by all runs
    report.html, tables/, figures/

A piece of work is done when its folder has the file `done`, and failed when it has `error.json`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gatespace.config import StudyConfig, dump_yaml, load_config
from gatespace.config.text import read_yaml
from gatespace.errors import UsageError
from gatespace.files import atomic_write, is_claimed
from gatespace.runs import Base, State

STUDY = "study.yaml"
STORE, BASES, _RUNNING, _PROGRESS = "store.json", "bases.json", "running.json", "progress.json"
DONE, ERROR, READS = "done", "error.json", "reads.jsonl"
FAILED = "failed"
"""At a URL, where a folder's last file says what it is: the records of a run that failed."""


class Store:
    """A study's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).expanduser().absolute()

    @classmethod
    def open(cls, folder: Path) -> Store:
        """The store of a study that exists."""
        store = cls(folder)
        if not (store.folder / STUDY).is_file():
            raise UsageError(
                "this is not the folder of a study",
                got=str(folder),
                why=f"it has no {STUDY}",
                instead="the folder that `gatespace run` has written, e.g. studies/demo",
            )
        return store

    # ------------------------------------------------------------------ places

    @property
    def scores(self) -> Path:
        """The teacher's answers."""
        return self.folder / "scores"

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / name

    def model(self, name: str) -> Path:
        """The run folder of a model that the study makes."""
        return self.folder / "models" / name

    def baseline(self, name: str) -> Path:
        """The folder of a model's evaluation before anything is distilled."""
        return self.folder / "baselines" / name

    # ------------------------------------------------------------------ the study

    def config(self) -> StudyConfig:
        """The study file."""
        return load_config(StudyConfig, self.folder / STUDY)

    def begin(self, config: StudyConfig, *, workers: int, threads: int | None, usual: int | None = None) -> int:
        """Make the folder this study's, and return the threads of each run.

        Threads show in the last bits of a sum. A study that is taken up again keeps those it began with, unless it is
        told otherwise.

        Args:
            config: The study file.
            workers: Runs at once.
            threads: Of each run, as the user has it.
            usual: Threads of a study that begins, where the user says nothing; None: its share of this machine's cores.
        """
        self._check_owner(config)
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self.folder / STUDY, dump_yaml(config))
        kept = self._read(STORE).get("threads")
        cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))
        chosen = threads or kept or usual or max(1, (cores or 1) // workers)
        atomic_write(self.folder / STORE, json.dumps({"threads": chosen, "workers": workers}) + "\n")
        return int(chosen)

    def _check_owner(self, config: StudyConfig) -> None:
        try:
            other = read_yaml((self.folder / STUDY).read_text("utf-8"), where=STUDY)
        except FileNotFoundError:
            return
        name = other.get("name") if isinstance(other, dict) else None
        if name != config.name:
            raise UsageError(
                "this folder holds another study",
                got=str(self.folder),
                why=f"it is {name!r}, not {config.name!r}",
                instead="another --output",
            )

    @property
    def workers(self) -> int:
        """How many runs go on at once."""
        return int(self._read(STORE).get("workers", 1))

    def bases(self) -> dict[str, Base]:
        """Task → base that was chosen on validation."""
        return {task: Base(**value) for task, value in self._read(BASES).items()}

    def choose(self, task: str, base: Base) -> None:
        """Write down a choice."""
        chosen = {name: value._asdict() for name, value in (self.bases() | {task: base}).items()}
        atomic_write(self.folder / BASES, json.dumps(chosen, indent=2, sort_keys=True) + "\n")

    # ------------------------------------------------------------------ pieces of work

    def running(self) -> set[str]:
        """Names of what is being worked on, on whatever machine. None of it, where nobody works on the study."""
        return set(self._read(_RUNNING)) if is_claimed(self.folder) else set()

    def now_running(self, names: Iterable[str]) -> None:
        """Write down what is being worked on."""
        atomic_write(self.folder / _RUNNING, json.dumps(dict.fromkeys(sorted(names), True)) + "\n")

    def state(self, folder: Path) -> State:
        """Of the piece of work in `folder`."""
        if (folder / DONE).exists():
            return "done"
        if (folder / ERROR).exists():
            return "failed"
        return "running" if is_claimed(folder) else "waiting"

    def error(self, folder: Path) -> str:
        """Why it failed; "" where it did not."""
        try:
            return str(json.loads((folder / ERROR).read_text())["error"])
        except (FileNotFoundError, ValueError, KeyError):
            return ""

    def fail(self, folder: Path, error: str, details: str = "") -> None:
        """Record a failure."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {"error": error, "details": details, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        atomic_write(folder / ERROR, json.dumps(record, indent=2) + "\n")

    def forgive(self, folder: Path) -> None:
        """Let what failed be tried again."""
        (folder / ERROR).unlink(missing_ok=True)

    def summary(self, folder: Path) -> dict[str, Any] | None:
        """The summary of a run that is done."""
        if not (folder / DONE).exists():
            return None
        found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return found

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return {}
        return found if isinstance(found, dict) else {}


def progress_of(folder: Path) -> int:
    """The last step that a run has recorded."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - 4096))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return _far_progress(folder)
    for line in reversed(lines[:-1]):  # what follows the last end of line is not whole
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return 0


def far_progress_is(folder: Path, step: int) -> None:
    """Write down how far a run is whose records are on another machine."""
    if step != _far_progress(folder):
        atomic_write(folder / _PROGRESS, json.dumps({"step": step}) + "\n")


def forget_far_progress(folder: Path) -> None:
    """The run's own records are here now."""
    (folder / _PROGRESS).unlink(missing_ok=True)


def _far_progress(folder: Path) -> int:
    try:
        return int(json.loads((folder / _PROGRESS).read_text())["step"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def seconds_of(folder: Path) -> float | None:
    """How long the latest attempt at a run took, or has taken so far."""
    try:
        began = (folder / "config.yaml").stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        return max(0.0, (folder / DONE).stat().st_mtime - began)
    except FileNotFoundError:
        return max(0.0, time.time() - began)


def as_reads(records: list[Mapping[str, Any]]) -> tuple[int, int]:
    """(rows of the test split, how often it was read) from the lines of reads.jsonl."""
    tests = [record for record in records if record.get("split") == "test"]
    return (int(tests[-1]["rows"]) if tests else 0), len(tests)
