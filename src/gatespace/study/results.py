"""Read a study back from its folder: everything that statistics and reports are computed from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

from gatespace.errors import GatespaceError, RunError
from gatespace.evaluation.calibration import LabelProbabilities, calibrate
from gatespace.gating.coefficients import Gate
from gatespace.plugins import provider
from gatespace.runs import Base, RunFolder, StudyFolder
from gatespace.study.plan import Plan, baseline_name, make_plan
from gatespace.study.points import base_of
from gatespace.study.records import (
    Cost,
    LamStats,
    Look,
    RunResult,
    RunSpec,
    Score,
    SplitRead,
    StudyResults,
    TaskBaseline,
    predictions,
)
from gatespace.training.warnings import Answers, Concern, concerns, of_choice, of_teacher


def read_results(path: Path) -> StudyResults:
    """Read the study in the folder or archive `path`, finished or not. Imports none of the user's plugins."""
    if Path(path).is_file():
        path = provider("results", "archive", kind="reader of a study's results")(Path(path))
    folder = StudyFolder.open(path)
    config = folder.config()
    chosen = folder.bases()
    plan = make_plan(config, {task: base.point for task, base in chosen.items()})
    runs = {spec.id: _result(folder.run(spec.id), spec, config.outcome) for spec in plan.runs.values()}
    bases = {
        task: chosen.get(task) or Base(str(base_of(config, task)), "the study file", {})
        for task in config.tasks
        if task in plan.bases
    }
    baselines = _baselines(folder, plan)
    return StudyResults(
        name=config.name,
        folder=folder.path,
        config=config,
        seeds=config.seeds,
        replication_seeds=config.replication.seeds if config.replication is not None else (),
        selection_seed=config.choosing_seed,
        tasks=tuple(config.tasks),
        runs=runs,
        comparisons=plan.comparisons,
        baselines=baselines,
        test_reads=tuple(_reads(folder, plan)),
        bases=bases,
        problems=tuple(_problems(plan, runs)),
        looks=_looks(folder, runs, config.outcome),
        warnings={name: tuple(found) for name, found in _warnings(runs, baselines) if found},
    )


@contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """For what is computed from a study's archive, whose records may have any types: errors in words.

    A study's folder has the records of this program, so the same error is a bug there and keeps its traceback.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError) as error:
        archives = [str(path) for path in paths if Path(path).is_file()]
        if not archives or isinstance(error, GatespaceError):
            raise
        raise RunError(
            "records of this archive are damaged",
            got=", ".join(archives),
            why=f"a value is missing or of the wrong type ({type(error).__name__}: {str(error)[:200]})",
            instead="an archive that `gatespace pack` has written, or the folder of the study",
        ) from error


def look_at(path: Path) -> StudyResults:
    """Read a study's results for analysis of its test scores, recording the look first."""
    results = read_results(path)
    folder = StudyFolder(results.folder)
    if len(results.looks) > len(folder.looks()):
        folder.look(results.looks[-1]._asdict())
    return results


def _looks(folder: StudyFolder, runs: Mapping[str, RunResult], outcome: str) -> tuple[Look, ...]:
    """Recorded looks, plus this one if the finished runs or the primary outcome have changed since."""
    known = [Look(str(r.get("digest")), r.get("runs", 0), r.get("seeds", {})) for r in folder.looks()]
    done = sorted((run.spec.task, run.spec.point, run.spec.seed) for run in runs.values() if "test" in run.scores)
    seen = done if outcome == "accuracy" else [outcome, *done]
    digest = hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]
    if done and (not known or known[-1].digest != digest):
        seeds: dict[str, list[int]] = {}
        for task, _, seed in done:
            if seed not in seeds.setdefault(task, []):
                seeds[task].append(seed)
        known.append(Look(digest, len(done), {task: sorted(found) for task, found in seeds.items()}))
    return tuple(known)


def _scores(run: RunFolder, records: Mapping[str, Mapping[str, Any]], outcome: str) -> dict[str, Score]:
    """Split → score by the study's outcome. Records of earlier releases lack it: it follows from the predictions."""
    scores = {split: Score.from_json(record) for split, record in records.items()}
    if any("auc" not in record["calibration"] for record in records.values() if "calibration" in record):
        rows = {}
        for split, score in scores.items():
            found = predictions(run.path, split)
            labels = [row.label for row in score.labels.per_label] if score.labels is not None else []
            likely = [
                LabelProbabilities({label: (row.probabilities or {})[label] for label in labels}, row.mass or 0.0)
                for row in found
            ]
            rows[split] = ([row.gold for row in found], likely)
        scores = {
            split: replace(score, calibration=calibrate(*rows[split], rows.get("val")))
            for split, score in scores.items()
        }
    return {split: score.by(outcome) for split, score in scores.items()}


def _aucs(scores: Mapping[str, Score]) -> dict[str, float | None]:
    return {split: score.calibration.auc for split, score in scores.items() if score.calibration is not None}


