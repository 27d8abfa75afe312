"""Bad input is a clear error: what, what was got, where, and what to do instead; never a wrong number."""

from __future__ import annotations

import math
import pickle  # noqa: TID251 - errors cross the border between worker processes by pickle, whoever runs them
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gatespace import Gate, fused_gated_kl, gated_kl, signals
from gatespace.errors import GatespaceError, MissingExtraError, RunError, UsageError, missing_extra, unknown_name
from gatespace.gating import (
    EOPD,
    Head,
    SampledReverseKL,
    TeacherTopK,
    ToDi,
    distillation_loss,
    forward_kl,
    objective,
    reverse_kl,
)

from .compare import top_k_of

B, T, V, H = 2, 3, 10, 4
GATE = Gate.named("H1")
INF, NAN = math.inf, math.nan


def z(*shape: int) -> torch.Tensor:
    shape = shape or (B, T, V)
    return torch.as_tensor(np.random.default_rng(len(shape)).normal(size=shape))


def fails(call: Callable[[], Any], *words: str) -> UsageError:
    """The call is a UsageError whose text has all the words, and which survives a trip between processes."""
    with pytest.raises(UsageError) as caught:
        call()
    error = caught.value
    text = str(error).lower()
    for word in words:
        assert word.lower() in text, f"{word!r} is not in: {error}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.exit_code == 2
    return error


# ---------------------------------------------------------------------------------------------- shapes


def plain(**options: Any) -> Any:
    return gated_kl(z(), z(), **{"gate": GATE, **options})


def fused(**options: Any) -> Any:
    names = ("student", "student_head", "teacher", "teacher_head")
    parts = (z(B, T, H), z(V, H), z(B, T, H), z(V, H))
    given = {name: options.pop(name, part) for name, part in zip(names, parts, strict=True)}
    return fused_gated_kl(*given.values(), **{"gate": GATE, **options})


@pytest.mark.parametrize(
    ("student", "teacher", "words"),
    [
        ((B, T, V), (B, T + 1, V), []),
        ((B, T, V), (B + 1, T, V), []),
        ((T, V), (T, V), []),
        ((V,), (V,), []),
        ((B, T, V, 1), (B, T, V, 1), []),
        ((B, T, V), (B, T, V + 2), ["vocab", "10", "12"]),
    ],
)
def test_shapes_of_logits(student: tuple[int, ...], teacher: tuple[int, ...], words: list[str]) -> None:
    fails(lambda: gated_kl(z(*student), z(*teacher), gate=GATE), *words)
    fails(lambda: distillation_loss(z(*student), z(*teacher), objective=ToDi()), *words)
    if student != teacher:
        for kl in (forward_kl, reverse_kl):
            fails(lambda kl=kl: kl(z(*student), z(*teacher)), *words)


INPUTS = [
    *[("mask", torch.ones(shape)) for shape in ((B, T + 1), (T, B), (B,))],
    *[("mask", torch.full((B, T), value)) for value in (0.5, 2, -1, NAN)],
    ("segment_ids", torch.zeros(B, T + 1, dtype=torch.long)),
    *[("u", torch.zeros(shape)) for shape in ((B + 1,), (B, T, 1))],
    *[("coefficients", torch.zeros(shape)) for shape in ((3,), (5,), (4, 1))],
    *[("temperature", value) for value in (0.0, -1.0, NAN, INF)],
    *[("total_tokens", value) for value in (0, -3, NAN)],
    *[("top_k", k) for k in (V + 1, 0, -1)],
    *[("vocab_size", size) for size in (V + 1, 0)],
]


@pytest.mark.parametrize(("name", "value"), INPUTS)
def test_inputs_that_cannot_be(name: str, value: Any) -> None:
    fails(lambda: plain(**{name: value}), name)
    fails(lambda: fused(**{name: value}), name)


FITS: list[tuple[dict[str, Any], list[str]]] = [
    ({"student_head": z(V, H + 1)}, ["student", "5", "4"]),
    ({"teacher": z(B, T, H + 2)}, ["teacher", "6", "4"]),
    ({"teacher_head": z(V + 1, H)}, ["vocab", "10", "11"]),
    ({"teacher": z(B, T + 1, H)}, []),
    ({"student": z(T, H), "teacher": z(T, H)}, []),
    ({"student_head": z(V)}, []),
    ({"student_head": Head(z(V, H), bias=z(V + 1))}, ["bias"]),
    ({"student_head": "head"}, ["head"]),
    ({"teacher_head": None}, ["head"]),
]


