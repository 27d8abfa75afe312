"""A CPU as a platform of verl, by its own plug-in registry: enough for its FSDP engine to train a small model.

verl ships platforms for GPUs and NPUs only. Import this before anything asks verl for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One device, gloo between processes, nothing to profile."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: ModuleType = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def is_ipc_supported(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def cudart(self) -> None: ...


set_platform(PlatformCPU())
