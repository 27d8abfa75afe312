"""TensorBoard, Weights & Biases and trackio, opened for a run. See `gatespace.training.trackers`, which uses them."""

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
    """An open tracker, by the two calls of it that are needed."""

    log: Callable[[int, dict[str, float]], None]
    close: Callable[[], None]


def tensorboard(folder: Path, settings: dict[str, Any], *, step: int) -> Opened:
    """Events in the run's folder; `step` hides what a killed run wrote after its checkpoint."""
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
    """A run of Weights & Biases, by the user's own login and environment."""
    with _package("wandb", "`wandb login`, or WANDB_MODE=offline") as package:
        run = package.init(
            # An argument would win over the user's environment.
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or folder.name,
            dir=os.environ.get("WANDB_DIR") or str(folder),
            id=_identity(folder),
            resume="allow",
            config=settings,
            reinit="create_new",  # a run of the caller's own stays what it is
            settings=package.Settings(console="off"),  # the progress display redraws lines
        )
    return Opened(lambda step, values: run.log(values, step=step), run.finish)


def trackio(folder: Path, settings: dict[str, Any], *, step: int) -> Opened:
    """A run of trackio, in its own folder of this machine."""
    with _package("trackio", "check that the folder TRACKIO_DIR is writable") as package:
        # Runs are told apart by name alone, so the name carries the identity.
        name = f"{folder.name}-{_identity(folder)[:8]}"
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        run = package.init(project=PROJECT, name=name, config=settings, resume="allow", **quiet)
    # The run's own finish would be called once more at the end of the process.
    return Opened(lambda step, values: run.log(values, step=step), package.finish)


@contextmanager
def _package(name: str, advice: str) -> Iterator[ModuleType]:
    """The package of a tracker; an error with `advice` where it cannot be imported or opened."""
    try:
        package: ModuleType | None = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise RunError(
                f"the package {name!r} is installed and cannot be imported", got=first_line(error)
            ) from error
        package = None
    # W&B writes to a folder named wandb: below the working directory, Python takes it for an empty package.
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
    """What a run is called elsewhere: new with its folder, and the same when the run is resumed."""
    path = folder / "tracker-id"
    if not path.exists():
        atomic_write(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8").strip()
