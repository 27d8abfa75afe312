"""Time and memory of one step of on-policy distillation: TRL, a plain transformers loop and gatespace, in one run.

Every contender distils the same teacher into the same student with the same prompts, batch, response cap, temperature,
full-parameter AdamW and precision, in a fresh process, with one response per prompt or several. The step is split into
rollout (student generates), score (teacher forward), update (loss, backward) and optimizer. See benchmarks/README.md
for the method.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import measure

WORKER = Path(__file__).with_name("step_worker.py")
PHASES = ("rollout", "score", "update", "optimizer")
TASK = "tweeteval/emotion"
BUSY = 0.1
"""Share of the machine taken by other processes above which the run counts as disturbed."""


@dataclass(frozen=True)
class Contender:
    """One row. `precisions`: those in which it differs from other rows."""

    about: str
    precisions: tuple[str, ...] = ("bf16", "fp32")


CONTENDERS: dict[str, Contender] = {
    "trl": Contender("TRL's DistillationTrainer as it comes, reverse KL; with bf16 its training pass stays in fp32"),
    "trl-autocast": Contender("the same with its training pass in bf16 too: equal precision", ("bf16",)),
    "plain": Contender("transformers: generate, response-only logits, autograd KL mixture; autocast"),
    "gatespace-cold": Contender("our step, gate G5, empty teacher cache"),
    "gatespace-warm": Contender("the same step again, its scores in the cache"),
}
_OURS = ("gatespace-cold", "gatespace-warm")
_EQUAL = ("trl-autocast", "trl")
"""TRL at equal precision: the first that ran."""
_PROMISED = {(1, "gatespace-cold"): 4.5, (1, "gatespace-warm"): 5.5, (8, "gatespace-warm"): 15.0}
"""Target speed-up over TRL, by responses per prompt."""
_GROWTH = {8: 1.6}
"""Responses per prompt → max duration of our step relative to one response per prompt."""
_WORDS = {"wall": "wall time", "cpu": "CPU time", "peak_mib": "peak memory"}


@dataclass(frozen=True)
class Settings:
    """Settings of one benchmark run."""

    model: str
    teacher: str | None
    task: str
    root: str | None
    batch: int
    max_new_tokens: int
    precision: str
    per_prompt: tuple[int, ...]
    contenders: tuple[str, ...]
    steps: int
    """With one response per prompt; with n responses, steps // n."""
    warm_up: int
    repeats: int
    lr: float
    threads: int
    seed: int
    timeout: float
    patience: int
    check_times: bool
    """Whether the targets apply to these sizes."""


@dataclass(frozen=True)
class Target:
    """Measured ratio of another contender's cost to ours, and its target (None: no target)."""

    key: str
    other: str
    ours: str
    per_prompt: int
    value: float
    limit: float | None

    @property
    def grows(self) -> bool:
        """Whether it compares a contender with itself at one response per prompt: lower is better."""
        return self.other == self.ours

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value <= self.limit if self.grows else self.value >= self.limit


Turns = dict[tuple[int, str], list[dict[str, Any]]]
"""(responses per prompt, contender) → answers, one per repeat; an answer "unavailable" has no numbers."""


def work_of(settings: Any, report: Callable[[str], None]) -> dict[str, Any]:
    """Request for the worker processes; names are resolved here, once. Also used by ladder.py."""
    from gatespace.models import build_tiny, packaged_folder
    from gatespace.models.load import SMOLLM2, TINY
    from gatespace.tasks import load_task

    def folder(name: str) -> str:
        if name == SMOLLM2:
            return str(packaged_folder(name, report=report))
        if name in TINY:
            pair = build_tiny(load_task(settings.task, settings.root))
            return str(pair.teacher if name == "tiny-teacher" else pair.student)
        return name

    return {
        "student": folder(settings.model),
        "teacher": folder(settings.teacher or settings.model),
        "brief": settings.model in TINY,
        **{key: getattr(settings, key) for key in ("task", "root", "batch", "max_new_tokens", "precision", "steps")},
        **{key: getattr(settings, key) for key in ("warm_up", "lr", "seed")},
    }


