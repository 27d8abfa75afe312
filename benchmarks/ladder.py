"""Gain of each exact speed-up of a step, enabled one after another, and distance of the full step from the limit.

All rungs do the same work: the same prompts, and responses sampled once, at the maximum length. Each rung keeps the
speed-ups of the rungs above it, and runs in a fresh process. Loss and gradient of every rung are compared with those of
the first. The limit is the time of the matrix products that no implementation can avoid, at the rate this machine
reaches for them in this run, plus the optimizer's memory traffic. See benchmarks/README.md for the method.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import measure
from step import (
    BUSY,
    PHASES,
    common_settings,
    disturbance,
    disturbed_lines,
    names,
    positive,
    resolved,
    tell,
    with_range,
    work_arguments,
    work_of,
)

WORKER = Path(__file__).with_name("ladder_worker.py")
SAME = {"fp32": 1e-4}
"""Relative difference from the first rung above which loss or gradient count as different."""
SHARE = {"fp32": 0.65, "bf16": 0.6}
"""Target share of the limit for the engine's step."""
KINDS = {
    "attention products": r"bmm|baddbmm|.*scaled_dot_product.*",
    "matrix products": r"(add)?mm|(mkldnn_)?linear.*|matmul|(add)?mv|dot",
    "softmax": r".*softmax.*|logsumexp",
    "optimizer": r"_fused_adam.*|_foreach.*",
    "copies and fills": r".*copy.*|clone|contiguous|to|fill_|zero_|zeros.*|ones.*|empty.*|cat|stack|gather|embedding.*|"
    r"index.*|slice.*|select_.*|repeat.*|resize_",
    "elementwise work and reductions": r".*",
}
"""Kind of operation → pattern of torch names; the first match counts."""


@dataclass(frozen=True)
class Rung:
    """Enabled speed-ups. A row with `engine` is the unmodified `Distillation.step`, with its own responses."""

    about: str
    all_logits: bool = False
    packed: bool = True
    share: tuple[str, ...] = ()
    reuse: bool = False
    fused: bool = False
    precision: str = "fp32"
    warm: bool = False
    engine: bool = False


def _rungs() -> dict[str, Rung]:
    whole = Rung("whole padded sequences, all logits, transformers' generate", all_logits=True, packed=False)
    response = replace(whole, about="logits at response positions only", all_logits=False)
    packed = replace(response, about="rows packed without padding (so there is no length to sort by)", packed=True)
    rollout = replace(packed, about="what prompts share is read once: in the rollout", share=("rollout",))
    score = replace(rollout, about="the same in scoring: once and for all", share=("rollout", "score"))
    update = replace(score, about="the same in the update", share=("rollout", "score", "update"))
    reuse = replace(update, about="the update goes on from the rollout's own pass over the prompts", reuse=True)
    fused = replace(reuse, about="the loss from hidden states, no logits of all tokens", fused=True)
    bf16 = replace(fused, about="bfloat16 passes, float32 master weights", precision="bf16")
    warm = replace(bf16, about="the teacher's scores are in the cache", warm=True)
    engine = replace(bf16, about="the engine's own step, empty cache; responses end where they end", engine=True)
    engine_fp32 = replace(engine, about=f"{engine.about}; fp32", precision="fp32")
    again = "the same step again, its scores in the cache"
    return {
        "whole": whole,
        "response-only": response,
        "packed": packed,
        "prefix-rollout": rollout,
        "prefix-score": score,
        "prefix-update": update,
        "reuse": reuse,
        "fused": fused,
        "engine-fp32-cold": engine_fp32,
        "engine-fp32-warm": replace(engine_fp32, about=f"{again}; fp32", warm=True),
        "bf16": bf16,
        "warm": warm,
        "engine-cold": engine,
        "engine-warm": replace(engine, about=again, warm=True),
    }


RUNGS = _rungs()


@dataclass(frozen=True)
class Settings:
    """Settings of one benchmark run."""

    model: str
    teacher: str | None
    task: str
    root: str | None
    batch: int
    max_new_tokens: int
    rungs: tuple[str, ...]
    steps: int
    warm_up: int
    micro_rows: int
    lr: float
    threads: int
    seed: int
    timeout: float
    patience: int
    check_times: bool
    """Whether the targets apply to these sizes."""
    precision: str = "fp32"
    """Precision in which the shared responses are sampled."""
    profile: bool = False
    """Whether engine rows are rerun under torch's profiler."""


