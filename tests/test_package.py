"""The package as others meet it: the wheel, the import, the layers, and every example and link in the text."""

from __future__ import annotations

import os
import pkgutil
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer

import gatespace
from gatespace.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sysconfig.get_path("scripts"))
PAGES = sorted(page for place in ("*.md", "docs/**/*.md", "benchmarks/*.md") for page in ROOT.glob(place))
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that has to succeed, without what would let it find the source tree by accident."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))} → {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in _FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------------------------------------------- wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_the_core_has_the_numpy_without_which_torch_warns(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (about,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        assert re.search(r"^Requires-Dist: numpy[^;]*$", files.read(about).decode(), re.MULTILINE)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = ROOT / "src"
    files = [path for path in sources.glob("gatespace/**/*") if path.is_file() and "__pycache__" not in path.parts]
    packaged = {entry for entry in names if ".dist-info/" not in entry}
    assert packaged == {path.relative_to(sources).as_posix() for path in files}
    assert "gatespace/py.typed" in packaged
    assert any(entry.endswith("licenses/LICENSE") for entry in names)


def test_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "-qq",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    # Borrow the dependencies, and not the editable gatespace: a path file inside a borrowed folder is not followed.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    version = run(home / "bin" / "gatespace", "--version", cwd=tmp_path).stdout.split()[-1]
    assert version == wheel.name.split("-")[1] == gatespace.__version__

    code = """
        import gatespace, torch
        logits = torch.zeros(1, 2, 4, requires_grad=True)
        teacher = torch.tensor([[[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]])
        out = gatespace.gated_kl(logits, teacher, gate=gatespace.Gate.named("H2"), top_k=2)
        out.loss.backward()
        assert out.loss.item() > 0 and logits.grad.abs().sum() > 0
        print(gatespace.__file__)
    """
    lines = "\n".join(line.strip() for line in code.strip().splitlines())
    imported = Path(run(python, "-c", lines, cwd=tmp_path).stdout.strip())
    assert imported.is_relative_to(site), f"{imported} is not the wheel's"


# ---------------------------------------------------------------------------------------------------- imports


@pytest.mark.parametrize(
    "statement",
    [
        "import gatespace",
        "from gatespace import Gate; Gate.named('G5').entropy_only()",
        "import gatespace.errors",
        "import gatespace.gating.coefficients",
        "import gatespace.cli.app",
    ],
)
def test_torch_is_imported_only_by_those_who_need_it(statement: str, tmp_path: Path) -> None:
    check = "import sys; sys.exit(', '.join({'torch', 'numpy', 'matplotlib'} & set(sys.modules)) or 0)"
    run(sys.executable, "-c", f"{statement}\n{check}", cwd=tmp_path)


def test_layers_import_downward_only() -> None:
    assert "0 broken" in run(BIN / "lint-imports", cwd=ROOT).stdout


# ---------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    # one process per page, its blocks in order, as a reader would paste them
    (tmp_path / "page.py").write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    run(sys.executable, "page.py", cwd=tmp_path, OMP_NUM_THREADS="1")


def commands(program: str) -> list[str]:
    """The lines of the pages' shell blocks that start with `program`, without their remarks."""
    whole = (block.replace("\\\n", " ") for page in PAGES for block in blocks(page, "bash"))
    lines = (line.split("#")[0].strip() for block in whole for line in block.split("\n"))
    return sorted({line for line in lines if line.split(" ")[0] == program})


JOBS = (
    "distill",
    "teach",
    "train",
    "evaluate",
    "predict",
    "export",
    "run",
    "status",
    "evidence",
    "report",
    "explore",
    "pack",
    "merge",
    "tune",
)
"""Commands that take long, or need what another one has made."""


def _marked(line: str) -> Any:
    """The plan of the replication reads three tasks of tweets with a real tokenizer."""
    return pytest.param(line, marks=pytest.mark.long) if "replication" in line else line


@pytest.mark.parametrize("command", [_marked(line) for line in commands("gatespace") if line.split()[1] not in JOBS])
def test_commands_in_the_text_run(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    run(BIN / program, *arguments, cwd=tmp_path)


@pytest.mark.parametrize("command", [line for line in commands("gatespace") if line.split()[1] in JOBS])
def test_jobs_in_the_text_are_well_formed(command: str) -> None:
    _, job, *arguments = shlex.split(command.split("<")[0])
    command: Any = typer.main.get_group(app).get_command(None, job)
    command.make_context(job, arguments)  # an unknown option or a missing argument raises


@pytest.mark.slow
@pytest.mark.long
def test_distillation_in_the_text_runs(tmp_path: Path) -> None:
    """The whole block, as a reader would paste it."""
    (block,) = [block for block in blocks(ROOT / "docs" / "engine.md", "bash") if "gatespace train" in block]
    script = f"set -e\nexport PATH={BIN}:$PATH GATESPACE_CACHE={tmp_path / 'cache'}\n{block}"
    shown = run("bash", "-c", script, cwd=tmp_path, OMP_NUM_THREADS="1").stdout
    assert shown.splitlines()[-1].startswith("good news\t")


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_in_the_text_exist(command: str) -> None:
    run(*shlex.split(command), "--dry-run", cwd=ROOT)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_resolve(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    files = {target: page.parent / (target.split("#")[0] or page.name) for target in targets}
    broken = [target for target, file in files.items() if not file.exists()]
    broken += [
        target
        for target, file in files.items()
        if "#" in target and file in PAGES and target.split("#")[1] not in anchors(file)
    ]
    assert not broken


def anchors(page: Path) -> set[str]:
    """What a link can name in a page: its headings, as MkDocs and GitHub spell them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_list_of_modules_is_up_to_date() -> None:
    run(sys.executable, ROOT / "docs" / "make_files.py", "--check", cwd=ROOT)


def paper_map_names(pattern: str) -> list[str]:
    return sorted(set(re.findall(pattern, (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8"))))


@pytest.mark.parametrize("report", paper_map_names(r"`([a-z]+-[a-z0-9-]*(?:TASK|AXIS)?)`"))
def test_tables_and_figures_of_the_paper_map_exist(report: str) -> None:
    places = (ROOT / "src" / "gatespace" / "report" / f"{name}.py" for name in ("tables", "charts", "view"))
    assert any(
        f'"{re.split("TASK|AXIS|restriction|gap", report)[0]}' in place.read_text(encoding="utf-8") for place in places
    )


@pytest.mark.parametrize("path", paper_map_names(r"`(gatespace\.[\w.]+)`"))
def test_functions_of_the_paper_map_exist(path: str) -> None:
    assert pkgutil.resolve_name(path) is not None


@pytest.mark.parametrize("path", paper_map_names(r"`(tests/[\w/.:]+)`"))
def test_tests_of_the_paper_map_exist(path: str) -> None:
    file, _, test = path.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {test}\(" if test else r"^def test_", text, re.MULTILINE)
