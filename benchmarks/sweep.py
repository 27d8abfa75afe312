"""Savings of one teacher cache for all runs of a study: the same grid of runs twice, with and without the cache.

Both sides use the study's own machinery (`run_study` on local processes), from the same two models, trained beforehand.
One side shares a score cache among all runs, the other scores every response again (`teacher.cache: null`). Weights,
records and predictions of both must be bitwise identical, or the benchmark fails. See benchmarks/README.md for the
method.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
from step import BUSY, disturbed_lines, positive, tell

from gatespace.study.engines import LocalEngine

if TYPE_CHECKING:
    from gatespace.config import StudyConfig
    from gatespace.runs import StudyFolder
    from gatespace.study.jobs import Job
    from gatespace.study.records import Comparison, StudyResults

SHARED, INDEPENDENT = "shared", "independent"
ABOUT = {
    SHARED: "one score cache, empty at first, for all runs",
    INDEPENDENT: "the very same runs, each without a cache",
}
TEACHER, STUDENT = 32e9, 4e9
"""Parameters of the paper's pair, for the FLOP estimate."""
FORWARD, BACKWARD = 2, 4
"""Floating-point operations per parameter and token."""
TOKENS, WALL = 0.10, 0.85
"""Targets of shared / independent."""
OPEN_BASE = "G5"
"""Base assumed when counting a plan whose base would be chosen by its runs."""


@dataclass(frozen=True)
class Preset:
    """A shipped study, and the part of it that is measured."""

    study: str
    about: str
    sets: tuple[str, ...]
    steps: int
    workers: int
    wall_limit: float | None
    """Target of the ratio of wall times; None: no target."""


PRESETS: dict[str, Preset] = {
    "demo": Preset(
        "demo",
        "the demo with all points of the paper at one seed: restrictions, static, published, controls, twins (39 runs)",
        ("points=paper", "axes.isolation={match: [lam]}", "axes.controls={shuffled: [G5, H2]}"),
        steps=30,
        workers=2,
        wall_limit=None,
    ),
    "smollm2": Preset(
        "smollm2",
        "SmolLM2-135M on TweetEval emotion: 6 points, 4 restrictions, static:0.5 and twin(G5) at one seed (12 runs)",
        (
            "points=[G1, G2, G4, G5, H1, H2]",
            "axes.isolation={match: [lam], points: [G5]}",
            "axes.controls={shuffled: []}",
            "axes.published=[]",
            # 240 prompts per run from 65 rows: as much repetition in one seed as a longer study has over many.
            "tasks.emotion.task.split={teacher: 0.6, distill: 0.02}",
            "teach.teacher.steps=40",
            # Few rows, so that responses are legal from the first step but not yet good.
            "teach.student={model: smollm2, task: {split: {teacher: 0.02}}, steps: 8, batch_size: 24, "
            "optimizer: {lr: 5.0e-5}}",
            # As many evaluated rows per step as in the whole study: 1795 for 60 steps.
            "train.evaluation.limit=150",
            "train.checkpoint.every=0",
        ),
        steps=10,
        workers=1,
        wall_limit=WALL,
    ),
}
_QUICK = (
    "points=[G5, H1]",
    "axes.isolation={match: [lam], points: [G5]}",
    "axes.controls={shuffled: []}",
    "axes.published=[]",
    "tasks.messages.task.split={teacher: 0.6, distill: 0.01}",
    "teach.teacher.steps=20",
    "teach.student.steps=20",
    "train.batch_size=6",
    "train.evaluation.limit=20",
)


@dataclass(frozen=True)
class Settings:
    """Settings of one benchmark run."""

    preset: str
    sets: tuple[str, ...]
    """Overrides of the shipped study, in the order they are applied."""
    workers: int
    threads: int
    parts: int
    output: str | None
    quick: bool
    token_limit: float | None
    wall_limit: float | None


@dataclass
class Side:
    """One way to run the grid, and the cost of its parts."""

    name: str
    config: StudyConfig
    store: StudyFolder
    parts: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """Measured ratio shared / independent, and its target (None: no target)."""

    key: str
    value: float
    limit: float | None

    @property
    def met(self) -> bool | None:
        return None if self.limit is None else self.value <= self.limit


