"""Time and memory of a step as prompts grow: ours and a plain transformers loop with SDPA attention, in one run.

    python benchmarks/length.py [--model smollm2|FOLDER] [--lengths 250,500,1000,2000] [--json FILE]

A step samples a few tokens after each prompt, scores them with a teacher of the same size, and backpropagates a KL
mixture; AdamW is omitted, as it is the same for both. Each contender and length has a fresh process. Memory is the
peak above what the process held before the step. The exponent is the slope of log memory over log length.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

CONTENDERS = ("plain", "gatespace", "gatespace-checkpointing")


def work(request: dict[str, Any]) -> dict[str, Any]:
    """In the fresh process: run two steps and measure the second."""
    import torch

    from gatespace.models import load_model

    torch.manual_seed(0)
    dtype = torch.bfloat16 if request["precision"] == "bf16" else torch.float32
    student, teacher = (load_model(request["model"], dtype=dtype) for _ in range(2))
    prompts = torch.randint(100, student.vocab_size, (request["rows"], request["length"])).tolist()
    step = (
        plain(student, teacher, request["new"]) if request["contender"] == "plain" else ours(student, teacher, request)
    )
    step([prompt[:64] for prompt in prompts])
    measure.give_back_free_memory()
    before = measure.rss()
    student.network.zero_grad()
    _, cost = measure.measured(lambda: step(prompts))
    return {"wall": cost.wall, "cpu": cost.cpu, "others": cost.others, "mib": (cost.peak_rss - before) / measure.MIB}


def plain(student: Any, teacher: Any, new: int) -> Any:
    """Generate, two forward passes with response-only logits, autograd."""
    import torch
    from torch.nn.functional import kl_div
    from transformers import GenerationConfig

    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)

    def step(prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        with torch.no_grad():
            written = student.network.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
            keep = {"input_ids": written, "use_cache": False, "logits_to_keep": new + 1}
            said = torch.log_softmax(teacher.network(**keep).logits[:, :-1].float(), -1)
        own = torch.log_softmax(student.network(**keep).logits[:, :-1].float(), -1)
        forward = kl_div(own, said, log_target=True, reduction="sum")
        (forward + kl_div(said, own, log_target=True, reduction="sum")).backward()

    return step


def ours(student: Any, teacher: Any, request: dict[str, Any]) -> Any:
    """Passes of our loop: one over the prompts for rollout and update, canonical scores, the fused loss."""
    import torch

    from gatespace.gating import Gate, LossInputs
    from gatespace.gating.fused import fused_distillation_loss
    from gatespace.gating.objectives import Gated
    from gatespace.models.body import body_of
    from gatespace.rollout import Sampling, sample
    from gatespace.seeding import generator
    from gatespace.teacher.local import LocalTeacher
    from gatespace.teacher.scores import ScoreSpec

    new = request["new"]
    body = body_of(student, packed=True, checkpointing=request["contender"].endswith("checkpointing") or None)
    scorer = LocalTeacher(teacher, ScoreSpec((), new, student.vocab_size), packed=True)

    def step(prompts: list[list[int]]) -> None:
        forward = body.forward(prompts)
        draws = [generator(1, "rollout", i).random for i in range(len(prompts))]
        responses = sample(
            body,
            forward,
            vocab_size=student.vocab_size,
            sampling=Sampling(1.0, 1.0, new),
            stop=lambda ids: False,
            draws=draws,
        ).responses
        scores = scorer.score(prompts, responses)
        after = body.forward([ids[:-1] for ids in responses], prefix=forward.prefix, past=forward.cache).hidden
        rest = after.split([new - 1] * len(prompts))
        hidden = torch.cat([part for pair in zip(forward.last().split(1), rest, strict=True) for part in pair])
        rows = torch.arange(len(prompts)).repeat_interleave(new)
        inputs = LossInputs(segment_ids=rows[None], vocab_size=student.vocab_size)
        fused_distillation_loss(
            hidden[None], student.head, scores.payload, scores.head, objective=Gated(Gate.parse("G5")), inputs=inputs
        ).loss.backward()

    return step


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Slope of log value over log length, from the first to the last."""
    return math.log(values[-1] / values[0]) / math.log(lengths[-1] / lengths[0])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="student and teacher")
    parser.add_argument("--lengths", default="250,500,1000,2000", help="tokens of a prompt")
    parser.add_argument("--rows", type=int, default=1, help="prompts of a step")
    parser.add_argument("--new", type=int, default=8, help="response tokens")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=measure.usable_cores())
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    lengths = [int(part) for part in given.lengths.split(",")]
    facts = measure.environment(given.threads)
    print(
        f"{facts['cpu']}, {given.threads} threads, {given.precision}, {given.model}: {given.rows} rows, {given.new} new"
    )
    print(f"{'tokens':>7} {'contender':<24} {'wall s':>7} {'CPU s':>7} {'MiB':>8}   CPU and memory beside plain")
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in CONTENDERS}
    for length in lengths:
        for name in CONTENDERS:
            asked = {**vars(given), "json": None, "contender": name, "length": length}
            got = measure.in_fresh_process(Path(__file__), asked, threads=given.threads, timeout=given.timeout)
            if "unavailable" in got:
                sys.exit(f"{name} at {length}: {got['unavailable']}")
            found[name][length] = got
            beside = found["plain"][length]
            print(
                f"{length:>7} {name:<24} {got['wall']:>7.2f} {got['cpu']:>7.2f} {got['mib']:>8.0f}   "
                f"{got['cpu'] / beside['cpu']:.2f} {got['mib'] / beside['mib']:.2f}",
                flush=True,
            )
    for name, figures in found.items():
        slope = exponent(lengths, [figures[length]["mib"] for length in lengths])
        print(f"memory of {name} grows with length to the power of {slope:.2f}")
    if given.json:
        given.json.write_text(json.dumps({"environment": facts, "figures": found}, indent=2))


if __name__ == "__main__":
    if sys.stdin.isatty() or len(sys.argv) > 1:
        main()
    else:
        text = sys.stdin.read()
        measure.answer(work(json.loads(text))) if text else main()
