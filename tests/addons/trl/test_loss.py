"""The loss of one micro-batch inside the trainer, against definitions in float64 that know nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gatespace.gating.coefficients import SATURATION
from tests.gating import oracle
from tests.models.architectures import made

pytest.importorskip("trl", reason="no TRL here; `make test-engines` makes an environment with it")

from gatespace.addons.trl.trainer import _head
from gatespace.gating.objectives import OBJECTIVES

H2 = (4.0, 4.0, -1.5, 4.0)
MIXED = (2.0, -3.0, 0.5, -2.0)


def logits(network: Any, batch: dict[str, Tensor]) -> Tensor:
    """(B, C, V) float64, by the network's own forward, at the positions that predict the completion."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    whole: Tensor = network(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return whole[:, -width - 1 : -1]


def both(trainer: Any, batch: dict[str, Tensor]) -> tuple[Any, Tensor, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The student in float64, its logits with gradient, and the teacher's; the mask of the loss."""
    student, teacher = copy.deepcopy(trainer.model).double(), copy.deepcopy(trainer.teacher_model).double()
    own = logits(student, batch)
    with torch.no_grad():
        other = logits(teacher, batch).numpy()
    return student, own, other, (batch["completion_mask"] * batch["tool_mask"]).numpy()


def compare_gradients(trainer: Any, student: Any) -> None:
    """Of every parameter, the head that is tied to the embedding among them."""
    found = dict(trainer.model.named_parameters())
    assert len(found) > 20
    for name, parameter in student.named_parameters():
        scale = parameter.grad.abs().max()
        assert torch.allclose(found[name].grad.double(), parameter.grad, rtol=1e-3, atol=2e-5 * float(scale)), name


@pytest.mark.parametrize(
    "settings, abcd, options",
    [
        ({"gate": H2}, H2, {}),
        ({"gate": MIXED, "signal_top_k": 4}, MIXED, {"top_k": 4}),
        ({"gate": MIXED, "stop_gradient": True}, MIXED, {"stop_gradient": True}),
        ({"gate": MIXED, "temperature": 2.0}, MIXED, {"temperature": 2.0}),
        ({"gate": MIXED, "loss_temperature": 0.5}, MIXED, {"temperature": 0.5}),
        ({"gate": MIXED, "entropy": "full"}, MIXED, {"entropy": "full"}),
        ({"gate": MIXED, "support": "bucket", "support_k": 12}, MIXED, {"support": "bucket", "support_k": 12}),
        ({"gate": MIXED, "support": "hybrid"}, MIXED, {"support": "hybrid"}),
        ({"gate": "static:0.3"}, (0, 0, np.log(0.3 / 0.7), 0), {}),
        ({"method": "static", "params": {"lam": 0.3}}, (0, 0, np.log(0.3 / 0.7), 0), {}),
    ],
    ids=str,
)
def test_loss_gradient_and_telemetry_of_a_gate(
    make: Callable[..., Any],
    batch: dict[str, Tensor],
    settings: dict[str, Any],
    abcd: tuple[float, ...],
    options: dict[str, Any],
) -> None:
    trainer = make(**settings)
    trainer.model.eval()  # no dropout in the tiny pair; TRL's count is left alone where it does not train
    student, own, other, mask = both(trainer, batch)
    sampled = batch["completion_ids"].numpy()
    wanted = oracle.gated(
        own.detach().numpy(), other, abcd=abcd, mask=mask, sampled=sampled, total_tokens=20.0, **options
    )
    own.backward(torch.from_numpy(wanted.grad))

    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(20))
    loss.backward()
    assert loss.item() == pytest.approx(wanted.loss, rel=2e-5)
    compare_gradients(trainer, student)

    keep = mask == 1
    lam = wanted.lam[keep]
    means = {name: getattr(wanted, name)[keep].mean() for name in ("h", "u", "gap", "forward_kl", "reverse_kl")}
    means |= {f"{name}_sd": getattr(wanted, name)[keep].std() for name in ("lam", "h", "u", "gap")}
    means["lam_rkl_mean"] = (lam * wanted.reverse_kl[keep]).sum() / wanted.reverse_kl[keep].sum()
    means |= {"lam_mean": lam.mean(), "lam_saturated": (np.minimum(lam, 1 - lam) <= SATURATION).mean()}
    if "support" in options:
        means |= {"tail_mass": wanted.tail_mass[keep].mean(), "tail_mass_max": wanted.tail_mass[keep].max()}
    metrics = trainer._metrics["eval"]
    probability = oracle.probabilities(own.detach().numpy()[keep], options.get("temperature", 1.0))
    assert metrics["entropy"] == [pytest.approx(np.mean([oracle.shannon(row) for row in probability]), rel=1e-5)]
    found = {name.removeprefix("gate/"): value for name, (value,) in metrics.items() if name.startswith("gate/")}
    assert found == pytest.approx(means, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "method, params, term",
    [
        ("todi", {"beta": 2}, lambda s, t: oracle.todi(s, t, 2.0)),
        ("akl", {}, oracle.akl),
        ("jsd", {"beta": 0.3}, lambda s, t: oracle.jsd(s, t, 0.3)),
        ("skl", {}, oracle.skl),
        ("srkl", {}, oracle.srkl),
        ("abkd", {"alpha": 0.5}, lambda s, t: oracle.abkd(s, t, 0.5)),
    ],
)
def test_loss_and_gradient_of_published_methods(
    make: Callable[..., Any], batch: dict[str, Tensor], method: str, params: dict[str, Any], term: Any
) -> None:
    trainer = make(method=method, params=params)
    student, own, other, mask = both(trainer, batch)
    wanted, _, grad = oracle.batch_of(own.detach().numpy(), other, lambda s, t, _: term(s, t), mask=mask)
    own.backward(torch.from_numpy(grad))
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, batch)  # no count: the mean over this batch
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=2e-5)
    compare_gradients(trainer, student)


