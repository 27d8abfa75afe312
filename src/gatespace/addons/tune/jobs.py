"""Execution of a search's jobs by a worker: measure the warm-up signals, train a run up to a rung."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gatespace.addons.tune.race import Rows
from gatespace.config import TrainConfig, parse_config
from gatespace.evaluation import Prediction
from gatespace.files import atomic_write
from gatespace.runs import RunFolder
from gatespace.study.jobs import Job, Reads
from gatespace.study.jobs import perform as perform_of_study


def perform(job: Job) -> None:
    """Run a job of the search or of a study."""
    {"warm-up": _warm_up, "rung": _rung}.get(job["do"], perform_of_study)(job)


def reached(run: RunFolder, steps: int) -> RunFolder | None:
    """The folder with a run's evaluation after `steps` steps, or None if it is not there yet."""
    if run.is_done and (run.summary() or {})["steps"] == steps:
        return run
    place = run.at_step(steps)
    return place if place.evaluation("val") is not None else None


def row_scores(place: RunFolder) -> list[float]:
    """Score of every validation row, higher is better: log p(gold label), or a text's score. NaN stays NaN."""

    def value(row: Prediction) -> float:
        if row.probabilities is None:
            return row.score
        likely = row.probabilities[row.gold]
        return math.nan if likely is None or math.isnan(likely) else math.log(max(likely, sys.float_info.min))

    return [value(Prediction.from_json(row)) for row in place.predictions("val")]


def read_rows(runs: Mapping[int, RunFolder], steps: int) -> Rows | None:
    """Seed → scores of all rows after `steps` steps; None if a run has not got that far."""
    places = {seed: reached(run, steps) for seed, run in runs.items()}
    rows = {seed: row_scores(place) for seed, place in places.items() if place is not None}
    return rows if len(rows) == len(places) else None


def _rung(job: Job) -> None:
    from gatespace.training.train import train

    config = parse_config(TrainConfig, job["config"])
    run = RunFolder(config.output)
    if reached(run, job["until"]) is None:
        train(config, Reads(run), until=job["until"])


def _warm_up(job: Job) -> None:
    """Measure the signals of the untrained student and its teacher on the first batches, and the validation score."""
    import torch

    from gatespace.training.clock import Clock
    from gatespace.training.train import opened

    began = time.perf_counter()  # after the imports, which happen once per worker
    config, channels = parse_config(TrainConfig, job["config"]), job["channels"]
    columns: dict[str, list[float]] = {name: [] for name in channels}
    weights: list[float] = []
    with opened(config, Reads(RunFolder(config.output))) as run:
        run.prepare()
        loaded = time.perf_counter()
        for step in range(job["batches"]):
            batch = run.rollouts(step, Clock(run.place.device))
            for part in batch.parts:
                part.scores = part.ask()
                out = run.loss(step, part)
                out.loss.backward()  # for realistic timing; the gradients are discarded
                for name in channels:
                    column = getattr(out, name) if name in ("h", "u", "gap") else out.signals[name]
                    columns[name] += column.flatten().double().tolist()
                weights += [weight for row in part.weights for weight in row] if part.weights else [1.0] * out.h.numel()
                part.free()
            batch.backward()
        run.optimizer.discard()
        learned = time.perf_counter()
        with torch.no_grad():
            evaluation = run.evaluate("val", probabilities=config.evaluation.probabilities)
        ended = time.perf_counter()
    scores = evaluation.calibration
    found = {
        "values": columns,
        "weights": weights,
        "score": evaluation.metrics.score if scores is None else -scores.log_loss,
        "metric": evaluation.metrics.metric if scores is None else "log-loss",
        "seconds": {"load": loaded - began, "step": (learned - loaded) / job["batches"], "evaluate": ended - learned},
    }
    atomic_write(Path(job["file"]), json.dumps(found) + "\n")
