"""The folder of a run: file names, readers, writers and locking.

config.yaml              all settings, including defaults
identity.json            the run's identity and what it was computed from
environment.json         versions, machine, threads
metrics.jsonl            a line per step; a function of the settings alone
timings.jsonl            a line per step: seconds, cache hits
tokens.jsonl             individual tokens of some steps
evaluations.jsonl        a line per evaluation during training
alarms.jsonl             a line per alarm, if any
reads.jsonl              a line per read of a held-out split, in a study
checkpoints/             what a killed run resumes from; removed when the run is done
predictions-SPLIT.jsonl  every response of a final evaluation
evaluation-SPLIT.json    its metrics
step-N/                  predictions and metrics of an evaluation at which the run paused, see `train(until=N)`
plugins/                 user plugins that the run imported
model/                   the trained model
summary.json, done       written last, in this order
error.json               why it failed, in a study
failed-step-N.json       diagnostics of a step that failed
progress.json            the current step, if the records are on another machine
baseline.json            instead of all the above: a model evaluated without training
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gatespace.errors import RunError, UsageError
from gatespace.files import Folder, JsonLines, Mark, atomic_write, is_claimed, read

if TYPE_CHECKING:
    from gatespace.config import TeachConfig, TrainConfig

State = Literal["done", "failed", "running", "waiting"]
LOGS = ("metrics", "tokens", "evaluations", "alarms", "timings")
_CHECKPOINT = re.compile(r"step-(\d{6,})")


class DamagedFileError(RunError, ValueError):
    """A run's file does not have the expected content."""


class RunFolder(Folder):
    """A run on disk, finished or not. Reading one changes nothing; `claim` it to write."""

    # ------------------------------------------------------------------ places

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.model = self.path / "model"
        """The folder of the trained model."""
        self.checkpoints = self.path / "checkpoints"
        """Checkpoints that a killed run resumes from."""
        self.plugins = self.path / "plugins"
        """Copies of the user's plugins."""
        self.config_file = self.path / "config.yaml"
        """All settings of the run."""
        self.identity_file = self.path / "identity.json"
        """The run's identity and what it was computed from."""
        self.error_file = self.path / "error.json"
        """Why the run failed."""
        self.done_file = self.path / "done"
        """Marker file, written last."""
        self.reads_file = self.path / "reads.jsonl"
        """The log of reads of held-out splits."""

    def checkpoint_steps(self) -> dict[int, Path]:
        """Step → folder of every complete checkpoint."""
        matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in self.checkpoints.glob("*"))
        return {int(match[1]): path for match, path in matches if match}

    def at_step(self, step: int) -> RunFolder:
        """The evaluation at which the run paused after `step` steps."""
        return RunFolder(self.path / f"step-{step}")

    def log_file(self, name: str) -> Path:
        """The file of a log: metrics, tokens, evaluations, alarms or timings."""
        return self.path / f"{name}.jsonl"

    def predictions_file(self, split: str) -> Path:
        """The responses of an evaluation on `split`."""
        return self.path / f"predictions-{split}.jsonl"

    def evaluation_file(self, split: str) -> Path:
        """The metrics of an evaluation on `split`."""
        return self.path / f"evaluation-{split}.json"

    def records(self) -> list[Path]:
        """The files with settings and results: no weights, checkpoints or code.

        For an unfinished run, only its error and its log of held-out reads.
        """
        found = [self.reads_file, self.error_file]
        if self.is_done:
            names = ("identity.json", "environment.json", "summary.json", "baseline.json")
            found += [self.done_file, self.config_file, *(self.path / name for name in names)]
            found += map(self.log_file, LOGS)
            found += self.path.glob(self.evaluation_file("*").name)
            found += self.path.glob(self.predictions_file("*").name)
        return sorted(path for path in found if path.is_file())

    # ------------------------------------------------------------------ state

    @property
    def exists(self) -> bool:
        """Whether this is the folder of a run."""
        return self.config_file.is_file() and self.identity_file.is_file()

    @property
    def is_done(self) -> bool:
        """Whether the run has finished with all its results."""
        return self.done_file.exists()

    @property
    def state(self) -> State:
        """Done, failed, running (in a process of this machine) or waiting."""
        if self.is_done:
            return "done"
        if self.error_file.exists():
            return "failed"
        return "running" if is_claimed(self.path) else "waiting"

    def error(self) -> str:
        """Why it failed; "" if it did not."""
        return str(self.failure().get("error", ""))

    def failure(self) -> dict[str, Any]:
        """The record of `fail`: error, details and when; empty if the run did not fail."""
        try:
            return self._json(self.error_file.name)
        except (FileNotFoundError, DamagedFileError):
            return {}

    def last_step(self) -> int:
        """The last step in the metrics log, or as reported from another machine."""
        try:
            with self.log_file("metrics").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return self._remote_step()
        for line in reversed(lines[:-1]):  # text after the last newline is incomplete
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError):
                continue
        return 0

    def seconds(self) -> float | None:
        """Duration of the latest attempt so far; None if unknown, e.g. for a run from an archive."""
        try:
            began = self.config_file.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            took = self.done_file.stat().st_mtime - began
            return took if took > 0 else None
        except FileNotFoundError:
            return max(0.0, time.time() - began)

    def ended_at(self) -> float | None:
        """When the run finished or failed, in seconds since 1970; None if it has not ended."""
        for path in (self.done_file, self.error_file):
            if path.exists():
                return path.stat().st_mtime
        return None

    # ------------------------------------------------------------------ readers

    def settings(self) -> dict[str, Any]:
        """config.yaml as plain data; raises if it is unreadable."""
        from gatespace.config.text import read_yaml

        try:
            found = read_yaml(self.config_file.read_text(encoding="utf-8-sig"), where=str(self.config_file))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{self.config_file} cannot be read", why=why) from None
        return found if isinstance(found, dict) else {}

    def identity(self) -> dict[str, Any]:
        """{"identity": hash, "content": what the settings resolved to}."""
        found = self._json("identity.json")
        if not isinstance(found.get("identity"), str) or not isinstance(found.get("content"), dict):
            raise self._damaged("identity.json", "it names no run")
        return found

    def environment(self) -> dict[str, Any]:
        """Versions, machine, threads."""
        return self._json("environment.json")

    def summary(self, *, before_done: bool = False) -> dict[str, Any] | None:
        """The summary of a finished run, else None. `before_done`: read what `finish` wrote, for finishers."""
        if not (before_done or self.is_done):
            return None
        try:
            return self._json("summary.json")
        except FileNotFoundError:
            raise self._damaged("summary.json", "it is missing") from None

    def baseline(self) -> dict[str, Any]:
        """The model and task of a baseline."""
        return self._json("baseline.json")

    def log(self, name: str) -> list[dict[str, Any]]:
        """The records of a log: metrics, tokens, evaluations, alarms, timings or reads."""
        return read(self.log_file(name))

    def predictions(self, split: str) -> list[dict[str, Any]]:
        """The responses of an evaluation on `split`; empty if there was none."""
        return read(self.predictions_file(split))

    def evaluation(self, split: str) -> dict[str, Any] | None:
        """The metrics of an evaluation on `split`; None if there was none."""
        return self._json(path.name) if (path := self.evaluation_file(split)).exists() else None

    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of all evaluations, sorted by split name."""
        return [self._json(path.name) for path in sorted(self.path.glob(self.evaluation_file("*").name))]

    # ------------------------------------------------------------------ writers

    def begin(
        self, config: TrainConfig | TeachConfig, content: Mapping[str, str], environment: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Begin the run in its folder, or check that the folder is this run's; return the summary if it is done.

        Args:
            config: All settings.
            content: What they resolved to, see `gatespace.config.identity`.
            environment: Versions, machine, threads.
        """
        from gatespace.config import dump_yaml, identity

        own: dict[str, Any] = {"identity": identity(config, content=content), "content": dict(content)}
        if self.identity_file.exists():
            other = self.identity()
            if other["identity"] != own["identity"]:
                raise self._other(_difference(self, config, other["content"], own["content"]))
            if self.is_done:
                shutil.rmtree(self.checkpoints, ignore_errors=True)  # in case of a kill between the two in `mark_done`
                return self.summary()
        atomic_write(self.config_file, dump_yaml(config))
        self._write("environment.json", environment)
        self._write("identity.json", own)
        return None

    def expect(self, config: TrainConfig | TeachConfig) -> None:
        """Refuse a folder with another run by its settings, for work before `begin`, which also compares contents."""
        from gatespace.config.identity import CONTENT

        if self.identity_file.exists():
            skip = tuple(path for name in self.identity()["content"] for path in CONTENT.get(name, ()))
            if changed := _changed_setting(self, config, skip):
                raise self._other(changed)

    def _other(self, why: str) -> UsageError:
        return UsageError(
            "output: this folder holds another run",
            got=self.path,
            why=why,
            instead="another output folder, or remove this one",
        )

    def open_logs(self, marks: Mapping[str, Mark]) -> dict[str, JsonLines]:
        """Open the logs, truncated to where the run resumes; those without a mark start empty."""
        logs = {name: JsonLines(self.log_file(name)) for name in LOGS}
        for name, log in logs.items():
            log.cut(marks.get(name, Mark()))
        return logs

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary; call `mark_done` once everything else is written."""
        self._write("summary.json", summary)

    def mark_done(self) -> None:
        """Write `done`, always last; remove checkpoints."""
        self.check_claim()
        atomic_write(self.done_file, "")
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def finish_baseline(self, about: Mapping[str, Any]) -> None:
        """Write what the evaluations in this folder are of, and mark it done."""
        atomic_write(self.path / "baseline.json", json.dumps(about, indent=2) + "\n")
        atomic_write(self.done_file, "")

    def fail(self, error: str, details: str = "") -> None:
        """Record a failure."""
        record = {"error": error, "details": details, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        atomic_write(self.error_file, json.dumps(record, indent=2) + "\n")

    def clear_failure(self) -> None:
        """Allow a failed run to be retried."""
        self.error_file.unlink(missing_ok=True)

    def failed_step(self, step: int, evidence: Mapping[str, Any], *, rank: int | None = None) -> Path:
        """Write diagnostics of a step that failed, and return the file."""
        self.check_claim()
        where = "" if rank is None else f"-process-{rank}"
        path = self.path / f"failed-step-{step}{where}.json"
        atomic_write(path, json.dumps({"step": step, **evidence}, indent=2, ensure_ascii=True) + "\n")
        return path

    def set_remote_step(self, step: int | None) -> None:
        """Set the step of a run whose records are on another machine; None once they are here."""
        path = self.path / "progress.json"
        if step is None:
            path.unlink(missing_ok=True)
        elif step != self._remote_step():
            atomic_write(path, json.dumps({"step": step}) + "\n")

    def _remote_step(self) -> int:
        try:
            return int(json.loads((self.path / "progress.json").read_text())["step"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_bytes())
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, str(error)) from None
        if not isinstance(found, dict):
            raise self._damaged(name, "it holds no JSON object")
        return found

    def _damaged(self, name: str, why: str) -> DamagedFileError:
        return DamagedFileError(
            f"{name} of a run is damaged",
            got=self.path / name,
            why=why,
            instead=f"the file as it was; or remove {self.path}, and do the run again",
        )

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        self.check_claim()
        atomic_write(self.path / name, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _difference(
    run: RunFolder, config: TrainConfig | TeachConfig, before: Mapping[str, str], now: Mapping[str, str]
) -> str:
    """Describe how the run in the folder differs from this one."""
    from gatespace.config.identity import CONTENT

    if before.get("processes") != now.get("processes"):
        return f"it is a run of {before.get('processes', '1')} processes, not {now.get('processes', '1')}"
    if {*before} ^ {*now} not in (set(), {"plugins"}):
        return "it is not a run of this command"
    for name in ("gate", "precision"):  # readable reasons first; precision also changes a teacher's hash
        if name in now and before[name] != now[name]:
            return f"its {name} is {before[name]}, not {now[name]}"
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            return f"changed: {name}"
    return _changed_setting(run, config, tuple(path for name in now for path in CONTENT[name])) or "its settings differ"


def _changed_setting(run: RunFolder, config: TrainConfig | TeachConfig, skip: tuple[str, ...]) -> str:
    """Describe a setting that counts and differs from the run's, "" for none; those under `skip` count by content."""
    from gatespace.config import load_config
    from gatespace.config.identity import counted, settings_of

    try:
        other = load_config(type(config), run.config_file)
    except UsageError:
        return "its settings differ"
    old, own = settings_of(other), settings_of(config)
    for path in {**counted(config), **counted(other)}:
        if not path.startswith(skip) and old.get(path) != own.get(path):
            return f"its {path} is {json.dumps(old.get(path))}, not {json.dumps(own.get(path))}"
    return ""
