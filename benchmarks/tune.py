"""Power, false positives and cost of `gatespace tune`: planted effects found, null effects reported, training steps.

Planted: a generated task and a pair for which one direction of the gate is better by construction. Every text has a
kind and a cue, and the teacher sees a note with it, a label, which the student does not (`teacher.prompt`). On the
first kind, labels of the same cue vary, and the note is the label: the teacher is certain and right. On the second
kind, a cue has one label and the note is a random wrong one, which the teacher half believes: it gives the label a
probability of 0.6 and the note 0.4.

The student cannot know the note, so it has to learn one distribution for the teacher's many. Forward KL is least at
their arithmetic mean, which is right on the first kind (labels as often as they occur) and wrong on the second (0.4 for
labels that never occur). Reverse KL is least at their geometric mean, which is right on the second kind, where the
label is all that the teacher's opinions have in common, and overconfident on the first. So λ should be low where the
teacher is certain and high where it is not (a > 0, or b > 0); every constant λ is worse, at convergence too.

Null: the same pair, and a gate that may depend on only one signal, which is noise: a pseudo-random function of the
token's probabilities, without gradient. The loss is linear in λ, and λ is independent of both KLs, so every gate of
this search has the same expected gradient as the constant of its mean, and all have the same mean. Noise in λ only adds
variance, and little of it at the spreads of this search (0.25 to 1). The best on validation is best by luck, and no
candidate is better than its static twin.

Null with all channels: the planted pair and everything that a search has by default (three channels, all λ̄, wide
spreads), but every channel has the values of h, u or gap at other tokens of the batch, at random and without gradient.
No gate is better than the constant of its mean.

Edge: texts of the second kind only, for which reverse KL alone is right at every token. The best constant is near 1,
and a gate whose λ comes closer to 1 than the constants that it is compared with must not be called better.

Weak: the planted case where only a share of the cues (.6, .4, .2) is as above. At the others teacher, note and label
agree, and no λ is better than another at convergence. How often a gate is called better, over the share, is the power.

Grid: the first planted repetition again with a single rung, so that every candidate is trained for all steps at all
seeds. Its training steps and its verdict are compared with those of the search.

Every repetition has its own texts, pair and seeds. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
from step import in_folder, positive, study_arguments, study_settings

LABELS = ("red", "green", "blue", "gold")
KINDS = (("north", "south", "east", "west"), ("iron", "stone", "paper", "glass"))
"""Words of the first kind, where labels vary, and of the second, where the teacher is misled."""
CUES = 5
"""Cues per label and kind."""
VARIES = 0.25
"""Share of texts of the first kind with another label than the usual one of their cue."""
MISLED = 0.4
"""Share of the teacher's training texts of the second kind labelled as the wrong note says."""
GUESSED = 0.5
"""Share of the student's training texts with a random label."""
DESIGN = 2
"""Repetitions 0 and 1 of the planted and the edge case served to design them and are not counted."""
WEAK = (0.6, 0.4, 0.2)
"""Shares of cues with an effect in the weak cases."""
COST = 0.4
"""Target: training steps / those of a full grid, verdict in both."""
TARGETS = {"planted": (">=", 0.9), "null": ("<=", 0.05), "null-all": ("<=", 0.05), "edge": ("<=", 0.0)}
"""Targets: share of repetitions in which a gate is called better."""
_NOISE = '''"""A signal that says nothing: a pseudo-random number for every token."""
import torch
from gatespace import signals

@signals.register("noise", range=(0.0, 1.0))
def noise(tokens):
    choice = tokens.teacher_choice[:, None]
    both = (tokens.teacher_at(choice) + 1.7 * tokens.student_at(choice)).squeeze(-1).detach().double()
    return torch.frac(torch.sin(both * 12345.678) * 43758.5453).abs().to(tokens.dtype)
'''
_ELSEWHERE = '''"""The paper's signals at other tokens: their values, permuted over the tokens of the call."""
import torch
from gatespace import signals

def elsewhere(name, salt):
    @signals.register(f"{name}_elsewhere", range=(0.0, 1.0), prepass=(name,))
    def permuted(tokens):
        values = signals.everywhere(name, tokens)
        places = torch.arange(len(values), device=values.device).double()
        order = torch.frac(torch.sin(places * 78.233 + values.double().sum() * 12.9898 + salt) * 43758.5453).argsort()
        return values[order][tokens.span]

for salt, name in enumerate(("h", "u", "gap")):
    elsewhere(name, salt)
'''