@dataclass
class Found:
    """Measurements: rung → answer, precision → rates of this machine, and rung → profile."""

    rungs: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: dict[str, dict[str, Any]] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)


def run(settings: Settings, report: Callable[[str], None] = lambda line: None) -> Found:
    """Run all measurements, one process at a time: rungs from first to last, then the machine's rates."""
    work, found = work_of(settings, report), Found()
    with tempfile.TemporaryDirectory(prefix="gatespace-bench-") as root:

        def ask(do: str, precision: str, **more: Any) -> dict[str, Any]:
            request = {"do": do, "threads": settings.threads, "folder": root, "work": work | {"precision": precision}}
            request |= {"micro_rows": settings.micro_rows} | more
            return measure.in_fresh_process(WORKER, request, threads=settings.threads, timeout=settings.timeout)

        def rung_once(name: str, do: str = "rung") -> dict[str, Any]:
            rung = RUNGS[name]
            scores = Path(root, f"engine-scores-{rung.precision}") if rung.warm else Path(tempfile.mkdtemp(dir=root))
            if rung.engine and rung.warm and not scores.exists():
                report(f"{name}: filling the cache")
                ask("rung", rung.precision, rung=asdict(rung), scores=str(scores))
            return ask(do, rung.precision, rung=asdict(rung), scores=str(scores))

        report("responses")
        made = ask("responses", settings.precision)
        if "unavailable" in made:
            raise SystemExit(f"The responses could not be made: {made['unavailable']}")
        for name in settings.rungs:
            tries: list[dict[str, Any]] = []
            while not tries or (disturbance(tries[-1:]) > BUSY and len(tries) <= settings.patience):
                again = f" again, others took {disturbance(tries[-1:]):.0%} of the machine" if tries else ""
                report(f"{name}{again}")
                tries.append(rung_once(name))
            found.rungs[name] = min(tries, key=lambda answer: disturbance([answer]))
        for name in settings.rungs:
            if settings.profile and RUNGS[name].engine:
                report(f"profile of {name}")  # separately, as the profiler adds overhead
                found.profiles[name] = rung_once(name, "profile")
        for precision in dict.fromkeys(RUNGS[name].precision for name in settings.rungs):
            answers = [
                found.rungs[name]
                for name in settings.rungs
                if RUNGS[name].precision == precision and "unavailable" not in found.rungs[name]
            ]
            if answers:
                report(f"rates of this machine in {precision}")
                sizes = counts(answers[-1])
                found.rates[precision] = ask(
                    "rates", precision, **{k: sizes[k] for k in ("tokens", "taught", "positions")}
                )
    return found


# ---------------------------------------------------------------------- limit


def counts(answer: dict[str, Any]) -> dict[str, float]:
    """Minimal work of one step, mean over the steps: each real token once."""
    shape = answer["shape"]
    positions = mean(step["response_tokens"] for step in answer["steps"])
    fed = positions - shape["rows"]  # the last token of a response predicts nothing
    own = shape["suffix"] + fed
    length = own / shape["rows"]
    # A token at position i attends to i + 1 keys; rows are assumed equally long, which is the minimum.
    prefix = shape["prefix"]
    row_pairs = shape["rows"] * (length * prefix + length * (length + 1) / 2)
    return {
        "tokens": prefix + own,
        "taught": own,
        "fed": fed,
        "positions": positions,
        "pairs": prefix * (prefix + 1) / 2 + row_pairs,
        "taught_pairs": row_pairs,
    }


