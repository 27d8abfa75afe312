from __future__ import annotations

import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from gatespace.cli import environment
from gatespace.cli.doctor import loss_check

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "gatespace": {"version", "installed", "missing"},
    "python": {"version", "implementation", "executable"},
    "platform": {"system", "release", "machine"},
    "cpu": {"cores", "usable", "container_limit"},
    "memory": {"total_bytes", "available_bytes", "container_limit_bytes"},
    "torch": {"usable", "version", "error", "threads", "cpu_capability", "bf16"},
}
ENGINES = ["native", "transformers", "vllm", "accelerate", "ray", "trl", "verl"]
METADATA = """\
Metadata-Version: 2.4
Name: gatespace
Version: 1.2.3
Provides-Extra: fast
Provides-Extra: all
Provides-Extra: elsewhere
Provides-Extra: dev
Requires-Dist: typer>=0.15
Requires-Dist: rich>=999
Requires-Dist: no-such-package-a<3,>=2; extra == 'fast'
Requires-Dist: vllm[audio]>=0.1; (sys_platform != 'nowhere') and extra == "fast"
Requires-Dist: gatespace[fast]; extra == 'all'
Requires-Dist: no-such-package-b; sys_platform == 'nowhere' and extra == 'elsewhere'
Requires-Dist: no-such-package-c ; extra == 'dev'
Requires-Dist: trl ; extra == 'dev'
"""


@pytest.fixture
def fake_distribution(tmp_path, monkeypatch):
    """A gatespace whose metadata is METADATA, before any that is really installed."""
    folder = tmp_path / "gatespace-1.2.3.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_doctor_passes_here_and_its_json_is_stable(gatespace):
    result = gatespace("doctor", "--json")
    data = json.loads(result.stdout)
    assert data["checks"] == [
        {
            "name": "loss self-check",
            "status": "ok",
            "detail": "value and gradient of a gated loss agree with the formula",
        }
    ]
    assert data["usable"] is True
    assert result.returncode == 0, result.stderr
    assert set(data) == {*KEYS, "devices", "engines", "extras", "checks", "usable", "self_check"}
    assert data["self_check"] is None
    for name, keys in KEYS.items():
        assert set(data[name]) == keys
    assert [engine["name"] for engine in data["engines"]] == ENGINES
    assert all(set(engine) == {"name", "installed", "version", "for", "command"} for engine in data["engines"])
    assert data["devices"][0]["kind"] == "cpu"
    assert 1 <= data["cpu"]["usable"] <= data["cpu"]["cores"]
    assert data["python"]["executable"] == sys.executable


def test_without_torch_the_core_is_not_usable(python):
    script = "import sys; sys.modules['torch'] = None; sys.argv = ['gatespace', 'doctor', *sys.argv[1:]]\n"
    script += "from gatespace.cli.app import main; main()"
    result = python("-c", script, "--json")
    assert result.returncode == 1
    data = json.loads(result.stdout)
    assert data["usable"] is False
    assert data["torch"]["usable"] is False
    assert data["torch"]["error"].startswith("ModuleNotFoundError")
    assert data["checks"][0]["status"] == "skipped"
    text = python("-c", script)
    assert text.returncode == 1
    assert "The core is not usable." in text.stdout
    assert "Traceback" not in text.stderr


def test_engines_are_found_without_being_imported(python):
    script = (
        "import sys\n"
        "from gatespace.cli.environment import ENGINES, engine_facts\n"
        "engine_facts({'usable': True, 'version': '2'})\n"
        "print([name for name in ('torch', *ENGINES) if name in sys.modules])\n"
    )
    assert python("-c", script).stdout.strip() == "[]"


def extras():
    return {extra["name"]: extra for extra in environment.extra_facts()}


def test_extras_come_from_the_metadata(fake_distribution):
    found = extras()
    assert list(found) == ["fast", "all", "elsewhere", "dev"]
    assert found["fast"] == {
        "name": "fast",
        "installed": False,
        "missing": ["no-such-package-a<3,>=2", "vllm[audio]>=0.1"],
        "command": "pip install '.[fast]'",
    }
    assert found["all"]["missing"] == found["fast"]["missing"]
    assert found["dev"]["missing"][0] == "no-such-package-c"
    assert found["elsewhere"]["missing"] == []  # its marker says that it is not needed here


