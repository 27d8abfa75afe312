"""Files and folders at a URL. Folders are uploaded and fetched atomically.

The last file of a folder lists all others with their checksums. A folder that has it is complete, so a partial upload
of an interrupted `put_folder` is never mistaken for a result.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from gatespace.errors import GatespaceError, RunError, UsageError, missing_extra
from gatespace.files import atomic_write

_FORMAT = 1


class Storage:
    """Storage at a URL that fsspec supports: ``s3://bucket/path``, ``gs://…``, ``file:///mnt/shared``.

    Credentials come from each machine's environment, as for other programs that use the same storage.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, separator, rest = url.partition("://")
        if not separator or not rest.strip("/"):
            raise UsageError(
                "--results is not a URL", got=url, instead="e.g. s3://bucket/path or file:///mnt/shared/study"
            )
        if scheme == "memory":
            raise UsageError(
                "results cannot go there", got=url, why="the memory of a process is seen by no other process"
            )
        try:
            fsspec: Any = importlib.import_module("fsspec")
        except ImportError as error:
            raise missing_extra("--results", module="fsspec", extra="remote") from error
        try:
            # Uploads by other machines must be visible immediately.
            self._fs, root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            if scheme in ("s3", "s3a"):
                raise missing_extra(f"--results {scheme}://", module="s3fs", extra="remote") from error
            # fsspec's message names the package that the scheme needs.
            raise UsageError(f"--results {scheme}:// needs another package", got=url, why=_line(error)) from error
        except (ValueError, OSError) as error:
            raise UsageError("--results cannot be used", got=url, why=_line(error)) from error
        self._root = root.rstrip("/")

    # ------------------------------------------------------------------ single files

    def read(self, place: str) -> bytes | None:
        """Read the file at `place`; None if it does not exist."""
        with self._call(f"{place} could not be read from"):
            try:
                return bytes(self._fs.cat_file(self._path(place)))
            except FileNotFoundError:
                return None

    def write(self, place: str, content: bytes) -> None:
        """Write `content` to the file at `place`."""
        with self._call(f"{place} could not be written to"):
            self._make_parent(place)
            self._fs.pipe_file(self._path(place), content)

    def has(self, place: str) -> bool:
        """Return whether the file exists."""
        with self._call(f"{place} could not be looked for at"):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._path(place)))

    def names(self, place: str) -> list[str]:
        """List the names directly under `place`, sorted; empty if it does not exist."""
        with self._call(f"{place} could not be listed at"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(place), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = {PurePosixPath(str(path).rstrip("/")).name for path in found}
            return sorted(names - {PurePosixPath(place).name, ""})

    def remove(self, place: str) -> None:
        """Remove everything under `place`."""
        with self._call(f"{place} could not be removed from"):
            self._fs.invalidate_cache()
            try:
                self._fs.rm(self._path(place), recursive=True)
            except FileNotFoundError:
                return

    # ------------------------------------------------------------------ folders

    def put_folder(
        self, folder: Path, place: str, *, last: str, leave: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Upload the files of a folder, then `last`, which lists them.

        Args:
            folder: Its files must not change meanwhile.
            place: Destination.
            last: Name of the file that marks the folder as complete.
            leave: Which files to skip, by their path within the folder.
        """
        listed: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if not path.is_file() or name == last or leave(name):
                continue
            status = path.stat()
            listed[name] = {"size": status.st_size, "sha256": _digest(path), "mtime": status.st_mtime}
            with self._call(f"{place}/{name} could not be uploaded to"):
                self._make_parent(f"{place}/{name}")
                self._fs.put_file(str(path), self._path(f"{place}/{name}"))
        marker = folder / last
        when = marker.stat().st_mtime if marker.exists() else None
        statement = {"format": _FORMAT, "when": when, "files": listed}
        self.write(f"{place}/{last}", json.dumps(statement, sort_keys=True, indent=1).encode() + b"\n")

    def get_folder(self, place: str, folder: Path, *, last: str) -> bool:
        """Fetch a complete folder, writing `last` last; False if it is incomplete or being removed.

        Files that already exist with the right content are not fetched again.
        """
        found = self.read(f"{place}/{last}")
        if found is None:
            return False
        when, listed = self._listed(found, f"{place}/{last}")
        for name, known in listed:
            target = folder / name
            if not _is_as_listed(target, known) and not self._fetch(f"{place}/{name}", target, known):
                return False
            # A run's duration is read from its file times.
            os.utime(target, (known["mtime"], known["mtime"]))
        atomic_write(folder / last, "")
        if when is not None:
            os.utime(folder / last, (when, when))
        return True

    def _fetch(self, place: str, target: Path, known: dict[str, Any]) -> bool:
        """Fetch one file; False if it is gone."""
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.tmp")
        with self._call(f"{place} could not be fetched from"):
            try:
                beside.unlink(missing_ok=True)  # it may be a link
                self._fs.get_file(self._path(place), str(beside))
            except FileNotFoundError:
                return False
        if not _is_as_listed(beside, known):
            beside.unlink()
            raise RunError(
                f"{place} is damaged",
                got=self.url,
                why="its checksum is not the one that its folder's last file gives",
                instead="remove that folder there; it is then computed again",
            )
        os.replace(beside, target)
        return True

    def _listed(self, content: bytes, place: str) -> tuple[float | None, list[tuple[str, dict[str, Any]]]]:
        """Parse a last file. It is untrusted input, so validate it before use."""
        try:
            statement = json.loads(content)
            when = statement["when"]
            files = [
                (str(name), {"size": int(one["size"]), "sha256": str(one["sha256"]), "mtime": float(one["mtime"])})
                for name, one in statement["files"].items()
            ]
            known = statement["format"] == _FORMAT and (when is None or isinstance(when, float | int))
        except (ValueError, KeyError, TypeError, AttributeError):
            known, when, files = False, None, []
        if not known or not all(_is_inside(name) for name, _ in files):
            raise RunError(f"{place} is not what this gatespace writes", got=self.url, instead="another --results")
        return when, files

    # ------------------------------------------------------------------ fsspec

    def _path(self, place: str) -> str:
        return f"{self._root}/{place}"

    def _make_parent(self, place: str) -> None:
        """Create the parent folder on file systems; object stores have none, and some refuse to make one."""
        if hasattr(self._fs, "auto_mkdir"):
            self._fs.makedirs(self._path(str(PurePosixPath(place).parent)), exist_ok=True)

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        """Convert any exception of a storage client to `RunError`."""
        try:
            yield
        except GatespaceError:
            raise
        except Exception as error:
            raise RunError(
                f"{what} {self.url}",
                got=_line(error),
                instead="check the storage and this machine's access to it; the same command then resumes",
            ) from error


def _is_inside(name: str) -> bool:
    """Whether an untrusted name stays within the folder."""
    return not ("\\" in name or "\0" in name or any(part in ("", "..", ".") for part in name.split("/")))


def _is_as_listed(path: Path, known: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == known["size"] and _digest(path) == known["sha256"]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
