"""A job whose results go through a URL: done in a folder of the machine's own, by a process that may be lost any time.

    models/NAME/         models that the study made, fetched once per machine
    scores/              the teacher's answers, shared by the runs of this machine
    attempts/…/ID/       a run that is under way; gone when its results are at the URL

What a run has done up to a checkpoint is put at the URL beside it, so that another machine can go on from there.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from gatespace.addons.cluster.depot import Depot
from gatespace.config import TeachConfig, TrainConfig, dump_yaml, parse_config
from gatespace.errors import GatespaceError, RunError
from gatespace.files import atomic_write, claim, is_claimed
from gatespace.study.jobs import Job, folder_of, perform, relocated, scratch_of
from gatespace.study.store import DONE, FAILED, READS

UNFINISHED, WHOLE, LEDGER = "unfinished", "whole", "reads"
_CHECKPOINTS, _MODEL = "checkpoints", "model"
_CHECKPOINT = re.compile(r"step-(\d{6,})")
_SNAPSHOT = re.compile(r"step-(\d{6,})-[0-9a-f]+")
_POLL_SECONDS = 1.0
_FETCHES = 5


def execute_in_scratch(job: Job) -> None:
    """Do a job from what the depot has, and put there what comes of it. Nothing is done where it is done already."""
    depot, study = Depot(job["depot"]["url"]), Path(job["depot"]["folder"])
    scratch = scratch_of(depot.url)
    final = folder_of(job)
    place = final.relative_to(study).as_posix()
    if depot.has(f"{place}/{DONE}"):
        return
    _remove_dead(scratch / "attempts", final.name)
    attempt = scratch / "attempts" / uuid.uuid4().hex
    folder = attempt / final.name
    # The job's own folder first: it lies below the study's.
    local: Job = relocated(relocated(job, final, folder), study, scratch)
    with claim(attempt):
        try:
            for name in _models(job, study):
                _fetch_model(depot, scratch, name)
            _take_up(depot, place, folder)
            _work(local, depot, place, folder)
            _speak_of_the_study(job, folder, scratch, study)
            _deliver(depot, place, folder)
            _keep_model(folder, scratch / place)
        finally:
            shutil.rmtree(attempt, ignore_errors=True)
    with suppress(GatespaceError):  # they are of no more use, and do no harm
        depot.remove(f"{place}/{UNFINISHED}")
        depot.remove(f"{place}/{FAILED}")


def _work(local: Job, depot: Depot, place: str, folder: Path) -> None:
    def publish(line: bytes) -> None:
        depot.write(f"{place}/{LEDGER}/{time.time_ns():020d}-{uuid.uuid4().hex[:8]}", line)

    try:
        with snapshots(depot, place, folder):
            perform(local, publish)
    except Exception:
        # What a failed step saw is in its folder, which would be out of reach.
        with suppress(GatespaceError, OSError):
            depot.put_folder(folder, place, last=FAILED, leave=_is_bulk)
        raise


def _deliver(depot: Depot, place: str, folder: Path) -> None:
    if not depot.has(f"{place}/{DONE}"):  # a worker that was given up for lost may have been quicker
        depot.put_folder(folder, place, last=DONE, leave=_is_scrap)


def _speak_of_the_study(job: Job, folder: Path, scratch: Path, study: Path) -> None:
    """Have the records name the places of the study and not those of this machine, which mean nothing elsewhere."""
    path = folder / "config.yaml"
    if path.exists():
        kind = TeachConfig if job["do"] == "teach" else TrainConfig
        began = path.stat().st_mtime  # when the run began is read from this file
        atomic_write(path, dump_yaml(parse_config(kind, job["config"])))
        os.utime(path, (began, began))
    path = folder / "baseline.json"
    if path.exists():
        found = relocated(json.loads(path.read_text("utf-8")), scratch, study)
        atomic_write(path, json.dumps(found, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------- models


def _models(job: Job, study: Path) -> list[str]:
    """Places of the models of the study that a job reads."""
    roles = {"teach": [], "baseline": [job.get("role", "")], "train": ["teacher", "student"]}[job["do"]]
    models = study / "models"
    named = (Path(str(job["config"]["pair"][role])) for role in roles)
    return [f"models/{path.relative_to(models).parts[0]}" for path in named if path.is_relative_to(models)]


def _fetch_model(depot: Depot, scratch: Path, place: str) -> None:
    with _one_at_a_time(scratch / place):
        if (scratch / place / DONE).exists():
            return
        if not depot.get_folder(place, scratch / place, last=DONE):
            raise RunError(f"{place} is not there", got=depot.url, why="this run begins with it")


def _keep_model(folder: Path, place: Path) -> None:
    """A model that this machine has made need not be fetched by it."""
    if place.parent.name == "models":
        with _one_at_a_time(place):
            if not place.exists():
                os.rename(folder, place)


@contextmanager
def _one_at_a_time(place: Path) -> Iterator[None]:
    place.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(place.with_name(f".{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------- going on


def progress_at(depot: Depot, place: str) -> int:
    """The step up to which a run can be taken up from the depot."""
    return max((step for step, _ in _snapshots(depot, place)), default=0)


def _snapshots(depot: Depot, place: str) -> list[tuple[int, str]]:
    """(step, name), the latest first."""
    matches = (_SNAPSHOT.fullmatch(name) for name in depot.names(f"{place}/{UNFINISHED}"))
    return sorted(((int(match[1]), match[0]) for match in matches if match), reverse=True)


def _take_up(depot: Depot, place: str, folder: Path) -> None:
    """Fetch what an earlier attempt has left at the depot."""
    for _ in range(_FETCHES):  # a worker that lives on may replace the one that is being fetched
        if _fetch_latest(depot, place, folder):
            (folder / WHOLE).unlink()
            break
    # The ledger has also what was read after the checkpoint.
    lines = [depot.read(f"{place}/{LEDGER}/{name}") or b"" for name in depot.names(f"{place}/{LEDGER}")]
    if lines:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / READS, b"".join(lines))


def _fetch_latest(depot: Depot, place: str, folder: Path) -> bool:
    """Fetch the latest snapshot that is whole; False where none is."""
    for _, name in _snapshots(depot, place):
        if depot.get_folder(f"{place}/{UNFINISHED}/{name}", folder, last=WHOLE):
            return True
        shutil.rmtree(folder, ignore_errors=True)
    return False


@contextmanager
def snapshots(depot: Depot, place: str, folder: Path) -> Iterator[None]:
    """Put every new checkpoint of a run at the depot, in a thread beside it.

    Trouble with the storage does not stop the run here: it can still be over when the results are to be put.
    """
    over = threading.Event()
    put = max((step for step, _ in _checkpoints(folder)), default=0)  # what was fetched is there

    def catch_up() -> None:
        nonlocal put
        latest = max(_checkpoints(folder), default=None)
        if latest is not None and latest[0] != put:
            with suppress(GatespaceError, OSError):
                put_snapshot(depot, place, folder, *latest)
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
        catch_up()  # a run that cannot go on has saved the steps that it did
        raise
    finally:
        over.set()
        thread.join()


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    try:
        found = list((folder / _CHECKPOINTS).iterdir())
    except FileNotFoundError:
        return []
    return [(int(match[1]), path) for path in found if (match := _CHECKPOINT.fullmatch(path.name))]


def put_snapshot(depot: Depot, place: str, folder: Path, step: int, checkpoint: Path) -> None:
    """Put a checkpoint with the records that belong to it, and then take away those before it."""
    stage = folder.parent / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    # The run goes on meanwhile. Files of a checkpoint never change but may be removed: links keep them. Logs grow: they
    # are copied, after the checkpoint, so that they reach at least as far.
    kept = stage / checkpoint.relative_to(folder)
    kept.mkdir(parents=True)
    for path in checkpoint.iterdir():
        try:
            os.link(path, kept / path.name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copy2(path, kept / path.name)
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and not _is_bulk(name.as_posix()):
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                shutil.copy2(path, stage / name)
    own = f"step-{step:06d}-{uuid.uuid4().hex[:8]}"
    depot.put_folder(stage, f"{place}/{UNFINISHED}/{own}", last=WHOLE)
    shutil.rmtree(stage, ignore_errors=True)
    for earlier, old in _snapshots(depot, place):
        if earlier < step:
            depot.remove(f"{place}/{UNFINISHED}/{old}")


def _is_scrap(name: str) -> bool:
    """Files that mean nothing outside of the folder's own machine, or nothing any more."""
    path = PurePosixPath(name)
    return path.name == ".lock" or path.name.endswith(".tmp") or path.parts[0] == _CHECKPOINTS


def _is_bulk(name: str) -> bool:
    first = PurePosixPath(name).parts[0]
    return _is_scrap(name) or first == _MODEL or first.startswith(f".{_MODEL}.")


def _remove_dead(attempts: Path, name: str) -> None:
    """Remove what attempts at this piece of work have left here whose processes were killed."""
    for attempt in attempts.glob("*"):
        if (attempt / name).exists() and not is_claimed(attempt):
            shutil.rmtree(attempt, ignore_errors=True)
