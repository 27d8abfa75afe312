"""Explorer page: the effect of gates on the recorded tokens of runs. No torch here.

Folders of runs or of a study → `find_runs` → `payload`, the page's data → `build_explorer`, the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import gatespace
from gatespace.addons.pages.page import render
from gatespace.errors import UsageError
from gatespace.evidence.accuracy import accuracy_interval
from gatespace.files import atomic_write
from gatespace.gating.coefficients import SATURATION, Gate, named_points
from gatespace.runs import RunFolder, StudyFolder, pages_of
from gatespace.study.records import Score
from gatespace.study.results import read_results

__all__ = ["Explorer", "build_explorer", "find_runs", "payload", "read_run"]

SCHEMA = 1
"""Version of the page's data; must match `web/src/explorer/data.ts`."""
MOST_TOKENS = 50_000
"""Default maximum of tokens on a page: about 8 MB."""
FILE = "explorer.html"
_BINS = 20
_PAPER = ("h", "u", "gap")
_OTHER = ("lam", "forward_kl", "reverse_kl")
_NO_SIGNALS = frozenset({*_PAPER, *_OTHER, "loss", "tail_mass", "weight"})
_COURSE = ("loss", "lam_mean", "lam_sd", "lam_saturated", "forward_kl", "reverse_kl", "h", "u", "gap", "grad_norm")
_COURSE_POINTS = 240
_NONE = -1


@dataclass(frozen=True)
class Explorer:
    """The page and its source."""

    found: Found
    data: Any
    html: str

    @property
    def counts(self) -> dict[str, int]:
        """Number of runs, responses and tokens shown, and of responses recorded."""
        return {
            "runs": len(self.data["runs"]),
            "responses": len(self.data["responses"]["run"]),
            "recorded": sum(run["recorded"] for run in self.data["runs"]),
            "tokens": len(self.data["tokens"]["text"]),
        }

    def write(self, path: Path | None = None) -> Path:
        """Write the page, by default into the folder it shows, and return its path."""
        place = self.found.home / FILE if path is None else Path(path).expanduser()
        if place.is_dir():
            place /= FILE
        atomic_write(place, self.html)
        return place


def build_explorer(
    paths: Sequence[Path], *, gates: Sequence[Gate] = (), most_tokens: int = MOST_TOKENS
) -> Explorer:  # fmt: skip
    """Build the explorer of these runs in their current state.

    Args:
        paths: Folders of runs or of a study.
        gates: Up to two initial gates.
        most_tokens: Max tokens on the page.
    """
    if len(gates) > 2:
        raise UsageError("the explorer holds two gates side by side", got=f"{len(gates)} gates", instead="one or two")
    found = find_runs(paths)
    data = payload(found, gates=gates, most_tokens=most_tokens, version=gatespace.__version__)
    for gate in gates:
        if unknown := sorted(set(gate.extra) - set(data["signals"])):
            raise UsageError(
                f"the signal {unknown[0]} was not recorded by these runs",
                got=str(gate),
                why="a browser can compute λ only from signals that tokens.jsonl has",
                instead=f"signals here: {', '.join(data['signals'])}",
            )
    return Explorer(found, data, render("explorer", title=f"{found.title} – gatespace explorer", data=data))


