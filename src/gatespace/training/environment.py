"""The environment of a run (versions, machine): recorded, but not part of its identity."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gatespace
from gatespace.training.setup import Placement

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "peft")


def environment(place: Placement) -> dict[str, Any]:
    """Versions, machine and threads."""
    return {
        "gatespace": gatespace.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(place.device) if place.device.startswith("cuda") else place.device,
        "precision": place.precision,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of gatespace's source if run from a checkout, marked if files were changed."""
    source = Path(gatespace.__file__).parent
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
