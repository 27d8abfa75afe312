"""Without TRL, or with one that is too old, the import says what to install. These run in any environment."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def imported(preparation: str) -> str:
    code = f"""
        import sys, types
        {preparation}
        try:
            import gatespace.addons.trl
        except ImportError as error:
            print("ImportError", error)
        except ValueError as error:
            print("ValueError", error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "preparation, told",
    [
        ("sys.modules['trl'] = None", ["ImportError", "needs the package 'trl'", "pip install '.[trl]'"]),
        (
            "sys.modules['trl'] = old = types.ModuleType('trl'); old.__version__ = '0.9.6'",
            ["TRL 0.9.6", "it has no DistillationTrainer", "pip install 'trl==1.16.*'"],
        ),
    ],
    ids=["none", "old"],
)
def test_what_is_missing_is_named(preparation: str, told: list[str]) -> None:
    found = imported(preparation)
    for part in told:
        assert part in found
