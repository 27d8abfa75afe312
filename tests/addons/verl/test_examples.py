"""The files of examples/verl, each as far as it runs without GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: make test-engines")

from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.dataset.rl_dataset import RLHFDataset

EXAMPLES = Path(__file__).parents[3] / "examples" / "verl"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    done = run(sys.executable, str(EXAMPLES / "prompts.py"), "--task", "synthetic", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def example(name: str) -> Any:
    """A script of the examples as a module of this process, which has verl imported already."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_on_a_cpu_learns(capsys: pytest.CaptureFixture[str]) -> None:
    example("cpu_step").main(["--steps", "8", "--gate", "G5"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line and line[0].isdigit()]
    assert [row[0] for row in rows] == [str(step) for step in range(1, 9)]
    losses = [float(row[1]) for row in rows]
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])
    assert all(0 < float(row[2]) < 1 for row in rows)


def test_a_wrong_gate_is_a_message() -> None:
    with pytest.raises(SystemExit, match="unknown gate 'G9'"):
        example("cpu_step").main(["--gate", "G9"])


def test_verls_dataset_reads_the_prompts(prompts: Path) -> None:
    dataset = RLHFDataset(
        str(prompts / "train.jsonl"),
        tokenizer=None,
        config=OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(prompts)}),
    )
    lines = (prompts / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(dataset) == len(lines) > 100
    row = dataset[0]
    first = json.loads(lines[0])
    assert list(row["raw_prompt"]) == first["prompt"]
    assert row["reward_model"]["ground_truth"] == first["reward_model"]["ground_truth"]


def test_the_reward_is_whether_the_label_is_right(prompts: Path) -> None:
    score = _reward()
    row = json.loads((prompts / "test.jsonl").read_text(encoding="utf-8").splitlines()[0])
    label, labels = row["reward_model"]["ground_truth"], row["extra_info"]["labels"]
    wrong = next(one for one in labels if one != label)

    def judged(text: str) -> Any:
        return score(data_source="x", solution_str=text, ground_truth=label, extra_info=row["extra_info"])

    assert judged(f'{label}"}}') == {"score": 1.0, "parsed": 1.0}
    assert judged(f'{wrong}"}}') == {"score": 0.0, "parsed": 1.0}
    assert judged("!!!") == {"score": 0.0, "parsed": 0.0}


def _reward() -> Any:
    section = {
        "reward": {"custom_reward_function": {"path": str(EXAMPLES / "label_reward.py"), "name": "compute_score"}}
    }
    return get_custom_reward_fn(OmegaConf.create(section))


def test_the_launch_script_makes_a_configuration_that_verl_reads(prompts: Path, tmp_path: Path) -> None:
    """Up to the trainer: Hydra resolves what the script passes on, and prints it instead of running."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python").symlink_to(sys.executable)
    done = run(
        *("bash", str(EXAMPLES / "run_qwen3_32b_to_4b.sh"), "--cfg", "job", "--resolve"),
        PATH=f"{bin_folder}:{os.environ['PATH']}",
        TASK="synthetic",
        GATE="HG4,d+2",
        STEPS="7",
        SEED="3",
        DATA=str(tmp_path / "data"),
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    config = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert config.distillation.distillation_loss.gate == "HG4,d+2"
    assert config.trainer.total_training_steps == 7
    assert config.trainer.experiment_name == "synthetic-HG4_d+2-s3"
    assert config.actor_rollout_ref.rollout.seed == config.data.seed == 3
    assert Path(config.data.train_files).is_file()
    assert Path(config.reward.custom_reward_function.path).is_file()