class Ration(LocalEngine):
    """A local engine that accepts at most `jobs` jobs: the study then stops, to be resumed later."""

    def __init__(self, workers: int, threads: int, jobs: int) -> None:
        super().__init__(workers, threads)
        self._left = jobs

    def start(self, name: str, job: Job) -> None:
        super().start(name, job)
        self._left -= 1
        if self._left == 0:
            self.slots = 0


# ---------------------------------------------------------------------- running


def study_of(settings: Settings) -> StudyConfig:
    """Load the study to measure."""
    from gatespace.cli.study_file import load_study

    return load_study(PRESETS[settings.preset].study, settings.sets)


def run(settings: Settings, folder: Path, report: Callable[[str], None] = lambda line: None) -> dict[str, Side]:
    """Train the models, then run the grid on both sides, in alternating parts: shared, independent, independent,
    shared, and so on, so that drift of the machine's speed affects both."""
    from gatespace.runs import StudyFolder
    from gatespace.study.plan import check

    config = study_of(settings)
    runs = len(check(config).runs)
    prepared = StudyFolder(folder / "prepared")
    prepare(settings, config, prepared, report)
    sides = {name: side(name, config, folder, prepared, cache=name == SHARED) for name in (SHARED, INDEPENDENT)}
    order = [SHARED, INDEPENDENT]
    for part in range(settings.parts):
        jobs = runs * (part + 1) // settings.parts - runs * part // settings.parts
        for name in order:
            report(f"{name}: part {part + 1} of {settings.parts}, {jobs} of {runs} runs")
            sides[name].parts.append(measured(settings, sides[name], jobs, report))
        order.reverse()
    return sides


def prepare(settings: Any, config: StudyConfig, store: StudyFolder, report: Callable[[str], None]) -> None:
    """Train and evaluate the models before any run, by the study itself; existing ones are kept."""
    from gatespace.study.outlook import outline

    threads = store.begin(config, workers=settings.workers, threads=settings.threads)
    work = [one for one in outline(store, config, threads)[1] if one.run is None]
    left = [one for one in work if not one.folder.is_done]
    if left:
        report(f"prepared beforehand: {', '.join(one.title for one in left)}")
        for one in left:
            one.folder.clear_failure()
        # No run can start before these are done.
        _go(settings, config, store, len(left), report)


def side(name: str, config: StudyConfig, folder: Path, prepared: StudyFolder, *, cache: bool) -> Side:
    """Set up a study that starts from the prepared models. Also used by power.py."""
    from gatespace.config import StudyConfig, dump_config, parse_config
    from gatespace.runs import StudyFolder

    store = StudyFolder(folder / name)
    store.path.mkdir(parents=True)
    for place in ("models", "baselines"):
        if (prepared.path / place).exists():
            (store.path / place).symlink_to(prepared.path / place)
    settings = dump_config(config)
    teacher = settings["train"].get("teacher", {}) | {"cache": str(store.scores) if cache else None}
    settings["train"] = settings["train"] | {"teacher": teacher}
    return Side(name, parse_config(StudyConfig, settings), store)


def measured(settings: Any, side: Side, jobs: int, report: Callable[[str], None]) -> dict[str, float]:
    """Execute `jobs` more runs of a side and return their cost; their processes have exited afterwards."""
    side.store.begin(side.config, workers=settings.workers, threads=settings.threads)
    before = _children()
    _, cost = measure.measured(lambda: _go(settings, side.config, side.store, jobs, report))
    children = _children() - before
    others = max(0.0, cost.others - children)
    return {"runs": jobs, "wall": cost.wall, "cpu": cost.cpu + children, "others": others}


def _go(settings: Any, config: StudyConfig, store: StudyFolder, jobs: int, report: Callable[[str], None]) -> None:
    from gatespace.errors import RunError
    from gatespace.study.runner import run_study

    engine = Ration(settings.workers, settings.threads, jobs)
    outlook = run_study(config, store, engine, threads=settings.threads, note=report)
    for work in outlook.work:
        if outlook.states[work.name] == "failed":
            raise RunError(f"{work.title} failed", got=work.folder.error())


