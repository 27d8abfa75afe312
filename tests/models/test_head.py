"""The head of architectures that do something to their logits, against the network's own logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gatespace.errors import UsageError
from gatespace.models import load_model
from gatespace.models.load import Model, check_network

SMALL: dict[str, Any] = {
    "vocab_size": 700,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
KINDS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "Llama": ({}, 1.0, None),
    "Cohere": ({"logit_scale": 0.25}, 0.25, None),
    "Cohere2": ({"logit_scale": 3.0}, 3.0, None),
    "Granite": ({"logits_scaling": 8.0}, 0.125, None),
    "HyperCLOVAX": ({"logits_scaling": 0.5}, 0.5, None),
    "Gemma2": ({"final_logit_softcapping": 5.0, "head_dim": 8}, 1.0, 5.0),
    "Gemma3Text": ({"final_logit_softcapping": None, "head_dim": 8}, 1.0, None),
    "Phi": ({}, 1.0, None),
}


def network_of(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SMALL | KINDS[kind][0])
    network = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    bias = getattr(network.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return network


@pytest.mark.parametrize("kind", KINDS)
def test_head_gives_the_networks_own_logits(kind: str, saved: Callable[..., Path]) -> None:
    network = network_of(kind)
    ids = torch.tensor([[3, 90, 411, 5, 620, 7]])
    with torch.no_grad():
        expected = network(ids).logits
    model = load_model(str(saved(network)))
    head = model.head
    assert (head.scale, head.softcap) == KINDS[kind][1:]
    assert (head.bias is not None) == (kind == "Phi")
    with torch.no_grad():
        out = model.body(input_ids=ids).last_hidden_state.double() @ head.weight.double().T
        out = (out + (0 if head.bias is None else head.bias)) * head.scale
        if head.softcap is not None:
            assert out.abs().max() > 2 * head.softcap  # so that the cap is felt
            out = head.softcap * torch.tanh(out / head.softcap)
    torch.testing.assert_close(out.float(), expected, rtol=1e-4, atol=1e-4)


def test_logits_made_in_an_unknown_way_are_refused(saved: Callable[..., Path]) -> None:
    model = load_model(str(saved(network_of("Cohere"))))
    model.network.logit_scale = 0.3  # the configuration still says 0.25
    with pytest.raises(UsageError, match="not those of its head"):
        check_network(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Cohere", "Gemma2", "Llama"])
def test_half_precision_is_not_taken_for_another_head(
    kind: str, dtype: torch.dtype, saved: Callable[..., Path]
) -> None:
    assert load_model(str(saved(network_of(kind))), dtype=dtype).head.weight.dtype == dtype


def test_a_network_without_a_head(student: Model) -> None:
    bare = Model(student.network.model, student.tokenizer, "bare", "")
    with pytest.raises(UsageError, match="one linear layer"):
        _ = bare.head