@dataclass(frozen=True)
class Settings:
    """Settings of one benchmark run."""

    planted: int
    null: int
    null_all: int
    edge: int
    weak: int
    grid: int
    proposals: int
    workers: int
    threads: int
    output: str | None
    quick: bool


def rows(seed: int, split: str, count: int, side: str = "gold", case: str = "planted") -> list[dict[str, str]]:
    """Generate texts with the correct labels, or with notes for the teacher, or for the training of either model."""
    from gatespace.seeding import generator

    draw = generator(seed, "benchmarks", "tune", split).random
    first = 0.0 if case == "edge" else 0.5
    plain = round(CUES * (1 - float(case.removeprefix("weak-")))) if case.startswith("weak-") else 0
    found = []
    for _ in range(count):
        kind, word, place = int(draw() >= first), int(draw() * 4), int(draw() * CUES * len(LABELS))
        # Each kind has its own cues. The number says nothing; without it, few texts would be in one split only.
        text = f"{int(draw() * 100):02d} {KINDS[kind][word]} cue{place + kind * CUES * len(LABELS):02d}"
        usual, luck, other = place // CUES, draw(), 1 + int(draw() * 3)
        if place % CUES < plain:  # a cue without an effect
            gold = note = taught = usual
        elif kind == 0:  # labels vary, and the note is the label
            gold = note = taught = (usual + (luck < VARIES)) % len(LABELS)
        else:  # there is one label, and the note is a wrong one
            gold, note = usual, (usual + other) % len(LABELS)
            taught = note if luck < MISLED else gold
        if side == "teacher":
            text += f" {LABELS[note]}"
        elif side == "student" and draw() < GUESSED:
            gold = int(draw() * len(LABELS))
        found.append({"text": text, "label": LABELS[{"notes": note, "teacher": taught}.get(side, gold)]})
    return found


