"""The loss in verl's real FSDP2 engine: a small Qwen3, one process or two, gloo, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl has an environment of its own: make test-engines")

import torch.distributed as dist
from transformers import AutoModelForCausalLM
from verl.trainer.distillation import distillation_ppo_loss

from gatespace import Gate, gated_kl
from gatespace.errors import UsageError
from gatespace.gating import TeacherTopK
from tests.addons.verl import engines
from tests.addons.verl.batches import Batch, K, actor, settings

HOLES = ((1, 0), (3, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.save_student(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss(**fields: Any) -> Any:
    return partial(distillation_ppo_loss, config=actor(), distillation_config=settings(**fields))


def batch(**more: Any) -> Batch:
    """Teacher's numbers of a batch; the student's come from the network."""
    padded, holes = more.pop("padded", False), more.pop("holes", HOLES)
    return Batch(dtype=torch.float32, padded=padded, holes=holes, more=engines.FACTS | more)


def plain(folder: Path, one: Batch, gate: str) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """The same step without verl: transformers' own forward on one sequence at a time, and `gated_kl`."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logits = torch.zeros(one.samples, one.mask.shape[1], model.config.vocab_size)
    for row, (ids, (prompt, response)) in enumerate(zip(one.ids, one.lengths, strict=True)):
        logits[row, :response] = model(ids[None]).logits[0, prompt - 1 : prompt + response - 1]
    top = one.teacher.log_softmax(-1).topk(K)
    teacher = TeacherTopK(top.indices, top.values.float())
    out = gated_kl(logits, teacher, gate=Gate.parse(gate), mask=one.mask, support="bucket")
    out.loss.backward()
    assert out.lam is not None
    return out.loss.item(), {name: part.grad for name, part in model.named_parameters()}, out.lam


@pytest.mark.usefixtures("alone")
class TestOneProcess:
    @pytest.mark.parametrize("packed", [True, False], ids=["rmpad", "padded forward"])
    @pytest.mark.parametrize("padded", [True, False], ids=["padded data", "nested data"])
    @pytest.mark.parametrize("micro", [4, 1])
    def test_the_step_is_that_of_gated_kl(self, folder: Path, packed: bool, padded: bool, micro: int) -> None:
        engine = engines.engine(folder)
        one = batch(use_remove_padding=packed, micro_batch_size_per_gpu=micro, padded=padded)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(one.data(), loss(gate="H2"))
            gradients = engines.gradients(engine)
        value, expected, lam = plain(folder, one, "H2")
        assert sum(output["loss"]) == pytest.approx(value, rel=1e-5)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=name)
        metrics = {name: metric.aggregate() for name, metric in output["metrics"].items()}
        assert metrics["distillation/gate/lam_mean"] == pytest.approx(float(lam[one.mask].mean()), rel=1e-5)
        assert metrics["distillation/loss"] == pytest.approx(value, rel=1e-5)

    def test_the_loss_falls(self, folder: Path) -> None:
        engine = engines.engine(folder, lr=1e-2)
        losses = []
        for _ in range(4):
            with engine.train_mode():
                output = engine.train_batch(batch(micro_batch_size_per_gpu=2).data(), loss(gate="G5"))
                engine.lr_scheduler_step()
            losses.append(sum(output["loss"]))
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.8 * losses[0]

    def test_beside_task_rewards_the_policy_loss_is_added(self, folder: Path) -> None:
        """Then verl computes log-probabilities from the same logits, and its backward may write over them."""
        engine = engines.engine(folder)
        one = batch(distillation_only=False, holes=())
        data = one.data()
        zeros = torch.nested.as_nested_tensor([torch.zeros(r) for _, r in one.lengths], layout=torch.jagged)
        data["old_log_probs"], data["advantages"] = zeros, zeros
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, loss(gate="H2", use_task_rewards=True))
            gradients = engines.gradients(engine)
        value, expected, _ = plain(folder, one, "H2")  # no advantage: the policy loss is 0, its gradient too
        assert sum(output["loss"]) == pytest.approx(value, rel=1e-5)
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=name)

    def test_in_bfloat16_the_loss_is_the_same_up_to_rounding(self, folder: Path) -> None:
        engine = engines.engine(folder, compute="bf16")
        one = batch()
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(one.data(), loss(gate="H2"))
            gradients = engines.gradients(engine)
        value, expected, _ = plain(folder, one, "H2")
        assert sum(output["loss"]) == pytest.approx(value, rel=0.03)
        ours, theirs = (torch.cat([part[name].reshape(-1) for name in expected]) for part in (gradients, expected))
        assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.995

    def test_adapters_learn_and_the_rest_does_not(self, folder: Path) -> None:
        engine = engines.engine(folder, lr=3e-2, lora=8)
        one = batch()
        losses = []
        for _ in range(4):
            with engine.train_mode():
                losses.append(sum(engine.train_batch(one.data(), loss(gate="G5"))["loss"]))
                engine.lr_scheduler_step()
        assert losses[0] == pytest.approx(plain(folder, one, "G5")[0], rel=1e-5)
        assert losses[-1] < 0.9 * losses[0]
        learning = {name for name, part in engine.module.named_parameters() if part.requires_grad}
        assert learning
        assert all("lora_" in name for name in learning)

    def test_fused_kernels_are_refused(self, folder: Path) -> None:
        engine = engines.engine(folder, fused=True)
        with engine.train_mode(), pytest.raises(UsageError, match="no logits"):
            engine.forward_backward_batch(batch(use_fused_kernels=True).data(), loss())

    def test_evaluation_without_gradient(self, folder: Path) -> None:
        engine = engines.engine(folder)
        one = batch()
        with engine.eval_mode():
            output = engine.infer_batch(one.data(), loss_function=loss(gate="H2"))
        assert sum(output["loss"]) == pytest.approx(plain(folder, one, "H2")[0], rel=1e-5)


def test_two_processes_with_one_sequence_between_them(tmp_path: Path) -> None:
    """Ulysses: each rank has half of the packed positions, and u of a sample may lie on the other one."""
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("rank equals") == 2, done.stdout
