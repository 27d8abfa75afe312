"""Memory and time of the gated loss, forward and backward: naive autograd, TRL, Liger and gatespace, in one run.

Every contender gets the same hidden states and head matrices and returns the gradients of the student's hidden states
and head. Each measurement is a fresh process, contenders take turns, and ratios are formed within one turn. Results are
compared with float64, so that nobody is fast by being wrong.

No peer can do the whole task, so each does the largest part it can: TRL takes a given λ per token, without gradient
through it; Liger supports only one constant λ. The rows gatespace-detached and gatespace-static do the same parts. See
benchmarks/README.md for the method.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import measure

WORKER = Path(__file__).with_name("loss_worker.py")
STATIC_LAM = 0.5
BUCKET_K = 64

TASKS = {
    "gated": "λ per token by the gate, gradient through the gate",
    "detached": "λ per token, given, without gradient",
    "static": f"one constant λ = {STATIC_LAM}",
    "bucket": f"gated, on the teacher's top-{BUCKET_K} and one tail bucket",
}


@dataclass(frozen=True)
class Contender:
    """One row. `function` is the function of loss_worker.py that computes its loss.

    `gradient_in_forward`: it may compute the gradients in its forward pass and only return them in backward.
    `whole_warm_up`: it recompiles for each shape, so a small warm-up is not enough.
    `dtypes`: those in which it differs from other rows.
    """

    task: str
    about: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    gradient_in_forward: bool = False
    whole_warm_up: bool = False
    dtypes: tuple[str, ...] = ("fp32", "bf16")


def _ours(task: str, about: str, **options: Any) -> Contender:
    return Contender(task, about, "gatespace", options, gradient_in_forward=True)


def _liger(about: str, function: str = "liger_two_calls", **options: Any) -> Contender:
    compiled = options.get("compiled", False)
    return Contender("static", about, function, options, gradient_in_forward=True, whole_warm_up=compiled)


CONTENDERS: dict[str, Contender] = {
    "naive": Contender("gated", "logits in full, autograd", "naive"),
    "naive-exact": Contender(
        "gated", "the same, multiplied in float32 to keep the logits exact", "naive", {"exact": True}, dtypes=("bf16",)
    ),
    "gatespace": _ours("gated", "fused_gated_kl as it comes"),
    "gatespace-once": _ours("gated", "recompute=False: gradient made with the value", recompute=False),
    "gatespace-again": _ours("gated", "recompute=True: logits made again in backward", recompute=True),
    "gatespace-bucket": _ours("bucket", f"support=bucket, support_k={BUCKET_K}", support="bucket", support_k=BUCKET_K),
    "trl": Contender("detached", "ChunkedDivergenceFunction twice, β=0 and β=1", "trl"),
    "gatespace-detached": _ours("detached", "stop_gradient=True", stop_gradient=True),
    "liger": _liger("JSD loss twice, chunk_size 1024 (default)", chunk_size=1024, compiled=False),
    "liger-compiled": _liger("the same under torch.compile (default)", chunk_size=1024, compiled=True),
    "liger-64": _liger("JSD loss twice, chunk_size 64", chunk_size=64, compiled=False),
    "liger-subclass": _liger("own float32 loss in its base class, once", "liger_subclass", chunk_size=64),
    "gatespace-static": _ours("static", "Gate.static", static=True),
}
PEERS = tuple(name for name in CONTENDERS if not name.startswith(("naive", "gatespace")))
QUICK_CONTENDERS = ("naive", "gatespace")

_RATIOS: tuple[tuple[str, str, str, str, float | None, bool], ...] = (
    # name, key, numerator, denominator, target (None: none), whether the target is a lower bound
    ("peak memory / naive", "peak_extra_mib", "gatespace", "naive", 0.05, False),
    ("wall time / naive", "wall", "gatespace", "naive", 1.0, False),
    ("CPU time / naive", "cpu", "gatespace", "naive", 1.0, False),
    ("TRL's wall time / ours", "wall", "trl", "gatespace", 1.8, True),
    ("TRL's CPU time / ours", "cpu", "trl", "gatespace", 1.8, True),
    ("wall time / naive-exact, which is as accurate", "wall", "gatespace", "naive-exact", None, False),
    ("CPU time / naive-exact", "cpu", "gatespace", "naive-exact", None, False),
)
TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 2e-2)}
"""Relative error of the loss and of the gradients above which a row is marked as less accurate."""
ERRORS = {"loss": "error: loss", "hidden": "∂hidden", "head": "∂head"}
BUSY = 0.1
"""Share of the machine taken by other processes above which the run counts as disturbed."""


@dataclass(frozen=True)
class Settings:
    """Settings of one benchmark run."""

    tokens: int
    vocab: int
    hidden: int
    teacher_hidden: int
    dtypes: tuple[str, ...]
    contenders: tuple[str, ...]
    repeats: int
    steps: int
    threads: int
    seed: int
    timeout: float
    patience: int
    quick: bool


@dataclass(frozen=True)
class Target:
    """A measured ratio and its target (None: no target)."""

    dtype: str
    name: str
    value: float
    limit: float | None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


Turns = dict[tuple[str, str], list[dict[str, Any]]]
"""(dtype, contender) → answers, one per repeat; an answer with the key "unavailable" has no numbers."""


def run(settings: Settings, report: Any = lambda line: None) -> Turns:
    """Run all measurements, one process at a time; contenders take turns, each repeat in a different order."""
    turns: Turns = {
        (dtype, name): []
        for dtype in settings.dtypes
        for name in settings.contenders
        if dtype in CONTENDERS[name].dtypes
    }
    tasks = sorted({CONTENDERS[name].task for name in settings.contenders})
    with tempfile.TemporaryDirectory(prefix="gatespace-bench-") as folder:

        def ask(dtype: str, contender: str | None) -> dict[str, Any]:
            sizes = {k: getattr(settings, k) for k in ("tokens", "vocab", "hidden", "teacher_hidden", "seed")}
            request = {
                "contender": contender,
                "tasks": tasks,
                "inputs": sizes | {"dtype": dtype},
                "steps": settings.steps,
                "threads": settings.threads,
                "reference": str(Path(folder, f"{dtype}.pt")),
            }
            return measure.in_fresh_process(WORKER, request, threads=settings.threads, timeout=settings.timeout)

        for dtype in settings.dtypes:
            report(f"{dtype}: float64 reference")
            made = ask(dtype, None)
            if "unavailable" in made:
                raise SystemExit(f"The float64 reference for {dtype} could not be made: {made['unavailable']}")
        for repeat in range(settings.repeats):
            for dtype in settings.dtypes:
                shift = repeat % len(settings.contenders)
                for name in settings.contenders[shift:] + settings.contenders[:shift]:
                    seen = turns.get((dtype, name))
                    if seen is None or any("unavailable" in answer for answer in seen):
                        continue
                    report(f"{dtype}: {name}, {repeat + 1} of {settings.repeats}")
                    tries = [ask(dtype, name)]
                    while disturbance(tries[-1:]) > BUSY and len(tries) <= settings.patience:
                        report(f"{dtype}: {name} again, others took {disturbance(tries[-1:]):.0%} of the machine")
                        tries.append(ask(dtype, name))
                    seen.append(min(tries, key=lambda answer: disturbance([answer])))
    return turns


def disturbance(answers: Sequence[dict[str, Any]]) -> float:
    """Share of the machine taken by other processes during these measurements."""
    steps = [step for answer in answers for step in answer.get("steps", ())]
    wall = sum(step["wall"] for step in steps)
    return sum(step["others"] for step in steps) / (wall * measure.usable_cores()) if wall else 0.0


def numbers(answers: Sequence[dict[str, Any]], key: str) -> list[float]:
    """One number per turn: the median over its steps, or the maximum for memory."""
    over_steps = max if key.startswith("peak") else median
    return [over_steps(step[key] for step in answer["steps"]) for answer in answers]


def summaries(settings: Settings, turns: Turns) -> list[dict[str, Any]]:
    """One flat record per dtype and contender: medians over the turns, and every turn's own number."""
    records = []
    for (dtype, name), answers in turns.items():
        contender = CONTENDERS[name]
        record: dict[str, Any] = {"dtype": dtype, "contender": name, "task": contender.task, "about": contender.about}
        bad = next((answer["unavailable"] for answer in answers if "unavailable" in answer), None)
        if bad is not None:
            records.append(record | {"unavailable": bad})
            continue
        for key in ("peak_extra_mib", "wall", "cpu", "wall_forward"):
            each = numbers(answers, key)
            record |= {key: median(each), f"{key}_all": each}
        record["others_share"] = disturbance(answers)
        for key in ("loss", "gradient_norm_hidden", "mean_lam", "error"):
            record[key] = answers[-1][key]
        loss_limit, gradient_limit = TOLERANCE[dtype]
        error = record["error"]
        record["accurate"] = error["loss"] <= loss_limit and max(error["hidden"], error["head"]) <= gradient_limit
        records.append(record)
    return records


