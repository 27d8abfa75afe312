"""`gatespace doctor --device`: check a device's results against the CPU and its own, and measure its speed."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gatespace import Gate, fused_gated_kl
from gatespace.cli.environment import device_facts, memory_facts
from gatespace.config import TrainConfig, parse_config
from gatespace.gating.supports import SUPPORTS
from gatespace.training.progress import Silent
from gatespace.training.setup import placement
from gatespace.training.train import train

Found = tuple[bool, str]
_ROUNDING = 1e-4
"""Relative tolerance of float32 against the CPU: covers the order of sums, but no reduced precision."""
_DRIFT = 1e-2
"""Relative tolerance of losses after the first update: Adam takes a full step even on a gradient of pure rounding."""
_EXACT = {"precision": "fp32", "deterministic": True}
_LOGS = ("metrics.jsonl", "tokens.jsonl", "predictions-test.jsonl")


class _Killed(Exception):
    """A run was stopped between two checkpoints."""


class _Until(Silent):
    """Progress callback that kills a run after a step."""

    def __init__(self, last: int | None) -> None:
        self._last = last

    def step(self, step: int, *_: Any) -> None:
        if step == self._last:
            raise _Killed


def self_check(device: str, say: Callable[[str], None]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Describe a device and check its results against the CPU's.

    Args:
        device: As in `engine.device`.
        say: Called with each check's name as it starts.

    Returns:
        The device's facts and figures, and the checks as {name, status, detail}. Checks after a failed one are skipped.
    """
    with tempfile.TemporaryDirectory(prefix="gatespace-") as folder:
        check = _Check(device, Path(folder))
        facts = check.facts()
        done: list[dict[str, str]] = []
        for name, found in (
            ("losses against the CPU", check.losses),
            ("a run against the CPU", check.run),
            ("two deterministic runs are equal", check.again),
            ("a killed run resumes to the same bytes", check.resume),
            ("speed", check.speed),
        ):
            if any(one["status"] == "failed" for one in done):
                done.append({"name": name, "status": "skipped", "detail": "a check before it failed"})
                continue
            say(f"{device}: {name} …")
            try:
                passed, detail = found()
            except Exception as error:  # any error of a device is a finding
                passed, detail = False, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            done.append({"name": name, "status": "ok" if passed else "failed", "detail": detail})
        return {**facts, **check.figures}, done


