"""A sharded model (FSDP2): weights, gradients and optimizer state are divided over processes.

Every layer is gathered for its pass and released after it. The head is not a layer that runs: losses take its weight,
so it is gathered by `learning` once for all passes of an update, and its gradient goes back to the shards once. Weights
are kept in float32 and computed with in `dtype`.

All methods are collective: every process calls them in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from gatespace.errors import UsageError
from gatespace.gating.projection import Head
from gatespace.models.load import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class ShardedModel(Model):
    """A sharded model; `shard` makes one. Its `head` is there within `whole` and `learning` only."""

    @property
    def device(self) -> torch.device:
        """Where this process's shard is."""
        return torch.device(self._memo["device"])

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the passes; the shards are in float32."""
        found: torch.dtype = self._memo["dtype"]
        return found

    @property
    def head(self) -> Head:
        """The whole head, in the precision of the passes."""
        gathered: Head | None = self._memo.get("head")
        if gathered is None:
            raise RuntimeError("the head of a sharded model is there within whole() and learning() only")
        bias = None if gathered.bias is None else gathered.bias.to(self.dtype)
        return Head(gathered.weight.to(self.dtype), bias, gathered.scale, gathered.softcap)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """For passes without gradient, as many as each process needs: all weights are gathered once, in `dtype`."""
        parts = [part for part in self.body.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        self._memo["head"] = self._gathered()
        try:
            with torch.no_grad():
                yield
        finally:
            del self._memo["head"]
            for part in parts:
                part.set_reshard_after_forward(part is not self.body, recurse=False)
                part.reshard()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """For passes with gradient, as many in every process as in the others."""
        whole = self._gathered()
        pairs = [
            (tensor, tensor.detach().requires_grad_()) for tensor in (whole.weight, whole.bias) if tensor is not None
        ]
        leaves = [leaf for _, leaf in pairs]
        self._memo["head"] = Head(leaves[0], leaves[1] if len(leaves) > 1 else None, whole.scale, whole.softcap)
        try:
            yield
        finally:
            del self._memo["head"]
        for tensor, leaf in pairs:
            if tensor.requires_grad:
                tensor.backward(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)

    def gathered(self, *, here: bool = True) -> Model | None:
        """The whole model, in float32 on the CPU; None in a process that takes part and does not want it."""
        state: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value  # one at a time on the device
                if here:
                    state[name] = whole.cpu()
        if not here:
            return None
        network = copy.deepcopy(self._memo["empty"])
        network.load_state_dict(state, assign=True)
        network.tie_weights()
        return Model(network.eval(), self.tokenizer, self.name, self.source)

    def _gathered(self) -> Head:
        own = super().head  # with the shards
        # Each process has a gradient of its own of the whole head; their sum is sharded again.
        weight, bias = (
            None if tensor is None else cast(DTensor, tensor).full_tensor(grad_placements=[Partial()])
            for tensor in (own.weight, own.bias)
        )
        assert weight is not None
        return Head(weight, bias, own.scale, own.softcap)


def shard(
    model: Model, *, dtype: torch.dtype, device: str | torch.device = "cpu", mesh: DeviceMesh | None = None
) -> ShardedModel:
    """Divide a model among all processes. `model` itself is not to be used any more.

    Args:
        model: Whole and in float32 in the first process; the weights of the others are ignored.
        dtype: The precision of the passes.
        device: Where this process's shard goes.
        mesh: The processes; None: all of them.
    """
    if not hasattr(FSDPModule, "set_reshard_after_forward"):
        raise UsageError(
            "engine.parallel: fsdp needs a newer torch", got=torch.__version__, instead="torch 2.8 or newer"
        )
    network, device = model.network, torch.device(device)
    weights = {name: tensor.detach() for name, tensor in (*network.named_parameters(), *network.named_buffers())}
    tied = network.get_output_embeddings().weight is network.get_input_embeddings().weight
    network.to(torch.device("meta"))  # type: ignore[arg-type]
    network.tie_weights()  # no more than a tensor at a time becomes whole on a device
    empty, body, layer = copy.deepcopy(network), model.body, network.get_output_embeddings()
    mesh = mesh or init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    for part in _blocks(body):
        fully_shard(part, **options)
    fully_shard(body, reshard_after_forward=False, **options)
    if not tied:
        fully_shard(layer, **options)
    _fill(network, weights, device)
    if tied:  # the body's embedding is another tensor now
        layer.weight = network.get_input_embeddings().weight
    for module in network.modules():
        if isinstance(module, FSDPModule):
            # Losses are sums over tokens, so their gradients are summed; the optimizer divides by all tokens.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    sharded = ShardedModel(network, model.tokenizer, model.name, model.source)
    known = {"unfit": model._memo["unfit"]} if "unfit" in model._memo else {}
    sharded._memo.update(known, empty=empty, dtype=dtype, device=str(device))
    return sharded


def _blocks(body: nn.Module) -> list[nn.Module]:
    """The repeated layers: the children of the longest list of modules."""
    lists = [list(module) for module in body.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _fill(network: PreTrainedModel, weights: dict[str, Tensor], device: torch.device) -> None:
    """Give the shards of a network without weights, and its buffers, the values that the first process has."""
    first = torch.distributed.get_rank() == 0

    def whole(name: str) -> Tensor:
        return weights[name].to(device) if first else torch.empty_like(weights[name], device=device)

    shards: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        if isinstance(parameter, DTensor):  # a tied head is not sharded by itself
            shards[name] = distribute_tensor(whole(name), parameter.device_mesh, parameter.placements)
    network.load_state_dict(shards, strict=False, assign=True)
    for name, _ in list(network.named_buffers()):
        buffer = whole(name)
        torch.distributed.broadcast(buffer, 0)
        module, _, key = name.rpartition(".")
        network.get_submodule(module)._buffers[key] = buffer