def test_a_wrong_version_of_a_core_requirement_is_named(fake_distribution):
    facts = environment.gatespace_facts()
    assert facts["version"] == "1.2.3"
    assert facts["missing"] == [f"rich>=999 (found {metadata.version('rich')})"]


def test_an_engine_is_added_by_an_extra_for_use_else_by_its_name(fake_distribution, monkeypatch):
    monkeypatch.setattr(environment, "_found", lambda module: False)
    commands = {e["name"]: e["command"] for e in environment.engine_facts({"usable": True, "version": "2"})}
    assert commands["vllm"] == "pip install '.[fast]'"
    assert commands["trl"] == "pip install trl"
    assert commands["native"] is None


def test_where_requirements_are_unknown_the_rest_still_works(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "packaging.requirements", None)
        assert "Extras: unknown, because the package packaging is not installed." in run("doctor").stdout

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", absent)
    result = run("doctor")
    assert result.exit_code == 0
    assert "Extras: unknown, because gatespace runs from source and is not installed." in result.stdout


def test_commands_name_the_real_extras():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    try:
        metadata.version("gatespace")
    except metadata.PackageNotFoundError:
        pytest.skip("gatespace is not installed here")
    assert set(extras()) == set(declared)
    assert set(declared) >= {"plot", *environment.FOR_DEVELOPMENT}  # gatespace gate --plot says to install plot


def test_self_check_finds_a_wrong_value_and_a_wrong_gradient(monkeypatch):
    import gatespace

    right = gatespace.gated_kl

    def scaled(*args, **kwargs):
        return SimpleNamespace(loss=right(*args, **kwargs).loss * 1.01)

    def detached(student, teacher, **kwargs):
        return SimpleNamespace(loss=right(student, teacher, **kwargs).loss.detach() + 0 * student.sum())

    monkeypatch.setattr(gatespace, "gated_kl", scaled)
    assert "the formula" in loss_check(True)["detail"]
    monkeypatch.setattr(gatespace, "gated_kl", detached)
    assert "gradient" in loss_check(True)["detail"]
    monkeypatch.setattr(gatespace, "gated_kl", right)
    assert loss_check(True)["status"] == "ok"


def test_probes_of_an_older_torch():
    class OldCpu:
        @staticmethod
        def _is_amx_tile_supported():
            return True

        @staticmethod
        def _is_avx512_bf16_supported():
            raise RuntimeError

    class OldTorch:
        cpu = OldCpu

    assert environment._bf16(OldTorch) == {"amx_tile": True}


# ---------------------------------------------------------------------------------------------------- one device
# tests/device/on_device.py has the whole of it on a simulated device.


@pytest.mark.long
def test_a_device_is_checked_and_the_cpu_says_that_it_met_itself(cli):
    result = cli("doctor", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert [(check["name"], check["status"]) for check in data["checks"][1:]] == [
        ("losses against the CPU", "ok"),
        ("a run against the CPU", "ok"),
        ("two deterministic runs are equal", "ok"),
        ("a killed run resumes to the same bytes", "ok"),
        ("speed", "ok"),
    ]
    assert result.stderr.count("cpu: ") == 5  # progress
    found = data["self_check"]
    assert (found["device"], found["compared_with"]) == ("cpu", "itself")
    for figure in ("memory_bytes", "decoded_tokens_per_second", "update_tokens_per_second", "peak_memory_bytes"):
        assert found[figure] > 0


def test_a_check_that_fails_is_named(cli, monkeypatch):
    from gatespace.cli import self_check

    monkeypatch.setattr(self_check, "_ROUNDING", -1.0)
    result = cli("doctor", "--device", "cpu")
    assert result.exit_code == 1
    assert "failed: losses against the CPU: apart by 0.0e+00" in result.stderr
    assert result.stdout.count("skipped (a check before it failed)") == 4
    assert "it is compared with itself" in result.stdout


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_a_device_that_is_not_there_is_a_wrong_call(cli, device):
    result = cli("doctor", "--device", device)
    assert result.exit_code == 2
    assert "engine.device" in result.stderr
    assert device in result.stderr
