"""Archives that `pack` did not write: nothing of them may end up outside of the folder, or at all."""

from __future__ import annotations

import io
import json
import lzma
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from gatespace.addons.archive import open_archive
from gatespace.addons.archive import unpack as reader
from gatespace.addons.archive.pack import FORMAT, MANIFEST, pack
from gatespace.addons.archive.unpack import unpack
from gatespace.errors import RunError, UsageError
from gatespace.runs import StudyFolder

STUDY = b"name: small\ntasks: {messages: {task: {name: synthetic}}}\n"


def entry(name: Any, size: Any) -> dict[str, Any]:
    return {"path": name, "bytes": size, "sha256": "0" * 64}


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


def named(*entries: Any, form: str = FORMAT) -> dict[str, Any]:
    return {"format": form, "study": "small", "files": list(entries)}


STUDY_ENTRY, STUDY_FILE = entry("study.yaml", len(STUDY)), file("study.yaml", STUDY)


def refused(path: Path, why: str) -> None:
    target = path.parent / "unpacked" / "study"
    with pytest.raises(UsageError) as caught:
        unpack(path, target)
    assert all(words in str(caught.value) for words in (why, "not an archive of a study"))
    assert not target.exists()
    assert not [*path.parent.rglob("evil")]


def test_the_helper_writes_what_is_accepted(tmp_path):
    path = archive(tmp_path / "a.tar.xz", named(STUDY_ENTRY), [STUDY_FILE])
    unpack(path, tmp_path / "out")
    assert (tmp_path / "out" / "study.yaml").read_bytes() == STUDY


@pytest.mark.parametrize("name", ["../evil", "runs/../../evil"])
def test_names_outside_of_the_folder(tmp_path, name):
    path = archive(tmp_path / "a.tar.xz", named(STUDY_ENTRY, entry(name, 1)), [STUDY_FILE, file(name, b"x")])
    refused(path, "outside the destination")


def test_an_absolute_name_is_below_the_folder(tmp_path):
    name = str(tmp_path / "evil")
    path = archive(tmp_path / "a.tar.xz", named(STUDY_ENTRY, entry(name, 1)), [STUDY_FILE, file(name, b"x")])
    unpack(path, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE])
def test_links_and_devices(tmp_path, kind):
    (tmp_path / "secret").write_text("secret")
    link = file("bases.json", type=kind, linkname=str(tmp_path / "secret"))
    refused(
        archive(tmp_path / "a.tar.xz", named(entry("bases.json", 0), STUDY_ENTRY), [link, STUDY_FILE]),
        "is not a regular file",
    )


def test_a_header_that_announces_a_long_name(tmp_path):
    """GNU and pax headers hold any number of bytes in memory before a name is known."""
    refused(archive(tmp_path / "a.tar.xz", named(entry("n" * 300, 1)), [file("n" * 300, b"x")]), "not a regular file")


def test_a_path_of_many_parts_is_refused_at_once(tmp_path):
    """A few hundred bytes that once took all memory: each of 60,000 parts was joined with all before it."""
    path = archive(tmp_path / "a.tar.xz", named(entry("a/" * 60_000 + "a", 1)), [], preset=9)
    assert path.stat().st_size < 500
    code = f"""
import resource
from pathlib import Path
from gatespace.addons.archive.unpack import unpack
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
resource.setrlimit(resource.RLIMIT_AS, (memory + (1 << 30), resource.RLIM_INFINITY))
unpack(Path({str(path)!r}), Path({str(tmp_path / "out")!r}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "UsageError" in found.stderr, found.stderr[-2000:]
    assert "MemoryError" not in found.stderr
    assert len(found.stderr) < 10_000


@pytest.mark.parametrize(
    "manifest, why",
    [
        (b"{", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"[]", "damaged"),
        (b'{"format": "gatespace.study.1"}', "damaged"),
        (named(entry("study.yaml", "9")), "damaged"),
        (named("study.yaml"), "damaged"),
        (named(form="gatespace.study.99"), "gatespace.study.99"),
        (named(), "no study file"),
        (named(entry("study.yaml", 3)), "not those of its manifest"),
        (named(entry("study.yaml", reader.MOST_BYTES + 1)), "more than"),
        (named(STUDY_ENTRY, entry("a", float("nan"))), "more than"),  # neither more nor less than any limit
        (named(STUDY_ENTRY, entry("a", 1 << 40), entry("b", -1 << 40)), "more than"),  # a sum of 0
        (named(*[entry("", 0)] * (reader.MOST_FILES + 1)), "more than"),
    ],
)
def test_manifests_that_pack_would_not_write(tmp_path, manifest, why):
    refused(archive(tmp_path / "a.tar.xz", manifest, [] if manifest == named() else [STUDY_FILE], preset=0), why)


@pytest.mark.parametrize("names", [("runs/a", "runs/a/done"), ("runs/a/done", "runs/a"), ("",)])
def test_a_file_that_is_also_a_folder(tmp_path, names):
    manifest = named(*(entry(name, 0) for name in names), STUDY_ENTRY)
    refused(archive(tmp_path / "a.tar.xz", manifest, [*map(file, names), STUDY_FILE]), "irectory")


def test_a_file_beyond_the_manifest(tmp_path):
    refused(archive(tmp_path / "a.tar.xz", named(STUDY_ENTRY), [STUDY_FILE, file("evil", b"x")]), "does not name")


def test_a_bomb_is_read_no_further_than_it_is_announced(tmp_path):
    """200 MB of zeros in a few kB: more than announced is refused at its header, and a huge manifest at its own."""
    zeros = bytes(200 << 20)
    path = archive(tmp_path / "a.tar.xz", named(entry("study.yaml", 1)), [file("study.yaml", zeros)], preset=0)
    assert path.stat().st_size < 1 << 20
    refused(path, "not those of its manifest")
    refused(archive(tmp_path / "b.tar.xz", zeros, [], preset=0), "at most 16 MiB")


def test_too_little_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    path = archive(tmp_path / "a.tar.xz", named(STUDY_ENTRY), [STUDY_FILE])
    usage = reader.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(reader.shutil, "disk_usage", lambda place: usage._replace(free=len(STUDY) - 1))
    with pytest.raises(RunError, match="too little disk space"):
        unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dictionary_that_needs_more_memory_than_is_given(tmp_path):
    path = tmp_path / "a.tar.xz"
    coder = lzma.LZMACompressor(filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}])
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


def test_cut_off_or_changed_anywhere_it_is_refused(tmp_path):
    path = archive(tmp_path / "a.tar.xz", named(STUDY_ENTRY), [STUDY_FILE])
    whole = path.read_bytes()
    for size in range(0, len(whole) - 60, 17):
        path.write_bytes(whole[:size])
        refused(path, "not an archive")
    for place in range(24, len(whole) - 60, 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
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