def task_of(root: Path | None, report: Callable[[str], None]) -> tuple[str, str | None]:
    """Return the task and its folder: real tweets if available."""
    place = root or os.environ.get("GATESPACE_TWEETEVAL")
    if place is not None:
        return TASK, str(place)
    report("no TweetEval folder (--root or $GATESPACE_TWEETEVAL): generated texts instead, which are shorter")
    return "synthetic", None


def run(settings: Settings, report: Callable[[str], None] = lambda line: None) -> Turns:
    """Run all measurements, one process at a time; contenders take turns, each repeat in a different order."""
    work = work_of(settings, report)
    turns: Turns = {(each, name): [] for each in settings.per_prompt for name in settings.contenders}

    def ask(name: str, each: int, folder: str) -> dict[str, Any]:
        asked = work | {"per_prompt": each, "steps": max(1, settings.steps // each)}
        request = {"contender": name, "threads": settings.threads, "folder": folder, "work": asked}
        return measure.in_fresh_process(WORKER, request, threads=settings.threads, timeout=settings.timeout)

    for each, repeat in ((each, repeat) for each in settings.per_prompt for repeat in range(settings.repeats)):
        shift = repeat % len(settings.contenders)
        with tempfile.TemporaryDirectory(prefix="gatespace-bench-") as root:
            warm = Path(root, "warm")
            for name in settings.contenders[shift:] + settings.contenders[:shift]:
                if any("unavailable" in answer for answer in turns[each, name]):
                    continue
                if name == "gatespace-warm" and not warm.exists():
                    report("gatespace-warm: filling the cache")
                    warm.mkdir()
                    ask("gatespace-cold", each, str(warm))
                tries: list[dict[str, Any]] = []
                while not tries or (disturbance(tries[-1:]) > BUSY and len(tries) <= settings.patience):
                    again = f" again, others took {disturbance(tries[-1:]):.0%} of the machine" if tries else ""
                    report(f"{name}, {each} per prompt, {repeat + 1} of {settings.repeats}{again}")
                    folder = warm if name == "gatespace-warm" else Path(tempfile.mkdtemp(dir=root))
                    tries.append(ask(name, each, str(folder)))
                turns[each, name].append(min(tries, key=lambda answer: disturbance([answer])))
    return turns


def disturbance(answers: Sequence[dict[str, Any]]) -> float:
    """Share of the machine taken by other processes during these measurements."""
    steps = [step for answer in answers for step in answer.get("steps", ())]
    wall = sum(step["wall"] for step in steps)
    return sum(step["others"] for step in steps) / (wall * measure.usable_cores()) if wall else 0.0


def summaries(turns: Turns) -> list[dict[str, Any]]:
    """One flat record per row: medians over all its steps, and the value of every step."""
    records = []
    for (each_prompt, name), answers in turns.items():
        record: dict[str, Any] = {"contender": name, "per_prompt": each_prompt, "about": CONTENDERS[name].about}
        bad = next((answer["unavailable"] for answer in answers if "unavailable" in answer), None)
        steps = [step for answer in answers for step in answer.get("steps", ())]
        if bad is not None or not steps:
            records.append(record | {"unavailable": bad or "no step was measured"})
            continue
        for kind in ("wall", "cpu"):
            for key in (kind, *(f"{kind}_{phase}" for phase in PHASES)):
                each = [step[key] for step in steps]
                record |= {key: median(each), f"{key}_all": each}
        each = [answer["peak_mib"] for answer in answers]
        record |= {"peak_mib": median(each), "peak_mib_all": each}
        record["mean_length"] = mean(step["mean_length"] for step in steps)
        record["others_share"] = disturbance(answers)
        if "misses" in steps[0]:
            record |= {key: sum(step[key] for step in steps) for key in ("hits", "misses")}
        records.append(record)
    return records


def targets(settings: Settings, turns: Turns) -> list[Target]:
    """Ratios this run supports: medians over the repeats of ratios within one repeat."""

    def values(each: int, name: str, key: str) -> list[float] | None:
        answers = turns.get((each, name), [])
        if not answers or any("unavailable" in answer for answer in answers):
            return None
        return [
            answer["peak_mib"] if key == "peak_mib" else median(step[key] for step in answer["steps"])
            for answer in answers
        ]

    found: dict[tuple[Any, ...], Target] = {}

    def compare(each: int, key: str, other: str, ours: str, limit: float | None) -> None:
        above = values(each, other, key)
        below = values(1 if other == ours else each, ours, key)  # the same contender with one response per prompt
        if above is not None and below is not None:
            ratio = median(x / max(y, 1e-9) for x, y in zip(above, below, strict=True))
            target = Target(key, other, ours, each, ratio, limit if settings.check_times else None)
            found.setdefault((each, key, other, ours), target)

    for each in settings.per_prompt:
        equal = next((name for name in _EQUAL if values(each, name, "wall") is not None), "trl")
        for ours in _OURS:
            for key in ("wall", "cpu"):
                compare(each, key, equal, ours, _PROMISED.get((each, ours)))
                compare(each, key, "plain", ours, None)
                compare(each, key, "trl", ours, None)
                if each > 1:
                    compare(each, key, ours, ours, _GROWTH.get(each))
        for other in (equal, "plain"):
            compare(each, "peak_mib", other, "gatespace-cold", 1.0)
    return list(found.values())


def kept(settings: Settings, turns: Turns) -> bool:
    """Whether all ran, the warm cache had no misses, and every target was met."""
    records = summaries(turns)
    if any("unavailable" in record for record in records):
        return False
    warm = all(record["misses"] == 0 for record in records if record["contender"] == "gatespace-warm")
    return warm and all(target.met is not False for target in targets(settings, turns))


def as_json(settings: Settings, facts: dict[str, Any], turns: Turns) -> dict[str, Any]:
    return {
        "benchmark": "step",
        "settings": asdict(settings),
        "environment": facts,
        "results": summaries(turns),
        "targets": [asdict(target) | {"met": target.met} for target in targets(settings, turns)],
    }


def show(settings: Settings, facts: dict[str, Any], turns: Turns) -> None:
    """Print the table, the rows' descriptions, and the targets one by one."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 170)
    records = summaries(turns)
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    console.print(f"{facts['cpu']}, {facts['threads']} threads; python {facts['python']}, {packages}", highlight=False)
    size = f"batch {settings.batch}, at most {settings.max_new_tokens} new tokens, {settings.precision}"
    table = Table(title=f"{settings.model}, {settings.task}, {size}: seconds per step, medians")
    table.add_column("contender")
    table.add_column("per prompt", justify="right")
    for heading in ("wall s", "CPU s", *(f"{phase} wall/CPU" for phase in PHASES), "peak MiB", "length", "others"):
        table.add_column(heading, justify="right")
    for r in records:
        if "unavailable" in r:
            table.add_row(r["contender"], str(r["per_prompt"]), f"[dim]{escape(r['unavailable'])}[/dim]")
            continue
        table.add_row(
            r["contender"],
            str(r["per_prompt"]),
            with_range(r["wall_all"]),
            with_range(r["cpu_all"]),
            *(f"{r[f'wall_{phase}']:.2f} / {r[f'cpu_{phase}']:.2f}" for phase in PHASES),
            f"{r['peak_mib']:.0f}",
            f"{r['mean_length']:.2f}",
            f"{r['others_share']:.0%}",
        )
    console.print(table)
    for name in settings.contenders:
        console.print(f"  {name}: {CONTENDERS[name].about}.", highlight=False, soft_wrap=True)
    console.print("  length: mean response in tokens; time depends on it. others: CPU taken by other processes.")
    for r in records:
        if r["contender"] == "gatespace-warm" and r.get("misses"):
            console.print(f"  The warm cache was not: {r['misses']} misses, {r['hits']} hits.")
    console.print()
    for line in target_lines(records, targets(settings, turns)):
        console.print(line, highlight=False, soft_wrap=True)


def target_lines(records: Iterable[dict[str, Any]], found: Iterable[Target]) -> list[str]:
    """One line per ratio, and a warning if other processes disturbed the run."""
    lines = []
    for target in found:
        what, each = _WORDS[target.key], f"{target.per_prompt} per prompt"
        line = f"{target.other}'s {what} / {target.ours}'s, {each}: {target.value:.2f}×"
        if target.grows:
            line = f"{target.ours}'s {what}, {each} / 1 per prompt: {target.value:.2f}×"
        if target.limit is None:
            lines.append(f"      {line} (no target)")
        else:
            sign = "≤" if target.grows else "≥"
            lines.append(f"{'PASS' if target.met else 'FAIL'}  {line} (target {sign} {target.limit:g}×)")
    return [*lines, *disturbed_lines(records, "contender")]


def disturbed_lines(records: Iterable[dict[str, Any]], name: str) -> list[str]:
    disturbed = [r for r in records if r.get("others_share", 0) > BUSY]
    if not disturbed:
        return []
    worst = max(disturbed, key=lambda r: r["others_share"])
    return [
        f"Disturbed: other processes took {worst['others_share']:.0%} of the machine during {worst[name]} "
        f"(rows above {BUSY:.0%}: {len(disturbed)}); do not quote these times."
    ]


def with_range(values: Sequence[float], digits: int = 2) -> str:
    text = f"{median(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    rows = "\n".join(f"  {name:<16}{c.about}" for name, c in CONTENDERS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"contenders:\n{rows}\n\n"
        "examples:\n"
        "  python benchmarks/step.py --root tweeteval            one response per prompt; about 10 minutes\n"
        "  python benchmarks/step.py --root tweeteval --per-prompt 1,4,8    more than an hour on two idle cores\n"
        "  python benchmarks/step.py --quick                     does it run? a tiny model; its numbers mean nothing\n"
        "  python benchmarks/step.py --precision fp32 --contenders plain,gatespace-cold\n"
        "  python benchmarks/step.py --json > step.json          for programs\n\n"
        "TRL needs: pip install '.[bench]'. What does not run is reported, and the rest runs.",
    )
    work_arguments(parser)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--precision", choices=("auto", "bf16", "fp32"), default="auto", help="of all passes (auto: what is fast here)"
    )
    what.add_argument("--per-prompt", type=counts, default=(1,), metavar="N,M", help="responses per prompt (1)")
    what.add_argument("--contenders", type=names(CONTENDERS), metavar="A,B", help="rows to run (all)")
    what.add_argument("--steps", type=positive, help="measured steps in each process (3, or 3/N, at least 1; quick: 1)")
    what.add_argument("--repeats", type=positive, default=1, help="fresh processes per row (%(default)s)")
    what.add_argument("--check", action="store_true", help="exit with 1 if a target is missed or a row did not run")
    options = parser.parse_args(arguments)
    asked = options.contenders or tuple(CONTENDERS)
    precision = resolved(options.precision)
    contenders = tuple(name for name in asked if precision in CONTENDERS[name].precisions)
    if not contenders:
        parser.error(f"nothing to run: {', '.join(asked)} at {precision} is the same as another row")
    common = common_settings(options)
    settings = Settings(
        **common,
        precision=precision,
        per_prompt=options.per_prompt,
        contenders=contenders,
        steps=options.steps or (1 if options.quick else 3),
        warm_up=1,
        repeats=options.repeats,
        check_times=not options.quick,
    )
    return settings, options


def work_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments shared by step.py and ladder.py."""
    work = parser.add_argument_group("the work")
    work.add_argument("--model", help="the student: smollm2, tiny, a folder or a Hub name (smollm2; quick: tiny)")
    work.add_argument("--teacher", help="the teacher (the same model)")
    work.add_argument("--root", type=Path, help="a TweetEval folder ($GATESPACE_TWEETEVAL)")
    work.add_argument("--batch", type=positive, help="prompts per step (24; quick: 4)")
    work.add_argument("--max-new-tokens", type=positive, default=8, metavar="N", help="longest response (%(default)s)")
    work.add_argument("--lr", type=float, default=1e-6, help="learning rate (%(default)s)")
    work.add_argument("--seed", type=int, default=0, help="of rows and samples (%(default)s)")
    how = parser.add_argument_group("how")
    cores = measure.usable_cores()
    how.add_argument("--threads", type=positive, default=cores, help="threads of each process (all cores: %(default)s)")
    how.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="seconds until a process is given up (%(default).0f)"
    )
    how.add_argument(
        "--patience", type=int, default=1, metavar="N", help="repeat what other processes disturbed, up to N times (1)"
    )
    how.add_argument("--quick", action="store_true", help="a tiny model and generated texts: does it run?")
    how.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")


def common_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Values of `work_arguments` by settings name."""
    task, root = ("synthetic", None) if options.quick else task_of(options.root, tell)
    return {
        "model": options.model or ("tiny" if options.quick else "smollm2"),
        "teacher": options.teacher,
        "task": task,
        "root": root,
        "batch": options.batch or (4 if options.quick else 24),
        "max_new_tokens": options.max_new_tokens,
        "lr": options.lr,
        "seed": options.seed,
        "threads": options.threads,
        "timeout": options.timeout,
        "patience": 0 if options.quick else options.patience,
    }


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is needed, got {text!r}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))


def resolved(precision: str) -> str:
    """Return fp32 or bf16; for auto, what a run on this machine would choose."""
    from gatespace.config import TrainConfig, parse_config
    from gatespace.training.setup import placement

    settings = {"pair": {"teacher": "tiny"}, "engine": {"precision": precision, "device": "cpu"}}
    return placement(parse_config(TrainConfig, settings).engine).precision


def names(known: Iterable[str]) -> Any:
    def parse_names(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown) or 'nothing'}; known: {', '.join(known)}")
        return found

    return parse_names


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def study_arguments(parser: argparse.ArgumentParser, quick: str) -> None:
    """Add the options of a benchmark that runs whole studies; `quick` describes its quick version."""
    parser.add_argument("--workers", type=positive, help="runs at once (cores; quick: 1)")
    parser.add_argument("--output", metavar="DIR", help="keep everything here (a temporary folder)")
    parser.add_argument("--quick", action="store_true", help=f"{quick}: does it run?")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")


def study_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Values of `study_arguments` by settings name."""
    workers = options.workers or (1 if options.quick else measure.usable_cores())
    threads = max(1, measure.usable_cores() // workers)
    return {"workers": workers, "threads": threads, "output": options.output, "quick": options.quick}


def in_folder(settings: Any, run: Callable[[Any, Path, Callable[[str], None]], Any]) -> Any:
    """Call `run` in `settings.output` or a temporary folder; print an error and return None if it fails."""
    from gatespace.errors import GatespaceError

    try:
        with tempfile.TemporaryDirectory(prefix="gatespace-bench-") as scratch:
            folder = Path(settings.output or scratch).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            return run(settings, folder, tell)
    except (GatespaceError, RuntimeError) as error:
        tell(f"error: {error}")
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    settings, options = parse(arguments)
    facts = measure.environment(settings.threads)
    turns = run(settings, tell)
    if options.json:
        print(json.dumps(as_json(settings, facts, turns), indent=2))
    else:
        show(settings, facts, turns)
    return int(options.check and not kept(settings, turns))


if __name__ == "__main__":
    sys.exit(main())
