"""Live page of a study or a run: a read-only loopback server protected by a token.

`Watcher` reads a folder and returns a JSON-serializable snapshot; `watch_server` serves it. The folder is never
written. The address of the page, port and token, is stored in the user's cache, readable by the user alone, so that an
open page or a bookmark works again after a restart. No torch here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gatespace.addons.pages.explore import read_run
from gatespace.addons.pages.page import Reply, loopback_server, render
from gatespace.errors import GatespaceError, UsageError
from gatespace.evaluation.metrics import metric_of
from gatespace.models.cache_root import cache_root
from gatespace.runs import RunFolder, StudyFolder
from gatespace.study.outlook import Outlook, Work, outline, read_outlook

__all__ = ["Watch", "Watcher", "check_watchable", "watch_server"]

SCHEMA = 1
MOST_POINTS = 240
"""Max points per curve, about a chart's width in pixels."""
_RECENT = 20
_MOST_BYTES = 32_000_000
_FRESH_SECONDS = 0.8
_MOST_TEXT = 20_000
_TOKEN_BYTES = 24
_PRIVATE = 0o600


# ---------------------------------------------------------------------------------------------------- server


@dataclass(frozen=True)
class Watch:
    """A bound server and its address; `server.serve_forever` starts it."""

    server: ThreadingHTTPServer
    token: str

    @property
    def port(self) -> int:
        """Port it listens on."""
        return int(self.server.server_address[1])

    @property
    def url(self) -> str:
        """Address for a browser."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"


def check_watchable(folder: Path) -> bool:
    """Return whether `folder` holds a study or a run yet; raise if it holds something else."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UsageError("only a folder can be watched", got=str(folder), instead="the folder of a study or of a run")
    if StudyFolder(folder).exists or any(_runs_in(folder)):
        return True
    if any(not one.name.startswith(".") for one in folder.iterdir()):
        raise UsageError(
            "this is not the folder of a study or a run",
            got=str(folder),
            why="it has other things in it, and no study.yaml and no config.yaml",
            instead="a folder of `gatespace run` or `gatespace train`, or one that is not there yet",
        )
    return False


def watch_server(folder: Path, *, port: int | None = None, new_address: bool = False) -> Watch:
    """Return a server for the live page of `folder`.

    Args:
        folder: Folder of a study or a run; need not exist yet.
        port: None: the previous one if it is free, else any; 0: any free port.
        new_address: Make a new token, so that earlier addresses stop working.
    """
    place = Path(folder).expanduser().absolute()
    kept = None if new_address else _kept_address(place)
    token = secrets.token_urlsafe(_TOKEN_BYTES) if kept is None else kept[1]
    reply = _replies(Watcher(place), token)
    try:
        server = loopback_server(reply, port=kept[0] if kept is not None and port is None else port or 0)
    except UsageError:
        if port is not None or kept is None:
            raise
        server = loopback_server(reply)  # another watcher of this folder has the port
    watch = Watch(server, token)
    if kept is None or port is not None:
        _keep_address(place, watch)
    return watch


def _replies(watcher: Watcher, token: str) -> Callable[[str], Reply]:
    def reply(target: str) -> Reply:
        try:
            parts = urlsplit(target)
            query = parse_qs(parts.query)
        except ValueError:  # e.g. //[
            return Reply(HTTPStatus.BAD_REQUEST, "not an address\n")
        given = query.get("token", [""])[-1]
        # Without the token nothing is revealed, not even which paths exist; the comparison is constant-time.
        if not hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode()):
            text = "the address that `gatespace watch` printed has a token: use all of it\n"
            return Reply(HTTPStatus.FORBIDDEN, text)
        if parts.path == "/":
            title = f"{watcher.folder.name} – gatespace watch"
            page = render("watch", title=title, data={"schema": SCHEMA}, connect=True)
            return Reply(HTTPStatus.OK, page, "text/html", "frame-ancestors 'none'")
        if parts.path == "/snapshot":
            found = watcher.snapshot(query.get("since", [""])[-1])
            return Reply(HTTPStatus.OK, json.dumps(found, allow_nan=False), "application/json")
        return Reply(HTTPStatus.NOT_FOUND, "only / and /snapshot are served here\n")

    return reply


