"""Several teachers of which one is a service on a real socket: the numbers of a run that has all in its process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatespace.config import TrainConfig
from gatespace.errors import UsageError
from gatespace.models import TinyPair, load_model
from gatespace.teacher.scores import TeacherAwayError
from gatespace.training.train import train
from tests.addons.service.services import Nursery, Service
from tests.addons.service.test_remote import nursery, service
from tests.addons.vllm.scripted import Scripted
from tests.training.conftest import assert_resumes
from tests.training.test_teachers import make, narrow, table

__all__ = ["make", "narrow", "nursery", "service", "table"]
Make = Callable[..., TrainConfig]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_teacher_behind_an_address_beside_one_in_the_process(
    staleness: int, make: Make, service: Service, taught: Path, narrow: Path, tmp_path: Path
) -> None:
    """Killed and resumed too, with one cache for both; the run is the same run."""
    more: dict[str, Any] = {"steps": 4, "engine": {"micro_tokens": 200}, "rollout": {"staleness": staleness}}
    pair = {"teacher": None, "teachers": {"wide": service.address, "slim": str(narrow)}}
    teacher = {"cache": str(tmp_path / "scores"), "options": {"patience": 60.0, "wide": {"timeout": 1.0}}}
    local = assert_resumes(make("local", **more), make("remote", pair=pair, teacher=teacher, **more), 3)
    about = json.loads((tmp_path / "remote" / "environment.json").read_text())["teachers"]
    assert about["wide"]["address"] == service.address
    assert set(about["slim"]) == {"fingerprint"}
    again = train(make("again", pair=pair, teacher=teacher, **more))
    assert again["fingerprint"] == local["fingerprint"]
    timings = [json.loads(line) for line in (tmp_path / "again" / "timings.jsonl").read_text().splitlines()]
    assert sum(record["cache_misses"] for record in timings) == 0
    assert sum(record["teacher_tokens"] for record in timings) == 0


def test_two_kinds_of_services_and_a_teacher_in_the_process(
    make: Make, service: Service, taught: Path, narrow: Path, tiny: TinyPair, table: dict[str, Any], tmp_path: Path
) -> None:
    """A vLLM server promises no bits; what it is asked for are the rows that name it."""
    rows = [json.loads(line) for line in Path(table["table"]["source"]).read_text().splitlines()]
    for i, row in enumerate(rows):
        row["who"] = ("wide", "slim", "own")[i % 3]
    (tmp_path / "three.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more: dict[str, Any] = {
        "task": {**table, "table": {**table["table"], "source": str(tmp_path / "three.jsonl")}},
        "objective": {"support": "bucket"},
        "steps": 2,
    }
    teacher = {"payload": "top_k", "k": 12}

    def pair(wide: str, slim: str) -> dict[str, Any]:
        return {"teacher": None, "teachers": {"wide": wide, "slim": slim, "own": str(tiny.teacher)}}

    local = train(make("local", pair=pair(str(taught / "model"), str(narrow)), teacher=teacher, **more))
    with Scripted(load_model(str(narrow))) as server:
        reached = {"options": {"patience": 60.0, "wide": {"timeout": 1.0}}}
        config = make("mixed", pair=pair(service.address, server.address), teacher=teacher | reached, **more)
        mixed = train(config)
    for name, figures in local["run"]["teachers"].items():
        assert mixed["run"]["teachers"][name] == pytest.approx(figures, rel=1e-3)
    asked = [ids for path, body in server.asked if path == "/v1/completions" for ids in body["prompt"]]
    assert len(asked) >= mixed["run"]["teachers"]["slim"]["rows"]
    assert mixed["run"]["rows"] == sum(one["rows"] for one in mixed["run"]["teachers"].values())


def test_a_service_that_cannot_be_one_of_several(
    make: Make, nursery: Nursery, service: Service, narrow: Path, tiny: TinyPair
) -> None:
    def pair(address: str) -> dict[str, Any]:
        return {"teacher": None, "teachers": {"wide": address, "slim": str(narrow)}}

    options = {"timeout": 0.2, "patience": 0.5}
    with pytest.raises(TeacherAwayError, match=r"zmq://127\.0\.0\.1:9"):
        train(make(pair=pair("zmq://127.0.0.1:9"), teacher={"options": options}))
    with pytest.raises(UsageError, match=r"pair\.teachers\.wide: is not an address"):
        make(pair=pair("zmq://nowhere"))
    wrong = {"wide": {"patiense": 1}}
    with pytest.raises(UsageError, match=r"teacher\.options.*patiense"):
        train(make(pair=pair(service.address), teacher={"options": wrong}))
