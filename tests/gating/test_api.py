"""The public names: keywords and inputs agree, the reference too, and the design's example runs as written."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

import gatespace
from gatespace import gating
from gatespace.gating.loss import reference_gated_kl


def test_inputs_of_a_loss_are_keywords_of_gated_kl() -> None:
    with pytest.raises(TypeError, match="topk"):
        gating.gated_kl(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), gate=gating.Gate(), topk=2)


def test_the_form_with_keywords_is_the_one_with_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 20, generator=generator) for _ in range(2))
    options: dict[str, Any] = {
        "mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "weights": torch.tensor([[1.0, 2.0, 0.5], [3.0, 1.0, 1.0]]),
        "top_k": 4,
        "temperature": 2.0,
        "entropy": "bucket",
        "sampled": torch.tensor([[3, 1, 2], [0, 5, 6]]),
        "sampled_log_probs": torch.full((2, 3), -1.5),
        "segment_ids": torch.tensor([[0, 1, 1], [0, 0, 0]]),
        "u": torch.tensor([0.2, 0.7]),
        "total_tokens": 9.0,
        "vocab_size": 18,
        "lam_order": torch.tensor([4, 2, 0, 1, 3]),
        "from_teacher": torch.tensor([0, 1]),
        "noise": torch.full((2, 3), 0.5),
    }
    assert options.keys() == {one.name for one in dataclasses.fields(gating.LossInputs)}
    objective = gating.Gated(gating.Gate.named("H2"), "hybrid", 5)
    for other in ("weights", "lam_order"):  # which exclude each other
        given = {**options, other: None}
        wanted = gating.distillation_loss(student, teacher, objective=objective, inputs=gating.LossInputs(**given))
        found = gating.gated_kl(student, teacher, gate=gating.Gate.named("H2"), support="hybrid", support_k=5, **given)
        assert torch.equal(found.loss, wanted.loss)


def test_the_reference_has_the_loss_and_the_gradient() -> None:
    student, teacher = torch.randn(2, 3, 4, 20, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]])
    for name in ("G5", "H2", "static:0.3"):
        call: dict[str, Any] = {"gate": gating.Gate.parse(name), "mask": mask, "top_k": 5, "temperature": 1.5}
        z, again = (student.clone().requires_grad_() for _ in range(2))
        gating.gated_kl(z, teacher, **call).loss.backward()
        reference_gated_kl(again, teacher, **call).backward()
        torch.testing.assert_close(z.grad, again.grad)


def test_names_at_the_top_level() -> None:
    for name in ("Gate", "LossInputs", "gated_kl", "fused_gated_kl", "objectives", "signals"):
        assert name in dir(gatespace)
        assert getattr(gatespace, name) is getattr(gating, name)
    with pytest.raises(AttributeError):
        gatespace.no_such_name  # noqa: B018


def test_the_example_of_the_design() -> None:
    generator = torch.Generator().manual_seed(0)
    student_logits = torch.randn(2, 3, 20, generator=generator, requires_grad=True)
    teacher_logits = torch.randn(2, 3, 20, generator=generator)
    student_hidden, student_head = torch.randn(2, 3, 5, generator=generator), torch.randn(20, 5, generator=generator)
    teacher_hidden, teacher_head = torch.randn(2, 3, 7, generator=generator), torch.randn(20, 7, generator=generator)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    # --- as written
    from gatespace import Gate, fused_gated_kl, gated_kl, signals

    gate = Gate(a=4, b=0, c=-1, d=0)
    out = gated_kl(student_logits, teacher_logits, gate=gate, mask=mask, top_k=8, temperature=1.0, stop_gradient=False)
    out.loss  # noqa: B018
    out.lam, out.forward_kl, out.reverse_kl, out.h, out.u, out.gap  # noqa: B018
    fused = fused_gated_kl(student_hidden, student_head, teacher_hidden, teacher_head, gate=gate, mask=mask)
    # ---
    assert gate == Gate.named("G5") == Gate.parse("4,0,-1,0")
    assert Gate.static(0.388).lam() == pytest.approx(0.388)
    assert gate.entropy_only() == Gate(a=-4)
    assert "d = 0" in gate.gap_only().reason
    mixed = out.lam * out.reverse_kl + (1 - out.lam) * out.forward_kl
    assert float(out.loss.detach()) == pytest.approx(float((mixed * mask).sum() / mask.sum()), rel=1e-6)
    out.loss.backward()
    plain = gated_kl(student_hidden @ student_head.T, teacher_hidden @ teacher_head.T, gate=gate, mask=mask)
    assert float(fused.loss) == pytest.approx(float(plain.loss), rel=1e-5)
    assert "h" in signals.names()


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, gatespace; from gatespace import Gate; gatespace.__version__; dir(gatespace);"
        "assert 'torch' not in sys.modules;"
        "gatespace.gated_kl; assert 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
