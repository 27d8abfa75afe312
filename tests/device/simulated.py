"""A device that stands for a GPU: `sim`. It computes on the CPU, and is as strict as CUDA.

A tensor there is a wrapper around a CPU tensor. Operations that mix it with tensors of the CPU raise as they would on
CUDA, and what costs time on a GPU is counted by the line of gatespace that asked for it: waits (the host needs a number
of the device), copies to the device, and launches (operations that compute). It shows what mixes devices and what
waits; it shows nothing of speed or memory. A backend can be registered once per process and not be taken back, so tests
that use it run in a process of their own.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import torch.optim.optimizer
import torch.utils._foreach_utils
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "sim"
waits: Counter[str] = Counter()
"""Line of gatespace → how often the host waited for the device there."""
copies: Counter[str] = Counter()
launches: Counter[str] = Counter()
"""Operation → how often."""

_aten = torch.ops.aten
_libraries: list[Any] = []
"""What is registered ends with the object that registered it."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_SYNCHRONOUS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount", "_unique2", "repeat_interleave"}
"""Their result, or its shape, is needed on the host."""
_NOT_DETERMINISTIC = {"put", "put_", "histc", "median", "nanmedian", "nll_loss2d_forward"}
"""They raise where torch is told to be deterministic; so do some others for some arguments."""
_VIEWS = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute", "select", "slice"),
    *("split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
    *("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense"),
}
"""They launch nothing."""


def reset() -> None:
    """Start to count anew."""
    for counter in (waits, copies, launches):
        counter.clear()


def _line() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, package, name = frame.f_code.co_filename.rpartition("/gatespace/")
        if package:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class SimTensor(Tensor):
    """A tensor on the simulated device; `raw` holds its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> SimTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=f"{NAME}:0",
        )
        made.raw = raw
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Any:  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: SimTensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw = value.raw

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        waits[_line()] += 1
        return self.raw.detach().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert a tensor of device {NAME}:0 to numpy: call .cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> SimTensor:
        copied = SimTensor(self.raw.clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimTensor({self.raw!r})"


def _on_sim(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    if name in ("copy_", "_to_copy", "_copy_from"):
        return _copy(name, func, args, kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    sims = [tensor for tensor in tensors if isinstance(tensor, SimTensor)]
    if sims:
        _check_devices(name, args, tensors)
        boolean_index = name in _INDEXING and any(
            isinstance(leaf, SimTensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        if name in _SYNCHRONOUS or boolean_index:
            waits[_line()] += 1
        if torch.are_deterministic_algorithms_enabled() and (
            name in _NOT_DETERMINISTIC
            or (name in ("cumsum", "cumsum_") and args[0].is_floating_point())
            or (name == "bincount" and len(args) > 1 and args[1] is not None)
        ):
            raise RuntimeError(f"{name}_cuda does not have a deterministic implementation")
    if name not in _VIEWS:
        launches[name] += 1
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    raw_args, raw_kwargs = tree_map(lambda leaf: leaf.raw if isinstance(leaf, SimTensor) else leaf, (args, kwargs))
    out = func(*raw_args, **raw_kwargs)
    if name == "_local_scalar_dense" or (device is not None and not _on_sim(device)):
        return out
    out = tree_map(lambda leaf: SimTensor(leaf) if isinstance(leaf, Tensor) else leaf, out)
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
        out = return_and_correct_aliasing(func, args, kwargs, out)
    return out


def _check_devices(name: str, args: Any, tensors: list[Tensor]) -> None:
    """Numbers without dimensions may come from the CPU, except in fused optimizers; so may indices, at a price."""
    strangers = [tensor for tensor in tensors if not isinstance(tensor, SimTensor)]
    strangers = [tensor for tensor in strangers if tensor.dim() > 0 or name.startswith("_fused")]
    if name in _INDEXING and strangers:
        indices = {id(leaf) for leaf in tree_leaves(args[1])}
        copies[_line()] += sum(id(tensor) in indices for tensor in strangers)
        strangers = [tensor for tensor in strangers if id(tensor) not in indices]
    if strangers:
        shape = tuple(strangers[0].shape)
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} got {NAME}:0 and cpu {shape}")


def _copy(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    launches[name] += 1
    if name == "_to_copy":
        source, device = args[0], kwargs.get("device")
        there = isinstance(source, SimTensor) if device is None else _on_sim(device)
        _crossed(source, there)
        raw = source.raw if isinstance(source, SimTensor) else source
        out = func(raw, **{**kwargs, "device": None})
        out = out.clone() if out.data_ptr() == raw.data_ptr() else out
        return SimTensor(out) if there else out
    into, source = (args[1], args[0]) if name == "_copy_from" else (args[0], args[1])
    _crossed(source, isinstance(into, SimTensor))
    raw = source.raw if isinstance(source, SimTensor) else source
    (into.raw if isinstance(into, SimTensor) else into).copy_(raw)
    return into


def _crossed(source: Tensor, there: bool) -> None:
    if isinstance(source, SimTensor) and not there:
        waits[_line()] += 1
    elif there and not isinstance(source, SimTensor):
        copies[_line()] += 1


def register() -> None:
    """Make the device `sim` known to torch, for the rest of this process."""
    module = _DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # type: ignore[attr-defined]
    module.synchronize = lambda _=None: waits.update([_line()])  # type: ignore[attr-defined]
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def kernel(operation: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            kept = {key: value for key, value in kwargs.items() if key not in ("layout", "pin_memory")}
            return _run(operation, args, {**kept, "device": torch.device(NAME)})

        return made

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> SimTensor:
        return SimTensor(torch.empty(size, dtype=dtype))

    def strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> SimTensor:
        return SimTensor(torch.empty_strided(size, stride, dtype=dtype))

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", strided, "PrivateUse1")
    library.impl(
        "_copy_from",
        lambda source, into, non_blocking=False: _copy("_copy_from", None, (source, into), {}),
        "PrivateUse1",
    )
    for base in ("arange", "full", "eye", "linspace", "scalar_tensor", "rand", "randn", "randperm"):
        packet = getattr(_aten, base)
        for overload in packet.overloads():
            operation = getattr(packet, overload)
            names = {argument.name for argument in operation._schema.arguments}
            if "device" in names and "out" not in names:
                library.impl(base if overload == "default" else f"{base}.{overload}", kernel(operation), "PrivateUse1")
    # A wrapper has no data to be replaced in place, and tied weights must stay one tensor.
    torch.__future__.set_swap_module_params_on_conversion(True)
    for part in (sys.modules["torch.optim.optimizer"], torch.utils._foreach_utils):  # they ask for exact types
        for name in dir(part):
            known = getattr(part, name)
            if "foreach_supported" in name and isinstance(known, list) and SimTensor not in known:
                known.append(SimTensor)
