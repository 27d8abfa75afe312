"""Facts about this machine, this Python and its packages, for `gatespace doctor`. An unknown fact is None."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatespace.cli.console import gatespace_version

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "gatespace"
FOR_DEVELOPMENT = frozenset({"dev", "docs", "bench"})
"""Extras for developing gatespace itself. All others add a feature."""

ENGINES = {
    "transformers": "language models",
    "vllm": "fast rollouts and teacher scores",
    "accelerate": "several GPUs or machines",
    "ray": "many runs at once",
    "trl": "its trainers",
    "verl": "its trainers",
}
_BF16_PROBES = {"amx_tile": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported"}


def facts() -> dict[str, Any]:
    """Everything that `gatespace doctor --json` prints except checks and verdict."""
    torch = torch_facts()
    return {
        "gatespace": gatespace_facts(),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "torch": torch,
        "devices": device_facts() if torch["usable"] else [],
        "engines": engine_facts(torch),
        "extras": extra_facts(),
    }


# ---------------------------------------------------------------------------------------------------- packages


def gatespace_facts() -> dict[str, Any]:
    """The version of gatespace and the unmet requirements of its core."""
    missing = _missing(_requirements().get("", []))
    return {"version": gatespace_version(), "installed": _version(DISTRIBUTION) is not None, "missing": missing}


def extra_facts() -> list[dict[str, Any]]:
    """The extras of the installed gatespace, their missing requirements, and the command that adds each.

    Empty if unknown: gatespace is not installed, or the package `packaging` is not.
    """
    found = []
    for name, wanted in _requirements().items():
        if name:
            missing = _missing(wanted)
            found.append({"name": name, "installed": not missing, "missing": missing, "command": _pip(name)})
    return found


def engine_facts(torch: dict[str, Any]) -> list[dict[str, Any]]:
    """The engines: what is known without importing them, and the command that adds each."""
    native = {
        "name": "native",
        "installed": torch["usable"],
        "version": torch["version"],
        "for": "everything, in this process",
        "command": None if torch["usable"] else "pip install torch",
    }
    others = []
    commands = {
        needed.name.lower(): _pip(extra)
        for extra, wanted in reversed(_requirements().items())  # reversed, so that the first of several extras wins
        for needed in wanted
        if extra and extra not in FOR_DEVELOPMENT
    }
    for name, purpose in ENGINES.items():
        installed = _found(name)
        command = None if installed else commands.get(name, f"pip install {name}")
        others.append(
            {"name": name, "installed": installed, "version": _version(name), "for": purpose, "command": command}
        )
    return [native, *others]


def _requirements() -> dict[str, list[Requirement]]:
    """Extra → its requirements on this machine, including those of nested extras; "" is the core. Empty: unknown."""
    try:
        from packaging.requirements import Requirement

        known = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
        extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except (ImportError, metadata.PackageNotFoundError):
        return {}

    def applying(extra: str) -> list[Requirement]:
        return [needed for needed in known if needed.marker is None or needed.marker.evaluate({"extra": extra})]

    core = applying("")
    own = {extra: [needed for needed in applying(extra) if needed not in core] for extra in extras}
    found = {"": core}
    for extra in extras:
        included = [extra]
        for name in included:  # grows while iterating
            for needed in own[name]:
                if needed.name == DISTRIBUTION:
                    included += sorted(needed.extras.difference(included))
        found[extra] = [needed for name in included for needed in own[name] if needed.name != DISTRIBUTION]
    return found


def _missing(wanted: Iterable[Requirement]) -> list[str]:
    """The unmet requirements, each with the installed version if there is one."""
    unmet = []
    for needed in wanted:
        version = _version(needed.name)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            text = str(needed).partition(";")[0].strip()
            unmet.append(text if version is None else f"{text} (found {version})")
    return list(dict.fromkeys(unmet))


def _pip(extra: str) -> str:
    return f"pip install '.[{extra}]'"  # no package index has it


def _found(module: str) -> bool:
    return bool(_tried(lambda: importlib.util.find_spec(module) is not None))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------------------------------------------- the machine


def cpu_facts() -> dict[str, Any]:
    """Cores of the machine, cores that this process may run on, and a container's limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    quota = _words("/sys/fs/cgroup/cpu.max")
    limit = float(quota[0]) / float(quota[1]) if len(quota) == 2 and quota[0].isdigit() else None
    return {
        "cores": os.cpu_count(),
        "usable": len(affinity(0)) if affinity else os.cpu_count(),
        "container_limit": limit,
    }


def memory_facts() -> dict[str, int | None]:
    """Bytes of memory: of the machine, available now, and a container's limit."""
    total = _tried(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    meminfo = _words("/proc/meminfo")
    available = _tried(lambda: int(meminfo[meminfo.index("MemAvailable:") + 1]) * 1024)
    words = _words("/sys/fs/cgroup/memory.max") or _words("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limit = int(words[0]) if words and words[0].isdigit() else None
    # "No limit" appears as a huge number.
    if limit is not None and total is not None and limit >= total:
        limit = None
    return {"total_bytes": total, "available_bytes": available, "container_limit_bytes": limit}


def torch_facts() -> dict[str, Any]:
    """Whether torch can be imported, its threads, and the CPU's bf16 instructions."""
    none: dict[str, Any] = {"threads": None, "cpu_capability": None, "bf16": {}}
    try:
        import torch
    # The doctor must survive any error of a broken installation: ImportError, OSError from a shared library, ...
    except Exception as error:
        return {"usable": False, "version": _version("torch"), "error": f"{type(error).__name__}: {error}", **none}
    return {
        "usable": True,
        "version": str(torch.__version__),
        "error": None,
        "threads": _tried(torch.get_num_threads),
        "cpu_capability": _tried(lambda: torch.backends.cpu.get_cpu_capability()),
        "bf16": _bf16(torch),
    }


def device_facts() -> list[dict[str, Any]]:
    """The devices that torch can use, the CPU first."""
    import torch

    found: list[dict[str, Any]] = [{"kind": "cpu", "index": 0, "name": platform.processor() or platform.machine()}]
    cpu_name = _tried(lambda: torch.cpu.get_capabilities()["cpu_name"])
    if cpu_name:
        found[0]["name"] = str(cpu_name)
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind, None)
        if module is None or not _tried(module.is_available):
            continue
        for index in range(_tried(module.device_count) or 0):
            found.append({"kind": kind, "index": index, "name": _tried(partial(module.get_device_name, index))})
    if _tried(lambda: torch.backends.mps.is_available()):
        found.append({"kind": "mps", "index": 0, "name": "Apple GPU"})
    return found


def _bf16(torch: Any) -> dict[str, bool]:
    """The CPU's bf16 instructions by name. Older torch has probes instead of `get_capabilities`."""
    known = _tried(lambda: dict(torch.cpu.get_capabilities())) or {}
    found = {name: bool(value) for name, value in sorted(known.items()) if "bf16" in name}
    if found:
        return found
    probed = {name: _tried(getattr(torch.cpu, function, lambda: None)) for name, function in _BF16_PROBES.items()}
    return {name: bool(value) for name, value in probed.items() if value is not None}


def _tried(fact: Callable[[], Any]) -> Any:
    """`fact()`, or None if it raises: probes differ between systems and torch releases."""
    try:
        return fact()
    except Exception:
        return None


def _words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []
