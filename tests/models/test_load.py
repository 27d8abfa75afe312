"""Loading: what is refused and why, what a model says of itself, and the fingerprint."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("name", ["nowhere", "hub:nothing", "../x", "", "./runs/teacher", "~/x/y", "a/b/c", "there/x"])
def test_names_of_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    path = "/" in name
    with pytest.raises(UsageError, match=r"^no such model folder\n" if path else r"no such model\n|not a model folder"):
        load_model(name)


def test_without_the_extra(tiny: TinyPair, student: Model, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match="'peft'") as raised:
        with_lora(student)
    assert "'.[lora]' in a clone" in raised.value.instead
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="'transformers'"):
        load_model(str(tiny.student))
    with pytest.raises(MissingExtraError, match="'transformers'"):
        build_tiny(task)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    without_weights(folder)


def unrelated(folder: Path) -> None:
    without_weights(folder)
    save_file({"unrelated": torch.zeros(1)}, folder / "other.safetensors")


def truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def one_missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "it's.q4.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "not a model folder"),
        (lambda folder: (folder / "config.json").write_text("{}"), "the configuration of"),
        (lambda folder: ViTConfig().save_pretrained(folder), "not a causal language model"),
        (lambda folder: T5Config().save_pretrained(folder), "not a causal language model"),
        (without_weights, "no weights"),
        (pickled, r"(?s)pytorch_model\.bin.*runs whatever code"),
        (unrelated, "the weights of"),
        (truncated, "the weights of"),
        (one_missing, r"(?s)does not have all the weights.*layers\.1\.self_attn\.q_proj"),
        (gguf, "a GGUF file is not a model folder"),
    ],
)
def test_folders_that_are_refused(change: Callable[[Path], Any], words: str, tiny: TinyPair, tmp_path: Path) -> None:
    change(folder := copied(tiny.student, tmp_path / "model"))
    with pytest.raises(UsageError, match=words):
        load_model(str(folder))


def test_names_with_the_wrong_options(tiny: TinyPair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="built for a task"):
        load_model("tiny")
    with pytest.raises(UsageError, match="no revisions"):
        load_model(str(tiny.student), revision="main")


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


def test_no_tokenizer(saved: Callable[..., Path], student: Model) -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SMALL))
    for network, problem in ((student.network, "has no tokens"), (llama, "could not be loaded")):
        with pytest.raises(UsageError, match=f"the tokenizer of .* {problem}"):
            load_model(str(saved(network, type(network).__name__, tokenizer=False)))


def test_more_ids_than_rows(saved: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="no row for"):
        load_model(str(saved(LlamaForCausalLM(LlamaConfig(vocab_size=100, **SMALL)))))


def test_a_network_that_looks_ahead(saved: Callable[..., Path]) -> None:
    config = BertConfig(vocab_size=1000, initializer_range=0.3, **SMALL)
    with pytest.raises(UsageError, match="not a causal language model") as raised:
        load_model(str(saved(BertLMHeadModel(config))))
    assert "later tokens" in str(raised.value)
