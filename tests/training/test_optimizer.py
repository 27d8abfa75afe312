"""AdamW against torch's own, learning rates against closed formulas, and bfloat16 that forgets nothing."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatespace.config import OptimizerConfig, parse_config
from gatespace.errors import RunError, UsageError
from gatespace.models import TinyPair, load_model
from gatespace.training.optimizer import Optimizer, eight_bit, learning_rate
from gatespace.training.processes import Processes
from gatespace.training.progress import Silent
from gatespace.training.train import train


def config(**settings: Any) -> OptimizerConfig:
    return parse_config(OptimizerConfig, settings)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def draw(number: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def losses(module: nn.Module, number: int) -> Tensor:
    """(5,) one loss per token."""
    x, y = draw(number)
    dtype = next(module.parameters()).dtype
    return (module(x.to(dtype)).float() - y).square().sum(-1)


def advance(module: nn.Module, optimizer: Optimizer, numbers: range) -> list[float]:
    norms = []
    for number in numbers:
        for part in losses(module, number).split(2):  # the sum arrives in pieces
            part.sum().backward(retain_graph=True)
        norms.append(optimizer.step(number, 5).grad_norm)
    return norms


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("clip", [None, 0.3, 1000.0])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_equals_adamw_on_the_mean_loss(clip: float | None, decay: float) -> None:
    ours, theirs = network(), network()
    optimizer = Optimizer(
        ours, config(lr=0.02, betas=[0.8, 0.95], eps=1e-6, clip=clip, weight_decay=decay), steps=6, dtype=torch.float32
    )
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    norms = advance(ours, optimizer, range(6))
    for number in range(6):
        adam.zero_grad()
        losses(theirs, number).mean().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        assert norms[number] == pytest.approx(float(norm), rel=1e-5)
        adam.step()
    assert min(norms) > 0.3  # so that the small clip does clip
    for name, p in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], p, rtol=2e-5, atol=2e-6)


def test_weight_decay_shrinks_matrices_and_nothing_else() -> None:
    module = network()
    before = weights(module)
    optimizer = Optimizer(module, config(lr=0.1, weight_decay=0.5, clip=None), steps=1, dtype=torch.float32)
    (0 * losses(module, 0).sum()).backward()
    optimizer.step(0, 5)
    for name, p in weights(module).items():
        assert torch.equal(p, before[name] * (0.95 if p.dim() == 2 else 1.0)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_starts_without_the_gradients_of_the_one_before(dtype: torch.dtype) -> None:
    module = network()
    optimizer = Optimizer(module, config(lr=0.02, clip=None), steps=2, dtype=dtype)
    advance(module, optimizer, range(1))
    gradients = torch.autograd.grad(losses(module, 1).mean(), list(module.parameters()))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    rel = 1e-5 if dtype == torch.float32 else 2e-2
    assert advance(module, optimizer, range(1, 2)) == [pytest.approx(norm, rel=rel)]


def test_discarded_gradients_leave_no_trace() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        clean, other = network(), network()
        steady = Optimizer(clean, config(lr=0.01), steps=2, dtype=dtype)
        disturbed = Optimizer(other, config(lr=0.01), steps=2, dtype=dtype)
        losses(other, 9).sum().backward()
        losses(other, 8).sum().backward()
        disturbed.discard()
        assert advance(clean, steady, range(2)) == advance(other, disturbed, range(2))


# ---------------------------------------------------------------------------------------------------- precision


def test_updates_below_the_resolution_of_bfloat16_accumulate() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    optimizer = Optimizer(module, config(lr=1e-4, clip=None), steps=100, dtype=torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    seen = set()
    for number in range(100):
        module.weight.sum().backward()  # the gradient is 1, so AdamW moves by -lr each time
        optimizer.step(number, 1)
        seen.add(module.weight.item())
    # neighbours of 1 in bfloat16 are 2⁻⁸ and more away: a single update of 1e-4 is lost there, a hundred are not
    assert optimizer.tensors()["weight/weight"].item() == pytest.approx(0.99, abs=1e-5)
    assert module.weight.item() == torch.tensor(0.99).bfloat16().item()
    assert len(seen) == 4
    optimizer.widen()
    assert module.weight.dtype == torch.float32
    assert module.weight.item() == pytest.approx(0.99, abs=1e-5)
    assert module.weight.item() != torch.tensor(0.99).bfloat16().item()


def test_the_network_computes_with_rounded_masters_and_collects_in_float32() -> None:
    module = network()
    optimizer = Optimizer(module, config(lr=0.01), steps=3, dtype=torch.bfloat16)
    advance(module, optimizer, range(3))
    masters = {n[len("weight/") :]: t for n, t in optimizer.tensors().items() if n.startswith("weight/")}
    for name, p in weights(module).items():
        assert masters[name].dtype == torch.float32
        assert torch.equal(p, masters[name].bfloat16()), name
    assert any(not torch.equal(masters[name], p.float()) for name, p in weights(module).items())

    line = nn.Linear(1, 1, bias=False)
    nn.init.ones_(line.weight)
    many = Optimizer(line, config(betas=[0.0, 0.999], clip=None), steps=1, dtype=torch.bfloat16)
    for _ in range(1000):  # in bfloat16 a sum of ones sticks at 256
        line.weight.sum().backward()
    assert many.step(0, 1).grad_norm == 1000.0


def test_rotary_positions_stay_in_float32(tiny: TinyPair) -> None:
    student = load_model(str(tiny.student))
    expected = load_model(str(tiny.student), dtype=torch.bfloat16)
    optimizer = Optimizer(student.network, config(), steps=1, dtype=torch.bfloat16)
    ids = torch.arange(150)[None]
    with torch.no_grad():
        assert torch.equal(student.network(ids).logits, expected.network(ids).logits)
    optimizer.widen()
    original = load_model(str(tiny.student))
    with torch.no_grad():
        assert torch.equal(student.network(ids).logits, original.network(ids).logits)


def test_frozen_weights_are_neither_trained_nor_kept() -> None:
    module = network()
    module[0].requires_grad_(False)  # type: ignore[index]
    before = weights(module)
    optimizer = Optimizer(module, config(lr=0.1, weight_decay=0.5), steps=2, dtype=torch.float32)
    advance(module, optimizer, range(2))
    after = weights(module)
    assert all(torch.equal(after[name], before[name]) for name in ("0.weight", "0.bias"))
    assert not any(torch.equal(after[name], before[name]) for name in ("3.weight", "3.bias", "1.weight"))
    assert not any("0.weight" in name for name in optimizer.tensors())


# ---------------------------------------------------------------------------------------------------- learning rate


def test_learning_rate_schedules() -> None:
    def rates(steps: int = 10, **settings: Any) -> list[float]:
        return [learning_rate(config(lr=2.0, **settings), step, steps) for step in range(steps)]

    assert rates() == [2.0] * 10
    assert rates(warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, *[2.0] * 6]
    assert rates(schedule="linear") == pytest.approx([2 * (1 - k / 10) for k in range(10)])
    expected = [1.0, 2.0, *(2 * (0.1 + 0.9 * (1 - k / 8)) for k in range(8))]
    assert rates(schedule="linear", warmup_steps=2, min_lr_ratio=0.1) == pytest.approx(expected)
    expected = [1.0, 2.0, *(2 * (0.1 + 0.9 * math.cos(math.pi * k / 16) ** 2) for k in range(8))]
    assert rates(schedule="cosine", warmup_steps=2, min_lr_ratio=0.1) == pytest.approx(expected)
    assert rates(4, warmup_steps=8, schedule="cosine") == [0.25, 0.5, 0.75, 1.0]
    assert rates(2, warmup_steps=2, schedule="linear") == [1.0, 2.0]


def test_the_rate_of_the_step_is_used() -> None:
    module = network()
    optimizer = Optimizer(
        module, config(lr=0.01, schedule="linear", warmup_steps=2, clip=None), steps=4, dtype=torch.float32
    )
    for number, expected in enumerate([0.005, 0.01, 0.01, 0.005]):
        before = weights(module)["3.bias"]
        losses(module, 0).sum().backward()
        assert optimizer.step(number, 5).lr == pytest.approx(expected)
        if number == 0:  # the first update of Adam is lr in every direction
            moved = (weights(module)["3.bias"] - before).abs()
            torch.testing.assert_close(moved, torch.full_like(moved, 0.005), rtol=1e-3, atol=0)


# ---------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_restored_optimizer_goes_on_to_the_bit(dtype: torch.dtype, done: int) -> None:
    settings = config(lr=0.02, schedule="cosine", weight_decay=0.1)
    straight = network()
    optimizer = Optimizer(straight, settings, steps=8, dtype=dtype)
    advance(straight, optimizer, range(done))
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    norms = advance(straight, optimizer, range(done, 8))

    other = network(seed=1)  # as a new process would find it, and not what was saved
    fresh = Optimizer(other, settings, steps=8, dtype=dtype)
    if done:
        advance(other, fresh, range(2))
    fresh.restore(saved)
    saved_before = {name: tensor.clone() for name, tensor in saved.items()}
    assert advance(other, fresh, range(done, 8)) == norms
    assert all(torch.equal(saved[name], tensor) for name, tensor in saved_before.items())  # and not written into
    expected = optimizer.tensors()
    assert set(expected) == set(fresh.tensors())
    assert {name.split("/")[0] for name in expected} == {"weight", "step", "exp_avg", "exp_avg_sq"}
    for name, tensor in fresh.tensors().items():
        assert torch.equal(tensor, expected[name]), name
    for name, p in weights(other).items():
        assert torch.equal(p, weights(straight)[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_before_any_weight_moves(dtype: torch.dtype, bad: float) -> None:
    module = network()
    optimizer = Optimizer(module, config(lr=0.1, weight_decay=0.5), steps=3, dtype=dtype)
    advance(module, optimizer, range(1))
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    rounded = weights(module)
    losses(module, 1).sum().backward()
    grad = optimizer.masters["3.bias"].grad
    assert grad is not None
    grad[1] = bad
    with pytest.raises(RunError, match="the gradient is not finite"):
        optimizer.step(1, 5)
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, before[name]), name
    for name, p in weights(module).items():
        assert torch.equal(p, rounded[name]), name


# ---------------------------------------------------------------------- states of 8 bits


def wide() -> nn.Module:
    """With matrices large enough to be quantised, and some that are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_8_bits_learn_alike_and_resume_to_the_bit(dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")

    def made(states: str) -> tuple[nn.Module, Optimizer]:
        module = wide()
        return module, Optimizer(module, config(lr=0.003, states=states), steps=30, dtype=dtype)

    usual, small = made("fp32"), made("8bit")
    for module, optimizer in (usual, small):
        advance(module, optimizer, range(8))
    tensors = {name: tensor.clone() for name, tensor in small[1].tensors().items()}
    assert all(type(tensor) is Tensor for tensor in tensors.values())
    assert tensors["exp_avg.codes/3.weight"].dtype == torch.uint8
    assert tensors["exp_avg/0.weight"].dtype == torch.float32  # too small to be worth it
    before = weights(wide())
    for name, p in weights(usual[0]).items():
        assert float((p - weights(small[0])[name]).norm()) < 0.2 * float((p - before[name]).norm())
    module, optimizer = made("8bit")
    optimizer.restore(tensors)
    for one, other in (small, (module, optimizer)):
        advance(one, other, range(8, 12))
    assert all(torch.equal(p, weights(small[0])[name]) for name, p in weights(module).items())
    assert all(torch.equal(tensor, small[1].tensors()[name]) for name, tensor in optimizer.tensors().items())


class Killed(Silent):
    def step(self, step: int, *_: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt


def test_a_run_with_states_of_8_bits_resumes_to_the_same_bytes(train_config: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    ways = [train_config(optimizer={"states": "8bit"}, output=str(tmp_path / name)) for name in ("whole", "killed")]
    train(ways[0])
    with pytest.raises(KeyboardInterrupt):
        train(ways[1], Killed())
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step-000002"]
    train(ways[1])
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_states_of_8_bits_are_not_sharded_and_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="do not go together"):
        eight_bit(type("Shards", (Processes,), {"sharded": True})())
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UsageError, match="pip install torchao"):
        Optimizer(wide(), config(states="8bit"), steps=1, dtype=torch.float32)
