"""One of several processes that train together: `python process_worker.py JOB STUDENT TEACHER OUT SETTINGS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEXTS = [
    "rain again",
    "a very good day",
    "why not",
    "so tired of this",
    "thanks a lot",
    "see you",
    "no",
    "well then ok",
]


def make(network: Any, tokenizer: str, teacher: str, out: str, settings: dict[str, Any]) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer

    from gatespace.addons.trl import GatedDistillationConfig, GatedDistillationTrainer

    # Greedy, so that the responses do not depend on which process writes them, and of different lengths.
    network.generation_config.eos_token_id = list(range(0, network.config.vocab_size, 5))
    config = GatedDistillationConfig(
        out,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        generation_kwargs={"do_sample": False},
        max_completion_length=8,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.5,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    return GatedDistillationTrainer(
        network,
        teacher,
        config,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in TEXTS]}),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
    )


def train(student: str, teacher: str, out: str, settings: dict[str, Any]) -> None:
    """A whole run, as TRL and accelerate distribute it."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    trainer = make(AutoModelForCausalLM.from_pretrained(student), student, teacher, out, settings)
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.accelerator.is_main_process:
        weights = {
            name: value.detach().clone().contiguous() for name, value in state.items() if name != "lm_head.weight"
        }
        save_file(weights, Path(out, "weights.safetensors"))
        logs = [log for log in trainer.state.log_history if "loss" in log]
        told = {
            "processes": trainer.accelerator.num_processes,
            "kind": str(trainer.accelerator.distributed_type),
            "logs": logs,
            "run": trainer.gate_summary(),
        }
        Path(out, "told.json").write_text(json.dumps(told), encoding="utf-8")


def shard(student: str, teacher: str, out: str, settings: dict[str, Any]) -> None:
    """The gradient of one loss with both networks sharded by FSDP2, beside that of whole ones.

    Accelerate has no FSDP on CPUs, so the networks are sharded here, as it would do it: every layer, then the rest.
    """
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(teacher))  # a head of its own, not tied
    own = settings.pop("head_of_its_own")
    trainer = make(network, student, teacher, out, settings)
    rank = trainer.accelerator.process_index
    trainer.model.eval()
    batches = []
    for seed, last in ((1, 6), (2, 3)):
        draw = torch.Generator().manual_seed(seed)
        mask = torch.ones(2, 6, dtype=torch.long)
        batches.append(
            {f"{part}_ids": torch.randint(10, 400, (2, 6), generator=draw) for part in ("prompt", "completion")}
        )
        batches[-1] |= {"prompt_mask": mask, "completion_mask": mask * (torch.arange(6) < last)}
    for batch in batches:
        (trainer.compute_loss(trainer.model, batch) / len(batches)).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}

    trainer.model.zero_grad()
    for whole in (trainer.model, trainer.teacher_model):
        for part in (*([whole.lm_head] if own else []), *whole.model.layers, whole):
            fully_shard(part)
    sharded = isinstance(trainer.model.lm_head.weight, DTensor)
    trainer.compute_loss(trainer.model, batches[rank]).backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in trainer.model.named_parameters()}
    far = {name: float((found[name] - value).norm() / value.norm()) for name, value in wanted.items()}
    if trainer.accelerator.is_main_process:
        told = {"sharded": sharded, "far": far}
        Path(out, "told.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    job, *places, text = sys.argv[1:]
    {"train": train, "shard": shard}[job](*places, json.loads(text))