def _children() -> float:
    """CPU seconds of all child processes that have exited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---------------------------------------------------------------------- findings


def findings(settings: Settings, sides: Mapping[str, Side], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in the report, as plain numbers."""
    from gatespace.study.results import read_results

    results = {name: read_results(side.store.path) for name, side in sides.items()}
    rows = {name: _row(settings, side, results[name]) for name, side in sides.items()}
    student = student_tokens(results[SHARED])
    ratios = {key: _ratio(rows, key) for key in ("teacher_tokens", "teacher_passes", "wall", "cpu", "step_wall")}
    large = large_pair(rows, student)
    limits = {"teacher_tokens": settings.token_limit, "wall": settings.wall_limit}
    return {
        "benchmark": "sweep",
        "settings": asdict(settings),
        "environment": dict(facts),
        "points": [result.spec.point for result in results[SHARED].runs.values()],
        "results": list(rows.values()),
        "ratios": ratios,
        "targets": [asdict(t) | {"met": t.met} for t in (Target(k, ratios[k], limit) for k, limit in limits.items())],
        "student": student,
        "large_pair": large,
        "plan": plans(settings, results[SHARED], rows),
        "differences": differences(results) + miscounts(results[INDEPENDENT], student),
    }


def _row(settings: Settings, side: Side, results: StudyResults) -> dict[str, Any]:
    """One side as a flat record."""
    from gatespace.files import read

    done = results.done
    costs = [result.cost for result in done if result.cost is not None]
    timings = [line for result in done for line in read(result.folder / "timings.jsonl")]
    row: dict[str, Any] = {"side": side.name, "about": ABOUT[side.name], "runs": len(done)}
    row |= {"planned": len(results.runs), "steps": sum(cost.steps for cost in costs)}
    for key in ("response_tokens", "teacher_tokens", "scores_asked", "scores_cached"):
        row[key] = sum(getattr(cost, key) for cost in costs)
    row["teacher_passes"] = sum(line["teacher_passes"] for line in timings)
    for key in ("wall", "cpu"):
        row |= {key: fsum(part[key] for part in side.parts), f"{key}_parts": [part[key] for part in side.parts]}
        phases = dict.fromkeys(phase for line in timings for phase in line[key])
        row[f"step_{key}_phases"] = {phase: fsum(line[key].get(phase, 0.0) for line in timings) for phase in phases}
        row[f"step_{key}"] = fsum(row[f"step_{key}_phases"].values())
        row[f"step_{key}_score"] = row[f"step_{key}_phases"].get("score", 0.0)
        row[f"step_{key}_rest"] = row[f"step_{key}"] - row[f"step_{key}_score"]
    busy = fsum(part["others"] for part in side.parts)
    return row | {"others_share": busy / max(row["wall"] * measure.usable_cores(), 1e-9)}


def _ratio(rows: Mapping[str, Mapping[str, Any]], key: str) -> float:
    return float(rows[SHARED][key] / max(rows[INDEPENDENT][key], 1e-9))


def differences(results: Mapping[str, StudyResults]) -> list[str]:
    """Differences between the two sides' results; must be empty."""
    ours, theirs = results[SHARED].runs, results[INDEPENDENT].runs
    found = [f"{name} is a run of one side only" for name in ours.keys() ^ theirs.keys()]
    for name in (name for name in ours if name in theirs):
        one, other = ours[name], theirs[name]
        if (one.state, other.state) != ("done", "done"):
            found.append(f"{name} is {one.state} ({SHARED}) and {other.state} ({INDEPENDENT})")
            continue
        if one.fingerprint != other.fingerprint:
            found.append(f"{name}: the trained weights differ")
        for path in ("metrics.jsonl", *(f"predictions-{split}.jsonl" for split in one.scores)):
            if (one.folder / path).read_bytes() != (other.folder / path).read_bytes():
                found.append(f"{name}: {path} differs")
    return found


