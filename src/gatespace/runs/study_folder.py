"""The folder of a study: every file name, who may write, and every reader.

study.yaml           the study file with every default written out
store.json           what must stay the same when the study is resumed
running.json         what is being run, while a process works on the study
bases.json           bases that were chosen on validation
looks.jsonl          a line per set of finished runs whose test results were analysed
plugins/HASH/…       the user's own code that the runs import
models/NAME/         runs of `teach`, one per task and role
baselines/NAME/      student before training and teacher, evaluated
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
    """Candidate → mean validation accuracy; empty where nothing was chosen."""


ARCHIVE = ".tar.xz"
"""How the name of an archive of a study ends."""


def pages_of(path: Path) -> Path:
    """Where pages about a study are written by default: its folder, or beside an archive of it."""
    return path.with_name(f"{path.name.removesuffix(ARCHIVE)}-report") if path.is_file() else path


class StudyFolder(Folder):
    """A study on disk. Reading one changes nothing; `claim` it to write."""

    @classmethod
    def open(cls, path: Path | str) -> StudyFolder:
        """The folder of a study that exists."""
        folder = cls(path)
        if not folder.exists:
            raise UsageError(
                "this is not the folder of a study",
                got=str(path),
                why=f"it has no {folder.study_file.name}",
                instead="the folder that `gatespace run` has written, e.g. studies/demo",
            )
        return folder

    # ------------------------------------------------------------------ places

    @property
    def study_file(self) -> Path:
        """The study file with every default written out."""
        return self.path / "study.yaml"

    @property
    def store_file(self) -> Path:
        """What must stay the same when the study is resumed."""
        return self.path / "store.json"

    @property
    def bases_file(self) -> Path:
        """Bases that were chosen on validation."""
        return self.path / "bases.json"

    @property
    def looks_file(self) -> Path:
        """The ledger of looks at test results."""
        return self.path / "looks.jsonl"

    @property
    def plugins(self) -> Path:
        """Copies of the user's own code."""
        return self.path / "plugins"

    @property
    def models(self) -> Path:
        """The folders of all models that the study makes."""
        return self.path / "models"

    @property
    def scores(self) -> Path:
        """The cache of the teacher's scores."""
        return self.path / "scores"

    def run(self, name: str) -> RunFolder:
        """The folder of a run."""
        return RunFolder(self.path / "runs" / name)

    def model(self, name: str) -> RunFolder:
        """The run folder of a model that the study makes."""
        return RunFolder(self.models / name)

    def baseline(self, name: str) -> RunFolder:
        """The folder of a model's evaluation before anything is distilled."""
        return RunFolder(self.path / "baselines" / name)

    def jobs(self) -> list[RunFolder]:
        """The folders of all baselines and runs that are there, also of those that the study no longer plans."""
        places = [place for kind in ("baselines", "runs") for place in (self.path / kind).glob("*")]
        return [RunFolder(place) for place in sorted(places) if place.is_dir()]

    def records(self) -> list[Path]:
        """The files that a report is made from, with the code that run ids depend on: no models, scores or pages."""
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
        """How many runs are active at once."""
        return int(self._read(self.store_file).get("workers", 1))

    def bases(self) -> dict[str, Base]:
        """Task → base that was chosen on validation."""
        return {task: Base(**value) for task, value in self._read(self.bases_file).items()}

    def looks(self) -> list[dict[str, Any]]:
        """Looks at test results that were recorded."""
        return read(self.looks_file)

    def running(self) -> set[str]:
        """Names of what is being run, on any machine; none where no process works on the study."""
        return set(self._read(self.path / "running.json")) if self.is_running else set()

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        return found if isinstance(found, dict) else {}

    # ------------------------------------------------------------------ writers

    def begin(self, config: StudyConfig, *, workers: int, threads: int | None, usual: int | None = None) -> int:
        """Make the folder this study's, and return the threads of each run, see `threads_of_runs`."""
        from gatespace.config import dump_yaml

        chosen = self.threads_of_runs(config, workers=workers, threads=threads, usual=usual)
        own = config.model_copy(update={"plugins": tuple(self._copy_plugin(plugin) for plugin in config.plugins)})
        atomic_write(self.study_file, dump_yaml(own))
        atomic_write(self.store_file, json.dumps({"threads": chosen, "workers": workers}) + "\n")
        return chosen

    def threads_of_runs(
        self, config: StudyConfig, *, workers: int, threads: int | None, usual: int | None = None
    ) -> int:
        """The threads of each run; an error where the folder holds another study.

        Threads show in the last bits of a sum: a study that is resumed keeps those it began with, unless the user names
        others.

        Args:
            config: The study file.
            workers: Runs at once.
            threads: Of each run, as the user has it.
            usual: Threads of a study that begins, where the user says nothing; None: its share of this machine's cores.
        """
        self._check_owner(config)
        kept = self._read(self.store_file).get("threads")
        cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))
        return int(threads or kept or usual or max(1, (cores or 1) // workers))

    def _check_owner(self, config: StudyConfig) -> None:
        from gatespace.config.text import read_yaml

        if not self.exists or not any(self.path.glob("*/*/done")):
            return  # nothing is done in it that could be of another study: the file that is given now counts
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
        """Keep a plugin that is a file, by its hash; how this folder's study file spells it."""
        if not plugin.endswith(".py"):
            return plugin  # a module, which has to be installed where runs are done
        source = Path(plugin)
        copy = self.plugins / plugin_hash(plugin)[:12] / source.name
        if copy != source:
            atomic_write(copy, source.read_bytes())
        return str(copy.relative_to(self.path))

    def look(self, record: Mapping[str, Any]) -> None:
        """Record a look at test results. A folder that cannot be written to keeps no ledger."""
        with suppress(OSError), self.looks_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def choose(self, task: str, base: Base) -> None:
        """Record the base that was chosen for a task."""
        chosen = {name: value._asdict() for name, value in (self.bases() | {task: base}).items()}
        atomic_write(self.bases_file, json.dumps(chosen, indent=2, sort_keys=True) + "\n")

    def now_running(self, names: Iterable[str]) -> None:
        """Record what is being run."""
        self.check_claim()
        atomic_write(self.path / "running.json", json.dumps(dict.fromkeys(sorted(names), True)) + "\n")