@pytest.mark.parametrize(("parts", "words"), FITS)
def test_heads_and_hidden_states_that_do_not_fit(parts: dict[str, Any], words: list[str]) -> None:
    fails(lambda: fused(**parts), *words)


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_logits_that_are_not_numbers_say_where(side: str, bad: float) -> None:
    student, teacher = z(), z() + 1
    (student if side == "student" else teacher)[1, 2, 7] = bad
    fails(lambda: gated_kl(student, teacher, gate=GATE), side, "[1, 2, 7]")
    fails(lambda: distillation_loss(student, teacher, objective=ToDi()), side, "[1, 2, 7]")
    mask = torch.ones(B, T)
    mask[1, 2] = 0
    assert torch.isfinite(gated_kl(student, teacher, gate=GATE, mask=mask).loss)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_fused_inputs_that_are_not_numbers_say_where(side: str, bad: float) -> None:
    student, teacher = z(B, T, H), z(B, T, H) + 1
    (student if side == "student" else teacher)[1, 2, 3] = bad
    fails(lambda: fused_gated_kl(student, z(V, H), teacher, z(V, H), gate=GATE), side, "1, 2")


def test_a_teacher_that_forbids_what_the_student_gives() -> None:
    """Reverse KL is infinite: say so, rather than drop terms."""
    teacher = z()
    teacher[0, 1, 4] = -INF
    fails(lambda: gated_kl(z(), teacher, gate=GATE), "reverse KL is infinite", "[0, 1")
    fails(lambda: gated_kl(z(), teacher, gate=Gate.static(0.5)), "reverse KL is infinite", "[0, 1")
    assert torch.isfinite(gated_kl(z(), teacher, gate=Gate.static(0)).loss)
    assert torch.isfinite(gated_kl(z(), teacher, gate=GATE, support="bucket", top_k=3).loss)


def test_a_student_that_forbids_what_the_teacher_gives() -> None:
    student = z()
    student[1, 0, 2] = -INF
    fails(lambda: gated_kl(student, z(), gate=GATE), "forward KL is infinite", "[1, 0")
    fails(lambda: gated_kl(student, z(), gate=Gate.static(0)), "forward KL is infinite", "[1, 0")
    assert torch.isfinite(gated_kl(student, z(), gate=Gate.static(1)).loss)


def test_a_fused_teacher_that_forbids_what_the_student_gives() -> None:
    bias = torch.zeros(V, dtype=torch.float64)
    bias[3] = -INF
    teacher = Head(z(V, H), bias=bias)
    fails(lambda: fused_gated_kl(z(B, T, H), z(V, H), z(B, T, H), teacher, gate=GATE), "reverse KL is infinite")
    assert torch.isfinite(fused_gated_kl(z(B, T, H), z(V, H), z(B, T, H), teacher, gate=Gate.static(0)).loss)


@pytest.mark.parametrize("recompute", [False, True])
def test_errors_of_the_fused_loss_name_the_place_whatever_chunk_it_is_in(recompute: bool) -> None:
    given = {"gate": GATE, "chunk_mb": 1e-6, "recompute": recompute}  # a token each
    student, teacher = z(B, T, H).requires_grad_(), z(B, T, H)
    broken = teacher.clone()
    broken[1, T - 1, 0] = NAN
    place = f"[1, {T - 1}"
    fails(lambda: fused_gated_kl(student, z(V, H), broken, z(V, H), **given), "the teacher has a logit", place)
    fails(lambda: fused_gated_kl(broken.requires_grad_(), z(V, H), teacher, z(V, H), **given), "the student has", place)
    sent = TeacherTopK(torch.arange(8).expand(B, T, 8), torch.full((B, T, 8), -3.0))
    sampled = torch.zeros(B, T, dtype=torch.long)
    sampled[1, T - 1] = V - 1
    hybrid = {**given, "support": "hybrid", "sampled": sampled}
    fails(lambda: fused_gated_kl(student, z(V, H), sent, None, **hybrid), "response token outside its top-K")


def test_a_row_without_any_possible_token() -> None:
    teacher = z()
    teacher[0, 2] = -INF
    fails(lambda: gated_kl(z(), teacher, gate=GATE), "teacher", "[0, 2")


def logits_with(value: float) -> torch.Tensor:
    changed = z().float()
    changed[0, 1, 4] = value
    return changed


FORBIDDEN = "gives probability 0 (a logit of -inf or below -1e+30)"


