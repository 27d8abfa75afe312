"""The script and the page, as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gatespace.models.tiny import TinyPair

pytest.importorskip("trl", reason="no TRL here; `make test-engines` makes an environment with it")

ROOT = Path(__file__).resolve().parents[3]


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    parts = [sys.executable, *map(str, command)]
    return subprocess.run(parts, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_example_as_it_is(tmp_path: Path) -> None:
    done = run(ROOT / "examples" / "trl_distillation.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout[done.stdout.index("  lam_mean") - 20 :].splitlines()
    names = table[0].split()
    rows = [dict(zip(names, map(float, line.split()), strict=True)) for line in table[1:11]]
    assert [row["step"] for row in rows] == list(range(6, 61, 6))
    assert rows[-1]["loss"] < 0.3 * rows[0]["loss"]
    assert rows[-1]["reverse_kl"] < 0.3 * rows[0]["reverse_kl"]
    (told,) = re.findall(r"E\[λ\] = ([\d.]+) ± ([\d.]+) over (\d+) tokens", done.stdout)
    assert 0.1 < float(told[0]) < 0.9
    assert float(told[1]) > 0.02
    assert not list(tmp_path.iterdir())  # it cleans up


@pytest.mark.slow
def test_example_with_models_and_rows_of_ones_own(tiny: TinyPair, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(8)), encoding="utf-8")
    options = "--max_steps 2 --logging_steps 1 --use_cpu --bf16 false --max_completion_length 4 --report_to none --lora"
    done = run(
        *(ROOT / "examples" / "trl_distillation.py", "--model", tiny.student, "--teacher", tiny.teacher),
        *("--dataset", rows, "--gate=-4,0,0,0", "--output_dir", tmp_path / "out", *options.split()),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "E[λ] = 0." in done.stdout
    assert (tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors").is_file()

    wrong = run(ROOT / "examples" / "trl_distillation.py", "--gate", "G55", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'G5'?" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_page_runs(tiny: TinyPair, tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "docs" / "trl.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    small = "use_cpu=True, bf16=False, max_steps=1, max_completion_length=4, report_to='none', save_strategy='no'"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(8)), encoding="utf-8")
    for old, new in {
        '"Qwen/Qwen3-0.6B"': repr(str(tiny.student)),
        '"Qwen/Qwen3-4B"': repr(str(tiny.teacher)),
        "learning_rate=1e-5": small,
        '"trl-lib/tldr"': f"'json', data_files={str(rows)!r}",
    }.items():
        assert block.count(old) == 1
        block = block.replace(old, new)
    (tmp_path / "page.py").write_text(block, encoding="utf-8")
    done = run("page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'lam_mean': 0." in done.stdout