def _address_file(folder: Path) -> Path:
    return cache_root() / "watch" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"


def _kept_address(folder: Path) -> tuple[int, str] | None:
    """Return (port, token) of an earlier server; None if there was none, or others could have read them."""
    path = _address_file(folder)
    try:
        about = path.stat()
        if about.st_mode & 0o077 or about.st_uid != os.getuid():
            return None
        found = json.loads(path.read_text("utf-8"))
        port, token = int(found["port"]), str(found["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (port, token) if 0 < port < 65536 and len(token) >= _TOKEN_BYTES and token.isascii() else None


def _keep_address(folder: Path, watch: Watch) -> None:
    path = _address_file(folder)
    text = json.dumps({"folder": str(folder), "port": watch.port, "token": watch.token}) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except OSError:  # not fatal: a restart only gets another address
        with suppress(OSError):
            beside.unlink()


# ---------------------------------------------------------------------------------------------------- snapshots


@dataclass(frozen=True)
class _Item:
    """A run or another job of a study."""

    folder: RunFolder
    state: str
    id: str
    title: str
    task: str
    point: str
    kind: str
    seed: int | None
    steps: int
    error: str = ""

    @property
    def place(self) -> Path:
        return self.folder.path


@dataclass(frozen=True)
class _State:
    """Everything read in one refresh."""

    kind: str
    """``study``, ``run``, ``runs``, or ``nothing`` before anything has started."""
    title: str
    alive: bool = False
    items: tuple[_Item, ...] = ()
    seconds_left: float | None = None
    workers: int = 1
    problem: str = ""


class Watcher:
    """Reads a folder, at most once per `fresh_seconds`, however many requests there are.

    Args:
        folder: Folder of a study, a run, or several runs; need not exist yet.
        most_bytes: Max bytes of logs per refresh; the next one continues from there.
        fresh_seconds: How long a refresh is reused.
    """

    def __init__(
        self, folder: Path, *, most_bytes: int = _MOST_BYTES, fresh_seconds: float = _FRESH_SECONDS
    ) -> None:  # fmt: skip
        self.folder = Path(folder).expanduser().absolute()
        self._most_bytes, self._fresh_seconds = most_bytes, fresh_seconds
        self._epoch = secrets.token_hex(4)
        self._version = 0
        self._at = -math.inf
        self._state = _State("nothing", self.folder.name)
        self._records: dict[Path, Records] = {}
        # Parsed settings, with marks that change when their files do.
        self._abouts: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._outline: tuple[Any, list[Work], str] | None = None
        self._lock = threading.Lock()

    def snapshot(self, since: str = "") -> dict[str, Any]:
        """Return the current state, with the curves that have changed.

        Args:
            since: `version` of the client's last snapshot; "", or one from another watcher, returns all curves.
        """
        with self._lock:
            if time.monotonic() - self._at >= self._fresh_seconds:
                self._refresh()
                self._at = time.monotonic()
            return self._snapshot(since)

    # ------------------------------------------------------------------ reading

    def _refresh(self) -> None:
        try:
            self._state = self._read()
        except (GatespaceError, OSError, ValueError, KeyError) as error:
            # Files may be changing: keep the last state, and show the reason with it.
            text = str(error) if isinstance(error, GatespaceError) else f"{type(error).__name__}: {error}"
            self._state = replace(self._state, problem=text[:_MOST_TEXT])
        self._version += 1
        budget = Budget(self._most_bytes)
        for item in sorted(self._state.items, key=lambda item: item.state != "running"):
            records = self._records.setdefault(item.place, Records(item.folder))
            records.read(budget, self._version, done=item.state == "done")
        gone = self._records.keys() - {item.place for item in self._state.items}
        for held in (self._records, self._abouts):
            for place in gone & held.keys():
                del held[place]

    def _read(self) -> _State:
        if StudyFolder(self.folder).exists:
            return self._read_study(StudyFolder(self.folder))
        runs = list(_runs_in(self.folder))
        if not runs:
            return _State("nothing", self.folder.name)
        items = tuple(self._run(run) for run in runs)
        kind = "run" if runs[0].path == self.folder else "runs"
        return _State(kind, self.folder.name, any(item.state == "running" for item in items), items)

    def _read_study(self, study: StudyFolder) -> _State:
        written = (_mark(study.study_file), _mark(study.bases_file))
        if self._outline is None or self._outline[0] != written:
            config = study.config()
            self._outline = (written, outline(study, config)[1], config.name)
        _, work, name = self._outline
        outlook = read_outlook(study, work)
        items = tuple(_item_of(one, outlook) for one in work)
        return _State("study", name, study.is_running, items, outlook.seconds_left(study.workers), study.workers)

    def _run(self, run: RunFolder) -> _Item:
        mark = (_mark(run.config_file), _mark(run.done_file))
        held = self._abouts.get(run.path)
        if held is None or held[0] != mark:
            held = self._abouts[run.path] = (mark, _about(run))
        return _Item(folder=run, state=run.state, error=run.error(), **held[1])

    # ------------------------------------------------------------------ response

    def _snapshot(self, since: str) -> dict[str, Any]:
        seen = self._state
        epoch, _, text = since.partition(".")
        known = int(text) if epoch == self._epoch and text.isdecimal() else 0
        rows = [self._row(item) for item in seen.items]
        records = {item.id: (item, self._records[item.place]) for item in seen.items}
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
                name: one.curves(item.steps)
                for name, (item, one) in records.items()
                if one.version > known and (item.steps or one.steps)
            },
        }

    def _row(self, item: _Item) -> dict[str, Any]:
        records, state = self._records[item.place], item.state
        step = item.folder.last_step() if records.behind or not records.steps else records.step
        if state == "waiting" and step > 0:
            state = "stopped"
        on_the_way = max(records.accuracies.items(), default=(0, None))[1]
        failure = item.folder.failure() if state == "failed" else {}
        return {
            "id": item.id,
            "title": item.title,
            "task": item.task,
            "point": item.point,
            "kind": item.kind,
            "seed": item.seed,
            "state": state,
            "step": min(step, item.steps) if item.steps else step,
            "steps": item.steps,
            "loss": plain(records.loss[-1]) if records.loss else None,
            "lam": plain(records.lam[-1]) if records.lam else None,
            "accuracy": plain(records.final if state == "done" else on_the_way),
            "metric": records.metric,
            "seconds": plain(item.folder.seconds()) if state in ("running", "done") else None,
            "error": item.error[:_MOST_TEXT],
            "details": str(failure.get("details") or "")[-_MOST_TEXT:],
            "when": str(failure.get("when") or ""),
            "alarms": records.alarms,
        }

    def _seconds_left(self, seen: _State) -> float | None:
        """Return the study's own estimate; for runs without a study, extrapolate from their last steps."""
        if seen.kind == "study":
            return seen.seconds_left
        running = [(item, self._records[item.place]) for item in seen.items if item.state == "running"]
        left = [(item.steps - one.step) * (one.seconds_per_step or math.nan) for item, one in running]
        return max(left) if left and not any(map(math.isnan, left)) else None


