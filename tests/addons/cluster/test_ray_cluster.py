"""What a worker on a node does before its job. A real cluster is in `ray/`, where Ray is installed."""

from __future__ import annotations

import shutil

import pytest

from gatespace.addons.cluster.ray_cluster import Node, asked, execute_on_node
from gatespace.addons.cluster.results import scratch_of
from gatespace.config.study import ResourcesConfig
from gatespace.runs import StudyFolder
from gatespace.study.engines import EngineSpec
from gatespace.study.outlook import outline
from gatespace.study.runner import run_study
from tests.study.conftest import InlineEngine, study


def test_a_worker_with_another_version_does_nothing():
    performed: list[object] = []
    outcome = execute_on_node({"do": "train"}, Node(performed.append, version="0.0.0"))
    assert outcome["state"] == "failed"
    assert "another gatespace" in outcome["error"]
    assert "0.0.0" in outcome["error"]
    assert performed == []


def test_what_a_run_asks_for():
    assert asked(ResourcesConfig(), threads=3) == {"CPU": 3.0}
    some = ResourcesConfig(cpus=2, gpus=0.5, memory_gb=1.5, custom={"a100": 1})
    assert asked(some, threads=3) == {"CPU": 2, "GPU": 0.5, "memory": 1.5 * 2**30, "a100": 1}


def test_only_workers_in_the_studys_folder_leave_its_scores_alone(tmp_path):
    folder = StudyFolder(tmp_path)

    def node(address, **more):
        return Node.of(EngineSpec(study(), folder, 1, 1, address, perform=print, **more))

    assert node("auto").scores == str(folder.scores)  # whatever the jobs are: several machines cannot share the cache
    assert node("auto").perform is print
    assert node("auto", shared=False).scores is None  # results through a URL have their own
    assert node(None).scores is None


@pytest.mark.slow
def test_scores_of_a_cluster_are_the_machines_own(tmp_path):
    axes = {"restrictions": False, "static": [], "isolation": None}
    teach, train = {"teacher": {"model": "tiny", "steps": 2}}, {**study().train, "pair": {"student": "tiny"}}
    config = study(axes=axes, points=["G5"], seeds=[1], teach=teach, train=train)
    folder = StudyFolder(tmp_path / "study")
    run_study(config, folder, InlineEngine(), threads=folder.begin(config, workers=1, threads=1))
    (work,) = [work for work in outline(folder, config, 1)[1] if work.run is not None]
    before = work.folder.log("metrics")
    assert folder.scores.exists()
    shutil.rmtree(work.folder)
    shutil.rmtree(folder.scores)
    assert execute_on_node(work.job(), Node(scores=str(folder.scores))) == {"state": "done"}
    assert not folder.scores.exists()
    assert list((scratch_of(str(folder.scores)) / "scores").iterdir())
    assert work.folder.log("metrics") == before
