"""TensorBoard, Weights & Biases and trackio for a run; used by `gatespace.training.trackers`."""

from __future__ import annotations

import json
import os
import uuid
from importlib import import_module
from pathlib import Path
from typing import Any

from gatespace.errors import RunError, missing_extra
from gatespace.files import atomic_write
from gatespace.models.hub import first_line
from gatespace.training.trackers import Tracker

PROJECT = "gatespace"


def tensorboard(folder: Path, settings: dict[str, Any], *, step: int) -> Tracker:
    """Write events to the run's folder; `step` purges what a killed run logged after its checkpoint."""
    _package("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=30)
    if step == 0:
        writer.add_text("config", f"```json\n{json.dumps(settings, indent=1, default=str)}\n```", 0)
    return Tracker(
        lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()], writer.close
    )


def wandb(folder: Path, settings: dict[str, Any], *, step: int) -> Tracker:
    """Open a Weights & Biases run with the user's own login and environment."""
    package = _package("wandb")
    try:
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
    except Exception as error:
        advice = "`wandb login`, or WANDB_MODE=offline, or leave wandb out of trace.trackers"
        raise RunError("the tracker wandb could not be opened", got=first_line(error), instead=advice) from error
    return Tracker(lambda step, values: run.log(values, step=step), run.finish)


def trackio(folder: Path, settings: dict[str, Any], *, step: int) -> Tracker:
    """Open a trackio run, stored in trackio's own folder on this machine."""
    package = _package("trackio")
    # trackio identifies runs by name alone, so the name includes the run's id.
    name = f"{folder.name}-{_identity(folder)[:8]}"
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = package.init(project=PROJECT, name=name, config=settings, resume="allow", **quiet)
    # The run's own finish would be called again at process exit.
    return Tracker(lambda step, values: run.log(values, step=step), package.finish)


def _package(name: str) -> Any:
    """Import a tracker's package."""
    try:
        package = import_module(name)
    except ModuleNotFoundError as error:
        raise missing_extra(f"the tracker {name}", module=error.name or name, extra=name) from error
    if package.__file__ is None:
        # W&B writes to a folder named wandb; in the working directory, Python imports it as an empty package.
        raise missing_extra(f"the tracker {name}", module=name, extra=name)
    return package


def _identity(folder: Path) -> str:
    """Return a run's id in trackers: new for a new folder, the same on resume."""
    path = folder / "tracker-id"
    if not path.exists():
        atomic_write(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8").strip()
