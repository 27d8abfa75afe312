"""Archives that `pack` did not write: nothing of them may end up outside of the folder, or at all."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from gatespace.addons.archive import open_archive
from gatespace.addons.archive import unpack as reader
from gatespace.addons.archive.pack import FORMAT, MANIFEST, pack
from gatespace.addons.archive.unpack import unpack
from gatespace.errors import UsageError
from gatespace.runs import StudyFolder

STUDY = b"name: small\ntasks: {messages: {task: {name: synthetic}}}\n"


def entry(name: Any, data: bytes, **changes: Any) -> dict[str, Any]:
    return {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} | changes


def file(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def archive(path: Path, manifest: Any, members: list[tuple[tarfile.TarInfo, bytes]], **kind: Any) -> Path:
    head = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    with lzma.open(path, "wb", **kind) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in [file(MANIFEST, head), *members]:
            tar.addfile(info, io.BytesIO(data))
    return path


def named(*entries: dict[str, Any], form: str = FORMAT) -> dict[str, Any]:
    return {"format": form, "study": "small", "files": list(entries)}


def refused(path: Path, why: str) -> None:
    target = path.parent / "unpacked" / "study"
    with pytest.raises(UsageError) as caught:
        unpack(path, target)
    assert why in str(caught.value)
    assert not target.exists()
    assert not (path.parent / "evil").exists()
    assert not (path.parent / "unpacked" / "evil").exists()


def test_the_helper_writes_what_is_accepted(tmp_path):
    path = archive(tmp_path / "a.tar.xz", named(entry("study.yaml", STUDY)), [file("study.yaml", STUDY)])
    unpack(path, tmp_path / "out")
    assert (tmp_path / "out" / "study.yaml").read_bytes() == STUDY


@pytest.mark.parametrize(
    "name", ["../evil", "runs/../../evil", "/evil", "runs//evil", "./evil", "..\\evil", "e\0vil", ""]
)
def test_names_outside_of_the_folder(tmp_path, name):
    path = archive(
        tmp_path / "a.tar.xz",
        named(entry("study.yaml", STUDY), entry(name, b"x")),
        [file("study.yaml", STUDY), file(name, b"x")],
    )
    refused(path, "which no study has")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE])
def test_links_and_devices(tmp_path, kind):
    (tmp_path / "secret").write_text("secret")
    link = file("bases.json", type=kind, linkname=str(tmp_path / "secret"))
    path = archive(
        tmp_path / "a.tar.xz",
        named(entry("bases.json", b""), entry("study.yaml", STUDY)),
        [link, file("study.yaml", STUDY)],
    )
    refused(path, "in the place of")


def test_a_header_that_announces_a_long_name(tmp_path):
    """GNU and pax headers hold any number of bytes in memory before a name is known."""
    path = archive(tmp_path / "a.tar.xz", named(entry("n" * 300, b"x")), [file("n" * 300, b"x")])
    refused(path, "in the place of")


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"sha256": "0" * 64}, "another hash"),
        ({"bytes": 3}, "another size"),
        ({"bytes": -1}, "which no study has"),
        ({"bytes": "9"}, "which no study has"),
        ({"bytes": reader.MOST_BYTES + 1}, "more than"),
        ({"more": 1}, "damaged"),
    ],
)
def test_files_that_are_not_what_the_manifest_says(tmp_path, changes, why):
    path = archive(tmp_path / "a.tar.xz", named(entry("study.yaml", STUDY, **changes)), [file("study.yaml", STUDY)])
    refused(path, why)


@pytest.mark.parametrize(
    "manifest, why",
    [
        (b"{", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"[]", "damaged"),
        (b'{"format": "gatespace.study.1"}', "damaged"),
        (named(form="gatespace.study.99"), "gatespace.study.99"),
        (named(entry("study.yaml", STUDY), entry("study.yaml", STUDY)), "twice"),
        (named(entry("runs/a", b""), entry("runs/a/done", b"")), "as a folder"),
        (named(), "no study file"),
    ],
)
def test_manifests_that_pack_would_not_write(tmp_path, manifest, why):
    refused(archive(tmp_path / "a.tar.xz", manifest, []), why)


@pytest.mark.parametrize("name", ["runs/a/model/model.safetensors", "scores/x", "evil.py", "runs/a/metrics.jsonl"])
def test_files_that_are_no_records(tmp_path, name):
    """The last: a run that is not done has no metrics in an archive."""
    entries = named(entry("study.yaml", STUDY), entry(name, b"x"))
    refused(archive(tmp_path / "a.tar.xz", entries, [file("study.yaml", STUDY), file(name, b"x")]), "not a record")


def test_a_file_beyond_the_manifest(tmp_path):
    members = [file("study.yaml", STUDY), file("evil", b"x")]
    refused(archive(tmp_path / "a.tar.xz", named(entry("study.yaml", STUDY)), members), "does not name")


def test_a_bomb_is_read_no_further_than_it_is_announced(tmp_path):
    """200 MB of zeros in a few kB: more than announced is refused at its header, and a huge manifest at its own."""
    zeros = bytes(200 << 20)
    path = archive(
        tmp_path / "a.tar.xz",
        named(entry("study.yaml", b"x")),
        [file("study.yaml", zeros)],
        preset=0,
    )
    assert path.stat().st_size < 1 << 20
    refused(path, "another size")
    refused(archive(tmp_path / "b.tar.xz", zeros, [], preset=0), "more than")


def test_a_dictionary_that_needs_more_memory_than_is_given(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 512 << 20}]
    path = tmp_path / "a.tar.xz"
    coder = lzma.LZMACompressor(filters=[{**filters[0], "dict_size": 1 << 20}])
    data = bytearray(coder.compress(b"x") + coder.flush())
    # The size of the dictionary is one byte of the block's header, which has a CRC of its own.
    place = data.index(b"\x21\x01") + 2
    data[place] = 34  # 512 MiB
    length = (data[12] + 1) * 4
    data[12 + length - 4 : 12 + length] = zlib.crc32(data[12 : 12 + length - 4]).to_bytes(4, "little")
    path.write_bytes(data)
    refused(path, "emory")


@pytest.mark.parametrize("content", [b"", b"not an archive", b"\xfd7zXZ\x00"])
def test_other_files(tmp_path, content):
    (tmp_path / "a.tar.xz").write_bytes(content)
    refused(tmp_path / "a.tar.xz", "not an archive")


def test_cut_off_anywhere_it_is_refused(tmp_path):
    path = archive(tmp_path / "a.tar.xz", named(entry("study.yaml", STUDY)), [file("study.yaml", STUDY)])
    whole = path.read_bytes()
    for size in range(0, len(whole) - 60, 17):
        path.write_bytes(whole[:size])
        refused(path, "not an archive")


def test_opened_once_per_content(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "study.yaml").write_bytes(STUDY)
    path = pack(StudyFolder(tmp_path / "small"))
    place = open_archive(path)
    assert (place / "study.yaml").read_bytes() == STUDY
    assert open_archive(path) == place
    (tmp_path / "small" / "store.json").write_text("{}\n")
    again = open_archive(pack(StudyFolder(tmp_path / "small")))
    assert again != place
    assert (again / "store.json").is_file()
