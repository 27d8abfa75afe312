"""Read a study back from its folder: everything that statistics and reports are computed from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from math import fsum
from pathlib import Path
from typing import Any

from gatespace.evaluation.concerns import Answers, Concern, concerns, of_teacher
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
)


def read_results(path: Path) -> StudyResults:
    """Read the study in the folder or archive `path`, finished or not. Imports none of the user's plugins."""
    if Path(path).is_file():
        path = provider("results", "archive", kind="reader of a study's results")(Path(path))
    folder = StudyFolder.open(path)
    config = folder.config()
    chosen = folder.bases()
    plan = make_plan(config, {task: base.point for task, base in chosen.items()})
    runs = {spec.id: _result(folder.run(spec.id), spec) for spec in plan.runs.values()}
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
        looks=_looks(folder, runs),
        warnings={name: tuple(found) for name, found in _warnings(runs, baselines) if found},
    )


def look_at(path: Path) -> StudyResults:
    """Read a study's results for analysis of its test scores, recording the look first."""
    results = read_results(path)
    folder = StudyFolder(results.folder)
    if len(results.looks) > len(folder.looks()):
        folder.look(results.looks[-1]._asdict())
    return results


def _looks(folder: StudyFolder, runs: Mapping[str, RunResult]) -> tuple[Look, ...]:
    """Recorded looks, plus this one if the finished runs have changed since."""
    known = [Look(str(r.get("digest")), r.get("runs", 0), r.get("seeds", {})) for r in folder.looks()]
    done = sorted((run.spec.task, run.spec.point, run.spec.seed) for run in runs.values() if "test" in run.scores)
    digest = hashlib.sha256(json.dumps(done).encode()).hexdigest()[:16]
    if done and (not known or known[-1].digest != digest):
        seeds: dict[str, list[int]] = {}
        for task, _, seed in done:
            if seed not in seeds.setdefault(task, []):
                seeds[task].append(seed)
        known.append(Look(digest, len(done), {task: sorted(found) for task, found in seeds.items()}))
    return tuple(known)


def _result(run: RunFolder, spec: RunSpec) -> RunResult:
    state = run.state
    if state != "done":
        return RunResult(spec, state, run.path, error=run.error(), gate=spec.gate)
    summary = run.summary()
    assert summary is not None
    content = dict(run.identity()["content"])
    gate = _gate(content.pop("gate", None))
    return RunResult(
        spec,
        state,
        run.path,
        gate=None if gate is None else gate.abcd,
        lam=gate.lam() if gate is not None and gate.is_static else None,
        scores={split: Score.from_json(record) for split, record in summary["evaluation"].items()},
        lam_stats=_lam(summary["run"]),
        cost=_cost(run, summary["run"]),
        environment=run.environment(),
        content=content,
        fingerprint=summary["fingerprint"],
        chosen_step=summary.get("chosen_step", summary.get("steps", 0)),
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
        tokens=round(run["tokens"]),  # expected tokens can be fractional
    )


def _cost(folder: RunFolder, run: Mapping[str, Any]) -> Cost:
    timings = folder.log("timings")
    hits = sum(record.get("cache_hits", 0) for record in timings)
    misses = sum(record.get("cache_misses", 0) for record in timings)
    return Cost(
        seconds=fsum(value for record in timings for value in record["wall"].values()),
        cpu_seconds=fsum(value for record in timings for value in record["cpu"].values()),
        steps=run["steps"],
        response_tokens=round(run["tokens"]),
        teacher_tokens=sum(record["teacher_tokens"] for record in timings),
        scores_asked=hits + misses if hits + misses else round(run["tokens"]),
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
                scores[role] = {record["split"]: Score.from_json(record) for record in baseline.evaluations()}
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
        found = concerns({split: score.metrics for split, score in known.teacher.items()})
        about = [concern._replace(seen=f"The teacher: {concern.seen}") for concern in found]
        if (split := "test") in known.start and split in known.teacher:
            teacher, start = known.teacher[split], known.start[split]
            about += of_teacher(split, teacher.accuracy, start.accuracy, start.metric)
        yield task, about
    for result in runs.values():
        if result.state == "done":
            begun = baselines[result.spec.task].start if result.spec.task in baselines else {}
            found = concerns(
                {split: score.metrics for split, score in result.scores.items()},
                start={split: Answers.of(score.metrics) for split, score in begun.items()},
                steps=result.curve(),
                unchanged=result.chosen_step == 0,
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
