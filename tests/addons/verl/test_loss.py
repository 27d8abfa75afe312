"""The loss inside verl's own functions, against the definitions in probability space and against `gated_kl`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl has an environment of its own: make test-engines")

import verl.trainer.distillation.losses as verl_losses
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils.metric import Metric
from verl.workers.config import DistillationConfig, DistillationLossConfig

from gatespace import Gate, gated_kl, signals
from gatespace.errors import RunError, UsageError
from gatespace.gating import TeacherTopK, Tokens
from tests.addons.verl.batches import LENGTHS, Batch, K, V, actor, settings
from tests.gating import oracle

HOLES = ((1, 0), (3, 2), (2, 0))  # the first token of a response, the last of one, the only one of another
TELEMETRY = ("lam", "forward_kl", "reverse_kl", "h", "u", "gap", "tail_mass")


def step(batch: Batch, config: DistillationConfig, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """verl's own entry, as its engine calls it where the logits are."""
    found: dict[str, torch.Tensor] = distillation_ppo_loss(
        config=actor(), distillation_config=config, data=batch.data(), student_logits=logits
    )
    return found


def whole(batch: Batch, config: DistillationConfig, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Both of verl's calls: numbers per token, then the loss and the metrics."""
    data = batch.data()
    outputs = distillation_ppo_loss(
        config=actor(), distillation_config=config, data=data, student_logits=logits, data_format="thd"
    )
    offsets = data["input_ids"].offsets()
    packed = {name: torch.nested.nested_tensor_from_jagged(value[0], offsets) for name, value in outputs.items()}
    loss, metrics = distillation_ppo_loss(
        config=actor(), distillation_config=config, model_output=packed, data=data, dp_group=None
    )
    return loss, metrics


CASES: list[dict[str, Any]] = [
    {"gate": "G1"},
    {"gate": "G4", "entropy": "bucket"},
    {"gate": "H2"},
    {"gate": [4, 4, -1.5, -4], "stop_gradient": True},
    {"gate": {"d": -4, "c": 0.5}, "support": "renorm"},
    {"gate": "static:0.388"},
    {"gate": "H3", "support_k": 5, "signal_top_k": 3},
    {"gate": "4,0,-1,2,student_entropy=2,position=-1"},
]


@pytest.mark.parametrize("holes", [(), HOLES], ids=["whole", "holes"])
@pytest.mark.parametrize("padded", [False, True], ids=["nested", "padded"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["gate"]))
def test_every_token_equals_the_definition(
    case: dict[str, Any], padded: bool, holes: tuple[tuple[int, int], ...]
) -> None:
    batch = Batch(padded=padded, holes=holes)
    logits = batch.logits()
    found = step(batch, settings(chunked_topk_chunk_size=3, **case), logits)
    losses = found["distillation_losses"]
    weights = torch.randn(losses.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (losses * weights).sum().backward()

    gate = settings(**case).distillation_loss.for_student(V).objective.gate
    expected = oracle.gated(
        **batch.arrays(),
        abcd=gate.abcd,
        extra=dict(gate.extra),
        top_k=case.get("signal_top_k", 8),
        support=case.get("support", "bucket"),
        support_k=case.get("support_k", K),
        entropy=case.get("entropy", "top_k"),
        stop_gradient=case.get("stop_gradient", False),
        total_tokens=1.0,
    )
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(batch.unpacked(losses.detach()), torch.tensor(expected.per_token), **close)
    for name in TELEMETRY:
        torch.testing.assert_close(
            batch.unpacked(found[f"gate_{name}"]), torch.tensor(getattr(expected, name)), msg=name, **close
        )
    for name, values in expected.signals.items():
        torch.testing.assert_close(batch.unpacked(found[f"gate_{name}"]), torch.tensor(values), rtol=1e-6, atol=1e-7)
    gradient = torch.tensor(expected.grad) * batch.unpacked(weights)[..., None]
    assert logits.grad is not None
    torch.testing.assert_close(batch.unpacked(logits.grad), gradient, **close)
    counted = torch.zeros(batch.positions, dtype=torch.bool)
    counted[[position for row, place, position in batch.places() if batch.mask[row, place]]] = True
    assert not logits.grad[0, ~counted].any(), "a position that predicts nothing was read"
    assert not losses[0, ~counted].any()
    assert not any(value.requires_grad for name, value in found.items() if name != "distillation_losses")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop_gradient", [False, True])
def test_loss_and_gradient_are_those_of_gated_kl_on_the_bucket(dtype: torch.dtype, stop_gradient: bool) -> None:
    batch = Batch(dtype=dtype)
    logits = batch.logits()
    loss, _ = whole(batch, settings(gate="H2", stop_gradient=stop_gradient), logits)
    loss.backward()

    plain = batch.student.to(dtype).requires_grad_()
    top = batch.teacher.log_softmax(-1).topk(K)
    known = TeacherTopK(top.indices, top.values.to(torch.float64 if dtype == torch.float64 else torch.float32))
    out = gated_kl(plain, known, gate=Gate.named("H2"), mask=batch.mask, support="bucket", stop_gradient=stop_gradient)
    out.loss.backward()
    assert logits.grad is not None
    assert plain.grad is not None
    assert logits.grad.dtype == dtype
    exact = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2 * 2**-8}[dtype]
    torch.testing.assert_close(loss.double(), out.loss.double(), rtol=min(exact, 1e-5), atol=1e-12)
    torch.testing.assert_close(batch.unpacked(logits.grad), plain.grad, rtol=exact, atol=exact * 1e-2)


def test_u_is_one_value_per_sample_and_that_of_its_first_token() -> None:
    batch = Batch()
    found = step(batch, settings(gate="G4", chunked_topk_chunk_size=1), batch.logits())
    u, h = batch.unpacked(found["gate_u"]), batch.unpacked(found["gate_h"])
    first = [oracle.teacher_entropy(row[0].numpy(), 8) for row in batch.teacher]
    assert len(set(first)) == len(LENGTHS)
    for row, (_, response) in enumerate(LENGTHS):
        torch.testing.assert_close(u[row, :response], torch.full((response,), first[row], dtype=torch.float64))
    assert (u[1, 1:4] != h[1, 1:4]).all()


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("gate", ["H2", "4,4,-1,2,position=3"])
def test_chunks_change_nothing(chunk: int, gate: str) -> None:
    results = []
    for size in (chunk, 7):
        batch = Batch()
        logits = batch.logits()
        losses = step(batch, settings(gate=gate, chunked_topk_chunk_size=size), logits)["distillation_losses"]
        losses.sum().backward()
        results.append((losses.detach(), batch.unpacked(logits.grad)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("temperature", [0.7, [0.5, 1.0, 2.0, 1.3]])
def test_the_samplers_temperature_is_taken_out(temperature: float | list[float]) -> None:
    hot, plain = Batch(temperature=temperature), Batch()
    config = settings(gate="H1")
    logits, reference = hot.logits(), plain.logits()
    found, wanted = step(hot, config, logits), step(plain, config, reference)
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-6, msg=name)
    found["distillation_losses"].sum().backward()
    wanted["distillation_losses"].sum().backward()
    expected = hot.unpacked(reference.grad) * hot.heat()[:, None, None]
    torch.testing.assert_close(hot.unpacked(logits.grad), expected, rtol=1e-5, atol=1e-7)


def test_rows_of_the_head_beyond_the_vocabulary_are_left_out() -> None:
    batch = Batch(seed=3)
    logits = batch.logits()
    wide = torch.cat([logits, torch.full((1, batch.positions, 8), 9.0, dtype=logits.dtype)], -1).detach()
    wide.requires_grad_()
    cut = step(batch, settings(gate="H2", vocab_size=V), wide)
    torch.testing.assert_close(
        cut["distillation_losses"], step(batch, settings(gate="H2"), logits)["distillation_losses"]
    )
    cut["distillation_losses"].sum().backward()
    assert wide.grad is not None
    assert not wide.grad[..., V:].any()
    with pytest.raises(UsageError, match="more than the student has logits"):
        step(batch, settings(gate="H2", vocab_size=V + 1), logits)


def test_without_gradient_nothing_is_kept() -> None:
    batch = Batch()
    with torch.no_grad():
        losses = step(batch, settings(gate="H2"), batch.logits())["distillation_losses"]
    assert not losses.requires_grad
    torch.testing.assert_close(losses, step(batch, settings(gate="H2"), batch.logits())["distillation_losses"].detach())


def test_a_micro_batch_in_which_nothing_counts_has_no_loss_and_no_gradient() -> None:
    batch = Batch(lengths=((2, 1), (3, 2)), holes=((0, 0), (1, 0), (1, 1)))
    logits = batch.logits()
    losses = step(batch, settings(gate="G1"), logits)["distillation_losses"]
    losses.sum().backward()
    assert not losses.any()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_autocast_around_the_loss_does_not_reach_it() -> None:
    """verl's engine calls the loss under autocast, in which the product of a signal would be one of bfloat16."""

    @signals.register("ranked", range=(0.0, 10.0))
    def ranked(tokens: Tokens) -> torch.Tensor:
        return tokens.student_at(tokens.teacher_top(4).ids).exp() @ torch.tensor([1.1, 2.3, 3.7, 4.9])

    batch = Batch(dtype=torch.float32)
    config = settings(gate="0,0,-1,0,ranked=1")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = step(batch, config, batch.logits())["distillation_losses"]
        outside = step(batch, config, batch.logits())["distillation_losses"]
    finally:
        signals.unregister("ranked")
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)


# ---------------------------------------------------------------------- metrics


def test_metrics_are_means_over_tokens_and_do_not_depend_on_the_split() -> None:
    config = settings(gate="3,0,-5,7,student_entropy=1")
    batch = Batch(dtype=torch.float32, poison=False)
    _, metrics = whole(batch, config, batch.logits())
    out = gated_kl(
        batch.student.float(),
        _top(batch),
        gate=Gate(3, 0, -5, 7, {"student_entropy": 1}),
        mask=batch.mask,
        support="bucket",
    )
    n = int(batch.mask.sum())
    lam = out.lam[batch.mask]
    gate = {name.removeprefix("distillation/gate/"): metric for name, metric in metrics.items() if "/gate/" in name}
    found = {name: metric.aggregate() for name, metric in gate.items()}
    for name in ("h", "u", "gap", "forward_kl", "reverse_kl", "tail_mass"):
        assert found[name] == pytest.approx(float(getattr(out, name).sum()) / n, rel=1e-5), name
    assert found["student_entropy"] == pytest.approx(float(out.signals["student_entropy"].sum()) / n, rel=1e-5)
    assert found["lam_mean"] == pytest.approx(float(lam.mean()), rel=1e-5)
    spread = (found["lam_square"] - found["lam_mean"] ** 2) ** 0.5
    assert spread == pytest.approx(float(lam.double().std(correction=0)), rel=1e-3)
    assert found["lam_min"] == pytest.approx(float(lam.min()))
    assert found["lam_max"] == pytest.approx(float(lam.max()))
    assert found["lam_saturated"] == pytest.approx(float(((lam <= 0.02) | (lam >= 0.98)).float().mean()))
    assert 0 < found["lam_saturated"] < 1, "the batch does not tell saturation from none"
    assert metrics["distillation/student_mass"].aggregate() == pytest.approx(1 - found["tail_mass"], rel=1e-5)
    teacher_mass = batch.teacher.softmax(-1).topk(K).values.sum(-1)[batch.mask]
    assert metrics["distillation/teacher_mass"].aggregate() == pytest.approx(float(teacher_mass.mean()), rel=1e-5)
    assert metrics["distillation/loss"].aggregate() == pytest.approx(float(out.loss), rel=1e-5)

    # the same rows as two micro-batches of unequal size, on each of two data-parallel ranks
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        more = {"batch_num_tokens": 2 * n, "dp_size": 2}
        part = Batch(lengths=LENGTHS[rows], dtype=torch.float32, poison=False, more=more)
        longest = part.mask.shape[1]
        part.student, part.teacher = batch.student[rows, :longest], batch.teacher[rows, :longest]
        parts.append(whole(part, config, part.logits())[1])
    for name, metric in metrics.items():
        rank = Metric(metric.aggregation)
        for part in parts:
            rank.append(part[name])
        assert Metric.aggregate_dp([rank, rank]) == pytest.approx(metric.aggregate(), rel=1e-5), name


def test_the_spread_of_a_gate_that_hardly_moves_is_still_a_number() -> None:
    """SD[λ] is made from E[λ²] and E[λ], which then differ in their last digits."""
    batch = Batch(dtype=torch.float32)
    _, metrics = whole(batch, settings(gate=[0.002, 0, 2, 0]), batch.logits())
    mean, square = (metrics[f"distillation/gate/{name}"].aggregate() for name in ("lam_mean", "lam_square"))
    lam = gated_kl(batch.student.float(), _top(batch), gate=Gate(0.002, 0, 2, 0), mask=batch.mask, support="bucket").lam
    assert lam is not None
    spread = float(lam[batch.mask].double().std(correction=0))
    assert 0 < spread < 1e-4
    assert (square - mean**2) ** 0.5 == pytest.approx(spread, rel=1e-3)


def test_no_name_of_a_mean_makes_verl_take_an_extreme() -> None:
    """verl reduces over mini-batches by whether "max" or "min" is in a name."""
    batch = Batch()
    _, metrics = whole(batch, settings(gate="H2"), batch.logits())
    for name, metric in metrics.items():
        kind = metric.aggregation.value
        assert ("max" in name) == (kind == "max"), name
        assert ("min" in name) == (kind == "min"), name


def _top(batch: Batch) -> TeacherTopK:
    top = batch.teacher.log_softmax(-1).topk(K)
    return TeacherTopK(top.indices, top.values.float())


# ---------------------------------------------------------------------- what it leaves alone, and what it refuses


def test_other_losses_are_verls_own() -> None:
    batch = Batch(dtype=torch.float32, poison=False)
    config = DistillationConfig(
        enabled=False, distillation_loss=DistillationLossConfig(loss_mode="forward_kl_topk", topk=K)
    )
    logits = batch.logits()
    original = verl_losses.compute_topk_loss.__wrapped__
    found, wanted = step(batch, config, logits), original(actor(), config, batch.data(), logits, "thd")
    assert found.keys() == wanted.keys()
    assert "gate_lam" not in found
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["megatron", "torchtitan"])
def test_strategies_without_whole_rows_of_logits_are_refused(strategy: str) -> None:
    config = actor()
    object.__setattr__(config, "strategy", strategy)
    batch = Batch()
    with pytest.raises(UsageError, match=strategy) as error:
        verl_losses.compute_topk_loss(config, settings(), batch.data(), batch.logits(), "thd")
    assert "fsdp2" in error.value.instead