# ---------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Run:
    """One distillation run, as read from its folder."""

    folder: RunFolder
    id: str
    """Unique name on the page."""
    label: str
    """The point, e.g. ``G5``, or the method, e.g. ``todi``."""
    task: str
    kind: str
    """Role: ``point``, ``restriction``, ``static``, ``twin``, ``control``, ``published``."""
    gate: Gate | None
    """As trained; None for a published method."""
    settings: Mapping[str, Any]
    lam: Mapping[str, Any] | None = None
    """λ over all its tokens, from its summary."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """Scores by split."""


@dataclass(frozen=True)
class Found:
    """Runs found at the given paths."""

    title: str
    kind: str
    """``study``, ``run`` or ``runs``."""
    runs: tuple[Run, ...]
    home: Path
    """Default folder for the page."""


def find_runs(paths: Sequence[Path]) -> Found:
    """Find the runs at these paths: folders of runs, a study or its archive, or folders that contain run folders."""
    if not paths:
        raise UsageError("nothing to explore", instead="the folder of a run or of a study")
    places = [_at(path) for path in paths]
    by_folder = {run.folder.path.resolve(): run for place in places for run in place.runs}
    runs: list[Run] = []
    seen: dict[str, int] = {}
    for run in by_folder.values():  # number runs of the same name from different places
        seen[run.id] = seen.get(run.id, 0) + 1
        runs.append(run if seen[run.id] == 1 else replace(run, id=f"{run.id} ({seen[run.id]})"))
    if not any(run.folder.log_file("tokens").is_file() for run in runs):
        raise UsageError(
            "there are no recorded tokens to explore",
            got=", ".join(str(path) for path in paths),
            why="no run here has a tokens.jsonl",
            instead="a run of `gatespace train` whose setting trace.tokens_every is not 0",
        )
    if len(places) == 1:
        return replace(places[0], runs=tuple(runs))
    return Found(places[0].home.name or "runs", "runs", tuple(runs), Path.cwd())


def _at(path: Path) -> Found:
    place = Path(path).expanduser().absolute()
    if StudyFolder(place).exists or place.is_file():
        results = read_results(place)
        runs = []
        for result in results.runs.values():
            run, spec = read_run(RunFolder(result.folder)), result.spec
            if run is not None:  # started
                planned = result.gate or spec.gate
                gate = run.gate or (None if planned is None else Gate(*planned))
                runs.append(replace(run, id=spec.id, label=spec.point, task=spec.task, kind=spec.kind, gate=gate))
        return Found(results.name, "study", tuple(runs), pages_of(place))
    if RunFolder(place).config_file.is_file():
        run = read_run(RunFolder(place))
        if run is None:
            raise UsageError(
                "this run has no gate to explore",
                got=str(path),
                why="it is not a run of `gatespace train`",
                instead="the folder of a distillation, or of a study",
            )
        return Found(place.name, "run", (run,), place)
    inside = sorted(place.iterdir()) if place.is_dir() else []
    runs = [run for one in inside if (run := read_run(RunFolder(one))) is not None]
    if not runs:
        raise UsageError(
            "this is not the folder of a run or a study",
            got=str(path),
            why="it has no config.yaml and no study.yaml" if place.is_dir() else "there is no such folder",
            instead="a folder that `gatespace train` or `gatespace run` has written",
        )
    return Found(place.name, "runs", tuple(runs), place)


def read_run(folder: RunFolder) -> Run | None:
    """Read the run in `folder`; None if it has not started, or is not a distillation.

    Settings are read raw, not as a `TrainConfig`, so that runs of other releases can be shown too.
    """
    if not folder.config_file.is_file():
        return None
    settings = folder.settings()
    objective = settings.get("objective")
    if not isinstance(objective, dict) or "method" not in objective:
        return None
    gate = _gate(folder, objective)
    label = objective["method"] if gate is None else gate.label
    kind = "published" if gate is None else "static" if gate.is_static else "point"
    if objective.get("shuffle"):
        label, kind = f"shuffled({label})", "control"
    summary = folder.summary() or {}
    return Run(
        folder=folder,
        id=folder.path.name,
        label=label,
        task=_task(settings),
        kind=kind,
        gate=gate,
        settings=settings,
        lam=summary.get("run"),
        scores=_scores(summary),
    )


def _gate(folder: RunFolder, objective: Mapping[str, Any]) -> Gate | None:
    if objective["method"] == "static":
        return Gate.static((objective.get("params") or {}).get("lam", 0.5))
    if objective["method"] != "gated":
        return None
    try:
        text = folder.identity()["content"]["gate"]
    except (FileNotFoundError, ValueError, KeyError):  # a run that is just starting
        text = objective.get("gate")
    return Gate.parse(text) if isinstance(text, str) and text != "None" else None


def _scores(summary: Mapping[str, Any]) -> dict[str, Score]:
    """Return scores by split, skipping those in an earlier release's format."""
    found = {}
    for split, record in (summary.get("evaluation") or {}).items():
        try:
            found[split] = Score.from_json(record)
        except (KeyError, TypeError):
            continue
    return found


# ---------------------------------------------------------------------------------------------------- page data


