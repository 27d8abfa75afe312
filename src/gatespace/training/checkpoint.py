"""Checkpoints: what a killed run resumes from.

A checkpoint folder is created by one rename, after everything in it is on disk; older ones are removed only after
that. So at least one complete checkpoint exists at any time. Later damage is detected by checksum, and the previous
checkpoint is used. Tensors are safetensors and the rest is JSON: loading runs no code.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from gatespace.errors import RunError, UsageError, missing_extra
from gatespace.files import atomic_write, sync_folder

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "latest", "save", "tensors_file", "tensors_of"]

_TENSORS, _STATE, _BEST = "state.safetensors", "state.json", "best.safetensors"
_FORMAT = 2
_NAME = re.compile(r"step-(\d{6,})(\.before)?")
_SCRAP = re.compile(r"\.step-\d{6,}(\.before)?\.(new|gone)")


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
) -> Path:
    """Write the checkpoint of `step`, then remove those no longer needed.

    Args:
        folder: The folder of all checkpoints of a run.
        step: Steps done.
        tensors: By name, on any device.
        state: JSON data; floats round-trip exactly.
        keep: How many of the latest to keep, including this one. Those of later steps are removed too: they belong
            to an abandoned continuation.
        best: Tensors of an earlier checkpoint to keep with this one.

    Returns:
        The checkpoint's own folder.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError("the step of a checkpoint is a whole number, at least 0", got=repr(step))
    if keep < 1:
        raise UsageError("keep is at least 1 checkpoint", got=keep)
    folder = Path(folder)
    final = folder / f"step-{step:06d}"
    new = folder / f".{final.name}.new"
    try:
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        new.mkdir()
        _write_tensors(new / _TENSORS, tensors)
        digests = {"tensors": _digest(new / _TENSORS)}
        if best is not None:
            _link(best, new / _BEST)
            digests["best"] = _digest(new / _BEST)
        atomic_write(new / _STATE, _statement(step, state, digests))
        if final.exists():  # moved aside and not removed: it may be the only one
            before = folder / f"{final.name}.before"
            _remove(before)
            os.rename(final, before)
        os.rename(new, final)
        sync_folder(folder)
        _tidy(folder, final, keep)
    except (OSError, RunError) as error:
        raise RunError(
            f"the checkpoint of step {step} could not be written",
            got=error,
            instead="free some disk space; the same command resumes from the checkpoint before",
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)  # exists only after an error; frees space on a full disk
    return final


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file, on the CPU."""
    return _safetensors().load_file(str(path))


def tensors_file(folder: Path, step: int, *, best: bool = False) -> Path:
    """Path of the tensors of the checkpoint of `step`, or of an earlier one's kept with it."""
    return Path(folder) / f"step-{step:06d}" / (_BEST if best else _TENSORS)


def latest(folder: Path, *, report: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The latest intact checkpoint; None if there is none.

    Args:
        folder: The folder of all checkpoints of a run.
        report: Called with a message for each damaged checkpoint, which is skipped.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise RunError(
            "there is a file where the folder of the checkpoints belongs", got=folder, instead="remove the file"
        )
    for number, path in _all(folder):
        try:
            return _load(path, number)
        except _Damaged as damage:
            if report is not None:
                report(f"the checkpoint {path.name} is damaged and is not used: {damage}")
    return None


# ---------------------------------------------------------------------------------------------------- on disk


class _Damaged(Exception):
    pass


def _all(folder: Path) -> list[tuple[int, Path]]:
    """Latest first; one moved aside comes after the one that replaced it."""
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), match[2] is None, path))
    return [(number, path) for number, _, path in sorted(found, reverse=True)]


def _remove(path: Path) -> None:
    """Rename a checkpoint before deleting it: a half-deleted one would look damaged."""
    if path.exists():
        gone = path.with_name(f".{path.name}.gone")
        _erase(gone)
        os.rename(path, gone)
        _erase(gone)


def _erase(path: Path) -> None:
    """Delete a file or folder: a foreign file may be where a folder belongs."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tidy(folder: Path, current: Path, keep: int) -> None:
    """Remove old, later (damaged or abandoned) and moved-aside (replaced) checkpoints."""
    paths = [path for _, path in _all(folder)]
    place = paths.index(current)
    rest = [current, *(path for path in paths[place + 1 :] if not path.suffix)]
    for path in paths:
        if path not in rest[:keep]:
            _remove(path)


def _sweep(folder: Path) -> None:
    for path in folder.iterdir():
        if _SCRAP.fullmatch(path.name):
            _erase(path)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    store = _safetensors()
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        if place in seen:  # the format holds no views
            tensor = tensor.clone()
        seen.add(place)
        plain[name] = tensor
    try:
        store.save_file(plain, str(path))
    except store.Error as error:
        raise OSError(str(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _link(source: Path, path: Path) -> None:
    """Hard-link a file; copy it if the file system has no hard links."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _statement(step: int, state: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    _check_keys(state)
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise UsageError("the state of a checkpoint holds something that JSON cannot represent", got=error) from None
    body = {"format": _FORMAT, "state": state, "step": step, **digests}
    return json.dumps({**body, "checksum": _seal(body)}, sort_keys=True, indent=1) + "\n"


def _check_keys(value: Any) -> None:
    """JSON would silently turn other keys into strings, and the run would resume with another state."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise UsageError("the keys in a checkpoint's state must be texts", got=repr(key))
            _check_keys(one)
    elif isinstance(value, list | tuple):
        for one in value:
            _check_keys(one)


def _load(path: Path, number: int) -> Checkpoint:
    try:
        body = json.loads((path / _STATE).read_bytes())
        seal = body.pop("checksum")
        form, step, state, tensors = (body[key] for key in ("format", "step", "state", "tensors"))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise _Damaged(f"{_STATE} cannot be read") from None
    if seal != _seal(body):
        raise _Damaged(f"{_STATE} has another checksum")
    if form != _FORMAT:
        raise UsageError(
            "the checkpoint is of another format than this gatespace writes",
            got=f"{path}: format {form}",
            instead="resume with the gatespace that wrote it, or remove the run folder",
        )
    if step != number:
        raise _Damaged(f"it is the checkpoint of step {step}")
    for name, digest in {_TENSORS: tensors, **({_BEST: body["best"]} if "best" in body else {})}.items():
        try:
            if _digest(path / name) != digest:
                raise _Damaged(f"{name} has another checksum")
        except OSError as error:
            raise _Damaged(f"{name} cannot be read: {error.strerror}") from None
    best = path / (_BEST if "best" in body else _TENSORS)
    return Checkpoint(path, step, tensors_of(path / _TENSORS), state, best)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class _Safetensors(NamedTuple):
    save_file: Callable[[dict[str, Tensor], str], None]
    load_file: Callable[[str], dict[str, Tensor]]
    Error: type[Exception]


def _safetensors() -> _Safetensors:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file
    except ImportError:
        raise missing_extra("writing and reading checkpoints", module="safetensors", extra="train") from None
    return _Safetensors(save_file, load_file, SafetensorError)