def _runs_in(folder: Path) -> Iterator[RunFolder]:
    if RunFolder(folder).config_file.is_file():
        yield RunFolder(folder)
    elif folder.is_dir():
        yield from (run for one in sorted(folder.iterdir()) if (run := RunFolder(one)).config_file.is_file())


def _item_of(work: Work, outlook: Outlook) -> _Item:
    run, state = work.run, outlook.states[work.name]
    reason = outlook.blocked.get(work.name, "")
    return _Item(
        folder=work.folder,
        state="blocked" if reason else state,
        id=work.name,
        title=work.title,
        task=work.task,
        point=run.point if run is not None else work.title.removesuffix(f" of {work.task}"),
        kind=run.kind if run is not None else "preparation",
        seed=None if run is None else run.seed,
        steps=work.steps,
        error=reason or (work.folder.error() if state == "failed" else ""),
    )


def _about(run: RunFolder) -> dict[str, Any]:
    """Describe a run by its configuration."""
    name, settings = run.path.name, run.settings()
    task = settings.get("task")
    numbers = {key: value if isinstance(value := settings.get(key), int) else None for key in ("seed", "steps")}
    found: dict[str, Any] = {
        "id": name,
        "title": name,
        "task": str(task.get("name") or "") if isinstance(task, dict) else "",
        "point": "teach",
        "kind": "run",
        "seed": numbers["seed"],
        "steps": numbers["steps"] or 0,
    }
    try:
        distilled = read_run(run)
    except (GatespaceError, OSError, ValueError, KeyError, TypeError):  # written by another release
        return found | {"point": name}
    return found if distilled is None else found | {"point": distilled.label, "kind": distilled.kind}