def limit(answer: dict[str, Any], rates: dict[str, Any], *, precision: str, warm: bool, kind: str) -> dict[str, float]:
    """Minimum seconds (wall or CPU) of a step by part: FLOPs × seconds per FLOP, and bytes × seconds per byte."""
    n, sizes = counts(answer), rates["sizes"]

    def seconds(flops: float, rate: str) -> float:
        return flops * float(rates[rate][kind])

    attention = 4 * n["pairs"] * sizes["attention"]
    body, head = 2 * sizes["body"] * n["tokens"], 2 * sizes["head"] * n["positions"]
    # AdamW reads the gradient, and reads and writes weight and two moments in float32; clipping reads the gradient
    # again; with bfloat16 passes the rounded weights are written too.
    half = precision == "bf16"
    traffic = sizes["parameters"] * (24 + 2 * (2 if half else 4) + (2 if half else 0))
    parts = {
        "student forward": seconds(body + attention, "forward"),
        "input gradients": seconds(body + attention, "input_gradient"),
        "weight gradients": seconds(body, "weight_gradient") + seconds(attention, "input_gradient"),
        "decode": seconds(2 * sizes["body"] * n["fed"], "decode") + seconds(head, "draw"),
        "student head": sum(seconds(head, f"head_{part}") for part in ("forward", "input_gradient", "weight_gradient")),
        "teacher head": seconds(2 * sizes["teacher_head"] * n["positions"], "teacher_head"),
        "optimizer": traffic * float(rates["copy"][kind]),
    }
    if not warm:
        work = 2 * sizes["teacher_body"] * n["taught"] + 4 * n["taught_pairs"] * sizes["teacher_attention"]
        parts["teacher"] = seconds(work, "teacher")
    return parts


# ---------------------------------------------------------------------- summaries


def summaries(settings: Settings, found: Found) -> list[dict[str, Any]]:
    """One flat record per rung: medians over its steps, gain over the previous rung, difference from the first."""
    records: list[dict[str, Any]] = []
    first: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    for name, answer in found.rungs.items():
        rung = RUNGS[name]
        record: dict[str, Any] = {"rung": name, "about": rung.about, "precision": rung.precision}
        if "unavailable" in answer:
            records.append(record | {"unavailable": answer["unavailable"]})
            continue
        for kind in ("wall", "cpu"):
            for key in (kind, *(f"{kind}_{phase}" for phase in PHASES)):
                each = [step[key] for step in answer["steps"]]
                record |= {key: median(each), f"{key}_all": each}
        record |= {"peak_mib": answer["peak_mib"], "others_share": disturbance([answer])}
        record |= {"mean_length": mean(step["mean_length"] for step in answer["steps"]), "misses": answer["misses"]}
        if not rung.engine:
            if before is not None:
                record |= {f"gain_{kind}": before[kind] / max(record[kind], 1e-9) for kind in ("wall", "cpu")}
            before = record
            record |= {key: answer[key] for key in ("loss", "gradient_norm", "gradient_error", "same_responses")}
            first = first or record
            for key in ("loss", "gradient_norm"):
                record[f"{key}_error"] = abs(record[key] - first[key]) / max(abs(first[key]), 1e-300)
        rates = found.rates.get(rung.precision, {"unavailable": "not measured"})
        if "unavailable" not in rates:
            for kind in ("wall", "cpu"):
                parts = limit(answer, rates, precision=rung.precision, warm=rung.warm, kind=kind)
                record |= {f"limit_{kind}_parts": parts, f"limit_{kind}": sum(parts.values())}
                record[f"share_{kind}"] = record[f"limit_{kind}"] / max(record[kind], 1e-9)
        records.append(record)
    return records


def shares(operations: dict[str, float]) -> dict[str, float]:
    """Kind of operation → share of the total time, largest first."""
    total: dict[str, float] = {}
    for name, time in operations.items():
        kind = next(kind for kind, names in KINDS.items() if re.fullmatch(names, name))
        total[kind] = total.get(kind, 0.0) + time
    whole = sum(total.values())
    return {kind: total[kind] / whole for kind in sorted(total, key=lambda kind: -total[kind])}


def largest_difference(records: Iterable[dict[str, Any]], precision: str) -> dict[str, float]:
    """Largest relative difference from the first rung, of loss, gradient and its norm."""
    keys = ("loss_error", "gradient_norm_error", "gradient_error")
    compared = [r for r in records if r["precision"] == precision and "loss_error" in r]
    return {key: max(r[key] for r in compared) for key in keys} if compared else {}


def kept(settings: Settings, found: Found) -> bool:
    """Whether all rungs ran, warm caches had no misses, results agree, and the engine reaches its target share."""
    records = summaries(settings, found)
    if any("unavailable" in record for record in (*records, *found.rates.values(), *found.profiles.values())):
        return False
    if any(record["misses"] for record in records if RUNGS[record["rung"]].warm):
        return False
    for precision, allowed in SAME.items():
        if any(value > allowed for value in largest_difference(records, precision).values()):
            return False
    engine = [record for record in records if RUNGS[record["rung"]].engine]
    return not settings.check_times or all(record["share_wall"] >= SHARE[record["precision"]] for record in engine)


