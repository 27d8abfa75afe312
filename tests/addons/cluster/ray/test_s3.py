"""Results through S3, from a real server over HTTP: machines that share no folder, one of which is killed."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-engines` has an environment with it")
pytest.importorskip("s3fs", reason="s3fs is not installed: `make test-engines` has an environment with it")
pytest.importorskip("moto.server", reason="moto is not installed: `make test-engines` has it")

from gatespace.addons.cluster import results
from gatespace.addons.cluster.storage import Storage
from gatespace.errors import RunError
from gatespace.files import read

from .conftest import Nodes, gatespace, numbers, run_folder_of, until

pytestmark = pytest.mark.slow
BUCKET = "studies"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a machine that may use the server's bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs(BUCKET, exist_ok=True)
    yield environment
    running.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def test_folders_on_s3(s3, tmp_path):
    storage = Storage(f"s3://{BUCKET}/some/where/")
    here = tmp_path / "here"
    (here / "deep").mkdir(parents=True)
    content = os.urandom(6_000_000)
    (here / "deep" / "large").write_bytes(content)
    (here / "empty").write_bytes(b"")
    assert storage.names("runs") == []
    assert storage.read("study.yaml") is None
    assert not storage.get_folder("runs/x", tmp_path / "there", last="done")
    storage.put_folder(here, "runs/x", last="done")
    # Another process sees it at once, and so does this one.
    assert storage.has("runs/x/done")
    assert Storage(storage.url).names("runs/x") == ["deep", "done", "empty"]
    assert storage.get_folder("runs/x", tmp_path / "there", last="done")
    assert (tmp_path / "there/deep/large").read_bytes() == content
    assert (tmp_path / "there/empty").read_bytes() == b""
    storage.remove("runs/x")
    storage.remove("runs/x")
    assert not storage.has("runs/x/done")
    assert storage.names("runs") == []
    with pytest.raises(RunError, match="could not be written to s3://nosuch"):
        Storage("s3://nosuch-bucket/x").write("a", b"")


def test_a_node_that_is_killed_is_taken_over_by_one_that_shares_no_folder_with_it(tmp_path, file, reference, nodes, s3):
    cluster: Nodes = nodes(**s3)
    folder, storage = tmp_path / "study", Storage(f"s3://{BUCKET}/cluster")
    words = ("run", file, "--output", folder, "--engine", "ray", "--address", cluster.address, "--no-report")
    with gatespace(*words, "--results", storage.url) as process:
        attempts = cluster.caches[1] / "studies"

        def begun() -> tuple[Path, int, list[dict]] | None:
            """A run on the second node that is not over, and what it has put at the URL: two steps or more."""
            held = run_folder_of(cluster.workers_of_second(), attempts)
            if held is None or not re.search(r"-s\d+-", held.name):
                return None
            place = f"runs/{held.name}"
            step = results.progress_at(storage, place)
            # Read while its node lives: the one that goes on replaces this snapshot soon after the kill.
            snapshots = [n for n in storage.names(f"{place}/{results.UNFINISHED}") if f"{step:06d}" in n]
            timings = [read_timings(storage, f"{place}/{results.UNFINISHED}/{name}") for name in snapshots]
            return (held, step, timings[0][:step]) if step >= 2 and timings and len(timings[0]) >= step else None

        held, step, before = until(begun, "run of the second node at the URL", every=0.3)
        place = f"runs/{held.name}"
        cluster.kill_second()
        assert not storage.has(f"{place}/done"), "the run was over before its node was killed"
        _, heard = process.communicate(timeout=600)
    assert process.returncode == 0, heard
    assert f"{held.name}: " in heard
    assert "resumed (1 of 3 times)" in heard
    assert numbers(folder) == numbers(reference)
    # What a step took is never the same twice: the first node's steps up to that snapshot were not done again.
    assert read(folder / place / "timings.jsonl")[:step] == before
    # The folder was filled from the URL, which holds nothing unfinished any more.
    for done in folder.glob("runs/*"):
        assert sorted(storage.names(f"runs/{done.name}")) == sorted({*os.listdir(done), "reads"} - {"progress.json"})
    assert str(tmp_path / "study") in (folder / place / "config.yaml").read_text()
    assert "cache-" not in (folder / place / "config.yaml").read_text()
    # What it was begun with is there for a machine that resumes from the URL alone.
    assert json.loads(storage.read("store.json") or b"")["threads"] == 1


def read_timings(storage: Storage, place: str) -> list[dict]:
    return [json.loads(line) for line in (storage.read(f"{place}/timings.jsonl") or b"").splitlines()]
