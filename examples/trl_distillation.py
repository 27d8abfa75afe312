"""On-policy distillation with a gate, in TRL's own trainer.

    python examples/trl_distillation.py
    python examples/trl_distillation.py --gate H2 --max_steps 60
    accelerate launch examples/trl_distillation.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B \
        --dataset trl-lib/tldr --gate G5 --learning_rate 1e-5 --output_dir runs/tldr

The first needs no download: it builds a tiny pair, trains the teacher with TRL's SFTTrainer, and distils, in about a
minute on a CPU. With --model all defaults are TRL's. Every setting of trl.DistillationConfig is an option.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from gatespace.errors import GatespaceError, UsageError
from gatespace.integrations.trl import GatedDistillationConfig, GatedDistillationTrainer
from gatespace.models.tiny import STUDENT, build_tiny
from gatespace.tasks import synthetic_task

ON_A_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True}
DEMO = ON_A_CPU | {
    "max_steps": 60,
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-3,
    "max_completion_length": 4,
    "save_strategy": "no",
    "logging_steps": 6,
}
COLUMNS = ("step", "loss", "gate/lam_mean", "gate/lam_sd", "gate/h", "gate/gap", "gate/forward_kl", "gate/reverse_kl")


@dataclass
class Script:
    """Student, teacher and prompts."""

    model: str | None = field(default=None, metadata={"help": "The student: a name on the Hub, or a folder."})
    teacher: str | None = field(default=None, metadata={"help": "The teacher, with the student's vocabulary."})
    dataset: str | None = field(default=None, metadata={"help": "Rows with a `prompt`: a JSONL file, or on the Hub."})
    lora: bool = field(default=False, metadata={"help": "Learn in adapters (LoRA, needs peft)."})


def tiny_pair(folder: Path) -> tuple[str, str, Dataset]:
    """Return an untrained student, a briefly trained teacher, and prompts the teacher has not seen."""
    task = synthetic_task(size=1200)
    # TRL requires student and teacher embeddings with the same number of rows.
    student, teacher = build_tiny(task, folder, student=replace(STUDENT, pad_to=64, spare=1))
    prompts = [[{"role": "user", "content": one.text}] for one in task.train]
    answers = [[{"role": "assistant", "content": one.label}] for one in task.train]
    half = len(prompts) // 2
    lesson = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(teacher),
        SFTConfig(str(folder / "taught"), max_steps=80, per_device_train_batch_size=16, learning_rate=3e-3, **ON_A_CPU),
        train_dataset=Dataset.from_dict({"prompt": prompts[:half], "completion": answers[:half]}),
        processing_class=AutoTokenizer.from_pretrained(teacher),
    )
    lesson.train()
    lesson.save_model()
    return str(student), str(folder / "taught"), Dataset.from_dict({"prompt": prompts[half:]})


def prompts_of(name: str) -> Dataset:
    if Path(name).is_file():
        return load_dataset("json", data_files=name, split="train")
    return load_dataset(name, split="train")


def main(arguments: list[str], scratch: Path) -> None:
    parser = HfArgumentParser((Script, GatedDistillationConfig))
    if not any(one.split("=")[0] == "--model" for one in arguments):
        parser.set_defaults(output_dir=str(scratch / "out"), **DEMO)
    script, config = parser.parse_args_into_dataclasses(arguments)
    if script.model is None:
        model, teacher, dataset = tiny_pair(scratch)
        dataset = prompts_of(script.dataset) if script.dataset else dataset
    elif script.teacher and script.dataset:
        model, teacher, dataset = script.model, script.teacher, prompts_of(script.dataset)
    else:
        raise UsageError("--model needs a --teacher and a --dataset")

    options = {}
    if script.lora:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GatedDistillationTrainer(model, teacher, config, train_dataset=dataset, **options)
    trainer.train()

    if not trainer.accelerator.is_main_process:
        return
    logs = [log for log in trainer.state.log_history if "loss" in log]
    names = [name for name in COLUMNS if logs and name in logs[0]]
    print("  ".join(f"{name.removeprefix('gate/'):>10}" for name in names))
    for log in logs:
        print("  ".join(f"{log[name]:10.4g}" for name in names))
    run = trainer.gate_summary()
    if run.get("lam_mean") is not None:
        print(f"E[λ] = {run['lam_mean']:.3f} ± {run['lam_sd']:.3f} over {run['tokens']:.0f} tokens.")
        print(f"To see what its variation is worth, compare with the constant: --gate static:{run['lam_mean']:.3f}")


if __name__ == "__main__":
    try:
        with tempfile.TemporaryDirectory(prefix="gatespace-trl-") as folder:
            main(sys.argv[1:], Path(folder))
    except GatespaceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
