"""Cost of a teacher's scores: one response per prompt or several, with an empty cache or 90 % hits.

    python benchmarks/score.py [--root tweeteval] [--per-prompt 1,4,8] [--hits 0,0.9] [--quick] [--check] [--json]

`gatespace` is `LocalTeacher`: each prompt once, in canonical shapes, so that scores are batch-invariant. `whole` is the
same network over the same rows, each prompt with each of its responses as one packed row, in passes of up to 512 tokens
without padding: the cost of scoring if only the prefix is shared and bits may depend on the batch. Both take turns in
one process. See benchmarks/README.md for the method.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import measure
import step

WASTE, COLD = 1.5, 1.1
"""Targets: tokens in passes / tokens needed at 90 % hits; CPU time / that of whole rows, one response, none cached."""
Rows = tuple[list[list[int]], list[list[int]]]
"""Prompts after the shared prefix, and responses."""


@dataclass(frozen=True)
class Settings:
    """Settings of one benchmark run."""

    model: str
    task: str
    root: str | None
    batch: int
    batches: int
    repeats: int
    per_prompt: tuple[int, ...]
    hits: tuple[float, ...]
    max_new_tokens: int
    precision: str
    threads: int
    seed: int
    check: bool
    """Whether the targets apply to these sizes."""


def run(settings: Settings) -> list[dict[str, Any]]:
    """Return a record per number of responses and share of hits."""
    import torch
    from step_worker import Work

    from gatespace.models import load_model
    from gatespace.models.body import body_of

    torch.set_num_threads(settings.threads)
    names = {"teacher": None, "steps": settings.batches, "warm_up": 0, "lr": 0.0}
    work = Work(**step.work_of(argparse.Namespace(**asdict(settings) | names), step.tell))
    model = load_model(work.student, dtype=work.dtype)
    encoder = work.encoder(model.tokenizer)
    body, prompts = body_of(model, packed=True), [[row.prompt for row in rows] for rows in work.rows(encoder)]
    found = []
    for each in settings.per_prompt:
        step.tell(f"{each} per prompt: the model writes")
        batches = [written(settings, number, body, encoder.prefix, some, each) for number, some in enumerate(prompts)]
        found += [measured(settings, model, body, encoder.prefix, batches, each, hits) for hits in settings.hits]
    return found


def written(settings: Settings, number: int, body: Any, prefix: list[int], prompts: list[list[int]], each: int) -> Rows:
    """Sample the model's own responses, like a student; duplicates of a prompt are scored once, as in training."""
    import torch

    from gatespace.rollout import Sampling, sample
    from gatespace.seeding import generator

    asked: dict[tuple[int, tuple[int, ...]], None] = {}
    for turn in range(each):
        with torch.no_grad():
            rollout = sample(
                body,
                body.forward(prompts, prefix=prefix),
                vocab_size=body.model.vocab_size,
                sampling=Sampling(max_new_tokens=settings.max_new_tokens),
                stop=lambda ids: ids[-1] in body.model.end_ids,
                draws=[generator(settings.seed, "rollout", number, row, turn).random for row in range(len(prompts))],
            )
        asked |= {(row, tuple(ids)): None for row, ids in enumerate(rollout.responses)}
    ordered = sorted(asked)
    return [prompts[row] for row, _ in ordered], [list(ids) for _, ids in ordered]