class _Check:
    """The checks of one device, which share their runs."""

    def __init__(self, device: str, folder: Path) -> None:
        self._device, self._folder = device, folder
        self._place = placement(self._config("none", {"device": device}).engine)
        self._cuda = self._place.device.startswith("cuda")
        self.figures: dict[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        """Name and memory of the device, and whether it has bf16 in hardware."""
        kind, _, index = self._place.device.partition(":")
        known = [one for one in device_facts() if one["kind"] == kind and one["index"] == int(index or 0)]
        free, total = torch.cuda.mem_get_info(self._place.device) if self._cuda else (None, None)
        if kind == "cpu":
            memory = memory_facts()
            free, total = memory["available_bytes"], memory["container_limit_bytes"] or memory["total_bytes"]
        return {
            "device": self._place.device,
            "name": known[0]["name"] if known else None,
            "memory_bytes": total,
            "free_bytes": free,
            "bf16": "in hardware" if self._place.precision == "bf16" else "emulated or none",
            "compared_with": "itself" if kind == "cpu" else "cpu",
        }

    def losses(self) -> Found:
        """Compare every support's fused loss and gradient."""
        worst, where = 0.0, "loss"
        for support in SUPPORTS:
            there, here = (_loss(support, device) for device in (self._place.device, "cpu"))
            for what, got, right in zip(("loss", "gradient"), there, here, strict=True):
                apart = float((got - right).abs().max() / right.abs().max())
                if not apart <= worst:  # NaN too
                    worst, where = apart, f"{what} on {support}"
        return worst <= _ROUNDING, f"apart by {worst:.1e} of the largest {where}, at most {_ROUNDING:.0e}"

    def run(self) -> Found:
        """Compare the losses of a short run."""
        there = _column(self._train("there"), "loss")
        here = _column(self._train("here", engine={**_EXACT, "device": "cpu"}), "loss")
        apart = [abs(got - right) / abs(right) for got, right in zip(there, here, strict=True)]
        passed = apart[0] <= _ROUNDING and max(apart) <= _DRIFT
        return passed, f"the first loss is apart by {apart[0]:.1e}, later ones by at most {max(apart):.1e}"

    def again(self) -> Found:
        """Repeat the run and compare."""
        return self._same(self._train("again"))

    def resume(self) -> Found:
        """Kill the run after step 2, resume it, and compare."""
        try:
            self._train("killed", until=2)
        except _Killed:
            return self._same(self._train("killed"))
        return False, "the run was not killed"

    def speed(self) -> Found:
        """Measure tokens per second of the tiny pair in the precision of `auto`, excluding the first step."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._place.device)
        folder = self._train(
            "speed",
            steps=3,
            engine={"device": self._device},
            batch_size=64,
            rollout={"max_new_tokens": 32, "stop": "eos"},
            evaluation={"final": [], "every": 0},
        )
        tokens = sum(_column(folder, "tokens")[1:])
        walls = _column(folder, "wall", "timings.jsonl")[1:]
        rates = {part: tokens / sum(wall[part] for wall in walls) for part in ("rollout", "update")}
        peak = torch.cuda.max_memory_allocated(self._place.device) if self._cuda else _peak(self._place.device)
        self.figures = {
            "precision": self._place.precision,
            "decoded_tokens_per_second": rates["rollout"],
            "update_tokens_per_second": rates["update"],
            "peak_memory_bytes": peak,
        }
        size = "" if peak is None else f", {peak / 2**20:.0f} MiB at most"
        return True, (
            f"the tiny pair in {self._place.precision}: {rates['rollout']:.0f} tokens/s decoded, "
            f"{rates['update']:.0f} tokens/s updated{size}"
        )

    def _config(self, name: str, engine: dict[str, Any], **more: Any) -> TrainConfig:
        settings = {
            "task": {"name": "synthetic", "brief": True},
            "pair": {"student": "tiny", "teacher": "tiny"},
            "objective": {"gate": "H2"},
            "steps": 4,
            "batch_size": 8,
            "rollout": {"max_new_tokens": 8},
            "optimizer": {"lr": 1e-3},
            "engine": engine,
            "evaluation": {"limit": 8, "final": ["test"], "every": 0, "max_new_tokens": 8},
            "checkpoint": {"every": 1},
            "teacher": {"cache": str(self._folder / "scores" / name)},
            "output": str(self._folder / name),
            **more,
        }
        return parse_config(TrainConfig, settings)

    def _train(self, name: str, until: int | None = None, engine: dict[str, Any] | None = None, **more: Any) -> Path:
        train(self._config(name, engine or {**_EXACT, "device": self._device}, **more), _Until(until))
        return self._folder / name

    def _same(self, folder: Path) -> Found:
        whole = self._folder / "there"
        different = [name for name in _LOGS if (whole / name).read_bytes() != (folder / name).read_bytes()]
        prints = [json.loads((one / "summary.json").read_text())["fingerprint"] for one in (whole, folder)]
        different += ["the weights"] if prints[0] != prints[1] else []
        return (
            not different,
            f"not the same: {', '.join(different)}" if different else "records and weights, to the byte",
        )


def _loss(support: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunked fused loss and its gradient, on inputs that are the same on every device."""
    shapes = [(2, 16, 32), (1000, 32), (2, 16, 24), (1000, 24)]
    hidden, head, theirs, their_head = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(n)).to(device) for n, shape in enumerate(shapes)
    )
    hidden.requires_grad_()
    sampled = torch.arange(32).reshape(2, 16).to(device)
    gate = Gate.named("H2")
    loss = fused_gated_kl(
        hidden, head, theirs, their_head, gate=gate, support=support, support_k=8, sampled=sampled, chunk_mb=0.05
    ).loss
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss.detach().cpu(), gradient.cpu()


def _column(folder: Path, name: str, log: str = "metrics.jsonl") -> list[Any]:
    return [json.loads(line)[name] for line in (folder / log).read_text(encoding="utf-8").splitlines()]


def _peak(device: str) -> int | None:
    """Peak memory of this process in bytes; None if it is unknown for the device."""
    if device != "cpu" or sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
