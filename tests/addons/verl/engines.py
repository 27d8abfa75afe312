"""verl's FSDP engine around a small student, on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.addons.verl.batches import V

FACTS: dict[str, Any] = {
    "use_remove_padding": True,
    "use_dynamic_bsz": False,
    "micro_batch_size_per_gpu": 4,
    "use_fused_kernels": False,
    "distillation_use_topk": True,
    "distillation_only": True,
    "pad_token_id": 0,
}
"""What verl's worker tells its engine about a batch."""


def on_cpu() -> None:
    """Give verl a CPU as its device, by the example's platform."""
    path = Path(__file__).parents[3] / "examples" / "verl" / "cpu_platform.py"
    spec = importlib.util.spec_from_file_location("cpu_platform", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


on_cpu()  # before verl's engine is imported, which asks for its device

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402


def save_student(folder: Path) -> Path:
    """A Qwen3 of two layers, with weights large enough to have opinions, and a tokenizer of its size."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(V)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
    tokenizer.save_pretrained(folder)
    return folder


def engine(folder: Path, *, lr: float = 1e-3, fused: bool = False, lora: int = 0, compute: str = "fp32") -> Any:
    """The engine that verl's FSDP2 workers use, with weights in float32."""
    model = HFModelConfig(
        path=str(folder),
        use_remove_padding=True,
        enable_gradient_checkpointing=False,
        use_fused_kernels=fused,
        lora_rank=lora,
        override_config={"attn_implementation": "eager"},
    )
    made = FSDPEngineWithLMHead(
        model,
        FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            use_torch_compile=False,
            mixed_precision={"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        FSDPOptimizerConfig(lr=lr, lr_warmup_steps=0, total_training_steps=10),
        CheckpointConfig(),
    )
    made.initialize()
    return made


def gradients(made: Any) -> dict[str, torch.Tensor]:
    """The whole gradient of every parameter, as it would be stepped with."""
    found = {name: part.grad for name, part in made.module.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in found.items() if gradient is not None}
