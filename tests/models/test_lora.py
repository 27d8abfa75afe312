"""LoRA: only adapters learn, body and head go on working, and what is merged computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gatespace.errors import UsageError
from gatespace.models import Model, TinyPair, load_model, merged, with_lora

IDS = torch.tensor([[5, 17, 300, 2, 41], [9, 8, 7, 6, 5]])


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.network(IDS).logits


def rebuilt(model: Model) -> torch.Tensor:
    return model.body(input_ids=IDS).last_hidden_state @ model.head.weight.T


def trained(model: Model, steps: int = 3) -> None:
    optimizer = torch.optim.SGD([weight for weight in model.network.parameters() if weight.requires_grad], lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        (rebuilt(model).log_softmax(-1)[..., 11].mean().neg()).backward()
        optimizer.step()


def adapters(model: Model) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.network.state_dict().items() if "lora_" in name}


@pytest.fixture(params=["student", "teacher"])
def folder(tiny: TinyPair, request: pytest.FixtureRequest) -> str:
    return str(getattr(tiny, request.param))


def test_only_adapters_learn(folder: str) -> None:
    plain = logits(load_model(folder))
    model = with_lora(load_model(folder), r=4)
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=0)
    before = {name: weight.clone() for name, weight in model.network.state_dict().items()}
    trained(model)
    after = model.network.state_dict()
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved == set(adapters(model))
    assert (logits(model) - plain).abs().max() > 0.01
    torch.testing.assert_close(rebuilt(model).detach(), logits(model))


def test_merged_computes_the_same_and_is_an_ordinary_model(folder: str, tmp_path: Path) -> None:
    model = with_lora(load_model(folder), r=4)
    trained(model)
    expected, weights = logits(model), {name: weight.clone() for name, weight in adapters(model).items()}
    plain = merged(model)
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-4)
    assert type(plain.network) is type(load_model(folder).network)
    assert not adapters(plain)
    assert all(weight.requires_grad for weight in plain.network.parameters())
    # the model with adapters is as it was
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    assert all(torch.equal(weight, adapters(model)[name]) for name, weight in weights.items())

    model.save(tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"))
    torch.testing.assert_close(logits(again), logits(plain), rtol=0, atol=0)
    assert again.fingerprint() == plain.fingerprint() != model.fingerprint()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def test_first_values_come_from_the_seed_alone(tiny: TinyPair) -> None:
    def first(seed: int, noise: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        return adapters(with_lora(load_model(str(tiny.student)), seed=seed, r=2))

    one, again, other = first(1, 10), first(1, 20), first(2, 10)
    assert one.keys() == again.keys() == other.keys()
    assert all(torch.equal(one[name], again[name]) for name in one)
    for name in one:
        assert torch.equal(one[name], other[name]) == ("lora_B" in name), name
    a = [weight for name, weight in one.items() if "lora_A" in name]
    assert len({tuple(weight.flatten()[:4].tolist()) for weight in a}) == len(a)  # no two adapters start alike


def test_chosen_layers(tiny: TinyPair) -> None:
    model = with_lora(load_model(str(tiny.student)), targets=["q_proj", "v_proj"], r=2)
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in adapters(model)}
    assert layers == {"q_proj", "v_proj"}
    everywhere = with_lora(load_model(str(tiny.student)), r=2)
    assert {"gate_proj", "o_proj"} < {name.split(".lora_")[0].rpartition(".")[2] for name in adapters(everywhere)}
    assert not any("lm_head" in name for name in adapters(everywhere))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: with_lora(model, targets=["qproj"]), "(?s)no layer for LoRA.*q_proj"),
        (lambda model: with_lora(model, targets=["q_proj", "lm_head"]), "the head cannot"),
        (lambda model: with_lora(model, r=0), "r ≥ 1"),
        (lambda model: with_lora(with_lora(model)), "adapters already"),
        (merged, "no adapters"),
    ],
)
def test_what_cannot_be_adapted(call: Callable[[Model], Model], words: str, teacher: Model) -> None:
    with pytest.raises(UsageError, match=words):
        call(teacher)