@pytest.mark.parametrize(
    ("student", "teacher", "options", "words"),
    [
        (z(), logits_with(1e4), {"gate": Gate(a=1e39)}, ["λ is not a number at [0, 1]", "exceed 3.4e+38"]),
        (z(), z(), {"gate": Gate(a=1e39, d=-1e39)}, ["λ is not a number at [0, 0]", "exceed 3.4e+38"]),
        (
            z(),
            z(),
            {"gate": Gate(b=1), "u": torch.tensor([0.3, NAN])},
            ["λ is not a number at [1, 0]", "signal u is NaN"],
        ),
        (
            z(),
            z(),
            {"gate": Gate(), "coefficients": torch.tensor([0, 0, NAN, 0])},
            ["λ is not", "learned coeff", "nan"],
        ),
        (logits_with(1e35), z(), {"gate": GATE}, ["forward KL overflows at [0, 1]", "logits of the student", "1e+35"]),
        (logits_with(-1e25), z(), {"gate": GATE}, ["forward KL overflows at [0, 1]", "from -1e+25"]),
        (z(), logits_with(1e35), {"gate": GATE}, ["reverse KL overflows at [0, 1]", "logits of the teacher", "1e+35"]),
        (z(), -z(), {"gate": GATE, "temperature": 1e-30}, ["KL overflows at [0, 0]", "temperature"]),
        (z(), logits_with(-3e38), {"gate": GATE}, ["reverse KL is infinite at [0, 1]", f"the teacher {FORBIDDEN}"]),
        (logits_with(-INF), z(), {"gate": GATE}, ["forward KL is infinite at [0, 1]", f"the student {FORBIDDEN}"]),
        (
            logits_with(-INF),
            logits_with(-INF).flip(-1),  # both are infinite, and reverse KL has no weight
            {"gate": Gate.static(0)},
            ["forward KL is infinite at [0, 1]", f"the student {FORBIDDEN}"],
        ),
    ],
)
def test_losses_that_are_not_finite_name_the_cause(
    student: torch.Tensor, teacher: torch.Tensor, options: dict[str, Any], words: list[str]
) -> None:
    fails(lambda: gated_kl(student.float(), teacher.float(), **options), *words)


@pytest.mark.parametrize("recompute", [False, True])
def test_fused_losses_that_are_not_finite_name_the_cause(recompute: bool) -> None:
    hidden, head = z(B, T, H).float().requires_grad_(), z(V, H).float()
    huge = head * 1e24
    for states, rows, gate, words in (
        (hidden.detach() * 1e4, head, Gate(a=1e39), ["λ is not a number at [0, 0]", "exceed 3.4e+38"]),
        (hidden.detach(), huge, GATE, ["reverse KL overflows at [0, 0]", "logits of the teacher"]),
    ):
        fails(lambda: fused_gated_kl(hidden, head, states, rows, gate=gate, recompute=recompute), *words)  # noqa: B023


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plain(support="bucket", support_k=V + 1, top_k=2), ["support_k", "11"]),
        (lambda: signals.teacher_entropy(z(), top_k=V + 1), ["top_k", "11"]),
        (lambda: forward_kl(z(), z(), support="renorm", support_k=0), ["support_k", "0"]),
        (lambda: plain(top_k=8, vocab_size=6), ["top_k", "6"]),  # measured against the cut vocabulary
        (lambda: gated_kl(z(B, T, V + 5), z(), gate=GATE, vocab_size=V + 2), ["vocab_size"]),
        (lambda: plain(support="hybrid"), ["sampled"]),
        (lambda: forward_kl(z(), z(), support="hybrid"), ["sampled"]),
        (lambda: forward_kl(z(), z(), temperature=0.0), ["temperature"]),
        (lambda: plain(support="hybrid", sampled=torch.full((B, T), V)), ["sampled"]),
        (lambda: plain(support="hybrid", sampled=torch.full((B, T), -1)), ["sampled"]),
        (lambda: plain(support="hybrid", sampled=torch.zeros(B, T + 1, dtype=torch.long)), ["sampled"]),
        (lambda: distillation_loss(z(), z(), objective=EOPD(pg="exact", top_k=0)), ["top_k of EOPD"]),
        (lambda: distillation_loss(z(), z(), objective=EOPD(pg="exact", top_k=V + 1)), ["top_k of EOPD"]),
        (lambda: gated_kl(torch.zeros(B, T, V, dtype=torch.long), z(), gate=GATE), ["floating-point"]),
        (lambda: plain(gate=Gate.named("G5").gap_only()), ["gate", "NotApplicable"]),
    ],
)
def test_calls_that_cannot_be(call: Callable[[], Any], words: list[str]) -> None:
    fails(call, *words)


def test_a_teacher_known_by_its_top_k_only() -> None:
    known = top_k_of(z().numpy(), 4)
    fails(lambda: gated_kl(z(), known, gate=GATE, top_k=4), "full")  # the default support
    fails(lambda: gated_kl(z(), known, gate=GATE, top_k=8, support="bucket"), "top_k", "4")
    fails(lambda: gated_kl(z(), known, gate=GATE, top_k=4, support="bucket", support_k=6), "support_k", "4")
    fails(lambda: gated_kl(z(), known, gate=GATE, top_k=4, support="bucket", entropy="full"), "entropy")
    sampled = torch.zeros(B, T, dtype=torch.long)
    fails(lambda: gated_kl(z(), known, gate=GATE, top_k=4, support="hybrid", sampled=sampled), "sampled_log_probs")
    fails(lambda: gated_kl(z(), known, gate=Gate(extra={"jsd": 1.0}), top_k=4, support="bucket"))
    fails(lambda: distillation_loss(z(), known, objective=ToDi()))
    fails(lambda: gated_kl(z(), known, gate=GATE, top_k=4, support="bucket", temperature=2.0), "temperature")


