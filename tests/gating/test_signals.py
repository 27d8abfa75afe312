"""Signals: h, u and gap at their edges, the shipped extras, and a signal of the user's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gatespace import Gate, fused_gated_kl, gated_kl, signals
from gatespace.errors import UsageError
from gatespace.gating import Gated, StudentTopK, distillation_loss, fused_distillation_loss
from gatespace.gating.vocabulary import top_k_overlap

from . import oracle
from .compare import assert_close, assert_matches, fixed, leaf, numbers
from .test_methods import drift, world

INF = math.inf
LN2 = math.log(2)


# ---------------------------------------------------------------------------------------------- h


@pytest.mark.parametrize(
    ("logits", "top_k", "h"),
    [
        pytest.param([0.0, -INF, -INF, -INF], 3, 0.0, id="one-hot by -inf"),
        pytest.param([0.0, -800.0, -900.0, -1000.0], 3, 0.0, id="one-hot by underflow"),
        pytest.param([1e4, -1e4, -1e4, -1e4], 4, 0.0, id="extreme logits"),
        pytest.param([3.0] * 10, 8, 1.0, id="uniform"),
        pytest.param([3.0] * 10, 10, 1.0, id="uniform, K = V"),
        pytest.param([1.0, 2.0, 0.5], 1, 0.0, id="K = 1"),
        pytest.param([5.0, 5.0, *[-INF] * 8], 8, LN2 / math.log(8), id="two-way tie, K = 8"),
        pytest.param([5.0, 5.0, *[-INF] * 14], 16, LN2 / math.log(16), id="two-way tie, K = 16"),
        pytest.param([5.0, 5.0, *[-INF] * 8], 5, LN2 / math.log(5), id="two-way tie, K = 5"),
        pytest.param([5.0, 5.0, -INF], 2, 1.0, id="two-way tie, K = 2"),
        pytest.param([-INF] * 5, 3, 0.0, id="all -inf"),
        pytest.param([-INF, 0.0, -INF], 3, 0.0, id="one finite, K = V"),
        pytest.param(np.log([0.5, 0.25, 0.25]), 3, 1.5 * LN2 / math.log(3), id="halves and quarters"),
        pytest.param(np.log([0.4, 0.4, 0.2]), 2, 1.0, id="what is outside the top K is not seen"),
    ],
)
def test_h_at_its_edges(logits: list[float], top_k: int, h: float) -> None:
    value = signals.teacher_entropy(fixed(logits), top_k=top_k)
    assert value.shape == ()
    assert_close(value, h, atol=1e-12)
    assert 0.0 <= float(value) <= 1.0


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [
        ("top_k", LN2 / LN2),
        ("full", (0.8 * -math.log(0.4) + 0.2 * -math.log(0.2)) / math.log(3)),
        ("bucket", (0.8 * -math.log(0.4) + 0.2 * -math.log(0.2)) / math.log(3)),
    ],
)
def test_h_variants_by_hand(entropy: str, expected: float) -> None:
    assert_close(signals.teacher_entropy(fixed(np.log([0.4, 0.2, 0.4])), top_k=2, entropy=entropy), expected)


@pytest.mark.parametrize("entropy", ["top_k", "full", "bucket"])
@pytest.mark.parametrize("top_k", [1, 2, 5, 11])
def test_h_matches_the_definition(entropy: str, top_k: int) -> None:
    teacher = np.random.default_rng(0).normal(size=(3, 4, 11)) * 2
    expected = np.array([[oracle.teacher_entropy(row, top_k, entropy) for row in rows] for rows in teacher])
    assert_close(signals.teacher_entropy(fixed(teacher), top_k=top_k, entropy=entropy), expected)


def test_full_entropy_of_one_hot_and_uniform() -> None:
    assert_close(signals.teacher_entropy(fixed([0.0, -INF, -INF]), top_k=2, entropy="full"), 0.0, atol=1e-12)
    assert_close(signals.teacher_entropy(fixed([2.0] * 7), top_k=2, entropy="full"), 1.0)
    assert_close(signals.teacher_entropy(fixed([2.0] * 7), top_k=6, entropy="bucket"), 1.0)


def test_h_never_leaves_the_unit_interval_in_float32() -> None:
    h = signals.teacher_entropy(torch.zeros(64, 50_000), top_k=8)
    assert float(h.max()) <= 1.0
    assert_close(h, np.ones(64), rtol=1e-6)


# ---------------------------------------------------------------------------------------------- u


@pytest.mark.parametrize("entropy", ["top_k", "full", "bucket"])
@pytest.mark.parametrize(
    ("mask", "segment_ids"),
    [
        (None, None),
        # right-padded, left-padded, with a hole
        ([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 0]], None),
        # packed rows; equal ids in different rows are different samples
        ([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0], [1] * 6], [[0, 0, 0, 1, 1, 1], [4, 4, 2, 2, 2, 2], [0] * 6]),
    ],
)
def test_u_is_h_of_the_first_masked_token_of_each_sample(mask: Any, segment_ids: Any, entropy: str) -> None:
    rng = np.random.default_rng(3)
    teacher = rng.normal(size=(3, 6, 9)) * 2
    mask, segments = np.ones((3, 6)) if mask is None else np.array(mask), segment_ids and np.array(segment_ids)
    given = {"mask": torch.as_tensor(mask), "segment_ids": segment_ids and torch.tensor(segment_ids)}
    out, _ = run(rng.normal(size=(3, 6, 9)), teacher, Gate.named("G4"), top_k=4, entropy=entropy, **given)
    assert_close(out.u, oracle.prompt_entropy(teacher, mask, 4, entropy, segments))
    assert len({float(u) for u in out.u.flatten()}) > 2


# ---------------------------------------------------------------------------------------------- gap


def test_gap_is_one_minus_the_students_probability_of_the_teachers_choice() -> None:
    rng = np.random.default_rng(5)
    student, teacher = rng.normal(size=(2, 3, 7)), rng.normal(size=(2, 3, 7))
    z = leaf(student)
    value = signals.gap(z, fixed(teacher))
    terms = [[oracle.gap(student[b, t], teacher[b, t]) for t in range(3)] for b in range(2)]
    assert_close(value, [[term.value for term in row] for row in terms])
    value.sum().backward()
    assert_close(z.grad, np.array([[term.grad for term in row] for row in terms]))


@pytest.mark.parametrize(
    ("teacher", "choice"),
    [([1.0, 3.0, 3.0, 0.0], 1), ([2.0, 2.0, 2.0, 2.0], 0), ([-INF, -INF, 0.0, 0.0], 2), ([0.0, 1.0, 2.0, 2.0], 2)],
)
def test_ties_of_the_teachers_choice_go_to_the_lowest_id(teacher: list[float], choice: int) -> None:
    student = np.log([0.1, 0.2, 0.3, 0.4])
    assert_close(signals.gap(fixed(student), fixed(teacher)), 1 - [0.1, 0.2, 0.3, 0.4][choice])


def test_gap_near_one_and_near_zero() -> None:
    student = fixed([[50.0, 0.0], [-50.0, 0.0]])
    teacher = fixed([[1.0, 0.0], [1.0, 0.0]])
    assert_close(signals.gap(student, teacher), [math.exp(-50) / (1 + math.exp(-50)), 1.0], rtol=1e-6, atol=1e-15)


# ---------------------------------------------------------------------------------------------- shipped extras


def run(student: np.ndarray, teacher: np.ndarray, gate: Gate, **options: Any) -> tuple[Any, np.ndarray]:
    z = leaf(student)
    out = gated_kl(z, fixed(teacher), gate=gate, **options)
    out.loss.backward()
    assert z.grad is not None
    return out, z.grad.numpy()


EXTRAS = ["student_entropy", "log_ratio", "jsd", "position"]


@pytest.mark.parametrize("stop_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", EXTRAS)
def test_shipped_signal_in_value_and_gradient(name: str, temperature: float, stop_gradient: bool) -> None:
    rng = np.random.default_rng(6)
    student, teacher = rng.normal(size=(2, 4, 7)) * 1.5, rng.normal(size=(2, 4, 7)) * 1.5
    mask = np.array([[0, 1, 1, 1], [1, 0, 0, 0]])
    options = {"top_k": 3, "temperature": temperature, "stop_gradient": stop_gradient}
    out, grad = run(student, teacher, Gate(1, -1, 0.5, 2, extra={name: 1.5}), mask=torch.as_tensor(mask), **options)
    expected = oracle.gated(student, teacher, abcd=(1, -1, 0.5, 2), extra={name: 1.5}, mask=mask, **options)
    assert_matches(out, expected)
    assert_close(grad, expected.grad)


def test_all_shipped_signals_at_once_with_coefficients() -> None:
    rng = np.random.default_rng(7)
    student, teacher = rng.normal(size=(1, 3, 6)), rng.normal(size=(1, 3, 6))
    extra = {"jsd": 1.0, "log_ratio": -0.5, "position": 2.0, "student_entropy": -1.0}
    coefficients = leaf([1.0, 2.0, -0.5, 1.5, *(extra[name] for name in sorted(extra))])
    z = leaf(student)
    out = gated_kl(
        z, fixed(teacher), gate=Gate(9, 9, 9, 9, extra=dict.fromkeys(extra, 9.0)), top_k=3, coefficients=coefficients
    )
    out.loss.backward()
    expected = oracle.gated(student, teacher, abcd=(1, 2, -0.5, 1.5), extra=extra, top_k=3)
    assert_matches(out, expected)
    assert_close(z.grad, expected.grad)
    assert_close(coefficients.grad, expected.coefficient_grad)


@pytest.mark.parametrize(
    ("mask", "segment_ids", "position"),
    [
        ([[1, 1, 1, 1, 1]], None, [[0, 0.25, 0.5, 0.75, 1]]),
        ([[0, 0, 1, 1, 1]], None, [[0, 0, 0, 0.5, 1]]),
        ([[0, 0, 0, 1, 0]], None, [[0, 0, 0, 0, 0]]),
        ([[1, 1, 1, 1, 1]], [[0, 0, 0, 1, 1]], [[0, 0.5, 1, 0, 1]]),
        ([[0, 1, 1, 0, 1]], [[3, 3, 3, 3, 7]], [[0, 0, 1, 0, 0]]),
    ],
)
def test_position_runs_from_0_to_1_in_each_response(
    mask: list[list[int]], segment_ids: list[list[int]] | None, position: list[list[float]]
) -> None:
    rng = np.random.default_rng(8)
    out, _ = run(
        rng.normal(size=(1, 5, 4)),
        rng.normal(size=(1, 5, 4)),
        Gate(extra={"position": 1.0}),
        mask=torch.tensor(mask),
        segment_ids=None if segment_ids is None else torch.tensor(segment_ids),
        top_k=2,
    )
    assert_close(out.signals["position"], position)


def test_extra_signals_at_their_limits() -> None:
    teacher = np.array([[[0.0, 0.0, -40.0], [3.0, 0.0, -2.0]]])
    student = np.array([[[-40.0, -40.0, 0.0], [3.0, 0.0, -2.0]]])  # disjoint; equal
    gate = Gate(extra={"jsd": 1.0, "log_ratio": 1.0, "student_entropy": 1.0})
    out, grad = run(student, teacher, gate, top_k=3)
    assert_close(out.signals["jsd"], [[1.0, 0.0]], atol=1e-12)
    assert_close(out.signals["log_ratio"], [[40.0 - LN2, 0.0]], atol=1e-12)
    assert_close(out.signals["student_entropy"], [[0.0, oracle.teacher_entropy(student[0, 1], 3)]], atol=1e-12)
    assert np.isfinite(grad).all()


# ---------------------------------------------------------------------------------------------- of the response


def test_trust_drift_and_advantage_are_what_they_are_called() -> None:
    x = world(1)
    on = x.mask != 0
    ratio = np.take_along_axis(
        oracle.probabilities(x.teacher) / oracle.probabilities(x.student), x.sampled[..., None], -1
    )[..., 0]
    gate = Gate(c=0.3, extra={"advantage": 0.1, "drift": 2.0, "trust": -1.0})
    z = leaf(x.student)
    out = distillation_loss(z, fixed(x.teacher), objective=Gated(gate), inputs=x.inputs())
    out.loss.backward()
    expected = {"advantage": np.log(ratio), "drift": drift(x), "trust": np.minimum(ratio, 1.0)}
    for name, values in expected.items():
        assert_close(out.signals[name], np.where(on, values, 0.0))
    logit = 0.3 + sum(gate.extra[name] * values for name, values in expected.items())
    assert_close(numbers(out.lam)[on], 1 / (1 + np.exp(-logit[on])))
    stopped = leaf(x.student)  # the three are constants
    inputs = x.inputs()
    distillation_loss(
        stopped, fixed(x.teacher), objective=Gated(gate, stop_gradient=True), inputs=inputs
    ).loss.backward()
    assert torch.equal(z.grad, stopped.grad)
    alone = distillation_loss(
        fixed(x.student[:1]), fixed(x.teacher[:1]), objective=Gated(gate), inputs=_first_row(x).inputs()
    )
    assert torch.equal(alone.signals["drift"][0], out.signals["drift"][0])  # whatever is beside it


def _first_row(x: Any) -> Any:
    return type(x)(*(None if values is None else values[:1] for values in x))


def test_overlap_of_both_top_k() -> None:
    x = world(4)
    out = distillation_loss(fixed(x.student), fixed(x.teacher), objective=StudentTopK(), inputs=x.inputs(top_k=5))
    for bt in zip(*np.nonzero(x.mask), strict=True):
        s, t = oracle.probabilities(x.student[bt]), oracle.probabilities(x.teacher[bt])
        both = set(oracle.top_ids(s, 5)) & set(oracle.top_ids(t, 5))
        assert_close(out.signals["overlap"][bt], len(both) / 5, rtol=1e-6)
        assert_close(out.signals["overlap_mass"][bt], sum(s[v] for v in both))
    ids = torch.tensor([[4, 1, 9]])
    assert (top_k_overlap(ids, ids.flip(-1)).item(), top_k_overlap(ids, ids + 10).item()) == (1.0, 0.0)


def test_a_signal_of_all_tokens_must_be_named_for_the_prepass() -> None:
    @signals.register("rank_of_h", range=(0.0, 1.0))
    def rank(tokens: Any) -> torch.Tensor:
        every = signals.everywhere("h", tokens)
        return (every.argsort().argsort() / max(every.numel() - 1, 1)).to(tokens.dtype)[tokens.span]

    rng = np.random.default_rng(0)
    hidden, head = fixed(rng.normal(size=(1, 40, 6))), fixed(rng.normal(size=(23, 6)))
    gated = Gated(Gate(extra={"rank_of_h": 1.0}))
    try:
        with pytest.raises(UsageError, match="needed of all tokens"):
            fused_distillation_loss(hidden, head, hidden, head, objective=gated, chunk_mb=0.005)
    finally:
        signals.unregister("rank_of_h")


# ---------------------------------------------------------------------------------------------- a signal of one's own


@pytest.fixture
def second_choice() -> Iterator[str]:
    """Ten lines: a name, a function of the tokens, a range."""

    @signals.register("second_choice", range=(0, 1))
    def second_choice(tokens: Any) -> torch.Tensor:
        """The student's probability of the teacher's second choice."""
        ids, _ = tokens.teacher_top(2)
        return tokens.student_at(ids)[:, 1].exp()

    yield "second_choice"
    signals.unregister("second_choice")


def second_choice_by_definition(student: np.ndarray, teacher: np.ndarray, top_k: int) -> oracle.Term:
    s, y = oracle.probabilities(student), int(oracle.top_ids(oracle.probabilities(teacher), 2)[1])
    return oracle.Term(s[y], s[y] * (oracle.indicator(len(s), y) - s))


@pytest.mark.parametrize("stop_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_own_signal_plain_and_fused(second_choice: str, temperature: float, stop_gradient: bool) -> None:
    rng = np.random.default_rng(9)
    hidden, head = rng.normal(size=(2, 3, 5)), rng.normal(size=(8, 5))
    teacher_hidden, teacher_head = rng.normal(size=(2, 3, 4)), rng.normal(size=(8, 4))
    student, teacher = hidden @ head.T, teacher_hidden @ teacher_head.T
    mask = np.array([[0, 1, 1], [1, 1, 0]])
    gate = Gate(1, 0, -0.5, 1, extra={second_choice: 3.0})
    options = {"top_k": 3, "temperature": temperature, "stop_gradient": stop_gradient}
    expected = oracle.gated(
        student,
        teacher,
        abcd=gate.abcd,
        extra=gate.extra,
        mask=mask,
        signals={second_choice: second_choice_by_definition},
        **options,
    )
    out, grad = run(student, teacher, gate, mask=torch.as_tensor(mask), **options)
    assert_matches(out, expected)
    assert_close(grad, expected.grad)

    coefficients = leaf([*gate.abcd, 3.0])
    h, w = leaf(hidden), leaf(head)
    fused = fused_gated_kl(
        h,
        w,
        fixed(teacher_hidden),
        fixed(teacher_head),
        gate=gate,
        mask=torch.as_tensor(mask),
        coefficients=coefficients,
        chunk_mb=0.0005,
        **options,
    )
    fused.loss.backward()
    assert_matches(fused, expected)
    assert_close(h.grad, expected.grad @ head)
    assert_close(w.grad, np.einsum("btv,bth->vh", expected.grad, hidden))
    assert_close(coefficients.grad, expected.coefficient_grad)


def test_own_signal_moves_lambda(second_choice: str) -> None:
    rng = np.random.default_rng(10)
    student, teacher = rng.normal(size=(1, 2, 5)), rng.normal(size=(1, 2, 5))
    up, _ = run(student, teacher, Gate(extra={second_choice: 4.0}), top_k=2)
    down, _ = run(student, teacher, Gate(extra={second_choice: -4.0}), top_k=2)
    assert torch.all(up.lam > 0.5)
    assert torch.all(down.lam < 0.5)
    assert_close(up.lam + down.lam, np.ones((1, 2)))


def test_registry_lists_what_is_there(second_choice: str) -> None:
    assert set(signals.names()) >= {"h", "u", "gap", *EXTRAS, second_choice}
    signals.get(second_choice)
    for name in EXTRAS:
        signals.get(name)


def test_unregistered_signal_is_gone() -> None:
    @signals.register("for_a_moment", range=(0, 1))
    def for_a_moment(tokens: Any) -> torch.Tensor:
        return torch.zeros(tokens.count, dtype=torch.float64)

    signals.unregister("for_a_moment")
    assert "for_a_moment" not in signals.names()
    with pytest.raises(UsageError, match="for_a_moment"):
        run(np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), Gate(extra={"for_a_moment": 1.0}), top_k=2)


@pytest.mark.parametrize("name", ["h", "u", "gap", "jsd", "position"])
def test_a_name_is_registered_once(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        signals.register(name, range=(0, 1))(lambda tokens: torch.zeros(tokens.count))


@pytest.mark.parametrize(
    ("name", "nearest"), [("student_entrpy", "student_entropy"), ("jds", "jsd"), ("postion", "position")]
)
def test_an_unknown_signal_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{nearest}'"):
        signals.get(name)
    with pytest.raises(UsageError, match=f"did you mean '{nearest}'"):
        run(np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), Gate(extra={name: 1.0}), top_k=2)


def test_a_signal_of_the_wrong_shape_is_an_error() -> None:
    @signals.register("too_long", range=(0, 1))
    def too_long(tokens: Any) -> torch.Tensor:
        return torch.zeros(tokens.count + 1, dtype=torch.float64)

    try:
        with pytest.raises(UsageError, match="too_long"):
            run(np.zeros((1, 2, 3)), np.zeros((1, 2, 3)), Gate(extra={"too_long": 1.0}), top_k=2)
    finally:
        signals.unregister("too_long")


def test_what_a_signal_may_ask(second_choice: str) -> None:
    """Every question of `Tokens`, answered for the masked tokens in row-major order."""
    rng = np.random.default_rng(11)
    student, teacher = rng.normal(size=(2, 3, 6)), rng.normal(size=(2, 3, 6))
    mask = np.array([[0, 1, 1], [1, 1, 1]])
    seen: dict[str, Any] = {}

    @signals.register("asks", range=(0, 1))
    def asks(tokens: Any) -> torch.Tensor:
        seen.update(
            count=tokens.count,
            position=tokens.position,
            length=tokens.length,
            choice=tokens.teacher_choice,
            top=tokens.teacher_top(2),
            student_top=tokens.student_top(3),
            at=tokens.teacher_at(torch.zeros(tokens.count, 1, dtype=torch.long)),
            student_at=tokens.student_at(torch.ones(tokens.count, 1, dtype=torch.long)),
            nats=tokens.teacher.entropy,
        )
        return torch.zeros(tokens.count, dtype=torch.float64)

    try:
        run(student, teacher, Gate(extra={"asks": 1.0}), mask=torch.as_tensor(mask), top_k=2)
    finally:
        signals.unregister("asks")
    s = oracle.probabilities(student)[mask == 1]
    t = oracle.probabilities(teacher)[mask == 1]
    assert seen["count"] == 5
    assert seen["position"].tolist() == [0, 1, 0, 1, 2]
    assert seen["length"].tolist() == [2, 2, 3, 3, 3]
    assert seen["choice"].tolist() == t.argmax(-1).tolist()
    top = np.stack([oracle.top_ids(row, 2) for row in t])
    assert seen["top"][0].tolist() == top.tolist()
    assert_close(seen["top"][1], np.log(np.take_along_axis(t, top, -1)))
    student_top = np.stack([oracle.top_ids(row, 3) for row in s])
    assert seen["student_top"][0].tolist() == student_top.tolist()
    assert_close(seen["student_top"][1], np.log(np.take_along_axis(s, student_top, -1)))
    assert_close(seen["at"], np.log(t[:, :1]))
    assert_close(seen["student_at"], np.log(s[:, 1:2]))
    assert_close(seen["nats"], [oracle.shannon(row) for row in t])
