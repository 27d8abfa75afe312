"""The folder of a study: file names, readers, writers and locking.

study.yaml           the study file with all defaults
store.json           settings kept when the study is resumed: threads, workers
running.json         jobs that are running, while a process works on the study
bases.json           bases chosen on validation
looks.jsonl          a line per set of finished runs whose test results were analysed
plugins/HASH/…       user plugins that the runs import
models/NAME/         runs of `teach`, one per task and role
baselines/NAME/      evaluations of the student before training and of the teacher
runs/ID/             one folder per run
scores/              the teacher's scores, shared by all runs
report.html, tables/, figures/

Folders of models, baselines and runs are `RunFolder`s.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gatespace.errors import UsageError
from gatespace.files import Folder, atomic_write, is_claimed, read
from gatespace.plugins import plugin_hash
from gatespace.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from gatespace.config import StudyConfig


class Base(NamedTuple):
    """The point that the HG points of a task are built on."""

    point: str
    chosen_by: str
    """``the study file``, or how it was chosen."""
    val: Mapping[str, float]
    """Candidate → mean validation accuracy; empty if the study file names the base."""


ARCHIVE = ".tar.xz"
"""File suffix of a study's archive."""


def pages_of(path: Path) -> Path:
    """Default folder for pages about a study: the study's own, or one next to its archive."""
    return path.with_name(f"{path.name.removesuffix(ARCHIVE)}-report") if path.is_file() else path