def targets(settings: Settings, turns: Turns) -> list[Target]:
    """Ratios this run supports: medians over the turns of ratios within one turn. Quick runs: none."""
    if settings.quick:
        return []

    def ratio(dtype: str, key: str, above: str, below: str) -> float | None:
        pairs = [turns.get((dtype, name), []) for name in (above, below)]
        if not all(pairs) or any("unavailable" in answer for answers in pairs for answer in answers):
            return None
        return median(x / max(y, 1e-9) for x, y in zip(*(numbers(p, key) for p in pairs), strict=True))

    found = []
    for dtype in settings.dtypes:
        for name, key, above, below, limit, at_least in _RATIOS:
            value = ratio(dtype, key, above, below)
            if value is not None:
                found.append(Target(dtype, name, value, limit, at_least))
    return found


def kept(settings: Settings, turns: Turns) -> bool:
    """Whether every target was measured and met, and our own results are accurate. Quick runs check only accuracy."""
    promised = [target for target in targets(settings, turns) if target.limit is not None]
    ours = [r for r in summaries(settings, turns) if CONTENDERS[r["contender"]].function == "gatespace"]
    limits = sum(limit is not None for *_, limit, _ in _RATIOS)
    complete = settings.quick or len(promised) == limits * len(settings.dtypes)
    return complete and all(t.met for t in promised) and bool(ours) and all(r.get("accurate", False) for r in ours)


