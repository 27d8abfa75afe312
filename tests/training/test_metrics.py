"""Metrics of steps against their definitions: exact sums, weights, λ over a run, κ, single tokens."""

from __future__ import annotations

import json
import math
import random
import statistics
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.config import ObjectiveConfig, TraceConfig, parse_config
from gatespace.files import encode
from gatespace.gating import Gate, LossInputs, TeacherTopK, ToDi, distillation_loss, gated_kl
from gatespace.gating.configured import build_objective
from gatespace.gating.loss import LossOutput
from gatespace.rollout import Rollout
from gatespace.tasks import Example
from gatespace.training.batches import Row
from gatespace.training.clock import Clock
from gatespace.training.metrics import (
    BINS,
    StepMetrics,
    Texts,
    TokenColumns,
    kappa_share,
    kappa_squares,
    top_tokens,
)
from gatespace.training.optimizer import Update
from gatespace.training.rollouts import MicroBatch

VOCAB = 12
ROWS = [0, 0, 0, 1, 2, 2]
GATE = Gate(4, 1, -1, 2)


def logits(seed: int, count: int = len(ROWS), scale: float = 2.0) -> Tensor:
    return torch.randn(1, count, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def loss(gate: Gate) -> LossOutput:
    return gated_kl(logits(1), logits(2), gate=gate, segment_ids=torch.tensor([ROWS]))


def cut(out: LossOutput, span: slice) -> LossOutput:
    fields = {
        name: value[:, span] if isinstance(value, Tensor) and value.dim() == 2 else value
        for name, value in vars(out).items()
    }
    signals = {name: value[:, span] for name, value in out.signals.items()}
    return LossOutput(**{**fields, "tokens": span.stop - span.start, "signals": signals})


def with_lam(*values: float, **columns: list[float]) -> LossOutput:
    zeros = torch.zeros(1, len(values), dtype=torch.float64)
    lam = torch.tensor([values], dtype=torch.float64)
    out = LossOutput(torch.tensor(0.0), len(values), zeros, lam, *[zeros] * 7)
    return LossOutput(**{**vars(out), **{name: torch.tensor([c], dtype=torch.float64) for name, c in columns.items()}})


def record(*outs: LossOutput) -> dict[str, Any]:
    return TokenColumns.join(map(TokenColumns.of, outs)).record()


def metrics(gate: Gate = GATE, every: int = 0) -> StepMetrics:
    settings = parse_config(ObjectiveConfig, {"gate": [gate.a, gate.b, gate.c, gate.d]})
    return StepMetrics(
        objective=build_objective(settings),
        settings=settings,
        trace=TraceConfig(tokens_every=every, rollouts=2),
        vocab_size=VOCAB,
        logits=lambda batch, span: (logits(1)[0, span], logits(2)[0, span]),
        texts=Texts(lambda ids: " ".join(map(str, ids)), lambda id: f"<{id}>", lambda text: text or None, judged=True),
    )


def batch(*lengths: int, first: int = 0, ended: bool = True, weights: list[list[float]] | None = None) -> MicroBatch:
    rows = [Row(first + i, Example(f"text {first + i}", "joy"), [0], [0]) for i in range(len(lengths))]
    responses = [list(range(5, 5 + length)) for length in lengths]
    rollout = Rollout(responses, [[-0.5] * length for length in lengths], [ended] * len(lengths))
    places = [*range(first, first + len(lengths))]
    return MicroBatch(rows, places, rollout=rollout, sources=["student"] * len(lengths), weights=weights)


def one_step(trace: StepMetrics, step: int, *parts: tuple[MicroBatch, LossOutput]) -> dict[str, Any]:
    trace.begin(step)
    for part, out in parts:
        trace.add(part, out)
    return trace.record(Update(0.5, 1e-6), Clock())["metrics"][0]


# ---------------------------------------------------------------------------------------------------- one step


def test_a_record_holds_what_the_definitions_say() -> None:
    out = loss(Gate(4, 1, -1, 2, {"student_entropy": 1.0}))
    found = record(out)
    names = ("lam", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass", "weight")
    columns = {name: getattr(out, name)[0].double().tolist() for name in names}
    for name in names[1:]:
        assert found[name] == pytest.approx(statistics.fmean(columns[name]), rel=1e-12, abs=1e-300)
    for name in ("lam", "h", "u", "gap"):
        assert found[f"{name}_sd"] == pytest.approx(statistics.pstdev(columns[name]), rel=1e-9)
    assert found["loss"] == pytest.approx(float(out.loss), rel=1e-6)
    assert found["lam_mean"] == pytest.approx(statistics.fmean(columns["lam"]), rel=1e-12)
    assert found["student_entropy"] == pytest.approx(float(out.signals["student_entropy"].mean()), rel=1e-6)
    assert (found["tail_mass_max"], found["tokens"]) == (max(columns["tail_mass"]), 6)


def test_responses_of_a_step() -> None:
    out, trace = loss(GATE), metrics()
    first, second = batch(3, 1), batch(2, first=2, ended=False)
    second.sources, second.rollout.log_probs = ["gold"], [[0.0, 0.0]]
    found = one_step(trace, 0, (first, cut(out, slice(0, 4))), (second, cut(out, slice(4, 6))))
    assert (found["step"], found["rows"], found["tokens"], trace.tokens) == (1, 3, 6, 6)
    assert (found["response_length"], found["ended"]) == (2.0, pytest.approx(2 / 3))
    assert found["sampled_log_prob"] == -0.5  # of the student's own alone
    assert (found["legal_answers"], found["repeated_ngrams"]) == (1.0, 0.0)
    assert (found["grad_norm"], found["lr"], found["kappa_share"]) == (0.5, 1e-6, None)
    encode(found)


def test_the_histogram_and_saturation_at_their_edges() -> None:
    found = record(with_lam(0.0, 0.019, 0.02, 0.021, 0.049, 0.05, 0.5, 0.949, 0.95, 0.979, 0.981, 1.0))
    expected = [0] * BINS
    for place in (0, 0, 0, 0, 0, 1, 10, 18, 19, 19, 19, 19):
        expected[place] += 1
    assert found["lam_hist"] == expected
    assert found["lam_saturated"] == 5 / 12


def test_the_division_into_micro_batches_and_their_order_do_not_show() -> None:
    out = loss(GATE)
    parts = [cut(out, slice(0, 3)), cut(out, slice(3, 4)), cut(out, slice(4, 6))]
    for seed in range(6):
        random.Random(seed).shuffle(parts)
        assert encode(record(*parts)) == encode(record(out))


def test_sums_are_exactly_rounded() -> None:
    values = [1e16, 1.0, -1e16, 1e-3] * 10  # left to right in float64 this is 0 or 20, by the order
    assert record(with_lam(*[0.5] * 40, per_token=values))["loss"] == 10.01 / 40


@pytest.mark.parametrize("gate", [GATE, Gate.static(0.1)])
def test_tokens_of_a_weight_are_tokens_repeated_as_often(gate: Gate) -> None:
    """Rows count twice, once and three times; a token of weight 0 beside them not at all."""
    out, often = loss(gate), [2, 2, 2, 1, 3, 3]
    beside = with_lam(0.999, tail_mass=[1.0])
    weighted, repeated = metrics(), metrics()
    for step in (1, 2):
        one = one_step(
            weighted,
            step,
            (batch(3, 1, 2, weights=[[2.0] * 3, [1.0], [3.0] * 2]), out),
            (batch(1, first=3, weights=[[0.0]]), beside),
        )
        tokens = [cut(out, slice(i, i + 1)) for i, times in enumerate(often) for _ in range(times)]
        other = one_step(repeated, step, *[(batch(1, first=i), token) for i, token in enumerate(tokens)])
        assert one["tokens"] == other["tokens"] == 13
        for name in TokenColumns.of(out).record():
            wanted = other[name]
            assert one[name] == (wanted if wanted is None else pytest.approx(wanted, rel=1e-12, abs=1e-15)), name
    for name, wanted in repeated.summary().items():
        assert name == "rows" or weighted.summary()[name] == pytest.approx(wanted, rel=1e-12, abs=1e-15), name


def test_an_objective_that_mixes_nothing_has_no_lam_and_no_statistics_of_it() -> None:
    out = distillation_loss(logits(1), logits(2), objective=ToDi())
    trace = metrics()
    found, run = one_step(trace, 0, (batch(3, 1, 2), out)), trace.summary()
    for name in ("lam_mean", "lam_rkl_mean", "lam_sd", "lam_hist", "lam_saturated"):
        assert (found[name], run[name]) == (None, None)
    assert found["forward_kl"] > 0
    assert run["tokens"] == 6


def test_no_tokens_have_a_record_of_the_same_names() -> None:
    empty = gated_kl(logits(1)[:, :0], logits(2)[:, :0], gate=Gate(a=1))
    for found in (record(), record(empty)):
        assert (found["tokens"], found["loss"], found["lam_mean"], found["lam_hist"]) == (0, None, None, None)
        assert set(found) == set(record(loss(Gate(a=1))))


def test_what_is_not_finite_stays_visible_in_the_record() -> None:
    found = record(with_lam(0.5, math.nan, per_token=[math.inf, -math.inf]))
    assert math.isnan(found["loss"])
    assert math.isnan(found["lam_mean"])
    assert sum(found["lam_hist"]) == 1
    assert json.loads(encode({"step": 1, **found}))["loss"] is None


# ---------------------------------------------------------------------------------------------------- the whole run


def outs(steps: range) -> list[LossOutput]:
    return [gated_kl(logits(step, 1 + step % 5), logits(step + 100, 1 + step % 5), gate=GATE) for step in steps]


def run(trace: StepMetrics, steps: range) -> StepMetrics:
    for step, out in zip(steps, outs(steps), strict=True):
        one_step(trace, step, (batch(1 + step % 5), out))
    return trace


def test_lam_over_the_run_counts_every_token_alike() -> None:
    summary = run(metrics(), range(40)).summary()
    lam = [Fraction(value) for out in outs(range(40)) for value in out.lam.flatten().tolist()]  # type: ignore[union-attr]
    rkl = [Fraction(value) for out in outs(range(40)) for value in out.reverse_kl.flatten().tolist()]
    mean = sum(lam) / len(lam)
    assert (summary["steps"], summary["rows"], summary["tokens"], sum(summary["lam_hist"])) == (40, 40, *[len(lam)] * 2)
    assert summary["lam_mean"] == pytest.approx(float(mean), rel=1e-12)
    variance = sum((one - mean) ** 2 for one in lam) / len(lam)
    assert summary["lam_sd"] == pytest.approx(math.sqrt(variance), rel=1e-14)
    weighted = sum(one * weight for one, weight in zip(lam, rkl, strict=True)) / sum(rkl)
    assert summary["lam_rkl_mean"] == pytest.approx(float(weighted), rel=1e-14)
    assert abs(summary["lam_rkl_mean"] - summary["lam_mean"]) > 1e-3  # they could be told apart


def test_a_small_spread_is_not_lost_in_rounding() -> None:
    values = [0.7 + 1e-9 * (i % 7) for i in range(60)]
    trace, static = metrics(), metrics()
    for one, lam in ((trace, values), (static, [0.1] * 60)):
        for step in range(6):
            one_step(one, step, (batch(10), with_lam(*lam[10 * step : 10 * step + 10])))
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = float(sum((value - mean) ** 2 for value in exact) / len(exact))
    assert trace.summary()["lam_sd"] == pytest.approx(math.sqrt(variance), rel=1e-6)
    assert static.summary()["lam_sd"] == 0.0


@pytest.mark.parametrize("rkl, expected", [([0.0, 0.0], None), ([3.0, 1.0], 0.35), ([math.inf, 1.0], None)])
def test_a_mean_by_reverse_kl_needs_a_reverse_kl(rkl: list[float], expected: float | None) -> None:
    trace = metrics()
    wanted = expected if expected is None else pytest.approx(expected)
    assert one_step(trace, 0, (batch(2), with_lam(0.25, 0.65, reverse_kl=rkl)))["lam_rkl_mean"] == wanted
    assert trace.summary()["lam_rkl_mean"] == wanted


def test_metrics_go_on_exactly_from_their_state_in_json() -> None:
    whole, first, second = run(metrics(), range(30)), run(metrics(), range(13)), metrics()
    state = json.loads(json.dumps(first.state()))
    run(first, range(13, 16))  # past the checkpoint; must not reach into the state that was taken
    second.restore(state)
    run(second, range(13, 30))
    assert repr(second.summary()) == repr(whole.summary())
    assert second.state() == whole.state()


# ---------------------------------------------------------------------------------------------------- κ


def closed_form_share(student: Tensor, teacher: Tensor, gate: Gate, temperature: float = 1.0) -> float:
    """From ∂L/∂z_j = (1/T){s_j[λ(l_j - R) + (1-λ) + κ s_y] - (1-λ) t_j - κ s_y 1[j=y]}, T = 1 in y's probability."""
    s, t = student.double().softmax(-1), teacher.double().softmax(-1)
    top = t.topk(8, dim=-1).values
    top = top / top.sum(-1, keepdim=True)
    h = -(top * top.log()).sum(-1) / math.log(8)
    u = h[torch.tensor([ROWS.index(row) for row in ROWS])]
    best = t.argmax(-1, keepdim=True)
    chosen = s.gather(-1, best)[:, 0]
    lam = torch.sigmoid(gate.a * h + gate.b * u + gate.c + gate.d * (1 - chosen))[:, None]
    hard = torch.zeros_like(s).scatter(-1, best, 1.0)
    sT, tT = (student.double() / temperature).softmax(-1), (teacher.double() / temperature).softmax(-1)
    l = sT.log() - tT.log()
    R, F = (sT * l).sum(-1, keepdim=True), -(tT * l).sum(-1, keepdim=True)
    stopped = (sT * (lam * (l - R) + (1 - lam)) - (1 - lam) * tT) / temperature
    kappa = gate.d * lam * (1 - lam) * (R - F)
    through = kappa * chosen[:, None] * (s - hard)
    return float(through.norm() / (stopped + through).norm())


def share_of(*args: Any, **options: Any) -> float:
    return kappa_share(*kappa_squares(*args, **options))


def test_kappa_share_does_not_depend_on_how_tokens_are_divided() -> None:
    gate, student, teacher = Gate(4, 2, -1.5, 2), logits(1)[0], logits(2)[0]
    u = loss(gate).u
    whole = share_of(student, teacher, gate, inputs=LossInputs(segment_ids=torch.tensor([ROWS]), total_tokens=1.0))
    squares: tuple[list[float], list[float]] = ([], [])
    for span in (slice(0, 1), slice(1, 4), slice(4, 6)):
        inputs = LossInputs(u=u[:, span], total_tokens=1.0)
        parts = kappa_squares(student[span], teacher[span], gate, inputs=inputs)
        for every, part in zip(squares, parts, strict=True):
            every += part
    # a share of 1e-4 is the difference of two float32 gradients that agree in their first four digits
    assert kappa_share(*squares) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("d", [-4.0, -2.0, 2.0, 4.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kappa_share_is_that_of_the_closed_form(d: float, temperature: float) -> None:
    gate = Gate(4, 2, -1.5, d)
    teacher = logits(2)[0]
    student = 0.8 * teacher + 0.35 * logits(1)[0]
    inputs = LossInputs(segment_ids=torch.tensor([ROWS]), temperature=temperature)
    share = share_of(student, teacher, gate, inputs=inputs)
    assert share == pytest.approx(closed_form_share(student, teacher, gate, temperature), rel=1e-4)
    assert share > 1e-3


def test_kappa_share_is_zero_where_the_gate_reads_nothing_of_the_student() -> None:
    student, teacher = logits(1)[0], logits(2)[0]
    assert share_of(student, teacher, Gate(4, 4, -1.5, 0)) == 0.0
    assert share_of(student, student, Gate(4, 4, -1.5, 2)) == pytest.approx(0.0, abs=1e-3)
    assert share_of(student[:0], teacher[:0], Gate(d=2)) == 0.0


def test_kappa_share_leaves_its_inputs_alone_and_needs_no_gradient_to_be_on() -> None:
    student = logits(1)[0].requires_grad_()
    with torch.no_grad():
        share = share_of(student, logits(2)[0], Gate(d=2))
    assert share == share_of(student.detach(), logits(2)[0], Gate(d=2)) > 0
    assert student.grad is None
    half = share_of(student.bfloat16(), logits(2)[0].bfloat16(), Gate(d=2))
    assert half == pytest.approx(share, rel=0.05)


def test_kappa_share_of_a_teacher_known_by_its_top_k() -> None:
    student, teacher = logits(1)[0], logits(2)[0]
    log_probs, ids = teacher.log_softmax(-1).topk(VOCAB, dim=-1)
    known = TeacherTopK(ids=ids[None], log_probs=log_probs[None])
    got = share_of(student, known, Gate(4, 0, -1, 2), support="bucket", support_k=VOCAB - 1)
    assert got == pytest.approx(share_of(student, teacher, Gate(4, 0, -1, 2)), rel=0.05)


# ---------------------------------------------------------------------------------------------------- token records


def test_lines_of_single_tokens() -> None:
    out, trace = loss(GATE), metrics(every=2)
    found = one_step(trace, 0, (batch(3, 1), cut(out, slice(0, 4))), (batch(2, first=2), cut(out, slice(4, 6))))
    lines = trace.record(Update(0.5, 1e-6), Clock())["tokens"]
    assert [(line["step"], line["row"], line["index"], line["text"]) for line in lines] == [
        (1, 0, 0, "text 0"),
        (1, 1, 1, "text 1"),
    ]
    line = lines[0]
    assert (line["ids"], line["tokens"], line["label"]) == ([5, 6, 7], ["<5>", "<6>", "<7>"], "5 6 7")
    assert (line["gold"], line["ended"], line["source"]) == ("joy", True, "student")
    assert line["values"]["lam"] == pytest.approx(out.lam[0, :3].tolist(), rel=1e-5)  # type: ignore[index]
    assert lines[1]["values"]["gap"] == pytest.approx(out.gap[0, 3:4].tolist(), rel=1e-5)
    probabilities = logits(2)[0, :3].softmax(-1)
    assert [top[0][0] for top in line["teacher_top"]] == [f"<{int(token)}>" for token in probabilities.argmax(-1)]
    assert line["teacher_top"][0][0][1] == pytest.approx(float(probabilities[0].max()), rel=1e-5)
    inputs = LossInputs(u=out.u[:, :4], total_tokens=1.0)
    share = share_of(logits(1)[0, :4], logits(2)[0, :4], GATE, inputs=inputs)
    assert found["kappa_share"] == pytest.approx(share, rel=1e-3)
    for every, wanted in ((0, []), (1, [0, 1, 2, 3]), (3, [0, 3])):
        trace = metrics(every=every)
        steps = [one_step(trace, step, (batch(3), cut(out, slice(0, 3)))) for step in range(4)]
        assert [step for step, line in enumerate(steps) if line["kappa_share"] is not None] == wanted


def test_top_tokens_are_in_order_and_ties_go_to_the_smaller_id() -> None:
    values = torch.tensor([[0.1, 0.3, 0.1, 0.1, 0.4], [0.2, 0.2, 0.2, 0.2, 0.2]]).log()
    assert [[token for token, _ in one] for one in top_tokens(values, 3)] == [[4, 1, 0], [0, 1, 2]]
    assert len(top_tokens(values, 9)[0]) == 5
    known = TeacherTopK(ids=torch.tensor([[[7, 2, 9]]]), log_probs=torch.tensor([[[0.2, 0.5, 0.2]]]).log())
    assert top_tokens(known, 2) == [[(2, pytest.approx(0.5)), (7, pytest.approx(0.2))]]