def measured(
    settings: Settings, model: Any, body: Any, prefix: list[int], batches: list[Rows], each: int, hits: float
) -> dict[str, Any]:
    """Measure both contenders on the rows that are not cached."""
    from gatespace.seeding import generator
    from gatespace.teacher.cache import ScoreCache
    from gatespace.teacher.local import LocalTeacher
    from gatespace.teacher.scores import ScoreSpec

    spec = ScoreSpec(tuple(prefix), settings.max_new_tokens, model.vocab_size)
    root = body.prefix_cache(prefix)
    draw = generator(settings.seed, "benchmarks", "score", each, round(1000 * hits))
    cached = [[draw.random() < hits for _ in responses] for _, responses in batches]
    missing = [
        [(p, r) for p, r, there in zip(*rows, known, strict=True) if not there]
        for rows, known in zip(batches, cached, strict=True)
    ]
    costs: dict[str, list[tuple[float, float, float]]] = {"gatespace": [], "whole": []}
    passed: list[int] = []
    hook = model.body.register_forward_pre_hook(
        lambda module, args, kwargs: passed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    step.tell(f"{each} per prompt, {hits:.0%} cached: {sum(map(len, missing))} rows of {len(batches)} batches missing")
    for _ in range(settings.repeats):
        with tempfile.TemporaryDirectory() as folder, ScoreCache(Path(folder)) as cache:
            teacher = LocalTeacher(model, spec, cache=cache)
            for (prompts, responses), known in zip(batches, cached, strict=True):
                if any(known):
                    chosen = [row for row, there in enumerate(known) if there]
                    teacher.score([prompts[row] for row in chosen], [responses[row] for row in chosen])
            tokens = teacher.stats.computed_tokens
            passed.clear()
            costs["gatespace"].append(cost(lambda score=teacher.score: [score(*rows) for rows in batches]))  # type: ignore[misc]
            needed, ours = teacher.stats.computed_tokens - tokens, sum(passed)
        costs["whole"].append(cost(lambda: [whole(body, root, rows) for rows in missing]))
    hook.remove()
    record: dict[str, Any] = {"per_prompt": each, "hits": hits, "rows": sum(map(len, missing))}
    record |= {"needed_tokens": needed, "pass_tokens": ours, "tokens_ratio": ours / max(needed, 1)}
    record["whole_tokens"] = sum(len(prompt) + len(response) - 1 for rows in missing for prompt, response in rows)
    for name, all_costs in costs.items():
        walls, cpus, others = zip(*all_costs, strict=True)
        record |= {f"{name}_wall": median(walls), f"{name}_cpu": median(cpus), f"{name}_others": max(others)}
    pairs = zip(costs["gatespace"], costs["whole"], strict=True)
    record["cpu_ratio"] = median(own[1] / max(other[1], 1e-9) for own, other in pairs)
    return record


def whole(body: Any, prefix: Any, rows: Sequence[tuple[list[int], list[int]]]) -> None:
    """Compute hidden states of whole rows, as many per pass as fit."""
    import torch

    from gatespace.teacher.local import PASS

    some: list[list[int]] = []
    with torch.no_grad():
        for row in [[*prompt, *response[:-1]] for prompt, response in rows]:
            if some and sum(map(len, some)) + len(row) > PASS:
                body.forward(some, prefix=prefix)
                some = []
            some.append(row)
        if some:
            body.forward(some, prefix=prefix)


def cost(act: Callable[[], Any]) -> tuple[float, float, float]:
    """Wall and CPU seconds, and the share of the machine taken by other processes."""
    _, found = measure.measured(act)
    return found.wall, found.cpu, found.others / (found.wall * measure.usable_cores())


def verdicts(settings: Settings, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets that apply to this run."""
    found = []
    for r in records:
        if r["hits"] >= 0.9:
            about = f"tokens in passes / needed, {r['per_prompt']} per prompt, {r['hits']:.0%} cached"
            found.append({"about": about, "value": r["tokens_ratio"], "limit": WASTE})
        if r["hits"] == 0 and r["per_prompt"] == 1:
            about = "CPU time / that of whole rows, 1 per prompt, nothing cached"
            found.append({"about": about, "value": r["cpu_ratio"], "limit": COLD})
    return [target | {"met": target["value"] <= target["limit"] if settings.check else None} for target in found]


def show(settings: Settings, facts: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    print(f"{facts['cpu']}, {settings.threads} threads; {settings.model}, {settings.precision}, {settings.task}")
    print(f"{settings.batches} batches of {settings.batch} prompts, {settings.repeats} repeats in turns\n")
    print(
        f"{'per prompt':>10}{'cached':>8}{'rows':>6}{'needed':>8}{'passes':>8}{'ratio':>7}{'whole rows':>11}"
        f"{'CPU s':>8}{'whole':>8}{'ratio':>7}{'others':>8}"
    )
    for r in records:
        print(
            f"{r['per_prompt']:>10}{r['hits']:>8.0%}{r['rows']:>6}{r['needed_tokens']:>8}{r['pass_tokens']:>8}"
            f"{r['tokens_ratio']:>7.2f}{r['whole_tokens']:>11}{r['gatespace_cpu']:>8.2f}{r['whole_cpu']:>8.2f}"
            f"{r['cpu_ratio']:>7.2f}{max(r['gatespace_others'], r['whole_others']):>8.0%}"
        )
    print("\nneeded: distinct prompts and response tokens of missing rows. passes: those and their padding.")
    for target in verdicts(settings, records):
        verdict = {None: "     ", True: "PASS ", False: "FAIL "}[target["met"]]
        print(f"{verdict} {target['about']}: {target['value']:.2f} (target ≤ {target['limit']})")
    if max(r["gatespace_others"] for r in records) > step.BUSY:
        print("other processes took more than a tenth of the machine: do not quote the times")


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the teacher: smollm2, tiny or a folder (smollm2; quick: tiny)")
    parser.add_argument("--root", type=Path, help="a TweetEval folder ($GATESPACE_TWEETEVAL)")
    parser.add_argument(
        "--per-prompt", type=step.counts, metavar="N,M", help="responses per prompt (1,4,8; quick: 1,3)"
    )
    parser.add_argument(
        "--hits", type=_shares, default=(0.0, 0.9), metavar="A,B", help="shares that are cached (0,0.9)"
    )
    parser.add_argument("--batch", type=step.positive, help="prompts of a batch (24; quick: 4)")
    parser.add_argument("--batches", type=step.positive, help="batches (6; quick: 2)")
    parser.add_argument("--repeats", type=step.positive, help="turns of each contender (3; quick: 1)")
    parser.add_argument("--max-new-tokens", type=step.positive, default=8, metavar="N", help="longest response (8)")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="of the teacher (auto)")
    parser.add_argument("--seed", type=int, default=0, help="of rows and samples (%(default)s)")
    cores = measure.usable_cores()
    parser.add_argument("--threads", type=step.positive, default=cores, help="all cores: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a tiny model and generated texts: does it run?")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args(arguments)
    quick = options.quick
    task, root = ("synthetic", None) if quick else step.task_of(options.root, step.tell)
    settings = Settings(
        model=options.model or ("tiny" if quick else "smollm2"),
        task=task,
        root=root,
        batch=options.batch or (4 if quick else 24),
        batches=options.batches or (2 if quick else 6),
        repeats=options.repeats or (1 if quick else 3),
        per_prompt=options.per_prompt or ((1, 3) if quick else (1, 4, 8)),
        hits=options.hits,
        max_new_tokens=options.max_new_tokens,
        precision=step.resolved(options.precision),
        threads=options.threads,
        seed=options.seed,
        check=not quick,
    )
    return settings, options


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(float(part) for part in text.split(","))
    if not all(0 <= share < 1 for share in shares):
        raise argparse.ArgumentTypeError(f"shares from 0 to below 1 are needed, got {text!r}")
    return shares


def main(arguments: Sequence[str] | None = None) -> int:
    settings, options = parse(arguments)
    facts = measure.environment(settings.threads)
    records = run(settings)
    judged = verdicts(settings, records)
    if options.json:
        found = {"benchmark": "score", "settings": asdict(settings), "environment": facts}
        print(json.dumps(found | {"results": records, "targets": judged}, indent=2))
    else:
        show(settings, facts, records)
    return int(options.check and any(target["met"] is False for target in judged))


if __name__ == "__main__":
    sys.exit(main())
