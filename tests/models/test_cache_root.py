"""Where things are kept, and folders that appear whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gatespace.errors import UsageError
from gatespace.models.cache_root import RECORD, cache_root, new_folder, read_record, remove_leftovers, write_record


def test_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x"
    monkeypatch.setenv("GATESPACE_CACHE", "")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "gatespace"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_root() == tmp_path / ".cache" / "gatespace"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_root() == tmp_path / "Library" / "Caches" / "gatespace"


def filled(folder: Path, value: int, *, broken: bool = False) -> None:
    with new_folder(folder) as fresh:
        (fresh / "weights").write_text(str(value))
        (fresh / "weights").chmod(0o600)
        if broken:
            raise AttributeError
        write_record(fresh, {"value": value})
        assert read_record(folder).get("value") != value


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    for value in (1, 2):
        filled(folder, value)
        assert read_record(folder) == {"written_by": "gatespace", "value": value}
        assert (folder / "weights").read_text() == str(value)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    plain = folder.parent / "plain"
    plain.touch()
    assert stat.S_IMODE((folder / "weights").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    filled(folder, 1)
    with pytest.raises(AttributeError):
        filled(folder, 2, broken=True)
    assert (folder / "weights").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_not_ours_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    filled(tmp_path / "folder", 1)  # empty, so nothing is lost
    (tmp_path / "folder" / RECORD).unlink()
    for name in ("file", "folder"):
        with pytest.raises(UsageError, match="refusing to overwrite"):
            filled(tmp_path / name, 2)
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "folder" / "weights").read_text() == "1"


def test_leftovers_of_the_killed(tmp_path: Path) -> None:
    for name in (".model.new-1-a", ".model.old-1-a", ".other.new-1-a", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    remove_leftovers(tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {".other.new-1-a", "model"}


def test_damaged_records_are_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) == {}
    for text in ("{", "[1]", "\x00"):
        (tmp_path / RECORD).write_text(text)
        assert read_record(tmp_path) == {}
