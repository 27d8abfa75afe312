"""A custom signal in a gate: in the loss, plain and fused, and in a training run.

Run it with `python examples/own_signal.py`. The training run builds a tiny pair and takes seconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from gatespace import Gate, fused_gated_kl, gated_kl, signals
from gatespace.config import TeachConfig, TrainConfig, parse_config
from gatespace.training.train import teach, train

TASK = {"name": "synthetic", "brief": True}


@signals.register("margin", range=(0.0, 1.0))
def margin(tokens):
    """The teacher's lead: its first probability minus its second, (N,)."""
    first, second = tokens.teacher_top(2).log_probs.exp().unbind(-1)
    return first - second


@signals.register("lag", range=(0.0, 1.0))
def lag(tokens):
    """How far the student is below the teacher at the teacher's second choice, (N,); it carries gradient."""
    top = tokens.teacher_top(2)
    return (top.log_probs.exp() - tokens.student_at(top.ids).exp())[:, 1].clamp(min=0.0)


GATE = Gate(a=4, c=-1, extra={"margin": -2, "lag": 3})  # in a file: gate: {a: 4, c: -1, margin: -2, lag: 3}


def in_the_loss() -> None:
    torch.manual_seed(0)
    student, head = torch.randn(2, 5, 16, requires_grad=True), torch.randn(50, 16)
    teacher = 2 * torch.randn(2, 5, 16)
    plain = gated_kl(student @ head.T, teacher @ head.T, gate=GATE)
    fused = fused_gated_kl(student, head, teacher, head, gate=GATE)
    gradients = [torch.autograd.grad(out.loss, student)[0] for out in (plain, fused)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    print(f"gate    {GATE}")
    print(f"margin  {plain.signals['margin'][0].numpy().round(2)}")
    print(f"λ       {plain.lam[0].numpy().round(2)}")
    print(f"loss    {plain.loss:.6f} plain, {fused.loss:.6f} fused, and the same gradient")


def in_a_training(folder: Path) -> None:
    own = {"a": GATE.a, "c": GATE.c, **GATE.extra}
    made = {"task": TASK, "model": "tiny", "steps": 60, "optimizer": {"lr": 3e-3}}
    teach(
        parse_config(TeachConfig, made | {"evaluation": {"every": 0, "final": []}, "output": str(folder / "teacher")})
    )
    settings = {
        "task": TASK,
        "pair": {"student": "tiny", "teacher": str(folder / "teacher" / "model")},
        "objective": {"gate": own},
        "steps": 30,
        "batch_size": 24,
        "optimizer": {"lr": 2e-3},
        "rollout": {"max_new_tokens": 8},
        "evaluation": {"final": ["val"], "limit": 100, "max_new_tokens": 8},
        "output": str(folder / "student"),
    }
    summary = train(parse_config(TrainConfig, settings))
    for line in (folder / "student" / "metrics.jsonl").read_text().splitlines()[::10]:
        record = json.loads(line)
        names = ("loss", "lam_mean", "h", "margin", "lag")
        print(f"step {record['step']:2}  " + "  ".join(f"{name} {record[name]:.3f}" for name in names))
    print(f"E[λ] {summary['run']['lam_mean']:.3f} over {summary['run']['tokens']} tokens")


if __name__ == "__main__":
    in_the_loss()
    in_a_training(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own-signal"))
