"""Packed passes where they compute what the network computes, plain ones elsewhere, and never something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gatespace.errors import UsageError
from gatespace.models import Model
from gatespace.models.body import body_of
from gatespace.models.packed import PackedBody
from gatespace.models.plain import PlainBody
from tests.models.architectures import WINDOWS, alone, distance, made, some_ids, some_rows

UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "sinks": ("GptOss", {"head_dim": 8, "num_local_experts": 4}, "s_aux"),
    "its own mask": ("Doge", {}, "mask of its own"),
    "a window that its code does not know": ("Llama", {"sliding_window": 20}, "the window of this network"),
    "convolution first": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "one after another"),
    "convolution last": ("Lfm2", {"layer_types": ["full_attention", "conv"]}, "without attention"),
    "linear biases": ("Bloom", {"num_key_value_heads": None, "intermediate_size": None}, "does not let"),
    "two attentions a layer": ("DiffLlama", {}, "one after another"),
    "recurrence": ("RecurrentGemma", {"lru_width": 32, "block_types": ["recurrent", "attention"]}, ""),
}
LIMITED: dict[str, tuple[str, dict[str, Any], int]] = {
    "a window that its code does not know": ("Llama", {"sliding_window": 64}, 64),
    "dynamic positions": (
        "Llama",
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        64,
    ),
    "two sets of positions": (
        "Phi3",
        {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        },
        64,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Small weights hide a difference from a probe.
@pytest.mark.parametrize("std", [0.02, 0.3])
@pytest.mark.parametrize("name", UNFIT)
def test_networks_that_packed_passes_do_not_fit(name: str, std: float, dtype: torch.dtype, student: Model) -> None:
    kind, settings, why = UNFIT[name]
    model = made(student.tokenizer, kind, std=std, dtype=dtype, **settings)
    body = body_of(model)
    assert isinstance(body, PlainBody)
    with pytest.raises(UsageError, match="cannot run over packed tokens") as error:
        body_of(model, packed=True)
    assert why in str(error.value)
    with torch.no_grad():
        rows = some_rows((30, 3), seed=1)
        right = torch.cat([alone(model, [7, 8, 9, *row])[3:] for row in rows])
        assert distance(body.forward(rows, prefix=[7, 8, 9]).hidden, right) < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("name", LIMITED)
def test_texts_beyond_the_reach_of_packed_passes(name: str, student: Model) -> None:
    kind, settings, reach = LIMITED[name]
    model = made(student.tokenizer, kind, **settings)
    body = body_of(model)
    assert isinstance(body, PackedBody)
    row = some_ids(reach + 1, seed=2)
    with torch.no_grad():
        fits = body.forward([row[1:-11], [5]], prefix=[3])
        assert distance(fits.hidden[:-1], alone(model, [3, *row[1:-11]])[1:]) < 1e-5
        decoding = body.decoding(fits, 20)
        for _ in range(10):  # up to the last token that fits
            decoding.step(torch.tensor([4, 4]))
        for beyond in (
            lambda: decoding.step(torch.tensor([4, 4])),
            lambda: body.forward([row]),
            lambda: body.forward([row[:20]], prefix=row[20:]),
            lambda: body.forward([row[:20]], past=body.forward([row[20:]]).cache),
        ):
            with pytest.raises(UsageError, match=r"these texts are longer|change with the length"):
                beyond()
        # plain ones go on
        assert distance(body_of(model, packed=False).forward([row]).hidden, alone(model, row)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "dtype"),
    # A mixture of experts decides otherwise at times in half precision.
    [*((kind, torch.float32) for kind in WINDOWS), *((kind, torch.bfloat16) for kind in WINDOWS if "oe" not in kind)],
)
def test_windows_and_soft_caps_fit(kind: str, dtype: torch.dtype, student: Model) -> None:
    model = made(student.tokenizer, kind, dtype=dtype, **WINDOWS[kind])
    assert isinstance(body_of(model), PackedBody)


def test_the_choice(student: Model) -> None:
    assert isinstance(body_of(student), PackedBody)
    assert isinstance(body_of(student, packed=True), PackedBody)
    assert isinstance(body_of(student, packed=False), PlainBody)


def test_the_probe_sees_a_network_that_computes_something_else(student: Model) -> None:
    # Positions that are counted from the beginning of the whole pass, whatever the caller says.
    student.body.rotary_emb.register_forward_pre_hook(
        lambda module, args: (args[0], torch.arange(args[0].shape[1])[None])
    )
    assert isinstance(body_of(student), PlainBody)
    with pytest.raises(UsageError, match="differs from the network's own forward by"):
        body_of(student, packed=True)


def test_a_model_is_probed_once(student: Model) -> None:
    calls: list[int] = []
    handle = student.body.register_forward_pre_hook(lambda *_: calls.append(1))
    body_of(student)
    once = len(calls)
    assert once
    body_of(student)
    assert len(calls) == once
    handle.remove()
