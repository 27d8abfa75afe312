"""Greedy answers against `generate` of transformers, and when they stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gatespace.models import Model, load_model
from gatespace.models.encode import Encoder
from gatespace.models.sizes import sizes_of
from gatespace.rollout import greedy
from gatespace.tasks import Prompt, Task
from gatespace.tasks.tweeteval import load_tweeteval


def generated(model: Model, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """What `generate` writes, prompts padded on the left, with nothing but the end ids to stop at."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[model.pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": [*model.end_ids]}
    settings["suppress_tokens"] = [*range(model.vocab_size, len(model.head.weight))] or None  # padding of the head
    written = model.network.generate(ids, attention_mask=mask, pad_token_id=model.pad_id, **settings)
    return [row[longest:].tolist() for row in written]


def check(model: Model, encoder: Encoder, texts: list[str], new_tokens: int, batch_size: int) -> None:
    answers = greedy(model, encoder, texts, max_new_tokens=new_tokens, batch_size=batch_size)
    prompts = [encoder.prompt.render(encoder.tokenizer, text) for text in texts]
    for answer, ids in zip(answers, generated(model, prompts, new_tokens), strict=True):
        assert list(answer.ids) == ids[: len(answer.ids)]
        assert answer.text == encoder.decode(answer.ids)
        stopped = answer.ids[-1] in model.end_ids or encoder.closed(answer.ids)
        assert answer.ended == stopped
        assert stopped or len(answer.ids) == new_tokens
        assert not any(encoder.closed(answer.ids[:stop]) for stop in range(1, len(answer.ids)))


@pytest.mark.parametrize("share", [True, False])
def test_tiny_answers_are_those_of_generate(share: bool, model: Model, task: Task) -> None:
    texts = [row.text for row in task.test[:20]] + ["a", "x" * 150]
    prompt = Prompt.of(task, brief=True)
    check(model, Encoder(prompt, model.tokenizer, texts, share=share), texts, 12, 8)


@pytest.mark.slow
def test_real_answers_are_those_of_generate(smollm2: Path, tweeteval: Path) -> None:
    task = load_tweeteval("emotion", tweeteval)
    texts = [row.text for row in task.test[:6]]
    model = load_model(str(smollm2))
    check(model, Encoder(Prompt.of(task), model.tokenizer, texts), texts, 8, 4)


def test_the_order_and_the_batches_do_not_matter(model: Model, task: Task) -> None:
    texts = [row.text for row in task.test[:9]] + ["short", "x" * 100]
    encoder = Encoder(Prompt.of(task, brief=True), model.tokenizer, texts)
    seen: list[tuple[int, int]] = []

    def note(done: int, count: int) -> None:
        seen.append((done, count))

    whole = greedy(model, encoder, texts, max_new_tokens=6, progress=note)
    assert seen == [(11, 11)]
    assert len({answer.ids for answer in whole}) > 1
    seen.clear()
    assert greedy(model, encoder, texts, max_new_tokens=6, batch_size=4, progress=note) == whole
    assert seen == [(4, 11), (8, 11), (11, 11)]
    assert greedy(model, encoder, texts[::-1], max_new_tokens=6, batch_size=3) == whole[::-1]
    assert greedy(model, encoder, [], max_new_tokens=6) == []


def test_long_texts_are_answered_in_smaller_groups(model: Model, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [row.text for row in task.test[:6]] + ["x" * 700] * 3 + ["y" * 800]
    encoder = Encoder(Prompt.of(task, brief=True), model.tokenizer, texts)
    long = len(encoder.prefix) + len(encoder.suffix(texts[-1])) + 6
    seen: list[int] = []
    whole = greedy(model, encoder, texts, max_new_tokens=6)
    # Keys and values of two long texts, once of the prompts and once to be written into, and not of three.
    monkeypatch.setattr("gatespace.models.sizes.ROOM", 2 * long * 2 * sizes_of(model).cached() * model.dtype.itemsize)
    assert greedy(model, encoder, texts, max_new_tokens=6, progress=lambda done, _: seen.append(done)) == whole
    assert [after - before for before, after in zip([0, *seen], seen, strict=False)] == [6, 2, 2]


def test_2000_tokens_are_decoded_34_at_a_time() -> None:
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    with torch.device("meta"):  # SmolLM2-135M
        network = LlamaForCausalLM(LlamaConfig(**shape, **heads))
    sizes = sizes_of(Model(network, None, "", ""))  # type: ignore[arg-type]
    assert sizes.rollout_tokens(4) // (2000 + 32) == 34
    assert sizes.rollout_tokens(4) // (150 + 32) > 64  # tweets are decoded as ever


def test_where_an_answer_ends(scripted: Callable[[Sequence[int]], Model], model: Model, task: Task) -> None:
    prompt = Prompt.of(task, brief=True)
    texts = [row.text for row in task.test[:3]]
    encoder = Encoder(prompt, model.tokenizer, texts)
    last = encoder.suffix(texts[0])[-1]
    end = model.end_ids[-1]
    label = max(task.labels, key=lambda name: len(encoder.gold(name)))
    gold = encoder.gold(label)
    chain = [last, *gold, end]
    assert len(set(chain)) == len(chain) > 4
    for answer in greedy(scripted(chain), encoder, texts):
        # the object is closed before the model says that it has ended
        assert answer.ids == tuple(gold)
        assert prompt.parse(answer.text) == label
        assert answer.ended
    for answer in greedy(scripted(chain), encoder, texts, max_new_tokens=len(gold) - 1):
        assert answer.ids == tuple(gold[:-1])
        assert not answer.ended
    for answer in greedy(scripted([last, gold[0], end, gold[1]]), encoder, texts):
        assert answer.ids == (gold[0], end)
        assert answer.text == encoder.decode(gold[:1])
        assert answer.ended