def payload(found: Found, *, gates: Sequence[Gate] = (), most_tokens: int = MOST_TOKENS, version: str = "") -> Any:
    """Build the page's data, JSON-serializable: runs, points with accuracies, tokens in columns.

    Args:
        found: The runs.
        gates: Initial gates; none: the gate of the first run that has one.
        most_tokens: Max tokens; beyond it, responses are dropped, from large runs first and evenly over their steps.
        version: Version of gatespace.
    """
    recorded = [run.folder.log("tokens") for run in found.runs]
    kept = [_thinned(records, share) for records, share in zip(recorded, _shares(recorded, most_tokens), strict=True)]
    table = _Table(_further(kept))
    for index, records in enumerate(kept):
        chats = _text_task(found.runs[index].settings).get("messages")
        for record in records:
            table.add(index, {**record, "text": _turns(record["text"])} if chats else record)
    return {
        "schema": SCHEMA,
        "version": version,
        "title": found.title,
        "kind": found.kind,
        "saturation": SATURATION,
        "bins": _BINS,
        "points": {name: _gate_data(gate) for name, gate in named_points().items()},
        "start": [_gate_data(gate) for gate in gates],
        "runs": [
            _run_data(run, shown=len(few), of=len(all_))
            for run, few, all_ in zip(found.runs, kept, recorded, strict=True)
        ],
        "marks": _marks(found.runs),
        **table.columns(),
    }


def _run_data(run: Run, *, shown: int, of: int) -> dict[str, Any]:
    objective = run.settings["objective"]
    return {
        "id": run.id,
        "label": run.label,
        "task": run.task,
        "metric": _metric(run.settings),
        "kind": run.kind,
        "seed": int(run.settings.get("seed", 0)),
        "gate": None if run.gate is None else _gate_data(run.gate),
        "top_k": int(objective.get("top_k", 8)),
        "entropy": str(objective.get("entropy", "top_k")),
        "steps": int(run.settings.get("steps", 0)),
        "done": run.folder.is_done,
        "shown": shown,
        "recorded": of,
        "lam": _lam_data(run.lam),
        "scores": {split: _score_data(score) for split, score in run.scores.items()},
        "course": _course(run.folder.log("metrics")),
    }


def _task(settings: Mapping[str, Any]) -> str:
    task = settings.get("task") or {}
    own = task.get("text") or task.get("table") or {}
    return str(task.get("name") or own.get("name") or own.get("source", ""))


def _text_task(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return (settings.get("task") or {}).get("text") or {}


def _metric(settings: Mapping[str, Any]) -> str:
    return str(_text_task(settings).get("metric", "accuracy"))


def _turns(chat: str) -> str:
    """A conversation, recorded as JSON, to be read."""
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in json.loads(chat))


def _gate_data(gate: Gate) -> dict[str, Any]:
    """Gate for JSON; an infinite c (a static λ of 0 or 1) becomes text."""
    values = [value if math.isfinite(value) else str(value) for value in gate.abcd]
    return {"abcd": values, "extra": dict(gate.extra)}