def as_json(settings: Settings, facts: dict[str, Any], turns: Turns) -> dict[str, Any]:
    return {
        "benchmark": "loss",
        "settings": asdict(settings),
        "environment": facts,
        "tasks": TASKS,
        "results": summaries(settings, turns),
        "targets": [asdict(target) | {"met": target.met} for target in targets(settings, turns)],
    }


def show(settings: Settings, facts: dict[str, Any], turns: Turns) -> None:
    """Print one table per dtype, then the targets one by one."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    records = summaries(settings, turns)
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    console.print(f"{facts['cpu']}, {facts['threads']} threads; python {facts['python']}, {packages}", highlight=False)
    for dtype in settings.dtypes:
        rows = [record for record in records if record["dtype"] == dtype]
        size = f"N={settings.tokens} V={settings.vocab} H={settings.hidden} H'={settings.teacher_hidden}"
        table = Table(title=f"{dtype}, forward + backward, {size}, median of {settings.repeats}")
        for heading in ("contender", "task"):
            table.add_column(heading)
        for heading in ("peak MiB", "of naive", "wall s", "CPU s", "loss", "‖∂hidden‖", *ERRORS.values()):
            table.add_column(heading, justify="right")
        naive = next((r.get("peak_extra_mib") for r in rows if r["contender"] == "naive"), None)
        for r in rows:
            if "unavailable" in r:
                table.add_row(r["contender"], r["task"], f"[dim]{escape(r['unavailable'])}[/dim]")
                continue
            share = f"{r['peak_extra_mib'] / naive:.1%}" if naive else ""
            found = [f"{r['error'][key]:.0e}" for key in ERRORS]
            table.add_row(
                r["contender"],
                r["task"],
                _with_range(r["peak_extra_mib_all"], digits=0),
                share,
                _with_range(r["wall_all"]),
                _with_range(r["cpu_all"]),
                f"{r['loss']:.5f}",
                f"{r['gradient_norm_hidden']:.5f}",
                *(found if r["accurate"] else [f"[red]{e}[/red]" for e in found]),
            )
        console.print(table)
    for name in settings.contenders:
        contender = CONTENDERS[name]
        console.print(f"  {name}: {contender.about}. Task: {TASKS[contender.task]}.", highlight=False, soft_wrap=True)
    lam = next((r["mean_lam"] for r in records if "mean_lam" in r), None)
    if lam is not None:
        console.print(f"  Mean λ of the gate: {lam:.3f}. Errors are relative, against float64 on the same inputs.")
    console.print()
    for line in target_lines(settings, records, targets(settings, turns)):
        console.print(line, highlight=False, soft_wrap=True)


def target_lines(settings: Settings, records: Iterable[dict[str, Any]], found: Iterable[Target]) -> list[str]:
    """One line per target, and a warning if other processes disturbed the run."""
    lines = ["A quick run has no targets: it is too small to say anything of memory or time."] if settings.quick else []
    for target in found:
        as_text = "{:.1%}" if "memory" in target.name else "{:.2f}×"
        line = f"{target.dtype}  {target.name}: {as_text.format(target.value)}"
        if target.limit is None:
            lines.append(f"      {line} (no target)")
        else:
            sign, verdict = "≥" if target.at_least else "≤", "PASS" if target.met else "FAIL"
            lines.append(f"{verdict}  {line} (target {sign} {as_text.format(target.limit)})")
    disturbed = [r for r in records if r.get("others_share", 0) > BUSY]
    if disturbed:
        worst = max(disturbed, key=lambda r: r["others_share"])
        lines.append(
            f"Disturbed: other processes took {worst['others_share']:.0%} of the machine during {worst['dtype']} "
            f"{worst['contender']} (rows above {BUSY:.0%}: {len(disturbed)}); do not quote these times."
        )
    return lines


def _with_range(values: Sequence[float], digits: int = 2) -> str:
    text = f"{median(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    rows = "\n".join(f"  {name:<19}{c.task:<10}{c.about}" for name, c in CONTENDERS.items())
    tasks = "\n".join(f"  {name:<10}{text}" for name, text in TASKS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"contenders (name, task, what it is):\n{rows}\n\ntasks:\n{tasks}\n\n"
        "examples:\n"
        "  python benchmarks/loss.py                            everything, about 20 minutes on two idle cores\n"
        "  python benchmarks/loss.py --quick                    does it run? seconds; its numbers mean nothing\n"
        "  python benchmarks/loss.py --contenders naive,gatespace --dtypes bf16 --repeats 5\n"
        "  python benchmarks/loss.py --json > loss.json         for programs\n\n"
        "The peers need: pip install '.[bench]'. What is not installed is reported, and the rest runs.",
    )
    size = parser.add_argument_group("size")
    size.add_argument("--tokens", type=_positive, metavar="N", help="tokens in the loss (512; quick: 128)")
    size.add_argument("--vocab", type=_positive, metavar="V", help="vocabulary (151936; quick: 4096)")
    size.add_argument("--hidden", type=_positive, metavar="H", help="hidden size of the student (1024; quick: 64)")
    size.add_argument("--teacher-hidden", type=_positive, metavar="H'", help="hidden size of the teacher (as --hidden)")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--dtypes", type=_names(TOLERANCE), default=tuple(TOLERANCE), metavar="A,B", help="fp32,bf16")
    what.add_argument(
        "--contenders", type=_names(CONTENDERS), metavar="A,B", help="rows to run (all; quick: naive,gatespace)"
    )
    what.add_argument("--repeats", type=_positive, help="fresh processes per row (3; quick: 1)")
    what.add_argument("--steps", type=_positive, default=1, help="measured steps in each process (%(default)s)")
    cores = measure.usable_cores()
    what.add_argument(
        "--threads", type=_positive, default=cores, help="threads of each process (all cores: %(default)s)"
    )
    what.add_argument("--seed", type=int, default=0, help="seed of the inputs (%(default)s)")
    what.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="seconds until a process is given up (%(default).0f)"
    )
    what.add_argument(
        "--patience", type=int, default=3, metavar="N", help="repeat what other processes disturbed, up to N times (3)"
    )
    what.add_argument("--quick", action="store_true", help="small sizes, one repeat, no peers, no targets")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    output.add_argument("--check", action="store_true", help="exit with 1 if a target is missed or an error large")
    options = parser.parse_args(arguments)
    defaults = (128, 4096, 64, QUICK_CONTENDERS, 1) if options.quick else (512, 151936, 1024, tuple(CONTENDERS), 3)
    tokens, vocab, hidden, contenders, repeats = defaults
    hidden = options.hidden or hidden
    settings = Settings(
        tokens=options.tokens or tokens,
        vocab=options.vocab or vocab,
        hidden=hidden,
        teacher_hidden=options.teacher_hidden or hidden,
        dtypes=options.dtypes,
        contenders=options.contenders or contenders,
        repeats=options.repeats or repeats,
        steps=options.steps,
        threads=options.threads,
        seed=options.seed,
        timeout=options.timeout,
        patience=0 if options.quick else options.patience,
        quick=options.quick,
    )
    if settings.vocab <= BUCKET_K:
        parser.error(f"--vocab must be above {BUCKET_K}, the top-K of the bucket support; got {settings.vocab}")
    return settings, options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is needed, got {text!r}")
    return int(text)


def _names(known: Iterable[str]) -> Any:
    def parse_names(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown) or 'nothing'}; known: {', '.join(known)}")
        return names

    return parse_names


def main(arguments: Sequence[str] | None = None) -> int:
    settings, options = parse(arguments)
    facts = measure.environment(settings.threads)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    turns = run(settings, report)
    if options.json:
        print(json.dumps(as_json(settings, facts, turns), indent=2))
    else:
        show(settings, facts, turns)
    return int(options.check and not kept(settings, turns))


if __name__ == "__main__":
    sys.exit(main())
