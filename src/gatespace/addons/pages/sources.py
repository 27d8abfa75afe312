"""From the paths of a command line to the runs that are looked at: a run, several, or all of a study."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gatespace.config.text import read_yaml
from gatespace.errors import UsageError
from gatespace.gating.coefficients import Gate
from gatespace.study.records import RunResult, Score
from gatespace.study.results import read_results
from gatespace.study.store import DONE, STUDY

__all__ = ["Found", "Run", "find_runs", "read_run"]

_CONFIG, TOKENS = "config.yaml", "tokens.jsonl"


@dataclass(frozen=True)
class Run:
    """One training, as far as its folder tells.

    Args:
        folder: Where it lies.
        id: Its name among all runs that are looked at.
        label: The point, e.g. ``G5``, or the method, e.g. ``todi``.
        task: The task's name.
        kind: What it is for: ``point``, ``restriction``, ``static``, ``twin``, ``control``, ``published``.
        seed: Its seed.
        gate: The point of the family that it was trained at; None for a published method.
        top_k: K of the entropy signals.
        entropy: How they are read.
        steps: How many it has in all.
        done: Whether it ended.
        lam: λ over all its tokens, as its summary has it.
        scores: By split.
    """

    folder: Path
    id: str
    label: str
    task: str
    kind: str
    seed: int
    gate: Gate | None
    top_k: int
    entropy: str
    steps: int
    done: bool
    lam: Mapping[str, Any] | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What the paths led to."""

    title: str
    kind: str
    """``study``, ``run`` or ``runs``."""
    runs: tuple[Run, ...]
    home: Path
    """Where a page about them belongs."""


def find_runs(paths: Sequence[Path]) -> Found:
    """The runs at these paths: folders of runs, of a study, or folders that have folders of runs in them."""
    if not paths:
        raise UsageError("nothing to explore", instead="the folder of a run or of a study")
    places = [Path(path).expanduser().absolute() for path in paths]
    found: dict[Path, Run] = {}
    kinds = []
    for place, path in zip(places, paths, strict=True):
        kind, runs = _at(place, path)
        kinds.append(kind)
        found.update((run.folder.resolve(), run) for run in runs)
    runs = _distinct(list(found.values()))
    if not any((run.folder / TOKENS).is_file() for run in runs):
        raise UsageError(
            "there are no recorded tokens to explore",
            got=", ".join(str(path) for path in paths),
            why=f"no run here has a {TOKENS}",
            instead="a run of `gatespace train` whose setting trace.tokens_every is not 0",
        )
    one = len(places) == 1
    title = read_yaml((places[0] / STUDY).read_text("utf-8"), where=STUDY)["name"] if kinds == ["study"] else ""
    kind = kinds[0] if one else "runs"
    return Found(title or places[0].name or "runs", kind, tuple(runs), places[0] if one else Path.cwd())


def _at(place: Path, shown: Path) -> tuple[str, list[Run]]:
    if (place / STUDY).is_file():
        results = read_results(place)
        return "study", [run for result in results.runs.values() if (run := _of_study(result)) is not None]
    if (place / _CONFIG).is_file():
        run = read_run(place)
        if run is None:
            raise UsageError(
                "this run has no gate to explore",
                got=str(shown),
                why="it is not a run of `gatespace train`",
                instead="the folder of a distillation, or of a study",
            )
        return "run", [run]
    inside = sorted(place.iterdir()) if place.is_dir() else []
    runs = [run for one in inside if (one / _CONFIG).is_file() and (run := read_run(one)) is not None]
    if not runs:
        raise UsageError(
            "this is not the folder of a run or a study",
            got=str(shown),
            why=f"it has no {_CONFIG} and no {STUDY}" if place.is_dir() else "there is no such folder",
            instead="a folder that `gatespace train` or `gatespace run` has written",
        )
    return "runs", runs


def _of_study(result: RunResult) -> Run | None:
    """None where the run has not begun."""
    spec, folder = result.spec, result.folder
    config = _settings(folder)
    if config is None:
        return None
    gate = result.gate or spec.gate
    return Run(
        folder=folder,
        id=spec.id,
        label=spec.point,
        task=spec.task,
        kind=spec.kind,
        seed=spec.seed,
        gate=_recorded_gate(folder, config) or (None if gate is None else Gate(*gate)),
        lam=_summary(folder).get("run") if result.state == "done" else None,
        scores=result.scores,
        done=result.state == "done",
        **_common(config),
    )


def read_run(folder: Path) -> Run | None:
    """The run in `folder`; None for one that is not a distillation."""
    config = _settings(folder)
    if config is None:
        return None
    objective = config["objective"]
    gate = _recorded_gate(folder, config)
    done = (folder / DONE).exists()
    summary = _summary(folder) if done else {}
    label = objective["method"] if gate is None else gate.label
    kind = "published" if gate is None else "static" if gate.is_static else "point"
    if objective.get("shuffle"):
        label, kind = f"shuffled({label})", "control"
    return Run(
        folder=folder,
        id=folder.name,
        label=label,
        task=str((config.get("task") or {}).get("name", "")),
        kind=kind,
        seed=int(config.get("seed", 0)),
        gate=gate,
        lam=summary.get("run"),
        scores=_scores(summary),
        done=done,
        **_common(config),
    )


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    objective = config["objective"]
    return {
        "top_k": int(objective.get("top_k", 8)),
        "entropy": str(objective.get("entropy", "top_k")),
        "steps": int(config.get("steps", 0)),
    }


def _settings(folder: Path) -> Mapping[str, Any] | None:
    """What config.yaml says; None where there is none yet, or none of a distillation.

    It is read as it is and not as a `TrainConfig`: a run of another release can be looked at too.
    """
    try:
        text = (folder / _CONFIG).read_text("utf-8")
    except FileNotFoundError:
        return None
    config = read_yaml(text, where=str(folder / _CONFIG))
    usable = isinstance(config, dict) and isinstance(config.get("objective"), dict)
    return config if usable and "method" in config["objective"] else None


def _recorded_gate(folder: Path, config: Mapping[str, Any]) -> Gate | None:
    objective = config["objective"]
    if objective["method"] == "static":
        return Gate.static((objective.get("params") or {}).get("lam", 0.5))
    if objective["method"] != "gated":
        return None
    try:
        text = json.loads((folder / "identity.json").read_text())["content"]["gate"]
    except (FileNotFoundError, ValueError, KeyError):  # a run that is about to begin
        text = objective.get("gate")
    return Gate.parse(text) if isinstance(text, str) and text != "None" else None


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def _scores(summary: Mapping[str, Any]) -> dict[str, Score]:
    """By split; without those that an earlier release wrote in another form."""
    found = {}
    for split, record in (summary.get("evaluation") or {}).items():
        try:
            found[split] = Score.from_json(record)
        except (KeyError, TypeError):
            continue
    return found


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs of several places may have one name; a number tells them apart."""

    def named(runs: Sequence[Run]) -> Iterator[Run]:
        seen: dict[str, int] = {}
        for run in runs:
            seen[run.id] = seen.get(run.id, 0) + 1
            yield run if seen[run.id] == 1 else Run(**{**run.__dict__, "id": f"{run.id} ({seen[run.id]})"})

    return list(named(runs))
