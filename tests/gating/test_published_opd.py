"""Published rules that look beyond a token's two distributions: at its response, at all tokens, at who wrote it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from gatespace import Gate, gated_kl
from gatespace.errors import UsageError
from gatespace.gating import (
    IWOPD,
    TAID,
    TIP,
    VOPD,
    DistiLLM2,
    Gated,
    LossInputs,
    RevisitingOPD,
    SampledReverseKL,
    Static,
    StudentTopK,
    distillation_loss,
    fused_distillation_loss,
    objective,
    signals,
)
from gatespace.gating.vocabulary import top_k_overlap

from . import oracle
from .compare import assert_close, fixed, leaf, numbers, top_k_of
from .strategies import distinct_logits

B, T, V, H, HT = 3, 6, 23, 6, 4


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Logits of both sides, and inputs in which responses have holes, differ in length and share rows."""
    rng = np.random.default_rng(seed)
    mask = np.ones((B, T), dtype=np.int64)
    mask[0, 2] = mask[1, 5] = mask[2, 0] = 0
    segments = np.zeros((B, T), dtype=np.int64)
    segments[1, 3:] = 1  # two responses in one row
    inputs = {
        "mask": torch.as_tensor(mask),
        "segment_ids": torch.as_tensor(segments),
        "sampled": torch.as_tensor(rng.integers(0, V, size=(B, T))),
        "noise": torch.as_tensor(rng.random((B, T))),
        "from_teacher": torch.tensor([0, 1, 0]),
    }
    return rng.normal(size=(B, T, V)) * 1.5, rng.normal(size=(B, T, V)) * 1.5, inputs


def run(student: np.ndarray, teacher: Any, method: Any, **inputs: Any) -> tuple[Any, np.ndarray]:
    z = leaf(student)
    teacher = fixed(teacher) if isinstance(teacher, np.ndarray) else teacher
    out = distillation_loss(z, teacher, objective=method, inputs=LossInputs(**inputs))
    out.loss.backward()
    assert z.grad is not None
    return out, z.grad.numpy()


def responses(inputs: dict[str, Any]) -> list[list[tuple[int, int]]]:
    return oracle.samples(numbers(inputs["mask"]) != 0, numbers(inputs["segment_ids"]))