def student_tokens(results: StudyResults) -> dict[str, Any]:
    """Tokens through the student: prompts from the rows of every step, responses from the records.

    The rollout prefills the shared prefix and the prompts once and decodes each response token but the last; the update
    reuses that prefill and runs the response tokens but the last again, forward and backward.
    """
    from gatespace.config import TrainConfig, load_config
    from gatespace.training.batches import Batches
    from gatespace.training.setup import ModelSpec, encoder_for, material, open_model

    names = ("steps", "rows", "prefix_tokens", "prefixes_read", "prompt_tokens", "response_tokens")
    total = dict.fromkeys((*names, "evaluation_forward_tokens"), 0)
    # task → seed → prompt tokens of a run, and max tokens duplicated within its steps; the same for all points
    prompts: dict[str, dict[int, tuple[int, int]]] = {}
    encoders: dict[str, Any] = {}
    per_run: dict[str, tuple[int, int]] = {}
    for result in results.done:
        spec, cost = result.spec, result.cost
        assert cost is not None
        config = load_config(TrainConfig, result.folder / "config.yaml")
        if spec.task not in encoders:
            data = material(config.task, "distill")
            model = open_model(ModelSpec.of(config.pair, "student"), data.task)
            splits = (*config.evaluation.final, config.evaluation.split)
            encoders[spec.task] = data, encoder_for(data, model, splits, share=True)
        data, encoder = encoders[spec.task]
        known = prompts.setdefault(spec.task, {})
        if spec.seed not in known:
            batches = Batches(data.rows, encoder, batch_size=config.batch_size, seed=spec.seed)
            steps = [[tuple(row.prompt) for row in batches.at(step)] for step in range(cost.steps)]
            twice = [prompt for rows in steps for at, prompt in enumerate(rows) if prompt in rows[:at]]
            answer = config.rollout.max_new_tokens - 1
            known[spec.seed] = sum(len(p) for rows in steps for p in rows), sum(len(p) + answer for p in twice)
        rows = cost.steps * config.batch_size * config.rollout.per_prompt
        total["steps"] += cost.steps
        total["rows"] += rows
        total["prefix_tokens"] += len(encoder.prefix)
        total["prefixes_read"] += len(encoder.prefix) * cost.steps
        read, shared = known[spec.seed]
        total["prompt_tokens"] += read
        total["response_tokens"] += cost.response_tokens
        total["evaluation_forward_tokens"] += _evaluated(result, encoder, config.evaluation.batch_size)
        if config.rollout.per_prompt == 1:
            most = read + cost.response_tokens - rows
            per_run[spec.id] = most - shared, most
    read, fed = total["prefixes_read"] + total["prompt_tokens"], total["response_tokens"] - total["rows"]
    learned = {"forward_tokens": read + 2 * fed, "backward_tokens": read + fed}
    return total | learned | {"scored_tokens_per_run": per_run}