class StudyFolder(Folder):
    """A study on disk. Reading one changes nothing; `claim` it to write."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.study_file = self.path / "study.yaml"
        """The study file with all defaults."""
        self.store_file = self.path / "store.json"
        """Settings kept when the study is resumed: threads, workers."""
        self.bases_file = self.path / "bases.json"
        """Bases chosen on validation."""
        self.looks_file = self.path / "looks.jsonl"
        """The log of looks at test results."""
        self.plugins = self.path / "plugins"
        """Copies of the user's plugins."""
        self.models = self.path / "models"
        """The folder of all models that the study trains."""
        self.scores = self.path / "scores"
        """The score cache."""

    @classmethod
    def open(cls, path: Path | str) -> StudyFolder:
        """Open the folder of an existing study."""
        folder = cls(path)
        if not folder.exists:
            raise UsageError(
                "this is not the folder of a study",
                got=str(path),
                why=f"it has no {folder.study_file.name}" if folder.path.exists() else "there is nothing at this place",
                instead="the folder that `gatespace run` has written, e.g. studies/demo",
            )
        return folder

    def run(self, name: str) -> RunFolder:
        """The folder of a run."""
        return RunFolder(self.path / "runs" / name)

    def model(self, name: str) -> RunFolder:
        """The run folder of a model that the study trains."""
        return RunFolder(self.models / name)

    def baseline(self, name: str) -> RunFolder:
        """The folder of a model's evaluation before distillation."""
        return RunFolder(self.path / "baselines" / name)

    def jobs(self) -> list[RunFolder]:
        """The folders of all baselines and runs on disk, including those no longer in the plan."""
        places = [place for kind in ("baselines", "runs") for place in (self.path / kind).glob("*")]
        return [RunFolder(place) for place in sorted(places) if place.is_dir()]

    def records(self) -> list[Path]:
        """The files that a report needs, with the plugins that run ids depend on: no models, scores or pages."""
        own = [self.study_file, self.store_file, self.bases_file, self.looks_file, *self.plugins.rglob("*.py")]
        return sorted(
            [path for path in own if path.is_file()] + [path for job in self.jobs() for path in job.records()]
        )

    # ------------------------------------------------------------------ readers

    @property
    def exists(self) -> bool:
        """Whether this is the folder of a study."""
        return self.study_file.is_file()

    @property
    def is_running(self) -> bool:
        """Whether a process of this machine works on the study."""
        return is_claimed(self.path)

    def config(self) -> StudyConfig:
        """The study file."""
        from gatespace.config import StudyConfig, load_config

        return load_config(StudyConfig, self.study_file).with_plugins_from(self.path)

    @property
    def workers(self) -> int:
        """Number of runs at once."""
        return int(self._read(self.store_file).get("workers", 1))

    def bases(self) -> dict[str, Base]:
        """Task → base chosen on validation."""
        return {task: Base(**value) for task, value in self._read(self.bases_file).items()}

    def looks(self) -> list[dict[str, Any]]:
        """Recorded looks at test results."""
        return read(self.looks_file)

    def running(self) -> set[str]:
        """Names of running jobs, on any machine; empty if no process works on the study."""
        return set(self._read(self.path / "running.json")) if self.is_running else set()

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        return found if isinstance(found, dict) else {}

    # ------------------------------------------------------------------ writers

    def begin(self, config: StudyConfig, *, workers: int, threads: int | None, usual: int | None = None) -> int:
        """Set up the folder for this study and return the threads per run, see `threads_of_runs`."""
        from gatespace.config import dump_yaml

        chosen = self.threads_of_runs(config, workers=workers, threads=threads, usual=usual)
        own = config.model_copy(update={"plugins": tuple(self._copy_plugin(plugin) for plugin in config.plugins)})
        atomic_write(self.study_file, dump_yaml(own))
        atomic_write(self.store_file, json.dumps({"threads": chosen, "workers": workers}) + "\n")
        return chosen

    def threads_of_runs(
        self, config: StudyConfig, *, workers: int, threads: int | None, usual: int | None = None
    ) -> int:
        """The threads per run; raises if the folder holds another study.

        The number of threads affects the last bits of a sum, so a resumed study keeps its number unless the user sets
        another.

        Args:
            config: The study file.
            workers: Runs at once.
            threads: Threads per run, if set by the user.
            usual: Default for a new study; None: an equal share of this machine's cores, and at most OMP_NUM_THREADS.
        """
        self._check_owner(config)
        kept = self._read(self.store_file).get("threads")
        cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))
        limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # one number per level of nesting
        most = int(limit) if limit.isdecimal() and int(limit) else cores or 1
        return int(threads or kept or usual or max(1, min(most, (cores or 1) // workers)))

    def _check_owner(self, config: StudyConfig) -> None:
        from gatespace.config.text import read_yaml

        if not self.exists or not any(self.path.glob("*/*/done")):
            return  # nothing finished could belong to another study: the given file wins
        other = read_yaml(self.study_file.read_text("utf-8"), where=self.study_file.name)
        name = other.get("name") if isinstance(other, dict) else None
        if name != config.name:
            raise UsageError(
                "this folder holds another study",
                got=str(self.path),
                why=f"it is {name!r}, not {config.name!r}",
                instead="another --output",
            )

    def _copy_plugin(self, plugin: str) -> str:
        """Copy a plugin file under its hash; return its path as written in this folder's study file."""
        if not plugin.endswith(".py"):
            return plugin  # a module, which must be installed where the runs execute
        source = Path(plugin)
        copy = self.plugins / plugin_hash(plugin)[:12] / source.name
        if copy != source:
            atomic_write(copy, source.read_bytes())
        return str(copy.relative_to(self.path))

    def look(self, record: Mapping[str, Any]) -> None:
        """Record a look at test results, unless the folder is read-only."""
        with suppress(OSError), self.looks_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def choose(self, task: str, base: Base) -> None:
        """Record the base chosen for a task."""
        chosen = {name: value._asdict() for name, value in (self.bases() | {task: base}).items()}
        atomic_write(self.bases_file, json.dumps(chosen, indent=2, sort_keys=True) + "\n")

    def now_running(self, names: Iterable[str]) -> None:
        """Record the running jobs."""
        self.check_claim()
        atomic_write(self.path / "running.json", json.dumps(dict.fromkeys(sorted(names), True)) + "\n")
