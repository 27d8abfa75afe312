"""The gated loss in verl's own FSDP2 engine on a CPU: what verl's worker does with a batch, without GPUs, Ray, vLLM.

A small student of Qwen3's architecture learns from a larger one with random weights. Rollout and teacher, which verl
leaves to vLLM, are a few lines here; losses, gradients, metrics and the optimizer are verl's.

Run it with `python examples/verl/cpu_step.py --gate G5` in an environment with verl 0.9.1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
warnings.filterwarnings("ignore", message=".*engine is not available.*")
sys.path.insert(0, str(Path(__file__).parent))

import cpu_platform  # noqa: E402, F401  # before verl asks for a device
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hydra.errors import InstantiationException  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.trainer.distillation import distillation_ppo_loss  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.config import (  # noqa: E402
    DistillationConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

V, TOP_K, PROMPT, SAMPLES, MICRO = 128, 32, 4, 16, 4
FACTS = {
    "temperature": 1.0,
    "global_batch_size": SAMPLES,
    "micro_batch_size_per_gpu": MICRO,
    "use_dynamic_bsz": False,
    "use_remove_padding": True,
    "use_fused_kernels": False,
    "distillation_use_topk": True,
    "distillation_only": True,
}
"""What verl's trainer tells its engine about a batch."""


def network(hidden: int, spread: float, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        initializer_range=spread,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config).eval()


def engine(folder: Path, steps: int) -> Any:
    """The engine of verl's FSDP2 workers, around the student in `folder`."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(V)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    attention = {"attn_implementation": "eager"}
    model = HFModelConfig(path=str(folder), enable_gradient_checkpointing=False, override_config=attention)
    plain = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    made = FSDPEngineWithLMHead(
        model,
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", use_torch_compile=False, mixed_precision=plain),
        FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=0, total_training_steps=steps, weight_decay=0.0),
        CheckpointConfig(),
    )
    made.initialize()
    return made


@torch.no_grad()
def batch(student: Any, teacher: Qwen3ForCausalLM, generator: torch.Generator) -> TensorDict:
    """Responses that the student sampled, and the teacher's top-k, in verl's packed form."""
    prompts = torch.randint(2, 6, (SAMPLES, 1), generator=generator).expand(-1, PROMPT)  # four prompts in all
    lengths = torch.randint(1, 6, (SAMPLES,), generator=generator).tolist()
    sequences = prompts
    for _ in range(max(lengths)):
        weights = student(sequences).logits[:, -1].softmax(-1)
        sequences = torch.cat([sequences, torch.multinomial(weights, 1, generator=generator)], 1)
    top = teacher(sequences).logits.log_softmax(-1).topk(TOP_K)
    whole = [PROMPT + length for length in lengths]

    def packed(values: torch.Tensor, ends: list[int], start: int = 0) -> torch.Tensor:
        rows = zip(values, ends, strict=True)
        return torch.nested.as_nested_tensor([row[start:end].clone() for row, end in rows], layout=torch.jagged)

    response = torch.ones_like(sequences)
    return tu.get_tensordict(
        {
            "prompts": packed(sequences, [PROMPT] * SAMPLES),
            "responses": packed(sequences, whole, PROMPT),
            "response_mask": packed(response, whole, PROMPT),
            "loss_mask": packed(response, whole, PROMPT),
            "input_ids": packed(sequences, whole),
            "position_ids": packed(torch.arange(sequences.shape[1]).expand_as(sequences), whole),
            "teacher_ids": packed(top.indices.int(), whole),
            "teacher_logprobs": packed(top.values, whole),
        },
        dict(FACTS),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", default="G5", help="a name, or a,b,c,d")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    # As verl makes it from a configuration file: the target is all that brings the plug-in in.
    section = {
        "_target_": "gatespace.integrations.verl.GatedLossConfig",
        "gate": options.gate,
        "topk": TOP_K,
    }
    try:
        settings = DistillationConfig(distillation_loss=omega_conf_to_dataclass(section))
    except InstantiationException as error:
        sys.exit(f"error: {error.__cause__ or error}")
    actor = FSDPActorConfig(rollout_n=1, strategy="fsdp2", ppo_micro_batch_size_per_gpu=MICRO, use_dynamic_bsz=False)
    loss = partial(distillation_ppo_loss, config=actor, distillation_config=settings)

    table = Table("step", "loss", "E[λ]", "SD[λ]", "h", "u", "gap", "FKL", "RKL", "tail", box=box.SIMPLE)
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        network(64, 0.1, seed=0).save_pretrained(f"{place}/student")
        student, teacher = engine(Path(place) / "student", options.steps), network(128, 0.25, seed=1)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, options.steps + 1):
            with student.eval_mode():
                data = batch(student.module, teacher, generator)
            with student.train_mode():
                output = student.train_batch(data, loss_function=loss)
                student.lr_scheduler_step()
            names = ("lam_mean", "lam_square", "h", "u", "gap", "forward_kl", "reverse_kl", "tail_mass")
            found = [float(output["metrics"][f"distillation/gate/{name}"].aggregate()) for name in names]
            mean, square, *rest = found
            spread = max(square - mean**2, 0.0) ** 0.5
            table.add_row(str(step), *(f"{number:.3f}" for number in (sum(output["loss"]), mean, spread, *rest)))
        dist.destroy_process_group()
    Console().print(table)
    print(f"gate {options.gate}: verl's FSDP2 engine, {SAMPLES} responses a step in micro-batches of {MICRO}.")


if __name__ == "__main__":
    main()