def _state(seen: _State, states: list[str]) -> str:
    if seen.alive:
        return "running"
    if all(state == "done" for state in states):
        return "done" if states else "nothing"
    if all(state in ("done", "failed", "blocked") for state in states):
        return "failed"
    return "stopped"


def _mark(path: Path) -> tuple[int, int, int] | None:
    """A value that changes with the file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino


# ---------------------------------------------------------------------------------------------------- growing logs
# A resumed run truncates its logs and rewrites them from the checkpoint, a folder may vanish and come back, and a copy
# may replace a file. In every case the state in memory must match the files.


class Budget:
    """Bytes one refresh may still read, so that long logs do not stall a page."""

    def __init__(self, left: int) -> None:
        self.left = left


class Tail:
    """A JSON-lines log, read incrementally."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.behind = False
        """Whether the budget left part of the file unread."""
        self._offset = 0
        self._file: tuple[int, int] | None = None
        self._last = b""

    def read(self, budget: Budget) -> tuple[bool, list[dict[str, Any]]]:
        """Return (whether everything read before is void, new records)."""
        try:
            file = self.path.open("rb")
        except OSError:
            return self._forget(), []
        with file:
            about = os.fstat(file.fileno())
            same = self._file == (about.st_dev, about.st_ino) and self._offset <= about.st_size and self._is_last(file)
            anew = False if same else self._forget()
            self._file = (about.st_dev, about.st_ino)
            wanted = about.st_size - self._offset
            if wanted <= 0 or budget.left <= 0:
                self.behind = wanted > 0
                return anew, []
            file.seek(self._offset)
            data = file.read(min(wanted, budget.left))
            if len(data) < wanted and not data.endswith(b"\n"):
                data += file.readline()  # exceed the budget to finish the line
        budget.left -= len(data)
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)  # skip an incomplete last line
        self._offset += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        self.behind = len(data) < wanted
        return anew, [record for line in lines if (record := _record(line)) is not None]

    def _is_last(self, file: Any) -> bool:
        """Whether the last line read is still in place."""
        file.seek(self._offset - len(self._last))
        return bool(file.read(len(self._last)) == self._last)

    def _forget(self) -> bool:
        held = self._offset > 0
        self._offset, self._file, self._last, self.behind = 0, None, b"", False
        return held


