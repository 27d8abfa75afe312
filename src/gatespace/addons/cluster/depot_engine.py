"""Any engine, with results that go through a URL instead of a folder that all machines see."""

from __future__ import annotations

import time
from concurrent import futures
from pathlib import Path

from gatespace.addons.cluster.depot import Depot
from gatespace.addons.cluster.scratch import progress_at
from gatespace.config import StudyConfig
from gatespace.config.text import read_yaml
from gatespace.errors import GatespaceError, UsageError
from gatespace.files import atomic_write
from gatespace.study.engines import Engine
from gatespace.study.jobs import Job, Outcome, folder_of
from gatespace.study.store import DONE, FAILED, STORE, STUDY, Store, far_progress_is, forget_far_progress

_FETCHERS = 4
_SECONDS_BETWEEN_LOOKS = 10.0


def join(depot: Depot, store: Store, config: StudyConfig) -> None:
    """Before a study begins: see that the depot is not another study's, and take over how it was begun there."""
    found = depot.read(STUDY)
    if found is None:
        return
    name = read_yaml(found.decode("utf-8"), where=f"{depot.url}/{STUDY}").get("name")
    if name != config.name:
        raise UsageError(
            "--results holds another study",
            got=depot.url,
            why=f"it is {name!r}, not {config.name!r}",
            instead="another URL",
        )
    if not (store.folder / STORE).exists():
        store.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(store.folder / STORE, depot.read(STORE) or "{}\n")


def publish(depot: Depot, store: Store) -> None:
    """When a study has begun: let those who know the URL alone go on with it."""
    for name in (STORE, STUDY):
        depot.write(name, (store.folder / name).read_bytes())


class DepotEngine:
    """Has another engine's workers work through a depot, and fills the study's folder from it.

    Args:
        inner: Does the jobs.
        depot: Where results go.
        store: The study's folder.
    """

    def __init__(self, inner: Engine, depot: Depot, store: Store) -> None:
        self._inner, self._depot, self._store = inner, depot, store
        self._pool = futures.ThreadPoolExecutor(_FETCHERS, thread_name_prefix="fetch")
        self._folders: dict[str, Path] = {}
        self._fetches: dict[futures.Future[Outcome], str] = {}
        self._look_under_way: futures.Future[None] | None = None
        self._looked = time.monotonic()

    @property
    def slots(self) -> int:
        return self._inner.slots + len(self._fetches)  # what is being fetched has no worker any more

    def start(self, name: str, job: Job) -> None:
        folder = folder_of(job)
        if self._depot.has(f"{self._place(folder)}/{DONE}"):
            self._fetch(name, folder, {"state": "done"})
            return
        self._folders[name] = folder
        depot = {"url": self._depot.url, "folder": str(self._store.folder)}
        self._inner.start(name, {**job, "depot": depot})

    def wait(self, seconds: float) -> list[tuple[str, Outcome]]:
        for name, outcome in self._inner.wait(0 if self._fetches else seconds):
            self._fetch(name, self._folders.pop(name), outcome)
        self._look()
        if not self._fetches:
            return []
        ready, _ = futures.wait(self._fetches, timeout=seconds, return_when=futures.FIRST_COMPLETED)
        return [(self._fetches.pop(future), future.result()) for future in ready]

    def close(self) -> None:
        self._inner.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _place(self, folder: Path) -> str:
        return folder.relative_to(self._store.folder).as_posix()

    def _fetch(self, name: str, folder: Path, outcome: Outcome) -> None:
        self._fetches[self._pool.submit(self._filled, folder, outcome)] = name

    def _filled(self, folder: Path, outcome: Outcome) -> Outcome:
        """Fill a piece of work's folder, and say how the work went."""
        done = outcome["state"] == "done"
        try:
            found = self._depot.get_folder(self._place(folder), folder, last=DONE if done else FAILED)
            if found:
                forget_far_progress(folder)
        except (GatespaceError, OSError) as error:
            return {"state": "failed", "error": str(error), "details": ""} if done else outcome
        finally:
            (folder / FAILED).unlink(missing_ok=True)
        if done and not found:
            error_text = f"its worker said that it is done, and {self._depot.url} does not have it"
            return {"state": "failed", "error": error_text, "details": ""}
        return outcome

    def _look(self) -> None:
        """See from time to time how far runs on other machines are."""
        busy = self._look_under_way is not None and not self._look_under_way.done()
        if self._folders and not busy and time.monotonic() - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._look_under_way = self._pool.submit(self._look_at, list(self._folders.values()))

    def _look_at(self, folders: list[Path]) -> None:
        for folder in folders:
            try:
                step = progress_at(self._depot, self._place(folder))
                if step and not (folder / DONE).exists():
                    far_progress_is(folder, step)
            except (GatespaceError, OSError):
                return  # the next look may succeed
