"""How a study or a run stands at a moment, as values that JSON knows. Nothing is written, and nothing is trained."""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatespace.addons.pages.sources import read_run
from gatespace.addons.pages.watch_records import Budget, Records, plain
from gatespace.config.text import read_yaml
from gatespace.errors import GatespaceError, UsageError
from gatespace.files import is_claimed
from gatespace.study.outlook import Outlook, Work, look, outline
from gatespace.study.store import BASES, DONE, ERROR, STUDY, Store, progress_of, seconds_of

__all__ = ["SCHEMA", "Watcher", "check_watchable"]

SCHEMA = 1
_CONFIG = "config.yaml"
_MOST_BYTES = 32_000_000
_FRESH_SECONDS = 0.8
_MOST_TEXT = 20_000


def check_watchable(folder: Path) -> bool:
    """Whether there is a study or a run in `folder` yet; an error where there is something else."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UsageError("only a folder can be watched", got=str(folder), instead="the folder of a study or of a run")
    if (folder / STUDY).is_file() or any(_run_folders(folder)):
        return True
    if any(not one.name.startswith(".") for one in folder.iterdir()):
        raise UsageError(
            "this is not the folder of a study or a run",
            got=str(folder),
            why=f"it has other things in it, and no {STUDY} and no {_CONFIG}",
            instead="a folder of `gatespace run` or `gatespace train`, or one that is not there yet",
        )
    return False


@dataclass(frozen=True)
class _Piece:
    """A run, or another piece of work of a study."""

    id: str
    title: str
    task: str
    point: str
    kind: str
    seed: int | None
    steps: int
    folder: Path
    state: str
    error: str = ""


@dataclass(frozen=True)
class _Look:
    """Everything at one moment."""

    kind: str
    """``study``, ``run``, ``runs``, or ``nothing`` where nothing has begun."""
    title: str
    alive: bool
    pieces: tuple[_Piece, ...] = ()
    seconds_left: float | None = None
    workers: int = 1
    problem: str = ""


class Watcher:
    """Looks at a folder, at most so often as is of use, however many ask.

    Args:
        folder: Of a study, of a run, or of runs; it need not be there yet.
        most_bytes: How much of the logs one look reads at most; the next goes on from there.
        fresh_seconds: For how long a look is good.
    """

    def __init__(
        self, folder: Path, *, most_bytes: int = _MOST_BYTES, fresh_seconds: float = _FRESH_SECONDS
    ) -> None:  # fmt: skip
        self.folder = Path(folder).expanduser().absolute()
        self._most_bytes, self._fresh_seconds = most_bytes, fresh_seconds
        self._epoch = secrets.token_hex(4)
        self._version = 0
        self._at = -math.inf
        self._look = _Look("nothing", self.folder.name, alive=False)
        self._records: dict[Path, Records] = {}
        self._finals: dict[Path, tuple[Any, float | None]] = {}
        self._outline: tuple[Any, list[Work], str] | None = None
        self._configs: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def snapshot(self, since: str = "") -> dict[str, Any]:
        """How it stands, with the curves that have changed.

        Args:
            since: `version` of the snapshot that the asker has; from another watcher, or "", it gives all curves.
        """
        with self._lock:
            if time.monotonic() - self._at >= self._fresh_seconds:
                self._refresh()
                self._at = time.monotonic()
            return self._told(since)

    # ------------------------------------------------------------------ looking

    def _refresh(self) -> None:
        try:
            self._look = self._see()
        except (GatespaceError, OSError, ValueError, KeyError) as error:
            # Files may be changing hands. What was seen last is better than nothing, with the reason beside it.
            text = str(error) if isinstance(error, GatespaceError) else f"{type(error).__name__}: {error}"
            self._look = _Look(**{**self._look.__dict__, "problem": text[:_MOST_TEXT]})
        self._version += 1
        budget = Budget(self._most_bytes)
        for piece in sorted(self._look.pieces, key=lambda piece: piece.state != "running"):
            records = self._records.setdefault(piece.folder, Records(piece.folder))
            records.read(budget, self._version)
            if piece.state == "done" and self._final_is_new(piece.folder):
                records.version = self._version
        gone = self._records.keys() - {piece.folder for piece in self._look.pieces}
        for held in (self._records, self._finals, self._configs):
            for folder in gone & held.keys():
                del held[folder]

    def _see(self) -> _Look:
        if (self.folder / STUDY).is_file():
            return self._see_study()
        folders = list(_run_folders(self.folder))
        if not folders:
            return _Look("nothing", self.folder.name, alive=False)
        pieces = tuple(self._run_in(folder) for folder in folders)
        kind = "run" if folders == [self.folder] else "runs"
        return _Look(kind, self.folder.name, any(piece.state == "running" for piece in pieces), pieces)

    def _see_study(self) -> _Look:
        store = Store(self.folder)
        written = tuple(_mark(self.folder / name) for name in (STUDY, BASES))
        if self._outline is None or self._outline[0] != written:
            config = store.config()
            self._outline = (written, outline(store, config)[1], config.name)
        _, work, name = self._outline
        outlook = look(store, work)
        pieces = tuple(_piece_of(store, one, outlook) for one in work)
        left = outlook.seconds_left(store.workers)
        return _Look("study", name, is_claimed(self.folder), pieces, left, store.workers)

    def _run_in(self, folder: Path) -> _Piece:
        mark = (_mark(folder / _CONFIG), _mark(folder / DONE))
        held = self._configs.get(folder)
        if held is None or held[0] != mark:
            held = self._configs[folder] = (mark, _about(folder))
        store = Store(folder)
        return _Piece(folder=folder, state=store.state(folder), error=store.error(folder), **held[1])

    def _final_is_new(self, folder: Path) -> bool:
        """Whether the accuracy on validation at the end has come since the last look."""
        path = folder / "evaluation-val.json"
        mark, held = _mark(path), self._finals.get(folder)
        if held is not None and held[0] == mark:
            return False
        self._finals[folder] = (mark, _accuracy(path))
        return True

    def _final(self, piece: _Piece) -> float | None:
        return self._finals.get(piece.folder, (None, None))[1] if piece.state == "done" else None

    # ------------------------------------------------------------------ telling

    def _told(self, since: str) -> dict[str, Any]:
        seen = self._look
        epoch, _, text = since.partition(".")
        known = int(text) if epoch == self._epoch and text.isdecimal() else 0
        rows = [self._row(piece) for piece in seen.pieces]
        records = {piece.id: (piece, self._records[piece.folder]) for piece in seen.pieces}
        return {
            "schema": SCHEMA,
            "version": f"{self._epoch}.{self._version}",
            "whole": known == 0,
            "kind": seen.kind,
            "title": seen.title,
            "folder": str(self.folder),
            "alive": seen.alive,
            "state": _state(seen, [row["state"] for row in rows]),
            "workers": seen.workers,
            "seconds_left": plain(self._seconds_left(seen)),
            "behind": any(one.behind for _, one in records.values()),
            "problem": seen.problem,
            "rows": rows,
            "curves": {
                name: one.curves(self._at_the_end(piece))
                for name, (piece, one) in records.items()
                if one.version > known and (piece.steps or one.steps)
            },
        }

    def _at_the_end(self, piece: _Piece) -> tuple[int, float] | None:
        final = self._final(piece)
        return None if final is None else (self._records[piece.folder].step or piece.steps, final)

    def _row(self, piece: _Piece) -> dict[str, Any]:
        records, state = self._records[piece.folder], piece.state
        step = progress_of(piece.folder) if records.behind or not records.steps else records.step
        if state == "waiting" and step > 0:
            state = "stopped"
        on_the_way = max(records.accuracies.items(), default=(0, None))[1]
        details = _failure(piece.folder) if state == "failed" else {}
        return {
            "id": piece.id,
            "title": piece.title,
            "task": piece.task,
            "point": piece.point,
            "kind": piece.kind,
            "seed": piece.seed,
            "state": state,
            "step": min(step, piece.steps) if piece.steps else step,
            "steps": piece.steps,
            "loss": plain(records.loss[-1]) if records.loss else None,
            "lam": plain(records.lam[-1]) if records.lam else None,
            "accuracy": plain(self._final(piece) if state == "done" else on_the_way),
            "seconds": plain(seconds_of(piece.folder)) if state in ("running", "done") else None,
            "error": piece.error[:_MOST_TEXT],
            "details": str(details.get("details") or "")[-_MOST_TEXT:],
            "when": str(details.get("when") or ""),
        }

    def _seconds_left(self, seen: _Look) -> float | None:
        """By the study's own estimate; that of runs alone is by the pace of their last steps."""
        if seen.kind == "study":
            return seen.seconds_left
        running = [(piece, self._records[piece.folder]) for piece in seen.pieces if piece.state == "running"]
        left = [(piece.steps - one.step) * (one.seconds_per_step or math.nan) for piece, one in running]
        return max(left) if left and not any(map(math.isnan, left)) else None


