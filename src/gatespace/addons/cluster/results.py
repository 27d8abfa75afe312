"""Results of a study at a URL, for workers that do not see the study's folder.

At the URL:

    study.yaml, store.json            as in the study's folder
    models/…  baselines/…  runs/ID/…  folders of finished jobs; `done` is written last
    runs/ID/unfinished/step-N-…/      a checkpoint with the records up to it; `whole` is written last
    runs/ID/reads/…                   every read of a held-out split, logged before its result is known

On a worker's machine, in its scratch folder (`scratch_of`):

    models/NAME/            models trained by the study, fetched once per machine
    scores/                 teacher scores, shared by the runs of this machine
    attempts/…/ID/          a run in progress; removed once its results are at the URL
    attempts/…/plugins/     the user's plugins, sent with the job
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from gatespace.addons.cluster.storage import Storage
from gatespace.config import StudyConfig, TeachConfig, TrainConfig, dump_yaml, parse_config
from gatespace.config.text import read_yaml
from gatespace.errors import GatespaceError, RunError, UsageError
from gatespace.files import atomic_write, claim, is_claimed
from gatespace.models.cache_root import cache_root
from gatespace.runs import RunFolder, StudyFolder
from gatespace.study.engines import Engine
from gatespace.study.jobs import Job, Outcome, Perform, failed, folder_of, perform

DONE, FAILED, UNFINISHED, WHOLE, LEDGER = "done", "failed", "unfinished", "whole", "reads"
_SNAPSHOT = re.compile(r"step-(\d{6,})-[0-9a-f]+")
_POLL_SECONDS = 1.0
_SECONDS_BETWEEN_LOOKS = 10.0
_FETCHES = 5
_FETCHERS = 4


def relocated(value: Any, before: Path, after: Path) -> Any:
    """Rewrite every path at or below `before` in plain data to the same path below `after`."""
    if isinstance(value, Mapping):
        return {key: relocated(one, before, after) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [relocated(one, before, after) for one in value]
    if isinstance(value, str) and (value == str(before) or value.startswith(f"{before}{os.sep}")):
        return str(after) + value[len(str(before)) :]
    return value


def scratch_of(name: str) -> Path:
    """Return this machine's scratch folder for a study, by the URL or folder of its results."""
    return cache_root() / "studies" / hashlib.sha256(name.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------- driver side


class UrlResults:
    """Results of a study at a URL; raises if the URL holds another study.

    Args:
        url: Any URL that fsspec supports.
        folder: The study's folder, filled from the URL.
        config: The study file.
    """

    threads: int | None = None
    """Threads per run with which the study was started there."""

    def __init__(self, url: str, folder: StudyFolder, config: StudyConfig) -> None:
        self._storage, self._folder = Storage(url), folder
        found = self._storage.read(folder.study_file.name)
        if found is None:
            return
        name = read_yaml(found.decode("utf-8"), where=f"{self._storage.url}/{folder.study_file.name}").get("name")
        if name != config.name:
            raise UsageError(
                "--results holds another study",
                got=self._storage.url,
                why=f"it is {name!r}, not {config.name!r}",
                instead="another URL",
            )
        self.threads = json.loads(self._storage.read(folder.store_file.name) or b"{}").get("threads")

    @property
    def perform(self) -> Perform:
        """The function with which a worker runs a job."""
        return partial(perform_through, url=self._storage.url, study=str(self._folder))

    def publish(self) -> None:
        """Upload what another machine needs to resume the study from the URL."""
        for path in (self._folder.store_file, self._folder.study_file):
            self._storage.write(path.name, path.read_bytes())

    def through(self, engine: Engine) -> UrlEngine:
        """Wrap an engine so that outcomes arrive once the results are in the study's folder."""
        return UrlEngine(engine, self._storage, self._folder)


class UrlEngine:
    """An engine whose workers upload results to a URL, from which the study's folder is filled."""

    def __init__(self, inner: Engine, storage: Storage, folder: StudyFolder) -> None:
        self._inner, self._storage, self._study = inner, storage, folder
        self._pool = futures.ThreadPoolExecutor(_FETCHERS, thread_name_prefix="fetch")
        self._working: dict[str, RunFolder] = {}
        self._fetching: dict[futures.Future[Outcome], str] = {}
        self._polling: futures.Future[None] | None = None
        self._looked = time.monotonic()

    @property
    def slots(self) -> int:
        return self._inner.slots + len(self._fetching)  # jobs being fetched no longer occupy a worker

    def start(self, name: str, job: Job) -> None:
        folder = folder_of(job)
        if self._storage.has(f"{self._place(folder)}/{DONE}"):
            self._fetch(name, folder, {"state": "done"})
            return
        self._working[name] = folder
        self._inner.start(name, self._with_sources(job))

    def _with_sources(self, job: Job) -> Job:
        """Add the source of plugins in the study's folder, which workers do not see."""
        plugins = _within(self._study.plugins, job["config"]["plugins"])
        return {**job, "sources": {path: Path(path).read_text("utf-8") for path in plugins}}

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        for name, outcome in self._inner.wait(0 if self._fetching else seconds):
            self._fetch(name, self._working.pop(name), outcome)
        self._poll_progress()
        if not self._fetching:
            return []
        ready, _ = futures.wait(self._fetching, timeout=seconds, return_when=futures.FIRST_COMPLETED)
        return [(self._fetching.pop(future), future.result()) for future in ready]

    def close(self) -> None:
        self._inner.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _place(self, folder: RunFolder) -> str:
        return folder.path.relative_to(self._study.path).as_posix()

    def _fetch(self, name: str, folder: RunFolder, outcome: Outcome) -> None:
        self._fetching[self._pool.submit(self._filled, folder, outcome)] = name

    def _filled(self, folder: RunFolder, outcome: Outcome) -> Outcome:
        """Fill the folder of a job that has ended, and return its outcome."""
        done = outcome["state"] == "done"
        try:
            found = self._storage.get_folder(self._place(folder), folder.path, last=DONE if done else FAILED)
            if found:
                folder.set_remote_step(None)
        except (GatespaceError, OSError) as error:
            return failed(str(error)) if done else outcome
        finally:
            (folder.path / FAILED).unlink(missing_ok=True)
        if done and not found:
            return failed(f"its worker reported that it is done, and {self._storage.url} does not have it")
        return outcome

    def _poll_progress(self) -> None:
        """Poll the progress of runs on other machines."""
        busy = self._polling is not None and not self._polling.done()
        if self._working and not busy and time.monotonic() - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._polling = self._pool.submit(self.record_progress, list(self._working.values()))

    def record_progress(self, folders: list[RunFolder]) -> None:
        """Record the progress of runs from their snapshots at the URL."""
        for folder in folders:
            try:
                step = progress_at(self._storage, self._place(folder))
                if step and not folder.is_done:
                    folder.set_remote_step(step)
            except (GatespaceError, OSError):
                return  # the next poll may succeed


# ---------------------------------------------------------------------------------------------------- worker side


def perform_through(job: Job, *, url: str, study: str) -> None:
    """Run a job, resuming from the URL, and upload its results. Finished jobs are not rerun."""
    storage, home, final = Storage(url), StudyFolder(study), folder_of(job)
    scratch = StudyFolder(scratch_of(storage.url))
    place = final.path.relative_to(home.path).as_posix()
    if storage.has(f"{place}/{DONE}"):
        return
    attempts = scratch.path / "attempts"
    _remove_dead(attempts, final.path.name)
    attempt = attempts / uuid.uuid4().hex
    run = RunFolder(attempt / final.path.name)
    local: Job = relocated(job, home.plugins, attempt / "plugins")
    # The job's own folder first, as it lies inside the study's.
    local = relocated(relocated(local, final.path, run.path), home.path, scratch.path)
    with claim(attempt):
        try:
            for path, source in job["sources"].items():
                atomic_write(Path(relocated(path, home.plugins, attempt / "plugins")), source)
            for path in _within(home.models, _models(job)):
                name = Path(path).relative_to(home.models).parts[0]
                _fetch_model(storage, scratch.model(name), f"{home.models.name}/{name}")
            _restore(storage, place, run)
            _work(local, storage, place, run)
            _rewrite_paths(job, run, scratch.path, home.path)
            if not storage.has(f"{place}/{DONE}"):  # a worker presumed lost may have finished first
                storage.put_folder(run.path, place, last=DONE, leave=_is_scrap)
        finally:
            shutil.rmtree(attempt, ignore_errors=True)
    with suppress(GatespaceError):  # obsolete, and harmless if they stay
        storage.remove(f"{place}/{UNFINISHED}")
        storage.remove(f"{place}/{FAILED}")


def _within(folder: Path, paths: list[str]) -> list[str]:
    return [path for path in paths if Path(path).is_relative_to(folder)]


def _models(job: Job) -> list[str]:
    """Return the models that a job starts from."""
    roles = {"teach": [], "baseline": [job.get("role", "")], "train": ["teacher", "student"]}[job["do"]]
    return [str(job["config"]["pair"][role]) for role in roles]


def _work(local: Job, storage: Storage, place: str, run: RunFolder) -> None:
    def publish(line: bytes) -> None:
        storage.write(f"{place}/{LEDGER}/{time.time_ns():020d}-{uuid.uuid4().hex[:8]}", line)

    try:
        with snapshots(storage, place, run):
            perform(local, publish)
    except Exception:
        # Upload what the failed step recorded; this machine's folder is out of reach.
        with suppress(GatespaceError, OSError):
            storage.put_folder(run.path, place, last=FAILED, leave=_is_bulk)
        raise


def _rewrite_paths(job: Job, run: RunFolder, scratch: Path, study: Path) -> None:
    """Rewrite this machine's paths in records to those of the study."""
    if job["do"] == "baseline":
        run.finish_baseline(relocated(run.baseline(), scratch, study))
        return
    kind = TeachConfig if job["do"] == "teach" else TrainConfig
    began = run.config_file.stat().st_mtime  # the start time of the run is read from this file
    atomic_write(run.config_file, dump_yaml(parse_config(kind, job["config"])))
    os.utime(run.config_file, (began, began))


def _remove_dead(attempts: Path, name: str) -> None:
    """Remove leftovers of this job's attempts whose processes were killed."""
    for attempt in attempts.glob("*"):
        if (attempt / name).exists() and not is_claimed(attempt):
            shutil.rmtree(attempt, ignore_errors=True)


def _fetch_model(storage: Storage, model: RunFolder, place: str) -> None:
    """Fetch a model trained by the study, once per machine."""
    model.path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(model.path.with_name(f".{model.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not model.is_done and not storage.get_folder(place, model.path, last=DONE):
            raise RunError(f"{place} is not there", got=storage.url, why="this run begins with it")
    finally:
        os.close(lock)


# ---------------------------------------------------------------------------------------------------- snapshots


def progress_at(storage: Storage, place: str) -> int:
    """Return the step from which a run can resume at the URL."""
    return max((step for step, _ in _snapshots(storage, place)), default=0)


def _snapshots(storage: Storage, place: str) -> list[tuple[int, str]]:
    """Return (step, name) pairs, latest first."""
    matches = (_SNAPSHOT.fullmatch(name) for name in storage.names(f"{place}/{UNFINISHED}"))
    return sorted(((int(match[1]), match[0]) for match in matches if match), reverse=True)


def _restore(storage: Storage, place: str, run: RunFolder) -> None:
    """Fetch the state of an earlier attempt from the URL."""
    for _ in range(_FETCHES):  # a surviving worker may replace the snapshot being fetched
        if fetch_latest(storage, place, run):
            break
    # The ledger also has reads after the checkpoint.
    lines = [storage.read(f"{place}/{LEDGER}/{name}") or b"" for name in storage.names(f"{place}/{LEDGER}")]
    if lines:
        atomic_write(run.reads_file, b"".join(lines))


def fetch_latest(storage: Storage, place: str, run: RunFolder) -> bool:
    """Fetch the latest complete snapshot; False if there is none."""
    for _, name in _snapshots(storage, place):
        if storage.get_folder(f"{place}/{UNFINISHED}/{name}", run.path, last=WHOLE):
            (run.path / WHOLE).unlink()
            return True
        shutil.rmtree(run.path, ignore_errors=True)
    return False


@contextmanager
def snapshots(storage: Storage, place: str, run: RunFolder) -> Iterator[None]:
    """Upload new checkpoints of a run to the URL, in a background thread.

    Storage errors do not stop the run: they may be over when the results are uploaded.
    """
    over = threading.Event()
    put = max(run.checkpoint_steps(), default=0)  # the fetched one is already there

    def catch_up() -> None:
        nonlocal put
        latest = max(run.checkpoint_steps().items(), default=None)
        if latest is not None and latest[0] != put:
            with suppress(GatespaceError, OSError):
                put_snapshot(storage, place, run, *latest)
                put = latest[0]

    def watch() -> None:
        while not over.wait(_POLL_SECONDS):
            catch_up()

    thread = threading.Thread(target=watch, name="snapshots", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        over.set()
        thread.join()
        catch_up()  # a failed run has checkpointed the steps it completed
        raise
    finally:
        over.set()
        thread.join()


def put_snapshot(storage: Storage, place: str, run: RunFolder, step: int, checkpoint: Path) -> None:
    """Upload a checkpoint with its records, then remove earlier ones."""
    stage = run.path.parent / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    # The run continues meanwhile. Checkpoint files never change but may be removed: hard links keep them. Logs grow:
    # they are copied after the checkpoint, so that they cover at least its steps.
    kept = stage / checkpoint.relative_to(run.path)
    kept.mkdir(parents=True)
    for path in checkpoint.iterdir():
        try:
            os.link(path, kept / path.name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copy2(path, kept / path.name)
    for path in run.path.rglob("*"):
        name = path.relative_to(run.path)
        if path.is_file() and not _is_bulk(name.as_posix()):
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                shutil.copy2(path, stage / name)
    own = f"step-{step:06d}-{uuid.uuid4().hex[:8]}"
    storage.put_folder(stage, f"{place}/{UNFINISHED}/{own}", last=WHOLE)
    shutil.rmtree(stage, ignore_errors=True)
    for earlier, old in _snapshots(storage, place):
        if earlier < step:
            storage.remove(f"{place}/{UNFINISHED}/{old}")


def _is_scrap(name: str) -> bool:
    """Whether a file is machine-specific or obsolete."""
    path = PurePosixPath(name)
    return path.name == ".lock" or path.name.endswith(".tmp") or path.parts[0] == "checkpoints"


def _is_bulk(name: str) -> bool:
    first = PurePosixPath(name).parts[0]
    return _is_scrap(name) or first == "model" or first.startswith(".model.")
