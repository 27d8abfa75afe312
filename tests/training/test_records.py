"""Records of a run that were lost, changed or deleted under it: it says so, and writes nothing that is half."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TrainConfig
from gatespace.errors import RunError
from gatespace.runs import RunFolder
from gatespace.training.progress import Silent
from gatespace.training.train import train


class _Stopped(Exception):
    pass


class At(Silent):
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self._step, self._act = step, act

    def step(self, step: int, steps: int, record: Any, timing: Any) -> None:
        if step == self._step:
            self._act()


def stop() -> None:
    raise _Stopped


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return act


def test_records_before_a_checkpoint_must_be_what_they_were(
    train_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = train_config(steps=4, evaluation={"every": 1}, trace={"tokens_every": 1})
    straight = config.model_copy(update={"output": tmp_path / "straight"})
    train(straight)
    with pytest.raises(_Stopped):
        train(config, At(3, stop))
    kept = tmp_path / "kept"
    shutil.copytree(config.output, kept)
    damage: list[tuple[str, Callable[[Path], None], str]] = [
        ("metrics", lines(lambda all: [all[0].replace(b'"step": 1', b'"step": 2'), *all[1:]]), "changed"),
        ("timings", lines(lambda all: all[:1]), "changed"),
        ("tokens", Path.unlink, "it is missing"),
    ]
    for name, act, what in damage:
        shutil.rmtree(config.output)
        shutil.copytree(kept, config.output)
        act(RunFolder(config.output).log_file(name))
        with pytest.raises(RunError, match=f"{name}.jsonl is not what the run wrote before its checkpoint") as error:
            train(config)
        assert what in str(error.value)
        assert f"remove {config.output}" in error.value.instead
    # What comes after the checkpoint is cut, torn or not.
    shutil.rmtree(config.output)
    shutil.copytree(kept, config.output)
    with RunFolder(config.output).log_file("tokens").open("ab") as file:
        file.write(b'{"step": 3, "to')
    train(config)
    for name in ("metrics", "tokens", "evaluations"):
        assert (
            RunFolder(config.output).log_file(name).read_bytes()
            == RunFolder(straight.output).log_file(name).read_bytes()
        )


@pytest.mark.parametrize("way", ["deleted", "replaced"])
def test_an_output_folder_that_is_gone_is_noticed_at_the_next_write(
    way: str, train_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = train_config(steps=40, evaluation={"final": []})
    seen: list[int] = []

    def act() -> None:
        shutil.rmtree(config.output)
        if way == "replaced":
            config.output.mkdir()

    class Watching(At):
        def step(self, step: int, steps: int, record: Any, timing: Any) -> None:
            seen.append(step)
            super().step(step, steps, record, timing)

    with pytest.raises(RunError, match="deleted, moved or replaced while this was writing") as error:
        train(config, Watching(1, act))
    assert error.value.exit_code == 1
    assert seen == [1]
    assert config.output.exists() == (way == "replaced")
    assert not any(config.output.glob("*"))


@pytest.mark.parametrize("content", ["", '{"identity": "12', "[]", "\0\0"])
@pytest.mark.parametrize("name", ["identity.json", "summary.json"])
def test_a_damaged_file_is_named(
    name: str, content: str, train_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = train_config()
    run = RunFolder(config.output)
    with run.claim():
        run.begin(config, {"task": "x"}, {})
        run.finish({"steps": 3})
        run.mark_done()
    (run.path / name).write_text(content)
    with pytest.raises(RunError, match=f"{name} of a run is damaged") as error:
        run.begin(config, {"task": "x"}, {})
    assert str(run.path) in error.value.instead
    (run.path / "summary.json").unlink()
    (run.path / "identity.json").write_text(json.dumps({"identity": "x", "content": {}}))
    with pytest.raises(RunError, match=r"summary\.json of a run is damaged"):
        run.summary()
