"""Time per activity of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Wall and CPU seconds by activity.

    Devices compute asynchronously, so each activity ends with one synchronisation.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
            torch.get_device_module(self._device).synchronize(self._device)
        finally:
            self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall
            self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu
