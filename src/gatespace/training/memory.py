"""Memory of a run by purpose, from shapes and settings alone, and the sizes that divide a step into parts.

`--dry-run` prints it. It is a lower bound, compared with real runs on a CPU (`benchmarks/memory.py`) and
never with a GPU, so that no run is refused because of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gatespace.config import EngineConfig, TeachConfig, TrainConfig
from gatespace.config.checking import checking
from gatespace.models.sizes import Sizes

TELEMETRY = 64 << 20
"""Bytes of one model's logits that token records process at a time."""
_CHUNK_MB = {"cpu": 60, "other": 512}
"""Logit buffers of the fused loss. On a CPU they fit into the cache. A GPU does 150 to 300 multiplications in the time
to read two bytes of weights; at a vocabulary of 152k, 60 MB are 48 tokens per weight, and 512 MB are 416."""
_QUANTISED = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
"""Bytes per quantised weight, with its scales."""
_STATES = {"fp32": 8.0, "8bit": 2 + 8 / 256}
"""Bytes of AdamW's two states per trained weight."""
_LOGIT_COPIES = {"distill": 6, "teach": 3}
"""Float32 tensors of (response tokens, vocabulary) alive at once in a loss that is not fused."""


def chunk_mb(device: str) -> float:
    """Megabytes of the logit buffers of the fused loss."""
    return _CHUNK_MB["cpu" if device == "cpu" else "other"]


def micro_tokens(sizes: Sizes, engine: EngineConfig, prefix: int = 0) -> int:
    """Token limit of a micro-batch.

    Depends on model, settings and shared prefix alone, not on free memory: how a batch is divided changes the last
    bits of a run.
    """
    if engine.micro_tokens is not None:
        return engine.micro_tokens
    return sizes.micro_tokens(checkpointing=bool(engine.activation_checkpointing), prefix=prefix)


def update_memory(
    config: TrainConfig | TeachConfig,
    student: Sizes,
    teachers: Sequence[Sizes] = (),
    *,
    itemsize: int,
    device: str,
    vocab_size: int,
    prefix: int,
    longest: int,
    tokens: float,
    response_tokens: float,
    shards: int = 1,
) -> dict[str, int]:
    """Bytes of one process during the update, by purpose; `all` is their sum.

    Args:
        config: The run.
        student: The trained model.
        teachers: Models in this process that score.
        itemsize: Bytes per element of the compute precision.
        device: Device type.
        vocab_size: Size of the vocabulary.
        prefix: Tokens that all prompts share.
        longest: Tokens of the longest row, prompt and response, without the prefix.
        tokens: Tokens of all rows of a step, without the prefix.
        response_tokens: Of these, response tokens.
        shards: Processes that share the weights (FSDP).
    """
    distills = isinstance(config, TrainConfig)
    pair = config.pair if isinstance(config, TrainConfig) else None

    def weights(sizes: Sizes, role: str) -> int:
        each = _QUANTISED.get((pair and pair.quantization(role)) or "", itemsize)
        return int(sizes.body * each) + (sizes.all - sizes.body) * itemsize

    masters = student.trained * 4 if itemsize < 4 else 0
    own = student.all * 4 if shards > 1 else weights(student, "student") + masters  # FSDP's shards are the masters
    limit = micro_tokens(student, config.engine, prefix)
    part = min(max(limit, longest), tokens)  # of a micro-batch
    keys = min(prefix + longest, student.most_keys(prefix))
    again = config.engine.activation_checkpointing
    per_token = student.kept(checkpointing=bool(again))
    if again is None and shards == 1 and prefix + longest > keys:  # every second layer of long rows is recomputed
        per_token = (student.kept() + student.kept(checkpointing=True)) // 2
    attention = student.attention(keys, checkpointing=bool(again))
    if distills and checking().fused:
        logits = int(chunk_mb(device) * 1e6)
    else:
        logits = (
            int(part * response_tokens / tokens) * vocab_size * 4 * _LOGIT_COPIES["distill" if distills else "teach"]
        )
    purposes = {
        "weights": own // shards,
        "gradients": student.trained * 4 // shards,
        "optimizer": int(student.trained * _STATES[config.optimizer.states]) // shards,
        "teacher_weights": sum(weights(teacher, "teacher") for teacher in teachers),
        "activations": int(((part + prefix) * per_token + part * attention) * itemsize),
        "logits": logits,
    }
    purposes = {purpose: size for purpose, size in purposes.items() if size}
    return {**purposes, "all": sum(purposes.values())}
