"""Write the records of a study as one file.

An archive is a tar file (ustar, regular files only) compressed by xz:

    manifest.json   {"format", "study", "files": [{"path", "bytes", "sha256"}, …]}; always first
    study.yaml, runs/ID/metrics.jsonl, …   in the order of the manifest, named as in the study's folder

Files with the same name are adjacent: predictions of all runs have the same texts, which xz then stores once.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

from gatespace.addons.archive.published import Published
from gatespace.errors import RunError, UsageError
from gatespace.files import atomic_write
from gatespace.runs import ARCHIVE, StudyFolder

FORMAT = "gatespace.study.1"
MANIFEST = "manifest.json"


def pack(
    folder: StudyFolder, output: Path | None = None, *, progress: Callable[[int, int], None] = lambda done, of: None
) -> Path:
    """Write the archive of a study and return its path. The same records give the same bytes.

    Args:
        folder: The study, finished or not.
        output: The file; None: next to the folder, with its name.
        progress: Called with (files written, total files).
    """
    place = Path(output) if output is not None else folder.path.with_name(folder.path.name + ARCHIVE)
    if not place.name.endswith(ARCHIVE):
        raise UsageError(f"the name of an archive ends with {ARCHIVE}", got=str(place))
    published = Published(folder)
    paths = sorted(folder.records(), key=lambda path: (path.name, published.name(path)))
    entries = []
    for path in paths:
        data = published.content(path)
        entries.append({"path": published.name(path), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    manifest = {"format": FORMAT, "study": published.config.name, "files": entries}
    buffer = io.BytesIO()
    with lzma.open(buffer, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        for done, (path, entry) in enumerate(zip(paths, entries, strict=True), start=1):
            data = published.content(path)
            if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise RunError("a file changed while it was packed", got=str(path), instead="the same command again")
            _add(tar, str(entry["path"]), data)
            progress(done, len(paths))
    atomic_write(place, buffer.getvalue())
    return place


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # no owner, no time: the bytes depend only on names and contents
    info.size = len(data)
    try:
        tar.addfile(info, io.BytesIO(data))
    except ValueError as error:
        raise UsageError("an archive cannot hold this name", got=name, why=str(error)) from None
