"""A real vLLM loads an export by the code in its card, and responds as the run did.

It needs an environment with vLLM (`make test-vllm`) and is skipped where there is none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from gatespace.addons.publish.export import export_model
from gatespace.config import TeachConfig, parse_config
from gatespace.runs import RunFolder
from gatespace.training.train import teach

pytestmark = pytest.mark.slow
_CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ROWS = 12


def test_the_code_in_the_card_gives_the_run_s_responses(vllm_python: str, tmp_path: Path) -> None:
    run, out = RunFolder(tmp_path / "run"), tmp_path / "out"
    settings = {
        "task": {"name": "synthetic", "brief": True},
        "model": "tiny",
        "steps": 60,
        "optimizer": {"lr": 3e-3},
        "engine": {"precision": "fp32"},
        "evaluation": {"every": 0, "final": ["val"], "limit": ROWS, "max_new_tokens": 12},
        "output": str(run),
    }
    teach(parse_config(TeachConfig, settings))
    export_model(run, out)
    first, second = _CODE.findall((out / "README.md").read_text(encoding="utf-8"))
    asking = [line for line in first[: first.index("def answer")].splitlines() if not line.startswith("model = ")]
    expected = run.predictions("val")
    texts = json.dumps([row["text"] for row in expected])
    more = f"""
    prompts = [{{"prompt_token_ids": encode(text)}} for text in {texts}]
    responses = [found.outputs[0].text for found in llm.generate(prompts, greedy)]
    open("responses.json", "w").write(__import__("json").dumps(responses))
"""
    (tmp_path / "script.py").write_text("\n".join(asking) + "\n" + second + more)
    # PYTHONPATH is left behind: what is ours has no part in this.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [vllm_python, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    responses = json.loads((tmp_path / "responses.json").read_text())
    raw = [row["raw"] for row in expected]
    assert [response[: len(text)] for response, text in zip(responses, raw, strict=True)] == raw
    assert len(set(raw)) > 2