def make_pair(folder: Path, case: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Build the task and the pair of a repetition; return the settings of the task."""
    from gatespace.config import TaskConfig, TeachConfig, parse_config
    from gatespace.models import build_tiny
    from gatespace.tasks.configured import load_configured_task
    from gatespace.training.train import teach

    def table(name: str, counts: dict[str, int], sides: dict[str, str]) -> dict[str, Any]:
        sources = {}
        for split, count in counts.items():
            path = folder / f"{name}-{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            own = rows(seed, f"{name} {split}", count, sides.get(split, name), case)
            path.write_text("".join(json.dumps(row) + "\n" for row in own))
            sources[split] = str(path)
        return {"name": None, "brief": True, "table": {"source": sources, "labels": list(LABELS), "name": "planted"}}

    few = settings.quick
    test = 40 if few else 200
    task = table("gold", {"train": 800, "val": test, "test": test}, {"train": "notes"})
    tiny = build_tiny(load_configured_task(parse_config(TaskConfig, task)))
    for side, base in (("teacher", tiny.teacher), ("student", tiny.student)):
        own = table(side, {"train": 2400, "val": 20, "test": 20}, {})
        teach(
            parse_config(
                TeachConfig,
                {
                    "task": own | {"split": {"teacher": 1.0}},
                    "model": str(base),
                    "steps": 20 if few else 400 if side == "teacher" else 200,
                    "batch_size": 48,
                    "optimizer": {"lr": 2e-3, "schedule": "cosine"},
                    "engine": {"precision": "fp32", "threads": settings.threads},
                    "evaluation": {"every": 0, "final": []},
                    "seed": seed,
                    "output": str(folder / side),
                },
            )
        )
    return task | {"split": {"distill": 1.0}}


def study(folder: Path, task: dict[str, Any], case: str, seed: int, settings: Settings) -> Path:
    """Write the study file of a repetition."""
    from gatespace.config.text import write_yaml

    few, first = settings.quick, 1000 * (seed + 1)
    rungs = [(1, 1), (2, 2)] if few else [(20, 1), (30, 2), (40, 4)]
    if case == "grid":
        rungs = rungs[-1:]
    search: dict[str, Any] = {
        "rungs": [{"steps": steps, "seeds": seeds} for steps, seeds in rungs],
        "seeds": list(range(first + 1, first + 5)),
        "fresh": list(range(first + 11, first + (13 if few else 17))),
        "proposals": settings.proposals,
        "batch": max(1, settings.proposals // 4),
        "keep": 0.25,
        "seed": seed,
    }
    if few:
        search |= {"points": ["G5"], "lam": [0.5]}
    whole: dict[str, Any] = {
        "name": case,
        "tasks": {"planted": {"task": task}},
        "train": {
            "pair": {role: str(folder / role / "model") for role in ("student", "teacher")},
            "steps": rungs[-1][0],
            "batch_size": 4 if few else 48,
            "optimizer": {"lr": 2e-3, "schedule": "cosine"},
            "teacher": {"prompt": {"prompt": "{prompt} {label}"}},
            "rollout": {"max_new_tokens": 6},
            "evaluation": {"max_new_tokens": 6, "batch_size": 200},
            "engine": {"precision": "fp32"},
            "trace": {"tokens_every": 0},
        },
        "tune": search,
    }
    if case.startswith("null"):
        plugin = folder / "noise.py"
        plugin.write_text(_NOISE if case == "null" else _ELSEWHERE)
        whole["plugins"] = [str(plugin)]
        search["points"] = []
    if case == "null":
        search |= {"channels": ["noise"], "lam": [0.5], "spread": [0.25, 1.0]}
    elif case == "null-all":
        search["channels"] = [f"{name}_elsewhere" for name in ("h", "u", "gap")]
    path = folder / f"{case}.yaml"
    path.write_text(write_yaml(whole))
    return path


def repetition(folder: Path, case: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Run one search and return its verdict."""
    place = folder / f"{case}-{seed}"
    path = study(place, make_pair(place, case, seed, settings), case, seed, settings)
    words = ["tune", str(path), "--json", "--quiet", "--trust-plugins", "--output", str(place / "tune")]
    words += ["--workers", str(settings.workers), "--threads", str(settings.threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads)}
    done = subprocess.run(
        [sys.executable, "-m", "gatespace", *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{case} {seed}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    verdict = found["verdict"]
    winner = found["winner"]
    return {
        "case": case,
        "repetition": seed,
        "state": verdict["state"],
        "sentence": f"{verdict['sentence']} {verdict['why']}",
        "power": verdict["power"],
        "gate": verdict["gate"],
        "direction": None if winner is None else winner["place"]["direction"],
        "lam": None if winner is None else winner["place"]["lam"],
        "spread": None if winner is None else winner["place"]["spread"],
        "against": verdict["against"],
        "curse": verdict["curse"],
        "cost": found["cost"],
    }


def run(settings: Settings, folder: Path, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run all repetitions; those already in the folder are read from it."""
    found = []
    cases = [
        ("edge", DESIGN, settings.edge),
        ("planted", DESIGN, settings.planted),
        ("grid", DESIGN, settings.grid),
        ("null", 0, settings.null),
        ("null-all", 0, settings.null_all),
        *((f"weak-{share}", 0, settings.weak) for share in WEAK),
    ]
    for case, first, count in cases:
        for seed in range(first, first + count):
            saved = folder / f"{case}-{seed}.json"
            if not saved.exists():
                one = repetition(folder, case, seed, settings)
                saved.write_text(json.dumps(one, indent=2))
            one = json.loads(saved.read_text())
            report(f"{case} {seed}: {one['sentence']}")
            found.append(one)
    return found


def targets(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Targets and the values reached."""
    found = []
    for case, (sign, limit) in TARGETS.items():
        own = [one for one in records if one["case"] == case]
        if own:
            share = sum(one["state"] == "better" for one in own) / len(own)
            met = share >= limit if sign == ">=" else share <= limit
            found.append({"what": f"{case}: called better", "value": share, "of": len(own), "limit": limit, "met": met})
    planted, grids = (
        {one["repetition"]: one for one in records if one["case"] == case} for case in ("planted", "grid")
    )
    counted = [one["cost"]["with_verdict"] for one in planted.values()]
    measured = [_steps(planted[number]) / _steps(grid) for number, grid in grids.items() if number in planted]
    for costs, how in ((counted, "counted"), (measured, "trained")):
        if costs:
            aim = {"what": f"steps / full grid ({how}), verdict in both", "value": max(costs), "of": len(costs)}
            found.append(aim | {"limit": COST, "met": max(costs) <= COST})
    same = [planted[number]["state"] == grid["state"] for number, grid in grids.items() if number in planted]
    if same:
        value = sum(same) / len(same)
        found.append(
            {"what": "verdict of the grid", "value": value, "of": len(same), "limit": 1.0, "met": value == 1.0}
        )
    return found


def _steps(one: dict[str, Any]) -> int:
    """Training steps of search and verdict."""
    steps: int = one["cost"]["search_steps"] + one["cost"]["verdict_steps"]
    return steps


def show(settings: Settings, facts: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    print(f"{facts['cpu']}, {settings.workers} runs at once with {settings.threads} threads each\n")
    print(f"{'case':<10}{'rep.':>5}{'verdict':>12}{'least gain':>12}{'λ̄':>7}{'spread':>8}{'steps/grid':>12}  direction")
    for one in records:
        gain = min((pair["mean"] for pair in one["against"]), default=float("nan"))
        place = ["", ""] if one["lam"] is None else [f"{one['lam']:.2f}", f"{one['spread']:.2f}"]
        toward = " ".join(f"{name} {value:+.2f}" for name, value in (one["direction"] or {}).items())
        print(
            f"{one['case']:<10}{one['repetition']:>5}{one['state']:>12}{gain:>12.4f}{place[0]:>7}{place[1]:>8}"
            f"{one['cost']['with_verdict']:>12.2f}  {toward}"
        )
    print()
    for aim in targets(records):
        mark = "" if settings.quick else ("PASS  " if aim["met"] else "FAIL  ")
        print(f"{mark}{aim['what']}: {aim['value']:.2f} of {aim['of']} (target {aim['limit']})")


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  python benchmarks/tune.py                      every case\n"
        "  python benchmarks/tune.py --planted 0 --grid 0 --null 0 --null-all 0 --weak 0   the edge case alone\n"
        "  python benchmarks/tune.py --output DIR         keep everything; the same command goes on after a stop\n"
        "  python benchmarks/tune.py --quick              does it run? its numbers mean nothing\n"
        "  python benchmarks/tune.py --json > tune.json",
    )
    parser.add_argument("--planted", type=int, help="repetitions of the planted case (10; quick: 1)")
    parser.add_argument("--null", type=int, help="repetitions of the null case (20; quick: 1)")
    parser.add_argument("--null-all", type=int, help="repetitions of the null case with all channels (20; quick: 1)")
    parser.add_argument("--edge", type=int, help="repetitions of the case whose best constant is near 1 (10; quick: 1)")
    parser.add_argument("--weak", type=int, help="repetitions of every weak case (5; quick: 0)")
    parser.add_argument("--grid", type=int, help="planted repetitions searched by a full grid too (1)")
    parser.add_argument("--proposals", type=positive, help="gates that are proposed (32; quick: 2)")
    study_arguments(parser, quick="one of each, two steps")
    options = parser.parse_args(arguments)
    quick = options.quick
    usual = {"planted": 10, "null": 20, "null_all": 20, "edge": 10, "weak": 5, "grid": 1}
    given = {case: getattr(options, case) for case in usual}
    least = {case: min(count, int(case != "weak")) for case, count in usual.items()} if quick else usual
    settings = Settings(
        **{case: least[case] if count is None else count for case, count in given.items()},
        proposals=options.proposals or (2 if quick else 32),
        **study_settings(options),
    )
    return settings, options


def main(arguments: Sequence[str] | None = None) -> int:
    settings, options = parse(arguments)
    facts = measure.environment(settings.threads)
    records = in_folder(settings, run)
    if records is None:
        return 2
    aims = targets(records)
    if options.json:
        found = {"benchmark": "tune", "settings": asdict(settings), "environment": facts, "results": records}
        print(json.dumps(found | {"targets": aims}, indent=2))
    else:
        show(settings, facts, records)
    return int(options.check and not all(aim["met"] for aim in aims))


if __name__ == "__main__":
    sys.exit(main())
