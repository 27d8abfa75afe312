"""The gated loss on a small random pair: one row per gate, from full logits and from hidden states.

Run it with `python examples/first_loss.py`.
"""

from __future__ import annotations

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from gatespace import Gate, fused_gated_kl, gated_kl

GATES = ("static:0", "static:0.388", "static:1", "G4", "G5", "H2", "gap-only(-4)")
B, T, V, H_STUDENT, H_TEACHER = 4, 6, 1000, 44, 48  # samples, response positions, vocabulary, hidden sizes
TOLERANCE = 1e-4  # float32 sums in a different order


def main() -> None:
    torch.manual_seed(0)
    # A teacher with high entropy at the first positions and low at the last, and a student that mostly agrees with it.
    teacher_hidden = torch.randn(B, T, H_TEACHER) * torch.linspace(2.0, 8.0, T)[:, None]
    teacher_head = torch.randn(V, H_TEACHER) / H_TEACHER**0.5
    student_hidden = (teacher_hidden[..., :H_STUDENT] + torch.randn(B, T, H_STUDENT)).requires_grad_()
    student_head = teacher_head[:, :H_STUDENT].clone().requires_grad_()
    mask = torch.ones(B, T)
    mask[0, 4:] = 0  # the first response is shorter

    table = Table("gate", "loss", "E[λ]", "FKL", "RKL", "fused − plain", "in gradient", box=box.SIMPLE)
    for name in GATES:
        gate = Gate.parse(name)
        plain = gated_kl(student_hidden @ student_head.T, teacher_hidden @ teacher_head.T, gate=gate, mask=mask)
        fused = fused_gated_kl(student_hidden, student_head, teacher_hidden, teacher_head, gate=gate, mask=mask)

        leaves = (student_hidden, student_head)
        gradients = zip(torch.autograd.grad(plain.loss, leaves), torch.autograd.grad(fused.loss, leaves), strict=True)
        off = (fused.loss - plain.loss).item()
        gradient_off = max((one - two).abs().max().item() for one, two in gradients)
        if not (abs(off) < TOLERANCE and gradient_off < TOLERANCE):
            raise SystemExit(f"{name}: fused and plain differ by {off:.2g}, in a gradient by {gradient_off:.2g}")

        means = [(values.sum() / plain.tokens).item() for values in (plain.lam, plain.forward_kl, plain.reverse_kl)]
        numbers = [f"{number:.4f}" for number in (plain.loss.item(), *means)]
        table.add_row(gate.label, *numbers, f"{off:+.1e}", f"{gradient_off:.1e}")

    Console().print(table)
    print(f"Means over {plain.tokens} tokens of {V} ids, in nats; λ multiplies RKL, the reverse KL.")
    print("Last two columns: how far the fused loss is from the plain one, in value and in")
    print("the largest entry of a gradient. Fused and plain agree at every gate.")


if __name__ == "__main__":
    main()
