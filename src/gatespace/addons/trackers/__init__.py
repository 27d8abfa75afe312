"""Metrics to TensorBoard, Weights & Biases or trackio, beside the files of the run folder.

The files are the record; a tracker is a window onto it. So a tracker that is asked for and cannot be opened is an error
before anything is trained, and one that fails later is let go with a note while the run goes on. A resumed run goes on
in the same place; the steps after its checkpoint, which it does again, have the same numbers again.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self

from gatespace.errors import GatespaceError, RunError, missing_extra, unknown_name
from gatespace.files import atomic_write

__all__ = ["Trackers", "open_trackers", "scalars"]

PROJECT = "gatespace"
_ID = "tracker-id"


class _Tracker(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All open trackers of a run; none is fine."""

    def __init__(self, opened: Mapping[str, _Tracker], report: Callable[[str], None] | None = None) -> None:
        self._open = dict(opened)
        self._report = report
        self.notes: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that are still in use."""
        return tuple(self._open)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand on the numbers among `values`. Never fails: a tracker that does is closed and noted once."""
        numbers = scalars(values)
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(step, numbers)
            except Exception as error:
                self._let_go(name, f"the tracker {name} failed at step {step} and is no longer used: {_line(error)}")

    def close(self) -> None:
        """Finish all of them; what cannot be finished is noted."""
        for name in list(self._open):
            self._let_go(name)

    def _let_go(self, name: str, reason: str = "") -> None:
        tracker = self._open.pop(name)
        if reason:
            self._note(reason)
        try:
            with redirect_stdout(sys.stderr):
                tracker.close()
        except Exception as error:
            if not reason:
                self._note(f"the tracker {name} could not be closed: {_line(error)}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if self._report is not None:
            self._report(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_trackers(
    names: Sequence[str],
    run_folder: Path,
    config: Mapping[str, Any],
    *,
    step: int = 0,
    report: Callable[[str], None] | None = None,
) -> Trackers:
    """Open the trackers of a run, before anything is trained.

    Args:
        names: Any of tensorboard, wandb, trackio.
        run_folder: TensorBoard and W&B write below it; trackio where it always does.
        config: The run's configuration, as JSON holds it.
        step: The step of the checkpoint that the run goes on from.
        report: Is told when a tracker is let go.
    """
    for name in names:
        if name not in _OPENERS:
            raise unknown_name("tracker", name, _OPENERS)
    modules = {name: _module(name) for name in names}
    folder = Path(run_folder).absolute()
    opened = Trackers({}, report)
    for name, module in modules.items():
        try:
            with redirect_stdout(sys.stderr):  # the command's own output stays its own
                opened._open[name] = _OPENERS[name](module, folder, dict(config), step)
        except GatespaceError:
            opened.close()
            raise
        except Exception as error:
            opened.close()
            raise RunError(
                f"the tracker {name} could not be opened",
                got=_line(error),
                instead=f"{_ADVICE[name]}, or leave {name} out of trace.trackers",
            ) from error
    return opened


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by name, without its step; nested names are joined by a slash.

    Example:
        >>> scalars({"step": 3, "loss": 0.5, "lam_mean": None, "lam_hist": [1, 2], "seconds": {"score": 1}})
        {'loss': 0.5, 'seconds/score': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif name != "step" and isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


# ---------------------------------------------------------------------------------------------------- each of them


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides what a killed run wrote after its checkpoint.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=30)
        if step == 0:
            self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```", 0)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Run:
    """Of W&B or trackio, which have this much in common."""

    def __init__(self, run: Any, finish: Callable[[], None]) -> None:
        self._run = run
        self._finish = finish

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._finish()


def _open_tensorboard(module: ModuleType, folder: Path, config: dict[str, Any], step: int) -> _Tracker:
    return _TensorBoard(folder, config, step)


def _open_wandb(module: ModuleType, folder: Path, config: dict[str, Any], step: int) -> _Tracker:
    run = module.init(
        # An argument would win over the user's environment.
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=os.environ.get("WANDB_NAME") or folder.name,
        dir=os.environ.get("WANDB_DIR") or str(folder),
        id=_identity(folder),
        resume="allow",
        config=config,
        reinit="create_new",  # a run of the caller's own stays what it is
        settings=module.Settings(console="off"),  # the progress display redraws lines
    )
    return _Run(run, run.finish)


def _open_trackio(module: ModuleType, folder: Path, config: dict[str, Any], step: int) -> _Tracker:
    # Runs are told apart by name alone, so the name carries the identity.
    name = f"{folder.name}-{_identity(folder)[:8]}"
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = module.init(project=PROJECT, name=name, config=config, resume="allow", **quiet)
    return _Run(run, module.finish)  # the run's own finish would be called once more at the end of the process


_OPENERS: dict[str, Callable[[ModuleType, Path, dict[str, Any], int], _Tracker]] = {
    "tensorboard": _open_tensorboard,
    "trackio": _open_trackio,
    "wandb": _open_wandb,
}
_ADVICE = {
    "tensorboard": "see that the run folder can be written",
    "trackio": "see that the folder TRACKIO_DIR can be written",
    "wandb": "`wandb login`, or WANDB_MODE=offline",
}


def _identity(folder: Path) -> str:
    """What a run folder is called elsewhere: new with the folder, and the same when the run is resumed."""
    path = folder / _ID
    if not path.exists():
        atomic_write(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8").strip()


def _module(name: str) -> ModuleType:
    module: ModuleType | None = None
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != name:
            raise RunError(f"the package {name!r} is installed and cannot be imported", got=_line(error)) from error
    # W&B writes to a folder named wandb: below the working directory, Python takes it for an empty package.
    if module is None or module.__file__ is None:
        raise missing_extra(f"the tracker {name}", module=name, extra=name)
    return module


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
