"""A sharded model (FSDP2): weights, gradients and optimizer state are sharded over processes.

Every layer is gathered for its pass and released after it. The head never runs as a layer: losses take its weight, so
`learning` gathers it once for all passes of an update, and its gradient is reduced to the shards once. Weights are kept
in float32; passes run in `dtype`.

All methods are collective: every process must call them in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class ShardedModel(Model):
    """A sharded model, created by `shard`. Its `head` exists only within `whole` and `learning`."""

    empty: PreTrainedModel = field(repr=False)
    """Without weights, for `gathered`."""
    compute_dtype: torch.dtype
    shard_device: torch.device
    _head: Head | None = field(default=None, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of this process's shard."""
        return self.shard_device

    @property
    def dtype(self) -> torch.dtype:
        """Compute precision; the shards are in float32."""
        return self.compute_dtype

    @property
    def head(self) -> Head:
        """The full head, in compute precision."""
        gathered = self._head
        if gathered is None:
            raise RuntimeError("the head of a sharded model is there within whole() and learning() only")
        bias = None if gathered.bias is None else gathered.bias.to(self.dtype)
        return Head(gathered.weight.to(self.dtype), bias, gathered.scale, gathered.softcap)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights once, in `dtype`, for passes without gradient; their number may differ by process."""
        parts = [part for part in self.body.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        self._head = self._gathered()
        try:
            with torch.no_grad():
                yield
        finally:
            self._head = None
            for part in parts:
                part.set_reshard_after_forward(part is not self.body, recurse=False)
                part.reshard()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Gather the head for passes with gradient; all processes must run the same number."""
        whole = self._gathered()
        pairs = [
            (tensor, tensor.detach().requires_grad_()) for tensor in (whole.weight, whole.bias) if tensor is not None
        ]
        leaves = [leaf for _, leaf in pairs]
        self._head = Head(leaves[0], leaves[1] if len(leaves) > 1 else None, whole.scale, whole.softcap)
        try:
            yield
        finally:
            self._head = None
        for tensor, leaf in pairs:
            if tensor.requires_grad:
                tensor.backward(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)

    def gathered(self, *, here: bool = True) -> Model | None:
        """Return the full model in float32 on the CPU; None where `here` is False."""
        state: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value  # one at a time on the device
                if here:
                    state[name] = whole.cpu()
        if not here:
            return None
        network = copy.deepcopy(self.empty)
        network.load_state_dict(state, assign=True)
        network.tie_weights()
        return Model(network.eval(), self.tokenizer, self.name, self.source)

    def _gathered(self) -> Head:
        own = super().head  # sharded
        # Each process has its own gradient of the full head; their sum is sharded again.
        weight, bias = (
            None if tensor is None else cast(DTensor, tensor).full_tensor(grad_placements=[Partial()])
            for tensor in (own.weight, own.bias)
        )
        assert weight is not None
        return Head(weight, bias, own.scale, own.softcap)


def shard(
    model: Model, *, dtype: torch.dtype, device: str | torch.device = "cpu", mesh: DeviceMesh | None = None
) -> ShardedModel:
    """Shard a model over all processes. `model` itself must not be used afterwards.

    Args:
        model: Full and in float32 in the first process; the weights of the others are ignored.
        dtype: Compute precision.
        device: Device of this process's shard.
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
    network.tie_weights()  # from meta, so that only one full tensor at a time is on a device
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
    if tied:  # the embedding was replaced by its shard
        layer.weight = network.get_input_embeddings().weight
    for module in network.modules():
        if isinstance(module, FSDPModule):
            # Losses are sums over tokens, so gradients are summed; the optimizer divides by the total tokens.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    sharded = ShardedModel(network, model.tokenizer, model.name, model.source, empty, dtype, device)
    sharded.unpackable = model.unpackable
    return sharded


def _blocks(body: nn.Module) -> list[nn.Module]:
    """Return the repeated layers: the children of the longest ModuleList."""
    lists = [list(module) for module in body.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _fill(network: PreTrainedModel, weights: dict[str, Tensor], device: torch.device) -> None:
    """Fill the shards and buffers of a meta network with the values of the first process."""
    first = torch.distributed.get_rank() == 0

    def whole(name: str) -> Tensor:
        return weights[name].to(device) if first else torch.empty_like(weights[name], device=device)

    shards: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        if isinstance(parameter, DTensor):  # a tied head is not sharded separately
            shards[name] = distribute_tensor(whole(name), parameter.device_mesh, parameter.placements)
    network.load_state_dict(shards, strict=False, assign=True)
    for name, _ in list(network.named_buffers()):
        buffer = whole(name)
        torch.distributed.broadcast(buffer, 0)
        module, _, key = name.rpartition(".")
        network.get_submodule(module)._buffers[key] = buffer