# ---------------------------------------------------------------------------------------------------- helpers


def _run_folders(folder: Path) -> Iterator[Path]:
    if (folder / _CONFIG).is_file():
        yield folder
    elif folder.is_dir():
        yield from sorted(one for one in folder.iterdir() if (one / _CONFIG).is_file())


def _piece_of(store: Store, work: Work, outlook: Outlook) -> _Piece:
    run, state = work.run, str(outlook.states[work.name])
    reason = outlook.blocked.get(work.name, "")
    return _Piece(
        id=work.name,
        title=work.title,
        task=work.task,
        point=run.point if run is not None else work.title.removesuffix(f" of {work.task}"),
        kind=run.kind if run is not None else "preparation",
        seed=None if run is None else run.seed,
        steps=work.steps,
        folder=work.folder,
        state="blocked" if reason else state,
        error=reason or (store.error(work.folder) if state == "failed" else ""),
    )


def _about(folder: Path) -> dict[str, Any]:
    """What a run's configuration says of it."""
    found: dict[str, Any] = {"id": folder.name, "title": folder.name, "kind": "run", "seed": None, "steps": 0}
    config = read_yaml((folder / _CONFIG).read_text("utf-8"), where=_CONFIG)
    config = config if isinstance(config, dict) else {}
    task = config.get("task")
    found |= {"task": str(task.get("name") or "") if isinstance(task, dict) else "", "point": "teach"}
    found |= {name: value for name in ("seed", "steps") if isinstance(value := config.get(name), int)}
    try:
        run = read_run(folder)
    except (GatespaceError, OSError, ValueError, KeyError, TypeError):  # of another release; there is less to say of it
        return found | {"point": folder.name}
    return found if run is None else found | {"point": run.label, "kind": run.kind}


def _state(seen: _Look, states: list[str]) -> str:
    if seen.alive:
        return "running"
    if all(state == "done" for state in states):
        return "done" if states else "nothing"
    if all(state in ("done", "failed", "blocked") for state in states):
        return "failed"
    return "stopped"


def _failure(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / ERROR).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _accuracy(path: Path) -> float | None:
    try:
        return float(json.loads(path.read_text("utf-8"))["metrics"]["accuracy"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino
