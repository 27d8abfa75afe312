from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gatespace.errors import RunError
from gatespace.training import checkpoint
from tests.training import kill_workers

STATE = {"seen": 3, "third": 1 / 3, "tiny": 5e-324, "deep": {"list": [0.1 + 0.2, None, True, "ü"]}}


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 4), value), "step": torch.tensor(value), "half": torch.ones(5, dtype=torch.bfloat16)}


def save(folder: Path, *steps: int, keep: int = 9) -> None:
    for step in steps:
        checkpoint.save(folder, step, tensors(step), {"step": step}, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def worker(work: str, *folders: Path) -> int:
    """Run a nursery of `kill_workers`; returns the number that it prints."""
    command = [sys.executable, kill_workers.__file__, work, *map(str, folders)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.stderr == ""
    return int(done.stdout)


# ---------------------------------------------------------------------------------------------------- contents


def test_everything_comes_back_exactly(tmp_path: Path) -> None:
    shared = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    given = {
        **tensors(),
        "view": shared.T,
        "shared": shared,
        "again": shared[2:],
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.tensor([-0.0, float("nan"), float("inf"), 1e-45])),
        "ids": torch.arange(3),
    }
    checkpoint.save(tmp_path / "new", 25, given, STATE)
    found = checkpoint.latest(tmp_path / "new")
    assert found is not None
    assert (found.step, found.state) == (25, STATE)
    assert found.state["tiny"].hex() == STATE["tiny"].hex()  # type: ignore[attr-defined]
    assert set(found.tensors) == set(given)
    for name, tensor in given.items():
        got = found.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert bytes(got.contiguous().flatten().view(torch.uint8).tolist()) == bytes(
            tensor.detach().contiguous().flatten().view(torch.uint8).tolist()
        ), name


def test_floats_that_are_not_finite_come_back_too(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {}, {"best": float("-inf"), "loss": float("nan")})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert repr(found.state) == "{'best': -inf, 'loss': nan}"


def test_what_is_done_to_loaded_tensors_does_not_reach_the_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for _ in range(2):
        found = checkpoint.latest(tmp_path)
        assert found is not None
        assert found.tensors["w"].sum() == 12
        found.tensors["w"].zero_()


def test_only_plain_formats_are_on_disk(tmp_path: Path) -> None:
    save(tmp_path, 7)
    assert names(tmp_path / "step-000007") == ["checksums.json", "state.json", "state.safetensors"]
    tensors = load_file(tmp_path / "step-000007" / "state.safetensors")
    assert torch.equal(tensors["w"], torch.full((3, 4), 7.0))


# ---------------------------------------------------------------------------------------------------- which are there


def test_none_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    assert checkpoint.latest(tmp_path) is None


def test_the_latest_is_found_by_number(tmp_path: Path) -> None:
    save(tmp_path, 999_999, 1_000_000)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1_000_000


@pytest.mark.parametrize("keep,left", [(1, ["step-000004"]), (2, ["step-000003", "step-000004"])])
def test_so_many_are_kept(tmp_path: Path, keep: int, left: list[str]) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=keep)
    assert names(tmp_path) == left


def test_later_ones_of_a_course_that_was_given_up_go(tmp_path: Path) -> None:
    save(tmp_path, 1, 5)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-000003"]


def test_saving_clears_what_a_kill_left(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for scrap in (".step-000005.new", ".step-000001.old"):
        (tmp_path / scrap).mkdir()
    (tmp_path / "notes.txt").write_text("the user's own")
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["notes.txt", "step-000003", "step-000004"]


# ---------------------------------------------------------------------------------------------------- damage


def damage_flip(path: Path) -> None:
    data = bytearray((path / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "state.safetensors").write_bytes(data)


def damage_cut(path: Path) -> None:
    os.truncate(path / "state.safetensors", 100)


def damage_state(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"step": 2', '"step": 3', 1))


def damage_no_tensors(path: Path) -> None:
    (path / "state.safetensors").unlink()


def damage_no_state(path: Path) -> None:
    (path / "state.json").unlink()


def damage_not_json(path: Path) -> None:
    (path / "checksums.json").write_bytes(b"\0" * 500)


def damage_no_checksums(path: Path) -> None:
    (path / "checksums.json").write_text("{}")


def damage_other(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-000001"), path)


@pytest.mark.parametrize("damage", [value for name, value in globals().copy().items() if name.startswith("damage_")])
def test_a_damaged_one_is_noted_and_the_one_before_is_used(tmp_path: Path, damage: object) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-000002")  # type: ignore[operator]
    notes: list[str] = []
    found = checkpoint.latest(tmp_path, report=notes.append)
    assert found is not None
    assert (found.step, found.state, float(found.tensors["step"])) == (1, {"step": 1}, 1.0)
    assert len(notes) == 1
    assert "step-000002 is damaged" in notes[0]
    shutil.rmtree(tmp_path / "step-000001")
    assert checkpoint.latest(tmp_path) is None


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in sorted((tmp_path / "step-000001").iterdir()):
        whole = path.read_bytes()
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
            found = checkpoint.latest(tmp_path)
            # Where JSON does not mind, the checksums are what they were.
            assert found is None or path.name == "checksums.json", (path.name, place)
        path.write_bytes(whole)
    assert checkpoint.latest(tmp_path) is not None


def test_another_format_is_an_error_and_not_a_new_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "_FORMAT", checkpoint._FORMAT + 1)
    with pytest.raises(RunError, match="another format"):
        checkpoint.latest(tmp_path)


def test_a_damaged_one_is_replaced_and_one_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 2)
    damage_cut(tmp_path / "step-000002")
    save(tmp_path, 2)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 2
    (tmp_path / "file").write_text("not a folder")
    assert checkpoint.latest(tmp_path / "file") is None
    with pytest.raises(RunError, match="checkpoint of step 3 could not be written"):
        save(tmp_path / "file", 3)


def test_a_full_disk_is_an_error_of_the_run_and_the_previous_one_stays(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys, torch; from pathlib import Path\n"
        "from gatespace.training import checkpoint\n"
        "checkpoint.save(Path(sys.argv[1]), 1, {'a': torch.ones(10)}, {})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: checkpoint.save(Path(sys.argv[1]), 2, {'a': torch.ones(1_000_000)}, {})\n"
        "except checkpoint.RunError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True).stdout
    assert "checkpoint of step 2 could not be written" in out
    assert "too large" in out
    assert names(tmp_path) == ["step-000001"]


# ---------------------------------------------------------------------------------------------------- killed


def test_killed_before_every_file_operation_of_a_save_in_turn_one_is_there(tmp_path: Path) -> None:
    assert worker("saving", tmp_path) > 10


@pytest.mark.slow
def test_killed_before_every_file_operation_in_turn_a_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    assert worker("every", tmp_path / "reference", tmp_path / "runs") > 40
