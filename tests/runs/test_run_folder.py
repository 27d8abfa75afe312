"""The life of a run's folder, without a run: what its files say at every moment, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TrainConfig, parse_config
from gatespace.errors import UsageError
from gatespace.files import Mark
from gatespace.runs import RunFolder
from gatespace.runs.run_folder import DamagedFileError

CONTENT = {"task": "d", "student": "s", "teacher": "t", "precision": "fp32"}


def config(**settings: Any) -> TrainConfig:
    return parse_config(TrainConfig, {"pair": {"teacher": "models/t"}, **settings})


@pytest.fixture
def begun(tmp_path: Path) -> Any:
    run = RunFolder(tmp_path / "run")
    with run.claim():
        assert run.begin(config(seed=1), CONTENT, {"python": "3"}) is None
        yield run


def test_from_waiting_to_done(begun: RunFolder) -> None:
    assert (begun.exists, begun.state, begun.last_step(), begun.summary()) == (True, "running", 0, None)
    logs = begun.open_logs({})
    logs["metrics"].append({"step": 1, "loss": 0.5})
    assert (begun.last_step(), begun.log("metrics")) == (1, [{"step": 1, "loss": 0.5}])
    begun.checkpoints.mkdir()
    begun.finish({"loss": 0.5})
    assert (begun.state, begun.summary(), begun.summary(before_done=True)) == ("running", None, {"loss": 0.5})
    begun.mark_done()
    assert (begun.state, begun.checkpoints.exists()) == ("done", False)
    assert begun.begin(config(seed=1), CONTENT, {}) == {"loss": 0.5}  # what was done is not done again


def test_a_run_that_failed_may_be_tried_again(begun: RunFolder) -> None:
    assert (begun.error(), begun.ended_at()) == ("", None)
    begun.fail("out of memory", "a traceback")
    assert (begun.state, begun.error(), begun.failure()["details"]) == ("failed", "out of memory", "a traceback")
    assert begun.ended_at() is not None
    begun.clear_failure()
    assert (begun.state, begun.failure()) == ("running", {})


@pytest.mark.parametrize(
    "settings, content, why",
    [
        ({"seed": 2}, {}, "its seed is 1, not 2"),
        ({"optimizer": {"lr": 1e-3}}, {}, "its optimizer.lr is 1e-06, not 0.001"),
        ({}, {"teacher": "other"}, "changed: teacher"),
        ({}, {"precision": "bf16"}, "its precision is fp32, not bf16"),
        ({}, {"processes": "2"}, "it is a run of 1 processes, not 2"),
        ({}, {"plugins": "p"}, "changed: plugins"),
        ({}, {"model": "m"}, "it is not a run of this command"),
    ],
)
def test_another_run_is_refused(begun: RunFolder, settings: dict[str, Any], content: dict[str, str], why: str) -> None:
    before = {path.name: path.read_bytes() for path in begun.path.iterdir()}
    with pytest.raises(UsageError) as caught:
        begun.begin(config(**{"seed": 1, **settings}), {**CONTENT, **content}, {})
    assert caught.value.why == why
    assert {path.name: path.read_bytes() for path in begun.path.iterdir()} == before


def test_what_changes_no_number_is_the_same_run(begun: RunFolder) -> None:
    assert begun.begin(config(seed=1, checkpoint={"every": 7}), CONTENT, {}) is None
    assert begun.settings()["checkpoint"]["every"] == 7


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": 1, "content": {}}', '{"identity": "x"}'])
def test_a_damaged_identity_is_named(begun: RunFolder, text: str) -> None:
    (begun.path / "identity.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"identity\.json of a run is damaged"):
        begun.begin(config(seed=1), CONTENT, {})


def test_logs_are_cut_back_to_a_checkpoint(begun: RunFolder) -> None:
    log = begun.open_logs({})["metrics"]
    log.append({"step": 1})
    mark = log.mark
    log.append({"step": 2})
    log.close()
    assert begun.open_logs({"metrics": mark})["metrics"].mark == mark != Mark()
    assert begun.log("metrics") == [{"step": 1}]


def test_steps_that_another_machine_reports(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.set_remote_step(12)
    assert run.last_step() == 12
    assert json.loads((tmp_path / "progress.json").read_text()) == {"step": 12}
    run.set_remote_step(None)
    assert run.last_step() == 0
