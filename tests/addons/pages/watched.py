"""Folders of studies and runs as gatespace writes them, without training anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gatespace.config import StudyConfig, parse_config
from gatespace.files import encode
from gatespace.runs import RunFolder, StudyFolder
from gatespace.study.outlook import Work, outline

STUDY: dict[str, Any] = {
    "name": "watched",
    "tasks": {"messages": {"task": {"name": "synthetic", "brief": True}}},
    "teach": {"teacher": {"model": "tiny", "steps": 4}},
    "train": {"steps": 10, "pair": {"student": "tiny-student"}},
    "points": ["G4", "G5"],
    "seeds": [1, 2],
    "axes": {"restrictions": False, "static": [0.5], "isolation": {}, "published": ["todi"]},
}


def begin(path: Path, **changes: Any) -> tuple[StudyFolder, dict[str, Work]]:
    """A study that has begun, and its pieces of work by title."""
    config = parse_config(StudyConfig, STUDY | changes)
    study = StudyFolder(path)
    study.begin(config, workers=2, threads=1)
    return study, {work.title: work for work in outline(study, config)[1]}


def record(step: int, **changes: Any) -> dict[str, Any]:
    left = math.exp(-step / 5)
    return {"step": step, "loss": 0.2 + left, "lam_mean": 0.6 - 0.2 * left, "forward_kl": left, **changes}


def lines(path: Path, *records: dict[str, Any], tail: bytes = b"") -> None:
    """Add whole lines to a log, and perhaps a torn one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(map(encode, records)) + tail)


def under_way(run: RunFolder, steps: int, *, first: int = 1, accuracy: float | None = None) -> None:
    """A run that has recorded some steps."""
    lines(run.log_file("metrics"), *(record(step) for step in range(first, first + steps)))
    lines(run.log_file("timings"), *({"step": i, "wall": {"update": 0.5, "score": 1.0}} for i in range(steps)))
    if accuracy is not None:
        lines(run.log_file("evaluations"), {"step": steps, "split": "val", "accuracy": accuracy, "macro_f1": 0.1})
    run.config_file.touch()


def finish(run: RunFolder, accuracy: float) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    for split, value in (("val", accuracy), ("test", 0.999)):
        run.evaluation_file(split).write_text(json.dumps({"metrics": {"accuracy": value}}))
    run.mark_done()