class Records:
    """One run's logs as columns, and its final evaluation."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._metrics, self._evaluations, self._alarms, self._timings = (
            Tail(run.log_file(name)) for name in ("metrics", "evaluations", "alarms", "timings")
        )
        self.steps, self.loss, self.lam = array("q"), array("d"), array("d")
        self.accuracies: dict[int, float] = {}
        """Step → validation accuracy, or the score of a text task."""
        self.metric = ""
        """Name of that metric; "" until known."""
        self.final: float | None = None
        """Final value for a finished run."""
        self._final_step: int | None = None
        self._final_mark: Any = None
        self.alarms: list[dict[str, Any]] = []
        """Step, name and text of each alarm raised."""
        self._pace: deque[float] = deque(maxlen=_RECENT)
        self.version = 0
        """`Watcher` version of the last change."""

    @property
    def behind(self) -> bool:
        """Whether the files have unread records."""
        return self._metrics.behind or self._evaluations.behind

    @property
    def step(self) -> int:
        """Last step."""
        return self.steps[-1] if self.steps else 0

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last steps."""
        return math.fsum(self._pace) / len(self._pace) if self._pace else None

    def read(self, budget: Budget, version: int, *, done: bool = False) -> None:
        """Read new records; `version` is the refresh's, `done` whether the run is finished."""
        anew, records = self._metrics.read(budget)
        if anew:
            del self.steps[:], self.loss[:], self.lam[:]
        for record in records:
            self._add(record)
        again, evaluations = self._evaluations.read(budget)
        if again:
            self.accuracies.clear()
        for record in evaluations:
            # Test is held out until the end: it must not influence decisions on the way.
            if record.get("split") == "val" and isinstance(record.get("step"), int):
                self.accuracies[record["step"]] = _number(record.get("accuracy", record.get("score")))
                self.metric = str(record.get("metric", "accuracy"))[:_MOST_TEXT]
        silent, alarms = self._alarms.read(budget)
        if silent:
            self.alarms = []
        for record in alarms:
            text = " ".join(str(record.get(key) or "") for key in ("seen", "helps"))[:_MOST_TEXT]
            self.alarms.append(
                {"step": plain(_number(record.get("step"))), "alarm": str(record.get("alarm")), "text": text}
            )
        void, timings = self._timings.read(budget)
        if void:
            self._pace.clear()
        for record in timings[-_RECENT:]:
            wall = record.get("wall")
            self._pace.append(math.fsum(map(_number, wall.values())) if isinstance(wall, dict) else math.nan)
        ended = self._read_final(done)
        if anew or again or records or evaluations or ended:
            self.version = version

    def _read_final(self, done: bool) -> bool:
        """Read the final accuracy; return whether it has changed since the last refresh."""
        mark = _mark(self._run.evaluation_file("val")) if done else None
        if mark == self._final_mark:
            return False
        self.final, self._final_step, self._final_mark = None, None, mark
        if mark is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                self.metric, self.final = metric_of((self._run.evaluation("val") or {})["metrics"])
                self._final_step = (self._run.summary() or {}).get("chosen_step")
        return True

    def _add(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        while self.steps and self.steps[-1] >= step:
            del self.steps[-1], self.loss[-1], self.lam[-1]
        self.steps.append(step)
        self.loss.append(_number(record.get("loss")))
        self.lam.append(_number(record.get("lam_mean")))

    def curves(self, steps: int, most: int = MOST_POINTS) -> dict[str, Any]:
        """Return the columns for JSON, downsampled to `most` points; `steps` is the total of the run."""
        accuracies = self.accuracies | (
            {} if self.final is None else {self._final_step or self.step or steps: self.final}
        )
        evaluated = sorted(accuracies)
        return {
            "step": thinned(self.steps, most, last=True),
            "loss": thinned(self.loss, most),
            "lam": thinned(self.lam, most),
            "evaluated": evaluated,
            "accuracy": [plain(accuracies[step]) for step in evaluated],
        }


def thinned(values: Sequence[float], most: int, *, last: bool = False) -> list[float | None]:
    """Downsample to at most `most` groups of equal size: the mean of each, or its last value.

    Examples:
        >>> thinned([1.0, 3.0, float("nan"), 5.0, 7.0], 3)
        [2.0, 5.0, 7.0]
    """
    size = max(1, math.ceil(len(values) / most))
    groups = (values[start : start + size] for start in range(0, len(values), size))
    return [plain(group[-1]) if last else plain(_mean(group)) for group in groups]


def plain(value: float | None) -> float | None:
    """Round a number for JSON to the digits a chart can show; None if it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