def as_json(settings: Settings, facts: dict[str, Any], found: Found) -> dict[str, Any]:
    records = summaries(settings, found)
    return {
        "benchmark": "ladder",
        "settings": asdict(settings),
        "environment": facts,
        "results": records,
        "rates": found.rates,
        "profiles": {name: shares(one["operations"]) for name, one in found.profiles.items() if "operations" in one},
        "largest_difference": {precision: largest_difference(records, precision) for precision in found.rates},
    }


def show(settings: Settings, facts: dict[str, Any], found: Found) -> None:
    """Print the ladder, the rungs' descriptions, their results, and the limit."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 180)
    records = summaries(settings, found)
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    console.print(f"{facts['cpu']}, {facts['threads']} threads; python {facts['python']}, {packages}", highlight=False)
    size = f"batch {settings.batch}, {settings.max_new_tokens} new tokens"
    table = Table(title=f"{settings.model}, {settings.task}, {size}: seconds per step, median of {settings.steps}")
    table.add_column("rung")
    for heading in ("wall s", "CPU s", "gain wall/CPU", *(f"{phase} wall/CPU" for phase in PHASES)):
        table.add_column(heading, justify="right")
    for heading in ("peak MiB", "of limit", "others"):
        table.add_column(heading, justify="right")
    for r in records:
        if "unavailable" in r:
            table.add_row(r["rung"], f"[dim]{escape(r['unavailable'])}[/dim]")
            continue
        table.add_row(
            r["rung"],
            with_range(r["wall_all"]),
            with_range(r["cpu_all"]),
            f"{r['gain_wall']:.2f}× / {r['gain_cpu']:.2f}×" if "gain_wall" in r else "",
            *(f"{r[f'wall_{phase}']:.2f} / {r[f'cpu_{phase}']:.2f}" for phase in PHASES),
            f"{r['peak_mib']:.0f}",
            f"{r['share_wall']:.2f}" if "share_wall" in r else "",
            f"{r['others_share']:.0%}",
        )
    console.print(table)
    lines = [*about_lines(settings, records), "", *same_lines(records), "", *limit_lines(settings, records, found)]
    for line in (*lines, *profile_lines(found)):
        console.print(line, highlight=False, soft_wrap=True)


def about_lines(settings: Settings, records: Iterable[dict[str, Any]]) -> list[str]:
    lines = [f"  {name}: {RUNGS[name].about}." for name in settings.rungs]
    for r in records:
        if RUNGS[r["rung"]].engine and "mean_length" in r:
            lines.append(f"  Responses of {r['rung']}: {r['mean_length']:.2f} tokens in the mean.")
        if RUNGS[r["rung"]].warm and r.get("misses"):
            lines.append(f"  The cache of {r['rung']} was not warm: {r['misses']} misses.")
    return lines


def same_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """Results of the rungs' first step, compared with the first rung."""
    compared = [r for r in records if "loss_error" in r]
    lines = [
        f"  {r['rung']:<15} loss {r['loss']:.6f}, gradient norm {r['gradient_norm']:.6f}; relative distance from the "
        f"first: {r['loss_error']:.0e}, {r['gradient_norm_error']:.0e}, of the whole gradient {r['gradient_error']:.0e}"
        for r in compared
    ]
    for precision in dict.fromkeys(r["precision"] for r in compared):
        worst = max(largest_difference(records, precision).values())
        if precision in SAME:
            verdict = "PASS" if worst <= SAME[precision] else "FAIL"
            lines.append(f"{verdict}  {precision}: largest difference {worst:.1e} (target ≤ {SAME[precision]:.0e})")
        else:
            lines.append(f"      {precision}: largest difference {worst:.1e} (rounding; no target)")
    return lines


