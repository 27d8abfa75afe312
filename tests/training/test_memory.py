"""The memory model: weights by hand, activations by what autograd really keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gatespace.config import EngineConfig, TrainConfig, parse_config
from gatespace.models import Model
from gatespace.models.attention import LONG
from gatespace.models.packed import PackedBody
from gatespace.models.sizes import Sizes, sizes_of
from gatespace.training.memory import chunk_mb, micro_tokens, update_memory

# As published: Qwen3-4B has 4.0 billion parameters, 3.6 without its embedding; Qwen3-32B has 32.8 and 31.2.
SHAPES: dict[str, dict[str, Any]] = {
    "4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "32b": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
        "tie_word_embeddings": False,
    },
}
COMMON: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


def outline(config: Any) -> Model:
    with torch.device("meta"):
        return Model(transformers.AutoModelForCausalLM.from_config(config), None, "", "")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair() -> dict[str, Sizes]:
    return {name: sizes_of(outline(transformers.Qwen3Config(**COMMON, **shape))) for name, shape in SHAPES.items()}


def memory(sizes: dict[str, Sizes], /, **settings: Any) -> dict[str, int]:
    """Qwen3-32B → Qwen3-4B, 72 responses of at most 256 tokens; `more` are arguments of `update_memory`."""
    more = {"prefix": 130, "longest": 292, "tokens": 72 * 282, "response_tokens": 72 * 256, **settings.pop("more", {})}
    config = parse_config(TrainConfig, {"pair": {"teacher": "t"}, "batch_size": 72, **settings})
    return update_memory(config, sizes["4b"], [sizes["32b"]], itemsize=2, device="cuda", vocab_size=151936, **more)


def test_what_lasts_is_18_bytes_of_a_weight(pair: dict[str, Sizes]) -> None:
    def lasting(found: dict[str, int]) -> int:
        return found["weights"] + found["gradients"] + found["optimizer"]

    weights, usual = pair["4b"].all, memory(pair)
    assert lasting(usual) == weights * (2 + 4 + 4 + 8)  # 72.4 GB
    assert usual["teacher_weights"] == 2 * pair["32b"].all
    assert usual["all"] == sum(size for purpose, size in usual.items() if purpose != "all")
    assert lasting(memory(pair, more={"shards": 8})) == weights * (4 + 4 + 8) // 8
    assert memory(pair, optimizer={"states": "8bit"})["optimizer"] == pytest.approx(2 * weights, rel=0.02)
    adapters = memory({**pair, "4b": replace(pair["4b"], trained=10**7)})
    assert lasting(adapters) == 2 * weights + (4 + 4 + 8) * 10**7
    small = memory(pair, pair={"teacher": "t", "teacher_quantization": "nf4"})
    assert 18e9 < small["teacher_weights"] < 21e9


def test_what_a_micro_batch_needs(pair: dict[str, Sizes]) -> None:
    usual = memory(pair, engine={"micro_tokens": 615})
    again = memory(pair, engine={"activation_checkpointing": True, "micro_tokens": 615})
    assert again["activations"] < usual["activations"] / 10
    # One row of 4096 tokens: half of its layers are recomputed, unless that is not wanted.
    row = {"longest": 4096, "tokens": 4096, "response_tokens": 256}
    half, none = (memory(pair, engine={"activation_checkpointing": how}, more=row) for how in (None, False))
    assert half["activations"] < 0.7 * none["activations"]


def test_the_table_of_the_docs(pair: dict[str, Sizes]) -> None:
    text = (Path(__file__).parents[2] / "docs/devices.md").read_text()
    for purpose, size in memory(pair).items():
        assert f"| {purpose.replace('_', ' ')} | " in text
        assert f" | {size / 1e9:.2f} |" in text, purpose


def test_weights_are_those_of_a_count_by_hand(pair: dict[str, Sizes]) -> None:
    def by_hand(hidden: int, layers: int, heads: int, inner: int) -> int:
        projections = hidden * 128 * (heads + 8 + 8) + 128 * heads * hidden
        return layers * (projections + 3 * hidden * inner + 2 * hidden + 2 * 128) + hidden

    assert pair["4b"].body == by_hand(2560, 36, 32, 9728)
    assert pair["4b"].all == by_hand(2560, 36, 32, 9728) + 151936 * 2560 == 4_022_468_096
    assert pair["32b"].body == by_hand(5120, 64, 64, 25600)
    assert pair["32b"].all == by_hand(5120, 64, 64, 25600) + 2 * 151936 * 5120 == 32_762_123_264


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2"])
def test_activations_are_what_autograd_keeps(kind: str, dtype: torch.dtype, checkpointing: bool) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
    }
    config = getattr(transformers, f"{kind}Config")(**shape)
    network = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model = Model(network, None, "", "")  # type: ignore[arg-type]
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, Any] = {}  # the storages themselves, so that none is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    rows = [[(7 * i + row) % 290 for i in range(40)] for row in range(4)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward = PackedBody(model, checkpointing=checkpointing).forward(rows)
    for side in (side for layer in forward.cache.layers for side in layer):
        keep(side)
    sizes = sizes_of(model)
    counted = sizes.kept(checkpointing=checkpointing) + sizes.attention(40, checkpointing=checkpointing)
    if checkpointing:  # the layer that is recomputed comes later
        counted -= sizes.kept() // sizes.layers + sizes.attention(40, checkpointing=True)
    real = sum(storage.nbytes() for storage in kept.values()) / (160 * dtype.itemsize)
    assert 0.85 < counted / real < 1.2


def test_micro_tokens_depend_on_model_settings_and_prefix_alone(pair: dict[str, Sizes], student: Model) -> None:
    engine, sizes = EngineConfig(), sizes_of(student)
    assert micro_tokens(sizes, EngineConfig(micro_tokens=7)) == 7
    layers, hidden, inner = (
        getattr(student.network.config, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    small, large = micro_tokens(sizes, engine), micro_tokens(pair["4b"], engine)
    assert small == (6 << 30) // (2 * layers * (34 * hidden + 6 * inner))
    assert large == 615
    assert micro_tokens(pair["4b"], EngineConfig(activation_checkpointing=True)) > large
    # Attention weights of short rows after a long prefix count; a prefix of some hundred tokens has room.
    assert micro_tokens(pair["4b"], engine, 1500) == large > micro_tokens(pair["4b"], engine, 4000)
    keys = pair["4b"].most_keys(4000)
    assert (keys - 4000) * keys <= LONG < (keys - 4000 + 1) * (keys + 1)
    bytes_per_token = 2 * (pair["4b"].kept() + pair["4b"].attention(keys))
    assert micro_tokens(pair["4b"], engine, 4000) * bytes_per_token < 1.1 * (6 << 30)


def test_chunks_are_larger_where_small_products_waste_the_device() -> None:
    assert (chunk_mb("cpu"), chunk_mb("cuda")) == (60, 512)
