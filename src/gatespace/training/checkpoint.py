"""Checkpoints: what a killed run resumes from.

A checkpoint is written aside, gets its name by one rename once all of it is on disk, and only then are older ones
removed. So a kill at any moment leaves a complete one. `checksums.json` has the SHA-256 of the other files: a
checkpoint that was damaged later is reported, and the one before it is used. Tensors are safetensors and the rest is
JSON: loading runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatespace.errors import RunError
from gatespace.files import atomic_write, sync_folder

if TYPE_CHECKING:
    from torch import Tensor

_TENSORS, _STATE, _BEST, _CHECKSUMS = "state.safetensors", "state.json", "best.safetensors", "checksums.json"
_FORMAT = 3
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, eq=False)  # tensors have no single truth value, so no generated ==
class Checkpoint:
    """A state to resume from."""

    path: Path
    step: int
    """Steps done."""
    tensors: dict[str, Tensor]
    """On the CPU."""
    state: dict[str, Any]
    best: Path
    """Tensors of an earlier checkpoint kept with this one, or its own."""


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int = 1,
    best: Path | None = None,
) -> None:
    """Write the checkpoint of `step`, then remove those no longer needed.

    Args:
        folder: The folder of all checkpoints of a run.
        step: Steps done.
        tensors: By name, on any device.
        state: JSON data; floats round-trip exactly.
        keep: How many of the latest to keep, including this one. Those of later steps are removed too: they belong
            to an abandoned continuation.
        best: Tensors of an earlier checkpoint to keep with this one.
    """
    final = folder / f"step-{step:06d}"
    new = folder / f".{final.name}.new"
    try:
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        new.mkdir()
        _write_tensors(new / _TENSORS, tensors)
        if best is not None:
            _link(best, new / _BEST)
        atomic_write(new / _STATE, json.dumps({"format": _FORMAT, "step": step, "state": state}, indent=1))
        atomic_write(new / _CHECKSUMS, json.dumps({path.name: _digest(path) for path in new.iterdir()}, indent=1))
        if final.exists():  # damaged, or of an abandoned continuation
            _put_aside(final)
        os.rename(new, final)
        sync_folder(folder)
        steps = [number for number in _steps(folder) if number <= step][:keep]
        for number, path in _steps(folder).items():
            if number not in steps:
                _put_aside(path)
        _sweep(folder)
    except (OSError, RunError) as error:
        raise RunError(
            f"the checkpoint of step {step} could not be written",
            got=error,
            instead="check the disk's free space; the same command resumes from the checkpoint before",
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)  # exists only after an error; frees space on a full disk


def latest(folder: Path, *, report: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The latest intact checkpoint; None if there is none.

    Args:
        folder: The folder of all checkpoints of a run.
        report: Called with a message for each damaged checkpoint, which is skipped.
    """
    for step, path in _steps(folder).items():
        try:
            return _load(path, step)
        except (OSError, ValueError, TypeError) as damage:
            if report is not None:
                report(f"the checkpoint {path.name} is damaged and is not used: {damage}")
    return None


def tensors_file(folder: Path, step: int, *, best: bool = False) -> Path:
    """Path of the tensors of the checkpoint of `step`, or of an earlier one's kept with it."""
    return folder / f"step-{step:06d}" / (_BEST if best else _TENSORS)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file, on the CPU."""
    from safetensors.torch import load_file

    return load_file(str(path))


# ---------------------------------------------------------------------------------------------------- on disk


def _load(path: Path, step: int) -> Checkpoint:
    checksums = dict(json.loads((path / _CHECKSUMS).read_bytes()))
    for name in {_TENSORS, _STATE, *checksums}:
        if _digest(path / name) != checksums.get(name):
            raise ValueError(f"{name} has another checksum")
    body = json.loads((path / _STATE).read_bytes())
    if body["format"] != _FORMAT:
        raise RunError(
            "the checkpoint is of another format than this gatespace writes",
            got=f"{path}: format {body['format']}",
            instead="resume with the gatespace that wrote it, or remove the run folder",
        )
    if body["step"] != step:
        raise ValueError(f"it is the checkpoint of step {body['step']}")
    best = path / (_BEST if _BEST in checksums else _TENSORS)
    return Checkpoint(path, step, tensors_of(path / _TENSORS), body["state"], best)


def _steps(folder: Path) -> dict[int, Path]:
    """The checkpoints by step, latest first."""
    names = ((path, _NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ()))
    return dict(sorted(((int(match[1]), path) for path, match in names if match), reverse=True))


def _put_aside(path: Path) -> None:
    """Rename a checkpoint before it is deleted: a half-deleted one would look damaged."""
    os.rename(path, path.with_name(f".{path.name}.old"))


def _sweep(folder: Path) -> None:
    """Delete what was put aside, and what a killed process was writing."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in storages else tensor  # the format holds no views
        storages.add(storage)
    try:
        save_file(plain, str(path))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    _sync(path)


def _link(source: Path, path: Path) -> None:
    """Hard-link a file; copy it if the file system has no hard links."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
        _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
