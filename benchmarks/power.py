"""Seeds and CPU-hours needed to tell two methods apart, by the number of responses per prompt.

The demo's pair is trained in several arms (gates, a static λ, a published method) with the same seeds, once per kind of
rollout: 1, 4 or 8 sampled responses per prompt. Arms are compared by paired differences over seeds. Their standard
deviation gives the seeds a paired t-test needs to detect a difference of one percentage point, and the CPU time of a
run gives their cost. Both are given for all pairs of arms and for pairs of arms without d: some runs with d collapse,
and these few make most of the variance of the former. See benchmarks/README.md for the method.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import measure
import sweep
from step import disturbed_lines, in_folder, names, positive, study_arguments, study_settings

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "1": ("one sampled response per prompt", ("train.rollout.per_prompt=1",)),
    "4": ("four", ("train.rollout.per_prompt=4",)),
    "8": ("eight", ("train.rollout.per_prompt=8",)),
}
DIFFERENCE, POWER = 1.0, 0.8
"""Percentage points to detect, and with what power."""
HOURS = 0.6
"""Target: CPU-hours of eight responses per prompt / those of one response per prompt."""
ARMS = (
    'points=[G2, G5, H2, "HG5,d+4"]',
    "axes={restrictions: false, gap: false, static: [0.5], isolation: null, controls: {shuffled: []}, "
    "published: [todi]}",
    "train.evaluation.every=0",
    "train.checkpoint.every=0",
    "train.trace.tokens_every=0",
)
_QUICK = (
    "tasks.messages.task.split={teacher: 0.6, distill: 0.01}",
    "teach.teacher.steps=20",
    "teach.student.steps=20",
    "train.batch_size=4",
    "train.evaluation.limit=40",
)
_RESAMPLES = 2000
WITHOUT_D = ("G2", "G5", "static:0.5")
"""Arms whose λ does not depend on the gap between teacher and student."""
Accuracies = dict[str, dict[int, float]]
"""Arm → seed → accuracy in percent."""


@dataclass(frozen=True)
class Settings:
    """Settings of one benchmark run."""

    kinds: tuple[str, ...]
    seeds: int
    steps: int | None
    sets: tuple[str, ...]
    split: str
    workers: int
    threads: int
    output: str | None
    quick: bool


def run(settings: Settings, folder: Path, report: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Run all kinds, one after the other, from the same two models."""
    from gatespace.cli.study_file import load_study
    from gatespace.runs import StudyFolder
    from gatespace.study.plan import check
    from gatespace.study.results import read_results

    common = ["replication=null", f"seeds={list(range(1, settings.seeds + 1))}", *ARMS]
    common += [*(_QUICK if settings.quick else ()), *([f"train.steps={settings.steps}"] if settings.steps else ())]
    prepared, found = StudyFolder(folder / "prepared"), []
    sweep.prepare(settings, load_study("demo", (*common, *settings.sets)), prepared, report)
    for kind in settings.kinds:
        config = load_study("demo", (*common, *KINDS[kind][1], *settings.sets))
        runs = len(check(config).runs)
        report(f"{kind}: {runs} runs")
        side = sweep.side(kind, config, folder, prepared, cache=True)
        cost = sweep.measured(settings, side, runs, report)
        accuracies: Accuracies = {}
        done = read_results(side.store.path).done
        for result in done:
            arm = accuracies.setdefault(result.spec.point, {})
            arm[result.spec.seed] = 100 * result.scores[settings.split].accuracy
        steps = fmean(result.cost.cpu_seconds for result in done if result.cost is not None)
        found.append(record(kind, accuracies, cost) | {"step_cpu_seconds_per_run": steps})
    return found


def record(kind: str, accuracies: Accuracies, cost: Mapping[str, float]) -> dict[str, Any]:
    """Results of a kind."""
    runs = sum(map(len, accuracies.values()))
    cpu = cost["cpu"] / runs
    return {
        "kind": kind,
        "about": KINDS[kind][0],
        "runs": runs,
        "arms": {arm: fmean(values.values()) for arm, values in accuracies.items()},
        "accuracies": {arm: {str(seed): value for seed, value in some.items()} for arm, some in accuracies.items()},
        **needed(accuracies, cpu),
        "without_d": needed({arm: accuracies[arm] for arm in WITHOUT_D}, cpu),
        "cpu_seconds_per_run": cpu,
        "wall": cost["wall"],
        "others_share": cost["others"] / (cost["wall"] * measure.usable_cores()),
    }


def needed(accuracies: Accuracies, cpu: float) -> dict[str, Any]:
    """Standard deviation of a paired difference of these arms, and the seeds and CPU-hours that it takes."""
    from gatespace.evidence.paired import seeds_needed

    spread = pooled(accuracies, sorted(next(iter(accuracies.values()))))
    seeds = seeds_needed(max(spread, 1e-6), DIFFERENCE, POWER)
    return {"sd": spread, "seeds_needed": seeds, "cpu_hours_needed": 2 * seeds * cpu / 3600}


def pooled(accuracies: Accuracies, seeds: Sequence[int]) -> float:
    """Standard deviation of a paired difference, pooled over all pairs of arms."""
    pairs = combinations(accuracies.values(), 2)
    return sqrt(fmean(variance([one[seed] - other[seed] for seed in seeds]) for one, other in pairs))