def limit_lines(settings: Settings, records: Sequence[dict[str, Any]], found: Found) -> list[str]:
    """Breakdown of the limit, for the last rung of each precision and all engine rows."""
    lines = []
    for precision, rates in found.rates.items():
        if "unavailable" in rates:
            lines.append(f"The rates in {precision} could not be measured: {rates['unavailable']}")
            continue
        speeds = [
            f"{name.replace('_', ' ')} {1e-12 / r['wall']:.2f}"
            for name, r in rates.items()
            if isinstance(r, dict) and "wall" in r
        ]
        lines.append(
            f"{precision}: TFLOP/s of products at the model's shapes: {', '.join(speeds[:-1])}; "
            f"copy {1e-9 / rates['copy']['wall']:.1f} GB/s"
        )
    last = {r["precision"]: r["rung"] for r in records if "share_wall" in r and not RUNGS[r["rung"]].engine}
    for r in records:
        rung = RUNGS[r["rung"]]
        if "share_wall" not in r or not (rung.engine or r["rung"] in last.values()):
            continue
        n = counts(found.rungs[r["rung"]])
        parts = ", ".join(f"{name} {value:.2f}" for name, value in r["limit_wall_parts"].items())
        lines.append(
            f"{r['rung']}: {n['tokens']:.0f} tokens through the student once forward and twice backward, "
            f"{0 if rung.warm else n['taught']:.0f} through the teacher, {n['fed']:.0f} decoded one by one, "
            f"{n['positions']:.0f} positions through the heads: at least {parts}; {r['limit_wall']:.2f} s in all"
        )
        line = f"{r['rung']} reaches {r['share_wall']:.2f} of the limit by wall, {r['share_cpu']:.2f} by CPU time"
        if rung.engine and settings.check_times:
            share = SHARE[rung.precision]
            lines.append(f"{'PASS' if r['share_wall'] >= share else 'FAIL'}  {line} (target ≥ {share})")
        else:
            lines.append(f"      {line} (no target)")
    measured = [{"rung": f"the rates in {precision}", **rates} for precision, rates in found.rates.items()]
    return [*lines, *disturbed_lines([*records, *measured], "rung")]


def profile_lines(found: Found) -> list[str]:
    """Share of each kind of operation, by rung."""
    lines = []
    for name, profile in found.profiles.items():
        parts = [f"{kind} {share:.0%}" for kind, share in shares(profile.get("operations", {})).items()]
        lines.append(f"Time in operations of {name}: {', '.join(parts) or profile['unavailable']}")
    return lines


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    rows = "\n".join(f"  {name:<16}{rung.about}" for name, rung in RUNGS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"rungs, each with all that stands above it:\n{rows}\n\n"
        "examples:\n"
        "  python benchmarks/ladder.py --root tweeteval          everything; about 20 minutes on two idle cores\n"
        "  python benchmarks/ladder.py --quick                   does it run? a tiny model; its times mean nothing\n"
        "  python benchmarks/ladder.py --rungs fused,bf16,engine-cold,engine-warm\n"
        "  python benchmarks/ladder.py --json > ladder.json      for programs",
    )
    work_arguments(parser)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--rungs", type=names(RUNGS), metavar="A,B", help="rungs to run (all; those in fp32 where bf16 is slow)"
    )
    what.add_argument("--steps", type=positive, help="measured steps in each process (2; quick: 1)")
    what.add_argument(
        "--micro-rows",
        type=positive,
        default=8,
        metavar="N",
        help="rows in one pass where each carries its whole prompt: more do not fit into memory (%(default)s)",
    )
    what.add_argument("--profile", action="store_true", help="print which kinds of operation the engine's time is in")
    what.add_argument("--check", action="store_true", help="exit with 1 if a target is missed or a rung did not run")
    options = parser.parse_args(arguments)
    fast = ("fp32", resolved("auto"))
    asked = options.rungs or [name for name, rung in RUNGS.items() if rung.precision in fast]
    settings = Settings(
        **common_settings(options),
        rungs=tuple(name for name in RUNGS if name in asked),
        steps=options.steps or (1 if options.quick else 2),
        warm_up=1,
        micro_rows=options.micro_rows,
        check_times=not options.quick,
        profile=options.profile,
    )
    return settings, options


def main(arguments: Sequence[str] | None = None) -> int:
    settings, options = parse(arguments)
    facts = measure.environment(settings.threads)
    found = run(settings, tell)
    if options.json:
        print(json.dumps(as_json(settings, facts, found), indent=2))
    else:
        show(settings, facts, found)
    return int(options.check and not kept(settings, found))


if __name__ == "__main__":
    sys.exit(main())