def _lam_data(lam: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if lam is None or lam.get("lam_mean") is None:
        return None
    # Runs of earlier releases lack some of these.
    further = {name: lam.get(f"lam_{name}") for name in ("sd", "saturated", "rkl_mean")}
    return {"mean": lam["lam_mean"], **further, "tokens": lam.get("tokens")}


def _score_data(score: Score) -> dict[str, Any]:
    low, high = accuracy_interval([score]) or (None, None)
    names, constant = ("accuracy", "correct", "count", "macro_f1"), score.best_constant
    shares = {"best_constant": constant and constant.accuracy, "low": low, "high": high}
    return {name: getattr(score, name) for name in names} | shares


def _marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the trained points with their accuracies; all seeds of a point are one mark."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.task, run.label, run.kind), []).append(index)
    found = []
    for (task, label, kind), members in groups.items():
        # A static twin has the mean λ of its own seed, so its seeds differ in gate: use the first.
        gate = next((runs[i].gate for i in members if runs[i].gate is not None), None)
        mark = {"label": label, "task": task, "kind": kind, "gate": None if gate is None else _gate_data(gate)}
        found.append(mark | {"runs": members} | _accuracy([runs[i] for i in members]))
    return found


def _accuracy(runs: Sequence[Run]) -> dict[str, Any]:
    done = [run for run in runs if run.scores]
    split = next((split for split in ("test", "val") if done and all(split in run.scores for run in done)), None)
    if split is None:
        return {"split": None, "accuracy": None, "low": None, "high": None, "interval": ""}
    scores = [run.scores[split] for run in done]
    shares = [score.accuracy for score in scores]
    how = f"over {len(scores)} seeds" if len(scores) > 1 else f"over {scores[0].count} texts, one seed"
    low, high = accuracy_interval(scores) or (None, None)
    return {"split": split, "accuracy": fmean(shares), "low": low, "high": high, "interval": how}


def _course(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return per-step metrics; for a long run, evenly spaced steps and the last."""
    stride = max(1, math.ceil(len(records) / _COURSE_POINTS))
    few = [record for place, record in enumerate(records) if place % stride == 0 or place == len(records) - 1]
    names = [name for name in _COURSE if any(record.get(name) is not None for record in few)]
    return {"step": [record["step"] for record in few], **{n: [_short(record.get(n)) for record in few] for n in names}}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value


# ---------------------------------------------------------------------------------------------------- tokens


def _shares(recorded: Sequence[Sequence[Mapping[str, Any]]], most: int) -> list[float]:
    """Return the fraction of each run's tokens to show; small runs keep all of theirs."""
    sizes = [sum(len(record["ids"]) for record in records) for records in recorded]
    left, room = most, {}
    for place, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        room[index] = min(sizes[index], left // (len(sizes) - place))
        left -= room[index]
    return [room[index] / size if size else 1.0 for index, size in enumerate(sizes)]


def _thinned(records: Sequence[Mapping[str, Any]], share: float) -> list[Mapping[str, Any]]:
    """Return this share of the responses, evenly spaced."""
    if share >= 1.0:
        return list(records)
    return [one for place, one in enumerate(records) if int((place + 1) * share) > int(place * share)]


def _further(kept: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Signals beyond the paper's."""
    names = {name for records in kept for record in records for name in record["values"]}
    return sorted(names - _NO_SIGNALS)


class _Table:
    """Responses and tokens as columns. Each text is stored once and referenced by index."""

    def __init__(self, further: Sequence[str]) -> None:
        self._further = further
        self._strings: dict[str, int] = {}
        self._responses: dict[str, list[Any]] = {
            name: []
            for name in ("run", "step", "row", "text", "gold", "label", "source", "ended", "start")
        }  # fmt: skip
        self._tokens: dict[str, list[Any]] = {name: [] for name in ("text", *_PAPER, *_OTHER, *further)}
        self._top: dict[str, list[Any]] = {"teacher": [], "teacher_p": [], "student": [], "student_p": []}
        self._most = 0

    def add(self, run: int, record: Mapping[str, Any]) -> None:
        """Add one line of tokens.jsonl."""
        texts = {name: self._string(record.get(name)) for name in ("text", "gold", "label")}
        row = {
            "run": run,
            "step": record["step"],
            "row": record["row"],
            **texts,
            "source": self._string(record.get("source", "student")),
            "ended": int(bool(record.get("ended"))),
            "start": len(self._tokens["text"]),
        }
        for name, value in row.items():
            self._responses[name].append(value)
        count, values = len(record["tokens"]), record["values"]
        self._tokens["text"] += [self._string(text) for text in record["tokens"]]
        for name in (*_PAPER, *_OTHER, *self._further):
            self._tokens[name] += values.get(name) or [None] * count
        for model in ("teacher", "student"):
            for top in record[f"{model}_top"]:
                self._most = max(self._most, len(top))
                self._top[model].append([self._string(text) for text, _ in top])
                self._top[f"{model}_p"].append([p for _, p in top])

    def columns(self) -> dict[str, Any]:
        """Return all columns."""

        def flat(rows: Sequence[Sequence[Any]], fill: Any) -> list[Any]:
            return [value for row in rows for value in (*row, *[fill] * (self._most - len(row)))]

        top = {name: flat(rows, None if name.endswith("_p") else _NONE) for name, rows in self._top.items()}
        return {
            "signals": [*_PAPER, *self._further],
            "strings": list(self._strings),
            "responses": self._responses,
            "tokens": self._tokens,
            "top": {"count": self._most, **top},
        }

    def _string(self, text: str | None) -> int:
        return _NONE if text is None else self._strings.setdefault(text, len(self._strings))
