"""Loading: what is refused and why, what a model says of itself, and the fingerprint."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
    T5Config,
    ViTConfig,
)

from gatespace.errors import MissingExtraError, UsageError
from gatespace.gating.projection import Projection, logits_buffer
from gatespace.models import Model, TinyPair, build_tiny, load_model, with_lora
from gatespace.tasks import Task

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IDS = torch.tensor([[5, 17, 300, 2, 41]])


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.network(IDS).logits


# ---------------------------------------------------------------------------------------------------- properties


def test_bits_do_not_depend_on_where_in_its_file_a_weight_begins(tiny: TinyPair, tmp_path: Path) -> None:
    found = []
    for length in (0, 8, 16, 40):
        folder = copied(tiny.teacher, tmp_path / str(length))
        weights = load_file(folder / "model.safetensors")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "note": "." * length})
        model = load_model(str(folder))
        assert all(weight.data_ptr() % 64 == 0 for weight in model.network.parameters())
        with torch.no_grad():
            hidden = model.body(input_ids=IDS, use_cache=False).last_hidden_state[0]
        projection = Projection(hidden, model.head, 400)
        own = projection.into(logits_buffer(hidden, len(hidden), 400, projection.dtype), slice(None), 0, 400)
        found.append((model.fingerprint(), logits(model), own))
    for fingerprint, numbers, own in found[1:]:
        assert fingerprint == found[0][0]
        assert numbers.equal(found[0][1])
        assert own.equal(found[0][2])  # this product shows it


def test_a_loaded_model_says_what_it_is(student: Model, tiny: TinyPair) -> None:
    vocabulary = student.tokenizer.get_vocab()
    assert student.vocab_size == len(vocabulary) < len(student.head.weight)
    assert student.end_ids == (vocabulary["<|im_end|>"],)
    assert student.pad_id == vocabulary["<|endoftext|>"]
    assert student.name == str(tiny.student)
    assert student.source.startswith(str(tiny.student))
    assert "synthetic" in student.source
    assert not student.network.training
    assert student.head.weight is student.network.get_output_embeddings().weight
    assert student.device.type == "cpu"


def test_precision(tiny: TinyPair) -> None:
    model = load_model(str(tiny.teacher), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.bfloat16}


def test_body_and_head_are_the_network(teacher: Model) -> None:
    with torch.no_grad():
        hidden = teacher.body(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(hidden @ teacher.head.weight.T, logits(teacher))


def test_ends_of_a_response_come_from_three_places(tiny: TinyPair, tmp_path: Path) -> None:
    folder = copied(tiny.student, tmp_path / "model")
    edit(folder / "generation_config.json", eos_token_id=[7, 9, 999_999])
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    model = load_model(str(folder))
    ids = model.tokenizer.get_vocab()
    # what is not an id of the tokenizer is left out; the end of a turn is in the chat template only
    assert model.end_ids == tuple(sorted([7, 9, ids["<|endoftext|>"], ids["<|im_end|>"]]))

    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} bye{% endfor %}"
    without = Model(model.network, model.tokenizer, "", "")
    assert without.end_ids == tuple(sorted([7, 9, ids["<|endoftext|>"]]))
    model.tokenizer.chat_template = "{{ raise_exception('no chat') }}"
    assert Model(model.network, model.tokenizer, "", "").end_ids == without.end_ids


def test_padding_without_a_padding_token(student: Model) -> None:
    student.tokenizer.pad_token = None
    assert student.pad_id == student.end_ids[0]


# ---------------------------------------------------------------------------------------------------- fingerprint


def test_fingerprint_is_that_of_the_weights_wherever_they_lie(student: Model, tmp_path: Path) -> None:
    before = student.fingerprint()
    student.save(tmp_path / "one")
    assert load_model(str(tmp_path / "one")).fingerprint() == before
    student.network.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    student.tokenizer.save_pretrained(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    edit(tmp_path / "parts" / "config.json", use_cache=False, transformers_version="0", pad_token_id=3)
    assert load_model(str(tmp_path / "parts")).fingerprint() == before


def test_fingerprint_sees_one_weight(student: Model, teacher: Model) -> None:
    before = student.fingerprint()
    assert before != teacher.fingerprint()
    weight = student.network.model.layers[1].mlp.up_proj.weight
    kept = weight[3, 5].item()
    with torch.no_grad():
        weight[3, 5] = torch.nextafter(torch.tensor(kept), torch.tensor(9.0))
    changed = student.fingerprint()
    assert changed != before
    with torch.no_grad():
        weight[3, 5] = kept
    assert student.fingerprint() == before


def test_fingerprint_follows_an_optimizer(student: Model) -> None:
    before = student.fingerprint()
    optimizer = torch.optim.AdamW(student.network.parameters(), lr=1e-3)
    student.network(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert student.fingerprint() != before


def test_fingerprint_sees_configuration_and_precision(student: Model, tiny: TinyPair, tmp_path: Path) -> None:
    folder = copied(tiny.student, tmp_path / "model")
    edit(folder / "config.json", rms_norm_eps=1e-3)
    prints = {
        student.fingerprint(),
        load_model(str(folder)).fingerprint(),
        load_model(str(tiny.student), dtype=torch.bfloat16).fingerprint(),
    }
    assert len(prints) == 3


def test_tokenizer_digest(student: Model, teacher: Model) -> None:
    before = student.tokenizer_digest()
    assert before == teacher.tokenizer_digest()
    student.tokenizer.chat_template = "other"
    other_template = student.tokenizer_digest()
    student.tokenizer.add_tokens(["<new>"])
    assert len({before, other_template, student.tokenizer_digest()}) == 3


# ---------------------------------------------------------------------------------------------------- saving


def test_save_and_load_give_the_same_logits(student: Model, tmp_path: Path) -> None:
    expected = logits(student)
    with torch.no_grad():
        student.network.model.norm.weight.mul_(2)
    student.save(tmp_path / "new" / "model")
    student.save(str(tmp_path / "new" / "model"))  # over its own
    again = load_model(str(tmp_path / "new" / "model"))
    torch.testing.assert_close(logits(again), logits(student), rtol=0, atol=0)
    assert not torch.equal(logits(again), expected)
    assert student.source in again.source
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_save_leaves_foreign_folders_alone(student: Model, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="refusing to overwrite"):
        student.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["nowhere", "./no/such/folder", "a/b/c", "hub:nothing", "../x", ""])
def test_names_of_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no such model|not a model folder"):
        load_model(name)


@pytest.mark.parametrize("name", ["./runs/teacher", "/nowhere/x", "~/x/y", "a/b/c", "there/x"])
def test_a_missing_folder_is_called_that(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^no such model folder\n"):
        load_model(name)


def test_a_gguf_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "it's.q4.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "it's.q4.gguf"):
        with pytest.raises(UsageError, match=r"^a GGUF file is not a model folder\n") as raised:
            load_model(str(name))
        words = shlex.split(raised.value.instead.partition(": ")[2])
        assert words[:2] == ["python", "-c"]
        compile(words[2], "advice", "exec")
        assert repr(str(tmp_path / "it's.q4")) in words[2]


def test_without_the_extra(tiny: TinyPair, student: Model, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match="'peft'") as raised:
        with_lora(student)
    assert "'.[train]' in a clone" in raised.value.instead
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="'transformers'"):
        load_model(str(tiny.student))
    with pytest.raises(MissingExtraError, match="'transformers'"):
        build_tiny(task)


def test_tiny_is_not_a_name() -> None:
    with pytest.raises(UsageError, match="built for a task"):
        load_model("tiny")


def test_folders_that_are_no_models(tiny: TinyPair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a model folder"):
        load_model(str(tmp_path))
    with pytest.raises(UsageError, match="no revisions"):
        load_model(str(tiny.student), revision="main")
    folder = copied(tiny.student, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no weights"):
        load_model(str(folder))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    with pytest.raises(UsageError, match="the configuration of"):
        load_model(str(folder))


def test_pickled_weights_are_refused_unread(tiny: TinyPair, tmp_path: Path) -> None:
    folder = copied(tiny.student, tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"pytorch_model\.bin") as raised:
        load_model(str(folder))
    assert "runs whatever code" in raised.value.why
    save_file({"unrelated": torch.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(UsageError, match=r"the weights of"):
        load_model(str(folder))


def test_damaged_weights(tiny: TinyPair, tmp_path: Path) -> None:
    folder = copied(tiny.student, tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="the weights of"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_not_finite_are_named(name: str, tiny: TinyPair, tmp_path: Path) -> None:
    folder = copied(tiny.teacher, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights[name][0, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="computes numbers that are not finite") as error:
        load_model(str(folder))
    assert f"1 of {weights[name].numel()} values of {name} are not finite" in str(error.value)
    assert "architecture" not in str(error.value)


def test_missing_weights_are_not_made_up(tiny: TinyPair, tmp_path: Path) -> None:
    folder = copied(tiny.student, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"does not have all the weights") as raised:
        load_model(str(folder))
    assert "layers.1.self_attn.q_proj" in str(raised.value)


def test_no_tokenizer(saved: Callable[..., Path], student: Model) -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SMALL))
    for network, problem in ((student.network, "has no tokens"), (llama, "could not be loaded")):
        with pytest.raises(UsageError, match=f"the tokenizer of .* {problem}"):
            load_model(str(saved(network, type(network).__name__, tokenizer=False)))


def test_more_ids_than_rows(saved: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="no row for"):
        load_model(str(saved(LlamaForCausalLM(LlamaConfig(vocab_size=100, **SMALL)))))


@pytest.mark.parametrize("config", [ViTConfig(), T5Config()], ids=["vision", "encoder-decoder"])
def test_other_kinds_of_model(config: Any, tiny: TinyPair, tmp_path: Path) -> None:
    folder = copied(tiny.student, tmp_path / "model")
    config.save_pretrained(folder)
    with pytest.raises(UsageError, match="not a causal language model"):
        load_model(str(folder))


def test_a_network_that_looks_ahead(saved: Callable[..., Path]) -> None:
    config = BertConfig(vocab_size=1000, initializer_range=0.3, **SMALL)
    with pytest.raises(UsageError, match="not a causal language model") as raised:
        load_model(str(saved(BertLMHeadModel(config))))
    assert "later tokens" in str(raised.value)


def test_a_folder_made_by_transformers_alone(saved: Callable[..., Path], student: Model) -> None:
    config = student.network.config
    folder = saved(Qwen3ForCausalLM(config))
    assert load_model(str(folder)).source == str(folder)
