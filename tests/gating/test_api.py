"""The public names: their signatures are pinned, and the design's example runs as written."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

import gatespace
from gatespace import gating

REQUIRED = inspect.Parameter.empty
ANY = object()  # a default that may change without breaking a caller

GATED_OPTIONS: dict[str, Any] = {
    "gate": REQUIRED,
    "mask": None,
    "top_k": 8,
    "temperature": 1.0,
    "stop_gradient": False,
    "support": "full",
    "support_k": None,
    "entropy": "top_k",
    "sampled": None,
    "sampled_log_probs": None,
    "segment_ids": None,
    "u": None,
    "coefficients": None,
    "total_tokens": None,
    "vocab_size": None,
}
OBJECTIVE_OPTIONS: dict[str, Any] = {
    "objective": REQUIRED,
    "mask": None,
    "top_k": 8,
    "temperature": 1.0,
    "entropy": "top_k",
    "sampled": None,
    "sampled_log_probs": None,
    "segment_ids": None,
    "u": None,
    "total_tokens": None,
    "vocab_size": None,
    "lam_order": None,
}
KL_OPTIONS: dict[str, Any] = {
    "support": "full",
    "support_k": 8,
    "temperature": 1.0,
    "sampled": None,
    "sampled_log_probs": None,
    "vocab_size": None,
}
LOGITS = ("student_logits", "teacher_logits")
HIDDEN = ("student_hidden", "student_head", "teacher_hidden", "teacher_head")
FUSED = {"recompute": None, "chunk_mb": ANY}

SIGNATURES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gated_kl": (LOGITS, GATED_OPTIONS),
    "fused_gated_kl": (HIDDEN, GATED_OPTIONS | FUSED),
    "distillation_loss": (LOGITS, OBJECTIVE_OPTIONS),
    "fused_distillation_loss": (HIDDEN, OBJECTIVE_OPTIONS | FUSED),
    "forward_kl": (LOGITS, KL_OPTIONS),
    "reverse_kl": (LOGITS, KL_OPTIONS),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    positional, options = SIGNATURES[name]
    found = inspect.signature(getattr(gating, name)).parameters
    kinds = {p.name: p.kind for p in found.values()}
    assert tuple(n for n, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY) == positional
    for n in positional:
        assert kinds[n] is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert found[n].default is REQUIRED
    keyword_only = [n for n, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    assert keyword_only == list(options)
    for n, default in options.items():
        if default is not ANY:
            assert found[n].default == default, n
        else:
            assert found[n].default is not REQUIRED


@pytest.mark.parametrize(
    ("name", "positional", "options"),
    [
        ("teacher_entropy", ("teacher_logits",), {"top_k": 8, "entropy": "top_k"}),
        ("gap", LOGITS, {}),
        ("prompt_entropy", ("teacher_logits",), {"mask": None, "top_k": 8, "entropy": "top_k", "segment_ids": None}),
    ],
)
def test_signatures_of_signals(name: str, positional: tuple[str, ...], options: dict[str, Any]) -> None:
    found = inspect.signature(getattr(gatespace.signals, name)).parameters
    assert [p.name for p in found.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == list(positional)
    assert {p.name: p.default for p in found.values() if p.kind is inspect.Parameter.KEYWORD_ONLY} == options


def test_signatures_of_gate() -> None:
    parameters = inspect.signature(gatespace.Gate).parameters
    assert list(parameters) == ["a", "b", "c", "d", "extra"]
    assert [parameters[n].default for n in "abcd"] == [0.0] * 4
    for method, arguments in {
        "named": ["name"],
        "static": ["lam"],
        "parse": ["text"],
        "entropy_only": ["self"],
        "gap_only": ["self"],
    }.items():
        assert list(inspect.signature(getattr(gatespace.Gate, method)).parameters) == arguments


def test_fields_of_the_outcome() -> None:
    telemetry = {"per_token", "lam", "forward_kl", "reverse_kl", "h", "u", "gap", "weight", "tail_mass", "signals"}
    assert {"loss", "tokens"} | telemetry <= set(gating.LossOutput.__dataclass_fields__)


def test_heads_and_teachers_by_top_k() -> None:
    head = gating.Head(torch.zeros(3, 2))
    assert (head.bias, head.scale, head.softcap) == (None, 1.0, None)
    assert list(inspect.signature(gating.Head).parameters) == ["weight", "bias", "scale", "softcap"]
    assert list(inspect.signature(gating.TeacherTopK).parameters)[:3] == ["ids", "log_probs", "sampled_log_probs"]


def test_names_at_the_top_level() -> None:
    for name in ("Gate", "gated_kl", "fused_gated_kl", "signals"):
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
