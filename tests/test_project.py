"""What the project has beside its code: workflows, templates, containers and citation name what is there."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import shlex
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import gatespace
from gatespace.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def stem(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", WORKFLOWS, ids=stem)
def test_workflows_call_targets_that_exist_with_few_rights(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}  # a job asks for more by itself
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", step["uses"])
    targets = [line for step in steps for line in step.get("run", "").splitlines() if line.startswith("make ")]
    assert targets
    for line in targets:
        done = subprocess.run([*shlex.split(line), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_tests_run_on_every_python_that_the_package_names() -> None:
    tested = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert named
    assert set(named) <= set(tested)


def test_citation_is_of_this_version() -> None:
    assert read(ROOT / "CITATION.cff")["version"] == gatespace.__version__


def test_messages_name_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    pattern = r'module=.*, extra="(\w+)"|EXTRA = "(\w+)"|(?:gatespace|\.)\[([\w,]+)\]|extra `(\w+)`'
    named = {name for text in sources for groups in re.findall(pattern, text) for name in "".join(groups).split(",")}
    assert {"train", "lora"} <= named
    assert named <= set(project["optional-dependencies"])


def test_changelog_has_this_version() -> None:
    assert f"\n## {gatespace.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_files_of_the_image_exist_and_are_not_ignored() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in kept


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_services_are_commands_of_ours(name: str) -> None:
    service = COMPOSE["services"][name]
    health = service.get("healthcheck", {}).get("test", [])
    for words in (shlex.split(service["command"]), health[2:]):
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            command, words = command.get_command(None, words[0]), words[1:]
        if words:
            command.make_context(command.name, words)  # an unknown option or a missing argument raises
    assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])


def test_make_shell_has_the_command(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gatespace").symlink_to(Path(sysconfig.get_path("scripts")) / "gatespace")
    done = subprocess.run(
        ["make", f"--old-file={tmp_path}/.ready", f"VENV={tmp_path}", "shell"],  # nothing is installed
        cwd=ROOT,
        # not those of `make test`, by which this make would name its folders
        env={k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        | {"PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"},
        input="command -v gatespace\n",
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/bin/gatespace", done.stderr


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    there = set(re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE))
    missing = set()
    for found in pkgutil.iter_modules(gatespace.__path__, "gatespace."):
        if not found.ispkg or found.name == "gatespace.integrations":  # which needs the engines; see below
            continue
        package = importlib.import_module(found.name)
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                home = value.__module__
                missing |= set() if {home, f"{home}.{name}"} & there else {f"{home}.{name}"}
    assert not missing
    for add_on in pkgutil.iter_modules([str(ROOT / "src" / "gatespace" / "addons")]):
        assert f"::: gatespace.addons.{add_on.name}" in pages
