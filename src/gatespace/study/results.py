"""A study read back from its folder: everything that statistics and reports are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import fsum
from pathlib import Path
from typing import Any

from gatespace.files import read
from gatespace.gating.coefficients import Gate
from gatespace.study.plan import Plan, baseline_name, make_plan
from gatespace.study.points import base_of
from gatespace.study.records import (
    Base,
    Cost,
    LamStats,
    RunResult,
    RunSpec,
    Score,
    SplitRead,
    StudyResults,
    TaskBaseline,
)
from gatespace.study.store import READS, Store, as_reads


def read_results(folder: Path) -> StudyResults:
    """The study in `folder` as it stands, done or not."""
    store = Store.open(folder)
    config = store.config()
    chosen = store.bases()
    plan = make_plan(config, {task: base.point for task, base in chosen.items()})
    runs = {spec.id: _result(store, spec) for spec in plan.runs.values()}
    bases = {
        task: chosen.get(task) or Base(str(base_of(config, task)), "the study file", {})
        for task in config.tasks
        if task in plan.bases
    }
    replication = config.replication.seeds if config.replication is not None else ()
    return StudyResults(
        name=config.name,
        folder=store.folder,
        config=config,
        seeds=config.seeds,
        replication_seeds=replication,
        selection_seed=config.seeds[0] if config.selection_seed is None else config.selection_seed,
        tasks=tuple(config.tasks),
        runs=runs,
        comparisons=plan.comparisons,
        baselines=_baselines(store, plan),
        test_reads=tuple(_reads(store, plan)),
        bases=bases,
        problems=tuple(_problems(plan, runs)),
    )


def _result(store: Store, spec: RunSpec) -> RunResult:
    folder = store.run(spec.id)
    state = store.state(folder)
    if state != "done":
        return RunResult(spec, state, folder, error=store.error(folder), gate=spec.gate)
    summary = store.summary(folder)
    assert summary is not None
    gate = _gate(json.loads((folder / "identity.json").read_text())["content"].get("gate"))
    static = gate is not None and gate.is_static
    return RunResult(
        spec,
        state,
        folder,
        gate=None if gate is None else gate.abcd,
        lam=gate.lam() if static and gate is not None else None,
        scores=_scores(summary["evaluation"]),
        lam_stats=_lam(summary["run"]),
        cost=_cost(folder, summary["run"]),
        environment=json.loads((folder / "environment.json").read_text()),
        fingerprint=summary["fingerprint"],
    )


def _gate(text: str | None) -> Gate | None:
    return None if text is None or text == "None" else Gate.parse(text)


def _scores(evaluations: Mapping[str, Any]) -> dict[str, Score]:
    return {split: Score.from_json(record) for split, record in evaluations.items()}


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


def _cost(folder: Path, run: Mapping[str, Any]) -> Cost:
    timings = read(folder / "timings.jsonl")
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


def _baselines(store: Store, plan: Plan) -> dict[str, TaskBaseline]:
    found: dict[str, TaskBaseline] = {}
    for task in plan.config.tasks:
        scores: dict[str, dict[str, Score]] = {}
        about: dict[str, Any] = {}
        for role in ("student", "teacher"):
            folder = store.baseline(baseline_name(plan.config, task, role))
            if store.state(folder) != "done":
                continue
            about = json.loads((folder / "baseline.json").read_text())
            records = [json.loads(path.read_text()) for path in sorted(folder.glob("evaluation-*.json"))]
            scores[role] = {record["split"]: Score.from_json(record) for record in records}
        if about:
            found[task] = TaskBaseline(
                about["task"], about["digest"], scores.get("student", {}), scores.get("teacher", {})
            )
    return found


def _reads(store: Store, plan: Plan) -> list[SplitRead]:
    reads: list[SplitRead] = []
    places = [
        (name := baseline_name(plan.config, task, role), task, store.baseline(name), purpose)
        for task in plan.config.tasks
        for role, purpose in (("student", "the student before training"), ("teacher", "the teacher"))
    ]
    places += [(run.id, run.task, store.run(run.id), "final evaluation") for run in plan.runs.values()]
    for name, task, folder, purpose in places:
        records = [json.loads(line) for line in _whole_lines(folder / READS)]
        rows, often = as_reads(records)
        if often:
            reads.append(SplitRead(name, task, rows, purpose, often))
    return reads


def _whole_lines(path: Path) -> list[str]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [line for line in text.split("\n")[:-1] if line]


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