def _result(run: RunFolder, spec: RunSpec, outcome: str) -> RunResult:
    state = run.state
    if state != "done":
        return RunResult(spec, state, run.path, error=run.error(), gate=spec.gate)
    summary = run.summary()
    assert summary is not None
    evaluations = run.log("evaluations") if "chosen_step" in summary else []
    content = dict(run.identity()["content"])
    gate = _gate(content.pop("gate", None))
    return RunResult(
        spec,
        state,
        run.path,
        gate=None if gate is None else gate.abcd,
        lam=gate.lam() if gate is not None and gate.is_static else None,
        scores=_scores(run, summary["evaluation"], outcome),
        lam_stats=_lam(summary["run"]),
        cost=_cost(run, summary["run"]),
        environment=run.environment(),
        content=content,
        fingerprint=summary["fingerprint"],
        chosen_step=summary.get("chosen_step", summary.get("steps", 0)),
        chosen_on=evaluations[-1]["count"] if evaluations else None,
        teachers=summary["run"].get("teachers", {}),
        alarms=tuple(
            Concern(f"alarm {one['alarm']}", one["seen"], one["helps"])
            for one in summary.get("alarms", ())
            if one["on"]
        ),
    )


def _gate(text: str | None) -> Gate | None:
    return None if text is None or text == "None" else Gate.parse(text)


def _lam(run: Mapping[str, Any]) -> LamStats | None:
    if run["lam_mean"] is None:
        return None
    return LamStats(
        mean=run["lam_mean"],
        sd=run["lam_sd"],
        saturated=run["lam_saturated"],
        hist=tuple(run["lam_hist"]),
        rkl_mean=run["lam_rkl_mean"],
        tokens=run["tokens"],
    )


def _cost(folder: RunFolder, run: Mapping[str, Any]) -> Cost:
    timings = folder.log("timings")
    hits = sum(record.get("cache_hits", 0) for record in timings)
    misses = sum(record.get("cache_misses", 0) for record in timings)
    return Cost(
        seconds=fsum(value for record in timings for value in record["wall"].values()),
        cpu_seconds=fsum(value for record in timings for value in record["cpu"].values()),
        steps=run["steps"],
        response_tokens=run["tokens"],
        teacher_tokens=sum(record["teacher_tokens"] for record in timings),
        scores_asked=hits + misses if hits + misses else run["tokens"],
        scores_cached=hits,
    )


def _baselines(folder: StudyFolder, plan: Plan) -> dict[str, TaskBaseline]:
    found: dict[str, TaskBaseline] = {}
    for task in plan.config.tasks:
        scores: dict[str, dict[str, Score]] = {"student": {}, "teacher": {}}
        about: dict[str, Any] = {}
        folders = {}
        for role in scores:
            baseline = folder.baseline(baseline_name(plan.config, task, role))
            if baseline.is_done:
                about = baseline.baseline()
                folders["start" if role == "student" else role] = baseline.path
                records = {record["split"]: record for record in baseline.evaluations()}
                scores[role] = _scores(baseline, records, plan.config.outcome)
        if about:
            found[task] = TaskBaseline(about["task"], about["digest"], scores["student"], scores["teacher"], folders)
    return found


def _reads(folder: StudyFolder, plan: Plan) -> list[SplitRead]:
    """Every model that was evaluated on a test split, and how often."""
    places = [
        (name := baseline_name(plan.config, task, role), task, folder.baseline(name), purpose)
        for task in plan.config.tasks
        for role, purpose in (("student", "the student before training"), ("teacher", "the teacher"))
    ]
    places += [(run.id, run.task, folder.run(run.id), "final evaluation") for run in plan.runs.values()]
    reads: list[SplitRead] = []
    for name, task, run, purpose in places:
        tests = [record for record in run.log("reads") if record.get("split") == "test"]
        if tests:
            reads.append(SplitRead(name, task, int(tests[-1]["rows"]), purpose, len(tests)))
    return reads


def _warnings(
    runs: Mapping[str, RunResult], baselines: Mapping[str, TaskBaseline]
) -> Iterator[tuple[str, list[Concern]]]:
    for task, known in baselines.items():
        found = concerns({split: score.metrics for split, score in known.teacher.items()}, aucs=_aucs(known.teacher))
        about = [concern._replace(seen=f"The teacher: {concern.seen}") for concern in found]
        if (split := "test") in known.start and split in known.teacher:
            teacher, start = known.teacher[split], known.start[split]
            about += of_teacher(split, teacher.accuracy, start.accuracy, start.metric)
        chosen_on = [one.chosen_on for one in runs.values() if one.spec.task == task and one.chosen_on is not None]
        yield task, [*about, *of_choice(min(chosen_on, default=None))]
    for result in runs.values():
        if result.state == "done":
            begun = baselines[result.spec.task].start if result.spec.task in baselines else {}
            found = concerns(
                {split: score.metrics for split, score in result.scores.items()},
                start={split: Answers.of(score.metrics) for split, score in begun.items()},
                steps=result.curve(),
                unchanged=result.chosen_step == 0,
                aucs=_aucs(result.scores),
            )
            yield result.spec.id, [*found, *result.alarms]


def _problems(plan: Plan, runs: Mapping[str, RunResult]) -> list[str]:
    states = [result.state for result in runs.values()]
    problems = []
    if failed := states.count("failed"):
        problems.append(f"{failed} of {len(states)} runs failed")
    if left := states.count("waiting") + states.count("running"):
        problems.append(f"{left} of {len(states)} runs are not done")
    if plan.open_bases:
        problems.append(f"the base of {', '.join(plan.open_bases)} is not chosen yet")
    return problems
