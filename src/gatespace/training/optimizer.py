"""AdamW over float32 master weights, whatever precision the network computes in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import set_stance

from gatespace.config import OptimizerConfig
from gatespace.errors import RunError, UsageError
from gatespace.training.processes import ONE, Processes


@dataclass(frozen=True)
class Update:
    """Result of an update."""

    grad_norm: float
    """Norm of the gradient of the mean loss, before clipping."""
    lr: float


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of update `step` (from 0) of `steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    share = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    height = 1 - share if config.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


class Follower(Protocol):
    """Tracks the weights, e.g. a teacher that averages them."""

    def follow(self, weights: Mapping[str, Tensor]) -> None: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def restore(self, tensors: Mapping[str, Tensor]) -> None: ...


class Optimizer:
    """Updates a network from the gradients of a sum of token losses.

    In bfloat16 the network holds rounded copies of the float32 master weights kept here. Several processes sum their
    gradients and each make the same update; if the network is sharded, each updates its shard.

    Args:
        network: Loaded in float32; its parameters that require gradient are trained.
        config: AdamW and learning rate settings.
        steps: Total number of updates.
        dtype: Compute precision of the network from now on. A sharded network handles that itself.
        processes: The processes that train it.
    """

    def __init__(
        self, network: nn.Module, config: OptimizerConfig, *, steps: int, dtype: torch.dtype, processes: Processes = ONE
    ) -> None:
        self._config, self._steps, self._processes = config, steps, processes
        self._network = network
        self.followers: list[Follower] = []
        """Called after every update, and part of a checkpoint."""
        self._own = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self._mixed = dtype != torch.float32 and not processes.sharded
        if self._mixed:
            self.masters = {name: p.detach().clone().requires_grad_() for name, p in self._own.items()}
            _convert(network, dtype)
            self._folding = [
                p.register_post_accumulate_grad_hook(_fold_into(self.masters[name])) for name, p in self._own.items()
            ]
        else:
            self.masters = dict(self._own)
        matrices = [p for p in self.masters.values() if p.dim() > 1]
        vectors = [p for p in self.masters.values() if p.dim() <= 1]
        self._device = next(iter(self.masters.values())).device.type
        # No weight decay on norms and biases.
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        self._eight = config.states == "8bit"
        if self._eight:
            self._adam = eight_bit(processes)([group for group in groups if group["params"]], **options)
        else:
            self._adam = torch.optim.AdamW(groups, **options, fused=self._device in ("cpu", "cuda"))
        self._adam.zero_grad()

    def step(self, number: int, tokens: float) -> Update:
        """Update with the mean token loss of all backward passes since the last update.

        Args:
            number: The step, from 0.
            tokens: Those of this process, or the sum of their weights; the mean is over all processes.
        """
        tokens = self._processes.total(tokens)
        self._processes.sum_gradients(self.masters.values())
        gradients = [p.grad for p in self.masters.values() if p.grad is not None]
        norm = float(self._processes.full(torch.nn.utils.get_total_norm(gradients))) if gradients else 0.0
        total = norm / tokens
        if not math.isfinite(total):
            raise RunError(
                "the gradient is not finite", got=total, instead="a smaller learning rate, or precision fp32"
            )
        clip = self._config.clip
        factor = 1.0 if clip is None else min(1.0, clip / (total + 1e-6))
        torch._foreach_mul_(gradients, factor / tokens)
        lr = learning_rate(self._config, number, self._steps)
        for group in self._adam.param_groups:
            group["lr"] = torch.tensor(lr) if self._eight else lr
        # torchao compiles its step, which on a CPU would need a C++ compiler.
        with set_stance("force_eager") if self._eight and self._device == "cpu" else nullcontext():
            self._adam.step()
        # Fused AdamW does not bump the version counters that memoised fingerprints rely on.
        torch.autograd.graph.increment_version(list(self.masters.values()))
        self._adam.zero_grad()
        self._publish()
        for follower in self.followers:
            follower.follow(self.masters)
        return Update(total, lr)

    def discard(self) -> None:
        """Drop the gradients accumulated so far."""
        self._adam.zero_grad()
        self._network.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Everything the next update depends on; if sharded, whole in the first process only."""
        found = {f"weight/{name}": p.detach() for name, p in self.masters.items()}
        for name, p in self.masters.items():
            for key, value in self._adam.state.get(p, {}).items():
                found |= {f"{key}{part}/{name}": tensor for part, tensor in _parts(value).items()}
        for follower in self.followers:
            found |= follower.tensors()
        return self._processes.gather_tensors(found)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        with torch.no_grad():
            for name, p in self.masters.items():
                p.copy_(self._processes.shard_like(p, tensors[f"weight/{name}"]))
        fused = self._adam.param_groups[0].get("fused", False)
        for name, p in self.masters.items():
            if (count := tensors.get(f"step/{name}")) is None:  # it never had a gradient
                continue
            # Fused AdamW counts on the parameter's device, the others on the CPU.
            self._adam.state[p] = state = {"step": count.to(p.device if fused else "cpu", copy=True)}
            for key in ("exp_avg", "exp_avg_sq"):
                if self._eight:
                    state[key] = self._adam._new_buffer(p, key == "exp_avg")
                    for part, tensor in _parts(state[key]).items():
                        tensor.copy_(tensors[f"{key}{part}/{name}"])
                else:
                    state[key] = self._processes.shard_like(p, tensors[f"{key}/{name}"].to(p.device, copy=True))
        self._publish()
        for follower in self.followers:
            follower.restore(tensors)

    def widen(self) -> None:
        """Give the network its float32 weights for saving; no update can follow."""
        if self._mixed:
            for hook in self._folding:
                hook.remove()
            _convert(self._network, torch.float32)
            with torch.no_grad():
                for name, p in self._own.items():
                    p.copy_(self.masters[name])

    @torch.no_grad()
    def _publish(self) -> None:
        if self._mixed:
            for name, p in self._own.items():
                p.copy_(self.masters[name])


def _fold_into(master: Tensor) -> Callable[[Tensor], None]:
    """Hook that moves a parameter's gradient into its master's at once, so that the two sets never coexist."""

    def fold(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return fold


def eight_bit(processes: Processes) -> Any:
    """AdamW with 8-bit states; raises if it is not available."""
    if processes.sharded:
        raise UsageError(
            "optimizer.states: 8bit and engine.parallel: fsdp do not go together",
            why="blocks of 256 weights do not end where shards do",
            instead="optimizer.states: fp32, of which each process has a shard, or engine.parallel: ddp",
        )
    try:
        return import_module("torchao.optim").AdamW8bit
    except ImportError as error:
        raise UsageError("optimizer.states: 8bit needs the package torchao", instead="pip install torchao") from error


def _parts(state: Any) -> dict[str, Tensor]:
    """Plain tensors of an optimizer state: codes, scales and their map if quantised."""
    sharded = hasattr(state, "full_tensor")  # its parts are this process's alone
    names = state.__tensor_flatten__()[0] if hasattr(state, "__tensor_flatten__") and not sharded else ()
    return {f".{name}": getattr(state, name) for name in names} or {"": state}


@torch.no_grad()
def _convert(network: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point parameters, but no buffers as `network.to(dtype)` would: rounded rotary frequencies encode
    other positions."""
    for parameter in network.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
