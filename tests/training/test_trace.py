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

from gatespace.errors import UsageError
from gatespace.files import encode
from gatespace.gating import Gate, LossInputs, TeacherTopK, ToDi, distillation_loss, gated_kl
from gatespace.gating.loss import LossOutput
from gatespace.training.token_records import due, token_record, top_tokens
from gatespace.training.trace import BINS, Trace, kappa_share, kappa_squares

VOCAB = 12
ROWS = [0, 0, 0, 1, 2, 2]


def logits(seed: int, count: int = len(ROWS), scale: float = 2.0) -> Tensor:
    return torch.randn(1, count, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def loss(gate: Gate, rows: list[int] | None = None, **arguments: object) -> LossOutput:
    segments = torch.tensor([rows or ROWS])
    return gated_kl(logits(1), logits(2), gate=gate, segment_ids=segments, **arguments)  # type: ignore[arg-type]


def traced(*parts: tuple[LossOutput, list[int]], step: int = 1) -> Trace:
    trace = Trace()
    trace.begin(step)
    trace.rollout(lengths=[3, 1, 2], ended=[True, False, True], log_probs=[[-1.0, -2.0, -3.0], None, [-0.5, -0.25]])
    for out, rows in parts:
        trace.add(out, rows=rows)
    return trace


def cut(out: LossOutput, span: slice) -> LossOutput:
    fields = {
        name: value[:, span] if isinstance(value, Tensor) and value.dim() == 2 else value
        for name, value in vars(out).items()
    }
    return LossOutput(**{**fields, "signals": {name: value[:, span] for name, value in out.signals.items()}})


# ---------------------------------------------------------------------------------------------------- one step


def test_a_record_holds_what_the_definitions_say() -> None:
    out = loss(Gate(4, 1, -1, 2, {"student_entropy": 1.0}))
    record = traced((out, ROWS)).record(grad_norm=0.5, lr=1e-6, kappa_share=0.25, source="student")
    columns = {
        name: getattr(out, name)[0].double().tolist()
        for name in ("lam", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass", "weight", "per_token")
    }
    lam = columns["lam"]
    for name in ("forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass", "weight"):
        assert record[name] == pytest.approx(statistics.fmean(columns[name]), rel=1e-12, abs=1e-300)
    for name in ("lam", "h", "u", "gap"):
        assert record[f"{name}_sd"] == pytest.approx(statistics.pstdev(columns[name]), rel=1e-9)
    assert record["loss"] == pytest.approx(float(out.loss), rel=1e-6)
    assert record["lam_mean"] == pytest.approx(statistics.fmean(lam), rel=1e-12)
    assert record["student_entropy"] == pytest.approx(float(out.signals["student_entropy"].mean()), rel=1e-6)
    assert record["tail_mass_max"] == max(columns["tail_mass"])
    assert record["response_length"] == 2.0
    assert record["ended"] == pytest.approx(2 / 3)
    assert record["sampled_log_prob"] == pytest.approx(-6.75 / 5)
    assert {name: record[name] for name in ("step", "tokens", "rows", "grad_norm", "lr", "kappa_share", "source")} == {
        "step": 1,
        "tokens": 6,
        "rows": 3,
        "grad_norm": 0.5,
        "lr": 1e-6,
        "kappa_share": 0.25,
        "source": "student",
    }
    encode(record)


def with_lam(*values: float) -> LossOutput:
    zeros = torch.zeros(1, len(values), dtype=torch.float64)
    lam = torch.tensor([values], dtype=torch.float64)
    return LossOutput(torch.tensor(0.0), len(values), zeros, lam, *[zeros] * 7)


def test_the_histogram_and_saturation_at_their_edges() -> None:
    values = [0.0, 0.019, 0.02, 0.021, 0.049, 0.05, 0.5, 0.949, 0.95, 0.979, 0.981, 1.0]
    record = traced((with_lam(*values), [0] * len(values))).record()
    expected = [0] * BINS
    for place in (0, 0, 0, 0, 0, 1, 10, 18, 19, 19, 19, 19):
        expected[place] += 1
    assert record["lam_hist"] == expected
    assert record["lam_saturated"] == 5 / 12


def test_the_division_into_micro_batches_and_their_order_do_not_show() -> None:
    out = loss(Gate(4, 1, -1, 2))
    whole = encode(traced((out, ROWS)).record())
    parts = [(cut(out, slice(0, 3)), ROWS[:3]), (cut(out, slice(3, 4)), ROWS[3:4]), (cut(out, slice(4, 6)), ROWS[4:])]
    for seed in range(6):
        random.Random(seed).shuffle(parts)
        assert encode(traced(*parts).record()) == whole


def test_sums_are_exactly_rounded() -> None:
    values = [1e16, 1.0, -1e16, 1e-3] * 10  # left to right in float64 this is 0 or 20, by the order
    out = with_lam(*[0.5] * 40)
    big = LossOutput(**{**vars(out), "per_token": torch.tensor([values], dtype=torch.float64)})
    assert traced((big, [0] * 40)).record()["loss"] == 10.01 / 40


def test_masked_positions_do_not_count() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    index = mask.reshape(-1).nonzero()[:, 0]
    student, teacher = logits(1), logits(2)
    wide = [torch.zeros(9, VOCAB).index_copy(0, index, one[0]).reshape(3, 3, VOCAB) for one in (student, teacher)]
    trace = traced()
    out = gated_kl(wide[0], wide[1], gate=Gate(4, 1, -1, 2), mask=mask)
    trace.add(out, rows=torch.arange(3)[:, None].expand(3, 3), mask=mask)
    assert trace.row(2) == traced((loss(Gate(4, 1, -1, 2)), ROWS)).row(2)
    assert encode(trace.record()) == encode(traced((loss(Gate(4, 1, -1, 2)), ROWS)).record())


@pytest.mark.parametrize("gate", [Gate(4, 1, -1, 2), Gate.static(0.1)])
def test_tokens_of_a_weight_are_tokens_repeated_as_often(gate: Gate) -> None:
    """Rows count twice, once and three times; a token of weight 0 beside them not at all."""
    out, often = loss(gate), [2, 2, 2, 1, 3, 3]
    beside = LossOutput(**{**vars(with_lam(0.999)), "tail_mass": torch.ones(1, 1)})
    weighted, repeated = Trace(), Trace()
    for step in (1, 2):
        weighted.begin(step)
        weighted.add(out, rows=ROWS, weights=[float(times) for times in often])
        weighted.add(beside, rows=[3], weights=[0.0])
        repeated.begin(step)
        for i in [i for i, times in enumerate(often) for _ in range(times)]:
            repeated.add(cut(out, slice(i, i + 1)), rows=[ROWS[i]])
        one, other = weighted.record(), repeated.record()
        assert one["tokens"] == other["tokens"] == 13
        assert_alike(one, other)
        for name in ("tokens", "lam_hist"):
            assert encode({name: one[name]}) == encode({name: other[name]})
    assert_alike(weighted.summary(), repeated.summary())


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == (value if value is None else pytest.approx(value, rel=1e-12, abs=1e-15)), name


def test_weights_of_one_leave_every_byte() -> None:
    out = loss(Gate(4, 1, -1, 2))
    plain, weighted = traced((out, ROWS)), traced()
    weighted.add(out, rows=ROWS, weights=torch.ones(6))
    assert encode(weighted.record()) == encode(plain.record())
    assert encode(weighted.state()) == encode(plain.state())


def test_a_row_is_given_in_the_order_of_its_tokens_wherever_it_was_added() -> None:
    out = loss(Gate(4, 1, -1, 2))
    trace = traced((cut(out, slice(3, 6)), ROWS[3:]), (cut(out, slice(0, 3)), ROWS[:3]))
    assert out.lam is not None
    assert trace.row(0)["lam"] == out.lam[0, :3].double().tolist()
    assert trace.row(0)["loss"] == out.per_token[0, :3].double().tolist()
    assert trace.row(2)["gap"] == out.gap[0, 4:].double().tolist()
    assert trace.row(7)["lam"] == []


def test_an_objective_that_mixes_nothing_has_no_lam() -> None:
    out = distillation_loss(logits(1), logits(2), objective=ToDi())
    assert out.lam is None
    trace = traced((out, ROWS))
    record = trace.record()
    names = ("lam_mean", "lam_rkl_mean", "lam_sd", "lam_hist", "lam_saturated")
    assert [record[name] for name in names] == [None] * 5
    assert record["forward_kl"] > 0
    assert (trace.summary()["lam_mean"], trace.summary()["tokens"]) == (None, 6)


def test_a_step_without_tokens_has_a_record_of_the_same_names() -> None:
    empty = gated_kl(logits(1)[:, :0], logits(2)[:, :0], gate=Gate(a=1))
    for trace in (traced(), traced((empty, []))):
        record = trace.record()
        assert (record["tokens"], record["loss"], record["lam_mean"], record["lam_hist"]) == (0, None, None, None)
        assert set(record) == set(traced((loss(Gate(a=1)), ROWS)).record())
        encode(record)


def test_what_is_not_finite_stays_visible_in_the_record() -> None:
    out = with_lam(0.5, math.nan)
    bad = LossOutput(**{**vars(out), "per_token": torch.tensor([[math.inf, -math.inf]])})
    record = traced((bad, [0, 0])).record()
    assert math.isnan(record["loss"])
    assert math.isnan(record["lam_mean"])
    assert sum(record["lam_hist"]) == 1
    assert json.loads(encode(record))["loss"] is None


def test_calls_out_of_order_are_errors() -> None:
    out = loss(Gate(a=1))
    with pytest.raises(UsageError, match="before"):
        Trace().add(out, rows=ROWS)
    with pytest.raises(UsageError, match="before"):
        Trace().record()
    trace = traced((out, ROWS))
    trace.record()
    with pytest.raises(UsageError, match="twice"):
        trace.record()
    with pytest.raises(UsageError, match="each token"):
        traced((out, ROWS[1:]))
    with pytest.raises(UsageError, match="same rows"):
        Trace().rollout(lengths=[1], ended=[])
    with pytest.raises(UsageError, match="given twice"):
        traced((out, ROWS)).record(loss=1.0)
    with pytest.raises(UsageError, match="a part of the step"):
        traced((out, ROWS)).add(out, rows=ROWS, more={"student_entropy": torch.zeros(6)})


# ---------------------------------------------------------------------------------------------------- the whole run


def steps(trace: Trace, numbers: range) -> None:
    for step in numbers:
        count = 1 + step % 5
        trace.begin(step)
        trace.rollout(lengths=[count], ended=[True])
        out = gated_kl(logits(step, count), logits(step + 100, count), gate=Gate(4, 1, -1, 2))
        trace.add(out, rows=[0] * count)
        trace.record()


def test_lam_over_the_run_counts_every_token_alike() -> None:
    trace = Trace()
    steps(trace, range(1, 21))
    all_lam = [
        value
        for step in range(1, 21)
        for value in gated_kl(logits(step, 1 + step % 5), logits(step + 100, 1 + step % 5), gate=Gate(4, 1, -1, 2))
        .lam.flatten()
        .tolist()  # type: ignore[union-attr]
    ]
    summary = trace.summary()
    assert (summary["steps"], summary["rows"], summary["tokens"]) == (20, 20, len(all_lam))
    assert summary["lam_mean"] == pytest.approx(statistics.fmean(all_lam), rel=1e-12)
    assert sum(summary["lam_hist"]) == len(all_lam)


def all_tokens(numbers: range) -> tuple[list[Fraction], list[Fraction]]:
    """λ and reverse KL of all tokens of `steps`, as exact fractions."""
    lam: list[Fraction] = []
    rkl: list[Fraction] = []
    for step in numbers:
        count = 1 + step % 5
        out = gated_kl(logits(step, count), logits(step + 100, count), gate=Gate(4, 1, -1, 2))
        assert out.lam is not None
        lam += map(Fraction, out.lam.flatten().tolist())
        rkl += map(Fraction, out.reverse_kl.flatten().tolist())
    return lam, rkl


def test_spread_and_weighted_mean_of_lam_over_the_run() -> None:
    trace = Trace()
    steps(trace, range(1, 41))
    lam, rkl = all_tokens(range(1, 41))
    mean = sum(lam) / len(lam)
    variance = sum((one - mean) ** 2 for one in lam) / len(lam)
    weighted = sum(one * weight for one, weight in zip(lam, rkl, strict=True)) / sum(rkl)
    summary = trace.summary()
    assert summary["lam_sd"] == pytest.approx(math.sqrt(variance), rel=1e-14)
    assert summary["lam_rkl_mean"] == pytest.approx(float(weighted), rel=1e-14)
    assert abs(summary["lam_rkl_mean"] - summary["lam_mean"]) > 1e-3  # they could be told apart


def test_a_small_spread_is_not_lost_in_rounding() -> None:
    values = [0.7 + 1e-9 * (i % 7) for i in range(60)]
    trace, static = Trace(), Trace()
    for one, lam in ((trace, values), (static, [0.1] * 60)):
        for step in range(6):
            one.begin(step)
            one.rollout(lengths=[10], ended=[True])
            one.add(with_lam(*lam[10 * step : 10 * step + 10]), rows=[0] * 10)
            one.record()
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = float(sum((value - mean) ** 2 for value in exact) / len(exact))
    assert trace.summary()["lam_sd"] == pytest.approx(math.sqrt(variance), rel=1e-6)
    assert static.summary()["lam_sd"] == 0.0


@pytest.mark.parametrize("rkl, expected", [([0.0, 0.0], None), ([3.0, 1.0], 0.35), ([math.inf, 1.0], None)])
def test_a_mean_by_reverse_kl_needs_a_reverse_kl(rkl: list[float], expected: float | None) -> None:
    out = with_lam(0.25, 0.65)
    out = LossOutput(**{**vars(out), "reverse_kl": torch.tensor([rkl], dtype=torch.float64)})
    trace = traced((out, [0, 0]))
    wanted = expected if expected is None else pytest.approx(expected)
    assert trace.record()["lam_rkl_mean"] == wanted
    assert trace.summary()["lam_rkl_mean"] == wanted


def test_a_run_without_lam_has_no_statistics_of_it() -> None:
    trace = traced((distillation_loss(logits(1), logits(2), objective=ToDi()), ROWS))
    trace.record()
    names = ("lam_mean", "lam_sd", "lam_rkl_mean", "lam_saturated", "lam_hist")
    assert [trace.summary()[name] for name in names] == [None] * 5


def test_a_trace_goes_on_exactly_from_its_state_in_json() -> None:
    whole, first, second = Trace(), Trace(), Trace()
    steps(whole, range(1, 31))
    steps(first, range(1, 14))
    state = json.loads(json.dumps(first.state()))
    steps(first, range(14, 17))  # past the checkpoint; must not reach into the state that was taken
    second.restore(state)
    steps(second, range(14, 31))
    assert repr(second.summary()) == repr(whole.summary())
    assert second.state() == whole.state()
    older = {name: value for name, value in state.items() if name != "lam_squares"}
    with pytest.raises(UsageError, match="state of a trace") as caught:
        Trace().restore(older)
    assert "remove the run's checkpoints" in caught.value.instead


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
    return kappa_share([kappa_squares(*args, **options)])


def test_kappa_share_does_not_depend_on_how_tokens_are_divided() -> None:
    gate, student, teacher = Gate(4, 2, -1.5, 2), logits(1)[0], logits(2)[0]
    u = loss(gate).u
    assert u is not None
    whole = share_of(student, teacher, gate, inputs=LossInputs(segment_ids=torch.tensor([ROWS]), total_tokens=1.0))
    parts = []
    for span in (slice(0, 1), slice(1, 4), slice(4, 6)):
        inputs = LossInputs(u=u[:, span], total_tokens=1.0)
        parts.append(kappa_squares(student[span], teacher[span], gate, inputs=inputs))
    # a share of 1e-4 is the difference of two float32 gradients that agree in their first four digits
    assert kappa_share(parts) == pytest.approx(whole, rel=1e-3)


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


def test_a_token_record_shows_a_row_and_both_models_first_choices() -> None:
    out = loss(Gate(4, 1, -1, 2))
    trace = traced((out, ROWS))
    student = torch.full((2, VOCAB), -20.0)
    student[0, 3], student[0, 5], student[1, 7] = 1.0, 0.0, 0.0
    record = token_record(
        step=3,
        row=2,
        text="a tweet",
        gold="joy",
        label=None,
        response=[3, 7],
        ended=False,
        values=trace.row(2),
        student_top=top_tokens(student, 2),
        teacher_top=top_tokens(logits(2)[0, 4:], 2),
        token_text=lambda token: f"<{token}>",
        more={"source": "student"},
    )
    assert record["tokens"] == ["<3>", "<7>"]
    assert record["ids"] == [3, 7]
    assert record["student_top"][0] == [["<3>", pytest.approx(0.731059)], ["<5>", pytest.approx(0.268941)]]
    assert record["student_top"][1][0] == ["<7>", pytest.approx(1.0)]
    best = logits(2)[0, 4:].softmax(-1)
    assert [one[0][0] for one in record["teacher_top"]] == [f"<{int(token)}>" for token in best.argmax(-1)]
    assert record["values"]["lam"] == pytest.approx(out.lam[0, 4:].tolist(), rel=1e-5)  # type: ignore[index]
    assert (record["step"], record["row"], record["gold"], record["label"], record["ended"], record["source"]) == (
        *(3, 2, "joy", None, False),
        "student",
    )
    assert len(encode(record)) < 1500
    for wrong in ({"response": [3]}, {"student_top": top_tokens(student)[:1]}, {"values": {"lam": [0.5]}}):
        with pytest.raises(UsageError, match="each token"):
            token_record(
                **{
                    "step": 1,
                    "row": 0,
                    "text": "",
                    "gold": "",
                    "label": "",
                    "response": [3, 7],
                    "ended": True,
                    "values": trace.row(2),
                    "student_top": top_tokens(student),
                    "teacher_top": top_tokens(student),
                    "token_text": str,
                    **wrong,
                }
            )


def test_first_choices_are_in_order_and_ties_go_to_the_smaller_id() -> None:
    values = torch.tensor([[0.1, 0.3, 0.1, 0.1, 0.4], [0.2, 0.2, 0.2, 0.2, 0.2]]).log()
    assert [[token for token, _ in one] for one in top_tokens(values, 3)] == [[4, 1, 0], [0, 1, 2]]
    assert len(top_tokens(values, 9)[0]) == 5
    known = TeacherTopK(ids=torch.tensor([[[7, 2, 9]]]), log_probs=torch.tensor([[[0.2, 0.5, 0.2]]]).log())
    assert top_tokens(known, 2) == [[(2, pytest.approx(0.5)), (7, pytest.approx(0.2))]]


def test_which_steps_keep_their_tokens() -> None:
    assert [step for step in range(1, 7) if due(step, every=1)] == [1, 2, 3, 4, 5, 6]
    assert [step for step in range(1, 7) if due(step, every=2)] == [1, 3, 5]
    assert not any(due(step, every=0) for step in range(1, 7))
