"""`gatespace doctor`: the machine, what is missing, and whether a tiny run trains here."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from gatespace.cli import doctor

METADATA = """\
Metadata-Version: 2.4
Name: gatespace
Version: 1.2.3
Provides-Extra: fast
Provides-Extra: all
Provides-Extra: elsewhere
Requires-Dist: typer>=0.15
Requires-Dist: rich>=999
Requires-Dist: no-such-package-a<3,>=2; extra == 'fast'
Requires-Dist: gatespace[fast]; extra == 'all'
Requires-Dist: no-such-package-b; sys_platform == 'nowhere' and extra == 'elsewhere'
"""


@pytest.mark.slow
def test_a_tiny_run_trains_here(cli):
    result = cli("doctor", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["usable"]
    assert [(check["name"], check["status"]) for check in report["checks"]] == [("a tiny run trains", "ok")]
    assert report["packages"]["torch"] == metadata.version("torch")
    assert report["devices"][0] == "cpu"


@pytest.mark.slow
def test_a_device_is_compared_with_the_cpu_and_resumes(cli):
    result = cli("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("cpu: ") == 3  # progress
    for words in ("apart by 0.0e+00", "records and weights, to the byte", "Usable."):
        assert words in result.stdout


def test_a_check_that_fails_is_named(cli, monkeypatch):
    monkeypatch.setattr(doctor, "_ROUNDING", -1.0)
    result = cli("doctor", "--device", "cpu")
    assert result.exit_code == 1
    assert "failed: its losses are the CPU's: the first loss is apart by 0.0e+00" in result.stderr
    assert result.stdout.count("skipped (a check before it failed)") == 1
    assert "Not usable." in result.stdout


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_a_device_that_is_not_there_is_a_wrong_call(cli, device):
    result = cli("doctor", "--device", device)
    assert result.exit_code == 2
    assert "device" in result.stderr
    assert device in result.stderr


def test_without_torch_it_is_not_usable(python):
    script = "import sys; sys.modules['torch'] = None; sys.argv = ['gatespace', 'doctor']\n"
    result = python("-c", script + "from gatespace.cli.app import main; main()")
    assert result.returncode == 1
    assert "missing: torch" in result.stdout
    assert "Traceback" not in result.stderr


def test_missing_requirements_come_from_the_metadata(tmp_path, monkeypatch):
    folder = tmp_path / "gatespace-1.2.3.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    core, extras = doctor._missing()
    assert core == [f"rich>=999 (found {metadata.version('rich')})"]
    assert extras == {"fast": ["no-such-package-a<3,>=2"]}  # the other extra is not needed here