def test_a_configuration_without_a_gate_is_refused() -> None:
    config = DistillationConfig(
        enabled=False, distillation_loss=DistillationLossConfig(loss_mode="gated_kl_topk", topk=K)
    )
    batch = Batch()
    with pytest.raises(UsageError, match="needs a gate") as error:
        step(batch, config, batch.logits())
    assert "_target_=gatespace.integrations.verl.GatedLossConfig" in error.value.instead


def test_losses_that_a_fused_kernel_made_are_refused() -> None:
    """VeOmni's kernel leaves a forward KL under the names of a top-K loss; taking it for ours would be silent."""
    batch = Batch()
    data = batch.data()
    numbers = torch.nested.nested_tensor_from_jagged(torch.ones(batch.positions), data["input_ids"].offsets())
    foreign = dict.fromkeys(("distillation_losses", "student_mass", "teacher_mass"), numbers)
    for output in (foreign, {}):
        with pytest.raises(UsageError, match="no logits") as error:
            distillation_ppo_loss(
                config=actor(), distillation_config=settings(), model_output=output, data=data, dp_group=None
            )
        assert "use_fused_kernels: false" in error.value.instead


def test_numbers_of_another_micro_batch_are_refused() -> None:
    batch = Batch()
    with pytest.raises(RunError, match="logits are not of this micro-batch"):
        step(batch, settings(), batch.logits()[:, :-2])
    other = batch.data()
    other["response_mask"] = torch.nested.as_nested_tensor(
        [torch.ones(1, dtype=torch.long)] * batch.samples, layout=torch.jagged
    )
    with pytest.raises(RunError, match="response_mask does not cover"):
        verl_losses.compute_topk_loss(actor(), settings(), other, batch.logits(), "thd")
    wrong = batch.data()
    wrong["teacher_ids"] = Batch(lengths=((3, 2),) * 4).data()["teacher_ids"]
    with pytest.raises(RunError, match="teacher's numbers are not of this micro-batch"):
        verl_losses.compute_topk_loss(actor(), settings(), wrong, batch.logits(), "thd")
