"""Packed passes against the network's own forward over one whole row at a time: hidden states, gradients, decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.errors import UsageError
from gatespace.models import Model, TinyPair, load_model, packed, with_lora
from gatespace.models.packed import PackedBody
from gatespace.models.plain import PlainBody
from tests.conftest import rounding
from tests.models.architectures import WINDOWS, alone, distance, made, some_ids, some_rows

LENGTHS = {
    "equal": (7, 7, 7),
    "different": (1, 40, 3, 90, 33, 2, 64),
    "one": (12,),
    "tokens": (1, 1, 1, 1, 1),
}
TRUNK = some_ids(21, seed=1)
Way = Callable[[Any, list[list[int]], list[list[int]]], Tensor]
"""From a body, prompts and responses to the hidden states of both, row by row; the backward pass is done."""


def coefficients(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(77))


def weighed(hidden: Tensor) -> Tensor:
    """A loss in which every entry counts differently."""
    return (hidden * coefficients(tuple(hidden.shape)).to(hidden)).sum()


# ---------------------------------------------------------------------------------------------------- ways to read


def inline(body: Any, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    hidden: Tensor = body.forward([p + r for p, r in zip(prompts, responses, strict=True)], prefix=TRUNK).hidden
    weighed(hidden).backward()
    return hidden


def no_trunk(body: Any, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    hidden: Tensor = body.forward([TRUNK + p + r for p, r in zip(prompts, responses, strict=True)]).hidden
    lengths = [len(TRUNK + p + r) for p, r in zip(prompts, responses, strict=True)]
    own = [states[len(TRUNK) :] for states in hidden.split(lengths)]
    weighed(torch.cat(own)).backward()
    return torch.cat(own)


def shaped(body: Any, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    shapes = [(-(-len(row) // 16) * 16 + 5, 0) for row in rows]
    hidden: Tensor = body.forward(rows, prefix=TRUNK, shape=shapes.__getitem__).hidden
    weighed(hidden).backward()
    return hidden


def in_two_passes(body: Any, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    first = body.forward(prompts, prefix=TRUNK)
    second = body.forward(responses, prefix=first.prefix, past=first.cache)
    parts = [first.hidden.split([*map(len, prompts)]), second.hidden.split([*map(len, responses)])]
    hidden = torch.cat([state for pair in zip(*parts, strict=True) for state in pair])
    weighed(hidden).backward()
    return hidden


def past_without_trunk(body: Any, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    first = body.forward([TRUNK + prompt for prompt in prompts])
    second = body.forward(responses, past=first.cache)
    before = [states[len(TRUNK) :] for states in first.hidden.split([len(TRUNK + prompt) for prompt in prompts])]
    after = second.hidden.split([*map(len, responses)])
    hidden = torch.cat([state for pair in zip(before, after, strict=True) for state in pair])
    weighed(hidden).backward()
    return hidden


def leaves(body: Any, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    """The prefix once, rows in two micro-batches, each with a backward pass of its own; the prefix's comes last."""
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    root = body.prefix_cache(TRUNK)
    fresh = root.leaves()
    half = -(-len(rows) // 2)
    seen: list[Tensor] = []
    for part in filter(None, (rows[:half], rows[half:])):
        hidden = body.forward(part, prefix=fresh).hidden
        # the sum over both is the loss of the whole
        done = sum(map(len, seen))
        weights = coefficients((sum(map(len, rows)), hidden.shape[1]))[done : done + len(hidden)]
        (hidden * weights.to(hidden)).sum().backward()
        seen.append(hidden)
    root.backward(fresh)
    return torch.cat(seen)


WAYS: list[Way] = [inline, no_trunk, shaped, in_two_passes, past_without_trunk, leaves]


def expected(model: Model, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    rows = [TRUNK + p + r for p, r in zip(prompts, responses, strict=True)]
    hidden = torch.cat([alone(model, row)[len(TRUNK) :] for row in rows])
    weighed(hidden).backward()
    return hidden


def gradients(model: Model, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.network.zero_grad(set_to_none=True)
    hidden = run().detach()
    found = {name: p.grad.clone() for name, p in model.network.named_parameters() if p.grad is not None}
    model.network.zero_grad(set_to_none=True)
    return hidden, found


def compare(model: Model, body: Any, way: Way, lengths: tuple[int, ...], tolerance: float) -> None:
    prompts = some_rows(lengths, seed=2)
    responses = some_rows([1 + (5 * i) % 9 for i in range(len(lengths))], seed=3)
    right, right_gradients = gradients(model, lambda: expected(model, prompts, responses))
    found, found_gradients = gradients(model, lambda: way(body, prompts, responses))
    assert found.shape == right.shape
    assert distance(found, right) < tolerance
    assert found_gradients.keys() == right_gradients.keys()
    assert len(right_gradients) > 5
    sizes = {name: float(gradient.norm()) for name, gradient in right_gradients.items()}
    errors = {name: float((found_gradients[name] - right_gradients[name]).norm()) for name in sizes}
    whole = math.hypot(*sizes.values())
    assert math.hypot(*errors.values()) < tolerance * whole
    for name, error in errors.items():
        # A gradient that is nearly nothing beside the others has their rounding.
        assert error < 10 * tolerance * max(sizes[name], 0.01 * whole), name


# ---------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_float64_agrees_to_the_last_digits(way: Way, lengths: tuple[int, ...], student: Model) -> None:
    # Starcoder 2 has grouped queries and norms that do not fall back to float32.
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64)
    compare(model, PackedBody(model), way, lengths, 1e-13)


@pytest.mark.parametrize("checkpointing", [False, True, None])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_long_texts_and_recomputed_layers_agree(
    way: Way, checkpointing: bool, student: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatespace.models.attention.LONG", 400)  # short rows stay below, long ones are above
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64)
    compare(model, PackedBody(model, checkpointing=checkpointing), way, LENGTHS["different"], 1e-13)


@pytest.mark.parametrize("long", [False, True], ids=["short", "long and recomputed"])
@pytest.mark.parametrize("window", [5, 30])  # shorter than the prefix, and longer: some rows are not cut
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_sliding_windows_agree(
    way: Way, window: int, long: bool, student: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        monkeypatch.setattr("gatespace.models.attention.LONG", 400)
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64, sliding_window=window)
    compare(model, PackedBody(model, checkpointing=long), way, LENGTHS["different"], 1e-13)


@pytest.mark.parametrize("long", [False, True])
def test_recomputed_layers_keep_less_and_give_the_same_bits(
    long: bool, student: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        monkeypatch.setattr("gatespace.models.attention.LONG", 400)
    rows, kept, found = some_rows((60, 40), seed=2), [], []
    for checkpointing in (False, True, None):
        body = PackedBody(student, checkpointing=checkpointing)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):  # noqa: B023
            hidden, gradient = gradients(student, lambda: inline(body, rows, [[1], [2]]))  # noqa: B023
        kept.append(sum(sizes))
        found.append((hidden, gradient))
    assert kept[1] < kept[0] / 3
    # By length: one of the two layers where rows are long, and none where they are short.
    assert kept[2] == kept[0] if not long else kept[1] < kept[2] < 0.75 * kept[0]
    for hidden, gradient in found[1:]:
        assert torch.equal(hidden, found[0][0])
        for name, values in found[0][1].items():
            assert torch.equal(values, gradient[name]), name


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_tiny_models_agree(way: Way, role: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(role)
    compare(model, PackedBody(model), way, LENGTHS["different"], 2e-6)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_plain_passes_agree(way: Way, student: Model) -> None:
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64)
    compare(model, PlainBody(model), way, LENGTHS["different"], 1e-13)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Gemma": {"head_dim": 8},
    "Mistral": {"sliding_window": None},
    "Olmo2": {},
    "Cohere": {},
    "Granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "Phi": {},
    "GPTNeoX": {"num_key_value_heads": None},
    "GPT2": {"num_key_value_heads": None, "intermediate_size": None},
    "OPT": {"num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "Gemma3Text": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,  # values narrower than keys
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures_agree(kind: str, student: Model) -> None:
    model = made(student.tokenizer, kind, **({"sliding_window": None} | ARCHITECTURES[kind]))
    compare(model, PackedBody(model), in_two_passes, (5, 40, 1), 5e-6)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", WINDOWS)
def test_architectures_with_windows_and_caps_agree(
    kind: str, way: Way, student: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatespace.models.attention.LONG", 1500)  # the second row is above
    model = made(student.tokenizer, kind, **WINDOWS[kind])
    compare(model, PackedBody(model, checkpointing=way is inline), way, (5, 40, 1), 5e-6)


def test_a_window_that_cuts_nothing_leaves_the_bits(student: Model) -> None:
    rows, found = some_rows((60, 40, 3), seed=2), []
    for window in (None, 1000):
        model = made(student.tokenizer, "Starcoder2", sliding_window=window)
        with torch.no_grad():
            found.append(PackedBody(model).forward(rows, prefix=TRUNK).hidden)
    assert found[0].equal(found[1])


def test_masks_are_made_once_for_all_layers_of_a_window(student: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made_masks: list[tuple[int, ...]] = []
    real = packed.mask_of
    monkeypatch.setattr(packed, "mask_of", lambda seen, dtype: made_masks.append(seen.shape) or real(seen, dtype))
    kinds = ["sliding_attention", "full_attention"] * 3
    settings: dict[str, Any] = WINDOWS["Gemma3Text"] | {"num_hidden_layers": 6, "layer_types": kinds}
    model = made(student.tokenizer, "Gemma3Text", **settings)
    with torch.no_grad():
        PackedBody(model).forward([[5] * 40, [6] * 3], prefix=TRUNK)
    # the prefix, the long row and the short one, with and without the window
    assert sorted(made_masks) == sorted(2 * [(1, 21, 21), (1, 40, 61), (1, 3, 24)])


def test_adapters_get_the_same_gradient(student: Model) -> None:
    model = with_lora(student, r=4, seed=1)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
            if "lora_B" in name:  # zeros, which would leave the other factor without a gradient
                parameter.normal_(std=0.1, generator=draw)
    compare(model, PackedBody(model), in_two_passes, LENGTHS["different"], 5e-6)


def test_what_is_kept_without_gradient_stops_it(student: Model) -> None:
    body = PackedBody(student)
    forward = body.forward([[5, 6, 7]], prefix=TRUNK)
    assert forward.cache.layers[0][0].requires_grad
    assert not any(tensor.requires_grad for pair in forward.cache.detached().layers for tensor in pair)
    # rows are told apart from what stands before them, and the prefix of a pass is handed on
    assert forward.cache.lengths == (3,)
    assert forward.prefix is not None
    assert forward.prefix.lengths == (len(TRUNK),)
    assert forward.last().equal(forward.hidden[-1:])
    again = body.forward([[8]], prefix=forward.prefix.detached(), past=forward.cache.detached())
    assert again.prefix is not None
    assert again.prefix.lengths == (len(TRUNK),)
    weighed(again.hidden).backward()
    embedding = student.network.get_input_embeddings().weight.grad
    assert embedding[8].any()
    assert not embedding[5].any()


def test_an_empty_trunk_is_none(student: Model) -> None:
    for body in (PackedBody(student), PlainBody(student)):
        assert body.prefix_cache([]) is None
        forward = body.forward([[5, 6]], prefix=[])
        assert forward.prefix is None
        assert distance(forward.hidden, alone(student, [5, 6])) < 1e-6


# ---------------------------------------------------------------------------------------------------- the network stays


def test_the_network_is_left_as_it_was(student: Model) -> None:
    config = student.body.config
    before = config._attn_implementation
    right = alone(student, TRUNK)
    PackedBody(student).forward([[5, 6]], prefix=TRUNK)
    assert config._attn_implementation == before
    with pytest.raises(IndexError):
        PackedBody(student).forward([[10**6]])
    assert config._attn_implementation == before
    assert alone(student, TRUNK).equal(right)


def test_an_architecture_that_keeps_its_own_attention(student: Model) -> None:
    model = made(student.tokenizer, "Bloom", num_key_value_heads=None, intermediate_size=None)
    with pytest.raises(UsageError, match="does not let its attention be replaced"):
        PackedBody(model)


# ---------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("prefix", [TRUNK, []], ids=["prefix", "no prefix"])
@pytest.mark.parametrize("kind", [PackedBody, PlainBody])
def test_decoding_is_reading_from_the_start(kind: Any, prefix: list[int], student: Model) -> None:
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64)
    decode(model, kind(model), prefix, 1e-12)


@pytest.mark.parametrize("window", [1, 3, 11, 24, 64])  # rows cross it at different steps, or never
def test_decoding_with_a_window(window: int, student: Model) -> None:
    model = made(student.tokenizer, "Starcoder2", dtype=torch.float64, sliding_window=window)
    decode(model, PackedBody(model), TRUNK, 1e-12)
    decode(model, PackedBody(model), [], 1e-12)


@pytest.mark.parametrize("kind", WINDOWS)
def test_decoding_of_architectures_with_windows_and_caps(kind: str, student: Model) -> None:
    model = made(student.tokenizer, kind, **WINDOWS[kind])
    decode(model, PackedBody(model), [], 5e-6)


def decode(model: Model, body: Any, prefix: list[int], tolerance: float) -> None:
    """Rows of which some end on the way against the network's own forward, at every step."""
    rows = some_rows((4, 40, 1, 9), seed=4)
    decoding = body.decoding(body.forward(rows, prefix=prefix), 6)
    written = [list(prefix) + row for row in rows]
    for step in range(6):
        kept = {2: [3, 1, 0], 4: [1]}.get(step)
        if kept is not None:
            decoding.keep(kept)
            written = [written[row] for row in kept]
        tokens = some_ids(len(written), seed=50 + step)
        hidden = decoding.step(torch.tensor(tokens))
        for row, token, state in zip(written, tokens, hidden, strict=True):
            row.append(token)
            assert distance(state, alone(model, row)[-1]) < tolerance


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2"])
def test_all_steps_of_decoding_compile_to_one_graph(kind: str, student: Model) -> None:
    if kind == "Gemma2":
        student = made(student.tokenizer, kind, **WINDOWS[kind])
    body, graphs, tokens = PackedBody(student), [], torch.tensor([4, 7])
    with torch.no_grad():
        forward = body.forward([[5, 6, 7], [9]], prefix=TRUNK)
    decoding = body.decoding(forward, 4)
    right = [decoding.step(tokens) for _ in range(4)]

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    student.body.compile(fullgraph=True, backend=backend)  # an error where an operation waits for a number
    decoding = body.decoding(forward, 4)
    assert all(decoding.step(tokens).equal(state) for state in right)
    assert len(graphs) == 1


def test_decoding_leaves_the_pass_as_it_was(student: Model) -> None:
    body = PackedBody(student)
    forward = body.forward([[5, 6, 7], [9]], prefix=TRUNK)
    before = [tensor.clone() for pair in forward.cache.layers for tensor in pair]
    decoding = body.decoding(forward, 3)
    for _ in range(3):
        assert not decoding.step(torch.tensor([4, 4])).requires_grad
    assert all(a.equal(b) for a, b in zip(before, (t for pair in forward.cache.layers for t in pair), strict=True))
    after = body.forward([[3], [3]], prefix=forward.prefix, past=forward.cache)
    assert distance(after.hidden[0], alone(student, [*TRUNK, 5, 6, 7, 3])[-1]) < 1e-5


# ---------------------------------------------------------------------------------------------------- precision


def test_half_precision_is_as_near_as_the_networks_own(tiny: TinyPair) -> None:
    exact, half = load_model(str(tiny.teacher)), load_model(str(tiny.teacher), dtype=torch.bfloat16)
    rows = some_rows((40, 90, 33, 64, 5), seed=8)
    with torch.no_grad():
        right = torch.cat([alone(exact, TRUNK + row)[len(TRUNK) :] for row in rows])
        own = distance(torch.cat([alone(half, TRUNK + row)[len(TRUNK) :] for row in rows]), right)
        forward = PackedBody(half).forward(rows, prefix=TRUNK)
        assert forward.hidden.dtype == torch.bfloat16
        assert distance(forward.hidden, right) < 1.5 * own


# ---------------------------------------------------------------------------------------------------- the real model


@pytest.mark.slow
@pytest.mark.parametrize("way", [in_two_passes, leaves], ids=lambda way: way.__name__)
def test_the_real_model_agrees(way: Way, short_smollm2: Path) -> None:
    model = load_model(str(short_smollm2))
    compare(model, PackedBody(model), way, (9, 30, 2), rounding(model))


def test_two_threads_in_one_network_have_the_numbers_of_one(tiny):
    """A pass sets the network's attention for its time, and a second one at the same time must not undo that."""
    from concurrent.futures import ThreadPoolExecutor

    from gatespace.models import load_model
    from gatespace.models.body import body_of

    model = load_model(str(tiny.student))
    rows = [[(7 * i + 3 * j) % 200 for i in range(20 + j)] for j in range(8)]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return body_of(model, packed=True).forward(rows).hidden

    alone = forward()
    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(forward) for _ in range(40)]]
    assert all(torch.equal(alone, hidden) for hidden in found)