@pytest.mark.parametrize(
    ("ids", "log_probs", "words"),
    [
        ([0, V], [-1.0, -2.0], ["id"]),
        ([0, -1], [-1.0, -2.0], ["id"]),
        ([0, 1], [3.0, 1.0], ["log_probs"]),
        ([0, 1], [NAN, -1.0], ["teacher"]),
        ([0, 1], [-1.0, -2.0, -3.0], ["log_probs"]),
    ],
)
def test_what_a_server_must_not_send(ids: list[int], log_probs: list[float], words: list[str]) -> None:
    sent = TeacherTopK(
        ids=torch.tensor(ids).expand(B, T, -1), log_probs=torch.tensor(log_probs, dtype=torch.float64).expand(B, T, -1)
    )
    fails(lambda: gated_kl(z(), sent, gate=GATE, top_k=2, support="bucket"), *words)


# ---------------------------------------------------------------------------------------------- names and types


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: gated_kl(z(), z(), gate=GATE, support="buckt"), "bucket"),
        (lambda: gated_kl(z(), z(), gate=GATE, support="renormalised"), "renorm"),
        (lambda: gated_kl(z(), z(), gate=GATE, entropy="topk"), "top_k"),
        (lambda: forward_kl(z(), z(), support="fulll"), "full"),
        (lambda: reverse_kl(z(), z(), support="hybrit"), "hybrid"),
        (lambda: signals.teacher_entropy(z(), entropy="bukket"), "bucket"),
        (lambda: objective("tody"), "todi"),
        (lambda: objective("eodp"), "eopd"),
        (lambda: objective("todi", betta=1.0), "beta"),
        (lambda: SampledReverseKL(estimator="k2"), "k"),
        (lambda: EOPD(pg="exakt"), "exact"),
        (lambda: objective("student_top_k", form="buckets"), "bucket"),
        (lambda: signals.get("gapp"), "gap"),
        (lambda: gated_kl(z(), z(), gate=Gate(extra={"jsdd": 1.0})), "jsd"),
    ],
)
def test_unknown_names_suggest_the_nearest(call: Callable[[], Any], nearest: str) -> None:
    fails(call, f"did you mean '{nearest}")


@pytest.mark.parametrize("gate", ["H1", (4, 0, -1, 0), None, 0.5, {"a": 1}])
def test_a_gate_of_a_wrong_type(gate: Any) -> None:
    fails(lambda: gated_kl(z(), z(), gate=gate), "gate", "Gate")
    fails(lambda: fused_gated_kl(z(B, T, H), z(V, H), z(B, T, H), z(V, H), gate=gate), "gate", "Gate")


@pytest.mark.parametrize("made", ["todi", None, 3, ToDi])
def test_an_objective_of_a_wrong_type(made: Any) -> None:
    fails(lambda: distillation_loss(z(), z(), objective=made), "objective")


# ---------------------------------------------------------------------------------------------- the family of errors


@pytest.mark.parametrize("kind", [GatespaceError, UsageError, RunError, MissingExtraError])
def test_errors_survive_a_trip_between_processes(kind: type[GatespaceError]) -> None:
    error = kind("the thing is wrong", got=3, why="because", instead="do that")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert (again.what, again.got, again.why, again.instead) == ("the thing is wrong", "3", "because", "do that")
    assert again.exit_code == error.exit_code


def test_errors_are_of_the_kinds_that_callers_catch() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(RunError, RuntimeError)
    assert issubclass(MissingExtraError, ImportError)
    assert UsageError("x").exit_code == 2
    assert RunError("x").exit_code == 1
    assert "'.[plot]' in a clone" in str(missing_extra("drawing", module="matplotlib", extra="plot"))
    assert "did you mean 'full'" in str(unknown_name("support", "ful", ["full", "bucket"]))
    assert "did you mean" not in str(unknown_name("support", "xyzzy", ["full", "bucket"]))


def test_a_top_k_teacher_that_names_an_id_twice() -> None:
    sent = top_k_of(z(), 4)
    ids = sent.ids.clone()
    ids[1, 2, 3] = ids[1, 2, 0]
    fails(lambda: gated_kl(z(), TeacherTopK(ids, sent.log_probs), gate=GATE, support="bucket"), "twice")
