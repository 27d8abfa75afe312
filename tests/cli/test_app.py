from __future__ import annotations

import json
import os
import re

import pytest
import typer
from typer.testing import CliRunner

from gatespace.cli import app as app_module
from gatespace.errors import RunError, UsageError
from gatespace.plugins import provided
from tests.cli.conftest import ROOT

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv = ["gatespace", *{args!r}]
from gatespace.cli.app import main
try:
    main()
except SystemExit as stop:
    code = stop.code or 0
heavy = [name for name in ("torch", "numpy", "gatespace.config", "matplotlib") if sys.modules.get(name) is not None]
print("HEAVY", heavy, file=sys.stderr)
sys.exit(code)
"""

CORE = (
    *("distill", "doctor", "evaluate", "evidence", "gate", "init", "methods", "plan", "predict"),
    *("report", "run", "status", "teach", "train"),
)


def failing_app(error: BaseException) -> typer.Typer:
    broken = typer.Typer(cls=app_module._Group, pretty_exceptions_enable=False)

    @broken.callback()
    def root() -> None: ...

    @broken.command()
    def fail() -> None:
        raise error

    return broken


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"gatespace \S+\n", result.stdout)


def test_version_is_the_distributions(run, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"gatespace": "9.8.7"}[name])
    assert run("--version").stdout == "gatespace 9.8.7\n"


def test_unknown_command_suggests_the_nearest(run):
    result = run("gat")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: unknown command 'gat'\n  instead: did you mean 'gate'? known: ")
    known = result.stderr.strip().partition("known: ")[2].split(", ")
    assert known == sorted({*CORE, *provided("commands")})


def test_commands_of_other_packages_and_one_that_is_broken(gatespace, tmp_path):
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[gatespace.commands]\nhello = other:hello\nbroken = wrong:go\n")
    (tmp_path / "other.py").write_text("def hello():\n    print('hello from another package')\n")
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    result = gatespace("hello", PYTHONPATH=path)
    assert (result.returncode, result.stdout) == (0, "hello from another package\n")
    assert result.stderr == ""  # the broken one was not asked for
    noted = "note: the command broken of wrong:go cannot be loaded: division by zero\n"
    listed = gatespace("--help", PYTHONPATH=path)
    assert (listed.returncode, listed.stderr) == (0, noted)
    assert " hello " in listed.stdout
    assert gatespace("broken", PYTHONPATH=path).stderr.startswith(noted)


def test_a_command_imports_no_other_and_no_add_on(python):
    script = "import sys; sys.argv = ['gatespace', 'train', '--help']; from gatespace.cli.app import main\n"
    script += "try: main()\nexcept SystemExit: print([m for m in sys.modules if m.startswith('gatespace.')])"
    imported = python("-c", script).stdout.splitlines()[-1]
    assert "gatespace.cli.train" in imported
    assert "gatespace.cli.run'" not in imported
    assert "gatespace.addons" not in imported


def test_unknown_option_exits_2(run):
    result = run("gate", "--jsno")
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("error, code", [(UsageError("bad"), 2), (RunError("broke"), 1)])
def test_exit_code_is_the_errors(error, code):
    result = CliRunner().invoke(failing_app(error), ["fail"])
    assert result.exit_code == code
    assert result.stderr == f"error: {error.what}\n"


def test_error_prints_all_parts_and_takes_text_literally():
    error = UsageError("[red]what[/red]", got="[/] \x1b[2J", why="because", instead="pip install 'x[y]'")
    result = CliRunner().invoke(failing_app(error), ["fail"])
    assert result.stderr.splitlines() == [
        "error: [red]what[/red]",
        "  got: [/] \\x1b[2J",
        "  why: because",
        "  instead: pip install 'x[y]'",
    ]


def test_error_on_a_terminal_is_styled_and_literal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    app_module.print_error(UsageError("[red]what[/red] :smile:", instead="x[y]"))
    text = capsys.readouterr().err
    assert "\x1b[" in text
    assert "[red]what[/red] :smile:" in text
    assert "x[y]" in text


def test_interrupt_is_quiet():
    result = CliRunner().invoke(failing_app(KeyboardInterrupt()), ["fail"])
    assert (result.exit_code, result.output) == (130, "")


def test_sigterm_says_so(python):
    """Whatever a command is at."""
    script = (
        "import gatespace.cli.app as a, os, signal, sys\n"
        "def stop(*_, **__): os.kill(os.getpid(), signal.SIGTERM)\n"
        "a.app.command('stop')(lambda: stop())\n"
        "sys.argv = ['gatespace', 'stop']\n"
        "a.main()"
    )
    result = python("-c", script)
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "stopped by SIGTERM\n")


@pytest.mark.parametrize(("name", "code", "text"), [("SIGTERM", 143, "stopped by SIGTERM\n"), ("SIGINT", 130, "")])
def test_a_signal_in_a_destructor_is_not_lost(python, name, code, text):
    """Python drops what is raised there."""
    script = (
        "import gatespace.cli.app as a, os, signal, sys, time\n"
        f"class Last:\n    def __del__(self): os.kill(os.getpid(), signal.{name}); time.sleep(0)\n"
        "def command():\n    Last()\n    time.sleep(60)\n    print('lost')\n"
        "a.app.command('stop')(command)\n"
        "sys.argv = ['gatespace', 'stop']\n"
        "a.main()"
    )
    result = python("-c", script)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", text)


@pytest.mark.parametrize("given", [{}, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "7"}])
def test_caches_of_products_are_limited_before_torch_reads_the_limit(python, monkeypatch, given):
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:  # this process has imported gatespace
        monkeypatch.delenv(name, raising=False)
    script = f"import os, sys, gatespace; print('torch' in sys.modules, *map(os.environ.get, {names}))"
    limit = given.get(names[0], "64")
    assert python("-c", script, **given).stdout == f"False {limit} {limit}\n"


def test_a_bug_keeps_its_traceback(python):
    script = (
        "import gatespace.cli.gate as g, gatespace.cli.app as a, sys\n"
        "def boom(texts): raise ZeroDivisionError('a bug')\n"
        "g.read_points = boom\n"
        "sys.argv = ['gatespace', 'gate']\n"
        "a.main()\n"
    )
    result = python("-c", script)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError: a bug" in result.stderr


@pytest.mark.parametrize(
    "args", [["--version"], ["--help"], ["train", "--help"], ["gate", "G5", "H2"], ["gate", "--json"], ["gat"]]
)
def test_nothing_heavy_is_imported(python, args):
    result = python("-c", WITHOUT_TORCH.format(args=args))
    assert result.returncode == (2 if args == ["gat"] else 0), result.stderr
    assert result.stderr.endswith("HEAVY []\n")


def test_importing_the_app_loads_neither_rich_nor_torch(python):
    names = ("rich", "torch", "pydantic", "matplotlib")
    script = f"import sys, gatespace.cli.app; print([m for m in {names} if m in sys.modules])"
    result = python("-c", script)
    assert result.stdout.strip() == "[]", result.stderr


def test_module_and_errors_in_a_real_process(gatespace):
    assert gatespace("--version").stdout.startswith("gatespace ")
    result = gatespace("gate", "G55")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown gate 'G55'\n")
    assert "Traceback" not in result.stderr


def test_a_narrow_encoding_costs_characters_not_the_command(gatespace):
    result = gatespace("gate", "G5", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    assert ".731" in result.stdout
    assert json.loads(gatespace("gate", "G5", "--json", PYTHONIOENCODING="ascii").stdout)