def ratios(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each kind relative to one response per prompt; ranges are 95 % bootstrap intervals over seeds."""
    base = next((r for r in records if r["kind"] == "1"), None)
    if base is None:
        return []
    found = []
    for r in (r for r in records if r is not base):
        cpu = r["cpu_seconds_per_run"] / base["cpu_seconds_per_run"]
        everything = _ratio(r, base, _range(r, base, tuple(r["arms"])), cpu)
        without_d = _ratio(r["without_d"], base["without_d"], _range(r, base, WITHOUT_D), cpu)
        found.append({"kind": r["kind"], "cpu_per_run": cpu, **everything, "without_d": without_d})
    return found


def _ratio(one: Mapping[str, Any], base: Mapping[str, Any], sds: tuple[float, float], cpu: float) -> dict[str, Any]:
    sd = one["sd"] / max(base["sd"], 1e-9)
    return {
        "sd": sd,
        "sd_range": sds,
        "cost": sd**2 * cpu,
        "cpu_hours": one["cpu_hours_needed"] / base["cpu_hours_needed"],
    }


def _range(one: Mapping[str, Any], other: Mapping[str, Any], arms: Sequence[str]) -> tuple[float, float]:
    """95 % paired bootstrap interval over seeds of the ratio of standard deviations."""
    from gatespace.seeding import generator

    draw = generator(0, "benchmarks", "power")
    both = [{arm: {int(s): v for s, v in r["accuracies"][arm].items()} for arm in arms} for r in (one, other)]
    seeds = sorted(both[0][arms[0]])
    values = []
    for _ in range(_RESAMPLES):
        chosen = draw.choices(seeds, k=len(seeds))
        if len(set(chosen)) > 1:
            values.append(pooled(both[0], chosen) / max(pooled(both[1], chosen), 1e-9))
    values.sort()
    return values[len(values) // 40], values[-1 - len(values) // 40]


def target(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The CPU-hours that eight responses need, relative to one response per prompt."""
    hours = next((r["cpu_hours"] for r in ratios(records) if r["kind"] == "8"), None)
    return None if hours is None else {"kind": "8", "value": hours, "limit": HOURS, "met": hours <= HOURS}


def show(settings: Settings, facts: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    print(f"{facts['cpu']}, {settings.workers} runs at once with {settings.threads} threads each")
    arms = ", ".join(records[0]["arms"])
    print(f"{settings.seeds} seeds; arms {arms}; {settings.split}; {DIFFERENCE:g} pp at {POWER:.0%} power\n")
    groups = {"all arms": lambda r: r, f"arms without d ({', '.join(WITHOUT_D)})": lambda r: r["without_d"]}
    for name, group in groups.items():
        print(f"{name}\n{'rollouts':<14}{'SD pp':>8}{'seeds':>8}{'CPU s/run':>11}{'CPU-hours':>11}{'others':>8}")
        for r in records:
            print(
                f"{r['kind']:<14}{group(r)['sd']:>8.2f}{group(r)['seeds_needed']:>8}{r['cpu_seconds_per_run']:>11.2f}"
                f"{group(r)['cpu_hours_needed']:>11.3f}{r['others_share']:>8.0%}"
            )
        for r in ratios(records):
            low, high = group(r)["sd_range"]
            print(
                f"{r['kind']} / 1: SD {group(r)['sd']:.2f} ({low:.2f} to {high:.2f}), CPU per run "
                f"{r['cpu_per_run']:.2f}, SD² × CPU {group(r)['cost']:.2f}, CPU-hours in whole seeds "
                f"{group(r)['cpu_hours']:.2f}"
            )
        print()
    print(
        "SD: of a paired difference, pooled over all pairs of these arms. CPU-hours: of both arms at that many seeds."
    )
    aim = target(records)
    if aim is not None and not settings.quick:
        verdict = "PASS" if aim["met"] else "FAIL"
        print(f"{verdict}  CPU-hours, {aim['kind']} / 1: {aim['value']:.2f} (target ≤ {aim['limit']})")
    for line in disturbed_lines(records, "kind"):
        print(line)


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    rows = "\n".join(f"  {name:<14}{about}" for name, (about, _) in KINDS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"kinds:\n{rows}\n\nexamples:\n"
        "  python benchmarks/power.py                     all kinds, 12 seeds, 6 arms: 216 runs\n"
        "  python benchmarks/power.py --kinds 1,8 --seeds 20\n"
        "  python benchmarks/power.py --quick             does it run? its numbers mean nothing\n"
        "  python benchmarks/power.py --json > power.json",
    )
    parser.add_argument("--kinds", type=names(KINDS), default=tuple(KINDS), metavar="A,B", help="of rollouts (all)")
    parser.add_argument("--seeds", type=positive, help="seeds of every arm (12; quick: 2)")
    parser.add_argument("--steps", type=positive, help="steps of a run (the demo's; quick: 2)")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="of the study")
    parser.add_argument("--split", default="test", help="whose accuracies are compared (%(default)s)")
    study_arguments(parser, quick="two seeds, two steps")
    options = parser.parse_args(arguments)
    if (options.seeds or 2) < 2:
        parser.error("a standard deviation needs at least two seeds")
    settings = Settings(
        kinds=options.kinds,
        seeds=options.seeds or (2 if options.quick else 12),
        steps=options.steps or (2 if options.quick else None),
        sets=tuple(options.sets),
        split=options.split,
        **study_settings(options),
    )
    return settings, options


def main(arguments: Sequence[str] | None = None) -> int:
    settings, options = parse(arguments)
    facts = measure.environment(settings.threads)
    records = in_folder(settings, run)
    if records is None:
        return 2
    aim = target(records)
    if options.json:
        found = {"benchmark": "power", "settings": asdict(settings), "environment": facts, "results": records}
        print(json.dumps(found | {"ratios": ratios(records), "target": aim}, indent=2))
    else:
        show(settings, facts, records)
    return int(options.check and aim is not None and not aim["met"])


if __name__ == "__main__":
    sys.exit(main())
