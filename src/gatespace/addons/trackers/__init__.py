"""TensorBoard, Weights & Biases and trackio for a run; used by `gatespace.training.trackers`."""

from __future__ import annotations

import importlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gatespace.errors import RunError, missing_extra
from gatespace.files import atomic_write
from gatespace.models.hub import first_line

PROJECT = "gatespace"


@dataclass(frozen=True)
class Opened:
    """An open tracker, as the two functions it needs."""

    log: Callable[[int, dict[str, float]], None]
    close: Callable[[], None]


def tensorboard(folder: Path, settings: dict[str, Any], *, step: int) -> Opened:
    """Write events to the run's folder; `step` purges what a killed run logged after its checkpoint."""
    with _package("tensorboard", "check that the run folder is writable"):
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=30)
        if step == 0:
            writer.add_text("config", f"```json\n{json.dumps(settings, indent=1, default=str)}\n```", 0)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Opened(log, writer.close)


def wandb(folder: Path, settings: dict[str, Any], *, step: int) -> Opened:
    """Open a Weights & Biases run with the user's own login and environment."""
    with _package("wandb", "`wandb login`, or WANDB_MODE=offline") as package:
        run = package.init(
            # Explicit arguments would override the user's environment.
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or folder.name,
            dir=os.environ.get("WANDB_DIR") or str(folder),
            id=_identity(folder),
            resume="allow",
            config=settings,
            reinit="create_new",  # leaves the caller's own run alone
            settings=package.Settings(console="off"),  # the progress display redraws lines
        )
    return Opened(lambda step, values: run.log(values, step=step), run.finish)


def trackio(folder: Path, settings: dict[str, Any], *, step: int) -> Opened:
    """Open a trackio run, stored in trackio's own folder on this machine."""
    with _package("trackio", "check that the folder TRACKIO_DIR is writable") as package:
        # trackio identifies runs by name alone, so the name includes the run's id.
        name = f"{folder.name}-{_identity(folder)[:8]}"
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        run = package.init(project=PROJECT, name=name, config=settings, resume="allow", **quiet)
    # The run's own finish would be called again at process exit.
    return Opened(lambda step, values: run.log(values, step=step), package.finish)


@contextmanager
def _package(name: str, advice: str) -> Iterator[ModuleType]:
    """Import a tracker's package; raise with `advice` if it cannot be imported or opened."""
    try:
        package: ModuleType | None = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise RunError(
                f"the package {name!r} is installed and cannot be imported", got=first_line(error)
            ) from error
        package = None
    # W&B writes to a folder named wandb; in the working directory, Python imports it as an empty package.
    if package is None or package.__file__ is None:
        raise missing_extra(f"the tracker {name}", module=name, extra=name)
    try:
        yield package
    except Exception as error:
        raise RunError(
            f"the tracker {name} could not be opened",
            got=first_line(error),
            instead=f"{advice}, or leave {name} out of trace.trackers",
        ) from error


def _identity(folder: Path) -> str:
    """Return a run's id in trackers: new for a new folder, the same on resume."""
    path = folder / "tracker-id"
    if not path.exists():
        atomic_write(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8").strip()