def _evaluated(result: Any, encoder: Any, batch_size: int) -> int:
    """Tokens of a run's evaluations: prompts, the prefix once per batch, and the responses, re-encoded from text."""
    from gatespace.files import read

    tokens = 0
    for split in result.scores:
        rows = read(result.folder / f"predictions-{split}.jsonl")
        tokens += -(-len(rows) // batch_size) * len(encoder.prefix)
        for row in rows:
            tokens += len(encoder.suffix(row["text"]))
            tokens += len(encoder.tokenizer.encode(row["raw"], add_special_tokens=False))
    return tokens


def miscounts(independent: StudyResults, student: Mapping[str, Any]) -> list[str]:
    """Runs whose uncached teacher did not compute exactly prompts and responses without their last tokens.

    A prompt that occurs twice in a step is computed once, and so is the common prefix of its two responses.
    """
    found = []
    for result in independent.done:
        assert result.cost is not None
        counted, expected = result.cost.teacher_tokens, student["scored_tokens_per_run"].get(result.spec.id)
        if expected is not None and not expected[0] <= counted <= expected[1]:
            found.append(f"{result.spec.id}: the teacher read {counted} tokens where the prompts make {expected[1]}")
    return found


def large_pair(rows: Mapping[str, Mapping[str, Any]], student: Mapping[str, Any]) -> dict[str, Any]:
    """FLOPs that the counted tokens would cost with a 32B teacher and a 4B student."""
    learning = STUDENT * (FORWARD * student["forward_tokens"] + BACKWARD * student["backward_tokens"])
    evaluating = STUDENT * FORWARD * student["evaluation_forward_tokens"]
    # Every run's teacher computes the prefix, with or without cached scores.
    teacher = {n: TEACHER * FORWARD * (r["teacher_tokens"] + student["prefix_tokens"]) for n, r in rows.items()}
    return {
        "teacher_parameters": TEACHER,
        "student_parameters": STUDENT,
        "teacher_flops": teacher,
        "student_flops": learning,
        "evaluation_flops": evaluating,
        "ratio": (teacher[SHARED] + learning) / (teacher[INDEPENDENT] + learning),
        "ratio_with_evaluation": (teacher[SHARED] + learning + evaluating)
        / (teacher[INDEPENDENT] + learning + evaluating),
    }


def plans(settings: Settings, results: StudyResults, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Savings from sharing runs between comparisons, in the measured grid and in the whole shipped study."""
    from gatespace.cli.study_file import load_study
    from gatespace.study.plan import make_plan

    measured = _shared_runs(results.comparisons, len(results.runs))
    alone = rows[INDEPENDENT]["teacher_tokens"] / max(rows[INDEPENDENT]["runs"], 1) * measured["runs_alone"]
    measured["teacher_tokens_alone"] = round(alone)
    measured["teacher_tokens_ratio"] = rows[SHARED]["teacher_tokens"] / max(alone, 1e-9)
    config = load_study(PRESETS[settings.preset].study)
    bases = {task: results.bases[task].point if task in results.bases else OPEN_BASE for task in config.tasks}
    plan = make_plan(config, bases)
    return {"measured": measured, "whole": _shared_runs(plan.comparisons, len(plan.runs)) | {"bases": dict(plan.bases)}}


def _shared_runs(comparisons: Iterable[Comparison], runs: int) -> dict[str, Any]:
    comparable = sum(1 for cell in comparisons if cell.status == "comparable")
    alone = 2 * comparable
    return {"comparisons": comparable, "runs": runs, "runs_alone": alone, "ratio": runs / max(alone, 1)}


def kept(found: Mapping[str, Any]) -> bool:
    """Whether the sides agree and every target was met."""
    return not found["differences"] and all(target["met"] is not False for target in found["targets"])


# ---------------------------------------------------------------------- report


def show(found: Mapping[str, Any]) -> None:
    """Print both sides, the ratios, and what they mean."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 180)
    facts, settings = found["environment"], found["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    console.print(f"{facts['cpu']}, {facts['cores']} cores; python {facts['python']}, {packages}", highlight=False)
    rows = found["results"]
    size = f"{rows[0]['runs']} runs, {rows[0]['steps']} steps in all"
    how = f"{settings['workers']} at once with {settings['threads']} threads each"
    table = Table(title=f"{settings['preset']}: {size}, {how}")
    table.add_column("side")
    headings = ("teacher tokens", "passes", "scores asked", "cached", "wall s", "CPU s")
    for heading in (*headings, "score wall/CPU s", "rest of the steps wall/CPU s", "others"):
        table.add_column(heading, justify="right")
    for r in rows:
        table.add_row(
            r["side"],
            f"{r['teacher_tokens']}",
            f"{r['teacher_passes']}",
            f"{r['scores_asked']}",
            f"{r['scores_cached']} ({r['scores_cached'] / max(r['scores_asked'], 1):.0%})",
            f"{r['wall']:.1f} ({' + '.join(f'{part:.1f}' for part in r['wall_parts'])})",
            f"{r['cpu']:.1f}",
            f"{r['step_wall_score']:.1f} / {r['step_cpu_score']:.1f}",
            f"{r['step_wall_rest']:.1f} / {r['step_cpu_rest']:.1f}",
            f"{r['others_share']:.0%}",
        )
    console.print(table)
    for line in (*about_lines(found), "", *ratio_lines(found), "", *large_lines(found), "", *plan_lines(found)):
        console.print(line, highlight=False, soft_wrap=True)
    for line in ("", *same_lines(found), *disturbed_lines(rows, "side")):
        console.print(line, highlight=False, soft_wrap=True)


def about_lines(found: Mapping[str, Any]) -> list[str]:
    return [
        *(f"  {r['side']}: {r['about']}." for r in found["results"]),
        f"  Runs: {' '.join(found['points'])}.",
        "  wall, CPU: of all runs with their processes, models, steps and evaluations; in parts, which took turns. "
        "score, rest: sums over all steps of all runs.",
        f"  others: share of the machine that other processes took; above {BUSY:.0%} do not quote the times.",
    ]


def ratio_lines(found: Mapping[str, Any]) -> list[str]:
    limits = {target["key"]: target for target in found["targets"]}
    words = {
        "teacher_tokens": "teacher tokens",
        "teacher_passes": "teacher passes",
        "wall": "wall time",
        "cpu": "CPU time",
        "step_wall": "wall time of the steps alone",
    }
    lines = []
    for key, value in found["ratios"].items():
        target = limits.get(key)
        line = f"{words[key]}, shared / independent: {value:.3f}"
        if target is None or target["limit"] is None:
            lines.append(f"      {line} (no target)")
        else:
            lines.append(f"{'PASS' if target['met'] else 'FAIL'}  {line} (target ≤ {target['limit']:.2f})")
    return lines


def large_lines(found: Mapping[str, Any]) -> list[str]:
    student, large = found["student"], found["large_pair"]
    tera = {name: value / 1e12 for name, value in large["teacher_flops"].items()}
    learning = large["student_flops"] / 1e12
    return [
        f"The same tokens with a {large['teacher_parameters'] / 1e9:g}B teacher and a "
        f"{large['student_parameters'] / 1e9:g}B student, by arithmetic, not measured:",
        f"  per parameter, {FORWARD} FLOPs a token forward and {BACKWARD} a token backward; attention left out.",
        f"  student forward = prefix × steps + prompts + 2 × (responses − rows) = {student['forward_tokens']} tokens; "
        f"backward = prefix × steps + prompts + (responses − rows) = {student['backward_tokens']} tokens, from "
        f"{student['steps']} steps, {student['rows']} rows, {student['prompt_tokens']} prompt tokens after the prefix "
        f"and {student['response_tokens']} response tokens: {learning:.1f} TFLOP on both sides.",
        f"  teacher = its tokens above + the prefix once a run ({student['prefix_tokens']}): {tera[SHARED]:.1f} TFLOP "
        f"shared, {tera[INDEPENDENT]:.1f} independent.",
        f"  compute of the training, shared / independent: {large['ratio']:.3f}; with the evaluations at the end "
        f"({student['evaluation_forward_tokens']} tokens forward): {large['ratio_with_evaluation']:.3f}",
    ]


def plan_lines(found: Mapping[str, Any]) -> list[str]:
    measured, whole = found["plan"]["measured"], found["plan"]["whole"]
    bases = ", ".join(f"{task} on {base}" for task, base in whole["bases"].items())
    return [
        "Sharing runs: a comparison that trains its own two sides needs two runs.",
        f"  measured here: {measured['comparisons']} comparisons need {measured['runs_alone']} runs alone, "
        f"{measured['runs']} shared ({measured['ratio']:.2f}); with the cache too, "
        f"{measured['teacher_tokens_ratio']:.3f} of the teacher tokens of runs that each comparison has to itself.",
        f"  the whole shipped study ({bases}): {whole['comparisons']} comparisons, {whole['runs_alone']} runs alone, "
        f"{whole['runs']} shared ({whole['ratio']:.2f}).",
    ]


def same_lines(found: Mapping[str, Any]) -> list[str]:
    if not found["differences"]:
        runs = found["results"][0]["runs"]
        return [f"PASS  all {runs} runs ended alike on both sides, to the bit: weights, records, predictions."]
    return [f"FAIL  {line}" for line in found["differences"]]


# ---------------------------------------------------------------------- command


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    presets = "\n".join(f"  {name:<10}{preset.about}" for name, preset in PRESETS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"presets:\n{presets}\n\n"
        "examples:\n"
        "  python benchmarks/sweep.py                                      the demo; some minutes on two idle cores\n"
        "  python benchmarks/sweep.py --preset smollm2 --root tweeteval    about half an hour on two idle cores\n"
        "  python benchmarks/sweep.py --preset smollm2 --teacher runs/teacher    a teacher that is there already\n"
        "  python benchmarks/sweep.py --points G4 G5 H2 --steps 10 --set axes.published=[]\n"
        "  python benchmarks/sweep.py --quick                              does it run? its numbers mean nothing\n"
        "  python benchmarks/sweep.py --json > sweep.json                  for programs\n\n"
        "Exit code 1: the two sides did not end alike; with --check also: a target is missed.",
    )
    what = parser.add_argument_group("the grid")
    what.add_argument("--preset", choices=tuple(PRESETS), default="demo", help="which one (%(default)s)")
    what.add_argument("--points", nargs="+", metavar="POINT", help="points, e.g. G4 G5 H2 (the preset's)")
    what.add_argument("--steps", type=positive, help="steps of each run (demo: 30, smollm2: 10; quick: 2)")
    what.add_argument("--batch", type=positive, help="prompts per step (24; quick: 6)")
    what.add_argument("--seed", type=int, default=42, help="of all runs (%(default)s)")
    what.add_argument(
        "--distill", type=float, metavar="SHARE", help="share of train that prompts come from (demo: .1, smollm2: .02)"
    )
    what.add_argument("--teacher", metavar="FOLDER", help="a teacher that is there (else one is taught beforehand)")
    what.add_argument("--root", type=Path, help="a TweetEval folder ($GATESPACE_TWEETEVAL)")
    what.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="any setting of the study file"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--workers", type=positive, help="runs at once (demo: 2, smollm2: 1; quick: 1)")
    how.add_argument("--threads", type=positive, help="threads of each run (cores / workers)")
    how.add_argument(
        "--parts", type=positive, default=2, help="parts in which the sides take turns, in mirrored order (%(default)s)"
    )
    how.add_argument(
        "--output",
        metavar="DIR",
        help="keep everything here (a temporary folder); models that were prepared in it are used again",
    )
    how.add_argument("--quick", action="store_true", help="a tiny grid of the demo: does it run?")
    how.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    how.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args(arguments)
    if options.quick and options.preset != "demo":
        parser.error("--quick is a small form of the demo")
    if options.output is not None and (there := [n for n in ABOUT if Path(options.output, n).exists()]):
        parser.error(f"{options.output} holds runs of an earlier measurement: remove {' and '.join(there)} in it")
    preset = PRESETS[options.preset]
    workers = options.workers or (1 if options.quick else preset.workers)
    settings = Settings(
        preset=options.preset,
        sets=_sets(options, preset),
        workers=workers,
        threads=options.threads or max(1, measure.usable_cores() // workers),
        parts=options.parts,
        output=options.output,
        quick=options.quick,
        token_limit=None if options.quick else TOKENS,
        wall_limit=None if options.quick else preset.wall_limit,
    )
    return settings, options


def _sets(options: argparse.Namespace, preset: Preset) -> tuple[str, ...]:
    """The settings of the preset, then those of the options, then the user's own."""
    from gatespace.cli.study_file import load_study

    task = next(iter(load_study(preset.study).tasks))
    sets = ["replication=null", f"seeds=[{options.seed}]", f"train.steps={preset.steps}", *preset.sets]
    if options.quick:
        sets += [*_QUICK, "train.steps=2"]
    if options.points:
        sets.append(f"points={json.dumps(options.points)}")
    if options.steps:
        sets.append(f"train.steps={options.steps}")
    if options.batch:
        sets.append(f"train.batch_size={options.batch}")
    if options.distill:
        sets.append(f"tasks.{task}.task.split.distill={options.distill}")
    if options.teacher:
        sets += ["teach.teacher=null", f"train.pair.teacher={json.dumps(str(Path(options.teacher).absolute()))}"]
    if options.root:
        sets.append(f"tasks.{task}.task.root={json.dumps(str(options.root.absolute()))}")
    return (*sets, *options.sets)


def main(arguments: Sequence[str] | None = None) -> int:
    from gatespace.errors import GatespaceError

    settings, options = parse(arguments)
    facts = measure.environment(settings.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="gatespace-bench-") as scratch:
            sides = run(settings, Path(settings.output or scratch).absolute(), tell)
            found = findings(settings, sides, facts)
    except GatespaceError as error:
        tell(f"error: {error}")
        return 2
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    for line in found["differences"]:
        tell(f"FAIL  {line}")
    return int(bool(found["differences"]) or (options.check and not kept(found)))


if __name__ == "__main__":
    sys.exit(main())
