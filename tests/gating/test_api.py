"""The public names: their signatures are pinned, and the design's example runs as written."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import typing
from typing import Any

import pytest
import torch

import gatespace
from gatespace import gating
from gatespace.gating.inputs import LossOptions, TokenOptions
from gatespace.gating.loss import DEFAULTS

REQUIRED = inspect.Parameter.empty

INPUTS: dict[str, Any] = {
    "mask": None,
    "weights": None,
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
    "from_teacher": None,
    "noise": None,
}
GATED = {"gate": REQUIRED, "stop_gradient": False, "support": "full", "support_k": None, "coefficients": None}
FUSED = {"recompute": None, "chunk_mb": 60}

SIGNATURES: dict[str, tuple[tuple[str, ...], dict[str, Any], type | None]] = {
    # name: positional, keyword-only with defaults, further fields of LossInputs as keywords
    "gated_kl": (("student_logits", "teacher_logits"), GATED, LossOptions),
    "fused_gated_kl": (
        ("student_hidden", "student_head", "teacher_hidden", "teacher_head"),
        GATED | FUSED,
        LossOptions,
    ),
    "distillation_loss": (("student_logits", "teacher"), {"objective": REQUIRED, "inputs": DEFAULTS}, None),
    "fused_distillation_loss": (
        ("student_hidden", "student_head", "teacher_payload", "teacher_head"),
        {"objective": REQUIRED, "inputs": DEFAULTS, **FUSED},
        None,
    ),
    "forward_kl": (("student_logits", "teacher_logits"), {"support": "full", "support_k": 8}, TokenOptions),
    "reverse_kl": (("student_logits", "teacher_logits"), {"support": "full", "support_k": 8}, TokenOptions),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    positional, options, further = SIGNATURES[name]
    function = getattr(gating, name)
    found = inspect.signature(function).parameters.values()
    assert tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD) == positional
    assert all(p.default is REQUIRED for p in found if p.kind is p.POSITIONAL_OR_KEYWORD)
    assert {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY} == options
    rest = [typing.get_type_hints(function)[p.name] for p in found if p.kind is p.VAR_KEYWORD]
    assert rest == ([] if further is None else [typing.Unpack[further]])


def test_inputs_of_a_loss() -> None:
    fields = dataclasses.fields(gating.LossInputs)
    assert {one.name: one.default for one in fields} == INPUTS
    assert typing.get_type_hints(LossOptions) == typing.get_type_hints(gating.LossInputs)
    with pytest.raises(TypeError, match="topk"):
        gating.gated_kl(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), gate=gating.Gate(), topk=2)  # type: ignore[call-arg]


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
    assert options.keys() == INPUTS.keys()
    objective = gating.Gated(gating.Gate.named("H2"), "hybrid", 5)
    for other in ("weights", "lam_order"):  # which exclude each other
        given = {**options, other: None}
        wanted = gating.distillation_loss(student, teacher, objective=objective, inputs=gating.LossInputs(**given))
        found = gating.gated_kl(student, teacher, gate=gating.Gate.named("H2"), support="hybrid", support_k=5, **given)
        assert torch.equal(found.loss, wanted.loss)


@pytest.mark.parametrize(
    ("name", "positional", "options"),
    [
        ("teacher_entropy", ("teacher_logits",), {"top_k": 8, "entropy": "top_k"}),
        ("gap", ("student_logits", "teacher_logits"), {}),
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
