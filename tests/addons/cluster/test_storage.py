"""Folders behind a URL: they arrive whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("fsspec", reason="fsspec is not installed")

from gatespace.addons.cluster.storage import Storage
from gatespace.errors import MissingExtraError, RunError, UsageError

from .conftest import filled


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(f"file://{tmp_path}/url")


def test_a_folder_comes_back_as_it_was(storage, tmp_path):
    here = filled(tmp_path / "here", a="one", deep__er__b="two", empty="", skipped="no")
    os.utime(here / "a", (1e9, 1e9))
    storage.put_folder(here, "runs/x", last="done", leave=lambda name: name == "skipped")
    assert storage.get_folder("runs/x", tmp_path / "there", last="done")
    found = {
        path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*") if path.is_file()
    }
    assert found == {"a", "deep/er/b", "empty", "done"}
    assert (tmp_path / "there/deep/er/b").read_text() == "two"
    assert (tmp_path / "there/a").stat().st_mtime == 1e9


def test_what_was_not_put_to_its_end_is_not_there(storage, tmp_path):
    here = filled(tmp_path / "here", a="one", b="two")
    storage.put_folder(here, "runs/x", last="done")
    (tmp_path / "url/runs/x/done").unlink()  # as a kill before the last file leaves it
    assert not storage.has("runs/x/done")
    assert not storage.get_folder("runs/x", tmp_path / "there", last="done")
    assert not (tmp_path / "there").exists()


def test_a_put_that_fails_on_the_way_leaves_nothing_that_counts(storage, tmp_path):
    (tmp_path / "url/x/b").mkdir(parents=True)  # no file can go there
    (tmp_path / "url/x/b/in_the_way").touch()
    with pytest.raises(RunError, match="x/b could not be uploaded"):
        storage.put_folder(filled(tmp_path / "here", a="one", b="two", c="three"), "x", last="done")
    assert storage.names("x") == ["a", "b"]


def test_a_file_that_is_gone_makes_a_folder_not_whole(storage, tmp_path):
    storage.put_folder(filled(tmp_path / "here", a="one", b="two"), "x", last="done")
    (tmp_path / "url/x/b").unlink()
    assert not storage.get_folder("x", tmp_path / "there", last="done")
    assert not (tmp_path / "there/done").exists()


def test_a_damaged_file_is_an_error_and_not_a_result(storage, tmp_path):
    storage.put_folder(filled(tmp_path / "here", a="one"), "x", last="done")
    (tmp_path / "url/x/a").write_text("0ne")
    with pytest.raises(RunError, match="x/a is damaged"):
        storage.get_folder("x", tmp_path / "there", last="done")
    assert not (tmp_path / "there/done").exists()
    assert not (tmp_path / "there/a").exists()


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/../../b", "..\\a", "./a", ""])
def test_a_list_cannot_name_files_outside(storage, tmp_path, name):
    statement = {"format": 1, "when": None, "files": {name: {"size": 1, "sha256": "0", "mtime": 0}}}
    storage.write("x/done", json.dumps(statement).encode())
    with pytest.raises(RunError, match="x/done is not what this gatespace writes"):
        storage.get_folder("x", tmp_path / "there", last="done")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 2, "when": null, "files": {}}', b'{"files": {"a": 3}}'])
def test_a_last_file_of_another_kind_is_refused(storage, tmp_path, content):
    storage.write("x/done", content)
    with pytest.raises(RunError, match="x/done is not what this gatespace writes"):
        storage.get_folder("x", tmp_path / "there", last="done")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("/a/folder", "not a URL"),
        ("s3://", "not a URL"),
        ("memory://x", "no other process"),
        ("nosuch://x/y", "nosuch"),
    ],
)
def test_urls_that_cannot_be(url, text):
    with pytest.raises(UsageError, match=text):
        Storage(url)


def test_a_storage_that_refuses_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError, match=r"could not be written to file://"):
        Storage(f"file://{tmp_path}/file/below").write("a", b"")


def test_without_its_package_a_scheme_says_which_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match="s3fs") as caught:
        Storage("s3://bucket/path")
    assert "'.[remote]' in a clone" in str(caught.value)