@pytest.mark.parametrize("method", [one for one in OBJECTIVES if one not in ("taid", "distillm2")])
def test_every_objective_has_a_step(make: Callable[..., Any], method: str) -> None:
    """But for the two that need what TRL does not have, which its settings refuse."""
    params = {"mask_special": False} if method == "revisiting_opd" else {}
    trainer = make(method=method, params=params, max_steps=1)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    log = trainer.state.log_history[0]
    moved = [not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True)]
    assert all(moved)
    assert np.isfinite(log["loss"])
    assert log["gate/reverse_kl"] > 0
    mixes = method in ("gated", "static", "eopd", "akl")
    assert ("gate/lam_mean" in log) is mixes
    assert ("gate/weight" in log) is (method in ("eopd", "tip", "iw_opd", "revisiting_opd"))
    assert ("lam_mean" in trainer.gate_summary()) is mixes


def test_nothing_to_learn_from_is_a_zero_with_gradient(make: Callable[..., Any], batch: dict[str, Tensor]) -> None:
    trainer = make(method="todi")  # mixes nothing, and an empty batch must not look as if it did
    trainer.model.eval()
    full = trainer._telemetry.names
    loss = trainer.compute_loss(trainer.model, batch | {"tool_mask": torch.zeros(3, 6, dtype=torch.long)})
    loss.backward()
    assert loss.item() == 0
    assert all(float(p.grad.abs().sum()) == 0 for p in trainer.model.parameters() if p.grad is not None)
    assert not [name for name in trainer._metrics["eval"] if name.startswith("gate/")]
    assert trainer._telemetry.names == full


def test_no_tensor_holds_the_logits_of_a_batch(make: Callable[..., Any]) -> None:
    trainer = make(chunk_mb=0.5)
    vocabulary = trainer.model.config.vocab_size

    class Widest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and vocabulary in out.shape:
                self.most = max(self.most, out.numel() // vocabulary)
            return out

    rows, width = 24, 16
    generator = torch.Generator().manual_seed(0)
    ids, masks = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
    batch = {name: torch.ones(rows, width, dtype=torch.long) for name in masks}
    batch |= {name: torch.randint(10, 400, (rows, width), generator=generator) for name in ids}
    trainer.model.eval()
    with Widest() as seen:
        trainer.compute_loss(trainer.model, batch).backward()
    assert 16 <= seen.most <= 128 < rows * width  # a chunk of the logits, and the teacher's head of width 128


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    store = torch.distributed.HashStore()
    init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,)), Shard(0)
    destroy_process_group()


def test_sharded_head_is_put_together_and_gets_its_gradient(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    network = made(None, "Phi").network
    weight = network.lm_head.weight.detach().clone()
    for name, parameter in list(network.lm_head.named_parameters()):
        setattr(network.lm_head, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh[0], [mesh[1]])))
    head = _head(network, torch.float32)
    assert not isinstance(head.weight, DTensor)
    assert not isinstance(head.bias, DTensor)
    assert torch.equal(head.weight, weight)
    head.weight.square().sum().backward()
    assert torch.equal(network.lm_head.weight.grad.full_tensor(), 2 * weight)