def drift(student: np.ndarray, teacher: np.ndarray, inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(B, T) A and drift by their definitions, response by response."""
    advantage, found = np.zeros((B, T)), np.zeros((B, T))
    for places in responses(inputs):
        for bt in places:
            y = int(inputs["sampled"][bt])
            s, t = oracle.probabilities(student[bt]), oracle.probabilities(teacher[bt])
            advantage[bt] = math.log(t[y]) - math.log(s[y])
        size = [abs(advantage[bt]) for bt in places]
        for i, bt in enumerate(places):
            found[bt] = sum(size[:i]) / sum(size)
    return advantage, found


# ---------------------------------------------------------------------------------------------- signals


def test_trust_drift_and_advantage_are_what_they_are_called() -> None:
    student, teacher, inputs = batch(1)
    advantage, expected = drift(student, teacher, inputs)
    gate = Gate(c=0.3, extra={"advantage": 0.1, "drift": 2.0, "trust": -1.0})
    out, grad = run(student, teacher, Gated(gate), **inputs)
    on = numbers(inputs["mask"]) != 0
    assert_close(out.signals["advantage"], advantage)
    assert_close(out.signals["drift"], expected)
    assert_close(out.signals["trust"], np.where(on, np.minimum(np.exp(advantage), 1.0), 0.0))
    lam = 1 / (1 + np.exp(-(0.3 + 0.1 * advantage + 2 * expected - np.where(on, np.minimum(np.exp(advantage), 1), 0))))
    assert_close(numbers(out.lam)[on], lam[on])

    def row(s: np.ndarray, t: np.ndarray, bt: tuple[int, int]) -> oracle.Term:
        f, r = oracle.forward_kl(s, t), oracle.reverse_kl(s, t)
        return oracle.Term(
            lam[bt] * r.value + (1 - lam[bt]) * f.value, lam[bt] * r.grad + (1 - lam[bt]) * f.grad
        )  # λ is a constant: its signals are

    loss, _, expected_grad = oracle.batch_of(student, teacher, row, mask=on)
    assert_close(out.loss, loss)
    assert_close(grad, expected_grad)


def test_drift_starts_at_0_and_does_not_depend_on_what_is_beside_it() -> None:
    student, teacher, inputs = batch(2)
    gate = Gated(Gate(extra={"drift": 1.0}))
    whole, _ = run(student, teacher, gate, **inputs)
    firsts = [places[0] for places in responses(inputs)]
    assert [float(whole.signals["drift"][bt]) for bt in firsts] == [0.0] * len(firsts)
    alone, _ = run(student[1:2], teacher[1:2], gate, **{name: values[1:2] for name, values in inputs.items()})
    assert torch.equal(alone.signals["drift"][0], whole.signals["drift"][1])


def test_agreement_has_no_drift() -> None:
    student, _, inputs = batch(3)
    out, _ = run(student, student, Gated(Gate(extra={"drift": 1.0, "trust": 1.0})), **inputs)
    assert float(out.signals["drift"].abs().max()) < 1e-6
    assert_close(out.signals["trust"], inputs["mask"])


def test_overlap_of_both_top_k() -> None:
    student, teacher, inputs = batch(4)
    out, _ = run(student, teacher, StudentTopK(), **inputs, top_k=5)
    for bt in zip(*np.nonzero(numbers(inputs["mask"])), strict=True):
        s, t = oracle.probabilities(student[bt]), oracle.probabilities(teacher[bt])
        both = set(oracle.top_ids(s, 5)) & set(oracle.top_ids(t, 5))
        assert_close(out.signals["overlap"][bt], len(both) / 5, rtol=1e-6)
        assert_close(out.signals["overlap_mass"][bt], sum(s[v] for v in both))
    ids = torch.tensor([[4, 1, 9]])
    assert top_k_overlap(ids, ids.flip(-1)).item() == 1.0
    assert top_k_overlap(ids, ids + 10).item() == 0.0


def test_a_signal_of_all_tokens_must_be_named_ahead() -> None:
    @signals.register("rank_of_h", range=(0.0, 1.0))
    def rank(tokens: Any) -> torch.Tensor:
        every = signals.everywhere("h", tokens)
        return (every.argsort().argsort() / max(every.numel() - 1, 1)).to(tokens.dtype)[tokens.span]

    rng = np.random.default_rng(0)
    hidden, head = fixed(rng.normal(size=(1, 40, H))), fixed(rng.normal(size=(V, H)))
    try:
        with pytest.raises(UsageError, match="needed of all tokens"):
            fused_distillation_loss(
                hidden, head, hidden, head, objective=Gated(Gate(extra={"rank_of_h": 1.0})), chunk_mb=0.005
            )
    finally:
        signals.unregister("rank_of_h")


# ---------------------------------------------------------------------------------------------- support: student


@pytest.mark.parametrize("k", [1, 5, V])
def test_support_student_in_value_and_gradient(k: int) -> None:
    student, teacher, inputs = batch(5)
    out, grad = run(student, teacher, Static(0.3, "student", k), mask=inputs["mask"])

    def row(s: np.ndarray, t: np.ndarray, _: tuple[int, int]) -> oracle.Term:
        f, r = oracle._bucket(s, t, np.isin(np.arange(V), oracle.top_ids(s, k)))
        return oracle.Term(0.3 * r.value + 0.7 * f.value, 0.3 * r.grad + 0.7 * f.grad)

    loss, per_token, expected = oracle.batch_of(student, teacher, row, mask=numbers(inputs["mask"]))
    assert_close(out.loss, loss)
    assert_close(out.per_token, per_token)
    assert_close(grad, expected)
    full, _ = run(student, teacher, Static(0.3), mask=inputs["mask"])
    for name in ("forward_kl", "reverse_kl"):
        assert (numbers(getattr(full, name)) - numbers(getattr(out, name)) > -1e-12).all()


def test_forms_of_student_top_k_that_are_divergences_are_not_negative() -> None:
    """The student has little on its top-1, the teacher more; the rest is out of sight."""
    student, teacher = np.log([[[0.4, 0.3, 0.3]]]), np.log([[[0.6, 0.2, 0.2]]])
    loss = {
        form: float(run(student, teacher, StudentTopK(top_k=1, form=form), top_k=2)[0].loss.detach())
        for form in ("release", "equation", "bucket")
    }
    assert loss["release"] < 0 == loss["equation"] < loss["bucket"]


@pytest.mark.parametrize("form", ["release", "equation"])
def test_no_id_in_both_top_k_is_nothing_to_learn_from(form: str) -> None:
    student, teacher = np.log([[[0.5, 0.3, 0.2]]]), np.log([[[0.2, 0.3, 0.5]]])
    out, grad = run(student, teacher, StudentTopK(top_k=1, ids="intersection", form=form), top_k=2)
    assert float(out.loss.detach()) == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("form", ["release", "equation"])
def test_a_teacher_that_forbids_all_of_the_students_top_k(form: str) -> None:
    student, teacher, _ = batch(7)
    np.put_along_axis(teacher, np.argsort(-student, -1)[..., :2], -np.inf, -1)
    with pytest.raises(UsageError, match="reverse KL is infinite"):
        run(student, teacher, StudentTopK(top_k=2, form=form))


def test_ids_that_the_student_chooses_need_more_than_a_top_k_teacher() -> None:
    student, teacher, _ = batch(6)
    with pytest.raises(UsageError, match="outside its top-K"):
        run(student, top_k_of(teacher, 8), StudentTopK(top_k=8))
    out, _ = run(student, top_k_of(teacher, 8), StudentTopK(top_k=8, ids="teacher", form="bucket"))
    bucket, _ = run(student, top_k_of(teacher, 8), Static(1.0, "bucket"))
    assert_close(out.loss, bucket.loss)


def test_forbidden_ids_belong_to_the_tail() -> None:
    student, teacher, _ = batch(7)
    teacher[..., :3] = -np.inf
    out, grad = run(student, teacher, StudentTopK(top_k=20, form="bucket"))
    assert np.isfinite(numbers(out.per_token)).all()
    assert np.isfinite(grad).all()


# ---------------------------------------------------------------------------------------------- IW-OPD, vOPD


@pytest.mark.parametrize("off_policy", [False, True])
def test_iw_opd(off_policy: bool) -> None:
    student, teacher, inputs = batch(8)
    _, share = drift(student, teacher, inputs)
    log_old = np.log(np.random.default_rng(0).uniform(0.02, 0.6, size=(B, T)))
    more = {"sampled_log_probs": fixed(log_old)} if off_policy else {}
    out, grad = run(student, teacher, IWOPD(gamma=0.7), **inputs, **more)

    def row(s: np.ndarray, t: np.ndarray, bt: tuple[int, int]) -> oracle.Term:
        old = float(log_old[bt]) if off_policy else None
        weight = 1 + 0.7 * (1 - share[bt])
        value, slope = oracle.sampled_reverse_kl(s, t, y=int(inputs["sampled"][bt]), log_old=old)
        return oracle.Term(weight * value, weight * slope)

    loss, per_token, expected = oracle.batch_of(student, teacher, row, mask=numbers(inputs["mask"]))
    assert_close(out.loss, loss)
    assert_close(out.per_token, per_token)
    assert_close(grad, expected)
    weights = numbers(out.weight)[numbers(inputs["mask"]) != 0]
    assert weights.min() >= 1.0
    assert weights.max() == pytest.approx(1.7)


def test_vopd_off_policy() -> None:
    student, teacher, inputs = batch(9)
    log_old = np.log(np.random.default_rng(0).uniform(0.02, 0.6, size=(B, T)))
    out, grad = run(student, teacher, VOPD(), **inputs, sampled_log_probs=fixed(log_old))

    def row(s: np.ndarray, t: np.ndarray, bt: tuple[int, int]) -> oracle.Term:
        return oracle.vopd(s, t, y=int(inputs["sampled"][bt]), log_old=float(log_old[bt]))

    loss, _, expected = oracle.batch_of(student, teacher, row, mask=numbers(inputs["mask"]))
    assert_close(out.loss, loss)
    assert_close(grad, expected)


@given(distinct_logits(5), distinct_logits(5))
def test_vopd_has_the_mean_gradient_of_reverse_kl_and_less_noise(student: np.ndarray, teacher: np.ndarray) -> None:
    s, t = oracle.probabilities(student), oracle.probabilities(teacher)
    squares = {}
    for method in (VOPD(), SampledReverseKL()):
        grads = [
            run(student[None, None], teacher[None, None], method, sampled=torch.tensor([[y]]), top_k=2)[1][0, 0]
            for y in range(5)
        ]
        mean = sum(p * grad for p, grad in zip(s, grads, strict=True))
        np.testing.assert_allclose(mean, oracle.reverse_kl(s, t).grad, atol=1e-10)
        factors = [grad[y] / (1 - s[y]) for y, grad in enumerate(grads)]  # of ∇log s(y)
        squares[method.name] = sum(p * factor**2 for p, factor in zip(s, factors, strict=True))
    assert squares["vopd"] <= squares["sampled_reverse_kl"] + 1e-12


def test_noise_of_the_gradient_with_and_without_the_baseline() -> None:
    """A teacher that is far away: k is large for all tokens, and its mean is most of it."""
    student, teacher, _ = batch(19)
    teacher[0, 0, student[0, 0].argmax()] -= 6
    s = oracle.probabilities(student[0, 0])
    noise = {}
    for method in (VOPD(), SampledReverseKL()):
        grads = np.array(
            [run(student[:1, :1], teacher[:1, :1], method, sampled=torch.tensor([[y]]))[1][0, 0] for y in range(V)]
        )
        noise[method.name] = float((s[:, None] * (grads - s @ grads) ** 2).sum())
    assert noise["vopd"] < 0.8 * noise["sampled_reverse_kl"]


# ---------------------------------------------------------------------------------------------- TIP, Revisiting OPD


def kept(student: np.ndarray, teacher: np.ndarray, method: Any, **inputs: Any) -> np.ndarray:
    return numbers(run(student, teacher, method, **inputs)[0].weight)


def test_tip_keeps_a_share_and_its_loss_is_reverse_kl() -> None:
    student, teacher, inputs = batch(10)
    out, grad = run(student, teacher, TIP(), **inputs)
    on = numbers(inputs["mask"]) != 0
    weight = numbers(out.weight)
    assert set(weight[on].tolist()) == {0.0, 1.0}
    assert weight.sum() == on.sum() // 2

    def row(s: np.ndarray, t: np.ndarray, bt: tuple[int, int]) -> oracle.Term:
        value, slope = oracle.reverse_kl(s, t)
        return oracle.Term(weight[bt] * value, weight[bt] * slope)

    loss, per_token, expected = oracle.batch_of(student, teacher, row, mask=on)
    assert_close(out.loss, loss)
    assert_close(out.per_token, per_token)
    assert_close(grad, expected)


@pytest.mark.parametrize(("alpha", "gamma"), [(1.0, 0.0), (0.5, 1.0)])
def test_tip_draws_without_replacement_by_weight(alpha: float, gamma: float) -> None:
    """How often each pair of three tokens is kept, against the probabilities of drawing them one after the other."""
    rng = np.random.default_rng(11)
    student, teacher = rng.normal(size=(1, 3, V)) * [[[0.3], [2.0], [4.0]]], rng.normal(size=(1, 3, V))
    weights = []
    for i in range(3):
        s, t = oracle.probabilities(student[0, i]), oracle.probabilities(teacher[0, i])
        entropy, jsd = oracle.shannon(s) / math.log(V), oracle.jsd(s, t).value / math.log(2)
        weights.append(entropy**alpha * jsd**gamma)
    weights = np.array(weights) / sum(weights)
    pairs = {frozenset(pair): 0.0 for pair in itertools.combinations(range(3), 2)}
    for first, second in itertools.permutations(range(3), 2):
        pairs[frozenset((first, second))] += weights[first] * weights[second] / (1 - weights[first])
    found = dict.fromkeys(pairs, 0)
    draws, method = 500, TIP(share=0.67, alpha=alpha, gamma=gamma)
    for noise in rng.random((draws, 1, 3)):  # a draw is over the tokens of a call
        found[frozenset(np.nonzero(kept(student, teacher, method, noise=fixed(noise), top_k=2)[0])[0].tolist())] += 1
    for pair, probability in pairs.items():
        assert found[pair] / draws == pytest.approx(probability, abs=4 * math.sqrt(0.25 / draws))


def test_tip_needs_random_numbers() -> None:
    student, teacher, _ = batch(12)
    with pytest.raises(UsageError, match="random numbers are needed"):
        run(student, teacher, TIP())


def test_revisiting_opd_keeps_the_tokens_of_highest_entropy() -> None:
    student, teacher, inputs = batch(13)
    on = numbers(inputs["mask"]) != 0
    entropies = np.where(on, [[oracle.shannon(oracle.probabilities(row)) for row in rows] for rows in student], -1.0)
    weight = kept(student, teacher, RevisitingOPD(top_k=5, share=0.2), **inputs)
    count = int(on.sum() * 0.2)
    assert weight.sum() == count
    assert entropies[weight == 1].min() >= np.sort(entropies.reshape(-1))[-count]


@pytest.mark.parametrize("method", [TIP, RevisitingOPD])
@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_lies_between_0_and_1(method: Any, share: float) -> None:
    with pytest.raises(UsageError, match="share of"):
        method(share=share)


# ---------------------------------------------------------------------------------------------- DistiLLM-2


def test_distillm2_by_who_wrote_the_response() -> None:
    student, teacher, inputs = batch(14)
    out, grad = run(student, teacher, DistiLLM2(alpha=0.2), **inputs)

    def row(s: np.ndarray, t: np.ndarray, bt: tuple[int, int]) -> oracle.Term:
        return oracle.skl(s, t, 0.2) if bt[0] == 1 else oracle.srkl(s, t, 0.2, True)

    loss, per_token, expected = oracle.batch_of(student, teacher, row, mask=numbers(inputs["mask"]))
    assert_close(out.loss, loss)
    assert_close(out.per_token, per_token)
    assert_close(grad, expected)
    with pytest.raises(UsageError, match="who wrote the responses"):
        run(student, teacher, DistiLLM2())


# ---------------------------------------------------------------------------------------------- TAID


def by_definition(losses: list[float], steps: int) -> list[float]:
    """τ of every step, as the authors' code has it."""
    tau, mean, last, found = 0.4, 0.0, math.inf, [0.4]
    for step, loss in enumerate(losses):
        if not math.isinf(last):
            mean = 0.99 * mean + 0.01 * (last - loss) / (last + 1e-15)
            target = 0.4 + 0.6 * step / steps
            tau = min(1.0, max(target, tau + 5e-4 / (1 + math.exp(-mean)) * (1 - tau)))
        last = loss
        found.append(tau)
    return found


def test_schedule_of_taid() -> None:
    rng = np.random.default_rng(15)
    losses = (np.exp(-np.arange(40) / 15) + rng.normal(size=40) * 0.02).tolist()
    method = TAID()
    found = [method.tau]
    for step, loss in enumerate(losses):
        method.advance(loss, step / 200)
        found.append(method.tau)
    np.testing.assert_allclose(found, by_definition(losses, 200), rtol=1e-12)
    assert found == sorted(found)
    line = TAID(adaptive=False)
    for step, loss in enumerate(losses):
        line.advance(loss, step / 40)
    assert line.tau == pytest.approx(0.4 + 0.6 * 39 / 40)


def test_state_of_taid_resumes_to_the_bit() -> None:
    whole, first, second = TAID(), TAID(), TAID()
    for step in range(10):
        whole.advance(1 / (step + 1), step / 500)
        (first if step < 6 else second).advance(1 / (step + 1), step / 500)
        if step == 5:
            second.restore(first.state())
    assert second.state() == whole.state()
    assert whole == TAID()  # the state is no part of what the method is
    assert TAID().tau == 0.4  # and no two share it


def test_taid_at_1_is_forward_kl() -> None:
    student, teacher, inputs = batch(16)
    method = TAID()
    method.restore({"tau": 1.0, "momentum": 0.0, "loss": 1.0})
    out, grad = run(student, teacher, method, mask=inputs["mask"])
    plain, plain_grad = run(student, teacher, Static(0.0), mask=inputs["mask"])
    assert_close(out.loss, plain.loss)
    assert_close(grad, plain_grad)


@pytest.mark.parametrize("wrong", [{"t_start": 1.0}, {"t_start": 0.5, "t_end": 0.4}, {"alpha": 2.0}, {"beta": 1.0}])
def test_taid_refuses_what_is_no_schedule(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="of TAID"):
        TAID(**wrong)


# ---------------------------------------------------------------------------------------------- fused

FUSED = {
    "iw_opd": IWOPD(),
    "vopd": VOPD(),
    "tip": TIP(),
    "tip with jsd": TIP(share=0.3, gamma=0.5),
    "revisiting_opd": RevisitingOPD(top_k=5, share=0.2),
    "distillm2": DistiLLM2(),
    "taid": TAID(),
    "student": Gated(Gate.named("H1"), "student", 4),
    "drift": Gated(Gate(a=1.0, d=2.0, extra={"drift": -2.0, "trust": 1.0, "student_entropy_full": 1.0})),
    "overlap": Gated(Gate(a=1.0, extra={"overlap": 2.0, "overlap_mass": 1.0})),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_fused_equals_plain_over_chunks_that_cut_responses(name: str, recompute: bool) -> None:
    rng = np.random.default_rng(17)
    shape = (B, 40)
    hidden, weight = rng.normal(size=(*shape, H)), rng.normal(size=(V, H))
    teacher_hidden, teacher_weight = rng.normal(size=(*shape, HT)), rng.normal(size=(V, HT))
    inputs = LossInputs(
        mask=torch.as_tensor(rng.random(shape) < 0.9),
        sampled=torch.as_tensor(rng.integers(0, V, size=shape)),
        noise=torch.as_tensor(rng.random(shape)),
        from_teacher=torch.tensor([1, 0, 1]),
    )
    h, w = leaf(hidden), leaf(weight)
    call: dict[str, Any] = {"objective": FUSED[name], "inputs": inputs}
    plain = distillation_loss(h @ w.T, fixed(teacher_hidden @ teacher_weight.T), **call)
    plain.loss.backward()
    fh, fw = leaf(hidden), leaf(weight)
    fused = fused_distillation_loss(
        fh, fw, fixed(teacher_hidden), fixed(teacher_weight), recompute=recompute, chunk_mb=0.008, **call
    )
    fused.loss.backward()
    assert_close(fused.loss, plain.loss)
    assert_close(fused.per_token, plain.per_token)
    assert np.abs(h.grad.numpy()).max() > 0
    assert_close(fh.grad, h.grad)
    assert_close(fw.grad, w.grad)


def test_shuffled_lam_of_a_gate_that_reads_the_whole_response() -> None:
    student, teacher, inputs = batch(18)
    count = int(inputs["mask"].sum())
    order = torch.as_tensor(np.random.default_rng(0).permutation(count))
    gate = Gate(a=1.0, extra={"drift": 3.0})
    out = gated_kl(fixed(student), fixed(teacher), gate=gate, **inputs, lam_order=order)
    own = gated_kl(fixed(student), fixed(teacher), gate=gate, **inputs)
    on = numbers(inputs["mask"]) != 0
    assert_close(numbers(out.lam)[on], numbers(own.lam)[on][order.numpy()])


def test_fused_names_what_a_top_k_teacher_does_not_know() -> None:
    """The sampled token lies outside of the top-K at some place, and its log-probability was not sent."""
    rng = np.random.default_rng(20)
    hidden, head = fixed(rng.normal(size=(1, 40, H))), fixed(rng.normal(size=(V, H)))
    teacher = top_k_of(rng.normal(size=(1, 40, V)), 3)
    inputs = LossInputs(sampled=torch.as_tensor(rng.integers(0, V, size=(1, 40))), top_k=2)
    for method in (IWOPD(), Gated(Gate(extra={"drift": 1.0}), "bucket")):
        with pytest.raises(UsageError, match="outside its top-K is needed and was not given"):
            fused_distillation_loss(hidden, head, teacher, None, objective=method, inputs=inputs, chunk_mb=0.005)


# ---------------------------------------------------------------------------------------------- what they need


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("tip", {"selects"}),
        ("iw_opd", {"uses_sampled", "ahead"}),
        ("vopd", {"uses_sampled"}),
        ("distillm2", {"by_source"}),
        ("taid", {"state"}),
        ("student_top_k", set()),
        ("revisiting_opd", {"skips_special"}),
        ("todi", set()),
    ],
)
def test_what_a_method_needs(name: str, needs: set[str]) -> None:
    made = objective(name)
    hooks = ("uses_sampled", "selects", "by_source", "skips_special", "state", "ahead")
    found = {hook for hook in hooks if getattr(made, hook)()}
    assert found - ({"ahead"} if name == "tip" else set()) == needs
    assert Gated(Gate(extra={"trust": 1.0})).uses_sampled()
    assert not Gated(Gate(extra={"position": 1.0})).uses_sampled()
