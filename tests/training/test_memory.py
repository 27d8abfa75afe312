"""The memory model: weights by hand, activations by what autograd really keeps, and what is said of a card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gatespace.config import TeachEngineConfig, TrainConfig, parse_config
from gatespace.errors import UsageError
from gatespace.models import Model
from gatespace.models.attention import LONG
from gatespace.models.packed import PackedBody
from gatespace.models.sizes import Sizes, sizes_of
from gatespace.training import memory
from gatespace.training.memory import Layout, Plan, Work, check_devices, chunk_mb, device_bytes, layouts, micro_tokens
from gatespace.training.processes import ONE

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


def plan(sizes: dict[str, Sizes], /, **settings: Any) -> Plan:
    config = parse_config(TrainConfig, {"pair": {"teacher": "t"}, "batch_size": 72, **settings})
    work = Work(prefix=130, mean=26.0, longest=36, new=256, rows=72)
    return Plan(config, torch.bfloat16, "cuda", sizes["4b"], sizes["32b"], 151936, work)


def test_weights_are_those_of_a_count_by_hand(pair: dict[str, Sizes]) -> None:
    def by_hand(hidden: int, layers: int, heads: int, inner: int) -> int:
        projections = hidden * 128 * (heads + 8 + 8) + 128 * heads * hidden
        return layers * (projections + 3 * hidden * inner + 2 * hidden + 2 * 128) + hidden

    assert pair["4b"].body == by_hand(2560, 36, 32, 9728)
    assert pair["4b"].all == by_hand(2560, 36, 32, 9728) + 151936 * 2560 == 4_022_468_096
    assert pair["32b"].body == by_hand(5120, 64, 64, 25600)
    assert pair["32b"].all == by_hand(5120, 64, 64, 25600) + 2 * 151936 * 5120 == 32_762_123_264


def test_what_lasts_is_18_bytes_of_a_weight(pair: dict[str, Sizes]) -> None:
    weights, whole = pair["4b"].all, plan(pair).memory()
    student = {name: size for name, size in whole.lasting.items() if name != "teacher_weights"}
    assert sum(student.values()) + whole.gradients == weights * (2 + 4 + 4 + 8)  # 72.4 GB
    assert whole.lasting["teacher_weights"] == 2 * pair["32b"].all
    shard = plan(pair).memory(8, sharded=True)
    assert sum(shard.lasting.values()) + shard.gradients - 2 * pair["32b"].all == weights * (4 + 4 + 8) // 8
    small = plan(pair, optimizer={"states": "8bit"}).memory()
    assert small.lasting["optimizer"] == pytest.approx(2 * weights, rel=0.02)
    adapters = plan({**pair, "4b": replace(pair["4b"], trained=10**7)}).memory()
    assert adapters.gradients + adapters.lasting["master_weights"] == 8 * 10**7
    assert adapters.phases["update"]["head_gradient"] == 0
    assert adapters.loading > 4 * weights  # in float32, before there are gradients


def test_which_cards_a_32b_teacher_and_a_4b_student_fit_on(pair: dict[str, Sizes]) -> None:
    def verdicts(**settings: Any) -> dict[tuple[int, str, str], str]:
        found = layouts(plan(pair, **settings))
        return {(one.cards, one.parallel, one.teacher): one.verdict(device_bytes("80GB")) for one in found}

    usual = verdicts()
    assert [place for place, verdict in usual.items() if verdict != "does not fit"] == [(8, "fsdp", "own card")]
    small = verdicts(optimizer={"states": "8bit"})
    fit = [place for place, verdict in small.items() if verdict == "fits"]
    assert fit == [(2, "", "own card"), (8, "ddp", "own card")]
    served = replace(plan(pair), teacher=None)
    assert {(one.cards, one.parallel) for one in layouts(served, 4)} == {
        (1, ""),
        *((cards, parallel) for cards in (2, 4, 8) for parallel in ("ddp", "fsdp")),
    }


TABLE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "`engine.activation_checkpointing: true`, `engine.micro_tokens: 615`": {
        "engine": {"activation_checkpointing": True, "micro_tokens": 615}
    },
    "`optimizer.states: 8bit`": {"optimizer": {"states": "8bit"}},
    "the same, with `pair.teacher_quantization: nf4`": {
        "optimizer": {"states": "8bit"},
        "pair": {"teacher": "t", "teacher_quantization": "nf4"},
    },
    "`pair.lora: {r: 16}`": {},
    "`pair.teacher`: a service on other cards": {},
}


def test_the_table_of_the_docs(pair: dict[str, Sizes]) -> None:
    """docs/devices.md: of the ways to place a run on some cards, the one whose fullest card has most room."""

    def cell(found: list[Layout], cards: int) -> str:
        best = min((one for one in found if one.cards == cards), key=Layout.worst)
        teacher = f" and {sum(best.memory.teacher.values()) / 1e9:.1f}" if best.memory.teacher else ""
        parallel = f", {best.parallel}" if best.parallel else ""
        return f"{best.verdict(80 * 10**9)}: {best.memory.all / 1e9:.1f}{teacher}{parallel}"

    text = (Path(__file__).parents[2] / "docs/devices.md").read_text()
    for name, settings in TABLE.items():
        run = plan(pair, **settings)
        if "service" in name:
            run = replace(run, teacher=None)
        if "lora" in name:
            targets = 4096 * 2 + 1024 * 2 + 2560 * 4 + 3 * (2560 + 9728)  # inputs and outputs of a layer's products
            run = replace(run, student=replace(pair["4b"], trained=16 * 36 * targets))
        found = list(layouts(run))
        assert f"| {name} | {' | '.join(cell(found, cards) for cards in (1, 2, 8))} |" in text
    update = plan(pair).memory().during("update")
    for purpose, size in update.items():
        assert f"| {purpose.replace('_', ' ')} | " in text
        assert f" | {size / 1e9:.2f} |" in text, purpose


def test_phases_do_not_add_up(pair: dict[str, Sizes]) -> None:
    found = plan(pair).memory()
    assert {"update", "rollout", "scoring", "telemetry", "evaluation"} == set(found.phases)
    totals = {name: sum(found.during(name).values()) for name in found.phases}
    assert found.all == max(totals.values()) == sum(found.by_purpose().values())
    for name, parts in found.phases.items():  # a rollout comes before there are gradients
        before = 0 if name in ("rollout", "evaluation") else found.gradients
        assert totals[name] == sum(found.lasting.values()) + before + sum(parts.values())
    quiet = plan(pair, trace={"tokens_every": 0}).memory()
    assert "telemetry" not in quiet.phases
    again = plan(pair, engine={"activation_checkpointing": True, "micro_tokens": 615}).memory()
    usual = plan(pair, engine={"micro_tokens": 615}).memory()
    assert again.phases["update"]["activations"] < usual.phases["update"]["activations"] / 10
    assert again.phases["update"]["attention"] == usual.phases["update"]["attention"] // 36
    # One row of 4096 tokens: half of its layers are recomputed, unless that is not wanted.
    work = Work(prefix=130, mean=3840.0, longest=3840, new=256, rows=1)
    half, all_ = (
        replace(plan(pair, engine={"activation_checkpointing": how}), work=work).memory().phases["update"]
        for how in (None, False)
    )
    assert half["activations"] < 0.6 * all_["activations"]
    apart = plan(pair).memory(teacher_beside=False)
    assert set(apart.teacher) == {"teacher_weights", "teacher_pass", "scores"}
    assert apart.lasting["teacher_head"] == 2 * pair["32b"].head
    small = plan(pair, pair={"teacher": "t", "teacher_quantization": "nf4"}).memory()
    assert 18e9 < small.lasting["teacher_weights"] < 21e9
    assert replace(plan(pair), teacher_bytes=7).memory().lasting["teacher_weights"] == 7


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
    engine, sizes = TeachEngineConfig(), sizes_of(student)
    assert micro_tokens(sizes, TeachEngineConfig(micro_tokens=7)) == 7
    layers, hidden, inner = (
        getattr(student.network.config, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    small, large = micro_tokens(sizes, engine), micro_tokens(pair["4b"], engine)
    assert small == (6 << 30) // (2 * layers * (34 * hidden + 6 * inner))
    assert large == 615
    assert micro_tokens(pair["4b"], TeachEngineConfig(activation_checkpointing=True)) > large
    # Attention weights of short rows after a long prefix count; a prefix of some hundred tokens has room.
    assert micro_tokens(pair["4b"], engine, 1500) == large > micro_tokens(pair["4b"], engine, 4000)
    keys = pair["4b"].most_keys(4000)
    assert (keys - 4000) * keys <= LONG < (keys - 4000 + 1) * (keys + 1)
    bytes_per_token = 2 * (pair["4b"].kept() + pair["4b"].attention(keys))
    assert micro_tokens(pair["4b"], engine, 4000) * bytes_per_token < 1.1 * (6 << 30)


def test_chunks_are_larger_where_small_products_waste_the_device() -> None:
    def config(**engine: Any) -> TrainConfig:
        return parse_config(TrainConfig, {"pair": {"teacher": "t"}, "engine": engine})

    assert (chunk_mb(config(), "cpu"), chunk_mb(config(), "cuda")) == (60, 512)
    assert chunk_mb(config(chunk_mb=8.0), "cuda") == 8


@pytest.mark.parametrize("text", ["80", "GB", "80 G", "-80GB", "0GB", "80GB!", "", "1e3GB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--device-memory: this is not a memory size") as error:
        device_bytes(text)
    assert "80GB" in str(error.value)


def test_a_run_that_cannot_fit_is_refused_and_one_that_may_not_is_told(
    pair: dict[str, Sizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    free: dict[int, int | None] = {}
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[device.index])
    run, first, second = plan(pair), torch.device("cuda", 0), torch.device("cuda", 1)
    needed = run.memory(teacher_beside=False)
    for students, teachers in ((None, None), (200 * 10**9, 200 * 10**9)):
        free |= {0: students, 1: teachers}
        assert check_devices(run, ONE, first, first) == check_devices(run, ONE, first, second) == []
    free[0] = 80 * 10**9
    with pytest.raises(UsageError, match="does not fit") as error:
        check_devices(run, ONE, first, first)
    for text in ("146", "80 are free on cuda:0", "optimizer 32.2", "8bit", "micro_tokens", "teacher_device"):
        assert text in str(error.value)
    free[0] = needed.all + 1
    assert "memory may run out" in check_devices(run, ONE, first, second)[0]
    free[1] = 60 * 10**9
    with pytest.raises(UsageError, match="cuda:1"):
        check_devices(run, ONE, first, second)
