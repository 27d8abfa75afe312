"""The core without its add-ons: they are deleted in a copy, and all the rest still works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which add-ons, their tests and their public aliases are gone."""
    copy = tmp_path_factory.mktemp("core")
    ignore = shutil.ignore_patterns("addons", "integrations", "__pycache__")
    for folder in ("src", "tests", "examples", "docs", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def run(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run([sys.executable, *words], cwd=core, env=environment, capture_output=True, text=True)


def test_commands_of_add_ons_are_gone_and_named_as_unknown(core: Path) -> None:
    told = run(core, "-m", "gatespace", "--help")
    assert told.returncode == 0, told.stderr
    for name in ("train", "run", "report"):
        assert f" {name} " in told.stdout
    gone = run(core, "-m", "gatespace", "explore")
    assert gone.returncode == 2
    assert "unknown command 'explore'" in gone.stderr
    assert "unknown command 'tune'" in run(core, "-m", "gatespace", "tune", "demo").stderr
    planned = run(core, "-m", "gatespace", "plan", "demo", "--set", "tune.proposals=3")
    assert planned.returncode == 0, planned.stderr  # a study with an add-on's section is a study without it


def test_what_an_add_on_has_is_a_clear_error(core: Path) -> None:
    told = run(core, "-m", "gatespace", "train", "--teacher", "zmq://127.0.0.1:5555", "--dry-run")
    assert told.returncode == 2
    assert "there is no kind of teacher called zmq://" in told.stderr
    told = run(core, "-m", "gatespace", "train", "--teacher", "x", "--set", "trace.trackers=[wandb]", "--dry-run")
    assert told.returncode == 2
    assert "trace.trackers" in told.stderr


@pytest.mark.long
def test_the_demo_runs(core: Path) -> None:
    fewer = ["train.steps=3", "teach.teacher.steps=40", "teach.student.steps=40", "points=[G5]", "seeds=[1]"]
    sets = [word for setting in fewer for word in ("--set", setting)]
    done = run(core, "-m", "gatespace", "run", "demo", "--quick", "--quiet", "--output", "its-study", *sets)
    assert done.returncode == 0, done.stderr
    assert (core / "its-study" / "report.html").is_file()
    (card, *_) = [*(core / "its-study" / "models").glob("*/model/config.json")]
    assert card.is_file()


@pytest.mark.long
def test_the_core_s_tests_pass(core: Path) -> None:
    """All but those of the installed package and of benchmark scripts, which are about the whole."""
    ignored = [
        f"--ignore=tests/{name}"
        for name in (
            "test_package.py",
            "test_benchmarks.py",
            "test_core_alone.py",
            "test_notebook.py",
            "test_project.py",
        )
    ]
    options = ["-n", "2", "-q", "-p", "no:cacheprovider", "-m", "not long and not slow"]
    done = run(core, "-m", "pytest", "tests", *ignored, *options)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
