"""A study that was really trained, packed and joined: the same tables from a file as from the folder."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import socket
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gatespace.addons.archive.merge import merge
from gatespace.addons.archive.pack import FORMAT, pack
from gatespace.addons.archive.published import without_places
from gatespace.addons.archive.unpack import opened
from gatespace.config import dump_yaml
from gatespace.errors import UsageError
from gatespace.runs import RunFolder, StudyFolder
from gatespace.study.plan import make_plan
from gatespace.study.results import read_results

from .conftest import cli, run, small

pytestmark = pytest.mark.slow


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").iterdir())


def part_of(study: Path, place: Path, runs: list[str]) -> Path:
    """A machine that has these runs."""
    shutil.copytree(study, place, ignore=shutil.ignore_patterns("model", "scores"))
    for name in set(names(study)) - set(runs):
        shutil.rmtree(place / "runs" / name)
    return place


def _texts(value: Any) -> Any:
    """The same record with all its numbers as texts."""
    if isinstance(value, dict):
        return {key: _texts(item) for key, item in value.items()}
    return [_texts(item) for item in value] if isinstance(value, list) else str(value)


def reads(folder: Path, name: str) -> int:
    return len((folder / "runs" / name / "reads.jsonl").read_text().splitlines())


def test_an_archive_has_the_records_and_no_weights(trained):
    path = pack(StudyFolder(trained))
    assert path == trained.with_name("small.tar.xz")
    inside = opened(path)
    found = {one.relative_to(inside).as_posix() for one in inside.rglob("*") if one.is_file()}
    run = f"runs/{names(trained)[0]}"
    for name in ("config.yaml", "identity.json", "environment.json", "summary.json", "metrics.jsonl", "timings.jsonl"):
        assert f"{run}/{name}" in found
    for name in ("tokens.jsonl", "reads.jsonl", "evaluation-test.json", "predictions-test.jsonl", "done"):
        assert f"{run}/{name}" in found
    assert not [name for name in found if name.startswith(("models/", "scores/", "tables/")) or "safetensors" in name]
    for name in found:
        if not name.endswith((".yaml", ".json")):  # which name the folder
            assert (inside / name).read_bytes() == (trained / name).read_bytes()


def test_the_same_records_give_the_same_bytes_without_the_folder_s_path(original, trained, tmp_path):
    for path in trained.glob("runs/*/config.yaml"):
        path.write_text(path.read_text().replace(str(original), str(trained)))  # as if it had been trained there
        assert str(trained) in path.read_text()
    first = pack(StudyFolder(trained), tmp_path / "first.tar.xz").read_bytes()
    for path in trained.rglob("*"):
        os.utime(path, (1, 1))
    assert pack(StudyFolder(trained), tmp_path / "second.tar.xz").read_bytes() == first
    assert os.fsencode(trained) not in lzma.decompress(first)


def test_report_and_explore_work_from_the_file_alone(trained, tmp_path):
    assert cli("report", trained, "--no-png").exit_code == 0
    packed = cli("pack", trained, "--json")
    assert packed.exit_code == 0, packed.output
    away = tmp_path / "elsewhere" / "small.tar.xz"
    away.parent.mkdir()
    shutil.move(json.loads(packed.output)["file"], away)
    told = cli("report", away, "--no-png", "--json")
    assert told.exit_code == 0, told.output
    written = away.with_name("small-report")
    tables = sorted((trained / "tables").iterdir())
    assert [path.name for path in tables] == sorted(path.name for path in (written / "tables").iterdir())
    for path in tables:
        assert (written / "tables" / path.name).read_bytes() == path.read_bytes(), path.name
    evidence = cli("evidence", away, "--json")
    assert json.loads(evidence.output)["comparisons"] == json.loads(told.output)["comparisons"]
    (found,) = json.loads(evidence.output)["comparisons"]
    assert (found["left"], found["right"], found["all"]["n"]) == ("G5", "static:0.5", 2)
    assert "static:0.5" in cli("evidence", away).output
    page = cli("explore", away, "--json")
    assert page.exit_code == 0, page.output
    assert json.loads(page.output)["runs"] == 4
    assert (written / "explorer.html").is_file()


def test_halves_of_two_machines_are_the_whole(trained, tmp_path):
    runs = names(trained)
    one = part_of(trained, tmp_path / "one", runs[:2])
    two = pack(StudyFolder(part_of(trained, tmp_path / "two", runs[2:])), tmp_path / "two.tar.xz")
    half = merge([one], tmp_path / "half")
    assert set(half.missing) == set(runs[2:])
    whole = merge([one, two], tmp_path / "whole")
    assert (set(whole.done), whole.missing) == (set(runs), ())
    joined, own = (pack(StudyFolder(folder)) for folder in (tmp_path / "whole", trained))
    for name in runs:
        assert reads(tmp_path / "whole", name) == reads(trained, name)
        for file in ("summary.json", "predictions-test.jsonl", "metrics.jsonl"):
            assert (opened(joined) / "runs" / name / file).read_bytes() == (
                opened(own) / "runs" / name / file
            ).read_bytes()
    told = cli("merge", one, trained, "-o", tmp_path / "again.tar.xz", "--json")
    assert told.exit_code == 0, told.output
    assert set(runs[:2]) < set(json.loads(told.output)["twice"])  # and the baselines


def test_a_study_goes_on_from_its_archive(trained, tmp_path):
    runs = names(trained)
    whole, half = (pack(StudyFolder(part_of(trained, tmp_path / f"{n}", runs[:n]))) for n in (len(runs), 1))
    folder = tmp_path / "half"
    merge([half], folder)
    status = json.loads(cli("status", folder, "--json").output)
    assert status["seconds_left"] is None  # an archive has no times
    assert {one["seconds"] for one in status["work"] if one["state"] == "done"} == {None}
    assert " left" not in cli("status", folder).output
    run(StudyFolder(folder).config(), folder)  # its teacher is taught again, by the same recipe
    for name in runs:
        for file in ("metrics.jsonl", "predictions-test.jsonl"):
            assert (folder / "runs" / name / file).read_bytes() == (trained / "runs" / name / file).read_bytes()
    folder = tmp_path / "whole"
    merge([whole], folder)
    run(StudyFolder(folder).config(), folder)
    assert not (folder / "models").exists()  # nothing that is open needs one


def test_seeds_of_several_machines_are_put_together(trained, tmp_path):
    parts = []
    for seed in (1, 2):
        own = [name for name in names(trained) if f"-s{seed}-" in name]
        part = part_of(trained, tmp_path / f"seed-{seed}", own)
        (part / "study.yaml").write_text(dump_yaml(small(seeds=[seed])))
        parts.append(part)
    whole = merge(parts, tmp_path / "whole")
    assert set(whole.done) == set(names(trained))
    assert StudyFolder(tmp_path / "whole").config().seeds == (1, 2)


def test_the_same_run_with_other_results_is_an_error_that_names_it(trained, tmp_path):
    name = names(trained)[1]
    other = part_of(trained, tmp_path / "other", names(trained))
    predictions = other / "runs" / name / "predictions-test.jsonl"
    predictions.write_text(predictions.read_text() + predictions.read_text().splitlines(keepends=True)[0])
    with pytest.raises(UsageError) as caught:
        merge([trained, other], tmp_path / "out")
    assert caught.value.got == name
    assert not (tmp_path / "out").exists()
    assert not [*tmp_path.glob(".out*")]


def test_a_run_computed_twice_was_read_twice_and_a_copy_once(trained, tmp_path):
    name = names(trained)[0]
    again = part_of(trained, tmp_path / "again", names(trained))
    merge([trained, again], tmp_path / "copies")
    assert reads(tmp_path / "copies", name) == reads(trained, name)
    timings = again / "runs" / name / "timings.jsonl"
    timings.write_text(timings.read_text().replace("0.", "1."))
    merge([trained, again], tmp_path / "both")
    assert reads(tmp_path / "both", name) == 2 * reads(trained, name)


@pytest.mark.parametrize(
    "name, damage",
    [
        ("summary.json", lambda record: []),
        ("summary.json", lambda record: {}),
        ("summary.json", lambda record: record | {"evaluation": 3}),
        ("summary.json", lambda record: record | {"run": None}),
        ("summary.json", lambda record: _texts(record)),
        ("summary.json", lambda record: record | {"alarms": [{"on": True}]}),
        ("identity.json", lambda record: {"content": {"gate": "nonsense"}}),
        ("environment.json", lambda record: ["x"]),
        ("evaluation-test.json", lambda record: {"metrics": []}),
    ],
)  # fmt: skip
def test_records_of_the_wrong_type_are_errors_in_words(trained, tmp_path, name, damage):
    for path in [*trained.glob(f"runs/*/{name}"), *trained.glob(f"baselines/*/{name}")]:
        path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    (tmp_path / "out").mkdir()
    archive = tmp_path / "out" / "small.tar.xz"
    paths = sorted(path for path in StudyFolder(trained).records())
    entries = [{"path": str(path.relative_to(trained)), "bytes": path.stat().st_size} for path in paths]
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"format": FORMAT, "files": entries}))
    with tarfile.open(archive, "w:xz", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(manifest, "manifest.json")
        for path in paths:
            tar.add(path, path.relative_to(trained))
    for command in (["evidence"], ["report", "--no-png"], ["explore"], ["merge", "-o", tmp_path / "merged"]):
        result = cli(command[0], archive, *command[1:])
        assert result.exit_code in (0, 1, 2), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)


def test_a_source_that_is_not_there(trained, tmp_path):
    with pytest.raises(UsageError, match="there is no such folder or archive"):
        merge([trained, tmp_path / "none.tar.xz"], tmp_path / "both")


def test_another_study_is_not_joined(trained, tmp_path):
    other = part_of(trained, tmp_path / "other", [])
    (other / "study.yaml").write_text(dump_yaml(small(points=["G4"])))
    with pytest.raises(UsageError, match="differ in points"):
        merge([trained, other], tmp_path / "out")
    with pytest.raises(UsageError, match="exists already"):
        merge([trained], other)


def test_what_is_published_names_no_place_host_or_user(tmp_path, monkeypatch):
    home = tmp_path / "home" / "mary ann"
    monkeypatch.setenv("GATESPACE_CACHE", str(home / "cache"))
    rows = [{"text": f"text {i} and/or /b/ thread", "label": ("yes/no", "no")[i % 2]} for i in range(60)]
    (home / "data").mkdir(parents=True)
    (home / "data" / "mails.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {"source": str(home / "data" / "mails.jsonl"), "labels": ["yes/no", "no"]}
    split = {"teacher": 0.6, "distill": 0.4}
    config = small(tasks={"mails": {"task": {"name": None, "table": table, "brief": True, "split": split}}}, seeds=[1])
    folder = run(config, home / "small")
    (failed,) = StudyFolder(folder).path.glob("runs/mails-static*")
    (failed / "done").unlink()
    details = f'Traceback\n  File "{home}/x.py"'
    RunFolder(failed).fail(f"no answer from zmq://me:pw@mary-pc:5555, nor of {home}/data/x.csv", details)
    own = make_plan(StudyFolder(folder).config())

    packed = pack(StudyFolder(folder), tmp_path / "small.tar.xz")
    joined = merge([folder, packed], tmp_path / "joined.tar.xz")
    for path in (packed, joined.path):
        files = [file for file in opened(path).rglob("*") if file.is_file()]
        for word in (str(tmp_path), "mary", "home/", "pw@", socket.gethostname(), "Traceback"):
            assert not [file for file in files if word.encode() in file.read_bytes()], word
        inside = StudyFolder(opened(path))
        plan = make_plan(inside.config())
        assert inside.config().tasks["mails"].task["table"]["source"] == "mails.jsonl"
        assert [run.point for run in plan.runs.values()] == [run.point for run in own.runs.values()]
        states = {run.point: inside.run(run.id).state for run in plan.runs.values()}
        assert states == {"G5": "done", "static:0.5": "failed"}
        assert (
            inside.run(plan.find("mails", "static:0.5", 1).id).error() == "no answer from zmq://host:5555, nor of x.csv"
        )
        # Names of folders change with the settings, texts and results do not.
        before, after = (
            place.run(which.find("mails", "G5", 1).id) for place, which in ((StudyFolder(folder), own), (inside, plan))
        )
        assert before.path.name != after.path.name
        for name in ("predictions-test.jsonl", "metrics.jsonl"):
            assert (after.path / name).read_bytes() == (before.path / name).read_bytes()
        theirs, ours = (place.summary()["evaluation"]["test"] for place in (after, before))
        assert (theirs.pop("task"), Path(ours.pop("task")).name) == ("mails.jsonl", "mails.jsonl")
        assert theirs == ours
        assert read_results(inside.path).baselines["mails"].start["test"].count > 0
        assert {read.run for read in read_results(inside.path).test_reads} >= {after.path.name}


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("/data/cache/x (from /home/me/a b)", "x (from a b)"),
        ("see file:///home/me/x.csv", "see x.csv"),
        ("http://user:pw@gpu-7.lab:8000/v1", "http://host:8000/v1"),
        ("vllm://[fe80::1]:8000/Qwen/Qwen3-32B", "vllm://host:8000/Qwen/Qwen3-32B"),
        ("~me/models/t", "t"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("./models/t/model", "./models/t/model"),
        ("λ/2 and/or 1/n", "λ/2 and/or 1/n"),
    ],
)
def test_places_in_texts(text, published):
    assert without_places([text, {"k": text}, 3, None]) == [published, {"k": published}, 3, None]
