"""`gatespace doctor`: versions, CPU and devices, missing packages, and whether a tiny run trains here."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from gatespace.cli.console import console, gatespace_version, print_json

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "vllm", "ray", "trl", "verl")
_ROUNDING = 1e-4
"""Relative tolerance of the first loss against the CPU's: covers the order of sums, but no reduced precision."""
_DRIFT = 1e-2
"""Of later losses: Adam takes a full step even on a gradient of pure rounding."""
_LOGS = ("metrics.jsonl", "tokens.jsonl", "predictions-test.jsonl")


def doctor(
    device: Annotated[
        str | None,
        typer.Option("--device", help="Compare this device with the CPU: cpu, cuda, cuda:1, ..."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show versions and missing packages, and train a tiny run.

    With --device: the run trains there, its losses are compared with the
    CPU's, and it is killed and resumed, which must give the same bytes.
    Nothing is downloaded.

    \b
    gatespace doctor
    gatespace doctor --device cuda --json

    Exit code 0: usable; 1: a package is missing or a check failed; 2: there
    is no such device. The JSON has gatespace, python, platform, cpu,
    packages, devices, missing, extras, usable, and checks \\[{name, status,
    detail}].
    """
    report = _machine()
    report["checks"] = [] if "torch" in report["missing"] else _checks(device, _say)
    report["usable"] = not report["missing"] and all(check["status"] != "failed" for check in report["checks"])
    if as_json:
        print_json(report)
    else:
        _print(report)
    for check in report["checks"]:
        if check["status"] == "failed":
            _say(f"failed: {check['name']}: {check['detail']}")
    if not report["usable"]:
        raise typer.Exit(1)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- the machine


def _machine() -> dict[str, Any]:
    missing, extras = _missing()
    report: dict[str, Any] = {
        "gatespace": gatespace_version(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "missing": missing,
        "extras": extras,
    }
    try:
        import torch

        from gatespace.config import EngineConfig
        from gatespace.training.setup import placement

        precision = placement(EngineConfig(device="cpu")).precision
    except Exception as error:  # of a broken installation: ImportError, OSError of a shared library, ...
        report["missing"] = [*dict.fromkeys([*missing, "torch"])]
        return report | {"cpu": None, "devices": [], "torch_error": f"{type(error).__name__}: {error}"}
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    bf16 = "bf16 in hardware" if precision == "bf16" else "bf16 emulated"
    kind, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    report["cpu"] = f"{kind}, {bf16}, {cores} cores, {threads} threads"
    cuda = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return report | {"devices": ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]}


def _missing() -> tuple[list[str], dict[str, list[str]]]:
    """Unmet requirements of the core, and of each extra (those of extras inside it are listed there)."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in metadata.requires("gatespace") or []]
        names = metadata.metadata("gatespace").get_all("Provides-Extra") or []
    except (ImportError, metadata.PackageNotFoundError):  # runs from source
        return [], {}

    def unmet(extra: str) -> list[str]:
        found = []
        for needed in requirements:
            version = _version(needed.name)
            if needed.name == "gatespace" or (needed.marker and not needed.marker.evaluate({"extra": extra})):
                continue
            if version is None or not needed.specifier.contains(version, prereleases=True):
                text = f"{needed.name}{needed.specifier}"
                found.append(text if version is None else f"{text} (found {version})")
        return found

    core = unmet("")
    return core, {name: missing for name in names if (missing := [one for one in unmet(name) if one not in core])}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------------------------------------------- the runs


def _checks(device: str | None, say: Callable[[str], None]) -> list[dict[str, str]]:
    """Checks that share their runs; those after a failed one are skipped."""
    from gatespace.config import EngineConfig, parse_config
    from gatespace.training.setup import placement

    placement(parse_config(EngineConfig, {"device": device or "auto"}))  # raises if there is no such device
    with tempfile.TemporaryDirectory(prefix="gatespace-") as folder:
        runs = _Runs(device or "auto", Path(folder))
        checks = {"a tiny run trains": runs.trains}
        if device is not None:
            checks |= {"its losses are the CPU's": runs.as_on_the_cpu, "killed and resumed: the same": runs.resumed}
        done: list[dict[str, str]] = []
        for name, check in checks.items():
            status, detail = "skipped", "a check before it failed"
            if all(one["status"] == "ok" for one in done):
                if device is not None:
                    say(f"{device}: {name} …")
                try:
                    passed, detail = check()
                except Exception as error:  # any error of a device is a finding
                    passed, detail = False, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                status = "ok" if passed else "failed"
            done.append({"name": name, "status": status, "detail": detail})
        return done


class _Killed(Exception):
    """A run was stopped between two checkpoints."""


class _Runs:
    def __init__(self, device: str, folder: Path) -> None:
        self._device, self._folder = device, folder

    def trains(self) -> tuple[bool, str]:
        """Train the tiny pair for four steps."""
        losses = self._losses("there", self._device)
        return len(losses) == 4, f"four steps, loss {losses[0]:.4f} to {losses[-1]:.4f}"

    def as_on_the_cpu(self) -> tuple[bool, str]:
        """Compare the losses with those of the same run on the CPU."""
        pairs = zip(self._losses("there", self._device), self._losses("here", "cpu"), strict=True)
        apart = [abs(there - here) / abs(here) for there, here in pairs]
        detail = f"the first loss is apart by {apart[0]:.1e}, later ones by at most {max(apart):.1e}"
        return apart[0] <= _ROUNDING and max(apart) <= _DRIFT, detail

    def resumed(self) -> tuple[bool, str]:
        """Kill the run after step 2, resume it, and compare records and weights."""
        try:
            self._losses("killed", self._device, until=2)
        except _Killed:
            self._losses("killed", self._device)
        there, killed = self._folder / "there", self._folder / "killed"
        different = [name for name in _LOGS if (there / name).read_bytes() != (killed / name).read_bytes()]
        prints = [json.loads((folder / "summary.json").read_text())["fingerprint"] for folder in (there, killed)]
        different += ["weights"] if prints[0] != prints[1] else []
        return (
            not different,
            f"not the same: {', '.join(different)}" if different else "records and weights, to the byte",
        )

    def _losses(self, name: str, device: str, until: int | None = None) -> list[float]:
        from gatespace.config import TrainConfig, parse_config
        from gatespace.training.progress import Silent
        from gatespace.training.train import train

        class Until(Silent):
            def step(self, step: int, *_: Any) -> None:
                if step == until:
                    raise _Killed

        settings = {
            "task": {"name": "synthetic", "brief": True},
            "pair": {"student": "tiny", "teacher": "tiny"},
            "objective": {"gate": "H2"},
            "steps": 4,
            "batch_size": 8,
            "rollout": {"max_new_tokens": 8},
            "optimizer": {"lr": 1e-3},
            "engine": {"precision": "fp32", "deterministic": True, "device": device},
            "evaluation": {"limit": 8, "final": ["test"], "every": 0, "max_new_tokens": 8},
            "checkpoint": {"every": 1},
            "teacher": {"cache": str(self._folder / "scores" / name)},
            "output": str(self._folder / name),
        }
        train(parse_config(TrainConfig, settings), Until())
        lines = (self._folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]


# ---------------------------------------------------------------------------------------------------- printing


def _print(report: dict[str, Any]) -> None:
    out = console()
    for name in ("gatespace", "python", "platform", "cpu"):
        out.print(f"{name:<10} {report[name]}", soft_wrap=True)
    out.print(f"{'devices':<10} {', '.join(report['devices'])}", soft_wrap=True)
    installed = [f"{name} {version}" for name, version in report["packages"].items() if version]
    absent = [name for name, version in report["packages"].items() if not version]
    out.print(f"{'packages':<10} {', '.join(installed)}", soft_wrap=True)
    if absent:
        out.print(f"{'absent':<10} {', '.join(absent)}", soft_wrap=True)
    for extra, missing in report["extras"].items():  # in a clone: no package index has gatespace
        out.print(f"extra {extra} lacks {', '.join(missing)}: pip install '.[{extra}]'", soft_wrap=True)
    for check in report["checks"]:
        style = {"ok": "green", "failed": "bold red"}.get(check["status"], "yellow")
        out.print(f"{check['name']}: {check['status']}", style=style, end="")
        out.print(f" ({check['detail']})", soft_wrap=True)
    for requirement in report["missing"]:
        out.print(f"missing: {requirement}; add it with: pip install --upgrade '.', in a clone of gatespace")
    if report.get("torch_error"):
        out.print(report["torch_error"], soft_wrap=True)
    verdict = ("Usable.", "green") if report["usable"] else ("Not usable.", "bold red")
    out.print(verdict[0], style=verdict[1])
